"""V0: keys of the caller's, buffers by pointer."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ems_support import buffer

from ems import CcConfig, CcKvOption, CcResult, PrimaryKey

OPTION = CcKvOption(timeout=1000)


@pytest.fixture
def cc(real_cc: Callable[..., Any]) -> Any:
    return real_cc()


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


def test_success_is_the_run_before_the_first_missing_key(cc: Any) -> None:
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
    assert cc.exists(key_list=["a", "c"], option=OPTION) == cc.exists(hashes=["a", "c"]) == CcResult(1, 2)


def test_models_and_tenants_do_not_see_each_others_values(real_cc: Callable[..., Any]) -> None:
    one = real_cc(access_id="tenant-1")
    one.save(OPTION, ["a"], [[buffer(values(1)[0])]])
    assert one.exists(["a"]).success == 1
    assert real_cc(access_id="tenant-2").exists(["a"]).success == 0
    assert real_cc().exists(["a"]).success == 0
    assert (
        real_cc(CcConfig(rank_id=0, device_id=0, model_id="another"), access_id="tenant-1").exists(["a"]).success == 0
    )


def test_a_string_is_no_primary_key(cc: Any) -> None:
    cc.save(OPTION, ["ab"], [[buffer(values(1)[0])]])
    for other in (PrimaryKey("a", "b"), PrimaryKey("ab", "ab")):
        assert cc.exists([other]).success == 0


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_may_be_tuples(cc: Any, kind: Any) -> None:
    assert cc.save(OPTION, kind(["a"]), kind([kind([buffer(values(1)[0])])])).success == 1


def test_key_lists_may_be_numpy_arrays(cc: Any) -> None:
    assert cc.save(OPTION, np.array(["a", "b"]), [[buffer(one)] for one in values(2)]).success == 2


def test_a_buffer_is_shared_by_requests(cc: Any) -> None:
    shared = [[buffer(values(1)[0])]]
    futures = [cc.async_save(OPTION, [f"k{index}"], shared) for index in range(5)]
    assert [future.result().success for future in futures] == [1] * 5
