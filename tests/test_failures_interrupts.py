"""Ctrl-C, pressed while a call waits for a peer that stands still: the call ends at once and the node goes on."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvferry
from failure_support import Peers

pytestmark = pytest.mark.quick("nothing_else[link]", "nothing_else[describe]", "nothing_else[unlink]")

LONG_MS = 60_000  # far longer than a test may wait
SOON_S = 20.0  # on any machine, however busy
BLOCKS = 4


class Caller:
    """A process whose calls are interrupted. Its peer is linked, and may be stopped."""

    def __init__(self, address: str, lonely: "tuple[str, int]") -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests' own parent has done with it
        self.node = kvferry.Node(transports=("socket",), heartbeat_timeout_ms=LONG_MS)
        self.mine = self.node.register("mine", [np.zeros((BLOCKS, 1 << 20), np.uint8) for _ in range(2)])
        self.address, self.lonely = address, f"{lonely[0]}:{lonely[1]}"
        self.link = self.node.link(address)
        self.prepared = self.link.prepare_pull("kv", into=self.mine, blocks={0: 0})
        self.moving: Any = None
        self.waits = False

    def start(self, verb: str) -> None:
        if verb == "pull":
            self.moving = self.link.pull_async("kv", into=self.mine, timeout_ms=LONG_MS)
        else:
            self.moving = self.link.push_async(self.mine, to="kv", timeout_ms=LONG_MS)

    def wait(self, what: str) -> "tuple[str, bool]":
        """What a wait of ``WAITS`` was ended by, and whether the link is still there."""
        try:
            self.waits = True
            WAITS[what](self)
        except BaseException as error:  # noqa: BLE001 - which one is the question
            return type(error).__name__, self.link.alive
        finally:
            self.waits = False
        return "nothing", self.link.alive

    def is_waiting(self) -> bool:
        return self.waits

    def goes_on(self, anew: bool) -> bool:
        """Whether the node moves bytes, over the old link or a new one."""
        if anew:
            self.link.close()
            self.link = self.node.link(self.address)
        self.mine.numpy(0)[:] = 0
        done = self.link.pull("kv", into=self.mine, timeout_ms=LONG_MS)
        return bool(done.size_bytes == 2 * BLOCKS << 20 and (self.mine.numpy(0) == 7).all())

    def sleep(self) -> str:
        try:
            time.sleep(LONG_MS / 1000)
        except KeyboardInterrupt:
            return "KeyboardInterrupt"
        return "nothing"

    def how_it_ended(self) -> str:
        try:
            self.moving.wait()
        except kvferry.KvferryError as error:
            return error.kind
        return "arrived"


def leave_a_layer_push(caller: Caller) -> None:
    with caller.link.push_layers(caller.mine, to="kv", timeout_ms=LONG_MS) as push:
        caller.moving = push.transfer
        push.layer_ready(0)


def unlink_while_busy(caller: Caller) -> None:
    caller.start("push")
    caller.link.unlink(LONG_MS)


WAITS: "dict[str, Callable[[Caller], Any]]" = {
    "link": lambda c: c.node.link(c.address, LONG_MS),
    "link to nobody": lambda c: c.node.link(c.lonely, LONG_MS),
    "describe": lambda c: c.link.describe("kv", LONG_MS),
    "prepare_pull": lambda c: c.link.prepare_pull("kv", into=c.mine, timeout_ms=LONG_MS),
    "prepared": lambda c: c.prepared.run(LONG_MS),
    "pull": lambda c: c.link.pull("kv", into=c.mine, timeout_ms=LONG_MS),
    "push": lambda c: c.link.push(c.mine, to="kv", timeout_ms=LONG_MS),
    "wait for a pull": lambda c: (c.start("pull"), c.moving.wait()),
    "wait for a push": lambda c: (c.start("push"), c.moving.wait(LONG_MS)),
    "leave a layer push": leave_a_layer_push,
    "a window's list": lambda c: c.link.pull(b"0123456789abcdef", into=c.mine, blocks=[0], timeout_ms=LONG_MS),
    "close": lambda c: c.link.close(),
    "unlink": lambda c: c.link.unlink(LONG_MS),
    "unlink while busy": unlink_while_busy,
}
GOES_ON = ("wait for a pull", "wait for a push", "unlink while busy")  # the operation does


class Owner:
    def __init__(self) -> None:
        self.node = kvferry.Node(listen="127.0.0.1:0", transports=("socket",), heartbeat_timeout_ms=LONG_MS)
        self.cache = self.node.register("kv", [np.zeros((BLOCKS, 1 << 20), np.uint8) for _ in range(2)])

    def address(self) -> "str | None":
        return self.node.address

    def fill(self) -> None:
        for array in self.cache.numpy():
            array[:] = 7


@pytest.fixture
def silent() -> "Iterator[tuple[str, int]]":
    """Where the kernel takes connections, and nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()


@pytest.mark.parametrize("what", [what for what in WAITS if what != "close"])
def test_ctrl_c_ends_the_wait_and_nothing_else(peers: Peers, silent: "tuple[str, int]", what: str) -> None:
    owner = peers(f"{__name__}:Owner")
    caller = peers(f"{__name__}:Caller", owner.call("address"), silent)
    owner.stop()
    waiting = caller.call_later("wait", what)
    while not caller.call_later("is_waiting", thread=True).result():
        assert not waiting.done(), waiting.result()
    time.sleep(0.3)
    assert not waiting.done(), waiting.result()
    os.kill(caller.pid, signal.SIGINT)
    assert waiting.result(SOON_S) == ("KeyboardInterrupt", True)
    owner.cont()
    if what in GOES_ON:
        assert caller.call("how_it_ended") == "arrived"
    elif what == "leave a layer push":
        assert caller.call("how_it_ended") == "cancelled"
    owner.call("fill")
    assert caller.call("goes_on", anew=False)


def test_ctrl_c_while_a_link_is_closed_drops_this_side(peers: Peers, silent: "tuple[str, int]") -> None:
    owner = peers(f"{__name__}:Owner")
    caller = peers(f"{__name__}:Caller", owner.call("address"), silent)
    owner.stop()
    waiting = caller.call_later("wait", "close")
    while not caller.call_later("is_waiting", thread=True).result():
        assert not waiting.done(), waiting.result()
    os.kill(caller.pid, signal.SIGINT)
    assert waiting.result(SOON_S)[1] is False
    owner.cont()
    owner.call("fill")
    assert caller.call("goes_on", anew=True)


def test_ctrl_c_in_another_thread_s_wait_is_the_main_thread_s(peers: Peers, silent: "tuple[str, int]") -> None:
    """Only the main thread hears signals: a call on another one goes on to its end."""
    owner = peers(f"{__name__}:Owner")
    caller = peers(f"{__name__}:Caller", owner.call("address"), silent)
    owner.stop()
    elsewhere = caller.call_later("wait", "pull", thread=True)
    while not caller.call_later("is_waiting", thread=True).result():
        assert not elsewhere.done(), elsewhere.result()
    here = caller.call_later("sleep")
    time.sleep(0.3)
    os.kill(caller.pid, signal.SIGINT)
    assert here.result(SOON_S) == "KeyboardInterrupt"
    assert not elsewhere.done()
    owner.cont()
    assert elsewhere.result() == ("nothing", True)


# --- operations that are begun ----------------------------------------------------------------------------------------


class Struck(Exception):
    """What a signal handler raises."""


def strike(*_: object) -> None:
    raise Struck


@pytest.fixture
def struck() -> "Iterator[None]":
    before = signal.signal(signal.SIGALRM, strike)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_operation_that_a_handler_tears_from_its_caller_is_cancelled(struck: None) -> None:
    """The handler raises when the native call that begins it returns, which here takes milliseconds: it copies 64 MiB."""
    message = bytes(64 << 20)
    with kvferry.Node(listen="127.0.0.1:0") as far, kvferry.Node() as near:
        far.serve_calls()  # and nobody takes them
        assert far.address
        link = near.link(far.address)
        for _ in range(3):
            torn = False
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.002)
                link.call_async(message, timeout_ms=60_000)
            except Struck:
                torn = True
            assert torn
            link.unlink(timeout_ms=5000)  # waits for what is in flight, and raises if it goes on
            link = near.link(far.address)


@pytest.mark.parametrize("verb", ["pull_async", "push_async", "push_layers", "call_async"])
def test_whatever_begins_an_operation_cancels_it_when_it_cannot_be_handed_over(verb: str) -> None:
    with kvferry.Node(listen="127.0.0.1:0") as far, kvferry.Node() as near:
        far.serve_calls()
        assert far.address
        link = near.link(far.address)
        kv = [np.zeros((4, 8), np.float32) for _ in range(2)]
        far.register("kv", [array.copy() for array in kv])
        mine = near.register("mine", kv)
        begin: dict[str, Callable[[], object]] = {
            "pull_async": lambda: link.pull_async("kv", into=mine, timeout_ms=60_000),
            "push_async": lambda: link.push_async(mine, to="kv", timeout_ms=60_000),
            "push_layers": lambda: link.push_layers(mine, to="kv", timeout_ms=60_000),
            "call_async": lambda: link.call_async(b"x", timeout_ms=60_000),
        }

        def raises_behind_it(_frame: object, event: str, function: object) -> None:
            if event == "c_return" and getattr(function, "__name__", "") == "extend":
                sys.setprofile(None)
                raise Struck

        sys.setprofile(raises_behind_it)
        try:
            with pytest.raises(Struck):
                begin[verb]()
        finally:
            sys.setprofile(None)
        link.unlink(timeout_ms=5000)
        assert not link.alive
