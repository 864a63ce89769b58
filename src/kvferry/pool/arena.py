"""Places for values in segments: equal blocks in slabs, everything else wherever it fits first.

    arena = Arena(capacity_bytes, segment_bytes=256 << 20, add_segment=…, drop_segment=…)
    spot = arena.take(size_bytes, group="")      # (slab, index), or None: nothing is free for it
    slabs, indices = arena.take_all(size_bytes, 1024)   # as many as are free, at most so many
    arena.place(spot, size_bytes)                # Place(segment, offset, size)
    arena.give(*spot)                            # free again; several of a slab: arena.give(slab, *indices)

Segments come when they are needed (`add_segment(number, bytes)`) and go whole (`drop_segment(number)`): one that is
empty is kept for the next value, a second one is not. Numbers are never used again. A value larger than a segment gets
a segment of its own. Segments of one *group* never hold values of another.

A segment is cut into *slabs*: `count` blocks of one size, rounded up to GRANULE. The first few values of a size get a
slab each; the more of that size are live, the more blocks has its next slab (up to SLAB_BYTES), so a size that comes
once costs what it needs, and taking and giving blocks of a size that comes all the time costs no search. An empty slab
goes back to its segment at once and merges with what is free beside it.

Knows no keys, no values and no memory: numbers in, numbers out.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

__all__ = ["GRANULE", "Arena", "Place", "Slab", "Spot", "rounded"]

GRANULE = 64
SLAB_BYTES = 2 << 20
"""No slab of more than one block is larger: a slab is free for other sizes only when all its blocks are."""


def rounded(size_bytes: int) -> int:
    """What a value of this size takes."""
    return -(-size_bytes // GRANULE) * GRANULE


class Place(NamedTuple):
    """Where a value lies: bytes from the start of a segment; a multiple of GRANULE."""

    segment: int
    offset: int
    size: int


class Slab:
    """``count`` blocks of ``block_bytes`` from ``offset`` of a segment on."""

    __slots__ = ("at", "block_bytes", "count", "fresh", "given", "kind", "offset", "position", "segment")

    def __init__(self, kind: "_Kind", segment: "_Segment", offset: int, count: int) -> None:
        self.kind = kind
        self.segment = segment
        self.offset = offset
        self.block_bytes = kind.block_bytes
        self.count = count
        self.fresh = 0  # blocks from here on were never taken
        self.given: list[int] = []  # those that were given back
        self.position = -1  # in its kind's list of slabs with room
        self.at = (segment.number, offset, kind.block_bytes)


Spot: TypeAlias = tuple[Slab, int]


class _Kind:
    """All slabs of one block size in one group."""

    __slots__ = ("block_bytes", "group", "live", "open")

    def __init__(self, group: str, block_bytes: int) -> None:
        self.group = group
        self.block_bytes = block_bytes
        self.live = 0
        self.open: list[Slab] = []  # with room, in no order

    def opens(self, slab: Slab) -> None:
        slab.position = len(self.open)
        self.open.append(slab)

    def closes(self, slab: Slab) -> None:
        last = self.open.pop()
        if last is not slab:
            self.open[slab.position] = last
            last.position = slab.position
        slab.position = -1


class _Segment:
    """``starts`` and ``lengths`` are its free stretches, in order; no two of them touch."""

    __slots__ = ("bytes", "group", "largest", "lengths", "number", "starts")

    def __init__(self, number: int, size: int, group: str) -> None:
        self.number = number
        self.bytes = size
        self.group = group
        self.starts = [0]
        self.lengths = [size]
        self.largest = size

    def cut(self, size: int) -> int:
        """The first stretch that is long enough gives it; there is one."""
        at = next(at for at, length in enumerate(self.lengths) if length >= size)
        start, length = self.starts[at], self.lengths[at]
        if length == size:
            del self.starts[at], self.lengths[at]
        else:
            self.starts[at], self.lengths[at] = start + size, length - size
        if length == self.largest:
            self.largest = max(self.lengths, default=0)
        return start

    def mend(self, start: int, size: int) -> None:
        at = bisect_left(self.starts, start)
        if at < len(self.starts) and start + size == self.starts[at]:
            size += self.lengths[at]
            del self.starts[at], self.lengths[at]
        if at and self.starts[at - 1] + self.lengths[at - 1] == start:
            at -= 1
            self.lengths[at] += size
        else:
            self.starts.insert(at, start)
            self.lengths.insert(at, size)
        self.largest = max(self.largest, self.lengths[at])


class Arena:
    """``add_segment`` may return False: there is no memory for it now. It is asked again after :meth:`ask_again`."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        segment_bytes: int,
        add_segment: Callable[[int, int], bool | None],
        drop_segment: Callable[[int], None],
    ) -> None:
        self.capacity_bytes = capacity_bytes // GRANULE * GRANULE
        self.segment_bytes = rounded(segment_bytes)
        self.taken_bytes = 0
        self.segments_bytes = 0
        self._add_segment, self._drop_segment = add_segment, drop_segment
        self._refused = False
        self._segments: dict[int, _Segment] = {}
        self._empty: dict[int, _Segment] = {}
        self._rooms: dict[str, list[tuple[int, int]]] = {}  # (largest free stretch, segment), in order, of each group
        self._kinds: dict[tuple[str, int], _Kind] = {}
        self._next = 0

    def take(self, size_bytes: int, group: str = "") -> Spot | None:
        """A place for so many bytes (at least 1), or None if nothing that is free is long enough."""
        slabs, indices = self.take_all(size_bytes, 1, group)
        return (slabs[0], indices[0]) if slabs else None

    def take_all(self, size_bytes: int, count: int, group: str = "") -> tuple[list[Slab], list[int]]:
        """Places for ``count`` values of that size, or as many as are free."""
        block_bytes = -(-size_bytes // GRANULE) * GRANULE
        kind = self._kinds.get((group, block_bytes))
        slabs: list[Slab] = []
        indices: list[int] = []
        while len(slabs) < count:
            if kind is None or not kind.open:
                kind = self._new_slab(kind, group, block_bytes)
                if kind is None:
                    break
            slab = kind.open[-1]
            given, wanted = slab.given, count - len(slabs)
            if given:
                taken = min(wanted, len(given))
                indices += given[-taken:]
                del given[-taken:]
            else:
                taken = min(wanted, slab.count - slab.fresh)
                indices += range(slab.fresh, slab.fresh + taken)
                slab.fresh += taken
            if not given and slab.fresh == slab.count:
                kind.closes(slab)
            slabs += [slab] * taken
            kind.live += taken
            self.taken_bytes += taken * block_bytes
        return slabs, indices

    def give(self, slab: Slab, *indices: int) -> None:
        kind = slab.kind
        kind.live -= len(indices)
        self.taken_bytes -= len(indices) * slab.block_bytes
        slab.given.extend(indices)
        if len(slab.given) == slab.fresh:
            if slab.position >= 0:
                kind.closes(slab)
            if not kind.live:
                del self._kinds[kind.group, kind.block_bytes]
            self._give_back(slab)
        elif slab.position < 0:
            kind.opens(slab)

    @staticmethod
    def place(spot: Spot, size_bytes: int) -> Place:
        slab, index = spot
        return Place(slab.segment.number, slab.offset + index * slab.block_bytes, size_bytes)

    def ask_again(self) -> None:
        """The next value that needs a segment asks for one, also if the last one got none."""
        self._refused = False

    def trim(self) -> None:
        """Drops the segment that is empty, if one is."""
        for segment in list(self._empty.values()):
            self._drop(segment)

    @property
    def segments(self) -> dict[int, int]:
        """The bytes of each."""
        return {number: segment.bytes for number, segment in self._segments.items()}

    # --- slabs out of segments ------------------------------------------------------------------------------------

    def _new_slab(self, kind: _Kind | None, group: str, block_bytes: int) -> _Kind | None:
        rooms = self._rooms.get(group)
        if rooms is None or rooms[-1][0] < block_bytes:
            if self._refused or not self._grow(block_bytes, group):
                return None
            rooms = self._rooms[group]
        if kind is None:
            kind = self._kinds[group, block_bytes] = _Kind(group, block_bytes)
        wanted = max(1, min(kind.live, SLAB_BYTES // block_bytes))
        count = min(wanted, rooms[-1][0] // block_bytes)
        segment = self._segments[rooms[bisect_left(rooms, (count * block_bytes, -1))][1]]
        self._empty.pop(segment.number, None)
        before = segment.largest
        offset = segment.cut(count * block_bytes)
        self._moved(segment, before)
        kind.opens(Slab(kind, segment, offset, count))
        return kind

    def _give_back(self, slab: Slab) -> None:
        segment = slab.segment
        before = segment.largest
        segment.mend(slab.offset, slab.count * slab.block_bytes)
        self._moved(segment, before)
        if segment.largest == segment.bytes:
            if self._empty:
                self._drop(segment)
            else:
                self._empty[segment.number] = segment

    def _moved(self, segment: _Segment, before: int) -> None:
        if segment.largest != before:
            rooms = self._rooms[segment.group]
            del rooms[bisect_left(rooms, (before, segment.number))]
            insort(rooms, (segment.largest, segment.number))

    # --- segments -------------------------------------------------------------------------------------------------

    def _grow(self, block_bytes: int, group: str) -> bool:
        wanted = max(self.segment_bytes, block_bytes)
        while self.capacity_bytes - self.segments_bytes < wanted and self._empty:
            self._drop(next(iter(self._empty.values())))
        size = min(wanted, self.capacity_bytes - self.segments_bytes)
        if size < block_bytes:
            return False
        if self._add_segment(self._next, size) is False:
            self._refused = True
            return False
        self._segments[self._next] = self._empty[self._next] = _Segment(self._next, size, group)
        insort(self._rooms.setdefault(group, []), (size, self._next))
        self.segments_bytes += size
        self._next += 1
        return True

    def _drop(self, segment: _Segment) -> None:
        self._empty.pop(segment.number, None)
        del self._segments[segment.number]
        rooms = self._rooms[segment.group]
        del rooms[bisect_left(rooms, (segment.largest, segment.number))]
        if not rooms:
            del self._rooms[segment.group]
        self.segments_bytes -= segment.bytes
        self._drop_segment(segment.number)
