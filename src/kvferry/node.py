"""A node: this process's part of the ferry. It holds caches, listens, links, and answers peers from native threads.

The node keeps what is registered alive and names it to the core; verbs that move bytes between nodes are the link's.
Closing a node, dropping it, or leaving the interpreter ends its links first and lets go of the memory last.
"""

import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary, finalize

from kvferry import _core, log, moves
from kvferry.arrays import Memory, element, recognise_group
from kvferry.cache import Cache, own_id
from kvferry.errors import Busy, InvalidArgument
from kvferry.holdings import Holdings, Keys
from kvferry.link import Link
from kvferry.moves import BlockMap, Units
from kvferry.names import Addresses, Key, key_words, target
from kvferry.options import (
    ACCESSES,
    ATTACH,
    KEY_USES,
    LARGEST_UNIT,
    LONGEST_MS,
    PoolOptions,
    checked_timeout,
    format_address,
    named,
    one_of,
    parse_place,
    pool_options,
    random_node_id,
    secret_bytes,
    text,
    transport_bits,
    truth,
    whole,
    whole_numbers,
)
from kvferry.records import NodeStatistics, record
from kvferry.windows import Window

__all__ = ["Node"]

_LOG_ENDS_S = 2.0


class Node:
    """A process's end of every link it has; a context manager, and closing twice is fine.

    =========================  =====================================================================================
    ``listen``                 ``"host:port"`` or ``"[v6]:port"`` where peers may link; port 0 takes a free one, see
                               :attr:`address`; or ``"unix:path"``, a socket's file for processes of this user and host
                               alone, and no port. A node that only links to others needs none
    ``node_id``                what peers call it; random unless given
    ``secret``                 what both ends of a link must know. Without one, peers of this host must run under the
                               same user
    ``transports``             what its own pulls, and pushes to it, may use at all, of ``map``, ``cma`` and ``socket``
    ``pool``                   bytes, or :class:`PoolOptions`, of memory for :meth:`allocate`
    ``heartbeat_ms``           how often a quiet link is used to say that this node is alive
    ``heartbeat_timeout_ms``   after how much silence a peer is lost
    ``copy_threads``           threads that share a big copy, a waiting caller's among them; 0: one for each core, at most 4
    ``lanes``                  data connections per link
    ``attach``                 ``"any"`` lets every process of this user read this one's memory
                               (``PR_SET_PTRACER_ANY``), which ``cma`` needs where Yama forbids it otherwise
    ``program``                a word for the peer, :attr:`kvferry.Link.peer_program` there; kvferry does nothing with it
    =========================  =====================================================================================

    A forked child finds its copy of the node closed.

    :raises AddressInUse: somebody else listens there; nothing is left behind. :raises Busy: no descriptors or threads can be
        had for it, and the sentence says which limit that is; nothing is left behind. :raises OutOfMemory: the same of memory.
    """

    def __init__(
        self,
        listen: str | None = None,
        *,
        node_id: int | None = None,
        secret: str | bytes | None = None,
        transports: Sequence[str] = ("map", "cma", "socket"),
        pool: int | PoolOptions | None = None,
        heartbeat_ms: int = 1000,
        heartbeat_timeout_ms: int = 10_000,
        copy_threads: int = 0,
        lanes: int = 2,
        attach: str = "same",
        program: str = "",
    ) -> None:
        where = None if listen is None else parse_place(listen)
        room = None if pool is None else pool_options(pool)
        core = _core.Node(
            node_id=random_node_id() if node_id is None else whole("node_id", node_id),
            secret=secret_bytes(secret),
            transports=transport_bits(transports),
            copy_threads=whole("copy_threads", copy_threads, most=LARGEST_UNIT),
            lanes=whole("lanes", lanes, most=LARGEST_UNIT),
            heartbeat_ms=whole("heartbeat_ms", heartbeat_ms, most=LONGEST_MS),
            heartbeat_timeout_ms=whole("heartbeat_timeout_ms", heartbeat_timeout_ms, most=LONGEST_MS),
            attach_any=bool(one_of("attach", attach, ATTACH)),
            program=text("program", program),
        )
        self._core = core
        self._address: str | None = None
        self._holdings = Holdings(core)
        self._links: WeakValueDictionary[int, Link] = WeakValueDictionary()
        # What is registered must outlive the core's use of it, also when this object is dropped without being closed.
        try:
            self._end = finalize(self, _end, core, self._holdings.memories, log.start(core))
        except BaseException:
            core.close()
            raise
        try:
            if room is not None:
                core.create_pool(
                    size_bytes=room.size_bytes, page_shift=room.page_shift, segment_bytes=room.segment_bytes
                )
            if where is not None:
                self._address = self._listen(where)
        except BaseException:
            self.close()
            raise

    # --- links -------------------------------------------------------------------------------------------------------

    def listen(self, address: str) -> str:
        """Lets peers link at ``address``; returns it with the port that was taken, or the whole path.

        A socket's file has mode 0600 and is removed when the node no longer listens. One that a process has left that
        ended otherwise is replaced.

        :raises AddressInUse: somebody else listens there, or it is a file of another sort.
        """
        self._address = self._listen(parse_place(address))
        return self._address

    def stop_listening(self) -> None:
        """Takes no new links; those that there are stay, and work as before. Not listening is fine.

        While a link is up whose lanes come over TCP (a peer on another host), its port stays taken, for that link alone.
        """
        self._core.stop_listening()
        self._address = None

    def link(self, address: str, timeout_ms: int = 3000, *, replace: bool = True) -> Link:
        """Links to the node that listens at ``address``. Afterwards both sides may pull and push.

        A link that this node had opened to that one before is replaced and goes down, with what is in flight on it: link
        once and let all threads use that one. With ``replace=False`` that link stays, whichever address led there.

        :raises LinkFailed: nobody answers there. :raises Refused: another secret, version or user.
        :raises AlreadyLinked: another live node with this one's ``node_id`` is linked to that one; or, with
            ``replace=False``, this node has opened a link to it, which is as it was.
        :raises DeadlineExceeded: time was up. :raises KeyboardInterrupt: there is no link.
        """
        where, timeout_ms, replace = parse_place(address), checked_timeout(timeout_ms), truth("replace", replace)
        if isinstance(where, str):
            return self._wrapped(self._core.connect_unix(where, timeout_ms, replace))
        return self._wrapped(self._core.connect(*where, timeout_ms, replace))

    @property
    def links(self) -> list[Link]:
        """The links that are up, those that peers opened among them."""
        return [self._wrapped(core) for core in self._core.links()]

    # --- calls -------------------------------------------------------------------------------------------------------

    def serve_calls(self) -> None:
        """From now on what peers call waits for :meth:`next_call`, which says so itself when it is first called. Before, their
        calls fail with Unsupported. Listen after this, and nobody hears that."""
        self._core.serve_calls()

    def next_call(self, timeout_ms: int) -> _core.Call | _core.LinkDown | None:
        """The next message of a peer (:meth:`kvferry.Link.call`), read on this very thread; None if none came in time.

        Any number of threads may wait here. Each :class:`Call` waits for its :meth:`Call.answer`; when one is dropped unanswered
        (no variable names it any more), its asker hears that at once. A :class:`LinkDown` says, once, that a link over which
        calls had come is down; those that nobody had taken yet are gone::

            while not node.closed:
                call = node.next_call(timeout_ms=1000)
                if isinstance(call, kvferry.Call) and not call.one_way:
                    call.answer(call.payload.upper())
                call = None

        :raises NodeClosed: the node is closed, also when that happens meanwhile.
        """
        if timeout_ms.__class__ is not int or not 0 <= timeout_ms <= LONGEST_MS:
            timeout_ms = checked_timeout(timeout_ms)
        return self._core.next_call(timeout_ms)

    # --- memory ------------------------------------------------------------------------------------------------------

    def register(self, name: str, tensors: Any, *, layout: str = "blocks", keys: Keys = None) -> Cache:
        """Registers memory that the caller owns, under ``name`` (``""``: none), and keeps it alive meanwhile.

        ``tensors``: one array or a sequence of them, all of one shape ``[blocks or rows, ...]`` and element type: numpy
        arrays, torch tensors on the CPU, anything with ``__array_interface__`` or DLPack. Each block or row must be
        contiguous; the distance from one to the next may be larger. For layers, K and V in turns: K0 V0 K1 V1 ….
        ``keys``: one RequestKey or PrefixKey (or None) per row, or a BlocksKey. The memory is not touched.

        :raises Unsupported: an array is not in host memory. :raises AlreadyExists: the name is taken.
        :raises InvalidArgument: no array, read-only, units not contiguous, larger than its storage, lazily conjugated or
            negated, or tensors that differ.
        """
        name = text("name", name)
        return self._holdings.register(self, name, layout, "host", recognise_group(tensors, name), keys)

    def register_addresses(
        self,
        name: str,
        addresses: Sequence[int],
        *,
        unit_bytes: int,
        count: int,
        stride_bytes: int | None = None,
        layout: str = "blocks",
        kind: str = "host",
        keys: Keys = None,
        reachable: bool = True,
    ) -> Cache:
        """Registers memory by raw addresses: tensors of ``count`` units of ``unit_bytes``, ``stride_bytes`` apart.

        The caller keeps it alive until the cache is unregistered. Addresses that are not mapped, or not writable, are
        found at the first use: an InvalidArgument that names cache and tensor, never a crash. ``reachable=False``: peers
        that name the cache are told InvalidArgument; they reach it through windows alone.

        :raises Unsupported: this build moves no memory of that ``kind``.
        """
        name, kind = text("name", name), text("kind", kind)
        shape = whole("count", count), whole("unit_bytes", unit_bytes)
        stride = None if stride_bytes is None else whole("stride_bytes", stride_bytes)
        memories = [Memory.plain(at, shape, "uint8", 1, stride) for at in whole_numbers("addresses", addresses)]
        if not memories:
            raise InvalidArgument(
                f"cache {named(name)}: a cache needs at least one address", cache=name, operation="register"
            )
        return self._holdings.register(self, name, layout, kind, memories, keys, truth("reachable", reachable))

    def allocate(
        self,
        name: str,
        *,
        tensors: int,
        shape: Sequence[int],
        dtype: Any,
        layout: str = "blocks",
        keys: Keys = None,
        keys_end_by: str = "key",
    ) -> Cache:
        """Takes a cache of ``tensors`` tensors of ``shape`` from the node's pool; peers on this host may map it.

        Its bytes are reached by :meth:`Cache.numpy` and :meth:`Cache.torch`. ``dtype``: a name such as ``"bfloat16"``, or a
        numpy or torch element type. ``keys_end_by``: what uses up a request key: the pull that names it (``"key"``), any pull
        of its row, by id or name too (``"row"``), or nothing but :meth:`remove_key` (``"never"``).

        :raises OutOfMemory: the pool has too little left; nothing is kept. :raises Unsupported: there is no pool.
        :raises InvalidArgument: a key is bound already, or there are more keys than rows.
        """
        dtype_name, itemsize = element(dtype)
        sizes = tuple(whole_numbers("shape", shape))
        if not sizes:
            raise InvalidArgument("shape=() has no dim 0, which counts the blocks or rows")
        like = Memory.plain(0, sizes, dtype_name, itemsize)
        whole("bytes of one block or row", like.unit_bytes)
        number = whole("tensors", tensors, most=LARGEST_UNIT)
        ends = one_of("keys_end_by", keys_end_by, KEY_USES)
        return self._holdings.allocate(self, text("name", name), layout, number, like, keys, ends)

    def unregister(self, cache: Cache | int) -> bool:
        """Ends a cache, allocated or not; False if there is none (any more).

        When this returns nobody's bytes move under it, its peers' reads that were under way fail, and its memory may be
        freed or used for something else.

        :raises Busy: the kernel itself holds a copy there, which waits for the file behind the memory. The cache has ended for
            everybody, but its memory must stay as it is; unregister it again to hear when it is free.
        """
        return self._holdings.unregister(own_id(cache, self))

    def deallocate(self, cache: Cache | int) -> bool:
        """Gives an allocated cache back, or, while request keys are bound to it, leaves it to its peers until the last of
        them has been pulled or removed. False if there is no such allocated cache."""
        return self._holdings.deallocate(own_id(cache, self))

    def remove_key(self, key: Key) -> bool:
        """Unbinds a key of an allocated cache; False if it is not bound."""
        return self._core.remove_key(key_words(key))

    @property
    def caches(self) -> list[Cache]:
        """What is registered at this node, in the order of registration."""
        return self._holdings.all(self)

    def cache(self, cache: Cache | int) -> Cache:
        """The cache with that id.

        :raises CacheNotFound: it is not registered here (any more).
        """
        return self._holdings.find(self, own_id(cache, self))

    def open_window(self, cache: Cache | int, units: Units, access: str, ttl_ms: int) -> Window:
        """The same as :meth:`Cache.window`, which says what it is for."""
        listed = moves.unit_numbers(units)
        bits = one_of("access", access, ACCESSES)
        name = self._core.open_window(own_id(cache, self), listed, bits, checked_timeout(ttl_ms, "ttl_ms"))
        return Window(name, access, len(listed), self._core)

    def copy(
        self,
        source: Cache | int | Addresses,
        into: Cache | int | Addresses,
        *,
        blocks: BlockMap | None = None,
        row: int | None = None,
        source_row: int | None = None,
        row_to_blocks: Units | None = None,
        size_bytes: int | None = None,
        layers: range | None = None,
        source_layers: range | None = None,
        tensors_per_layer: int = 2,
        offset_bytes: int = 0,
    ) -> _core.Done:
        """Copies between two caches of this node, or within one, then in the order given. Arguments as in
        :meth:`Link.pull`; ``source_row`` is 0 unless given, and both sides of a row begin ``offset_bytes`` into it.

        The two must not overlap. One of them may be memory of this process that is not registered: :class:`Addresses`, one
        for each tensor moved, whose ``unit_bytes`` are those of the other side unless given. The caller keeps it as long as the
        call lasts.
        """
        bare_source, bare_into = isinstance(source, Addresses), isinstance(into, Addresses)
        here, there = moves.tensor_ranges(
            layers, source_layers, tensors_per_layer, "source_layers", bare_mine=bare_into, bare_far=bare_source
        )
        from_, to = (side if isinstance(side, Addresses) else own_id(side, self) for side in (source, into))
        within = not bare_source and from_ == to
        source_row, row = moves.row_number("source_row", source_row), moves.row_number("row", row)
        what = moves.move(blocks, source_row, row, row_to_blocks, size_bytes, there, here, keep_order=within)
        return self._core.copy(target(from_), target(to), what, whole("offset_bytes", offset_bytes))

    # --- life --------------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str | None:
        """Where it listens, with the port taken; None if it does not."""
        return self._address

    @property
    def node_id(self) -> int:
        """What peers call it."""
        return self._core.node_id

    @property
    def closed(self) -> bool:
        """Whether it is closed, or this process is a forked child of the one that made it."""
        return self._core.closed

    def statistics(self) -> NodeStatistics:
        """What it holds right now; a record that does not change."""
        return record(NodeStatistics, self._core.statistics())

    def close(self) -> None:
        """Ends its links and caches. When this returns its threads have ended and nothing is read or written any more.

        It waits for no peer, only for the pieces in hand; Ctrl-C is heard after that.

        :raises Busy: the kernel itself holds a copy in the memory of a cache, which must stay; all else has ended. Close it
            again to hear when that memory is free.
        """
        self._core.close()
        self._end()
        self._holdings.forget()
        self._address = None

    def __enter__(self) -> "Node":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = f" at {self._address}" if self._address else ""
        return f"<Node {self.node_id}{where}{', closed' if self.closed else ''}>"

    def _listen(self, where: tuple[str, int] | str) -> str:
        if isinstance(where, str):
            return f"unix:{self._core.listen_unix(where)}"
        return format_address(*self._core.listen(*where))

    def _wrapped(self, core: _core.Link) -> Link:
        link = self._links.get(core.link_id)
        if link is None:
            link = self._links[core.link_id] = Link(core, self)
        return link


_held: list[tuple[_core.Node, dict[int, tuple[Memory, ...]]]] = []


def _end(core: _core.Node, memories: dict[int, tuple[Memory, ...]], logging_thread: threading.Thread) -> None:
    """Closes the core before the memory that it may be reading goes, and before the interpreter does."""
    try:
        core.close()
    except Busy:
        _held.append((core, memories.copy()))  # the kernel may write there yet: kept while the process lives
    if logging_thread is not threading.current_thread():
        logging_thread.join(_LOG_ENDS_S)
    memories.clear()
