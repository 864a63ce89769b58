"""The caches of one instance: registered and allocated, by the id that kvferry gave them.

The half of ``CacheManager`` that puts memory under a name; the other half moves bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import kvferry
from llm_datadist import _rules, arguments
from llm_datadist._rules import EngineOptions, Share
from llm_datadist.cache import Cache, CacheDesc, MemInfo
from llm_datadist.engine import Engine, translated
from llm_datadist.enums import Placement
from llm_datadist.keys import NO_ID, BlocksCacheKey, CacheKey
from llm_datadist.status import LLMStatusCode, failure, raise_if_false
from llm_datadist.utils.utils import check_int64, check_isinstance, check_object


class CacheTable:
    def __init__(self, options: EngineOptions, engine: Engine) -> None:
        self._options = options
        self._engine = engine
        self._caches: dict[int, kvferry.Cache] = {}
        self._allocated: dict[int, Share] = {}
        pools = {Placement.DEVICE: options.device_pool, Placement.HOST: options.host_pool}
        self._shares = {placement: Share(pool) for placement, pool in pools.items() if pool is not None}
        self._shares_lock = threading.Lock()
        self._lock = threading.Lock()  # of the next two
        self._prefixes: dict[int, set[kvferry.PrefixKey]] = {}  # that are bound, by allocated cache
        self._kept: set[int] = set()  # ids of caches that were deallocated, and live on for a prefix
        self._private: set[int] = set()  # ids that remote mode must not move
        self._blocks_keys: dict[int, kvferry.BlocksKey] = {}
        self._is_call_linked = False

    def set_is_call_linked(self) -> None:
        """From the first ``link()`` on, new caches are not remote accessible."""
        self._is_call_linked = True

    # -- registration

    def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        cache_keys: Sequence[CacheKey] = (),
        remote_accessible: bool | None = None,
    ) -> Cache:
        """A cache in the caller's memory, addressed by rows; the i-th key names row i. The memory is not touched."""
        arguments.addresses(cache_desc, addrs, exact=True)
        arguments.cache_keys(cache_keys)
        accessible = self._is_accessible(cache_desc, remote_accessible)
        self._check_open("register_cache")
        return self._register(cache_desc, addrs, [owner_key(key) for key in cache_keys], accessible, is_blocks=False)

    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Cache:
        """A cache in the caller's memory, addressed by blocks. The memory is not touched."""
        arguments.addresses(cache_desc, addrs, exact=False)
        check_isinstance("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        accessible = self._is_accessible(cache_desc, remote_accessible)
        keys = self._owner_blocks_key(blocks_cache_key)
        cache_desc._is_blocks = True
        self._check_open("register_blocks_cache")
        with arguments.rules_as_exceptions():
            _rules.check_addresses(len(addrs), cache_desc.num_tensors, accessible and not all(addrs))
        return self._register(cache_desc, addrs, keys, accessible, is_blocks=True)

    def _register(
        self, cache_desc: CacheDesc, addrs: list[int], keys: list[Any], accessible: bool, is_blocks: bool
    ) -> Cache:
        unit_bytes, count = arguments.geometry(cache_desc)
        try:
            ours = self._engine.node.register_addresses(
                "",
                [int(address) or 1 for address in addrs],  # kvferry refuses 0, and no more is mapped at 1
                unit_bytes=unit_bytes,
                count=count,
                layout="blocks" if is_blocks else "rows",
                keys=keys,
                reachable=accessible or not self._options.remote,
            )
        except kvferry.KvferryError as error:
            raise translated(error, "register_blocks_cache" if is_blocks else "register_cache", "register") from error
        if not accessible:
            self._private.add(ours.id)
        self._caches[ours.id] = ours
        return Cache(ours.id, cache_desc, list(addrs), self, is_registered=True, is_blocks_cache=is_blocks)

    def _is_accessible(self, cache_desc: CacheDesc, remote_accessible: bool | None) -> bool:
        check_isinstance("remote_accessible", remote_accessible, bool)
        raise_if_false(
            not (remote_accessible and self._is_call_linked),
            "remote_accessible can not be True for a cache registered after link()",
        )
        if remote_accessible is not None:
            return remote_accessible
        return cache_desc.placement == Placement.DEVICE and not self._is_call_linked

    def unregister_cache(self, cache_id: int) -> None:
        """Ends it; an unknown id is fine, and so is that of an allocated cache, which stays. When this returns nobody's bytes move in
        its memory any more."""
        cache_id = check_int64("cache_id", cache_id)
        self._check_open("unregister_cache")
        if cache_id not in self._caches or cache_id in self._allocated:
            return
        try:
            self._engine.node.unregister(cache_id)
        except kvferry.KvferryError as error:
            raise translated(error, "unregister_cache", "register") from error
        self._forget(cache_id)

    def remap_registered_memory(self, mem_infos: MemInfo | list[MemInfo]) -> None:
        """Nothing to be done: a transfer reads whatever memory is mapped at a registered address when it runs."""
        arguments.memory(mem_infos)
        function = "remap_registered_memory"
        self._check_open(function)
        if isinstance(mem_infos, list) and not mem_infos:
            raise failure(LLMStatusCode.LLM_PARAM_INVALID, function, "mem_infos is empty")
        if not self._engine.has_links():
            raise failure(LLMStatusCode.LLM_NOT_YET_LINK, function, "there is no link")

    # -- allocation

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> Cache:
        """A cache from the configured pool, addressed by rows; the i-th key names row i."""
        arguments.cache_keys(cache_keys)
        return self._allocate(cache_desc, [owner_key(key) for key in cache_keys], is_blocks=False)

    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None) -> Cache:
        """A cache from the configured pool, addressed by blocks."""
        check_isinstance("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        return self._allocate(cache_desc, self._owner_blocks_key(blocks_cache_key), is_blocks=True)

    def _allocate(self, cache_desc: CacheDesc, keys: list[Any], is_blocks: bool) -> Cache:
        arguments.description(cache_desc)
        raise_if_false(cache_desc.num_tensors > 0, "num_tensors must be over 0")
        on_host = cache_desc.placement == Placement.HOST
        share = self._shares.get(cache_desc.placement)
        raise_if_false(share is not None, "{} is not configured", "host_mem_pool_cfg" if on_host else "mem_pool_cfg")
        assert share is not None
        function = "allocate_blocks_cache" if is_blocks else "allocate_cache"
        self._check_open(function)
        unit_bytes, count = arguments.geometry(cache_desc)
        try:
            with self._shares_lock:
                wanted = share.wanted(cache_desc.num_tensors, unit_bytes * count)
                ours = self._engine.node.allocate(
                    "",
                    tensors=cache_desc.num_tensors,
                    shape=(count, unit_bytes),
                    dtype="uint8",
                    layout="blocks" if is_blocks else "rows",
                    keys=keys,
                    keys_end_by="never" if self._options.remote else "row",
                )
                share.take(ours.id, wanted)
        except _rules.TooLittleLeft as error:
            raise failure(LLMStatusCode.LLM_OUT_OF_MEMORY, function, error) from None
        except kvferry.KvferryError as error:
            raise translated(error, function, "register") from error
        if is_blocks:
            cache_desc._is_blocks = True
        prefixes = {key for key in keys if isinstance(key, kvferry.PrefixKey)}
        if prefixes:
            with self._lock:
                self._prefixes[ours.id] = prefixes
        self._allocated[ours.id] = share
        self._caches[ours.id] = ours
        return Cache(ours.id, cache_desc, list(ours.addresses), self, is_blocks_cache=is_blocks)

    def deallocate_cache(self, cache: Cache) -> None:
        """Gives its memory back, once every key that is still bound was removed, or used up by a pull."""
        self._deallocate("deallocate_cache", cache, is_blocks=False)

    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Gives its memory back."""
        self._deallocate("deallocate_blocks_cache", cache, is_blocks=True)

    def _deallocate(self, function: str, cache: Cache, is_blocks: bool) -> None:
        check_object("cache", cache, Cache)
        raise_if_false(cache.is_blocks_cache == is_blocks, "{} is of the other kind", cache)
        self._needs_a_pool(function)
        if cache.cache_id in self._allocated:
            with self._lock:
                is_kept = cache.cache_id in self._prefixes
                if is_kept:
                    self._kept.add(cache.cache_id)
            if not is_kept:
                self._give_back(function, cache.cache_id)
            self._forget(cache.cache_id)
        cache._tensor_addrs = []

    def _give_back(self, function: str, cache_id: int) -> None:
        try:
            self._engine.node.deallocate(cache_id)  # which waits for request keys, and not for prefixes
        except kvferry.KvferryError as error:
            raise translated(error, function) from error

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Unbinds a request or prefix key of an allocated cache; any other key is fine and nothing happens."""
        check_object("cache_key", cache_key, CacheKey)
        self._needs_a_pool("remove_cache_key")
        key = owner_key(cache_key)
        if key is None:
            return
        try:
            self._engine.node.remove_key(key)
        except kvferry.KvferryError as error:
            raise translated(error, "remove_cache_key", "register") from error
        with self._lock:
            of = next((cache_id for cache_id, prefixes in self._prefixes.items() if key in prefixes), None)
            if of is None:
                return
            self._prefixes[of].discard(key)
            if self._prefixes[of]:
                return
            del self._prefixes[of]
            if of not in self._kept:
                return
            self._kept.discard(of)
        self._give_back("remove_cache_key", of)

    def _needs_a_pool(self, function: str) -> None:
        self._check_open(function, LLMStatusCode.LLM_PARAM_INVALID)
        if not self._shares:
            raise failure(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, function, "no memory pool is configured")

    def _forget(self, cache_id: int) -> None:
        self._caches.pop(cache_id, None)
        share = self._allocated.pop(cache_id, None)
        if share is not None:
            with self._shares_lock:
                share.give_back(cache_id)
        self._private.discard(cache_id)

    # -- names

    def _own(self, function: str, cache: Cache) -> kvferry.Cache:
        """This node's cache behind a ``Cache``, for a transfer."""
        ours = self._here(function, cache)
        if cache.cache_id in self._private and self._options.remote:
            raise failure(LLMStatusCode.LLM_PARAM_INVALID, function, f"{cache} is not remote accessible")
        return ours

    def _here(self, function: str, cache: Cache) -> kvferry.Cache:
        """The same for what stays within this process."""
        ours = self._caches.get(cache.cache_id)
        if ours is None:
            self._check_open(function, LLMStatusCode.LLM_PARAM_INVALID)
            raise failure(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, function, f"{cache} does not exist here")
        return ours

    def _check_open(self, function: str, otherwise: LLMStatusCode = LLMStatusCode.LLM_FAILED) -> None:
        """For a manager that was kept after ``finalize``."""
        if self._engine.closed:
            raise failure(otherwise, function, "llm datadist was finalized")

    def _blocks_key(self, model_id: int) -> kvferry.BlocksKey:
        key = self._blocks_keys.get(model_id)
        if key is None:
            key = self._blocks_keys[model_id] = kvferry.BlocksKey(model_id)
        return key

    def _owner_blocks_key(self, key: BlocksCacheKey | None) -> list[kvferry.BlocksKey]:
        if key is None:
            return []
        key._check_ids()
        return [self._blocks_key(key.model_id)]


def owner_key(key: CacheKey) -> kvferry.RequestKey | kvferry.PrefixKey | None:
    """A key in its owner's table: the cluster plays no part. None: it names nothing and skips its row."""
    if key.prefix_id != NO_ID:
        return kvferry.PrefixKey(key.prefix_id, key.model_id)
    return None if key.req_id == NO_ID else kvferry.RequestKey(key.req_id, key.model_id)
