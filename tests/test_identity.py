"""Who is at the other end: a pid is not an identity, a user is a boundary, and a peer that comes back is another peer."""

import os
import socket
import time
from typing import Any

import pytest

import kvferry
from failure_support import CASES, NEW, OLD, REFILL, WHERE, Ferry, Memory, Peers, ended, until
from identity_support import (
    goes_down,
    identity_page,
    port_of,
    reborn,
    the_same_addresses,
    without_its_control_thread,
)
from support import Peer

pytestmark = pytest.mark.quick(
    "is_not_the_owner[cma]",
    "does_not_hide_the_death_of_its_parent[socket]",
    "without_a_secret[of root]",
    "are_refused[right-wrong]",
    "says_so[pull]",
)

SIDE = "failure_support:Side"
MODULES = ("failure_support", "kvferry", "numpy")  # what another user cannot read any more when it needs them
NOBODY = 65534
ONE_SIDED = [case for case in CASES if case.transport != "socket"]
root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
BLOCKS, BLOCK_BYTES = 4, 16 << 10


class Pair:
    """An owner of the cache "source", and a puller with a small prepared pull from it."""

    def __init__(self, peers: Peers, transport: str) -> None:
        self.peers, self.transport = peers, transport
        self.options = {"pool": 1 << 20, "heartbeat_ms": 100, "heartbeat_timeout_ms": 1000}
        if transport == "socket":
            self.options["transports"] = ("socket",)
        with the_same_addresses():
            self.owner = peers(SIDE, self.options | {"node_id": 7})
            self.puller = peers(SIDE, self.options)
        self.address = self.owner.call("address")
        (self.at,) = self.give_source(self.owner, NEW)
        (into,) = self.puller.call("cache", "destination", "registered", BLOCKS, BLOCK_BYTES, OLD)
        self.memory = Memory(self.puller.pid, into, BLOCKS, BLOCK_BYTES)
        self.puller.call("link", self.address)
        self.puller.call("prepare", "source", "destination", None, transport)
        self.puller.call("run_prepared", 2000)
        assert self.words() == [NEW, NEW + 1, NEW + 2, NEW + 3]
        self.puller.call("fill", "destination", OLD)

    def give_source(self, owner: Peer, value: int) -> Any:
        return owner.call("cache", "source", WHERE[self.transport], BLOCKS, BLOCK_BYTES, value)

    def words(self) -> "list[int]":
        return [self.memory.word(block) for block in range(BLOCKS)]

    def born_again(self, **keywords: Any) -> Peer:
        with the_same_addresses():
            return reborn(self.peers, self.owner.pid, SIDE, self.options | {"node_id": 7}, **keywords)


# --- another process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["map", "cma", "socket"])
def test_a_process_with_the_pid_and_the_addresses_of_the_owner_is_not_the_owner(peers: Peers, transport: str) -> None:
    pair = Pair(peers, transport)
    with without_its_control_thread(pair.puller):
        pair.owner.kill()
        other = pair.born_again()
        (at,) = pair.give_source(other, REFILL)
        print("the other's memory is at the same address:", at == pair.at)
        for _ in range(3):
            error = ended(pair.puller.call_later("run_prepared", 500), kvferry.PeerLost)
            assert "node 7" in error.peer
            assert error.bytes_touched or pair.words() == [OLD, OLD + 1, OLD + 2, OLD + 3]
    goes_down(pair.puller, 1.0)
    ended(pair.puller.call_later("run_prepared", 500), kvferry.PeerLost)
    pair.puller.call("link", other.call("address"))
    pair.puller.call("prepare", "source", "destination", None, transport)
    pair.puller.call("run_prepared", 2000)
    assert pair.words() == [REFILL, REFILL + 1, REFILL + 2, REFILL + 3]


@pytest.mark.parametrize("ferry", [*CASES[:3], CASES[5]], ids=str, indirect=True)
def test_a_source_whose_pid_is_another_s_in_the_middle_of_a_transfer_is_a_lost_peer(ferry: Ferry, peers: Peers) -> None:
    moving = ferry.stopped_in_the_middle(ferry.destination)
    ferry.source.kill()
    other = reborn(peers, ferry.source.pid, SIDE, {"pool": ferry.moved * ferry.block_bytes + (1 << 20)})
    other.call("cache", "source", WHERE[ferry.case.transport], ferry.moved, ferry.block_bytes, REFILL)
    ferry.destination.cont()
    if ferry.actor is ferry.destination:
        ended(moving, kvferry.PeerLost)
    goes_down(ferry.destination, 2.0)
    ferry.nothing_outside_changed()
    ferry.refill()
    ferry.nothing_changes()


@pytest.fixture
def ferry(request: pytest.FixtureRequest, peers: Peers) -> Ferry:
    return Ferry(peers, request.param)


@pytest.mark.parametrize("transport", ["map", "cma", "socket"])
def test_of_an_owner_that_has_become_another_program_not_a_byte_is_delivered(peers: Peers, transport: str) -> None:
    pair = Pair(peers, transport)
    identity = identity_page(pair.owner.pid)
    size = BLOCKS * BLOCK_BYTES
    with without_its_control_thread(pair.puller):
        pair.owner.call_later("become", [(pair.at, size), (identity[0], identity[1] - identity[0])])
        until(lambda: poisoned(pair.owner.pid, pair.at), "the other program is there")
        for _ in range(3):
            pulling = pair.puller.call_later("run_prepared", 500)
            if transport == "map":
                pulling.result()  # its memory outlives it, and nobody has written there since
                assert pair.words() == [NEW, NEW + 1, NEW + 2, NEW + 3]
            else:
                ended(pulling, kvferry.PeerLost)
    goes_down(pair.puller, 1.0)
    ended(pair.puller.call_later("run_prepared", 500), kvferry.PeerLost)
    with kvferry.Node(listen=pair.address):
        pass  # its port is free


def poisoned(pid: int, at: int) -> bool:
    try:
        return Memory(pid, at, 1).word(0) == 0xEEEEEEEEEEEEEEEE
    except OSError:
        return False


@pytest.mark.parametrize("transport", ["map", "cma", "socket"])
def test_a_forked_child_that_lives_on_does_not_hide_the_death_of_its_parent(peers: Peers, transport: str) -> None:
    pair = Pair(peers, transport)
    pair.owner.call("fork_one_that_lives_on")
    pair.puller.call("run_prepared", 2000)
    pair.puller.call("fill", "destination", OLD)
    pair.owner.kill()
    assert len(pair.owner.descendants()) == 1
    assert goes_down(pair.puller, 1.0) < 1.0
    error = ended(pair.puller.call_later("run_prepared", 500), kvferry.PeerLost)
    assert not error.bytes_touched and pair.words() == [OLD, OLD + 1, OLD + 2, OLD + 3]
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port_of(pair.address)))
        bound.listen()
    again = peers(SIDE, pair.options | {"node_id": 7, "listen": pair.address})
    pair.give_source(again, REFILL)
    pair.puller.call("link", pair.address)
    pair.puller.call("prepare", "source", "destination", None, transport)
    pair.puller.call("run_prepared", 2000)
    assert pair.words()[0] == REFILL


# --- a peer that comes back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["map", "cma", "socket"])
def test_a_peer_restarted_with_its_id_at_its_port_is_linked_to_again(peers: Peers, transport: str) -> None:
    pair = Pair(peers, transport)
    for value in (REFILL, NEW):
        pair.owner.kill()
        pair.owner = peers(SIDE, pair.options | {"node_id": 7, "listen": pair.address})
        pair.give_source(pair.owner, value)
        goes_down(pair.puller, 1.0)
        pair.puller.call("link", pair.address)
        blocks = {block: block for block in range(BLOCKS)}
        pair.puller.call("move", "pull", "source", "destination", blocks, time.monotonic() + 2, transport)
        assert pair.words() == [value, value + 1, value + 2, value + 3]


def test_a_restarted_peer_that_links_takes_the_place_of_the_one_that_stands_still(peers: Peers) -> None:
    owner = peers(SIDE, {"heartbeat_ms": 100})
    address = owner.call("address")
    first, second = (peers(SIDE, {"node_id": 9, "heartbeat_ms": 100}, name=name) for name in ("first", "second"))
    first.call("link", address)
    until(lambda: owner.call("alive") == [True], "the first link is up")
    first.stop()
    time.sleep(0.3)  # more than two heartbeats
    for peer in (owner, second):
        peer.call("cache", "kv", "registered", BLOCKS, BLOCK_BYTES, NEW if peer is owner else OLD)
    second.call("link", address)
    until(lambda: owner.call("alive") == [True], "the old link is gone")
    blocks = {0: 1}
    assert owner.call("move", "push", "kv", "kv", blocks, time.monotonic() + 2, None)[0] == BLOCK_BYTES
    first.cont()
    goes_down(first, 2.0)
    assert second.call("alive") == [True]
    assert owner.call("move", "push", "kv", "kv", blocks, time.monotonic() + 2, None)[0] == BLOCK_BYTES


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_two_live_processes_with_one_id_do_not_drive_each_other_out(peers: Peers, over: str) -> None:
    options: dict[str, Any] = {"transports": ("socket",)} if over == "tcp" else {}
    owner = peers(SIDE, options)
    address = owner.call("address")
    first, second = (peers(SIDE, options | {"node_id": 9}, name=name) for name in ("first", "second"))
    first.call("link", address)
    until(lambda: owner.call("alive") == [True], "the first link is up")
    for _ in range(2):
        error = ended(second.call_later("link", address), kvferry.AlreadyLinked)
        assert "itself 9" in str(error) and "node_id" in str(error) and str(first.pid) in str(error)
    assert first.call("alive") == owner.call("alive") == [True]
    first.call("link", address)  # who links twice means it
    until(lambda: owner.call("peer_ids") == [9] and first.call("alive") == [True], "its last link counts")
    first.kill()
    until(lambda: owner.call("alive") == [], "the first one is gone")
    second.call("link", address)
    assert second.call("alive") == [True]


@pytest.mark.parametrize("who", ["one side", "both sides"])
def test_a_process_that_stood_still_does_not_drop_its_links(peers: Peers, who: str) -> None:
    options = {"heartbeat_ms": 50, "heartbeat_timeout_ms": 300}
    still = peers(SIDE, options, name="still")
    other = peers(SIDE, options | ({"heartbeat_timeout_ms": 10_000} if who == "one side" else {}), name="other")
    still.call("link", other.call("address"))
    until(lambda: other.call("alive") == [True], "the link is up")
    for _ in range(2):
        stopped = [still] if who == "one side" else [still, other]
        for peer in stopped:
            peer.stop()
        time.sleep(0.8)
        for peer in stopped:
            peer.cont()
        time.sleep(0.2)
        assert still.call("alive") == other.call("alive") == [True]


def test_a_peer_that_is_only_silent_is_lost_after_the_heartbeat_time(peers: Peers) -> None:
    options = {"heartbeat_ms": 50, "heartbeat_timeout_ms": 300}
    owner, other = peers(SIDE, options), peers(SIDE, options)
    other.call("link", owner.call("address"))
    time.sleep(0.5)
    assert other.call("alive") == [True]
    owner.stop()
    assert 0.2 < goes_down(other, 2.0) < 0.8
    owner.cont()
    goes_down(owner, 1.0)


# --- users ------------------------------------------------------------------------------------------------------------


@root_only
@pytest.mark.parametrize("listener", ["of root", "of nobody"])
def test_another_user_of_this_host_is_refused_without_a_secret(peers: Peers, listener: str) -> None:
    theirs = peers(SIDE, uid=NOBODY, preload=MODULES)
    mine = peers(SIDE)
    dialler, listening = (theirs, mine) if listener == "of root" else (mine, theirs)
    error = ended(dialler.call_later("link", listening.call("address")), kvferry.Refused)
    assert "uid 0" in str(error) and f"uid {NOBODY}" in str(error) and "secret" in str(error)
    assert listening.call("alive") == [] and dialler.call("alive") == []
    friend = peers(SIDE, **({"uid": NOBODY, "preload": MODULES} if listening is theirs else {}))
    friend.call("link", listening.call("address"))


@root_only
@pytest.mark.parametrize("where", ["allocated", "registered"])
def test_another_user_with_the_secret_is_served_over_sockets_and_told_why(peers: Peers, where: str) -> None:
    options = {"secret": "between us", "pool": 1 << 20}
    theirs = peers(SIDE, options, uid=NOBODY, preload=MODULES)
    mine = peers(SIDE, options)
    for peer, value in ((theirs, OLD), (mine, NEW)):
        peer.call("cache", "kv", where, BLOCKS, BLOCK_BYTES, value)
    theirs.call("link", mine.call("address"))
    until(lambda: mine.call("alive") == [True], "the link is up")
    assert theirs.call("move", "pull", "kv", "kv", {3: 0}, time.monotonic() + 2, None) == (BLOCK_BYTES, "socket")
    assert mine.call("move", "push", "kv", "kv", {2: 1}, time.monotonic() + 2, None) == (BLOCK_BYTES, "socket")
    assert theirs.call("first_words", "kv") == [NEW + 3, NEW + 2, OLD + 2, OLD + 3]
    for peer in (theirs, mine):
        reasons = peer.call("statistics")["transports"]
        assert reasons["socket"] == "ok"
        for fast in ("map", "cma"):
            assert "uid 0" in reasons[fast] and f"uid {NOBODY}" in reasons[fast]
    for fast in ("map", "cma"):
        pulling = theirs.call_later("move", "pull", "kv", "kv", {3: 0}, time.monotonic() + 2, fast)
        error = ended(pulling, kvferry.Unsupported)
        assert "uid" in str(error) and not error.bytes_touched


@pytest.mark.parametrize(("listener", "dialler"), [("right", "wrong"), (None, "one"), ("one", None)])
def test_two_secrets_or_only_one_are_refused(peers: Peers, listener: "str | None", dialler: "str | None") -> None:
    one, other = peers(SIDE, {"secret": listener}), peers(SIDE, {"secret": dialler})
    error = ended(other.call_later("link", one.call("address")), kvferry.Refused)
    assert "secret" in str(error)
    assert one.call("alive") == []


# --- memory that may not be read --------------------------------------------------------------------------------------


def ordinary() -> "dict[str, Any]":
    return {"uid": NOBODY, "preload": MODULES} if os.getuid() == 0 else {}


@pytest.mark.parametrize("verb", ["pull", "push"])
def test_a_process_that_is_not_dumpable_is_read_by_other_means_and_says_so(peers: Peers, verb: str) -> None:
    options = {"pool": 1 << 20}
    hidden = peers(SIDE, options, dumpable=False, **ordinary())
    plain = peers(SIDE, options, **ordinary())
    for name, where in (("owned", "registered"), ("pooled", "allocated")):
        hidden.call("cache", name, where, BLOCKS, BLOCK_BYTES, NEW)
    plain.call("cache", "mine", "registered", BLOCKS, BLOCK_BYTES, OLD)
    plain.call("link", hidden.call("address"))
    until(lambda: hidden.call("alive") == [True], "the link is up")
    for name, transport in (("owned", "socket"), ("pooled", "map")):
        actor, far, near = (plain, name, "mine") if verb == "pull" else (hidden, "mine", name)
        moved = actor.call("move", verb, far, near, {3: 1}, time.monotonic() + 2, None)
        assert moved == (BLOCK_BYTES, transport)
        assert plain.call("first_words", "mine") == [OLD, NEW + 3, OLD + 2, OLD + 3]
        plain.call("fill", "mine", OLD)
    reasons = plain.call("statistics")["transports"]
    assert reasons["map"] == "ok" and "dumpable" in reasons["cma"]
    assert "kvferry allocate" in reasons["cma"]  # what mends it
    assert hidden.call("statistics")["transports"]["cma"] == "ok"  # the other way round nothing is in the way


@pytest.mark.parametrize("verb", ["pull", "push"])
def test_a_process_that_hides_its_memory_later_on_is_read_by_other_means(peers: Peers, verb: str) -> None:
    hiding, plain = peers(SIDE, **ordinary()), peers(SIDE, **ordinary())
    hiding.call("cache", "kv", "registered", BLOCKS, BLOCK_BYTES, NEW)
    plain.call("cache", "kv", "registered", BLOCKS, BLOCK_BYTES, OLD)
    plain.call("link", hiding.call("address"))
    until(lambda: hiding.call("alive") == [True], "the link is up")
    actor = plain if verb == "pull" else hiding
    move = ("move", verb, "kv", "kv", {3: 1}, time.monotonic() + 10, None)
    assert actor.call(*move) == (BLOCK_BYTES, "cma")
    assert hiding.call("prctl", 4, 0) == 0  # PR_SET_DUMPABLE
    plain.call("fill", "kv", OLD)
    for _ in range(2):
        assert actor.call(*move) == (BLOCK_BYTES, "socket")
        assert plain.call("first_words", "kv") == [OLD, NEW + 3, OLD + 2, OLD + 3]
    assert "not permitted" in plain.call("statistics")["transports"]["cma"]
