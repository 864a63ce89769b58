"""The harness itself: its peers do what they are told, its deadlines hold, and nothing outlives a test."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support import Peer, PeerDied, PeerRaised, PeerTimeout

SCRIPT = """
import os, signal, sys, time

class Own(Exception):
    def __init__(self, *, size): super().__init__("own words"); self.size = size

def add(a, b=0): return a + b
def given(): return arguments
def sleep(seconds): time.sleep(seconds); return "slept"
def spin():
    while True: pass
def fail(): raise LookupError("not here")
def fail_alone(): raise Own(size=7)
def unsendable(): return Own
def crash(): os.kill(os.getpid(), signal.SIGSEGV)
def end(status): os._exit(status)
def uid(): return os.getuid()
def fork():
    pid = os.fork()
    if pid == 0: time.sleep(60); os._exit(0)
    return pid
def fork_and_return(): return os.fork()
def replace(): os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"])
"""

Peers = Callable[..., Peer]


class Counter:
    """What a ``module:name`` peer is made of."""

    def __init__(self, start: int) -> None:
        self.value = start

    def add(self, step: int) -> int:
        self.value += step
        return self.value


def test_a_call_runs_in_another_process_and_brings_its_result_back(peers: Peers) -> None:
    peer = peers(SCRIPT, "from the test", 3)
    assert peer.call("add", 2, b=3) == 5
    assert peer.call("given") == ("from the test", 3)
    assert peer.pid != os.getpid()


def test_a_peer_can_be_an_object_of_a_test_module(peers: Peers) -> None:
    peer = peers("test_support:Counter", 40)
    assert [peer.call("add", 1), peer.call("add", 1)] == [41, 42]


def test_an_exception_arrives_as_itself_with_the_trace_of_the_peer(peers: Peers) -> None:
    peer = peers(SCRIPT)
    with pytest.raises(LookupError, match="not here") as caught:
        peer.call("fail")
    assert "def fail" in str(caught.value.__cause__) or "in fail" in str(caught.value.__cause__)


def test_an_exception_that_cannot_travel_is_described(peers: Peers) -> None:
    peer = peers(SCRIPT)
    with pytest.raises(PeerRaised, match="Own: own words") as caught:
        peer.call("fail_alone")
    assert caught.value.kinds[:2] == ["Own", "Exception"]
    assert caught.value.attributes == {"size": 7}


def test_a_value_that_cannot_travel_fails_its_call_and_no_other(peers: Peers) -> None:
    peer = peers(SCRIPT)
    with pytest.raises((AttributeError, ImportError)):
        peer.call("unsendable")
    assert peer.call("add", 1) == 1


def test_a_script_that_raises_fails_the_start() -> None:
    with pytest.raises(ZeroDivisionError):
        Peer("x = 1\ny = x / 0\n")


def test_a_hung_call_raises_at_its_deadline_with_the_stacks_of_the_peer(peers: Peers) -> None:
    peer = peers(SCRIPT)
    begin = time.monotonic()
    with pytest.raises(PeerTimeout, match="in spin"):
        peer.call("spin", timeout=0.3)
    assert time.monotonic() - begin < 5


def test_calls_are_done_in_order_unless_one_asks_for_a_thread(peers: Peers) -> None:
    peer = peers(SCRIPT)
    slow = peer.call_later("sleep", 0.5)
    beside = peer.call_later("add", 1, b=1, thread=True)
    assert beside.result(timeout=5) == 2
    assert not slow.done()
    assert slow.result() == "slept"


def test_kill_ends_the_process_and_the_calls_in_it(peers: Peers) -> None:
    peer = peers(SCRIPT)
    running = peer.call_later("sleep", 60)
    peer.kill()
    assert peer.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{peer.pid}").exists()
    with pytest.raises(PeerDied, match="SIGKILL before it answered"):
        running.result(timeout=5)
    with pytest.raises(PeerDied, match="before it was asked for add"):
        peer.call("add", 1)


def test_a_stopped_process_stands_still_until_it_is_continued(peers: Peers) -> None:
    peer = peers(SCRIPT)
    peer.stop()
    assert peer.state == "stopped"
    waiting = peer.call_later("add", 1)
    with pytest.raises(PeerTimeout, match="stopped"):
        waiting.result(timeout=0.3)
    peer.cont()
    assert waiting.result(timeout=5) == 1


def test_a_stopped_process_can_be_killed(peers: Peers) -> None:
    peer = peers(SCRIPT)
    peer.stop()
    peer.kill()
    assert not peer.alive


def test_terminate_returns_the_exit_status(peers: Peers) -> None:
    assert peers(SCRIPT).terminate() == -signal.SIGTERM


def test_sending_to_a_stopped_process_has_a_deadline(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.peer.SEND_TIMEOUT_S", 0.3)
    peer = peers(SCRIPT)
    peer.stop()
    with pytest.raises((PeerDied, PeerTimeout)):
        peer.call("add", bytes(10_000_000), timeout=0.5)


def test_closing_tells_of_a_crash_that_no_call_noticed() -> None:
    peer = Peer(SCRIPT)
    with pytest.raises(PeerDied, match="SIGSEGV"):
        peer.call("crash", timeout=5)
    with pytest.raises(PeerDied, match="SIGSEGV and nobody had asked it to"):
        peer.close()
    peer.close()


def test_closing_lets_the_process_run_its_own_end() -> None:
    with Peer("import atexit, os\natexit.register(lambda: os._exit(9))\n") as peer:
        pid = peer.pid
        with pytest.raises(PeerDied, match="status 9"):
            peer.close()
    assert not Path(f"/proc/{pid}").exists()


def test_closing_does_not_wait_for_a_peer_in_a_busy_loop() -> None:
    begin = time.monotonic()
    with Peer(SCRIPT) as peer:
        peer.call_later("spin")
    assert time.monotonic() - begin < 5


def test_a_fork_of_a_peer_lives_on_until_the_peer_is_closed() -> None:
    with Peer(SCRIPT) as peer:
        forked = peer.call("fork")
        peer.kill()
        assert peer.descendants() == [forked]
    assert ended(forked)


def test_a_fork_that_comes_back_from_its_call_ends(peers: Peers) -> None:
    peer = peers(SCRIPT)
    forked = peer.call("fork_and_return")
    assert ended(forked)
    assert peer.call("add", 1) == 1


def test_a_peer_that_became_another_program_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.peer.LEAVE_TIMEOUT_S", 0.2)
    with Peer(SCRIPT) as peer:
        with pytest.raises(PeerDied, match="closed its pipe"):
            peer.call("replace", timeout=10)
        assert peer.alive
    assert ended(peer.pid)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_peer_can_be_another_user(peers: Peers) -> None:
    peer = peers(SCRIPT, uid=54321)
    assert peer.call("uid") == 54321
    assert Path(f"/proc/{peer.pid}/mem").stat().st_uid == 54321
    hidden = peers(SCRIPT, uid=54321, dumpable=False)
    assert Path(f"/proc/{hidden.pid}/mem").stat().st_uid == 0


def test_nothing_outlives_a_test_run_that_is_killed(tmp_path: Path) -> None:
    run = start_pytest(
        tmp_path,
        """
        import os, time
        from support import Peer

        def test_it():
            peer = Peer("def add(a): return a\\n")
            print(f"PEER {peer.pid}", flush=True)
            peer.stop()
            time.sleep(60)
        """,
    )
    assert run.stdout is not None
    line = next(line for line in run.stdout if "PEER" in line)
    peer = int(line.split("PEER")[1])
    run.kill()
    run.wait()
    assert ended(peer)


@pytest.mark.slow
def test_a_hung_test_is_ended_with_the_stacks_of_all_its_processes(tmp_path: Path) -> None:
    run = start_pytest(
        tmp_path,
        """
        import pytest, time
        from support import Peer

        @pytest.mark.deadline(1)
        def test_that_hangs():
            with Peer("def inside():\\n while True: pass\\n") as peer:
                print(f"PEER {peer.pid}", flush=True)
                peer.call("inside", timeout=50)
        """,
    )
    output, _ = run.communicate(timeout=30)
    assert run.returncode == 70
    assert "HUNG test_case.py::test_that_hangs" in output
    assert "in inside" in output
    assert "in test_that_hangs" in output
    assert ended(int(output.split("PEER")[1].split()[0]))


@pytest.mark.slow
def test_a_test_that_hangs_in_c_with_the_interpreter_held_is_ended_too(tmp_path: Path) -> None:
    run = start_pytest(
        tmp_path,
        """
        import ctypes, pytest
        import support.watchdog
        support.watchdog.GRACE_S = 1

        @pytest.mark.deadline(0.5)
        def test_that_hangs():
            ctypes.PyDLL(None).sleep(60)
        """,
    )
    output, _ = run.communicate(timeout=30)
    assert run.returncode != 0
    assert "in test_that_hangs" in output


def start_pytest(folder: Path, test: str) -> "subprocess.Popen[str]":
    """pytest on a file of one test, as a process of its own, with this project's harness."""
    (folder / "test_case.py").write_text(textwrap.dedent(test))
    (folder / "conftest.py").write_text("from support.watchdog import pytest_configure\n")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = deadline\n")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", "test_case.py"]
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def ended(pid: int, within: float = 5.0) -> bool:
    """Whether the process is gone (a zombie that nobody reaps counts as gone)."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False
