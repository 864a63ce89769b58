"""The ``llm_datadist`` API on hosts without an Ascend device, carried by kvferry.

Translation and nothing else: names, defaults, argument checks and statuses are the vendor's, the bytes are moved by
kvferry. ``DEVICE`` placement means host memory.
"""

from __future__ import annotations

from typing import Any

from llm_datadist.cache import Cache, CacheDesc, KvCache, MemInfo
from llm_datadist.cluster import LLMClusterInfo
from llm_datadist.configs import LLMConfig, LlmConfig
from llm_datadist.data_type import DataType
from llm_datadist.enums import LLMRole, Memtype, Placement, RegisterMemStatus
from llm_datadist.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from llm_datadist.status import LLMException, LLMStatusCode, Status
from llm_datadist.tensors import create_npu_tensors as create_npu_tensors
from llm_datadist.transfer import CacheTask, LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
from llm_datadist.v2.llm_datadist import LLMDataDist

_OLDER_MODE = ["TensorDesc", "Tensor", "KvCacheManager"]

v2_list = [
    "LLMClusterInfo",
    "LLMStatusCode",
    "LLMException",
    "LLMRole",
    "LlmConfig",
    "LLMConfig",
    "DataType",
    "Status",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "KvCache",
    "Cache",
    "BlocksCacheKey",
    "LLMDataDist",
    "Placement",
    "RegisterMemStatus",
    "LayerSynchronizer",
    "TransferConfig",
    "CacheTask",
    "TransferWithCacheKeyConfig",
    "Memtype",
    "MemInfo",
]

# The older mode's names are listed as the vendor lists them: a star import without llm_datadist_v1 is an ImportError.
__all__ = [  # noqa: RUF022
    "LLMClusterInfo",
    "LLMStatusCode",
    "LLMException",
    "LLMRole",
    "LlmConfig",
    "LLMConfig",
    "DataType",
    "Status",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "KvCache",
    "Cache",
    "BlocksCacheKey",
    "LLMDataDist",
    "Placement",
    "RegisterMemStatus",
    "LayerSynchronizer",
    "TransferConfig",
    "CacheTask",
    "TransferWithCacheKeyConfig",
    "Memtype",
    "MemInfo",
    "TensorDesc",
    "Tensor",
    "KvCacheManager",
]


def __getattr__(name: str) -> Any:
    if name in _OLDER_MODE:
        import importlib

        return getattr(importlib.import_module("llm_datadist_v1"), name)  # ModuleNotFoundError without it
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
