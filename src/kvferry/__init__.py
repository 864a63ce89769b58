"""kvferry moves the KV caches of large language models between processes and machines.

A :class:`Node` holds caches and links; a :class:`Link` pulls and pushes them. Importing this changes nothing in the
process; torch, asyncio and the pool are imported by the calls that need them.
"""

from typing import TYPE_CHECKING, Any

from kvferry import _core
from kvferry._core import Call, Done, LinkDown
from kvferry.cache import MEMORY, Cache, OwnMemory
from kvferry.errors import (
    BY_KIND,
    AddressInUse,
    AlreadyExists,
    AlreadyLinked,
    Busy,
    CacheNotFound,
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    KvferryError,
    LinkFailed,
    NodeClosed,
    NotLinked,
    OutOfMemory,
    PeerLost,
    Refused,
    Unsupported,
)
from kvferry.layers import LayerPush
from kvferry.link import Link
from kvferry.names import Addresses, BlocksKey, PrefixKey, RequestKey
from kvferry.node import Node
from kvferry.options import PoolOptions
from kvferry.records import CacheDescription, LinkStatistics, NodeStatistics
from kvferry.transfer import Answer, Prepared, Transfer
from kvferry.windows import Window

__all__ = [
    "MEMORY",
    "AddressInUse",
    "Addresses",
    "AlreadyExists",
    "AlreadyLinked",
    "Answer",
    "BlocksKey",
    "Buffers",
    "Busy",
    "Cache",
    "CacheDescription",
    "CacheNotFound",
    "Call",
    "Cancelled",
    "DeadlineExceeded",
    "Done",
    "Future",
    "InternalError",
    "InvalidArgument",
    "KvferryError",
    "LayerPush",
    "Link",
    "LinkDown",
    "LinkFailed",
    "LinkStatistics",
    "Member",
    "Membership",
    "Node",
    "NodeClosed",
    "NodeStatistics",
    "NotLinked",
    "OutOfMemory",
    "Outcome",
    "OwnMemory",
    "PeerLost",
    "Pool",
    "PoolOptions",
    "PrefixKey",
    "Prepared",
    "Refused",
    "RequestKey",
    "StaticMembership",
    "Transfer",
    "Unsupported",
    "Window",
    "prefix_keys",
]

if TYPE_CHECKING:
    from kvferry.pool.client import Pool
    from kvferry.pool.keys import prefix_keys
    from kvferry.pool.membership import Member, Membership, StaticMembership
    from kvferry.pool.outcome import Outcome
    from kvferry.pool.values import Buffers
    from kvferry.pool.workers import Future

_OF_THE_POOL = {
    "Buffers": "kvferry.pool.values",
    "Future": "kvferry.pool.workers",
    "Member": "kvferry.pool.membership",
    "Membership": "kvferry.pool.membership",
    "Outcome": "kvferry.pool.outcome",
    "Pool": "kvferry.pool.client",
    "StaticMembership": "kvferry.pool.membership",
    "prefix_keys": "kvferry.pool.keys",
}  # imported by whoever names them first

_core.set_error_classes(BY_KIND)
del BY_KIND

if not TYPE_CHECKING:  # a type checker would take any name for one of the package's

    def __getattr__(name: str) -> Any:
        if name not in _OF_THE_POOL:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        found = globals()[name] = getattr(import_module(_OF_THE_POOL[name]), name)
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
