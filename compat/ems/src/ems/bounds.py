"""Known memory: where it ends for an address inside it, so that a buffer that is longer than its tensor is refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ems.arguments import Addresses
from ems.common.exception import invalid
from ems.tensors import Memory

NOWHERE = np.iinfo(np.uint64).max


class Bounds:
    """Ranges may lie in each other, as tensors lie in a larger allocation: the innermost one counts."""

    def __init__(self, memories: Sequence[Memory] = ()) -> None:
        self.memories = [memory for memory in memories if memory.size_bytes]  # kept: their addresses stay theirs
        starts = np.array([memory.address for memory in self.memories], np.uint64)
        ends = starts + np.array([memory.size_bytes for memory in self.memories], np.uint64)
        self._edges = np.unique(np.concatenate([[np.uint64(0)], starts, ends]))
        covers = (starts <= self._edges[:, None]) & (self._edges[:, None] < ends)
        self._limits = np.where(covers, ends, NOWHERE).min(axis=1, initial=NOWHERE)

    def with_more(self, memories: Sequence[Memory]) -> Bounds:
        return Bounds([*self.memories, *memories])

    def check(self, addresses: Addresses, sizes: Addresses) -> None:
        """Of addresses in no known memory nothing is said: whoever moves the bytes looks at those."""
        limits = self._limits[np.searchsorted(self._edges, addresses, side="right") - 1]
        beyond = np.flatnonzero(sizes > limits - addresses)
        if len(beyond):
            wrong = beyond[0]
            raise invalid(
                f"a buffer of {sizes[wrong]} bytes at {addresses[wrong]:#x} is longer than the registered memory there, "
                f"which ends {limits[wrong] - addresses[wrong]} bytes on"
            )
