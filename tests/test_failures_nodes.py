"""What one bad peer costs the others, and what is left behind: links, descriptors, threads, mappings, children, exits."""

import asyncio
import contextlib
import ctypes
import gc
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvferry
from failure_support import MOVED, NEW, OLD, PATIENCE_S, Peers, Side, ended, mapped, until, words

pytestmark = pytest.mark.quick(
    "nobody_else_anything[any]",
    "unregisters_unlinks_and_closes_at_once",
    "none_is_left_in_the_list",
    "as_fast_as_all_others[actor-push-map]",
    "as_fast_as_all_others[other-pull-cma]",
    "as_fast_as_all_others[other-push-socket]",
    "finds_the_node_closed",
    "leaves_nothing_behind",
)

SIDE = "failure_support:Side"
BLOCKS, BLOCK_BYTES = 8, 4096
WHERE = {"map": "allocated", "cma": "registered", "socket": "registered"}
DEADLINE_MS = 300
SLACK_S = 0.3


def small(peer: Any, name: str, where: str, value: int) -> None:
    peer.call("cache", name, where, BLOCKS, BLOCK_BYTES, value)


# --- a peer that stands still -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["any", "socket"])
def test_a_frozen_peer_costs_its_callers_the_deadline_and_nobody_else_anything(peers: Peers, transport: str) -> None:
    options: dict[str, Any] = {"transports": ("socket",)} if transport == "socket" else {}
    frozen, lively = peers(SIDE, options, name="frozen"), peers(SIDE, options, name="lively")
    with kvferry.Node(copy_threads=2, **options) as node:
        links = {peer: node.link(peer.call("address")) for peer in (frozen, lively)}
        for peer in (frozen, lively):
            small(peer, "kv", "registered", NEW)
        mine = node.register("kv", mapped((BLOCKS, BLOCK_BYTES // 8)))
        links[lively].pull("kv", into=mine)
        usual = max(timed(lambda: links[lively].pull("kv", into=mine)) for _ in range(50))
        frozen.stop()
        begun = time.monotonic()
        waiting = [links[frozen].pull_async("kv", into=mine, timeout_ms=DEADLINE_MS) for _ in range(20)]
        waiting += [links[frozen].push_async(mine, to="kv", timeout_ms=DEADLINE_MS) for _ in range(20)]
        took: list[float] = []
        while time.monotonic() < begun + DEADLINE_MS / 1000 - 0.02:
            took.append(timed(lambda: links[lively].pull("kv", into=mine)))
            took.append(timed(lambda: links[lively].push(mine, to="kv", timeout_ms=2000)))
            took.append(timed(lambda: links[lively].pull_async("kv", into=mine).wait()))
        assert not any(one.done() for one in waiting)
        print(f"{len(took)} transfers beside it; longest {max(took) * 1e3:.1f} ms, before at most {usual * 1e3:.1f} ms")
        assert len(took) > 30
        assert max(took) < 0.1
        for one in waiting:
            with pytest.raises(kvferry.DeadlineExceeded) as caught:
                one.wait(5000)
            assert one.done() and caught.value.peer == links[frozen].peer
        assert time.monotonic() - begun < DEADLINE_MS / 1000 + SLACK_S
        frozen.cont()
        links[frozen].pull("kv", into=mine, timeout_ms=2000)
        links[frozen].push(mine, to="kv", timeout_ms=2000)


def timed(call: Any) -> float:
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


def test_on_the_calling_thread_too_a_frozen_peer_costs_the_deadline(peers: Peers) -> None:
    frozen = peers(SIDE)
    small(frozen, "kv", "registered", NEW)
    with kvferry.Node() as node, node.link(frozen.call("address")) as link:
        mine = node.register("kv", mapped((BLOCKS, BLOCK_BYTES // 8)))
        frozen.stop()
        for call in (
            lambda: link.pull("kv", into=mine, timeout_ms=DEADLINE_MS),
            lambda: link.push(mine, to="kv", timeout_ms=DEADLINE_MS),
            lambda: link.describe("kv", DEADLINE_MS),
            lambda: link.prepare_pull("kv", into=mine, timeout_ms=DEADLINE_MS),
            lambda: node.link(frozen_address(link), DEADLINE_MS),
        ):
            begun = time.monotonic()
            with pytest.raises(kvferry.DeadlineExceeded) as caught:
                call()
            assert DEADLINE_MS / 1000 - 0.02 < time.monotonic() - begun < DEADLINE_MS / 1000 + SLACK_S
            assert caught.value.peer
        assert link.alive
        frozen.cont()
        link.pull("kv", into=mine, timeout_ms=2000)
        assert (mine.numpy(0) == words(NEW, BLOCKS)).all()
        frozen.stop()
        with pytest.raises(kvferry.DeadlineExceeded):
            link.unlink(DEADLINE_MS)
        frozen.cont()
        time.sleep(0.1)  # the peer hears of it, too late
        link.pull("kv", into=mine, timeout_ms=2000)
        assert link.alive and frozen.call("alive") == [True]
        link.unlink(2000)
        until(lambda: not link.alive and frozen.call("alive") == [], "the link is down on both sides")


def frozen_address(link: kvferry.Link) -> str:
    return link.statistics().address


def test_a_node_with_frozen_peers_unregisters_unlinks_and_closes_at_once(peers: Peers) -> None:
    frozen = peers(SIDE, {"pool": 1 << 20})
    small(frozen, "kv", "registered", NEW)
    node = kvferry.Node(listen="127.0.0.1:0")
    link = node.link(frozen.call("address"))
    frozen.call("link", node.address)
    mine = node.register("kv", mapped((BLOCKS, BLOCK_BYTES // 8)))
    other = node.register("other", mapped((BLOCKS, BLOCK_BYTES // 8)))
    frozen.stop()
    flying = [link.pull_async("kv", into=mine, timeout_ms=60_000), link.push_async(mine, to="kv", timeout_ms=60_000)]
    flying += [link.push_async(other, to="kv", timeout_ms=60_000)]
    time.sleep(0.05)
    assert timed(lambda: node.unregister(other)) < 0.2
    assert timed(lambda: link.unlink(force=True)) < 0.2
    for one in flying:
        with pytest.raises((kvferry.NotLinked, kvferry.CacheNotFound)):
            one.wait(1000)
        assert one.done()
    back = node.links[0]  # the one that the frozen peer had opened
    flying = [back.pull_async("kv", into=mine, timeout_ms=60_000), back.push_async(mine, to="kv", timeout_ms=60_000)]
    assert timed(node.close) < 0.5
    for one in flying:
        with pytest.raises(kvferry.NodeClosed):
            one.wait(1000)
        assert one.done()


def test_closing_a_link_to_a_frozen_peer_gives_it_a_second_and_no_more(peers: Peers) -> None:
    frozen = peers(SIDE)
    with kvferry.Node() as node:
        link = node.link(frozen.call("address"))
        frozen.stop()
        assert timed(link.close) < 1.4
        assert not link.alive and node.links == []
        frozen.cont()
        until(lambda: frozen.call("alive") == [], "its side is down too")


# --- many links -------------------------------------------------------------------------------------------------------


def test_one_process_has_sixty_four_links_and_few_threads(peers: Peers) -> None:
    owner = peers(SIDE, {"pool": 1 << 20, "copy_threads": 0})
    small(owner, "kv", "allocated", NEW)
    address = owner.call("address")
    threads, descriptors = owner.call("threads"), owner.call("descriptors")
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(kvferry.Node(copy_threads=1)) for _ in range(64)]
        links = [stack.enter_context(node.link(address)) for node in nodes]
        until(lambda: owner.call("alive") == [True] * 64, "64 links are up")
        assert owner.call("threads") == threads <= 10
        caches = [node.register("kv", mapped((BLOCKS, BLOCK_BYTES // 8))) for node in nodes]
        moving = [
            link.pull_async("kv", into=cache, timeout_ms=10_000) for link, cache in zip(links, caches, strict=True)
        ]
        for one, cache in zip(moving, caches, strict=True):
            assert one.wait().transport == "map"
            assert (cache.numpy(0) == words(NEW, BLOCKS)).all()
        for node, cache in zip(nodes[::8], caches[::8], strict=True):
            cache.numpy(0)[:] = words(OLD, BLOCKS)
            (back,) = [number for number, id in enumerate(owner.call("peer_ids")) if id == node.node_id]
            owner.call("push_over", back, "kv", "kv")
            assert (cache.numpy(0) == words(NEW, BLOCKS)).all()
    until(lambda: owner.call("alive") == [], "all of them are gone")
    until(lambda: owner.call("descriptors") <= descriptors, "and their descriptors")


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_links_go_on_when_their_node_listens_no_more(peers: Peers, over: str) -> None:
    options: dict[str, Any] = {"transports": ("socket",)} if over == "tcp" else {}
    other, late = peers(SIDE, options, name="other"), peers(SIDE, name="late")
    small(other, "kv", "registered", NEW)
    with kvferry.Node(listen="127.0.0.1:0", **options) as node:
        address = node.address
        other.call("link", address)
        until(lambda: len(node.links) == 1, "the link is up")
        mine = node.register("kv", mapped((BLOCKS, BLOCK_BYTES // 8)))
        (link,) = node.links
        node.stop_listening()
        for _ in range(20):  # each costs a lane, on this side and on the other
            with pytest.raises(kvferry.DeadlineExceeded):
                link.pull("kv", into=mine, timeout_ms=0, transport="socket")
            ended(other.call_later("move", "pull", "kv", "kv", None, 0.0, "socket"), kvferry.DeadlineExceeded)
        for _ in range(3):
            link.pull("kv", into=mine, timeout_ms=2000, transport="socket")
            link.push(mine, to="kv", timeout_ms=2000, transport="socket")
            other.call("move", "pull", "kv", "kv", None, time.monotonic() + 2, "socket")
        assert (mine.numpy(0) == words(NEW, BLOCKS)).all()
        ended(late.call_later("link", address), kvferry.LinkFailed)
        link.unlink()
        until(lambda: can_listen(address), "nobody needs the port any more")


def can_listen(address: str) -> bool:
    try:
        kvferry.Node(listen=address).close()
    except kvferry.AddressInUse:
        return False
    return True


def test_of_links_that_are_unlinked_none_is_left_in_the_list() -> None:
    with kvferry.Node(listen="127.0.0.1:0") as one, kvferry.Node() as other:
        assert one.address
        for _ in range(100):
            link = other.link(one.address)
            link.unlink()
            assert other.links == []
            with pytest.raises(kvferry.NotLinked):
                link.describe("kv")
            until(lambda: one.links == [], "the other side has heard of it")


@pytest.mark.parametrize("transport", ["map", "cma", "socket"])
@pytest.mark.parametrize("verb", ["pull", "push"])
@pytest.mark.parametrize("dialler", ["actor", "other"])
def test_the_first_transfer_of_a_link_goes_as_fast_as_all_others(
    peers: Peers, verb: str, transport: str, dialler: str
) -> None:
    options = {"pool": 4 << 20}
    actor, other = peers(SIDE, options), peers(SIDE, options)
    small(actor, "mine", WHERE[transport], NEW if verb == "push" else OLD)
    small(other, "far", WHERE[transport], OLD if verb == "push" else NEW)
    one, listener = (actor, other) if dialler == "actor" else (other, actor)
    one.call("link", listener.call("address"))
    until(lambda: listener.call("alive") == [True], "the link is up")
    until_s = time.monotonic() + 3
    assert actor.call("move_here", verb, "far", "mine", {0: 1}, until_s, transport) == (BLOCK_BYTES, transport)
    destination, name = (actor, "mine") if verb == "pull" else (other, "far")
    assert destination.call("first_words", name)[:3] == [OLD, NEW, OLD + 2]


# --- forks and exits --------------------------------------------------------------------------------------------------


def test_a_forked_child_finds_the_node_closed_and_its_parent_does_not_notice(peers: Peers) -> None:
    owner, parent = peers(SIDE, {"pool": 1 << 20}), peers("test_failures_nodes:Forking", {"pool": 1 << 20})
    for name, where in (("kv", "registered"), ("pooled", "allocated")):
        small(owner, name, where, NEW)
        small(parent, name, where, OLD)
    parent.call("link", owner.call("address"))
    parent.call("prepare", "pooled", "kv", {0: 1}, None)
    parent.call("run_prepared", 1000)
    for _ in range(3):
        report = parent.call("fork_and_try_everything")
        assert report.pop("descriptors left") == []
        assert set(report.values()) == {"NodeClosed", "ok"}, report
        assert [what for what, how in report.items() if how == "ok"] == ["closing", "a new node", "a view", "closed"]
    parent.call("run_prepared", 1000)
    assert parent.call("move", "pull", "kv", "kv", {3: 3}, time.monotonic() + 2, None)
    assert parent.call("alive") == owner.call("alive") == [True]


async def awaited(transfer: Any) -> Any:
    return await transfer


CORE_DESCRIPTORS = ("socket:", "anon_inode:[event", "anon_inode:[pidfd", "/memfd:kvferry", "pidfd:")


class Forking(Side):
    def fork_and_try_everything(self) -> "dict[str, Any]":
        self.going_on = self.links[0].push_layers(self.caches["kv"], to="kv", tensors_per_layer=1)
        try:
            return self._fork_and_try()
        finally:
            self.going_on.cancel()

    def _fork_and_try(self) -> "dict[str, Any]":
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(writing, repr(self.try_everything()).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as answer:
            report = answer.read()
        os.waitpid(child, 0)
        found: dict[str, Any] = eval(report)
        return found

    def try_everything(self) -> "dict[str, Any]":
        link, cache, node = self.links[0], self.caches["kv"], self.node
        calls = {
            "wait": lambda: self.going_on.transfer.wait(),
            "wait a while": lambda: self.going_on.transfer.wait(1000),
            "await": lambda: asyncio.run(awaited(self.going_on.transfer)),
            "layer_ready": lambda: self.going_on.layer_ready(0),
            "cancel": self.going_on.cancel,
            "pull": lambda: link.pull("kv", into=cache),
            "pull_async": lambda: link.pull_async("kv", into=cache),
            "push": lambda: link.push(cache, to="kv"),
            "push_layers": lambda: link.push_layers(cache, to="kv", tensors_per_layer=1),
            "prepared": lambda: self.prepared.run(1000),
            "prepare": lambda: link.prepare_pull("kv", into=cache),
            "describe": lambda: link.describe("kv"),
            "link": lambda: node.link(self.node.address or "127.0.0.1:1"),
            "listen": lambda: node.listen("127.0.0.1:0"),
            "register": lambda: node.register("more", np.zeros((2, 8))),
            "allocate": lambda: node.allocate("more", tensors=1, shape=(1, 8), dtype="uint8"),
            "window": lambda: cache.window(blocks=[0], access="read", ttl_ms=1000),
            "copy": lambda: node.copy(cache, cache, blocks={0: 1}),
            "closing": node.close,
            "a new node": self.another_node,
            "a view": lambda: self.caches["pooled"].numpy(0)[0, 0],
            "closed": lambda: None if node.closed and not link.alive else 1 / 0,
        }
        report: dict[str, Any] = {"descriptors left": self.kvferry_descriptors()}
        for what, call in calls.items():
            report[what] = how_it_ends(call)
        return report

    def kvferry_descriptors(self) -> "list[str]":
        """Of the core: a peer of these tests has no sockets, event descriptors or memory files of its own in a child."""
        return [target for target in descriptor_targets() if target.startswith(CORE_DESCRIPTORS)]

    def descriptors_of_a_program_started(self) -> "list[str]":
        program = (
            "import os\n"
            "for fd in map(int, os.listdir('/proc/self/fd')):\n"
            "    try: print(os.readlink(f'/proc/self/fd/{fd}'))\n"
            "    except OSError: pass\n"
        )
        command = [sys.executable, "-S", "-c", program]
        found = subprocess.run(command, close_fds=False, capture_output=True, text=True, check=True).stdout.splitlines()
        return [target for target in found if target.startswith(CORE_DESCRIPTORS)]

    def another_node(self) -> None:
        with kvferry.Node(listen="127.0.0.1:0") as one, kvferry.Node() as other, other.link(one.address or "") as link:
            one.register("kv", np.ones((2, 8)))
            into = np.zeros((2, 8))
            link.pull("kv", into=other.register("kv", into))
            assert (into == 1).all()


def how_it_ends(call: Any) -> str:
    ends = []

    def attempt() -> None:
        try:
            call()
            ends.append("ok")
        except Exception as error:  # noqa: BLE001 - whatever it is, the report names it
            ends.append(type(error).__name__)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(3)
    return ends[0] if ends else "hangs"


def descriptor_targets() -> "list[str]":
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


def test_what_was_in_flight_when_its_process_forked_arrives(peers: Peers) -> None:
    owner, parent = peers(SIDE), peers("test_failures_nodes:Forking")
    for peer, value in ((owner, NEW), (parent, OLD)):
        peer.call("cache", "kv", "registered", MOVED, 1024, value)
    parent.call("link", owner.call("address"))
    owner.stop()
    whole = np.arange(MOVED)
    moving = parent.call_later("move", "pull", "kv", "kv", (whole, whole), time.monotonic() + 20, "socket", thread=True)
    time.sleep(0.05)
    for _ in range(3):
        parent.call("fork_one_that_lives_on")
    owner.cont()
    assert moving.result() == (MOVED * 1024, "socket")
    assert parent.call("first_words", "kv") == [NEW + block for block in range(MOVED)]


def test_a_program_that_is_started_inherits_no_descriptor_of_the_core(peers: Peers) -> None:
    owner, parent = peers(SIDE, {"pool": 1 << 20}), peers("test_failures_nodes:Forking", {"pool": 1 << 20})
    for peer in (owner, parent):
        small(peer, "kv", "allocated", NEW)
    parent.call("link", owner.call("address"))
    parent.call("move", "pull", "kv", "kv", {0: 1}, time.monotonic() + 2, None)
    assert parent.call("descriptors_of_a_program_started") == []


def test_a_process_without_descriptors_refuses_links_and_takes_them_again(peers: Peers) -> None:
    owner = peers(SIDE)
    small(owner, "kv", "registered", NEW)
    address = owner.call("address")
    owner.call("limit_descriptors", owner.call("descriptors") + 8)
    with contextlib.ExitStack() as stack:
        failed = 0
        for _ in range(6):
            node = stack.enter_context(kvferry.Node(copy_threads=1))
            mine = node.register("kv", mapped((BLOCKS, BLOCK_BYTES // 8)))
            try:
                link = stack.enter_context(node.link(address, 300))
                link.pull("kv", into=mine, timeout_ms=300)
            except kvferry.KvferryError:
                failed += 1
        print(failed, "of 6 failed")
        assert 0 < failed < 6
        before = owner.call("cpu_seconds")
        time.sleep(0.3)
        assert owner.call("cpu_seconds") - before < 0.1  # it does not turn round and round meanwhile
    until(lambda: owner.call("alive") == [], "all of them are gone")
    with kvferry.Node() as node, node.link(address) as link:
        mine = node.register("kv", mapped((BLOCKS, BLOCK_BYTES // 8)))
        link.pull("kv", into=mine, timeout_ms=2000)


@pytest.mark.parametrize("verb", ["pull", "push"])
@pytest.mark.parametrize("end", ["normally", "closed first"])
def test_a_process_ends_well_in_the_middle_of_transfers(peers: Peers, verb: str, end: str) -> None:
    """`close()` of a peer raises if its process does not end with status 0 in time."""
    options = {"pool": 64 << 20}
    actor, other = peers(SIDE, options), peers(SIDE, options)
    size = MOVED, 1024
    for peer in (actor, other):
        peer.call("cache", "kv", "registered", *size, NEW)
    actor.call("link", other.call("address"))
    other.stop()
    actor.call("leave_flying", verb, "kv", "kv", 3)
    if end == "closed first":
        actor.call("close")
    actor.close()
    other.cont()
    until(lambda: other.call("alive") == [], "the other has noticed")
    assert other.call("unregister", "kv", timeout=2)


# --- nothing leaks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["dialler", "listener"])
def test_after_many_links_transfers_and_errors_nothing_is_left_behind(peers: Peers, who: str) -> None:
    options = {"pool": 8 << 20, "copy_threads": 2}
    here = peers("test_failures_nodes:Busy", options)
    there = peers(SIDE, options)
    address = there.call("address")
    for name, where in (("registered", "registered"), ("allocated", "allocated")):
        there.call("cache", name, where, BLOCKS, 64 << 10, NEW)
    here.call("a_life_with", address, 4)
    watched = here if who == "dialler" else there
    settled(here, there)
    before = watched.call("left_behind")
    here.call("a_life_with", address, 12)
    settled(here, there)
    until(lambda: close_to(watched.call("left_behind"), before), f"{before} again", PATIENCE_S)
    assert there.call("statistics_of_node")["slots_open"] == 2


def settled(*sides: Any) -> None:
    for side in sides:
        until(lambda: side.call("alive") == [], "its links are gone")  # noqa: B023


def close_to(now: "dict[str, int]", before: "dict[str, int]") -> bool:
    print(now, before)
    return all(now[what] <= before[what] + (4 if what == "mappings" else 0) for what in before)


class Busy(Side):
    def a_life_with(self, address: str, rounds: int) -> None:
        for number in range(rounds):
            with self.node.link(address) as link:
                self.use(link)
                if number % 3 == 1:
                    link.unlink()
                if number % 3 == 2:
                    link.unlink(force=True)
        gc.collect()

    def use(self, link: Any) -> None:
        shape = (BLOCKS, (64 << 10) // 8)
        with (
            self.node.register("mine", mapped(shape)) as mine,
            self.node.allocate("own", tensors=1, shape=shape, dtype="uint64") as own,
        ):
            for name in ("registered", "allocated"):
                for transport in (None, "socket"):
                    link.pull(name, into=mine, timeout_ms=3000, transport=transport)
                    link.push(own, to=name, blocks={0: 0}, timeout_ms=3000, transport=transport)
                    link.push(mine, to=name, blocks={0: 0}, timeout_ms=3000, transport=transport)
                    self.fail(link, name, mine, transport)
            prepared = link.prepare_pull("allocated", into=own)
            for _ in range(3):
                prepared.run()
            with link.push_layers(mine, to="registered", blocks={1: 1}, tensors_per_layer=1) as push:
                push.layer_ready(0)
            link.push_layers(mine, to="registered", blocks={1: 1}, tensors_per_layer=1).cancel()
            with (
                mine.window(blocks=[1], access="read", ttl_ms=1000),
                own.window(blocks=[1], access="write", ttl_ms=1000),
            ):
                pass

    def fail(self, link: Any, name: str, mine: Any, transport: Any) -> None:
        with contextlib.suppress(kvferry.CacheNotFound):
            link.pull("no", into=mine, timeout_ms=3000, transport=transport)
        with contextlib.suppress(kvferry.InvalidArgument):
            link.push(mine, to=name, blocks={99: 0}, timeout_ms=3000, transport=transport)
        for moving in (
            link.pull_async(name, into=mine, timeout_ms=3000, transport=transport),
            link.push_async(mine, to=name, blocks={1: 2}, timeout_ms=3000, transport=transport),
        ):
            moving.cancel()
            with contextlib.suppress(kvferry.Cancelled):
                moving.wait()
        with contextlib.suppress(kvferry.DeadlineExceeded):
            link.pull(name, into=mine, timeout_ms=0, transport=transport)


@pytest.mark.parametrize("verb", ["pull", "push"])
def test_memory_that_its_owner_has_freed_is_not_held_by_peers(peers: Peers, verb: str) -> None:
    options = {"heartbeat_ms": 60_000, "heartbeat_timeout_ms": 120_000}  # they hear of it at once
    owner, other = peers(SIDE, options | {"pool": 64 << 20}), peers(SIDE, options)
    other.call("cache", "mine", "registered", BLOCKS, BLOCK_BYTES, OLD)
    other.call("link", owner.call("address"))
    until(lambda: owner.call("alive") == [True], "the link is up")
    for round in range(3):
        owner.call("cache", "kv", "allocated", BLOCKS, BLOCK_BYTES, NEW)
        actor, far, near = (other, "kv", "mine") if verb == "pull" else (owner, "mine", "kv")
        actor.call("move", verb, far, near, None, time.monotonic() + 2, "map")
        if verb == "pull":
            other.call("prepare", "kv", "mine", None, "map")
            other.call("run_prepared", 2000)
        assert segments_of(other.pid) > 0
        owner.call("unregister_and_free", "kv")
        if verb == "pull":
            ended(other.call_later("run_prepared", 2000), kvferry.CacheNotFound)
        until(lambda: segments_of(other.pid) == 0, f"it is given back ({round})")
    assert segments_of(owner.pid) == 0


def test_for_want_of_a_descriptor_a_pull_goes_without_map_and_the_next_one_with_it(peers: Peers) -> None:
    owner, other = peers(SIDE, {"pool": 64 << 20}), peers(SIDE)
    small(owner, "kv", "allocated", NEW)
    small(owner, "free", "registered", NEW)
    small(other, "mine", "registered", OLD)
    other.call("link", owner.call("address"))
    pull = ("move", "pull", "kv", "mine", None)
    other.call("move", "pull", "free", "mine", None, time.monotonic() + 2, None)
    other.call("limit_descriptors", 3)
    assert other.call(*pull, time.monotonic() + 2, None) == (BLOCKS * BLOCK_BYTES, "cma")
    assert other.call("first_words", "mine")[:2] == [NEW, NEW + 1]
    other.call("limit_descriptors", 1024)
    assert other.call(*pull, time.monotonic() + 2, None) == (BLOCKS * BLOCK_BYTES, "map")


def segments_of(pid: int) -> int:
    """Mapped, or held open."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            lines.append(os.readlink(entry))
    return sum("kvferry-segment" in line for line in lines)


def test_the_leak_test_would_see_a_leak(peers: Peers) -> None:
    side = peers(SIDE)
    before = side.call("left_behind")
    side.call("cache", "kv", "registered", 16, 1 << 20, NEW)
    assert Path(f"/proc/{side.pid}").exists()
    assert side.call("left_behind")["mappings"] > before["mappings"]


def test_what_a_link_was_refused_leaves_nothing_behind(peers: Peers) -> None:
    listener = peers(SIDE, {"secret": "right"})
    address = listener.call("address")
    with kvferry.Node(secret="wrong") as wrong, kvferry.Node() as none:
        for node in (wrong, none):
            with pytest.raises(kvferry.Refused):
                node.link(address)
        before = listener.call("left_behind")
        for _ in range(20):
            for node in (wrong, none):
                with pytest.raises(kvferry.Refused):
                    node.link(address)
        until(lambda: close_to(listener.call("left_behind"), before), "nothing is left")
    error = ended(listener.call_later("link", "127.0.0.1:1"), kvferry.LinkFailed)
    assert "127.0.0.1:1" in str(error)


def test_a_layer_push_that_everybody_has_forgotten_holds_up_nobody(peers: Peers) -> None:
    other = peers(SIDE)
    small(other, "kv", "registered", OLD)
    with kvferry.Node() as node:
        link = node.link(other.call("address"))
        mine = node.register("kv", mapped((BLOCKS, BLOCK_BYTES // 8)))
        before = node.statistics().slots_open
        link.push_layers(mine, to="kv", tensors_per_layer=1)  # none of its layers will ever be ready
        gc.collect()
        until(lambda: node.statistics().slots_open == before, "its guard has ended")
        assert timed(lambda: link.unlink(1000)) < 0.5
        assert timed(node.close) < 0.5


LOOKUP = """
import socket, subprocess, sys, time
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
subprocess.run(["mount", "--bind", sys.argv[1], "/etc/resolv.conf"], check=True)
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("127.0.0.1", 53))
import kvferry
with kvferry.Node() as node:
    begun = time.monotonic()
    try:
        node.link("nobody.example:7000", timeout_ms=300)
    except kvferry.DeadlineExceeded as error:
        print(time.monotonic() - begun < 3, error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a name server of its own takes root")
def test_a_name_server_that_does_not_answer_costs_the_deadline(tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    command = ["unshare", "--mount", "--net", sys.executable, "-c", LOOKUP, str(tmp_path / "resolv.conf")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert said.stdout.startswith("True the name 'nobody.example' was not found in time"), said


@pytest.mark.parametrize("way", ["from it", "into it"])
def test_a_copy_of_memory_whose_file_has_become_shorter_is_an_error_and_no_crash(peers: Peers, way: str) -> None:
    side = peers("test_failures_nodes:Alone")
    error = ended(side.call_later("copy_with_a_short_file", way), kvferry.InvalidArgument)
    assert "become shorter" in str(error) and error.bytes_touched
    assert side.call("copy_with_a_whole_file", way)


# What is unmapped or read-only is found before the first byte unless it was looked at earlier. After that it is its owner's
# promise that it is not touched: by map, and by socket a few blocks, the process itself writes there.
GONE = [("memfd", by, used, n) for by in ("map", "cma", "socket") for used in (False, True) for n in (2, BLOCKS)] + [
    (how, by, True, n)
    for how in ("unmapped", "read only")
    for by, n in (("cma", 2), ("cma", BLOCKS), ("socket", BLOCKS))
]


@pytest.mark.parametrize(("how", "by", "used", "blocks"), GONE)
def test_a_destination_of_which_only_the_first_page_is_left_is_named(
    peers: Peers, how: str, by: str, used: bool, blocks: int
) -> None:
    """And not the peer, which is well; that page has changed, and the error says so. Shared memory does not end the process."""
    other, side = peers(SIDE, {"pool": 1 << 20}), peers("test_failures_nodes:Alone")
    small(other, "kv", "allocated" if by == "map" else "registered", NEW)
    side.call("link", other.call("address"))
    error = ended(side.call_later("pull_into_little", how, by, used, blocks), kvferry.InvalidArgument)
    assert "'mine' is not (or not writable) memory any more" in str(error)
    assert error.bytes_touched and error.destination_settled
    assert side.call("first_page") == [words(NEW, 1)[0, 0]] * (BLOCK_BYTES // 8)
    assert side.call("alive")


@pytest.mark.parametrize("way", ["from it", "into it"])
def test_a_copy_of_memory_whose_memfd_has_become_shorter_is_an_error_and_no_crash(peers: Peers, way: str) -> None:
    side = peers("test_failures_nodes:Alone")
    error = ended(side.call_later("copy_with_a_short_memfd", way), kvferry.InvalidArgument)
    assert "become shorter" in str(error) and error.bytes_touched


class Alone(Side):
    def pull_into_little(self, how: str, by: str, used: bool, blocks: int) -> None:
        """A pull into memory of which all but the first page has gone; ``used``: after one while it was whole."""
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        size = BLOCKS * BLOCK_BYTES
        shared = how == "memfd"
        descriptor = os.memfd_create("lent") if shared else -1
        if shared:
            os.ftruncate(descriptor, size)
        self.at = libc.mmap(
            None,
            size,
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            descriptor,
            0,
        )
        mine = self.node.register_addresses("mine", [self.at], unit_bytes=BLOCK_BYTES, count=BLOCKS)
        moves = {number: number for number in range(blocks)}
        if used:
            self.links[0].pull("kv", into=mine, blocks=moves, transport=by)
            ctypes.memset(self.at, 0, size)
        if shared:
            os.ftruncate(descriptor, BLOCK_BYTES)
        elif how == "unmapped":
            libc.munmap(self.at + BLOCK_BYTES, size - BLOCK_BYTES)
        else:
            libc.mprotect(self.at + BLOCK_BYTES, size - BLOCK_BYTES, mmap.PROT_READ)
        self.links[0].pull("kv", into=mine, blocks=moves, transport=by)

    def first_page(self) -> "list[int]":
        return list((ctypes.c_uint64 * (BLOCK_BYTES // 8)).from_address(self.at))

    def alive(self) -> bool:
        return bool(self.links[0].alive)

    def copy_with_a_short_memfd(self, way: str) -> None:
        descriptor = os.memfd_create("lent")
        os.ftruncate(descriptor, 1 << 20)
        lent = self.node.register(
            "lent", np.frombuffer(mmap.mmap(descriptor, 1 << 20), dtype=np.uint8).reshape(16, 1 << 16)
        )
        plain = self.node.register("plain", np.full((16, 1 << 16), 7, np.uint8))
        os.ftruncate(descriptor, 4096)
        self.node.copy(*((lent, plain) if way == "from it" else (plain, lent)))

    def one_more_node(self) -> None:
        kvferry.Node().close()

    def copy_with_a_short_file(self, way: str) -> None:
        self._copy(way, short=True)

    def copy_with_a_whole_file(self, way: str) -> bool:
        return self._copy(way, short=False)

    def _copy(self, way: str, *, short: bool) -> bool:
        with tempfile.TemporaryFile() as file:
            os.ftruncate(file.fileno(), 1 << 20)
            of_file = np.frombuffer(mmap.mmap(file.fileno(), 1 << 20), dtype=np.uint8).reshape(16, 1 << 16)
            plain = np.full((16, 1 << 16), 7, np.uint8)
            if not short:
                of_file[:] = 3
            with self.node.register("", of_file) as file_cache, self.node.register("", plain) as plain_cache:
                if short:
                    os.ftruncate(file.fileno(), 4096)
                ends = (file_cache, plain_cache) if way == "from it" else (plain_cache, file_cache)
                self.node.copy(*ends)
                return bool((of_file == plain).all())


def test_any_number_of_caches_may_lie_at_one_address() -> None:
    """As many as there can be: ending them all took minutes when each was looked for among the others."""
    memory = np.zeros((4, 16), np.uint8)
    with kvferry.Node() as node:
        for _ in range(65_536):
            node.register("", memory)


def test_a_link_whose_place_a_newer_one_has_taken_says_so(peers: Peers) -> None:
    other = peers(SIDE)
    small(other, "kv", "registered", NEW)
    with kvferry.Node() as node:
        mine = node.register("kv", mapped((BLOCKS, BLOCK_BYTES // 8)))
        first, second = (node.link(other.call("address")) for _ in range(2))
        until(lambda: not first.alive, "the first one has ended")
        with pytest.raises(kvferry.NotLinked, match="a newer link to it from here"):
            first.pull("kv", into=mine)
        second.pull("kv", into=mine, timeout_ms=2000)


def test_a_process_without_descriptors_says_busy(peers: Peers) -> None:
    other, side = peers(SIDE), peers("test_failures_nodes:Alone")
    address = other.call("address")
    side.call("limit_descriptors", 3)
    assert "out of descriptors" in str(ended(side.call_later("link", address), kvferry.Busy))
    assert "out of descriptors" in str(ended(side.call_later("one_more_node"), kvferry.Busy))
    side.call("limit_descriptors", 1024)
    side.call("link", address)


def test_a_name_stands_in_a_sentence_as_one_short_line() -> None:
    with kvferry.Node() as node:
        node.register("two\nlines", np.zeros((2, 8)))
        with pytest.raises(kvferry.AlreadyExists) as caught:
            node.register("two\nlines", np.zeros((2, 8)))
        assert "two\\x0alines" in str(caught.value)
        long = "é" * 1000
        node.register(long, np.zeros((2, 8)))
        with pytest.raises(kvferry.AlreadyExists) as caught:
            node.register(long, np.zeros((2, 8)))
        assert len(str(caught.value)) < 300 and "é..." in str(caught.value)
