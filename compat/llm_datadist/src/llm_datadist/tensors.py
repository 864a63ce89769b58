"""Views over raw host addresses, for callers that got a cache as addresses. torch is imported when asked for one."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def create_npu_tensors(shape: Sequence[int], dtype: torch.dtype, addrs: Sequence[int]) -> list[torch.Tensor]:
    """One torch tensor (on the CPU) for each address, over the memory itself.

    The tensors own nothing: whoever owns the memory keeps it as long as they are used.
    """
    import torch

    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes <= 0:
        raise ValueError(f"a tensor of shape {list(shape)} has no bytes to look at")
    return [
        torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=dtype).reshape(tuple(shape))
        for address in addrs
    ]
