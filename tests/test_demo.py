"""The demo from end to end, with the made-up model in place of the real one: real processes, a real handover."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from demo import play
from demo.channel import Worker, WorkerFailedError

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.torch, pytest.mark.deadline(180)]


@dataclass
class Played:
    outcome: play.Outcome
    said: list[str]
    told: dict[str, list[str]]  # role -> the lines that went to that process
    answered: dict[str, list[Any]]


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    """One run of the demo, with everything that its two processes were told written down."""
    said: list[str] = []
    told: dict[str, list[str]] = {"prefill": [], "decode": []}
    answered: dict[str, list[Any]] = {"prefill": [], "decode": []}

    class Written(Worker):
        def ask(self, what: str, **arguments: Any) -> None:
            told[self.role].append(json.dumps({"do": what, **arguments}))
            super().ask(what, **arguments)

        def answer(self, timeout_s: float = 120) -> Any:
            answered[self.role].append(super().answer(timeout_s))
            return answered[self.role][-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(play, "Worker", Written)
        yield Played(play.play("tiny", 8, said.append), said, told, answered)


def test_every_handover_decodes_the_tokens_of_the_undivided_run(played: Played) -> None:
    outcome = played.outcome
    assert outcome.holds
    assert {handover.transport for handover in outcome.handovers} | set(outcome.refused) == set(play.TRANSPORTS)
    assert len(outcome.handovers) == 3 * (3 - len(outcome.refused))
    assert all(handover.size_bytes and handover.seconds > 0 for handover in outcome.handovers)
    assert not [line for line in played.said if "instead" in line], "a transport was offered and then not used"


def test_the_socket_is_always_offered(played: Played) -> None:
    assert "socket" not in played.outcome.refused


def test_tokens_differ_when_a_block_is_altered_or_nothing_is_pulled(played: Played) -> None:
    assert played.outcome.altered_differs
    assert played.outcome.left_out_differs


def test_only_the_push_by_layers_has_a_hidden_share(played: Played) -> None:
    assert {handover.way for handover in played.outcome.handovers if handover.hidden is not None} == {play.LAYERS}


def test_the_decode_process_is_told_lengths_and_block_numbers_and_one_token(played: Played) -> None:
    told = [json.loads(line) for line in played.told["decode"]]
    allowed = {
        "load": {"name"},
        "open": {"transport", "blocks", "block_tokens"},
        "link": {"address"},
        "fill": {"value"},
        "pull": {"theirs", "mine"},
        "decode": {"blocks", "length", "last", "new_tokens"},
        "close": set(),
    }
    for request in told:
        assert request.keys() - {"do"} == allowed[request["do"]]
    prompt = played.answered["prefill"][0]
    decodes = [request for request in told if request["do"] == "decode"]
    assert {(request["length"], request["last"]) for request in decodes} == {(prompt["length"], prompt["last"])}


def test_blocks_have_other_numbers_at_the_other_end(played: Played) -> None:
    pulls = [json.loads(line) for line in played.told["decode"] if '"pull"' in line]
    assert pulls
    assert all(pull["theirs"] != pull["mine"] for pull in pulls)


def test_a_model_folder_of_ones_own_is_run_from_the_command_line(tmp_path: Path) -> None:
    make = "import sys; from demo import model; model.tiny().save_pretrained(sys.argv[1])"
    subprocess.run([sys.executable, "-c", make, tmp_path], cwd=ROOT, check=True)
    ended = _demo("--model", str(tmp_path), "--tokens", "4")
    assert ended.returncode == 0, ended.stderr
    for line in ("the decoded tokens equal those of the undivided run", "one block altered", "pull left out"):
        assert line in ended.stdout
    assert "hidden" in ended.stdout
    assert "FAIL" not in ended.stdout


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    ended = _demo("--model", str(tmp_path))
    assert ended.returncode == 2
    assert f"{tmp_path} is no model folder: it has no config.json" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_process_that_is_killed_ends_the_demo_with_a_sentence() -> None:
    with Worker("decode") as decode:
        decode.ask("load", name="tiny")
        os.kill(decode.pid, signal.SIGKILL)
        with pytest.raises(WorkerFailedError, match="The decode process was ended by signal 9 during 'load'"):
            decode.answer()
        with pytest.raises(WorkerFailedError, match="signal 9 during 'fill'"):
            decode.call("fill", value=0.0)


def test_an_error_of_kvferry_comes_back_as_its_sentence() -> None:
    with Worker("decode") as decode:
        decode.call("load", name="tiny")
        decode.call("open", transport="socket", blocks=2, block_tokens=16)
        with pytest.raises(WorkerFailedError, match=r"LinkFailed: .*127\.0\.0\.1:1"):
            decode.call("link", address="127.0.0.1:1")


def _demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "demo", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
