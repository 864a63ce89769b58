"""Faults of the surroundings, one by one: strangers at the port, neither descriptors nor memory left, restarts, odd ids,
namespaces. Each answer comes in time, names what it is about, and what was linked before goes on."""

import contextlib
import json
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvferry
from cgroup_support import memory_cgroup
from failure_support import NEW, OLD, WHERE, Peers, Side, dice, ended, mapped, until
from namespace_support import AWAIT_CABLE, INNER, Inside, cable
from support import Peer

pytestmark = pytest.mark.slow

SIDE = "failure_support:Side"
BLOCKS, BLOCK_BYTES = 8, 4096
LARGEST_ID = (1 << 64) - 1


def small(peer: Peer, name: str, where: str, value: int) -> None:
    peer.call("cache", name, where, BLOCKS, BLOCK_BYTES, value)


def moved(peer: Peer, verb: str, far: str, near: str, transport: "str | None" = None, seconds: float = 3) -> str:
    size, by = peer.call("move", verb, far, near, None, time.monotonic() + seconds, transport)
    assert size == BLOCKS * BLOCK_BYTES
    return str(by)


# --- a link that is down ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["unlinked", "killed"])
@pytest.mark.parametrize("call", ["pull", "push", "pull_async", "push_async", "prepare_pull", "describe"])
def test_a_call_on_a_link_that_is_down_names_peer_cache_and_operation(peers: Peers, how: str, call: str) -> None:
    other = peers(SIDE)
    small(other, "kv", "registered", NEW)
    with kvferry.Node() as node:
        mine = node.register("mine", mapped((BLOCKS, BLOCK_BYTES // 8)))
        link = node.link(other.call("address"))
        if how == "killed":
            other.kill()
            until(lambda: not link.alive, "it is noticed")
        else:
            link.unlink()
        calls: dict[str, Callable[[], Any]] = {
            "pull": lambda: link.pull("kv", into=mine),
            "push": lambda: link.push(mine, to="kv"),
            "pull_async": lambda: link.pull_async("kv", into=mine).wait(),
            "push_async": lambda: link.push_async(mine, to="kv").wait(),
            "prepare_pull": lambda: link.prepare_pull("kv", into=mine),
            "describe": lambda: link.describe("kv"),
        }
        with pytest.raises(kvferry.PeerLost if how == "killed" else kvferry.NotLinked) as caught:
            calls[call]()
        error = caught.value
        assert error.peer == link.peer and error.operation == call.split("_")[0] and str(error)
        assert "mine" in error.cache if call != "describe" else error.cache
        assert not error.bytes_touched and error.destination_settled


# --- restarts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["map", "cma", "socket"])
def test_two_peers_that_restart_at_once_find_each_other_again(peers: Peers, transport: str) -> None:
    """Both die in the middle of transfers in both directions, and each links to the other as soon as it is back."""
    chance = dice()
    options: dict[str, Any] = {"pool": 1 << 20, "heartbeat_ms": 100}
    if transport == "socket":
        options["transports"] = ("socket",)
    addresses = ["127.0.0.1:0", "127.0.0.1:0"]
    for _ in range(3):
        sides = [peers(SIDE, options | {"node_id": 1 + i, "listen": addresses[i]}) for i in (0, 1)]
        addresses = [side.call("address") for side in sides]
        for side in sides:
            small(side, "source", WHERE[transport], NEW)
            small(side, "into", "registered", OLD)
        linking = [sides[i].call_later("link", addresses[1 - i]) for i in (0, 1)]
        for one in linking:
            one.result(5)
        for side in sides:
            assert moved(side, "pull", "source", "into", transport) == transport
            assert moved(side, "push", "into", "source", None)
            assert side.call("first_words", "into") == [NEW + block for block in range(BLOCKS)]
            side.call_later("leave_flying", "pull", "source", "into", 50)
        time.sleep(chance.uniform(0, 0.01))
        for side in chance.sample(sides, 2):
            side.kill()


# --- strangers at the port --------------------------------------------------------------------------------------------

CONNECTIONS = 1000


def knock(address: "tuple[str, int]", chance: Any) -> "socket.socket | None":
    """One stranger of some kind; the connection, if he stays."""
    try:
        connection = socket.create_connection(address, timeout=5)
        match chance.randrange(6):
            case 0:  # a port scanner
                connection.close()
                return None
            case 1:
                connection.sendall(chance.randbytes(chance.randrange(1, 4000)))
            case 2:  # a hello that breaks off
                connection.sendall(bytes([90, 0, 0, 0, 1, 0, 0, 0]) + bytes(16) + b"KVFERRY1")
            case 3:  # a frame of 4 GiB
                connection.sendall(b"\xff\xff\xff\xff\1\0\0\0" + bytes(16))
            case 4:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: kv\r\n\r\n")
            case _:  # says nothing, or a byte now and then
                pass
    except OSError:  # closed already
        return None
    return connection


def test_a_thousand_strangers_cost_those_who_are_linked_nothing(peers: Peers) -> None:
    chance = dice()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most[1] < CONNECTIONS + 200:
        pytest.skip(f"{CONNECTIONS} connections take more descriptors than the {most[1]} that this user may have")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(most[0], CONNECTIONS + 200), most[1]))
    owner = peers(SIDE)
    small(owner, "kv", "registered", NEW)
    address = owner.call("address")
    host, port = address.rsplit(":", 1)
    owner.call("limit_descriptors", 4096)
    before = owner.call("left_behind")
    stay: list[socket.socket] = []
    with kvferry.Node() as node, node.link(address) as link, contextlib.ExitStack() as stack:
        mine = node.register("mine", mapped((BLOCKS, BLOCK_BYTES // 8)))
        longest = 0.0
        for number in range(CONNECTIONS):
            if connection := knock((host, int(port)), chance):
                stay.append(stack.enter_context(connection))
            if number % 20 == 0:
                for slow in chance.sample(stay, min(len(stay), 20)):
                    with contextlib.suppress(OSError):
                        slow.sendall(b"K")
                begun = time.monotonic()
                link.pull("kv", into=mine, timeout_ms=2000, transport=chance.choice([None, "socket"]))
                longest = max(longest, time.monotonic() - begun)
        with kvferry.Node() as late, late.link(address, 5000) as another:  # in the midst of them
            another.pull("kv", into=late.register("mine", mapped((BLOCKS, BLOCK_BYTES // 8))), timeout_ms=2000)
        assert link.alive
        used = owner.call("descriptors") - before["descriptors"]
        print(f"{len(stay)} of {CONNECTIONS} stayed, which are {used} descriptors; longest pull {longest * 1e3:.1f} ms")
        assert used < 600  # the oldest of those who say nothing make room
        until(lambda: owner.call("descriptors") <= before["descriptors"] + 20, "whoever says nothing is sent away", 10)
    until(lambda: no_more(owner.call("left_behind"), before), "nothing is left of them")


def no_more(now: "dict[str, int]", before: "dict[str, int]") -> bool:
    return all(now[what] <= before[what] + (4 if what in ("mappings", "descriptors") else 0) for what in before)


def oversized(connection: socket.socket) -> None:
    connection.sendall(b"\xff\xff\xff\x7f\2\0\0\0" + bytes(16))


def truncated(connection: socket.socket) -> None:
    connection.sendall(b"\x40\0\0\0\2\0\0\0" + bytes(16) + b"half of it")


def garbage(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n")


def another_frame(connection: socket.socket) -> None:
    connection.sendall(b"\0\0\0\0\x21\0\0\0" + bytes(16))


def nothing(connection: socket.socket) -> None:
    pass


def byte_by_byte(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        for _ in range(100):
            connection.sendall(b"\1")
            time.sleep(0.05)


@pytest.fixture
def listener() -> Iterator[Callable[[Any], str]]:
    """Listens, and does with whoever comes what the test says; the address. Then it closes, or waits."""
    stop = threading.Event()
    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)

        def begin(answer: Any, *, close: bool) -> str:
            def serve() -> None:
                kept = []
                while not stop.is_set():
                    with contextlib.suppress(TimeoutError, OSError):
                        connection, _ = server.accept()
                        kept.append(connection)
                        connection.settimeout(1)
                        connection.recv(4096)  # its hello
                        answer(connection)
                        if close:
                            connection.close()
                for connection in kept:
                    connection.close()

            threads.append(threading.Thread(target=serve))
            threads[-1].start()
            return "127.0.0.1:%d" % server.getsockname()[1]  # noqa: UP031

        yield begin
        stop.set()
        for thread in threads:
            thread.join(10)


@pytest.mark.parametrize(
    ("answer", "close", "kind", "sentence"),
    [
        (oversized, False, kvferry.LinkFailed, "protocol"),
        (truncated, True, kvferry.LinkFailed, "closed"),
        (truncated, False, kvferry.DeadlineExceeded, "in time"),
        (garbage, False, kvferry.LinkFailed, "protocol"),
        (another_frame, False, kvferry.LinkFailed, "protocol"),
        (nothing, True, kvferry.LinkFailed, "closed"),
        (nothing, False, kvferry.DeadlineExceeded, "in time"),
        (byte_by_byte, False, kvferry.KvferryError, ""),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_whatever_listens_there_link_says_so_in_time(
    listener: Any, answer: Any, close: bool, kind: Any, sentence: str
) -> None:
    address = listener(answer, close=close)
    with kvferry.Node() as node:
        begun = time.monotonic()
        with pytest.raises(kind) as caught:
            node.link(address, timeout_ms=400)
        assert time.monotonic() - begun < 1.4
        assert caught.value.peer == address and caught.value.operation == "link"
        assert sentence in str(caught.value), str(caught.value)
        assert node.links == []


# --- nothing left -----------------------------------------------------------------------------------------------------


def test_with_64_descriptors_whoever_is_linked_goes_on_and_the_others_hear_of_it(peers: Peers) -> None:
    owner = peers(SIDE, {"pool": 1 << 20})
    small(owner, "kv", "registered", NEW)
    small(owner, "pooled", "allocated", NEW)
    address = owner.call("address")
    with kvferry.Node() as first, first.link(address) as link:  # what a process opens once, it opens now
        link.pull("kv", into=first.register("", mapped((BLOCKS, BLOCK_BYTES // 8))))
    until(lambda: owner.call("alive") == [], "the link is gone")
    before = owner.call("left_behind")
    owner.call("limit_descriptors", 64)
    linked: list[tuple[Any, Any]] = []
    failed: list[kvferry.KvferryError] = []
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            node = stack.enter_context(kvferry.Node(copy_threads=1))
            begun = time.monotonic()
            try:
                link = stack.enter_context(node.link(address, 500))
                mine = node.register("mine", mapped((BLOCKS, BLOCK_BYTES // 8)))
                link.pull("kv", into=mine, timeout_ms=500)
                linked.append((link, mine))
            except kvferry.KvferryError as error:
                failed.append(error)
            assert time.monotonic() - begun < 2
        print(len(linked), "linked;", {f"{type(error).__name__}: {error}" for error in failed})
        assert linked and failed
        for error in failed:
            assert isinstance(error, kvferry.LinkFailed | kvferry.DeadlineExceeded | kvferry.PeerLost | kvferry.Busy)
            assert error.peer and str(error)
        for link, mine in linked[:2]:
            for transport in ("cma", "socket"):
                link.pull("kv", into=mine, timeout_ms=2000, transport=transport)
    until(lambda: owner.call("alive") == [], "all of them are gone")
    until(lambda: no_more(owner.call("left_behind"), before), "nothing is left of them")
    with kvferry.Node() as node, node.link(address) as link:
        link.pull("kv", into=node.register("mine", mapped((BLOCKS, BLOCK_BYTES // 8))), timeout_ms=2000)


class First(Side):
    def pull_over_the_first_link(self) -> int:
        return int(self.links[0].pull("kv", into=self.caches["mine"], timeout_ms=3000).size_bytes)


def test_who_has_64_descriptors_hears_that_they_are_used_up(peers: Peers) -> None:
    """The other way round: it is who links that has no more."""
    dialler = peers("test_campaign_faults:First")
    small(dialler, "mine", "registered", OLD)
    dialler.call("limit_descriptors", 64)
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(kvferry.Node(listen="127.0.0.1:0", copy_threads=1)) for _ in range(12)]
        for node in nodes:
            node.register("kv", np.ones((BLOCKS, BLOCK_BYTES // 8), np.uint64))
        failed = []
        for node in nodes:
            try:
                dialler.call("link", node.address)
            except kvferry.KvferryError as error:
                failed.append(error)
            else:
                dialler.call("pull_over_the_first_link")  # from the first time on it has its connections
        print({f"{type(error).__name__}: {error}" for error in failed})
        assert 0 < len(failed) < 12
        for error in failed:
            assert isinstance(error, kvferry.Busy) and "127.0.0.1:" in error.peer
            assert "out of descriptors" in str(error)
        begun = time.monotonic()
        late = dialler.call_later("move", "pull", "kv", "mine", None, begun + 0.5, None)  # over a link that has none
        with contextlib.suppress(kvferry.DeadlineExceeded, kvferry.Busy):
            late.result()
        assert time.monotonic() - begun < 1.5
        assert dialler.call("pull_over_the_first_link") == BLOCKS * BLOCK_BYTES


def test_a_pool_in_a_small_cgroup_says_no_before_a_page_is_touched(peers: Peers) -> None:
    """A process that writes more than its cgroup may have is killed by the kernel. The pool does not give that much."""
    with memory_cgroup(256 << 20) as cgroup:
        side = peers(SIDE, {"pool": 1 << 30})
        cgroup.take_in(side.pid)
        before = side.call("left_behind")
        error = ended(side.call_later("cache", "kv", "allocated", 1, 1 << 30, NEW), kvferry.OutOfMemory)
        assert "memory cgroup" in str(error) and not error.bytes_touched
        assert cgroup.used_bytes() < 32 << 20 and cgroup.kills() == 0
        assert no_more(side.call("left_behind"), before)
        side.call("cache", "some", "allocated", 64, 1 << 20, NEW)  # 64 MiB, which are written
        ended(side.call_later("cache", "kv", "allocated", 1, 224 << 20, NEW), kvferry.OutOfMemory)
        side.call("cache", "more", "allocated", 64, 1 << 20, NEW)
        assert side.call("first_words", "more") == [NEW + block for block in range(64)]
        assert side.alive and cgroup.kills() == 0
        side.close()


# --- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("one_id", "other_id"), [(0, LARGEST_ID), (LARGEST_ID, 0), (5, 5)])
def test_any_two_ids_can_be_linked_the_same_one_too(peers: Peers, one_id: int, other_id: int) -> None:
    one, other = peers(SIDE, {"node_id": one_id}), peers(SIDE, {"node_id": other_id})
    small(one, "kv", "registered", NEW)
    small(other, "kv", "registered", OLD)
    one.call("link", other.call("address"))
    until(lambda: other.call("peer_ids") == [one_id], "the link is up")
    assert one.call("peer_ids") == [other_id] and one.call("node_id") == one_id
    moved(one, "push", "kv", "kv")
    assert other.call("first_words", "kv") == [NEW + block for block in range(BLOCKS)]
    one.call("fill", "kv", OLD)
    moved(one, "pull", "kv", "kv")
    assert one.call("first_words", "kv") == [NEW + block for block in range(BLOCKS)]


# --- namespaces -------------------------------------------------------------------------------------------------------

INSIDE = """
import json, sys
import numpy as np
import kvferry
node = kvferry.Node(listen=sys.argv[1] + ":0", pool=1 << 20)
node.register("owned", np.full((8, 512), 7, np.uint64))
node.allocate("pooled", tensors=1, shape=(8, 512), dtype="uint64").numpy(0)[:] = 7
into = np.zeros((8, 512), np.uint64)
mine = node.register("mine", into)
print(node.address, flush=True)
for line in sys.stdin:
    link = node.links[0]
    by = {}
    for name in ("owned", "pooled"):
        into[:] = 0
        by[name] = link.pull(name, into=mine, timeout_ms=3000).transport
        assert (into == 7).all()
    print(json.dumps([by, dict(link.statistics().transports)]), flush=True)
"""


@pytest.fixture
def inside(insides: Callable[..., Inside]) -> Callable[..., "Puller"]:
    return lambda *arguments, **keywords: Puller(insides(INSIDE, *arguments, **keywords))


class Puller:
    def __init__(self, inside: Inside) -> None:
        self.process = inside.process
        self.inside = inside

    def address(self) -> str:
        return self.inside.line()

    def pulls(self) -> "tuple[dict[str, str], dict[str, str]]":
        """By which transports it pulls over the link that there is, and its reasons."""
        by, reasons = json.loads(self.inside.ask("pull"))
        return by, reasons


def outside_pulls(node: kvferry.Node, link: kvferry.Link) -> "dict[str, str]":
    by = {}
    into = np.zeros((8, 512), np.uint64)
    with node.register("", into) as mine:
        for name in ("owned", "pooled"):
            into[:] = 0
            by[name] = link.pull(name, into=mine, timeout_ms=3000).transport
            assert (into == 7).all()
    return by


def outside_node(listen: "str | None" = None) -> kvferry.Node:
    node = kvferry.Node(listen=listen, pool=1 << 20)
    node.register("owned", np.full((8, 512), 7, np.uint64))
    node.allocate("pooled", tensors=1, shape=(8, 512), dtype="uint64").numpy(0)[:] = 7
    return node


FASTEST = {"owned": "cma", "pooled": "map"}


def test_in_a_mount_namespace_of_its_own_nothing_is_different(inside: Any) -> None:
    other = inside("127.0.0.1", ["--mount"])
    with outside_node() as node, node.link(other.address()) as link:
        assert outside_pulls(node, link) == FASTEST
        assert other.pulls()[0] == FASTEST


def test_from_a_pid_namespace_of_its_own_it_cannot_read_who_is_outside_and_says_so(inside: Any) -> None:
    other = inside("127.0.0.1", ["--pid", "--mount-proc"])
    with outside_node() as node, node.link(other.address()) as link:
        assert outside_pulls(node, link) == FASTEST
        by, reasons = other.pulls()
        assert by == {"owned": "socket", "pooled": "map"}
        assert "PID namespace" in reasons["cma"] and reasons["map"] == "ok"
        other.process.kill()
        until(lambda: not link.alive, "its death is noticed", 2)


def test_between_network_namespaces_sockets_are_used_and_the_reason_is_told(inside: Any) -> None:
    other = inside(INNER, ["--net"], before=AWAIT_CABLE)
    with cable(other.inside), outside_node() as node, node.link(other.address(), 5000) as link:
        assert outside_pulls(node, link) == {"owned": "socket", "pooled": "socket"}
        by, reasons = other.pulls()
        assert by == {"owned": "socket", "pooled": "socket"}
        for found in (reasons, link.statistics().transports):
            assert "network namespace" in found["map"] and "network namespace" in found["cma"]
        begun = time.monotonic()
        with pytest.raises(kvferry.KvferryError) as caught:
            node.link(f"{INNER}:1", 500)
        assert time.monotonic() - begun < 1.5 and f"{INNER}:1" in caught.value.peer
