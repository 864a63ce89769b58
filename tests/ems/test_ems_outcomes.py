"""What the pool answers, as results and errors; and what it is asked. Over a pool that answers what a test tells it to."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ems_support import buffer, kv_cache, refused, v1_config
from fake_pool import FakePool

import kvferry
from ems import CcKvOption, CcResult, EmsErrorCode, KvBufferWrapper, PrimaryKey

OPTION = CcKvOption(timeout=1000)


@pytest.fixture
def cc(open_cc: Callable[..., Any]) -> Any:
    return open_cc()


def values(count: int) -> Any:
    return [np.full(16, index, np.uint8) for index in range(count)]


def test_strings_are_routed_by_themselves_and_primary_keys_by_their_first_part(cc: Any, fake: FakePool) -> None:
    cc.save(OPTION, ["x", PrimaryKey("group", "1"), PrimaryKey("group", "2")], [[buffer(one)] for one in values(3)])
    assert fake.calls[-1][2]["routes"] == [b"x", b"group", b"group"]


def test_options_reach_the_pool(cc: Any, fake: FakePool) -> None:
    cc.save(CcKvOption(write_rcache=False, timeout=70), ["a"], [[buffer(values(1)[0])]])
    assert fake.calls[-1][2]["local_copy"] is False
    assert fake.calls[-1][2]["timeout_ms"] == 70
    cc.load(CcKvOption(read_local_only=True), ["a"], [[buffer(values(1)[0])]])
    assert fake.calls[-1][2]["local_only"] is True
    cc.exists(["a"], CcKvOption(read_local_only=True, timeout=3))
    assert fake.calls[-1][2]["local_only"] is True
    assert fake.calls[-1][2]["timeout_ms"] == 3


@pytest.mark.parametrize("mask", [[0] * 10, [0] * 5 + [1] * 5])
def test_tokens_without_a_full_block_ask_nothing(open_cc: Callable[..., Any], fake: FakePool, mask: Any) -> None:
    cc = open_cc(v1_config())
    cc.register_kvcache(kv_cache())
    future = cc.async_load(slot_mapping=list(range(10)), token_ids=list(range(10)), mask=mask)
    assert cc.is_ready(future)
    assert future.result() == CcResult(0, 0)
    assert not fake.calls


# -- what goes wrong on the way


def test_an_unmapped_pointer_is_an_invalid_argument_at_submit(cc: Any, fake: FakePool) -> None:
    fake.error = kvferry.InvalidArgument("span 0 is not mapped")
    for call in (cc.load, cc.async_load, cc.save, cc.async_save):
        with refused("not mapped"):
            call(OPTION, ["a"], [[KvBufferWrapper(4096, 8)]])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (kvferry.DeadlineExceeded("late"), EmsErrorCode.EMS_IO_TIMEOUT),
        (kvferry.PeerLost("lost"), EmsErrorCode.EMS_IO_ERROR),
        (kvferry.NodeClosed("closed"), EmsErrorCode.EMS_IO_ERROR),
        (kvferry.InternalError("broken"), EmsErrorCode.EMS_INTERNAL_ERROR),
        (RuntimeError("nobody thought of this"), EmsErrorCode.EMS_INTERNAL_ERROR),
    ],
)
def test_errors_of_the_pool_come_with_the_result(cc: Any, fake: FakePool, error: Any, code: EmsErrorCode) -> None:
    fake.error = error
    future = cc.async_load(OPTION, ["a"], [[buffer(values(1)[0])]])
    assert cc.is_ready(future)
    for _ in range(2):
        with refused(str(error), code):
            future.result()


@pytest.mark.parametrize(
    "word", ["evicted", "expired", "full", "oversize", "corrupted", "lease_lost", "pool_off", "removed"]
)
def test_no_miss_raises(cc: Any, fake: FakePool, word: str) -> None:
    fake.word = word
    assert cc.load(OPTION, ["a"], [[buffer(values(1)[0])]]) == CcResult(0, 1)
    assert cc.save(OPTION, ["a"], [[buffer(values(1)[0])]]) == CcResult(0, 1)


def test_time_that_is_up_before_the_first_success_is_an_error(cc: Any, fake: FakePool) -> None:
    fake.word = "timeout"
    for call in (cc.load, cc.save):
        with refused("1000 ms", EmsErrorCode.EMS_IO_TIMEOUT):
            call(OPTION, ["a"], [[buffer(values(1)[0])]])
    assert cc.exists(["a"]) == CcResult(0, 1)


def test_a_pool_that_does_not_answer_is_an_error(cc: Any, fake: FakePool) -> None:
    fake.word = "node_lost"
    with refused("check_health", EmsErrorCode.EMS_IO_ERROR):
        cc.load(OPTION, ["a"], [[buffer(values(1)[0])]])
    assert cc.exists(["a"]) == CcResult(0, 1)
    fake.word, fake.error = "", kvferry.PeerLost("lost")
    assert cc.exists(["a"]) == CcResult(0, 1)


def answer(monkeypatch: pytest.MonkeyPatch, fake: FakePool, *words: str) -> None:
    outcome = type("Outcome", (), {"outcomes": list(words), "ok": [word in ("hit", "saved") for word in words]})()
    monkeypatch.setattr(fake, "load", lambda *_, **__: outcome)


@pytest.mark.parametrize(
    ("words", "success"), [(["hit", "timeout"], 1), (["hit", "node_lost"], 1), (["timeout", "hit"], 0)]
)
def test_a_lost_or_slow_node_costs_its_own_keys_alone(
    cc: Any, fake: FakePool, monkeypatch: pytest.MonkeyPatch, words: Any, success: int
) -> None:
    answer(monkeypatch, fake, *words)
    assert cc.load(OPTION, ["a", "b"], [[buffer(one)] for one in values(2)]) == CcResult(success, 2)


def test_keys_of_a_lost_node_are_misses_while_others_answer(
    cc: Any, fake: FakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, fake, "node_lost")
    assert cc.load(OPTION, ["a"], [[buffer(values(1)[0])]]) == CcResult(0, 1)
