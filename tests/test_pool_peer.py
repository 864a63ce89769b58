"""One node as a client sees it: who waits for a link that is being made, and who is told at once that there is none."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import kvferry
from kvferry.pool.peer import PAUSE_S, Peer, Unreachable
from pool_support import NodeProcess, until

pytestmark = pytest.mark.quick("link")

LONG_S = 60.0


@pytest.fixture
def node() -> Iterator[kvferry.Node]:
    with kvferry.Node() as node:
        yield node


@pytest.fixture
def pool_node(tmp_path: Any) -> Iterator[NodeProcess]:
    started = NodeProcess(f"unix:{tmp_path}/pool.sock")
    yield started
    started.stop()


class Way:
    """Where the node is: told to whoever makes an attempt, when the test lets it."""

    def __init__(self, where: str | None) -> None:
        self.where, self.attempts, self.open = where, 0, threading.Event()

    def __call__(self, timeout_ms: int) -> str | None:
        self.attempts += 1
        assert self.open.wait(LONG_S)
        return self.where


def reach(peer: Peer, patience_s: float = LONG_S) -> Any:
    """The link, or the word for why there is none."""
    try:
        return peer.reach(time.monotonic() + patience_s)
    except Unreachable as why:
        return why.word


def failing(peer: Peer, way: Way, attempts: int) -> None:
    """Lets so many attempts fail, and the pause after them pass."""
    way.open.set()
    for number in range(attempts):
        assert reach(peer) == "node_lost"
        time.sleep(PAUSE_S[number])
    way.open.clear()


def at_once(count: int, work: Callable[[], Any], way: Way) -> list[Any]:
    """What each of ``count`` threads comes to, of which one makes an attempt that ends when all others wait for it."""
    with ThreadPoolExecutor(count) as threads:
        doing = [threads.submit(work) for _ in range(count)]
        until(lambda: way.attempts)
        time.sleep(0.1)
        assert not any(one.done() for one in doing)
        way.open.set()
        return [one.result(LONG_S) for one in doing]


def test_all_who_come_while_a_link_is_being_made_get_it(node: kvferry.Node, pool_node: NodeProcess) -> None:
    way = Way(pool_node.address)
    peer = Peer(node, way)
    links = at_once(8, lambda: reach(peer), way)
    assert links == [peer.link] * 8 and way.attempts == 1


def test_a_failed_attempt_is_the_answer_of_all_who_have_waited_for_the_link(node: kvferry.Node) -> None:
    way = Way(None)
    peer = Peer(node, way)
    assert at_once(8, lambda: reach(peer), way) == ["node_lost"] * 8
    assert way.attempts == 1


def test_whoever_waits_for_a_link_waits_no_longer_than_it_may(node: kvferry.Node, pool_node: NodeProcess) -> None:
    way = Way(pool_node.address)
    peer = Peer(node, way)
    with ThreadPoolExecutor(1) as threads:
        making = threads.submit(reach, peer)
        until(lambda: way.attempts)
        assert reach(peer, 0.05) == "timeout"
        assert not making.done()
        way.open.set()
        assert making.result(LONG_S) is peer.link


def test_a_node_that_has_failed_again_and_again_is_waited_for_by_one_alone(node: kvferry.Node) -> None:
    way = Way(None)
    peer = Peer(node, way)
    failing(peer, way, 2)
    with ThreadPoolExecutor(1) as threads:
        making = threads.submit(reach, peer)
        until(lambda: way.attempts == 3)
        assert [reach(peer) for _ in range(8)] == ["node_lost"] * 8
        assert not making.done() and way.attempts == 3
        way.open.set()
        assert making.result(LONG_S) == "node_lost"


def test_who_has_no_time_left_does_not_make_the_link_fail_for_others(
    node: kvferry.Node, pool_node: NodeProcess
) -> None:
    peer = Peer(node, lambda timeout_ms: pool_node.address)
    assert reach(peer, 0) == "timeout"
    assert reach(peer) is peer.link is not None


def test_a_signal_handler_on_the_thread_that_makes_a_link_is_told_at_once(
    node: kvferry.Node, pool_node: NodeProcess
) -> None:
    heard: list[Any] = []

    def find(timeout_ms: int) -> str:
        signal.raise_signal(signal.SIGALRM)
        return pool_node.address

    peer = Peer(node, find)
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(reach(peer)))
    try:
        assert reach(peer) is peer.link is not None
    finally:
        signal.signal(signal.SIGALRM, before)
    assert heard == ["node_lost"]


def test_a_handler_that_raises_while_a_link_is_waited_for_leaves_nothing_taken(
    node: kvferry.Node, pool_node: NodeProcess
) -> None:
    way = Way(pool_node.address)
    peer = Peer(node, way)

    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, strike)
    try:
        with ThreadPoolExecutor(1) as threads:
            making = threads.submit(reach, peer)
            until(lambda: way.attempts)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                reach(peer)
            way.open.set()
            assert making.result(LONG_S) is peer.link
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert reach(peer) is peer.link is not None
