"""The EMS Context Caching API on CPU hosts, carried by kvferry's pool.

Translation and nothing else: names, argument rules, status codes and results are the vendor's, in all generations of its
documents; values are kept and moved by kvferry. KV caches lie in host memory.
"""

from __future__ import annotations

from ems.caching import ContextCaching
from ems.caching_v1 import ContextCache_v1
from ems.cc_v1.cc_config import CcConfig_v1, KVCacheType
from ems.common.exception import EmsErrorCode, EmsExcepiton, EmsException
from ems.config import CcConfig, EmsConfig
from ems.facade import Ems
from ems.future import CcFuture
from ems.values import CcKvOption, CcResult, KvBufferWrapper, PrimaryKey

__all__ = [
    "CcConfig",
    "CcConfig_v1",
    "CcFuture",
    "CcKvOption",
    "CcResult",
    "ContextCache_v1",
    "ContextCaching",
    "Ems",
    "EmsConfig",
    "EmsErrorCode",
    "EmsExcepiton",
    "EmsException",
    "KVCacheType",
    "KvBufferWrapper",
    "PrimaryKey",
]
