"""Measures the C++ API (libllm_datadist.so) beside the machine's own limit and kvferry for Python, in one run and in turns.

`python benchmarks/cpp.py [--rounds N] [--calls N] [--json FILE]`

One owner in C++; pullers in C++ (cpp_driver.cpp) and in Python take turns. All bytes are compared after each turn. The core's own
prepared pulls are timed beside the API's calls: that takes the tree in which the core was built.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import kvferry
from kvferry import cli

HERE = Path(__file__).resolve().parent
BIG = 256 << 20
RAW = "raw process_vm_readv"
SMALL = {  # what the driver is asked for, and how much more than the raw call it may take
    RAW: ("raw", None),
    "prepared, registered (cma)": ("prepared 1", 1.0),
    "prepared, allocated (map)": ("prepared 2", 1.0),
    "kept, registered (cma)": ("pull 1", 2.0),
    "kept, allocated (map)": ("pull 2", 2.0),
}
LEAST_OF_PYTHON = 0.95
START_S = 60


class Driver:
    """A process of cpp_driver.cpp: one line in, one line out."""

    def __init__(self, program: Path, *arguments: str) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([program, *arguments], **pipes)  # type: ignore[call-overload]
        self.first = self._read()

    def ask(self, line: str) -> list[int]:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return [int(word) for word in self._read().split()]

    def _read(self) -> str:
        line = str(self._process.stdout.readline())
        if not line:
            raise SystemExit(f"the driver ended with {self._process.wait(START_S)}")
        return line.strip()

    def close(self) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(START_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


class Python:
    """The same row of 256 MiB, pulled by kvferry for Python from the same owner."""

    def __init__(self, port: int, transports: str) -> None:
        self.node = kvferry.Node(transports=transports.split(","))
        self.link = self.node.link(f"127.0.0.1:{port}")
        pages = mmap.mmap(-1, BIG, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)  # as the driver's
        self.memory = np.frombuffer(pages, np.uint8).reshape(1, BIG)
        self.mine = self.node.register("mine", [self.memory], layout="rows")
        self.right = {cache: _made(cache) for cache in (3, 4)}

    def bulk(self, cache: int) -> float:
        self.memory.fill(0xA5)
        began = time.perf_counter_ns()
        self.link.pull(cache, into=self.mine, row=0, timeout_ms=20_000)
        took = time.perf_counter_ns() - began
        if not np.array_equal(self.memory[0].view(np.uint64), self.right[cache]):
            raise SystemExit("wrong bytes")
        return BIG / took


def _made(cache: int) -> np.ndarray:
    words = np.arange(BIG // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(cache)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return words ^ (words >> np.uint64(27))


def main() -> int:
    options = arguments()
    folder = Path(kvferry._core.__file__).parent / "cpp"
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    core = HERE.parent / ".build" / str(sys.implementation.cache_tag) / "libkvferry_core.a"
    if compiler is None or not folder.is_dir() or not core.exists():
        print(
            "it takes a C++ compiler, a kvferry with its C++ library, and the tree that `make` built it in",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="kvferry-benchmark-") as temporary, ExitStack() as stack:
        program = Path(temporary) / "cpp_driver"
        headers, library = folder / cli.CPP_FOLDERS["include-dir"][0], folder / "lib" / "kvferry"
        flags = ["-std=c++20", "-O2", f"-I{headers}", f"-I{HERE.parent / 'core'}", "-fvisibility=hidden", "-pthread"]
        libraries = [str(core), f"-L{library}", f"-Wl,-rpath,{library}", "-lllm_datadist"]
        subprocess.run([compiler, *flags, HERE / "cpp_driver.cpp", "-o", program, *libraries], check=True)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        owner = Driver(program, "owner", str(port))
        stack.callback(owner.close)
        caches = owner.first.split()

        def puller(transports: str) -> Driver:
            driver = Driver(program, "puller", str(port), transports, *caches)
            stack.callback(driver.close)
            return driver

        fast = puller("map,cma,socket")
        small = measured_small(fast, options)
        fast.close()
        bulk = measured_bulk(puller, port, options)
    report(small, bulk)
    if options.json:
        options.json.write_text(json.dumps({"us": small, "gb_per_s": bulk}, indent=1))
    return 0


def measured_small(driver: Driver, options: argparse.Namespace) -> dict[str, list[float]]:
    """p50 in µs of each round, of one block of 4 KiB out of 64 in turn."""
    rounds: dict[str, list[float]] = {name: [] for name in SMALL}
    for words, _ in SMALL.values():
        driver.ask(f"{words} {options.calls}")
    for _ in range(options.rounds):
        for name, (words, _) in SMALL.items():
            rounds[name].append(driver.ask(f"{words} {options.calls}")[0] / 1000)
    return rounds


def measured_bulk(puller: Callable[[str], Driver], port: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """GB/s of each round, of a row of 256 MiB."""
    rounds: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        rounds.setdefault(name, []).append(value)

    for transport, cache, transports in (
        ("cma", 3, "map,cma,socket"),
        ("map", 4, "map,cma,socket"),
        ("socket", 3, "socket"),
    ):
        driver, python = puller(transports), Python(port, transports)
        driver.ask(f"bulk {cache}")
        python.bulk(cache)
        doors = {
            "C++": lambda driver=driver, cache=cache: BIG / driver.ask(f"bulk {cache}")[0],
            "Python": lambda python=python, cache=cache: python.bulk(cache),
        }
        for turn in range(options.rounds):
            # Each comes first as often as the other: what one leaves behind in caches and buffers the next one finds.
            for door in sorted(doors, reverse=turn % 2 == 1):
                add(f"{transport}, {door}", doors[door]())
            if transport == "cma":
                add("raw process_vm_readv, one thread", BIG / driver.ask("rawbulk")[0])
        driver.close()
        python.node.close()
    return rounds


def report(small: dict[str, list[float]], bulk: dict[str, list[float]]) -> None:
    raw = statistics.median(small[RAW])
    print("4 KiB, p50 in us: median / best of the rounds")
    for name, values in small.items():
        line = f"  {name:<34} {statistics.median(values):6.2f} / {min(values):.2f}"
        if most := SMALL[name][1]:
            over = statistics.median(values) - raw
            line += f"   raw {over:+.2f}, target <= raw {most:+.1f}: {'met' if over <= most else 'NOT MET'}"
        print(line)
    print("256 MiB, GB/s: median / best of the rounds")
    for name, values in bulk.items():
        line = f"  {name:<34} {statistics.median(values):6.2f} / {max(values):.2f}"
        if name.endswith("C++"):
            pairs = zip(values, bulk[name.replace("C++", "Python")], strict=True)
            ratio = statistics.median(ours / others for ours, others in pairs)  # of each turn: the machine drifts
            line += f"   {ratio:.2f} times Python's, target >= {LEAST_OF_PYTHON}: {'met' if ratio >= LEAST_OF_PYTHON else 'NOT MET'}"
        print(line)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The C++ API against the limit of this machine, and against Python")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=5000, help="of one block, in each round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every single value as well")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
