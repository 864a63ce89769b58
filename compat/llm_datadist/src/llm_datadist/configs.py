"""``LLMConfig``: checked properties, and the option strings that they make.

Knows the name of every option and what may be assigned, not what the engine does with it (the native rules do).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from llm_datadist._rules import ip_to_int
from llm_datadist.status import raise_if_false
from llm_datadist.utils.utils import check_dict, check_int32, check_isinstance, check_object, check_uint32

_MAX_INT32 = (1 << 31) - 1
_MAX_UINT32 = (1 << 32) - 1


class _Option:
    """A property that becomes one option string once it was assigned.

    ``check(name, value)`` raises for what may not be assigned. ``text(value)`` makes the option's string, or None for
    "not emitted". ``default`` is what reading gives before the first assignment.
    """

    def __init__(
        self,
        key: str,
        check: Callable[[str, Any], object],
        text: Callable[[Any], str | None],
        default: Any,
        doc: str,
    ) -> None:
        self.key = key
        self.check = check
        self.text = text
        self.default = default
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, config: LlmConfig | None, owner: type) -> Any:
        if config is None:
            return self
        if isinstance(self.default, dict):  # callers write into what they have read
            return config._values.setdefault(self.name, dict(self.default))
        return config._values.get(self.name, self.default)

    def __set__(self, config: LlmConfig, value: Any) -> None:
        self.check(self.name, value)
        config._values[self.name] = value


def _is_str(name: str, value: Any) -> None:
    check_isinstance(name, value, str)


def _is_bool(name: str, value: Any) -> None:
    check_isinstance(name, value, bool)


def _is_device(name: str, value: Any) -> None:
    check_isinstance(name, value, [int, list, tuple], allow_none=False)
    for device in value if isinstance(value, (list, tuple)) else (value,):
        check_isinstance(name, device, int, allow_none=False)
        raise_if_false(device >= 0, "{} must not be negative, but got {}", name, device)
        check_int32(name, device)


def _is_timeout(name: str, value: Any) -> None:
    check_isinstance(name, value, [int, str], allow_none=False)
    if isinstance(value, str):
        raise_if_false(
            value.isascii() and value.isdigit(), "{} must be a number of milliseconds, but got {!r}", name, value
        )
    raise_if_false(int(value) > 0, "{} must be over 0, but got {}", name, value)
    check_int32(name, int(value))


def _is_between(low: int, high: int) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        check_isinstance(name, value, int, allow_none=False)
        raise_if_false(low <= value <= high, "{} must be from {} to {}, but got {}", name, low, high, value)

    return check


def _is_share(name: str, value: Any) -> None:
    check_isinstance(name, value, float, allow_none=False)
    raise_if_false(0.0 <= value <= 1.0, "{} must be from 0.0 to 1.0, but got {}", name, value)


def _is_texts(name: str, value: Any) -> None:
    check_object(name, value, dict)
    check_dict(name, value, str, str)


def _is_json(name: str, value: Any) -> None:
    check_isinstance(name, value, str, allow_none=False)
    json.loads(value)


def _text_if_set(value: Any) -> str | None:
    return None if value is None else str(int(value) if isinstance(value, bool) else value)


def _text_if_any(value: Any) -> str | None:
    return str(value) if value else None


def _one_or_zero(value: Any) -> str | None:
    return None if value is None else str(int(value))


def _one_or_nothing(value: Any) -> str | None:
    return "1" if value else None


def _device_text(value: Any) -> str:
    return ";".join(str(int(device)) for device in value) if isinstance(value, (list, tuple)) else str(int(value))


def _cluster_text(value: str) -> str | None:
    if not value:
        return None
    cluster = json.loads(value)
    for entry in cluster.get("listen_ip_info", ()):
        if isinstance(entry.get("ip"), str):
            entry["ip"] = ip_to_int(entry["ip"])
    return json.dumps(cluster)


class LlmConfig:
    """Options of ``LLMDataDist.init``. Nothing is emitted for a property that was never assigned, but for
    ``mem_utilization``; what was emitted once stays in the dict."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._options: dict[str, str] = {}

    device_id = _Option("ge.exec.deviceId", _is_device, _device_text, None, "One device number, or several.")
    listen_ip_info = _Option("llm.listenIpInfo", _is_str, _text_if_any, "", "``ip:port`` to listen at.")
    sync_kv_timeout = _Option(
        "llm.SyncKvCacheWaitTime",
        _is_timeout,
        _text_if_set,
        None,
        "Milliseconds for one transfer; unset: 1000.",
    )
    link_total_time = _Option(
        "llm.LinkTotalTime", _is_between(0, _MAX_UINT32), _text_if_set, 0, "Seconds for one ``link()``; 0: 120 seconds."
    )
    link_retry_count = _Option("llm.LinkRetryCount", _is_between(1, 100), _text_if_set, 1, "Accepted, without effect.")
    rdma_traffic_class = _Option("llm.RdmaTrafficClass", check_uint32, _text_if_set, None, "Accepted, without effect.")
    rdma_service_level = _Option("llm.RdmaServiceLevel", check_uint32, _text_if_set, None, "Accepted, without effect.")
    buf_pool_cfg = _Option("llm.BufPoolCfg", _is_str, _text_if_any, "", "Accepted, without effect.")
    mem_pool_cfg = _Option("llm.MemPoolConfig", _is_str, _text_if_any, "", "JSON: the pool for DEVICE caches.")
    host_mem_pool_cfg = _Option("llm.HostMemPoolConfig", _is_str, _text_if_any, "", "JSON: the pool for HOST caches.")
    enable_cache_manager = _Option(
        "llm.EnableCacheManager", _is_bool, _one_or_zero, False, "The mode that this package serves."
    )
    enable_remote_cache_accessible = _Option(
        "llm.EnableRemoteCacheAccessible", _is_bool, _one_or_zero, False, "Remote caches are named by id."
    )
    local_comm_res = _Option(
        "llm.LocalCommRes",
        _is_str,
        _text_if_set,
        "",
        "JSON, or empty: turns both of the above on.",
    )
    transfer_backend = _Option("llm.TransferBackend", _is_str, _text_if_set, "", "``hixl``.")
    global_resource_config = _Option("llm.GlobalResourceConfig", _is_str, _text_if_set, "", "JSON for ``hixl``.")
    deploy_res_path = _Option("llm.deployResPath", _is_str, _text_if_any, "", "Older mode only.")
    enable_switch_role = _Option("llm.EnableSwitchRole", _is_bool, _one_or_nothing, False, "Older mode only.")
    mem_utilization = _Option("llm.MemoryUtilization", _is_share, str, 0.95, "Older mode only.")
    cluster_info = _Option("llm.ClusterInfo", _is_json, _cluster_text, "", "JSON; older mode only.")
    output_max_size = _Option(
        "llm.OutputMaxSize",
        lambda name, value: check_isinstance(name, value, int),
        _text_if_set,
        None,
        "Older mode only.",
    )
    ge_options = _Option("", _is_texts, lambda value: None, {}, "More options, overwritten by the properties.")

    @property
    def options(self) -> dict[str, str]:
        """The dict that ``generate_options`` fills: always the same object."""
        return self._options

    def generate_options(self) -> dict[str, str]:
        self._options.update(self.ge_options)
        for option in _OPTIONS:
            assigned = option.name in self._values or option is LlmConfig.mem_utilization
            text = option.text(option.__get__(self, LlmConfig)) if assigned else None
            if text is None:
                continue
            self._options[option.key] = text
            if option is LlmConfig.device_id:
                devices = self.device_id
                first = devices[0] if isinstance(devices, (list, tuple)) else devices
                self._options["ge.session_device_id"] = str(int(first))
        return self._options

    def gen_options(self) -> dict[str, str]:
        return self.generate_options()


_OPTIONS = [option for option in vars(LlmConfig).values() if isinstance(option, _Option) and option.key]
LLMConfig = LlmConfig
