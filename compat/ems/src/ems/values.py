"""What callers build requests of, and what they get. Nothing is checked before a request is submitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class CcKvOption:
    """
    :param write_rcache: a save also keeps a copy on the local node.
    :param read_local_only: a load or ``exists`` asks the local node alone.
    :param timeout: milliseconds for the request, from its submission on; 0 ends it at once.
    """

    write_rcache: bool = True
    read_local_only: bool = False
    timeout: int = 5000


@dataclass(frozen=True, slots=True)
class PrimaryKey:
    """All attribute keys of one distribute key lie on one node. Each part: 1 to 127 bytes of UTF-8."""

    distribute_key: str
    attribute_key: str


class KvBufferWrapper:
    """``length`` bytes of host memory from ``data_ptr`` on, an address or something that returns one (the vendor's samples
    pass ``tensor.data_ptr`` uncalled). Immutable, and to be shared by any number of requests."""

    __slots__ = ("_data_ptr", "_length")
    _data_ptr: int
    _length: int

    def __init__(self, data_ptr: int | Callable[[], int], length: int) -> None:
        self._data_ptr = data_ptr() if callable(data_ptr) else data_ptr
        self._length = length

    @property
    def data_ptr(self) -> int:
        return self._data_ptr

    @property
    def length(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"KvBufferWrapper(data_ptr={self._data_ptr!r}, length={self._length!r})"


@dataclass(frozen=True)
class CcResult:
    """``success``: how many keys from the first one on, without a gap, were saved or loaded; ``total``: of how many."""

    success: int
    total: int
