"""``LLMDataDist``: one instance's life, its links, and the way to its cache manager."""

from __future__ import annotations

import atexit
import importlib
import os
import threading
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import kvferry
from llm_datadist import _rules
from llm_datadist._rules import EngineOptions
from llm_datadist.arguments import rules_as_exceptions
from llm_datadist.cluster import LLMClusterInfo, ip_infos
from llm_datadist.engine import Cluster, Engine, translated
from llm_datadist.enums import LLMRole, RegisterMemStatus
from llm_datadist.status import LLMException, LLMStatusCode, code_2_status, failure, raise_if_false
from llm_datadist.utils.utils import (
    check_dict,
    check_inner,
    check_int32,
    check_isinstance,
    check_object,
    check_text,
    check_uint32,
    check_uint64,
)
from llm_datadist.v2.cache_manager import CacheManager
from llm_datadist.v2.llm_utils import parse_listen_ip_info

EngineConfig = EngineOptions
_MAX_RANKS = 4
_MAX_NAME = 127
_OUR_ENVIRONMENT = "KVFERRY_"


class LLMDataDist:
    """One engine of a process; only one can be initialised at a time. In a forked child none is."""

    llm_engine_instance: ClassVar[LLMDataDist | None] = None
    _life: ClassVar[threading.RLock] = threading.RLock()  # init and finalize exclude each other

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        check_isinstance("role", role, LLMRole)
        self._role = role
        self._cluster_id = check_uint64("cluster_id", cluster_id)
        self._engine: Engine | None = None
        self._cache_manager: CacheManager | None = None

    # -- life

    def init(self, options: dict[str, str]) -> None:
        """Starts the engine; does nothing if this object is initialised. Nothing has changed if the call raises."""
        with LLMDataDist._life:
            if self._engine is not None:
                return
            raise_if_false(
                LLMDataDist.llm_engine_instance is None,
                "another LLMDataDist is initialised in this process: finalize it first",
                status_code=LLMStatusCode.LLM_FAILED,
            )
            check_object("options", options, dict)
            values = self._parsed(options)
            try:
                engine = Engine(self._cluster_id, values)
            except kvferry.KvferryError as error:
                raise translated(error, "init", "init") from error
            self._engine = engine
            self._cache_manager = CacheManager(self, values, engine)
            LLMDataDist.llm_engine_instance = self

    def _parsed(self, options: dict[str, str]) -> EngineOptions:
        check_dict("options", options, str, str)
        ours = {name: text for name, text in os.environ.items() if name.startswith(_OUR_ENVIRONMENT)}
        for name, text in (*ours.items(), *options.items()):
            check_text("the name of an option", name)
            check_text(name, text)
        try:
            completed = _rules.completed(_rules.with_environment(options, ours), self._role_to_str(self._role))
            if not _rules.is_cache_manager_mode(completed):
                importlib.import_module("llm_datadist_v1")  # the older mode: ModuleNotFoundError
                raise failure(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "init", "the older mode is not served here")
            return _rules.parse_options(completed)
        except _rules.OptionError as error:
            raise failure(LLMStatusCode.LLM_PARAM_INVALID, "init", error) from None

    def finalize(self) -> None:
        """Ends links, caches and pools; does nothing if not initialised. ``init`` may follow."""
        with LLMDataDist._life:
            engine, self._engine = self._engine, None
            if engine is None:
                return
            self._cache_manager = None
            if LLMDataDist.llm_engine_instance is self:
                LLMDataDist.llm_engine_instance = None
            engine.close()

    def _initialised(self) -> Engine:
        engine = self._engine
        if engine is None:
            raise RuntimeError("llm datadist is not initialized")
        return engine

    # -- what it has

    @property
    def cluster_id(self) -> int:
        return self._cluster_id

    @property
    def cache_manager(self) -> CacheManager:
        self._initialised()
        manager = self._cache_manager
        assert manager is not None
        return manager

    @property
    def kv_cache_manager(self) -> Any:
        self._initialised()
        raise LLMException(
            "kv_cache_manager belongs to the older mode: use cache_manager", status_code=LLMStatusCode.LLM_PARAM_INVALID
        )

    # -- links by address

    def link_clusters(
        self, clusters: list[LLMClusterInfo] | tuple[LLMClusterInfo, ...], timeout: int = 3000
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Links to each; never raises for a link that fails. The first code is that of the last one that failed."""
        engine = self._initialised()
        timeout = _checked_timeout(timeout)
        listed = _plain(clusters, "taken" if engine.options.local_comm_res else "required")
        return _summed_up(engine.link_clusters(listed, timeout))

    def unlink_clusters(
        self, clusters: list[LLMClusterInfo] | tuple[LLMClusterInfo, ...], timeout: int = 3000, force: bool = False
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Ends the links to each, with the peer's knowledge unless ``force``; transfers in flight are waited for."""
        engine = self._initialised()
        timeout = _checked_timeout(timeout)
        check_isinstance("force", force, bool, allow_none=False)
        return _summed_up(engine.unlink_clusters(_plain(clusters, "ignored"), timeout, force))

    def check_link_status(self, remote_cluster_id: int) -> None:
        self._initialised()
        check_uint64("remote_cluster_id", remote_cluster_id)
        raise LLMException("check_link_status belongs to the older mode", status_code=LLMStatusCode.LLM_PARAM_INVALID)

    # -- links by rank table

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Starts linking to the other clusters of a rank table and returns a number for it at once.

        Every member calls it with the same name, ranks and table, in any order; ``query_register_mem_status`` says how far
        it is, ``FAILED`` after ``link_total_time`` at the latest. The table names no port: the members meet at one that all
        have configured alike, ``kvferry.rendezvous_port``, at the server of the lowest rank.
        """
        engine = self._initialised()
        check_text("comm_name", comm_name)
        raise_if_false(1 <= len(comm_name) <= _MAX_NAME, "comm_name must have 1 to {} characters", _MAX_NAME)
        check_dict("cluster_rank_info", cluster_rank_info, int, int)
        raise_if_false(
            1 < len(cluster_rank_info) <= _MAX_RANKS, "cluster_rank_info must have 2 to {} entries", _MAX_RANKS
        )
        listed = [
            (check_uint64("cluster_rank_info's cluster id", cluster_id), check_uint32("cluster_rank_info's rank", rank))
            for cluster_id, rank in cluster_rank_info.items()
        ]
        ranks = [rank for _, rank in listed]
        raise_if_false(ranks == sorted(ranks), "cluster_rank_info's ranks must ascend, but got {}", ranks)
        check_text("rank_table", rank_table)
        _needs_tables("link", engine)
        raise_if_false(
            self._cluster_id in cluster_rank_info, "cluster_rank_info must have this cluster, {}", self._cluster_id
        )
        with rules_as_exceptions():
            members = _rules.members_of(rank_table, listed)
        comm_id = engine.communicators.add(comm_name, tuple(members))
        self.cache_manager.set_is_call_linked()
        return comm_id

    def unlink(self, comm_id: int) -> None:
        """Ends what ``link`` has made, or goes on making; a link that another call of ``link`` needs too stays."""
        engine = self._initialised()
        check_uint64("comm_id", comm_id)
        _needs_tables("unlink", engine)
        engine.communicators.remove(comm_id)

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """``OK`` once all members are linked, ``FAILED`` when time was up before; either is for good."""
        engine = self._initialised()
        check_uint64("comm_id", comm_id)
        _needs_tables("query_register_mem_status", engine)
        return engine.communicators.status(comm_id)

    # -- role

    def switch_role(self, role: LLMRole, switch_options: dict[str, str] | None = None) -> None:
        """Role is a label; the listener follows ``llm.listenIpInfo`` of the options and closes without it."""
        engine = self._initialised()
        check_isinstance("role", role, LLMRole)
        check_isinstance("switch_options", switch_options, dict)
        self._role_to_str(role)
        listen = None
        if switch_options and _rules.LISTEN in switch_options:
            listen = parse_listen_ip_info(switch_options[_rules.LISTEN])
        with LLMDataDist._life:
            engine.switch_role(listen)
            self._role = role

    @staticmethod
    def _role_to_str(role: LLMRole) -> str:
        if role is None:
            raise KeyError("role only support LLMRole, but got NoneType")
        return _rules.role_name(role)


def _needs_tables(function: str, engine: Engine) -> None:
    if engine.options.hixl:
        raise failure(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, function, "the hixl backend links by address alone")


def _checked_timeout(timeout: int) -> int:
    timeout = check_int32("timeout", timeout)
    with rules_as_exceptions():
        _rules.check_timeout(timeout)
    return timeout


def _plain(clusters: Sequence[LLMClusterInfo], local: Literal["required", "taken", "ignored"]) -> list[Cluster]:
    check_isinstance("clusters", clusters, [list, tuple], allow_none=False)
    check_inner("clusters", clusters, LLMClusterInfo)
    result = []
    for cluster in clusters:
        raise_if_false(cluster.local_ip_info_list or local != "required", "local_ip_info_list is empty")
        check_uint64("remote_cluster_id", cluster.remote_cluster_id)
        assert cluster.remote_cluster_id is not None
        from_here = [] if local == "ignored" else cluster.local_ip_info_list
        result.append(
            Cluster(
                cluster.remote_cluster_id,
                ip_infos("local_ip_info_list", from_here),
                ip_infos("remote_ip_info_list", cluster.remote_ip_info_list),
            )
        )
    return result


def _summed_up(codes: list[LLMStatusCode]) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
    return code_2_status(_rules.overall([int(code) for code in codes])), codes


def _shutdown_handler() -> None:
    """Finalizes the live instance; run at exit."""
    instance = LLMDataDist.llm_engine_instance
    if instance is None:
        return
    try:
        instance.finalize()
    except LLMException:
        LLMDataDist.llm_engine_instance = None


def _in_a_forked_child() -> None:
    """Nothing is initialised here. What the parent has stays its own; a manager that was kept answers as after ``finalize``."""
    LLMDataDist._life = threading.RLock()  # another thread may have held it
    instance, LLMDataDist.llm_engine_instance = LLMDataDist.llm_engine_instance, None
    if instance is None or instance._engine is None:
        return
    instance._engine.leave_to_the_parent()
    instance._engine = instance._cache_manager = None


atexit.register(_shutdown_handler)
os.register_at_fork(after_in_child=_in_a_forked_child)
