"""The configuration of V1: who this rank is, and what sort of KV cache its model has."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class KVCacheType(Enum):
    """Only ``MLA`` changes anything: its KV cache is the same on all ranks of a TP group, and is stored once."""

    GQA = "GQA"
    MHA = "MHA"
    MLA = "MLA"
    MQA = "MQA"


@dataclass
class CcConfig_v1:
    """Plain values, read and checked by ``Ems.init``."""

    rank_id: int
    device_id: int
    model_id: str
    tp_world_size: int = 1
    pp_world_size: int = 1
    rank_in_tp_group: int = 0
    rank_in_pp_group: int = 0
    llm_engine: str = "vllm"
    kvcache_type: KVCacheType | str = KVCacheType.GQA
