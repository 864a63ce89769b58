"""Moves the bytes of values between this process and a window of a node, and takes their checksums if they are wanted.

Checksums are taken of what lies in this process, after it has moved: of a piece while the next one is moved, so that a
large batch takes hardly longer than without.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry import _core
from kvferry.errors import CacheNotFound, DeadlineExceeded, InvalidArgument, KvferryError
from kvferry.link import Link
from kvferry.options import LONGEST_MS
from kvferry.pool.values import U64, Spans, Values

__all__ = ["Way", "moved", "moves_of", "ms_left", "pulling", "pushing"]

PIECE_BYTES = 16 << 20

NO_SUMS: U64 = np.zeros(0, np.uint64)


class Way(NamedTuple):
    """How spans are moved: now, or beside the caller. Both take the time that is left, in milliseconds."""

    to_node: bool
    now: Callable[[_core.Moves, int], object]
    begin: Callable[[_core.Moves, int], _core.Transfer]


def pulling(link: Link, window: bytes, resolution: bytes) -> Way:
    """Out of ``window``. Its owner has told what it would answer (``resolution``), so it is not asked again."""
    core, source = link._core, _core.Target.by_window(window)
    return Way(
        False,
        lambda moves, left_ms: core.pull(source, None, moves, left_ms, 0, resolution),
        lambda moves, left_ms: core.pull_async(source, None, moves, left_ms, 0, resolution),
    )


def pushing(link: Link, window: bytes) -> Way:
    """Into ``window``."""
    core, to = link._core, _core.Target.by_window(window)
    return Way(
        True,
        lambda moves, left_ms: core.push(None, to, moves, left_ms),
        lambda moves, left_ms: core.push_async(None, to, moves, left_ms),
    )


def ms_left(until: float) -> int:
    return max(0, int((until - time.monotonic()) * 1000))


def moves_of(spans: Spans) -> _core.Moves:
    return _core.Moves.spans(spans.view(np.int64))


def moved(
    way: Way, values: Values, chosen: npt.NDArray[np.int64], offsets: U64, until: float, seeds: U64 | None = None
) -> tuple[str, U64]:
    """Moves the ``chosen`` values; ``offsets``: of each in the window's segment. "" if all bytes have moved, else the word
    for why not; and with ``seeds`` their checksums.

    :raises InvalidArgument: memory that the caller named is not there.
    """
    try:
        if seeds is None:
            way.now(moves_of(values.spans(chosen, offsets, to_node=way.to_node)), ms_left(until))
            return "", NO_SUMS
        return "", _summed(way, values, chosen, offsets, until, seeds)
    except InvalidArgument:
        raise
    except CacheNotFound:
        return "lease_lost", NO_SUMS
    except DeadlineExceeded:
        return "timeout", NO_SUMS
    except KvferryError:
        return "node_lost", NO_SUMS


def _summed(way: Way, values: Values, chosen: npt.NDArray[np.int64], offsets: U64, until: float, seeds: U64) -> U64:
    sizes = values.totals[chosen]
    piece_of = (np.cumsum(sizes) - sizes) // np.uint64(PIECE_BYTES)
    pieces = np.split(np.arange(len(chosen)), np.flatnonzero(np.diff(piece_of)) + 1)

    def moves(piece: npt.NDArray[np.int64]) -> _core.Moves:
        return moves_of(values.spans(chosen[piece], offsets[piece], to_node=way.to_node))

    if len(pieces) == 1:
        way.now(moves(pieces[0]), ms_left(until))
        return values.checksums(chosen, seeds)
    sums = []
    moving = way.begin(moves(pieces[0]), ms_left(until))
    try:
        for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
            moving.wait(LONGEST_MS)  # its own deadline ends it
            if following is not None:
                moving = way.begin(moves(following), ms_left(until))
            sums.append(values.checksums(chosen[piece], seeds[piece]))
    except BaseException:
        moving.cancel()
        while not moving.done():  # nothing moves any more when this call has ended
            try:
                moving.wait(LONGEST_MS)
            except KvferryError:
                continue
        raise
    return np.concatenate(sums)
