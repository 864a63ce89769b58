"""Communicators: links that are built by rank table, in the background, by the number that ``link()`` returned.

A communicator is preparing (its thread meets the other members, links to those of lower rank, waits for those of higher
rank, and meets them all once more), ready, or failed, for good. Several may share one link; it ends with the last of them.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping
from typing import Protocol

import kvferry
from llm_datadist import _rules, rendezvous
from llm_datadist._rules import EngineOptions, Member
from llm_datadist.enums import RegisterMemStatus
from llm_datadist.latch import Latch
from llm_datadist.status import LLMException, failure, no_thread
from llm_datadist.utils.log import get_logger

MOST = 512
_LOOK_AGAIN_S = 0.02
_DIAL_MS = 2000
_JOIN_S = 5.0


class Linker(Protocol):
    """What communicators need of the engine."""

    cluster_id: int
    options: EngineOptions

    def listening_address(self, host: str) -> str: ...
    def is_linked(self, cluster_id: int) -> bool: ...
    def link_for_table(self, cluster_id: int, address: str, timeout_ms: int) -> None: ...
    def unlink_for_table(self, cluster_id: int) -> None: ...


class Communicators:
    """All communicators of one engine. Any thread may call any method."""

    def __init__(self, engine: Linker) -> None:
        self._engine: Linker = weakref.proxy(engine)  # who keeps this: a finalized engine needs no collector to go
        self._lock = threading.Lock()
        self._by_id: dict[int, _Communicator] = {}
        self._last_id = 0
        self._closed = False
        self._places: dict[rendezvous.Address, rendezvous.MeetingPlace] = {}

    def add(self, name: str, members: tuple[Member, ...]) -> int:
        """Starts building one and returns its number at once."""
        with self._lock:
            self._check_open("link")
            if len(self._by_id) >= MOST:
                raise failure(_rules.PARAM_INVALID, "link", f"there are {MOST} communicators: unlink one first")
            communicator = _Communicator(self._engine, self, name, members)
            try:
                communicator.thread.start()
            except RuntimeError as error:
                raise no_thread("link", error) from error
            self._last_id += 1
            self._by_id[self._last_id] = communicator
            return self._last_id

    def status(self, comm_id: int) -> RegisterMemStatus:
        """How the linking went. Ready is for good too: whether the members are still there, transfers say."""
        with self._lock:
            return self._found("query_register_mem_status", comm_id).state

    def remove(self, comm_id: int) -> None:
        """Ends one, whatever its state, with those of its links that no other one needs."""
        with self._lock:
            self._check_open("unlink")
            gone = self._found("unlink", comm_id)
            del self._by_id[comm_id]
            needed = {member.cluster_id for other in self._by_id.values() for member in other.others}
            gone.stopped.set()
        gone.thread.join(_JOIN_S)
        for member in gone.others:
            if member.cluster_id not in needed:
                self._engine.unlink_for_table(member.cluster_id)

    def under_construction(self) -> list[int]:
        with self._lock:
            return [comm_id for comm_id, one in self._by_id.items() if one.state is RegisterMemStatus.PREPARING]

    def stop(self) -> None:
        """Nothing is built any more from here on; `join` waits for the threads."""
        with self._lock:
            self._closed = True
            places = list(self._places.values())
            self._places.clear()
            for communicator in self._by_id.values():
                communicator.stopped.set()
        for place in places:
            place.close()

    def join(self) -> None:
        for communicator in list(self._by_id.values()):  # nothing is added any more, and removing finds it closed
            communicator.thread.join(_JOIN_S)
        self._by_id.clear()

    def open_place(self, where: rendezvous.Address) -> None:
        """Opens the meeting place if nobody has: this process, or another one of this server."""
        with self._lock:
            if self._closed or where in self._places:
                return
            try:
                self._places[where] = rendezvous.MeetingPlace(where)
            except RuntimeError as error:
                raise no_thread("link", error) from error
            except OSError:
                return  # somebody else has it, or it is not this machine's address: connecting will tell

    def _check_open(self, function: str) -> None:
        if self._closed:
            raise failure(_rules.FAILED, function, "llm datadist was finalized")

    def _found(self, function: str, comm_id: int) -> _Communicator:
        try:
            return self._by_id[comm_id]
        except KeyError:
            raise failure(_rules.NOT_YET_LINK, function, f"there is no communicator {comm_id}") from None


class _Communicator:
    def __init__(self, engine: Linker, all_of_them: Communicators, name: str, members: tuple[Member, ...]) -> None:
        self._engine = engine
        self._all = all_of_them
        self._name = name
        self._members = members
        own = next(number for number, member in enumerate(members) if member.cluster_id == engine.cluster_id)
        self._me, self._lower, self._higher = members[own], members[:own], members[own + 1 :]
        self._until = time.monotonic() + engine.options.link_total_time_s
        self.state = RegisterMemStatus.PREPARING
        self.stopped = Latch()
        self.thread = threading.Thread(target=self._run, name=f"llm_datadist-link {name}", daemon=True)

    @property
    def others(self) -> tuple[Member, ...]:
        return self._lower + self._higher

    def _run(self) -> None:
        try:
            addresses = self._meet(0, self._engine.listening_address(self._me.host))
            for member in self._lower:
                self._dial(member, addresses[member.cluster_id])
            for member in self._higher:
                self._await(member)
            self._meet(1, "")
            self.state = RegisterMemStatus.OK
        except Exception as error:  # noqa: BLE001 - the thread's root: whatever this is, the status says failed
            self.state = RegisterMemStatus.FAILED
            if not self.stopped.is_set():
                get_logger().error("[link] %s: %s", self._name, error)

    def _meet(self, step: int, listens: str) -> Mapping[int, str]:
        first = self._members[0]
        where = (first.host or rendezvous.LOOPBACK, self._engine.options.rendezvous_port)
        group = (self._name, step, tuple((member.cluster_id, member.rank) for member in self._members))
        try:
            return rendezvous.meet(
                where,
                group,
                self._me.cluster_id,
                listens,
                self._until,
                self.stopped.is_set,
                (lambda: self._all.open_place(where)) if self._me.host == first.host else lambda: None,
            )
        except TimeoutError as error:
            raise TimeoutError(
                f"{error} at {where[0]}:{where[1]} within {self._engine.options.link_total_time_s} s: do all of them call "
                "link() with this name and these ranks, with one rendezvous_port?"
            ) from None

    def _dial(self, member: Member, address: str) -> None:
        """Links to a member of lower rank; tries again as long as there is time, unless it is refused for good."""
        if address.startswith(":"):
            address = _joined(member.host or rendezvous.LOOPBACK, address[1:])
        while not self.stopped.is_set():
            left_ms = round((self._until - time.monotonic()) * 1000)
            try:
                return self._engine.link_for_table(member.cluster_id, address, max(1, min(left_ms, _DIAL_MS)))
            except kvferry.KvferryError as error:
                if left_ms <= 0 or error.kind in ("refused", "closed"):
                    raise
            except LLMException:
                raise
            self.stopped.wait(_LOOK_AGAIN_S)
        raise InterruptedError("unlinked meanwhile")

    def _await(self, member: Member) -> None:
        while not self._engine.is_linked(member.cluster_id):
            if time.monotonic() > self._until:
                raise TimeoutError(f"cluster {member.cluster_id} came to the meeting place, but did not link in time")
            if self.stopped.wait(_LOOK_AGAIN_S):
                raise InterruptedError("unlinked meanwhile")


def _joined(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
