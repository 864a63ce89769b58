"""The child's end of a `Peer`: does the calls that come through the pipe, one after the other, on the main thread.

Started as ``python -c "from support.child import main; main(…)"``. A second thread only reads the pipe, so that a
call can be answered on a thread of its own (``thread=True``) while the main one is busy.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import traceback
import types
from typing import Any

from support import frames

FORKED_LIFETIME_S = 120  # a test's forked grandchild may outlive its parent, but not for longer than this
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4


def main(pipe_fd: int, stacks_fd: int, parent: int) -> None:
    die_with(parent)
    faulthandler.register(signal.SIGUSR2, file=stacks_fd, all_threads=True)
    faulthandler.enable()
    os.set_inheritable(pipe_fd, False)
    os.set_inheritable(stacks_fd, False)
    child = Child(socket.socket(fileno=pipe_fd))
    os.register_at_fork(after_in_child=child.forked)
    child.run()


class Child:
    def __init__(self, pipe: socket.socket) -> None:
        self.pipe = pipe
        self.pid = os.getpid()
        self.sending = threading.Lock()
        self.work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.scope: Any = None

    def run(self) -> None:
        setup = frames.receive(self.pipe)
        sys.path[:] = setup["path"]
        try:
            for module in setup["preload"]:
                importlib.import_module(module)
            if setup["uid"] is not None:
                become(setup["uid"], setup["parent"])
            if not setup["dumpable"]:
                prctl(PR_SET_DUMPABLE, 0)
            self.scope = load(setup["target"], setup["arguments"])
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever called, in the other process
            self.answer(0, error=error)
            return
        self.answer(0, value=os.getpid())
        threading.Thread(target=self.read, name="support: pipe", daemon=True).start()
        while (request := self.work.get()) is not None:
            self.do(*request)

    def read(self) -> None:
        while True:
            try:
                number, name, payload, thread = frames.receive(self.pipe)
            except EOFError:  # the parent closed the pipe: end as any program does when its main function returns
                self.work.put(None)
                return
            request = (number, name, payload)
            if thread:
                threading.Thread(target=self.do, args=request, name=f"support: {name}", daemon=True).start()
            else:
                self.work.put(request)

    def do(self, number: int, name: str, payload: bytes) -> None:
        try:
            arguments, keywords = pickle.loads(payload)
            value = find(self.scope, name)(*arguments, **keywords)
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever called, in the other process
            self.answer(number, error=error)
        else:
            self.answer(number, value=value)

    def answer(self, number: int, *, value: Any = None, error: "BaseException | None" = None) -> None:
        if os.getpid() != self.pid:
            os._exit(0)  # a call forked, and this is the fork coming back from it: the answer is not its to give
        message: dict[str, Any] = {"number": number}
        try:
            message |= describe(error) if error else {"value": pickle.dumps(value)}
        except Exception as unsendable:  # noqa: BLE001 - an answer may refuse to be pickled in any way
            message |= describe(unsendable)
        with self.sending, contextlib.suppress(ConnectionError):  # nobody may wait for this answer any more
            frames.send(self.pipe, message)

    def forked(self) -> None:
        """In a fork of ours: give up what would keep our end from being seen, and do not live for ever."""
        os.close(self.pipe.detach())
        signal.alarm(FORKED_LIFETIME_S)


def load(target: str, arguments: tuple[Any, ...]) -> Any:
    """What the calls' names are looked up in: a script's globals, or what ``module:name`` gives when called."""
    if "\n" not in target and target.count(":") == 1 and " " not in target:
        module, name = target.split(":")
        found = importlib.import_module(module)
        return getattr(found, name)(*arguments)
    script = types.ModuleType("peer_script")
    sys.modules["peer_script"] = script
    script.__dict__["arguments"] = arguments
    exec(compile(target, "<peer script>", "exec"), script.__dict__)
    return script


def find(scope: Any, name: str) -> Any:
    return scope[name] if isinstance(scope, dict) else getattr(scope, name)


def describe(error: BaseException) -> dict[str, Any]:
    """The exception itself, where it survives the journey, and what is known of it in plain values."""
    try:
        pickled: bytes | None = pickle.dumps(error)
        pickle.loads(pickled or b"")
    except Exception:  # noqa: BLE001 - a class may refuse in any way
        pickled = None
    kinds = [kind.__name__ for kind in type(error).__mro__]
    plain = {name: value for name, value in vars(error).items() if isinstance(value, str | int | float | None)}
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"error": pickled, "kinds": kinds, "sentence": str(error), "attributes": plain, "trace": trace}


def become(uid: int, parent: int) -> None:
    """Another user from here on, as readable to the kernel's checks as any program of that user."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    prctl(PR_SET_DUMPABLE, 1)
    die_with(parent)  # the kernel forgets it when a process changes its user


def die_with(parent: int) -> None:
    """SIGKILL from the kernel as soon as the parent (more exactly: its thread that started us) is gone."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it went before we could watch for that


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")
