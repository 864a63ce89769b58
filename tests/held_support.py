"""Memory in which the kernel holds every copy: pages of a file that do not come until the test lets them.

A stand-in for a file on a disk or server that does not answer. The pages are userfaultfd's (userfaultfd(2)): whoever
touches a missing one waits inside the kernel, in system calls too, until the descriptor is closed.
"""

import ctypes
import fcntl
import mmap
import os
import signal
import struct
import tempfile
from typing import Any

import numpy as np

_SYS_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
_UFFDIO_API, _UFFDIO_REGISTER = 0xC018AA3F, 0xC020AA00
_UFFD_API, _REGISTER_MODE_MISSING = 0xAA, 1
_SHM = "/dev/shm"  # a file system whose files userfaultfd knows


class HeldMemory:
    """``array``: bytes of a new file in shared memory, none of them there. Raises OSError where that cannot be had."""

    def __init__(self, shape: "tuple[int, ...]") -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._pages = libc.syscall(_SYS_USERFAULTFD[os.uname().machine], os.O_CLOEXEC)
        if self._pages < 0:
            raise OSError(ctypes.get_errno(), "userfaultfd")
        fcntl.ioctl(self._pages, _UFFDIO_API, bytearray(struct.pack("QQQ", _UFFD_API, 0, 0)))
        size = -(-int(np.prod(shape)) // mmap.PAGESIZE) * mmap.PAGESIZE
        with tempfile.TemporaryFile(dir=_SHM) as file:
            os.ftruncate(file.fileno(), size)
            self._map = mmap.mmap(file.fileno(), size)
        self.array: Any = np.frombuffer(self._map, dtype=np.uint8, count=int(np.prod(shape))).reshape(shape)
        where = struct.pack("QQQQ", self.array.ctypes.data, size, _REGISTER_MODE_MISSING, 0)
        fcntl.ioctl(self._pages, _UFFDIO_REGISTER, bytearray(where))

    def let_go(self) -> None:
        """From now on its pages come, and whoever waited for one goes on."""
        if self._pages >= 0:
            os.close(self._pages)
            self._pages = -1


def why_not() -> str:
    """Why this machine or user cannot have such memory; "" if it can."""
    try:
        HeldMemory((mmap.PAGESIZE,)).let_go()
    except (OSError, KeyError) as error:
        return f"memory whose pages are held cannot be had here: {error}"
    return ""


class HeldSide:
    """A node in a peer with a cache "held" over such memory and one "free" over ordinary memory, both of 64 blocks."""

    def __init__(self, block_bytes: int) -> None:
        import kvferry

        self.node = kvferry.Node(listen="127.0.0.1:0")
        self.memory = HeldMemory((64, block_bytes))
        self.held = self.node.register("held", [self.memory.array], layout="blocks")
        self.free = self.node.register("free", [np.full((64, block_bytes), 7, np.uint8)], layout="blocks")
        self.link: Any = None

    def address(self) -> "str | None":
        return self.node.address

    def let_go(self) -> None:
        self.memory.let_go()

    def bytes_of_held(self) -> bytes:
        return bytes(self.memory.array.tobytes())

    def fill_held(self, value: int) -> None:
        self.memory.array[:] = value

    def unregister_held(self) -> bool:
        return self.held.unregister()

    def pull_until_interrupted(self, address: str) -> "tuple[str, bool]":
        """Pulls into what is held, until Ctrl-C; how that ended."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with self.node.link(address) as link:
            try:
                link.pull("free", into=self.held, timeout_ms=60_000)
            except BaseException as error:  # noqa: BLE001 - which one is the question
                return type(error).__name__, link.alive
        return "nothing", True

    def link_to(self, address: str) -> None:
        self.link = self.node.link(address)

    def push_free_to(self, window: bytes, timeout_ms: int) -> None:
        self.link.push(self.free, to=window, timeout_ms=timeout_ms)
