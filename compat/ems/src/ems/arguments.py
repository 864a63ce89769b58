"""What a call was given, as the values that the rest goes on with; every broken rule is ``EMS_INVALID_ARGUMENT`` here.

Sequences may be lists, tuples, numpy arrays or integer tensors; tensors are recognised by protocol, and torch is not
imported to find out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from ems.common.exception import invalid
from ems.values import CcKvOption, KvBufferWrapper, PrimaryKey

Integers = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]

LONGEST_PART = 127  # bytes of UTF-8: the vendor says "less than 128"
LONGEST_TIMEOUT_MS = (1 << 31) - 1


def option(value: object, *, default: CcKvOption | None = None) -> CcKvOption:
    if value is None and default is not None:
        return default
    if not isinstance(value, CcKvOption):
        raise invalid(f"option must be a CcKvOption, but is of type {type(value).__name__}")
    timeout = value.timeout
    if not _is_integer(timeout) or not 0 <= timeout <= LONGEST_TIMEOUT_MS:
        raise invalid(f"timeout must be an integer of milliseconds from 0 on, but is {timeout!r}")
    for name in ("write_rcache", "read_local_only"):
        if not isinstance(getattr(value, name), (bool, np.bool_)):
            raise invalid(f"{name} must be a bool, but is {getattr(value, name)!r}")
    return value


# -- V0: keys and buffers


def keys(value: object) -> list[str | PrimaryKey]:
    """Non-empty, all different, every part of 1 to 127 bytes."""
    listed = _listed("key_list", value)
    for key in listed:
        if isinstance(key, PrimaryKey):
            _check_part("distribute_key", key.distribute_key)
            _check_part("attribute_key", key.attribute_key)
        elif isinstance(key, str):
            _check_part("a key", key)
        else:
            raise invalid(f"key_list holds strings and PrimaryKeys, but also {type(key).__name__}")
    if len(set(listed)) != len(listed):
        raise invalid(f"key_list names a key twice: {_first_duplicate(listed)!r}")
    return listed


def _check_part(name: str, part: object) -> None:
    if not isinstance(part, str):
        raise invalid(f"{name} must be a string, but is of type {type(part).__name__}")
    try:
        length = len(part.encode())
    except UnicodeEncodeError:
        raise invalid(f"{name} {part!r} has no UTF-8 form") from None
    if not 1 <= length <= LONGEST_PART:
        raise invalid(f"{name} must have 1 to {LONGEST_PART} bytes, but {part!r:.40} has {length}")


def buffers(value: object, count: int) -> tuple[Addresses, Addresses, Integers]:
    """(addresses, sizes in bytes) of all segments, key after key, and how many of them each of ``count`` keys has."""
    values = _listed("value_list", value)
    if len(values) != count:
        raise invalid(f"key_list has {count} keys and value_list {len(values)} values; they must pair one to one")
    for one in values:
        if not isinstance(one, (list, tuple)) or not one:
            raise invalid("value_list must hold non-empty lists of KvBufferWrapper, one list for each key")
    flat = list(chain.from_iterable(values))
    for kind in set(map(type, flat)):
        if not issubclass(kind, KvBufferWrapper):
            raise invalid(f"value_list must hold lists of KvBufferWrapper, but one holds {kind.__name__}")
    addresses = _positive("data_ptr", [one._data_ptr for one in flat])
    sizes = _positive("length", [one._length for one in flat])
    if np.any(sizes > np.iinfo(np.uint64).max - addresses):
        raise invalid("a KvBufferWrapper reaches beyond the address space")
    return addresses, sizes, np.fromiter(map(len, values), np.int64, count)


def _positive(name: str, numbers: list[Any]) -> Addresses:
    for kind in set(map(type, numbers)):
        if not _is_integer_type(kind):
            raise invalid(f"{name} of a KvBufferWrapper must be an integer, but is of type {kind.__name__}")
    if min(numbers) <= 0 or max(numbers) >= 1 << 64:
        wrong = next(number for number in numbers if not 0 < number < 1 << 64)
        raise invalid(f"{name} of a KvBufferWrapper must be over 0 and under 2^64, but is {wrong}")
    return np.array(numbers, np.uint64)


# -- V1: hashes and slots


def hashes(value: object) -> list[int]:
    """Non-empty and all different; any integers, of any size and sign."""
    listed = _integer_list("hashes", value)
    if not listed:
        raise invalid("hashes is empty")
    if len(set(listed)) != len(listed):
        raise invalid(f"hashes names a block twice: {_first_duplicate(listed)}")
    return listed


def integers(name: str, value: object) -> Integers:
    """One-dimensional, not empty, each fits a signed 64-bit integer."""
    array = _integer_array(value)
    if array is not None and array.ndim != 1:
        raise invalid(f"{name} must have one dimension, but has {array.ndim}")
    numbers = _integer_list(name, value) if array is None else array
    if not len(numbers):
        raise invalid(f"{name} is empty")
    return _as_int64(name, numbers)


def chunk_descs(value: object, groups: int, chunks: int) -> list[tuple[Integers, Integers]]:
    """For each layer group, (first slot, length in tokens) of each chunk."""
    outer = _listed("chunk_descs", value)
    if len(outer) != groups:
        raise invalid(f"chunk_descs has {len(outer)} layer groups, but {groups} are registered")
    found = []
    for index, inner in enumerate(outer):
        name = f"chunk_descs[{index}]"
        pairs = _integer_array(inner)
        if pairs is None:
            listed = _listed(name, inner)
            if any(not isinstance(pair, (list, tuple)) or len(pair) != 2 for pair in listed):
                raise invalid(f"{name} must hold pairs (start_slot, length)")
            pairs = integers(name, list(chain.from_iterable(listed))).reshape(-1, 2)
        if pairs.ndim != 2 or pairs.shape[1] != 2:
            raise invalid(f"{name} must hold pairs (start_slot, length), but has shape {pairs.shape}")
        if len(pairs) != chunks:
            raise invalid(f"{name} describes {len(pairs)} chunks, but there are {chunks} hashes")
        pairs = _as_int64(name, pairs)
        found.append((pairs[:, 0], pairs[:, 1]))
    return found


def mask(value: object) -> npt.NDArray[np.bool_]:
    """Zeros or False, then ones or True."""
    listed = _integer_array(value, boolean=True)
    if listed is None:
        listed = np.asarray(_integer_list("mask", value, boolean=True))
    if listed.ndim != 1 or not np.all((listed == 0) | (listed == 1)):
        raise invalid("mask must be a sequence of 0 and 1, or of False and True")
    wanted = listed.astype(np.bool_)
    if np.any(wanted[:-1] & ~wanted[1:]):
        raise invalid("mask must be a run of 0 and then a run of 1; a 0 follows a 1")
    return wanted


# -- sequences


def _listed(name: str, value: object) -> list[Any]:
    if isinstance(value, np.ndarray) and value.ndim:
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise invalid(f"{name} must be a list, but is of type {type(value).__name__}")
    if not value:
        raise invalid(f"{name} is empty")
    return list(value)


def _integer_list(name: str, value: object, *, boolean: bool = False) -> list[Any]:
    array = _integer_array(value, boolean=boolean)
    if array is not None:
        if array.ndim != 1:
            raise invalid(f"{name} must have one dimension, but has {array.ndim}")
        numbers: list[Any] = array.tolist()
        return numbers
    if not isinstance(value, (list, tuple)):
        raise invalid(f"{name} must be a list of integers, but is of type {type(value).__name__}")
    kinds = set(map(type, value))
    if kinds == {int}:
        return list(value)
    for kind in kinds:
        if not _is_integer_type(kind) and not (boolean and issubclass(kind, (bool, np.bool_))):
            raise invalid(f"{name} must hold integers, but also holds {kind.__name__}")
    return [int(item) for item in value]


def _integer_array(value: object, *, boolean: bool = False) -> npt.NDArray[Any] | None:
    """A numpy array or a tensor, as a numpy array; None: it is neither."""
    if isinstance(value, (list, tuple)) or not hasattr(value, "dtype") or not hasattr(value, "__array__"):
        return None
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # of a tensor on a device, or of a type that numpy lacks
        raise invalid(f"{type(value).__name__} cannot be read as an array of integers: {error}") from None
    if array.dtype.kind not in ("iub" if boolean else "iu"):
        raise invalid(f"an array of integers is needed, but this one has elements of type {array.dtype}")
    return array


def _as_int64(name: str, numbers: list[int] | npt.NDArray[Any]) -> Integers:
    try:
        if isinstance(numbers, list) or numbers.dtype != np.uint64 or int(numbers.max()) < 1 << 63:
            return np.asarray(numbers, np.int64)
    except OverflowError:  # of a list; what is unsigned would wrap around
        pass
    raise invalid(f"{name} holds an integer that does not fit 64 bits with a sign")


def _is_integer(value: object) -> bool:
    return _is_integer_type(type(value))


def _is_integer_type(kind: type) -> bool:
    return issubclass(kind, (int, np.integer)) and not issubclass(kind, bool)


def _first_duplicate(items: Sequence[Any] | Iterable[Any]) -> object:
    seen = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None
