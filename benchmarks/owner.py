"""The process that owns what is pulled. Limit and kvferry read the same pages of it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import networks
from exchange import TIMEOUT_MS, Offer, Sample, Setup, cold_block, moves, open_node, partly_written, timed
from limits import MIB, Limits, PrivateMemory


class Owner:
    """Owns the source. Its raw sockets are answered by C threads, its kvferry node by kvferry's own."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._limits = setup, Limits(setup.library)
        self._memory: list[Any] = []
        self._host = networks.OWNER if setup.apart else "127.0.0.1"
        self._node: Any = None
        self._cache: Any = None
        if setup.kvferry:
            pool = setup.work.region_bytes * setup.tensors + setup.cold_names * MIB // 8 + 64 * MIB
            options = {"pool": pool} if setup.transport == "map" else {}
            self._node = open_node(setup, listen=f"{self._host}:0", **options)
        self._addresses = self._source()
        for address in self._addresses:
            self._limits.fill_pattern(address, setup.work.region_bytes)
        self._register_cold_names()
        self._tcp = socket.create_server((self._host, 0))
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unix.bind(f"\0kvferry-benchmark-{os.getpid()}")
        self._unix.listen()

    def _source(self) -> list[int]:
        work, tensors = self._setup.work, self._setup.tensors
        if self._node is not None and self._setup.transport == "map":
            shape = (work.slots, work.unit)
            self._cache = self._node.allocate("kv", tensors=tensors, shape=shape, dtype="uint8")
            return list(self._cache.addresses)
        if self._setup.transport == "map":
            descriptor = os.memfd_create("source")
            os.ftruncate(descriptor, work.region_bytes * tensors)
            mapping = mmap.mmap(descriptor, work.region_bytes * tensors)
            self._memory.append((descriptor, mapping))
            start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
            return [start + i * work.region_bytes for i in range(tensors)]
        memory = [PrivateMemory(work.region_bytes) for _ in range(tensors)]
        self._memory.extend(memory)
        if self._node is not None:
            tensors_of = [m.bytes.reshape(work.slots, work.unit) for m in memory]
            self._cache = self._node.register("kv", tensors_of, layout="blocks")
        return [m.address for m in memory]

    def _register_cold_names(self) -> None:
        if self._node is None:
            return
        unit = self._setup.work.unit
        for i in range(self._setup.cold_names):
            if self._setup.transport == "map":
                address = self._node.allocate(f"cold-{i}", tensors=1, shape=(1, unit), dtype="uint8").addresses[0]
                self._limits.fill_pattern(address, unit)
            else:
                start = unit * cold_block(self._setup, i)
                block = self._memory[0].bytes[start : start + unit].reshape(1, unit)
                self._node.register(f"cold-{i}", block, layout="blocks")

    def offer(self) -> Offer:
        node = self._node.address if self._node is not None else None
        shared = shared_pages(self._addresses[0]) if self._setup.transport == "map" else None
        name = f"\0kvferry-benchmark-{os.getpid()}"
        return Offer(os.getpid(), node, self._addresses[0], shared, self._tcp.getsockname(), name)

    def answer_raw(self) -> None:
        """Accept the puller's raw TCP and, on one host, raw Unix connection; a C loop answers each."""
        for listener in (self._tcp,) if self._setup.apart else (self._tcp, self._unix):
            connection, _ = listener.accept()
            if connection.family == socket.AF_INET:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            size = self._setup.work.region_bytes
            arguments = (connection.detach(), self._addresses[0], size)
            threading.Thread(target=self._limits.serve, args=arguments, daemon=True).start()

    def push(self, puller_pid: int) -> Sample:
        assert self._node is not None
        cache, link = self._cache, next(link for link in self._node.links if link.alive)
        options = moves(self._setup.work)
        call = lambda: link.push(cache, to="mine", timeout_ms=TIMEOUT_MS, **options)  # noqa: E731
        return timed((os.getpid(), puller_pid), call)[0]

    def allocate_partly_written(self) -> None:
        """A cache "partly written" of the size of the source."""
        assert self._node is not None
        work = self._setup.work
        cache = self._node.allocate("partly written", tensors=1, shape=(work.slots, work.unit), dtype="uint8")
        for block in partly_written(work).tolist():
            cache.numpy(0)[block] = self._cache.numpy(0)[block]

    def busy(self, how: str, seconds: float) -> Iterator[Any]:
        """Answers "started" at once; then how far a Python counter thread came, per second, after ``seconds``.

        "pass" runs ``while True: pass`` in this process's main thread; "hold" keeps the GIL inside C.
        """
        counter, ended = ctypes.c_int64(0), threading.Event()

        def count() -> None:
            while not ended.wait(0.001):
                counter.value += 1

        threading.Thread(target=count, daemon=True).start()
        while counter.value < 10:
            time.sleep(0.001)
        yield "started"
        if how == "hold":
            moved = self._limits.hold(seconds, counter)
        else:
            before = counter.value
            run_until_alarm(seconds)
            moved = counter.value - before
        ended.set()
        yield moved / seconds


def run_until_alarm(seconds: float) -> None:
    class Enough(Exception):
        pass

    def stop(*_: object) -> None:
        raise Enough

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        while True:
            pass
    except Enough:
        return


def shared_pages(address: int) -> tuple[int, int] | None:
    """This process's descriptor of the memfd mapped at ``address``, and the offset of that address in it."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, offset, _, inode, *_ = [*line.split(), ""]
            start, end = (int(part, 16) for part in span.split("-"))
            if start <= address < end:
                break
        else:
            return None
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            if inode != "0" and os.stat(int(name)).st_ino == int(inode):
                return int(name), address - start + int(offset, 16)
    return None
