"""Typed stub of the native core (built from ``binding/``).

The core knows caches, rows, blocks, keys, windows, links and bytes. It does not know tensors, arrays, dtypes or
any engine. ``kvferry`` is the only caller; every name here may change between releases.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

MAP: Final[int]  # 1: same host, source allocated by kvferry, its sealed segment mapped read-only
CMA: Final[int]  # 2: same host, caller-owned source, process_vm_readv
SOCKET: Final[int]  # 4: lanes over TCP or Unix sockets

ROWS: Final[int]  # 0: dim 0 of each tensor is a batch row
BLOCKS: Final[int]  # 1: dim 0 is a KV block
MIXED: Final[int]  # 2: usable both ways

READ: Final[int]  # 1: window access
WRITE: Final[int]  # 2

WIRE_VERSION: Final[int]

def set_error_classes(by_kind: Mapping[str, type[Exception]]) -> None:
    """What the core raises for each kind of error: an instance made without running its ``__init__`` or any other Python,
    with ``args`` (the sentence,) and the attributes peer, cache, operation, bytes_touched, destination_settled. Kinds:
    invalid_argument not_found not_linked already_linked link_failed refused peer_lost deadline cancelled closed busy
    out_of_memory address_in_use unsupported exists internal."""

def enable_test_kind() -> None:
    """Make memory kind ``test:0`` known to this process (its pages are PROT_NONE except inside its copier)."""

def test_kind_allocate(size_bytes: int) -> int:
    """Address of new ``test:0`` memory; its bytes are reached only through the two calls below and the copier."""

def test_kind_read(address: int, size_bytes: int) -> bytes: ...
def test_kind_write(address: int, data: bytes) -> None: ...
def host_report() -> dict[str, Any]:
    """What `kvferry doctor` prints: kernel, boot_id, cores, yama_scope (None: no Yama), memfd_seals (bool), and for map, cma
    and socket "ok", or why not and what to change."""

def memory_room(with_swap: bool) -> tuple[int, str]:
    """How many bytes more this process may use, and by whom that is limited: "this machine", "the memory cgroup …"."""

def checksums(
    addresses: npt.NDArray[np.uint64],
    sizes: npt.NDArray[np.uint64],
    counts: npt.NDArray[np.int64],
    seeds: npt.NDArray[np.uint64],
    may_shrink: bool = False,
) -> bytes:
    """A u64 for each value, never 0: value i is the next ``counts[i]`` segments, one behind the other. Nothing is looked up:
    only for memory of which ``check_memory`` has said in this call that it is there. ``may_shrink``: as it said; what is not there
    any more is InvalidArgument then."""

@final
class ValueSums:
    """Checksums, as :func:`checksums` has them, of values that follow each other in the bytes of one transfer at a
    time."""

    @staticmethod
    def of(sizes: npt.NDArray[np.uint64], seeds: npt.NDArray[np.uint64]) -> ValueSums:
        """Of each value its bytes, at least 1, and its seed."""
    def taken(self) -> bytes | None:
        """A u64 for each value, when whoever has sent or copied every byte has taken them; else None."""

@final
class Target:
    """What a pull or push names on the far side."""

    @staticmethod
    def by_id(cache_id: int) -> Target: ...
    @staticmethod
    def by_name(name: str) -> Target: ...
    @staticmethod
    def by_request(request_id: int, model_id: int) -> Target: ...
    @staticmethod
    def by_prefix(prefix_id: int, model_id: int) -> Target: ...
    @staticmethod
    def by_blocks_key(model_id: int) -> Target: ...
    @staticmethod
    def by_window(name: bytes) -> Target: ...
    @staticmethod
    def by_addresses(addresses: Sequence[int], unit_bytes: int = 0) -> Target:
        """Push only: each destination span is named by a raw address that must lie inside one tensor of one cache.
        ``unit_bytes``: of the far side's blocks, 0: as large as the source's."""

@final
class Moves:
    """Which units go where, the same for every tensor moved; immutable, reusable, any length.

    ``source_tensors`` / ``destination_tensors`` are (first, count); (0, -1) means all of that side's tensors.
    Both sides must come to the same count, else invalid_argument before the first byte.
    """

    @staticmethod
    def whole(*, source_tensors: tuple[int, int] = (0, -1), destination_tensors: tuple[int, int] = (0, -1)) -> Moves:
        """Every unit i of the source to unit i of the destination: counts and unit sizes must be equal."""
    @staticmethod
    def row(
        source_row: int,
        destination_row: int,
        size_bytes: int = -1,
        *,
        source_tensors: tuple[int, int] = (0, -1),
        destination_tensors: tuple[int, int] = (0, -1),
    ) -> Moves:
        """One batch row. -1 moves the mover's own row size (pull: destination's, push: source's); ``source_row`` -1 in
        a pull by request or prefix key is the row that the key names."""
    @staticmethod
    def blocks(
        source: Sequence[int] | npt.NDArray[np.integer[Any]],
        destination: Sequence[int] | npt.NDArray[np.integer[Any]],
        *,
        source_tensors: tuple[int, int] = (0, -1),
        destination_tensors: tuple[int, int] = (0, -1),
        keep_order: bool = False,
    ) -> Moves:
        """Block source[i] to block destination[i]; a destination named twice keeps its last writer. ``keep_order``: for
        copies within one cache, each pair is done, in order."""
    @staticmethod
    def in_window_order(
        mine: Sequence[int] | npt.NDArray[np.integer[Any]],
        *,
        source_tensors: tuple[int, int] = (0, -1),
        destination_tensors: tuple[int, int] = (0, -1),
    ) -> Moves:
        """This side's blocks, one for each block of the far side's window, in the window's order."""
    @staticmethod
    def row_to_blocks(
        source_row: int,
        destination: Sequence[int] | npt.NDArray[np.integer[Any]],
        *,
        source_tensors: tuple[int, int] = (0, -1),
        destination_tensors: tuple[int, int] = (0, -1),
    ) -> Moves:
        """The i-th listed block receives bytes [i*block, (i+1)*block) of the row; the last listed one only what is left."""

    @staticmethod
    def spans(listed: npt.NDArray[np.int64], sums: ValueSums | None = None) -> Moves:
        """(n, 3), C-contiguous: source offset, destination offset, bytes, of each side's only tensor; copied. Names the first
        span that cannot be. Unsigned numbers come as the signed ones of the same bits. ``sums``: of what is moved, in this
        order, taken by whoever copies it into host memory, or sends it from this process's memory by a stream."""

    @property
    def units(self) -> int: ...

@final
class Done:
    """What a finished transfer did."""

    @property
    def size_bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def transport(self) -> str: ...  # "map" | "cma" | "socket" | "local"
    @property
    def gb_per_s(self) -> float: ...  # 1e9 bytes

@final
class Transfer:
    """An operation in flight. Every way it ends is settled: no byte of its destination is written afterwards."""

    def done(self) -> bool: ...
    def wait(self, timeout_ms: int) -> Done:
        """Raises kind "deadline" with operation still running (`done()` False) if timeout_ms passes; else what it ended with."""
    def cancel(self) -> bool: ...
    def notify(self, notifier: Notifier, token: int) -> bool:
        """False if already done (then no notification follows)."""

@final
class Answer:
    """A call in flight; like Transfer."""

    def done(self) -> bool: ...
    def wait(self, timeout_ms: int) -> bytes: ...
    def cancel(self) -> bool: ...
    def notify(self, notifier: Notifier, token: int) -> bool: ...

@final
class Call:
    """A peer's message, to be answered from any thread; dropped without an answer, its asker is told so.

    ``link_id`` is the link's that it came over, ``same_host`` whether the peer is a process of this host (known by the local
    step), ``one_way`` whether nobody waits for an answer, and ``left_ms`` how long the asker still waits.
    """

    @property
    def payload(self) -> bytes: ...
    @property
    def link_id(self) -> int: ...
    @property
    def same_host(self) -> bool: ...
    @property
    def one_way(self) -> bool: ...
    @property
    def left_ms(self) -> int: ...
    def answer(self, payload: Buffer) -> bool:
        """Sends the answer and does not wait for anybody. False: the asker is gone, or has given up.

        :raises InvalidArgument: more than 64 MiB, no bytes, answered already, or nobody waits for an answer.
        """

@final
class LinkDown:
    """A link over which calls had come is down. ``process_ended``: its peer was a process of this host, which has ended."""

    @property
    def link_id(self) -> int: ...
    @property
    def process_ended(self) -> bool: ...

@final
class LayerPush:
    """A push whose layers leave in ascending order as each is declared ready."""

    def layer_ready(self, layer: int) -> None: ...
    def cancel(self) -> bool: ...
    @property
    def transfer(self) -> Transfer: ...

@final
class Notifier:
    """One eventfd per event loop: readable when any transfer registered with it has ended."""

    def __init__(self) -> None: ...
    def fileno(self) -> int: ...
    def take(self) -> list[int]: ...
    def close(self) -> None: ...

@final
class Prepared:
    """A pull with everything resolved that can be: run it again and again."""

    def run(self, timeout_ms: int) -> Done: ...

@final
class Link:
    @property
    def link_id(self) -> int: ...
    @property
    def peer_id(self) -> int: ...
    @property
    def peer_program(self) -> str: ...
    @property
    def peer(self) -> str: ...  # "node 7 at 127.0.0.1:7000"
    @property
    def alive(self) -> bool: ...
    @property
    def outgoing(self) -> bool: ...
    # ``into`` or ``source`` None: this process's memory, by spans
    def pull(
        self,
        target: Target,
        into: int | None,
        moves: Moves,
        timeout_ms: int,
        transport: int = 0,
        resolution: bytes = b"",
    ) -> Done:
        """``resolution``: what the owner's `Node.resolution` gives for this target, a window: it need not be asked then."""
    def pull_async(
        self,
        target: Target,
        into: int | None,
        moves: Moves,
        timeout_ms: int,
        transport: int = 0,
        resolution: bytes = b"",
    ) -> Transfer: ...
    def push(self, source: int | None, target: Target, moves: Moves, timeout_ms: int, transport: int = 0) -> Done: ...
    def push_async(
        self, source: int | None, target: Target, moves: Moves, timeout_ms: int, transport: int = 0
    ) -> Transfer: ...
    def push_layers(
        self,
        source: int,
        target: Target,
        moves: Moves,
        layers: Sequence[int],
        tensors_per_layer: int,
        destination_layers: Sequence[int],
        timeout_ms: int,
        transport: int = 0,
    ) -> LayerPush:
        """``layers[i]`` of the source goes to ``destination_layers[i]``; each after ``layer_ready(layers[i])``, in list order.
        ``timeout_ms`` counts for each layer from its readiness. With Target.by_addresses: tensors_per_layer addresses per layer."""
    def call(self, payload: Buffer, timeout_ms: int) -> bytes: ...
    def call_async(self, payload: Buffer, timeout_ms: int) -> Answer: ...
    def send(self, payload: Buffer, timeout_ms: int) -> None: ...
    def prepare_pull(
        self, target: Target, into: int, moves: Moves, timeout_ms: int, transport: int = 0
    ) -> Prepared: ...
    def describe(self, target: Target, timeout_ms: int) -> dict[str, Any]:
        """cache_id, name, layout, kind, tensors, unit_bytes, count, transport, reasons, window: the units of the window that
        the target is, in its order (of either access), or None"""
    def unlink(self, timeout_ms: int, force: bool = False) -> None: ...
    def statistics(self) -> dict[str, Any]:
        """peer, peer_id, alive, outgoing, same_host, transports: dict[str, str] (name -> "ok" or the reason it is refused and
        the line that mends it), lanes, pulls, pushes, bytes_pulled, bytes_pushed, failures, resets, address"""

@final
class Node:
    def __init__(
        self,
        *,
        node_id: int,
        secret: bytes = b"",
        transports: int = 7,
        copy_threads: int = 0,  # 0: cores, at most 4, the a waiting caller counted
        lanes: int = 2,
        heartbeat_ms: int = 1000,
        heartbeat_timeout_ms: int = 10000,
        attach_any: bool = False,
        program: str = "",
    ) -> None: ...
    @property
    def node_id(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def listen(self, host: str, port: int) -> tuple[str, int]: ...
    def stop_listening(self) -> None: ...
    def connect(self, host: str, port: int, timeout_ms: int, replace: bool = True) -> Link: ...
    def listen_unix(self, path: str) -> str:
        """``path`` is absolute."""
    def connect_unix(self, path: str, timeout_ms: int, replace: bool = True) -> Link: ...
    def links(self) -> list[Link]: ...
    def serve_calls(self) -> None: ...
    def next_call(self, timeout_ms: int) -> Call | LinkDown | None: ...
    def next_event(self, timeout_ms: int) -> tuple[str, str] | None:
        """(level, sentence) for the log: level "info" | "warning"; None when none came in time or the node is closed."""

    def register_cache(
        self,
        *,
        name: str,  # "" for none
        kind: str,  # "host" | "test:0"; others are refused by name
        layout: int,
        addresses: Sequence[int],
        unit_bytes: int,
        stride_bytes: int,  # distance between unit i and i+1 in each tensor, >= unit_bytes
        count: int,
        keys: Sequence[
            tuple[str, int, int] | None
        ] = (),  # per row: ("request"|"prefix", id, model); blocks: [("blocks", 0, model)]
        reachable: bool = True,  # False: peers reach it through windows only
    ) -> int: ...
    def create_pool(self, *, size_bytes: int, page_shift: int = 16, segment_bytes: int = 256 << 20) -> None:
        """The node's pool of library-allocated (mappable) memory; one per node, before the first allocate."""
    def allocate_cache(
        self,
        *,
        name: str,
        layout: int,
        tensors: int,
        unit_bytes: int,
        count: int,
        keys: Sequence[tuple[str, int, int] | None] = (),
        key_use: int = 0,  # what uses up a request key: 0 the pull that names it, 1 any pull of its row, 2 nothing
    ) -> tuple[int, list[int]]: ...
    def keep_memory(self, cache_id: int) -> object:
        """What keeps the segments of an allocated cache mapped in this process while it lives, also after the cache and
        the node have ended. Every numpy or torch view of the cache holds it, so that a late look cannot crash."""
    def unregister_cache(self, cache_id: int) -> bool:
        """False for an unknown id. Returns when nobody's bytes move under it any more."""
    def deallocate_cache(self, cache_id: int) -> bool:
        """Like unregister for an allocated cache, but request keys still bound keep it alive until pulled or removed."""
    def remove_key(self, key: tuple[str, int, int]) -> bool: ...
    def cache_ids(self) -> list[int]: ...
    def open_window(
        self, cache_id: int, units: Sequence[int] | npt.NDArray[np.integer[Any]], access: int, ttl_ms: int
    ) -> bytes:
        """``units``: their numbers, or an array [n, 2] of first numbers and counts."""
    def check_memory(self, moves: Moves, writable: bool) -> bool:
        """Raises kind "invalid_argument" if a span of this process's memory is not mapped with the right that is needed:
        as a pull into it, or a push from it, would before its first byte. Whether some of it lies in a file, which may be cut
        short at any time."""
    def resolution(self, window: bytes) -> bytes:
        """What a read window stands for, to be told to a peer beside its name."""
    def close_window(self, name: bytes) -> bool: ...
    def copy(self, source: Target, destination: Target, moves: Moves, offset_bytes: int = 0) -> Done:
        """Between two caches of this node (or within one: then in the given order), each by id; one side may be by addresses:
        memory of this process that is not registered. ``offset_bytes``: where in its row each side begins."""
    def statistics(self) -> dict[str, Any]:
        """node_id, threads, caches, windows, links, pool_bytes, pool_used_bytes, slots_open"""
