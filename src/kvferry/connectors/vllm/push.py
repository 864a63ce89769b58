"""Handover by push, as a worker does it: a prefill sends each layer while it computes the next one, into a window that the
decode has opened over the blocks it is waiting for.

The decode says where it waits; the prefill says when everything has come, which a thread of its own waits for so that no step
of the engine lies in between, or that it will not. Until then the decode's window stands, and when it is closed nothing can
be written there any more. Driven by `ferry`, which hears the messages.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from threading import RLock

import msgspec

from kvferry import Cache, KvferryError, LayerPush, Link, Window
from kvferry.connectors.vllm.handed import Answered, Expecting, Pushed
from kvferry.connectors.vllm.links import Links
from kvferry.connectors.vllm.orders import Receive, Report, Send

__all__ = ["Receiving", "Sending"]

log = logging.getLogger("kvferry.vllm")

ASKING_MS = 1000
LAYER_MS = 5000  # from its readiness to its arrival


@dataclass(slots=True)
class _Sent:
    """A request of this prefill's. ``count``: its blocks before this one have been handed to pushes. ``computed``: when the step
    had ended that completed its prompt. ``arrived``: when all of it was there; the decode has been told."""

    until: float
    expecting: Expecting | None = None
    link: Link | None = None
    send: Send | None = None
    count: int = 0
    pushes: list[LayerPush] = field(default_factory=list)
    finished: bool | None = None  # True: all of its prompt is computed; False: it was aborted
    computed: float | None = None
    arrived: float | None = None
    why: str = ""


class Sending:
    """The prefill's half."""

    def __init__(
        self,
        cache: Cache,
        links: Links,
        geometry: str,
        ttl_s: float,
        threads: ThreadPoolExecutor,
        now: Callable[[], float],
    ) -> None:
        self._cache, self._links, self._geometry, self._ttl_s = cache, links, geometry, ttl_s
        self._threads, self._now = threads, now
        self._lock = RLock()
        self._sent: dict[str, _Sent] = {}
        self._open: list[LayerPush] = []

    def expected(self, said: Expecting, now: float) -> str:
        """Somebody waits for a request; why that is in vain, or ``""``. From the thread that answers.

        Who comes when something has left for somebody else would get the rest alone, and must not take it for all.
        """
        if said.geometry != self._geometry:
            return f"its blocks are {said.geometry}, those here {self._geometry}"
        link = self._links.to(said.address, ASKING_MS)
        with self._lock:
            sent = self._sent.setdefault(said.id, _Sent(now + self._ttl_s))
            if sent.pushes or sent.arrived is not None:
                return (
                    f"it is already being pushed to {sent.expecting.address if sent.expecting else 'another instance'}"
                )
            sent.expecting, sent.link = said, link
        return ""

    def step(self, send: Send, now: float) -> None:
        """Before the step that computes these blocks; its layers leave as `layer_ready` says."""
        with self._lock:
            sent = self._sent.setdefault(send.id, _Sent(now + self._ttl_s))
            if sent.finished is not None:
                return  # an earlier request of this name is still on its way, and its blocks are what is being read
            sent.send, sent.until = send, now + self._ttl_s
            push = self._begun(sent)
        if push is not None:
            self._open.append(push)

    def _begun(self, sent: _Sent) -> LayerPush | None:
        send, said = sent.send, sent.expecting
        if send is None or said is None or sent.link is None or sent.why or sent.arrived is not None:
            return None
        if (said.model, said.prompt) != (send.model, send.prompt):
            sent.why = "unlike"
            return None
        first, last = max(sent.count, said.first), min(send.whole, said.first + len(said.blocks))
        sent.count = max(sent.count, send.whole)
        if first >= last:
            return None
        blocks = (send.blocks[first:last], said.blocks[first - said.first : last - said.first])
        try:
            push = sent.link.push_layers(
                self._cache, to=said.window, blocks=blocks, tensors_per_layer=1, timeout_ms=LAYER_MS
            )
        except KvferryError as error:
            log.warning("request %s is not pushed: %s", send.request_id, error)
            sent.why = "failed"
            return None
        sent.pushes.append(push)
        return push

    def interrupted(self, request_id: str) -> None:
        """Its blocks are others' from now on: nothing of them is read any more when this returns, and all is sent anew when
        it has been computed again."""
        with self._lock:
            for sent in self._sent.values():
                if sent.send is not None and sent.send.request_id == request_id and sent.arrived is None:
                    for push in sent.pushes:
                        push.cancel()
                    for push in sent.pushes:
                        with suppress(KvferryError):
                            push.wait(LAYER_MS)
                    sent.pushes, sent.count, sent.send, sent.computed = [], 0, None, None

    @property
    def pushes(self) -> bool:
        with self._lock:
            return any(sent.pushes for sent in self._sent.values())

    def layer_ready(self, layer: int) -> None:
        for push in self._open:
            push.layer_ready(layer)

    def stepped(self) -> None:
        """All layers of this step are there."""
        for layer in range(self._cache.tensors):
            self.layer_ready(layer)
        self._open = []
        with self._lock:
            for push_id, sent in self._sent.items():
                if sent.computed is None and sent.send is not None and sent.send.complete:
                    sent.computed = self._now()
                    if sent.pushes and all(push.done() for push in sent.pushes):
                        self._arriving(push_id, sent, list(sent.pushes))
                    elif sent.pushes:
                        self._threads.submit(self._arriving, push_id, sent, list(sent.pushes))

    def _arriving(self, push_id: str, sent: _Sent, pushes: list[LayerPush]) -> None:
        """Tells the decode as soon as all of a prompt is there; on a thread, if it is not. What fails is found by `held`."""
        try:
            for push in pushes:
                push.wait(LAYER_MS)
        except KvferryError:
            return
        with self._lock:
            link = sent.link
            if link is None or sent.pushes != pushes or sent.why or self._sent.get(push_id) is not sent:
                return  # it has been interrupted, or ended otherwise
            sent.arrived = self._now()
        with suppress(KvferryError):  # its own time will be up
            link.send(msgspec.msgpack.encode(Pushed(push_id, "")))

    def finished(self, push_id: str, whole: bool, now: float) -> None:
        with self._lock:
            sent = self._sent.setdefault(push_id, _Sent(now + self._ttl_s))
            if sent.finished is None:  # else that of an earlier request of this name
                sent.finished = whole

    def held(self, report: Report, now: float) -> set[str]:
        """Requests whose blocks are still being read. What has ended since the last time is counted and told."""
        with self._lock:
            for push_id, sent in list(self._sent.items()):
                late = now >= sent.until
                if sent.finished:
                    rest = self._begun(sent)  # what was computed before anybody had said where it is to go
                    for layer in range(self._cache.tensors if rest is not None else 0):
                        rest.layer_ready(layer)  # type: ignore[union-attr]
                if (sent.finished is False or late or sent.why) and not all(push.done() for push in sent.pushes):
                    for push in sent.pushes:
                        push.cancel()
                if sent.finished is None and not late:
                    continue
                waiting = sent.expecting is None and sent.finished and not late
                if waiting or not all(push.done() for push in sent.pushes):
                    continue
                del self._sent[push_id]
                self._told(push_id, sent, late, report)
            return {sent.send.request_id for sent in self._sent.values() if sent.send is not None}

    def _told(self, push_id: str, sent: _Sent, late: bool, report: Report) -> None:
        if sent.arrived is not None:
            self._count(sent, sent.arrived, report)
            return
        why = sent.why or ("" if sent.finished else "aborted")
        try:
            for push in sent.pushes:
                push.wait(0)
        except KvferryError as error:
            why = why or "failed"
            log.warning("a push has failed: %s", error)
        if sent.expecting is None:
            why = "expired" if late else "not_wanted"
        if why:
            report.words[f"handovers {why}"] += 1
        else:
            self._count(sent, self._now(), report)
        if sent.expecting is not None and sent.link is not None:
            with suppress(KvferryError):  # its own time will be up
                sent.link.send(msgspec.msgpack.encode(Pushed(push_id, why)))

    def _count(self, sent: _Sent, arrived: float, report: Report) -> None:
        report.words["handovers pushed"] += 1
        if sent.computed is not None:
            report.took("pushing", arrived - sent.computed)


@dataclass(slots=True)
class _Received:
    order: Receive
    window: Window
    began: float
    until: float
    link: Link | None = None
    why: str | None = None  # "": everything has come


class Receiving:
    """The decode's half."""

    def __init__(
        self, cache: Cache, links: Links, address: str, threads: ThreadPoolExecutor, tell: Callable[[], None]
    ) -> None:
        """``tell`` hears, on any thread, that `ended` has something to say."""
        self._cache, self._links, self._address, self._threads, self._tell = cache, links, address, threads, tell
        self._lock = RLock()
        self._received: dict[str, _Received] = {}

    def receive(self, order: Receive, rank: int, now: float) -> str:
        """Begins to wait. Returns why it does not."""
        if not order.blocks:  # nothing is wanted, and whoever would push it is told
            self._threads.submit(self._say, order, b"", rank)
            return ""
        with self._lock:
            if order.id in self._received:
                log.warning(
                    "request %s is computed: another one waits for what is pushed as %r; give each request a name of its own",
                    order.request_id,
                    order.id,
                )
                return "unlike"
        try:
            window = self._cache.window(blocks=order.blocks, access="write", ttl_ms=order.timeout_ms)
        except KvferryError as error:
            log.warning("request %s cannot be received: %s", order.request_id, error)
            return "failed"
        received = _Received(order, window, now, now + order.timeout_ms / 1000)
        with self._lock:
            self._received[order.id] = received
        self._threads.submit(self._say, order, window.name, rank)
        return ""

    def _say(self, order: Receive, window: bytes, rank: int) -> None:
        said = Expecting(
            order.id,
            window,
            self._address,
            order.first,
            order.blocks,
            order.geometry,
            order.model,
            order.prompt,
        )
        try:
            link = self._links.to(order.addresses[rank], ASKING_MS)
            answer = msgspec.msgpack.decode(link.call(msgspec.msgpack.encode(said), ASKING_MS), type=Answered)
        except (KvferryError, msgspec.MsgspecError) as error:
            log.warning("request %s is computed, for nobody could be told to push it: %s", order.request_id, error)
            self._end(order.id, "peer_lost")
            return
        with self._lock:
            if order.id in self._received:
                self._received[order.id].link = link
        if answer.why:
            log.warning("request %s is computed: %s", order.request_id, answer.why)
            self._end(order.id, "unlike")

    def pushed(self, said: Pushed) -> None:
        self._end(said.id, said.why)

    def cancel(self, request_id: str) -> None:
        with self._lock:
            for push_id, received in self._received.items():
                if received.order.request_id == request_id:
                    self._end(push_id, "cancelled")

    def _end(self, push_id: str, why: str) -> None:
        with self._lock:
            received = self._received.get(push_id)
            if received is not None and received.why is None:
                received.why = why
        self._tell()

    @property
    def waits(self) -> bool:
        return bool(self._received)

    def ended(self, now: float) -> list[tuple[Receive, str, float]]:
        """What has ended since the last time: why it did not come (``""``: it did), and seconds."""
        over = []
        with self._lock:
            for push_id, received in list(self._received.items()):
                if received.why is None and now >= received.until:
                    received.why = "timeout"
                if received.why is None and received.link is not None and not received.link.alive:
                    received.why = "peer_lost"
                if received.why is not None:
                    del self._received[push_id]
                    over.append(received)
        for received in over:
            received.window.close()  # from here on nothing is written there, and its blocks may be computed into
        return [(received.order, received.why or "", now - received.began) for received in over]
