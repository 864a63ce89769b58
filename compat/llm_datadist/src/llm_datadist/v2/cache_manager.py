"""``CacheManager``: the movement of caches' bytes, at the vendor's names.

Checks arguments (``arguments``), names what is meant in kvferry's words, calls kvferry, translates its errors. Every
method may be called from any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kvferry
from llm_datadist import arguments, layerwise
from llm_datadist._rules import EngineOptions, IdMeans, check_blocks_of_row, check_paired, copied_bytes, meaning_of_id
from llm_datadist.cache import Cache
from llm_datadist.engine import Engine, translated
from llm_datadist.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from llm_datadist.layerwise import Destination
from llm_datadist.status import LLMException, raise_if_false
from llm_datadist.transfer import CacheTask, LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
from llm_datadist.utils.utils import (
    check_block_list,
    check_int64,
    check_isinstance,
    check_object,
    check_uint32,
    check_uint64,
)
from llm_datadist.v2.cache_table import CacheTable, owner_key

_PULL_CACHE_KEYS = (CacheKey, CacheKeyByIdAndIndex)
_PULL_BLOCKS_KEYS = (BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex)

# What a key stands for on its owner's side: kvferry's name for the cache, and a row of it (None: the key's own).
_Named = tuple[Any, int | None]


class CacheManager(CacheTable):
    """Made by ``LLMDataDist``; reached through its ``cache_manager``."""

    def __init__(self, llm_datadist: object, options: EngineOptions, engine: Engine) -> None:
        super().__init__(options, engine)
        self._llm_datadist = llm_datadist

    @staticmethod
    def check_cache_key(cache_key: CacheKey) -> None:
        """``LLMException`` unless exactly one of request and prefix id is given."""
        check_object("cache_key", cache_key, CacheKey)
        arguments.cache_key(cache_key)

    # -- pull

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> None:
        """One row of the cluster's cache into row ``batch_index`` of ``cache``, for each tensor or the layers given."""
        if self._options.remote:
            check_object("cache_key", cache_key, CacheKeyByIdAndIndex)
        else:
            check_object("cache_key", cache_key, _PULL_CACHE_KEYS)
        check_object("cache", cache, Cache)
        raise_if_false(not cache.is_blocks_cache, "cache must not be a blocks cache: use pull_blocks")
        batch_index = check_uint32("batch_index", batch_index)
        size = arguments.size(size)
        if isinstance(cache_key, CacheKey):
            arguments.cache_key(cache_key)
        moves = _pull_layer_moves(kwargs, cache) if kwargs else {}
        mine = self._own("pull_cache", cache)
        arguments.row("batch_index", batch_index, mine.count)
        link = self._engine.link_to(cache_key.cluster_id, "pull_cache")
        try:
            source, row = self._named(cache_key)
            if moves:
                self._complete_layers(moves, link, source)
            link.pull(
                source,
                into=mine,
                row=batch_index,
                source_row=row,
                size_bytes=None if size == -1 else size,
                timeout_ms=self._engine.timeout_ms,
                **moves,
            )
        except kvferry.KvferryError as error:
            raise translated(error, "pull_cache") from error

    def pull_blocks(
        self,
        src_cache_key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey,
        dst_cache: Cache,
        src_blocks: list[int] | tuple[int, ...] = (),
        dst_blocks: list[int] | tuple[int, ...] = (),
        **kwargs: Any,
    ) -> None:
        """Block ``src_blocks[i]`` into block ``dst_blocks[i]``; a key of a row fills the blocks with the row."""
        check_object("src_cache_key", src_cache_key, _PULL_BLOCKS_KEYS)
        check_object("dst_cache", dst_cache, Cache)
        if not dst_cache.is_blocks_cache:
            raise_if_false(False, "dst_cache must be a blocks cache: use pull_cache")
        sources = check_block_list("src_blocks", src_blocks)
        into = check_block_list("dst_blocks", dst_blocks)
        if not dst_blocks:
            raise_if_false(False, "dst_blocks is empty")
        from_blocks = isinstance(src_cache_key, BlocksCacheKey)
        if bool(src_blocks) != from_blocks:
            raise_if_false(False, "src_blocks must be given with a BlocksCacheKey, and with no other key")
        if from_blocks and len(sources) != len(into):  # the rule, without the detour for what does not break it
            with arguments.rules_as_exceptions():
                check_paired(len(sources), len(into))
        if isinstance(src_cache_key, BlocksCacheKey):
            src_cache_key._check_ids()
        elif isinstance(src_cache_key, CacheKey):
            arguments.cache_key(src_cache_key)
        moves = _pull_layer_moves(kwargs, dst_cache) if kwargs else {}
        mine = self._own("pull_blocks", dst_cache)
        link = self._engine.link_to(src_cache_key.cluster_id, "pull_blocks")
        try:
            source, row = self._named(src_cache_key)
            if moves:
                self._complete_layers(moves, link, source)
            if from_blocks:
                link.pull(source, into=mine, blocks=(sources, into), timeout_ms=self._engine.timeout_ms, **moves)
            else:
                link.pull(
                    source,
                    into=mine,
                    source_row=row,
                    row_to_blocks=into,
                    timeout_ms=self._engine.timeout_ms,
                    **moves,
                )
        except kvferry.KvferryError as error:
            raise translated(error, "pull_blocks") from error

    def _complete_layers(self, moves: dict[str, Any], link: kvferry.Link, source: Any) -> None:
        """Destination layers alone take all layers of the far cache, which must be as many."""
        if moves["source_layers"] is not None:
            return
        wanted, width = len(moves["layers"]), moves["tensors_per_layer"]
        tensors = link.describe(source, timeout_ms=self._engine.timeout_ms).tensors
        raise_if_false(tensors == wanted * width, "the source has {} tensors, not {} layers", tensors, wanted)
        moves["source_layers"] = range(wanted)

    # -- push

    def push_cache(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int = 0,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        size: int = -1,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Row ``src_batch_index`` of ``src_cache`` into the row that the key names."""
        self._needs_remote_mode("push_cache")
        check_isinstance("dst_cache_key", dst_cache_key, CacheKeyByIdAndIndex, allow_none=False)
        check_object("src_cache", src_cache, Cache)
        raise_if_false(not src_cache.is_blocks_cache, "src_cache must not be a blocks cache: use push_blocks")
        src_batch_index = check_uint32("src_batch_index", src_batch_index)
        check_int64("size", size)
        raise_if_false(size == -1, "size must be -1, but got {}", size)
        moves = {"row": src_batch_index, "destination_row": dst_cache_key.batch_index}
        layers = arguments.push_layers(src_layer_range, dst_layer_range, src_cache, tensor_num_per_layer)
        self._push("push_cache", dst_cache_key, src_cache, layers, moves)

    def push_blocks(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: list[int] | tuple[int, ...] = (),
        dst_blocks: list[int] | tuple[int, ...] = (),
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Block ``src_blocks[i]`` of ``src_cache`` into block ``dst_blocks[i]`` of the cache that the key names."""
        self._needs_remote_mode("push_blocks")
        check_object("dst_cache_key", dst_cache_key, BlocksCacheKey)
        check_object("src_cache", src_cache, Cache)
        raise_if_false(src_cache.is_blocks_cache, "src_cache must be a blocks cache: use push_cache")
        sources = check_block_list("src_blocks", () if src_blocks is None else src_blocks)
        into = check_block_list("dst_blocks", dst_blocks)
        with arguments.rules_as_exceptions():
            check_paired(len(sources), len(into))
        layers = arguments.push_layers(src_layer_range, dst_layer_range, src_cache, tensor_num_per_layer)
        dst_cache_key._check_ids()
        self._push("push_blocks", dst_cache_key, src_cache, layers, {"blocks": (sources, into)})

    def _push(
        self,
        function: str,
        key: CacheKeyByIdAndIndex | BlocksCacheKey,
        cache: Cache,
        layers: tuple[range, range, int],
        moves: dict[str, Any],
    ) -> None:
        cluster_id = key.cluster_id
        source, destination, tensors_per_layer = layers
        if not source:
            return  # fewer tensors than one layer has: nothing is sent, and that is a success
        mine = self._own(function, cache)
        if "row" in moves:
            arguments.row("src_batch_index", moves["row"], mine.count)
        link = self._engine.link_to(cluster_id, function)
        try:
            link.push(
                mine,
                to=layerwise.pushed_to(link, self._push_target(key), self._engine.timeout_ms),
                layers=source,
                destination_layers=destination,
                tensors_per_layer=tensors_per_layer,
                timeout_ms=self._engine.timeout_ms,
                **moves,
            )
        except kvferry.KvferryError as error:
            raise translated(error, function) from error

    def _needs_remote_mode(self, function: str) -> None:
        raise_if_false(self._options.remote, "{} needs enable_remote_cache_accessible", function)

    # -- layer by layer

    def transfer_cache_async(
        self,
        src_cache: Cache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[TransferConfig | TransferWithCacheKeyConfig],
        src_block_indices: Sequence[int] | None = None,
        dst_block_indices: Sequence[int] | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Sends each layer as soon as the synchronizer says that it is computed; outcomes are the task's."""
        arguments.transfer(
            src_cache,
            layer_synchronizer,
            transfer_configs,
            src_block_indices,
            dst_block_indices,
            dst_block_memory_size,
            self._options.remote,
        )
        lists = ([*map(int, src_block_indices or ())], [*map(int, dst_block_indices or ())])
        block_bytes = 0
        try:
            mine = self._own(layerwise.FUNCTION, src_cache)
            if lists[1] and not lists[0]:  # rows into blocks
                block_bytes = int(dst_block_memory_size or 0)
                with arguments.rules_as_exceptions():
                    check_blocks_of_row(src_cache.cache_desc.size, block_bytes, len(lists[1]))
            for config in transfer_configs:
                arguments.row("src_batch_index", config.src_batch_index, mine.count)
        except LLMException as error:  # the engine's refusals are the task's to tell
            return layerwise.refused(len(transfer_configs), error)
        if not lists[1] and src_cache.is_blocks_cache:
            lists = ([0], [0])
        return layerwise.start(
            self._engine,
            mine,
            layer_synchronizer,
            [self._destination(config, lists, block_bytes) for config in transfer_configs],
            src_cache.cache_desc.num_tensors // layerwise.TENSORS_PER_LAYER,
        )

    def _destination(
        self,
        config: TransferConfig | TransferWithCacheKeyConfig,
        lists: tuple[list[int], list[int]],
        block_bytes: int,
    ) -> Destination:
        layers = config.src_layer_range
        assert layers is not None
        to: Any
        row = 0
        if isinstance(config, TransferConfig):
            to = kvferry.Addresses(tuple(map(int, config.dst_addrs)), unit_bytes=block_bytes)
        else:
            to = self._push_target(config.cache_key)
            row = config.cache_key.batch_index if isinstance(config.cache_key, CacheKeyByIdAndIndex) else 0
        moves: dict[str, Any]
        if block_bytes:
            moves = {"row": config.src_batch_index, "row_to_blocks": lists[1]}
        elif lists[1]:
            moves = {"blocks": lists}
        else:
            moves = {"row": config.src_batch_index, "destination_row": row}
        return Destination(config.dst_cluster_id, to, layers, config.dst_layer_range, moves, block_bytes)

    # -- within this process

    def copy_cache(
        self,
        dst: Cache,
        src: Cache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> None:
        """``size`` bytes of a row of ``src`` into a row of ``dst``, both from ``offset`` on; -1: the rest of ``src``'s row."""
        check_object("dst", dst, Cache)
        check_object("src", src, Cache)
        raise_if_false(not dst.is_blocks_cache and not src.is_blocks_cache, "copy_cache is not for blocks caches")
        dst_batch_index = check_uint32("dst_batch_index", dst_batch_index)
        src_batch_index = check_uint32("src_batch_index", src_batch_index)
        offset = check_uint64("offset", offset)
        size = arguments.size(size)
        if req_id is not None:
            check_uint64("req_id", req_id)
        source, destination = self._here("copy_cache", src), self._here("copy_cache", dst)
        with arguments.rules_as_exceptions():
            size_bytes = copied_bytes(offset, size, source.unit_bytes, destination.unit_bytes)
        arguments.row("src_batch_index", src_batch_index, source.count)
        arguments.row("dst_batch_index", dst_batch_index, destination.count)
        moves = {"row": dst_batch_index, "source_row": src_batch_index, "size_bytes": size_bytes}
        self._copy("copy_cache", source, destination, moves | {"offset_bytes": offset})

    def copy_blocks(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> None:
        """Each named block into each of the blocks listed for it, in order, within one cache."""
        check_object("cache", cache, Cache)
        raise_if_false(cache.is_blocks_cache, "cache must be a blocks cache")
        check_isinstance("copy_block_info", copy_block_info, dict, allow_none=False)
        pairs: list[tuple[int, int]] = []
        sources = check_block_list("copy_block_info's blocks", list(copy_block_info))
        for source, destinations in zip(sources, copy_block_info.values(), strict=True):
            check_isinstance(f"copy_block_info[{source}]", destinations, list, allow_none=False)
            pairs += [(source, into) for into in check_block_list(f"copy_block_info[{source}]", destinations)]
        if pairs:
            mine = self._here("copy_blocks", cache)
            self._copy("copy_blocks", mine, mine, {"blocks": tuple(zip(*pairs, strict=True))})

    def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> None:
        """Copies blocks between a host and a device cache, in the direction given."""
        arguments.swap(src_cache, dst_cache, src_to_dst)
        if src_to_dst:
            source, destination = (self._operand("swap_blocks", cache) for cache in (src_cache, dst_cache))
            blocks = ([*map(int, src_to_dst)], [*map(int, src_to_dst.values())])
            self._copy("swap_blocks", source, destination, {"blocks": blocks})

    def _operand(self, function: str, cache: Cache) -> kvferry.Cache | kvferry.Addresses:
        """A cache made by ``create_cpu_cache`` is no more than its addresses, and how large its blocks are."""
        if cache.cache_id != -1:
            return self._here(function, cache)
        desc = cache.cache_desc
        return kvferry.Addresses(cache.tensor_addrs, unit_bytes=desc.size // desc.batch_size)

    def _copy(
        self,
        function: str,
        source: kvferry.Cache | kvferry.Addresses,
        destination: kvferry.Cache | kvferry.Addresses,
        moves: dict[str, Any],
    ) -> None:
        try:
            self._engine.node.copy(source, destination, **moves)
        except kvferry.KvferryError as error:
            raise translated(error, function) from error

    # -- names

    def _named(self, key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey) -> _Named:
        """The source that a pull's key names."""
        if isinstance(key, BlocksCacheKey):
            return self._blocks_key(key.model_id), None
        if isinstance(key, CacheKey):
            return owner_key(key), None
        if meaning_of_id(key.cache_id, self._options.remote, pushing=False) is IdMeans.BLOCKS_OF_MODEL_0:
            return self._blocks_key(0), key.batch_index
        return max(key.cache_id, 0), key.batch_index

    def _push_target(self, key: CacheKeyByIdAndIndex | BlocksCacheKey) -> Any:
        if isinstance(key, BlocksCacheKey):
            return self._blocks_key(key.model_id)
        meant = meaning_of_id(key.cache_id, self._options.remote, pushing=True)
        return key.cache_id if meant is IdMeans.CACHE else layerwise.ID_OF_NO_CACHE


def _pull_layer_moves(kwargs: dict[str, Any], cache: Cache) -> dict[str, Any]:
    source, destination, tensors_per_layer = arguments.pull_layers(kwargs, cache)
    if destination is None:
        return {}
    return {"layers": destination, "source_layers": source, "tensors_per_layer": tensors_per_layer}
