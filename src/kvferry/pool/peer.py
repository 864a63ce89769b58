"""One pool node as a client sees it: the link, made when needed and again when lost, and what is asked over it.

One caller at a time makes an attempt to link, and what it comes to is the answer of all who have waited for it. Whoever
finds the node gone after that is told so at once; the next attempt is made after a pause. A node that has failed several
times is waited for by nobody but the caller who tries.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvferry.errors import DeadlineExceeded, InvalidArgument, KvferryError
from kvferry.options import LONGEST_MS
from kvferry.pool import messages
from kvferry.pool.moving import ms_left

if TYPE_CHECKING:
    from kvferry.link import Link
    from kvferry.node import Node

__all__ = ["TOLD_AT_ONCE_BYTES", "Peer", "Space", "Unreachable"]

log = logging.getLogger("kvferry.pool")

A = TypeVar("A", bound=msgspec.Struct)

PAUSE_S = (0.1, 0.5, 1.0, 2.0)  # between attempts to reach a node that is gone
LONGEST_LINKING_MS = 3000
PATIENT = 2  # attempts that may have failed in a row while others still wait for the next one
TOLD_AT_ONCE_BYTES = 1 << 20  # a message of its own costs as much as moving this
MOST_UNTOLD = 32
SILENT_S = 1.0
PASSED_OVER = 8  # times as long as it kept somebody waiting who could have done without it


class Unreachable(Exception):
    """The node cannot be asked now; ``word`` says why, as an outcome does."""

    def __init__(self, word: str, sentence: str) -> None:
        super().__init__(sentence)
        self.word = word


class Space(msgspec.Struct, frozen=True):
    """What a pool object's values are: told to each node once a link."""

    namespace: str
    domain: bytes
    fingerprint: bytes
    quota_bytes: int | None

    def without_geometry(self) -> "Space":
        """The same for values that are bytes and nothing more."""
        return self if not self.fingerprint else Space(self.namespace, self.domain, b"", self.quota_bytes)


class _Line:
    """A link, which spaces are open over it, and the leases over it whose end is still to be told."""

    __slots__ = ("link", "released", "spaces")

    def __init__(self, link: "Link") -> None:
        self.link = link
        self.spaces: dict[Space, int] = {}
        self.released: deque[int] = deque()

    def to_tell(self) -> list[int]:
        leases: list[int] = []
        while self.released:
            try:
                leases.append(self.released.popleft())
            except IndexError:  # another thread was quicker
                break
        return leases


class Peer:
    """``find``: where the node is now, asked before every attempt to link; None or an exception: nowhere.

    Nobody waits for what its own thread holds: a signal handler may ask the node too, on a thread that is just asking it.
    """

    def __init__(self, node: "Node", find: Callable[[int], str | None]) -> None:
        self._node = node
        self._find = find
        self._linking = threading.RLock()
        self._making = False
        self._line: _Line | None = None  # exchanged whole
        self._not_before = 0.0
        self._attempts = 0
        self._late = 0.0
        self._said, self._silent_until = "", 0.0
        self.numbers = count(1)  # what reservations and leases are called
        self.same_host: bool | None = None  # what the last link said; None: there was none
        self.why_not = ""  # it could not be reached the last time
        self.beyond_host = False  # processes of other hosts may be its clients

    @property
    def link(self) -> "Link | None":
        line = self._line
        return None if line is None else line.link

    def reach(self, until: float) -> "Link":
        """The link, made now if there is none. ``until``: on the monotonic clock, in seconds."""
        link = self.link
        if link is not None and link.alive:
            return link
        failed = self._attempts
        patience_s = max(0.0, until - time.monotonic()) if failed < PATIENT else 0.0
        taken: list[bool] = []
        try:
            # In one call of native code: what a signal handler raises leaves the lock alone, or finds it in the list.
            taken.extend(map(self._linking.acquire, (True,), (patience_s,)))
            if taken[0]:
                return self._linked(until, failed)
        finally:
            if taken and taken[0]:
                self._linking.release()
        if failed < PATIENT:
            raise Unreachable("timeout", "the node is still being linked to")
        raise Unreachable("node_lost", self.why_not)

    def _linked(self, until: float, failed: int) -> "Link":
        """With the lock. ``failed``: attempts before this caller came; if one has failed since, that is its answer."""
        if self._making:
            raise Unreachable("node_lost", "the node is being linked to by the call that this one interrupts")
        self._making = True
        try:
            link = self.link
            if link is not None and link.alive:
                return link
            now = time.monotonic()
            if now < self._not_before or self._attempts > failed:
                raise Unreachable("node_lost", self.why_not)
            self._forget(link)
            return self._make(until, now)
        finally:
            self._making = False

    def ask(self, request: messages.Request, expected: type[A], until: float, link: "Link | None" = None) -> A:
        """The node's answer.

        :raises Unreachable: none came in time. :raises InvalidArgument: the node says that the request is wrong.
        """
        link = link or self.reach(until)
        with REACHING:
            raw = link.call(messages.encode(request), timeout_ms=_ms_left(until))
        return self._answer(raw, expected, link)

    def asking(
        self, request: messages.Request, expected: type[A], until: float, link: "Link", beside: bool
    ) -> Callable[[], A]:
        """The same in two steps: what :meth:`ask` gives or raises comes from what this returns. ``beside``: the node is
        asked now; else only then, which is quicker for whoever has nothing to do meanwhile."""
        if not beside:
            return lambda: self.ask(request, expected, until, link)
        with REACHING:
            waiting = link._core.call_async(messages.encode(request), _ms_left(until))

        def answer() -> A:
            with REACHING:
                raw = waiting.wait(LONGEST_MS)  # its own deadline ends it
            return self._answer(raw, expected, link)

        return answer

    def _answer(self, raw: bytes, expected: type[A], link: "Link") -> A:
        try:
            answer = messages.decode_answer(raw)
        except msgspec.DecodeError as error:
            raise Unreachable("node_lost", f"{link.peer} answers in words that are none: {error}") from None
        if isinstance(answer, expected):
            return answer
        if isinstance(answer, messages.Failure):
            if answer.word == "unknown_space":
                line = self._line_of(link)
                if line is not None:
                    line.spaces.clear()
            if answer.word == "invalid":
                raise InvalidArgument(answer.sentence)
            if answer.word == "given_up":  # by another thread, whose word was quicker than the request
                raise Unreachable("timeout", answer.sentence)
            raise Unreachable("node_lost", f"{link.peer}: {answer.sentence}")
        raise Unreachable("node_lost", f"{link.peer} gives an answer of another kind")

    def tell(self, link: "Link", request: messages.Request) -> None:
        """Says something that needs no answer; what is lost on the way ends by its time."""
        try:
            link.send(messages.encode(request))
        except KvferryError:
            return

    def give_up(self, link: "Link", number: int) -> None:
        """Says that nobody waits any more for a reservation or lease, which may not even have been heard of."""
        self.tell(link, messages.Release([number]))

    def release(self, link: "Link", lease: int, size_bytes: int) -> None:
        """Says that a lease is over: now if much hangs on it, else with the next request. What is never said ends by its time."""
        line = self._line_of(link)
        if line is None:
            return
        line.released.append(lease)
        if size_bytes >= TOLD_AT_ONCE_BYTES or len(line.released) >= MOST_UNTOLD:
            self.tell(link, messages.Release(line.to_tell()))

    def released(self, link: "Link") -> list[int]:
        """The leases to be told of with the next request."""
        line = self._line_of(link)
        return [] if line is None else line.to_tell()

    def space(self, space: Space, until: float, link: "Link") -> int:
        """The node's number for ``space``, asked once per link."""
        line = self._line_of(link) or _Line(link)
        number = line.spaces.get(space)
        if number is None:
            opened = self.ask(
                messages.Open(messages.VERSION, space.namespace, space.domain, space.fingerprint, space.quota_bytes),
                messages.Opened,
                until,
                link,
            )
            number, self.beyond_host = opened.space, opened.beyond_host
            line.spaces[space] = number
        return number

    @property
    def prompt(self) -> bool:
        """Whether those who can do without may ask it: a link is up, and it did not keep one of them waiting just now."""
        link = self.link
        return link is not None and link.alive and time.monotonic() >= self._late

    def late(self, since: float) -> None:
        """One of them has waited since then for nothing."""
        now = time.monotonic()
        self._late = now + PASSED_OVER * (now - since)

    def says(self, sentence: str) -> None:
        """Logs why a call came to less than it might have: an outcome has a word for it and no more. The same is said once,
        and nothing more often than once in a while."""
        now = time.monotonic()
        if sentence != self._said and now >= self._silent_until:
            self._said, self._silent_until = sentence, now + SILENT_S
            log.warning("misses, because %s", sentence)

    def close(self) -> None:
        self._forget(self.link)

    def _line_of(self, link: "Link") -> _Line | None:
        line = self._line
        return line if line is not None and line.link is link else None

    def _make(self, until: float, now: float) -> "Link":
        left = min(_ms_left(until), LONGEST_LINKING_MS)  # who has no time left knows nothing of the node
        try:
            where = self._find(left)
            if where is None:
                raise Unreachable("node_lost", "there is no pool node")
            link = self._node.link(where, timeout_ms=min(_ms_left(until), LONGEST_LINKING_MS))
        except (KvferryError, Unreachable, OSError) as error:
            self._attempts += 1
            self._not_before = now + PAUSE_S[min(self._attempts, len(PAUSE_S)) - 1]
            self.why_not = str(error)
            word = "timeout" if isinstance(error, DeadlineExceeded) else "node_lost"
            raise Unreachable(word, self.why_not) from None
        self._attempts, self.why_not, self._said = 0, "", ""
        self._line = _Line(link)
        self.same_host = link.statistics().same_host
        return link

    def _forget(self, link: "Link | None") -> None:
        self._line = None
        if link is not None:
            try:
                link.unlink(force=True)
            except KvferryError:
                return


class _Reaching:
    """What goes wrong on the way to a node and back, as Unreachable."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DeadlineExceeded):
            raise Unreachable("timeout", str(error)) from None
        if isinstance(error, KvferryError) and not isinstance(error, InvalidArgument):
            raise Unreachable("node_lost", str(error)) from None


REACHING = _Reaching()


def _ms_left(until: float) -> int:
    left = ms_left(until)
    if not left:
        raise Unreachable("timeout", "no time is left")
    return left
