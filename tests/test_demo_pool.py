"""The demo's second half, with the made-up model: blocks saved by a process that has ended, found by fresh ones."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from demo import play, reuse
from demo.__main__ import main
from demo.channel import Worker, WorkerFailedError
from demo.pool_node import PoolNode

from pool_support import until

ROOT = Path(__file__).resolve().parent.parent
NODE = re.compile(r"a pool node, process (?P<pid>\d+): kvferry pool serve --listen unix:(?P<path>\S+)")
PROMPT_TOKENS, LONGER_TOKENS = 600, 700
SAVED_BLOCKS = (PROMPT_TOKENS - 1) // play.BLOCK_TOKENS
pytestmark = [pytest.mark.torch, pytest.mark.deadline(180)]


@dataclass
class Played:
    seen: reuse.Reuse
    said: list[str]
    saver_lived: list[bool]  # when each request was made
    told: list[dict[str, Any]]  # what the zygote was told


@pytest.fixture(scope="module")
def played() -> Played:
    """One run of the demo, over one transport, and what became of the process that saved."""
    savers: list[int] = []
    saver_lived: list[bool] = []
    told: list[dict[str, Any]] = []
    said: list[str] = []

    class Saver(Worker):
        def ask(self, what: str, **arguments: Any) -> None:
            if what == "save":
                savers.append(self.pid)
            super().ask(what, **arguments)

    class Zygote(Worker):
        def ask(self, what: str, **arguments: Any) -> None:
            saver_lived.append(any(is_alive(pid) for pid in savers))
            told.append({"do": what, **arguments})
            super().ask(what, **arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(play, "Worker", Saver)
        patch.setattr(reuse, "Worker", Zygote)
        patch.setattr(play, "TRANSPORTS", ("socket",))
        seen = play.play("tiny", 8, said.append).reuse
    assert savers
    return Played(seen, said, saver_lived, told)


def test_requests_with_and_without_the_pool_give_the_same_tokens(played: Played) -> None:
    assert played.seen.holds
    assert len(played.seen.without) == len(played.seen.pooled) == reuse.RUNS
    assert len(played.seen.expected) == 8
    assert len(played.seen.pooled[0].tokens) == 8, "one request of each kind decodes to the end"


def test_every_full_block_of_the_shorter_prompt_is_hit_and_the_rest_is_computed(played: Played) -> None:
    assert {run.hits for run in played.seen.pooled} == {SAVED_BLOCKS}
    assert {run.computed for run in played.seen.pooled} == {LONGER_TOKENS - SAVED_BLOCKS * play.BLOCK_TOKENS}
    assert {run.computed for run in played.seen.without} == {LONGER_TOKENS}
    assert all(run.size_bytes and run.load_s > 0 for run in played.seen.pooled)


def test_a_saved_block_that_was_altered_changes_the_tokens(played: Played) -> None:
    assert played.seen.altered.hits == SAVED_BLOCKS
    assert played.seen.altered_differs


def test_the_process_that_saved_has_ended_before_the_one_that_loads_begins(played: Played) -> None:
    assert played.saver_lived == [False] * (2 + 2 * reuse.RUNS)


def test_the_loading_process_is_told_tokens_and_where_the_pool_is(played: Played) -> None:
    requests = played.told[1:]
    assert {frozenset(request) for request in requests} == {
        frozenset({"do", "ids", "new_tokens", "block_tokens", "pool", "namespace"})
    }
    assert [request["pool"] is None for request in requests] == [True, False] * reuse.RUNS + [False]


def test_neither_the_node_nor_its_folder_is_left_behind(played: Played) -> None:
    pid, folder = node_of("\n".join(played.said))
    assert not is_alive(pid)
    assert not folder.exists()


def test_other_bytes_saved_under_the_same_keys_are_reported_and_fail_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Spoiling(Worker):
        def call(self, what: str, **arguments: Any) -> Any:
            if what != "save" or arguments["namespace"] != reuse.SAVED:
                return super().call(what, **arguments)
            super().call("scale_block", block=arguments["mine"][5], factor=-8.0)
            answer = super().call(what, **arguments)
            super().call("scale_block", block=arguments["mine"][5], factor=-1 / 8.0)
            return answer

    monkeypatch.setattr(play, "Worker", Spoiling)
    monkeypatch.setattr(play, "TRANSPORTS", ("socket",))
    monkeypatch.setattr(reuse, "RUNS", 2)
    assert main(["--tiny", "--tokens", "8"]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"from the pool .* DIFFERENT", shown)
    assert "FAIL pool: the tokens of 2 of 4 requests" in shown
    pid, folder = node_of(shown)
    assert not is_alive(pid)
    assert not folder.exists()


def test_the_node_ends_when_the_demo_fails() -> None:
    with suppress(WorkerFailedError), PoolNode(64 << 20) as node:
        folder = Path(node.address.removeprefix("unix:")).parent
        assert is_alive(node.pid)
        assert folder.exists()
        raise WorkerFailedError("a process failed")
    assert not is_alive(node.pid)
    assert not folder.exists()


def test_a_node_that_cannot_start_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("too_long_for_a_socket" * 6)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(WorkerFailedError, match="The pool node did not start"):
        PoolNode(64 << 20)
    assert not list(deep.iterdir())


def test_a_request_that_fails_ends_its_own_process_only() -> None:
    with Worker("zygote") as zygote:
        for _ in range(2):
            with pytest.raises(WorkerFailedError, match="a forked process ended with status 1"):
                zygote.call("request")


def test_a_forked_process_ends_with_the_one_that_it_was_forked_from() -> None:
    program = (
        "import os, time; from demo.channel import in_a_child;"
        "in_a_child(lambda: (print(os.getpid(), flush=True), time.sleep(60)))"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    until(lambda: not is_alive(child))


def node_of(said: str) -> tuple[int, Path]:
    """The pid of the pool node that was told of, and its folder."""
    found = NODE.search(said)
    assert found is not None
    return int(found["pid"]), Path(found["path"]).parent


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
