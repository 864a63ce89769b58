"""A memory cgroup for a process of a test, of whichever version this machine has."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")


class MemoryCgroup:
    def __init__(self, folder: Path, usage: str) -> None:
        self.folder, self._usage = folder, usage

    def take_in(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))

    def used_bytes(self) -> int:
        return int((self.folder / self._usage).read_text())

    def kills(self) -> int:
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(FileNotFoundError):
                words = dict(line.split() for line in (self.folder / name).read_text().splitlines())
                return int(words["oom_kill"])
        raise AssertionError("this kernel does not count whom it kills")


@contextlib.contextmanager
def memory_cgroup(size_bytes: int) -> Iterator[MemoryCgroup]:
    """Skips the test where none can be made. Whoever is in it must have ended, or left it, at the end."""
    second = (ROOT / "cgroup.controllers").exists()
    folder = (ROOT if second else ROOT / "memory") / f"kvferry-test-{os.getpid()}"
    limit, usage = ("memory.max", "memory.current") if second else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        try:
            (folder / limit).write_text(str(size_bytes))
        except OSError as error:
            pytest.skip(f"no memory cgroup can be given a limit here: {error}")
        yield MemoryCgroup(folder, usage)
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():  # who was not ended
            (folder.parent / "cgroup.procs").write_text(pid)
        folder.rmdir()
