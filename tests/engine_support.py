"""A small engine for tests of the vLLM connector's two sides: it schedules, allocates, computes, preempts and frees as vLLM
does, without vLLM. What it "computes" for a position depends on all tokens up to it, so that a block in the wrong place,
or of another prompt, or not loaded at all, is seen."""

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.connectors.vllm.orders import Place
from kvferry.connectors.vllm.requests import Asked, Scheduled, Step
from kvferry.connectors.vllm.scheduler import SchedulerSide
from kvferry.connectors.vllm.settings import Settings
from kvferry.connectors.vllm.worker import WorkerSide

BLOCK = 4
WIDTH = 8  # float32 of each token in each layer


class Tensor:
    """A numpy array with torch's words."""

    def __init__(self, array: npt.NDArray[Any], device: str = "cpu") -> None:
        self.array, self.shape, self.dtype, self.device = array, array.shape, str(array.dtype), device

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize


@dataclass
class Running:
    id: str
    tokens: list[int]
    output: int
    params: dict[str, Any] | None
    state: str = "waiting"  # loading, running, finished
    computed: int = 0
    external: int = 0
    blocks: list[int] = field(default_factory=list)
    given: int = 0  # of its blocks, how many the worker's side has been told of
    resumed: bool = False
    preemptions: int = 0
    delayed: bool = False
    made: int = 0  # tokens computed here
    prompt: int = 0
    answer: dict[str, object] | None = None
    taken: int = 0  # tokens from elsewhere, as the engine counts them


class Engine:
    def __init__(
        self,
        *,
        pool: "str | list[str]" = "off",
        blocks: int = 64,
        layers: int = 2,
        chunk: int = 1000,
        model: str = "model",
        dtype: str = "float32",
        saves: bool = True,
        latent: bool = False,
        **settings: Any,
    ) -> None:
        self.settings = Settings.read(
            {"pool": pool, "handover": False, "bounded": False, "lookup_timeout_ms": 2000, "load_timeout_ms": 5000}
            | settings
        )
        of_a_token = () if latent else (2,)  # one vector, as of MLA, or keys and values
        self.caches = [np.zeros((blocks, *of_a_token, BLOCK, WIDTH), dtype) for _ in range(layers)]
        self.worker = WorkerSide(self.settings)
        self.place: Place = self.worker.registered(
            {f"layer {i}": Tensor(cache) for i, cache in enumerate(self.caches)}, blocks
        )
        self.scheduler = SchedulerSide(self.settings, block_tokens=BLOCK, model=model, engine_id="engine", saves=saves)
        self.scheduler.placed({0: self.place})
        self.free = list(range(1, blocks))  # block 0 is nobody's, as in vLLM
        self.requests: dict[str, Running] = {}
        self.chunk = chunk
        self.preempted: set[str] = set()
        self.received: list[str] = []
        self.released: list[str] = []
        self.failed: set[int] = set()

    # --- as an engine's users see it ---------------------------------------------------------------------------------

    def add(
        self, name: str, tokens: Sequence[int], output: int = 1, params: dict[str, Any] | None = None, **asked: Any
    ) -> Running:
        request = Running(name, list(tokens), output, params, prompt=len(tokens))
        self.requests[name] = request
        self.scheduler.began(Asked(name, request.tokens, len(tokens), params, **asked))
        return request

    def run(
        self, name: str, tokens: Sequence[int], output: int = 1, params: dict[str, Any] | None = None, **asked: Any
    ) -> Running:
        request = self.add(name, tokens, output, params, **asked)
        self.finish(request)
        return request

    def finish(self, *requests: Running, patience_s: float = 15.0) -> None:
        end = time.monotonic() + patience_s
        while any(request.state != "finished" for request in requests) or any(r.delayed for r in requests):
            assert time.monotonic() < end, [(r.id, r.state, r.delayed) for r in self.requests.values()]
            self.step()

    def settle(self, patience_s: float = 15.0) -> None:
        """Until every block is free again and nothing is under way."""
        end = time.monotonic() + patience_s
        while self.requests or self.scheduler.busy:
            assert time.monotonic() < end, [(r.id, r.state, r.delayed) for r in self.requests.values()]
            self.step()

    def abort(self, request: Running) -> None:
        self._end(request, whole=False)

    def preempt(self, request: Running) -> None:
        assert request.state == "running"
        self._give_back(request)
        request.state, request.computed, request.given, request.resumed = "waiting", 0, 0, True
        request.preemptions += 1
        self.preempted.add(request.id)

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()

    def counted(self) -> dict[str, float]:
        return self.scheduler.counts.take()

    # --- one step ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        scheduled: list[Scheduled] = []
        computing: list[tuple[Running, int]] = []
        for request in list(self.requests.values()):
            if request.state == "waiting" and not self._admitted(request):
                continue
            if request.state == "running":
                # The first token of the output is known when all of the prompt is computed.
                count = min(self.chunk, len(request.tokens) - request.computed)
                if not self._has_room(request, request.computed + count):
                    continue
                whole = request.given == 0
                scheduled.append(
                    Scheduled(request.id, request.blocks[request.given :], whole, request.computed + count)
                )
                request.given = len(request.blocks)
                computing.append((request, count))
        preempted, self.preempted = frozenset(self.preempted), set()
        tokens = sum(count for _, count in computing)
        orders = self.scheduler.step(Step(scheduled, preempted, tokens))
        self.worker.begin(orders)
        for layer in range(len(self.caches)):
            for request, count in computing:
                self._compute(request, layer, count)
            self.worker.layer_saved(f"layer {layer}")
        for request, count in computing:
            request.computed += count
            request.made += count
        self.worker.start_loads(orders)
        if computing:  # vLLM before 0.30 says nothing after a step that computes nothing
            self.worker.start_saves(orders)
        released, received = self.worker.finished()
        failed = self.worker.failed_blocks()
        report = self.worker.report()
        self._failed(failed)
        for request, _ in computing:
            if request.state == "running" and request.computed == len(request.tokens):
                if len(request.tokens) - request.prompt + 1 >= request.output:
                    self._end(request, whole=True)
                else:
                    request.tokens.append(zlib.crc32(str(request.tokens).encode()) % 1000)
        if report is not None:
            self.scheduler.reported(report)
        self._arrived(received)
        for name in released:
            assert self.requests[name].delayed and self.requests[name].state == "finished"
            self.released.append(name)
            self._give_back(self.requests.pop(name))
        time.sleep(0.001)

    def _admitted(self, request: Running) -> bool:
        """As vLLM does it: asks what can be had, allocates, and parks the request while that comes."""
        if request.computed:  # a load has ended
            request.state = "running"
            return True
        tokens, later = self.scheduler.matched(request.id, 0)
        if tokens is None:
            return False
        assert tokens == 0 or later
        if not self._has_room(request, max(tokens, 1)):
            return False
        self.scheduler.allocated(request.id, request.blocks, tokens)
        if tokens:
            request.state, request.computed, request.external = "loading", tokens, tokens
            return False
        request.state = "running"
        return True

    def _has_room(self, request: Running, tokens: int) -> bool:
        needed = -(-tokens // BLOCK) - len(request.blocks)
        if needed > len(self.free):
            return False
        request.blocks += [self.free.pop(0) for _ in range(needed)]
        return True

    def _compute(self, request: Running, layer: int, count: int) -> None:
        for position in range(request.computed, request.computed + count):
            self._cell(request, layer, position)[:] = expected(request.tokens, layer, position)

    def _cell(self, request: Running, layer: int, position: int) -> npt.NDArray[Any]:
        return self.caches[layer][request.blocks[position // BLOCK], ..., position % BLOCK, :]

    def is_right(self, request: Running) -> bool:
        """What lies in its blocks is what computing all of it would have put there."""
        return all(
            (self._cell(request, layer, position) == expected(request.tokens, layer, position)).all()
            for layer in range(len(self.caches))
            for position in range(request.computed)
        )

    def _failed(self, failed: set[int]) -> None:
        self.failed |= failed
        for request in self.requests.values():
            if request.state == "loading":
                bad = [i for i, block in enumerate(request.blocks) if block in failed]
                if bad:
                    request.computed = min(request.computed, bad[0] * BLOCK)

    def _arrived(self, received: set[str]) -> None:
        for name in received:
            assert name in self.requests, f"{name} is received, and nobody waits for it"
            self.received.append(name)
            request = self.requests[name]
            if request.state == "finished":
                self._give_back(self.requests.pop(name))
                request.delayed = False
                continue
            assert request.state == "loading", f"{name} is received and is {request.state}"
            request.taken += request.computed
            request.state = "waiting"
            if request.computed == len(request.tokens):
                request.computed -= 1
            if not request.computed:
                self._give_back(request)
            else:
                self.scheduler.allocated(name, request.blocks, 0)

    def _end(self, request: Running, whole: bool) -> None:
        loading, request.state = request.state == "loading", "finished"
        if whole:
            assert self.is_right(request), f"{request.id} has other values than computing would give"
        delay, request.answer = self.scheduler.finished(request.id, request.blocks, request.computed, whole)
        assert not (loading and delay)
        if delay or loading:
            request.delayed = True
        else:
            del self.requests[request.id]
            self._give_back(request)

    def _give_back(self, request: Running) -> None:
        for block in request.blocks:
            for cache in self.caches:
                cache[block] = -1.0  # whoever still reads it reads what is nobody's
        self.free += request.blocks
        request.blocks = []
        request.delayed = False


def expected(tokens: Sequence[int], layer: int, position: int) -> float:
    return float(zlib.crc32(np.asarray(tokens[: position + 1], "<u4").tobytes(), layer) % 65536)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()
