"""One initialised instance: a kvferry node, and the book of its links (``native/links.hpp``).

Drives kvferry's public names and answers in the vendor's statuses. Knows no vendor argument rules; the classes in
``v2`` check arguments and call this.

Life: made by ``LLMDataDist.init`` (node open), closed by ``finalize``; a closed engine answers errors, never crashes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import kvferry
from llm_datadist import _rules
from llm_datadist._rules import EngineOptions, LinkBook, ListenerMove, int_to_ip, status_of
from llm_datadist.communicators import Communicators
from llm_datadist.rendezvous import LOOPBACK
from llm_datadist.status import LLMException, LLMStatusCode, code_2_status, failure
from llm_datadist.utils.log import get_logger

_LINK_WORKERS = 16  # links that one call builds at a time


@dataclass(frozen=True, slots=True)
class Cluster:
    """One entry of a ``link_clusters`` or ``unlink_clusters`` call, as plain values."""

    cluster_id: int
    local: tuple[tuple[int, int], ...]
    remote: tuple[tuple[int, int], ...]


def translated(error: kvferry.KvferryError, function: str, call: str = "transfer") -> LLMException:
    """What a vendor's caller sees instead of ``error``."""
    return failure(status_of(error.kind, call), function, error)


class Engine:
    def __init__(self, cluster_id: int, options: EngineOptions) -> None:
        """Opens the node; raises ``kvferry.KvferryError``, and ``LLMException`` for pools that this machine can never give
        and addresses where it cannot listen."""
        self.cluster_id = cluster_id
        self.options = options
        self.timeout_ms = options.timeout_ms
        _check_pools(options)
        self._book = LinkBook(cluster_id, options, needs_local_address=True)
        self.node = _open_node(cluster_id, options, self._book.program)
        self.closed = False
        self._listen = options.listen
        self._listens_for = ""  # the server's address for which a communicator had the node listen
        self._lock = threading.Lock()  # of the book too
        self._found: dict[int, kvferry.Link] = {}  # what the book has found; looked at without the lock
        self._dialling: dict[int, threading.Lock] = {}  # by cluster: a second call is told that it is linked
        self.communicators = Communicators(self)

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._found.clear()
            self._book.clear()
        self.communicators.stop()
        self.node.close()
        self.communicators.join()

    def leave_to_the_parent(self) -> None:
        """In a forked child: the node is the parent's, and so is whichever thread held the lock."""
        self._lock = threading.Lock()
        self.closed = True
        self._found = {}

    # -- links

    def link_to(self, cluster_id: int, function: str) -> kvferry.Link:
        """A live link to the cluster, or ``LLMException``."""
        link = self._found.get(cluster_id)
        if link is not None and link.alive and cluster_id != self.cluster_id:
            return link
        with self._lock:
            if self.closed:
                raise failure(_rules.PARAM_INVALID, function, "llm datadist was finalized")
            status, why, link = self._book.to(cluster_id, self.node.links)
            if link is None:
                raise failure(status, function, why)
            self._found[cluster_id] = link
            return link

    def has_links(self) -> bool:
        return any(link.alive for link in self.node.links)

    def link_clusters(self, clusters: Sequence[Cluster], timeout_ms: int) -> list[LLMStatusCode]:
        return _for_each(clusters, lambda cluster: self._link(cluster, timeout_ms))

    def _link(self, cluster: Cluster, timeout_ms: int) -> int:
        with self._dial_lock(cluster.cluster_id):
            return self._dial(cluster, timeout_ms)

    def _dial(self, cluster: Cluster, timeout_ms: int) -> int:
        function = "link_clusters"
        with self._lock:
            addresses = len(cluster.local), len(cluster.remote)
            status, why = self._book.may_dial(cluster.cluster_id, *addresses, self.node.links)
        if status != _rules.SUCCESS:
            return self._refuse(function, cluster, status, why)
        ip, port = cluster.remote[0]
        try:
            host = int_to_ip(ip)
            # Whoever answers there may be linked under another id than was asked for: that link must not suffer.
            link = self.node.link(f"{host}:{port}", timeout_ms=timeout_ms, replace=False)
        except ValueError as error:
            return self._refuse(function, cluster, _rules.PARAM_INVALID, error)
        except kvferry.KvferryError as error:
            with self._lock:
                if error.kind == "already_linked" and self._book.adopt(cluster.cluster_id, self.node.links):
                    return _rules.SUCCESS
            return self._refuse(function, cluster, status_of(error.kind, "link"), error)
        with self._lock:
            status, why = self._book.dialled(link, host, port)
        if status != _rules.SUCCESS:
            link.close()
            return self._refuse(function, cluster, status, why)
        return status

    # -- links by rank table

    def listening_address(self, host: str) -> str:
        """Where members of a communicator reach this node, whose own server there is ``host`` (``""``: only this one).
        Listens if ``init`` did not say where. ``":port"``: at any address of the server."""
        with self._lock:
            address = self.node.address
            if address is None:
                self._listens_for = host or LOOPBACK
                address = _listen_at_any_port(self.node, self._listens_for)
            elif self._listen is None and host not in ("", self._listens_for) and not _is_everywhere(address):
                # Others may still be on their way to the address that they were told, so the port stays the same.
                self.node.stop_listening()
                address = _listen_everywhere(self.node, address.rpartition(":")[2])
        return f":{address.rpartition(':')[2]}" if _is_everywhere(address) else address

    def is_linked(self, cluster_id: int) -> bool:
        with self._lock:
            return not self.closed and self._book.alive(cluster_id, self.node.links) is not None

    def link_for_table(self, cluster_id: int, address: str, timeout_ms: int) -> None:
        """Links to a member unless it is linked. Raises ``kvferry.KvferryError``, and ``LLMException`` for another peer
        than was expected."""
        with self._dial_lock(cluster_id):
            if self.is_linked(cluster_id):
                return
            link = self.node.link(address, timeout_ms=timeout_ms, replace=False)
            if link.peer_id != cluster_id or self._book.is_of_the_other_mode(link):
                link.close()
                sentence = (
                    f"cluster {link.peer_id} with {link.peer_program} listens at {address}, not cluster {cluster_id}"
                )
                raise failure(_rules.PARAM_INVALID, "link", f"{sentence} with {self._book.program}")
            with self._lock:
                self._book.keep(cluster_id, link)

    def unlink_for_table(self, cluster_id: int) -> None:
        """Ends the links to a member, unless ``link_clusters`` opened one here: that is for ``unlink_clusters``."""
        with self._lock:
            if self._book.has_opened(cluster_id) or self.closed:
                return
            links = [link for link in self.node.links if link.peer_id == cluster_id]
            self._book.forget(cluster_id)
            self._found.pop(cluster_id, None)
        for link in links:
            link.close()

    def _dial_lock(self, cluster_id: int) -> threading.Lock:
        with self._lock:
            return self._dialling.setdefault(cluster_id, threading.Lock())

    def unlink_clusters(self, clusters: Sequence[Cluster], timeout_ms: int, force: bool) -> list[LLMStatusCode]:
        return _for_each(clusters, lambda cluster: self._unlink(cluster, timeout_ms, force))

    def _unlink(self, cluster: Cluster, timeout_ms: int, force: bool) -> int:
        function = "unlink_clusters"
        with self._lock:
            parting = self._book.parting(cluster.cluster_id, len(cluster.remote), force, self.node.links)
        code, why, links, tell_if_lost = parting
        if code != _rules.SUCCESS:
            return self._refuse(function, cluster, code, why)
        if not links:
            return code
        if tell_if_lost and any(_was_lost(link) for link in links):
            # The peer did not take leave, so it is told; if it cannot be, the local entry stays until it is forced.
            code = _told(cluster.remote[0], timeout_ms)
        for link in links:
            try:
                link.unlink(timeout_ms=timeout_ms, force=force)
            except kvferry.KvferryError as error:
                get_logger().error("[%s] cluster %d: %s", function, cluster.cluster_id, error)
                code = status_of(error.kind, "unlink") or code
        if code == _rules.SUCCESS:
            with self._lock:
                self._book.parted(cluster.cluster_id)
                self._found.pop(cluster.cluster_id, None)
        return code

    @staticmethod
    def _refuse(function: str, cluster: Cluster, status: int, why: object) -> int:
        get_logger().error("[%s] cluster %d: %s", function, cluster.cluster_id, why)
        return status

    # -- role

    def switch_role(self, listen: tuple[str, int] | None) -> None:
        """Moves the listener to ``listen``, closes it for None. Nothing has changed if the call raises."""
        with self._lock:  # a communicator hears of the address before or after the move, and not in the middle
            self._move_listener(listen, "switch_role")

    def _move_listener(self, listen: tuple[str, int] | None, function: str) -> None:
        move = _rules.listener_move(self.has_links(), self.options.hixl, self._listen, listen)
        if move is ListenerMove.REFUSED_LINKED:
            raise failure(_rules.EXIST_LINK, function, "there are links; unlink them first")
        building = self.communicators.under_construction()
        if building:  # the other members were told where this one listens
            sentence = f"communicators {building} are under construction; wait for them, or unlink them first"
            raise failure(_rules.EXIST_LINK, function, sentence)
        if move is ListenerMove.STAYS:
            return
        if move is ListenerMove.REFUSED_HIXL:
            raise failure(_rules.FEATURE_NOT_ENABLED, function, "the hixl backend keeps its port")
        before = self._listen
        try:
            self.node.stop_listening()
            self._listens_at(None)
            if listen is not None:
                self.node.listen(f"{listen[0]}:{listen[1]}")
                self._listens_at(listen)
        except kvferry.KvferryError as error:
            if before is not None and self._listen is None and not self.node.closed:
                self.node.listen(f"{before[0]}:{before[1]}")
                self._listens_at(before)
            raise translated(error, function, "listen") from error

    def _listens_at(self, listen: tuple[str, int] | None) -> None:
        self._listen = listen
        self._book.listens(listen)


def _check_pools(options: EngineOptions) -> None:
    try:
        with open("/proc/meminfo") as file:
            sentence = _rules.pools_too_large(options, file.read())
    except OSError:  # the kernel does not say
        return
    if sentence is not None:
        raise failure(_rules.OUT_OF_MEMORY, "init", sentence)


def _open_node(cluster_id: int, options: EngineOptions, program: str) -> kvferry.Node:
    more: dict[str, Any] = {}
    pool = _rules.pool_of(options)
    if pool is not None:
        more["pool"] = kvferry.PoolOptions(size_bytes=pool.size_bytes, page_shift=pool.page_shift)
    if options.transports is not None:
        more["transports"] = options.transports
    node = kvferry.Node(node_id=cluster_id, secret=options.secret, attach=options.attach, program=program, **more)
    if options.listen is not None:
        try:
            node.listen(f"{options.listen[0]}:{options.listen[1]}")
        except kvferry.KvferryError as error:  # what a port that cannot be bound is to a vendor's caller: no bad option
            node.close()
            raise translated(error, "init", "listen") from error
    return node


def _was_lost(link: kvferry.Link) -> bool:
    """Whether the peer vanished, rather than one of the two having unlinked."""
    if link.alive:
        return False
    try:
        link.describe(0, timeout_ms=0)
    except kvferry.KvferryError as error:
        return error.kind == "peer_lost"
    return False


def _told(address: tuple[int, int], timeout_ms: int) -> int:
    """Whether anybody listens where a peer was that is to be told that its link is over."""
    try:
        socket.create_connection((int_to_ip(address[0]), address[1]), timeout=timeout_ms / 1000).close()
    except ValueError:
        return _rules.PARAM_INVALID
    except TimeoutError:
        return _rules.TIMEOUT
    except OSError as error:
        get_logger().error("[unlink_clusters] %s:%d: %s; unlink by force", *address, error)
        return _rules.UNLINK_FAILED
    return _rules.SUCCESS


def _listen_at_any_port(node: kvferry.Node, host: str) -> str:
    try:
        return node.listen(f"[{host}]:0" if ":" in host else f"{host}:0")
    except kvferry.KvferryError:  # the table has an address that leads here, but is not this machine's own
        return _listen_everywhere(node, "0")


def _listen_everywhere(node: kvferry.Node, port: str) -> str:
    try:
        return node.listen(f"0.0.0.0:{port}")
    except kvferry.AddressInUse:  # at one of the other addresses
        return node.listen("0.0.0.0:0")


def _is_everywhere(address: str) -> bool:
    return address.startswith(("0.0.0.0:", "[::]:"))


def _for_each(clusters: Sequence[Cluster], work: Callable[[Cluster], int]) -> list[LLMStatusCode]:
    """The outcome of each, in order; several are worked on at a time, as many as there are threads to be had for it."""
    if len(clusters) < 2:
        return [code_2_status(work(cluster)) for cluster in clusters]
    codes = [Future[int]() for _ in clusters]
    todo = deque(zip(clusters, codes, strict=True))

    def work_on_some() -> None:
        while True:
            try:
                cluster, code = todo.popleft()
            except IndexError:
                return
            try:
                code.set_result(work(cluster))
            except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
                code.set_exception(error)

    with contextlib.suppress(
        RuntimeError
    ):  # no more threads to be had: those that there are do it, this one among them
        for _ in codes[1:_LINK_WORKERS]:
            threading.Thread(target=work_on_some, name="llm_datadist-link").start()
    work_on_some()
    return [code_2_status(code.result()) for code in codes]
