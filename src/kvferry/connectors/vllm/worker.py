"""A worker's side: loads and pulls into its registered cache, and saves from it, beside the engine's steps.

Knows blocks of tensors as arrays of any library, and what it is ordered to do; imports no vLLM. Driven by the façade, on the
engine's thread, which waits here only in a step that has nothing to do, and shortly: futures are looked at once in each step.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from kvferry import Future, InvalidArgument, KvferryError, Outcome, Pool, Unsupported
from kvferry.connectors.vllm.ferry import Ferry
from kvferry.connectors.vllm.identity import of_rank
from kvferry.connectors.vllm.orders import Load, Orders, Place, Receive, Report, Save
from kvferry.connectors.vllm.pace import LEAST_TOKENS
from kvferry.connectors.vllm.pools import open_pool
from kvferry.connectors.vllm.settings import Settings

__all__ = ["WorkerSide", "place_of"]

log = logging.getLogger("kvferry.vllm")

# How long a step that has nothing to do waits for a handover to end. vLLM steps hundreds of times a second while a request
# waits for its blocks, which takes the cores of whoever computes them. A request that comes meanwhile is seen after it.
IDLE_S = 0.01


class _Tensor(Protocol):
    """What is asked of a tensor: torch's words."""

    shape: Any
    dtype: Any
    device: Any

    def stride(self) -> Any: ...
    def element_size(self) -> int: ...
    def data_ptr(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Loading:
    load: Load
    future: "Future[Outcome]"


@dataclass(frozen=True, slots=True)
class _Saving:
    save: Save
    future: "Future[Outcome]"


class WorkerSide:
    def __init__(
        self,
        settings: Settings,
        *,
        rank: int = 0,
        world: int = 1,
        may_wait: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``may_wait``: a step without tokens holds up nobody but this engine."""
        self._settings, self._rank, self._world, self._now = settings, rank, world, now
        self._may_wait = may_wait
        self._pool: Pool | None = None
        self._ferry: Ferry | None = None
        self._place: Place | None = None
        self._loading: dict[str, _Loading] = {}
        self._saving: dict[int, _Saving] = {}
        self._lost: list[Load] = []  # that could not even be begun
        self._awaited: set[str] = set()
        self._failed: set[int] = set()
        self._report = Report()
        self._begun: Orders | None = None
        self._layers: dict[str, int] = {}
        self._tokens, self._began = 0, 0.0
        self._idle = False

    def registered(self, tensors: "dict[str, Any]", blocks: int, attention: str = "") -> Place:
        """The engine's cache: one tensor for each layer, whose dim 0 counts ``blocks``.

        :raises Unsupported: it lies on a device, or is not one piece per block. :raises InvalidArgument: the same.
        """
        once = _each_once(tensors)
        place = place_of(once, blocks, attention)
        arrays = list(once.values())
        self._layers = {name: number for number, name in enumerate(once)}
        if not self._settings.pool_off:
            self._pool = open_pool(self._settings)
            self._pool.register(arrays)
        if self._settings.handover:
            self._ferry = Ferry(arrays, self._settings, self._rank, place.geometry)
            place = Place(
                place.units, place.dtype, place.itemsize, place.layout, self._ferry.address, self._ferry.token
            )
        self._place = place
        return place

    # --- one step, in this order -------------------------------------------------------------------------------------

    def begin(self, orders: Orders) -> None:
        """Before anything of this step writes into a block: saves of blocks that have changed hands read no further."""
        if self._begun is orders:  # vLLM says it twice where requests may be preempted
            return
        self._begun = orders
        for saving in list(self._saving.values()):
            if saving.save.request_id in orders.ended:
                saving.future.cancel()
        for request_id in orders.ended:
            if request_id in self._loading:
                self._loading[request_id].future.cancel()
            elif self._ferry is not None:
                self._ferry.cancel(request_id)
        self._awaited |= orders.awaited
        if self._ferry is not None:
            self._ferry.begin(orders)
        self._tokens, self._began = orders.tokens, self._now()
        self._idle = orders.idle and self._may_wait

    def start_loads(self, orders: Orders) -> None:
        for load in orders.loads:
            assert self._pool is not None
            keys = of_rank(load.keys, self._rank, self._world)
            try:
                future = self._pool.load_async(keys, blocks=load.blocks, timeout_ms=load.timeout_ms)
            except KvferryError as error:  # it is computed
                log.warning("request %s cannot be loaded: %s", load.request_id, error)
                self._lost.append(load)
            else:
                self._loading[load.request_id] = _Loading(load, future)
        if self._ferry is not None:
            for pull in orders.pulls:
                self._ferry.pull(pull, self._rank)
            for receive in orders.receives:
                self._ferry.receive(receive, self._rank)

    def layer_saved(self, name: str) -> None:
        """This step has written its blocks of this layer."""
        if self._ferry is not None and name in self._layers:
            self._ferry.layer_ready(self._layers[name])

    def start_saves(self, orders: Orders) -> None:
        """After the step has written its blocks; not in every step that computes nothing."""
        if self._tokens >= LEAST_TOKENS:
            self._report.pace = (self._tokens, self._now() - self._began)
        self._tokens = 0
        if self._ferry is not None:
            self._ferry.stepped()
        for save in orders.saves:
            assert self._pool is not None
            keys = of_rank(save.keys, self._rank, self._world)
            try:
                future = self._pool.save_async(
                    keys, blocks=save.blocks, ttl_ms=save.ttl_ms, chain=True, timeout_ms=self._settings.save_timeout_ms
                )
            except KvferryError as error:
                log.warning("blocks of request %s cannot be saved: %s", save.request_id, error)
                self._report.saves[save.number] += 1
                self._report.words["blocks_saved error"] += len(save.blocks)
            else:
                self._saving[save.number] = _Saving(save, future)

    def finished(self) -> tuple[set[str], set[str]]:
        """The requests whose blocks nobody reads any more, of those that are awaited, and those whose loads have ended in
        whatever way; each once. Of an idle step that waits for a handover it returns when one has ended, or soon."""
        ended = self._ended()
        if self._idle and self._ferry is not None and not any(ended) and self._only_handovers(self._ferry):
            self._ferry.wait(IDLE_S)
            ended = self._ended()
        return ended

    def _only_handovers(self, ferry: Ferry) -> bool:
        """Nothing is under way but what wakes `Ferry.wait`, and nothing is there to be reported."""
        wakes = (ferry.waits or self._awaited) and not ferry.pushes
        return bool(wakes) and not (self._loading or self._saving or self._report)

    def _ended(self) -> tuple[set[str], set[str]]:
        received = set()
        for load in self._lost:
            received.add(load.request_id)
            self._note(load.request_id, load.blocks, len(load.blocks), "error")
        self._lost.clear()
        for request_id, loading in list(self._loading.items()):
            if loading.future.done():
                del self._loading[request_id]
                self._loaded(loading)
                received.add(request_id)
        if self._ferry is not None:
            for pulled in self._ferry.ended():
                received.add(pulled.pull.request_id)
                self._note(pulled.pull.request_id, pulled.pull.blocks, pulled.failed, pulled.why)
                self._report.pulled.add(pulled.pull.request_id)
                self._report.took("receiving" if isinstance(pulled.pull, Receive) else "pulling", pulled.seconds)
                self._report.words[f"handovers {pulled.why or 'taken'}"] += 1
        for number, saving in list(self._saving.items()):
            if saving.future.done():
                del self._saving[number]
                self._report.saves[number] += 1
                self._count("blocks_saved", "saving", saving.future)
        released = set()
        if self._awaited:
            busy = {saving.save.request_id for saving in self._saving.values()}
            held = self._ferry.held(self._report) if self._ferry is not None else set()
            released = self._awaited - busy - held
            self._awaited -= released
        return released, received

    def failed_blocks(self) -> set[int]:
        """Those that were to be filled since this was last asked, and are not."""
        failed, self._failed = self._failed, set()
        return failed

    def report(self) -> Report | None:
        report, self._report = self._report, Report()
        return report or None

    # -----------------------------------------------------------------------------------------------------------------

    def _loaded(self, loading: _Loading) -> None:
        load = loading.load
        outcome = self._count("blocks_loaded", "loading", loading.future)
        if outcome is None:
            self._note(load.request_id, load.blocks, len(load.blocks), "error")
            return
        failed = [block for block, ok in zip(load.blocks, outcome.ok.tolist(), strict=True) if not ok]
        self._failed.update(failed)
        self._report.blocks_loaded[load.request_id] = outcome.prefix
        if failed:
            self._report.why[load.request_id] = outcome.outcomes[outcome.prefix]

    def _note(self, request_id: str, blocks: list[int], failed: int, why: str) -> None:
        """The last ``failed`` of its blocks are not filled."""
        good = len(blocks) - failed
        self._failed.update(blocks[good:])
        self._report.blocks_loaded[request_id] = good
        if failed:
            self._report.why[request_id] = why

    def _count(self, what: str, of: str, future: "Future[Outcome]") -> Outcome | None:
        try:
            outcome = future.wait(0)
        except Exception:
            # A defect of this connector's, whatever it is: the request is computed, and serving goes on.
            log.exception("the pool was asked for something that cannot be")
            self._report.words[f"{what} error"] += 1
            return None
        for word, count in outcome.reasons.items():
            self._report.words[f"{what} {word}"] += count
        self._report.took(of, outcome.seconds)
        return outcome

    def close(self) -> None:
        """Ends what is under way; afterwards nothing touches the engine's cache."""
        futures = [loading.future for loading in self._loading.values()]
        for future in futures + [saving.future for saving in self._saving.values()]:
            future.cancel()
        if self._pool is not None:
            self._pool.close()
        if self._ferry is not None:
            self._ferry.close()


def place_of(tensors: "dict[str, Any]", blocks: int, attention: str) -> Place:
    """What a worker's tensors are, without where they lie."""
    if not tensors:
        raise InvalidArgument("the engine has registered no KV cache")
    said: list[tuple[int, str, int, tuple[int, ...], tuple[int, ...]]] = []
    for name, tensor in tensors.items():
        kind = str(getattr(tensor.device, "type", tensor.device))
        if kind != "cpu":
            raise Unsupported(
                f"the KV cache of {name} lies in memory of kind {kind!r}, and kvferry moves only host memory so far: "
                "run vLLM on the CPU"
            )
        shape = tuple(int(length) for length in tensor.shape)
        if shape[0] != blocks:
            raise Unsupported(
                f"the KV cache of {name} has the shape {shape}, whose first number is not that of the engine's {blocks} "
                "blocks: kvferry needs the layout of vLLM 0.26 or newer, where each block lies in one piece"
            )
        itemsize, strides = int(tensor.element_size()), tuple(int(step) for step in tensor.stride())
        said.append(
            (_product(shape[1:]) * itemsize, str(tensor.dtype).removeprefix("torch."), itemsize, shape[1:], strides[1:])
        )
    units, dtypes = tuple(unit for unit, *_ in said), {dtype for _, dtype, *_ in said}
    if len(dtypes) != 1 or len(set(units)) != 1:
        raise Unsupported(
            f"the engine's layers have KV caches that are not alike ({len(set(units))} sizes of block, element types "
            f"{', '.join(sorted(dtypes))}): kvferry handles models whose layers are all alike"
        )
    _, dtype, itemsize, shape, strides = said[0]
    return Place(units, dtype, itemsize, f"block {list(shape)} strides {list(strides)} {attention}".strip())


def _each_once(tensors: "dict[str, Any]") -> "dict[str, Any]":
    """Layers that share one cache are one."""
    found: dict[int, str] = {}
    for name, tensor in tensors.items():
        found.setdefault(int(tensor.data_ptr()), name)
    return {name: tensors[name] for name in found.values()}


def _product(numbers: Iterable[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result
