"""What the option strings given to ``init`` mean.

Two steps. ``completed`` adds what one option implies for another; ``parse`` turns the completed strings into values.
Both raise ``OptionError`` with a sentence that names the option.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from llm_datadist.rules.addresses import split_listen

ROLE = "llm.Role"
DEVICE_ID = "ge.exec.deviceId"
GRAPH_MEMORY = "ge.flowGraphMemMaxSize"
CACHE_MANAGER = "llm.EnableCacheManager"
REMOTE_ACCESSIBLE = "llm.EnableRemoteCacheAccessible"
LOCAL_COMM_RES = "llm.LocalCommRes"
TRANSFER_BACKEND = "llm.TransferBackend"
GLOBAL_RESOURCE = "llm.GlobalResourceConfig"
LISTEN = "llm.listenIpInfo"
LISTEN_IP = "llm.ListenIp"
LISTEN_PORT = "llm.ListenPort"
SYNC_TIMEOUT = "llm.SyncKvCacheWaitTime"
LINK_TOTAL_TIME = "llm.LinkTotalTime"
LINK_RETRY_COUNT = "llm.LinkRetryCount"
DEVICE_POOL = "llm.MemPoolConfig"
HOST_POOL = "llm.HostMemPoolConfig"

# Our own, unknown to the vendor: reach the dict by LLMConfig.ge_options, or the environment (`with_environment`).
SECRET = "kvferry.secret"
TRANSPORTS = "kvferry.transports"  # "map,cma,socket" or fewer
ATTACH = "kvferry.attach"  # "same" or "any"
RENDEZVOUS_PORT = "kvferry.rendezvous_port"  # where members of rank tables meet
OWN = (SECRET, TRANSPORTS, ATTACH, RENDEZVOUS_PORT)

DEFAULT_TIMEOUT_MS = 1000
DEFAULT_LINK_TOTAL_TIME_S = 30
DEFAULT_PAGE_SHIFT = 16
DEFAULT_RENDEZVOUS_PORT = 18517


class OptionError(Exception):
    """An option that cannot be: the message says which and why."""


@dataclass(frozen=True, slots=True)
class Pool:
    size_bytes: int
    page_shift: int


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of one initialised instance, as values."""

    remote: bool = False  # remote caches are addressed by id, without the owner's key table
    hixl: bool = False
    listen: tuple[str, int] | None = None
    timeout_ms: int = DEFAULT_TIMEOUT_MS
    link_total_time_s: int = DEFAULT_LINK_TOTAL_TIME_S
    link_retry_count: int = 1
    local_comm_res: str = ""
    device_pool: Pool | None = None
    host_pool: Pool | None = None
    secret: str | None = None
    transports: tuple[str, ...] | None = None
    attach: str = "same"
    rendezvous_port: int = DEFAULT_RENDEZVOUS_PORT


def completed(options: Mapping[str, str], role: str) -> dict[str, str]:
    """A copy with what follows from the options' presence. ``ValueError`` for a port that is no number."""
    _check_graph_memory(options.get(GRAPH_MEMORY))
    result = dict(options)
    result[ROLE] = role
    if LOCAL_COMM_RES in result:
        result.setdefault(CACHE_MANAGER, "1")
        result.setdefault(REMOTE_ACCESSIBLE, "1")
        if result[CACHE_MANAGER] == "0":
            raise OptionError(f"local_comm_res needs the cache manager: {CACHE_MANAGER} is 0")
    if TRANSFER_BACKEND in result:
        if not is_cache_manager_mode(result):
            raise OptionError(f"transfer_backend needs {CACHE_MANAGER}=1")
        if result.setdefault(REMOTE_ACCESSIBLE, "1") == "0":
            raise OptionError(f"transfer_backend needs {REMOTE_ACCESSIBLE}=1")
        if LISTEN not in result:
            raise OptionError(f"transfer_backend needs {LISTEN}")
    if is_cache_manager_mode(result) and LISTEN in result:
        result.update(listen_options(result[LISTEN]))
    return result


def with_environment(options: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """A copy with those of our own options that only the environment has: ``kvferry.secret`` as ``KVFERRY_SECRET``."""
    ours = {option: environment.get(option.upper().replace(".", "_")) for option in OWN}
    return {option: text for option, text in ours.items() if text} | dict(options.items())


def is_cache_manager_mode(options: Mapping[str, str]) -> bool:
    return options.get(CACHE_MANAGER) == "1"


def listen_options(text: str) -> dict[str, str]:
    """``"ip:port"`` as the two options made of it. ``ValueError`` for a port that is no number."""
    try:
        ip, port = split_listen(text)
    except ValueError as error:
        raise OptionError(f"{LISTEN}: {error}") from None
    return {LISTEN_IP: ip, LISTEN_PORT: str(int(port))}


def parse(options: Mapping[str, str]) -> EngineOptions:
    """Values of the completed options."""
    device = options.get(DEVICE_ID, "0")
    if not device.isdigit():
        raise OptionError(f"{DEVICE_ID} must name one device here, not {device!r}")
    backend = options.get(TRANSFER_BACKEND)
    if backend not in (None, "hixl"):
        raise OptionError(f"{TRANSFER_BACKEND} can only be 'hixl', not {backend!r}")
    if backend is not None and options.get(GLOBAL_RESOURCE):
        _json_object(GLOBAL_RESOURCE, options[GLOBAL_RESOURCE])
    attach = options.get(ATTACH, "same")
    if attach not in ("same", "any"):
        raise OptionError(f"{ATTACH} can be 'same' or 'any', not {attach!r}")
    transports = options.get(TRANSPORTS)
    total_time_s = _number(options, LINK_TOTAL_TIME, 0, 0, (1 << 32) - 1)
    return EngineOptions(
        remote=options.get(REMOTE_ACCESSIBLE) == "1",
        hixl=backend is not None,
        listen=(options[LISTEN_IP], int(options[LISTEN_PORT])) if LISTEN_IP in options else None,
        timeout_ms=_number(options, SYNC_TIMEOUT, DEFAULT_TIMEOUT_MS, 1, (1 << 31) - 1),
        link_total_time_s=total_time_s or DEFAULT_LINK_TOTAL_TIME_S,
        link_retry_count=_number(options, LINK_RETRY_COUNT, 1, 1, 100),
        local_comm_res=options.get(LOCAL_COMM_RES, ""),
        device_pool=_pool(DEVICE_POOL, options.get(DEVICE_POOL)),
        host_pool=_pool(HOST_POOL, options.get(HOST_POOL)),
        secret=options.get(SECRET),
        transports=tuple(name.strip() for name in transports.split(",")) if transports else None,
        attach=attach,
        rendezvous_port=_number(options, RENDEZVOUS_PORT, DEFAULT_RENDEZVOUS_PORT, 1, 65535),
    )


def _check_graph_memory(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, str):
        raise TypeError(f"{GRAPH_MEMORY} only support str, but got {type(value).__name__}")
    if not value.isdigit():
        raise OptionError(f"{GRAPH_MEMORY} must be one number of bytes, not {value!r}")


def _number(options: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = options.get(name)
    if text is None:
        return default
    if not text.isdigit() or not low <= int(text) <= high:
        raise OptionError(f"{name} must be a number from {low} to {high}, not {text!r}")
    return int(text)


def _pool(name: str, text: str | None) -> Pool | None:
    if not text:
        return None
    fields = _json_object(name, text)
    size, shift = fields.get("memory_size"), fields.get("page_shift", DEFAULT_PAGE_SHIFT)
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise OptionError(f"{name}: memory_size must be a positive number of bytes, not {size!r}")
    if not isinstance(shift, int) or isinstance(shift, bool) or not 10 <= shift <= 30:
        raise OptionError(f"{name}: page_shift must be from 10 to 30, not {shift!r}")
    return Pool(size, shift)


def _json_object(name: str, text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise OptionError(f"{name} must be a JSON object, not {text!r}")
    return value
