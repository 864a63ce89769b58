"""Peers that die or stand still in the middle of a transfer: what the caller hears, and which bytes change.

Every case is two real processes. The process that copies is stopped for an instant in its middle, so that what happens
then falls into the transfer for certain; two tests strike while it runs.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import kvferry
from failure_support import (
    CASES,
    FEW,
    NEW,
    OLD,
    REFILL,
    Ferry,
    Peers,
    Side,
    dice,
    ended,
    kept,
    mapped,
    outcome,
    seed,
    until,
)

pytestmark = pytest.mark.quick(
    "costs_the_deadline_and_no_more[pull-socket-tcp]",
    "nothing_more[pull-socket-tcp-cancelled]",
    "source_killed_in_the_middle_is_a_lost_peer[push-socket-tcp]",
    "destination_killed_in_the_middle_is_a_lost_peer[pull-map]",
)

DEADLINE_MS = 250
SLACK_S = 0.3


@pytest.fixture(scope="module", params=CASES, ids=str)
def shared(request: pytest.FixtureRequest) -> Iterator[Ferry]:
    yield from kept(request.param)


@pytest.fixture
def ferry(shared: Ferry) -> Ferry:
    shared.refill(OLD)
    return shared


@pytest.fixture
def mortal(request: pytest.FixtureRequest, peers: Peers) -> Ferry:
    return Ferry(peers, request.param)


of_few = pytest.mark.parametrize("mortal", FEW, ids=str, indirect=True)


def one_sided(ferry: Ferry) -> bool:
    return ferry.case.transport != "socket"


# --- stopped ----------------------------------------------------------------------------------------------------------


def test_a_source_that_stands_still_costs_the_deadline_and_no_more(ferry: Ferry) -> None:
    moving = ferry.stopped_in_the_middle(ferry.source, DEADLINE_MS)
    if ferry.actor is ferry.destination and one_sided(ferry):
        moving.result()  # memory of a stopped process can be read all the same
        ferry.all_arrived()
        ferry.source.cont()
        return
    if ferry.actor is ferry.destination:
        error = ended(moving, kvferry.DeadlineExceeded)
        assert ferry.too_late_s() < SLACK_S
        assert error.bytes_touched and error.destination_settled
    else:
        ferry.wait_for_the_end_of_the_copy()
        assert ferry.too_late_s() < SLACK_S
        ferry.wait_past_the_deadline()
    ferry.nothing_outside_changed()
    ferry.refill()
    ferry.source.cont()
    if ferry.actor is ferry.source:
        error = ended(moving, kvferry.DeadlineExceeded)
        assert error.bytes_touched
    ferry.nothing_changes()
    ferry.goes_on()


def test_a_destination_that_stands_still_writes_nothing_after_the_deadline(ferry: Ferry) -> None:
    moving = ferry.stopped_in_the_middle(ferry.destination, DEADLINE_MS)
    if ferry.actor is ferry.source:
        error = ended(moving, kvferry.DeadlineExceeded)
        assert ferry.too_late_s() < SLACK_S
        assert error.bytes_touched and not error.destination_settled
    ferry.wait_past_the_deadline()
    ferry.destination.cont()
    if ferry.actor is ferry.destination:
        error = ended(moving, kvferry.DeadlineExceeded)
        assert error.bytes_touched and error.destination_settled
    ferry.wait_for_the_end_of_the_copy()
    assert ferry.nothing_outside_changed()[-1, 0] == OLD + 2 * ferry.moved - 1  # it has not gone on to its end
    ferry.refill()
    ferry.nothing_changes()
    ferry.goes_on()


def test_what_stood_still_for_a_moment_only_arrives_whole(ferry: Ferry) -> None:
    for peer in (ferry.source, ferry.destination):
        moving = ferry.stopped_in_the_middle(peer)
        time.sleep(0.05)
        peer.cont()
        moving.result()
        ferry.all_arrived()
        ferry.refill(OLD)


# --- interrupted ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["cancelled", "deadline"])
def test_what_the_caller_ends_in_the_middle_writes_nothing_more(ferry: Ferry, by: str) -> None:
    """A puller fills its blocks in the very moment in which the call ends; a pusher when the receiver is known to be done."""
    chance, ends = dice(), []
    pulls = ferry.actor is ferry.destination
    mine, then_fill = ("destination", ("destination", REFILL)) if pulls else ("source", None)
    for _ in range(2):
        after_ms = chance.uniform(0.5, 8)
        when = (after_ms / 1000, 20_000) if by == "cancelled" else (0.02, int(after_ms))
        how = ferry.actor.call(
            "interrupt", ferry.case.verb, ferry.far, mine, ferry.blocks, *when, ferry.case.transport, then_fill
        )
        ends.append(how)
        if not pulls:
            time.sleep(0 if "settled" in how else 0.05)
            ferry.refill()
        ferry.nothing_changes()
        ferry.refill(OLD)
    print(ends)
    # Only of a receiver in another process can it be unknown whether it has stopped.
    # A deadline of some ms may be seen only when the call is cancelled 20 ms later, on a machine that is busy.
    allowed = {"arrived"}
    for kind in {by, "cancelled"}:
        allowed |= {f"{kind} settled", f"{kind} touched settled", *([] if pulls else [f"{kind} touched"])}
    assert set(ends) <= allowed
    ferry.goes_on()


class Hurried(Side):
    """Asks for more than the time allows, from many threads at once."""

    def hurry(self, transports: "list[str]", threads: int, for_s: float) -> "dict[str, int]":
        ends: Counter[str] = Counter()
        until_s = time.monotonic() + for_s

        def ask(number: int) -> None:
            chance = random.Random(seed + number)
            mine = self.node.register("", mapped((64, 1024)))
            while time.monotonic() < until_s:
                more: Any = {"timeout_ms": chance.randint(0, 3), "transport": chance.choice(transports)}
                more["blocks"] = {chance.randrange(64): chance.randrange(64) for _ in range(chance.choice((1, 8, 60)))}
                try:
                    match chance.randrange(4):
                        case 0:
                            self._link().pull("kv", into=mine, **more)
                        case 1:
                            self._link().pull_async("kv", into=mine, **more).wait()
                        case 2:
                            self._link().push(mine, to="kv", **more)
                        case _:
                            self._link().push_async(mine, to="kv", **more).wait()
                    ends["arrived"] += 1
                except kvferry.KvferryError as error:
                    ends[error.kind if error.kind == "deadline" else repr(error)] += 1

        workers = [threading.Thread(target=ask, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return ends


@pytest.mark.parametrize("over", ["unix", "tcp"])
@pytest.mark.parametrize("who", ["dialler", "listener"])
def test_who_has_no_time_hears_of_the_time_and_of_nothing_else(peers: Peers, over: str, who: str) -> None:
    """A lane that is closed because of one deadline is nobody else's error."""
    options: dict[str, Any] = {"transports": ("socket",)} if over == "tcp" else {}
    dialler, listener = (peers("test_failures_peers:Hurried", options, name=name) for name in ("dialler", "listener"))
    dialler.call("link", listener.call("address"))
    hurried, other = (dialler, listener) if who == "dialler" else (listener, dialler)
    until(lambda: hurried.call("alive") == [True], "the link is up")
    other.call("cache", "kv", "registered", 64, 8192, NEW)
    ends = hurried.call("hurry", ["socket"] if over == "tcp" else ["cma", "socket"], 32, 1.5)
    print(ends)
    assert set(ends) == {"arrived", "deadline"}
    assert hurried.call("alive") == [True]


# --- killed -----------------------------------------------------------------------------------------------------------


@of_few
def test_a_source_killed_in_the_middle_is_a_lost_peer(mortal: Ferry) -> None:
    moving = mortal.stopped_in_the_middle(mortal.destination)
    mortal.source.kill()
    mortal.destination.cont()
    if mortal.actor is mortal.destination:
        error = ended(moving, kvferry.PeerLost)
        assert error.bytes_touched and error.destination_settled
    until(lambda: mortal.lost(mortal.destination), "the link is down", 2)
    mortal.nothing_outside_changed()
    mortal.refill()
    mortal.nothing_changes()


@of_few
def test_a_destination_killed_in_the_middle_is_a_lost_peer(mortal: Ferry) -> None:
    moving = mortal.stopped_in_the_middle(mortal.destination)
    mortal.destination.kill()
    if mortal.actor is mortal.source:
        error = ended(moving, kvferry.PeerLost)
        assert error.bytes_touched
    until(lambda: mortal.lost(mortal.source), "the link is down", 2)
    assert mortal.source.call("unregister", "source", timeout=2)


@pytest.mark.parametrize("mortal", CASES[:3], ids=str, indirect=True)
def test_a_source_killed_while_bytes_run_gives_all_of_them_or_an_error(mortal: Ferry) -> None:
    moving = mortal.start()
    until(lambda: mortal.memory.word(1) != OLD + 1, "a first byte comes", pause_s=0)
    mortal.source.kill()
    if mortal.actor is mortal.destination:
        error = outcome(moving)
        if error is None:
            mortal.all_arrived()
        assert error is None or isinstance(error, kvferry.PeerLost)
    until(lambda: mortal.lost(mortal.destination), "the link is down", 2)
    mortal.nothing_outside_changed()
    mortal.refill()
    mortal.nothing_changes()
