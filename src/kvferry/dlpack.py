"""Reads where a DLPack tensor lies, without taking it over.

``numpy.from_dlpack`` would refuse bfloat16 and the eight-bit floats that KV caches are made of, so the few fields that
registering needs are read from the capsule itself. The capsule is never renamed: whoever holds it holds the memory, and
its own destructor gives the memory back. Layout as in dlpack.h 0.8 (``dltensor``) and 1.0 (``dltensor_versioned``).
"""

import ctypes
from dataclasses import dataclass

__all__ = ["DlpackTensor", "device_name", "is_capsule", "read_capsule"]

CPU = 1
# Pinned host memory: ordinary host memory to everybody but the device that registered it.
_HOST_DEVICES = {CPU: "kDLCPU", 3: "kDLCUDAHost", 11: "kDLROCMHost"}
_OTHER_DEVICES = {
    2: ("cuda", "kDLCUDA"),
    4: ("opencl", "kDLOpenCL"),
    7: ("vulkan", "kDLVulkan"),
    8: ("metal", "kDLMetal"),
    9: ("vpi", "kDLVPI"),
    10: ("rocm", "kDLROCM"),
    12: ("ext", "kDLExtDev"),
    13: ("cuda_managed", "kDLCUDAManaged"),
    14: ("oneapi", "kDLOneAPI"),
    15: ("webgpu", "kDLWebGPU"),
    16: ("hexagon", "kDLHexagon"),
    17: ("maia", "kDLMAIA"),
    18: ("trn", "kDLTrn"),
}
_READ_ONLY = 1
# The last element type codes are the eight-bit (and smaller) floats, by name; the others carry their width in `bits`.
_TYPES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_NAMED_TYPES = {
    7: "float8_e3m4",
    8: "float8_e4m3",
    9: "float8_e4m3b11fnuz",
    10: "float8_e4m3fn",
    11: "float8_e4m3fnuz",
    12: "float8_e5m2",
    13: "float8_e5m2fnuz",
    14: "float8_e8m0fnu",
}


@dataclass(frozen=True, slots=True)
class DlpackTensor:
    """What a capsule says; ``strides`` in elements, ``itemsize`` 0 for elements that are no whole bytes."""

    device: tuple[int, int]
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    read_only: bool


class _Tensor(ctypes.Structure):
    _fields_ = [
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
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


def device_name(device: tuple[int, int]) -> tuple[str, str] | None:
    """None for host memory, else its kind and DLPack's word for it, as in ``("cuda:0", "kDLCUDA")``."""
    number, index = int(device[0]), int(device[1])
    if number in _HOST_DEVICES:
        return None
    kind, constant = _OTHER_DEVICES.get(number, (f"dlpack-{number}", f"device type {number}"))
    return f"{kind}:{index}", constant


def is_capsule(value: object) -> bool:
    """Whether ``value`` is a bare DLPack capsule that nobody has taken over yet."""
    return type(value).__name__ == "PyCapsule" and _name(value) is not None


def read_capsule(capsule: object) -> DlpackTensor:
    """What the capsule says about its tensor; the capsule must satisfy :func:`is_capsule` and stays as it is."""
    name = _name(capsule)
    get_pointer = ctypes.PyDLL(None).PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    pointer = get_pointer(capsule, name)
    read_only = False
    if name == b"dltensor":
        tensor = _Tensor.from_address(pointer)
    else:
        versioned = _Versioned.from_address(pointer)
        tensor, read_only = versioned.tensor, bool(versioned.flags & _READ_ONLY)
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _contiguous(shape)
    bits = tensor.bits * tensor.lanes
    return DlpackTensor(
        device=(tensor.device_type, tensor.device_id),
        address=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides=strides,
        dtype=_dtype_name(tensor.code, tensor.bits, tensor.lanes),
        itemsize=0 if bits % 8 else bits // 8,
        read_only=read_only,
    )


def _name(capsule: object) -> bytes | None:
    is_valid = ctypes.PyDLL(None).PyCapsule_IsValid
    is_valid.restype, is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
    return next((name for name in (b"dltensor", b"dltensor_versioned") if is_valid(capsule, name)), None)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def _dtype_name(code: int, bits: int, lanes: int) -> str:
    name = _NAMED_TYPES.get(code) or (
        _TYPES.get(code, f"dlpack{code}_") + ("" if code == 6 and bits == 8 else str(bits))
    )
    return name if lanes == 1 else f"{name}x{lanes}"
