"""The façade: vLLM's connector interface, translated to and from the plain values of `scheduler` and `worker`.

vLLM makes it twice, once with the role of the scheduler and once in each worker. One class for all versions: what came into
the interface later is asked for by name, and what a version lacks is not used. Decides nothing.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from kvferry import Unsupported
from kvferry.connectors.vllm.identity import config_digest, identity, model_at
from kvferry.connectors.vllm.orders import Orders, Place, Report
from kvferry.connectors.vllm.prometheus import KvferryProm, KvferryStats
from kvferry.connectors.vllm.requests import Asked, Scheduled, Step
from kvferry.connectors.vllm.scheduler import SchedulerSide
from kvferry.connectors.vllm.settings import Settings
from kvferry.connectors.vllm.worker import WorkerSide

__all__ = ["KvferryConnector"]

log = logging.getLogger("kvferry.vllm")

# Groups of layers whose blocks hold all tokens, so that block i of a request is its tokens from i * block size on.
_WHOLE = ("FullAttentionSpec", "MLAAttentionSpec")


@dataclass
class StepOrders(KVConnectorMetadata):
    orders: Orders


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """``places``: by rank, once; for a scheduler's side that the handshake has not reached (see `WorkerPlace`)."""

    report: Report
    places: dict[int, Place] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.report.plus(other.report), self.places | other.places)


@dataclass
class WorkerPlace(KVConnectorHandshakeMetadata):
    """``whose``: the connector that it is meant for. vLLM's MultiConnector gives all of its connectors the handshake of the
    first that has any."""

    place: Place
    whose: str


class KvferryConnector(KVConnectorBase_V1):
    """See docs/vllm.md. Its configuration is `kvferry.connectors.vllm.settings.Settings`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm()
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        settings = Settings.read(transfer.kv_connector_extra_config or {})
        self._settings = settings
        self._blocks = _checked_blocks(kv_cache_config, vllm_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._place: Place | None = None
        self._place_told = False
        self._whose = repr((transfer.kv_role, sorted((transfer.kv_connector_extra_config or {}).items())))
        self._world = int(parallel.tensor_parallel_size)
        if role == KVConnectorRole.SCHEDULER:
            _require_recompute(transfer)
            self._scheduler = SchedulerSide(
                settings,
                block_tokens=int(vllm_config.cache_config.block_size),
                model=_model(vllm_config, settings),
                engine_id=str(transfer.engine_id or ""),
                saves=bool(transfer.is_kv_producer),
                hands_over=bool(transfer.is_kv_producer),
                takes_over=bool(transfer.is_kv_consumer),
            )
        else:
            self._rank = int(parallel.rank) % self._world
            # Of data-parallel engines each computes something in every step, for the others wait for it.
            alone = int(getattr(parallel, "data_parallel_size", 1) or 1) == 1
            self._worker = WorkerSide(settings, rank=self._rank, world=self._world, may_wait=alone)

    @property
    def requires_kv_delivery(self) -> bool:
        """Blocks for a pool may get lost; what is handed over is to arrive."""
        return self._settings.handover and bool(self._vllm_config.kv_transfer_config.is_kv_producer)

    # --- the worker's side -------------------------------------------------------------------------------------------

    @property
    def _work(self) -> WorkerSide:
        assert self._worker is not None, "vLLM asks the scheduler's side for a worker's work"
        return self._worker

    def _orders(self) -> Orders:
        metadata = self._connector_metadata
        return metadata.orders if isinstance(metadata, StepOrders) else Orders()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        attention = str(getattr(getattr(self._vllm_config, "attention_config", None), "backend", None) or "")
        self._place = self._work.registered(dict(kv_caches), self._blocks, attention)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if self._place is None else WorkerPlace(self._place, self._whose)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(kv_connector_metadata, StepOrders):
            self._work.begin(kv_connector_metadata.orders)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._work.begin(self._orders())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._work.start_loads(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._work.layer_saved(layer_name)

    def wait_for_save(self) -> None:
        self._work.start_saves(self._orders())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        released, received = self._work.finished()
        return released or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._work.failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self._work.report()
        if self._place is not None and not self._place_told:
            self._place_told = True
            return WorkerReport(report or Report(), {self._rank: self._place})
        return None if report is None else WorkerReport(report)

    def shutdown(self) -> None:
        for side in (self._worker, self._scheduler):
            if side is not None:
                side.close()

    # --- the scheduler's side ----------------------------------------------------------------------------------------

    @property
    def _plan(self) -> SchedulerSide:
        assert self._scheduler is not None, "vLLM asks a worker for the scheduler's work"
        return self._scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        said = {rank: one for rank, one in metadata.items() if isinstance(one, WorkerPlace)}
        if said and all(one.whose == self._whose for one in said.values()):
            self._plan.placed({rank: one.place for rank, one in said.items()})

    def on_new_request(self, request: Any) -> None:
        adapter = request.lora_request
        self._plan.began(
            Asked(
                request.request_id,
                request.all_token_ids,
                request.num_prompt_tokens,
                request.kv_transfer_params,
                str(request.cache_salt or ""),
                "" if adapter is None else f"{adapter.lora_name} {getattr(adapter, 'lora_path', '')}",
                "multimodal" if request.mm_features else "embedded" if request.prompt_embeds is not None else "",
                bool(getattr(request, "skip_reading_prefix_cache", False)),  # not every vLLM heeds it for connectors
            )
        )

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not self._plan.knows(request.request_id):
            self.on_new_request(request)
        return self._plan.matched(request.request_id, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._plan.allocated(request.request_id, list(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return StepOrders(self._plan.step(_step(scheduler_output)))

    def update_connector_output(self, connector_output: Any) -> None:
        said = connector_output.kv_connector_worker_meta
        if isinstance(said, WorkerReport):
            if said.places and not self._plan.is_placed:
                self._plan.placed(said.places)
            self._plan.reported(said.report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        whole = request.status.name in ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
        return self._plan.finished(request.request_id, list(block_ids), int(request.num_computed_tokens), whole)

    def has_pending_push_work(self) -> bool:
        """Keeps the engine stepping until the workers have been told."""
        return self._plan.busy

    # --- both --------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KvferryStats | None:
        if self._scheduler is None:  # the workers' counts travel with their reports
            return None
        counted = self._scheduler.counts.take()
        return KvferryStats(data=counted) if counted else None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers of a graph are not heard of one by one."""
        return bool(extra_config.get("push"))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvferryStats:
        return KvferryStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KvferryProm:
        return KvferryProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _step(output: Any) -> Step:
    scheduled = [
        Scheduled(
            new.req_id, list(new.block_ids[0]), True, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
        )
        for new in output.scheduled_new_reqs
    ]
    cached = output.scheduled_cached_reqs
    resumed = set(getattr(cached, "resumed_req_ids", None) or ())
    for name, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
        listed = [] if blocks is None else list(blocks[0])
        scheduled.append(Scheduled(name, listed, name in resumed, computed + output.num_scheduled_tokens[name]))
    preempted = frozenset(getattr(output, "preempted_req_ids", None) or ()) | resumed
    return Step(scheduled, preempted, output.total_num_scheduled_tokens)


def _checked_blocks(kv_cache_config: Any, vllm_config: Any) -> int:
    """How many blocks the engine has. :raises Unsupported: its cache, or its way of sharing it out, is not handled here."""
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if int(getattr(parallel, name, 1) or 1) > 1:
            raise Unsupported(f"kvferry's connector does not handle {name} = {getattr(parallel, name)}: set it to 1")
    groups = getattr(kv_cache_config, "kv_cache_groups", None)
    if groups is None:
        raise Unsupported(f"vLLM {vllm.__version__} does not say what its KV cache is like: use 0.27 or newer")
    if len(groups) != 1:
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        raise Unsupported(
            f"this model has {len(groups)} groups of KV caches ({kinds}), and kvferry's connector handles models of one "
            "group: run it without the connector, or with --disable-hybrid-kv-cache-manager if vLLM allows that for it"
        )
    spec = groups[0].kv_cache_spec
    for kind in [type(one).__name__ for one in getattr(spec, "kv_cache_specs", {"": spec}).values()]:
        if kind not in _WHOLE:
            raise Unsupported(
                f"this model's KV cache is a {kind}, and kvferry's connector handles {' and '.join(_WHOLE)}"
            )
        if kind == "MLAAttentionSpec" and not vllm_config.scheduler_config.enable_chunked_prefill:
            # vLLM switches chunked prefill and its own prefix cache off for its reference backend for MLA on the CPU, and asks
            # connectors nevertheless: hits would change answers there, as those of its own cache do when it is forced on.
            raise Unsupported(
                f"this model's KV cache is a {kind}, and vLLM computes its prompts in one piece here (chunked prefill is off), "
                "and not behind blocks that are there: run it without the connector, or on a CPU with AMX in bfloat16"
            )
    return int(kv_cache_config.num_blocks)


def _log_as_vllm() -> None:
    """kvferry's warnings appear where vLLM's do: nobody who serves a model has set up another library's logging."""
    own = logging.getLogger("kvferry")
    if not own.handlers:
        for handler in logging.getLogger("vllm").handlers:
            own.addHandler(handler)
        own.propagate = not own.handlers


def _require_recompute(transfer: Any) -> None:
    """A load that fails must not fail its request. vLLM reads the policy after it has made the connector."""
    if getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
        log.warning(
            'kv_load_failure_policy is "%s": a request would end with an error whenever the pool or a peer fails. kvferry has '
            'set it to "recompute"; say so in --kv-transfer-config to silence this',
            transfer.kv_load_failure_policy,
        )
        transfer.kv_load_failure_policy = "recompute"


def _model(vllm_config: Any, settings: Settings) -> str:
    model, cache = vllm_config.model_config, vllm_config.cache_config
    dummy = str(getattr(vllm_config.load_config, "load_format", "")) == "dummy"
    return identity(
        {
            "model": settings.model or model_at(str(model.model), model.revision),
            "weights": f"dummy {model.seed}" if dummy else "",
            "config": config_digest(model.hf_config.to_dict()),
            "quantization": model.quantization or "",
            "dtype": model.dtype,
            "cache dtype": cache.cache_dtype,
            "block tokens": cache.block_size,
            "speculation": getattr(vllm_config.speculative_config, "model", None) or "",
        }
    )
