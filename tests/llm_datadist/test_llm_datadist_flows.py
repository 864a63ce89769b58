"""The flows of the vendor's guides, between two processes, with numpy memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from datadist_side import Side, at, status_of

from llm_datadist import LLMStatusCode
from support import Peer

pytestmark = pytest.mark.quick(
    "by_its_request_key[map",
    "pulled_and_pushed[socket]",
    "used_up_by_its_pull",
)

HERE, THERE = 1, 0
SUCCESS = LLMStatusCode.LLM_SUCCESS
SHAPE = [4, 4, 8]
NO_ID, PREFIX = 2**64 - 1, 900
MANY_BLOCKS = [10, 128]


def filled(peer: Peer, **how: Any) -> int:
    cache = int(peer.call("register", **how))
    peer.call("fill", cache)
    return cache


def test_whole_cache_is_pulled_by_its_request_key(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    source = filled(there, shape=SHAPE, req_ids=[1])
    mine = here.register(SHAPE)
    here.pull_cache(("request", THERE, 1, 0), mine, 1)
    for got, sent in zip(here.tensors(mine), there.call("tensors", source), strict=True):
        assert np.array_equal(got[1], sent[0])
        assert not got[[0, 2, 3]].any()
    here.unregister(mine)
    there.call("unregister", source)
    assert here.unlink(THERE, there.call("where")) == (SUCCESS, [SUCCESS])
    here.finalize()
    there.call("finalize")


def test_prompt_side_pushes_layer_by_layer_to_addresses(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    mine = here.register(SHAPE)
    source = there.call("register", SHAPE)
    task = there.call("start", source, [("addresses", HERE, here.addresses(mine), None, 0)])
    for layer in range(2):
        there.call("compute", task, source, layer, 1.0)
    assert there.call("results", task) == [SUCCESS]
    assert there.call("synchronize", task) == SUCCESS
    for index, address in enumerate(here.caches[mine].per_device_tensor_addrs[0]):
        view = at(address, SHAPE)
        assert (view[0] == 1.0 + index).all()
        assert not view[1:].any()


def test_blocks_are_pulled_and_pushed(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    source = filled(there, shape=MANY_BLOCKS, blocks=True, model=0)
    mine = here.register(MANY_BLOCKS, blocks=True, model=0)
    sent = there.call("tensors", source)

    here.pull_blocks(("blocks", THERE, 0), mine, [0, 1], [2, 3])
    for got, tensor in zip(here.tensors(mine), sent, strict=True):
        assert np.array_equal(got[[2, 3]], tensor[[0, 1]])
        assert not got[[0, 1, 4, 5, 6, 7, 8, 9]].any()

    task = there.call("start", source, [("addresses", HERE, here.addresses(mine), None, 0)], [0, 1], [6, 7])
    there.call("all_ready", task)
    assert there.call("results", task) == [SUCCESS]
    for got, tensor in zip(here.tensors(mine), sent, strict=True):
        assert np.array_equal(got[[6, 7]], tensor[[0, 1]])
        assert not got[[0, 1, 4, 5, 8, 9]].any()


def test_blocks_fill_in_any_order(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    source = filled(there, shape=MANY_BLOCKS, blocks=True, model=3)
    mine = here.register(MANY_BLOCKS, blocks=True)
    here.pull_blocks(("blocks", THERE, 3), mine, [0, 1, 2, 3], [3, 2, 1, 0])
    for got, sent in zip(here.tensors(mine), there.call("tensors", source), strict=True):
        assert np.array_equal(got[[3, 2, 1, 0]], sent[[0, 1, 2, 3]])


def test_a_block_named_twice_keeps_its_last_writer(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    source = filled(there, shape=MANY_BLOCKS, blocks=True, model=0)
    mine = here.register(MANY_BLOCKS, blocks=True)
    here.pull_blocks(("blocks", THERE, 0), mine, [0, 5, 5], [4, 4, 1])
    got, sent = here.tensors(mine)[0], there.call("tensors", source)[0]
    assert np.array_equal(got[4], sent[5])
    assert np.array_equal(got[1], sent[5])


@pytest.mark.parametrize(("width", "source", "into"), [(1, (2, 6), (4, 8)), (2, (1, 3), (2, 4)), (4, (1, 2), (0, 1))])
def test_layer_ranges_are_tensors(
    linked: tuple[Side, Peer], width: int, source: tuple[int, int], into: tuple[int, int]
) -> None:
    here, there = linked
    far = filled(there, shape=SHAPE, tensors=8, req_ids=[1])
    mine = here.register(SHAPE, tensors=8)
    here.pull_cache(
        ("request", THERE, 1, 0), mine, src_layer_range=source, dst_layer_range=into, tensor_num_per_layer=width
    )
    sent, got = there.call("tensors", far), here.tensors(mine)
    for tensor in range(8):
        if into[0] * width <= tensor < into[1] * width:
            assert np.array_equal(got[tensor][0], sent[tensor - into[0] * width + source[0] * width][0])
        else:
            assert not got[tensor].any()


def test_one_layer_range_alone_must_fill_the_other_side(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    far = filled(there, shape=SHAPE, tensors=8, req_ids=[1])
    small = here.register(SHAPE, tensors=4)
    big = here.register(SHAPE, tensors=12)
    key = ("request", THERE, 1, 0)
    sent = there.call("tensors", far)

    here.pull_cache(key, small, src_layer_range=(1, 3))
    assert all(np.array_equal(here.tensors(small)[i][0], sent[i + 2][0]) for i in range(4))
    here.pull_cache(key, big, dst_layer_range=(2, 6))
    assert all(np.array_equal(here.tensors(big)[i + 4][0], sent[i][0]) for i in range(8))

    for cache, layers in ((small, {"dst_layer_range": (0, 2)}), (big, {"src_layer_range": (0, 2)})):
        assert status_of(lambda c=cache, m=layers: here.pull_cache(key, c, **m)) == LLMStatusCode.LLM_PARAM_INVALID


def test_part_of_a_row(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    far = filled(there, shape=SHAPE, req_ids=[1, 2])
    mine = here.register(SHAPE)
    here.pull_cache(("request", THERE, 2, 0), mine, 3, 64)
    for got, sent in zip(here.tensors(mine), there.call("tensors", far), strict=True):
        assert np.array_equal(got[3].reshape(-1)[:16], sent[1].reshape(-1)[:16])
        assert not got[3].reshape(-1)[16:].any()
    assert status_of(lambda: here.pull_cache(("request", THERE, 2, 0), mine, 0, 129)) == LLMStatusCode.LLM_PARAM_INVALID


def test_a_row_fills_blocks_and_the_last_listed_one_gets_the_rest(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    far = filled(there, shape=[2, 20], tensors=2, req_ids=[1, 2])
    mine = here.register([6, 8], tensors=2, blocks=True)
    here.pull_blocks(("request", THERE, 2, 0), mine, [], [5, 0, 3])
    for got, sent in zip(here.tensors(mine), there.call("tensors", far), strict=True):
        assert np.array_equal(got[5], sent[1][:8])
        assert np.array_equal(got[0], sent[1][8:16])
        assert np.array_equal(got[3], [*sent[1][16:], 0, 0, 0, 0])
        assert not got[[1, 2, 4]].any()


def test_single_layers_are_pushed_one_at_a_time(
    start_here: Callable[..., Side], start_there: Callable[..., Peer]
) -> None:
    here = start_here(enable_remote_cache_accessible=True)
    there = start_there(enable_remote_cache_accessible=True)
    assert here.link(THERE, there.call("where"))[0] == SUCCESS
    far = there.call("register", SHAPE, 8)
    far_blocks = there.call("register", MANY_BLOCKS, 8, blocks=True, model=5)
    mine, my_blocks = here.register(SHAPE, 8), here.register(MANY_BLOCKS, 8, blocks=True)
    here.fill(mine)
    here.fill(my_blocks)
    for layer in range(4):
        one = (layer, layer + 1)
        here.push_cache(("id", THERE, far, 2), mine, 1, src_layer_range=one, dst_layer_range=one)
        here.push_blocks(("blocks", THERE, 5), my_blocks, [0, 1], [8, 2], src_layer_range=one, dst_layer_range=one)
        for tensor, array in enumerate(there.call("tensors", far)):
            assert array.any() == (tensor < 2 * layer + 2)
    for got, sent in zip(there.call("tensors", far), here.tensors(mine), strict=True):
        assert np.array_equal(got[2], sent[1])
        assert not got[[0, 1, 3]].any()
    for got, sent in zip(there.call("tensors", far_blocks), here.tensors(my_blocks), strict=True):
        assert np.array_equal(got[[8, 2]], sent[[0, 1]])
        assert not got[[0, 1, 3, 4, 5, 6, 7, 9]].any()

    here.pull_cache(("id", THERE, far, 2), mine, 3)
    assert all(np.array_equal(array[3], array[1]) for array in here.tensors(mine))


def test_pull_with_no_ranges_needs_equal_counts_of_tensors(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    filled(there, shape=SHAPE, tensors=2, req_ids=[1])
    mine = here.register(SHAPE, tensors=4)
    assert status_of(lambda: here.pull_cache(("request", THERE, 1, 0), mine)) == LLMStatusCode.LLM_PARAM_INVALID


def test_both_sides_of_one_link_may_pull(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    mine = here.register(SHAPE, req_ids=[9])
    here.fill(mine)
    far = there.call("register", SHAPE)
    there.call("pull_cache", ("request", HERE, 9, 0), far, 2)
    for got, sent in zip(there.call("tensors", far), here.tensors(mine), strict=True):
        assert np.array_equal(got[2], sent[0])


def test_a_missing_key_is_its_callers_affair_alone(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    filled(there, shape=MANY_BLOCKS, tensors=1, blocks=True, model=0)
    mine = here.register(MANY_BLOCKS, tensors=1, blocks=True)
    good, missing = ("blocks", THERE, 0), ("blocks", THERE, 77)
    failed = here.pull_many(good, missing, mine, threads=8, pulls=1000)
    assert failed == [(0, 500, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)]

    filled(there, shape=MANY_BLOCKS, tensors=1, blocks=True, model=77)
    here.pull_blocks(missing, mine, [4], [9])
    assert here.tensors(mine)[0][9][0] == 4 * 128 + 1


def test_statuses_of_pulls_that_cannot_be(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    far = filled(there, shape=SHAPE, req_ids=[1])
    filled(there, shape=MANY_BLOCKS, blocks=True, model=0)
    mine, my_blocks = here.register(SHAPE), here.register(MANY_BLOCKS, blocks=True)
    not_exist, invalid = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, LLMStatusCode.LLM_PARAM_INVALID
    blocks = ("blocks", THERE, 0)
    calls: list[tuple[LLMStatusCode, Callable[[], object]]] = [
        (LLMStatusCode.LLM_NOT_YET_LINK, lambda: here.pull_cache(("request", 5, 1, 0), mine)),
        (invalid, lambda: here.pull_cache(("request", HERE, 1, 0), mine)),
        (not_exist, lambda: here.pull_cache(("request", THERE, 2, 0), mine)),
        (not_exist, lambda: here.pull_cache(("request", THERE, 1, 1), mine)),
        (not_exist, lambda: here.pull_cache(("id", THERE, 99), mine)),
        (not_exist, lambda: here.pull_cache(("id", THERE, -1), mine)),
        (not_exist, lambda: here.pull_cache(("id", THERE, far, 4), mine)),
        (invalid, lambda: here.pull_cache(("request", THERE, 1, 0), mine, 4)),
        (invalid, lambda: here.pull_blocks(blocks, my_blocks, [10], [0])),
        (invalid, lambda: here.pull_blocks(blocks, my_blocks, [0], [10])),
        (invalid, lambda: here.pull_blocks(blocks, my_blocks, [0, 1], [0])),
        (invalid, lambda: here.pull_cache(("id", THERE, far + 1), mine)),
    ]
    for number, (status, call) in enumerate(calls):
        assert status_of(call) == status, f"call {number}"
    assert not any(array.any() for array in here.tensors(mine) + here.tensors(my_blocks))


def test_a_closed_registration_is_not_pulled_from_or_into(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    far = filled(there, shape=SHAPE, req_ids=[1])
    mine = here.register(SHAPE)
    there.call("unregister", far)
    assert status_of(lambda: here.pull_cache(("request", THERE, 1, 0), mine)) == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    here.unregister(mine)
    here.unregister(mine)
    assert status_of(lambda: here.pull_cache(("request", THERE, 1, 0), mine)) == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_memory_that_is_not_there_is_an_error_each_time(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    filled(there, shape=SHAPE, tensors=1, req_ids=[1])
    from llm_datadist import CacheDesc, CacheKey, DataType

    nowhere = here.manager.register_cache(CacheDesc(1, SHAPE, DataType.DT_FLOAT), [1])
    for _ in range(2):
        call = lambda: here.manager.pull_cache(CacheKey(THERE, 1), nowhere)  # noqa: E731
        assert status_of(call) == LLMStatusCode.LLM_PARAM_INVALID
    mine = here.register(SHAPE, tensors=1)
    here.pull_cache(("request", THERE, 1, 0), mine)
    assert here.tensors(mine)[0][0].any()


def test_a_frozen_peer_costs_the_timeout_and_the_link_still_works(
    start_here: Callable[..., Side], start_there: Callable[..., Peer]
) -> None:
    here, there = start_here(sync_kv_timeout=300), start_there(sync_kv_timeout=300)
    assert here.link(THERE, there.call("where"))[0] == SUCCESS
    filled(there, shape=SHAPE, req_ids=[1])
    mine = here.register(SHAPE)
    there.stop()
    # A key that was not resolved yet: a peer that stands still cannot say what it stands for.
    assert status_of(lambda: here.pull_cache(("request", THERE, 1, 0), mine)) == LLMStatusCode.LLM_TIMEOUT
    there.cont()
    here.pull_cache(("request", THERE, 1, 0), mine)
    assert here.tensors(mine)[0][0].any()


# --- keys of allocated caches


@pytest.fixture
def pooled(
    start_here: Callable[..., Side], start_there: Callable[..., Peer], transports: dict[str, Any]
) -> tuple[Side, Peer]:
    """The other side has a pool and lets its caches be pulled by key."""
    here, there = start_here(**transports), start_there(mem_pool_cfg='{"memory_size": 1048576}', **transports)
    assert here.link(THERE, there.call("where"))[0] == SUCCESS
    return here, there


def test_a_request_key_of_an_allocated_cache_is_used_up_by_its_pull(pooled: tuple[Side, Peer]) -> None:
    here, there = pooled
    far = there.call("allocate", [4, 8], 4, [1, 2], 9)
    mine = here.register([4, 8])
    for request in (1, 2):
        here.pull_cache(("request", THERE, request), mine, request)
    again = [here.tensors(mine)[0][row].tolist() for row in (1, 2)]
    assert again == [there.call("tensors", far)[0][row].tolist() for row in (0, 1)]
    for request in (1, 2):
        call = lambda r=request: here.pull_cache(("request", THERE, r), mine)  # noqa: E731
        assert status_of(call) == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    for _ in range(2):  # a prefix stays
        here.pull_cache(("request", THERE, 2**64 - 1, 0, 9), mine, 3)
        assert here.tensors(mine)[0][3].tolist() == there.call("tensors", far)[0][2].tolist()


@pytest.mark.slow
def test_a_pull_of_its_row_by_id_uses_a_request_key_up_too(pooled: tuple[Side, Peer]) -> None:
    here, there = pooled
    far = there.call("allocate", [4, 8], 4, [1, 2], 9)
    mine = here.register([4, 8])
    here.pull_cache(("id", THERE, far, 1), mine)
    assert here.tensors(mine)[0][0].tolist() == there.call("tensors", far)[0][1].tolist()
    call = lambda: here.pull_cache(("request", THERE, 2), mine)  # noqa: E731
    assert status_of(call) == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    here.pull_cache(("id", THERE, far, 1), mine)  # the row itself is there as long as its cache
    here.pull_cache(("id", THERE, far, 2), mine)
    here.pull_cache(("request", THERE, 2**64 - 1, 0, 9), mine)  # a prefix stays
    here.pull_cache(("request", THERE, 1), mine)


@pytest.mark.slow
def test_nothing_is_used_up_in_remote_mode(start_here: Callable[..., Side], start_there: Callable[..., Peer]) -> None:
    how = {"enable_remote_cache_accessible": True}
    here, there = start_here(**how), start_there(mem_pool_cfg='{"memory_size": 1048576}', **how)
    assert here.link(THERE, there.call("where"))[0] == SUCCESS
    far = there.call("allocate", [1, 8], 4, [1])
    mine, my_blocks = here.register([1, 8]), here.register([4, 2], blocks=True)
    for _ in range(2):
        here.pull_cache(("id", THERE, far, 0), mine)
        here.pull_blocks(("request", THERE, 1), my_blocks, [], [0, 1, 2, 3])


def test_a_key_pulled_by_layers_is_used_up_by_the_last_of_them(pooled: tuple[Side, Peer]) -> None:
    here, there = pooled
    there.call("allocate", [1, 8], 4, [1])
    mine = here.register([1, 8])
    for layer in range(2):
        one = (layer, layer + 1)
        here.pull_cache(("request", THERE, 1), mine, src_layer_range=one, dst_layer_range=one)
    assert all(array.any() for array in here.tensors(mine))
    call = lambda: here.pull_cache(("request", THERE, 1), mine)  # noqa: E731
    assert status_of(call) == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_a_deallocated_cache_lives_until_its_keys_are_gone(pooled: tuple[Side, Peer]) -> None:
    here, there = pooled
    far = there.call("allocate", [4, 8], 2, [1, 2, 3])
    mine = here.register([4, 8], 2)
    there.call("deallocate", far)
    assert there.call("addresses", far) == []
    here.pull_cache(("request", THERE, 1), mine)
    assert here.tensors(mine)[0][0].any()
    there.call("remove_key", 2)
    call = lambda: here.pull_cache(("request", THERE, 2), mine)  # noqa: E731
    assert status_of(call) == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    here.pull_cache(("request", THERE, 3), mine)


def test_a_deallocated_cache_lives_until_its_prefix_is_removed(pooled: tuple[Side, Peer]) -> None:
    here, there = pooled
    far = there.call("allocate", [4, 8], 2, [1], PREFIX)
    mine = here.register([4, 8], 2)
    there.call("deallocate", far)
    assert there.call("addresses", far) == []
    pull = lambda *key: here.pull_cache(("request", THERE, *key), mine)  # noqa: E731
    pull(1)
    for _ in range(2):
        pull(NO_ID, 0, PREFIX)
    there.call("remove_key", NO_ID, PREFIX + 1)
    pull(NO_ID, 0, PREFIX)
    there.call("remove_key", NO_ID, PREFIX)
    for key in ((NO_ID, 0, PREFIX), (1,)):
        assert status_of(lambda k=key: pull(*k)) == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    other = there.call("allocate", [4, 8], 2, [1], PREFIX)  # both keys are free again
    there.call("remove_key", NO_ID, PREFIX)
    there.call("deallocate", other)
    pull(1)  # for which it was kept
    assert status_of(lambda: pull(1)) == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert there.call("pool_in_use") == 0


# --- what a side lets others reach


@pytest.mark.slow
def test_a_private_cache_of_the_peer_is_refused_in_remote_mode(
    start_here: Callable[..., Side], start_there: Callable[..., Peer]
) -> None:
    how = {"enable_remote_cache_accessible": True}
    here, there = start_here(**how), start_there(**how)
    assert here.link(THERE, there.call("where"))[0] == SUCCESS
    invalid = LLMStatusCode.LLM_PARAM_INVALID
    mine = here.register(SHAPE)
    for settings in ({"remote_accessible": False}, {"host": True}):
        far = there.call("register", SHAPE, **settings)
        assert status_of(lambda f=far: here.pull_cache(("id", THERE, f), mine)) == invalid
        assert status_of(lambda f=far: here.push_cache(("id", THERE, f), mine)) == invalid
    shared = there.call("register", SHAPE, host=True, remote_accessible=True)
    here.pull_cache(("id", THERE, shared), mine)
    private = here.register(SHAPE, remote_accessible=False)
    assert status_of(lambda: here.pull_cache(("id", THERE, shared), private)) == invalid
    here.manager.copy_cache(here.caches[private], here.caches[mine])  # that stays within the process


@pytest.mark.slow
def test_a_private_cache_is_for_remote_mode_alone(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    filled(there, shape=SHAPE, req_ids=[1], remote_accessible=False)
    mine = here.register(SHAPE, remote_accessible=False)
    here.pull_cache(("request", THERE, 1), mine)
    assert here.tensors(mine)[0][0].any()


@pytest.mark.slow
def test_many_threads_of_both_sides_do_everything_at_once(
    start_here: Callable[..., Side], start_there: Callable[..., Peer], transports: dict[str, Any]
) -> None:
    how = {"enable_remote_cache_accessible": True, **transports}
    here, there = start_here(**how), start_there(**how)
    assert here.link(THERE, there.call("where"))[0] == SUCCESS
    threads = 8
    far_rows = there.call("register", [threads, 128], 2)
    there.call("register", [threads, 128], 2, blocks=True, model=5)
    my_rows = here.register([threads, 128], 2)
    here.register([threads, 128], 2, blocks=True, model=5)
    theirs = there.call_later("do_everything", HERE, 5, my_rows, threads, 40)
    assert here.do_everything(THERE, 5, far_rows, threads, 40) == []
    assert theirs.result(60) == []
