"""The one place that a user's own node can take: its socket and locks, who is there, and how often one was started.

=============  ==================================================================================================
``pool.sock``  where the node listens; left behind by one that was killed
``node.lock``  locked by the node for as long as it lives; what is known of it stands inside
``start.lock`` locked by whoever starts a node; when nodes were started stands inside
=============  ==================================================================================================

Whether a node lives is asked of its lock, where it listens of its socket, who it is of the kernel (``SO_PEERCRED``). Starts
and ends nothing; ``embedded`` does.
"""

import contextlib
import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvferry.errors import Busy, Refused, Unsupported
from kvferry.pool.places import log_file, socket_path

__all__ = ["Seat"]

STARTS = 3  # so many within START_WINDOW_S, and the next one waits: what dies at once is not started for ever
START_WINDOW_S = 60.0


class Seat:
    """A runtime directory, seen as that place. Nothing is kept open between two calls."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = socket_path(directory)
        self.address = f"unix:{self.socket}"

    # --- looking ----------------------------------------------------------------------------------------------

    def listens(self) -> bool:
        return self.listener() is not None

    def listener(self) -> int | None:
        """The pid of who listens, 0 if it cannot be told; None: nobody does. The kernel answers, the node need not."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.setblocking(False)
            try:
                asking.connect(os.fspath(self.socket))
            except BlockingIOError:
                return 0  # so many wait for its answer already
            except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
                return None
            except OSError as error:
                raise Refused(f"{self.socket} cannot be connected to: {error.strerror}") from error
            size = struct.calcsize("iii")
            pid, uid, _ = struct.unpack("iii", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if uid != os.geteuid():
            raise Refused(f"{self.socket} is served by uid {uid}, and this process runs as uid {os.geteuid()}")
        return int(pid)

    def is_held(self) -> bool:
        """Whether a node lives, listening or not."""
        try:
            lock = os.open(self.directory / "node.lock", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise Refused(f"{self.directory / 'node.lock'} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(lock, fcntl.LOCK_UN)  # not by closing alone: a fork of this moment has it as well
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(lock)

    def known(self) -> dict[str, Any]:
        """What stands in node.lock; true only while it is held."""
        with contextlib.suppress(OSError, ValueError):
            written = json.loads((self.directory / "node.lock").read_bytes())
            if isinstance(written, dict):
                return written
        return {}  # a node writes it just after it has the lock

    def log(self) -> str:
        return str(log_file(self.directory))

    def node(self) -> int | None:
        """A pidfd of the node, or None if there is none.

        The pid is asked for once more when the pidfd is there: if it still is the node's, so is the pidfd.
        """
        pid = self._pid()
        if pid is None:
            return None
        if pid == 0:
            raise Unsupported(
                f"the process that serves {self.address} is not to be seen from here; if it runs in another container, stop it there"
            )
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        if self._pid() == pid:
            return pidfd
        os.close(pidfd)
        return None

    def _pid(self) -> int | None:
        pid = self.listener()
        if pid:
            return pid
        if not self.is_held():
            return None if pid is None else 0
        written = self.known().get("pid")
        return written if isinstance(written, int) and self._has_the_lock_open(written) else 0

    def _has_the_lock_open(self, pid: int) -> bool:
        """The same number may be another process's in our own PID namespace."""
        with contextlib.suppress(OSError):
            lock = os.stat(self.directory / "node.lock")
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.path.samestat(lock, os.stat(f"/proc/{pid}/fd/{name}")):
                        return True
        return False

    # --- starts ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def only_starter(self) -> Iterator[int | None]:
        """The descriptor of start.lock, or None if somebody else has it."""
        lock = os.open(self.directory / "start.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            try:
                yield lock
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)  # not by closing alone: forks of this moment have it as well
        finally:
            os.close(lock)

    def count_start(self, lock: int) -> None:
        """Notes one more start in start.lock, or raises Busy."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        try:
            starts = [float(word) for word in os.pread(lock, 4096, 0).split()]
        except ValueError:
            starts = []
        recent = [when for when in starts if 0 <= now - when < START_WINDOW_S]  # those of an earlier boot lie ahead
        if len(recent) >= STARTS:
            wait_s = START_WINDOW_S - (now - recent[-STARTS])
            raise Busy(
                f"{len(recent)} pool nodes were started within {START_WINDOW_S:g} s, and none is left; the next one may start "
                f"in {wait_s:.0f} s. {self.log()} says why they ended"
            )
        os.ftruncate(lock, 0)
        os.pwrite(lock, " ".join(f"{when:.3f}" for when in [*recent, now]).encode(), 0)

    def forget_starts(self) -> None:
        """A node that was ended on purpose is no reason to wait."""
        with self.only_starter() as lock:
            if lock is not None:
                os.ftruncate(lock, 0)
