"""The loops of limits.c for Python, and the memory and block lists that every contender shares.

Knows nothing of kvferry or of the peers; the worker processes and the peers' drivers call it. Every call releases the
GIL except `hold`, which is there to keep it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SEED = 20_260_101
SOURCE = Path(__file__).with_name("limits.c")

Blocks = npt.NDArray[np.int64]


class LimitsUnavailable(Exception):
    """limits.c could not be compiled; the text says what is missing."""


def build(folder: Path) -> tuple[Path, Path]:
    """Compile limits.c into ``folder``: (the library, the program that spins)."""
    compiler = os.environ.get("CC", "gcc")
    library, spinner = folder / "limits.so", folder / "spinner"
    flags = [compiler, "-O3", "-march=native", "-Wall", "-pthread", str(SOURCE)]
    try:
        subprocess.run([*flags, "-shared", "-fPIC", "-o", str(library)], check=True)
        subprocess.run([*flags, "-DSPINNER", "-o", str(spinner)], check=True)
    except FileNotFoundError:
        raise LimitsUnavailable(f"no C compiler named {compiler!r}: install gcc, or name one in CC") from None
    except subprocess.CalledProcessError as error:
        raise LimitsUnavailable(f"{compiler} could not compile {SOURCE.name}: exit status {error.returncode}") from None
    return library, spinner


@dataclass(frozen=True, slots=True)
class Work:
    """Which bytes one round moves: ``size_bytes`` in one piece, or blocks of ``unit`` bytes over two index lists.

    A scattered round takes ``count`` blocks in random order out of ``slots`` on each side; the order is seeded, so
    every process makes the same lists for itself.
    """

    size_bytes: int
    unit: int
    slots: int
    count: int = 0

    @property
    def whole(self) -> bool:
        return self.count == 0

    @property
    def region_bytes(self) -> int:
        return self.unit * self.slots

    def lists(self) -> tuple[Blocks, Blocks]:
        """Source blocks, destination blocks."""
        if self.whole:
            every = np.arange(self.slots, dtype=np.int64)
            return every, every
        random = np.random.default_rng(SEED)
        return random.permutation(self.slots)[: self.count], random.permutation(self.slots)[: self.count]


def one_piece(size_bytes: int, unit: int = MIB) -> Work:
    return Work(size_bytes, unit, size_bytes // unit)


def scattered(count: int, unit: int, slots: int) -> Work:
    return Work(count * unit, unit, slots, count)


class PrivateMemory:
    """Page-aligned anonymous memory of this process, every page touched; ordinary pages on every contender's side."""

    def __init__(self, size_bytes: int) -> None:
        self._mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = np.frombuffer(self._mapping, dtype=np.uint8)
        self.address = self.bytes.ctypes.data
        self.bytes[:: mmap.PAGESIZE] = 1


class Limits:
    """limits.c, loaded. Seconds come back; a failed loop raises OSError."""

    def __init__(self, library: Path | str) -> None:
        pointer, whole, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
        lib, holding = ctypes.CDLL(str(library)), ctypes.PyDLL(str(library))
        self._copy_whole = _declared(lib.copy_whole, real, pointer, pointer, whole, ctypes.c_int, ctypes.c_int)
        self._copy_blocks = _declared(
            lib.copy_blocks, real, pointer, pointer, pointer, pointer, whole, whole, ctypes.c_int, ctypes.c_int
        )
        self._copy_latencies = _declared(
            lib.copy_latencies, real, pointer, pointer, pointer, pointer, whole, whole, ctypes.c_int, pointer
        )
        self.serve = _declared(lib.serve, ctypes.c_int, ctypes.c_int, pointer, whole)
        self._ask = _declared(lib.ask, real, ctypes.c_int, pointer, whole, whole, ctypes.c_int)
        self._ask_latencies = _declared(
            lib.ask_latencies,
            real,
            ctypes.c_int,
            pointer,
            pointer,
            pointer,
            whole,
            whole,
            whole,
            ctypes.c_int,
            pointer,
        )
        self._fill_pattern = _declared(lib.fill_pattern, None, pointer, whole, ctypes.c_uint64)
        self._fill_byte = _declared(lib.fill_byte, None, pointer, ctypes.c_int, whole)
        self._first_wrong = _declared(
            lib.first_wrong_block, whole, pointer, pointer, pointer, whole, whole, ctypes.c_uint64
        )
        self._hold = _declared(holding.hold, whole, real, pointer)

    def copy(
        self, to: int, source: int, work: Work, lists: tuple[Blocks, Blocks], *, owner: int, threads: int
    ) -> float:
        """``owner`` 0 copies mapped memory; else the source is an address in that process, read by process_vm_readv."""
        if work.whole:
            return _seconds(self._copy_whole(to, source, work.size_bytes, owner, threads))
        here, there = lists[1].ctypes.data, lists[0].ctypes.data
        return _seconds(self._copy_blocks(to, source, here, there, work.count, work.unit, owner, threads))

    def copy_latencies(self, to: int, source: int, lists: tuple[Blocks, Blocks], unit: int, *, owner: int) -> Times:
        us = np.zeros(len(lists[0]), dtype=np.float64)
        here, there = lists[1].ctypes.data, lists[0].ctypes.data
        _seconds(self._copy_latencies(to, source, here, there, len(us), unit, owner, us.ctypes.data))
        return us

    def ask(self, socket: int, to: int, size_bytes: int) -> float:
        return _seconds(self._ask(socket, to, 0, size_bytes, False))

    def ask_latencies(
        self, socket: int, to: int, lists: tuple[Blocks, Blocks], unit: int, size_bytes: int, *, look: bool
    ) -> Times:
        """The first ``size_bytes`` of each block. ``look``: both ends look for bytes for a moment before they sleep."""
        us = np.zeros(len(lists[0]), dtype=np.float64)
        here, there = lists[1].ctypes.data, lists[0].ctypes.data
        _seconds(self._ask_latencies(socket, to, here, there, len(us), unit, size_bytes, look, us.ctypes.data))
        return us

    def fill_pattern(self, address: int, size_bytes: int) -> None:
        self._fill_pattern(address, size_bytes // 8, SEED)

    def overwrite(self, address: int, size_bytes: int, byte: int) -> None:
        self._fill_byte(address, byte, size_bytes)

    def check(self, address: int, work: Work, lists: tuple[Blocks, Blocks]) -> None:
        """Raise AssertionError unless every block of the round holds the owner's bytes."""
        here, there = lists[1].ctypes.data, lists[0].ctypes.data
        wrong = self._first_wrong(address, here, there, len(lists[0]), work.unit, SEED)
        if wrong >= 0:
            raise AssertionError(f"block {lists[1][wrong]} does not hold the bytes of source block {lists[0][wrong]}")

    def hold(self, seconds: float, counter: ctypes.c_int64) -> int:
        """Hold the GIL inside C; how often the Python counter moved meanwhile."""
        return int(self._hold(seconds, ctypes.addressof(counter)))


Times = npt.NDArray[np.float64]


def process_clock(pid: int) -> int:
    """The kernel's CPU clock of another process, all its threads, in nanoseconds (the kernel's own numbering)."""
    return (~pid << 3) | 2


def end_with_parent() -> None:
    """A benchmark that is killed leaves no process behind: PR_SET_PDEATHSIG is 1."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _declared(function: object, result: object, *arguments: object):  # type: ignore[no-untyped-def]
    function.restype, function.argtypes = result, list(arguments)  # type: ignore[attr-defined]
    return function


def _seconds(answer: float) -> float:
    if answer < 0:
        raise OSError(int(-answer), os.strerror(int(-answer)))
    return answer
