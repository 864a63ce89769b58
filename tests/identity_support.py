"""Means to make a process take another's place: its pid, its addresses; and to keep a peer from noticing for a while."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from failure_support import Peers, until
from support import Peer

PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT = 17, 0x4206, 0x4207
WALL = 0x40000000
ADDR_NO_RANDOMIZE = 0x0040000
LAST_PID = Path("/proc/sys/kernel/ns_last_pid")

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long


@contextlib.contextmanager
def without_its_control_thread(peer: Peer) -> Iterator[None]:
    """That one thread of the peer stands still: its node hears of nothing, and its other threads go on."""
    tid = control_thread(peer)
    _ptrace(PTRACE_SEIZE, tid)
    _ptrace(PTRACE_INTERRUPT, tid)
    assert os.waitpid(tid, WALL)[0] == tid
    try:
        yield
    finally:
        _ptrace(PTRACE_DETACH, tid)


def control_thread(peer: Peer) -> int:
    for task in Path(f"/proc/{peer.pid}/task").iterdir():
        if (task / "comm").read_text().strip() == "kvferry-control":
            return int(task.name)
    raise AssertionError("it has no control thread")


def _ptrace(request: int, tid: int) -> None:
    if libc.ptrace(request, tid, None, None):
        error = ctypes.get_errno()
        pytest.skip(f"threads of other processes cannot be traced here: {os.strerror(error)}")


@contextlib.contextmanager
def the_same_addresses() -> Iterator[None]:
    """Processes started inside have their memory where every other run of the same program has it."""
    before = libc.personality(0xFFFFFFFF)
    libc.personality(before | ADDR_NO_RANDOMIZE)
    try:
        yield
    finally:
        libc.personality(before)


def reborn(peers: Peers, pid: int, *arguments: Any, **keywords: Any) -> Peer:
    """A peer with the pid of one that has ended."""
    for _ in range(20):
        try:
            LAST_PID.write_text(str(pid - 1))
        except OSError as error:
            pytest.skip(f"the next pid cannot be chosen here: {error}")
        peer = peers(*arguments, **keywords)
        if peer.pid == pid:
            return peer
        peer.close()  # somebody else was faster, who may be gone by the next time
    pytest.skip("somebody else has taken that pid")


def identity_page(pid: int) -> "tuple[int, int]":
    """Where the page begins and ends that is wiped in a forked child: the core's word lies there."""
    region = (0, 0)
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            begin, _, end = first.partition("-")
            region = int(begin, 16), int(end, 16)
        elif first == "VmFlags:" and "wf" in line.split():
            return region
    raise AssertionError("it has no such page")


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def goes_down(peer: Peer, seconds: float) -> float:
    """Waits until no link of the peer is up; how long it took."""
    return until(lambda: not any(peer.call("alive")), "its links are down", seconds)
