"""What the processes of a pair tell each other, and how each of them times a call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from limits import Blocks, Times, Work, process_clock

TIMEOUT_MS = 20_000
BATCH = 64  # prepared transfers used in turn by a latency batch, each over its own blocks


@dataclass(frozen=True, slots=True)
class Setup:
    """What both processes of a pair are told."""

    library: str  # limits.so
    work: Work
    transport: str  # "map" | "cma" | "socket": what the source's memory and the node are set up for
    copy_threads: int = 1
    tensors: int = 1
    kvferry: bool = True
    apart: bool = False  # the two processes are in two networks, like on two hosts
    cold_names: int = 0  # further caches of one block each, every one under a name of its own


@dataclass(frozen=True, slots=True)
class Offer:
    """What the owner tells the puller: where the bytes are, and where it listens."""

    pid: int
    node: str | None
    source_address: int
    shared: tuple[int, int] | None  # the owner's descriptor of the memfd that holds the source, and the offset in it
    tcp: tuple[str, int]
    unix_name: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed round. CPU is that of both processes."""

    seconds: float
    cpu_s: float
    transport: str = ""


def timed(pids: tuple[int, int], call: Callable[[], Any]) -> tuple[Sample, Any]:
    before = sum(time.clock_gettime(process_clock(pid)) for pid in pids)
    began = time.perf_counter()
    answer = call()
    seconds = time.perf_counter() - began
    cpu_s = sum(time.clock_gettime(process_clock(pid)) for pid in pids) - before
    return Sample(seconds, cpu_s, getattr(answer, "transport", "")), answer


def moves(work: Work) -> dict[str, Any]:
    return {} if work.whole else {"blocks": work.lists()}


def cold_block(setup: Setup, number: int) -> int:
    """Which block of the source's pattern the cache ``cold-number`` holds."""
    return 0 if setup.transport == "map" else number % setup.work.slots


def partly_written(work: Work) -> Blocks:
    """The blocks of the cache "partly written" that its owner writes: its first half, and some of the third quarter."""
    half, quarter = work.slots // 2, work.slots // 4
    return np.concatenate([np.arange(half), np.arange(half, half + quarter, 4)])


def open_node(setup: Setup, **options: Any) -> Any:
    import kvferry

    return kvferry.Node(copy_threads=setup.copy_threads, transports=(setup.transport,), **options)


def latencies(count: int, call: Callable[[int], Any], most_s: float = 20.0, least: int = 0) -> Times:
    """Microseconds of ``count`` calls, or of those that ``most_s`` was enough for, but of ``least`` anyway."""
    clock, us = time.perf_counter_ns, []
    until = clock() + int(most_s * 1e9)
    for i in range(count):
        began = clock()
        call(i)
        ended = clock()
        us.append((ended - began) / 1e3)
        if ended > until and i + 1 >= least:
            break
    return np.array(us)
