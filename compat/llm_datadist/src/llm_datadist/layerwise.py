"""One ``transfer_cache_async``: a thread that asks the synchronizer for layer after layer and lets each leave.

Knows no argument rules and no keys: it gets destinations that were checked and named. The bytes of a layer leave while
the synchronizer waits for the next one.

A destination is open (its push stands, layers missing), complete (all its layers were declared ready) or failed. The
first failure ends the job: complete destinations still get their outcome, open ones are cancelled and keep no result.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import kvferry
from llm_datadist.engine import Engine, translated
from llm_datadist.status import LLMException, LLMStatusCode, failure, no_thread
from llm_datadist.transfer import CacheTask, LayerSynchronizer
from llm_datadist.utils.log import get_logger

FUNCTION = "transfer_cache_async"
TENSORS_PER_LAYER = 2


# What an id of no cache stands for in a push: the cache that has this key at the peer, any row of it. Pushes are of the
# remote mode, which looks it up so in the peer's table.
ID_OF_NO_CACHE = kvferry.RequestKey(0, model_id=0)


def pushed_to(link: kvferry.Link, to: Any, timeout_ms: int) -> Any:
    """What kvferry calls the destination ``to``."""
    return link.describe(to, timeout_ms=timeout_ms).cache_id if to is ID_OF_NO_CACHE else to


@dataclass(frozen=True, slots=True)
class Destination:
    """Where one configuration's layers go. ``moves`` are the arguments of ``Link.push_layers`` that say which units.
    ``block_bytes``: the size that the far side's blocks are said to have; 0: nothing is said."""

    cluster_id: int
    to: Any
    layers: range
    destination_layers: range | None
    moves: dict[str, Any] = field(default_factory=dict)
    block_bytes: int = 0


def start(
    engine: Engine,
    mine: kvferry.Cache,
    synchronizer: LayerSynchronizer,
    destinations: Sequence[Destination],
    num_layers: int,
) -> CacheTask:
    """Starts the job's thread (not a daemon: the process waits for it) and returns."""
    job = _Job(engine, mine, synchronizer, destinations, num_layers)
    try:
        threading.Thread(target=job.run, name="llm_datadist-layerwise", daemon=False).start()
    except RuntimeError as error:
        return refused(len(destinations), no_thread(FUNCTION, error))
    return job.task


def refused(count: int, error: LLMException) -> CacheTask:
    """A task of ``count`` configurations that the engine refuses as a whole: the first one has the code."""
    get_logger().error("%s", error)
    task = CacheTask(count)
    if count:
        task._record(0, error.status_code)
    task._end()
    return task


class _Job:
    def __init__(
        self,
        engine: Engine,
        mine: kvferry.Cache,
        synchronizer: LayerSynchronizer,
        destinations: Sequence[Destination],
        num_layers: int,
    ) -> None:
        self._engine = engine
        self._mine = mine
        self._synchronizer = synchronizer
        self._destinations = destinations
        self._num_layers = num_layers
        self._pushes: dict[int, kvferry.LayerPush] = {}
        self._complete: set[int] = set()
        self.task = CacheTask(len(destinations))

    def run(self) -> None:
        try:
            if self._open():
                self._feed()
            self._settle()
        except BaseException:  # noqa: BLE001 - the thread's root: whatever this is, nobody waits for ever
            get_logger().exception("[%s] the transfer's thread ended", FUNCTION)
            for index in range(len(self._destinations)):
                self.task._record(index, LLMStatusCode.LLM_FAILED)
            for push in self._pushes.values():
                push.cancel()
        finally:
            self.task._end()

    def _open(self) -> bool:
        """Opens a push for each destination; what is wrong with one is found before a byte has left."""
        for index, destination in enumerate(self._destinations):
            try:
                link = self._engine.link_to(destination.cluster_id, FUNCTION)
                if destination.block_bytes and not isinstance(destination.to, kvferry.Addresses):
                    self._check_block_size(link, destination)
                self._pushes[index] = link.push_layers(
                    self._mine,
                    to=pushed_to(link, destination.to, self._engine.timeout_ms),
                    layers=destination.layers,
                    destination_layers=destination.destination_layers,
                    tensors_per_layer=TENSORS_PER_LAYER,
                    timeout_ms=self._engine.timeout_ms,
                    **destination.moves,
                )
            except (kvferry.KvferryError, LLMException) as error:
                self._fail(index, error)
                return False
        return True

    def _check_block_size(self, link: kvferry.Link, destination: Destination) -> None:
        there = link.describe(destination.to, timeout_ms=self._engine.timeout_ms).unit_bytes
        if there != destination.block_bytes:
            sentence = (
                f"dst_block_memory_size is {destination.block_bytes}, the destination's blocks have {there} bytes"
            )
            raise failure(LLMStatusCode.LLM_PARAM_INVALID, FUNCTION, sentence)

    def _feed(self) -> None:
        """Declares layers ready in ascending order, until all are or something fails."""
        for layer in range(self._num_layers):
            wanting = [index for index, to in enumerate(self._destinations) if layer in to.layers]
            if not wanting:
                continue
            status = self._synchronize(layer)
            if status != LLMStatusCode.LLM_SUCCESS:
                for index in wanting:
                    self.task._record(index, status)
                return
            for index in wanting:
                try:
                    self._pushes[index].layer_ready(layer)
                except kvferry.KvferryError as error:
                    self._fail(index, self._cause(index, error))
                    return
                if layer == self._destinations[index].layers[-1]:
                    self._complete.add(index)
            standing = [self._stands(index) for index in self._pushes]  # asks each: outcomes are recorded on the way
            if not all(standing):
                return

    def _synchronize(self, layer: int) -> LLMStatusCode:
        try:
            ready = self._synchronizer.synchronize_layer(layer, None)
        except BaseException:  # noqa: BLE001 - the caller's code may raise anything, sys.exit() too, and its result says so
            get_logger().exception("[%s] synchronize_layer(%d) raised", FUNCTION, layer)
            return LLMStatusCode.LLM_FAILED
        return LLMStatusCode.LLM_SUCCESS if ready else LLMStatusCode.LLM_PARAM_INVALID

    def _stands(self, index: int) -> bool:
        """False if the push has failed meanwhile: then the rest of the job is not worth its while."""
        return not self._pushes[index].done() or self._outcome(index)

    def _outcome(self, index: int) -> bool:
        """Waits for a push and records how it ended."""
        try:
            self._pushes[index].wait()
        except kvferry.KvferryError as error:
            self._fail(index, error)
            return False
        self.task._record(index, LLMStatusCode.LLM_SUCCESS)
        return True

    def _cause(self, index: int, error: kvferry.KvferryError) -> kvferry.KvferryError:
        """Why a push ended: its own error says more than the refused ``layer_ready`` does."""
        try:
            self._pushes[index].wait()
        except kvferry.KvferryError as cause:
            return cause
        return error

    def _settle(self) -> None:
        """Waits for what was declared ready in full, cancels the rest and waits until it has stopped."""
        for index, push in self._pushes.items():
            if index not in self._complete:
                push.cancel()
                with contextlib.suppress(kvferry.KvferryError):
                    push.transfer.wait()
        for index in sorted(self._complete):
            self._outcome(index)

    def _fail(self, index: int, error: kvferry.KvferryError | LLMException) -> None:
        if isinstance(error, kvferry.KvferryError):
            error = translated(error, FUNCTION)
        get_logger().error("destination %d: %s", index, error)
        self.task._record(index, error.status_code)
