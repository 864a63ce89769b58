"""Measures the pool against what this machine can do: `python benchmarks/pool.py [--case NAME …] [--json FILE]`.

One pool node in a process of its own, this process as its client; the limits are measured in turns with it, between two
further processes, and so is Mooncake's Store where it is installed (`--mooncake-python PYTHON`). README.md beside this
file says what each case and each limit is and how to read the figures.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import stores
from bench import Bench, add_options
from limits import KIB, LimitsUnavailable, Work, build, end_with_parent, one_piece, process_clock
from pair import Pair
from peers import STORE_SAME_HOST, STORE_TCP
from table import HEADER, Row, lines, machine, write_json
from turns import Contender, Figure, Turns, Value, in_turns, until_steady

import kvferry

CALLS = 1000
KEYS = 1_000_000
SHAPES = {"256x512KiB": (256, 512 * KIB), "1024x32KiB": (1024, 32 * KIB)}
REACH = {  # of memcpy by map and cma, of one raw socket by socket
    ("map", "load", "256x512KiB"): 0.90,
    ("map", "save", "256x512KiB"): 0.85,
    ("map", "load", "1024x32KiB"): 0.65,
    ("map", "save", "1024x32KiB"): 0.55,
    ("map", "load", "256x512KiB-checksum"): 0.65,
    ("map", "save", "256x512KiB-checksum"): 0.65,
    ("socket", "load", "256x512KiB"): 0.90,
    ("socket", "save", "256x512KiB"): 0.75,
    ("socket", "load", "1024x32KiB"): 0.90,
    ("socket", "save", "1024x32KiB"): 0.75,
}


class Node:
    """A pool node, ended with the block."""

    def __init__(self, memory: str, *, tcp: bool = False) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-benchmark-")
        where = "127.0.0.1:0" if tcp else f"unix:{self._folder.name}/pool.sock"
        command = [sys.executable, "-m", "kvferry.pool.program", "--listen", where, "--memory", memory]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        # "kvferry pool node at ADDRESS: 1.00 GiB ..."
        said = self._process.stdout.readline() if select.select([self._process.stdout], [], [], 20)[0] else ""
        if not said:
            self.__exit__()
            raise RuntimeError("the pool node did not start")
        self.address = said.removeprefix("kvferry pool node at ").partition(": ")[0]

    def anonymous_bytes(self) -> int:
        words = Path(f"/proc/{self.pid}/status").read_text().split("RssAnon:")[1].split()
        return int(words[0]) * 1024

    def cpu_s(self) -> float:
        return time.clock_gettime(process_clock(self.pid))

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(10)
        self._folder.cleanup()


@dataclass(frozen=True, slots=True)
class Batch:
    """Values one behind the other in ``memory``, and their keys."""

    keys: list[bytes]
    memory: Any
    buffers: kvferry.Buffers

    @classmethod
    def of(cls, count: int, size: int, seed: int = 1) -> Batch:
        memory = np.random.default_rng(seed).integers(0, 256, count * size, dtype=np.uint8)
        keys = [f"{seed}:{size}:{i}".encode() for i in range(count)]
        return cls(keys, memory, cls.where(memory, count, size))

    @staticmethod
    def where(memory: Any, count: int, size: int) -> kvferry.Buffers:
        return kvferry.Buffers(
            memory.ctypes.data + size * np.arange(count), np.full(count, size), np.ones(count, np.int64)
        )


def moved(bench: Bench, verb: str, shape: str, transport: str) -> Iterator[Row]:
    plain, _, verified = shape.partition("-")
    count, size = SHAPES[plain]
    total = count * size
    batch = Batch.of(count, size)
    into = np.empty_like(batch.memory)
    there = Batch.where(into, count, size)
    way = ("socket",) if transport == "socket" else ("map", "cma", "socket")
    work = one_piece(total)
    limit = "tcp" if transport == "socket" else "memcpy"
    with (
        Pair(bench.setup(work, "map" if limit == "memcpy" else "socket")) as pair,
        Node("1GiB", tcp=transport == "socket") as node,
        kvferry.Pool.connect(node.address, transports=way, checksum="always" if verified else "auto") as pool,
        ExitStack() as stack,
    ):

        def save() -> Value:
            pool.clear()
            return timed(lambda: pool.save(batch.keys, buffers=batch.buffers, timeout_ms=20_000))

        def load() -> Value:
            into.fill(0)
            value = timed(lambda: pool.load(batch.keys, buffers=there, timeout_ms=20_000))
            assert np.array_equal(into, batch.memory), "a load brought other bytes than were saved"
            return value

        def timed(call: Callable[[], kvferry.Outcome]) -> Value:
            cpu, began = time.process_time() + node.cpu_s(), time.perf_counter()
            outcome = call()
            seconds = time.perf_counter() - began
            assert outcome.prefix == count, outcome
            return Value(total / seconds / 1e9, (time.process_time() + node.cpu_s() - cpu) / (total / 1e9))

        def baseline(threads: int, name: str = limit) -> Callable[[], Value]:
            return lambda: Value(total / pair.limit(name, threads).seconds / 1e9)

        save()
        load()
        contenders = [Contender("kvferry", save if verb == "save" else load)]
        if limit == "memcpy":
            contenders.append(Contender(f"memcpy with {bench.threads} threads", baseline(bench.threads)))
            if verb == "save":  # as its node reads memory that is its caller's own
                raw = baseline(bench.threads, "attach")
                contenders.append(Contender(f"process_vm_readv with {bench.threads} threads", raw))
        if not verified:
            ways = STORE_TCP if transport == "socket" else STORE_SAME_HOST
            contenders += stores.batches(stores.opened(bench, stack, ways, one_piece(total, size), count), verb, count)
        turns = turned(bench, Contender("limit", baseline(1)), contenders)
        if verb == "save":
            load()  # the bytes are right
        reach = REACH[transport, verb, shape]
        name = {"memcpy": "memcpy with one thread", "tcp": "one raw TCP connection"}[limit]
        yield from rows(f"{verb}-{shape}", transport, "GB/s", turns, name, reach)


def scattered_load(bench: Bench) -> Iterator[Row]:
    """64 blocks of 128 tensors (64 layers of K and V), 8 KiB each: 8,192 pieces."""
    tensors = [np.random.default_rng(t).integers(0, 256, (128, 8 * KIB), dtype=np.uint8) for t in range(128)]
    total = 64 * 128 * 8 * KIB
    keys = [f"block {i}".encode() for i in range(64)]
    with (
        Pair(bench.setup(one_piece(total), "map")) as pair,
        Node("1GiB") as node,
        kvferry.Pool.connect(node.address) as pool,
        ExitStack() as stack,
    ):
        pool.register(tensors)
        assert pool.save(keys, blocks=range(64), timeout_ms=20_000).prefix == 64
        table = np.random.default_rng(0).permutation(np.arange(64, 128))

        def load() -> Value:
            for tensor in tensors:
                tensor[64:] = 0
            began = time.perf_counter()
            outcome = pool.load(keys, blocks=table, timeout_ms=20_000)
            seconds = time.perf_counter() - began
            assert outcome.prefix == 64, outcome
            assert all(np.array_equal(tensor[table], tensor[:64]) for tensor in tensors)
            return Value(total / seconds / 1e9)

        baseline = Contender("limit", lambda: Value(total / pair.limit("memcpy", 1).seconds / 1e9))
        load()
        peers = stores.opened(bench, stack, STORE_SAME_HOST, one_piece(total, 8 * KIB), 64)
        turns = turned(bench, baseline, [Contender("kvferry", load), *stores.batches(peers, "load", 64)])
        yield from rows("load-64x128x8KiB", "map", "GB/s", turns, "memcpy with one thread", 0.5)


def small(bench: Bench) -> Iterator[Row]:
    work = Work(64 * KIB, 64 * KIB, 1024, 64)
    value, into = np.random.default_rng(3).integers(0, 256, 64 * KIB, dtype=np.uint8), np.empty(64 * KIB, np.uint8)
    with (
        Pair(bench.setup(work, "map")) as pair,
        Node("1GiB") as node,
        kvferry.Pool.connect(node.address) as pool,
        ExitStack() as stack,
    ):
        thousand = [f"key {i:028d}".encode() for i in range(1000)]
        tiny = np.zeros(64 * 1000, np.uint8)
        pool.save(thousand, buffers=Batch.where(tiny, 1000, 64), timeout_ms=20_000)
        pool.save([b"one"], buffers=[value])

        def p50(call: Callable[[], kvferry.Outcome], right: int, calls: int = CALLS) -> Value:
            us = np.empty(calls)
            for i in range(calls):
                began = time.perf_counter()
                outcome = call()
                us[i] = (time.perf_counter() - began) * 1e6
                assert outcome.prefix == right, outcome
            return points(us)

        def raw(look: bool) -> Callable[[], Value]:
            return lambda: Value(float(np.median(pair.puller.call("ask_latencies", "unix", 64, CALLS, look))))

        def load() -> Value:
            into.fill(0)
            seen = p50(lambda: pool.load([b"one"], buffers=[into]), 1)
            assert np.array_equal(into, value)
            return seen

        def rate(us: Value) -> Value:
            return Value(1000 / us.value)

        copy = float(np.median(pair.puller.call("copy_latencies", CALLS)))
        limit = Contender("limit", raw(False))
        peers = stores.opened(bench, stack, STORE_SAME_HOST, one_piece(64 * KIB, 64 * KIB), 1)
        for name, contender, asked, most in (
            ("exists-1", lambda: p50(lambda: pool.exists([b"one"]), 1), f"exist 1 {CALLS}", 1.5),
            ("load-1x64KiB", load, f"load_one {CALLS}", 2.0),
        ):
            others = [Contender("kvferry", contender), Contender("looking", raw(True))]
            turns = turned(bench, limit, others + stores.latencies(peers, asked, points), higher=False)
            what, loads = "raw Unix round trip of 64 B", name.startswith("load")
            yield from rows(name, "map", "us (p50)", turns, what, most, copy if loads else 0.0, as_fast=loads)
        ours = Contender("kvferry", lambda: rate(p50(lambda: pool.exists(thousand), 1000, 200)))
        turns = turned(bench, ours, stores.latencies(peers, "exist 1000 200", lambda us: rate(points(us))))
        yield Row(
            "exists-1000", "-", "million keys/s", turns.baseline, target=">= 3", met=turns.baseline.median >= 3,
            notes=beside_it(turns, turns.baseline), others=turns.others, steady=turns.steady, attempts=turns.attempts,
        )  # fmt: skip
        yield from stores.against_mooncake("exists-1000", "-", "million keys/s", turns.baseline, turns)


def clients(bench: Bench) -> Iterator[Row]:
    """Four processes load at once; held against memcpy by as many threads as the machine has cores."""
    count, size = SHAPES["256x512KiB"]
    total, rounds = count * size, max(3, bench.rounds)
    batch = Batch.of(count, size)
    with (
        Pair(bench.setup(one_piece(total), "map")) as pair,
        Node("1GiB") as node,
        kvferry.Pool.connect(node.address) as pool,
    ):
        assert pool.save(batch.keys, buffers=batch.buffers, timeout_ms=20_000).prefix == count
        code = "import sys; sys.path.insert(0, sys.argv[1]); import pool; pool.client(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))"
        command = [sys.executable, "-c", code, str(Path(__file__).parent), node.address, str(count), str(size)]
        running = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
        ]
        try:
            for process in running:
                assert process.stdout.readline() == "ready\n"  # type: ignore[union-attr]

            def together() -> Value:
                began = time.perf_counter()
                for process in running:
                    process.stdin.write("go\n")  # type: ignore[union-attr]
                    process.stdin.flush()  # type: ignore[union-attr]
                for process in running:
                    assert process.stdout.readline() == "done\n"  # type: ignore[union-attr]
                return Value(4 * total / (time.perf_counter() - began) / 1e9)

            baseline = Contender("limit", lambda: Value(total / pair.limit("memcpy", bench.threads).seconds / 1e9))
            together()
            turns = until_steady(lambda: in_turns(baseline, [Contender("kvferry", together)], rounds), bench.attempts)
            name = f"memcpy with {bench.threads} threads"
            yield from rows("load-4-clients", "map", "GB/s", turns, name, 0.9)
        finally:
            for process in running:
                process.stdin.close()  # type: ignore[union-attr]
                process.wait(20)


def client(address: str, count: int, size: int) -> None:
    """One of the four: loads at each line that comes, and says when the bytes are there and right."""
    batch = Batch.of(count, size)
    into = np.zeros_like(batch.memory)
    there = Batch.where(into, count, size)
    with kvferry.Pool.connect(address) as pool:
        assert pool.load(batch.keys, buffers=there, timeout_ms=20_000).prefix == count
        assert np.array_equal(into, batch.memory)
        print("ready", flush=True)
        for _ in sys.stdin:
            assert pool.load(batch.keys, buffers=there, timeout_ms=20_000).prefix == count
            print("done", flush=True)
        assert np.array_equal(into, batch.memory)


def beside(bench: Bench) -> Iterator[Row]:
    with Node("1GiB") as node, kvferry.Pool.connect(node.address) as pool:
        pool.exists([b"x"])
        time.sleep(1)
        before = node.cpu_s()
        time.sleep(bench.idle_s)
        share = (node.cpu_s() - before) / bench.idle_s * 100
        yield absolute("idle-node", "-", "% of a core", share, "<= 0.5", share <= 0.5)
        at_first = node.anonymous_bytes()
        at_a_time, memory = 50_000, np.zeros(50_000 * 64, np.uint8)
        where = Batch.where(memory, at_a_time, 64)
        for begin in range(0, KEYS, at_a_time):
            keys = [f"{i:032d}".encode() for i in range(begin, begin + at_a_time)]
            saved = pool.save(keys, buffers=where, timeout_ms=60_000)
            assert saved.prefix == at_a_time, saved
        each = (node.anonymous_bytes() - at_first) / KEYS - 32
        yield absolute("bytes-per-key", "-", "bytes beside the key", each, "<= 400", each <= 400)


def chained_keys(bench: Bench) -> Iterator[Row]:
    tokens = np.random.default_rng(5).integers(0, 49_152, 1_000_000)
    rates = []
    for _ in range(bench.rounds):
        began = time.perf_counter()
        keys = kvferry.prefix_keys(tokens, block_tokens=16)
        rates.append(1 / (time.perf_counter() - began))
        assert len(keys) == 1_000_000 // 16
    figure = Figure(rates)
    yield Row("prefix-keys", "-", "million tokens/s", figure, target=">= 2", met=figure.median >= 2)


def turned(bench: Bench, baseline: Contender, others: list[Contender], *, higher: bool = True) -> Turns:
    return until_steady(lambda: in_turns(baseline, others, bench.rounds, higher_is_better=higher), bench.attempts)


def points(us: Any) -> Value:
    return Value(float(np.median(us)), p99=float(np.percentile(us, 99)))


def rows(
    case: str,
    transport: str,
    unit: str,
    turns: Turns,
    limit_name: str,
    reach: float,
    taken_off: float = 0.0,
    *,
    as_fast: bool = False,
) -> Iterator[Row]:
    """Ours against the limit, and against Mooncake where that took part; ``as_fast`` judges the second one too."""
    mine, limit = turns.others.pop("kvferry"), turns.baseline
    ratio = (mine.median - taken_off) / limit.median
    notes = beside_it(turns, mine)
    if taken_off:
        notes.append(f"the bare copy of the block, {taken_off:.1f} us, is taken off first")
    least = limit.higher_is_better
    target = f"{'>=' if least else '<='} {reach:.2f} of the limit"
    met = ratio >= reach if least else ratio <= reach
    yield Row(
        case, transport, unit, mine, limit_name, limit, ratio, target, met, notes, turns.others, turns.steady,
        turns.attempts,
    )  # fmt: skip
    yield from stores.against_mooncake(case, transport, unit, mine, turns, as_fast=as_fast)


def beside_it(turns: Turns, mine: Figure) -> list[str]:
    return [
        f"{name}: {figure.median:.2f} / {figure.best:.2f}; kvferry's is {mine.median / figure.median:.2f} times that"
        for name, figure in turns.others.items()
        if figure.values
    ]


def absolute(case: str, transport: str, unit: str, value: float, target: str, met: bool) -> Row:
    return Row(case, transport, unit, Figure([value]), target=target, met=met)


CASES: dict[str, Callable[[Bench], Iterator[Row]]] = {
    **{
        f"{verb}-{shape}-{transport}": (lambda b, v=verb, s=shape, t=transport: moved(b, v, s, t))
        for transport, verb, shape in REACH
    },
    "load-64x128x8KiB": scattered_load,
    "small": small,
    "load-4-clients": clients,
    "prefix-keys": chained_keys,
    "beside": beside,
}


@contextmanager
def prepared(options: argparse.Namespace) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="kvferry-benchmark-") as folder:
        library, spinner = build(Path(folder))
        threads = min(4, len(os.sched_getaffinity(0)))
        pythons = {"mooncake": options.mooncake_python} if options.mooncake_python else {}
        yield Bench(library, spinner, False, options.rounds, options.attempts, threads, options.idle_s, pythons)


def main() -> int:
    parser = argparse.ArgumentParser(description="the pool against the limits of this machine")
    add_options(parser)
    parser.add_argument("--mooncake-python", metavar="PYTHON", help="a Python in which Mooncake's wheel is installed")
    options = parser.parse_args()
    wanted = [name for name in CASES if not options.case or any(fnmatch.fnmatch(name, p) for p in options.case)]
    if options.list or not wanted:
        print("\n".join(wanted or CASES))
        return 0 if wanted else 2
    began = time.monotonic()
    rows: list[Row] = []
    try:
        with prepared(options) as bench:
            print("  ".join(f"{name}: {value}" for name, value in machine().items()), HEADER, sep="\n\n", flush=True)
            for name in wanted:
                for each in CASES[name](bench):
                    rows.append(each)
                    print(lines(each), flush=True)
                if options.json:
                    write_json(options.json, rows, {"rounds": bench.rounds, "attempts": bench.attempts})
    except LimitsUnavailable as error:
        print(error, file=sys.stderr)
        return 2
    judged = [each for each in rows if each.met is not None]
    print(f"\n{sum(bool(each.met) for each in judged)} of {len(judged)} targets met, {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
