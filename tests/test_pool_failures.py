"""How a pool fails: nodes and clients that are killed, stopped or cut off at any moment, and whatever else goes wrong.

Real processes throughout. What fails is a miss with a reason, in time; nothing stale or torn is ever served, nothing
beside the named bytes changes, and nothing is left behind.
"""

import contextlib
import ctypes
import itertools
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import held_support
import kvferry
from cgroup_support import memory_cgroup
from failure_support import Memory, Peers, dice, seed
from kvferry.pool import messages
from kvferry.pool.node import PoolNode
from kvferry.pool.values import Values
from namespace_support import AWAIT_CABLE, INNER, OUTER_DEVICE, Inside, cable
from pool_sides import Raw, key_of, left_behind, value_of, word_of
from pool_support import NodeProcess, Nodes, block_bytes_of, names, until

pytestmark = pytest.mark.quick("message", "a_space_is", "argument", "given_back", "never_commits", "expired", "forgets")

LONG = os.environ.get("KVFERRY_CAMPAIGN", "") == "long"
LATE_S = 3.0  # an answer comes so long after its deadline at most, on a busy machine too
SETTLE_S = 2.0  # for so long nothing may change any more
MIB = 1 << 20
NODE, CLIENT, RAW = "pool_sides:NodeSide", "pool_sides:ClientSide", "pool_sides:RawSide"
OVER = ("unix", "socket")


@pytest.fixture
def nodes(tmp_path: Any) -> Iterator[Nodes]:
    """Starts pool nodes (arguments as `NodeProcess`, behind a socket of their own) and stops them when the test is over."""
    started: list[NodeProcess] = []

    def start(memory: str = "64MiB", *options: str, address: str = "") -> NodeProcess:
        started.append(NodeProcess(address or f"unix:{tmp_path}/{len(started)}.sock", memory, *options))
        return started[-1]

    yield start
    for node in started:
        node.stop()


@pytest.fixture
def raws() -> Iterator[Callable[[str], Raw]]:
    """Bare links to nodes."""
    made: list[Raw] = []

    def link(address: str) -> Raw:
        made.append(Raw(address))
        return made[-1]

    yield link
    for raw in made:
        raw.close()


def rows_of(array: Any) -> Any:
    return [[row] for row in array]


class Traffic:
    """Threads that save, load and look without a pause until they are told to stop; each answer is judged.

    Values are of `pool_sides.value_of`: a hit holds the bytes of its key, whole, and blocks beside it stay as they are. What
    a load has left stays as it is.
    """

    KEYS, WORDS, KEPT = 400, 2048, 64

    def __init__(self, pool: kvferry.Pool, timeout_ms: int) -> None:
        self.pool, self.timeout_ms = pool, timeout_ms
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.slowest_s = 0.0
        self.loaded: deque[tuple[Any, int]] = deque(maxlen=self.KEPT)
        self.stopping = False
        self.threads = [
            threading.Thread(target=self._guarded, args=(work,)) for work in (self._saves, self._loads, self._looks)
        ]

    def __enter__(self) -> "Traffic":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping = True
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive(), "a call does not end"
        self.problems += ["written after its end" for into, were in self.loaded if zlib.crc32(into) != were]
        assert not self.problems, self.problems[0]

    def served(self, what: str) -> None:
        """Waits until it comes up again."""
        before = self.counts[what]
        until(lambda: self.counts[what] > before or self.problems)

    def _guarded(self, work: Callable[[Any], None]) -> None:
        try:
            chance = np.random.default_rng(3)
            while not self.stopping and not self.problems:
                work(chance)
                time.sleep(0.001)
        except BaseException as problem:  # noqa: BLE001 - the test's own thread raises it
            self.problems.append(repr(problem))

    def _count(self, verb: str, outcome: Any) -> None:
        self.slowest_s = max(self.slowest_s, outcome.seconds)
        if outcome.seconds > self.timeout_ms / 1000 + LATE_S:
            self.problems.append(f"a {verb} took {outcome.seconds:.2f} s")
        self.counts.update(f"{verb} {word}" for word in outcome.outcomes)

    def _saves(self, chance: Any) -> None:
        chosen = chance.choice(self.KEYS, 16, replace=False).tolist()
        values = np.stack([value_of(number, self.WORDS) for number in chosen])
        keys = [key_of(number) for number in chosen]
        self._count("save", self.pool.save(keys, buffers=rows_of(values), timeout_ms=self.timeout_ms))

    def _loads(self, chance: Any) -> None:
        chosen = chance.choice(self.KEYS, 16, replace=False).tolist()
        into = np.zeros((33, self.WORDS), np.uint64)
        outcome = self.pool.load([key_of(n) for n in chosen], buffers=rows_of(into[1::2]), timeout_ms=self.timeout_ms)
        for number, row, word in zip(chosen, into[1::2], outcome.outcomes, strict=True):
            if word == "hit" and not (row == word_of(number)).all():
                self.problems.append(f"{number} is {row}")
        if into[::2].any():
            self.problems.append("blocks that were not named have changed")
        if not outcome.ok.all():
            self.loaded.append((into, zlib.crc32(into)))
        self._count("load", outcome)

    def _looks(self, chance: Any) -> None:
        chosen = chance.choice(self.KEYS, 16, replace=False).tolist()
        self._count("exists", self.pool.exists([key_of(number) for number in chosen], timeout_ms=self.timeout_ms))


# --- nodes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("how", ["killed", "restarted", "stopped", "slow"])
def test_a_node_that_is_struck_amid_saves_loads_and_looks_costs_misses(nodes: Nodes, how: str, over: str) -> None:
    node, chance = nodes(), dice()
    transports = ("map", "cma", "socket") if over == "unix" else ("socket",)
    timeout_ms = 60 if how == "slow" else 400
    with kvferry.Pool.connect(node.address, transports=transports) as pool, Traffic(pool, timeout_ms) as traffic:
        for _ in range(3):
            traffic.served("load hit")
            time.sleep(chance.uniform(0, 0.05))
            if how == "slow":  # it stands still for the most of the time
                before, end = traffic.counts.copy(), time.monotonic() + 20
                while not all(traffic.counts[seen] > before[seen] + 20 for seen in ("load hit", "load timeout")):
                    node.signal(signal.SIGSTOP)
                    time.sleep(chance.uniform(0, 0.1))
                    node.signal(signal.SIGCONT)
                    time.sleep(chance.uniform(0, 0.005))
                    assert time.monotonic() < end, traffic.counts
            elif how == "stopped":
                node.signal(signal.SIGSTOP)
                traffic.served("load timeout")
                node.signal(signal.SIGCONT)
            else:
                node.kill() if how == "killed" else node.stop()
                traffic.served("load node_lost")
                node.start()
            traffic.served("save saved" if how in ("killed", "restarted") else "load hit")
    print(dict(traffic.counts), traffic.slowest_s)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_node_that_does_not_answer_costs_its_own_keys_and_no_others(nodes: Nodes, how: str) -> None:
    """Twelve loads at once, each with a share on three nodes: those that wait for one node hold up nobody's share."""
    three = [nodes() for _ in range(3)]
    keys = names(90)
    values = block_bytes_of(1, 90, 4096)
    with kvferry.Pool.connect([node.address for node in three]) as pool:
        assert pool.save(keys, buffers=rows_of(values), timeout_ms=10_000).prefix == 90
        owner = [_owner_of(three, key) for key in keys]
        assert set(owner) == {0, 1, 2}
        three[1].kill() if how == "killed" else three[1].signal(signal.SIGSTOP)
        into = np.zeros((12, *values.shape), np.uint8)
        began = time.monotonic()
        loads = [pool.load_async(keys, buffers=rows_of(part), timeout_ms=1500) for part in into[:8]]
        here: list[Any] = []
        threads = [
            threading.Thread(
                target=lambda part=part: here.append(pool.load(keys, buffers=rows_of(part), timeout_ms=1500))
            )
            for part in into[8:]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        outcomes = [load.wait(10_000) for load in loads] + here
        assert len(outcomes) == 12 and time.monotonic() - began < 1.5 + LATE_S
        for outcome in outcomes:
            for number, word in enumerate(outcome.outcomes):
                assert (word == "hit") == (owner[number] != 1), (number, word)
        lively = [number for number in range(90) if owner[number] != 1]
        assert (into[:, lively] == values[lively]).all()
        assert not into[:, [number for number in range(90) if owner[number] == 1]].any()
        assert pool.remove(keys, timeout_ms=500) == len(lively)  # counted side by side, and none is lost
        if how == "stopped":
            three[1].signal(signal.SIGCONT)


def _owner_of(three: "list[NodeProcess]", key: bytes) -> int:
    """Whoever has the value, asked by itself."""
    for number, node in enumerate(three):
        pool = _singles.get(node.address)
        if pool is None:
            pool = _singles[node.address] = kvferry.Pool.connect(node.address)
        if pool.exists([key], timeout_ms=10_000).prefix:
            return number
    raise AssertionError(f"nobody has {key!r}")


_singles: "dict[str, kvferry.Pool]" = {}


@pytest.fixture(autouse=True)
def _close_singles() -> Iterator[None]:
    yield
    for pool in _singles.values():
        pool.close()
    _singles.clear()


NODE_INSIDE = """
import sys, threading
from kvferry.pool.node import PoolNode
from kvferry.pool.values import Values
node = PoolNode(sys.argv[1], 64 << 20)
threading.Thread(target=node.run, daemon=True).start()
print(node.address, flush=True)
sys.stdin.readline()
"""


CUTS = {
    "unplugged": ("link set {} down", "link set {} up"),
    # What is sent goes to a hardware address that nobody has: no packet arrives, and nobody is told.
    "silent": (f"neigh replace {INNER} lladdr 02:00:00:00:00:01 dev {{}} nud permanent", f"neigh del {INNER} dev {{}}"),
}


@pytest.mark.parametrize("how", CUTS)
def test_a_node_that_is_cut_off_costs_its_share_until_it_is_back(
    insides: Callable[..., Inside], nodes: Nodes, how: str
) -> None:
    near = nodes()

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.format(OUTER_DEVICE).split()], check=True)

    inside = insides(NODE_INSIDE, f"{INNER}:0", ["--net"], before=AWAIT_CABLE)
    with cable(inside):
        far = inside.line()
        with kvferry.Pool.connect([near.address, far], timeout_ms=10_000) as pool:
            keys, values = names(40), block_bytes_of(1, 40, 4096)
            assert pool.save(keys, buffers=rows_of(values), timeout_ms=10_000).prefix == 40
            with kvferry.Pool.connect(near.address) as alone:
                at_home = alone.exists(keys).ok
            assert 0 < at_home.sum() < 40
            ip(CUTS[how][0])
            for _ in range(3):
                into = np.zeros_like(values)
                loaded = pool.load(keys, buffers=rows_of(into), timeout_ms=300)
                assert (loaded.ok == at_home).all() and loaded.seconds < 0.3 + LATE_S
                assert (into[at_home] == values[at_home]).all() and not into[~at_home].any()
                assert set(loaded.reasons) <= {"hit", "timeout", "node_lost"}
                assert pool.exists(keys, timeout_ms=300).ok.sum() == at_home.sum()
                saved = pool.save(names(40, "new"), buffers=rows_of(values), timeout_ms=300)
                assert 0 < saved.ok.sum() < 40
                pool.remove(names(40, "new"), timeout_ms=300)
            ip(CUTS[how][1])
            into = np.zeros_like(values)
            until(lambda: pool.load(keys, buffers=rows_of(into), timeout_ms=500).prefix == 40, 30)
            assert (into == values).all()


def test_a_second_node_at_the_same_socket_leaves_and_the_first_goes_on(nodes: Nodes) -> None:
    node = nodes()
    with kvferry.Pool.connect(node.address) as pool:
        assert pool.save(["k"], buffers=[np.ones(100, np.uint8)]).prefix == 1
        second = subprocess.run(node.command, capture_output=True, text=True, timeout=30, check=False)
        assert second.returncode == 1 and node.address.removeprefix("unix:") in second.stderr
        assert "Traceback" not in second.stderr
        assert pool.exists(["k"]).prefix == 1
        with kvferry.Pool.connect(node.address) as other:
            assert other.exists(["k"]).prefix == 1


def test_two_nodes_with_one_id_are_both_used_and_never_mixed_up(nodes: Nodes) -> None:
    two = [nodes("64MiB", "--node-id", "77") for _ in range(2)]
    keys, values = names(40), block_bytes_of(1, 40, 1000)
    with kvferry.Pool.connect([node.address for node in two]) as pool:
        assert pool.save(keys, buffers=rows_of(values), timeout_ms=5000).prefix == 40
        for _ in range(20):
            into = np.zeros_like(values)
            assert pool.load(keys, buffers=rows_of(into), timeout_ms=5000).prefix == 40
            assert (into == values).all()
    shares = []
    for node in two:
        with kvferry.Pool.connect(node.address) as pool:
            shares.append(int(pool.exists(keys).ok.sum()))
    assert all(shares) and sum(shares) == 40


@pytest.mark.parametrize("over", OVER)
def test_after_a_load_has_ended_nothing_is_written_into_its_buffers(nodes: Nodes, over: str) -> None:
    """The node is stopped at a moment drawn by chance, the load ends by its time, the buffers are filled again, the node
    goes on: two seconds later they are as they were filled. For saves: what was filled in is never served."""
    node, chance = nodes("128MiB"), dice()
    transports = ("map", "cma", "socket") if over == "unix" else ("socket",)
    source = np.stack([value_of(number, 4096) for number in range(512)])  # 16 MiB
    into = np.zeros_like(source)
    keys = [key_of(number) for number in range(512)]
    with kvferry.Pool.connect(node.address, transports=transports) as pool:
        assert pool.save(keys, buffers=rows_of(source), timeout_ms=20_000).prefix == 512
        for turn in range(6):
            saved_now = [b"turn %d " % turn + key for key in keys]
            moved = source.copy()
            loading = pool.load_async(keys, buffers=rows_of(into), timeout_ms=250)
            saving = pool.save_async(saved_now, buffers=rows_of(moved), timeout_ms=250)
            time.sleep(chance.uniform(0, 0.012))
            node.signal(signal.SIGSTOP)
            loaded, saved = loading.wait(10_000), saving.wait(10_000)
            for number in np.flatnonzero(loaded.ok):
                assert (into[number] == word_of(int(number))).all()
            into[:] = moved[:] = 5
            node.signal(signal.SIGCONT)
            if turn % 3 == 2:
                time.sleep(SETTLE_S)
            assert (into == 5).all() and (moved == 5).all()
            back = np.zeros_like(source)
            again = pool.load(saved_now, buffers=rows_of(back), timeout_ms=20_000)
            for number in np.flatnonzero(again.ok):
                assert (back[number] == word_of(int(number))).all(), saved.outcomes[number]
            assert again.ok[saved.ok].all()
            pool.remove(saved_now, timeout_ms=10_000)


# --- clients ----------------------------------------------------------------------------------------------------------


def drained(node: Any, **besides: int) -> None:
    """Nothing is held for anybody at the node any more, except what is said."""
    wanted = {"pending": 0, "leases": 0, "held": 0, "windows": 0, "slots_open": 0} | besides
    last: dict[str, int] = {}

    def reached() -> bool:
        last.update(node.call("counts"))
        return all(last[what] == count for what, count in wanted.items())

    with contextlib.suppress(AssertionError):
        until(reached)
    assert {what: last[what] for what in wanted} == wanted


@pytest.mark.parametrize("end", ["killed", "unlinked"])
def test_places_and_leases_of_a_client_that_goes_are_given_back_at_once(peers: Peers, tmp_path: Any, end: str) -> None:
    """Half the node is reserved and the other half leased for ten minutes; then its client is gone."""
    node = peers(NODE, f"unix:{tmp_path}/n.sock", 4 * MIB, name="node")
    address = node.call("address")
    with kvferry.Pool.connect(address, namespace="test") as pool:
        value = np.ones(64 << 10, np.uint8)
        assert pool.save(names(32, "old"), buffers=[[value]] * 32, timeout_ms=10_000).prefix == 32
        client = peers(RAW, address, name="client")
        reserved, leased = client.call("hold", names(32, "half"), names(32, "old"), 64 << 10, 600_000)
        assert messages.WORDS[reserved[0]] == "saved" and messages.WORDS[leased[0]] == "hit"
        assert pool.save(["more"], buffers=[value]).outcomes == ["full"]
        assert pool.load(["half 3"], buffers=[value]).outcomes == ["pending"]
        assert pool.save(["half 3"], buffers=[value]).outcomes == ["pending"]
        client.kill() if end == "killed" else client.call("close")
        until(lambda: pool.save(["more"], buffers=[value]).prefix == 1)
        assert pool.save(names(63), buffers=[[value]] * 63, timeout_ms=10_000).prefix == 63
        assert pool.load(["half 3"], buffers=[value]).outcomes == ["never_saved"]
        drained(node)


@pytest.mark.deadline(150)
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("verb", ["load", "save"])
def test_a_client_stopped_in_the_middle_gets_and_leaves_nothing_wrong(
    peers: Peers, tmp_path: Any, verb: str, over: str
) -> None:
    """Its link is declared dead, the pool is filled twice over with other values, then it goes on."""
    blocks, words, chance = 512, 4096, dice()  # 16 MiB of 48
    node = peers(
        NODE, f"unix:{tmp_path}/n.sock", 48 * MIB, {"heartbeat_timeout_ms": 2500, "policy": "lru"}, name="node"
    )
    address = node.call("address")
    client = peers(CLIENT, address, over, blocks, words, name="client")
    other = peers(CLIENT, address, "unix", 64, words, name="other")
    memory = Memory(client.pid, client.call("where"), blocks, 8 * words)
    first, by_then = 0, time.monotonic() + 60
    while time.monotonic() < by_then:
        if verb == "load":
            client.call("save", first, blocks)
        client.call("begin", verb, first, blocks, 60_000)
        if verb == "load":  # until a block drawn by chance has come
            block, end = chance.randrange(blocks // 2), time.monotonic() + 5
            while not memory.word(block) and time.monotonic() < end:
                pass
        else:
            time.sleep(chance.uniform(0, 0.01))
        client.stop()
        if verb == "load":
            came = [memory.word(number) != 0 for number in range(blocks)]
            middle = any(came) and not all(came)
        else:
            middle = node.call("counts")["pending"] > 0
        if middle:
            break
        client.cont()
        client.call("outcome")
        first += blocks if verb == "save" else 0
    else:
        pytest.fail("each was over before it could be stopped")
    drained(node, links=1)
    churned = other.call("save", 100_000, 2 * 48 * MIB // (8 * words), timeout=60)
    assert churned["saved"] == 2 * 48 * MIB // (8 * words)
    client.cont()
    outcomes = client.call("outcome")
    print(dict(Counter(outcomes)))
    assert "saved" not in outcomes and {"node_lost", "lease_lost"} & set(outcomes)
    found = memory.read()
    for number in range(blocks):  # a segment of the node whose values had all come before is nothing but a hit
        assert outcomes[number] != "hit" or (verb == "load" and (found[number] == word_of(first + number)).all())
    served = other.call("check", list(range(first, first + blocks)), timeout=60)
    assert not served.get("hit")
    other.call("check", list(range(100_000, 100_000 + 2 * 48 * MIB // (8 * words), 7)), timeout=60)
    until(lambda: client.call("save", 50_000, 8).get("saved") == 8)  # over a link that is made anew
    assert client.call("check", list(range(50_000, 50_008))) == {"hit": 8}
    drained(node, links=2)


def test_a_client_that_reserves_and_never_commits_loses_its_places(peers: Peers, tmp_path: Any) -> None:
    node = peers(NODE, f"unix:{tmp_path}/n.sock", MIB, name="node")
    raw = Raw(node.call("address"))
    space = raw.space()
    raw.reserve(space, names(17), 60_000, 200)
    assert raw.reserve(space, [b"one more"], 60_000, 0).codes == bytes([messages.code_of("full")])
    drained(node)
    until(lambda: raw.reserve(space, [b"one more"], 60_000, 0).codes == bytes([messages.code_of("saved")]))
    assert raw.ask(messages.Commit(1, [], b"")).word == "given_up"
    assert set(raw.lookup(space, names(17), 60_000, 100).codes) == {messages.code_of("never_saved")}
    raw.close()


def test_what_nobody_waits_for_any_more_ends_at_once_also_before_it_has_come(
    raws: Callable[[str], Raw], nodes: Nodes
) -> None:
    raw = raws(nodes("1MiB").address)
    space = raw.space()
    saved = bytes([messages.code_of("saved")])
    assert raw.reserve(space, [b"a"], 900_000, 60_000).codes == saved
    raw.release(raw.number)
    until(lambda: raw.reserve(space, [b"b"], 900_000, 60_000).codes == saved)
    assert raw.ask(messages.Commit(raw.number, [], b"")).codes == saved

    def refused() -> bool:
        raw.release(raw.number + 1)  # over a connection of its own it may come before what it ends
        time.sleep(0.01)
        return getattr(raw.lookup(space, [b"b"], 900_000, 60_000), "word", "") == "given_up"

    until(refused)
    assert raw.lookup(space, [b"b"], 900_000, 60_000).windows  # none is remembered for longer than that


# What is raised while something is finalised goes nowhere.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("verb", ["save", "load", "loads of one"])
def test_a_call_that_a_signal_handler_ends_leaves_nothing_pending_and_nothing_in_use(nodes: Nodes, verb: str) -> None:
    class Enough(BaseException):
        pass

    def enough(*_: object) -> None:
        raise Enough

    node = nodes("8MiB")
    keys, values = names(400), np.zeros((400, 8 << 10), np.uint8)
    ended = 0
    with kvferry.Pool.connect(node.address) as pool, kvferry.Pool.connect(node.address) as other:
        before = signal.signal(signal.SIGALRM, enough)
        try:
            for turn in range(120):
                if verb != "save":
                    other.save(keys, buffers=rows_of(values), timeout_ms=10_000)
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0002 + turn % 40 * 0.00015)
                    while verb == "loads of one":
                        pool.load(keys[:1], buffers=[values[0]], timeout_ms=60_000)
                    getattr(pool, verb)(keys, buffers=rows_of(values), timeout_ms=60_000)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Enough:
                    ended += 1
                other.clear()
                # It needs the place of whatever the call may have held.
                whole = [np.ones(7 << 20, np.uint8)]
                until(lambda: other.save([b"whole"], buffers=whole, timeout_ms=10_000).prefix == 1)  # noqa: B023
                assert other.exists(keys).reasons == Counter(never_saved=400)
                other.clear()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert ended > 10


def test_what_has_expired_is_neither_written_nor_committed_nor_read(raws: Callable[[str], Raw], nodes: Nodes) -> None:
    raw = raws(nodes("1MiB").address)
    space = raw.space()
    spans = np.zeros((1, 3), np.int64)
    mine = np.full(1000, 3, np.uint8)
    reserved = raw.reserve(space, [b"k"], 1000, 0)
    spans[0] = mine.ctypes.data, np.frombuffer(reserved.offsets, np.uint64)[0], 1000
    raw.link.push(kvferry.MEMORY, to=_window(reserved), spans=spans)
    time.sleep(0.8)
    with pytest.raises(kvferry.CacheNotFound):
        raw.link.push(kvferry.MEMORY, to=_window(reserved), spans=spans)
    assert raw.ask(messages.Commit(raw.number, [], b"")).word == "given_up"
    again = raw.reserve(space, [b"k"], 1000, 5000)
    spans[0, 1] = np.frombuffer(again.offsets, np.uint64)[0]
    raw.link.push(kvferry.MEMORY, to=_window(again), spans=spans)
    assert raw.ask(messages.Commit(raw.number, [], b"")).codes == bytes([messages.code_of("saved")])
    lease = raw.lookup(space, [b"k"], 1000, 0)
    into = np.zeros(1000, np.uint8)
    back = np.array([[np.frombuffer(lease.offsets, np.uint64)[0], into.ctypes.data, 1000]], np.int64)
    raw.link.pull(_window(lease), into=kvferry.MEMORY, spans=back)
    assert (into == 3).all()
    time.sleep(0.8)
    into[:] = 0
    with pytest.raises(kvferry.CacheNotFound):
        raw.link.pull(_window(lease), into=kvferry.MEMORY, spans=back)
    assert not into.any()
    # A lease is for reading, and ends where its values do.
    lease = raw.lookup(space, [b"k"], 1000, 5000)
    with pytest.raises(kvferry.KvferryError):
        raw.link.push(kvferry.MEMORY, to=_window(lease), spans=spans)
    back[0, 2] = 1 << 16
    with pytest.raises(kvferry.CacheNotFound, match="does not lie in the window"):
        raw.link.pull(_window(lease), into=kvferry.MEMORY, spans=back)


def _window(answer: Any) -> bytes:
    (name,) = answer.windows
    return bytes(name)


@pytest.mark.skipif(bool(held_support.why_not()), reason=held_support.why_not())
def test_a_client_whose_memory_the_kernel_holds_holds_up_no_other(nodes: Nodes) -> None:
    """As from a file on a disk that does not answer: the node's copy of it waits inside the kernel."""
    node = nodes("64MiB")
    held = held_support.HeldMemory((64, 64 << 10))
    try:
        with kvferry.Pool.connect(node.address) as stuck, kvferry.Pool.connect(node.address) as pool:
            value = np.ones((16, 64 << 10), np.uint8)
            waiting = [
                stuck.save_async([f"held {turn}"], buffers=[[held.array[turn]]], timeout_ms=500) for turn in range(2)
            ]
            slowest = 0.0
            end = time.monotonic() + 5
            while time.monotonic() < end:
                outcome = pool.save(names(16), buffers=rows_of(value), timeout_ms=10_000)
                loaded = pool.load(names(16), buffers=rows_of(value), timeout_ms=10_000)
                assert outcome.prefix == loaded.prefix == 16
                slowest = max(slowest, outcome.seconds, loaded.seconds)
                pool.remove(names(16), timeout_ms=10_000)
            for one in waiting:
                assert one.wait(10_000).outcomes[0] in ("timeout", "node_lost")
            assert slowest < 1.5, slowest
            held.let_go()
            until(lambda: stuck.save(["held 0"], buffers=[[value[0]]], timeout_ms=500).ok.all())
    finally:
        held.let_go()


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_node_whose_memory_is_all_in_use_refuses_the_rest_and_keeps_what_there_is(
    nodes: Nodes, raws: Callable[[str], Raw]
) -> None:
    node = nodes("1MiB")
    with kvferry.Pool.connect(node.address, namespace="test") as pool:
        values = block_bytes_of(1, 24, 64 << 10)
        assert pool.save(names(8), buffers=rows_of(values[:8])).prefix == 8
        raw = raws(node.address)
        raw.lookup(raw.space(), names(8), 64 << 10, 60_000)
        saved = pool.save(names(24), buffers=rows_of(values), timeout_ms=5000)
        assert saved.reasons == Counter(present=8, saved=8, full=8) and saved.prefix == 16
        again = pool.save(names(24), buffers=rows_of(values), timeout_ms=5000)
        assert again.reasons["present"] >= 8
        into = np.zeros_like(values)
        loaded = pool.load(names(24), buffers=rows_of(into), timeout_ms=5000)
        assert loaded.ok[:8].all()
        assert all((into[i] == values[i]).all() if loaded.ok[i] else not into[i].any() for i in range(24))
        raw.release(raw.number)
        until(lambda: pool.save(names(16, "new"), buffers=rows_of(values[:16]), timeout_ms=5000).prefix == 16)


def test_what_a_client_has_loaded_is_not_in_the_way_of_what_it_saves(nodes: Nodes) -> None:
    """The end of a small lease is told with the next request, be it a save."""
    with kvferry.Pool.connect(nodes("1MiB").address) as pool:
        values = block_bytes_of(1, 16, 64 << 10)
        assert pool.save(names(14), buffers=rows_of(values[:14])).prefix == 14
        assert pool.load(names(14), buffers=rows_of(np.zeros_like(values[:14])), timeout_ms=30_000).prefix == 14
        assert pool.save(names(16, "new"), buffers=rows_of(values), timeout_ms=5000).prefix == 16


def test_a_node_in_a_small_cgroup_is_full_and_lives(nodes: Nodes) -> None:
    with memory_cgroup(160 * MIB) as group:
        node = nodes("2GiB", "--segment", "16MiB")
        group.take_in(node.pid)
        with kvferry.Pool.connect(node.address) as pool:
            values = block_bytes_of(1, 40, 8 * MIB)
            outcomes: Counter[str] = Counter()
            for turn in range(40):
                outcomes.update(pool.save([f"k{turn}"], buffers=[[values[turn]]], timeout_ms=10_000).outcomes)
            assert group.kills() == 0, outcomes
            into = np.zeros_like(values)
            loaded = pool.load([f"k{turn}" for turn in range(40)], buffers=rows_of(into), timeout_ms=20_000)
            assert 0 < loaded.ok.sum() < 40, (outcomes, loaded.reasons)
            for number in np.flatnonzero(loaded.ok):
                assert (into[number] == values[number]).all()
        assert node.stop() == 0


# --- arguments --------------------------------------------------------------------------------------------------------


def test_arguments_at_their_limits(nodes: Nodes) -> None:
    node = nodes("1MiB")
    with kvferry.Pool.connect(node.address) as pool:
        value = np.arange(100, dtype=np.uint8)
        into = np.zeros(100, np.uint8)
        for key in (b"x" * 255, "ü" * 127 + "u", b"\0", b"\xff" * 255):
            assert pool.save([key], buffers=[[value]]).outcomes == ["saved"]
            assert pool.load([key], buffers=[[into]]).prefix == 1 and (into == value).all()
            assert pool.exists([key]).prefix == 1 and pool.remove([key]) == 1
        for keys in (
            [b"x" * 256],
            ["ü" * 128],
            [b""],
            [""],
            ["k", b"k"],
            ["a", "b", "a"],
            [None],
            [bytearray(b"k")],
            ["\ud800"],
        ):
            for call in (
                lambda: pool.save(keys, buffers=[[value]] * len(keys)),  # noqa: B023
                lambda: pool.load(keys, buffers=[[into]] * len(keys)),  # noqa: B023
                lambda: pool.load_async(keys, buffers=[[into]] * len(keys)),  # noqa: B023
                lambda: pool.exists(keys),  # noqa: B023
                lambda: pool.remove(keys),  # noqa: B023
            ):
                with pytest.raises(kvferry.InvalidArgument):
                    call()
        assert pool.save([], buffers=[]).total == pool.load([], buffers=[]).total == pool.exists([]).total == 0
        assert pool.remove([]) == 0
        assert pool.exists([np.bytes_(b"k")]).total == 1
        frozen = value.copy()
        frozen.flags.writeable = False
        assert pool.save(["frozen"], buffers=[frozen]).prefix == 1  # it is only read
        with pytest.raises(kvferry.InvalidArgument, match="read-only"):
            pool.load(["frozen"], buffers=[frozen])
        with pytest.raises(kvferry.InvalidArgument, match="at least one segment"):
            pool.load(list("abcd"), buffers=kvferry.Buffers([into.ctypes.data], [4], [2**62, 2**62, 2**62, 2**62 + 1]))
    for members in (5, {node.address}, [5]):
        with pytest.raises(kvferry.InvalidArgument, match="address"):
            kvferry.Pool.connect(members)  # type: ignore[arg-type]


def test_values_of_another_size_or_geometry_leave_the_buffers_alone(nodes: Nodes) -> None:
    with kvferry.Pool.connect(nodes().address) as pool:
        kv = [np.arange(64, dtype=np.float32).reshape(8, 8) for _ in range(2)]
        pool.register(kv)
        assert pool.save(["k"], blocks=[3]).prefix == 1
        into = np.zeros(64, np.uint8)
        assert pool.load(["k"], buffers=[[into]]).outcomes == [
            "never_saved"
        ]  # the same size, and nobody knows what it is
        for other in ([kv[0]], [np.zeros((8, 4), np.float64)] * 2, [np.zeros((8, 8), np.int32)] * 2, kv + kv):
            pool.register([np.zeros_like(array) for array in other])
            assert pool.load(["k"], blocks=[1]).outcomes == ["never_saved"]
            assert pool.exists(["k"]).outcomes == ["never_saved"]
        pool.save(["sized"], buffers=[[np.ones(64, np.uint8)]])
        for size in (1, 63, 65, 128):
            wrong = np.zeros(size, np.uint8)
            assert pool.load(["sized"], buffers=[[wrong]]).outcomes == ["size_mismatch"]
            assert pool.save(["sized"], buffers=[[wrong]]).outcomes == ["size_mismatch"]
            assert not wrong.any()
        assert not into.any()


WRONG_POINTERS = """
import ctypes, mmap, sys
import numpy as np
import kvferry
pool = kvferry.Pool.connect(sys.argv[1], transports=tuple(sys.argv[2].split(",")))
PAGE = mmap.PAGESIZE

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def mapped(pages, protection):
    address = libc.mmap(None, pages * PAGE, protection, 0x22, -1, 0)
    assert address not in (None, 2**64 - 1)
    return address

def refused(verb, segments, key="k"):
    try:
        outcome = getattr(pool, verb)([key], buffers=[segments])
    except kvferry.InvalidArgument:
        return
    raise AssertionError((verb, segments, outcome))

size = 4 * PAGE
good = np.full(size, 9, np.uint8)
assert pool.save(["k"], buffers=[[good]]).prefix == 1
readable = mapped(4, 1)
assert pool.save(["zeros"], buffers=[[(readable, size)]]).prefix == 1
refused("load", [(readable, size)])
nothing = mapped(4, 0)
refused("load", [(nothing, size)])
refused("save", [(nothing, size)], "other")
half = mapped(4, 3)
assert libc.munmap(half + 2 * PAGE, 2 * PAGE) == 0
refused("load", [(half, size)])
refused("save", [(half, size)], "other")
refused("load", [(half, 2 * PAGE), (half + 2 * PAGE, 2 * PAGE)])
assert bytes((ctypes.c_char * PAGE).from_address(half)) == bytes(PAGE)
foreign = int(sys.argv[3])
refused("load", [(foreign, size)])
refused("save", [(foreign, size)], "other")
assert pool.load(["k"], buffers=[[good]]).prefix == 1
assert pool.exists(["other"]).prefix == 0
print("well")
"""


@pytest.mark.parametrize("transports", ["map,cma,socket", "socket"])
def test_pointers_to_memory_that_is_missing_read_only_or_another_s_are_errors(
    nodes: Nodes, peers: Peers, transports: str
) -> None:
    node = nodes()
    # An address that is mapped in another process and not here, most likely: far above what this one has.
    foreign = mmap.mmap(-1, 1 << 20)
    address = np.frombuffer(foreign, np.uint8).ctypes.data
    command = [sys.executable, "-c", WRONG_POINTERS, node.address, transports, str(address)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


def test_without_time_nothing_happens_and_nothing_is_raised(nodes: Nodes) -> None:
    with kvferry.Pool.connect(nodes().address) as pool:
        value = np.ones(64 << 10, np.uint8)
        assert pool.save(["k"], buffers=[[value]]).prefix == 1
        for _ in range(50):
            into = np.zeros(64 << 10, np.uint8)
            outcomes = [
                pool.load(["k"], buffers=[[into]], timeout_ms=0),
                pool.load_async(["k"], buffers=[[into]], timeout_ms=0).wait(5000),
                pool.save(["l"], buffers=[[value]], timeout_ms=0),
                pool.exists(["k"], timeout_ms=0),
            ]
            for outcome in outcomes:
                assert set(outcome.reasons) <= {"timeout", "hit", "saved", "present", "pending", "lease_lost"}
            assert outcomes[0].prefix or outcomes[1].prefix or not into.any()
        assert pool.remove(["x"], timeout_ms=0) == 0


def test_loads_into_the_same_buffers_at_once_change_nothing_else(nodes: Nodes) -> None:
    with kvferry.Pool.connect(nodes().address) as pool:
        values = np.stack([value_of(number, 8192) for number in range(16)])
        keys = [key_of(number) for number in range(16)]
        assert pool.save(keys, buffers=rows_of(values), timeout_ms=10_000).prefix == 16
        memory = np.zeros((3, 8192), np.uint64)
        for turn in range(20):
            loads = [pool.load_async([key], buffers=[[memory[1]]], timeout_ms=10_000) for key in keys]
            assert all(load.wait(10_000).prefix == 1 for load in loads)
            assert set(np.unique(memory[1]).tolist()) <= {word_of(number) for number in range(16)}
            assert not memory[0].any() and not memory[2].any()
            assert pool.load([keys[turn % 16]], buffers=[[memory[1]]]).prefix == 1
            assert (memory[1] == word_of(turn % 16)).all()
        # Twice within one batch: each of the two keys is a hit, and the bytes are of one of them.
        assert pool.load(keys[:2], buffers=[[memory[1]], [memory[1]]]).prefix == 2
        assert set(np.unique(memory[1]).tolist()) <= {word_of(0), word_of(1)}


# --- messages ---------------------------------------------------------------------------------------------------------

HUGE = (0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))


def anything(chance: random.Random, depth: int = 0) -> Any:
    """What MessagePack can say."""
    kinds = ["number", "bytes", "words", "none", "truth", "float", *(["list", "table"] if depth < 3 else [])]
    kind = chance.choice(kinds)
    if kind == "number":
        return chance.choice([*HUGE, chance.randrange(300)])
    if kind == "bytes":
        return chance.randbytes(chance.choice([0, 1, 7, 8, 16, 24, 300]))
    if kind == "words":
        return chance.choice(["", "test", "ü" * 200, "\0", "x" * 5000])
    if kind == "list":
        return [anything(chance, depth + 1) for _ in range(chance.randrange(9))]
    if kind == "table":
        return {f"{i}": anything(chance, depth + 1) for i in range(chance.randrange(3))}
    return {"none": None, "truth": chance.random() < 0.5, "float": chance.choice([0.0, -1.5, float("nan"), 1e300])}[
        kind
    ]


def a_request(chance: random.Random, taken: "list[int]") -> Any:
    """One whose form is right and whose words need not be."""
    number, truth = lambda: chance.choice([*HUGE, *range(4)]), lambda: chance.random() < 0.5
    keys = [chance.choice([b"", b"a", b"k%d" % chance.randrange(30), b"x" * 300]) for _ in range(chance.randrange(6))]
    sizes = np.array([chance.choice([0, 1, 64, 1000, 1 << 20, 2**63, 2**64 - 1]) for _ in keys], np.uint64).tobytes()
    sizes = chance.choice([sizes, sizes, sizes, sizes[:-3], sizes * 2, b""])
    reservation = chance.choice([*taken, number()]) if taken else number()
    return chance.choice(
        [
            messages.Open(chance.choice([messages.VERSION, 0, 9]), chance.choice(["", "test", "x\0y"]), b"d" * chance.randrange(2),
                          b"f" * chance.randrange(40), chance.choice([None, -5, 0, 1, 2**63])),
            messages.Exists(number(), keys),
            messages.Lookup(number(), number(), keys, sizes, number(), [number() for _ in range(chance.randrange(3))]),
            messages.Release([*taken, number()]),
            messages.Reserve(number(), number(), keys, sizes, chance.choice([None, b"", b"k"]), chance.choice([None, number()]), number(),
                             truth(), []),
            messages.Commit(reservation, [number() for _ in range(chance.randrange(3))], chance.choice([b"", b"12345678", b"1"])),
            messages.Remove(number(), keys),
            messages.Status(),
        ]
    )  # fmt: skip


def test_no_message_that_a_client_can_send_ends_a_node(peers: Peers, tmp_path: Any) -> None:
    chance = dice()
    node = peers(NODE, f"unix:{tmp_path}/n.sock", 4 * MIB, name="node")
    address = node.call("address")
    values = np.stack([value_of(number, 512) for number in range(64)])
    keys = [key_of(number) for number in range(64)]
    into = np.zeros_like(values)
    with kvferry.Pool.connect(address, namespace="somebody") as pool:
        assert pool.save(keys, buffers=rows_of(values), timeout_ms=10_000).prefix == 64
        owner = Raw(address)
        owner.reserve(owner.space("somebody"), [b"mine"], 64, 60_000)
        mine = owner.number
        owner.lookup(owner.space("somebody"), keys[:4], 4096, 60_000)
        theirs = owner.number
        raw = Raw(address)
        raw.space()
        words = [b"", b"\xc1", b"\x91", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 100_000, bytes(100)]
        for turn in range(1200 if not LONG else 20_000):
            kind = chance.random()
            if kind < 0.1:
                payload = chance.choice(words) + chance.randbytes(chance.randrange(20))
            elif kind < 0.4:
                payload = msgspec.msgpack.encode(
                    [chance.choice([*range(10), 11, 64, -1]), *(anything(chance) for _ in range(chance.randrange(8)))]
                )
            else:
                payload = messages.encode(a_request(chance, [mine, theirs]))
            if not payload:
                continue
            with contextlib.suppress(kvferry.InternalError, msgspec.DecodeError):
                if chance.random() < 0.1:
                    raw.link.send(payload)
                else:
                    messages.decode_answer(raw.link.call(payload, 10_000))
            if turn % 100 == 0:
                # The fuzz may fill the node; what is still there is right, and is served in time.
                loaded = pool.load(keys, buffers=rows_of(into), timeout_ms=2000)
                assert set(loaded.reasons) <= {"hit", "evicted", "never_saved"}
                assert all((into[n] == word_of(int(n))).all() for n in np.flatnonzero(loaded.ok))
                assert loaded.ok[:4].all(), "a lease was ended by another than its owner"
        # Neither the reservation nor the lease of another was touched.
        assert owner.ask(messages.Commit(mine, [], b"")).codes == bytes([messages.code_of("saved")])
        raw.close()
        owner.close()
        assert pool.save(["after"], buffers=[[values[0]]], timeout_ms=10_000).prefix == 1
        drained(node, links=1)


class Elsewhere:
    """Takes the place of `Values.checksums`: whoever comes waits until it may go on."""

    def __init__(self, monkeypatch: Any) -> None:
        self.came, self.may_go = threading.Event(), threading.Event()
        took = Values.checksums

        def checksums(*arguments: Any) -> Any:
            self.came.set()
            assert self.may_go.wait(20)
            return took(*arguments)

        monkeypatch.setattr(Values, "checksums", checksums)


@pytest.mark.parametrize("verb", ["load", "save"])
def test_who_gives_a_call_up_waits_for_the_checksums_that_are_being_taken(
    monkeypatch: Any, tmp_path: Path, verb: str
) -> None:
    memory = np.memmap(tmp_path / "values", np.uint8, "w+", shape=(3, 4096))  # whose sums its caller's threads take
    memory[:] = 1
    with kvferry.Pool.private() as pool:
        pool._checksum = "always"
        assert pool.save(names(3), buffers=list(memory)).prefix == 3
        there = Elsewhere(monkeypatch)
        call = pool.load_async if verb == "load" else pool.save_async
        future = call(names(3) if verb == "load" else names(3, "more"), buffers=list(memory), timeout_ms=20_000)
        assert there.came.wait(20)
        cancelling = threading.Thread(target=future.cancel)
        cancelling.start()
        cancelling.join(0.2)
        assert cancelling.is_alive()  # its caller may not have the memory back yet
        there.may_go.set()
        cancelling.join(20)
        assert not cancelling.is_alive()
        assert pool.load(names(3), buffers=[np.zeros(4096, np.uint8) for _ in range(3)]).prefix == 3


@pytest.mark.parametrize("checksum", ["auto", "always"])
@pytest.mark.parametrize("way", ["map", "socket"])
@pytest.mark.parametrize("pages", [1, 512])
def test_memory_that_was_there_in_an_earlier_call_is_looked_at_again(
    nodes: Nodes, checksum: str, way: str, pages: int
) -> None:
    size = pages * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    anywhere = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, anywhere, -1, 0)
    transports = ["socket"] if way == "socket" else ["map", "cma", "socket"]
    with kvferry.Pool.connect(nodes().address, checksum=checksum, transports=transports) as pool:
        where = [(address, size)]
        assert pool.save(["a"], buffers=where, timeout_ms=20_000).prefix == 1
        assert pool.load(["a"], buffers=where, timeout_ms=20_000).prefix == 1
        libc.mprotect(address, size, mmap.PROT_READ)
        assert pool.save(["b"], buffers=where, timeout_ms=20_000).prefix == 1
        with pytest.raises(kvferry.InvalidArgument, match="not writable"):
            pool.load(["a"], buffers=where)
        libc.mprotect(address, size, 0)
        for verb in (pool.load, pool.save):
            with pytest.raises(kvferry.InvalidArgument, match="memory of this process"):
                verb(["c"], buffers=where)
        assert pool.load(["a"], buffers=[np.zeros(size, np.uint8)], timeout_ms=20_000).prefix == 1
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))


@pytest.mark.parametrize("verb", ["load", "save"])
@pytest.mark.parametrize("how", ["number", "array", "registered"])
def test_a_file_that_is_cut_short_under_its_checksum_is_an_error(
    monkeypatch: Any, tmp_path: Any, verb: str, how: str
) -> None:
    file = tmp_path / "values"
    file.write_bytes(bytes(range(256)) * 16 * 16)
    array = np.memmap(file, np.uint8, "r+", shape=(16, 4096))
    address = array.ctypes.data
    with kvferry.Pool.private() as pool:
        pool._checksum = "always"
        pool.register(array)
        where: dict[str, Any] = {
            "number": {"buffers": [(address + at, 4096) for at in range(0, 16 * 4096, 4096)]},
            "array": {"buffers": list(array)},
            "registered": {"blocks": range(16)},
        }[how]
        assert pool.save(names(16), **where, timeout_ms=20_000).prefix == 16
        took = Values.checksums

        def checksums(*arguments: Any) -> Any:
            os.truncate(file, 4096)
            return took(*arguments)

        monkeypatch.setattr(Values, "checksums", checksums)
        call, keys = (pool.load, names(16)) if verb == "load" else (pool.save, names(16, "more"))
        with pytest.raises(kvferry.InvalidArgument, match="not there"):
            call(keys, **where, timeout_ms=20_000)


def test_a_request_that_comes_after_its_end_was_told_is_a_time_out(nodes: Nodes) -> None:
    with kvferry.Pool.connect(nodes().address) as pool:
        (peer,) = pool._awake()
        number = next(peer.numbers)
        peer.numbers = itertools.chain([number], peer.numbers)
        link = peer.link
        assert link is not None
        peer.give_up(link, number)
        outcome = pool.load(["a"], buffers=[np.zeros(8, np.uint8)], timeout_ms=20_000)
        assert outcome.outcomes == ["timeout"]
        assert pool.save(["a"], buffers=[np.zeros(8, np.uint8)], timeout_ms=20_000).prefix == 1


def test_one_value_is_loaded_as_it_would_be_among_others(nodes: Nodes) -> None:
    """Most loads of one small value go a way of their own, which those that run beside their caller do not."""
    size, saved = 4096, np.arange(4096, dtype=np.uint8)
    node, gone = nodes(), nodes()
    with kvferry.Pool.connect(node.address) as pool, kvferry.Pool.connect(gone.address) as lost:
        for key in ("there", "removed"):
            assert pool.save([key], buffers=[saved]).prefix == 1
        assert pool.save(["short"], buffers=[saved[:8]]).prefix == 1
        assert pool.remove(["removed"]) == 1
        pool.register(np.zeros((2, 8), np.uint8))  # whose values are others
        gone.stop()

        def seen(load: Callable[..., kvferry.Outcome]) -> list[Any]:
            came: list[Any] = []
            before = pool.statistics()
            for keys, shape in (
                (["there"], size),
                ([b"there"], (2, size // 2)),
                (np.frombuffer(b"there", np.uint8).reshape(1, -1), size),
                (["there"], 8),  # another size
                (["short"], 8),
                (["removed"], size),
                (["never"], size),
            ):
                around = np.zeros((3, *np.empty(shape).shape), np.uint8)
                if shape == 8:  # not numpy's own memory
                    around = np.frombuffer(mmap.mmap(-1, 3 * 8), np.uint8).reshape(3, 8)
                outcome = load(pool, keys, buffers=[[around[1]] if len(keys[0]) == 5 else around[1]])
                assert not around[0].any() and not around[2].any()
                came.append((outcome.outcomes, outcome.size_bytes, around[1].tobytes() if outcome.prefix else b""))
                assert outcome.seconds > 0
            after = pool.statistics()
            came.append({word: after[word] - before.get(word, 0) for word in after})
            came.append(load(lost, ["there"], buffers=[np.zeros(size, np.uint8)]).outcomes)
            return came

        alone = seen(lambda pool, *given, **more: pool.load(*given, **more))
        assert alone == seen(lambda pool, *given, **more: pool.load_async(*given, **more).wait(5000))
        words = [what[0] for what in alone[:-2]]
        assert words == [["hit"]] * 3 + [["size_mismatch"], ["hit"], ["removed"], ["never_saved"]]
        assert [value for _, _, value in alone[:5]] == [saved.tobytes()] * 3 + [b"", saved[:8].tobytes()]
        assert alone[-1] == ["node_lost"]

        for refused in (np.zeros(size, np.uint8)[::2], np.zeros(0, np.uint8), np.zeros(4, object), read_only(size)):
            with pytest.raises(kvferry.InvalidArgument):
                pool.load(["there"], buffers=[refused])
        for timeout in (-1, None, 1.5):
            with pytest.raises(kvferry.InvalidArgument, match="timeout_ms"):
                pool.load(["there"], buffers=[np.zeros(size, np.uint8)], timeout_ms=timeout)  # type: ignore[arg-type]
        for keys in ([], [""], ["there", "there"], ["x" * 256], [7], "there"):
            with pytest.raises(kvferry.InvalidArgument):
                pool.load(keys, buffers=[np.zeros(size, np.uint8)])


def read_only(size: int) -> Any:
    array = np.zeros(size, np.uint8)
    array.flags.writeable = False
    return array


def test_one_millisecond_is_enough_for_a_node_that_is_there(nodes: Nodes) -> None:
    with kvferry.Pool.connect(nodes().address) as pool:
        assert until(lambda: pool.exists(["a"], timeout_ms=1).outcomes == ["never_saved"])


def test_a_pool_that_is_closed_says_so(nodes: Nodes) -> None:
    pool = kvferry.Pool.connect(nodes().address)
    pool.close()
    array = np.zeros((2, 8), np.uint8)
    for verb in (
        lambda: pool.register(array),
        pool.clear,
        lambda: pool.exists(["a"]),
        lambda: pool.remove(["a"]),
        lambda: pool.load(["a"], buffers=[array]),
        lambda: pool.save(["a"], buffers=[array]),
    ):
        with pytest.raises(kvferry.NodeClosed):
            verb()


NO_ANSWERS: dict[str, Callable[[messages.Request], Any]] = {
    "too few codes": lambda asked: messages.Flags(b"\0"),
    "too many codes": lambda asked: messages.Flags(b"\0" * 4),
    "codes of no word": lambda asked: messages.Flags(b"\0\xff\0"),
    "leases of two": lambda asked: messages.Leased(b"\0\0", [b"w" * 16], [b""], b"", b"\0" * 16, b""),
    "places that are missing": lambda asked: messages.Leased(b"\0" * 3, [b"w" * 16], [b""], b"", b"\0" * 16, b""),
    "no window": lambda asked: messages.Leased(b"\0" * 3, [], [], b"", b"\0" * 24, b""),
    "a window too far": lambda asked: messages.Leased(
        b"\0" * 3, [b"w" * 16, b"x" * 16], [b"", b""], b"\2\0" * 3, b"\0" * 24, b""
    ),
    "too few checksums": lambda asked: messages.Leased(b"\0" * 3, [b"w" * 16], [b""], b"", b"\0" * 24, b"\0" * 8),
    "a resolution too many": lambda asked: messages.Leased(b"\0" * 3, [b"w" * 16], [b"", b""], b"", b"\0" * 24, b""),
    "windows that are none": lambda asked: messages.Leased(b"\0" * 3, [b"w" * 16], [b""], b"", b"\0" * 24, b""),
    "reserved too little": lambda asked: messages.Reserved(b"\1" * 3, [b"w" * 16], b"", b"\0" * 16),
    "reserved in no window": lambda asked: messages.Reserved(b"\1" * 3, [b"w" * 16], b"", b"\0" * 24),
}


@pytest.mark.parametrize("what", NO_ANSWERS)
def test_a_node_whose_answers_do_not_fit_is_as_one_that_is_gone(tmp_path: Any, what: str) -> None:
    with kvferry.Node(program="kvferry-pool") as node:
        node.serve_calls()
        address = node.listen(f"unix:{tmp_path}/node.sock")

        def answer() -> None:
            with contextlib.suppress(kvferry.NodeClosed):
                while True:
                    call: Any = node.next_call(1000)
                    if isinstance(call, kvferry.Call) and not call.one_way:
                        asked = messages.decode_request(call.payload)
                        opened = messages.Opened(0, node.node_id, MIB)
                        said = opened if isinstance(asked, messages.Open) else NO_ANSWERS[what](asked)
                        call.answer(messages.encode(said))
                    call = None

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with kvferry.Pool.connect(address) as pool:
                into = [np.zeros(8, np.uint8) for _ in range(3)]
                one = pool.load(names(1), buffers=[np.zeros(8, np.uint8)])
                assert set(one.outcomes) <= {"node_lost", "lease_lost"}, one
                for verb in (
                    lambda: pool.exists(names(3)),
                    lambda: pool.exists_async(names(3)).wait(),
                    lambda: pool.load(names(3), buffers=into),
                    lambda: pool.save(names(3), buffers=into),
                ):
                    outcome = verb()
                    assert outcome.total == 3 and not outcome.ok.any(), outcome
                    assert set(outcome.outcomes) <= {"node_lost", "lease_lost"}, outcome
                assert not any(array.any() for array in into)
        finally:
            node.close()
            thread.join(20)


def test_a_space_is_for_those_who_have_opened_it(nodes: Nodes, raws: Callable[[str], Raw]) -> None:
    """Its number alone, without the secret of its namespace, leads nowhere."""
    node = nodes("1MiB")
    with kvferry.Pool.connect(node.address, secret="s") as pool:
        assert pool.save(["k"], buffers=[[np.ones(8, np.uint8)]]).prefix == 1
        raw = raws(node.address)
        raw.space("another")
        for number in (0, *range(2, 9)):
            for answer in (
                raw.lookup(number, [b"k"], 8, 100),
                raw.reserve(number, [b"new"], 8, 100),
                raw.ask(messages.Exists(number, [b"k"])),
                raw.ask(messages.Remove(number, [b"k"])),
                raw.ask(messages.Clear(number)),
            ):
                assert answer.word == "unknown_space"
        assert pool.exists(["k"]).prefix == 1


def test_a_node_forgets_namespaces_that_are_empty_when_nobody_has_them_open(
    tmp_path: Any, raws: Callable[[str], Raw]
) -> None:
    node = PoolNode(f"unix:{tmp_path}/sock", 1 << 20)
    thread = threading.Thread(target=node.run, daemon=True)
    thread.start()
    value = np.arange(100, dtype=np.uint8)
    with kvferry.Pool.connect(node.address, namespace="kept") as pool:
        assert pool.save(["k"], buffers=[value]).prefix == 1
    stays = raws(node.address)
    open_and_empty = [stays.space(f"open {number}") for number in range(50)]
    for round in range(10):
        raw = raws(node.address)
        opened = [raw.space(f"run {round}.{number}") for number in range(100)]
        assert len(set(opened + open_and_empty)) == 150
        assert raw.reserve(opened[0], [b"k"], 100, 0).codes == bytes(
            [messages.code_of("saved")]
        )  # it ends with the link
        raw.close()
        until(lambda: len(node._opened_by) == 1)
    assert len(node._spaces) < 500
    assert len(node._store._spaces) == len(node._spaces)
    assert [stays.ask(messages.Exists(space, [b"k"])).codes for space in open_and_empty] == [
        bytes([messages.code_of("never_saved")])
    ] * 50
    with kvferry.Pool.connect(node.address, namespace="kept") as pool:
        assert pool.load(["k"], buffers=[np.zeros_like(value)]).prefix == 1
    node.close()
    thread.join(10)


def test_a_message_of_too_many_keys_is_refused_before_anybody_waits_for_it(
    nodes: Nodes, raws: Callable[[str], Raw]
) -> None:
    raw = raws(nodes("1MiB").address)
    space, keys = raw.space(), [b"k"] * (messages.MOST_KEYS + 1)
    for answer in (
        raw.lookup(space, keys, 8, 100),
        raw.reserve(space, keys, 8, 100),
        raw.ask(messages.Exists(space, keys)),
        raw.ask(messages.Remove(space, keys)),
    ):
        assert answer.word == "invalid" and str(messages.MOST_KEYS) in answer.sentence
    for key in (b"", b"x" * 256):
        assert raw.reserve(space, [key], 8, 100).word == "invalid"


# --- many at once, for a while ----------------------------------------------------------------------------------------


@pytest.mark.deadline(300 if LONG else 90)
@pytest.mark.parametrize("over", OVER)
def test_clients_at_random_find_what_was_saved_and_nothing_else(peers: Peers, tmp_path: Any, over: str) -> None:
    dice()
    seconds = 60.0 if LONG else 3.0
    node = peers(NODE, f"unix:{tmp_path}/n.sock", 2 * MIB, name="node")
    clients = [peers(CLIENT, node.call("address"), over, 1, 3000, name=f"client {i}") for i in range(2)]
    running = [client.call_later("churn", seed + i, 300, 6, seconds, thread=True) for i, client in enumerate(clients)]
    total: Counter[str] = Counter()
    for one in running:
        total.update(one.result(seconds + 50))
    print(dict(total))
    assert total["load hit"] and total["save saved"] and total["save present"] and node.call("counts")["evictions"]
    for client in clients:
        client.kill()
    drained(node, links=0)


@pytest.mark.deadline(150)
def test_after_many_clients_and_errors_nothing_is_left_behind(peers: Peers, tmp_path: Any) -> None:
    """Descriptors, threads, mappings, memory, windows, slots and links of a node: clients come, save, load, and are killed in
    the middle or leave; of a client: nodes that come and go."""
    node = peers(NODE, f"unix:{tmp_path}/n.sock", 4 * MIB, name="node")
    address = node.call("address")
    values = block_bytes_of(1, 16, 32 << 10)
    into = np.zeros_like(values)

    def visit(turn: int) -> None:
        with kvferry.Pool.connect(address, transports=("map", "cma", "socket") if turn % 2 else ("socket",)) as pool:
            assert pool.save(names(16), buffers=rows_of(values), timeout_ms=10_000).prefix == 16
            assert pool.load(names(16), buffers=rows_of(into), timeout_ms=10_000).prefix == 16
            pool.load(names(16, "no"), buffers=rows_of(into), timeout_ms=0)
            raw = Raw(address)
            space = raw.space("default")
            raw.reserve(space, names(3, "half"), 1000, 60_000)
            raw.lookup(space, names(16), 32 << 10, 60_000)
            raw.close()
        with contextlib.suppress(kvferry.KvferryError):
            kvferry.Pool.connect(f"unix:{tmp_path}/nobody.sock", timeout_ms=100).close()

    def counted() -> "dict[str, int]":
        drained(node, links=0)
        return dict(node.call("left_behind"))

    for turn in range(4):
        visit(turn)
    before, mine = counted(), left_behind()
    for turn in range(12):
        visit(turn)
    for role, old, read in (("node", before, counted), ("client", mine, left_behind)):
        last: dict[str, int] = {}

        def settled(old: Any = old, read: Any = read, last: Any = last) -> bool:
            last.update(read())
            slack = {"descriptors": 0, "threads": 0, "mappings": 12, "KiB": 6 << 10}
            return all(last[what] <= old[what] + slack[what] for what in old)

        with contextlib.suppress(AssertionError):
            until(settled, 10)
        assert settled(), (role, old, last)


def test_a_client_keeps_nothing_of_nodes_that_have_gone(nodes: Nodes) -> None:
    node = nodes()
    value = np.ones(100_000, np.uint8)
    with kvferry.Pool.connect(node.address) as pool:
        counted = []
        for _ in range(4):
            until(lambda: pool.save(["k"], buffers=[[value]], timeout_ms=1000).prefix == 1)
            assert pool.load(["k"], buffers=[[value]]).prefix == 1
            counted.append(left_behind())
            node.kill()
            assert pool.load(["k"], buffers=[[value]], timeout_ms=1000).reasons.keys() <= {"node_lost", "timeout"}
            node.start()
        for what in ("descriptors", "threads"):
            assert counted[-1][what] <= counted[1][what], (what, counted)
        assert counted[-1]["mappings"] <= counted[1]["mappings"] + 8, counted
