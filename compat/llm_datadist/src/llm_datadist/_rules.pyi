"""Typed stub of the native rules (built from ``native/``): pure functions of plain values. ``native/rules.hpp`` says what each
does and which rules there are."""

from collections.abc import Mapping, Sequence
from typing import Final, final

class RuleError(Exception):
    """A broken rule: the sentence says which value and what would be right."""

class OptionError(RuleError):
    """An option that cannot be."""

SUCCESS: Final[int]
FAILED: Final[int]
KV_CACHE_NOT_EXIST: Final[int]
PARAM_INVALID: Final[int]
NOT_YET_LINK: Final[int]
ALREADY_LINK: Final[int]
LINK_FAILED: Final[int]
UNLINK_FAILED: Final[int]
EXIST_LINK: Final[int]
FEATURE_NOT_ENABLED: Final[int]
TIMEOUT: Final[int]
LINK_BUSY: Final[int]
OUT_OF_MEMORY: Final[int]

def status_of(kind: str, call: str = "") -> int: ...
def known_kinds() -> list[str]: ...

# --- addresses

def ip_to_int(ip: str) -> int:
    """Raises RuntimeError for what is no IPv4 address."""

def int_to_ip(number: int) -> str:
    """Raises ValueError for what is no IPv4 address."""

def parse_listen(text: str) -> tuple[str, int]:
    """``"ip:port"``. Raises OptionError, and ValueError for a port that is no number."""

# --- options

ROLE: Final[str]
DEVICE_ID: Final[str]
GRAPH_MEMORY: Final[str]
CACHE_MANAGER: Final[str]
REMOTE_ACCESSIBLE: Final[str]
LOCAL_COMM_RES: Final[str]
TRANSFER_BACKEND: Final[str]
GLOBAL_RESOURCE: Final[str]
LISTEN: Final[str]
LISTEN_IP: Final[str]
LISTEN_PORT: Final[str]
SYNC_TIMEOUT: Final[str]
LINK_TOTAL_TIME: Final[str]
LINK_RETRY_COUNT: Final[str]
DEVICE_POOL: Final[str]
HOST_POOL: Final[str]
SECRET: Final[str]
TRANSPORTS: Final[str]
ATTACH: Final[str]
RENDEZVOUS_PORT: Final[str]

@final
class Pool:
    @property
    def size_bytes(self) -> int: ...
    @property
    def page_shift(self) -> int: ...

@final
class EngineOptions:
    """The options of one initialised instance, as values."""

    def __init__(self) -> None: ...
    @property
    def remote(self) -> bool: ...
    @property
    def hixl(self) -> bool: ...
    @property
    def listen(self) -> tuple[str, int] | None: ...
    @property
    def timeout_ms(self) -> int: ...
    @property
    def link_total_time_s(self) -> int: ...
    @property
    def link_retry_count(self) -> int: ...
    @property
    def local_comm_res(self) -> str: ...
    @property
    def device_pool(self) -> Pool | None: ...
    @property
    def host_pool(self) -> Pool | None: ...
    @property
    def secret(self) -> str | None: ...
    @property
    def transports(self) -> list[str] | None: ...
    @property
    def attach(self) -> str: ...
    @property
    def rendezvous_port(self) -> int: ...

def with_environment(options: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]: ...
def completed(options: Mapping[str, str], role: str) -> dict[str, str]:
    """Raises OptionError, and ValueError for a port that is no number."""

def is_cache_manager_mode(options: Mapping[str, str]) -> bool: ...
def parse_options(options: Mapping[str, str]) -> EngineOptions:
    """Raises OptionError."""

# --- rank tables

@final
class Member:
    @property
    def cluster_id(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def host(self) -> str: ...

def members_of(rank_table: str, ranks: Sequence[tuple[int, int]]) -> list[Member]:
    """Raises RuleError."""

# --- layers, shapes and sizes; all raise RuleError

def layer_tensors(layers: Sequence[int], tensors_per_layer: int) -> list[int]: ...
def unit_geometry(num_tensors: int, shape: Sequence[int], element_bytes: int) -> tuple[int, int]: ...
def pull_layers(
    source: range | None, destination: range | None, num_tensors: int, tensors_per_layer: int
) -> tuple[range | None, range | None]: ...
def push_layers(
    source: range | None, destination: range | None, num_tensors: int, tensors_per_layer: int
) -> tuple[range, range]: ...
def copied_bytes(offset: int, size: int, source_row_bytes: int, destination_row_bytes: int) -> int: ...
def check_blocks_of_row(tensor_bytes: int, block_bytes: int, listed: int) -> None: ...
