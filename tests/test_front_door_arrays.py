"""What `register` recognises as memory, and what it refuses by name; no memory is touched and no node is needed."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry import InvalidArgument, Unsupported, dlpack
from kvferry.arrays import element, recognise, recognise_group, view

NOWHERE = 0xDEAD000  # an address that nobody may dereference


class Interface:
    """A foreign array that speaks `__array_interface__` only."""

    def __init__(self, array: Any, **changes: Any) -> None:
        self.__array_interface__ = array.__array_interface__ | changes
        self.keeps = array


class Dlpack:
    """A foreign array that speaks DLPack only, in its newest or its oldest form."""

    def __init__(self, array: Any, old: bool = False) -> None:
        self.array, self.old = array, old

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **keywords: Any) -> object:
        if self.old and keywords:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**keywords)


class Managed(ctypes.Structure):
    """DLManagedTensor of dlpack.h, as a device library would fill it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


kept: list[object] = []  # what the capsules below point to


def capsule(
    device: tuple[int, int], shape: tuple[int, ...], *, code: int = 2, bits: int = 32, address: int = NOWHERE
) -> Any:
    sizes = (ctypes.c_int64 * len(shape))(*shape)
    managed = Managed(address, *device, len(shape), code, bits, 1, sizes, None, 0, None, None)
    kept.extend([sizes, managed])
    new = ctypes.PyDLL(None).PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.addressof(managed), b"dltensor", None)


def lookalike(array: Any, **changes: Any) -> Any:
    """Quacks like a torch tensor."""
    words = {
        "shape": array.shape,
        "dtype": "torch.float32",
        "device": SimpleNamespace(type="cpu", index=None),
        "data_ptr": lambda: array.ctypes.data,
        "stride": lambda: tuple(step // array.itemsize for step in array.strides),
        "element_size": lambda: array.itemsize,
        "keeps": array,
    }
    return SimpleNamespace(**(words | changes))


@pytest.fixture
def kv() -> Any:
    return np.arange(96, dtype=np.float32).reshape(4, 6, 4)


# --- what is recognised ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap", [lambda array: array, Interface, lookalike, Dlpack, lambda array: Dlpack(array, old=True)]
)
def test_every_protocol_tells_the_same_place(kv: Any, wrap: Any) -> None:
    memory = recognise(wrap(kv), "kv")
    assert (memory.address, memory.shape, memory.dtype) == (kv.ctypes.data, (4, 6, 4), "float32")
    assert (memory.count, memory.unit_bytes, memory.stride_bytes) == (4, 96, 96)


def test_a_bare_capsule_is_an_array_and_stays_whole(kv: Any) -> None:
    bare = kv.__dlpack__()
    memory = recognise(bare, "kv")
    assert (memory.address, memory.shape, memory.dtype) == (kv.ctypes.data, (4, 6, 4), "float32")
    assert dlpack.is_capsule(bare)  # its destructor still gives the memory back


def test_units_may_lie_apart(kv: Any) -> None:
    every_second = recognise(kv[::2], "kv")
    assert (every_second.count, every_second.unit_bytes, every_second.stride_bytes) == (2, 96, 192)
    first_rows = recognise(kv[:, :2], "kv")
    assert (first_rows.unit_bytes, first_rows.stride_bytes) == (32, 96)


def test_a_dimension_of_one_may_have_any_stride() -> None:
    odd = np.lib.stride_tricks.as_strided(np.zeros(64, np.float32), (3, 1, 4), (64, 12345, 4))
    assert recognise(odd, "kv").unit_bytes == 16
    assert recognise(np.zeros((1, 8), np.int8)[:, :4], "kv").stride_bytes == 4  # one unit has no next one


def test_bfloat16_by_dlpack_is_named_and_seen_as_bits() -> None:
    bits = np.arange(8, dtype=np.uint16).reshape(2, 4)
    memory = recognise(capsule((1, 0), (2, 4), code=4, bits=16, address=bits.ctypes.data), "kv")
    assert (memory.dtype, memory.itemsize, memory.unit_bytes) == ("bfloat16", 2, 8)
    seen = view(memory)
    assert seen.dtype == np.uint16
    np.testing.assert_array_equal(seen, bits)


def test_a_view_is_the_array_itself_or_the_same_memory_with_the_same_strides(kv: Any) -> None:
    assert view(recognise(kv, "kv")) is kv
    seen = view(recognise(lookalike(kv[:, :2]), "kv"))
    np.testing.assert_array_equal(seen, kv[:, :2])
    seen[3, 1, 0] = -1
    assert kv[3, 1, 0] == -1


@pytest.mark.parametrize(
    ("given", "name", "size"),
    [
        ("bfloat16", "bfloat16", 2),
        ("float8_e4m3fn", "float8_e4m3fn", 1),
        ("float16", "float16", 2),
        (np.float32, "float32", 4),
        (np.dtype("int8"), "int8", 1),
        ("torch.bfloat16", "bfloat16", 2),
    ],
)
def test_element_types_have_many_spellings(given: object, name: str, size: int) -> None:
    assert element(given) == (name, size)


def test_a_word_that_is_no_element_type_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'bf17' is no element type"):
        element("bf17")


# --- what is refused by name ---------------------------------------------------------------------------------------


def test_a_cuda_capsule_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match=r"cache 'kv': tensor 0 is in memory of kind 'cuda:1'.*kDLCUDA") as caught:
        recognise(capsule((2, 1), (4, 8)), "kv")
    assert (caught.value.cache, caught.value.operation) == ("kv", "register")
    assert not caught.value.bytes_touched


@pytest.mark.parametrize(
    ("device", "kind"), [((10, 0), "rocm:0"), ((13, 0), "cuda_managed:0"), ((99, 2), "dlpack-99:2")]
)
def test_other_devices_are_refused_by_name(device: tuple[int, int], kind: str) -> None:
    with pytest.raises(Unsupported, match=f"'{kind}'"):
        recognise(capsule(device, (4, 8)), "kv")


def test_pinned_host_memory_is_host_memory() -> None:
    assert recognise(capsule((3, 0), (4, 8)), "kv").address == NOWHERE


def test_a_dlpack_exporter_on_a_device_is_refused_before_it_exports() -> None:
    class OnDevice:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

        def __dlpack__(self, **_: Any) -> object:
            raise AssertionError("asked for the memory of a device")

    with pytest.raises(Unsupported, match="'cuda:0'"):
        recognise(OnDevice(), "kv")


def test_a_cuda_array_interface_is_refused_by_name(kv: Any) -> None:
    words = kv.__array_interface__ | {"data": (NOWHERE, False)}
    with pytest.raises(Unsupported, match=r"'cuda'.*__cuda_array_interface__.*copy it to the host first"):
        recognise(SimpleNamespace(__cuda_array_interface__=words), "kv")


@pytest.mark.parametrize("device", ["cuda:0", SimpleNamespace(type="cuda", index=0), "xpu:1", "meta"])
def test_a_tensor_that_says_it_is_on_a_device_is_believed(kv: Any, device: object) -> None:
    with pytest.raises(Unsupported, match="memory of kind"):
        recognise(lookalike(kv, device=device, data_ptr=lambda: pytest.fail("looked at")), "kv")


def test_a_lookalike_on_cuda_0_is_named(kv: Any) -> None:
    with pytest.raises(Unsupported, match="'cuda:0'"):
        recognise(lookalike(kv, device="cuda:0"), "kv")
    array = Interface(kv)
    array.device = "cuda:0"  # type: ignore[attr-defined]
    with pytest.raises(Unsupported, match="'cuda:0'"):  # also if its memory seems to be the host's
        recognise(array, "kv")


# --- what cannot be registered as it is ----------------------------------------------------------------------------


def test_read_only_memory_is_refused(kv: Any) -> None:
    kv.flags.writeable = False
    with pytest.raises(InvalidArgument, match="tensor 0 is read-only"):
        recognise(kv, "kv")


def test_units_must_be_contiguous(kv: Any) -> None:
    with pytest.raises(InvalidArgument, match="units that are not contiguous"):
        recognise(kv.transpose(0, 2, 1), "kv")
    with pytest.raises(InvalidArgument, match="units that are not contiguous"):
        recognise(kv[:, :, :2], "kv")


def test_units_must_not_overlap_or_run_backwards(kv: Any) -> None:
    backwards = kv[::-1]
    overlapping = np.lib.stride_tricks.as_strided(kv, (4, 6, 4), (0, 16, 4))
    for array in (backwards, overlapping):
        with pytest.raises(InvalidArgument, match="overlap or run backwards"):
            recognise(array, "kv")


def test_what_is_no_array_is_named(kv: Any) -> None:
    for thing in (b"bytes", {"a": kv}, None, 7, "kv"):
        with pytest.raises(InvalidArgument, match=f"is a {type(thing).__name__}, which is no array"):
            recognise(thing, "kv")
    with pytest.raises(InvalidArgument, match="no dimensions"):
        recognise(np.array(1.0), "kv")
    with pytest.raises(InvalidArgument, match="Python objects"):
        recognise(np.array([kv, None], dtype=object), "kv")


def test_a_capsule_that_was_taken_over_is_refused(kv: Any) -> None:
    class Bare:
        def __init__(self) -> None:
            self.capsule = kv.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **_: Any) -> Any:
            return self.capsule

    taken = Bare()
    np.from_dlpack(taken)
    with pytest.raises(InvalidArgument, match="taken it over already"):
        recognise(taken.capsule, "kv")


def test_the_tensors_of_a_cache_are_alike(kv: Any) -> None:
    assert len(recognise_group([kv, kv.copy()], "kv")) == 2
    assert len(recognise_group(kv, "kv")) == 1
    wide = np.zeros((4, 6, 8), np.float32)
    for other, what in ((kv[:2], "shape"), (kv.view(np.int32), "element type"), (wide[:, :, :4], "not contiguous")):
        with pytest.raises(InvalidArgument, match=what):
            recognise_group([kv, other], "kv")
    with pytest.raises(InvalidArgument, match="distance in bytes"):
        recognise_group([np.zeros((2, 4), np.int8), np.zeros((2, 8), np.int8)[:, :4]], "kv")
    with pytest.raises(InvalidArgument, match="at least one tensor"):
        recognise_group([], "kv")


class Breaks:
    """Its property raises: what asks for it hears neither yes nor no."""

    @property
    def __array_interface__(self) -> Any:
        raise RuntimeError("the device has gone")


@pytest.mark.parametrize(
    ("thing", "cause"),
    [
        (SimpleNamespace(__array_interface__={"version": 3}), ValueError),
        (SimpleNamespace(__array_interface__=7), ValueError),
        (Breaks(), RuntimeError),
        (lookalike(np.zeros(4), data_ptr=lambda: 1 / 0), ZeroDivisionError),
        (lookalike(np.zeros(4), stride=lambda: (1, 1)), ValueError),
        (SimpleNamespace(__dlpack_device__=lambda: (1, 0), __dlpack__=lambda **_: 1 / 0), ZeroDivisionError),
        (SimpleNamespace(__dlpack_device__=lambda: None, __dlpack__=lambda **_: None), TypeError),
    ],
    ids=["half an interface", "no interface", "a property", "an address", "strides", "an export", "a device"],
)
def test_an_array_that_does_not_answer_is_named_and_its_error_kept(thing: Any, cause: type[Exception]) -> None:
    with pytest.raises(
        InvalidArgument, match=r"cache 'kv': tensor 3, a .* does not say where its memory lies"
    ) as caught:
        recognise(thing, "kv", 3)
    assert isinstance(caught.value.__cause__, cause)


def test_an_interface_without_an_address_is_refused(kv: Any) -> None:
    with pytest.raises(InvalidArgument, match="tensor 0"):
        recognise(Interface(kv, data=(0, False)), "kv")


@pytest.mark.parametrize("name", ["two\nlines", "n" * 1_000_000], ids=["two lines", "a million characters"])
def test_a_sentence_shows_a_name_on_one_line_and_shortened(name: str) -> None:
    with kvferry.Node() as node:
        for refused in (
            lambda: node.register(name, []),
            lambda: node.register_addresses(name, [], unit_bytes=1, count=1),
        ):
            with pytest.raises(InvalidArgument, match="at least one") as caught:
                refused()
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 200
            assert caught.value.cache == name


# --- torch ---------------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_torch_tensors_are_recognised_and_their_storage_is_kept() -> None:
    import torch

    for dtype, name, size in ((torch.float32, "float32", 4), (torch.bfloat16, "bfloat16", 2)):
        tensor = torch.zeros(4, 6, 8, dtype=dtype)
        memory = recognise(tensor, "kv")
        assert (memory.address, memory.dtype, memory.unit_bytes) == (tensor.data_ptr(), name, 48 * size)
        assert element(dtype) == (name, size)
    apart = recognise(tensor[:, :3], "kv")
    assert (apart.unit_bytes, apart.stride_bytes) == (48, 96)
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    memory = recognise(parameter, "kv")
    parameter.data = torch.zeros(2, 2)
    assert memory.owner[1].data_ptr() == memory.address  # type: ignore[index]


@pytest.mark.torch
def test_torch_tensors_that_have_no_memory_in_one_piece_are_refused() -> None:
    import torch

    with pytest.raises(Unsupported, match="'meta'"):
        recognise(torch.zeros(2, 2, device="meta"), "kv")
    with pytest.raises(InvalidArgument, match="sparse"):
        recognise(torch.zeros(2, 2).to_sparse(), "kv")
    with pytest.raises(InvalidArgument, match="not contiguous"):
        recognise(torch.zeros(2, 3, 4).transpose(1, 2), "kv")


@pytest.mark.torch
def test_a_torch_tensor_is_refused_where_it_claims_more_than_its_storage_has() -> None:
    import torch

    for left in (64, 0):
        tensor = torch.zeros(4, 256)
        tensor.untyped_storage().resize_(left)
        with pytest.raises(InvalidArgument, match=f"tensor 1 needs 4096 bytes from byte 0 .* which has {left} "):
            recognise_group([torch.zeros(4, 256), tensor], "kv")
    tail = torch.zeros(8, 4)[4:]
    assert recognise(tail, "kv").count == 4  # up to the last byte
    tail.untyped_storage().resize_(8 * 16 - 1)
    with pytest.raises(InvalidArgument, match=r"tensor 0 needs 64 bytes from byte 64 .* which has 127 "):
        recognise(tail, "kv")
    apart = torch.zeros(4, 8)[:, :4]
    apart.untyped_storage().resize_(3 * 32 + 16)
    assert recognise(apart, "kv").stride_bytes == 32  # the last unit needs no distance behind it
    recognise(torch.zeros(0, 4), "kv")
    recognise(torch.zeros(4, 1)[:, :0], "kv")


@pytest.mark.torch
def test_a_torch_tensor_without_memory_of_its_own_is_refused() -> None:
    import torch

    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), words: Any = None) -> Any:
            raise NotImplementedError(call)

    with pytest.raises(InvalidArgument, match="tensor 0"):
        recognise(torch.Tensor._make_wrapper_subclass(Wrapper, (4, 8)), "kv")
    with pytest.raises(InvalidArgument, match="tensor 0"):
        recognise(torch._efficientzerotensor((4, 8)), "kv")


@pytest.mark.torch
def test_lazy_torch_views_are_refused_with_the_way_out() -> None:
    import torch

    values = torch.view_as_complex(torch.ones(4, 8, 2))
    with pytest.raises(InvalidArgument, match=r"is_conj\(\) is True.*tensor\.resolve_conj\(\)"):
        recognise(values.conj(), "kv")
    with pytest.raises(InvalidArgument, match=r"is_neg\(\) is True.*tensor\.resolve_neg\(\)"):
        recognise(torch._neg_view(torch.ones(4, 8)), "kv")
    assert recognise(values.conj().resolve_conj(), "kv").dtype == "complex64"
    with pytest.raises(InvalidArgument, match="does not say where its memory lies"):  # torch does not export it
        recognise(Dlpack(values.conj()), "kv")


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_forms_of_torch_tensors_are_named() -> None:
    import torch

    with pytest.raises(InvalidArgument, match="tensor 0 is a nested tensor"):
        recognise(torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)]), "kv")
    with pytest.raises(InvalidArgument, match=r"layout torch\._mkldnn"):
        recognise(torch.zeros(2, 4).to_mkldnn(), "kv")


@pytest.mark.torch
def test_torch_by_dlpack_alone_tells_bfloat16() -> None:
    import torch

    tensor = torch.arange(8, dtype=torch.bfloat16).reshape(2, 4)
    memory = recognise(Dlpack(tensor), "kv")
    assert (memory.address, memory.dtype, memory.unit_bytes) == (tensor.data_ptr(), "bfloat16", 8)


@pytest.mark.parametrize("dtype", [object, ">f4", "U3", [("a", "f4")], None, "float8_banana", "no such"])
def test_only_numbers_in_native_order_are_allocated(dtype: Any) -> None:
    with kvferry.Node(pool=1 << 20) as node, pytest.raises(kvferry.InvalidArgument, match="element type"):
        node.allocate("kv", tensors=1, shape=(2, 4), dtype=dtype)
