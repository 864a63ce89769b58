"""A user's own node: one small process per user and host, found by whoever needs a pool, and started by the first.

::

    nobody ── a starter holds start.lock ──► starting ── it binds its socket ──► listening ──► nobody
              and spawns launch.py           node.lock is held by the node for as long as it lives

A starter spawns launch.py in a fresh interpreter, which leaves everything of the starter behind, takes node.lock and becomes
the node. Knows no keys and no links, and of the node only how it is started and asked to leave.
"""

import contextlib
import json
import logging
import os
import select
import signal
import stat
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvferry import _core
from kvferry.errors import (
    AlreadyExists,
    DeadlineExceeded,
    KvferryError,
    LinkFailed,
    OutOfMemory,
)
from kvferry.options import format_size, parse_size
from kvferry.pool import launch
from kvferry.pool.places import LOG_BYTES, Settings, runtime_directory, settings
from kvferry.pool.seat import Seat
from kvferry.threads import start_thread

__all__ = ["NodeStatus", "claim", "ensure", "find", "fitting_memory", "is_own", "start_or_find", "status", "stop"]

IDLE_S = 900.0  # after which a node that a process has started leaves, unless the configuration file says otherwise
LEAST_BYTES = 16 << 20  # with less there is no node
LOOK_S = 0.005  # between two looks at the socket, growing to LOOK_MOST_S
LOOK_MOST_S = 0.05
KILL_S = 5.0  # for the kernel to take a killed node's memory back

# What the node's environment keeps. Not here: devices, preloaded libraries, everything that is the starter's own affair.
_KEPT = (
    *("HOME", "USER", "LOGNAME", "PATH", "LANG", "TZ", "TMPDIR", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH"),
    *("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CONFIG_HOME"),
)
_PATHS = {"PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH"}  # relative ones start here, and the node runs in /
_CLEARED = {"CUDA_VISIBLE_DEVICES": ""}  # not even what the node might import finds an accelerator

_log = logging.getLogger("kvferry.pool")


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """What is known of the user's own node without asking it anything. What is not known is None."""

    state: Literal["nobody", "starting", "listening"]
    address: str
    log: str
    pid: int | None = None
    memory_bytes: int | None = None
    """The most that it takes; it takes it as it fills."""
    idle_s: float | None = None
    started: float | None = None
    """When, in seconds since 1970."""


def find() -> str | None:
    """The address of the node that listens now, or None. Waits for nothing and starts nothing."""
    try:
        seat = Seat(runtime_directory(create=False))
        return seat.address if seat.listens() else None
    except (KvferryError, OSError):
        return None


def is_own(address: str) -> bool:
    """Whether a node at ``address`` is the one that :func:`find`, :func:`status` and :func:`stop` mean."""
    try:
        return Seat(runtime_directory(create=False)).address == address
    except KvferryError:
        return False


def start_or_find(timeout_ms: int, *, program: Sequence[str] | None = None) -> str | None:
    """As :func:`ensure`, but None where there is no node in the end; the log ``kvferry.pool`` says why."""
    try:
        return ensure(timeout_ms, program=program)
    except KvferryError as error:
        _log.warning("no pool node of your own: %s", error)
        return None


def ensure(timeout_ms: int, *, program: Sequence[str] | None = None) -> str:
    """The address of the user's own node, which listens; it is started if there is none. Any number may call this at once.

    ``program``: what is started, an interpreter first; left out, kvferry's own node.

    :raises Refused: the runtime directory, or who listens there, is somebody else's.
    :raises OutOfMemory: a quarter of what is free is too little for a node.
    :raises Busy: nodes were started again and again, and are gone.
    :raises LinkFailed: it could not be started, or ended at once; the sentence names its log.
    :raises DeadlineExceeded: it does not listen yet.
    :raises InvalidArgument: the configuration file says something that makes no sense.
    """
    deadline = time.monotonic() + timeout_ms / 1000
    seat = Seat(runtime_directory(create=True))
    try:
        if seat.listens():  # nearly always
            return seat.address
        return _started(seat, settings(), program or (sys.executable or "", "-m", "kvferry.pool.program"), deadline)
    except OSError as error:  # a full disk, no descriptor left
        raise LinkFailed(f"the pool node at {seat.address} cannot be found or started: {error}") from error


def stop(timeout_ms: int = 10_000) -> Literal["nobody", "stopped", "killed"]:
    """Ends the user's own node: it is asked to leave, and killed if it has not left in time.

    :raises Refused: the runtime directory, or who listens there, is somebody else's.
    :raises Unsupported: it runs in another PID namespace.
    :raises DeadlineExceeded: even killed it is still there.
    """
    seat = Seat(runtime_directory(create=False))
    node = seat.node()
    if node is None:
        return "nobody"
    try:
        how: Literal["stopped", "killed"] = "stopped"
        _signal(node, signal.SIGTERM)
        _signal(node, signal.SIGCONT)  # one that stands still must run to leave
        if not _ended(node, timeout_ms / 1000):
            how = "killed"
            _signal(node, signal.SIGKILL)
            if not _ended(node, KILL_S):
                raise DeadlineExceeded(f"the pool node at {seat.address} was killed and has not ended yet")
    finally:
        os.close(node)
    seat.forget_starts()
    return how


def status() -> NodeStatus:
    """What is known of the user's own node.

    :raises Refused: the runtime directory, or who listens there, is somebody else's.
    """
    seat = Seat(runtime_directory(create=False))
    pid = seat.listener()
    if pid is None and not seat.is_held():
        return NodeStatus("nobody", seat.address, seat.log())
    known = seat.known()
    return NodeStatus(
        "starting" if pid is None else "listening",
        seat.address,
        known.get("log", seat.log()),
        pid or known.get("pid"),
        known.get("memory_bytes"),
        known.get("idle_s"),
        known.get("started"),
    )


def claim(memory_bytes: int, idle_s: float | None) -> tuple[str, int]:
    """This process is to be the user's own node: the address to listen at, and a descriptor to keep open meanwhile.

    :raises AlreadyExists: there is one.
    :raises Refused: the runtime directory is somebody else's.
    """
    seat = Seat(runtime_directory(create=True))
    lock = os.open(seat.directory / "node.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if seat.listens() or not launch.locked(lock):
        os.close(lock)
        raise AlreadyExists(f"there is a pool node at {seat.address} already; `kvferry pool stop` ends it")
    state = {"pid": os.getpid(), "memory_bytes": memory_bytes, "idle_s": idle_s, "started": time.time()}
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps(state).encode(), 0)
    return seat.address, lock


def fitting_memory(most: int | str | None = None) -> int:
    """Bytes for a node on this host: a quarter of what is free now, on the machine or in this process's memory cgroups,
    whichever is less; at most ``most``; whole MiB.

    :raises OutOfMemory: that is too little for a node.
    """
    free, whose = _core.memory_room(False)
    size = free // 4
    if most is not None:
        size = min(size, parse_size("memory", most))
    if size < LEAST_BYTES:
        raise OutOfMemory(
            f"a pool node may take {format_size(size)} here, and needs {format_size(LEAST_BYTES)}: at most a quarter of the "
            f"{format_size(free)} that {whose or 'this machine'} has left"
        )
    return size >> 20 << 20


def _started(seat: Seat, chosen: Settings, program: Sequence[str], deadline: float) -> str:
    started, pause = False, LOOK_S
    while True:
        if not seat.is_held():
            if started:
                raise LinkFailed(f"the pool node ended before it listened; {seat.log()} says why")
            started = _start(seat, chosen, program, deadline)
        if seat.listens():
            if started:
                _announce(seat)
            return seat.address
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"the pool node at {seat.address} does not listen yet; see {seat.log()}")
        time.sleep(pause)
        pause = min(1.5 * pause, LOOK_MOST_S)


def _start(seat: Seat, chosen: Settings, program: Sequence[str], deadline: float) -> bool:
    """Starts a node, unless somebody else is just doing that: False, and all that is left to do is to wait."""
    with seat.only_starter() as lock:
        if lock is None or seat.is_held() or seat.listens():
            return False
        memory = fitting_memory(chosen.memory)
        seat.count_start(lock)
        log = _fresh_log(seat)
        idle_s = chosen.idle_s or IDLE_S
        state = {"memory_bytes": memory, "idle_s": idle_s, "log": log, "started": time.time()}
        arguments = ["--listen", seat.address, "--memory", str(memory), "--idle-s", f"{idle_s:g}"]
        with contextlib.suppress(FileNotFoundError):  # of a node that was killed: nobody listens there
            if stat.S_ISSOCK(os.lstat(seat.socket).st_mode):
                os.unlink(seat.socket)
        return _launch(seat, [*program, *arguments], json.dumps(state), log, deadline)


def _announce(seat: Seat) -> None:
    """The one thing that the library says unasked: there is a process now that its user did not start."""
    known = seat.known()
    if sys.stderr is not None and known:
        sys.stderr.write(
            f"kvferry: started a pool node of your own at {seat.address}. It takes up to "
            f"{format_size(known['memory_bytes'])} as it fills, logs to {known['log']}, and leaves after "
            f"{known['idle_s']:g} s without a client; `kvferry pool stop` ends it.\n"
        )


def _launch(seat: Seat, command: list[str], state: str, log: str, deadline: float) -> bool:
    """Runs launch.py to its end; False if another node was faster."""
    python = command[0]
    script = os.path.abspath(launch.__file__)
    words = [python, "-I", "-S", script, str(seat.directory / "node.lock"), state, *command]
    files = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    signals = signal.valid_signals()
    try:
        pid = os.posix_spawn(python, words, _environment(), file_actions=files, setsigmask=(), setsigdef=signals)
    except (OSError, ValueError) as error:
        raise LinkFailed(f"{python!r} cannot be started, or log to {log}: {error}") from error
    code = _exit_code(pid, deadline)
    if code is None:
        return seat.is_held()
    if code not in (0, launch.BUSY):
        raise LinkFailed(f"the pool node could not be started (status {code}); {log} says why")
    return code == 0


def _fresh_log(seat: Seat) -> str:
    log = seat.log()
    with contextlib.suppress(OSError):
        found = os.lstat(log)
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for who reads it
            raise LinkFailed(f"the pool node cannot log to {log}, which is no file: move it away")
        if found.st_size > LOG_BYTES:
            os.replace(log, f"{log}.1")
    return log


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith("LC_")}
    for name in _PATHS & kept.keys():
        kept[name] = os.pathsep.join(map(os.path.abspath, kept[name].split(os.pathsep)))
    return kept | _CLEARED


def _exit_code(pid: int, deadline: float) -> int | None:
    """Of a child that ends soon. None: somebody else in this process has taken its status."""
    try:
        while True:
            ended, code = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(code)
            if time.monotonic() > deadline:
                start_thread("kvferry-reap", _reap, pid)
                raise DeadlineExceeded("the pool node is still being started")
            time.sleep(0.002)
    except ChildProcessError:
        return None


def _reap(pid: int) -> None:
    """launch.py ends within seconds, and whoever does not wait for its children keeps what is left of them."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _signal(pidfd: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def _ended(pidfd: int, seconds: float) -> bool:
    waiting = select.poll()
    waiting.register(pidfd, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))
