"""Typed stub of the native rules (built from ``native/``): pure functions of plain values. ``native/rules.hpp`` says what each
does and which rules there are."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final, final

import kvferry

class RuleError(Exception):
    """A broken rule: the sentence says which value and what would be right."""

class OptionError(RuleError):
    """An option that cannot be."""

class TooLittleLeft(Exception):
    """A pool has too little left."""

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
def overall(statuses: Sequence[int]) -> int: ...

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

def role_name(role: int) -> str:
    """Raises RuleError."""

# --- instances

def pool_of(options: EngineOptions) -> Pool | None: ...
def pools_too_large(options: EngineOptions, meminfo: str) -> str | None: ...

@final
class Share:
    """What one placement may take of the node's pool, and has taken. Not for several threads at once."""

    def __init__(self, pool: Pool) -> None: ...
    def wanted(self, tensors: int, tensor_bytes: int) -> int:
        """Raises TooLittleLeft."""

    def take(self, cache_id: int, size_bytes: int) -> None: ...
    def give_back(self, cache_id: int) -> bool: ...

class ListenerMove(Enum):
    STAYS = 0
    MOVES = 1
    REFUSED_LINKED = 2
    REFUSED_HIXL = 3

def listener_move(
    has_links: bool, hixl: bool, before: tuple[str, int] | None, wanted: tuple[str, int] | None
) -> ListenerMove: ...

class IdMeans(Enum):
    CACHE = 0
    BLOCKS_OF_MODEL_0 = 1
    REQUEST_0 = 2

def meaning_of_id(cache_id: int, remote: bool, pushing: bool) -> IdMeans: ...

# --- links

_Links = list[kvferry.Link]

@final
class LinkBook:
    """Which of a node's links belongs to which cluster; ``native/links.hpp``. Methods are given the node's links, in order,
    and answer (status, sentence, ...). Not for several threads at once."""

    def __init__(self, cluster_id: int, options: EngineOptions, needs_local_address: bool) -> None: ...
    @property
    def program(self) -> str: ...
    def listens(self, listen: tuple[str, int] | None) -> None: ...
    def to(self, cluster_id: int, links: _Links) -> tuple[int, str, kvferry.Link | None]: ...
    def alive(self, cluster_id: int, links: _Links) -> kvferry.Link | None: ...
    def is_of_the_other_mode(self, link: kvferry.Link) -> bool: ...
    def may_dial(
        self, cluster_id: int, local_addresses: int, remote_addresses: int, links: _Links
    ) -> tuple[int, str]: ...
    def dialled(self, link: kvferry.Link, host: str, port: int) -> tuple[int, str]: ...
    def adopt(self, cluster_id: int, links: _Links) -> bool: ...
    def keep(self, cluster_id: int, link: kvferry.Link) -> None: ...
    def has_opened(self, cluster_id: int) -> bool: ...
    def parting(
        self, cluster_id: int, remote_addresses: int, force: bool, links: _Links
    ) -> tuple[int, str, _Links, bool]: ...
    def parted(self, cluster_id: int) -> None: ...
    def forget(self, cluster_id: int) -> None: ...
    def clear(self) -> None: ...

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
def element_bits(data_type: int) -> int | None: ...
def unit_geometry(num_tensors: int, shape: Sequence[int], data_type: int) -> tuple[int, int]: ...
def check_addresses(given: int, num_tensors: int, one_is_0: bool) -> None: ...
def check_size(size: int) -> None: ...
def check_row(name: str, row: int, count: int) -> None: ...
def check_tensors_per_layer(tensors_per_layer: int) -> None: ...
def check_timeout(timeout_ms: int) -> None: ...
def check_paired(sources: int, destinations: int) -> None: ...
def pull_layers(
    source: range | None, destination: range | None, num_tensors: int, tensors_per_layer: int
) -> tuple[range | None, range | None]: ...
def push_layers(
    source: range | None, destination: range | None, num_tensors: int, tensors_per_layer: int
) -> tuple[range, range]: ...
def copied_bytes(offset: int, size: int, source_row_bytes: int, destination_row_bytes: int) -> int: ...
def check_blocks_of_row(tensor_bytes: int, block_bytes: int, listed: int) -> None: ...
