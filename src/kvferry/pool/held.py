"""What a store hands out: spaces, and the places that somebody holds for a while. Values; `store` alone changes them."""

from collections.abc import Hashable, Iterable, Sequence
from itertools import compress, groupby
from operator import attrgetter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.pool.arena import Arena, Place, Slab
from kvferry.pool.eviction import Entry, Policy

__all__ = ["Held", "Lease", "Namespace", "Reservation", "Space", "Table"]

Table: TypeAlias = npt.NDArray[np.int64]  # [n, 3]: segment, offset, size


class Namespace:
    """Spaces that share a quota, and, with ``group``, segments."""

    __slots__ = ("bytes", "copies", "group", "name", "policy", "quota_bytes", "spaces")

    def __init__(self, name: str, group: str, policy: Policy) -> None:
        self.name = name
        self.group = group
        self.policy = policy
        self.copies: Policy | None = None  # who of the copies goes; made with the first one
        self.quota_bytes: int | None = None
        self.bytes = 0  # all it takes in the arena, reserved and removed ones too
        self.spaces: list[Space] = []


class Space:
    """The values of one namespace and one geometry. Made by :meth:`Store.space`."""

    __slots__ = ("entries", "fingerprint", "namespace", "number", "pending", "salt")

    def __init__(self, number: int, namespace: Namespace, fingerprint: bytes) -> None:
        self.number = number
        self.namespace = namespace
        self.fingerprint = fingerprint
        self.salt = hash((namespace.name, fingerprint))
        self.entries: dict[bytes, Entry] = {}
        self.pending: dict[bytes, Reservation] = {}


class Held:
    """``places``, ``outcomes`` and ``keys`` go together, one per key of the call; the place is None where there is none."""

    __slots__ = ("closed", "ended", "keys", "outcomes", "owner", "space", "until")

    def __init__(self, space: Space, keys: Sequence[bytes], owner: Hashable, until: float) -> None:
        self.space = space
        self.keys = keys
        self.owner = owner
        self.until = until
        self.outcomes: list[str] = []
        self.ended = False
        self.closed = False

    @property
    def places(self) -> list[Place | None]:
        raise NotImplementedError

    def table(self) -> Table:
        """Segment, offset and size of each place, in the order of the keys."""
        raise NotImplementedError

    def segments(self) -> set[int]:
        """Those in which its places lie."""
        return set(self.table()[:, 0].tolist())


class Reservation(Held):
    """Places for values that are being saved: ``slabs[i]`` and ``indices[i]``, or None and whatever. Outcomes are RESERVED,
    PRESENT, PENDING, SIZE_MISMATCH, FULL or OVERSIZE."""

    __slots__ = ("copy", "indices", "parents", "sizes", "slabs", "ttl_ms", "void")

    def __init__(
        self,
        space: Space,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        owner: Hashable,
        until: float,
        parents: Sequence[bytes | None] | None,
        ttl_ms: float | None,
        copy: bool,
    ) -> None:
        super().__init__(space, keys, owner, until)
        self.sizes = sizes
        self.parents = parents
        self.ttl_ms = ttl_ms
        self.copy = copy
        self.slabs: list[Slab | None] = []
        self.indices: list[int] = []
        self.void: set[bytes] = set()  # removed meanwhile

    @property
    def places(self) -> list[Place | None]:
        taken = zip(self.slabs, self.indices, self.sizes, strict=True)
        return [None if slab is None else Arena.place((slab, index), size) for slab, index, size in taken]

    def table(self) -> Table:
        slabs, indices, sizes = self.slabs, self.indices, self.sizes
        if None in slabs:
            indices, sizes = [*compress(indices, slabs)], [*compress(sizes, slabs)]
        return _table(filter(None, slabs), indices, sizes)


class Lease(Held):
    """Places of values that are being loaded; outcomes are HIT, NEVER_SAVED, EVICTED, EXPIRED, REMOVED, PENDING or
    SIZE_MISMATCH. ``entries``: what was found, None where nothing was."""

    __slots__ = ("entries",)

    def __init__(self, space: Space, keys: Sequence[bytes], owner: Hashable, until: float) -> None:
        super().__init__(space, keys, owner, until)
        self.entries: list[Entry | None] = []

    @property
    def places(self) -> list[Place | None]:
        return [None if one is None else Arena.place((one.slab, one.index), one.size) for one in self.entries]

    @property
    def checksums(self) -> list[object]:
        """Those of the commit, or None."""
        return [entry and entry.checksum for entry in self.entries]

    def table(self) -> Table:
        found = [*filter(None, self.entries)]
        return _table(map(_SLAB, found), [*map(_INDEX, found)], [*map(_SIZE, found)])


_SLAB, _INDEX, _SIZE = map(attrgetter, ("slab", "index", "size"))


def _table(slabs: Iterable[Slab], indices: list[int], sizes: Sequence[int]) -> Table:
    if not indices:
        return np.empty((0, 3), np.int64)
    if len(indices) == 1:
        segment, offset, each = next(iter(slabs)).at
        return np.array([(segment, offset + each * indices[0], sizes[0])], np.int64)
    runs = [(slab.at, len(list(run))) for slab, run in groupby(slabs)]  # neighbours often lie in one
    table = np.array([at for at, _ in runs], np.int64).reshape(-1, 3)
    if len(runs) < len(indices):
        table = table.repeat([count for _, count in runs], axis=0)
    table[:, 1] += table[:, 2] * indices
    table[:, 2] = sizes[0] if sizes.count(sizes[0]) == len(sizes) else sizes
    return table
