"""A pool node: says where values lie and who may go there. The bytes are moved by native threads and never seen here.

One thread answers all calls, one after the other, so the store needs no lock. A reservation is a write window of the core
per segment that it touches, a lease is a read window; closing one waits for whoever copies through it, and only then does
the store hear that its places are free. Run as a program by `program`, or inside a process.
"""

import logging
import os
import secrets
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from itertools import compress
from typing import Any, TypeAlias
from weakref import finalize

import msgspec
import numpy as np

from kvferry import _core
from kvferry.errors import Busy, InvalidArgument, NodeClosed, OutOfMemory
from kvferry.node import Node
from kvferry.options import PoolOptions, whole
from kvferry.pool import messages
from kvferry.pool.arena import GRANULE
from kvferry.pool.messages import code_of
from kvferry.pool.store import Lease, Reservation, Space, Store
from kvferry.pool.words import FULL, RESERVED
from kvferry.threads import start_thread

__all__ = ["PoolNode", "Private"]

log = logging.getLogger("kvferry.pool")

PAGE_SHIFT = 12
PAGE = 1 << PAGE_SHIFT
SEGMENTS_AT_LEAST = 8
TICK_MS = 1000  # the longest that the loop waits for a call
MARGIN_S = 0.5  # a lease outlives its client's deadline by this, for clocks and messages on their way
LONGEST_HOLD_S = 600.0
MANY_SPACES = 64  # so many are kept before one looks which of them are still of use
HELD_AGAIN_S = 1.0  # until a window that the kernel holds is tried again

MOST_OVER = 256  # numbers of a link that are remembered

Number: TypeAlias = tuple[int, int]
"""The link, and what its other end calls a reservation or lease."""

_CODES = {word: code_of(word) for word in messages.WORDS} | {RESERVED: code_of("saved")}


class _Held:
    """A reservation or lease, and the windows that stand for it."""

    __slots__ = ("held", "windows")

    def __init__(self, held: "Reservation | Lease", windows: list[bytes]) -> None:
        self.held = held
        self.windows = windows


class PoolNode:
    """``memory_bytes`` of arena, taken as it fills; answers whoever links to ``listen``.

    :raises AddressInUse: somebody else listens there. :raises InvalidArgument: less than a page of memory.
    """

    def __init__(
        self,
        listen: str,
        memory_bytes: int,
        *,
        segment_bytes: int = 256 << 20,
        policy: str | None = None,
        secret: str | bytes | None = None,
        node_id: int | None = None,
        heartbeat_timeout_ms: int = 10_000,
    ) -> None:
        capacity = whole("memory_bytes", memory_bytes, least=PAGE) // PAGE * PAGE
        # A small node has several segments too: namespaces with a secret take segments of their own.
        most = max(capacity // SEGMENTS_AT_LEAST, min(capacity, 1 << 20))
        segment = min(whole("segment_bytes", segment_bytes, least=PAGE), most) // PAGE * PAGE
        self._segments: dict[int, int] = {}  # number -> id of the cache that is its memory
        self._store = Store(
            capacity,
            segment_bytes=segment,
            add_segment=self._add_segment,
            drop_segment=self._drop_segment,
            **({} if policy is None else {"policy": policy}),
        )
        self._capacity = capacity
        self._spaces: dict[int, Space] = {}  # no number comes again
        self._opened: dict[tuple[str, bytes, bytes], int] = {}
        self._next_space = 0
        self._many_spaces = MANY_SPACES
        self._opened_by: dict[int, set[int]] = {}  # link -> the spaces that it may name
        self._held: dict[Number, _Held] = {}
        self._numbers: dict[int, Number] = {}  # id() of what the store holds -> its number here
        self._over: dict[
            int, deque[int]
        ] = {}  # link -> numbers that ended and were not there: they may be on their way
        self._kernel_held: list[tuple[list[bytes], Callable[[], None]]] = []
        self._try_again = 0.0
        self._stopping = False
        self._asked = time.monotonic()
        self._answers: dict[type, Callable[[Any, Any], msgspec.Struct | None]] = {
            messages.Open: self._open,
            messages.Exists: self._exists,
            messages.Lookup: self._lookup,
            messages.Release: self._release,
            messages.Reserve: self._reserve,
            messages.Commit: self._commit,
            messages.Remove: self._remove,
            messages.Clear: self._clear,
            messages.Status: self._status,
            messages.Stop: self._stop,
        }
        self._node = Node(
            node_id=node_id,
            secret=secret,
            pool=PoolOptions(capacity, PAGE_SHIFT, segment),
            heartbeat_timeout_ms=heartbeat_timeout_ms,
            program="kvferry-pool",
        )
        try:
            self._node.serve_calls()
            self.address = self._node.listen(listen)
        except BaseException:
            self._node.close()
            raise

    @property
    def capacity_bytes(self) -> int:
        return self._capacity

    def run(self, idle_s: float | None = None) -> None:
        """Answers until :meth:`stop`, a Stop, or, with ``idle_s``, so long without a link or a call."""
        next_call, wait_ms = self._node.next_call, 0
        while not self._stopping:
            try:
                call = next_call(wait_ms)
            except NodeClosed:
                return
            if call is not None:
                self._handle(call)
                call = None  # one that was not answered tells its asker so when no name holds it any more
            now = time.monotonic()
            wait_ms = self._end_what_is_due(now)
            if idle_s is not None and now - self._asked > idle_s and not self._node.links:
                log.info("nobody has asked for %.0f s: leaving", idle_s)
                return

    def stop(self) -> None:
        """Has :meth:`run` return soon; from any thread or a signal handler."""
        self._stopping = True

    def close(self) -> None:
        """Ends the links and gives the memory back."""
        self._stopping = True
        self._node.close()

    # --- the loop ----------------------------------------------------------------------------------------------------

    def _handle(self, call: Any) -> None:
        if isinstance(call, _core.LinkDown):
            self._opened_by.pop(call.link_id, None)
            self._over.pop(call.link_id, None)
            for held in self._store.end_owner(call.link_id):
                self._end(self._numbers.get(id(held)))
            return
        self._asked = time.monotonic()
        try:
            request = messages.decode_request(call.payload)
            answer = self._answers[type(request)](request, call)
        except (msgspec.DecodeError, InvalidArgument, IndexError, ValueError) as error:
            answer = messages.Failure("invalid", str(error))
        except _UnknownSpace as error:
            answer = messages.Failure("unknown_space", str(error))
        except _GivenUp as error:
            answer = messages.Failure("given_up", str(error))
        except Exception as error:  # the node goes on, whatever one request did to it
            log.exception("a call failed")
            answer = messages.Failure("internal", f"{type(error).__name__}: {error}")
        if answer is not None and not call.one_way:
            call.answer(messages.encode(answer))

    def _end_what_is_due(self, now: float) -> int:
        """For how many milliseconds there is nothing more of that."""
        due = self._store.next_end
        if due <= now:
            for held in self._store.expire(now):
                self._end(self._numbers.get(id(held)))
            due = self._store.next_end
        if self._kernel_held and now >= self._try_again:
            waiting, self._kernel_held = self._kernel_held, []
            self._try_again = now + HELD_AGAIN_S
            for windows, then in waiting:
                self._close_windows(windows, then)
        return TICK_MS if due - now > TICK_MS / 1000 else max(0, int((due - now) * 1000) + 1)

    # --- what is asked -----------------------------------------------------------------------------------------------

    def _open(self, request: messages.Open, call: Any) -> msgspec.Struct:
        if request.version != messages.VERSION:
            return messages.Failure("internal", f"this node speaks version {messages.VERSION}, not {request.version}")
        key = (request.namespace, request.domain, request.fingerprint)
        number = self._opened.get(key)
        if number is None and len(self._spaces) >= self._many_spaces:
            self._forget_spaces()
        if number is None or request.quota_bytes is not None:
            # A namespace with a secret is another one than without, or with another, and has segments of its own.
            name = request.namespace + (f"\0{request.domain.hex()}" if request.domain else "")
            space = self._store.space(
                name, request.fingerprint, quota_bytes=request.quota_bytes, apart=bool(request.domain)
            )
            if number is None:
                number = self._opened[key] = self._next_space
                self._next_space += 1
                self._spaces[number] = space
        self._opened_by.setdefault(call.link_id, set()).add(number)
        return messages.Opened(number, self._node.node_id, self._capacity, not self.address.startswith("unix:"))

    def _forget_spaces(self) -> None:
        """Those that are empty and that no link has open; the others may become twice as many before the next look."""
        named = set().union(*self._opened_by.values())
        for key, number in list(self._opened.items()):
            if number not in named and self._store.forget(self._spaces[number]):
                del self._opened[key], self._spaces[number]
        self._many_spaces = 2 * len(self._spaces) + MANY_SPACES

    def _exists(self, request: messages.Exists, call: Any) -> msgspec.Struct:
        flags = self._store.exists(self._space(request.space, call), request.keys, time.monotonic())
        return messages.Flags(flags.translate(_FOUND))

    def _lookup(self, request: messages.Lookup, call: Any) -> msgspec.Struct:
        now = time.monotonic()
        sizes = self._begun(request, call)
        lease = self._store.lookup(
            self._space(request.space, call),
            request.keys,
            sizes=sizes,
            owner=call.link_id,
            until=_until(now, request.left_ms),
            now=now,
        )
        codes = _codes(lease.outcomes)
        try:
            windows, window_of, offsets = self._windows((call.link_id, request.number), lease, _core.READ, now)
        except BaseException:
            self._store.release(lease)
            raise
        checksums = b""
        if any(lease.checksums):
            checksums = np.array([c or 0 for c in compress(lease.checksums, lease.entries)], np.uint64).tobytes()
        told = [self._node._core.resolution(window) for window in windows]
        return messages.Leased(codes, windows, told, window_of, offsets, checksums)

    def _begun(self, request: messages.Lookup | messages.Reserve, call: Any) -> list[int]:
        """What both begin with: earlier leases are over, this one is not yet, and there is a size for each key."""
        self._release_all(request.released, call)
        if request.number in self._over.get(call.link_id, ()):
            self._over[call.link_id].remove(request.number)
            raise _GivenUp("the call has been given up")
        if (call.link_id, request.number) in self._held:
            raise InvalidArgument(f"there is a {request.number} already over this link")
        if len(request.sizes) == 8:
            sizes = [int.from_bytes(request.sizes, "little")]
        else:
            given = np.frombuffer(request.sizes, np.uint64)
            same = len(given) > 1 and bool((given == given[0]).all())
            sizes = [int(given[0])] * len(given) if same else given.tolist()
        if len(request.keys) != len(sizes):
            raise InvalidArgument(f"{len(request.keys)} keys and {len(sizes)} sizes")
        if sizes and min(sizes) < 1:
            raise InvalidArgument("a value has at least one byte")
        return sizes

    def _release(self, request: messages.Release, call: Any) -> None:
        self._release_all(request.numbers, call)

    def _release_all(self, numbers: list[int], call: Any) -> None:
        for number in numbers:
            if (call.link_id, number) in self._held:
                self._end((call.link_id, number))
            else:
                self._over.setdefault(call.link_id, deque(maxlen=MOST_OVER)).append(number)

    def _reserve(self, request: messages.Reserve, call: Any) -> msgspec.Struct:
        now = time.monotonic()
        sizes = self._begun(request, call)
        if request.ttl_ms is not None and request.ttl_ms < 1:
            raise InvalidArgument("a value stays for at least a millisecond")
        saving = self._store.reserve(
            self._space(request.space, call),
            request.keys,
            sizes,
            parents=None if request.continues is None else [request.continues or None, *request.keys[:-1]],
            ttl_ms=request.ttl_ms,
            owner=call.link_id,
            until=_until(now, request.left_ms),
            now=now,
            copy=request.copy,
        )
        codes = _codes(saving.outcomes)
        try:
            windows, window_of, offsets = self._windows((call.link_id, request.number), saving, _core.WRITE, now)
        except BaseException:
            self._store.abort(saving)
            raise
        return messages.Reserved(codes, windows, window_of, offsets)

    def _commit(self, request: messages.Commit, call: Any) -> msgspec.Struct:
        number = call.link_id, request.number
        held = self._held.get(number)
        if held is None or not isinstance(held.held, Reservation):
            return messages.Failure("given_up", "this reservation has ended")
        saving = held.held
        reserved = [*compress(range(len(saving.slabs)), saving.slabs)]
        failed = {reserved[at]: FULL for at in request.failed}
        checksums = None
        if request.checksums:
            checksums = [None] * len(saving.slabs)
            for at, checksum in zip(reserved, np.frombuffer(request.checksums, np.uint64).tolist(), strict=True):
                checksums[at] = checksum
        codes = b""

        def publish() -> None:
            nonlocal codes
            outcomes = self._store.commit(saving, failed=failed, checksums=checksums, now=time.monotonic())
            codes = _codes([*compress(outcomes, saving.slabs)])

        self._forget(number)
        if not self._close_windows(held.windows, publish):
            return messages.Failure("internal", "the kernel holds a copy into this reservation")
        return messages.Flags(codes)

    def _remove(self, request: messages.Remove, call: Any) -> msgspec.Struct:
        return messages.Count(self._store.remove(self._space(request.space, call), request.keys))

    def _clear(self, request: messages.Clear, call: Any) -> msgspec.Struct:
        return messages.Count(self._store.clear(self._space(request.space, call).namespace.name))

    def _status(self, request: messages.Status, call: Any) -> msgspec.Struct:
        seen = self._store.statistics()
        return messages.Facts(
            {
                "address": self.address,
                "pid": os.getpid(),
                "capacity_bytes": seen.capacity_bytes,
                "segments_bytes": seen.segments_bytes,
                "taken_bytes": seen.taken_bytes,
                "keys": seen.keys,
                "copies": seen.copies,
                "copies_bytes": seen.copies_bytes,
                "pending": seen.pending,
                "leases": seen.leases,
                "hits": seen.hits,
                "misses": sum(seen.misses.values()),
                "saved": seen.saved,
                "evictions": seen.evictions,
                "links": len(self._node.links),
            }
        )

    def _stop(self, request: messages.Stop, call: Any) -> msgspec.Struct:
        self._stopping = True
        return messages.Count(0)

    # --- windows -----------------------------------------------------------------------------------------------------

    def _windows(
        self, number: Number, held: "Reservation | Lease", access: int, now: float
    ) -> tuple[list[bytes], bytes, bytes]:
        """One window per segment over the places of ``held``: their names, and for each place, in order, the window that it
        lies in and where."""
        table = held.table()
        if not len(table):
            return [], b"", b""
        first = int(table[0, 0])
        parts = [(first, table)]
        window_of = bytes(2 * len(table))
        if len(table) > 1 and not (table[:, 0] == first).all():
            segments, which = np.unique(table[:, 0], return_inverse=True)
            parts = [(segment, table[which == number]) for number, segment in enumerate(segments.tolist())]
            window_of = which.astype(np.uint16).tobytes()
        ttl_ms = int((held.until - now) * 1000)
        names: list[bytes] = []
        try:
            for segment, mine in parts:
                runs = mine[:, 1:] + _ROUNDING  # whole granules, of the sizes too, for offsets are multiples of them
                runs //= GRANULE
                names.append(self._node._core.open_window(self._segments[segment], runs, access, ttl_ms))
        except BaseException:
            self._close_windows(names, lambda: None)
            raise
        self._held[number] = _Held(held, names)
        self._numbers[id(held)] = number
        return names, window_of, table[:, 1].tobytes()

    def _end(self, number: Number | None) -> None:
        """Ends a lease, or a reservation without publishing it."""
        held = None if number is None else self._forget(number)
        if held is None:
            return
        what = held.held
        let_go = self._store.release if isinstance(what, Lease) else self._store.abort
        self._close_windows(held.windows, lambda: let_go(what))  # type: ignore[arg-type] # each takes its own sort

    def _forget(self, number: Number) -> _Held | None:
        held = self._held.pop(number, None)
        if held is not None:
            self._numbers.pop(id(held.held), None)
        return held

    def _close_windows(self, windows: list[bytes], then: Callable[[], None]) -> bool:
        """``then`` runs when nobody copies through them any more: now, or (False) when the kernel has let go."""
        left = []
        for name in windows:
            try:
                self._node._core.close_window(name)
            except Busy:
                left.append(name)
            except NodeClosed:
                return False
        if left:
            log.warning("the kernel holds a copy into this node's memory; its place stays taken until that ends")
            self._kernel_held.append((left, then))
            return False
        then()
        return True

    # --- memory ------------------------------------------------------------------------------------------------------

    def _add_segment(self, number: int, size_bytes: int) -> bool:
        try:
            cache = self._node.allocate(
                f"segment {number}",
                tensors=1,
                shape=(-(-size_bytes // GRANULE), GRANULE),
                dtype="uint8",
            )
        except OutOfMemory as error:
            log.warning("no more memory: %s", error)
            return False
        self._segments[number] = cache.id
        return True

    def _drop_segment(self, number: int) -> None:
        self._node.unregister(self._segments.pop(number))

    def _space(self, number: int, call: Any) -> Space:
        """:raises _UnknownSpace: not opened over this link, whose client may not know its secret."""
        if number not in self._opened_by.get(call.link_id, ()):
            raise _UnknownSpace(f"no space {number} was opened over this link")
        return self._spaces[number]


class _UnknownSpace(Exception):
    pass


class _GivenUp(Exception):
    pass


def _codes(outcomes: list[str]) -> bytes:
    if outcomes and outcomes.count(outcomes[0]) == len(outcomes):
        return bytes([_CODES[outcomes[0]]]) * len(outcomes)
    return bytes(map(_CODES.__getitem__, outcomes))


_ROUNDING = np.array([0, GRANULE - 1])
_FOUND = bytes([code_of("never_saved"), code_of("hit"), *range(2, 256)])


def _until(now: float, left_ms: int) -> float:
    return now + min(max(left_ms, 0) / 1000 + MARGIN_S, LONGEST_HOLD_S)


class Private:
    """A node and its loop inside this process, behind a socket in a directory of its own and a secret that nobody else has.

    It ends when it is closed, when nobody holds it any more, or with the process. What a forked child has of it ends nothing.
    """

    def __init__(self, memory_bytes: int) -> None:
        self.secret = secrets.token_bytes(16)
        self._pid = os.getpid()
        directory = tempfile.mkdtemp(prefix="kvferry-")
        try:
            self._node = PoolNode(f"unix:{directory}/pool.sock", memory_bytes, secret=self.secret)
            try:
                self._thread = start_thread("kvferry-pool-node", _run_private, self._node)
            except BaseException:
                self._node.close()
                raise
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        self._end = finalize(self, _end_private, self._node, directory, self._pid)
        self.address = self._node.address

    def close(self) -> None:
        """Ends node and thread; twice is fine."""
        if os.getpid() == self._pid:
            self._end()
            self._node.close()
            self._thread.join(5)


def _run_private(node: PoolNode) -> None:
    try:
        node.run()
    finally:
        node.close()


def _end_private(node: PoolNode, directory: str, pid: int) -> None:
    """From any thread, its own too, in the middle of whatever made the last reference go: its thread closes it."""
    if os.getpid() == pid:
        node.stop()
        shutil.rmtree(directory, ignore_errors=True)
