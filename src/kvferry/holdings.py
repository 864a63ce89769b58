"""What a node has registered: names it to the core and keeps its memory alive for as long as the core may touch it.

Life of an entry: registered or allocated -> let go, after the core has said that nobody's bytes move under it any more.
Driven by the node. A cache keeps its node and not the other way round: what is kept here is how to make it, so that a node
whose caches nobody holds is dropped, and closed, at once.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from kvferry import _core
from kvferry.arrays import Memory
from kvferry.cache import Cache
from kvferry.errors import CacheNotFound, InvalidArgument, NodeClosed
from kvferry.names import BlocksKey, Key, key_words
from kvferry.options import LAYOUTS, one_of, shown

if TYPE_CHECKING:
    from kvferry.node import Node

__all__ = ["Holdings", "Keys"]

Keys = BlocksKey | Sequence[Key | None] | None


class Holdings:
    """The caches of one node, and ``memories``: what must not go away while the node's core is open."""

    def __init__(self, core: _core.Node) -> None:
        self._core = core
        self.memories: dict[int, tuple[Memory, ...]] = {}
        self._make: dict[int, Callable[[Node], Cache]] = {}
        self._made: WeakValueDictionary[int, Cache] = WeakValueDictionary()

    def register(
        self,
        node: "Node",
        name: str,
        layout: str,
        kind: str,
        memories: Sequence[Memory],
        keys: Keys,
        reachable: bool = True,
    ) -> Cache:
        """Registers memory that somebody else owns: tensors alike in shape and stride. ``reachable``: by peers."""
        first = memories[0]
        cache_id = self._core.register_cache(
            name=name,
            kind=kind,
            layout=one_of("layout", layout, LAYOUTS),
            addresses=[memory.address for memory in memories],
            unit_bytes=first.unit_bytes,
            stride_bytes=first.stride_bytes,
            count=first.count,
            keys=_key_list(keys, layout),
            reachable=reachable,
        )
        return self._keep(node, cache_id, name, layout, kind, tuple(memories), allocated=False)

    def allocate(
        self, node: "Node", name: str, layout: str, tensors: int, like: Memory, keys: Keys, key_use: int
    ) -> Cache:
        """Takes ``tensors`` tensors from the pool, each like ``like`` in all but its address and owner."""
        cache_id, addresses = self._core.allocate_cache(
            name=name,
            layout=one_of("layout", layout, LAYOUTS),
            tensors=tensors,
            unit_bytes=like.unit_bytes,
            count=like.count,
            keys=_key_list(keys, layout),
            key_use=key_use,
        )
        keeper = self._core.keep_memory(cache_id)  # a view may outlive cache and node
        memories = tuple(like.at(address, keeper) for address in addresses)
        return self._keep(node, cache_id, name, layout, "host", memories, allocated=True)

    def unregister(self, cache_id: int) -> bool:
        return self._ended(self._core.unregister_cache, cache_id)

    def deallocate(self, cache_id: int) -> bool:
        return self._ended(self._core.deallocate_cache, cache_id)

    def find(self, node: "Node", cache_id: int) -> Cache:
        """The cache with that id, the same object as long as somebody holds it."""
        make = self._make.get(cache_id)
        if make is None:
            self._core.cache_ids()  # a closed node says so
            raise CacheNotFound(f"cache {cache_id} is not registered at this node", cache=f"cache {cache_id}")
        return self._one(node, cache_id, make)

    def all(self, node: "Node") -> list[Cache]:
        """What is registered, in the order of registration."""
        return [self._one(node, cache_id, make) for cache_id, make in list(self._make.items())]

    def forget(self) -> None:
        """The core is closed; the memories are let go by whoever closed it."""
        self._make.clear()

    def _keep(
        self,
        node: "Node",
        cache_id: int,
        name: str,
        layout: str,
        kind: str,
        memories: tuple[Memory, ...],
        *,
        allocated: bool,
    ) -> Cache:
        first = memories[0]
        self.memories[cache_id] = memories

        def make(node: "Node") -> Cache:
            return Cache(
                id=cache_id,
                name=name,
                layout=layout,
                kind=kind,
                tensors=len(memories),
                count=first.count,
                unit_bytes=first.unit_bytes,
                shape=first.shape,
                dtype=first.dtype,
                addresses=tuple(memory.address for memory in memories),
                allocated=allocated,
                _memories=memories,
                _node=node,
            )

        self._make[cache_id] = make
        return self._one(node, cache_id, make)

    def _one(self, node: "Node", cache_id: int, make: "Callable[[Node], Cache]") -> Cache:
        cache = self._made.get(cache_id)
        return self._made.setdefault(cache_id, make(node)) if cache is None else cache

    def _ended(self, end: Callable[[int], bool], cache_id: int) -> bool:
        try:
            ended = end(cache_id)
        except NodeClosed:
            return False  # it ended with the node
        if ended:
            self.memories.pop(cache_id, None)
            self._make.pop(cache_id, None)
        return ended


def _key_list(keys: Keys, layout: str) -> list[tuple[str, int, int] | None]:
    if keys is None:
        return []
    listed = keys if isinstance(keys, Sequence) else [keys]
    words = [None if key is None else key_words(key) for key in listed]
    for key in listed:
        if layout == ("rows" if isinstance(key, BlocksKey) else "blocks") and key is not None:
            named = "a cache of blocks" if layout == "rows" else "a row"
            raise InvalidArgument(
                f"{shown(key)} names {named}, and layout {layout!r} has none; 'mixed' is used both ways"
            )
    return words
