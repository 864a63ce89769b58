"""Context caching of V0: the caller makes the keys and says where each value lies."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NoReturn

from ems import arguments, keys
from ems._pool import Batch, Pool
from ems.arguments import Addresses, Integers
from ems.bounds import Bounds
from ems.common.exception import EmsException, invalid
from ems.config import Settings
from ems.future import CcFuture, leading_run
from ems.log import LOGGER
from ems.tensors import memory_of
from ems.values import CcKvOption, CcResult, KvBufferWrapper, PrimaryKey


class ContextCaching:
    """What ``Ems.get_cc()`` returns for a `CcConfig`. Any thread may call it, with any number of requests in flight.

    Wrong arguments raise ``EMS_INVALID_ARGUMENT`` before anything is sent; a missing or evicted key never raises.
    """

    def __init__(self, pool: Pool, settings: Settings) -> None:
        self._pool = pool
        self._settings = settings
        self._bounds = Bounds()
        self._lock = threading.Lock()  # for what is registered

    def save(
        self,
        option: CcKvOption | None = None,
        key_list: Sequence[str | PrimaryKey] | None = None,
        value_list: Sequence[Sequence[KvBufferWrapper]] | None = None,
        *more: object,
        **kwargs: Any,
    ) -> CcResult:
        """Save each key's segments, in their order, as one value. A key that exists keeps its value and counts as saved."""
        return self._start_v0(option, key_list, value_list, more, kwargs, saving=True, wait=True).result()

    def load(
        self,
        option: CcKvOption | None = None,
        key_list: Sequence[str | PrimaryKey] | None = None,
        value_list: Sequence[Sequence[KvBufferWrapper]] | None = None,
        *more: object,
        **kwargs: Any,
    ) -> CcResult:
        """Load each key's value into its segments; a value of another size is a miss. Buffers from ``success`` on may have been
        written too, but nothing outside them."""
        return self._start_v0(option, key_list, value_list, more, kwargs, saving=False, wait=True).result()

    def async_save(
        self,
        option: CcKvOption | None = None,
        key_list: Sequence[str | PrimaryKey] | None = None,
        value_list: Sequence[Sequence[KvBufferWrapper]] | None = None,
        *more: object,
        **kwargs: Any,
    ) -> CcFuture:
        """As ``save``, without waiting: the buffers must stay as they are until the future is resolved."""
        return self._start_v0(option, key_list, value_list, more, kwargs, saving=True, wait=False)

    def async_load(
        self,
        option: CcKvOption | None = None,
        key_list: Sequence[str | PrimaryKey] | None = None,
        value_list: Sequence[Sequence[KvBufferWrapper]] | None = None,
        *more: object,
        **kwargs: Any,
    ) -> CcFuture:
        """As ``load``, without waiting."""
        return self._start_v0(option, key_list, value_list, more, kwargs, saving=False, wait=False)

    def exists(
        self, hashes: Sequence[str | PrimaryKey] | None = None, option: CcKvOption | None = None, **kwargs: Any
    ) -> CcResult:
        """How many of the keys (also as ``key_list=``), from the first one on, are there. Never raises for the pool's state:
        that is 0."""
        wanted = arguments.keys(kwargs.get("key_list") if hashes is None else hashes)
        chosen = arguments.option(option, default=CcKvOption())
        return self._look(*keys.v0_keys(self._settings, wanted), chosen)

    def is_ready(self, ccfuture: CcFuture) -> bool:
        """Whether ``get_result`` would return or raise at once. Never waits."""
        return _future(ccfuture)._is_ready()

    def get_result(self, ccfuture: CcFuture) -> CcResult:
        """As ``ccfuture.result()``."""
        return _future(ccfuture).result()

    def register_kvcache(self, kvcache: object, store_layer_group_desc: object = None) -> None:
        """V1 only."""
        _v1_only("register_kvcache")

    def register_memory(self, *tensors: object) -> None:
        """Not the vendor's: make the bounds of tensors known, so that a buffer that begins in one and is longer is refused when
        it is submitted. They are kept alive as long as this object. Registered KV caches are known anyway."""
        memories = [memory_of(tensor, f"tensor {index}") for index, tensor in enumerate(tensors)]
        with self._lock:
            self._bounds = self._bounds.with_more(memories)

    # -- shared with V1

    def _start_v0(
        self,
        option: object,
        key_list: object,
        value_list: object,
        more: tuple[object, ...],
        unknown: dict[str, Any],
        *,
        saving: bool,
        wait: bool,
    ) -> CcFuture:
        if more:
            _v1_only(f"a call with {3 + len(more)} arguments by position")
        if unknown:
            _v1_only(", ".join(unknown))
        chosen = arguments.option(option)
        wanted = arguments.keys(key_list)
        segments = arguments.buffers(value_list, len(wanted))
        self._bounds.check(*segments[:2])
        names, routes = keys.v0_keys(self._settings, wanted)
        return self._start(names, segments, chosen, routes=routes, saving=saving, wait=wait)

    def _start(
        self,
        names: list[bytes],
        segments: tuple[Addresses, Addresses, Integers],
        option: CcKvOption,
        *,
        saving: bool,
        wait: bool,
        **more: Any,
    ) -> CcFuture:
        routes = more.pop("routes", None)
        batch = Batch(names, *segments, routes=routes)
        return CcFuture(self._pool, batch, option, saving=saving, wait=wait, **more)

    def _look(self, names: list[bytes], routes: list[bytes] | None, option: CcKvOption) -> CcResult:
        try:
            return CcResult(leading_run(self._pool.exists(names, option, routes).ok), len(names))
        except EmsException as error:
            LOGGER.warning("exists: the pool could not be asked: %s", error)
            return CcResult(0, len(names))


def _future(given: object) -> CcFuture:
    if not isinstance(given, CcFuture):
        raise invalid(f"a CcFuture of async_save or async_load is needed, but this is of type {type(given).__name__}")
    return given


def _v1_only(what: str) -> NoReturn:
    raise invalid(
        f"{what} belongs to V1, and this process was initialised with a CcConfig; give Ems.init a CcConfig_v1 "
        "(cc_config_v1=CcConfig_v1(...))"
    )
