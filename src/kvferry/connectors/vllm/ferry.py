"""Handover as a worker does it: windows over finished requests for those who come for them, and pulls from others' windows.

A window ends when its blocks were taken, when its time is up, or with the worker; only then may they be reused. Pulls run on
threads of their own. Driven by `worker`; answers the messages of `handed`.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any

import msgspec

from kvferry import Call, DeadlineExceeded, KvferryError, Link, Node, NodeClosed, Transfer, Window
from kvferry.connectors.vllm.handed import (
    Answered,
    Expecting,
    Open,
    Opened,
    Pushed,
    Release,
    advertised_at,
    new_token,
)
from kvferry.connectors.vllm.links import Links
from kvferry.connectors.vllm.orders import Orders, Pull, Receive, Report
from kvferry.connectors.vllm.push import Receiving, Sending
from kvferry.connectors.vllm.settings import Settings

__all__ = ["Ferry", "Pulled"]

log = logging.getLogger("kvferry.vllm")

THREADS = 8
LINKING_MS = 400
WORDS = {
    "DeadlineExceeded": "timeout",
    "CacheNotFound": "window_gone",
    "PeerLost": "peer_lost",
    "LinkFailed": "peer_lost",
    "Refused": "refused",
}


@dataclass(frozen=True, slots=True)
class Pulled:
    """How a pull has ended: how many of its last blocks are not filled, and why."""

    pull: Pull | Receive
    failed: int
    why: str
    seconds: float


@dataclass(slots=True)
class _Held:
    request_id: str
    window: Window
    until: float
    how: str = ""


class Ferry:
    def __init__(
        self,
        arrays: list[Any],
        settings: Settings,
        rank: int,
        geometry: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._node = Node(secret=settings.node_secret, program="kvferry-vllm")
        self._cache = self._node.register("kv", arrays, layout="blocks")
        self._node.serve_calls()
        self.address = self._node.listen(settings.place_of(rank))
        self.token = new_token()
        self._lock = Lock()
        self._windows: dict[bytes, _Held] = {}
        self._links = Links(self._node)
        self._pulling: dict[str, tuple[Pull, ThreadFuture[Pulled]]] = {}
        self._moving: dict[str, Transfer] = {}
        self._given_up: set[str] = set()
        self._threads = ThreadPoolExecutor(THREADS, "kvferry-vllm-pull")
        # Not an Event, whose lock stays held for good where a signal handler raises amid a wait.
        self._ends: SimpleQueue[None] = SimpleQueue()
        self._sending = Sending(self._cache, self._links, geometry, settings.window_ttl_ms / 1000, self._threads, now)
        advertised = advertised_at(self.address, settings.advertise)
        self._receiving = Receiving(self._cache, self._links, advertised, self._threads, lambda: self._ends.put(None))
        self._unreceived: list[Pulled] = []
        self._answering = Thread(target=self._answer, name="kvferry-vllm-answers", daemon=True)
        self._answering.start()

    # --- giving ------------------------------------------------------------------------------------------------------

    def held(self, report: Report) -> set[str]:
        """The requests whose blocks somebody may still come for. What has ended since the last time is counted."""
        now = self._now()
        with self._lock:
            for name, held in list(self._windows.items()):
                if not held.how and now >= held.until:
                    held.how = "expired"
                if held.how:
                    del self._windows[name]
                    held.window.close()  # from here on nobody reads through it, and its blocks may be others'
                    report.words[f"handovers {held.how}"] += 1
            held_by = {held.request_id for held in self._windows.values()}
        return held_by | self._sending.held(report, now)

    def begin(self, orders: Orders) -> None:
        """Before a step: what it computes of pushed requests leaves layer by layer."""
        for request_id in orders.ended:
            self._sending.interrupted(request_id)
        for send in orders.sends:
            self._sending.step(send, self._now())
        for push_id, whole in orders.sent.items():
            self._sending.finished(push_id, whole, self._now())

    def layer_ready(self, layer: int) -> None:
        self._sending.layer_ready(layer)

    def stepped(self) -> None:
        self._sending.stepped()

    def _answer(self) -> None:
        while True:
            try:
                call = self._node.next_call(timeout_ms=1000)
            except NodeClosed:
                return
            if isinstance(call, Call):
                try:
                    self._heard(call)
                except (KvferryError, msgspec.MsgspecError) as error:
                    log.warning("a message that cannot be answered: %s", error)
            call = None

    def _heard(self, call: Call) -> None:
        said = msgspec.msgpack.decode(call.payload, type=Open | Release | Expecting | Pushed)
        if isinstance(said, Release):
            with self._lock:
                held = self._windows.get(said.window)
                if held is not None:
                    held.how = "given" if said.read else "not_wanted"
            self._ends.put(None)
            return
        if isinstance(said, Pushed):
            self._receiving.pushed(said)
            return
        if isinstance(said, Expecting):
            self._threads.submit(self._expected, call, said)  # it links, which may take its time
            return
        if said.token != self.token:
            call.answer(msgspec.msgpack.encode(Opened(b"", "that is for this worker's own scheduler alone")))
            return
        try:
            window = self._cache.window(blocks=said.blocks, access="read", ttl_ms=said.ttl_ms)
        except KvferryError as error:
            call.answer(msgspec.msgpack.encode(Opened(b"", str(error))))
            return
        with self._lock:
            self._windows[window.name] = _Held(said.request_id, window, self._now() + said.ttl_ms / 1000)
        call.answer(msgspec.msgpack.encode(Opened(window.name)))

    def _expected(self, call: Call, said: Expecting) -> None:
        try:
            why = self._sending.expected(said, self._now())
        except KvferryError as error:
            why = str(error)
        self._ends.put(None)  # what has been computed already may leave
        call.answer(msgspec.msgpack.encode(Answered(why)))

    # --- taking ------------------------------------------------------------------------------------------------------

    def pull(self, pull: Pull, rank: int) -> None:
        """Begins it, and returns. One without blocks only tells the other instance that nobody will come."""
        future = self._threads.submit(self._pulled, pull, rank, self._now())
        if pull.blocks:
            self._pulling[pull.request_id] = (pull, future)
            future.add_done_callback(lambda _: self._ends.put(None))

    def cancel(self, request_id: str) -> None:
        with self._lock:
            if request_id in self._pulling:
                self._given_up.add(request_id)
            moving = self._moving.get(request_id)
        self._receiving.cancel(request_id)
        if moving is not None:
            moving.cancel()

    @property
    def waits(self) -> bool:
        """Somebody's blocks are on their way."""
        return bool(self._pulling or self._unreceived or self._receiving.waits)

    @property
    def pushes(self) -> bool:
        """Something is being pushed, whose end wakes nobody."""
        return self._sending.pushes

    def wait(self, seconds: float) -> None:
        """Until `ended` or `held` may have something to say that they have not said yet, for so long at most."""
        with suppress(Empty):
            self._ends.get(timeout=seconds)

    def ended(self) -> list[Pulled]:
        """The pulls that have ended since the last time."""
        with suppress(Empty):
            while True:
                self._ends.get_nowait()
        done = [request_id for request_id, (_, future) in self._pulling.items() if future.done()]
        ended, self._unreceived = self._unreceived, []
        ended += [self._pulling.pop(request_id)[1].result() for request_id in done]
        for receive, why, seconds in self._receiving.ended(self._now()):
            ended.append(Pulled(receive, len(receive.blocks) if why else 0, why, seconds))
        return ended

    def receive(self, receive: Receive, rank: int) -> None:
        """Waits for what another instance pushes; returns at once."""
        why = self._receiving.receive(receive, rank, self._now())
        if why:
            self._unreceived.append(Pulled(receive, len(receive.blocks), why, 0.0))

    def _pulled(self, pull: Pull, rank: int, began: float) -> Pulled:
        """On a thread of its own; whatever happens, it comes back with how it ended."""
        why = ""
        link: Link | None = None
        try:
            link = self._links.to(pull.addresses[rank], min(LINKING_MS, self._ms_left(pull, began)))
            if pull.blocks:
                self._move(link, pull, rank, began)
        except KvferryError as error:
            why = WORDS.get(type(error).__name__, "failed")
            log.warning("request %s is computed, for its blocks could not be had: %s", pull.request_id, error)
        except Exception:  # the root of a thread
            why = "error"
            log.exception("request %s is computed, for its blocks could not be had", pull.request_id)
        finally:
            with self._lock:
                self._moving.pop(pull.request_id, None)
                self._given_up.discard(pull.request_id)
        if link is not None:
            self._release(link, pull.windows[rank], bool(pull.blocks) and not why)
        return Pulled(pull, len(pull.blocks) if why else 0, why, self._now() - began)

    def _move(self, link: Link, pull: Pull, rank: int, began: float) -> None:
        transfer = link.pull_async(
            pull.windows[rank],
            into=self._cache,
            blocks=(pull.theirs, pull.blocks),
            timeout_ms=max(1, self._ms_left(pull, began)),
        )
        with self._lock:
            self._moving[pull.request_id] = transfer
            given_up = pull.request_id in self._given_up
        if given_up:
            transfer.cancel()
        while True:
            try:
                transfer.wait(1000)
                return
            except DeadlineExceeded:
                if transfer.done():
                    raise  # else this wait is over, and not the pull, which has its own deadline

    def _release(self, link: Link, window: bytes, read: bool) -> None:
        try:
            link.send(msgspec.msgpack.encode(Release(window, read)))
        except KvferryError:
            return  # its time will be up

    def _ms_left(self, pull: Pull, began: float) -> int:
        return pull.timeout_ms - int(1000 * (self._now() - began))

    def close(self) -> None:
        self._node.close()
        self._answering.join(2)
        self._threads.shutdown(wait=True, cancel_futures=True)
