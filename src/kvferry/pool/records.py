"""What a store says of itself."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["NamespaceStatistics", "StoreStatistics"]


@dataclass(frozen=True, slots=True)
class NamespaceStatistics:
    keys: int
    """Copies included."""
    bytes: int
    """In the arena, rounded up to its granule, reserved places included."""
    quota_bytes: int | None


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Counts since the store was made, and what it holds now."""

    capacity_bytes: int
    segments: int
    segments_bytes: int
    taken_bytes: int
    """By values, reserved places, and removed values that are still being read; never more than the capacity."""
    keys: int
    copies: int
    """Of what other nodes own; beside the keys."""
    copies_bytes: int
    pending: int
    leases: int
    hits: int
    hit_bytes: int
    misses: Mapping[str, int]
    """By reason."""
    saved: int
    saved_bytes: int
    not_saved: Mapping[str, int]
    """Of the keys that were to be saved, by outcome; PRESENT ones are as good as saved."""
    evictions: int
    evicted_bytes: int
    expired: int
    removed: int
    namespaces: Mapping[str, NamespaceStatistics]
