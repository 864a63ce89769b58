"""Who goes when room is needed: LRU and S3-FIFO behind one small interface.

A policy holds the published entries of a store, or of one namespace that has a policy of its own. It never names an
entry that is *held*: pinned by a reader, or the parent of an entry that is still there (a chain is given up from its
end). Such an entry is put aside when its turn comes, which costs one look, and comes back at the head of its queue when
the store says that nothing holds it any more (`unheld`): it was the next to go when it was put aside, and whatever has
been used since came back by that use. Everything is O(1), amortised; queues forget entries that went otherwise when
they come by, or when these are as many as the others.

Knows no clock and no places.
"""

from array import array
from collections import deque
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from itertools import compress
from operator import attrgetter
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.pool.arena import Slab

__all__ = ["LRU", "POLICIES", "S3FIFO", "Entry", "Ghosts", "Policy"]


class Entry(msgspec.Struct, gc=False, eq=False):
    """One published value. The garbage collector does not look at entries (there may be millions, also in an engine's own
    process), so nothing here may lead back to its entry: the space is a number, and a parent is older than its child."""

    key: bytes
    space: int
    slab: Slab
    index: int
    size: int
    checksum: object = None
    expires: float | None = None
    copy: bool = False  # of what another node owns
    parent: "Entry | None" = None
    children: int = 0
    pins: int = 0
    alive: bool = True  # found by its key; one that is not may still be pinned
    mark: int = 0  # the policy's own


_BYTES = attrgetter("slab.block_bytes")


class Policy(Protocol):
    bytes: int
    """What its entries take in the arena."""

    def add(self, entries: Sequence[Entry], returning: Sequence[bool]) -> None:
        """New ones, in the order of their chain; ``returning`` says of each whether it went early not long ago."""

    def touch(self, entries: Sequence[Entry]) -> None:
        """These were used together, in the order of their chain."""

    def unheld(self, entry: Entry) -> None:
        """It has neither a reader nor a child any more."""

    def remove(self, entries: Collection[Entry]) -> None:
        """They went for another reason than room: they are not ``alive`` any more."""

    def part(self, entries: AbstractSet[Entry]) -> "Policy":
        """Another one for these of its entries, which go there in the order that they had here."""

    def victim(self) -> "tuple[Entry, bool] | None":
        """The next to go, which the policy has forgotten by now, and whether it went early; None: all are held."""


class LRU:
    """The one that was not used for longest; of those used together the last of the chain.

    The queue has an entry once for each use that is remembered; ``entry.mark`` counts how often, and only the last counts.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._count = 0
        self._queue: deque[Entry] = deque()

    def add(self, entries: Sequence[Entry], returning: Sequence[bool]) -> None:
        self._count += len(entries)
        self.bytes += sum(map(_BYTES, entries))
        self.touch(entries)

    def touch(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.mark += 1
        self._queue.extend(reversed(entries))
        if len(self._queue) > 2 * self._count + 64:
            self._shorten()

    def unheld(self, entry: Entry) -> None:
        if not entry.mark:
            entry.mark = 1
            self._queue.appendleft(entry)

    def remove(self, entries: Collection[Entry]) -> None:
        self._count -= len(entries)
        self.bytes -= sum(map(_BYTES, entries))
        if len(self._queue) > 2 * self._count + 64:
            self._shorten()

    def part(self, entries: AbstractSet[Entry]) -> "LRU":
        other = LRU()
        self._shorten()
        self._queue, other._queue = _parted(self._queue, entries)
        before = self.bytes
        self.remove(entries)
        other.bytes, other._count = before - self.bytes, len(entries)
        return other

    def victim(self) -> "tuple[Entry, bool] | None":
        queue = self._queue
        while queue:
            entry = queue.popleft()
            entry.mark -= 1
            if not entry.mark and entry.alive and not entry.pins and not entry.children:
                self._count -= 1
                self.bytes -= entry.slab.block_bytes
                return entry, False
        return None

    def _shorten(self) -> None:
        kept: deque[Entry] = deque()
        for entry in self._queue:
            entry.mark -= 1
            if not entry.mark and entry.alive:
                kept.append(entry)
        for entry in kept:
            entry.mark = 1
        self._queue = kept


def _parted(queue: deque[Entry], entries: AbstractSet[Entry]) -> tuple[deque[Entry], deque[Entry]]:
    others, these = [deque(entry for entry in queue if (entry in entries) is mine) for mine in (False, True)]
    return others, these


_USES, _MAIN, _ASIDE = 3, 4, 8  # the bits of an S3-FIFO entry's mark


class S3FIFO:
    """Three queues (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023), by bytes.

    New entries wait in a small queue of a tenth of the bytes. Those used at least PROMOTED_BY times meanwhile go on into
    the main one, the others go, and what comes back while the store remembers them goes to the main queue at once. The
    main queue gives an entry another round for each of its last three uses. ``returning`` is the paper's ghost queue.
    """

    SMALL = 10  # the small queue has one byte in so many
    PROMOTED_BY = 2

    def __init__(self) -> None:
        self.bytes = 0
        self._small_bytes = 0
        self._small: deque[Entry] = deque()
        self._main: deque[Entry] = deque()
        self._gone = 0

    def add(self, entries: Sequence[Entry], returning: Sequence[bool]) -> None:
        new = entries
        if any(returning):
            back = [*compress(entries, returning)]
            for entry in back:
                entry.mark = _MAIN
            self._main.extend(reversed(back))
            self.bytes += sum(map(_BYTES, back))
            new = [entry for entry in entries if not entry.mark]
        size = sum(map(_BYTES, new))
        self.bytes += size
        self._small_bytes += size
        self._small.extend(reversed(new))

    def touch(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.mark & _USES < 3:
                entry.mark += 1

    def unheld(self, entry: Entry) -> None:
        if entry.mark & _ASIDE:
            entry.mark -= _ASIDE
            (self._main if entry.mark & _MAIN else self._small).appendleft(entry)

    def remove(self, entries: Collection[Entry]) -> None:
        for entry in entries:
            self._forget(entry)
            if not entry.mark & _ASIDE:
                self._gone += 1
        if self._gone > 64 and 2 * self._gone > len(self._small) + len(self._main):
            self._small = deque(entry for entry in self._small if entry.alive)
            self._main = deque(entry for entry in self._main if entry.alive)
            self._gone = 0

    def part(self, entries: AbstractSet[Entry]) -> "S3FIFO":
        other = S3FIFO()
        self._small, other._small = _parted(self._small, entries)
        self._main, other._main = _parted(self._main, entries)
        before, small_before = self.bytes, self._small_bytes
        for entry in entries:
            self._forget(entry)
        other.bytes, other._small_bytes = before - self.bytes, small_before - self._small_bytes
        return other

    def victim(self) -> "tuple[Entry, bool] | None":
        small, main = self._small, self._main
        while small or main:
            early = bool(small) and (not main or self._small_bytes * self.SMALL >= self.bytes)
            entry = small.popleft() if early else main.popleft()
            if not entry.alive:
                self._gone -= 1
            elif early and entry.mark >= self.PROMOTED_BY:
                entry.mark = _MAIN
                self._small_bytes -= entry.slab.block_bytes
                main.append(entry)
            elif not early and entry.mark & _USES:
                entry.mark -= 1
                main.append(entry)
            elif entry.pins or entry.children:
                entry.mark |= _ASIDE
            else:
                self._forget(entry)
                return entry, early
        return None

    def _forget(self, entry: Entry) -> None:
        size = entry.slab.block_bytes
        self.bytes -= size
        if not entry.mark & _MAIN:
            self._small_bytes -= size


class Ghosts:
    """Why keys went, by their hashes: for about as many as the store had entries at most, and eight bytes for each.

    A table of buckets of four words, each with 61 bits of a hash and a number for the reason; the newest stands first
    and pushes the oldest of its bucket out.
    """

    __slots__ = ("_mask", "_reasons", "_words")

    LEAST = 1 << 12
    WAYS = 4
    REASON_BITS = 3  # of a word
    FEW = 16  # up to here one after the other is quicker

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._empty(self.LEAST)

    def put(self, key: int, reason: str, live: int) -> None:
        """``live`` is how many entries there are."""
        if live > len(self._words):
            self._grow()
        self._push((key & _HASH) << self.REASON_BITS | self._code(reason))

    def put_all(self, keys: "npt.NDArray[np.int64]", reason: str) -> None:
        """Of so many entries that went at once, in this order."""
        while len(keys) > len(self._words):
            self._grow()
        code = np.uint64(self._code(reason))
        self._push_all(keys.view(np.uint64) << np.uint64(self.REASON_BITS) | code)

    def get(self, key: int) -> str | None:
        key &= _HASH
        first = key & self._mask
        for word in self._words[first : first + self.WAYS]:
            if word >> self.REASON_BITS == key:
                return self._reasons[word & (1 << self.REASON_BITS) - 1]
        return None

    def take(self, key: int) -> str | None:
        """As `get`, and forgets it."""
        key &= _HASH
        first, words = key & self._mask, self._words
        reason = None
        for at in range(first, first + self.WAYS):  # it may have been put more than once
            if words[at] >> self.REASON_BITS == key:
                reason = reason or self._reasons[words[at] & (1 << self.REASON_BITS) - 1]
                words[at] = 0
        return reason

    def take_all(self, keys: "npt.NDArray[np.int64]", reason: str) -> list[bool]:
        """`take` of each (no two are equal): which of them went for this reason."""
        if not self._reasons:
            return [False] * len(keys)
        if len(keys) <= self.FEW:
            return [self.take(key) == reason for key in keys.tolist()]
        buckets = (keys.view(np.uint64) & np.uint64(self._mask)) // np.uint64(self.WAYS)
        table = np.frombuffer(self._words, np.uint64).reshape(-1, self.WAYS)
        words = table[buckets]
        at, way = np.nonzero(words >> np.uint64(self.REASON_BITS) == (keys.view(np.uint64) & np.uint64(_HASH))[:, None])
        table[buckets[at], way] = 0
        known, newest = np.unique(at, return_index=True)
        codes = words[known, way[newest]] & np.uint64((1 << self.REASON_BITS) - 1)
        taken = np.zeros(len(keys), np.bool_)
        taken[known[codes == np.uint64(self._code(reason))]] = True
        return taken.tolist()

    def _code(self, reason: str) -> int:
        if reason not in self._reasons:
            assert len(self._reasons) < 1 << self.REASON_BITS
            self._reasons.append(reason)
        return self._reasons.index(reason)

    def _push(self, word: int) -> None:
        words, first = self._words, word >> self.REASON_BITS & self._mask
        words[first + 1 : first + self.WAYS] = words[first : first + self.WAYS - 1]
        words[first] = word

    def _empty(self, size: int) -> None:
        self._words = array("Q", bytes(8 * size))
        self._mask = size - self.WAYS  # the first word of a bucket

    def _grow(self) -> None:
        words = np.frombuffer(self._words, np.uint64)[::-1]  # the newest of a bucket last
        self._empty(2 * len(words))
        self._push_all(words[words != 0])

    def _push_all(self, words: "npt.NDArray[np.uint64]") -> None:
        """`_push` of each, a bucket at a time: its newest `WAYS` words stay."""
        table = np.frombuffer(self._words, np.uint64).reshape(-1, self.WAYS)
        buckets = (words >> np.uint64(self.REASON_BITS) & np.uint64(self._mask)) // np.uint64(self.WAYS)
        order = np.argsort(buckets, kind="stable")
        words, buckets = words[order], buckets[order]
        ends = np.flatnonzero(np.append(buckets[1:] != buckets[:-1], [True] * bool(len(buckets))))
        counts = np.diff(ends, prepend=-1)
        buckets = buckets[ends]
        for way in reversed(range(self.WAYS)):  # what stands before it is moved first
            new = counts > way
            table[buckets[new], way] = words[ends[new] - way]
            table[buckets[~new], way] = table[buckets[~new], way - counts[~new]]


_HASH = (1 << 64 - Ghosts.REASON_BITS) - 1


POLICIES: dict[str, Callable[[], Policy]] = {"lru": LRU, "s3fifo": S3FIFO}
