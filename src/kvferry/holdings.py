"""What a node has registered: names it to the core and keeps its memory alive for as long as the core may touch it.

Life of an entry: registered or allocated -> let go, after the core has said that nobody's bytes move under it any more.
Driven by the node. It must not know the node by more than its caches do, because it outlives one that is dropped.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvferry import _core
from kvferry.arrays import Memory
from kvferry.cache import Cache
from kvferry.errors import CacheNotFound, NodeClosed
from kvferry.names import BlocksKey, Key, key_words
from kvferry.options import LAYOUTS, one_of

if TYPE_CHECKING:
    from kvferry.node import Node

__all__ = ["Holdings", "Keys"]

Keys = BlocksKey | Sequence[Key | None] | None


class Holdings:
    """The caches of one node, and ``memories``: what must not go away while the node's core is open."""

    def __init__(self, core: _core.Node) -> None:
        self._core = core
        self.caches: dict[int, Cache] = {}
        self.memories: dict[int, tuple[Memory, ...]] = {}

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
            keys=_key_list(keys),
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
            keys=_key_list(keys),
            key_use=key_use,
        )
        keeper = self._core.keep_memory(cache_id)  # a view may outlive cache and node
        memories = tuple(like.at(address, keeper) for address in addresses)
        return self._keep(node, cache_id, name, layout, "host", memories, allocated=True)

    def unregister(self, cache_id: int) -> bool:
        return self._ended(self._core.unregister_cache, cache_id)

    def deallocate(self, cache_id: int) -> bool:
        return self._ended(self._core.deallocate_cache, cache_id)

    def find(self, cache_id: int) -> Cache:
        try:
            return self.caches[cache_id]
        except KeyError:
            raise CacheNotFound(f"cache {cache_id} is not registered at this node", cache=f"cache {cache_id}") from None

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
        cache = self.caches[cache_id] = Cache(
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
        return cache

    def _ended(self, end: Callable[[int], bool], cache_id: int) -> bool:
        try:
            ended = end(cache_id)
        except NodeClosed:
            return False  # it ended with the node
        if ended:
            self.memories.pop(cache_id, None)
            self.caches.pop(cache_id, None)
        return ended


def _key_list(keys: Keys) -> list[tuple[str, int, int] | None]:
    if keys is None:
        return []
    return [None if key is None else key_words(key) for key in (keys if isinstance(keys, Sequence) else [keys])]
