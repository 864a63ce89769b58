"""Words between the demo and its processes: one JSON object per line, a request and its answer, over a pipe.

Only orders and figures pass here, never a byte of a KV cache: that is kvferry's. A worker that ends, hangs or fails
becomes one exception with a sentence in it.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent  # where `-m demo.worker` is found
ENDS_WITHIN_S = 5.0
ANSWERS_WITHIN_S = 600.0  # a large model of the user's own may take minutes to load

# One thread each, so that the same sums are made in the same order; and nothing is looked for on a model hub.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class WorkerFailedError(Exception):
    """A worker answered with an error, ended, or did not answer in time."""


class Worker:
    """A process that runs ``python -m demo.worker ROLE``. Driven by the process that started it.

    States: idle -> asked (``ask``) -> idle (``answer``); ended after ``close`` or when the process is gone.
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self._asked = ""
        self._unread = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "demo.worker", role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **ENVIRONMENT},
            cwd=ROOT,
            start_new_session=True,  # Ctrl-C is for the starter alone, which then closes the pipe
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, what: str, **arguments: Any) -> None:
        """Sends a request and does not wait for its answer."""
        self._asked = what
        line = json.dumps({"do": what, **arguments}).encode() + b"\n"
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def answer(self, timeout_s: float = ANSWERS_WITHIN_S) -> Any:
        """Waits for the answer to the last request.

        :raises WorkerFailedError: it could not be carried out, or nothing came in time.
        """
        answer = json.loads(self._line(time.monotonic() + timeout_s, timeout_s))
        if "error" in answer:
            raise WorkerFailedError(answer["error"])
        return answer["result"]

    def call(self, what: str, **arguments: Any) -> Any:
        self.ask(what, **arguments)
        return self.answer()

    def close(self) -> None:
        """Lets the process end by closing its input; ends it where it does not. Closing twice is fine."""
        with suppress(BrokenPipeError):  # a request that the process did not live to read
            self._process.stdin.close()
        try:
            self._process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:  # what it is still busy with, nobody waits for
            self._process.kill()
        self.close()

    def _line(self, deadline: float, timeout_s: float) -> bytes:
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise WorkerFailedError(f"The {self.role} process did not finish '{self._asked}' in {timeout_s:.0f} s.")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise self._gone()
            self._unread += piece
        line, self._unread = self._unread.split(b"\n", 1)
        return line

    def _gone(self) -> WorkerFailedError:
        status = self._process.wait(ENDS_WITHIN_S)
        if status < 0:
            return WorkerFailedError(f"The {self.role} process was ended by signal {-status} during '{self._asked}'.")
        return WorkerFailedError(
            f"The {self.role} process ended with status {status} during '{self._asked}' (its last words are above)."
        )


def serve(actions: Any, expected: tuple[type[Exception], ...]) -> None:
    """The worker's side: carries out requests as methods of ``actions`` until the pipe is closed.

    What is printed meanwhile goes to standard error. Errors of the ``expected`` kinds become answers; any other ends
    the process with its traceback, which is what its starter reports.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": getattr(actions, request.pop("do"))(**request)}
        except expected as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


class ChildFailedError(Exception):
    """What was to be done in a child was not done."""


def in_a_child(do: Callable[[], Any]) -> Any:
    """What ``do`` returns (JSON's types) in a process forked for it, which has ended by then.

    The child ends with the process that it was forked from, whose starter has a deadline for the answer: there is none here.

    :raises ChildFailedError: it ended otherwise, with its last words on standard error.
    """
    reading, writing = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        _carry_out(do, parent, writing)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise ChildFailedError(
            f"a forked process ended with status {os.waitstatus_to_exitcode(status)} (its last words are above)"
        )
    return json.loads(answer)


def _carry_out(do: Callable[[], Any], parent: int, writing: int) -> NoReturn:
    """Never returns into what the parent was doing."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            with open(writing, "wb") as pipe:
                pipe.write(json.dumps(do()).encode())
            status = 0
    except BaseException:  # noqa: BLE001 - the root of a process
        traceback.print_exc()
    finally:
        os._exit(status)
