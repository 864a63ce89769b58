"""A pool in this process's memory, for tests of the rules above it."""

import ctypes
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvferry


@dataclass(frozen=True)
class Outcome:
    outcomes: list[str]

    @property
    def ok(self) -> Any:
        return np.array([word in ("hit", "saved", "present") for word in self.outcomes])

    @property
    def reasons(self) -> "Counter[str]":
        return Counter(self.outcomes)


class Future(kvferry.Future[Any]):
    def __init__(self, work: Callable[[], Outcome]) -> None:
        self.work = work
        self.outcome: Outcome | None = None
        self.held = False  # a test keeps it from ending

    def done(self) -> bool:
        return not self.held

    def wait(self, timeout_ms: int | None = None) -> Outcome:
        while self.held:
            time.sleep(0.001)
        if self.outcome is None:
            self.outcome = self.work()
        return self.outcome


class FakePool:
    """What `kvferry.Pool` answers, from a dict. ``word``: what is answered instead of looking."""

    def __init__(self, values: "dict[bytes, bytes]") -> None:
        self.values = values
        self.calls: list[tuple[str, list[bytes], dict[str, Any]]] = []
        self.futures: list[Future] = []
        self.word = ""
        self.pending: set[bytes] = set()
        self.error: Exception | None = None
        self.hold = False

    def close(self) -> None:
        pass

    def exists(self, keys: "list[bytes]", **how: Any) -> Outcome:
        self.calls.append(("exists", keys, how))
        if self.error:
            raise self.error
        return Outcome([self.word or ("hit" if key in self.values else "never_saved") for key in keys])

    def load(self, keys: "list[bytes]", *, buffers: kvferry.Buffers, **how: Any) -> Outcome:
        return self._note("load", keys, buffers, how)

    def save(self, keys: "list[bytes]", *, buffers: kvferry.Buffers, **how: Any) -> Outcome:
        return self._note("save", keys, buffers, how)

    def load_async(self, keys: "list[bytes]", *, buffers: kvferry.Buffers, **how: Any) -> Future:
        return self._later("load", keys, buffers, how)

    def save_async(self, keys: "list[bytes]", *, buffers: kvferry.Buffers, **how: Any) -> Future:
        return self._later("save", keys, buffers, how)

    def _later(self, verb: str, keys: "list[bytes]", buffers: kvferry.Buffers, how: Any) -> Future:
        if isinstance(self.error, kvferry.InvalidArgument):
            raise self.error
        future = Future(lambda: self._note(verb, keys, buffers, how))
        future.held = self.hold
        self.futures.append(future)
        return future

    def _note(self, verb: str, keys: "list[bytes]", buffers: kvferry.Buffers, how: Any) -> Outcome:
        self.calls.append((verb, keys, how))
        if self.error:
            raise self.error
        assert len(buffers.addresses) == len(buffers.sizes) == sum(buffers.counts)
        words, at = [], 0
        for key, count in zip(keys, buffers.counts.tolist(), strict=True):
            spans = list(zip(buffers.addresses.tolist(), buffers.sizes.tolist(), strict=True))[at : at + count]
            at += count
            words.append(self._one(verb, key, spans))
        return Outcome(words)

    def _one(self, verb: str, key: bytes, spans: "list[tuple[int, int]]") -> str:
        if self.word:
            return self.word
        if verb == "save":
            if key in self.pending:
                return "pending"
            if key in self.values:
                return "present"
            self.values[key] = b"".join(ctypes.string_at(*span) for span in spans)
            return "saved"
        if key not in self.values:
            return "never_saved"
        value = self.values[key]
        if len(value) != sum(size for _, size in spans):
            return "size_mismatch"
        at = 0
        for address, size in spans:
            ctypes.memmove(address, value[at : at + size], size)
            at += size
        return "hit"
