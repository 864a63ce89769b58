"""Where an array lies: recognises memory by protocol and never imports the library it came from.

Anything is an array that has torch's ``data_ptr`` and ``stride``, numpy's ``__array_interface__``, or DLPack (also as a
bare capsule). Its kind is read from the memory itself. What is not in host memory is refused by name here and never
dereferenced; this module touches no array's bytes in any case. Driven by :meth:`kvferry.Node.register`.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry import dlpack
from kvferry.errors import InvalidArgument, KvferryError, Unsupported
from kvferry.options import named, shown, text

__all__ = ["Memory", "element", "recognise", "recognise_group", "view", "view_as"]

# A numpy view of an element type that numpy has no name for shows its bits.
_BITS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True, slots=True)
class Memory:
    """One tensor as registering needs it: ``count`` units of ``unit_bytes``, ``stride_bytes`` apart, from ``address`` on.

    ``array`` is what was recognised; ``owner`` is whatever must live for the memory to stay (often more than the array).
    """

    address: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    unit_bytes: int
    stride_bytes: int
    array: object
    owner: object

    @property
    def count(self) -> int:
        return self.shape[0]

    def at(self, address: int, owner: object) -> "Memory":
        """The same somewhere else."""
        return replace(self, address=address, owner=owner)

    @classmethod
    def plain(
        cls, address: int, shape: tuple[int, ...], dtype: str, itemsize: int, stride_bytes: int | None = None
    ) -> "Memory":
        """Memory that no array stands for: units of ``shape[1:]`` elements, one behind the other unless a stride is given."""
        unit_bytes = itemsize * math.prod(shape[1:])
        stride = unit_bytes if stride_bytes is None else stride_bytes
        return cls(address, shape, dtype, itemsize, unit_bytes, stride, array=None, owner=None)


@dataclass(frozen=True, slots=True)
class _Found:
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None  # in bytes; None: rows of C order without gaps
    dtype: str
    itemsize: int
    owner: object


def recognise_group(tensors: object, cache: str) -> list[Memory]:
    """The tensors of one cache, one or a sequence of them: all of one shape, element type and distance between units."""
    listed = list(tensors) if isinstance(tensors, list | tuple) else [tensors]
    if not listed:
        raise _invalid(cache, "a cache needs at least one tensor")
    memories = [recognise(tensor, cache, index) for index, tensor in enumerate(listed)]
    first = memories[0]
    for index, memory in enumerate(memories):
        for what, mine, its in (
            ("shape", memory.shape, first.shape),
            ("element type", memory.dtype, first.dtype),
            ("distance in bytes between its units", memory.stride_bytes, first.stride_bytes),
        ):
            if mine != its:
                raise _invalid(cache, f"tensor {index} has {what} {mine}, but tensor 0 has {its}; they must be equal")
    return memories


def recognise(array: Any, cache: str, index: int = 0) -> Memory:
    """Where ``array`` lies and how its units (dim 0) follow each other.

    :raises Unsupported: it lies on a device; the sentence names the kind and the way out.
    :raises InvalidArgument: it is no array, read-only, without dimensions, larger than its own storage, or its units are
        not contiguous; or asking it where it lies fails, in whatever way.
    """
    try:
        return _recognised(array, cache, index)
    except KvferryError:
        raise
    except Exception as error:  # what is asked is somebody else's code, which may raise anything
        raise _invalid(
            cache, f"tensor {index}, a {type(array).__name__}, does not say where its memory lies: {shown(error)}"
        ) from error


def _recognised(array: Any, cache: str, index: int) -> Memory:
    _refuse_devices(array, cache, index)
    found = _find(array, cache, index)
    shape = found.shape
    if not shape:
        raise _invalid(cache, f"tensor {index} has no dimensions; dim 0 must be its rows or blocks")
    unit_bytes = math.prod(shape[1:]) * found.itemsize
    stride_bytes = unit_bytes
    if found.strides is not None and 0 not in shape:
        expected = found.itemsize
        for length, stride in zip(reversed(shape[1:]), reversed(found.strides[1:]), strict=True):
            if length != 1 and stride != expected:
                raise _invalid(
                    cache,
                    f"tensor {index} (shape {shape}, strides {found.strides} bytes) has units that are not contiguous; "
                    "dim 0 must be the row or block, and all behind it in C order (permute, or make it contiguous first)",
                )
            expected *= length
        if shape[0] > 1:
            stride_bytes = found.strides[0]
            if stride_bytes < unit_bytes:
                raise _invalid(
                    cache,
                    f"tensor {index} has units of {unit_bytes} bytes that are {stride_bytes} bytes apart: they overlap "
                    "or run backwards (an expanded or flipped view?); make a contiguous copy first",
                )
    return Memory(
        found.address, shape, found.dtype, found.itemsize, unit_bytes, stride_bytes, array=array, owner=found.owner
    )


# The names that torch and ml_dtypes give them.
_FLOAT8 = frozenset(
    (
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float8_e4m3",
        "float8_e3m4",
        "float8_e4m3b11fnuz",
    )
)


def element(dtype: object) -> tuple[str, int]:
    """Name and size in bytes of an element type given as a string, a numpy or a torch dtype.

    >>> element("bfloat16"), element(np.float32)
    (('bfloat16', 2), ('float32', 4))
    """
    is_torch = type(dtype).__module__.partition(".")[0] == "torch"
    name = text("dtype", str(dtype)).removeprefix("torch.") if is_torch or isinstance(dtype, str) else ""
    if name == "bfloat16" or name in _FLOAT8:
        return name, 2 if name == "bfloat16" else 1
    try:
        known: np.dtype[Any] | None = None if dtype is None else np.dtype(name or dtype)  # type: ignore[call-overload]
    except Exception:  # noqa: BLE001 - numpy asks whatever it is given, which may refuse in any way
        known = None
    # Numbers only, in this machine's byte order: objects are pointers, which mean nothing in another process.
    if known is None or known.kind not in "biufc" or not known.isnative:
        raise InvalidArgument(
            f"{shown(dtype)} is no element type of tensors; give a name such as 'bfloat16', or a numpy or torch dtype of numbers"
        )
    return known.name, known.itemsize


def view(memory: Memory) -> npt.NDArray[Any]:
    """A writable numpy array over ``memory``, which it keeps alive. Element types unknown to numpy are shown as bits."""
    if isinstance(memory.array, np.ndarray):
        return memory.array
    try:
        dtype: np.dtype[Any] = np.dtype(memory.dtype)
    except TypeError:
        dtype = np.dtype(_BITS.get(memory.itemsize, np.dtype((np.void, memory.itemsize))))
    return view_as(memory, dtype)


def view_as(memory: Memory, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """A writable numpy array over ``memory`` of another element type of the same size."""
    return np.asarray(_Exporter(memory, dtype))


class _Exporter:
    """Hands a numpy view its memory, and stays behind as the view's base so that the memory lives as long."""

    def __init__(self, memory: Memory, dtype: np.dtype[Any]) -> None:
        inner, step = [], memory.itemsize
        for length in reversed(memory.shape[1:]):
            inner.append(step)
            step *= length
        self.memory = memory
        self.__array_interface__ = {
            "version": 3,
            "data": (memory.address, False),
            "typestr": dtype.str,
            "shape": memory.shape,
            "strides": (memory.stride_bytes, *reversed(inner)),
        }


def _refuse_devices(array: Any, cache: str, index: int) -> None:
    """Whatever says that it lies on a device is believed, whatever else it says."""
    device = getattr(array, "device", None)
    kind = device if isinstance(device, str) else getattr(device, "type", None)
    if isinstance(kind, str) and kind.partition(":")[0].lower() != "cpu":
        raise _elsewhere(cache, index, str(device), "device attribute")
    if _is_torch(array):
        _refuse_forms(array, cache, index)
    where = getattr(array, "__dlpack_device__", None)
    if callable(where):
        _refuse_dlpack(where(), cache, index)
    if hasattr(array, "__cuda_array_interface__"):
        raise _elsewhere(cache, index, "cuda", "__cuda_array_interface__")


def _refuse_dlpack(device: tuple[int, int], cache: str, index: int) -> None:
    elsewhere = dlpack.device_name(device)
    if elsewhere:
        raise _elsewhere(cache, index, elsewhere[0], f"DLPack {elsewhere[1]}")


def _is_torch(array: Any) -> bool:
    return all(callable(getattr(array, name, None)) for name in ("data_ptr", "stride", "element_size"))


def _refuse_forms(tensor: Any, cache: str, index: int) -> None:
    """The forms of a torch tensor whose bytes are not simply its values, one behind the other."""
    layout = str(getattr(tensor, "layout", "torch.strided"))
    if layout != "torch.strided":
        raise _invalid(
            cache, f"tensor {index} has the layout {layout}; only strided tensors lie in one piece of memory"
        )
    if getattr(tensor, "is_nested", False):
        raise _invalid(
            cache,
            f"tensor {index} is a nested tensor, whose parts differ in shape; register its parts, or a padded copy",
        )
    for lazy in ("conj", "neg"):
        asked = getattr(tensor, f"is_{lazy}", None)
        if callable(asked) and asked():
            raise _invalid(
                cache,
                f"tensor {index} is a lazy view (is_{lazy}() is True): its values are not what lies in its memory; "
                f"register tensor.resolve_{lazy}(), which is a copy",
            )


def _find(array: Any, cache: str, index: int) -> _Found:
    if isinstance(array, np.ndarray):
        return _from_numpy(array, cache, index)
    if _is_torch(array):
        return _from_torch(array, cache, index)
    if hasattr(array, "__array_interface__"):
        return _from_numpy(np.asarray(array), cache, index)
    if type(array).__name__ == "PyCapsule" or hasattr(array, "__dlpack__"):
        return _from_dlpack(array, cache, index)
    raise _invalid(
        cache,
        f"tensor {index} is a {type(array).__name__}, which is no array: give numpy arrays, torch tensors, or anything "
        "with __array_interface__ or __dlpack__ (numpy.frombuffer makes an array of a buffer)",
    )


def _from_numpy(array: npt.NDArray[Any], cache: str, index: int) -> _Found:
    if not array.flags.writeable:
        raise _read_only(cache, index)
    if array.dtype.hasobject:
        raise _invalid(cache, f"tensor {index} holds Python objects, which cannot be moved to another process")
    return _Found(
        array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.name, array.dtype.itemsize, array
    )


def _from_torch(array: Any, cache: str, index: int) -> _Found:
    itemsize = int(array.element_size())
    shape = tuple(int(length) for length in array.shape)
    strides = tuple(int(step) * itemsize for step in array.stride())
    address, owner = int(array.data_ptr()), array
    if callable(getattr(array, "untyped_storage", None)):
        storage = array.untyped_storage()
        if 0 not in shape:
            _check_storage(address, _extent(shape, strides, itemsize), storage, cache, index)
        # The storage too: `tensor.data = other` would free it while its address is still registered.
        owner = (array, storage)
    return _Found(address, shape, strides, str(array.dtype).removeprefix("torch."), itemsize, owner)


def _check_storage(address: int, size_bytes: int, storage: Any, cache: str, index: int) -> None:
    """A storage may have been resized under its tensors, and those of wrapper classes have no memory at all."""
    first, owned = int(storage.data_ptr()), int(storage.nbytes())
    if not first or not first <= address <= first + owned - size_bytes:
        offset = address - first if first <= address else 0
        raise _invalid(
            cache,
            f"tensor {index} needs {size_bytes} bytes from byte {offset} of its storage on, which has "
            f"{owned if first else 0} (was it resized?); register a tensor that lies in its storage as a whole",
        )


def _extent(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int:
    """Bytes from the first element to the end of the last one; strides are in bytes, and torch has no negative ones."""
    return itemsize + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))


def _from_dlpack(array: Any, cache: str, index: int) -> _Found:
    capsule = array if type(array).__name__ == "PyCapsule" else _exported(array)
    if not dlpack.is_capsule(capsule):
        raise _invalid(cache, f"tensor {index} is no DLPack capsule, or somebody has taken it over already")
    tensor = dlpack.read_capsule(capsule)
    _refuse_dlpack(tensor.device, cache, index)
    if tensor.read_only:
        raise _read_only(cache, index)
    if not tensor.itemsize:
        raise _invalid(cache, f"tensor {index} has elements of type {tensor.dtype}, which are no whole bytes")
    strides = tuple(step * tensor.itemsize for step in tensor.strides)
    return _Found(tensor.address, tensor.shape, strides, tensor.dtype, tensor.itemsize, (array, capsule))


def _exported(array: Any) -> object:
    try:
        return array.__dlpack__(max_version=(1, 0))
    except TypeError:  # an exporter from before DLPack 1.0
        return array.__dlpack__()


def _invalid(cache: str, sentence: str) -> InvalidArgument:
    return InvalidArgument(f"cache {named(cache)}: {sentence}", cache=cache, operation="register")


def _read_only(cache: str, index: int) -> InvalidArgument:
    return _invalid(
        cache, f"tensor {index} is read-only, so nothing could be received in it; register a writable array"
    )


def _elsewhere(cache: str, index: int, kind: str, seen: str) -> Unsupported:
    return Unsupported(
        f"cache {named(cache)}: tensor {index} is in memory of kind {shown(kind)} (seen by its {seen}), and only host memory is "
        "moved so far; copy it to the host first (torch: tensor.cpu(), CuPy: cupy.asnumpy) and register the copy",
        cache=cache,
        operation="register",
    )
