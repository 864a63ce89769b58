"""The constants and pure functions of the vendor's native module that tests look at. There is no native module here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from llm_datadist.data_type import DataType, dtype_to_size_bytes
from llm_datadist.status import LLMStatusCode as _Code

kSuccess: Final = int(_Code.LLM_SUCCESS)
kFailed: Final = int(_Code.LLM_FAILED)
kParamInvalid: Final = int(_Code.LLM_PARAM_INVALID)
kLLMWaitProcessTimeOut: Final = int(_Code.LLM_WAIT_PROCESS_TIMEOUT)
kLLMKVCacheNotExist: Final = int(_Code.LLM_KV_CACHE_NOT_EXIST)
kLLMRepeatRequest: Final = int(_Code.LLM_REPEAT_REQUEST)
kLLMRequestAlreadyCompleted: Final = int(_Code.LLM_REQUEST_ALREADY_COMPLETED)
kLLMEngineFinalized: Final = int(_Code.LLM_ENGINE_FINALIZED)
kLLMNotYetLink: Final = int(_Code.LLM_NOT_YET_LINK)
kAlreadyLink: Final = int(_Code.LLM_ALREADY_LINK)
kLinKFailed: Final = int(_Code.LLM_LINK_FAILED)  # spelt so by the vendor
kUnlinkFailed: Final = int(_Code.LLM_UNLINK_FAILED)
kNotifyPromptUnlinkFailed: Final = int(_Code.LLM_NOTIFY_PROMPT_UNLINK_FAILED)
kLLMClusterNumExceedLimit: Final = int(_Code.LLM_CLUSTER_NUM_EXCEED_LIMIT)
kProcessingLink: Final = int(_Code.LLM_PROCESSING_LINK)
kDeviceOutOfMemory: Final = int(_Code.LLM_DEVICE_OUT_OF_MEMORY)
kPrefixAlreadyExist: Final = int(_Code.LLM_PREFIX_ALREADY_EXIST)
kPrefixNotExist: Final = int(_Code.LLM_PREFIX_NOT_EXIST)
kLLMSeqLenOverLimit: Final = int(_Code.LLM_SEQ_LENOVERLIMIT)
kLLMNoFreeBlock: Final = int(_Code.LLM_NO_FREE_BLOCK)
kLLMBlocksOutOfMemory: Final = int(_Code.LLM_BLOCKS_OUT_OF_MEMORY)
kLLMExistLink: Final = int(_Code.LLM_EXIST_LINK)
kLLMFeatureNotEnabled: Final = int(_Code.LLM_FEATURE_NOT_ENABLED)
kLLMTimeout: Final = int(_Code.LLM_TIMEOUT)
kLLMLinkBusy: Final = int(_Code.LLM_LINK_BUSY)
kLLMOutOfMemory: Final = int(_Code.LLM_OUT_OF_MEMORY)
kLLMDeviceMemError: Final = int(_Code.LLM_DEVICE_MEM_ERROR)
kLLMSuspectRemoteError: Final = int(_Code.LLM_SUSPECT_REMOTE_ERROR)


def calc_tensor_size(shape: Sequence[int], dtype: int) -> int:
    """Bytes of a tensor of the type with this number; -1 for shapes and types that cannot be."""
    if any(dim <= 0 for dim in shape) or dtype not in {member.value for member in DataType}:
        return -1
    return math.prod(shape) * dtype_to_size_bytes[DataType(dtype)]


def dict_to_vector(mapping: Mapping[str, str]) -> list[tuple[str, str]]:
    return list(mapping.items())
