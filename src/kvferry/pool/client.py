"""A pool as its user sees it: blocks are saved and loaded in batches under their keys, and nothing that fails is an error.

Splits a batch over the nodes that its keys belong to, asks each for places, has the bytes moved, and puts the answers
together. A node that is dead, slow or full costs its own keys and no others. Policy is the nodes'; bytes are the core's.
"""

import hashlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry import _core
from kvferry.arrays import Memory, recognise
from kvferry.errors import InvalidArgument, NodeClosed
from kvferry.link import Link
from kvferry.node import Node
from kvferry.options import LONGEST_MS, checked_timeout, one_of, shown, text, truth, whole
from kvferry.pool import embedded, messages, places, routing
from kvferry.pool import keys as key_rules
from kvferry.pool.membership import Member, Membership, StaticMembership
from kvferry.pool.messages import LONGEST_KEY, code_of
from kvferry.pool.moving import Moving, Way, moves_of, ms_left, pulling, pushing
from kvferry.pool.outcome import SUCCESSES, Codes, Outcome
from kvferry.pool.peer import TOLD_AT_ONCE_BYTES, Peer, Space, Unreachable
from kvferry.pool.values import U64, Spans, Values, extents, of_blocks, of_buffers, of_the_heap, plain
from kvferry.pool.workers import Future, Workers

__all__ = ["Pool"]

SHORT_LEASE_MS = 2000  # of what moves in a moment, and whose end is told with the next request, if ever
THREADS = 8
BESIDE = 64  # those that wait for nodes that stand still must leave some for the others
TRANSPORTS = ("map", "cma", "socket")
CHECKSUMS = {"auto": 0, "always": 1, "never": 2}
# A batch goes in parts of this size: its node looks for the places of the next one while the bytes of one are moved, and
# a batch of any size takes a bounded share of a node.
KEYS_AT_A_TIME = 4096
BYTES_AT_A_TIME = 64 << 20
LOOKED_FOR_AT_A_TIME = 16_384  # keys of which nothing is moved
# The stage whose turn comes first in a round over the parts under way: the node is asked for the newest before anything is
# waited for, and a part is committed only when the one before it has been, which it may continue (chain=).
TURNS = (0, 1, 3, 2)
SUMMING_S = 0.0002  # between two looks whether checksums, of a part at most, have been taken
LOCAL_FIRST = 4  # the node on this host has one part in so many of the time that is left to answer before the owners

HIT, SAVED, TIMEOUT, NODE_LOST, POOL_OFF, NEVER_SAVED, CORRUPTED = map(
    code_of, ("hit", "saved", "timeout", "node_lost", "pool_off", "never_saved", "corrupted")
)
NO_CHECKSUM = np.uint64(0)
LENGTHS = set(range(1, LONGEST_KEY + 1))  # of keys
ALL = slice(None)

Indices = npt.NDArray[np.int64]
Job = Generator[None, None, None]
"""One part of a batch at one node. Between its stages something happens elsewhere: the node answers, bytes move."""
Begin = Callable[[Peer, Indices, bool], Job]
"""``begin(peer, part, beside)``; not ``beside``: nothing else happens meanwhile, so the job does all itself."""


@dataclass(slots=True)
class _Batch:
    """One call: its keys, where its values lie, and what became of each key so far."""

    keys: list[bytes]
    routes: list[bytes] | None
    values: Values | None
    began: float
    until: float
    codes: Codes
    every: Indices
    may_shrink: bool = False  # some of the values' memory: somebody may cut its file short
    apart: bool = False  # carried out by another thread than its caller's, who may give it up meanwhile
    size_bytes: int = 0
    lock: Any = field(default_factory=threading.RLock)  # a signal handler may give the call up amid giving it up
    # Reservations and leases whose end is still to be told.
    held: set[tuple[Peer, Link, int]] = field(default_factory=set)
    _moving: list[Moving] = field(default_factory=list)
    _summing: set[int] = field(default_factory=set)  # the threads that read the values' memory for their checksums
    _given_up: bool = False

    def move(self, way: Way, spans: Spans, beside: bool, sums: _core.ValueSums | None = None) -> Moving:
        """From any of the threads that carry the batch out. :raises Unreachable: it has been given up."""
        with self.lock:
            self._go_on()
            moving = Moving(way, spans, self.until, sums)
            self._moving.append(moving)  # before anything moves: give_up() knows of it, whatever happens here
            if beside:
                moving.begin()
        return moving

    def checksums(self, chosen: Indices, seeds: U64) -> U64:
        """Of those values as they lie in memory now. :raises Unreachable: the call has been given up."""
        assert self.values is not None
        me = threading.get_ident()
        try:
            with self.lock:
                self._go_on()
                self._summing.add(me)
            return self.values.checksums(chosen, seeds, self.may_shrink)
        finally:
            self._summing.discard(me)

    def _go_on(self) -> None:
        if self._given_up:
            raise Unreachable("timeout", "the call has been given up")

    def give_up(self) -> None:
        """No thread moves or reads anything for it any more when this has ended, and the nodes have been told that they may have
        back what they hold for it, whatever a signal handler raises meanwhile."""
        interrupted: BaseException | None = None
        while not self._given_up or any(not one.ended for one in self._moving) or self.held or self._others_sum():
            try:
                with self.lock:
                    self._given_up = True
                for one in self._moving:
                    one.give_up()
                for held in list(self.held):
                    self.over(*held)
                if self._others_sum():
                    time.sleep(SUMMING_S)
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _others_sum(self) -> bool:
        """What this thread itself has read is over, or it were not here."""
        return bool(self._summing - {threading.get_ident()})

    def over(self, peer: Peer, link: Link, number: int) -> None:
        """The node may have back what it holds, or is about to hold, under this number; of a save nothing is published."""
        peer.give_up(link, number)
        self.held.discard((peer, link, number))

    def lost(self, keys: Indices, word: str) -> None:
        """Those of ``keys`` that have not come to anything come to ``word``."""
        self.codes[keys[~SUCCESSES[self.codes[keys]]]] = code_of(word)

    def moved(self, size_bytes: int) -> None:
        """From any of the threads that carry the batch out."""
        with self.lock:
            self.size_bytes += size_bytes

    def outcome(self) -> Outcome:
        return Outcome(self.codes, self.size_bytes, time.monotonic() - self.began)


@dataclass(frozen=True, slots=True)
class _Call:
    """A load, a save or a look. ``late``: what it came to if its time was over before a thread was free for it."""

    batch: _Batch
    work: Callable[[], Outcome]
    late: Callable[[], Outcome]

    def now(self) -> Outcome:
        try:
            return self.work()
        except BaseException:  # also what a signal handler raises: whoever catches it may reuse the memory at once
            self.batch.give_up()
            raise


class Pool:
    """Blocks kept and shared beyond one request; made by :meth:`connect` or :meth:`private`; a context manager.

    Every verb takes ``keys``: bytes or strings of 1 to 255 bytes, each once, or what :func:`kvferry.prefix_keys` gives.
    The bytes of each value are named in one of two ways:

    ============  ====================================================================================================
    ``blocks``    one block number per key, in what was given to :meth:`register`: the value is that block of every tensor
    ``buffers``   one list of segments per key, each an array or ``(address, size_bytes)``, or :class:`kvferry.Buffers`
    ============  ====================================================================================================

    ``routes``: one string or bytes per key; keys of one route lie on one node. ``timeout_ms`` counts from the call, waiting
    for a free thread included. A miss, a dead node and a timeout make :attr:`Outcome.prefix` shorter and raise nothing.

    The verbs raise only for what the caller did: InvalidArgument for keys, numbers, sizes and addresses that cannot be (an
    address that is not mapped is found before its first byte moves), NodeClosed once the pool is closed.
    """

    def __init__(
        self,
        membership: Membership | None,
        *,
        namespace: str = "default",
        secret: str | bytes | None = None,
        node_secret: str | bytes | None = None,
        quota_bytes: int | None = None,
        transports: Sequence[str] = TRANSPORTS,
        checksum: str = "auto",
        keep: Any = None,
    ) -> None:
        """For :meth:`connect` and :meth:`private`. ``membership`` None: the pool is off. ``keep`` is closed with it."""
        quota = None if quota_bytes is None else whole("quota_bytes", quota_bytes, least=1)
        # What blocks= counts, the space of its values, and whether its memory is to be looked at in each call, for it may shrink;
        # exchanged whole: calls may run beside a register().
        self._registered: tuple[tuple[Memory, ...], Space, bool] = (
            (),
            Space(text("namespace", namespace), _digest(secret), b"", quota),
            False,
        )
        self._membership = membership
        self._node_options: dict[str, Any] = {
            "secret": node_secret,
            "transports": transports,
            "program": "kvferry-pool-client",
        }
        one_of("checksum", checksum, CHECKSUMS)
        self._checksum = checksum
        self._keep = keep
        self._lock = threading.RLock()  # a signal handler may use the pool as well, on a thread that is just using it
        self._closed = False
        self._pid = 0
        self._version = -1
        self._start = True
        _POOLS.add(self)
        self._counted = np.zeros(len(messages.WORDS), np.int64)
        self._moved_bytes = 0
        self._awake()

    @classmethod
    def connect(
        cls,
        members: "str | Member | Sequence[str | Member] | Membership | None" = None,
        *,
        namespace: str = "default",
        secret: str | bytes | None = None,
        node_secret: str | bytes | None = None,
        quota_bytes: int | None = None,
        transports: Sequence[str] = TRANSPORTS,
        checksum: str = "auto",
        start: bool = True,
        timeout_ms: int = 5000,
    ) -> "Pool":
        """Opens a pool over ``members``: an address, a :class:`kvferry.Member`, a list of either, or a
        :class:`Membership` that may change meanwhile.

        Without any, ``KVFERRY_POOL`` or the configuration file says where (docs/pool.md); else it is a node of this user's
        own on this host, which is started if need be and ``start`` allows it. Nothing that is missing there is an error:
        loads are misses until a node can be reached.

        ``namespace``: values of one are never found in another. With a ``secret``, only those who give the same one find
        them. ``quota_bytes``: the most that this namespace may fill of each node, with everybody's values: the last that any
        pool has named counts for all of them. ``node_secret``: what links to the nodes must know; left out, what is said of
        it where ``KVFERRY_POOL`` or the configuration file names them. ``transports``: what links to the nodes may use at
        all. ``checksum``: whether values are saved with a checksum, and verified by it when they are loaded: ``"auto"``, if
        they cross from host to host, ``"always"`` or ``"never"``.
        """
        until = time.monotonic() + checked_timeout(timeout_ms) / 1000
        membership: Membership | None
        if isinstance(members, Member):
            membership = StaticMembership([members])
        elif members is not None and not isinstance(members, str | Sequence):
            if not (callable(getattr(members, "members", None)) and hasattr(members, "version")):
                raise InvalidArgument(
                    f"members is {shown(members)}: give an address, a list of addresses or of Member, or a Membership"
                )
            membership = members
        elif not isinstance(members, str | None) and any(isinstance(member, Member) for member in members):
            membership = StaticMembership(
                member if isinstance(member, Member) else Member(member, member) for member in members
            )
        else:
            found = places.resolve(members)  # type: ignore[arg-type] # none of them is a Member
            if found == "private":
                return cls.private(namespace=namespace, secret=secret, quota_bytes=quota_bytes, checksum=checksum)
            listed = [places.OWN] if found == places.OWN else found
            if members is None and node_secret is None and found not in (places.OWN, None):
                node_secret = places.secret()
            membership = None if listed is None else StaticMembership(Member(where, where) for where in listed)
        pool = cls(
            membership,
            namespace=namespace,
            secret=secret,
            node_secret=node_secret,
            quota_bytes=quota_bytes,
            transports=transports,
            checksum=checksum,
        )
        pool._start = truth("start", start)
        pool._reach_all(until, pool._awake())
        return pool

    @classmethod
    def private(
        cls,
        memory_bytes: int = 256 << 20,
        *,
        namespace: str = "default",
        secret: str | bytes | None = None,
        quota_bytes: int | None = None,
        checksum: str = "auto",
    ) -> "Pool":
        """A pool with a node of its own inside this process, which ends with it; nobody else can reach it."""
        from kvferry.pool.node import Private

        node = Private(whole("memory_bytes", memory_bytes, least=1))
        try:
            pool = cls(
                StaticMembership([Member(node.address, node.address)]),
                namespace=namespace,
                secret=secret,
                node_secret=node.secret,
                quota_bytes=quota_bytes,
                checksum=checksum,
                keep=node,
            )
        except BaseException:
            node.close()
            raise
        pool._reach_all(time.monotonic() + 5, pool._awake())
        return pool

    # --- memory ------------------------------------------------------------------------------------------------------

    def register(self, arrays: Any, *, layout: str = "blocks") -> None:
        """Says what ``blocks=`` counts from now on: the blocks (dim 0) of these arrays, K0 V0 K1 V1 …

        They may differ in everything but the number of blocks that a call uses; each block must be contiguous. Their sizes
        and element types become part of every key: values of another geometry are never found. The arrays are kept alive.
        """
        one_of("layout", layout, {"blocks": 0})
        listed = list(arrays) if isinstance(arrays, list | tuple) else [arrays]
        if not listed:
            raise InvalidArgument("register() needs at least one array")
        memories = tuple(recognise(array, "pool", number) for number, array in enumerate(listed))
        for number, memory in enumerate(memories):
            if memory.unit_bytes == 0 or memory.count == 0:
                raise InvalidArgument(f"array {number} has no blocks, or blocks of no bytes (shape {memory.shape})")
        fingerprint = key_rules.fingerprint([(memory.unit_bytes, memory.dtype) for memory in memories])
        self._awake()
        if self._closed:
            raise NodeClosed("the pool is closed")
        try:
            may_shrink = self._may_shrink(extents(memories), False)
        except InvalidArgument:  # it lies in another process, say: only whoever moves it here is told
            may_shrink = True
        with self._lock:
            space = self._space
            mine = Space(space.namespace, space.domain, fingerprint, space.quota_bytes)
            self._registered = (memories, mine, may_shrink)

    # --- verbs -------------------------------------------------------------------------------------------------------

    def load(
        self,
        keys: Any,
        *,
        blocks: Any = None,
        buffers: Any = None,
        routes: Any = None,
        timeout_ms: int = 1000,
        local_only: bool = False,
    ) -> Outcome:
        """Copies the values of ``keys`` from the pool into this process's memory; those that are not there are left out."""
        loaded = None
        if blocks is None and routes is None and local_only is False:
            loaded = self._load_one(keys, buffers, timeout_ms)
        return loaded or self._loading(keys, blocks, buffers, routes, timeout_ms, local_only).now()

    def load_async(
        self,
        keys: Any,
        *,
        blocks: Any = None,
        buffers: Any = None,
        routes: Any = None,
        timeout_ms: int = 1000,
        local_only: bool = False,
    ) -> "Future[Outcome]":
        """Starts a :meth:`load` and returns at once."""
        return self._later(self._loading(keys, blocks, buffers, routes, timeout_ms, local_only))

    def save(
        self,
        keys: Any,
        *,
        blocks: Any = None,
        buffers: Any = None,
        routes: Any = None,
        timeout_ms: int = 1000,
        ttl_ms: int | None = None,
        chain: bool = False,
        local_copy: bool = False,
    ) -> Outcome:
        """Copies values into the pool. A key that is there already keeps its value, which counts as a success.

        ``ttl_ms``: how long it may stay at most. ``chain``: each key continues the one before it, as prefix keys do; a node
        then never drops one before those behind it. ``local_copy``: the node on this host keeps a copy as well.
        """
        return self._saving(keys, blocks, buffers, routes, timeout_ms, ttl_ms, chain, local_copy).now()

    def save_async(
        self,
        keys: Any,
        *,
        blocks: Any = None,
        buffers: Any = None,
        routes: Any = None,
        timeout_ms: int = 1000,
        ttl_ms: int | None = None,
        chain: bool = False,
        local_copy: bool = False,
    ) -> "Future[Outcome]":
        """Starts a :meth:`save` and returns at once. The memory must stay as it is until the future has ended."""
        return self._later(self._saving(keys, blocks, buffers, routes, timeout_ms, ttl_ms, chain, local_copy))

    def exists(self, keys: Any, *, routes: Any = None, timeout_ms: int = 1000, local_only: bool = False) -> Outcome:
        """Which keys are there at this moment (``hit`` or ``never_saved``)."""
        began, peers = time.monotonic(), self._awake()
        if len(peers) != 1 or routes is not None or local_only is not False:
            return self._looking(keys, routes, timeout_ms, local_only).now()
        # One node: schedulers ask this for every request, so nothing is made that several would need.
        listed, until = _keys(keys), began + checked_timeout(timeout_ms) / 1000
        if not 0 < len(listed) <= LOOKED_FOR_AT_A_TIME:
            return self._looking(keys, routes, timeout_ms, local_only).now()
        peer = peers[0]
        try:
            link = peer.reach(until)
            request = messages.Exists(peer.space(self._space, until, link), listed)
            codes = _told(peer.ask(request, messages.Flags, until, link), len(listed))
        except Unreachable as why:
            peer.says(str(why))
            codes = np.full(len(listed), code_of(why.word), np.uint8)
        return Outcome(codes, 0, time.monotonic() - began)

    def exists_async(
        self, keys: Any, *, routes: Any = None, timeout_ms: int = 1000, local_only: bool = False
    ) -> "Future[Outcome]":
        """Starts an :meth:`exists` and returns at once."""
        return self._later(self._looking(keys, routes, timeout_ms, local_only))

    def remove(self, keys: Any, *, routes: Any = None, timeout_ms: int = 1000) -> int:
        """Drops values, and the copies of them on this host; how many values there were. What a node that cannot be
        reached holds, stays, and so do copies on other hosts; what it has not answered for in time may have gone, and is not
        counted."""
        batch = self._batch(keys, routes, None, timeout_ms)
        removed: list[int] = []

        def ask(peer: Peer, chosen: Indices, beside: bool) -> Job:
            link = peer.reach(batch.until)
            request = messages.Remove(peer.space(self._space, batch.until, link), _picked(batch.keys, chosen))
            asked = peer.asking(request, messages.Count, batch.until, link, beside)
            yield
            removed.append(asked().keys)

        shares, local = self._shares(batch), self._local()
        # The local node counts what it owns and not its copies: it is asked for all keys.
        shares = [(peer, chosen) for peer, chosen in shares if peer is not local]
        self._on_each(batch, shares if local is None else [(local, batch.every), *shares], ask)
        return sum(removed)

    def clear(self, *, timeout_ms: int = 1000) -> int:
        """Drops everything of this namespace, whatever its geometry, copies included, on every node that can be reached;
        how many values."""
        until = time.monotonic() + checked_timeout(timeout_ms) / 1000
        dropped: list[int] = []

        def ask(peer: Peer) -> None:
            try:
                link = peer.reach(until)
                request = messages.Clear(peer.space(self._space, until, link))
                dropped.append(peer.ask(request, messages.Count, until, link).keys)
            except Unreachable:
                return

        peers = self._awake()
        if self._closed:
            raise NodeClosed("the pool is closed")
        self._side_by_side([partial(ask, peer) for peer in peers], until)
        return sum(dropped)

    # --- life --------------------------------------------------------------------------------------------------------

    @property
    def namespace(self) -> str:
        return self._space.namespace

    def statistics(self) -> dict[str, int]:
        """How often each outcome word came up in this object's loads and saves, and the bytes moved."""
        with self._lock:
            counted = {word: count for word, count in zip(messages.WORDS, self._counted.tolist(), strict=True) if count}
            return counted | {"bytes": self._moved_bytes}

    def close(self) -> None:
        """Ends its links; calls under way end with what they have. Twice is fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._pid == os.getpid():
            self._workers.close()
            self._beside.close()
            self._node.close()
        if self._keep is not None:
            self._keep.close()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Pool {self._space.namespace!r}{', closed' if self._closed else ''}>"

    # --- one batch ---------------------------------------------------------------------------------------------------

    def _batch(
        self,
        keys: Any,
        routes: Any,
        values: Callable[[int], Values] | None,
        timeout_ms: int,
        writable: bool = False,
    ) -> _Batch:
        began = time.monotonic()
        until = began + checked_timeout(timeout_ms) / 1000
        listed = _keys(keys)
        routed = None if routes is None else _words("routes", routes)
        if routed is not None and len(routed) != len(listed):
            raise InvalidArgument(f"{len(listed)} keys and {len(routed)} routes: give one route for each key")
        where = None if values is None else values(len(listed))
        if self._closed:
            raise NodeClosed("the pool is closed")
        self._awake()
        every = np.arange(len(listed))
        may_shrink = False
        if where is not None and where.raw and len(where):
            spans = where.spans(every, np.zeros(len(where), np.uint64), to_node=not writable)
            may_shrink = self._may_shrink(spans, writable)
        codes = np.empty(len(listed), np.uint8)
        codes.fill(TIMEOUT if self._membership is not None else POOL_OFF)
        return _Batch(listed, routed, where, began, until, codes, every, may_shrink)

    def _may_shrink(self, spans: Spans, writable: bool) -> bool:
        """Whether somebody may cut short a file in which this memory lies. :raises InvalidArgument: it is not there."""
        try:
            return self._node._core.check_memory(moves_of(spans), writable)
        except NodeClosed:
            raise NodeClosed("the pool is closed") from None

    def _where(self, blocks: Any, buffers: Any, writable: bool) -> tuple[Callable[[int], Values], Space]:
        """Where so many values lie, and the space that values of this shape are in."""
        if (blocks is None) == (buffers is None):
            raise InvalidArgument("say where the values are by blocks= or by buffers=, one of the two")
        memories, space, raw = self._registered
        if buffers is not None:
            return partial(of_buffers, buffers, writable=writable), space.without_geometry()
        if not memories:
            raise InvalidArgument("blocks= counts the blocks of what was registered: call register(...) first")
        return lambda count: of_blocks(memories, blocks, count, memories, raw), space

    @property
    def _space(self) -> Space:
        return self._registered[1]

    def _loading(self, keys: Any, blocks: Any, buffers: Any, routes: Any, timeout_ms: int, local_only: bool) -> _Call:
        values, space = self._where(blocks, buffers, True)
        batch = self._batch(keys, routes, values, timeout_ms, writable=True)
        local = truth("local_only", local_only)

        def load() -> Outcome:
            self._read(batch, local, partial(self._load_from, batch, space))
            return self._counted_up(batch)

        return _Call(batch, load, partial(self._counted_up, batch))

    def _saving(
        self,
        keys: Any,
        blocks: Any,
        buffers: Any,
        routes: Any,
        timeout_ms: int,
        ttl_ms: int | None,
        chain: bool,
        local_copy: bool,
    ) -> _Call:
        values, space = self._where(blocks, buffers, False)
        batch = self._batch(keys, routes, values, timeout_ms)
        ttl = None if ttl_ms is None else whole("ttl_ms", ttl_ms, least=1)
        chained, copied = truth("chain", chain), truth("local_copy", local_copy)

        def save() -> Outcome:
            shares = self._shares(batch)
            self._on_each(batch, shares, partial(self._save_to, batch, space, {} if chained else None, ttl, False))
            if copied:
                copying = partial(self._save_to, batch, space, {} if chained else None, ttl, True)
                self._copy_locally(batch, shares, copying)
            return self._counted_up(batch)

        return _Call(batch, save, partial(self._counted_up, batch))

    def _looking(self, keys: Any, routes: Any, timeout_ms: int, local_only: bool) -> _Call:
        batch = self._batch(keys, routes, None, timeout_ms)
        local, space = truth("local_only", local_only), self._space

        def look(peer: Peer, chosen: Indices, beside: bool, until: float) -> Job:
            link = peer.reach(until)
            request = messages.Exists(peer.space(space, until, link), _picked(batch.keys, chosen))
            asked = peer.asking(request, messages.Flags, until, link, beside)
            yield
            batch.codes[chosen] = _told(asked(), len(chosen))

        def exists() -> Outcome:
            self._read(batch, local, look)
            return batch.outcome()

        return _Call(batch, exists, batch.outcome)

    def _later(self, call: _Call) -> "Future[Outcome]":
        call.batch.apart = True
        try:
            return self._workers.submit(call.now, call.batch.until, call.late, call.batch.give_up)
        except BaseException:  # a signal handler's: nobody has the future, and the memory is its caller's again
            call.batch.give_up()
            raise

    def _read(self, batch: _Batch, local_only: bool, begin: Callable[[Peer, Indices, bool, float], Job]) -> None:
        """``begin(peer, part, beside, until)``: the node on this host is asked for all keys, then each owner for what is
        missing.

        ``until`` is for asking alone. The local node, which may be the one that stands still, has a part of the time.
        """

        def for_long(peer: Peer, part: Indices, beside: bool) -> Job:
            return begin(peer, part, beside, batch.until)

        if local_only:
            local = self._local(batch.until)
            if local is not None:
                self._on_each(batch, [(local, batch.every)], for_long)
            elif self._membership is not None:
                batch.codes[:] = NEVER_SAVED
            return
        shares = self._shares(batch)
        local = self._local() if len(self._routed[1]) > 1 else None
        if local is not None and any(peer is not local for peer, _ in shares) and local.prompt:

            def for_a_moment(peer: Peer, part: Indices, beside: bool) -> Job:
                now = time.monotonic()
                return begin(peer, part, beside, now + (batch.until - now) / LOCAL_FIRST)

            began = time.monotonic()
            lost = self._in_parts(batch, local, batch.every, for_a_moment, alone=True)
            if lost:
                local.late(began)
            missing = ~SUCCESSES[batch.codes]
            again = np.zeros(len(batch.keys), np.bool_)  # what the local node owns and has not answered for
            for part, _ in lost:
                again[part] = True
            left = [(peer, chosen[missing[chosen] & (again[chosen] | (peer is not local))]) for peer, chosen in shares]
            shares = [share for share in left if len(share[1])]
        self._on_each(batch, shares, for_long)

    def _on_each(self, batch: _Batch, shares: list[tuple[Peer, Indices]], begin: Begin) -> None:
        """Each share in parts, side by side; a node that cannot be asked leaves its word to its keys."""

        def carry_out(peer: Peer, chosen: Indices) -> None:
            for part, why in self._in_parts(batch, peer, chosen, begin, alone=len(shares) == 1):
                batch.lost(part, why.word)

        if len(shares) == 1:
            carry_out(*shares[0])
            return
        late = [partial(batch.lost, chosen, "timeout") for _, chosen in shares]
        self._side_by_side([partial(carry_out, *share) for share in shares], batch.until, late)

    def _in_parts(
        self, batch: _Batch, peer: Peer, chosen: Indices, begin: Begin, *, alone: bool
    ) -> list[tuple[Indices, Unreachable]]:
        """One part after the other, each some stages behind the one before it. Those for which the node could not be
        asked, and why; after the first of them no other part is begun. ``alone``: no other thread works for this batch."""
        parts = self._parts(batch, chosen)
        if len(parts) == 1 and alone and not batch.apart:
            try:
                for _ in begin(peer, chosen, False):
                    pass
            except Unreachable as why:
                peer.says(str(why))
                return [(chosen, why)]
            return []
        lost: list[tuple[Indices, Unreachable]] = []
        coming = deque(parts)
        under_way: list[_Part] = []
        try:
            while coming or under_way:
                if coming and lost:
                    lost.extend((part, lost[0][1]) for part in coming)
                    coming.clear()
                elif coming:
                    part = coming.popleft()
                    under_way.append(_Part(part, begin(peer, part, True)))
                for one in sorted(under_way, key=_Part.turn):
                    try:
                        next(one.job)
                        one.stage += 1
                        continue
                    except StopIteration:
                        pass
                    except Unreachable as why:
                        peer.says(str(why))
                        lost.append((one.keys, why))
                    under_way.remove(one)
        finally:
            for one in under_way:  # something else went wrong: nothing moves any more when this call has ended
                one.job.close()
        return lost

    def _side_by_side(
        self, jobs: Sequence[Callable[[], None]], until: float, late: Sequence[Callable[[], None]] = ()
    ) -> None:
        """The first on this thread. Ends when all have ended, or by what the first of them raises. ``late``: what is done
        instead of each if no thread is free for it before ``until``."""
        if not jobs:
            return
        late = late or [lambda: None] * len(jobs)
        others = [self._beside.submit(job, until, instead) for job, instead in zip(jobs[1:], late[1:], strict=True)]
        jobs[0]()
        for future in others:
            future.wait()

    def _shares(self, batch: _Batch) -> list[tuple[Peer, Indices]]:
        """Each owner and its keys; of a pool without members nobody, which is as if all of them were lost."""
        self._awake()
        members, peers = self._routed
        if not peers or not batch.keys:
            if self._membership is not None:
                batch.codes[:] = NODE_LOST
            return []
        if len(peers) == 1:
            return [(peers[0], batch.every)]
        digests = routing.digests(batch.keys if batch.routes is None else batch.routes)
        owners = routing.owners(digests, members)
        return [(peers[i], np.flatnonzero(owners == i)) for i in range(len(peers)) if (owners == i).any()]

    def _parts(self, batch: _Batch, chosen: Indices) -> list[Indices]:
        """``chosen`` in order, in parts that are asked for at once."""
        if batch.values is None or not len(chosen):
            step = LOOKED_FOR_AT_A_TIME
            return [chosen[at : at + step] for at in range(0, len(chosen), step)]
        if len(chosen) <= KEYS_AT_A_TIME and batch.values.bytes_of(chosen) <= BYTES_AT_A_TIME:
            return [chosen]
        sizes = batch.values.totals[chosen]
        parts, begin = [], 0
        before = np.concatenate([[0], np.cumsum(sizes)])
        while begin < len(chosen):
            end = int(np.searchsorted(before, before[begin] + BYTES_AT_A_TIME, side="right")) - 1
            end = min(max(end, begin + 1), begin + KEYS_AT_A_TIME, len(chosen))
            parts.append(chosen[begin:end])
            begin = end
        return parts

    def _load_from(self, batch: _Batch, space: Space, peer: Peer, chosen: Indices, beside: bool, until: float) -> Job:
        values = batch.values
        assert values is not None
        link = peer.reach(until)
        number, through = next(peer.numbers), False
        sizes = values.totals if len(chosen) == len(values) else values.totals[chosen]
        request = messages.Lookup(
            number,
            peer.space(space, until, link),
            _picked(batch.keys, chosen),
            sizes.tobytes(),
            min(
                ms_left(batch.until),
                SHORT_LEASE_MS if values.bytes_of(chosen) < TOLD_AT_ONCE_BYTES else LONGEST_MS,
            ),
            peer.released(link),
        )
        lost: list[tuple[Indices, int]] = []
        moving: list[tuple[Indices, U64, _core.ValueSums | None, Moving]] = []
        size_bytes = 0
        batch.held.add((peer, link, number))
        try:
            asked = peer.asking(request, messages.Leased, until, link, beside)
            yield
            leased = asked()
            codes = _told(leased, len(chosen))
            found = chosen if leased.codes.count(HIT) == len(chosen) else chosen[codes == HIT]
            size_bytes = values.bytes_of(found) if len(found) else 0
            offsets = np.frombuffer(leased.offsets, np.uint64)
            verified = bool(leased.checksums) and self._verifies(peer)
            expected = np.frombuffer(leased.checksums if verified else b"", np.uint64)
            for at, mine in enumerate(_by_window(leased.window_of, len(leased.windows))):
                way = pulling(link, leased.windows[at], leased.resolutions[at])
                which = found[mine]
                spans = values.spans(which, offsets[mine], to_node=False)
                sums = self._sums(batch, space, which) if verified else None
                moving.append((which, expected[mine if verified else ALL], sums, batch.move(way, spans, beside, sums)))
            if moving:
                yield
            for which, kept, sums, move in moving:
                if word := move.end():
                    peer.says(move.why)
                    lost.append((which, code_of(word)))
                elif verified:
                    wrong = which[(self._taken(batch, space, which, sums) != kept) & (kept != NO_CHECKSUM)]
                    if len(wrong):
                        lost.append((wrong, CORRUPTED))
                        self._drop(peer, link, request.space, _picked(batch.keys, wrong), batch.until)
            through = True
        finally:
            for *_, move in moving:
                move.give_up()
            if not through:
                batch.over(peer, link, number)
            elif moving:
                peer.release(link, number, size_bytes)
            batch.held.discard((peer, link, number))
        batch.moved(size_bytes - sum(values.bytes_of(which) for which, _ in lost))
        batch.codes[chosen if len(chosen) < len(batch.codes) else ALL] = codes
        for which, code in lost:
            batch.codes[which] = code

    def _load_one(self, keys: Any, buffers: Any, timeout_ms: int) -> Outcome | None:
        """What :meth:`load` does, for one small value that goes from the only node, without a checksum, into one numpy array:
        with nothing that several would need, it takes half the time. None: it is another case."""
        began, peers = time.monotonic(), self._awake()
        if len(peers) != 1 or self._verifies(peers[0]) or type(buffers) is not list or len(buffers) != 1:
            return None
        peer, buffer = peers[0], buffers[0]
        if type(buffer) is list and len(buffer) == 1:
            buffer = buffer[0]
        where = plain(buffer, True) if type(buffer) is np.ndarray else None
        listed = _keys(keys)
        if where is None or where[1] >= TOLD_AT_ONCE_BYTES or len(listed) != 1:
            return None
        address, size_bytes = where
        if not of_the_heap(buffer):
            self._may_shrink(np.array([(0, address, size_bytes)], np.uint64), True)
        until = began + checked_timeout(timeout_ms) / 1000
        mine, moved_bytes = self._space.without_geometry(), 0
        codes = np.empty(1, np.uint8)
        try:
            link = peer.reach(until)
            number, through = next(peer.numbers), False
            request = messages.Lookup(
                number,
                peer.space(mine, until, link),
                listed,
                size_bytes.to_bytes(8, "little"),
                min(ms_left(until), SHORT_LEASE_MS),
                peer.released(link),
            )
            try:
                leased = peer.ask(request, messages.Leased, until, link)
                codes[0] = _told(leased, 1)[0]
                if leased.windows:
                    spans = np.array([(int.from_bytes(leased.offsets, "little"), address, size_bytes)], np.uint64)
                    move = Moving(pulling(link, leased.windows[0], leased.resolutions[0]), spans, until)
                    if word := move.end():
                        raise Unreachable(word, move.why)
                    moved_bytes = size_bytes
                    peer.release(link, number, size_bytes)
                through = True
            finally:
                if not through:
                    peer.give_up(link, number)
        except Unreachable as why:
            peer.says(str(why))
            codes[0] = code_of(why.word)
        with self._lock:
            self._counted[codes[0]] += 1
            self._moved_bytes += moved_bytes
        return Outcome(codes, moved_bytes, time.monotonic() - began)

    def _save_to(
        self,
        batch: _Batch,
        space: Space,
        ends: dict[Peer, bytes] | None,
        ttl: int | None,
        copy: bool,
        peer: Peer,
        chosen: Indices,
        beside: bool,
    ) -> Job:
        """``ends``: of a chain, with which key the part before this one has ended at each node."""
        values = batch.values
        assert values is not None
        continues = None
        if ends is not None:
            continues, ends[peer] = ends.get(peer, b""), batch.keys[chosen[-1]]
        link = peer.reach(batch.until)
        number, committed = next(peer.numbers), False
        request = messages.Reserve(
            number,
            peer.space(space, batch.until, link),
            _picked(batch.keys, chosen),
            values.totals[chosen].tobytes(),
            continues,
            ttl,
            ms_left(batch.until),
            copy,
            peer.released(link),
        )
        moving: list[tuple[Indices | slice, _core.ValueSums | None, Moving]] = []
        batch.held.add((peer, link, number))
        try:
            asked = peer.asking(request, messages.Reserved, batch.until, link, beside)
            yield
            reserved = asked()
            codes = _told(reserved, len(chosen)).copy()
            places = np.flatnonzero(codes == SAVED)
            offsets = np.frombuffer(reserved.offsets, np.uint64)
            failed: list[int] = []
            size_bytes = 0
            summed = self._verifies(peer) or (self._checksum == "auto" and peer.beyond_host)
            checksums = np.zeros(len(places) if summed else 0, np.uint64)
            try:
                for at, mine in enumerate(_by_window(reserved.window_of, len(reserved.windows))):
                    way = pushing(link, reserved.windows[at])
                    which = chosen[places[mine]]
                    spans = values.spans(which, offsets[mine], to_node=True)
                    sums = self._sums(batch, space, which) if summed else None
                    moving.append((mine, sums, batch.move(way, spans, beside, sums)))
                if moving:
                    yield
                for mine, sums, move in moving:
                    which = chosen[places[mine]]
                    word = move.end()
                    if word:
                        peer.says(move.why)
                        codes[places[mine]] = code_of(word)
                        failed += np.arange(len(places))[mine].tolist()
                        continue
                    size_bytes += values.bytes_of(which)
                    if summed:
                        checksums[mine] = self._taken(batch, space, which, sums)
                if moving:
                    commit = messages.Commit(number, failed, checksums.tobytes())
                    published = peer.asking(commit, messages.Flags, batch.until, link, beside)
                    yield
                    flags = _told(published(), len(places))
                    codes[places] = np.where(SUCCESSES[codes[places]], flags, codes[places])
                committed = True
            except Unreachable as why:
                peer.says(str(why))
                codes[places] = code_of(why.word)
        finally:
            for _, _, move in moving:
                move.give_up()
            if not committed:
                batch.over(peer, link, number)
            batch.held.discard((peer, link, number))
        if not copy:
            batch.codes[chosen] = codes
            batch.moved(size_bytes if committed else 0)

    def _sums(self, batch: _Batch, space: Space, which: Indices) -> _core.ValueSums | None:
        """For whoever moves those values: it has them in its cache. Of a file the moving tells first what is missing."""
        assert batch.values is not None
        if batch.may_shrink:
            return None
        return _core.ValueSums.of(batch.values.totals[which], _seeds(space, batch.keys, which))

    def _taken(self, batch: _Batch, space: Space, which: Indices, sums: _core.ValueSums | None) -> U64:
        """Their checksums, when they have moved: taken now, if nobody has."""
        taken = None if sums is None else sums.taken()
        if taken is None:
            return batch.checksums(which, _seeds(space, batch.keys, which))
        return np.frombuffer(taken, np.uint64)

    def _verifies(self, peer: Peer) -> bool:
        return not peer.same_host if self._checksum == "auto" else self._checksum == "always"

    def _drop(self, peer: Peer, link: Link, space: int, keys: list[bytes], until: float) -> None:
        """Values that have lost their bytes are not served again."""
        try:
            peer.ask(messages.Remove(space, keys), messages.Count, until, link)
        except Unreachable:
            return

    def _copy_locally(self, batch: _Batch, shares: list[tuple[Peer, Indices]], begin: Begin) -> None:
        """Of what was saved in this call: what was there already may be other bytes than the caller's."""
        local = self._local()
        if local is None or not local.prompt:
            return
        saved = batch.codes == SAVED
        for peer, chosen in shares:
            if peer is local:
                saved[chosen] = False
        began = time.monotonic()
        if self._in_parts(batch, local, np.flatnonzero(saved), begin, alone=True):
            local.late(began)

    def _counted_up(self, batch: _Batch) -> Outcome:
        codes = batch.codes
        if len(codes) == 1:
            with self._lock:
                self._counted[codes[0]] += 1
                self._moved_bytes += batch.size_bytes
            return batch.outcome()
        counts = np.bincount(codes, minlength=len(messages.WORDS))
        with self._lock:
            self._counted += counts
            self._moved_bytes += batch.size_bytes
        return batch.outcome()

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _awake(self) -> list[Peer]:
        """The nodes, in the order of their members; made anew in a forked child and when the members have changed."""
        membership = self._membership
        there = not self._closed and self._pid == os.getpid()
        if there and (membership is None or membership.version == self._version):
            return self._routed[1]
        with self._lock:
            if self._closed:
                return []
            if self._pid != os.getpid():
                self._workers, self._beside = Workers("kvferry-pool", THREADS), Workers("kvferry-pool-beside", BESIDE)
                for workers in (self._workers, self._beside):  # theirs end also if it is dropped without a close()
                    weakref.finalize(self, workers.close).atexit = False
                self._node = Node(**self._node_options)
                self._peers: dict[tuple[str, str], Peer] = {}
                self._routed: tuple[tuple[Member, ...], list[Peer]] = ((), [])  # exchanged whole
                self._version = -1
                self._pid = os.getpid()
            if membership is None or membership.version == self._version:
                return self._routed[1]
            version = membership.version  # read first: a change between the two is seen by the next call
            members = membership.members()
            kept = {}
            for member in members:
                at = (member.id, member.address)
                known = self._peers.pop(at) if at in self._peers else None
                kept[at] = known or Peer(self._node, self._finder(member.address))
            gone, self._peers = self._peers, kept
            self._routed = (members, list(kept.values()))
            self._version = version  # last: who sees it without the lock sees the peers too
            peers = self._routed[1]
        for peer in gone.values():
            peer.close()
        return peers

    def _finder(self, address: str) -> Callable[[int], str | None]:
        """Where a node is at the moment of linking to it."""
        if address != places.OWN:
            return lambda timeout_ms: address
        return lambda timeout_ms: embedded.ensure(timeout_ms) if self._start else embedded.find()

    def _local(self, until: float | None = None) -> Peer | None:
        """The node on this host, of several the first by id; None, if none is known. ``until``: nodes that were never
        reached may be the one, and are tried."""
        peers = self._awake()
        if until is not None and not any(peer.same_host for peer in peers):
            self._reach_all(until, [peer for peer in peers if peer.same_host is None])
        return next((peer for peer in peers if peer.same_host), None)

    def _reach_all(self, until: float, peers: Sequence[Peer]) -> None:
        def reach(peer: Peer) -> None:
            with suppress(Unreachable):
                peer.reach(until)

        self._side_by_side([partial(reach, peer) for peer in peers], until)


_POOLS: "weakref.WeakSet[Pool]" = weakref.WeakSet()


def _in_a_forked_child() -> None:
    """Another thread may have held their locks; everything else of theirs is made anew by the next call (`_awake`)."""
    for pool in list(_POOLS):
        pool._lock = threading.RLock()


os.register_at_fork(after_in_child=_in_a_forked_child)


class _Part:
    """A part under way, and how many of its stages are behind it."""

    __slots__ = ("job", "keys", "stage")

    def __init__(self, keys: Indices, job: Job) -> None:
        self.keys, self.job, self.stage = keys, job, 0

    def turn(self) -> int:
        return TURNS[self.stage]


def _by_window(window_of: bytes, windows: int) -> Sequence[Indices | slice]:
    """For each window the places in it."""
    if windows == 1:
        return [ALL]
    numbers = np.frombuffer(window_of, np.uint16)
    return [np.flatnonzero(numbers == number) for number in range(windows)]


def _told(answer: messages.Flags | messages.Leased | messages.Reserved, keys: int) -> Codes:
    """The codes of an answer. :raises Unreachable: it is none to what was asked for so many keys."""
    try:
        return answer.of(keys)
    except ValueError as error:
        raise Unreachable("node_lost", f"the node answers in words that are none: {error}") from None


def _seeds(space: Space, keys: list[bytes], chosen: Indices) -> U64:
    """What a value's checksum starts from: its key and whose it is, so that a right value under a wrong key is wrong."""
    said = messages.encode([space.namespace, space.domain, space.fingerprint])
    own = int.from_bytes(hashlib.blake2b(said, digest_size=8, person=b"kvferry sums").digest(), "little")
    return routing.digests(_picked(keys, chosen)) ^ np.uint64(own)


def _picked(keys: list[bytes], chosen: Indices) -> list[bytes]:
    return keys if len(chosen) == len(keys) else [keys[i] for i in chosen.tolist()]


def _digest(secret: str | bytes | None) -> bytes:
    if secret is None:
        return b""
    raw = secret if isinstance(secret, bytes) else text("secret", secret).encode()
    return hashlib.blake2b(raw, digest_size=16, person=b"kvferry pool").digest()


def _keys(keys: Any) -> list[bytes]:
    if type(keys) is list and len(keys) == 1 and type(keys[0]) is bytes and 0 < len(keys[0]) <= LONGEST_KEY:
        return list(keys)  # plainly one
    listed = _words("keys", keys)
    if len(set(listed)) != len(listed):
        seen: set[bytes] = set()
        for number, key in enumerate(listed):
            if key in seen:
                raise InvalidArgument(f"key {number} is {shown(key)}, which stands before it too: each key once")
            seen.add(key)
    return listed


def _words(what: str, words: Any) -> list[bytes]:
    if (
        isinstance(words, np.ndarray)
        and words.dtype == np.uint8
        and words.ndim == 2
        and 0 < words.shape[1] <= LONGEST_KEY
    ):
        width = words.shape[1]
        together = np.ascontiguousarray(words).tobytes()
        return [together[at : at + width] for at in range(0, len(together), width)]
    if isinstance(words, str | bytes) or not isinstance(words, Sequence):
        raise InvalidArgument(
            f"{what} is {shown(words)}: give a list of bytes or strings, or the array of prefix_keys()"
        )
    if set(map(type, words)) == {bytes} and set(map(len, words)) <= LENGTHS:
        return list(words)
    listed = []
    for number, word in enumerate(words):
        try:
            raw = word.encode() if isinstance(word, str) else word
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"{what}[{number}] is {shown(word)}, which is no text: {error.reason}") from None
        if not isinstance(raw, bytes):
            raise InvalidArgument(f"{what}[{number}] is {shown(word)}: give bytes or a string")
        raw = bytes(raw)
        if not 0 < len(raw) <= LONGEST_KEY:
            raise InvalidArgument(f"{what}[{number}] has {len(raw)} bytes: 1 to {LONGEST_KEY} are possible")
        listed.append(raw)
    return listed
