"""Argument rules of the cache manager's calls: what is checked before anything is asked of the engine.

Wrong types are ``TypeError``, broken rules ``LLMException(LLM_PARAM_INVALID)``. The functions return what the call goes
on with; they know no links and no kvferry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llm_datadist import _rules
from llm_datadist.cache import Cache, CacheDesc, MemInfo
from llm_datadist.data_type import DataType
from llm_datadist.enums import Memtype, Placement
from llm_datadist.keys import NO_ID, BlocksCacheKey, CacheKey
from llm_datadist.status import raise_if_false
from llm_datadist.transfer import LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig, check_layer_range
from llm_datadist.utils.utils import (
    check_inner,
    check_int64,
    check_isinstance,
    check_list_int64,
    check_list_uint64,
    check_object,
    check_uint32,
    check_uint64,
)


@contextmanager
def rules_as_exceptions() -> Iterator[None]:
    """A broken pure rule is ``LLM_PARAM_INVALID``."""
    try:
        yield
    except _rules.RuleError as error:
        raise_if_false(False, "{}", error)


# -- caches


def description(cache_desc: CacheDesc) -> None:
    """What its constructor lets through, or somebody has written into its shape since, ends here: ``TypeError``."""
    check_object("cache_desc", cache_desc, CacheDesc)
    check_isinstance("data_type", cache_desc.data_type, DataType, allow_none=False)
    check_isinstance("placement", cache_desc.placement, Placement, allow_none=False)
    check_list_int64("shape", cache_desc.shape)


def geometry(cache_desc: CacheDesc) -> tuple[int, int]:
    """(bytes of one row or block, how many) of each tensor."""
    with rules_as_exceptions():
        return _rules.unit_geometry(cache_desc.num_tensors, cache_desc.shape, cache_desc.data_type.value)


def addresses(cache_desc: CacheDesc, addrs: list[int], exact: bool) -> None:
    """The addresses of a registration; ``exact``: as many as tensors and none of them 0."""
    description(cache_desc)
    check_isinstance("addrs", addrs, list, allow_none=False)
    check_inner("addrs", addrs, int)
    raise_if_false(len(addrs) > 0, "addrs is empty")
    if exact:
        with rules_as_exceptions():
            _rules.check_addresses(len(addrs), cache_desc.num_tensors, not all(addrs))
    for address in addrs:
        if not 0 <= address < 1 << 64:
            raise TypeError(f"addrs only support addresses from 0 to 2^64-1, but got {address}")


def cache_keys(keys: Sequence[CacheKey]) -> None:
    check_isinstance("cache_keys", keys, [list, tuple], allow_none=False)
    check_inner("cache_keys", keys, CacheKey)


def cache_key(key: CacheKey) -> None:
    """A key that a pull may name: exactly one of request and prefix id."""
    raise_if_false(
        (key.req_id != NO_ID) != (key.prefix_id != NO_ID),
        "exactly one of req_id and prefix_id must be given in {}",
        key,
    )


# -- moving


def size(value: int) -> int:
    value = check_int64("size", value)
    with rules_as_exceptions():
        _rules.check_size(value)
    return value


def row(name: str, value: int, count: int) -> None:
    """A row of a cache of this side, which has ``count``."""
    if value >= count:  # the rule, without the detour for what does not break it
        with rules_as_exceptions():
            _rules.check_row(name, value, count)


def tensors_per_layer(value: int) -> int:
    value = check_uint32("tensor_num_per_layer", value)
    with rules_as_exceptions():
        _rules.check_tensors_per_layer(value)
    return value


def pull_layers(kwargs: dict[str, Any], cache: Cache) -> tuple[range | None, range | None, int]:
    """(source layers, destination layers, tensors per layer) of a pull's keywords; unknown keywords are ignored."""
    source, destination = kwargs.get("src_layer_range"), kwargs.get("dst_layer_range")
    for name, layers in (("src_layer_range", source), ("dst_layer_range", destination)):
        check_isinstance(name, layers, range)
        if layers:
            raise_if_false(layers.step == 1, "{} must have step 1, but got {}", name, layers)
            raise_if_false(layers.start >= 0, "{} must start at 0 or more, but got {}", name, layers)
            check_uint32(name, layers.stop)
    count = tensors_per_layer(kwargs.get("tensor_num_per_layer", 2))
    with rules_as_exceptions():
        return *_rules.pull_layers(source, destination, cache.cache_desc.num_tensors, count), count


def push_layers(
    source: range | None, destination: range | None, cache: Cache, tensor_num_per_layer: int
) -> tuple[range, range, int]:
    """(source layers, destination layers, tensors per layer) of a push; empty: there is nothing to send."""
    check_layer_range("src_layer_range", source)
    check_layer_range("dst_layer_range", destination)
    count = tensors_per_layer(tensor_num_per_layer)
    with rules_as_exceptions():
        return *_rules.push_layers(source, destination, cache.cache_desc.num_tensors, count), count


def swap(src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> None:
    for name, cache in (("src_cache", src_cache), ("dst_cache", dst_cache)):
        check_object(name, cache, Cache)
        raise_if_false(cache.is_blocks_cache, "{} must be a blocks cache", name)
    check_isinstance("src_to_dst", src_to_dst, dict, allow_none=False)
    check_inner("src_to_dst", src_to_dst.keys(), int)
    check_inner("src_to_dst", src_to_dst.values(), int)
    source, destination = src_cache.cache_desc, dst_cache.cache_desc
    raise_if_false(source.num_tensors == destination.num_tensors, "the caches have different numbers of tensors")
    raise_if_false(
        source.size // source.batch_size == destination.size // destination.batch_size,
        "the caches have different block sizes",
    )
    raise_if_false(
        all(0 <= block < source.batch_size for block in src_to_dst), "src_to_dst names source blocks out of range"
    )
    raise_if_false(
        all(0 <= block < destination.batch_size for block in src_to_dst.values()),
        "src_to_dst names destination blocks out of range",
    )
    raise_if_false(
        {source.placement, destination.placement} == {Placement.HOST, Placement.DEVICE},
        "swap_blocks is between HOST and DEVICE",
    )


def memory(mem_infos: MemInfo | list[MemInfo]) -> None:
    """What ``remap_registered_memory`` takes: every violation is ``LLMException``."""
    infos = mem_infos if isinstance(mem_infos, list) else [mem_infos]
    for info in infos:
        raise_if_false(isinstance(info, MemInfo), "mem_infos only support MemInfo, but got {}", type(info).__name__)
        raise_if_false(info.mem_type == Memtype.MEM_TYPE_DEVICE, "only device memory can be remapped, not {}", info)
        for name, value in (("addr", info.addr), ("size", info.size)):
            raise_if_false(isinstance(value, int) and value > 0, "{} must be over 0 in {}", name, info)


# -- layer by layer


def transfer(
    src_cache: Cache,
    layer_synchronizer: LayerSynchronizer,
    transfer_configs: Sequence[TransferConfig | TransferWithCacheKeyConfig],
    src_block_indices: Sequence[int] | None,
    dst_block_indices: Sequence[int] | None,
    dst_block_memory_size: int | None,
    remote: bool,
) -> None:
    """The rules of ``transfer_cache_async``; writes the default range into configurations that have none."""
    check_isinstance("src_cache", src_cache, Cache, allow_none=False)
    raise_if_false(src_cache.cache_desc.placement != Placement.HOST, "src_cache must not be a HOST cache")
    check_isinstance("layer_synchronizer", layer_synchronizer, LayerSynchronizer, allow_none=False)
    check_isinstance("transfer_configs", transfer_configs, [list, tuple], allow_none=False)
    check_inner("transfer_configs", transfer_configs, TransferWithCacheKeyConfig if remote else TransferConfig)
    for name, blocks in (("src_block_indices", src_block_indices), ("dst_block_indices", dst_block_indices)):
        if blocks is not None:
            check_list_uint64(name, blocks)
    if dst_block_memory_size is not None:
        check_uint64("dst_block_memory_size", dst_block_memory_size)
    if src_block_indices:
        raise_if_false(
            dst_block_indices and len(src_block_indices) == len(dst_block_indices),
            "src_block_indices and dst_block_indices must have the same length",
        )
    elif dst_block_indices:
        raise_if_false(dst_block_memory_size is not None, "dst_block_memory_size is required without src_block_indices")
    raise_if_false(not dst_block_memory_size or dst_block_indices, "dst_block_memory_size needs dst_block_indices")
    num_tensors = src_cache.cache_desc.num_tensors
    raise_if_false(num_tensors % 2 == 0, "num_tensors of src_cache must be even, but is {}", num_tensors)
    for config in transfer_configs:
        raise_if_false(
            not src_block_indices or config.src_batch_index == 0,
            "src_batch_index must be 0 with src_block_indices, but is {}",
            config.src_batch_index,
        )
        _check_config(config, num_tensors // 2)


def _check_config(config: TransferConfig | TransferWithCacheKeyConfig, num_layers: int) -> None:
    if config.src_layer_range is None:
        config.src_layer_range = range(num_layers)
    layers = config.src_layer_range
    raise_if_false(layers.stop <= num_layers, "src_layer_range {} is outside the {} layers", layers, num_layers)
    if isinstance(config, TransferConfig):
        check_list_uint64("dst_addrs", config.dst_addrs)
        raise_if_false(
            len(config.dst_addrs) == 2 * len(layers),
            "dst_addrs must have 2 addresses for each of {} layers, but has {}",
            len(layers),
            len(config.dst_addrs),
        )
    else:
        raise_if_false(
            config.dst_layer_range is not None and len(config.dst_layer_range) == len(layers),
            "dst_layer_range must have as many layers as src_layer_range: {}",
            config,
        )
        if isinstance(config.cache_key, BlocksCacheKey):
            config.cache_key._check_ids()
        check_uint64("dst_cluster_id", config.dst_cluster_id)
