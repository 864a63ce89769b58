"""`Peer`: a real child process that a test commands, kills, stops and continues.

    with Peer('''
    import kvferry
    node = kvferry.Node(listen="127.0.0.1:0")
    def address(): return node.address
    ''') as peer:
        link = mine.link(peer.call("address"))
        peer.stop()                                   # SIGSTOP, and it *has* stopped when this returns
        with pytest.raises(kvferry.DeadlineExceeded):
            link.pull(…, timeout_ms=200)

States: *running* → ``stop()`` → *stopped* → ``cont()`` → *running*; from both ``kill()``, ``terminate()`` or its own
end lead to *ended*. Every wait has a deadline, and the kernel kills the child when the thread that started it ends,
so a test that is itself killed leaves nothing behind.
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from textwrap import dedent
from types import TracebackType
from typing import Any

from support import frames

TESTS = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 30.0  # importing torch on a busy machine takes ten
CALL_TIMEOUT_S = 20.0
END_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 2.0  # between the end of its pipe and its own end
STACKS_TIMEOUT_S = 1.0
POLL_S = 0.002
MARK = "KVFERRY_TEST_PEER"  # in the environment of a peer and of all it starts, with a value of its own

living: "set[Peer]" = set()
"""Peers not closed yet; the watchdog prints their stacks and ends them."""


class PeerError(Exception):
    """Root of what a `Peer` raises of its own."""


class PeerDied(PeerError):
    """The process ended: before it answered, or in another way than a program should."""


class PeerTimeout(PeerError, TimeoutError):
    """No answer within the deadline. The message holds the child's stacks."""


class PeerRaised(PeerError):
    """The call raised something that cannot be pickled; ``kinds`` are its class's names, itself first."""

    def __init__(self, sentence: str, kinds: list[str], attributes: dict[str, Any]) -> None:
        super().__init__(f"{kinds[0]}: {sentence}")
        self.kinds = kinds
        self.attributes = attributes


class Peer:
    """Start a child Python process.

    ``target`` is a script, whose functions are then called by name, or ``"module:name"``: called with ``arguments``
    in the child, it returns the object (or dict) whose methods the calls name. A script finds them as ``arguments``.

    ``uid`` makes the child another user (the test must run as root) after ``preload`` was imported: that user may not
    be able to read the environment. ``dumpable=False`` keeps other processes of its user out of its memory.
    """

    def __init__(
        self,
        target: str,
        *arguments: Any,
        name: str = "peer",
        env: "dict[str, str] | None" = None,
        preload: Sequence[str] = (),
        uid: "int | None" = None,
        dumpable: bool = True,
        timeout: float = START_TIMEOUT_S,
    ) -> None:
        self.name = name
        self._expected = False  # its end was ours to bring, or the test has waited for it
        self._left = False  # its end of the pipe is closed: it has ended, or become another program
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Any]] = {0: Future()}
        self._count = 0
        self._mark = uuid.uuid4().hex
        self._stacks = os.memfd_create(f"stacks of {name}")
        self._pipe, other = socket.socketpair()
        self._pipe.setblocking(True)
        # pytest may run with a `sys.path` of its own; the child gets the same.
        command = f"from support.child import main; main({other.fileno()}, {self._stacks}, {os.getpid()})"
        paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), MARK: self._mark} | (env or {})
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", command],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno(), self._stacks],
                start_new_session=True,
            )
        self.pid = self._process.pid
        living.add(self)
        setup = {
            "target": dedent(target),
            "arguments": arguments,
            "path": sys.path,
            "preload": list(preload),
            "uid": uid,
            "dumpable": dumpable,
            "parent": os.getpid(),
        }
        threading.Thread(target=self._read, name=f"support: answers of {name}", daemon=True).start()
        try:
            self._send(setup)
            self._wait_for(self._pending[0], "its start", timeout)
        except BaseException:
            self._end()
            raise

    def __repr__(self) -> str:
        return f"<Peer {self.name} pid {self.pid} {self.state}>"

    # --- commands ---------------------------------------------------------------------------------------------

    def call(self, name: str, /, *arguments: Any, timeout: float = CALL_TIMEOUT_S, **keywords: Any) -> Any:
        """Call ``name`` on the child's main thread and return what it returns, or raise what it raises."""
        return self.call_later(name, *arguments, **keywords).result(timeout)

    def call_later(self, name: str, /, *arguments: Any, thread: bool = False, **keywords: Any) -> "Pending":
        """Send a call and do not wait. Calls are done in order, unless ``thread`` asks for a thread of its own."""
        with self._lock:
            self._count += 1
            number = self._count
            answer: Future[Any] = Future()
            if self._left:
                answer.set_exception(self._died(f"before it was asked for {name}"))
            else:
                self._pending[number] = answer
                self._send((number, name, pickle.dumps((arguments, keywords)), thread))
        return Pending(self, name, answer)

    # --- signals ----------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone and reaped, so its pid may be another's from here on."""
        self._expected = True
        self._signal(signal.SIGKILL)
        self.wait()

    def terminate(self, timeout: float = END_TIMEOUT_S) -> int:
        """SIGTERM; returns the exit status (``-SIGTERM`` unless the child handles it)."""
        self._expected = True
        self._signal(signal.SIGTERM)
        return self.wait(timeout)

    def stop(self, timeout: float = END_TIMEOUT_S) -> None:
        """SIGSTOP; returns when every thread of the child stands still."""
        self._signal(signal.SIGSTOP)
        self._until(lambda: set(self._thread_states()) <= {"T", "Z"}, "stopped", timeout)

    def cont(self, timeout: float = END_TIMEOUT_S) -> None:
        """SIGCONT; returns when the child runs again."""
        self._signal(signal.SIGCONT)
        self._until(lambda: "T" not in self._thread_states(), "continued", timeout)

    def wait(self, timeout: float = END_TIMEOUT_S) -> int:
        """Wait until the process has ended by itself (or by a signal sent before); its exit status.

        Whoever has seen the status need not be told again: `close` then says nothing about a crash.
        """
        self._wait(timeout)
        self._expected = True
        return self._process.returncode

    @property
    def returncode(self) -> "int | None":
        return self._process.poll()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def state(self) -> str:
        if self._process.poll() is not None:
            return f"ended with {self._process.returncode}"
        return "stopped" if "T" in self._thread_states() else "running"

    def stacks(self, timeout: float = STACKS_TIMEOUT_S) -> str:
        """Where each Python thread of the child is. Its interpreter need not be free for that."""
        if self.state != "running":
            return f"({self}: no stacks)"
        before = os.fstat(self._stacks).st_size
        self._signal(signal.SIGUSR2)
        deadline = time.monotonic() + timeout
        seen = before
        while time.monotonic() < deadline:
            time.sleep(20 * POLL_S)
            size = os.fstat(self._stacks).st_size
            if size == seen != before:
                break
            seen = size
        written = os.pread(self._stacks, seen - before, before).decode(errors="replace")
        return f"Stacks of {self}:\n{written or '(it did not answer the signal)'}"

    # --- the end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let the child end as a program does when it is through, and find out whether it does that well.

        Raises `PeerDied` when it crashed (now or before, and not by a signal of ours) and `PeerTimeout` when it does
        not end; a child that is stopped or in the middle of a call is killed without a word. Closing twice is fine.
        """
        if self not in living:
            return
        try:
            if self.state == "running" and not self._pending and not self._left:
                self._pipe.shutdown(socket.SHUT_WR)
                self._wait(END_TIMEOUT_S)
        finally:
            crashed = self._process.poll() and not self._expected  # as it is before _end() kills it
            self._end()
        if crashed:
            raise self._died("and nobody had asked it to")

    def _end(self) -> None:
        """Nothing of this peer lives on: neither it, nor what it started."""
        self._expected = True
        self._signal(signal.SIGKILL)
        self._process.wait(END_TIMEOUT_S)
        for pid in self.descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._pipe.shutdown(socket.SHUT_RDWR)
        self._pipe.close()
        if self in living:
            living.discard(self)
            os.close(self._stacks)

    def descendants(self) -> list[int]:
        """Pids of living processes that this peer started, directly or not, and that outlive it or not."""
        mark = f"{MARK}={self._mark}".encode()
        return [pid for pid, environment in _environments() if mark in environment and pid != self.pid]

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self, kind: "type[BaseException] | None", error: "BaseException | None", trace: "TracebackType | None"
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end()  # the test has its reason already

    # --- inside -----------------------------------------------------------------------------------------------

    def _signal(self, number: int) -> None:
        self._process.send_signal(number)  # looks first whether the child was reaped: never at another process

    def _send(self, message: Any) -> None:
        """A child that is stopped does not read: what the socket cannot hold runs into the deadline."""
        deadline = threading.Timer(SEND_TIMEOUT_S, self._pipe.shutdown, [socket.SHUT_RDWR])
        deadline.start()
        try:
            frames.send(self._pipe, message)
        except (BrokenPipeError, ConnectionError):
            pass  # it died; the reader tells everyone who waits
        finally:
            deadline.cancel()

    def _read(self) -> None:
        while True:
            try:
                message = frames.receive(self._pipe)
            except (EOFError, OSError):
                break
            answer = self._pending.pop(message["number"])
            try:
                if "kinds" in message:
                    raise _raised(message)
                answer.set_result(pickle.loads(message["value"]))
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the answer
                answer.set_exception(error)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_TIMEOUT_S)
        with self._lock:
            self._left = True
            waiting = list(self._pending.values())
            self._pending.clear()
        for answer in waiting:
            answer.set_exception(self._died("before it answered"))

    def _wait_for(self, answer: "Future[Any]", what: str, timeout: float) -> Any:
        try:
            return answer.result(timeout)
        except FutureTimeout:
            if answer.done():  # the call itself raised a TimeoutError
                raise
            raise PeerTimeout(f"{what}: no answer within {timeout:g} s\n{self.stacks()}") from None

    def _wait(self, timeout: float) -> None:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise PeerTimeout(f"{self} has not ended after {timeout:g} s\n{self.stacks()}") from None

    def _until(self, reached: Any, what: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not reached():
            if self._process.poll() is not None:
                raise self._died(f"and cannot be {what}")
            if time.monotonic() > deadline:
                raise PeerTimeout(f"{self} was not {what} within {timeout:g} s")
            time.sleep(POLL_S)

    def _thread_states(self) -> list[str]:
        states = []
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    states.append((task / "stat").read_text().rpartition(")")[2].split()[0])
        return states

    def _died(self, when: str) -> PeerDied:
        code = self._process.poll()
        if code is None:
            how = "closed its pipe"
        else:
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return PeerDied(f"{self.name} (pid {self.pid}) {how} {when}")


class Pending:
    """A call on its way."""

    def __init__(self, peer: Peer, name: str, answer: "Future[Any]") -> None:
        self._peer = peer
        self._name = name
        self._answer = answer

    def done(self) -> bool:
        return self._answer.done()

    def result(self, timeout: float = CALL_TIMEOUT_S) -> Any:
        """What the call returns, or raises; `PeerDied` or `PeerTimeout` when there is neither."""
        return self._peer._wait_for(self._answer, f"{self._peer.name}.{self._name}", timeout)


def _raised(message: dict[str, Any]) -> BaseException:
    """The child's exception, with its trace there as the cause; or a `PeerRaised` that describes it."""
    error: BaseException = PeerRaised(message["sentence"], message["kinds"], message["attributes"])
    if message["error"] is not None:
        with contextlib.suppress(Exception):
            error = pickle.loads(message["error"])
    error.__cause__ = PeerError(f"in the peer:\n{message['trace']}")
    return error


def _environments() -> Iterator[tuple[int, bytes]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(folder.name), (folder / "environ").read_bytes()
