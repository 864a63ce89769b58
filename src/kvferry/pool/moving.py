"""Moves the bytes of values between this process and a window of a node: now, or beside whoever began it."""

import time
from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from kvferry import _core
from kvferry.errors import CacheNotFound, Cancelled, DeadlineExceeded, InvalidArgument, KvferryError
from kvferry.link import Link
from kvferry.options import LONGEST_MS
from kvferry.pool.values import Spans

__all__ = ["Moving", "Way", "moves_of", "ms_left", "pulling", "pushing"]


class Way(NamedTuple):
    """How spans are moved: now, or beside the caller, by functions of the core that take what comes ``first``, the moves, the
    time that is left in milliseconds, and ``more``."""

    now: Callable[..., object]
    begin: Callable[..., _core.Transfer]
    first: tuple[Any, ...]
    more: tuple[Any, ...]


def pulling(link: Link, window: bytes, resolution: bytes) -> Way:
    """Out of ``window``. Its owner has told what it would answer (``resolution``), so it is not asked again."""
    core = link._core
    return Way(core.pull, core.pull_async, (_core.Target.by_window(window), None), (0, resolution))


def pushing(link: Link, window: bytes) -> Way:
    """Into ``window``."""
    core = link._core
    return Way(core.push, core.push_async, (None, _core.Target.by_window(window)), ())


def ms_left(until: float) -> int:
    return max(0, ceil((until - time.monotonic()) * 1000))  # what is left of a millisecond counts as one


def moves_of(spans: Spans, sums: _core.ValueSums | None = None) -> _core.Moves:
    return _core.Moves.spans(spans.view(np.int64), sums)


class Moving:
    """``spans`` on their ``way``: beside their caller from :meth:`begin` on, else while their end is waited for. ``why``: in a
    sentence, why it failed."""

    __slots__ = ("_begun", "_failed", "_moves", "_until", "_way", "why")

    def __init__(self, way: Way, spans: Spans, until: float, sums: _core.ValueSums | None = None) -> None:
        self._way, self._until, self._moves = way, until, moves_of(spans, sums)
        self._begun: list[_core.Transfer] = []
        self._failed = self.why = ""

    def begin(self) -> None:
        """Whether that went well comes from :meth:`end`. :raises InvalidArgument: as there."""
        self._failed = self._in_words(self._begin)

    def end(self) -> str:
        """ "" when all bytes have moved, else the word for why not; nothing moves any more.

        :raises InvalidArgument: memory that the caller named is not there.
        """
        return self._failed or self._in_words(self._finish)

    @property
    def ended(self) -> bool:
        """Nothing moves on its behalf now. One that has not begun counts as well: its caller is the one who moves it."""
        return not self._begun or self._begun[0].done()

    def give_up(self) -> None:
        """Nothing moves any more when this has ended, also if it ends by what a signal handler raises meanwhile."""
        interrupted: BaseException | None = None
        while not self.ended:
            try:
                self._begun[0].cancel()
                self._begun[0].wait(LONGEST_MS)
            except KvferryError:
                continue
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _begin(self) -> None:
        # Nothing in here is Python code, so what a signal handler raises comes when the transfer is in the list: it never
        # goes on with nobody to stop it.
        way = self._way
        arguments = (*way.first, self._moves, ms_left(self._until), *way.more)
        begun = map(way.begin, *((one,) for one in arguments))
        self._begun.extend(begun)

    def _finish(self) -> None:
        if self._begun:
            self._begun[0].wait(LONGEST_MS)  # its own deadline ends it
        else:
            way = self._way
            way.now(*way.first, self._moves, ms_left(self._until), *way.more)

    def _in_words(self, do: Callable[[], None]) -> str:
        try:
            do()
        except InvalidArgument as error:
            raise InvalidArgument(
                f"memory that this call was given is not there (any more), as where a file has been cut short: {error}"
            ) from error
        except KvferryError as error:
            self.why = str(error)
            if isinstance(error, CacheNotFound):
                return "lease_lost"
            return "timeout" if isinstance(error, (DeadlineExceeded, Cancelled)) else "node_lost"
        return ""
