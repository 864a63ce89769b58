"""What kvferry reports about itself: frozen records, made from the core's words.

A record is a picture of one moment; nothing in it changes afterwards.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

__all__ = ["CacheDescription", "LinkStatistics", "NodeStatistics"]

_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class NodeStatistics:
    """What a node holds: counts of its native threads, caches, windows, links and open guard slots, and how many bytes its
    pool has and has given out."""

    node_id: int
    threads: int
    caches: int
    windows: int
    links: int
    pool_bytes: int
    pool_used_bytes: int
    slots_open: int


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """What a link is and did.

    ``transports`` maps each of ``map``, ``cma`` and ``socket`` to ``"ok"``, or to why it is not used and what mends it.
    ``pulls``, ``pushes`` and their bytes are this side's operations that succeeded, ``failures`` those that did not.
    ``resets`` counts lanes that were closed and opened anew after an operation ended early.
    """

    peer: str
    peer_id: int
    address: str
    alive: bool
    outgoing: bool
    same_host: bool
    transports: Mapping[str, str]
    lanes: int
    pulls: int
    pushes: int
    bytes_pulled: int
    bytes_pushed: int
    failures: int
    resets: int


@dataclass(frozen=True, slots=True)
class CacheDescription:
    """A cache of the peer as it stands right now: ``tensors`` of ``count`` units of ``unit_bytes`` each.

    ``transport`` is what a pull from it would use, ``reasons`` says of each faster one why not. ``window``: the blocks or
    rows of the window that was asked for, in its order; None if it was no window.
    """

    cache_id: int
    name: str
    layout: str
    kind: str
    tensors: int
    unit_bytes: int
    count: int
    transport: str
    reasons: Mapping[str, str]
    window: tuple[int, ...] | None


def record(kind: type[_Record], words: Mapping[str, Any]) -> _Record:
    """The record made of the core's dictionary; what the record has no field for is left out."""
    fields: dict[str, Any] = {name: words.get(name) for name in kind.__slots__}  # type: ignore[attr-defined]
    return kind(**{name: _frozen(value) for name, value in fields.items()})


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return MappingProxyType(dict(value))
    return tuple(value) if isinstance(value, list) else value
