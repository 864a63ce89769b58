"""Calls: messages that code of the other process answers, and what both sides hear when one of them goes astray."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import kvferry
from support import Peer

Peers = Callable[..., Peer]
MOST = 64 << 20
LONG_MS = 60_000
SOON_S = 15.0


class Server:
    """A process that answers: with what it was asked, unless the message's first word says otherwise."""

    def __init__(self, listen: str = "127.0.0.1:0", threads: int = 1, options: "dict[str, Any] | None" = None) -> None:
        self.node = kvferry.Node(**(options or {}))
        if threads:
            self.node.serve_calls()
        self.address = self.node.listen(listen)
        self.heard: list[bytes] = []
        self.held: list[kvferry.Call] = []
        self.downs: list[tuple[int, bool]] = []
        self.threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(threads)]
        for thread in self.threads:
            thread.start()

    def _serve(self) -> None:
        while True:
            try:
                call = self.node.next_call(LONG_MS)
            except kvferry.NodeClosed:
                return
            if isinstance(call, kvferry.LinkDown):
                self.downs.append((call.link_id, call.process_ended))
            elif call is not None:
                self.heard.append(call.payload[:8])
                self._answer(call)
            call = None  # or what was dropped would be kept until the next one comes

    def _answer(self, call: kvferry.Call) -> None:
        if call.payload == b"hold":
            self.held.append(call)
        elif call.payload == b"sleep":
            time.sleep(0.3)
            call.answer(b"slept")
        elif not call.one_way and call.payload != b"drop":
            call.answer(call.payload)

    def where(self) -> str:
        return self.address

    def what_was_heard(self) -> "list[bytes]":
        return self.heard

    def ended_links(self) -> "list[tuple[int, bool]]":
        return self.downs

    def held_calls(self) -> int:
        return len(self.held)

    def answer_held(self, answer: bytes) -> "list[bool]":
        held, self.held = self.held, []
        return [call.answer(answer) for call in held]

    def call_back(self, payload: bytes) -> bytes:
        return self.node.links[0].call(payload)

    def link(self, address: str) -> None:
        self.linked = self.node.link(address)

    def call(self, payload: bytes, timeout_ms: int) -> bytes:
        return self.linked.call(payload, timeout_ms)

    def unlink(self) -> None:
        self.linked.close()

    def interrupted(self, what: str) -> "tuple[str, bool]":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            if what == "call":
                self.linked.call(b"hold", LONG_MS)
            else:
                self.node.next_call(LONG_MS)
        except KeyboardInterrupt:
            return "KeyboardInterrupt", self.linked.alive
        return "nothing", self.linked.alive

    def close(self) -> None:
        self.node.close()
        for thread in self.threads:
            thread.join(SOON_S)
            assert not thread.is_alive()

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))


def until(reached: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SOON_S
    while not (found := reached()):
        assert time.monotonic() < deadline, "never came"
        time.sleep(0.005)
    return found


@pytest.fixture
def here() -> Iterator[kvferry.Node]:
    with kvferry.Node() as node:
        yield node


@pytest.fixture
def server(peers: Peers) -> Peer:
    return peers("test_calls:Server")


@pytest.fixture
def link(here: kvferry.Node, server: Peer) -> kvferry.Link:
    return here.link(server.call("where"))


# --- what is said ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transports", [("map", "cma", "socket"), ("socket",)], ids=["unix", "tcp"])
def test_the_answer_has_every_byte(peers: Peers, transports: "tuple[str, ...]") -> None:
    server = peers("test_calls:Server", "127.0.0.1:0", 1, {"transports": transports})
    with kvferry.Node(transports=transports) as here:
        link = here.link(server.call("where"))
        for size in (0, 1, 100, 4072, 4073, 100_000, MOST):
            message = np.random.default_rng(size).bytes(size)
            assert link.call(message, 20_000) == message
        assert link.statistics().resets == 0


def test_messages_are_bytes_or_like_them(link: kvferry.Link) -> None:
    for like in (bytearray(b"abcd"), memoryview(b"abcd"), np.frombuffer(b"abcd", np.uint16)):
        assert link.call(like) == b"abcd"
        assert link.call_async(like).wait() == b"abcd"
    for wrong in ("text", 5, None, [1, 2], np.zeros(8, np.uint8)[::2]):
        for verb in (link.call, link.call_async, link.send):
            with pytest.raises(kvferry.InvalidArgument, match="a message of type"):
                verb(wrong)
    for verb in (link.call, link.call_async, link.send):
        with pytest.raises(kvferry.InvalidArgument, match=f"a message of {MOST + 1} bytes: {MOST} are allowed"):
            verb(bytes(MOST + 1))
        with pytest.raises(kvferry.InvalidArgument, match="timeout_ms=-1"):
            verb(b"", timeout_ms=-1)


def test_many_threads_call_and_many_answer(peers: Peers) -> None:
    server = peers("test_calls:Server", "127.0.0.1:0", 3)
    with kvferry.Node(lanes=4) as here, ThreadPoolExecutor(12) as threads:
        link = here.link(server.call("where"))

        def call(number: int) -> bool:
            message = str(number).encode() * (number % 50)
            return link.call(message, LONG_MS) == message

        assert all(threads.map(call, range(2000)))
        assert link.statistics().resets == 0


def test_either_side_calls(here: kvferry.Node, link: kvferry.Link, server: Peer) -> None:
    answering = threading.Thread(target=lambda: here.next_call(LONG_MS).answer(b"from here"))  # type: ignore[union-attr]
    here.serve_calls()
    answering.start()
    assert server.call("call_back", b"to here") == b"from here"
    answering.join()


def test_a_call_says_whose_it_is(here: kvferry.Node, link: kvferry.Link, server: Peer) -> None:
    here.serve_calls()
    back = server.call_later("call_back", b"to here")
    call = here.next_call(LONG_MS)
    assert isinstance(call, kvferry.Call)
    assert (call.payload, call.one_way, call.same_host) == (b"to here", False, True)
    assert here.links[0]._core.link_id == call.link_id and 0 < call.left_ms <= 1000
    with pytest.raises(kvferry.InvalidArgument, match="a message of type str"):
        call.answer("text")  # type: ignore[arg-type]
    assert call.answer(bytearray(b"now"))
    with pytest.raises(kvferry.InvalidArgument, match="answered already"):
        call.answer(b"again")
    assert back.result() == b"now"


def test_calls_in_asyncio(link: kvferry.Link, server: Peer) -> None:
    async def all_of_them() -> "list[bytes]":
        return await asyncio.gather(*(link.call_async(str(i).encode(), LONG_MS) for i in range(100)))  # type: ignore[arg-type]

    assert asyncio.run(all_of_them()) == [str(i).encode() for i in range(100)]

    async def cancelled() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(link.call_async(b"hold", LONG_MS), 0.05)

    asyncio.run(cancelled())
    answer = link.call_async(b"hold", LONG_MS)
    assert not answer.done() and "in flight" in repr(answer)
    with pytest.raises(kvferry.DeadlineExceeded):
        answer.wait(20)
    until(lambda: server.call("held_calls") == 2)
    assert server.call("answer_held", b"at last") == [False, True]
    assert answer.wait() == answer.wait() == b"at last"


def test_what_is_sent_one_way_arrives_and_is_not_answered(link: kvferry.Link, server: Peer) -> None:
    for number in range(50):
        assert link.send(f"told {number}".encode()) is None
    until(lambda: len(server.call("what_was_heard")) == 50)
    assert sorted(server.call("what_was_heard")) == sorted(f"told {number}".encode()[:8] for number in range(50))
    link.send(bytes(MOST), timeout_ms=20_000)
    until(lambda: len(server.call("what_was_heard")) == 51)
    assert link.call(b"and on") == b"and on" and link.statistics().resets == 0


# --- what goes astray --------------------------------------------------------------------------------------------------


def test_where_nobody_answers_that_is_said_at_once(here: kvferry.Node, peers: Peers) -> None:
    server = peers("test_calls:Server", "127.0.0.1:0", 0)
    link = here.link(server.call("where"))
    for ask in (lambda: link.call(b"x", LONG_MS), lambda: link.call_async(b"x", LONG_MS).wait()):
        with pytest.raises(kvferry.Unsupported, match="answers no calls") as caught:
            ask()
        assert (caught.value.operation, caught.value.peer) == ("call", link.peer)
    link.send(b"into nothing")
    with pytest.raises(kvferry.Unsupported):
        server.call("call_back", b"x")
    assert link.statistics().resets == 0


def test_what_is_dropped_is_told(link: kvferry.Link) -> None:
    with pytest.raises(kvferry.InternalError, match="was not answered"):
        link.call(b"drop", LONG_MS)
    assert link.call(b"next") == b"next"


def test_a_busy_server_costs_the_deadline_and_its_late_answer_nothing(link: kvferry.Link, server: Peer) -> None:
    began = time.monotonic()
    with pytest.raises(kvferry.DeadlineExceeded):
        link.call(b"sleep", 50)
    with pytest.raises(kvferry.DeadlineExceeded):
        link.call(b"stale", 50)  # nobody takes it in time, and nobody does later
    assert time.monotonic() - began < 0.3
    assert link.call(b"fresh", LONG_MS) == b"fresh"
    assert server.call("what_was_heard") == [b"sleep", b"fresh"] and link.statistics().resets == 2


def test_a_stopped_server_costs_the_deadline(link: kvferry.Link, server: Peer) -> None:
    assert link.call(b"before") == b"before"
    server.stop()
    for _ in range(3):
        with pytest.raises(kvferry.DeadlineExceeded):
            link.call(b"stopped", 50)
    server.cont()
    assert link.call(b"after", LONG_MS) == b"after"
    assert b"stopped" not in server.call("what_was_heard")


def test_a_killed_server_is_a_lost_peer_and_its_successor_answers(
    here: kvferry.Node, link: kvferry.Link, server: Peer, peers: Peers
) -> None:
    address = server.call("where")
    pending = [link.call_async(b"hold", LONG_MS) for _ in range(5)]
    until(lambda: server.call("held_calls") == 2)  # as many as there are lanes
    server.kill()
    for one in pending:
        with pytest.raises(kvferry.PeerLost):
            one.wait(10_000)
    for verb in (link.call, link.call_async, link.send):
        with pytest.raises(kvferry.PeerLost):
            verb(b"x")
    peers("test_calls:Server", address)
    assert here.link(address).call(b"anew", LONG_MS) == b"anew"


@pytest.mark.parametrize("how", ["killed", "closed", "unlinked"])
def test_the_end_of_a_link_that_had_called_is_told_once(here: kvferry.Node, peers: Peers, how: str) -> None:
    here.serve_calls()
    address = here.listen("127.0.0.1:0")
    silent, asks = peers("test_calls:Server", "127.0.0.1:0", 0), peers("test_calls:Server", "127.0.0.1:0", 0)
    silent.call("link", address)
    asks.call("link", address)
    asked = asks.call_later("call", b"hello", LONG_MS)
    call = here.next_call(LONG_MS)
    assert isinstance(call, kvferry.Call) and call.answer(b"yes") and asked.result() == b"yes"
    silent.kill()
    if how == "killed":
        asks.kill()
    else:
        asks.call("unlink" if how == "unlinked" else "close")
    down = here.next_call(10_000)
    assert isinstance(down, kvferry.LinkDown)
    assert (down.link_id, down.process_ended) == (call.link_id, how == "killed")
    assert repr(down) == f"LinkDown(link_id={down.link_id}, process_ended={down.process_ended})"
    assert here.next_call(50) is None


def test_a_node_that_closes_lets_everybody_go(here: kvferry.Node, link: kvferry.Link, server: Peer) -> None:
    ended: list[str] = []

    def waits() -> None:
        try:
            here.next_call(LONG_MS)
        except kvferry.NodeClosed as error:
            ended.append(error.kind)

    threads = [threading.Thread(target=waits) for _ in range(3)]
    for thread in threads:
        thread.start()
    pending = link.call_async(b"hold", LONG_MS)
    time.sleep(0.05)
    here.close()
    for thread in threads:
        thread.join(SOON_S)
    assert ended == ["closed"] * 3
    with pytest.raises(kvferry.NodeClosed):
        pending.wait()
    for ask in (here.serve_calls, lambda: here.next_call(0), lambda: link.call(b"x"), lambda: link.send(b"x")):
        with pytest.raises(kvferry.NodeClosed):
            ask()
    server.call("close")


def test_next_call_minds_its_time(here: kvferry.Node) -> None:
    began = time.monotonic()
    assert here.next_call(0) is None and here.next_call(50) is None
    assert 0.04 < time.monotonic() - began < 5
    for wrong in (-1, None, "1", 1.5):
        with pytest.raises(kvferry.InvalidArgument, match="timeout_ms"):
            here.next_call(wrong)  # type: ignore[arg-type]


def test_a_forked_child_takes_nothing_and_drops_nothing(here: kvferry.Node, link: kvferry.Link, server: Peer) -> None:
    here.serve_calls()
    back = server.call_later("call_back", b"to here")
    call = here.next_call(LONG_MS)
    assert isinstance(call, kvferry.Call)
    child = os.fork()
    if child == 0:
        closed = 0
        for ask in (
            lambda: here.next_call(0),
            lambda: call.answer(b"child"),
            lambda: link.call(b"x"),
            here.serve_calls,
        ):
            try:
                ask()
            except kvferry.NodeClosed:
                closed += 1
        del call
        os._exit(closed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert call.answer(b"parent") and back.result() == b"parent"


@pytest.mark.parametrize("what", ["call", "next_call"])
def test_ctrl_c_ends_the_wait(here: kvferry.Node, peers: Peers, what: str) -> None:
    here.serve_calls()
    waits = peers("test_calls:Server", "127.0.0.1:0", 0)
    waits.call("link", here.listen("127.0.0.1:0"))
    waiting = waits.call_later("interrupted", what)
    if what == "call":
        held = here.next_call(LONG_MS)
        assert held is not None
    time.sleep(0.1)
    os.kill(waits.pid, signal.SIGINT)
    assert waiting.result(SOON_S) == ("KeyboardInterrupt", True)


def test_nothing_is_left_open(here: kvferry.Node, server: Peer) -> None:
    def everything() -> None:
        with here.link(server.call("where")) as link:
            for _ in range(20):
                assert link.call(b"x" * 5000) == b"x" * 5000
            for _ in range(40):
                with pytest.raises(kvferry.DeadlineExceeded):
                    link.call(b"hold", 3)
        until(lambda: server.call("answer_held", b"late") == [])

    def counted() -> "tuple[int, int]":
        return len(os.listdir("/proc/self/fd")), server.call("descriptors")

    everything()
    until(lambda: len(server.call("ended_links")) == 1)
    before = counted()
    for _ in range(3):
        everything()
    until(lambda: counted() <= before)
