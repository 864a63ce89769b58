"""Real pool nodes for tests: processes behind a Unix socket, and values whose bytes say whose they are."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PATIENCE_S = 15.0
CONTROL_BYTES = 1 << 20  # a node's shared memory that is smaller than this holds no values

Nodes = Callable[..., "NodeProcess"]


class NodeProcess:
    """``python -m kvferry.pool.program`` at ``address``; `start` runs it, and again after it has ended."""

    def __init__(self, address: str, memory: str = "64MiB", *options: str) -> None:
        self.address = address
        self.command = [sys.executable, "-m", "kvferry.pool.program", "--listen", address, "--memory", memory, *options]
        self.process: subprocess.Popen[str] | None = None
        self.line = ""
        self.start()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        self.line = self.process.stdout.readline() if ready else ""
        if "pool node at" not in self.line:
            self.process.kill()
            raise AssertionError(f"the node did not start: {self.line} {self.process.communicate()[1]}")
        if self.address.endswith(":0"):
            self.address = self.command[4] = self.line.split(" at ")[1].split(": ")[0]

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(PATIENCE_S)

    def stop(self) -> int:
        """Its exit status after SIGTERM."""
        assert self.process is not None
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGTERM)
        _, words = self.process.communicate(timeout=PATIENCE_S)
        if words:
            print(words, file=sys.stderr)
        return self.process.returncode


def spoil(pid: int, change: Callable[["npt.NDArray[np.uint8]"], int]) -> int:
    """Has ``change`` alter the bytes of a node's values, segment by segment; how many places it says that it has altered."""
    altered = 0
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:" not in line or " rw-s " not in line:
                continue
            first, last = (int(word, 16) for word in line.split()[0].split("-"))
            if last - first < CONTROL_BYTES:
                continue
            memory.seek(first)
            segment = np.frombuffer(bytearray(memory.read(last - first)), np.uint8)
            places = change(segment)
            if places:
                memory.seek(first)
                memory.write(segment.tobytes())
            altered += places
    return altered


def names(count: int, prefix: str = "key") -> list[bytes]:
    return [f"{prefix} {i}".encode() for i in range(count)]


def block_bytes_of(seed: int, count: int, size: int) -> npt.NDArray[np.uint8]:
    """``count`` values of ``size`` bytes, each unlike every other."""
    return np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)


def until(condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    end = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.01)
    return value
