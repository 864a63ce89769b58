"""Where a tensor lies, by protocol: torch's methods or numpy's array interface. Host memory alone; no byte is touched."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ems.common.exception import invalid


@dataclass(frozen=True, slots=True)
class Memory:
    """Strides are in bytes. ``owner`` keeps the memory."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    owner: object

    @property
    def size_bytes(self) -> int:
        """From the first byte to the end of the last element."""
        if 0 in self.shape:
            return 0
        return self.itemsize + sum(
            (length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True)
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one [i, j]: what dim 2 and all behind it hold."""
        return self.itemsize * math.prod(self.shape[2:])

    def has_dense_units(self) -> bool:
        """Whether each [i] is one run of bytes in C order, and they do not overlap."""
        expected = self.itemsize
        for length, stride in zip(reversed(self.shape[1:]), reversed(self.strides[1:]), strict=True):
            if length != 1 and stride != expected:
                return False
            expected *= length
        return self.shape[0] == 1 or self.strides[0] >= expected


def memory_of(tensor: Any, name: str) -> Memory:
    """:raises EmsException: ``EMS_INVALID_ARGUMENT``: it is no tensor, is read-only, or lies on a device."""
    device = getattr(tensor, "device", None)
    kind = device if isinstance(device, str) else getattr(device, "type", "cpu")
    if str(kind).partition(":")[0].lower() != "cpu" or hasattr(tensor, "__cuda_array_interface__"):
        raise invalid(
            f"{name} is in memory of kind {device}; KV caches lie in host memory here, so register a CPU tensor"
        )
    if all(callable(getattr(tensor, method, None)) for method in ("data_ptr", "stride", "element_size")):
        itemsize = int(tensor.element_size())
        strides = tuple(int(step) * itemsize for step in tensor.stride())
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Memory(int(tensor.data_ptr()), tuple(map(int, tensor.shape)), strides, dtype, itemsize, tensor)
    if hasattr(tensor, "__array_interface__"):
        array = np.asarray(tensor)
        if not array.flags.writeable or array.dtype.hasobject:
            raise invalid(f"{name} is read-only, or holds Python objects; a load could not write to it")
        address = int(array.__array_interface__["data"][0])
        return Memory(address, array.shape, array.strides, array.dtype.name, array.dtype.itemsize, array)
    raise invalid(f"{name} is a {type(tensor).__name__}, which is no tensor: give torch CPU tensors or numpy arrays")
