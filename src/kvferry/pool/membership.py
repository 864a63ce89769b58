"""Who the pool's nodes are, as a list that may change while clients run.

A :class:`Membership` is asked for its members and tells when they have changed; where it knows them from is its own
affair. :class:`StaticMembership` is told. Knows no keys and no links.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from kvferry.errors import InvalidArgument
from kvferry.options import shown, text

__all__ = ["Member", "Membership", "StaticMembership"]


@dataclass(frozen=True, slots=True)
class Member:
    """One node of the pool.

    ``id`` decides which keys are its own, so it must outlive restarts and changes of address. ``address`` is where it
    listens. Of two members, one with twice the ``weight`` gets twice as many keys: its capacity, in any unit.
    """

    id: str
    address: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not text("id", self.id):
            raise InvalidArgument("a member's id is empty; its keys are found by it")
        if not text("address", self.address):
            raise InvalidArgument(f"member {shown(self.id)} has an empty address")
        weight = self.weight
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 1e-20 <= weight <= 1e20:
            raise InvalidArgument(
                f"member {shown(self.id)} has weight={shown(weight)}; give a number from 1e-20 to 1e20, and leave out who is "
                "to get no keys"
            )


class Membership(Protocol):
    """Safe to use from any thread; nothing here waits for a node or for the network."""

    @property
    def version(self) -> int:
        """Another number after each change: equal versions, equal members."""

    def members(self) -> tuple[Member, ...]:
        """All members at this moment, in order of their ids."""

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """``changed()`` is called after each change until what this returns is called.

        It is called on the thread that brought the change, may ask for the members, must not wait, and must not raise.
        Changes at the same time may be told once or twice, in any order: what counts is what ``members`` says then.
        """


class StaticMembership:
    """The members that it was last told, by ``set``.

    >>> nodes = StaticMembership([Member("a", "10.0.0.1:7000")])
    >>> nodes.set([Member("b", "10.0.0.2:7000", weight=2), *nodes.members()])
    >>> [member.id for member in nodes.members()], nodes.version
    (['a', 'b'], 1)
    """

    def __init__(self, members: Iterable[Member] = ()) -> None:
        self._lock = threading.RLock()
        self._state = (0, _ordered(members))  # one tuple, exchanged whole: readers need no lock
        self._subscribers: dict[object, Callable[[], None]] = {}

    @property
    def version(self) -> int:
        return self._state[0]

    def members(self) -> tuple[Member, ...]:
        return self._state[1]

    def set(self, members: Iterable[Member]) -> None:
        """These are the members from now on. Nobody is told, and the version stays, if they were that before.

        :raises InvalidArgument: two of them have one id; nothing has changed.
        """
        ordered = _ordered(members)
        with self._lock:
            version, before = self._state
            if ordered == before:
                return
            self._state = (version + 1, ordered)
            subscribers = list(self._subscribers.values())
        for changed in subscribers:
            changed()

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        key = object()  # the same callable may subscribe twice
        with self._lock:
            self._subscribers[key] = changed

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers.pop(key, None)

        return unsubscribe


def _ordered(members: Iterable[Member]) -> tuple[Member, ...]:
    ordered = sorted(members, key=lambda member: member.id)
    for one, other in pairwise(ordered):
        if one.id == other.id:
            raise InvalidArgument(f"two members have the id {shown(one.id)}, at {one.address} and at {other.address}")
    return tuple(ordered)
