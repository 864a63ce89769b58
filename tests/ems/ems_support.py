"""What the tests of `ems` build requests of."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ems import CcConfig, CcConfig_v1, ContextCaching, EmsConfig, EmsErrorCode, EmsException, KvBufferWrapper, _pool
from ems.caching_v1 import ContextCache_v1
from ems.config import Settings

BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 8, 4, 2, 3


def open_caching(config: Any = None, access_id: "str | None" = None) -> Any:
    """A context caching object beside the process's one. Default: of V0."""
    config = config or CcConfig(rank_id=0, device_id=0, model_id="a-model")
    settings = Settings.checked(EmsConfig(access_id=access_id, cc_config=config))
    kind = ContextCache_v1 if isinstance(config, CcConfig_v1) else ContextCaching
    return kind(_pool.connect(settings.access_id, settings.access_key), settings)


def v1_config(**fields: Any) -> CcConfig_v1:
    return CcConfig_v1(**({"rank_id": 0, "device_id": 0, "model_id": "a-model"} | fields))


def kv_cache(layers: int = 2, seed: "int | None" = 0, blocks: int = BLOCKS, size: int = BLOCK_SIZE) -> Any:
    """layers x (K, V), each [blocks, block_size, heads, head_size]; no seed: zeros."""
    shape = (blocks, size, HEADS, HEAD_SIZE)
    if seed is None:
        return [[np.zeros(shape, np.float32) for _ in "kv"] for _ in range(layers)]
    random = np.random.default_rng(seed)
    return [[random.random(shape, np.float32) for _ in "kv"] for _ in range(layers)]


def rows(kvcache: Any, slots: "list[int]") -> npt.NDArray[Any]:
    """[layers, tensors, slots, …]: what lies in the slots."""
    return np.array([[tensor.reshape(-1, *tensor.shape[2:])[slots] for tensor in layer] for layer in kvcache])


class Held(KvBufferWrapper):
    """Keeps its array, which a pointer alone would not: a test's temporary ends before the request does."""

    __slots__ = ("array",)


def buffer(array: npt.NDArray[Any]) -> KvBufferWrapper:
    held = Held(array.ctypes.data, array.nbytes)
    held.array = array
    return held


def refused(match: "str | None" = None, code: EmsErrorCode = EmsErrorCode.EMS_INVALID_ARGUMENT) -> Any:
    """`pytest.raises` an exception of this code."""
    return pytest.raises(EmsException, check=lambda error: error.status_code() is code, match=match)
