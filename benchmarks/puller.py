"""The process that pulls. Limit and kvferry write the same pages of it."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from exchange import (
    BATCH,
    TIMEOUT_MS,
    Offer,
    Sample,
    Setup,
    cold_block,
    latencies,
    moves,
    open_node,
    partly_written,
    timed,
)
from limits import SEED, Blocks, Limits, PrivateMemory, Times, Work


class Puller:
    """Owns the destination, and times what is pulled into it."""

    def __init__(self, setup: Setup, offer: Offer) -> None:
        self._setup, self._offer, self._limits = setup, offer, Limits(setup.library)
        self._lists = setup.work.lists()
        self._memory = [PrivateMemory(setup.work.region_bytes) for _ in range(setup.tensors)]
        self._pids = (os.getpid(), offer.pid)
        self._byte = 0
        self._source = 0
        self._link: Any = None
        self._mine: Any = None
        self._further_nodes: list[Any] = []
        self._tcp: socket.socket | None = None
        if setup.kvferry:
            self._node = open_node(setup)
            tensors = [m.bytes.reshape(setup.work.slots, setup.work.unit) for m in self._memory]
            self._mine = self._node.register("mine", tensors, layout="blocks")
            self.link()

    def _map_source(self, descriptor: int, offset: int) -> int:
        """The source's own pages and no others: to populate a page that its owner has never touched would make it."""
        into_the_page = offset % mmap.PAGESIZE
        handle = os.open(f"/proc/{self._offer.pid}/fd/{descriptor}", os.O_RDONLY)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0x8000)
        size_bytes, start = into_the_page + self._setup.work.region_bytes, offset - into_the_page
        self._mapping = mmap.mmap(handle, size_bytes, flags=flags, prot=mmap.PROT_READ, offset=start)
        os.close(handle)
        return np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data + into_the_page

    def link(self) -> None:
        self._link = self._node.link(self._offer.node)

    def relink(self) -> None:
        self._link.unlink()
        self.link()

    def connect_raw(self) -> None:
        """What the limits use: the owner's pages mapped once more, and a connection of each sort."""
        if self._offer.shared:
            self._source = self._map_source(*self._offer.shared)
        self._tcp = socket.create_connection(self._offer.tcp)
        self._tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._setup.apart:
            return
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unix.connect(self._offer.unix_name)

    # -- whole rounds: the destination is overwritten before, compared after

    def overwrite(self) -> None:
        self._byte = self._byte % 255 + 1
        for memory in self._memory:
            self._limits.overwrite(memory.address, self._setup.work.region_bytes, self._byte)

    def check(self, in_one_piece: bool = False) -> None:
        """``in_one_piece`` compares what a raw stream brought: the first bytes of the source, in order."""
        work, lists = self._setup.work, self._lists
        if in_one_piece:
            work = Work(work.size_bytes, work.unit, work.size_bytes // work.unit)
            lists = work.lists()
        for memory in self._memory:
            self._limits.check(memory.address, work, lists)

    def pull(self) -> Sample:
        link, mine, options = self._link, self._mine, moves(self._setup.work)
        return timed(self._pids, lambda: link.pull("kv", into=mine, timeout_ms=TIMEOUT_MS, **options))[0]

    def pull_partly_written(self) -> tuple[str, str]:
        """Pulls all of the cache "partly written" in one piece, then block by block in random order.

        The transports used. AssertionError unless its written blocks hold the pattern and all the others zeros.
        """
        work, memory = self._setup.work, self._memory[0]
        written = partly_written(work)
        others = np.setdiff1d(np.arange(work.slots), written)
        shuffled = np.random.default_rng(SEED).permutation(work.slots)
        used = []
        for blocks in ({}, {"blocks": (shuffled, shuffled)}):
            self.overwrite()
            done = self._link.pull("partly written", into=self._mine, timeout_ms=TIMEOUT_MS, **blocks)
            self._limits.check(memory.address, work, (written, written))
            assert not memory.bytes.reshape(work.slots, work.unit)[others].any(), "what nobody wrote is not zero"
            used.append(done.transport)
        return used[0], used[1]

    def limit(self, name: str, threads: int) -> Sample:
        """One round of a limit: "memcpy", "gather", "attach" or "tcp"."""
        to, work = self._memory[0].address, self._setup.work
        if name == "tcp":
            handle = self._raw(name)
            return timed(self._pids, lambda: self._limits.ask(handle, to, work.size_bytes))[0]
        source, owner = (self._offer.source_address, self._offer.pid) if name == "attach" else (self._source, 0)
        call = lambda: self._limits.copy(to, source, work, self._lists, owner=owner, threads=threads)  # noqa: E731
        return timed(self._pids, call)[0]

    def _raw(self, name: str) -> int:
        assert self._tcp is not None
        return (self._tcp if name == "tcp" else self._unix).fileno()

    # -- one small block at a time; microseconds of each call come back

    def _in_turn(self, count: int) -> tuple[Blocks, Blocks]:
        wanted = np.arange(count, dtype=np.int64) % BATCH
        return self._lists[0][wanted], self._lists[1][wanted]

    def copy_latencies(self, count: int) -> Times:
        """The bare copy of one block: from the mapped pages, or by process_vm_readv."""
        lists = self._in_turn(count)
        mapped = self._setup.transport == "map"
        source, owner = (self._source, 0) if mapped else (self._offer.source_address, self._offer.pid)
        self.overwrite()
        us = self._limits.copy_latencies(self._memory[0].address, source, lists, self._setup.work.unit, owner=owner)
        self.check()
        return us

    def ask_latencies(self, name: str, size_bytes: int, count: int, look: bool = False) -> Times:
        """A raw request, answered with one block after the other as a pull would be, or with a few bytes of each."""
        unit, to = self._setup.work.unit, self._memory[0].address
        self.overwrite()
        us = self._limits.ask_latencies(self._raw(name), to, self._in_turn(count), unit, size_bytes, look=look)
        if size_bytes == unit:
            self.check()
        return us

    def _check_first(self, size_bytes: int, source_block: int = 0) -> None:
        """The destination begins with ``size_bytes`` of that block of the source."""
        first = Work(size_bytes, size_bytes, 1).lists()[1]
        self._limits.check(self._memory[0].address, Work(size_bytes, size_bytes, 1), (first + source_block, first))

    def prepared_latencies(self, count: int, spinning: bool = False) -> Times:
        pairs = zip(*(side[:BATCH].tolist() for side in self._lists), strict=True)
        prepared = [
            self._link.prepare_pull("kv", into=self._mine, blocks={source: destination}, timeout_ms=TIMEOUT_MS)
            for source, destination in pairs
        ]
        runs = [transfer.run for transfer in prepared]
        self.overwrite()
        with spinning_thread() if spinning else contextlib.nullcontext():
            us = latencies(
                count, lambda i: runs[i % BATCH](timeout_ms=TIMEOUT_MS), most_s=4.0 if spinning else 20.0, least=BATCH
            )
        self.check()
        return us

    def named_latencies(self, count: int) -> Times:
        """One-off pulls under one repeated name, a dict of one block each."""
        pull, mine = self._link.pull, self._mine
        maps = [{s: d} for s, d in zip(*(side[:BATCH].tolist() for side in self._lists), strict=True)]
        self.overwrite()
        us = latencies(count, lambda i: pull("kv", into=mine, blocks=maps[i % BATCH], timeout_ms=TIMEOUT_MS))
        self.check()
        return us

    def cold_latencies(self, first: int, count: int) -> Times:
        """Pulls under names that this link never asked for: each has to be resolved by the owner."""
        pull, mine = self._link.pull, self._mine
        names = [f"cold-{first + i}" for i in range(count)]
        self.overwrite()
        us = latencies(count, lambda i: pull(names[i], into=mine, blocks={0: 0}, timeout_ms=TIMEOUT_MS))
        last = first + len(us) - 1
        self._check_first(self._setup.work.unit, cold_block(self._setup, last))
        return us

    # -- what stands beside the figures

    def link_further(self, count: int) -> int:
        """Open ``count`` more nodes in this process, each with a link to the owner."""
        for _ in range(count):
            node = open_node(self._setup)
            self._further_nodes.append((node, node.link(self._offer.node)))
        return len(self._further_nodes)

    def transports(self) -> Any:
        return self._link.statistics()


@contextlib.contextmanager
def spinning_thread() -> Iterator[None]:
    """A second Python thread that never sleeps, while the block runs."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
