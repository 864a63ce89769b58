"""Campaigns: several transfers at once between two processes, and by chance something happens in their middle.

Whatever it is: what has arrived has arrived whole, what failed has changed its own spans alone and says whether, and
nothing changes any more when it has ended. ``KVFERRY_CAMPAIGN_S`` says how long each case takes, ``KVFERRY_TEST_SEED``
repeats the choices (not the scheduling) of an earlier run.
"""

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvferry
from failure_support import CASES, NEW, OLD, PATIENCE_S, REFILL, Case, Ferry, Peers, dice, until, words
from support import Pending

CAMPAIGN_S = float(os.environ.get("KVFERRY_CAMPAIGN_S", "1"))
TOGETHER = 3
pytestmark = pytest.mark.slow


class Flight:
    """One of several transfers: some of the source's blocks to blocks of their own."""

    def __init__(self, ferry: Ferry, blocks: Any, chance: random.Random) -> None:
        self.blocks, self.verb = blocks, chance.choice(["pull", "push"])
        actor, far, mine = ferry.destination, "source", "destination"
        if self.verb == "push":
            actor, far, mine = ferry.source, "destination", "source"
        timeout_s = chance.choice([20.0, 20.0, chance.uniform(0.001, 0.02)])
        how = chance.choice(["move", "move_here"])
        pair = (blocks, 2 * blocks + 1)
        words = (how, self.verb, far, mine, pair, time.monotonic() + timeout_s, ferry.case.transport)
        self.pending: Pending = actor.call_later(*words, thread=True)
        self.error: kvferry.KvferryError | None = None

    def ended(self) -> str:
        try:
            self.pending.result(PATIENCE_S)
        except kvferry.KvferryError as error:
            self.error = error
            return f"{self.verb}: {type(error).__name__}"
        return f"{self.verb}: arrived"

    def judge(self, found: Any, moved: int) -> None:
        mine = found[2 * self.blocks + 1]
        if self.error is None:
            assert (mine == words(NEW, moved)[self.blocks]).all()
        elif not self.error.bytes_touched:
            assert (mine == words(OLD, 2 * moved + 1)[2 * self.blocks + 1]).all()


def nothing(ferry: Ferry, chance: random.Random) -> None:
    """For comparison."""


def stop_the_source(ferry: Ferry, chance: random.Random) -> None:
    ferry.source.stop()
    time.sleep(chance.uniform(0, 0.03))
    ferry.source.cont()


def stop_the_destination(ferry: Ferry, chance: random.Random) -> None:
    ferry.destination.stop()
    time.sleep(chance.uniform(0, 0.03))
    ferry.destination.cont()


def end_the_source(ferry: Ferry, chance: random.Random) -> None:
    ferry.source.call_later("unregister_and_fill", "source", REFILL, thread=True).result()


def end_the_destination(ferry: Ferry, chance: random.Random) -> None:
    ferry.destination.call_later("unregister", "destination", thread=True).result()


def drop_the_link(ferry: Ferry, chance: random.Random) -> None:
    chance.choice([ferry.source, ferry.destination]).call_later("unlink_by_force", thread=True).result()


EVENTS: "list[Callable[[Ferry, random.Random], None]]" = [
    nothing,
    stop_the_source,
    stop_the_destination,
    end_the_source,
    end_the_destination,
    drop_the_link,
]
ALLOWED = {
    "nothing": {"DeadlineExceeded"},
    "stop_the_source": {"DeadlineExceeded"},
    "stop_the_destination": {"DeadlineExceeded"},
    "end_the_source": {"DeadlineExceeded", "CacheNotFound"},
    "end_the_destination": {"DeadlineExceeded", "CacheNotFound"},
    "drop_the_link": {"DeadlineExceeded", "NotLinked", "PeerLost"},
}


@pytest.mark.parametrize("case", [case for case in CASES if case.verb == "pull"], ids=str)
@pytest.mark.deadline(CAMPAIGN_S + 120)
def test_whatever_happens_bytes_arrive_whole_or_an_error_does(peers: Peers, case: Case) -> None:
    chance, seen = dice(), Counter[str]()
    ferry = Ferry(peers, case, moved=12 << 10, copy_threads=3)
    begun = time.monotonic()
    while time.monotonic() - begun < CAMPAIGN_S:
        event = chance.choice(EVENTS)
        parts = np.array_split(np.random.default_rng(chance.randrange(1 << 30)).permutation(ferry.moved), TOGETHER)
        flights = [Flight(ferry, np.sort(part), chance) for part in parts]
        time.sleep(chance.uniform(0, 0.012))
        event(ferry, chance)
        for flight in flights:
            how = flight.ended()
            seen[f"{event.__name__}, {how}"] += 1
            assert how.endswith("arrived") or how.split()[-1] in ALLOWED[event.__name__], flight.error
        if not all(flight.error is None or flight.error.destination_settled for flight in flights):
            time.sleep(0.06)  # of a push that was given up the receiver knows a little later
        found = ferry.memory.read()
        assert (found[::2] == words(OLD, len(found))[::2]).all()
        for flight in flights:
            flight.judge(found, ferry.moved)
        ferry.refill()
        ferry.nothing_changes()
        start_over(ferry, event)
    for what, count in sorted(seen.items()):
        print(f"{count:5}  {what}")


def start_over(ferry: Ferry, event: Callable[..., None]) -> None:
    if event is drop_the_link:
        for peer in (ferry.source, ferry.destination):
            until(lambda: ferry.lost(peer), "the link is down on both sides")  # noqa: B023
        ferry.link()
    if event in (end_the_source, end_the_destination):
        ferry.start_over()
    ferry.refill(OLD)


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_whoever_is_killed_at_whatever_moment_the_other_goes_on(peers: Peers, case: Case) -> None:
    chance = dice()
    for _ in range(2):
        ferry = Ferry(peers, case, moved=12 << 10, copy_threads=3)
        parts = np.array_split(np.arange(ferry.moved), TOGETHER)
        flights = [Flight(ferry, part, chance) for part in parts]
        victim, other = chance.sample([ferry.source, ferry.destination], 2)
        time.sleep(chance.uniform(0, 0.012))
        victim.kill()
        until(lambda: ferry.lost(other), "the link is down", 2)  # noqa: B023
        survivors = [flight for flight in flights if (flight.verb == "pull") == (other is ferry.destination)]
        for flight in survivors:
            assert flight.ended().split()[-1] in ("arrived", "PeerLost", "DeadlineExceeded")
        if other is ferry.destination:
            found = ferry.nothing_outside_changed()
            for flight in survivors:
                assert flight.error or (found[flight.blocks] == words(NEW, ferry.moved)[flight.blocks]).all()
            ferry.refill()
            ferry.nothing_changes()
        name = "destination" if other is ferry.destination else "source"
        assert other.call("unregister", name, timeout=2)


def test_children_forked_amid_traffic_find_the_node_closed_and_the_traffic_arrives(peers: Peers) -> None:
    """A fork may come while any thread of the core holds any lock: the child must not wait for one of them."""
    owner, parent = (
        peers("failure_support:Side", {"pool": 8 << 20}),
        peers("test_failures_nodes:Forking", {"pool": 8 << 20}),
    )
    for name, where in (("kv", "registered"), ("pooled", "allocated")):
        owner.call("cache", name, where, 2048, 1024, NEW)
        parent.call("cache", name, where, 2048, 1024, OLD)
    parent.call("link", owner.call("address"))
    parent.call("prepare", "pooled", "kv", {0: 1}, None)
    for _ in range(8):
        late = time.monotonic() + PATIENCE_S
        ways = [(verb, transport) for verb in ("pull", "push") for transport in ("cma", "socket")]
        moving = [
            parent.call_later("move", verb, "kv", "kv", None, late, transport, thread=True) for verb, transport in ways
        ]
        report = parent.call("fork_and_try_everything")
        assert report.pop("descriptors left") == []
        assert set(report.values()) == {"NodeClosed", "ok"}, report
        for (_, transport), one in zip(ways, moving, strict=True):
            assert one.result() == (2048 * 1024, transport)
