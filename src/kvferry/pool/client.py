"""A pool as its user sees it: blocks are saved and loaded in batches under their keys, and nothing that fails is an error.

Splits a batch over the nodes that its keys belong to, asks each for places, has the bytes moved, and puts the answers
together. A node that is dead, slow or full costs its own keys and no others. Policy is the nodes'; bytes are the core's.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.arrays import Memory, recognise
from kvferry.errors import InvalidArgument, NodeClosed
from kvferry.link import Link
from kvferry.node import Node
from kvferry.options import checked_timeout, one_of, shown, text, truth, whole
from kvferry.pool import embedded, messages, places, routing
from kvferry.pool import keys as key_rules
from kvferry.pool.membership import Member, Membership, StaticMembership
from kvferry.pool.messages import LONGEST_KEY, code_of
from kvferry.pool.moving import moved, moves_of, ms_left, pulling, pushing
from kvferry.pool.outcome import SUCCESSES, Codes, Outcome
from kvferry.pool.peer import Peer, Space, Unreachable
from kvferry.pool.values import U64, Values, of_blocks, of_buffers
from kvferry.pool.workers import Future, Workers

__all__ = ["Pool"]

THREADS = 8
BESIDE = 64  # those that wait for nodes that stand still must leave some for the others
TRANSPORTS = ("map", "cma", "socket")
CHECKSUMS = {"auto": 0, "always": 1, "never": 2}
# At most this much of a batch is reserved or leased at a time: a batch of any size takes a bounded share of a node.
KEYS_AT_A_TIME = 16_384
BYTES_AT_A_TIME = 256 << 20
LOCAL_FIRST = 4  # the node on this host has one part in so many of the time that is left to answer before the owners

HIT, SAVED, TIMEOUT, NODE_LOST, POOL_OFF, NEVER_SAVED, CORRUPTED = map(
    code_of, ("hit", "saved", "timeout", "node_lost", "pool_off", "never_saved", "corrupted")
)
NO_CHECKSUM = np.uint64(0)

Indices = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Batch:
    """One call: its keys, where its values lie, and what became of each key so far."""

    keys: list[bytes]
    routes: list[bytes] | None
    values: Values | None
    began: float
    until: float
    codes: Codes
    size_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def moved(self, size_bytes: int) -> None:
        """From any of the threads that carry the batch out."""
        with self.lock:
            self.size_bytes += size_bytes

    def outcome(self) -> Outcome:
        return Outcome(self.codes, self.size_bytes, time.monotonic() - self.began)


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
        self._space = Space(text("namespace", namespace), _digest(secret), b"", quota)
        self._membership = membership
        self._node_options: dict[str, Any] = {
            "secret": node_secret,
            "transports": transports,
            "program": "kvferry-pool-client",
        }
        one_of("checksum", checksum, CHECKSUMS)
        self._checksum = checksum
        self._keep = keep
        self._memories: tuple[Memory, ...] = ()
        self._lock = threading.Lock()
        self._closed = False
        self._pid = 0
        self._start = True
        self._counted = np.zeros(len(messages.WORDS), np.int64)
        self._moved_bytes = 0
        self._awake()

    @classmethod
    def connect(
        cls,
        members: "str | Sequence[str | Member] | Membership | None" = None,
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
        """Opens a pool over ``members``: an address, a list of addresses or of :class:`kvferry.Member`, or a
        :class:`Membership` that may change meanwhile.

        Without any, ``KVFERRY_POOL`` or the configuration file says where (docs/pool.md); else it is a node of this user's
        own on this host, which is started if need be and ``start`` allows it. Nothing that is missing there is an error:
        loads are misses until a node can be reached.

        ``namespace``: values of one are never found in another. With a ``secret``, only those who give the same one find
        them. ``quota_bytes``: the most that this namespace may fill of each node. ``node_secret``: what links to the nodes
        must know. ``transports``: what links to the nodes may use at all. ``checksum``: whether values are saved with a
        checksum, and verified by it when they are loaded: ``"auto"``, if they cross from host to host, ``"always"`` or
        ``"never"``.
        """
        until = time.monotonic() + checked_timeout(timeout_ms) / 1000
        membership: Membership | None
        if members is not None and not isinstance(members, str | Sequence):
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
        with self._lock:
            space = self._space
            self._memories = memories
            self._space = Space(space.namespace, space.domain, fingerprint, space.quota_bytes)

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
        return self._loading(keys, blocks, buffers, routes, timeout_ms, local_only)()

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
        return self._workers.submit(self._loading(keys, blocks, buffers, routes, timeout_ms, local_only))

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
        return self._saving(keys, blocks, buffers, routes, timeout_ms, ttl_ms, chain, local_copy)()

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
        return self._workers.submit(self._saving(keys, blocks, buffers, routes, timeout_ms, ttl_ms, chain, local_copy))

    def exists(self, keys: Any, *, routes: Any = None, timeout_ms: int = 1000, local_only: bool = False) -> Outcome:
        """Which keys are there at this moment (``hit`` or ``never_saved``)."""
        return self._looking(keys, routes, timeout_ms, local_only)()

    def exists_async(
        self, keys: Any, *, routes: Any = None, timeout_ms: int = 1000, local_only: bool = False
    ) -> "Future[Outcome]":
        """Starts an :meth:`exists` and returns at once."""
        return self._workers.submit(self._looking(keys, routes, timeout_ms, local_only))

    def remove(self, keys: Any, *, routes: Any = None, timeout_ms: int = 1000) -> int:
        """Drops values, and the copies of them on this host; how many values there were. What a node that cannot be
        reached holds, stays, and so do copies on other hosts."""
        batch = self._batch(keys, routes, None, timeout_ms)
        removed: list[int] = []

        def ask(peer: Peer, chosen: Indices) -> None:
            link = peer.reach(batch.until)
            request = messages.Remove(peer.space(self._space, batch.until, link), _picked(batch.keys, chosen))
            removed.append(peer.ask(request, messages.Count, batch.until, link).keys)

        shares, local = self._shares(batch), self._local()
        every = np.arange(len(batch.keys), dtype=np.int64)
        # The local node counts what it owns and not its copies: it is asked for all keys.
        shares = [(peer, chosen) for peer, chosen in shares if peer is not local]
        self._on_each(batch, shares if local is None else [(local, every), *shares], ask)
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

        self._side_by_side([partial(ask, peer) for peer in self._awake()])
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
        if where is not None and where.raw and len(where):
            every = np.arange(len(where))
            spans = where.spans(every, np.zeros(len(where), np.uint64), to_node=not writable)
            self._node._core.check_memory(moves_of(spans), writable)
        codes = np.full(len(listed), TIMEOUT if self._membership is not None else POOL_OFF, np.uint8)
        return _Batch(listed, routed, where, began, until, codes)

    def _values(self, blocks: Any, buffers: Any) -> Callable[[int], Values]:
        if (blocks is None) == (buffers is None):
            raise InvalidArgument("say where the values are by blocks= or by buffers=, one of the two")
        if buffers is not None:
            return lambda count: of_buffers(buffers, count)
        memories = self._memories
        if not memories:
            raise InvalidArgument("blocks= counts the blocks of what was registered: call register(...) first")
        return lambda count: of_blocks(memories, blocks, count, memories)

    def _loading(
        self, keys: Any, blocks: Any, buffers: Any, routes: Any, timeout_ms: int, local_only: bool
    ) -> Callable[[], Outcome]:
        batch = self._batch(keys, routes, self._values(blocks, buffers), timeout_ms, writable=True)
        local, space = truth("local_only", local_only), self._space_of(buffers)

        def load() -> Outcome:
            self._read(batch, local, lambda *share: self._load_from(space, batch, *share))
            return self._counted_up(batch)

        return load

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
    ) -> Callable[[], Outcome]:
        batch = self._batch(keys, routes, self._values(blocks, buffers), timeout_ms)
        ttl = None if ttl_ms is None else whole("ttl_ms", ttl_ms, least=1)
        chained, space = truth("chain", chain), self._space_of(buffers)
        copied = truth("local_copy", local_copy)

        def save() -> Outcome:
            shares = self._shares(batch)
            self._on_each(
                batch, shares, lambda peer, chosen: self._save_to(peer, space, batch, chosen, chained, ttl, False)
            )
            if copied:
                self._copy_locally(shares, space, batch, chained, ttl)
            return self._counted_up(batch)

        return save

    def _looking(self, keys: Any, routes: Any, timeout_ms: int, local_only: bool) -> Callable[[], Outcome]:
        batch = self._batch(keys, routes, None, timeout_ms)
        local, space = truth("local_only", local_only), self._space

        def look(peer: Peer, chosen: Indices, until: float) -> None:
            link = peer.reach(until)
            request = messages.Exists(peer.space(space, until, link), _picked(batch.keys, chosen))
            flags = peer.ask(request, messages.Flags, until, link)
            batch.codes[chosen] = np.frombuffer(flags.codes, np.uint8)

        def exists() -> Outcome:
            self._read(batch, local, look)
            return batch.outcome()

        return exists

    def _space_of(self, buffers: Any) -> Space:
        space = self._space
        return space if buffers is None else Space(space.namespace, space.domain, b"", space.quota_bytes)

    def _read(self, batch: _Batch, local_only: bool, do: Callable[[Peer, Indices, float], None]) -> None:
        """``do(peer, chosen, until)``: the node on this host is asked for all keys, then each owner for what is missing.

        ``until`` is for asking alone. The local node, which may be the one that stands still, has a part of the time.
        """

        def asked_for_long(peer: Peer, chosen: Indices) -> None:
            do(peer, chosen, batch.until)

        every = np.arange(len(batch.keys), dtype=np.int64)
        if local_only:
            local = self._local(batch.until)
            if local is not None:
                self._on_each(batch, [(local, every)], asked_for_long)
            elif self._membership is not None:
                batch.codes[:] = NEVER_SAVED
            return
        shares, local = self._shares(batch), self._local()
        if local is not None and any(peer is not local for peer, _ in shares) and local.prompt:
            answered = np.zeros(len(batch.keys), np.bool_)
            for part in self._parts(batch, every):
                now = time.monotonic()
                try:
                    do(local, part, now + (batch.until - now) / LOCAL_FIRST)
                except Unreachable:
                    local.late(now)
                    break
                answered[part] = True
            missing = ~SUCCESSES[batch.codes]
            left = [(peer, chosen[missing[chosen] & ~(answered[chosen] & (peer is local))]) for peer, chosen in shares]
            shares = [share for share in left if len(share[1])]
        self._on_each(batch, shares, asked_for_long)

    def _on_each(self, batch: _Batch, shares: list[tuple[Peer, Indices]], do: Callable[[Peer, Indices], None]) -> None:
        """``do`` for each share, side by side; a node that cannot be asked leaves its word to its keys."""

        def carry_out(peer: Peer, chosen: Indices) -> None:
            for part in self._parts(batch, chosen):
                try:
                    do(peer, part)
                except Unreachable as why:
                    rest = chosen[np.searchsorted(chosen, part[0]) :]
                    waiting = rest[~SUCCESSES[batch.codes[rest]]]
                    batch.codes[waiting] = code_of(why.word)
                    return

        self._side_by_side([partial(carry_out, *share) for share in shares])

    def _side_by_side(self, jobs: Sequence[Callable[[], None]]) -> None:
        """The first on this thread. Ends when all have ended, and raises what one of them raises."""
        others = [self._beside.submit(job) for job in jobs[1:]]
        try:
            for job in jobs[:1]:
                job()
        finally:
            for future in others:  # whatever has happened here: nothing moves any more when this call has ended
                future.settle()
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
            return [(peers[0], np.arange(len(batch.keys), dtype=np.int64))]
        digests = routing.digests(batch.keys if batch.routes is None else batch.routes)
        owners = routing.owners(digests, members)
        return [(peers[i], np.flatnonzero(owners == i)) for i in range(len(peers)) if (owners == i).any()]

    def _parts(self, batch: _Batch, chosen: Indices) -> list[Indices]:
        """``chosen`` in order, in parts that are asked for at once."""
        if batch.values is None or not len(chosen):
            return [chosen[at : at + KEYS_AT_A_TIME] for at in range(0, len(chosen), KEYS_AT_A_TIME)]
        sizes = batch.values.totals[chosen]
        if len(chosen) <= KEYS_AT_A_TIME and int(sizes.sum()) <= BYTES_AT_A_TIME:
            return [chosen]
        parts, begin = [], 0
        before = np.concatenate([[0], np.cumsum(sizes)])
        while begin < len(chosen):
            end = int(np.searchsorted(before, before[begin] + BYTES_AT_A_TIME, side="right")) - 1
            end = min(max(end, begin + 1), begin + KEYS_AT_A_TIME, len(chosen))
            parts.append(chosen[begin:end])
            begin = end
        return parts

    def _load_from(self, space: Space, batch: _Batch, peer: Peer, chosen: Indices, until: float) -> None:
        values = batch.values
        assert values is not None
        link = peer.reach(until)
        request = messages.Lookup(
            peer.space(space, until, link),
            _picked(batch.keys, chosen),
            values.totals[chosen].tobytes(),
            ms_left(batch.until),
            peer.released(link),
        )
        leased = peer.ask(request, messages.Leased, until, link)
        codes = np.frombuffer(leased.codes, np.uint8).copy()
        hits = np.flatnonzero(codes == HIT)
        if len(hits):
            windows = np.frombuffer(leased.window_of, np.uint16)
            offsets = np.frombuffer(leased.offsets, np.uint64)
            seeds = expected = None
            if leased.checksums and self._verifies(peer):
                expected = np.frombuffer(leased.checksums, np.uint64)
                seeds = _seeds(space, batch.keys, chosen[hits])
            try:
                for number, name in enumerate(leased.windows):
                    mine = np.flatnonzero(windows == number)
                    which = chosen[hits[mine]]
                    way = pulling(link, name, leased.resolutions[number])
                    word, sums = moved(way, values, which, offsets[mine], batch.until, _at(seeds, mine))
                    if word:
                        codes[hits[mine]] = code_of(word)
                    elif expected is not None:
                        wrong = (sums != expected[mine]) & (expected[mine] != NO_CHECKSUM)
                        codes[hits[mine[wrong]]] = CORRUPTED
            finally:
                peer.release(link, leased.lease, int(values.totals[chosen[hits]].sum()))
            batch.moved(int(values.totals[chosen[codes == HIT]].sum()))
            if (codes == CORRUPTED).any():
                self._drop(peer, link, request.space, _picked(batch.keys, chosen[codes == CORRUPTED]), batch.until)
        batch.codes[chosen] = codes

    def _save_to(
        self, peer: Peer, space: Space, batch: _Batch, chosen: Indices, chain: bool, ttl: int | None, copy: bool
    ) -> None:
        values = batch.values
        assert values is not None
        link = peer.reach(batch.until)
        request = messages.Reserve(
            peer.space(space, batch.until, link),
            _picked(batch.keys, chosen),
            values.totals[chosen].tobytes(),
            chain,
            ttl,
            ms_left(batch.until),
            copy,
            peer.released(link),
        )
        reserved = peer.ask(request, messages.Reserved, batch.until, link)
        codes = np.frombuffer(reserved.codes, np.uint8).copy()
        places = np.flatnonzero(codes == SAVED)
        if len(places):
            windows = np.frombuffer(reserved.window_of, np.uint16)
            offsets = np.frombuffer(reserved.offsets, np.uint64)
            failed: list[int] = []
            size_bytes = 0
            seeds, checksums = None, np.zeros(0, np.uint64)
            if self._verifies(peer) or (self._checksum == "auto" and peer.beyond_host):
                seeds, checksums = _seeds(space, batch.keys, chosen[places]), np.zeros(len(places), np.uint64)
            committed = False
            try:
                for number, name in enumerate(reserved.windows):
                    mine = np.flatnonzero(windows == number)
                    which = chosen[places[mine]]
                    word, sums = moved(pushing(link, name), values, which, offsets[mine], batch.until, _at(seeds, mine))
                    if word:
                        codes[places[mine]] = code_of(word)
                        failed += mine.tolist()
                        continue
                    size_bytes += int(values.totals[which].sum())
                    if seeds is not None:
                        checksums[mine] = sums
                commit = messages.Commit(reserved.reservation, failed, checksums.tobytes())
                flags = peer.ask(commit, messages.Flags, batch.until, link)
                committed = True
            except Unreachable as why:
                codes[places] = code_of(why.word)
            finally:
                if not committed:  # nothing of it is published; the node has its places back at once
                    everything = list(range(len(places)))
                    peer.tell(link, messages.Commit(reserved.reservation, everything, b""))
            if committed:
                published = np.frombuffer(flags.codes, np.uint8)
                codes[places] = np.where(SUCCESSES[codes[places]], published, codes[places])
                if not copy:
                    batch.moved(size_bytes)
        if not copy:
            batch.codes[chosen] = codes

    def _verifies(self, peer: Peer) -> bool:
        return not peer.same_host if self._checksum == "auto" else self._checksum == "always"

    def _drop(self, peer: Peer, link: Link, space: int, keys: list[bytes], until: float) -> None:
        """Values that have lost their bytes are not served again."""
        try:
            peer.ask(messages.Remove(space, keys), messages.Count, until, link)
        except Unreachable:
            return

    def _copy_locally(
        self, shares: list[tuple[Peer, Indices]], space: Space, batch: _Batch, chain: bool, ttl: int | None
    ) -> None:
        """Of what was saved in this call: what was there already may be other bytes than the caller's."""
        local = self._local()
        if local is None or not local.prompt:
            return
        saved = batch.codes == SAVED
        for peer, chosen in shares:
            if peer is local:
                saved[chosen] = False
        began = time.monotonic()
        for part in self._parts(batch, np.flatnonzero(saved)):
            try:
                self._save_to(local, space, batch, part, chain, ttl, True)
            except Unreachable:
                local.late(began)
                return

    def _counted_up(self, batch: _Batch) -> Outcome:
        counts = np.bincount(batch.codes, minlength=len(messages.WORDS))
        with self._lock:
            self._counted += counts
            self._moved_bytes += batch.size_bytes
        return batch.outcome()

    # --- nodes -------------------------------------------------------------------------------------------------------

    def _awake(self) -> list[Peer]:
        """The nodes, in the order of their members; made anew in a forked child and when the members have changed."""
        membership = self._membership
        with self._lock:
            if self._closed:
                return []
            if self._pid != os.getpid():
                self._pid = os.getpid()
                self._workers, self._beside = Workers("kvferry-pool", THREADS), Workers("kvferry-pool-beside", BESIDE)
                self._node = Node(**self._node_options)
                self._peers: dict[tuple[str, str], Peer] = {}
                self._routed: tuple[tuple[Member, ...], list[Peer]] = ((), [])  # exchanged whole
                self._version = -1
            if membership is None or membership.version == self._version:
                return self._routed[1]
            self._version = membership.version  # read first: a change between the two is seen by the next call
            members = membership.members()
            kept = {}
            for member in members:
                at = (member.id, member.address)
                known = self._peers.pop(at) if at in self._peers else None
                kept[at] = known or Peer(self._node, self._finder(member.address))
            gone, self._peers = self._peers, kept
            self._routed = (members, list(kept.values()))
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

        self._side_by_side([partial(reach, peer) for peer in peers])


def _at(seeds: U64 | None, which: Indices) -> U64 | None:
    return None if seeds is None else seeds[which]


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
    if set(map(type, words)) == {bytes} and min(map(len, words)) > 0 and max(map(len, words)) <= LONGEST_KEY:
        return list(words)
    listed = []
    for number, word in enumerate(words):
        raw = word.encode() if isinstance(word, str) else word
        if not isinstance(raw, bytes):
            raise InvalidArgument(f"{what}[{number}] is {shown(word)}: give bytes or a string")
        if not 0 < len(raw) <= LONGEST_KEY:
            raise InvalidArgument(f"{what}[{number}] has {len(raw)} bytes: 1 to {LONGEST_KEY} are possible")
        listed.append(raw)
    return listed
