"""A Mooncake Store that this process starts and then saves to and loads from; runs in the peer's environment.

A master, a client of Mooncake's that gives the memory where this process does not give it itself, and Mooncake's public
Python calls with registered buffers. Knows nothing of kvferry. Obeys and answers as peer_driver.py does.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from limits import GIB, MIB, Limits, PrivateMemory, Work, end_with_parent, process_clock
from peer_driver import main, read_line, say
from peers import Way

START_S = 15.0
HERE = "127.0.0.1"


class Store:
    """``work`` is one piece: the slots of a source, and of a destination behind it in the same memory. A value is one
    slot, or where there are fewer values than slots, as many slots with equal distances between them."""

    def __init__(self, way: Way, limits: Limits, work: Work, stack: ExitStack) -> None:
        master, metrics, service = _free_ports(3)
        self._limits, self._work, self._every = limits, work, work.lists()
        pids = [os.getpid()]
        # Its processes are stopped between rounds: the time to live keeps the master from taking the others for dead.
        at = [f"--rpc_address={HERE}", f"--rpc_port={master}", f"--metrics_host={HERE}", f"--metrics_port={metrics}"]
        pids.append(_start(stack, master, "mooncake_master", *at, "--client_ttl=3600"))
        if way.values != "own":
            gives = ["--protocol=tcp", "--metadata_server=P2PHANDSHAKE", f"--global_segment_size={GIB}"]
            at = [f"--host={HERE}", f"--port={service}", f"--master_server_address={HERE}:{master}"]
            pids.append(_start(stack, service, "mooncake_client", *at, *gives))
        self._clocks = [process_clock(pid) for pid in pids]
        self._meet(way, f"{HERE}:{master}", f"{HERE}:{service}")
        limits.fill_pattern(self._source, work.region_bytes)

    def _meet(self, way: Way, master: str, service: str) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        size, buffer = 2 * self._work.region_bytes, 64 * MIB
        if way.values == "shared":  # only memory of the store's own is in reach of that client
            _worked("setup_dummy", self._store.setup_dummy(size + buffer, buffer, service))
            self._source = self._store.alloc_from_mem_pool(size)
        else:
            given = GIB if way.values == "own" else 0
            _worked("setup", self._store.setup(HERE, "P2PHANDSHAKE", given, buffer, "tcp", "", master))
            self._memory = PrivateMemory(size)
            self._source = self._memory.address
        self._destination = self._source + self._work.region_bytes
        _worked("register_buffer", self._store.register_buffer(self._source, size))

    def save(self, values: int) -> dict[str, float]:
        """Seconds and CPU seconds of saving them into an empty store; they are loaded and compared afterwards."""
        self._store.remove_all(True)
        sample = self._move("put_from", values, self._source, 0)
        self.load(values)
        return sample

    def load(self, values: int) -> dict[str, float]:
        self._overwrite()
        sample = self._move("get_into", values, self._destination, self._work.size_bytes // values)
        self._check()
        return sample

    def _move(self, verb: str, values: int, base: int, right: int) -> dict[str, float]:
        slots = np.arange(self._work.slots).reshape(-1, values).T
        places, unit = (base + slots * self._work.unit).tolist(), self._work.unit
        keys, pieces = [str(value) for value in range(values)], slots.shape[1]
        if pieces > 1:
            call, sizes = getattr(self._store, f"batch_{verb}_multi_buffers"), [[unit] * pieces] * values
        else:
            call, sizes = getattr(self._store, f"batch_{verb}"), [unit] * values
            places = [place for (place,) in places]
        before = sum(map(time.clock_gettime, self._clocks))
        began = time.perf_counter()
        statuses = call(keys, places, sizes)
        seconds = time.perf_counter() - began
        cpu_s = sum(map(time.clock_gettime, self._clocks)) - before
        if wrong := set(statuses) - {right}:
            raise RuntimeError(f"{call.__name__} returned {sorted(wrong)}")
        return {"seconds": seconds, "cpu_s": cpu_s}

    def load_one(self, calls: int) -> dict[str, list[float]]:
        """Microseconds of each load of the only value there is."""
        size = self._work.size_bytes
        self._overwrite()
        times = _latencies(calls, lambda: self._store.get_into("0", self._destination, size), size)
        self._check()
        return times

    def exist(self, count: int, calls: int) -> dict[str, list[float]]:
        """Microseconds of each call that asks for ``count`` keys, saved here with 64 bytes each if they are not."""
        keys = [f"key {i:028d}" for i in range(count)]
        if not all(self._store.batch_is_exist(keys)):
            saved = self._store.batch_put_from(keys, [self._source] * count, [64] * count)
            _worked("batch_put_from", *saved)
        if count == 1:
            return _latencies(calls, lambda: self._store.is_exist(keys[0]), 1)
        return _latencies(calls, lambda: self._store.batch_is_exist(keys), [1] * count)

    def _overwrite(self) -> None:
        self._limits.overwrite(self._destination, self._work.region_bytes, 0)

    def _check(self) -> None:
        self._limits.check(self._destination, self._work, self._every)


def _free_ports(count: int) -> list[int]:
    """Ports that the kernel gives, in a network that no other program is in."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((HERE, 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def _start(stack: ExitStack, port: int, program: str, *options: str) -> int:
    """Start one of Mooncake's programs, which ends with ``stack``; its process id, once it listens."""
    command = [str(Path(sys.executable).with_name(program)), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=end_with_parent)
    stack.callback(process.wait, 5)
    stack.callback(process.kill)
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            socket.create_connection((HERE, port), 1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return process.pid
    how = f"did not listen in {START_S:.0f} s" if process.poll() is None else f"ended, exit status {process.poll()}"
    raise RuntimeError(f"{program} {how}")


def _worked(call: str, *statuses: int) -> None:
    if any(statuses):
        raise RuntimeError(f"{call} returned {next(filter(None, statuses))}")


def _latencies(calls: int, call: Callable[[], Any], right: Any) -> dict[str, list[float]]:
    us = []
    for _ in range(calls):
        began = time.perf_counter_ns()
        answer = call()
        us.append((time.perf_counter_ns() - began) / 1e3)
        if answer != right:
            raise RuntimeError(f"a call returned {answer}")
    return {"us": us}


def run(way: Way, limits: Limits, work: Work, _: bool) -> None:
    with ExitStack() as stack:
        store = Store(way, limits, work, stack)
        say(ready=True)
        while command := read_line().decode().split():
            say(**getattr(store, command[0])(*map(int, command[1:])))


if __name__ == "__main__":
    main(run)
