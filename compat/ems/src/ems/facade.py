"""``Ems``: the one context caching object of a process, and whether the pool works."""

from __future__ import annotations

import os
import threading

from ems import _pool
from ems._pool import Pool
from ems.caching import ContextCaching
from ems.caching_v1 import ContextCache_v1
from ems.cc_v1.cc_config import CcConfig_v1
from ems.common.exception import EmsErrorCode, EmsException
from ems.config import Settings
from ems.log import LOGGER


class _Process:
    """What ``init`` made. A forked child has one of its own, so that nothing of its parent's is used there, not even a
    lock that some other thread held when it forked."""

    def __init__(self) -> None:
        self.initialising = threading.Lock()
        self.settings: Settings | None = None  # of the last init, successful or not
        self.pool: Pool | None = None
        self.caching: ContextCaching | None = None
        self.is_done = False


_processes: dict[int, _Process] = {}


def _here() -> _Process:
    return _processes.setdefault(os.getpid(), _Process())


class Ems:
    """Static calls, from any thread. The pool is closed when the process ends."""

    @staticmethod
    def init(config: object) -> None:
        """Join the pool. Once that has succeeded, another call changes nothing, unless the first one configured no caching.

        :raises EmsException: ``EMS_INVALID_ARGUMENT``: the configuration; ``EMS_RECOVERD_ERROR``: the pool does not answer.
            After either the call can be made again, from any thread.
        """
        settings = Settings.checked(config)
        here = _here()
        with here.initialising:
            if here.is_done and (here.caching is not None or settings.cc is None):
                if settings != here.settings:
                    LOGGER.warning("Ems.init was called again with another configuration; the first one stays")
                return
            here.settings = settings
            pool = _joined(settings)
            if isinstance(settings.cc, CcConfig_v1):
                here.caching = ContextCache_v1(pool, settings)
            elif settings.cc is not None:
                here.caching = ContextCaching(pool, settings)
            before, here.pool, here.is_done = here.pool, pool, True
            if before is not None:
                before.close()

    @staticmethod
    def get_cc() -> ContextCaching | None:
        """The context caching object; None before a successful ``init``, or if its configuration has none."""
        return _here().caching

    @staticmethod
    def check_health() -> bool:
        """Whether the pool answers, within a second or, before ``init`` and after one that failed, two."""
        here = _here()
        try:
            if here.pool is not None:
                return here.pool.is_reachable()
            settings = here.settings
            pool = _pool.connect(*_credentials(settings), timeout_ms=_pool.HEALTH_TIMEOUT_MS)
            try:
                return pool.is_reachable()
            finally:
                pool.close()
        except Exception as error:  # noqa: BLE001 - callers poll this from a bare thread
            LOGGER.info("the pool is not healthy: %s", error)
            return False


def _credentials(settings: Settings | None) -> tuple[str, str | None]:
    return (settings.access_id, settings.access_key) if settings else ("", None)


def _joined(settings: Settings) -> Pool:
    try:
        pool = _pool.connect(*_credentials(settings))
        reachable = False
        try:
            reachable = pool.is_reachable()
        finally:
            if not reachable:
                pool.close()
        if reachable:
            return pool
    except EmsException as error:
        if error.status_code() is EmsErrorCode.EMS_INVALID_ARGUMENT:
            raise
        raise EmsException(
            EmsErrorCode.EMS_RECOVERD_ERROR, f"the pool cannot be joined yet: {error.message()}"
        ) from error
    raise EmsException(
        EmsErrorCode.EMS_RECOVERD_ERROR,
        "no node of the pool answers yet; call Ems.init again when Ems.check_health() is True (KVFERRY_POOL says where it is)",
    )
