"""What names a cache on another cluster. Keys compare by identity, as the vendor's do."""

from __future__ import annotations

from typing import Any

from llm_datadist.status import raise_if_false
from llm_datadist.utils.utils import check_int64, check_isinstance, check_uint32, check_uint64

NO_ID = (1 << 64) - 1  # a request or prefix id that names nothing


class CacheKey:
    """``CacheKey(cluster_id, req_id, model_id=0, prefix_id=2**64-1)``: a request's or a prefix's row."""

    _ORDER = ("cluster_id", "req_id", "model_id", "prefix_id")

    def __init__(self, *args: int, **kwargs: int) -> None:
        values = _by_name("CacheKey", self._ORDER, args, kwargs)
        raise_if_false("req_id" in values, "req_id is required")
        self._cluster_id = check_uint64("cluster_id", values["cluster_id"])
        self._req_id = check_uint64("req_id", values["req_id"])
        self._model_id = check_uint64("model_id", values.get("model_id", 0))
        self._prefix_id = check_uint64("prefix_id", values.get("prefix_id", NO_ID))

    @property
    def cluster_id(self) -> int:
        return self._cluster_id

    @property
    def prompt_cluster_id(self) -> int:
        return self._cluster_id

    @property
    def req_id(self) -> int:
        return self._req_id

    @property
    def prefix_id(self) -> int:
        return self._prefix_id

    @property
    def model_id(self) -> int:
        return self._model_id

    def __repr__(self) -> str:
        return (
            f"CacheKey(cluster_id={self._cluster_id}, req_id={self._req_id}, prefix_id={self._prefix_id}, "
            f"model_id={self._model_id})"
        )


class BlocksCacheKey:
    """``BlocksCacheKey(cluster_id, model_id=0)``: the blocks cache of a model."""

    _ORDER = ("cluster_id", "model_id")

    def __init__(self, *args: int, **kwargs: int) -> None:
        self._given_as = "prompt_cluster_id" if "prompt_cluster_id" in kwargs else "cluster_id"
        values = _by_name("BlocksCacheKey", self._ORDER, args, kwargs)
        self._cluster_id: int = values["cluster_id"]
        self._model_id: int = values.get("model_id", 0)
        check_isinstance("cluster_id", self._cluster_id, int)
        check_isinstance("model_id", self._model_id, int)
        ids = self._cluster_id, self._model_id
        self._fits = all(number is not None and 0 <= number <= NO_ID for number in ids)
        if self._fits:
            self._cluster_id, self._model_id = map(int, ids)

    def _check_ids(self) -> None:
        """``TypeError`` for ids of no cluster and no model, which the constructor lets through: for every use of the key."""
        if not self._fits:
            raise TypeError(f"cluster_id and model_id only support integers from 0 to 2^64-1, but got {self}")

    @property
    def cluster_id(self) -> int:
        return self._cluster_id

    @property
    def prompt_cluster_id(self) -> int:
        return self._cluster_id

    @property
    def model_id(self) -> int:
        return self._model_id

    def __repr__(self) -> str:
        return f"BlocksCacheKey({self._given_as}={self._cluster_id}, model_id={self._model_id})"


class CacheKeyByIdAndIndex:
    """A cache by the id that its owner's engine gave it, and a row of it."""

    def __init__(self, cluster_id: int, cache_id: int, batch_index: int = 0) -> None:
        self._cluster_id = check_uint64("cluster_id", cluster_id)
        self._cache_id = check_int64("cache_id", cache_id)
        self._batch_index = check_uint32("batch_index", batch_index)

    @property
    def cluster_id(self) -> int:
        return self._cluster_id

    @property
    def cache_id(self) -> int:
        return self._cache_id

    @property
    def batch_index(self) -> int:
        return self._batch_index

    def __repr__(self) -> str:
        return (
            f"CacheKeyByIdAndIndex(cluster_id={self._cluster_id}, cache_id={self._cache_id}, "
            f"batch_index={self._batch_index})"
        )


def _by_name(what: str, order: tuple[str, ...], args: tuple[int, ...], kwargs: dict[str, int]) -> dict[str, Any]:
    """Arguments by name: positional before keyword, ``cluster_id`` before its older name ``prompt_cluster_id``."""
    raise_if_false(len(args) + len(kwargs) <= len(order), "{} takes at most {} arguments", what, len(order))
    for name in kwargs:
        raise_if_false(name in order or name == "prompt_cluster_id", "Unsupported param:{}", name)
    values = dict(kwargs)
    older = values.pop("prompt_cluster_id", None)
    if "prompt_cluster_id" in kwargs:
        values.setdefault("cluster_id", older)  # type: ignore[arg-type]
    values.update(zip(order, args, strict=False))
    raise_if_false("cluster_id" in values, "cluster_id is required")
    return values
