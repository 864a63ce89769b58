"""The one exception and its codes; and how kvferry's errors become them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import kvferry


class EmsErrorCode(Enum):
    """The vendor publishes names and no numbers; the numbers are ours."""

    EMS_INVALID_ARGUMENT = 1
    EMS_IO_ERROR = 2
    EMS_IO_TIMEOUT = 3
    EMS_INTERNAL_ERROR = 4
    EMS_RECOVERD_ERROR = 5  # spelt so by the vendor
    EMS_RECOVERED_ERROR = 5  # noqa: PIE796 - another name of the same


class EmsException(Exception):
    """Every failure of a call. ``str()`` has the code's name and the sentence."""

    def __init__(self, status_code: EmsErrorCode, message: str = "") -> None:
        super().__init__(status_code, message)
        self._status_code = status_code
        self._message = message

    def status_code(self) -> EmsErrorCode:
        return self._status_code

    def message(self) -> str:
        return self._message

    def __str__(self) -> str:
        return f"{self._status_code.name}: {self._message}"


EmsExcepiton = EmsException  # some pages spell it so


def invalid(sentence: str) -> EmsException:
    return EmsException(EmsErrorCode.EMS_INVALID_ARGUMENT, sentence)


@contextmanager
def kvferry_errors() -> Iterator[None]:
    """kvferry's errors leave as ``EmsException``, with the same sentence. So does whatever else goes wrong there: a program
    that serves requests catches nothing but that, and can do without its cache."""
    try:
        yield
    except kvferry.KvferryError as error:
        raise EmsException(_code(error), str(error)) from error
    except Exception as error:
        raise EmsException(EmsErrorCode.EMS_INTERNAL_ERROR, f"{type(error).__name__}: {error}") from error


def _code(error: kvferry.KvferryError) -> EmsErrorCode:
    if isinstance(error, (kvferry.InvalidArgument, kvferry.Unsupported)):
        return EmsErrorCode.EMS_INVALID_ARGUMENT
    if isinstance(error, kvferry.DeadlineExceeded):
        return EmsErrorCode.EMS_IO_TIMEOUT
    if isinstance(
        error, (kvferry.PeerLost, kvferry.NotLinked, kvferry.LinkFailed, kvferry.Refused, kvferry.NodeClosed)
    ):
        return EmsErrorCode.EMS_IO_ERROR
    return EmsErrorCode.EMS_INTERNAL_ERROR
