"""An owner process and a puller process, started for one measurement and ended with it; and what can be read of a
process from outside: CPU time, threads, anonymous memory."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import networks
from exchange import Offer, Sample, Setup
from limits import process_clock

ANSWER_S = 120.0


class WorkerFailed(Exception):
    """A worker raised or ended; the text holds its traceback."""


class Worker:
    """One worker process. It answers once when it runs; `start` makes its role, `call` runs a method of that."""

    def __init__(self, role: str, before: Sequence[str] = ()) -> None:
        self._role = role
        self._pipe, theirs = Pipe()
        script = Path(__file__).with_name("worker.py")
        command = [*before, sys.executable, str(script), role, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        self.pid = self._process.pid

    def start(self, *arguments: Any) -> None:
        self.call("start", *arguments)

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        self.send(name, *arguments, **options)
        return self.answer()

    def send(self, name: str, *arguments: Any, **options: Any) -> None:
        self._pipe.send((name, arguments, options))

    def answer(self, within_s: float = ANSWER_S) -> Any:
        if not self._pipe.poll(within_s):
            raise WorkerFailed(f"the {self._role} gave no answer in {within_s:.0f} s")
        try:
            good, answer = self._pipe.recv()
        except EOFError:
            raise WorkerFailed(f"the {self._role} ended, exit status {self._process.wait(5)}") from None
        if not good:
            raise WorkerFailed(f"the {self._role} raised:\n{answer}")
        return answer

    def close(self) -> None:
        self._pipe.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Pair:
    """Both processes, linked, with their raw connections beside the link."""

    def __init__(self, setup: Setup, *, raw: bool = True) -> None:
        self.setup = setup
        before = networks.ALONE if setup.apart else ()
        self.owner, self.puller = Worker("owner", before), Worker("puller", before)
        try:
            self._meet(raw)
        except BaseException:
            self.close()
            raise

    def _meet(self, raw: bool) -> None:
        for worker in (self.owner, self.puller):
            worker.answer()
        if self.setup.apart:
            networks.join(self.owner.pid, self.puller.pid)
        self.owner.start(self.setup)
        offer: Offer = self.owner.call("offer")
        self.puller.start(self.setup, offer)
        if raw:
            self.owner.send("answer_raw")
            self.puller.call("connect_raw")
            self.owner.answer()

    def pull(self) -> Sample:
        return self._round(lambda: self.puller.call("pull"))

    def push(self) -> Sample:
        return self._round(lambda: self.owner.call("push", self.puller.pid))

    def limit(self, name: str, threads: int = 1) -> Sample:
        return self._round(lambda: self.puller.call("limit", name, threads), in_one_piece=name == "tcp")

    def _round(self, timed_call: Any, in_one_piece: bool = False) -> Sample:
        self.puller.call("overwrite")
        sample: Sample = timed_call()
        self.puller.call("check", in_one_piece)
        return sample

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.puller.close()
        self.owner.close()


def place(pair: Pair, where: str) -> None:
    """Keep every thread of both processes on "one core", on "two cores" (a process each), or let them go "free"."""
    cores = sorted(os.sched_getaffinity(0))
    placements = {"one core": (cores[:1], cores[:1]), "two cores": (cores[:1], cores[-1:])}
    owner, puller = placements.get(where, (cores, cores))
    for worker, allowed in ((pair.owner, owner), (pair.puller, puller)):
        for thread in os.listdir(f"/proc/{worker.pid}/task"):
            os.sched_setaffinity(int(thread), allowed)


@contextmanager
def spinning_process(spinner: Path, seconds: float) -> Iterator[None]:
    """A C process that spins, in the place of the owner's Python; ended with the block."""
    process = subprocess.Popen([str(spinner), str(seconds)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def status_kib(pid: int, field_name: str) -> int:
    """A number of /proc/PID/status: RssAnon, VmPTE (KiB), Threads."""
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith(field_name + ":"):
                return int(line.split()[1])
    raise KeyError(field_name)


def segment_pages(pid: int) -> int:
    """How many pages the kernel has given to the segments (memfds) of that process's pool, whoever touched them."""
    found = {}
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            path = f"/proc/{pid}/fd/{descriptor}"
            if os.readlink(path).startswith("/memfd:kvferry-segment"):
                status = os.stat(path)
                found[status.st_ino] = status.st_blocks * 512 // mmap.PAGESIZE
    return sum(found.values())


@dataclass(slots=True)
class Idle:
    """One process over some seconds in which nobody asked it for anything."""

    percent_of_a_core: float
    threads: int


def idle(pids: list[int], seconds: float) -> list[Idle]:
    before = [time.clock_gettime_ns(process_clock(pid)) for pid in pids]
    began = time.perf_counter_ns()
    time.sleep(seconds)
    took = time.perf_counter_ns() - began
    used = [time.clock_gettime_ns(process_clock(pid)) - then for pid, then in zip(pids, before, strict=True)]
    return [Idle(100 * ns / took, status_kib(pid, "Threads")) for pid, ns in zip(pids, used, strict=True)]


class AnonymousMemory:
    """Watches RssAnon of some processes every few milliseconds while the block runs."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids
        self.looks = 0
        self.extra_mib: list[float] = []

    def __enter__(self) -> AnonymousMemory:
        self._before = [status_kib(pid, "RssAnon") for pid in self.pids]
        self._peak = list(self._before)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.003):
            self._look()

    def _look(self) -> None:
        self.looks += 1
        self._peak = [max(peak, status_kib(pid, "RssAnon")) for peak, pid in zip(self._peak, self.pids, strict=True)]

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._look()
        self.extra_mib = [(peak - then) / 1024 for peak, then in zip(self._peak, self._before, strict=True)]
