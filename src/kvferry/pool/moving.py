"""Moves the bytes of values between this process and a window of a node: now, or beside whoever began it."""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvferry import _core
from kvferry.errors import CacheNotFound, DeadlineExceeded, InvalidArgument, KvferryError
from kvferry.link import Link
from kvferry.options import LONGEST_MS
from kvferry.pool.values import Spans

__all__ = ["Moving", "Way", "moves_of", "ms_left", "pulling", "pushing"]


class Way(NamedTuple):
    """How spans are moved: now, or beside the caller. Both take the time that is left, in milliseconds."""

    now: Callable[[_core.Moves, int], object]
    begin: Callable[[_core.Moves, int], _core.Transfer]


def pulling(link: Link, window: bytes, resolution: bytes) -> Way:
    """Out of ``window``. Its owner has told what it would answer (``resolution``), so it is not asked again."""
    core, source = link._core, _core.Target.by_window(window)
    return Way(
        lambda moves, left_ms: core.pull(source, None, moves, left_ms, 0, resolution),
        lambda moves, left_ms: core.pull_async(source, None, moves, left_ms, 0, resolution),
    )


def pushing(link: Link, window: bytes) -> Way:
    """Into ``window``."""
    core, to = link._core, _core.Target.by_window(window)
    return Way(
        lambda moves, left_ms: core.push(None, to, moves, left_ms),
        lambda moves, left_ms: core.push_async(None, to, moves, left_ms),
    )


def ms_left(until: float) -> int:
    return max(0, int((until - time.monotonic()) * 1000))


def moves_of(spans: Spans) -> _core.Moves:
    return _core.Moves.spans(spans.view(np.int64))


class Moving:
    """``spans`` on their ``way``: from now on if they go ``beside`` their caller, else while their end is waited for."""

    __slots__ = ("_failed", "_moves", "_transfer", "_until", "_way")

    def __init__(self, way: Way, spans: Spans, until: float, beside: bool) -> None:
        self._way, self._until, self._moves = way, until, moves_of(spans)
        self._transfer: _core.Transfer | None = None
        self._failed = self._in_words(self._begin) if beside else ""

    def end(self) -> str:
        """ "" when all bytes have moved, else the word for why not; nothing moves any more.

        :raises InvalidArgument: memory that the caller named is not there.
        """
        return self._failed or self._in_words(self._finish)

    @property
    def ended(self) -> bool:
        """Nothing moves on its behalf now. One that has not begun counts as well: its caller is the one who moves it."""
        return self._transfer is None or self._transfer.done()

    def give_up(self) -> None:
        """Nothing moves any more when this has ended, also if it ends by what a signal handler raises meanwhile."""
        interrupted: BaseException | None = None
        while self._transfer is not None and not self._transfer.done():
            try:
                self._transfer.cancel()
                self._transfer.wait(LONGEST_MS)
            except KvferryError:
                continue
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _begin(self) -> None:
        self._transfer = self._way.begin(self._moves, ms_left(self._until))

    def _finish(self) -> None:
        if self._transfer is None:
            self._way.now(self._moves, ms_left(self._until))
        else:
            self._transfer.wait(LONGEST_MS)  # its own deadline ends it

    @staticmethod
    def _in_words(do: Callable[[], None]) -> str:
        try:
            do()
        except InvalidArgument:
            raise
        except CacheNotFound:
            return "lease_lost"
        except DeadlineExceeded:
            return "timeout"
        except KvferryError:
            return "node_lost"
        return ""
