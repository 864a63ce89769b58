"""A request on its way: rounds of pool calls until nothing is left to be done or time is up.

A load is one round. A save has further rounds for keys that somebody else is saving just now: its success says that the
value *is* there, so it is told only when that save has ended, well or not. Ranks of a TP group whose caches are the same
begin with every n-th key each (``first``), so that all of them copy and none copies twice; the rest is then found saved.

Rounds are begun by whoever polls or waits; there is no thread here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import kvferry
from ems._pool import Batch, Ended, Pool, Running
from ems.common.exception import EmsErrorCode, EmsException
from ems.log import say_once
from ems.values import CcKvOption, CcResult

FIRST_PAUSE_S = 0.0005
LONGEST_PAUSE_S = 0.02
LAST_LOOK_MS = 100  # for a caller who polls late: somebody else's save has long ended by then
LOST_TIMEOUT_MS = 200


class CcFuture:
    """What ``async_save`` and ``async_load`` return. Once it is resolved, nothing is written to the caller's buffers."""

    def __init__(
        self,
        pool: Pool,
        batch: Batch,
        option: CcKvOption,
        *,
        saving: bool,
        wait: bool,
        first: npt.NDArray[np.intp] | None = None,
    ) -> None:
        self._pool = pool
        self._batch = batch
        self._option = option
        self._call = pool.save if saving else pool.load
        self._saving = saving
        self._words = ["pending"] * len(batch.keys)
        self._ok = np.zeros(len(batch.keys), np.bool_)
        self._deadline = time.monotonic() + option.timeout / 1000
        self._pause_s = FIRST_PAUSE_S
        self._next_round = 0.0  # when to begin it
        self._rounds = 0
        self._lock = threading.Lock()  # held by whoever begins, waits for or reads rounds
        self._error: EmsException | None = None
        self._result: CcResult | None = None
        self._resolved = False
        self._indexes = np.arange(len(batch.keys)) if first is None or not len(first) else first
        self._round: Ended | Running | None = None
        if not batch.keys:
            self._resolved = True
            return
        try:
            self._round = self._begin(wait)
        except EmsException as error:
            if error.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT:
                raise
            self._error, self._resolved = error, True  # whatever else is wrong is told by result()

    def result(self) -> CcResult:
        """Wait for the end. The same answer for everybody, any number of times.

        :raises EmsException: ``EMS_IO_TIMEOUT``: time was up before the first success; ``EMS_IO_ERROR``: no node answers.
        """
        with self._lock:
            while not self._resolved:
                self._advance(wait=True)
            if self._result is None and self._error is None:
                self._judge()
            if self._error is not None:
                raise EmsException(self._error.status_code(), self._error.message()) from self._error.__cause__
            assert self._result is not None
            return self._result

    def _is_ready(self) -> bool:
        """Never waits."""
        if not self._resolved and self._lock.acquire(blocking=False):
            try:
                self._advance(wait=False)
            finally:
                self._lock.release()
        return self._resolved

    # -- rounds, under the lock

    def _begin(self, wait: bool) -> Ended | Running:
        left_ms = max(0, int((self._deadline - time.monotonic()) * 1000)) if self._rounds else int(self._option.timeout)
        if self._rounds == 1:
            left_ms = max(left_ms, min(LAST_LOOK_MS, int(self._option.timeout)))
        self._rounds += 1
        return self._call(self._batch.part(self._indexes), self._option, left_ms, wait=wait)

    def _advance(self, wait: bool) -> None:
        try:
            if self._round is None:
                pause = self._next_round - time.monotonic()
                if pause > 0:
                    if not wait:
                        return
                    time.sleep(pause)
                self._round = self._begin(wait)
            if wait or self._round.done():
                self._take(self._round.wait())
        except EmsException as error:
            self._error = error
            self._end()

    def _take(self, outcome: kvferry.Outcome) -> None:
        self._round = None
        self._ok[self._indexes] = np.asarray(outcome.ok, np.bool_)
        for index, word in zip(self._indexes.tolist(), outcome.outcomes, strict=True):
            self._words[index] = word
        self._indexes = np.flatnonzero(np.array(self._words) == "pending") if self._saving else self._indexes[:0]
        if not len(self._indexes):
            self._end()
        elif self._rounds > 1 and time.monotonic() >= self._deadline:
            for index in self._indexes.tolist():
                self._words[index] = "timeout"
            self._end()
        elif self._rounds > 1:
            self._next_round = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _end(self) -> None:
        self._resolved = True
        self._batch = self._batch.part(self._indexes[:0])  # futures are kept longer than their requests

    def _judge(self) -> None:
        """A miss, a full node, a lost node among others are no errors. Time that was up for all of them is one, and so is a pool
        of which nobody answers: callers leave the cache alone then until it is healthy."""
        if not self._ok.any():
            if "timeout" in self._words:
                doing = "saved" if self._saving else "loaded"
                self._error = EmsException(
                    EmsErrorCode.EMS_IO_TIMEOUT,
                    f"none of {len(self._words)} keys was {doing} within {self._option.timeout} ms; give more time, or look at "
                    "the pool's load",
                )
                return
            if "node_lost" in self._words and not self._pool_answers():
                self._error = EmsException(
                    EmsErrorCode.EMS_IO_ERROR, "the pool does not answer; Ems.check_health() says when it does again"
                )
                return
        if "size_mismatch" in self._words:
            say_once(
                "values of another size than the buffers were left alone: to be loaded, sizes must be as they were saved"
            )
        self._result = CcResult(leading_run(self._ok), len(self._ok))

    def _pool_answers(self) -> bool:
        try:
            return self._pool.is_reachable(LOST_TIMEOUT_MS)
        except EmsException:
            return False


def leading_run(ok: Sequence[bool] | npt.NDArray[np.bool_]) -> int:
    """How many are true before the first that is not."""
    flags = np.asarray(ok, np.bool_)
    return len(flags) if flags.all() else int(np.argmin(flags))
