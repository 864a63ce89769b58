"""V0: keys of the caller's, buffers by pointer."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ems_support import buffer, refused
from fake_pool import FakePool

import kvferry
from ems import CcConfig, CcKvOption, CcResult, EmsErrorCode, KvBufferWrapper, PrimaryKey

OPTION = CcKvOption(timeout=1000)


@pytest.fixture
def cc(open_cc: Callable[..., Any]) -> Any:
    return open_cc()


def values(count: int, size: int = 16, seed: int = 0) -> Any:
    return [np.random.default_rng(seed + index).integers(0, 255, size, np.uint8) for index in range(count)]


def test_what_is_saved_is_loaded(cc: Any) -> None:
    saved, loaded = values(3), [np.zeros(16, np.uint8) for _ in range(3)]
    keys = ["a", PrimaryKey("a", "b"), "b@pp1@tp2@0@-7"]
    assert cc.save(OPTION, keys, [[buffer(one)] for one in saved]) == CcResult(3, 3)
    assert cc.load(OPTION, keys, [[buffer(one)] for one in loaded]) == CcResult(3, 3)
    np.testing.assert_array_equal(saved, loaded)


def test_asynchronously_too(cc: Any) -> None:
    saved, loaded = values(2), values(2, seed=9)
    future = cc.async_save(OPTION, ["a", "b"], [[buffer(one)] for one in saved])
    assert future
    assert future.result() == CcResult(2, 2)
    future = cc.async_load(OPTION, ["a", "b"], [[buffer(one)] for one in loaded])
    assert cc.get_result(future) == cc.get_result(future) == CcResult(2, 2)
    assert cc.is_ready(future)
    np.testing.assert_array_equal(saved, loaded)


def test_a_value_is_its_segments_in_their_order(cc: Any) -> None:
    whole = values(1, 24)[0]
    cc.save(OPTION, ["a"], [[buffer(whole[:8]), buffer(whole[8:])]])
    loaded = np.zeros(24, np.uint8)
    assert cc.load(OPTION, ["a"], [[buffer(loaded[:4]), buffer(loaded[4:20]), buffer(loaded[20:])]]).success == 1
    np.testing.assert_array_equal(loaded, whole)


def test_success_is_the_run_before_the_first_missing_key(cc: Any, fake: FakePool) -> None:
    cc.save(OPTION, ["a", "c"], [[buffer(one)] for one in values(2)])
    loaded = [np.zeros(16, np.uint8) for _ in range(3)]
    assert cc.load(OPTION, ["a", "b", "c"], [[buffer(one)] for one in loaded]) == CcResult(1, 3)
    assert cc.load(OPTION, ["b", "a"], [[buffer(one)] for one in loaded[:2]]) == CcResult(0, 2)


def test_a_value_of_another_size_is_a_miss_and_is_said_once(cc: Any, caplog: pytest.LogCaptureFixture) -> None:
    cc.save(OPTION, ["a"], [[buffer(values(1)[0])]])
    loaded = np.zeros(8, np.uint8)
    assert cc.load(OPTION, ["a"], [[buffer(loaded)]]) == CcResult(0, 1)
    assert cc.load(OPTION, ["a"], [[buffer(loaded)]]) == CcResult(0, 1)
    assert not loaded.any()
    assert len([record for record in caplog.records if "another size" in record.message]) <= 1


def test_the_first_write_wins_and_the_second_is_a_success(cc: Any) -> None:
    first, second = values(2)
    cc.save(OPTION, ["a"], [[buffer(first)]])
    assert cc.save(OPTION, ["a"], [[buffer(second)]]) == CcResult(1, 1)
    loaded = np.zeros(16, np.uint8)
    cc.load(OPTION, ["a"], [[buffer(loaded)]])
    np.testing.assert_array_equal(loaded, first)


def test_exists_counts_the_leading_run(cc: Any) -> None:
    cc.save(OPTION, ["a", PrimaryKey("a", "b")], [[buffer(one)] for one in values(2)])
    assert cc.exists(["a", PrimaryKey("a", "b"), "c"]) == CcResult(2, 3)
    assert cc.exists(["c", "a"], OPTION) == CcResult(0, 2)


def test_models_and_tenants_do_not_see_each_others_values(open_cc: Callable[..., Any]) -> None:
    one = open_cc(access_id="tenant-1")
    one.save(OPTION, ["a"], [[buffer(values(1)[0])]])
    assert one.exists(["a"]).success == 1
    assert open_cc(access_id="tenant-2").exists(["a"]).success == 0
    assert open_cc().exists(["a"]).success == 0
    assert (
        open_cc(CcConfig(rank_id=0, device_id=0, model_id="another"), access_id="tenant-1").exists(["a"]).success == 0
    )


def test_a_string_is_no_primary_key(cc: Any) -> None:
    cc.save(OPTION, ["ab"], [[buffer(values(1)[0])]])
    for other in (PrimaryKey("a", "b"), PrimaryKey("ab", "ab")):
        assert cc.exists([other]).success == 0


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


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_may_be_tuples(cc: Any, kind: Any) -> None:
    assert cc.save(OPTION, kind(["a"]), kind([kind([buffer(values(1)[0])])])).success == 1


def test_key_lists_may_be_numpy_arrays(cc: Any) -> None:
    assert cc.save(OPTION, np.array(["a", "b"]), [[buffer(one)] for one in values(2)]).success == 2


def test_a_buffer_is_shared_by_requests(cc: Any) -> None:
    shared = [[buffer(values(1)[0])]]
    futures = [cc.async_save(OPTION, [f"k{index}"], shared) for index in range(5)]
    assert [future.result().success for future in futures] == [1] * 5


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
