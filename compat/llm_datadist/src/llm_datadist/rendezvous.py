"""How the members of a communicator find each other, although a rank table names addresses and no port.

All members go to one *meeting place*: a port that both sides have configured alike, at the server of the lowest rank.
Whichever process of that server comes first opens it and serves every communicator of that server until it is finalized;
then the next one that needs it does. Each member says which communicator it belongs to, who it is, and where its node
listens. When all members of a communicator are there, each is told where the others listen, and the place forgets them.
They come back when they are linked, and are told when all are: else a member that is quick could be done and gone before
another has seen it.
The links themselves, with their secrets and checks, are kvferry's; a meeting place only passes addresses on.

One line of JSON each way. Nothing here knows caches, options or links.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

LOOPBACK = "127.0.0.1"
_LONGEST_LINE = 4096
_MOST_GUESTS = 4096
_SILENCE_S = 5.0  # a connection that has not said in that time who it is is closed
_TRY_AGAIN_S = 0.05
_LISTEN_FOR_STOP_S = 0.2
_CONNECT_S = 2.0

# In a forked child the parent's port and its places in line must not live on.
_sockets: WeakSet[socket.socket] = WeakSet()
_watching_forks = threading.Event()

Address = tuple[str, int]
# A communicator's name, what its members come for (0: addresses, 1: to say that they are linked), their ids and ranks.
Group = tuple[str, int, tuple[tuple[int, int], ...]]


def _own(connection: socket.socket) -> socket.socket:
    if not _watching_forks.is_set():
        _watching_forks.set()
        os.register_at_fork(after_in_child=_let_all_go)
    _sockets.add(connection)
    return connection


def _let_all_go() -> None:
    for connection in list(_sockets):
        connection.close()


@dataclass(slots=True)
class _Guest:
    connection: socket.socket
    since: float
    said: bytes = b""
    group: Group | None = None
    cluster_id: int = 0
    address: str = ""


@dataclass(slots=True)
class _Room:
    """The guests of one communicator: who comes first is served first, for it may be built several times at once."""

    waiting: dict[int, deque[_Guest]] = field(default_factory=dict)


class MeetingPlace:
    """Serves one address with one thread, from construction until ``close``. ``OSError`` if the address is taken,
    ``RuntimeError`` if there is no thread to be had; nothing is left behind then."""

    def __init__(self, where: Address) -> None:
        self._listener = _own(socket.create_server(where, family=_family(where[0]), backlog=128))
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._guests: dict[socket.socket, _Guest] = {}
        self._rooms: dict[Group, _Room] = {}
        self._thread = threading.Thread(target=self._serve, name="llm_datadist-meeting-place", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._wake.close()
            self._leave()
            raise

    def close(self) -> None:
        """Ends it; who still waits there loses its connection and looks for the next place."""
        self._wake.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            silent = any(guest.group is None for guest in self._guests.values())
            for key, _ in self._selector.select(_SILENCE_S if silent else None):
                if key.fileobj is self._woken:
                    self._leave()
                    return
                if key.fileobj is self._listener:
                    self._welcome()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._guests:
                    self._hear(self._guests[key.fileobj])
            now = time.monotonic()
            for guest in list(self._guests.values()):
                if guest.group is None and now - guest.since > _SILENCE_S:
                    self._drop(guest)

    def _leave(self) -> None:
        for connection in (*self._guests, self._listener, self._woken):
            connection.close()
        self._selector.close()

    def _welcome(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(_TRY_AGAIN_S)  # it stays in the backlog: this would spin
            return
        if len(self._guests) >= _MOST_GUESTS:
            connection.close()
            return
        _own(connection).setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._guests[connection] = _Guest(connection, time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, guest: _Guest) -> None:
        try:
            heard = guest.connection.recv(_LONGEST_LINE)
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        guest.said += heard
        if not heard or guest.group is not None or len(guest.said) > _LONGEST_LINE:
            self._drop(guest)  # it is gone, or says more than it has to
        elif guest.said.endswith(b"\n"):
            try:
                guest.group, guest.cluster_id, guest.address = _read_announcement(guest.said)
            except (ValueError, TypeError, KeyError):
                self._drop(guest)
                return
            room = self._rooms.setdefault(guest.group, _Room())
            room.waiting.setdefault(guest.cluster_id, deque()).append(guest)
            self._introduce(guest.group)

    def _introduce(self, group: Group) -> None:
        waiting = self._rooms[group].waiting
        if not all(waiting.get(cluster_id) for cluster_id, _ in group[2]):
            return
        met = [waiting[cluster_id][0] for cluster_id, _ in group[2]]
        answer = json.dumps({str(guest.cluster_id): guest.address for guest in met}).encode() + b"\n"
        for guest in met:
            with contextlib.suppress(OSError):
                guest.connection.send(answer)  # a line fits into any fresh socket's buffer
            self._drop(guest)

    def _drop(self, guest: _Guest) -> None:
        self._selector.unregister(guest.connection)
        guest.connection.close()
        del self._guests[guest.connection]
        room = self._rooms.get(guest.group) if guest.group is not None else None
        if room is None or guest.group is None:
            return
        room.waiting[guest.cluster_id].remove(guest)
        if not any(room.waiting.values()):
            del self._rooms[guest.group]


def meet(
    where: Address,
    group: Group,
    cluster_id: int,
    address: str,
    until: float,
    stopped: Callable[[], bool],
    open_place: Callable[[], None],
) -> dict[int, str]:
    """Goes to the meeting place and waits there; returns where each member listens.

    ``open_place`` is called before each try and may open the place here. ``TimeoutError`` at ``until`` (monotonic
    seconds), or once ``stopped()``.
    """
    line = json.dumps({"llm_datadist": 1, "group": group, "cluster_id": cluster_id, "address": address})
    while not stopped() and time.monotonic() < until:
        open_place()
        try:
            left = until - time.monotonic()
            with _own(socket.create_connection(where, max(min(left, _CONNECT_S), _TRY_AGAIN_S))) as connection:
                connection.sendall(line.encode() + b"\n")
                answer = _answer(connection, until, stopped)
                return {int(number): str(listens) for number, listens in answer.items()}
        except (OSError, ValueError, AttributeError):  # nobody there yet, or the place has closed, or it is another's
            time.sleep(_TRY_AGAIN_S)
    raise TimeoutError("not all members came to the meeting place")


def _answer(connection: socket.socket, until: float, stopped: Callable[[], bool]) -> Any:
    connection.settimeout(_LISTEN_FOR_STOP_S)
    heard = b""
    while not stopped() and time.monotonic() < until:
        try:
            piece = connection.recv(_LONGEST_LINE)
        except TimeoutError:
            continue
        heard += piece
        if not piece or len(heard) > _LONGEST_LINE:
            break
        if heard.endswith(b"\n"):
            return json.loads(heard)
    raise OSError("no answer")


def _read_announcement(line: bytes) -> tuple[Group, int, str]:
    said = json.loads(line)
    if said["llm_datadist"] != 1:
        raise ValueError("another version")
    name, step, listed = said["group"]
    members: Sequence[tuple[int, int]] = tuple((int(cluster_id), int(rank)) for cluster_id, rank in listed)
    cluster_id = int(said["cluster_id"])
    if cluster_id not in (member for member, _ in members):
        raise ValueError("not a member")
    return (str(name), int(step), tuple(members)), cluster_id, str(said["address"])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
