"""The process that pulls. Limit and kvferry write the same pages of it."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from typing import Any

import numpy as np
from exchange import BATCH, TIMEOUT_MS, Offer, Sample, Setup, latencies, moves, open_node, timed
from limits import Limits, PrivateMemory, Times, Work


class Puller:
    """Owns the destination, and times what is pulled into it."""

    def __init__(self, setup: Setup, offer: Offer) -> None:
        self._setup, self._offer, self._limits = setup, offer, Limits(setup.library)
        self._lists = setup.work.lists()
        self._memory = [PrivateMemory(setup.work.region_bytes) for _ in range(setup.tensors)]
        self._pids = (os.getpid(), offer.pid)
        self._byte = 0
        self._source = self._map_source() if offer.shared else 0
        self._link: Any = None
        self._mine: Any = None
        self._further_nodes: list[Any] = []
        self._tcp: socket.socket | None = None
        if setup.kvferry:
            self._node = open_node(setup)
            tensors = [m.bytes.reshape(setup.work.slots, setup.work.unit) for m in self._memory]
            self._mine = self._node.register("mine", tensors, layout="blocks")
            self.link()

    def _map_source(self) -> int:
        descriptor, offset = self._offer.shared  # type: ignore[misc]
        handle = os.open(f"/proc/{self._offer.pid}/fd/{descriptor}", os.O_RDONLY)
        populate = getattr(mmap, "MAP_POPULATE", 0x8000)
        self._mapping = mmap.mmap(handle, 0, flags=mmap.MAP_SHARED | populate, prot=mmap.PROT_READ)
        os.close(handle)
        return np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data + offset

    def link(self) -> None:
        self._link = self._node.link(self._offer.node)

    def relink(self) -> None:
        self._link.unlink()
        self.link()

    def connect_raw(self) -> None:
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

    def pull_untouched(self) -> None:
        self._link.pull("untouched", into=self._mine, timeout_ms=TIMEOUT_MS)

    def limit(self, name: str, threads: int) -> Sample:
        """One round of a limit: "memcpy", "gather", "attach", "tcp" or "unix"."""
        to, work = self._memory[0].address, self._setup.work
        if name in ("tcp", "unix"):
            handle = self._raw(name)
            return timed(self._pids, lambda: self._limits.ask(handle, to, work.size_bytes))[0]
        source, owner = (self._offer.source_address, self._offer.pid) if name == "attach" else (self._source, 0)
        call = lambda: self._limits.copy(to, source, work, self._lists, owner=owner, threads=threads)  # noqa: E731
        return timed(self._pids, call)[0]

    def _raw(self, name: str) -> int:
        assert self._tcp is not None
        return (self._tcp if name == "tcp" else self._unix).fileno()

    # -- one small block at a time; microseconds of each call come back

    def copy_latencies(self, count: int) -> Times:
        """The bare copy of one block: from the mapped pages, or by process_vm_readv."""
        wanted = np.arange(count, dtype=np.int64) % BATCH
        lists = (self._lists[0][wanted], self._lists[1][wanted])
        mapped = self._setup.transport == "map"
        source, owner = (self._source, 0) if mapped else (self._offer.source_address, self._offer.pid)
        to = self._memory[0].address
        return self._limits.copy_latencies(to, source, lists, self._setup.work.unit, owner=owner)

    def ask_latencies(self, name: str, size_bytes: int, count: int) -> Times:
        return self._limits.ask_latencies(self._raw(name), self._memory[0].address, size_bytes, count)

    def prepared_latencies(self, count: int, spinning: bool = False) -> Times:
        pairs = zip(*(side[:BATCH].tolist() for side in self._lists), strict=True)
        prepared = [
            self._link.prepare_pull("kv", into=self._mine, blocks={source: destination}, timeout_ms=TIMEOUT_MS)
            for source, destination in pairs
        ]
        runs = [transfer.run for transfer in prepared]
        if not spinning:
            self.overwrite()
            us = latencies(count, lambda i: runs[i % BATCH](timeout_ms=TIMEOUT_MS))
            self.check()
            return us
        stop = threading.Event()

        def spin() -> None:
            while not stop.is_set():
                pass

        thread = threading.Thread(target=spin, daemon=True)
        thread.start()
        try:
            return latencies(count, lambda i: runs[i % BATCH](timeout_ms=TIMEOUT_MS), most_s=4.0)
        finally:
            stop.set()
            thread.join()

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
        return latencies(count, lambda i: pull(names[i], into=mine, blocks={0: 0}, timeout_ms=TIMEOUT_MS))

    # -- what stands beside the figures

    def link_further(self, count: int) -> int:
        """Open ``count`` more nodes in this process, each with a link to the owner."""
        for _ in range(count):
            node = open_node(self._setup)
            self._further_nodes.append((node, node.link(self._offer.node)))
        return len(self._further_nodes)

    def transports(self) -> Any:
        return self._link.statistics()
