"""Copies that the kernel itself holds: the call ends all the same, nobody else waits, and the memory stays quarantined."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import held_support
import kvferry
from failure_support import PATIENCE_S, Peers, until
from held_support import HeldMemory

pytestmark = pytest.mark.skipif(bool(held_support.why_not()), reason=held_support.why_not())

SIDE = "held_support:HeldSide"
DEADLINE_MS = 300
SIZES = {"small": 4096, "large": 64 << 10}  # of a block; 64 blocks are a small reply, or one on a lane of its own


@pytest.fixture(params=["small", pytest.param("large", marks=pytest.mark.slow)])
def block_bytes(request: pytest.FixtureRequest) -> int:
    return SIZES[request.param]


@pytest.fixture
def held() -> Iterator[Any]:
    """Makes held memory; what a test has not let go of is let go of at its end."""
    made: list[HeldMemory] = []

    def make(shape: "tuple[int, ...]") -> HeldMemory:
        made.append(HeldMemory(shape))
        return made[-1]

    yield make
    for memory in made:
        memory.let_go()


def given_up(call: Any, deadline_ms: int = DEADLINE_MS) -> kvferry.DeadlineExceeded:
    begun = time.monotonic()
    with pytest.raises(kvferry.DeadlineExceeded) as caught:
        call()
    assert deadline_ms * 0.8e-3 <= time.monotonic() - begun < PATIENCE_S  # a receiver is given a little less
    return caught.value


@pytest.mark.parametrize(
    "how", ["waiting", pytest.param("future", marks=pytest.mark.slow), pytest.param("await", marks=pytest.mark.slow)]
)
def test_a_pull_whose_destination_is_held_ends_at_its_deadline(
    peers: Peers, held: Any, block_bytes: int, how: str
) -> None:
    peer = peers(SIDE, block_bytes)
    memory = held((64, block_bytes))
    with kvferry.Node() as node, node.link(peer.call("address")) as link:
        mine = node.register("mine", [memory.array], layout="blocks")
        other = node.register("other", [np.zeros((64, block_bytes), np.uint8)], layout="blocks")

        def pull() -> Any:
            if how == "waiting":
                return link.pull("free", into=mine, timeout_ms=DEADLINE_MS)
            if how == "future":
                return link.pull_async("free", into=mine, timeout_ms=DEADLINE_MS).wait()

            async def awaited() -> Any:
                return await link.pull_async("free", into=mine, timeout_ms=DEADLINE_MS)

            return asyncio.run(awaited())

        error = given_up(pull)
        assert error.bytes_touched and not error.destination_settled
        assert "kernel still holds" in str(error)
        # Nobody else waits for it, and the link is as good as before.
        for _ in range(3):
            assert link.pull("free", into=other, timeout_ms=5000).size_bytes == 64 * block_bytes
            assert (other.numpy(0) == 7).all()
            other.numpy(0)[:] = 0
        # Its memory is quarantined.
        with pytest.raises(kvferry.Busy, match="kernel still holds"):
            link.pull("free", into=mine, timeout_ms=DEADLINE_MS)
        with pytest.raises(kvferry.Busy, match="unregister it again") as busy:
            mine.unregister()
        assert busy.value.cache == "cache 1 'mine'" and not busy.value.destination_settled
        with pytest.raises(kvferry.CacheNotFound):  # ended for everybody all the same
            link.pull("free", into=mine, timeout_ms=DEADLINE_MS)
        memory.let_go()
        until(lambda: unregistered(mine), "the copy came back")
        assert not mine.unregister()


def refused(call: Any) -> bool:
    try:
        call()
    except kvferry.Busy as error:
        return "kernel still holds" in str(error)
    except kvferry.DeadlineExceeded:
        return False
    raise AssertionError("it succeeded")


def unregistered(cache: Any) -> bool:
    try:
        return bool(cache.unregister())
    except kvferry.Busy:
        return False


@pytest.mark.slow
def test_once_the_copy_has_come_back_the_memory_is_written_again(peers: Peers, held: Any, block_bytes: int) -> None:
    peer = peers(SIDE, block_bytes)
    memory = held((64, block_bytes))
    with kvferry.Node() as node, node.link(peer.call("address")) as link:
        mine = node.register("mine", [memory.array], layout="blocks")
        given_up(lambda: link.pull("free", into=mine, timeout_ms=DEADLINE_MS))
        memory.let_go()

        def pulled() -> bool:
            try:
                link.pull("free", into=mine, timeout_ms=5000)
            except kvferry.Busy:
                return False
            return True

        until(pulled, "the copy came back")
        assert (memory.array == 7).all()
        memory.array[:] = 9
        time.sleep(0.3)
        assert (memory.array == 9).all()  # and the copy that was held writes no more
        assert mine.unregister()


@pytest.mark.slow
def test_a_push_whose_destination_is_held_ends_at_its_deadline(peers: Peers, block_bytes: int) -> None:
    peer = peers(SIDE, block_bytes)
    with kvferry.Node() as node, node.link(peer.call("address")) as link:
        mine = node.register("mine", [np.full((64, block_bytes), 5, np.uint8)], layout="blocks")
        error = given_up(lambda: link.push(mine, to="held", timeout_ms=DEADLINE_MS))
        assert error.bytes_touched and not error.destination_settled
        for _ in range(3):
            assert link.push(mine, to="free", timeout_ms=5000).size_bytes == 64 * block_bytes
        until(lambda: refused(lambda: link.push(mine, to="held", timeout_ms=DEADLINE_MS)), "the receiver gave up too")
        with pytest.raises(kvferry.Busy):
            peer.call("unregister_held")
        assert mine.unregister()  # nothing is held here
        peer.call("let_go")

        def settled() -> bool:
            try:
                return bool(peer.call("unregister_held"))
            except kvferry.Busy:
                return False

        until(settled, "the copy came back")
        peer.call("fill_held", 9)
        time.sleep(0.3)
        assert peer.call("bytes_of_held") == b"\x09" * (64 * block_bytes)


@pytest.mark.slow
def test_a_pull_from_memory_that_is_held_costs_the_deadline_and_no_other_transfer_anything(
    peers: Peers, block_bytes: int
) -> None:
    peer = peers(SIDE, block_bytes)
    with kvferry.Node(heartbeat_ms=100, heartbeat_timeout_ms=1000) as node, node.link(peer.call("address")) as link:
        mine = node.register("mine", [np.zeros((64, block_bytes), np.uint8)], layout="blocks")
        for _ in range(6):  # more than the peer has copy threads
            error = given_up(lambda: link.pull("held", into=mine, timeout_ms=DEADLINE_MS))
            assert error.destination_settled  # it is here, and nothing writes into it any more
        mine.numpy(0)[:] = 3
        with pytest.raises(kvferry.Busy):
            peer.call("unregister_held")
        assert link.pull("free", into=mine, timeout_ms=5000).size_bytes == 64 * block_bytes
        assert link.alive  # its heartbeats went on
        mine.numpy(0)[:] = 3
        peer.call("let_go")
        time.sleep(0.3)
        assert (mine.numpy(0) == 3).all()
        with pytest.raises(kvferry.CacheNotFound):
            link.pull("held", into=mine, timeout_ms=5000)


@pytest.mark.slow
def test_a_push_from_memory_that_is_held_ends_at_its_deadline(peers: Peers, held: Any, block_bytes: int) -> None:
    peer = peers(SIDE, block_bytes)
    memory = held((64, block_bytes))
    with kvferry.Node() as node, node.link(peer.call("address")) as link:
        mine = node.register("mine", [memory.array], layout="blocks")
        other = node.register("other", [np.full((64, block_bytes), 2, np.uint8)], layout="blocks")
        given_up(lambda: link.push(mine, to="free", timeout_ms=DEADLINE_MS))
        assert link.push(other, to="free", timeout_ms=5000).size_bytes == 64 * block_bytes
        with pytest.raises(kvferry.Busy):
            mine.unregister()
        memory.let_go()
        until(lambda: unregistered(mine), "the copy came back")


@pytest.mark.slow
def test_a_window_and_a_node_over_held_memory_say_busy_until_it_is_free(
    peers: Peers, held: Any, block_bytes: int
) -> None:
    peer = peers(SIDE, block_bytes)
    memory = held((64, block_bytes))
    node = kvferry.Node(listen="127.0.0.1:0")
    mine = node.register("mine", [memory.array], layout="blocks")
    window = mine.window(blocks=range(64), access="write", ttl_ms=60_000)
    peer.call("link_to", node.address)
    with pytest.raises(kvferry.DeadlineExceeded) as caught:
        peer.call("push_free_to", window.name, DEADLINE_MS)
    assert not caught.value.destination_settled
    with pytest.raises(kvferry.Busy, match="close the window again"):
        window.close()
    with pytest.raises(kvferry.Busy, match="again"):
        node.close()
    assert node.closed
    with pytest.raises(kvferry.Busy):
        node.close()
    memory.let_go()

    def closed() -> bool:
        try:
            node.close()
        except kvferry.Busy:
            return False
        return True

    until(closed, "the copy came back")
    memory.array[:] = 9
    time.sleep(0.3)
    assert (memory.array == 9).all()


def test_ctrl_c_ends_what_is_held(peers: Peers) -> None:
    owner, puller = peers(SIDE, 4096), peers(SIDE, 4096)
    pulling = puller.call_later("pull_until_interrupted", owner.call("address"))
    time.sleep(0.5)
    os.kill(puller.pid, signal.SIGINT)
    assert pulling.result(PATIENCE_S) == ("KeyboardInterrupt", True)
    with pytest.raises(kvferry.Busy):
        puller.call("unregister_held")
    puller.call("let_go")


def test_cancelling_what_is_held_ends_it(peers: Peers, held: Any) -> None:
    peer = peers(SIDE, 4096)
    memory = held((64, 4096))
    with kvferry.Node() as node, node.link(peer.call("address")) as link:
        mine = node.register("mine", [memory.array], layout="blocks")
        moving = link.pull_async("free", into=mine, timeout_ms=60_000)
        time.sleep(0.2)
        assert not moving.done()
        moving.cancel()
        with pytest.raises(kvferry.Cancelled) as caught:
            moving.wait(5000)
        assert not caught.value.destination_settled
        memory.let_go()
        until(lambda: unregistered(mine), "the copy came back")


def test_memory_of_files_that_answer_is_moved_both_ways(peers: Peers, tmp_path: Any, block_bytes: int) -> None:
    peer = peers(SIDE, block_bytes)
    peer.call("let_go")
    peer.call("fill_held", 4)
    file = np.memmap(tmp_path / "cache", dtype=np.uint8, mode="w+", shape=(64, block_bytes))
    with kvferry.Node() as node, node.link(peer.call("address")) as link:
        mine = node.register("mine", [np.asarray(file)], layout="blocks")
        done = link.pull("held", into=mine, timeout_ms=5000)
        assert done.transport == "socket" and (file == 4).all()
        file[:] = 6
        assert link.push(mine, to="held", timeout_ms=5000).transport == "socket"
        assert peer.call("bytes_of_held") == b"\x06" * (64 * block_bytes)
        many = [link.pull_async("held", into=mine, blocks={i: i}, timeout_ms=10_000) for i in range(40)]
        for one in many:
            one.wait()
        assert (file == 6).all()
        assert mine.unregister()
