"""Windows and guards when somebody stands still: what has ended is not read or written any more, whatever was under way.

Two real processes each. The one that copies, or the one whose call it is, is stopped in the middle of a transfer; meanwhile
what the transfer goes through ends, its blocks are used for something else, and then everybody goes on.
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvferry
from failure_support import (
    CASES,
    FEW,
    NEW,
    OLD,
    REFILL,
    SETTLE_S,
    WHERE,
    Case,
    Ferry,
    Memory,
    Peers,
    dice,
    ended,
    kept,
    outcome,
    until,
)
from support import Peer

pytestmark = pytest.mark.quick(
    "what_has_ended[window-pull-map]",
    "when_its_source_has_ended[by name-pull-map]",
    "goes_on[window-push-cma]",
    "no_others[pull-map]",
    "are_not_written[push-socket-tcp]",
)

PULLS = [case for case in CASES if case.verb == "pull"]
PUSHES = [case for case in CASES if case.verb == "push"]
PROMPT_S = 0.5  # to end a window or a cache takes a piece in hand at most, not a peer


of_pulls = pytest.mark.parametrize("shared", PULLS, ids=str, indirect=True, scope="module")
of_pushes = pytest.mark.parametrize("shared", PUSHES, ids=str, indirect=True, scope="module")


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest) -> Iterator[Ferry]:
    yield from kept(request.param)


@pytest.fixture
def ferry(shared: Ferry) -> Ferry:
    shared.start_over()
    return shared


def through_a_window(ferry: Ferry) -> bytes:
    """From here on the transfer names a window of exactly its blocks instead of the cache."""
    access, owner = ("read", ferry.source) if ferry.case.verb == "pull" else ("write", ferry.destination)
    name = "source" if ferry.case.verb == "pull" else "destination"
    ferry.far = owner.call("open_window", name, ferry.blocks[0 if access == "read" else 1], access)
    return bytes(ferry.far)


def promptly(call: Any) -> Any:
    begun = time.monotonic()
    value = call()
    assert time.monotonic() - begun < PROMPT_S
    return value


# --- read -------------------------------------------------------------------------------------------------------------


@of_pulls
@pytest.mark.parametrize("what", ["window", "cache"])
def test_a_puller_stopped_in_the_middle_never_succeeds_with_what_has_ended(ferry: Ferry, what: str) -> None:
    window = through_a_window(ferry)
    assert ferry.run()[0] == ferry.moved * ferry.block_bytes
    ferry.all_arrived()
    ferry.refill(OLD)
    moving = ferry.stopped_in_the_middle(ferry.destination)
    if what == "window":
        assert promptly(lambda: ferry.source.call("close_window_and_fill", window, "source", REFILL))
    else:
        assert promptly(lambda: ferry.source.call("unregister_and_fill", "source", REFILL))
    ferry.destination.cont()
    ferry.has_ended_in_its_middle(moving)
    again = ended(ferry.start(), kvferry.CacheNotFound)
    assert not again.bytes_touched
    ferry.nothing_changes()


@of_pulls
def test_a_read_window_whose_time_is_up_ends_the_pull_in_its_middle(ferry: Ferry) -> None:
    ferry.far = ferry.source.call("open_window", "source", ferry.blocks[0], "read", 400)
    opened = time.monotonic()
    moving = ferry.stopped_in_the_middle(ferry.destination)
    time.sleep(max(0.0, opened + 0.45 - time.monotonic()))
    ferry.source.call("fill", "source", REFILL)
    ferry.destination.cont()
    ended(moving, kvferry.CacheNotFound)
    ferry.nothing_outside_changed()


@pytest.mark.parametrize("case", PULLS[1:], ids=str)
@pytest.mark.parametrize("what", ["window", "cache"])
def test_bytes_that_were_all_on_their_way_when_their_window_closed_are_no_success(
    peers: Peers, case: Case, what: str
) -> None:
    """The owner has sent everything before it closes the window; the puller looks at it afterwards only."""
    ferry = Ferry(peers, case, moved=96)  # fits into the buffers of any socket
    if what == "window":
        window = through_a_window(ferry)
    ferry.run()
    ferry.all_arrived()
    ferry.refill(OLD)
    ferry.source.stop()
    moving = ferry.start()
    time.sleep(0.05)
    if moving.done():
        moving.result()  # one-sided, from what was resolved before: the owner need not run
        ferry.all_arrived()
        return
    ferry.destination.stop()
    ferry.source.cont()
    time.sleep(0.05)
    if what == "window":
        ferry.source.call("close_window_and_fill", window, "source", REFILL)
        ferry.destination.cont()
        assert ended(moving, kvferry.CacheNotFound).bytes_touched
    else:
        ferry.source.call("unregister_and_fill", "source", REFILL)
        ferry.destination.cont()
        moving.result()  # the bytes of before, and of a time at which the cache stood
        ferry.all_arrived()
    ferry.nothing_outside_changed()


@of_pulls
def test_memory_given_back_in_the_middle_of_a_pull_is_a_cache_that_is_gone(ferry: Ferry) -> None:
    """Not a cache that was registered wrongly: its owner did everything right."""
    moving = ferry.stopped_in_the_middle(ferry.destination)
    promptly(lambda: ferry.source.call("unregister_and_free", "source"))
    ferry.destination.cont()
    ended(moving, kvferry.CacheNotFound)
    ferry.nothing_outside_changed()


# --- write ------------------------------------------------------------------------------------------------------------


@of_pushes
@pytest.mark.parametrize("what", ["window", "cache"])
def test_nothing_is_written_through_what_has_ended_though_the_pusher_goes_on(ferry: Ferry, what: str) -> None:
    window = through_a_window(ferry)
    ferry.run()
    ferry.all_arrived()
    ferry.refill(OLD)
    moving = ferry.stopped_in_the_middle(ferry.source)
    end = ("close_window", window) if what == "window" else ("unregister", "destination")
    if ferry.case.transport == "socket":  # else the receiver may be through by now: the next test strikes there
        assert promptly(lambda: ferry.destination.call(*end))
    else:
        promptly(lambda: ferry.destination.call(*end))
    ferry.nothing_outside_changed()
    ferry.refill()
    ferry.source.cont()
    if ferry.case.transport == "socket":
        error = ended(moving, kvferry.CacheNotFound)
        assert error.bytes_touched and error.destination_settled
    ferry.nothing_changes()
    assert not ended(ferry.start(), kvferry.CacheNotFound).bytes_touched
    ferry.nothing_changes()


@of_pushes
def test_a_pusher_that_ends_what_it_pushes_has_pushed_nothing_else(ferry: Ferry) -> None:
    moving = ferry.stopped_in_the_middle(ferry.destination)
    assert promptly(lambda: ferry.source.call_later("unregister_and_fill", "source", REFILL).result())
    ferry.destination.cont()
    ferry.has_ended_in_its_middle(moving)


@of_pushes
@pytest.mark.parametrize("what", ["window", "cache"])
def test_a_receiver_that_ends_what_it_receives_into_is_written_to_no_more(ferry: Ferry, what: str) -> None:
    """The receiver's own threads are in the middle of copying when it does so."""
    window = through_a_window(ferry)
    moving = ferry.stopped_in_the_middle(ferry.destination)
    end = ("close_window", window) if what == "window" else ("unregister", "destination")
    ending = ferry.destination.call_later(*end, then_fill=("destination", REFILL))
    ferry.destination.cont()
    assert ending.result()
    ferry.nothing_changes()
    error = outcome(moving)  # None: it was through when the call came
    assert error is None or (isinstance(error, kvferry.CacheNotFound) and error.destination_settled)


@of_pulls
def test_a_puller_that_ends_what_it_pulls_into_is_written_to_no_more(ferry: Ferry) -> None:
    moving = ferry.stopped_in_the_middle(ferry.destination)
    ending = ferry.destination.call_later("unregister", "destination", then_fill=("destination", REFILL))
    ferry.destination.cont()
    assert ending.result()
    ferry.nothing_changes()
    error = outcome(moving)
    assert error is None or (isinstance(error, kvferry.CacheNotFound) and error.destination_settled)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_a_node_that_is_closed_in_the_middle_has_neither_given_nor_taken_anything_later(
    peers: Peers, case: Case
) -> None:
    ferry = Ferry(peers, case)
    moving = ferry.stopped_in_the_middle(ferry.destination)
    promptly(lambda: ferry.source.call("close_and_fill", "source", REFILL))
    ferry.destination.cont()
    if ferry.actor is ferry.destination:
        assert ended(moving, kvferry.KvferryError).kind in ("peer_lost", "not_found")
    else:
        ended(moving, kvferry.NodeClosed)
    until(lambda: ferry.lost(ferry.destination), "the link is down", 2)
    ferry.nothing_outside_changed()
    ferry.destination.call("close_and_fill", "destination", REFILL)
    ferry.nothing_changes()


# --- layers -----------------------------------------------------------------------------------------------------------

LAYERS = 3


@pytest.mark.parametrize("case", FEW[3:], ids=str)
def test_layers_that_come_after_the_window_is_closed_are_not_written(peers: Peers, case: Case) -> None:
    pusher, receiver, arrays = layered(peers, case)
    window = receiver.call("open_window", "kv", [1, 2], "write")
    pusher.call("begin_layers", window, "kv", {0: 1}, 20_000, case.transport)
    pusher.call("layer_ready", 0)
    until(lambda: arrays[0].word(1) == NEW, "layer 0 is there")
    receiver.call("close_window_and_fill", window, "kv", REFILL)
    pusher.call("layer_ready", 1)
    error = ended(pusher.call_later("end_layers"), kvferry.CacheNotFound)
    assert error.destination_settled
    time.sleep(SETTLE_S)
    assert [array.read()[:, 0].tolist() for array in arrays] == [[REFILL + block for block in range(4)]] * LAYERS


@pytest.mark.parametrize("case", FEW[3:], ids=str)
def test_layers_whose_receiver_stands_still_end_at_their_deadline(peers: Peers, case: Case) -> None:
    pusher, receiver, arrays = layered(peers, case)
    pusher.call("begin_layers", "kv", "kv", {0: 1}, 200, case.transport)
    pusher.call("layer_ready", 0)
    until(lambda: arrays[0].word(1) == NEW, "layer 0 is there")
    receiver.stop()
    pusher.call("layer_ready", 1)
    begun = time.monotonic()
    error = ended(pusher.call_later("end_layers"), kvferry.DeadlineExceeded)
    assert time.monotonic() - begun < 0.5
    assert error.bytes_touched and not error.destination_settled
    receiver.cont()
    time.sleep(0.05)
    receiver.call("fill", "kv", REFILL)
    time.sleep(SETTLE_S)
    assert [array.read()[:, 0].tolist() for array in arrays] == [[REFILL + block for block in range(4)]] * LAYERS


def layered(peers: Peers, case: Case) -> "tuple[Peer, Peer, list[Memory]]":
    options = {"pool": 4 << 20} | ({"transports": ("socket",)} if case.over == "tcp" else {})
    pusher, receiver = peers("failure_support:Side", options), peers("failure_support:Side", options)
    pusher.call("cache", "kv", WHERE[case.transport], 4, 64 << 10, NEW, LAYERS)
    at = receiver.call("cache", "kv", "registered", 4, 64 << 10, OLD, LAYERS)
    dialler, listener = (pusher, receiver) if case.dialler == "actor" else (receiver, pusher)
    dialler.call("link", listener.call("address"))
    until(lambda: listener.call("alive") == [True], "the link is up")
    return pusher, receiver, [Memory(receiver.pid, address, 4, 64 << 10) for address in at]


# --- prepared ---------------------------------------------------------------------------------------------------------


@of_pulls
@pytest.mark.parametrize("named", ["by name", "by id", "by window"])
def test_a_prepared_pull_is_refused_when_its_source_has_ended(ferry: Ferry, named: str) -> None:
    if named == "by window":
        through_a_window(ferry)
    elif named == "by id":
        ferry.far = ferry.source.call("cache_id", "source")
    one = ([3, 1], [1, 3])
    ferry.destination.call("prepare", ferry.far, "destination", one, ferry.case.transport)
    ferry.destination.call("run_prepared", 2000)
    assert [ferry.memory.word(1), ferry.memory.word(3)] == [NEW + 3, NEW + 1]
    ferry.refill(OLD)
    ferry.source.call("unregister_and_fill", "source", REFILL)
    for _ in range(3):
        error = ended(ferry.destination.call_later("run_prepared", 2000), kvferry.CacheNotFound)
        assert not error.bytes_touched
        assert ferry.destination.call("alive") == [True]
    ferry.nothing_changes(OLD)


@of_pulls
def test_a_prepared_pull_by_name_finds_the_cache_that_has_the_name_now(ferry: Ferry) -> None:
    ferry.destination.call("prepare", "source", "destination", ([3], [1]), ferry.case.transport)
    ferry.source.call("unregister_and_fill", "source", REFILL)
    ferry.source.call("cache", "source", "registered", ferry.moved, ferry.block_bytes, NEW + 100)
    error = outcome(ferry.destination.call_later("run_prepared", 2000))
    if error is None:
        assert ferry.memory.word(1) == NEW + 103
    else:  # memory that its caller owns cannot be mapped
        assert ferry.case.transport == "map" and isinstance(error, kvferry.Unsupported) and not error.bytes_touched


# --- races ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[2]], ids=str)
def test_unregistering_races_with_the_pulls_of_two_peers(peers: Peers, case: Case) -> None:
    """Every pull that succeeds has the bytes of before, although they are overwritten as soon as unregister returns."""
    moved, block_bytes = 96, 16 << 10
    options = {"pool": 16 << 20} | ({"transports": ("socket",)} if case.over == "tcp" else {})
    owner = peers("failure_support:Side", options)
    pullers = [peers("failure_support:RacingPuller", options) for _ in range(2)]
    blocks = (np.arange(moved), 2 * np.arange(moved) + 1)
    where = "allocated" if case.transport == "map" else "registered"
    for puller in pullers:
        puller.call("cache", "destination", "registered", 2 * moved + 1, block_bytes, OLD)
        puller.call("link", owner.call("address"))
    chance, pulled = dice(), 0
    for number in range(12):
        owner.call("cache", "source", where, moved, block_bytes, NEW)
        pulling = [puller.call_later("pull_until_it_ends", blocks, case.transport) for puller in pullers]
        time.sleep(0.01 + 0.02 * chance.random())
        if number % 2:
            owner.call("unregister_and_fill", "source", REFILL)
        else:
            owner.call("unregister_and_free", "source")
        for one in pulling:
            count, kind, sentence = one.result()
            assert kind == "CacheNotFound", f"{kind}: {sentence}"
            pulled += count
        for puller in pullers:
            assert puller.call("alive") == [True]
    assert pulled > 24


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[2]], ids=str)
def test_a_window_shows_its_own_blocks_and_no_others(peers: Peers, case: Case) -> None:
    ferry = Ferry(peers, case, moved=16)
    ferry.far = ferry.source.call("open_window", "source", [2, 5, 9], "read")
    assert ferry.destination.call("move", "pull", ferry.far, "destination", [1, 3, 5], time.monotonic() + 2, None)
    assert [ferry.memory.word(block) for block in (1, 3, 5)] == [NEW + 2, NEW + 5, NEW + 9]
    ferry.refill(OLD)
    for blocks in ({3: 1}, {2: 1, 3: 3}, {0: 0}, {9: 1, 10: 3}):
        pulling = ferry.destination.call_later(
            "move", "pull", ferry.far, "destination", blocks, time.monotonic() + 2, case.transport
        )
        error = ended(pulling, kvferry.CacheNotFound)
        assert "window" in str(error) and not error.bytes_touched
    pushing = ferry.destination.call_later(
        "move", "push", ferry.far, "destination", {1: 2}, time.monotonic() + 2, (case.over and "socket") or None
    )
    assert not ended(pushing, kvferry.CacheNotFound).bytes_touched
    ferry.nothing_changes(OLD)
    until(lambda: ferry.source.call("alive") == [True], "the link stands")


def test_a_window_may_be_given_as_runs_of_units() -> None:
    with kvferry.Node() as node:
        cache = node.register("kv", [np.zeros((100, 64), np.uint8)])
        name = node._core.open_window(cache.id, np.array([[0, 5], [90, 10]]), 1, 1000)
        assert node._core.close_window(name)
        for runs, words in (
            ([[0, 0]], "run 0 is of 0 units"),
            ([[-1, 3]], "from -1 on"),
            ([[0, 1], [0, 1 << 32]], "run 1 is of 4294967296 units"),
            ([[99, 2]], "block 100 of"),
            ([[0, 5], [4, 2]], "4 twice"),
            (np.zeros((0, 2), np.int64), "at least one"),
        ):
            with pytest.raises(kvferry.InvalidArgument, match=words):
                node._core.open_window(cache.id, np.array(runs), 1, 1000)
