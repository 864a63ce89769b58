"""Where the values of one batch lie in this process: their segments as flat arrays, whatever the caller gave.

A value is its segments in order, one behind the other. Knows no nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry import _core
from kvferry.arrays import Memory, recognise
from kvferry.errors import InvalidArgument
from kvferry.options import LARGEST, shown

__all__ = ["Buffers", "Spans", "Values", "extents", "of_blocks", "of_buffers", "of_the_heap", "plain"]

U64 = npt.NDArray[np.uint64]
Spans = npt.NDArray[np.uint64]  # [n, 3]: offset in the node's segment, address here, bytes
LARGEST_VALUE = 2**40


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """Segments of many values as arrays: value i is the next ``counts[i]`` of ``(addresses, sizes)``, in bytes."""

    addresses: npt.ArrayLike
    sizes: npt.ArrayLike
    counts: npt.ArrayLike


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """``addresses`` and ``sizes`` of all segments; value i has those from ``first[i]`` up to ``first[i + 1]``.

    ``into[j]`` is where segment j begins within its value. ``owner`` lives as long as this does. ``raw``: nobody knows
    without looking what memory there is, for an address was given as a number, or an array may lie in a mapped file.
    """

    addresses: U64
    sizes: U64
    into: U64
    first: npt.NDArray[np.int64]
    totals: U64
    owner: object
    raw: bool = False

    def __len__(self) -> int:
        return len(self.totals)

    def bytes_of(self, chosen: npt.NDArray[np.int64]) -> int:
        """Of the ``chosen`` values together."""
        return int(self.totals[chosen[0]]) if len(chosen) == 1 else int(self.totals[chosen].sum())

    def spans(self, chosen: npt.NDArray[np.int64], offsets: U64, *, to_node: bool) -> Spans:
        """The moves of the ``chosen`` values from, or to, what begins at ``offsets`` (one for each) of a segment."""
        if len(self.sizes) == len(self.totals):  # a segment each
            if len(chosen) == len(self.sizes):
                return _spans(self.addresses, offsets, self.sizes, to_node)
            return _spans(self.addresses[chosen], offsets, self.sizes[chosen], to_node)
        at, counts = self._segments(chosen)
        there = self.into[at] + np.repeat(offsets, counts)
        return _spans(self.addresses[at], there, self.sizes[at], to_node)

    def checksums(self, chosen: npt.NDArray[np.int64], seeds: U64, may_shrink: bool) -> U64:
        """Of the ``chosen`` values as they lie here now, with a seed each, after somebody has looked whether their memory is
        there, and whether it ``may_shrink``. :raises InvalidArgument: then it has."""
        at, counts = self._segments(chosen)
        return np.frombuffer(_core.checksums(self.addresses[at], self.sizes[at], counts, seeds, may_shrink), np.uint64)

    def _segments(self, chosen: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The numbers of the ``chosen`` values' segments, and how many each value has."""
        counts = self.first[chosen + 1] - self.first[chosen]
        ends = np.cumsum(counts)
        at = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(self.first[chosen] - (ends - counts), counts)
        return at, counts


def _spans(here: U64, there: U64, sizes: U64, to_node: bool) -> Spans:
    spans = np.empty((len(sizes), 3), np.uint64)
    spans[:, 0], spans[:, 1] = (here, there) if to_node else (there, here)
    spans[:, 2] = sizes
    return spans


def extents(memories: Sequence[Memory]) -> Spans:
    """All that ``memories`` take here."""
    sizes = [(memory.count - 1) * memory.stride_bytes + memory.unit_bytes for memory in memories]
    here = np.array([memory.address for memory in memories], np.uint64)
    return _spans(here, np.zeros(len(here), np.uint64), np.array(sizes, np.uint64), True)


def of_blocks(memories: Sequence[Memory], blocks: Any, count: int, owner: object, raw: bool) -> Values:
    """Value i is block ``blocks[i]`` of every tensor, in the tensors' order."""
    numbers = _integers("blocks", blocks)
    if len(numbers) != count:
        raise InvalidArgument(f"{count} keys and {len(numbers)} blocks: give one block for each key")
    least = min(memory.count for memory in memories)
    if count and (int(numbers.min()) < 0 or int(numbers.max()) >= least):
        wrong = next(int(n) for n in numbers if not 0 <= n < least)
        raise InvalidArgument(f"block {wrong} does not exist: what is registered has {least}")
    bases = np.array([memory.address for memory in memories], np.uint64)
    strides = np.array([memory.stride_bytes for memory in memories], np.uint64)
    sizes = np.array([memory.unit_bytes for memory in memories], np.uint64)
    addresses = bases[None, :] + numbers.astype(np.uint64)[:, None] * strides[None, :]
    into = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.uint64)
    tensors = len(memories)
    return Values(
        addresses.reshape(-1),
        np.tile(sizes, count),
        np.tile(into, count),
        np.arange(count + 1, dtype=np.int64) * tensors,
        np.full(count, sizes.sum(), np.uint64),
        owner,
        raw,
    )


def of_buffers(buffers: Any, count: int, *, writable: bool = True) -> Values:
    """Value i is ``buffers[i]``: a list of segments, each ``(address, size_bytes)`` or an array. Not ``writable``: they are only
    read, and numpy arrays may be read-only."""
    owner: object = buffers
    raw = True
    if isinstance(buffers, Buffers):
        # Copies: the caller may use his arrays for something else while the values are moved.
        addresses, sizes = _words("addresses", buffers.addresses).copy(), _words("sizes", buffers.sizes).copy()
        counts = _integers("counts", buffers.counts)
        # No count alone may be so large that the sum of them wraps.
        fit = not len(counts) or (int(counts.min()) >= 1 and int(counts.max()) <= len(sizes))
        if len(addresses) != len(sizes) or not fit or int(counts.sum()) != len(sizes):
            raise InvalidArgument(
                f"{len(addresses)} addresses, {len(sizes)} sizes and counts of {int(counts.sum())} segments: they must be "
                "equal, and each value has at least one segment"
            )
    else:
        addresses, sizes, counts, owner, raw = _listed(buffers, writable)
    if len(counts) != count:
        raise InvalidArgument(f"{count} keys and {len(counts)} values: give one value for each key")
    if isinstance(buffers, Buffers) and len(sizes):
        wrong = np.flatnonzero((sizes == 0) | (addresses == 0) | (sizes > LARGEST_VALUE))
        if len(wrong):
            at = int(wrong[0])
            raise InvalidArgument(
                f"segment {at} is of {int(sizes[at])} bytes at address {int(addresses[at])}: sizes are 1 to 2**40, and "
                "address 0 is none"
            )
    if len(sizes) == count:
        return Values(addresses, sizes, np.zeros(count, np.uint64), np.arange(count + 1), sizes, owner, raw)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    before = np.concatenate([[0], np.cumsum(sizes, dtype=np.uint64)]).astype(np.uint64)
    totals = before[first[1:]] - before[first[:-1]]
    into = before[:-1] - np.repeat(before[first[:-1]], counts)
    return Values(addresses, sizes, into, first, totals, owner, raw)


def _listed(buffers: Any, writable: bool) -> tuple[U64, U64, npt.NDArray[np.int64], object, bool]:
    addresses: list[int] = []
    sizes: list[int] = []
    counts: list[int] = []
    owners: list[object] = []
    raw = False
    if not isinstance(buffers, list | tuple):
        raise InvalidArgument(
            f"buffers is {shown(buffers)}: give a list with the segments of each value, or Buffers(...)"
        )
    for number, value in enumerate(buffers):
        segments = value if isinstance(value, list) else [value]
        if not segments:
            raise InvalidArgument(f"value {number} has no segment")
        for segment in segments:
            if isinstance(segment, np.ndarray) and (where := plain(segment, writable)):
                address, size = where
                owners.append(segment)
                raw = raw or not of_the_heap(segment)
            elif isinstance(segment, tuple) and len(segment) == 2 and all(type(word) is int for word in segment):
                address, size = segment
                raw = True
                if not (0 < address <= LARGEST and 0 < size <= LARGEST_VALUE and address + size - 1 <= LARGEST):
                    raise InvalidArgument(
                        f"value {number} has a segment of {size} bytes at address {address}: sizes are 1 to 2**40, "
                        "addresses 1 to 2**64 - 1"
                    )
            else:
                memory = recognise(segment, f"value {number}")
                if memory.count != 1 and memory.stride_bytes != memory.unit_bytes:
                    raise InvalidArgument(f"value {number} has an array whose rows do not follow each other")
                address, size = memory.address, memory.unit_bytes * memory.count
                if size == 0:
                    raise InvalidArgument(f"value {number} has an empty array")
                owners.append(memory.owner)
                raw = True
            addresses.append(address)
            sizes.append(size)
        counts.append(len(segments))
    return (
        np.array(addresses, np.uint64),
        np.array(sizes, np.uint64),
        np.array(counts, np.int64),
        owners,
        raw,
    )


def of_the_heap(array: npt.NDArray[Any]) -> bool:
    """Its memory is numpy's own, which is there as long as it is."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.owndata:
            return True
        base = base.base
    return False


def plain(array: npt.NDArray[Any], writable: bool) -> tuple[int, int] | None:
    """Address and bytes of most arrays that come; of the others `recognise` says what is wrong, or what they are."""
    flags, size = array.flags, array.nbytes
    if (
        not flags.c_contiguous
        or not (flags.writeable or not writable)
        or not size
        or array.dtype.hasobject
        or not array.ndim
    ):
        return None
    return array.__array_interface__["data"][0], size


def _integers(what: str, numbers: Any) -> npt.NDArray[np.int64]:
    array = _array(what, numbers)
    if array.dtype == np.uint64 and len(array) and int(array.max()) >= 2**63:
        raise InvalidArgument(f"{what} has {int(array.max())}, which is far too large")
    return np.ascontiguousarray(array, np.int64)


def _words(what: str, numbers: Any) -> U64:
    array = _array(what, numbers)
    if array.dtype.kind == "i" and len(array) and int(array.min()) < 0:
        raise InvalidArgument(f"{what} has {int(array.min())}, which is below 0")
    return np.ascontiguousarray(array, np.uint64)


def _array(what: str, numbers: Any) -> npt.NDArray[Any]:
    try:
        array = numbers if type(numbers) is np.ndarray else np.asarray(numbers)
    except Exception as error:  # what is asked is somebody else's code, which may raise anything
        raise InvalidArgument(f"{what} is {shown(numbers)}: {shown(error)}") from error
    if array.ndim == 1 and array.size == 0:
        return array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidArgument(f"{what} is {shown(numbers)}: give a list or array of whole numbers")
    return array
