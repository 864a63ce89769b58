"""Every argument rule of save, load, exists and their twins: raised at submit, before anything is sent."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ems_support import buffer, kv_cache, refused, v1_config
from fake_pool import FakePool

from ems import CcKvOption, KvBufferWrapper, PrimaryKey

ARRAY = np.zeros(64, np.uint8)
OPTION = CcKvOption(timeout=1000)
CALLS = ["save", "load", "async_save", "async_load"]


@pytest.fixture(params=CALLS)
def v0(request: pytest.FixtureRequest, open_cc: Callable[..., Any], fake: FakePool) -> Any:
    yield getattr(open_cc(), request.param)
    assert not fake.calls


@pytest.fixture
def cc(open_cc: Callable[..., Any]) -> Any:
    caching = open_cc(v1_config())
    caching.register_kvcache(kv_cache())
    return caching


@pytest.fixture(params=CALLS)
def v1(request: pytest.FixtureRequest, cc: Any, fake: FakePool) -> Any:
    yield getattr(cc, request.param)
    assert not fake.calls


# -- V0


@pytest.mark.parametrize("option", [None, "option", 5000, {"timeout": 3}])
def test_v0_needs_an_option(v0: Any, option: Any) -> None:
    with refused("option"):
        v0(option, ["a"], [[buffer(ARRAY)]])


@pytest.mark.parametrize("timeout", [-1, True, 1.5, "5000", None, 1 << 40])
def test_timeouts(v0: Any, timeout: Any) -> None:
    with refused("timeout"):
        v0(CcKvOption(timeout=timeout), ["a"], [[buffer(ARRAY)]])


@pytest.mark.parametrize("name", ["write_rcache", "read_local_only"])
def test_flags(v0: Any, name: str) -> None:
    with refused(name):
        v0(CcKvOption(**{name: "yes"}), ["a"], [[buffer(ARRAY)]])


@pytest.mark.parametrize(
    "keys",
    [
        None,
        [],
        "a",
        [""],
        [b"a"],
        [7],
        [None],
        ["x" * 128],
        ["ä" * 64],  # 128 bytes
        ["\ud800"],
        [PrimaryKey("", "a")],
        [PrimaryKey("a", "")],
        [PrimaryKey("a", "b" * 128)],
        [PrimaryKey(1, "b")],  # type: ignore[arg-type]
        [("a", "b")],
    ],
)
def test_keys(v0: Any, keys: Any) -> None:
    with refused("key"):
        v0(OPTION, keys, [[buffer(ARRAY)]])


@pytest.mark.parametrize("keys", [["a", "a"], [PrimaryKey("a", "b")] * 2])
def test_duplicate_keys(v0: Any, keys: Any) -> None:
    with refused("twice"):
        v0(OPTION, keys, [[buffer(ARRAY)]] * 2)


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        [[]],
        [None],
        [[buffer(ARRAY)], [buffer(ARRAY)]],
        [buffer(ARRAY)],
        [[(4096, 8)]],
        [[buffer(ARRAY), None]],
    ],
)
def test_values(v0: Any, values: Any) -> None:
    with refused("value"):
        v0(OPTION, ["a"], values)


@pytest.mark.parametrize("pointer", [0, -8, True, 1.0, "4096", None, 1 << 64])
def test_pointers(v0: Any, pointer: Any) -> None:
    with refused("data_ptr"):
        v0(OPTION, ["a"], [[KvBufferWrapper(pointer, 8)]])


@pytest.mark.parametrize("length", [0, -8, True, 1.0, len, None, 1 << 64])
def test_lengths(v0: Any, length: Any) -> None:
    with refused("length"):
        v0(OPTION, ["a"], [[KvBufferWrapper(4096, length)]])


def test_a_buffer_beyond_the_address_space(v0: Any) -> None:
    with refused("address space"):
        v0(OPTION, ["a"], [[KvBufferWrapper((1 << 64) - 8, 16)]])


def test_the_longest_keys_are_accepted(open_cc: Callable[..., Any]) -> None:
    keys = ["x" * 127, PrimaryKey("ä" * 63 + "x", "y" * 127)]
    assert open_cc().save(OPTION, keys, [[buffer(ARRAY)]] * 2).success == 2


def test_v1_calls_on_a_v0_object_say_what_to_do(open_cc: Callable[..., Any]) -> None:
    cc = open_cc()
    with refused("CcConfig_v1"):
        cc.save(slot_mapping=[0], hashes=[1], offsets=[1], option=OPTION)
    for verb in ("save", "load", "async_save", "async_load"):
        with refused("CcConfig_v1"):
            getattr(cc, verb)([0], [1], [1], OPTION)
    with refused("CcConfig_v1"):
        cc.register_kvcache(kv_cache())


@pytest.mark.parametrize("future", [None, 7, object()])
def test_futures_must_be_futures(open_cc: Callable[..., Any], future: Any) -> None:
    cc = open_cc()
    with refused("CcFuture"):
        cc.is_ready(future)
    with refused("CcFuture"):
        cc.get_result(future)


# -- buffers in registered memory


def test_a_buffer_longer_than_its_registered_tensor_is_refused(v0: Any) -> None:
    v0.__self__.register_memory(ARRAY[:16])
    with refused("ends 16 bytes on"):
        v0(OPTION, ["a"], [[KvBufferWrapper(ARRAY.ctypes.data, 24)]])


def test_in_a_larger_registered_allocation_it_is_not(open_cc: Callable[..., Any]) -> None:
    cc = open_cc()
    cc.register_memory(ARRAY)
    assert cc.save(OPTION, ["a"], [[KvBufferWrapper(ARRAY.ctypes.data, 24)]]).success == 1
    with refused("registered memory"):
        cc.save(OPTION, ["b"], [[KvBufferWrapper(ARRAY.ctypes.data + 60, 8)]])


def test_the_innermost_registered_tensor_counts(open_cc: Callable[..., Any]) -> None:
    cc = open_cc()
    cc.register_memory(ARRAY, ARRAY[8:16])
    assert cc.save(OPTION, ["a"], [[KvBufferWrapper(ARRAY.ctypes.data + 16, 48)]]).success == 1
    with refused("registered memory"):
        cc.save(OPTION, ["b"], [[KvBufferWrapper(ARRAY.ctypes.data + 8, 24)]])


def test_a_registered_kv_cache_bounds_v0_buffers(cc: Any) -> None:
    tensor = np.zeros((2, 4, 2, 3), np.float32)
    cc.register_kvcache([[tensor]])
    with refused("registered memory"):
        cc.load(OPTION, ["a"], [[KvBufferWrapper(tensor.ctypes.data, tensor.nbytes + 1)]])


# -- V1: forms


def test_before_registering(open_cc: Callable[..., Any]) -> None:
    cc = open_cc(v1_config())
    for call in CALLS:
        with refused("register"):
            getattr(cc, call)(slot_mapping=[0], hashes=[1], offsets=[1], option=OPTION)
    with refused("register"):
        cc.exists([1])


SLOTS = list(range(8))
SLOT_FORM = {"slot_mapping": SLOTS, "hashes": [1, 2], "offsets": [4, 4]}
CHUNK_FORM = {"hashes": [1, 2], "chunk_descs": [[(0, 4), (4, 4)]]}
TOKEN_FORM = {"slot_mapping": SLOTS, "token_ids": SLOTS, "mask": [0] * 4 + [1] * 4}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"hashes": [1, 2]},
        {"slot_mapping": SLOTS, "hashes": [1, 2]},
        SLOT_FORM | CHUNK_FORM,
        SLOT_FORM | TOKEN_FORM,
        CHUNK_FORM | {"offsets": [4, 4]},
        TOKEN_FORM | {"hashes": [1]},
        SLOT_FORM | {"chunk_desc": [[(0, 4)]]},
    ],
)
def test_exactly_one_form(v1: Any, given: Any) -> None:
    with refused("V1 takes"):
        v1(**given, option=OPTION)


@pytest.mark.parametrize(
    ("name", "value"), [("hashes", []), ("offsets", []), ("slot_mapping", []), ("chunk_descs", [])]
)
def test_empty_lists(v1: Any, name: str, value: Any) -> None:
    form = CHUNK_FORM if name == "chunk_descs" else SLOT_FORM
    with refused(name):
        v1(**form | {name: value}, option=OPTION)


@pytest.mark.parametrize("option", ["option", 5])
def test_v1_options(v1: Any, option: Any) -> None:
    with refused("option"):
        v1(**SLOT_FORM, option=option)


# -- V1: slot mapping


def test_six_slots_and_offsets_of_eight_names_both_numbers(v1: Any) -> None:
    with refused("6 slots.* 8"):
        v1(slot_mapping=list(range(6)), hashes=[1, 2], offsets=[4, 4], option=OPTION)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hashes": [1]}, "pair"),
        ({"hashes": [1, 1]}, "twice"),
        ({"hashes": [1, True]}, "bool"),
        ({"hashes": [1, 2.0]}, "float"),
        ({"hashes": ["1", "2"]}, "str"),
        ({"hashes": 1}, "hashes"),
        ({"hashes": np.zeros((1, 2), np.int64)}, "dimension"),
        ({"hashes": np.zeros(2)}, "integers"),
        ({"offsets": [8, 0]}, "offsets"),
        ({"offsets": [9, -1]}, "offsets"),
        ({"offsets": [4, True]}, "bool"),
        ({"offsets": [1 << 63, 4]}, "64 bits"),
        ({"offsets": [(1 << 63) - 4, (1 << 63) - 4]}, "sum"),
        ({"slot_mapping": [*range(7), 32]}, "slot 32"),
        ({"slot_mapping": [-1, *range(7)]}, "slot -1"),
        ({"slot_mapping": [0, *range(7)]}, "twice"),
        ({"slot_mapping": [*range(7), 1 << 70]}, "64 bits"),
        ({"slot_mapping": np.full(8, (1 << 64) - 1, np.uint64)}, "64 bits"),
        ({"slot_mapping": [*range(7), 7.0]}, "float"),
        ({"slot_mapping": [1, 2, 4, 5, 6, 7, 8, 9], "offsets": [2, 6]}, "chunk 0"),
        ({"slot_mapping": [0, 2, 4, 5, 6, 7, 8, 9], "offsets": [2, 6]}, "chunk 0"),
    ],
)
def test_slot_mapping(v1: Any, change: Any, match: str) -> None:
    with refused(match):
        v1(**SLOT_FORM | change, option=OPTION)


# -- V1: chunk descriptions


@pytest.mark.parametrize(
    ("descs", "match"),
    [
        ([[(0, 4), (4, 4)]] * 2, "layer groups"),
        ([[(0, 4)]], "1 chunks"),
        ([[(0, 4), (4, 0)]], "at least one"),
        ([[(0, 4), (4, -4)]], "at least one"),
        ([[(0, 4), (-4, 4)]], "below 0"),
        ([[(0, 4), (30, 4)]], "32 slots"),
        ([[(0, 4), (0, 1 << 62)]], "32 slots"),
        ([[(0, 4), (2, 4)]], "twice"),
        ([[(0, 4), (5, 2)]], "chunk 1"),
        ([[(0, 4), (4, True)]], "bool"),
        ([[(0, 4), (4,)]], "pairs"),
        ([[(0, 4), 4]], "pairs"),
        ([[]], "empty"),
        ("descs", "chunk_descs"),
        ([np.zeros((2, 3), np.int64)], "pairs"),
    ],
)
def test_chunk_descs(v1: Any, descs: Any, match: str) -> None:
    with refused(match):
        v1(hashes=[1, 2], chunk_descs=descs, option=OPTION)


# -- V1: tokens


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"mask": [0] * 8 + [1]}, "equally long"),
        ({"token_ids": [1]}, "equally long"),
        ({"mask": [1] * 4 + [0] * 4}, "a 0 follows a 1"),
        ({"mask": [0] * 7 + [2]}, "0 and 1"),
        ({"mask": [0.0] * 8}, "float"),
        ({"token_ids": [1.0] * 8}, "float"),
        ({"token_ids": []}, "empty"),
        ({"token_ids": [-1] * 8}, "token"),
        ({"token_ids": [1 << 32] * 8}, "token"),
    ],
)
def test_tokens(v1: Any, change: Any, match: str) -> None:
    with refused(match):
        v1(**TOKEN_FORM | change, option=OPTION)


# -- registering


def layer(**change: Any) -> Any:
    return np.zeros(change.get("shape", (4, 4, 2, 3)), change.get("dtype", np.float32))


class Elsewhere:
    """A tensor on a device, as torch shows it."""

    device = "npu:1"
    shape = (4, 4, 2, 3)

    def data_ptr(self) -> int:
        return 4096


@pytest.mark.parametrize(
    ("kvcache", "match"),
    [
        (None, "non-empty list"),
        ([], "non-empty list"),
        ([[]], r"kvcache\[0\]"),
        ([layer()], r"kvcache\[0\] must be a non-empty list"),
        (layer(), "non-empty list of layers"),
        ([[None]], "no tensor"),
        ([[Elsewhere()]], "npu:1.*host memory"),
        ([[layer(shape=(4, 4))]], "shape"),
        ([[layer(shape=(0, 4, 2, 3))]], "shape"),
        ([[layer(shape=(4, 0, 2, 3))]], "shape"),
        ([[layer(shape=(4, 4, 2, 0))]], "no tensor with any bytes"),
        ([[layer(), layer(shape=(5, 4, 2, 3))]], "layer group 0"),
        ([[layer()], [layer(shape=(4, 8, 2, 3))]], "layer group 0"),
        ([[layer()[:, ::2]]], "not contiguous"),
        ([[layer().transpose(1, 0, 2, 3)]], "not contiguous"),
        ([[layer()[::-1]]], "not contiguous"),
    ],
)
def test_registering(open_cc: Callable[..., Any], kvcache: Any, match: str) -> None:
    with refused(match):
        open_cc(v1_config()).register_kvcache(kvcache)


def test_read_only_tensors_are_refused(open_cc: Callable[..., Any]) -> None:
    tensor = layer()
    tensor.flags.writeable = False
    with refused("read-only"):
        open_cc(v1_config()).register_kvcache([[tensor]])


@pytest.mark.parametrize(
    ("desc", "match"),
    [
        ([], "non-empty"),
        ("all", "non-empty"),
        ([[]], "empty"),
        ([[0, 1], [1, 2]], "twice"),
        ([[0, 3]], "layer 3 of 3"),
        ([[-1]], "layer -1"),
        ([(1, 3)], "layer 3"),
        ([(1, 0)], "empty"),
        ([["0"]], "layer numbers"),
        ([[True]], "layer numbers"),
        ([object()], "layer numbers"),
    ],
)
def test_layer_groups(open_cc: Callable[..., Any], desc: Any, match: str) -> None:
    with refused(match):
        open_cc(v1_config()).register_kvcache(kv_cache(layers=3), desc)


# -- exists


@pytest.mark.parametrize("hashes", [None, [], [1, 1], ["a"], [1.0], [True]])
def test_exists_hashes(cc: Any, hashes: Any) -> None:
    with refused("hashes"):
        cc.exists(hashes)


def test_exists_options(cc: Any) -> None:
    with refused("timeout"):
        cc.exists([1], CcKvOption(timeout=-1))
