"""A group of equally shaped tensors at known addresses, and its description."""

from __future__ import annotations

import math
from typing import Any

from llm_datadist.data_type import DataType, dtype_to_size_bytes
from llm_datadist.enums import Memtype, Placement
from llm_datadist.status import LLMStatusCode, raise_if_false
from llm_datadist.utils.utils import (
    check_inner,
    check_int32,
    check_isinstance,
    check_list_int64,
    check_object,
    check_uint32,
)


class CacheDesc:
    """How many tensors, of which shape and type. Dim 0 counts rows or blocks, whatever ``batch_dim_index`` is."""

    def __init__(
        self,
        num_tensors: int,
        shape: list[int] | tuple[int, ...],
        data_type: DataType,
        placement: Placement = Placement.DEVICE,
        batch_dim_index: int = 0,
        seq_len_dim_index: int = -1,
        kv_tensor_format: str | None = None,
    ) -> None:
        self._num_tensors = check_uint32("num_tensors", num_tensors)
        check_list_int64("shape", shape)
        check_isinstance("data_type", data_type, DataType)
        check_isinstance("placement", placement, Placement)
        check_isinstance("batch_dim_index", batch_dim_index, int, allow_none=False)
        raise_if_false(
            0 <= batch_dim_index < len(shape),
            "batch_dim_index is {}, shape has {} dimensions",
            batch_dim_index,
            len(shape),
        )
        check_int32("seq_len_dim_index", seq_len_dim_index)
        raise_if_false(
            -1 <= seq_len_dim_index < len(shape),
            "seq_len_dim_index is {}, can be -1 or one of shape's {} dimensions",
            seq_len_dim_index,
            len(shape),
        )
        check_isinstance("kv_tensor_format", kv_tensor_format, str)
        self._shape: Any = shape  # the caller's own list: update_dim writes into it
        self._data_type = data_type
        self._placement = placement
        self._batch_dim = batch_dim_index
        self._seq_len_dim_index = seq_len_dim_index
        self._kv_tensor_format = kv_tensor_format
        self._batch_size: int = shape[batch_dim_index]
        self._size: int | None = None
        self._is_blocks = False

    @property
    def num_tensors(self) -> int:
        return self._num_tensors

    @property
    def shape(self) -> list[int]:
        return self._shape  # type: ignore[no-any-return]

    @property
    def data_type(self) -> DataType:
        return self._data_type

    @property
    def placement(self) -> Placement:
        return self._placement

    @property
    def batch_dim(self) -> int:
        return self._batch_dim

    @property
    def seq_len_dim_index(self) -> int:
        return self._seq_len_dim_index

    @property
    def kv_tensor_format(self) -> str | None:
        return self._kv_tensor_format

    @property
    def batch_size(self) -> int:
        """``shape[batch_dim_index]`` as it was at construction."""
        return self._batch_size

    @property
    def size(self) -> int:
        """Bytes of one tensor."""
        if self._size is None:
            raise_if_false(
                all(dim > 0 for dim in self._shape),
                "size of a tensor of shape {} cannot be told: its dimensions must be positive",
                self._shape,
                status_code=LLMStatusCode.LLM_SUCCESS,  # so in the vendor's; callers look at the text
            )
            check_isinstance("data_type", self._data_type, DataType, allow_none=False)
            self._size = math.prod(self._shape) * dtype_to_size_bytes[self._data_type]
        return self._size

    def update_dim(self, dim_index: int, dim_value: int) -> None:
        """Writes into the shape (a list; a tuple is ``TypeError``). ``batch_size`` stays as it was."""
        self._shape[dim_index] = dim_value
        self._size = None

    def __repr__(self) -> str:
        return (
            f"CacheDesc(num_tensors={self._num_tensors}, shape={self._shape}, data_type={self._data_type}, "
            f"placement={self._placement}, batch_dim_index={self._batch_dim}, "
            f"seq_len_dim_index={self._seq_len_dim_index},kv_tensor_format={self._kv_tensor_format})"
        )


class Cache:
    """A registered or allocated cache; made by the cache manager. Nothing is freed when it goes out of sight."""

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        tensor_addrs: list[int],
        cache_manager: object,
        is_registered: bool = False,
        is_blocks_cache: bool = False,
    ) -> None:
        self._cache_id = cache_id
        self._cache_desc = cache_desc
        self._tensor_addrs = tensor_addrs
        self._cache_manager = cache_manager
        self._is_registered = is_registered
        self._is_blocks_cache = is_blocks_cache

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int]) -> Cache:
        """Host memory as an operand of ``swap_blocks``, and of nothing else."""
        check_object("cache_desc", cache_desc, CacheDesc)
        check_isinstance("addrs", addrs, list, allow_none=False)
        check_inner("addrs", addrs, int)
        raise_if_false(cache_desc.placement == Placement.HOST, "placement of a cpu cache must be HOST")
        raise_if_false(
            len(addrs) == cache_desc.num_tensors,
            "{} addresses are given for {} tensors",
            len(addrs),
            cache_desc.num_tensors,
        )
        return cls(-1, cache_desc, addrs, None, False, True)

    @property
    def cache_id(self) -> int:
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        return self._cache_desc

    @property
    def tensor_addrs(self) -> list[int]:
        """One address for each tensor."""
        return self._tensor_addrs

    @property
    def per_device_tensor_addrs(self) -> list[list[int]]:
        """The addresses once more as the guides of the older mode read them: a list for each device, of which there
        is one."""
        return [self._tensor_addrs]

    @property
    def is_blocks_cache(self) -> bool:
        return self._is_blocks_cache

    def __str__(self) -> str:
        return (
            f"Cache(cache_id = {self._cache_id}, device_tensor_addrs = {len(self._tensor_addrs)}, "
            f"is_blocks_cache = {self._is_blocks_cache})"
        )


class KvCache:
    """The older mode's cache: a list of addresses for each device. Only its host form can be made here."""

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        per_device_tensor_addrs: list[list[int]],
        kv_cache_manager: Any,
    ) -> None:
        self._cache_id = cache_id
        self._cache_desc = cache_desc
        self._per_device_tensor_addrs = per_device_tensor_addrs
        self._kv_cache_manager = kv_cache_manager

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int] | list[list[int]]) -> KvCache:
        check_object("cache_desc", cache_desc, CacheDesc)
        check_isinstance("addrs", addrs, list, allow_none=False)
        raise_if_false(cache_desc.placement == Placement.HOST, "placement of a cpu cache must be HOST")
        raise_if_false(bool(addrs), "addrs is empty")
        per_device: list[list[int]] = addrs if isinstance(addrs[0], list) else [addrs]
        for index, device_addrs in enumerate(per_device):
            check_isinstance(f"addrs[{index}]", device_addrs, list, allow_none=False)
            check_inner(f"addrs[{index}]", device_addrs, int)
            raise_if_false(
                len(device_addrs) == cache_desc.num_tensors,
                "{} addresses are given for {} tensors",
                len(device_addrs),
                cache_desc.num_tensors,
            )
        return cls(-1, cache_desc, per_device, None)

    @property
    def cache_id(self) -> int:
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        return self._cache_desc

    @property
    def per_device_tensor_addrs(self) -> list[list[int]]:
        return self._per_device_tensor_addrs

    def __str__(self) -> str:
        return f"KvCache(cache_id = {self._cache_id}, num_devices = {len(self._per_device_tensor_addrs)})"

    def __del__(self) -> None:
        manager = getattr(self, "_kv_cache_manager", None)
        if manager is not None and manager.is_initialized():
            manager.deallocate_cache(self)


class MemInfo:
    """A piece of memory by address; checked for types only."""

    def __init__(self, mem_type: Memtype, addr: int, size: int) -> None:
        check_isinstance("mem_type", mem_type, Memtype)
        check_isinstance("addr", addr, int)
        check_isinstance("size", size, int)
        self._mem_type = mem_type
        self._addr = addr
        self._size = size

    @property
    def mem_type(self) -> Memtype:
        return self._mem_type

    @property
    def addr(self) -> int:
        return self._addr

    @property
    def size(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"MemInfo(mem_type={self._mem_type}, addr={self._addr}, size={self._size})"
