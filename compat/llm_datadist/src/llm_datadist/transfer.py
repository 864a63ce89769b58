"""What ``transfer_cache_async`` takes and gives: destinations, the synchronizer that the caller writes, the task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from llm_datadist.keys import BlocksCacheKey, CacheKeyByIdAndIndex
from llm_datadist.latch import Latch
from llm_datadist.status import LLMStatusCode, raise_if_false
from llm_datadist.utils.utils import check_isinstance, check_list_uint64, check_uint32, check_uint64


class LayerSynchronizer(ABC):
    """Says when a layer's computation is done."""

    @abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Blocks until the layer is computed; true when it is. Called from the transfer's thread, with None."""


def check_layer_range(name: str, layers: range | None) -> None:
    """A ``range`` of step 1 with 0 <= start < stop, or None."""
    if layers is None:
        return
    check_isinstance(name, layers, range)
    raise_if_false(layers.step == 1, "{} must have step 1, but got {}", name, layers)
    raise_if_false(0 <= layers.start < layers.stop, "{} must have 0 <= start < stop, but got {}", name, layers)
    check_uint32(name, layers.stop)


class TransferConfig:
    """One destination by raw addresses: the pair for layer L is ``dst_addrs[2 * (L - start) :][:2]``.

    An address is a name, not a permission: the destination's engine looks it up among its registered caches.
    """

    def __init__(
        self,
        dst_cluster_id: int,
        dst_addrs: list[int] | tuple[int, ...],
        src_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        self.dst_cluster_id = dst_cluster_id
        self.dst_addrs = dst_addrs
        self.src_layer_range = src_layer_range
        self.src_batch_index = src_batch_index
        self.dst_layer_range: range | None = None

    @property
    def dst_cluster_id(self) -> int:
        return self._dst_cluster_id

    @dst_cluster_id.setter
    def dst_cluster_id(self, cluster_id: int) -> None:
        self._dst_cluster_id = check_uint64("dst_cluster_id", cluster_id)

    @property
    def dst_addrs(self) -> Sequence[int]:
        return self._dst_addrs

    @dst_addrs.setter
    def dst_addrs(self, addrs: list[int] | tuple[int, ...]) -> None:
        check_list_uint64("dst_addrs", addrs)
        self._dst_addrs = addrs

    @property
    def src_layer_range(self) -> range | None:
        return self._src_layer_range

    @src_layer_range.setter
    def src_layer_range(self, layers: range | None) -> None:
        check_layer_range("src_layer_range", layers)
        self._src_layer_range = layers

    @property
    def src_batch_index(self) -> int:
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, index: int) -> None:
        self._src_batch_index = check_uint32("src_batch_index", index)

    def __repr__(self) -> str:
        return (
            f"TransferConfig(dst_cluster_id={self._dst_cluster_id}, dst_addrs={self._dst_addrs}, "
            f"src_layer_range={self._src_layer_range}, src_batch_index={self._src_batch_index})"
        )


class TransferWithCacheKeyConfig:
    """One destination by the key of a cache: the n-th source layer goes to the n-th destination layer."""

    def __init__(
        self,
        cache_key: BlocksCacheKey | CacheKeyByIdAndIndex,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        self.cache_key = cache_key
        for name, layers in (("src_layer_range", src_layer_range), ("dst_layer_range", dst_layer_range)):
            check_isinstance(name, layers, range, allow_none=False)
        self.src_layer_range = src_layer_range
        self.dst_layer_range = dst_layer_range
        assert src_layer_range is not None and dst_layer_range is not None
        raise_if_false(
            len(src_layer_range) == len(dst_layer_range),
            "src_layer_range has {} layers, dst_layer_range has {}",
            len(src_layer_range),
            len(dst_layer_range),
        )
        self.src_batch_index = src_batch_index
        raise_if_false(
            not isinstance(cache_key, BlocksCacheKey) or src_batch_index == 0,
            "src_batch_index must be 0 with a BlocksCacheKey, but got {}",
            src_batch_index,
        )
        self.dst_cluster_id = cache_key.cluster_id

    @property
    def cache_key(self) -> BlocksCacheKey | CacheKeyByIdAndIndex:
        return self._cache_key

    @cache_key.setter
    def cache_key(self, key: BlocksCacheKey | CacheKeyByIdAndIndex) -> None:
        check_isinstance("cache_key", key, [BlocksCacheKey, CacheKeyByIdAndIndex], allow_none=False)
        self._cache_key = key

    @property
    def src_layer_range(self) -> range | None:
        return self._src_layer_range

    @src_layer_range.setter
    def src_layer_range(self, layers: range | None) -> None:
        check_layer_range("src_layer_range", layers)
        self._src_layer_range = layers

    @property
    def dst_layer_range(self) -> range | None:
        return self._dst_layer_range

    @dst_layer_range.setter
    def dst_layer_range(self, layers: range | None) -> None:
        check_layer_range("dst_layer_range", layers)
        self._dst_layer_range = layers

    @property
    def src_batch_index(self) -> int:
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, index: int) -> None:
        self._src_batch_index = check_uint32("src_batch_index", index)

    def __repr__(self) -> str:
        return (
            f"TransferWithCacheKeyConfig(cache_key={self._cache_key}, src_layer_range={self._src_layer_range}, "
            f"dst_layer_range={self._dst_layer_range}, src_batch_index={self._src_batch_index})"
        )


class CacheTask:
    """The outcome of a ``transfer_cache_async``, one entry for each configuration."""

    def __init__(self, count: int) -> None:
        self._results: list[LLMStatusCode | None] = [None] * count
        self._ended = Latch()

    def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """Waits; ``LLM_TIMEOUT`` while running, else the first result that is no success, else ``LLM_SUCCESS``."""
        if not self._wait(timeout_in_millis):
            return LLMStatusCode.LLM_TIMEOUT
        failures = (result for result in self._results if result not in (None, LLMStatusCode.LLM_SUCCESS))
        return next(failures, LLMStatusCode.LLM_SUCCESS)

    def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        """Waits; ``LLM_TIMEOUT`` for each while running. None: that configuration was never reached."""
        if not self._wait(timeout_in_millis):
            return [LLMStatusCode.LLM_TIMEOUT] * len(self._results)
        return list(self._results)

    def _wait(self, timeout_in_millis: int | None) -> bool:
        if timeout_in_millis is not None:
            check_uint32("timeout_in_millis", timeout_in_millis)
        return self._ended.wait(None if timeout_in_millis is None else timeout_in_millis / 1000)

    def _record(self, index: int, status: LLMStatusCode) -> None:
        self._results[index] = status

    def _end(self) -> None:
        self._ended.set()
