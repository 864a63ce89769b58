"""kvferry moves the KV caches of large language models between processes and machines.

A :class:`Node` holds caches and links; a :class:`Link` pulls and pushes them. Importing this changes nothing in the
process; torch and asyncio are imported by the calls that need them.
"""

from kvferry import _core
from kvferry._core import Done
from kvferry.cache import Cache
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
from kvferry.transfer import Prepared, Transfer
from kvferry.windows import Window

__all__ = [
    "AddressInUse",
    "Addresses",
    "AlreadyExists",
    "AlreadyLinked",
    "BlocksKey",
    "Busy",
    "Cache",
    "CacheDescription",
    "CacheNotFound",
    "Cancelled",
    "DeadlineExceeded",
    "Done",
    "InternalError",
    "InvalidArgument",
    "KvferryError",
    "LayerPush",
    "Link",
    "LinkFailed",
    "LinkStatistics",
    "Node",
    "NodeClosed",
    "NodeStatistics",
    "NotLinked",
    "OutOfMemory",
    "PeerLost",
    "PoolOptions",
    "PrefixKey",
    "Prepared",
    "Refused",
    "RequestKey",
    "Transfer",
    "Unsupported",
    "Window",
]

_core.set_error_classes(BY_KIND)
del BY_KIND
