"""``CacheManager``: what each call checks before anything moves, and what it answers; with a real engine, no peer."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from datadist_side import Events, Side, status_of

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

INVALID = LLMStatusCode.LLM_PARAM_INVALID
NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK
NO_ID = 2**64 - 1
POOL = '{"memory_size": 1048576}'


def type_error(call: Callable[[], object]) -> None:
    with pytest.raises(TypeError):
        call()


def out_of_range(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        call()


def desc(num_tensors: int = 2, shape: Any = (4, 8), **more: Any) -> CacheDesc:
    return CacheDesc(num_tensors, list(shape), DataType.DT_INT8, **more)


@pytest.fixture
def manager(start_here: Callable[..., Side]) -> Any:
    return start_here(listen=False).manager


@pytest.fixture
def remote(start_here: Callable[..., Side]) -> Any:
    return start_here(listen=False, enable_remote_cache_accessible=True).manager


@pytest.fixture
def pooled(start_here: Callable[..., Side]) -> Any:
    return start_here(listen=False, mem_pool_cfg=POOL).manager


# --- registration


def test_registration_never_touches_memory_and_counts_from_1(manager: Any) -> None:
    first = manager.register_cache(desc(), [1, 2])
    second = manager.register_blocks_cache(desc(), [1, 2], BlocksCacheKey(0, 0))
    assert (first.cache_id, first.is_blocks_cache, first.tensor_addrs) == (1, False, [1, 2])
    assert (second.cache_id, second.is_blocks_cache, second.tensor_addrs) == (2, True, [1, 2])
    assert str(first) == "Cache(cache_id = 1, device_tensor_addrs = 2, is_blocks_cache = False)"
    for cache_id in (1, 1, 2, 99, -1):
        manager.unregister_cache(cache_id)
    assert manager.register_cache(desc(), [1, 2]).cache_id == 3


def test_arguments_of_register_cache(manager: Any) -> None:
    register = manager.register_cache
    for addrs in ([], [1], [1, 2, 3], [0, 1]):
        assert status_of(lambda a=addrs: register(desc(), a)) == INVALID
    for addrs in ((1, 2), [1, "2"], [1, -1], 1):
        type_error(lambda a=addrs: register(desc(), a))
    type_error(lambda: register(1, [1, 2]))
    type_error(lambda: register(desc(), [1, 2], [BlocksCacheKey(0)]))
    type_error(lambda: register(desc(), [1, 2], None))
    type_error(lambda: register(desc(), [1, 2], (), 1))
    for shape in ([4, 0], [-1, 8], [1] * 32, [1 << 40, 1 << 30]):
        assert status_of(lambda s=shape: register(desc(shape=s), [1, 2])) == INVALID
    assert register(desc(shape=[1] * 31), [1, 2]).cache_id > 0


def test_arguments_of_register_blocks_cache(manager: Any) -> None:
    register = manager.register_blocks_cache
    for addrs in ([], [1]):
        assert status_of(lambda a=addrs: register(desc(), a)) == INVALID
    for addrs in ((1, 2), [1, -1]):
        type_error(lambda a=addrs: register(desc(), a))
    type_error(lambda: register(desc(), [1, 2], CacheKey(0, 1)))
    described = desc()
    register(described, [1, 2])
    assert described._is_blocks
    assert not manager.register_cache(described, [1, 2]).is_blocks_cache


def test_address_0_is_nowhere_and_fine_where_nobody_reaches_it(manager: Any) -> None:
    host = desc(placement=Placement.HOST)
    for private in ((host, None), (desc(), False)):
        cache = manager.register_blocks_cache(private[0], [0, 1], None, private[1])
        assert cache.tensor_addrs == [0, 1]
    for reached in ((desc(), None), (host, True)):
        assert status_of(lambda r=reached: manager.register_blocks_cache(r[0], [0, 1], None, r[1])) == INVALID
    cpu = Cache.create_cpu_cache(host, [1, 1])
    device = manager.register_blocks_cache(desc(), [0, 1], None, False)
    for swap in ((cpu, device), (device, cpu)):
        assert status_of(lambda s=swap: manager.swap_blocks(*s, {0: 0})) == INVALID


def test_more_keys_than_rows_and_keys_named_twice_are_fine_when_registering(manager: Any) -> None:
    keys = [CacheKey(0, 1), CacheKey(0, NO_ID), CacheKey(0, 1), CacheKey(0, NO_ID, 0, 5)]
    assert manager.register_cache(desc(shape=[4, 8]), [1, 2], keys).cache_id == 1


def test_remote_accessible_after_link(manager: Any) -> None:
    manager.set_is_call_linked()
    assert status_of(lambda: manager.register_cache(desc(), [1, 2], (), True)) == INVALID
    assert status_of(lambda: manager.register_blocks_cache(desc(), [1, 2], None, True)) == INVALID
    assert manager.register_cache(desc(), [1, 2]).cache_id == 1


def test_arguments_of_unregister(manager: Any) -> None:
    type_error(lambda: manager.unregister_cache("1"))
    out_of_range(lambda: manager.unregister_cache(1 << 63))


# --- allocation


def test_allocation_comes_from_the_configured_pool(pooled: Any) -> None:
    cache = pooled.allocate_cache(desc(2, [4, 8]), [CacheKey(0, 1)])
    blocks = pooled.allocate_blocks_cache(desc(2, [4, 8]), BlocksCacheKey(0, 3))
    assert (cache.cache_id, blocks.cache_id) == (1, 2)
    assert len(cache.tensor_addrs) == 2
    assert len({*cache.tensor_addrs, *blocks.tensor_addrs}) == 4
    assert status_of(lambda: pooled.deallocate_cache(blocks)) == INVALID
    assert status_of(lambda: pooled.deallocate_blocks_cache(cache)) == INVALID
    pooled.deallocate_cache(cache)
    pooled.deallocate_blocks_cache(blocks)
    assert cache.tensor_addrs == blocks.tensor_addrs == []
    pooled.deallocate_cache(cache)


def test_allocated_keys_are_bound_once(pooled: Any) -> None:
    pooled.allocate_cache(desc(1, [2, 8]), [CacheKey(0, 1)])
    pooled.allocate_blocks_cache(desc(1), BlocksCacheKey(0, 3))
    for keys in ([CacheKey(0, 1)], [CacheKey(0, 5), CacheKey(0, 5)], [CacheKey(0, i) for i in (6, 7, 8)]):
        assert status_of(lambda k=keys: pooled.allocate_cache(desc(1, [2, 8]), k)) == INVALID
    assert status_of(lambda: pooled.allocate_blocks_cache(desc(1), BlocksCacheKey(0, 3))) == INVALID
    pooled.remove_cache_key(CacheKey(9, 1))
    pooled.remove_cache_key(CacheKey(9, 1))
    pooled.allocate_cache(desc(1, [2, 8]), [CacheKey(0, 1)])


def test_a_pool_that_is_full_gives_back_what_it_got(pooled: Any) -> None:
    big = desc(1, [8, 128 * 1024])  # all of the pool
    for _ in range(3):
        cache = pooled.allocate_cache(big)
        assert status_of(lambda: pooled.allocate_cache(desc(1))) == LLMStatusCode.LLM_OUT_OF_MEMORY
        pooled.deallocate_cache(cache)
    assert status_of(lambda: pooled.allocate_cache(desc(3, [8, 64 * 1024]))) == LLMStatusCode.LLM_OUT_OF_MEMORY
    pooled.allocate_cache(big)


@pytest.mark.parametrize("page_shift", [10, 11, 12, 16, 20])
def test_pages_of_a_pool(start_here: Callable[..., Side], page_shift: int) -> None:
    pool = f'{{"memory_size": 1048576, "page_shift": {page_shift}}}'
    manager = start_here(listen=False, mem_pool_cfg=pool).manager
    cache = manager.allocate_cache(desc(1))
    assert cache.tensor_addrs[0] % 4096 == 0
    if page_shift == 20:  # all of it was one page
        assert status_of(lambda: manager.allocate_cache(desc(1))) == LLMStatusCode.LLM_OUT_OF_MEMORY


def test_each_placement_has_its_own_share(start_here: Callable[..., Side]) -> None:
    pools = {"mem_pool_cfg": '{"memory_size": 1048576}', "host_mem_pool_cfg": '{"memory_size": 524288}'}
    manager = start_here(**pools).manager
    for placement, size in ((Placement.DEVICE, 1 << 20), (Placement.HOST, 1 << 19)):
        for _ in range(2):
            cache = manager.allocate_cache(desc(2, [8, size // 16], placement=placement))
            for more in (1, 3):
                call = lambda p=placement, n=more: manager.allocate_blocks_cache(desc(n, placement=p))  # noqa: E731
                assert status_of(call) == LLMStatusCode.LLM_OUT_OF_MEMORY
            manager.deallocate_cache(cache)
    type_error(lambda: manager.allocate_cache(desc(), [1]))
    manager.allocate_cache(desc(2, [8, 1 << 16]))  # what failed has taken nothing


def test_allocation_rules(pooled: Any) -> None:
    assert status_of(lambda: pooled.allocate_cache(desc(0))) == INVALID
    assert status_of(lambda: pooled.allocate_cache(desc(placement=Placement.HOST))) == INVALID
    assert status_of(lambda: pooled.allocate_cache(desc(shape=[0]))) == INVALID
    type_error(lambda: pooled.allocate_cache(desc(), None))
    type_error(lambda: pooled.allocate_blocks_cache(desc(), CacheKey(0, 1)))
    type_error(lambda: pooled.deallocate_cache(1))


def test_without_a_pool(manager: Any) -> None:
    not_enabled = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    cache = manager.register_cache(desc(), [1, 2])
    assert status_of(lambda: manager.allocate_cache(desc())) == INVALID
    assert status_of(lambda: manager.deallocate_cache(cache)) == not_enabled
    assert status_of(lambda: manager.remove_cache_key(CacheKey(0, 1))) == not_enabled
    type_error(lambda: manager.remove_cache_key(BlocksCacheKey(0)))


def test_deallocating_a_registered_cache_only_forgets_its_addresses(pooled: Any) -> None:
    cache = pooled.register_cache(desc(), [1, 2])
    pooled.deallocate_cache(cache)
    assert cache.tensor_addrs == []


# --- keys


NOBODY = [(None, 0), (-1, 0), (1 << 64, 0), (5, None), (5, -1), (5, 1 << 64)]


@pytest.mark.parametrize("ids", NOBODY)
def test_a_blocks_key_of_nobody_is_a_type_error_wherever_it_is_used(remote: Any, ids: tuple[Any, Any]) -> None:
    key = BlocksCacheKey(*ids)  # which lets it through
    cache = remote.register_blocks_cache(desc(), [1, 2])
    uses: dict[str, Callable[[], object]] = {
        "pull": lambda: remote.pull_blocks(key, cache, [0], [0]),
        "push": lambda: remote.push_blocks(key, cache, [0], [0]),
        "register": lambda: remote.register_blocks_cache(desc(), [1, 2], key),
        "transfer": lambda: remote.transfer_cache_async(
            cache, Events(1), [TransferWithCacheKeyConfig(key, range(1), range(1))], [0], [0]
        ),
    }
    for use in uses.values():
        with pytest.raises(TypeError, match="cluster_id and model_id only support"):
            use()


def test_allocating_for_a_key_of_nobody_takes_nothing(pooled: Any) -> None:
    for ids in NOBODY:
        type_error(lambda i=ids: pooled.allocate_blocks_cache(desc(), BlocksCacheKey(*i)))
    assert pooled.allocate_cache(desc()).cache_id == 1


def test_keys_of_true_and_of_the_largest_ids_are_keys(remote: Any) -> None:
    rows, blocks = remote.register_cache(desc(), [1, 2]), remote.register_blocks_cache(desc(), [1, 2])
    for number in (True, NO_ID):
        key = BlocksCacheKey(number, number)
        for call in (remote.pull_blocks, remote.push_blocks):
            assert status_of(lambda c=call, k=key: c(k, blocks, [0], [0])) in (NOT_LINKED, INVALID)  # 1 is this side
        remote.register_blocks_cache(desc(), [1, 2], key)
    assert status_of(lambda: remote.push_cache(CacheKeyByIdAndIndex(NO_ID, True, True), rows)) == NOT_LINKED


# --- pull


def test_arguments_of_pull_cache(manager: Any) -> None:
    cache = manager.register_cache(desc(4), [1, 2, 3, 4])
    blocks = manager.register_blocks_cache(desc(4), [1, 2, 3, 4])
    pull, key = manager.pull_cache, CacheKey(5, 1)
    assert status_of(lambda: pull(key, cache)) == NOT_LINKED
    assert status_of(lambda: pull(CacheKeyByIdAndIndex(5, 1), cache)) == NOT_LINKED
    assert status_of(lambda: pull(key, cache, unknown=1)) == NOT_LINKED
    assert status_of(lambda: pull(key, blocks)) == INVALID
    for neither_or_both in (CacheKey(5, NO_ID), CacheKey(5, 1, 0, 1)):
        assert status_of(lambda k=neither_or_both: pull(k, cache)) == INVALID
    assert status_of(lambda: pull(CacheKey(5, NO_ID, 0, 1), cache)) == NOT_LINKED
    for size in (0, -2):
        assert status_of(lambda s=size: pull(key, cache, 0, s)) == INVALID
    for wrong in ((BlocksCacheKey(5), cache), (key, 1), (key, cache, "0"), (key, cache, None), (key, cache, 0, 1.0)):
        type_error(lambda w=wrong: pull(*w))
    out_of_range(lambda: pull(key, cache, -1))
    assert status_of(lambda: pull(key, cache, 4), "batch_index is 4, the cache has 4 rows") == INVALID
    with pytest.raises(AttributeError):
        pull(None, cache)
    gone = Cache(99, desc(), [1, 2], manager)
    assert status_of(lambda: pull(key, gone)) == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


@pytest.mark.parametrize("blocks", [False, True])
def test_layer_arguments_of_pulls(manager: Any, blocks: bool) -> None:
    def pull(**layers: Any) -> None:
        if blocks:
            manager.pull_blocks(BlocksCacheKey(5), cache, [0], [0], **layers)
        else:
            manager.pull_cache(CacheKey(5, 1), cache, **layers)

    register = manager.register_blocks_cache if blocks else manager.register_cache
    cache = register(desc(4), [1, 2, 3, 4])
    good = {"src_layer_range": range(2), "dst_layer_range": range(2)}
    for fine in (
        good,
        {"src_layer_range": range(0), "dst_layer_range": None},
        {"tensor_num_per_layer": 99},
        good | {"tensor_num_per_layer": 1},
    ):
        assert status_of(lambda f=fine: pull(**f)) == NOT_LINKED
    for broken in (
        {"src_layer_range": range(0, 4, 2)},
        {"src_layer_range": range(-1, 1)},
        {"dst_layer_range": range(0, 4, 2)},
        {"src_layer_range": range(1), "dst_layer_range": range(2)},
        {"dst_layer_range": range(2, 3)},
        {"src_layer_range": range(1)},
        good | {"tensor_num_per_layer": 3},
        {"tensor_num_per_layer": 0},
    ):
        assert status_of(lambda b=broken: pull(**b)) == INVALID
    for wrong in (
        {"src_layer_range": [0]},
        {"dst_layer_range": 1},
        {"tensor_num_per_layer": 1.0},
        {"tensor_num_per_layer": "1"},
    ):
        type_error(lambda w=wrong: pull(**w))
    out_of_range(lambda: pull(tensor_num_per_layer=-1))
    out_of_range(lambda: pull(src_layer_range=range(1 << 32)))


def test_arguments_of_pull_blocks(manager: Any) -> None:
    cache = manager.register_blocks_cache(desc(), [1, 2])
    rows = manager.register_cache(desc(), [1, 2])
    pull, key, by_row = manager.pull_blocks, BlocksCacheKey(5), CacheKey(5, 1)
    assert status_of(lambda: pull(key, cache, [0], (1,))) == NOT_LINKED
    assert status_of(lambda: pull(by_row, cache, (), [1])) == NOT_LINKED
    assert status_of(lambda: pull(CacheKeyByIdAndIndex(5, 1), cache, [], [1])) == NOT_LINKED
    for broken in ((key, rows, [0], [1]), (key, cache, [0], []), (key, cache, [], [1]), (by_row, cache, [0], [1])):
        assert status_of(lambda b=broken: pull(*b)) == INVALID
    assert status_of(lambda: pull(CacheKey(5, NO_ID), cache, [], [1])) == INVALID
    for wrong in (
        (1, cache, [0], [1]),
        (key, 1, [0], [1]),
        (key, cache, None, [1]),
        (key, cache, [0], None),
        (key, cache, [0], range(1)),
        (key, cache, ["0"], [1]),
        (key, cache, [0.0], [1]),
        (key, cache, [-1], [1]),
        (key, cache, [0], [-1]),
    ):
        type_error(lambda w=wrong: pull(*w))


def test_remote_mode_pulls_by_id_alone(remote: Any) -> None:
    cache = remote.register_cache(desc(), [1, 2])
    type_error(lambda: remote.pull_cache(CacheKey(5, 1), cache))
    assert status_of(lambda: remote.pull_cache(CacheKeyByIdAndIndex(5, 1), cache)) == NOT_LINKED


def test_remote_mode_moves_remote_accessible_caches_alone(remote: Any) -> None:
    key = CacheKeyByIdAndIndex(5, 1)
    for cache in (
        remote.register_cache(desc(), [1, 2], (), False),
        remote.register_cache(desc(placement=Placement.HOST), [1, 2]),
    ):
        assert status_of(lambda c=cache: remote.pull_cache(key, c)) == INVALID
    open_host = remote.register_cache(desc(placement=Placement.HOST), [1, 2], (), True)
    assert status_of(lambda: remote.pull_cache(key, open_host)) == NOT_LINKED


# --- push


def test_pushing_needs_remote_mode(manager: Any) -> None:
    rows, blocks = manager.register_cache(desc(), [1, 2]), manager.register_blocks_cache(desc(), [1, 2])
    assert status_of(lambda: manager.push_cache(CacheKeyByIdAndIndex(5, 1), rows)) == INVALID
    assert status_of(lambda: manager.push_blocks(BlocksCacheKey(5), blocks, [0], [0])) == INVALID


def test_arguments_of_push_cache(remote: Any) -> None:
    cache = remote.register_cache(desc(10), list(range(1, 11)))
    blocks = remote.register_blocks_cache(desc(), [1, 2])
    push, key = remote.push_cache, CacheKeyByIdAndIndex(5, 1)
    assert status_of(lambda: push(key, cache)) == NOT_LINKED
    assert status_of(lambda: push(key, blocks)) == INVALID
    assert status_of(lambda: push(key, cache, size=8)) == INVALID
    for layers in (
        (range(0), None),
        (range(0, 4, 2), range(2)),
        (range(1), range(2)),
        (range(1), None),
        (range(5, 6), range(1)),
    ):
        assert status_of(lambda r=layers: push(key, cache, 0, *r)) == INVALID
    assert status_of(lambda: push(key, cache, tensor_num_per_layer=3)) == INVALID
    assert status_of(lambda: push(key, cache, tensor_num_per_layer=0)) == INVALID
    for wrong in ((None, cache), (CacheKey(5, 1), cache), (key, 1), (key, cache, "0"), (key, cache, 0, [0])):
        type_error(lambda w=wrong: push(*w))
    out_of_range(lambda: push(key, cache, -1))
    assert status_of(lambda: push(key, cache, 4), "src_batch_index is 4, the cache has 4 rows") == INVALID
    out_of_range(lambda: push(key, cache, tensor_num_per_layer=-1))
    push(key, cache, tensor_num_per_layer=11)  # no layer at all: nothing is sent, not even a link is looked for


def test_arguments_of_push_blocks(remote: Any) -> None:
    cache = remote.register_blocks_cache(desc(), [1, 2])
    rows = remote.register_cache(desc(), [1, 2])
    push, key = remote.push_blocks, BlocksCacheKey(5)
    assert status_of(lambda: push(key, cache, [0], [1])) == NOT_LINKED
    for broken in (
        (key, rows, [0], [1]),
        (key, cache, [0], []),
        (key, cache, [], [1]),
        (key, cache, None, [1]),
        (key, cache, [0, 1], [1]),
    ):
        assert status_of(lambda b=broken: push(*b)) == INVALID
    for wrong in ((CacheKeyByIdAndIndex(5, 1), cache, [0], [1]), (key, cache, 0, [1]), (key, cache, [-1], [1])):
        type_error(lambda w=wrong: push(*w))
    with pytest.raises(AttributeError):
        push(None, cache, [0], [1])


# --- layer by layer


def test_arguments_of_transfer_cache_async(manager: Any) -> None:
    cache = manager.register_cache(desc(4), [1, 2, 3, 4])
    odd = manager.register_cache(desc(3), [1, 2, 3])
    host = manager.register_cache(desc(4, placement=Placement.HOST), [1, 2, 3, 4])
    transfer, events = manager.transfer_cache_async, Events(2)
    config = TransferConfig(5, [1, 2, 3, 4])
    one = TransferConfig(5, [1, 2], range(1))
    row_2 = TransferConfig(5, [1, 2, 3, 4], None, 2)
    for wrong in (
        (None, events, [config]),
        (cache, None, [config]),
        (cache, object(), [config]),
        (cache, events, config),
        (cache, events, None),
        (cache, events, [None]),
        (cache, events, [TransferWithCacheKeyConfig(BlocksCacheKey(5), range(1), range(1))]),
        (cache, events, [config], 1),
        (cache, events, [config], [0], ["1"]),
        (cache, events, [config], None, [0], "8"),
    ):
        type_error(lambda w=wrong: transfer(*w))
    out_of_range(lambda: transfer(cache, events, [config], [-1], [0]))
    for broken in (
        (host, events, [config]),
        (odd, events, [one]),
        (cache, events, [TransferConfig(5, [1, 2], range(2, 3))]),
        (cache, events, [TransferConfig(5, [1, 2, 3])]),
        (cache, events, [config], [0]),
        (cache, events, [config], [0, 1], [0]),
        (cache, events, [row_2], [0], [0]),
        (cache, events, [config], None, [0]),
        (cache, events, [config], None, None, 8),
    ):
        assert status_of(lambda b=broken: transfer(*b)) == INVALID, broken
    for blocks, size in (([0], 0), ([0], 32), ([0] * 5, 8)):  # the engine's refusals are the task's to tell
        assert transfer(cache, events, [config], None, blocks, size).get_results() == [INVALID]
    row_4 = TransferConfig(5, [1, 2, 3, 4], None, 4)
    assert transfer(cache, events, [row_4]).get_results(5000) == [INVALID]


def test_a_missing_range_is_written_back(manager: Any) -> None:
    cache = manager.register_cache(desc(4), [1, 2, 3, 4])
    config = TransferConfig(5, [1, 2, 3, 4])
    task = manager.transfer_cache_async(cache, Events(2), (config,))
    assert config.src_layer_range == range(2)
    assert task.get_results(5000) == [NOT_LINKED]
    assert task.synchronize(5000) == NOT_LINKED


def test_no_configurations_are_a_task_that_is_done(manager: Any) -> None:
    cache = manager.register_cache(desc(4), [1, 2, 3, 4])
    assert manager.transfer_cache_async(cache, Events(2), []).synchronize(5000) == LLMStatusCode.LLM_SUCCESS


def test_remote_mode_transfers_by_key(remote: Any) -> None:
    cache = remote.register_cache(desc(4), [1, 2, 3, 4])
    type_error(lambda: remote.transfer_cache_async(cache, Events(2), [TransferConfig(5, [1, 2, 3, 4])]))
    config = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(5, 1), range(2), range(2))
    assert remote.transfer_cache_async(cache, Events(2), [config]).synchronize(5000) == NOT_LINKED


# --- within this process


def arrays(manager: Any, blocks: bool, **how: Any) -> tuple[Any, list[Any]]:
    memory = [np.zeros((4, 8), np.int8) for _ in range(2)]
    register = manager.register_blocks_cache if blocks else manager.register_cache
    return register(desc(**how), [array.ctypes.data for array in memory]), memory


def test_copy_cache(manager: Any) -> None:
    (source, theirs), (destination, mine) = arrays(manager, False), arrays(manager, False, placement=Placement.HOST)
    blocks, _ = arrays(manager, True)
    for index, array in enumerate(theirs):
        array[...] = np.arange(32).reshape(4, 8) + 1 + index
    copy = manager.copy_cache
    copy(destination, source, 3, 1)
    copy(destination, source, dst_batch_index=0, size=3, req_id=7)
    for got, sent in zip(mine, theirs, strict=True):
        assert (got[3] == sent[1]).all()
        assert (got[0][:3] == sent[0][:3]).all()
        assert not got[0][3:].any()
        assert not got[1:3].any()
    for broken in (
        lambda: copy(blocks, source),
        lambda: copy(destination, source, size=0),
        lambda: copy(destination, source, 4),
    ):
        assert status_of(broken) == INVALID
    type_error(lambda: copy(destination, 1))
    out_of_range(lambda: copy(destination, source, offset=-1))
    out_of_range(lambda: copy(destination, source, req_id=-1))


def test_copy_cache_from_an_offset_on(manager: Any) -> None:
    (source, theirs), (destination, mine) = arrays(manager, False), arrays(manager, False)
    for array in theirs:
        array[...] = np.arange(32).reshape(4, 8) + 1
    manager.copy_cache(destination, source, 2, 1, offset=3, size=2)
    manager.copy_cache(destination, source, 3, 1, offset=6)
    for array in mine:
        assert array[2].tolist() == [0, 0, 0, 12, 13, 0, 0, 0]
        assert array[3].tolist() == [0] * 6 + [15, 16]
        assert not array[:2].any()
    for how in ({"offset": 8}, {"offset": 3, "size": 6}, {"src_batch_index": 4}):
        assert status_of(lambda h=how: manager.copy_cache(destination, source, **h)) == INVALID


def test_copy_cache_moves_the_sources_row(manager: Any) -> None:
    source, theirs = arrays(manager, False)
    memory = [np.zeros((2, 12), np.int8) for _ in range(2)]
    longer = manager.register_cache(desc(shape=[2, 12]), [array.ctypes.data for array in memory])
    theirs[1][3] = 7
    manager.copy_cache(longer, source, 1, 3)
    assert memory[1].tolist() == [[0] * 12, [7] * 8 + [0] * 4]
    assert status_of(lambda: manager.copy_cache(source, longer)) == INVALID  # it would not fit


def test_copy_blocks(manager: Any) -> None:
    cache, memory = arrays(manager, True)
    rows, _ = arrays(manager, False)
    for array in memory:
        array[0], array[1] = 5, 6
    manager.copy_blocks(cache, {})
    manager.copy_blocks(cache, {0: [2, 3], 1: [3]})
    for array in memory:
        assert array[:, 0].tolist() == [5, 6, 5, 6]
    assert status_of(lambda: manager.copy_blocks(rows, {0: [1]})) == INVALID
    assert status_of(lambda: manager.copy_blocks(cache, {0: [4]})) == INVALID
    for wrong in ([], {"0": [1]}, {0: (1,)}, {0: ["1"]}, {0: [-1]}, {-1: [0]}):
        type_error(lambda w=wrong: manager.copy_blocks(cache, w))


def test_swap_blocks(manager: Any) -> None:
    (device, theirs), (host, mine) = arrays(manager, True), arrays(manager, True, placement=Placement.HOST)
    rows, _ = arrays(manager, False)
    theirs[0][1], theirs[1][1] = 5, 6
    manager.swap_blocks(device, host, {1: 3})
    assert mine[0][3].tolist() == [5] * 8
    assert mine[1][3].tolist() == [6] * 8
    smaller = manager.register_blocks_cache(desc(shape=[4, 4], placement=Placement.HOST), [1, 2])
    for broken in (
        (device, device, {0: 0}),
        (rows, host, {0: 0}),
        (device, smaller, {0: 0}),
        (device, host, {4: 0}),
        (device, host, {0: 4}),
    ):
        assert status_of(lambda b=broken: manager.swap_blocks(*b)) == INVALID
    for wrong in ((1, host, {}), (device, host, []), (device, host, {"0": 0})):
        type_error(lambda w=wrong: manager.swap_blocks(*w))


def test_swap_blocks_with_a_cpu_cache(manager: Any) -> None:
    device, theirs = arrays(manager, True)
    mine = [np.zeros((4, 8), np.int8) for _ in range(2)]
    cpu = Cache.create_cpu_cache(desc(placement=Placement.HOST), [array.ctypes.data for array in mine])
    theirs[0][1], theirs[1][1] = 5, 6
    manager.swap_blocks(device, cpu, {1: 3})
    manager.swap_blocks(cpu, device, {3: 0})
    for memory in (mine[0][3], theirs[0][0]):
        assert memory.tolist() == [5] * 8
    assert mine[1][3].tolist() == theirs[1][0].tolist() == [6] * 8
    assert not mine[0][:3].any()
    # Blocks are a cache's size over its batch: where dim 0 of the other one counts something else, nothing is moved.
    odd = manager.register_blocks_cache(desc(shape=[2, 16], batch_dim_index=1), [array.ctypes.data for array in theirs])
    small = Cache.create_cpu_cache(desc(shape=[16, 2], placement=Placement.HOST), [array.ctypes.data for array in mine])
    before = [array.copy() for array in (*mine, *theirs)]
    for pair in ((odd, small), (small, odd)):
        assert status_of(lambda p=pair: manager.swap_blocks(*p, {1: 3})) == INVALID
    assert all((array == was).all() for array, was in zip((*mine, *theirs), before, strict=True))
    nowhere = Cache.create_cpu_cache(desc(placement=Placement.HOST), [1, 2])
    assert status_of(lambda: manager.swap_blocks(nowhere, device, {0: 0})) == INVALID
    assert manager.register_cache(desc(), [1, 2]).cache_id == 3  # nothing else was registered on the way


def test_check_cache_key(manager: Any) -> None:
    manager.check_cache_key(CacheKey(0, 1))
    assert status_of(lambda: manager.check_cache_key(CacheKey(0, NO_ID))) == INVALID
