"""Element types. numpy is imported only when one of the three numpy maps is touched."""

from __future__ import annotations

from enum import Enum
from typing import Any

from llm_datadist._rules import element_bits


class DataType(Enum):
    DT_FLOAT = 0
    DT_FLOAT16 = 1
    DT_INT8 = 2
    DT_INT32 = 3
    DT_UINT8 = 4
    DT_INT16 = 6
    DT_UINT16 = 7
    DT_UINT32 = 8
    DT_INT64 = 9
    DT_UINT64 = 10
    DT_DOUBLE = 11
    DT_BOOL = 12
    DT_STRING = 13
    DT_BF16 = 27


dtype_to_size_bytes: dict[DataType, int] = {dtype: (element_bits(dtype.value) or 0) // 8 for dtype in DataType}

# The native layer names types by number.
python_dtype_2_dwrapper_dtype: dict[DataType, int] = {dtype: dtype.value for dtype in DataType}


def get_python_dtype_from_wrapper_dtype(number: int) -> DataType:
    return DataType(number)


_NUMPY_NAMES = {
    DataType.DT_FLOAT: "float32",
    DataType.DT_FLOAT16: "float16",
    DataType.DT_INT8: "int8",
    DataType.DT_INT32: "int32",
    DataType.DT_UINT8: "uint8",
    DataType.DT_INT16: "int16",
    DataType.DT_UINT16: "uint16",
    DataType.DT_UINT32: "uint32",
    DataType.DT_INT64: "int64",
    DataType.DT_UINT64: "uint64",
    DataType.DT_DOUBLE: "float64",
    DataType.DT_BOOL: "bool_",
    DataType.DT_STRING: "bytes_",
    DataType.DT_BF16: "float16",  # numpy has no bfloat16: same size, other meaning
}
_NUMPY_MAPS = ("dtype_to_np_dtype", "valid_np_dtypes", "np_dtype_to_dtype")


def __getattr__(name: str) -> Any:
    if name not in _NUMPY_MAPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import numpy as np

    to_numpy = {dtype: getattr(np, numpy_name) for dtype, numpy_name in _NUMPY_NAMES.items()}
    maps = {
        "dtype_to_np_dtype": to_numpy,
        "valid_np_dtypes": list(to_numpy.values()),
        "np_dtype_to_dtype": {value: dtype for dtype, value in to_numpy.items() if dtype is not DataType.DT_BF16},
    }
    globals().update(maps)
    return maps[name]
