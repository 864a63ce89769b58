"""Futures: polling, waiting, threads; saves that meet somebody else's save of the same key."""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ems_support import buffer, kv_cache, refused, v1_config
from fake_pool import FakePool

from ems import CcKvOption, CcResult, EmsErrorCode, KVCacheType, keys
from ems.caching_v1 import KEEP_UNPOLLED

OPTION = CcKvOption(timeout=1000)
ARRAY = np.arange(16, dtype=np.uint8)


@pytest.fixture
def cc(open_cc: Callable[..., Any]) -> Any:
    return open_cc()


def test_polling_never_waits_not_even_for_a_thread_that_does(cc: Any, fake: FakePool) -> None:
    fake.hold = True
    future = cc.async_load(OPTION, ["a"], [[buffer(ARRAY.copy())]])
    assert not cc.is_ready(future)
    waiting = threading.Thread(target=future.result)
    waiting.start()
    before = time.monotonic()
    for _ in range(100):
        assert not cc.is_ready(future)
    assert time.monotonic() - before < 0.5
    fake.futures[-1].held = False
    waiting.join(10)
    assert cc.is_ready(future)


def test_all_threads_get_the_same_answer(cc: Any, fake: FakePool) -> None:
    fake.hold = True
    future = cc.async_save(OPTION, ["a"], [[buffer(ARRAY)]])
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(future.result())) for _ in range(8)]
    for thread in threads:
        thread.start()
    fake.futures[-1].held = False
    for thread in threads:
        thread.join(10)
    assert answers == [CcResult(1, 1)] * 8
    assert [verb for verb, *_ in fake.calls] == ["save"]


def key_of(cc: Any, name: str) -> bytes:
    return keys.v0_keys(cc._settings, [name])[0][0]


def test_a_save_succeeds_when_the_other_save_of_the_key_has_ended(cc: Any, fake: FakePool) -> None:
    """Success says that the value is there; until then the future is not ready."""
    fake.pending.add(key_of(cc, "b"))
    future = cc.async_save(OPTION, ["a", "b"], [[buffer(ARRAY)]] * 2)
    for _ in range(20):
        assert not cc.is_ready(future)
    fake.pending.clear()
    fake.values[key_of(cc, "b")] = b"the other's"
    assert future.result() == CcResult(2, 2)
    assert fake.values[key_of(cc, "b")] == b"the other's"


def test_polling_alone_brings_it_to_its_end(cc: Any, fake: FakePool) -> None:
    fake.pending.add(key_of(cc, "a"))
    future = cc.async_save(OPTION, ["a"], [[buffer(ARRAY)]])
    assert not cc.is_ready(future)
    fake.pending.clear()  # the other's save has failed: this one does it
    until = time.monotonic() + 5
    while not cc.is_ready(future) and time.monotonic() < until:
        time.sleep(0.001)
    assert future.result() == CcResult(1, 1)
    assert fake.values[key_of(cc, "a")] == ARRAY.tobytes()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_it_waits_no_longer_than_it_was_told(cc: Any, fake: FakePool, asynchronous: bool) -> None:
    fake.pending.add(key_of(cc, "a"))
    before = time.monotonic()
    with refused("200 ms", EmsErrorCode.EMS_IO_TIMEOUT):
        call = cc.async_save if asynchronous else cc.save
        answer = call(CcKvOption(timeout=200), ["a"], [[buffer(ARRAY)]])
        answer.result()
    assert 0.15 < time.monotonic() - before < 2


def test_a_caller_who_polls_late_still_finds_it_saved(cc: Any, fake: FakePool) -> None:
    fake.pending.add(key_of(cc, "a"))
    future = cc.async_save(CcKvOption(timeout=10), ["a"], [[buffer(ARRAY)]])
    assert not cc.is_ready(future)
    time.sleep(0.05)
    fake.pending.clear()
    fake.values[key_of(cc, "a")] = b"the other's"
    assert future.result() == CcResult(1, 1)


# -- ranks of one TP group with equal caches


def ranks(open_cc: Callable[..., Any], count: int, kvcache: Any) -> Any:
    opened = []
    for rank in range(count):
        config = v1_config(tp_world_size=count, rank_in_tp_group=rank, rank_id=rank, kvcache_type=KVCacheType.MLA)
        opened.append(open_cc(config))
        opened[-1].register_kvcache(kvcache)
    return opened


CHUNKS = {"slot_mapping": list(range(24)), "hashes": list(range(6)), "offsets": [4] * 6}


def test_mla_ranks_copy_each_block_once_and_all_report_all(open_cc: Callable[..., Any], fake: FakePool) -> None:
    opened = ranks(open_cc, 3, kv_cache())
    futures = [cc.async_save(**CHUNKS, option=OPTION) for cc in opened]
    for cc, future in zip(opened, futures, strict=True):
        cc.is_ready(future)  # every rank copies its own share first
    assert [len(asked) for _, asked, _ in fake.calls] == [2, 2, 2]
    assert len({key for _, asked, _ in fake.calls for key in asked}) == 6
    assert [future.result() for future in futures] == [CcResult(6, 6)] * 3
    assert [cc.exists(list(range(6))).success for cc in opened] == [6] * 3


def test_an_mla_rank_that_is_alone_saves_all_itself(open_cc: Callable[..., Any]) -> None:
    cc = ranks(open_cc, 8, kv_cache())[5]
    assert cc.save(**CHUNKS, option=OPTION) == CcResult(6, 6)
    assert cc.save(slot_mapping=[0, 1, 2, 3], hashes=[99], offsets=[4], option=OPTION) == CcResult(1, 1)


# -- registering while requests are in flight


def test_another_cache_is_refused_while_requests_are_in_flight(open_cc: Callable[..., Any], fake: FakePool) -> None:
    cc, kvcache = open_cc(v1_config()), kv_cache()
    cc.register_kvcache(kvcache)
    fake.hold = True
    future = cc.async_load(**CHUNKS, option=OPTION)
    cc.register_kvcache(kvcache)  # the same: nothing to do
    with refused("in flight"):
        cc.register_kvcache(kv_cache())
    fake.futures[-1].held = False
    future.result()
    cc.register_kvcache(kv_cache())


def test_ended_futures_are_not_kept(open_cc: Callable[..., Any]) -> None:
    cc = open_cc(v1_config())
    cc.register_kvcache(kv_cache())
    for _ in range(3 * KEEP_UNPOLLED):
        cc.async_load(**CHUNKS, option=OPTION).result()
    assert len(cc._in_flight) <= KEEP_UNPOLLED


def test_a_future_that_comes_while_ended_ones_are_forgotten_is_not(open_cc: Callable[..., Any], fake: FakePool) -> None:
    """One thread's request is on its way into the list while another thread makes the new list without the ended ones."""
    cc = open_cc(v1_config())
    cc.register_kvcache(kv_cache())
    begun, go_on, noted = threading.Event(), threading.Event(), threading.Event()

    class Kept(list[Any]):
        def __iter__(self) -> Any:
            yield from list.__iter__(self)
            go_on.set()  # every future has been looked at, and the list is still the old one
            noted.wait(0.5)

        def append(self, future: Any) -> None:
            super().append(future)
            if go_on.is_set():
                noted.set()

    cc._in_flight = Kept()
    cc._look_at = 1
    start = cc._start

    def slow_start(*arguments: Any, **more: Any) -> Any:
        future = start(*arguments, **more)
        begun.set()
        go_on.wait(10)
        return future

    fake.hold = True
    cc._start = slow_start
    other = threading.Thread(target=lambda: cc.async_load(**CHUNKS, option=OPTION))
    other.start()
    assert begun.wait(10)
    cc._start = start
    fake.hold = False
    cc.async_load(**CHUNKS, option=OPTION)
    other.join(10)
    assert go_on.is_set()
    with refused("in flight"):
        cc.register_kvcache(kv_cache())
