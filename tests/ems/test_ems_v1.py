"""V1: a registered KV cache, three forms, and who must not see whose blocks."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ems_support import BLOCK_SIZE, HEAD_SIZE, HEADS, kv_cache, refused, rows, v1_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ems import CcKvOption, CcResult, KVCacheType

OPTION = CcKvOption(timeout=1000)
NUMBERS = itertools.count()
SLOTS = [12, 13, 14, 15, 4, 5, 6, 7]  # blocks 3 and 1


@pytest.fixture
def open_cc(real_cc: Callable[..., Any]) -> Callable[..., Any]:
    return real_cc


@pytest.fixture
def cc(open_cc: Callable[..., Any]) -> Any:
    return open_cc(v1_config())


def save(cc: Any, kvcache: Any, **form: Any) -> CcResult:
    cc.register_kvcache(kvcache, form.pop("groups", None))
    return cc.save(**form, option=OPTION)


def load(cc: Any, kvcache: Any, **form: Any) -> CcResult:
    cc.register_kvcache(kvcache, form.pop("groups", None))
    return cc.load(**form, option=OPTION)


def test_blocks_come_back_into_other_blocks(cc: Any) -> None:
    source, target = kv_cache(), kv_cache(seed=None)
    assert save(cc, source, slot_mapping=SLOTS, hashes=[5, -6], offsets=[4, 4]) == CcResult(2, 2)
    assert load(cc, target, slot_mapping=list(range(16, 24)), hashes=[5, -6], offsets=[4, 4]) == CcResult(2, 2)
    np.testing.assert_array_equal(rows(target, list(range(16, 24))), rows(source, SLOTS))
    for layer in target:
        for tensor in layer:
            assert not tensor[[0, 1, 2, 3, 6, 7]].any()


def test_with_arguments_by_position_and_without_an_option(cc: Any) -> None:
    cc.register_kvcache(kv_cache())
    assert cc.save(SLOTS, [5, 6], [4, 4]) == CcResult(2, 2)
    assert cc.load(SLOTS, [5, 6], [4, 4], OPTION) == CcResult(2, 2)
    assert cc.get_result(cc.async_load(SLOTS, [5, 6], [4, 4], OPTION)) == CcResult(2, 2)
    assert cc.async_save(SLOTS, [5, 6], [4, 4], OPTION).result() == CcResult(2, 2)


def test_a_call_that_begins_with_an_option_is_one_of_v0(cc: Any) -> None:
    from ems_support import buffer

    one = np.arange(8, dtype=np.uint8)
    assert cc.save(OPTION, ["a"], [[buffer(one)]]) == CcResult(1, 1)
    assert cc.load(OPTION, ["a"], value_list=[[buffer(one)]]) == CcResult(1, 1)
    assert cc.load(option=OPTION, key_list=["a"], value_list=[[buffer(one)]]) == CcResult(1, 1)


def test_success_is_the_leading_run_wherever_the_hashes_begin(cc: Any) -> None:
    save(cc, kv_cache(), slot_mapping=SLOTS, hashes=[5, 7], offsets=[4, 4])
    assert load(cc, kv_cache(), slot_mapping=[*SLOTS, 0, 1, 2, 3], hashes=[5, 6, 7], offsets=[4] * 3) == CcResult(1, 3)
    assert load(cc, kv_cache(), slot_mapping=SLOTS, hashes=[7, 5], offsets=[4, 4]) == CcResult(2, 2)


@pytest.mark.parametrize(
    "kind",
    [list, tuple, np.array, lambda items: np.array(items, np.int32), lambda items: [np.int64(item) for item in items]],
)
def test_sequences_of_integers(cc: Any, kind: Any) -> None:
    cc.register_kvcache(kv_cache())
    assert cc.save(kind(SLOTS), kind([5, 6]), kind([4, 4]), OPTION) == CcResult(2, 2)
    assert cc.exists(kind([5, 6])) == CcResult(2, 2)
    assert cc.load(hashes=kind([5, 6]), chunk_descs=[[(0, 4), (4, 4)]]) == CcResult(2, 2)
    assert cc.load(hashes=kind([5, 6]), chunk_descs=[np.array([(0, 4), (4, 4)])]) == CcResult(2, 2)


def test_hashes_of_any_size_and_sign_are_different_blocks(cc: Any) -> None:
    wide = [0, 1, -1, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 1 << 255, -(1 << 255), 255, 256, -256, 128, -128]
    cc.register_kvcache(kv_cache())
    for number in wide:
        assert cc.exists([number]) == CcResult(0, 1), number
        assert cc.save([0, 1, 2, 3], [number], [4]) == CcResult(1, 1)
    assert cc.exists(wide) == CcResult(len(wide), len(wide))


def test_a_part_of_a_block_needs_the_same_length(cc: Any) -> None:
    source, target = kv_cache(), kv_cache(seed=None)
    assert save(cc, source, slot_mapping=[8, 9, 10], hashes=[1], offsets=[3]) == CcResult(1, 1)
    assert cc.exists([1]) == CcResult(1, 1)
    assert load(cc, target, slot_mapping=[4, 5], hashes=[1], offsets=[2]) == CcResult(0, 1)
    assert load(cc, target, slot_mapping=[4, 5, 6, 7], hashes=[1], offsets=[4]) == CcResult(0, 1)
    assert load(cc, target, slot_mapping=[4, 5, 6], hashes=[1], offsets=[3]) == CcResult(1, 1)
    np.testing.assert_array_equal(rows(target, [4, 5, 6]), rows(source, [8, 9, 10]))


def test_slots_of_a_chunk_may_be_scattered(cc: Any) -> None:
    source, target = kv_cache(), kv_cache(seed=None)
    save(cc, source, slot_mapping=[31, 2, 3, 17], hashes=[1], offsets=[4])
    load(cc, target, slot_mapping=[0, 9, 5, 6], hashes=[1], offsets=[4])
    np.testing.assert_array_equal(rows(target, [0, 9, 5, 6]), rows(source, [31, 2, 3, 17]))


def strided(seed: "int | None") -> Any:
    """Blocks with something else between them, as in [blocks, 2, block_size, …]."""
    return [
        [both[:, 0], both[:, 1]] for both in (kv_cache(1, seed, blocks=16)[0][0].reshape(8, 2, 4, HEADS, HEAD_SIZE),)
    ]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_slots_from_and_to_any_layout(cc: Any, data: st.DataObject) -> None:
    draw = lambda: data.draw(st.permutations(range(32)))  # noqa: E731
    chunks = data.draw(st.integers(1, 5))
    layouts = st.sampled_from([strided, lambda seed: kv_cache(1, seed)])
    source, target = data.draw(layouts)(1), data.draw(layouts)(None)
    taken, given_to = list(draw())[: chunks * 4], list(draw())[: chunks * 4]
    hashes = [next(NUMBERS) for _ in range(chunks)]
    assert save(cc, source, slot_mapping=taken, hashes=hashes, offsets=[4] * chunks).success == chunks
    assert load(cc, target, slot_mapping=given_to, hashes=hashes, offsets=[4] * chunks).success == chunks
    np.testing.assert_array_equal(rows(target, given_to), rows(source, taken))
    others = [slot for slot in range(32) if slot not in given_to]
    assert not rows(target, others).any()


def test_tensors_of_unequal_sizes(cc: Any) -> None:
    """As of an MLA model: one head, 512 and 64 numbers, and an empty third."""
    shapes = [(8, 4, 1, 512), (8, 4, 1, 64), (8, 4, 1, 0)]
    source = [[np.random.default_rng(1).random(shape).astype(np.float16) for shape in shapes] for _ in range(2)]
    target = [[np.zeros(shape, np.float16) for shape in shapes] for _ in range(2)]
    save(cc, source, slot_mapping=SLOTS, hashes=[1, 2], offsets=[4, 4])
    assert load(cc, target, slot_mapping=SLOTS, hashes=[1, 2], offsets=[4, 4]).success == 2
    for layer in range(2):
        for tensor in range(2):
            np.testing.assert_array_equal(target[layer][tensor][[1, 3]], source[layer][tensor][[1, 3]])


def test_registered_tensors_are_kept_alive(cc: Any) -> None:
    cc.register_kvcache(kv_cache())
    ballast = [np.full((8, 4, 2, 3), 7.0, np.float32) for _ in range(50)]
    assert cc.save(SLOTS, [5, 6], [4, 4]) == CcResult(2, 2)
    assert all((one == 7).all() for one in ballast)


# -- layer groups


GROUPS = [
    [[0, 2], [1]],
    [{"layers": [0, 2]}, {"layer_ids": [1]}],
    [type("Group", (), {"layers": range(0, 3, 2)})(), range(1, 2)],
    [np.array([0, 2]), (1, 1)],
]


@pytest.mark.parametrize("groups", GROUPS)
def test_layer_groups_have_block_tables_of_their_own(cc: Any, groups: Any) -> None:
    source, target = kv_cache(3), kv_cache(3, seed=None)
    descs = [[(0, 4), (4, 4)], [(28, 4), (8, 4)]]
    assert save(cc, source, groups=groups, hashes=[1, 2], chunk_descs=descs) == CcResult(2, 2)
    assert cc.exists([1, 2]) == CcResult(2, 2)
    other = [[(16, 4), (8, 4)], [(0, 4), (4, 4)]]
    assert load(cc, target, groups=groups, hashes=[1, 2], chunk_descs=other) == CcResult(2, 2)
    for layer in (0, 2):
        np.testing.assert_array_equal(rows([target[layer]], [16, 17, 18, 19]), rows([source[layer]], [0, 1, 2, 3]))
    np.testing.assert_array_equal(rows([target[1]], [4, 5, 6, 7]), rows([source[1]], [8, 9, 10, 11]))


def test_groups_may_hold_unequal_numbers_of_slots(cc: Any) -> None:
    """As with sliding windows. Those numbers are part of the key: the same bytes cut elsewhere would be wrong."""
    source, target = kv_cache(2), kv_cache(2, seed=None)
    groups = [[0], [1]]
    save(cc, source, groups=groups, hashes=[1], chunk_descs=[[(0, 4)], [(4, 2)]])
    assert load(cc, target, groups=groups, hashes=[1], chunk_descs=[[(0, 2)], [(4, 4)]]) == CcResult(0, 1)
    assert load(cc, target, groups=groups, hashes=[1], chunk_descs=[[(0, 4)], [(4, 2)]]) == CcResult(1, 1)
    np.testing.assert_array_equal(rows([target[1]], [4, 5]), rows([source[1]], [4, 5]))


def test_groups_of_unequal_blocks(cc: Any) -> None:
    kvcache = [*kv_cache(1), *kv_cache(1, blocks=2, size=16)]
    cc.register_kvcache(kvcache, [[0], [1]])
    assert cc.save(hashes=[1], chunk_descs=[[(4, 4)], [(16, 4)]]) == CcResult(1, 1)
    with refused("chunk_descs"):
        cc.save(slot_mapping=[0, 1, 2, 3], hashes=[1], offsets=[4])


def test_one_slot_mapping_serves_groups_of_equal_blocks(cc: Any) -> None:
    source, target = kv_cache(2), kv_cache(2, seed=None)
    save(cc, source, groups=[[1], [0]], slot_mapping=SLOTS, hashes=[1, 2], offsets=[4, 4])
    form = {"hashes": [1, 2], "chunk_descs": [[(12, 4), (4, 4)]] * 2}
    assert load(cc, target, groups=[[1], [0]], **form) == CcResult(2, 2)
    np.testing.assert_array_equal(rows(target, SLOTS), rows(source, SLOTS))


# -- tokens


class TestTokens:
    TOKENS = range(100, 110)  # two blocks and a half

    def test_full_blocks_of_the_ones_are_moved(self, cc: Any) -> None:
        source, target = kv_cache(), kv_cache(seed=None)
        slots = list(range(10))
        assert save(cc, source, slot_mapping=slots, token_ids=list(self.TOKENS), mask=[1] * 10) == CcResult(2, 2)
        to = [-1] * 4 + [8, 9, 10, 11, -1, -1]  # places of what is not moved do not count
        mask = [False] * 3 + [True] * 7
        assert load(cc, target, slot_mapping=to, token_ids=list(self.TOKENS), mask=mask) == CcResult(1, 1)
        np.testing.assert_array_equal(rows(target, [8, 9, 10, 11]), rows(source, [4, 5, 6, 7]))

    def test_a_block_is_named_by_all_tokens_before_it(self, cc: Any) -> None:
        slots = list(range(8))
        save(cc, kv_cache(), slot_mapping=slots, token_ids=list(self.TOKENS[:8]), mask=[1] * 8)
        other = {"slot_mapping": slots, "token_ids": [1, *self.TOKENS[1:8]], "mask": [0] * 4 + [1] * 4}
        assert load(cc, kv_cache(), **other) == CcResult(0, 1)


# -- whose blocks


def holds(cc: Any, kvcache: Any = None) -> bool:
    cc.register_kvcache(kvcache or kv_cache())
    return bool(cc.exists([1]).success)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_id": "another"},
        {"llm_engine": "vllm@service"},
        {"tp_world_size": 4},
        {"pp_world_size": 2},
        {"rank_in_tp_group": 1},
        {"rank_in_pp_group": 1},
        {"kvcache_type": KVCacheType.MHA},
        {"kvcache_type": KVCacheType.MLA},
    ],
)
def test_other_models_engines_shapes_and_ranks_do_not_see_a_block(open_cc: Callable[..., Any], fields: Any) -> None:
    base = {"tp_world_size": 2}
    first = open_cc(v1_config(**base))
    save(first, kv_cache(), slot_mapping=[0, 1, 2, 3], hashes=[1], offsets=[4])
    assert holds(open_cc(v1_config(**base, rank_id=9, device_id=3)))
    assert not holds(open_cc(v1_config(**base | fields)))


def test_other_tenants_do_not_see_a_block(open_cc: Callable[..., Any]) -> None:
    save(open_cc(v1_config(), "one"), kv_cache(), slot_mapping=[0, 1, 2, 3], hashes=[1], offsets=[4])
    assert holds(open_cc(v1_config(), "one"))
    assert not holds(open_cc(v1_config(), "two"))
    assert not holds(open_cc(v1_config()))


def test_mla_ranks_of_a_group_see_each_others_blocks_and_those_of_another_stage_do_not(
    open_cc: Callable[..., Any],
) -> None:
    base = {"tp_world_size": 2, "pp_world_size": 2, "kvcache_type": "MLA"}
    save(open_cc(v1_config(**base)), kv_cache(), slot_mapping=[0, 1, 2, 3], hashes=[1], offsets=[4])
    assert holds(open_cc(v1_config(**base, rank_in_tp_group=1)))
    assert not holds(open_cc(v1_config(**base, rank_in_pp_group=1)))


def test_other_geometries_do_not_see_a_block(open_cc: Callable[..., Any]) -> None:
    cc = open_cc(v1_config())
    save(cc, kv_cache(), slot_mapping=[0, 1, 2, 3], hashes=[1], offsets=[4])
    assert holds(cc, kv_cache(blocks=32))  # more of the same blocks
    shape = (8, BLOCK_SIZE, HEADS, HEAD_SIZE)
    for other in (
        kv_cache(3),
        kv_cache(size=2 * BLOCK_SIZE),
        [[np.zeros(shape, np.int32) for _ in "kv"] for _ in range(2)],
        [[np.zeros(shape, np.float16) for _ in "kv"] for _ in range(2)],
    ):
        assert not holds(cc, other)


def test_other_layer_groups_do_not_see_a_block(open_cc: Callable[..., Any]) -> None:
    cc = open_cc(v1_config())
    save(cc, kv_cache(), slot_mapping=[0, 1, 2, 3], hashes=[1], offsets=[4])
    cc.register_kvcache(kv_cache(), [[0], [1]])
    assert cc.exists([1]) == CcResult(0, 1)
