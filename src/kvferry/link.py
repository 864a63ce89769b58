"""A link: a live peer, and the verbs that move bytes to and from it.

Either side may pull and push, whoever connected. Pulling is copied by this process into its own memory; a push is carried
out by the receiver. Each verb turns the caller's words into the core's and does no more: what exists, what fits and what
is still alive is decided there. A one-off call adds about two microseconds to the core's own.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry import _core, moves
from kvferry.cache import Cache, OwnMemory, own_id, own_memory_or_id
from kvferry.errors import KvferryError, NodeClosed
from kvferry.layers import LayerPush
from kvferry.moves import BlockMap, Spans, Units
from kvferry.names import Addresses, FarCache, Targets
from kvferry.options import LONGEST_MS, checked_timeout, transport_bit, truth
from kvferry.records import CacheDescription, LinkStatistics, record
from kvferry.transfer import Answer, Prepared, Transfer, begun

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvferry.node import Node

__all__ = ["Link"]

_CLOSE_MS = 1000


class Link:
    """Made by :meth:`kvferry.Node.link`, or found in :attr:`kvferry.Node.links` when the peer connected.

    Arguments that mean the same in every verb:

    =====================  =========================================================================================
    ``blocks``             ``{source: destination, ...}`` or ``(sources, destinations)``, two sequences or arrays; a
                           destination named twice keeps its last writer. With a window on the far side also a list of this
                           side's blocks, in the window's order
    ``row``                the row of this side's cache; the far side's is ``source_row`` or ``destination_row``, by
                           default the row that the key names, else row 0
    ``row_to_blocks``      blocks that the source's row fills, in order; the last one gets what is left. Fewer than it fills
                           take its beginning, and the rest is not moved
    ``size_bytes``         how much of a row to move, from its start; by default this side's whole row
    ``layers``             ``range`` of layers of this side's cache, and of the far side's unless that has its own, or is
                           Addresses
    ``tensors_per_layer``  layer L is tensors ``[L * n, (L + 1) * n)``; 2 for K and V in turns
    ``spans``              instead of all of these: an (n, 3) array of int64 or uint64, one row for each span of bytes: source
                           offset, destination offset, bytes. Offsets count from the start of that side's only tensor;
                           with :data:`kvferry.MEMORY` as this side's cache they are addresses of this process. Through a
                           window each span must lie in its blocks. Where spans overlap at the destination, any may win
    ``timeout_ms``         the operation's deadline, 0 to 2**31 - 1
    ``transport``          ``"map"``, ``"cma"`` or ``"socket"``, instead of the fastest that the link offers
    =====================  =========================================================================================

    Without blocks and rows, everything is moved: unit i to unit i.

    Errors of every verb: InvalidArgument, CacheNotFound, NotLinked, NodeClosed and Unsupported come before the first
    byte. PeerLost, DeadlineExceeded and Cancelled may come later, and so may CacheNotFound, when the source ends
    meanwhile, and InvalidArgument, when memory turns out not to be there: then ``bytes_touched`` says whether the
    destination spans of this operation may have changed, and ``destination_settled`` whether the receiver is known to have
    stopped. Repeating is safe after every error, except that a request key of an allocated cache is used up by the pull
    that succeeded.

    Ctrl-C ends every wait within a fraction of a second. A pull or push has been cancelled then, and the bytes of its
    destination are as after an error with ``bytes_touched`` True; the link stays.
    """

    __slots__ = ("__weakref__", "_core", "_node", "_targets")

    def __init__(self, core: _core.Link, node: "Node") -> None:
        self._core = core
        self._node = node
        self._targets = Targets()

    # --- verbs -------------------------------------------------------------------------------------------------------

    def pull(
        self,
        source: FarCache,
        *,
        into: Cache | int | OwnMemory,
        blocks: BlockMap | None = None,
        row: int | None = None,
        source_row: int | None = None,
        row_to_blocks: Units | None = None,
        size_bytes: int | None = None,
        layers: range | None = None,
        source_layers: range | None = None,
        tensors_per_layer: int = 2,
        spans: Spans | None = None,
        timeout_ms: int = 1000,
        transport: str | None = None,
    ) -> _core.Done:
        """Copies from the peer's ``source`` into this node's cache ``into`` and returns when the bytes are there."""
        what = moves.pull(
            source,
            blocks,
            row,
            source_row,
            row_to_blocks,
            size_bytes,
            layers,
            source_layers,
            tensors_per_layer,
            spans,
        )
        by = transport_bit(transport)
        return self._core.pull(
            self._targets.of(source), own_memory_or_id(into, self._node, spans), what, checked_timeout(timeout_ms), by
        )

    def pull_async(
        self,
        source: FarCache,
        *,
        into: Cache | int | OwnMemory,
        blocks: BlockMap | None = None,
        row: int | None = None,
        source_row: int | None = None,
        row_to_blocks: Units | None = None,
        size_bytes: int | None = None,
        layers: range | None = None,
        source_layers: range | None = None,
        tensors_per_layer: int = 2,
        spans: Spans | None = None,
        timeout_ms: int = 1000,
        transport: str | None = None,
    ) -> Transfer:
        """Starts a :meth:`pull` and returns at once; ``await`` what it returns, or wait for it."""
        what = moves.pull(
            source,
            blocks,
            row,
            source_row,
            row_to_blocks,
            size_bytes,
            layers,
            source_layers,
            tensors_per_layer,
            spans,
        )
        by = transport_bit(transport)
        mine, timeout_ms = own_memory_or_id(into, self._node, spans), checked_timeout(timeout_ms)
        return begun(Transfer, self, self._core.pull_async, self._targets.of(source), mine, what, timeout_ms, by)

    def prepare_pull(
        self,
        source: FarCache,
        *,
        into: Cache | int,
        blocks: BlockMap | None = None,
        row: int | None = None,
        source_row: int | None = None,
        row_to_blocks: Units | None = None,
        size_bytes: int | None = None,
        layers: range | None = None,
        source_layers: range | None = None,
        tensors_per_layer: int = 2,
        timeout_ms: int = 1000,
        transport: str | None = None,
    ) -> Prepared:
        """Resolves a :meth:`pull` without moving anything, so that it can be run many times at the least cost.

        ``timeout_ms`` is for asking the peer; each run has its own.
        """
        what = moves.pull(
            source, blocks, row, source_row, row_to_blocks, size_bytes, layers, source_layers, tensors_per_layer
        )
        by = transport_bit(transport)
        core = self._core.prepare_pull(
            self._targets.of(source), own_id(into, self._node), what, checked_timeout(timeout_ms), by
        )
        return Prepared(core, self)

    def push(
        self,
        mine: Cache | int | OwnMemory,
        *,
        to: FarCache | Addresses,
        blocks: BlockMap | None = None,
        row: int | None = None,
        destination_row: int | None = None,
        row_to_blocks: Units | None = None,
        size_bytes: int | None = None,
        layers: range | None = None,
        destination_layers: range | None = None,
        tensors_per_layer: int = 2,
        spans: Spans | None = None,
        timeout_ms: int = 1000,
        transport: str | None = None,
    ) -> _core.Done:
        """Has the peer copy from this node's cache ``mine`` into its own cache ``to``; returns when the bytes are there."""
        what = moves.push(
            to,
            blocks,
            row,
            destination_row,
            row_to_blocks,
            size_bytes,
            layers,
            destination_layers,
            tensors_per_layer,
            spans,
        )
        by = transport_bit(transport)
        return self._core.push(
            own_memory_or_id(mine, self._node, spans), self._targets.of(to), what, checked_timeout(timeout_ms), by
        )

    def push_async(
        self,
        mine: Cache | int | OwnMemory,
        *,
        to: FarCache | Addresses,
        blocks: BlockMap | None = None,
        row: int | None = None,
        destination_row: int | None = None,
        row_to_blocks: Units | None = None,
        size_bytes: int | None = None,
        layers: range | None = None,
        destination_layers: range | None = None,
        tensors_per_layer: int = 2,
        spans: Spans | None = None,
        timeout_ms: int = 1000,
        transport: str | None = None,
    ) -> Transfer:
        """Starts a :meth:`push` and returns at once; ``mine`` must stay as it is until the transfer has ended."""
        what = moves.push(
            to,
            blocks,
            row,
            destination_row,
            row_to_blocks,
            size_bytes,
            layers,
            destination_layers,
            tensors_per_layer,
            spans,
        )
        by = transport_bit(transport)
        source, timeout_ms = own_memory_or_id(mine, self._node, spans), checked_timeout(timeout_ms)
        return begun(Transfer, self, self._core.push_async, source, self._targets.of(to), what, timeout_ms, by)

    def push_layers(
        self,
        mine: Cache | int,
        *,
        to: FarCache | Addresses,
        blocks: BlockMap | None = None,
        row: int | None = None,
        destination_row: int | None = None,
        row_to_blocks: Units | None = None,
        layers: Sequence[int] | None = None,
        destination_layers: Sequence[int] | None = None,
        tensors_per_layer: int = 2,
        timeout_ms: int = 1000,
        transport: str | None = None,
    ) -> LayerPush:
        """Starts a push that sends each layer once it is declared ready, in the order of ``layers``.

        ``layers[i]`` goes to ``destination_layers[i]``; by default all layers of ``mine``, each to the same number. With
        :class:`Addresses`, ``tensors_per_layer`` of them for each layer. ``timeout_ms`` counts for each layer from its
        readiness::

            with link.push_layers(mine, to="kv", blocks={0: 2}) as push:
                for number, layer in enumerate(model.layers):
                    layer(x, kv)
                    push.layer_ready(number)
        """
        if layers is None:
            layers = moves.layers_of(self._node.cache(mine).tensors, tensors_per_layer)
        numbers = moves.layer_numbers(layers)
        there = numbers if destination_layers is None else moves.layer_numbers(destination_layers)
        what = moves.push(to, blocks, row, destination_row, row_to_blocks, None, None, None, tensors_per_layer)
        return begun(
            lambda core, link: LayerPush(core, link, numbers),
            self,
            self._core.push_layers,
            own_id(mine, self._node),
            self._targets.of(to),
            what,
            numbers,
            moves.layer_width(tensors_per_layer),
            there,
            checked_timeout(timeout_ms),
            transport_bit(transport),
        )

    def describe(self, source: FarCache, timeout_ms: int = 1000) -> CacheDescription:
        """What ``source`` stands for at the peer right now. Moves nothing.

        :raises CacheNotFound: it stands for nothing.
        """
        return record(CacheDescription, self._core.describe(self._targets.of(source), checked_timeout(timeout_ms)))

    # --- calls -------------------------------------------------------------------------------------------------------

    def call(self, payload: "Buffer", timeout_ms: int = 1000) -> bytes:
        """Sends a message to the code that answers calls at the peer (:meth:`kvferry.Node.next_call`) and returns the answer.

        ``payload``: bytes or something contiguous like them, at most 64 MiB. Either side of a link may call. Calls that are
        made at the same time go over connections of their own, up to ``lanes`` of the side that linked; more wait for one.

        :raises DeadlineExceeded: no answer in time. The peer may have heard the call; its answer is not looked at any more.
        :raises Unsupported: nobody answers calls there. :raises InvalidArgument: no bytes, or too many of them.
        :raises PeerLost: the peer went away; it may have heard the call. :raises InternalError: the code there dropped it.
        """
        if timeout_ms.__class__ is not int or not 0 <= timeout_ms <= LONGEST_MS:
            timeout_ms = checked_timeout(timeout_ms)
        return self._core.call(payload, timeout_ms)

    def call_async(self, payload: "Buffer", timeout_ms: int = 1000) -> Answer:
        """Starts a :meth:`call` with a copy of ``payload`` and returns at once; ``await`` what it returns, or wait for it."""
        return begun(Answer, self, self._core.call_async, payload, checked_timeout(timeout_ms))

    def send(self, payload: "Buffer", timeout_ms: int = 1000) -> None:
        """Sends a message that nobody answers, and does not wait.

        It is lost, and nobody hears of that, if it cannot be sent within ``timeout_ms``, if the link goes down, or if nobody
        answers calls there. Messages over one link may arrive in another order than they were sent in.

        :raises InvalidArgument: no bytes, or more than 64 MiB. :raises NotLinked: the link was down already (or PeerLost).
        """
        self._core.send(payload, checked_timeout(timeout_ms))

    # --- life --------------------------------------------------------------------------------------------------------

    @property
    def peer(self) -> str:
        """The peer in words, such as ``node 7 at 127.0.0.1:7000``."""
        return self._core.peer

    @property
    def peer_id(self) -> int:
        """The peer's node id."""
        return self._core.peer_id

    @property
    def peer_program(self) -> str:
        """What the peer's node was made with as ``program``; ``""`` unless it was told."""
        return self._core.peer_program

    @property
    def alive(self) -> bool:
        """Whether the peer was there when last heard of; a peer that is lost is noticed within the heartbeat time."""
        return self._core.alive

    def unlink(self, timeout_ms: int = 3000, force: bool = False) -> None:
        """Ends the link on both sides, after the operations in flight; a link that has ended is left alone.

        ``force``: ends this side at once and does not ask the peer, which sees the link go down.

        :raises DeadlineExceeded: operations were still in flight, or the peer did not answer; the link stays up on both
            sides, also if the peer hears of it later. ``force`` does not need it.
        :raises KeyboardInterrupt: likewise.
        """
        self._core.unlink(checked_timeout(timeout_ms), truth("force", force))

    def close(self) -> None:
        """Ends the link, with the peer's consent if it answers within a second, and without it if not or on Ctrl-C."""
        try:
            self._core.unlink(_CLOSE_MS, not self._core.alive)
        except NodeClosed:
            return  # it ended with the node
        except KvferryError:
            self._core.unlink(_CLOSE_MS, True)
        except BaseException:  # Ctrl-C: this side is dropped, and then it goes on
            self._core.unlink(_CLOSE_MS, True)
            raise

    def statistics(self) -> LinkStatistics:
        """What the link is and did so far; a record that does not change."""
        return record(LinkStatistics, self._core.statistics())

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Link to {self.peer}{'' if self.alive else ', ended'}>"
