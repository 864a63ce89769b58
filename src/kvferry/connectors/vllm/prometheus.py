"""The connector's counters on vLLM's own metrics page; part of the façade."""

from collections import Counter as Counted
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.connectors.vllm.counts import COUNTED

__all__ = ["KvferryProm", "KvferryStats"]


class KvferryStats(KVConnectorStats):
    """``data``: numbers by ``what:label``."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        if not other.is_empty():
            added = Counted(self.data)
            added.update(other.data)
            self.data = dict(added)
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(number, 3) for name, number in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class KvferryProm(KVConnectorPromMetrics):
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            what: self._counter_cls(name=f"vllm:kvferry_{what}", documentation=meaning, labelnames=[*labelnames, label])
            for what, (label, meaning) in COUNTED.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, number in transfer_stats_data.items():
            what, _, label = name.partition(":")
            self._counters[what].labels(*self.per_engine_labelvalues[engine_idx], label).inc(number)
