"""Checks of single arguments: wrong type is ``TypeError``, out of range is ``ValueError``.

Knows no caches and raises no ``LLMException``. Type checks let ``None`` through unless told otherwise (callers of the
vendor's package rely on it); integer ranges never do. A ``bool`` is an ``int``, and the checks of integers return it as
one: kvferry takes none for a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def check_isinstance(
    name: str,
    value: Any,
    classes: Sequence[type] | type,
    inner_class: type | None = None,
    extra_fmt: str = "",
    allow_none: bool = True,
) -> Any:
    """Returns ``value``; ``TypeError`` unless it is an instance of one of ``classes`` (or an allowed ``None``) and, with an
    ``inner_class``, all that it holds is of that."""
    accepted = classes if isinstance(classes, (type, tuple)) else tuple(classes)
    if value is None and allow_none:
        return value
    if isinstance(value, accepted):
        if inner_class is not None:
            check_inner(name, value, inner_class)
        return value
    raise TypeError(extra_fmt + _only(name, value, accepted))


def check_object(name: str, value: Any, classes: Sequence[type] | type) -> None:
    """As ``check_isinstance``, for what attributes are read of: there ``None`` ends as ``AttributeError``."""
    check_isinstance(name, value, classes)
    if value is None:
        raise AttributeError(_only(name, value, classes))


def _only(name: str, value: Any, classes: Sequence[type] | type) -> str:
    names = ", ".join(cls.__name__ for cls in ((classes,) if isinstance(classes, type) else classes))
    return f"{name} only support {names}, but got {type(value).__name__}"


def check_text(name: str, value: Any) -> None:
    """A string that can be written as UTF-8: half of a character pair is ``TypeError`` too."""
    check_isinstance(name, value, str, allow_none=False)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise TypeError(f"{name} only support text that is valid Unicode, but got {value!a}") from error


def check_inner(name: str, values: Iterable[Any], classes: Sequence[type] | type, allow_none: bool = False) -> None:
    """Each element of ``values`` is an instance of one of ``classes``."""
    for index, value in enumerate(values):
        check_isinstance(f"{name}[{index}]", value, classes, allow_none=allow_none)


def check_dict(
    name: str,
    value: Any,
    key_classes: Sequence[type] | type,
    value_classes: Sequence[type] | type,
    value_inner_class: type | None = None,
) -> None:
    check_isinstance(name, value, dict, allow_none=False)
    check_inner(f"{name} dict key", value.keys(), key_classes)
    check_inner(f"{name} dict value", value.values(), value_classes)
    if value_inner_class is not None:
        for held in value.values():
            check_inner(f"{name} dict value", held, value_inner_class)


def _check_integer(name: str, value: Any, low: int, high: int, kind: str) -> int:
    if not isinstance(value, int):
        check_isinstance(name, value, int, allow_none=False)
    if not low <= value <= high:
        raise ValueError(f"{name} is out of range: {value} is not in {kind}'s [{low}, {high}]")
    return int(value)


def check_uint64(name: str, value: Any) -> int:
    return _check_integer(name, value, 0, (1 << 64) - 1, "uint64")


def check_int64(name: str, value: Any) -> int:
    return _check_integer(name, value, -(1 << 63), (1 << 63) - 1, "int64")


def check_uint32(name: str, value: Any) -> int:
    return _check_integer(name, value, 0, (1 << 32) - 1, "uint32")


def check_int32(name: str, value: Any) -> int:
    return _check_integer(name, value, -(1 << 31), (1 << 31) - 1, "int32")


def check_uint16(name: str, value: Any) -> int:
    return _check_integer(name, value, 0, (1 << 16) - 1, "uint16")


def check_uint8(name: str, value: Any) -> int:
    return _check_integer(name, value, 0, (1 << 8) - 1, "uint8")


def check_list_uint64(name: str, values: Any) -> None:
    _check_list(name, values, check_uint64)


def check_list_int64(name: str, values: Any) -> None:
    _check_list(name, values, check_int64)


def check_list_int32(name: str, values: Any) -> None:
    _check_list(name, values, check_int32)


def check_positive_or_set_default(name: str, value: Any, default: int = -1) -> int:
    """``default`` for ``None``; else an int64 that is not negative (``ValueError``)."""
    if value is None:
        return default
    number = check_int64(name, value)
    if number < 0:
        raise ValueError(f"{name} is out of range: {value} is negative")
    return number


def check_block_list(name: str, values: Any) -> Sequence[int]:
    """A list or tuple of block numbers, of any length and at little cost: int, not negative (``TypeError`` both)."""
    if not isinstance(values, (list, tuple)):
        check_isinstance(name, values, [list, tuple], allow_none=False)
    if not values:
        return ()
    if set(map(type, values)) != _PLAIN_INT:
        check_inner(name, values, int)
        values = list(map(int, values))
    if min(values) < 0:
        raise TypeError(f"{name} only support block numbers from 0, but got {min(values)}")
    listed: Sequence[int] = values
    return listed


_PLAIN_INT = {int}


def _check_list(name: str, values: Any, check: Any) -> None:
    check_isinstance(name, values, [list, tuple], allow_none=False)
    for index, value in enumerate(values):
        check(f"{name}[{index}]", value)
