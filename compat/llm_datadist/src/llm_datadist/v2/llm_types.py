"""Every value class of the API in one place, where callers of the vendor's package import them from."""

from llm_datadist.cache import Cache, CacheDesc, KvCache, MemInfo
from llm_datadist.cluster import LLMClusterInfo
from llm_datadist.data_type import DataType
from llm_datadist.enums import LLMRole, Memtype, Placement, PushType, RegisterMemStatus
from llm_datadist.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from llm_datadist.transfer import CacheTask, LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheTask",
    "DataType",
    "KvCache",
    "LLMClusterInfo",
    "LLMRole",
    "LayerSynchronizer",
    "MemInfo",
    "Memtype",
    "Placement",
    "PushType",
    "RegisterMemStatus",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
]
