"""What a store hands out: spaces, and the places that somebody holds for a while. Values; `store` alone changes them."""

from collections.abc import Hashable, Sequence

from kvferry.pool.arena import Place, Spot
from kvferry.pool.eviction import Entry, Policy

__all__ = ["Held", "Lease", "Namespace", "Reservation", "Space"]


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
    """``places``, ``outcomes`` and ``keys`` go together, one per key of the call."""

    __slots__ = ("closed", "ended", "keys", "outcomes", "owner", "places", "space", "until")

    def __init__(self, space: Space, keys: Sequence[bytes], owner: Hashable, until: float) -> None:
        self.space = space
        self.keys = keys
        self.owner = owner
        self.until = until
        self.places: list[Place | None] = []
        self.outcomes: list[str] = []
        self.ended = False
        self.closed = False

    def segments(self) -> set[int]:
        """Those in which its places lie."""
        return {place[0] for place in self.places if place is not None}


class Reservation(Held):
    """Places for values that are being saved; outcomes are RESERVED, PRESENT, PENDING, SIZE_MISMATCH, FULL or OVERSIZE."""

    __slots__ = ("copy", "parents", "spots", "ttl_ms", "void")

    def __init__(
        self,
        space: Space,
        keys: Sequence[bytes],
        owner: Hashable,
        until: float,
        parents: Sequence[bytes | None] | None,
        ttl_ms: float | None,
        copy: bool,
    ) -> None:
        super().__init__(space, keys, owner, until)
        self.parents = parents
        self.ttl_ms = ttl_ms
        self.copy = copy
        self.spots: list[Spot | None] = []
        self.void: set[bytes] = set()  # removed meanwhile


class Lease(Held):
    """Places of values that are being loaded; outcomes are HIT, NEVER_SAVED, EVICTED, EXPIRED, REMOVED, PENDING or
    SIZE_MISMATCH. ``checksums`` are those of the commit, or None."""

    __slots__ = ("checksums", "entries")

    def __init__(self, space: Space, keys: Sequence[bytes], owner: Hashable, until: float) -> None:
        super().__init__(space, keys, owner, until)
        self.checksums: list[object] = []
        self.entries: list[Entry] = []
