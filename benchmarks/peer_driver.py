"""A puller, and the owner it starts, that move bytes by a peer's public Python calls; runs in the peer's environment.

Knows nothing of kvferry. Obeys one-line commands on standard input and answers in JSON lines that begin with "@@".
"""

from __future__ import annotations

import argparse
import base64
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from limits import Limits, PrivateMemory, Work, end_with_parent, process_clock
from peers import Way


class Nixl:
    """One agent over one region; without a thread of its own, the owner's has to be driven."""

    def __init__(self, role: str, way: Way, memory: PrivateMemory, work: Work) -> None:
        import nixl_cu12 as nixl

        self._work, self._memory, self._way = work, memory, way
        thread = way.drives == "thread"
        self._agent = nixl.nixl_agent(role, nixl.nixl_agent_config(enable_prog_thread=thread, backends=[]))
        self._agent.create_backend("UCX", dict(self._agent.get_plugin_params("UCX")))
        self._agent.register_memory([(memory.address, work.region_bytes, 0, "")], "DRAM")

    def offer(self) -> dict[str, Any]:
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": self._memory.address}

    def meet(self, offer: dict[str, Any]) -> None:
        self._agent.add_remote_agent(base64.b64decode(offer["metadata"]))
        self._from = offer["address"]

    def drive(self) -> None:
        self._agent.get_new_notifs()

    def prepare(self) -> None:
        """Lists of every slot on both sides, so that a read only names indices."""
        unit = self._work.region_bytes if self._work.whole else self._work.unit
        self._sides = [
            self._agent.prep_xfer_dlist(name, self._slots(base, unit), "DRAM")
            for name, base in (("NIXL_INIT_AGENT", self._memory.address), ("owner", self._from))
        ]
        sources, destinations = self._work.lists()
        one = [0]
        self._destinations = one if self._work.whole else destinations.astype("int32")
        self._sources = one if self._work.whole else sources.astype("int32")

    def _slots(self, base: int, unit: int) -> Any:
        slots = np.zeros((self._work.region_bytes // unit, 3), dtype=np.uint64)
        slots[:, 0] = np.uint64(base) + np.arange(len(slots), dtype=np.uint64) * np.uint64(unit)
        slots[:, 1] = unit
        return slots

    def read(self) -> float:
        """Seconds from posting to the end; making the handle is not counted."""
        handle = self._make(self._destinations, self._sources)
        began = time.perf_counter()
        self._finish(handle, self._agent.transfer(handle))
        seconds = time.perf_counter() - began
        self._agent.release_xfer_handle(handle)
        return seconds

    def _make(self, destinations: Any, sources: Any) -> Any:
        return self._agent.make_prepped_xfer("READ", self._sides[0], destinations, self._sides[1], sources)

    def _finish(self, handle: Any, state: str) -> None:
        until = time.monotonic() + 30
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
            if state == "PROC" and time.monotonic() > until:
                raise TimeoutError("a read did not end in 30 s")
        if state != "DONE":
            raise RuntimeError(f"a read ended in state {state}")

    def latencies(self, count: int) -> dict[str, list[float]]:
        """Microseconds of one block: "fresh" makes, posts and frees a handle each time, "reposted" only posts."""
        fresh, reposted = [], []
        for i in range(count):
            slot = [i % self._work.slots]
            began = time.perf_counter_ns()
            handle = self._make(slot, slot)
            self._finish(handle, self._agent.transfer(handle))
            self._agent.release_xfer_handle(handle)
            fresh.append((time.perf_counter_ns() - began) / 1e3)
        handle = self._make([5], [5])
        for _ in range(count):
            began = time.perf_counter_ns()
            self._finish(handle, self._agent.transfer(handle))
            reposted.append((time.perf_counter_ns() - began) / 1e3)
        self._agent.release_xfer_handle(handle)
        return {"fresh": fresh, "reposted": reposted}


class Mooncake:
    """One transfer engine over TCP; the owner needs no driving."""

    def __init__(self, role: str, way: Way, memory: PrivateMemory, work: Work) -> None:
        from mooncake.engine import TransferEngine

        self._work, self._memory = work, memory
        self._engine = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("the engine did not start")
        if self._engine.register_memory(memory.address, work.region_bytes):
            raise RuntimeError("the engine did not register the memory")

    def offer(self) -> dict[str, Any]:
        return {"port": self._engine.get_rpc_port(), "address": self._memory.address}

    def meet(self, offer: dict[str, Any]) -> None:
        self._peer, self._from = f"127.0.0.1:{offer['port']}", offer["address"]

    def drive(self) -> None:
        pass

    def prepare(self) -> None:
        sources, destinations = self._work.lists()
        self._here = [self._memory.address + int(d) * self._work.unit for d in destinations]
        self._there = [self._from + int(s) * self._work.unit for s in sources]
        self._sizes = [self._work.unit] * len(self._here)

    def read(self) -> float:
        began = time.perf_counter()
        if self._work.whole:
            size = self._work.size_bytes
            status = self._engine.transfer_sync_read(self._peer, self._memory.address, self._from, size)
        else:
            status = self._engine.batch_transfer_sync_read(self._peer, self._here, self._there, self._sizes)
        if status:
            raise RuntimeError(f"a read returned {status}")
        return time.perf_counter() - began

    def latencies(self, count: int) -> dict[str, list[float]]:
        us = []
        for i in range(count):
            at = (i % self._work.slots) * self._work.unit
            began = time.perf_counter_ns()
            if self._engine.transfer_sync_read(self._peer, self._memory.address + at, self._from + at, self._work.unit):
                raise RuntimeError("a read failed")
            us.append((time.perf_counter_ns() - began) / 1e3)
        return {"fresh": us}


PACKAGES: dict[str, Callable[..., Any]] = {"nixl": Nixl, "mooncake": Mooncake}


def say(**answer: Any) -> None:
    os.write(1, b"@@" + json.dumps(answer).encode() + b"\n")


def read_line() -> bytes:
    """One line of standard input, unbuffered so that select() tells the truth; empty at its end."""
    line = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return line


def run_owner(way: Way, limits: Limits, work: Work) -> None:
    memory = PrivateMemory(work.region_bytes)
    limits.fill_pattern(memory.address, work.region_bytes)
    side = PACKAGES[way.package]("owner", way, memory, work)
    say(pid=os.getpid(), **side.offer())
    side.meet(json.loads(read_line()))
    while not select.select([0], [], [], 0 if way.drives == "loop" else 3600)[0]:
        side.drive()


def run_puller(way: Way, limits: Limits, work: Work, owner: subprocess.Popen[bytes]) -> None:
    memory = PrivateMemory(work.region_bytes)
    side = PACKAGES[way.package]("puller", way, memory, work)
    assert owner.stdin is not None
    assert owner.stdout is not None
    while not (line := owner.stdout.readline()).startswith(b"@@"):
        if not line:
            raise RuntimeError("the owner ended")
    offer = json.loads(line[2:])
    side.meet(offer)
    owner.stdin.write(json.dumps(side.offer()).encode() + b"\n")
    owner.stdin.flush()
    side.prepare()
    side.read()
    say(ready=True)
    clocks = [process_clock(os.getpid()), process_clock(offer["pid"])]
    byte, lists = 0, work.lists()
    while command := read_line():
        if command.startswith(b"latencies"):
            say(**side.latencies(int(command.split()[1])))
            continue
        byte = byte % 255 + 1
        limits.overwrite(memory.address, work.region_bytes, byte)
        before = sum(time.clock_gettime(clock) for clock in clocks)
        seconds = side.read()
        cpu_s = sum(time.clock_gettime(clock) for clock in clocks) - before
        limits.check(memory.address, work, lists)
        say(seconds=seconds, cpu_s=cpu_s)


def run(way: Way, limits: Limits, work: Work, owner: bool) -> None:
    if owner:
        run_owner(way, limits, work)
        return
    command = [sys.executable, *sys.argv, "--owner"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        run_puller(way, limits, work, started)


def main(run: Callable[[Way, Limits, Work, bool], None]) -> None:
    """The root of a driver's process: what fails in ``run`` is said to the driving end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", type=json.loads)
    parser.add_argument("library")
    parser.add_argument("work", type=json.loads)
    parser.add_argument("--owner", action="store_true")
    options = parser.parse_args()
    end_with_parent()
    logging.disable(logging.WARNING)
    try:
        run(Way(**options.way), Limits(options.library), Work(**options.work), options.owner)
    except Exception as error:  # noqa: BLE001  the driving end hears of it
        say(error=f"{type(error).__name__}: {error}")
    os._exit(0)  # the NIXL wheel crashes at a normal exit


if __name__ == "__main__":
    main(run)
