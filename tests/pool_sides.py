"""Pool nodes and clients that tests of failures strike: in processes of their own, and looked into from outside.

A value is a row of 64-bit words: each says the key's number, and the version that was saved. Whoever reads a value thus
knows whose it is, whether it is whole, and whether anybody has ever saved it.
"""

import contextlib
import gc
import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvferry
from kvferry.pool import messages
from kvferry.pool.node import PoolNode

Words = npt.NDArray[np.uint64]

TRANSPORTS = {"unix": ("map", "cma", "socket"), "socket": ("socket",)}
VERSION_BITS = 16


def value_of(number: int, words: int, version: int = 0) -> Words:
    return np.full(words, word_of(number, version), np.uint64)


def word_of(number: int, version: int = 0) -> int:
    return (number + 1 << VERSION_BITS) + version


def key_of(number: int) -> bytes:
    return b"number %d" % number


def left_behind() -> "dict[str, int]":
    """What of this process grows when something is forgotten."""
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "KiB": next(
            int(line.split()[1])
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith("RssAnon:")
        ),
    }


class NodeSide:
    """A pool node, its loop on a thread."""

    def __init__(self, listen: str, memory_bytes: int, options: "dict[str, Any] | None" = None) -> None:
        self.node = PoolNode(listen, memory_bytes, **(options or {}))
        self.thread = threading.Thread(target=self.node.run, daemon=True)
        self.thread.start()

    def address(self) -> str:
        return self.node.address

    def counts(self) -> "dict[str, int]":
        """What is held for clients; the loop changes it meanwhile."""
        assert self.thread.is_alive()
        seen, core = self.node._store.statistics(), self.node._node.statistics()
        return {
            "pending": seen.pending,
            "leases": seen.leases,
            "keys": seen.keys,
            "taken_bytes": seen.taken_bytes,
            "evictions": seen.evictions,
            "held": len(self.node._held) + len(self.node._numbers) + len(self.node._kernel_held),
            "windows": core.windows,
            "links": core.links,
            "slots_open": core.slots_open - core.caches,
        }

    def left_behind(self) -> "dict[str, int]":
        return left_behind()

    def close(self) -> None:
        self.node.close()
        self.thread.join(10)
        assert not self.thread.is_alive()


class ClientSide:
    """A pool object, and ``blocks`` blocks of memory that the test's process reads from outside."""

    def __init__(self, address: str, over: str, blocks: int, words: int) -> None:
        self.pool = kvferry.Pool.connect(address, transports=TRANSPORTS[over], namespace="test")
        self.memory = np.zeros((blocks, words), np.uint64)
        self.words = words
        self.future: Any = None

    def where(self) -> int:
        return int(self.memory.ctypes.data)

    def save(self, first: int, count: int, timeout_ms: int = 20_000) -> "dict[str, int]":
        """The values of ``count`` keys from ``first`` on, a few at a time."""
        total: dict[str, int] = {}
        for at in range(first, first + count, len(self.memory)):
            some = range(at, min(at + len(self.memory), first + count))
            for row, number in zip(self.memory, some, strict=False):
                row[:] = word_of(number)
            rows = [[row] for row in self.memory[: len(some)]]
            outcome = self.pool.save([key_of(number) for number in some], buffers=rows, timeout_ms=timeout_ms)
            for word, times in outcome.reasons.items():
                total[word] = total.get(word, 0) + times
        return total

    def begin(self, verb: str, first: int, count: int, timeout_ms: int) -> None:
        """One save or load into or out of the first ``count`` blocks, on a thread."""
        keys, rows = [key_of(number) for number in range(first, first + count)], [[row] for row in self.memory[:count]]
        for row, number in zip(self.memory, range(first, first + count), strict=False):
            row[:] = word_of(number) if verb == "save" else 0
        start = self.pool.save_async if verb == "save" else self.pool.load_async
        self.future = start(keys, buffers=rows, timeout_ms=timeout_ms)

    def ended(self) -> bool:
        return bool(self.future.done())

    def outcome(self) -> "list[str]":
        return list(self.future.wait(20_000).outcomes)

    def check(self, numbers: "list[int]") -> "dict[str, int]":
        """Loads each and looks at it; how often each outcome came up."""
        total: dict[str, int] = {}
        for number in numbers:
            into = np.zeros(self.words, np.uint64)
            (word,) = self.pool.load([key_of(number)], buffers=[into], timeout_ms=2000).outcomes
            assert not into.any() if word != "hit" else (into == word_of(number)).all(), (number, word, into)
            total[word] = total.get(word, 0) + 1
        return total

    def left_behind(self) -> "dict[str, int]":
        return left_behind()

    def churn(self, seed: int, keys: int, threads: int, seconds: float) -> "dict[str, int]":
        """Threads that save, load, look and remove at random; every value that comes back is one that was saved under its
        key, and nothing beside it changes. How often each outcome came up."""
        until, lock = time.monotonic() + seconds, threading.Lock()
        total: dict[str, int] = {}
        problems: list[str] = []

        def work(number: int) -> None:
            dice = np.random.default_rng([seed, number])
            memory = np.zeros((40, self.words + 8), np.uint64)
            while time.monotonic() < until and not problems:
                chosen = dice.choice(keys, dice.integers(1, 21), replace=False).tolist()
                words = [self._size_of(number) for number in chosen]
                memory[:] = 7
                rows = dice.permutation(40)[: len(chosen)].tolist()
                spans = [self._cut(dice, memory[row], size) for row, size in zip(rows, words, strict=True)]
                names = [key_of(number) for number in chosen]
                verb = dice.choice(["save", "load", "exists", "remove"], p=[0.4, 0.5, 0.05, 0.05])
                if verb == "save":
                    version = int(dice.integers(1, 1 << VERSION_BITS))
                    for row, size, number in zip(rows, words, chosen, strict=True):
                        memory[row, :size] = word_of(number, version)
                    before = memory.copy()
                    ttl = int(dice.integers(1, 2000)) if dice.random() < 0.2 else None
                    outcome = self.pool.save(names, buffers=spans, timeout_ms=20_000, ttl_ms=ttl)
                    words_of = outcome.outcomes
                    if not (memory == before).all():
                        problems.append(f"a save has changed {chosen}")
                elif verb == "load":
                    limit = 20_000 if dice.random() < 0.8 else int(dice.integers(0, 5))
                    words_of = self.pool.load(names, buffers=spans, timeout_ms=limit).outcomes
                    for row, size, number, word in zip(rows, words, chosen, words_of, strict=True):
                        if word == "hit" and not _is_whole(memory[row, :size], number):
                            problems.append(f"{number} is {memory[row, :size]}")
                        if not (memory[row, size:] == 7).all():
                            problems.append(f"bytes behind {number} have changed")
                    others = np.setdiff1d(np.arange(40), rows)
                    if not (memory[others] == 7).all():
                        problems.append("blocks that were not named have changed")
                elif verb == "exists":
                    words_of = self.pool.exists(names, timeout_ms=20_000).outcomes
                else:
                    words_of = ["removed now"] * self.pool.remove(names, timeout_ms=20_000)
                with lock:
                    for word in words_of:
                        total[f"{verb} {word}"] = total.get(f"{verb} {word}", 0) + 1

        def guarded(number: int) -> None:
            try:
                work(number)
            except BaseException as problem:  # noqa: BLE001 - the test's own process raises it
                problems.append(repr(problem))

        workers = [threading.Thread(target=guarded, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(seconds + 40)
        assert not problems, problems[0]
        assert not any(worker.is_alive() for worker in workers)
        return total

    def _size_of(self, number: int) -> int:
        return [1, 9, self.words // 3, self.words][number % 4]

    @staticmethod
    def _cut(dice: Any, row: Words, size: int) -> "list[tuple[int, int]]":
        """The first ``size`` words of a row as one to three segments."""
        cuts = sorted({0, size, *dice.integers(0, size + 1, dice.integers(0, 3)).tolist()})
        at = int(row.ctypes.data)
        return [(at + 8 * begin, 8 * (end - begin)) for begin, end in itertools.pairwise(cuts)]


def _is_whole(words: Words, number: int) -> bool:
    return bool((words == words[0]).all()) and int(words[0]) >> VERSION_BITS == number + 1


class Raw:
    """Says to a pool node what no client would: messages over a bare link."""

    def __init__(self, address: str) -> None:
        self.node = kvferry.Node()
        self.link = self.node.link(address, 10_000)
        self.number = 0  # of the last reservation or lease

    def space(self, namespace: str = "test", fingerprint: bytes = b"") -> int:
        return int(self.ask(messages.Open(messages.VERSION, namespace, b"", fingerprint, None)).space)

    def ask(self, request: Any, timeout_ms: int = 10_000) -> Any:
        return messages.decode_answer(self.link.call(messages.encode(request), timeout_ms))

    def reserve(self, space: int, keys: "list[bytes]", size_bytes: int, left_ms: int) -> Any:
        sizes = np.full(len(keys), size_bytes, np.uint64).tobytes()
        self.number += 1
        return self.ask(messages.Reserve(self.number, space, keys, sizes, None, None, left_ms, False, []))

    def lookup(self, space: int, keys: "list[bytes]", size_bytes: int, left_ms: int) -> Any:
        sizes = np.full(len(keys), size_bytes, np.uint64).tobytes()
        self.number += 1
        return self.ask(messages.Lookup(self.number, space, keys, sizes, left_ms, []))

    def release(self, number: int) -> None:
        self.link.send(messages.encode(messages.Release([number])))

    def close(self) -> None:
        with contextlib.suppress(kvferry.KvferryError):
            self.link.unlink(force=True)
        self.node.close()


class RawSide(Raw):
    """The same in a process of its own: it takes places and leases and does nothing more."""

    def hold(
        self, reserved: "list[bytes]", leased: "list[bytes]", size_bytes: int, left_ms: int
    ) -> "tuple[bytes, bytes]":
        space = self.space()
        places = self.reserve(space, reserved, size_bytes, left_ms) if reserved else None
        lease = self.lookup(space, leased, size_bytes, left_ms) if leased else None
        return places.codes if places else b"", lease.codes if lease else b""
