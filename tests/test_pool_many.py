"""A pool of several nodes: who has what, what a change of the members costs, and the node on the caller's own host."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry.pool import client
from kvferry.pool.membership import Member, StaticMembership
from kvferry.pool.routing import digests, owners
from namespace_support import Inside, network
from pool_support import PATIENCE_S, NodeProcess, block_bytes_of, names, until

pytestmark = pytest.mark.quick("exactly_one_node", "membership", "killed", "copies")

SIZE = 4 << 10
KEYS = names(300)
VALUES = block_bytes_of(1, len(KEYS), SIZE)


class Interrupted(Exception):
    pass


class Cluster:
    """Nodes a, b, c, … behind Unix sockets. The first by id is the one that clients here take for their own."""

    def __init__(self, directory: Path, count: int = 3, memory: str = "32MiB") -> None:
        self.directory, self.memory = directory, memory
        self.nodes: dict[str, NodeProcess] = {}
        with ThreadPoolExecutor() as several:
            list(several.map(self.add, "abcdef"[:count]))
        self.nodes = dict(sorted(self.nodes.items()))

    def add(self, name: str) -> None:
        self.nodes[name] = NodeProcess(f"unix:{self.directory}/{name}.sock", self.memory)

    def member(self, name: str, weight: float = 1.0) -> Member:
        return Member(name, self.nodes[name].address, weight)

    def members(self) -> list[Member]:
        return [self.member(name) for name in self.nodes]

    def alone(self, name: str) -> kvferry.Pool:
        """Sees this node and no other."""
        return kvferry.Pool.connect(self.nodes[name].address)

    def held(self) -> dict[str, list[bytes]]:
        """Of KEYS, those that each node has."""
        found = {}
        for name in self.nodes:
            with self.alone(name) as pool:
                found[name] = [key for key, ok in zip(KEYS, pool.exists(KEYS, timeout_ms=5000).ok, strict=True) if ok]
        return found

    def stop(self) -> None:
        with ThreadPoolExecutor() as several:
            list(several.map(NodeProcess.stop, self.nodes.values()))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.stop()


def owners_of(keys: list[bytes], members: list[Member]) -> list[str]:
    return [members[at].id for at in owners(digests(keys), members)]


def save(pool: kvferry.Pool, **options: Any) -> kvferry.pool.outcome.Outcome:
    return pool.save(KEYS, buffers=list(VALUES), **{"timeout_ms": 10_000} | options)


def load(pool: kvferry.Pool, **options: Any) -> kvferry.pool.outcome.Outcome:
    """Hits have the right bytes."""
    into = np.zeros_like(VALUES)
    outcome = pool.load(KEYS, buffers=list(into), **{"timeout_ms": 10_000} | options)
    assert (into[outcome.ok] == VALUES[outcome.ok]).all()
    return outcome


def where(outcome: Any, members: list[Member]) -> dict[str, set[str]]:
    """The words of each owner's keys."""
    said: dict[str, set[str]] = {}
    for owner, word in zip(owners_of(KEYS, members), outcome.outcomes, strict=True):
        said.setdefault(owner, set()).add(word)
    return said


# --- shares -----------------------------------------------------------------------------------------------------------


def test_every_key_lies_on_exactly_one_node_and_that_is_its_owner(cluster: Cluster) -> None:
    with kvferry.Pool.connect(cluster.members()) as pool:
        assert save(pool).prefix == len(KEYS)
        assert load(pool).prefix == len(KEYS)
        assert pool.exists(KEYS).prefix == len(KEYS)
        said = owners_of(KEYS, cluster.members())
        held = cluster.held()
        for name in cluster.nodes:
            assert held[name] == [key for key, owner in zip(KEYS, said, strict=True) if owner == name]
            assert len(held[name]) > 50
        assert pool.remove(KEYS[:100]) == 100
        assert pool.clear() == 200


def test_addresses_are_members_too_and_alone_they_weigh_the_same(cluster: Cluster) -> None:
    listed = [node.address for node in cluster.nodes.values()]
    with kvferry.Pool.connect(listed) as pool, kvferry.Pool.connect(",".join(reversed(listed))) as other:
        save(pool)
        assert load(other).prefix == len(KEYS)
    with kvferry.Pool.connect([cluster.member("a", 20), cluster.member("b"), cluster.nodes["c"].address]) as pool:
        pool.clear()
        save(pool)
    held = cluster.held()
    assert sum(map(len, held.values())) == len(KEYS)
    assert len(held["a"]) > 5 * (len(held["b"]) + len(held["c"]))


def test_keys_of_one_route_lie_on_one_node(cluster: Cluster) -> None:
    routes = [b"request %d" % (i % 7) for i in range(len(KEYS))]
    with kvferry.Pool.connect(cluster.members()) as pool:
        assert save(pool, routes=routes).prefix == len(KEYS)
        assert load(pool, routes=routes).prefix == len(KEYS)
        assert load(pool).prefix < len(KEYS)
        found = {key: name for name, keys in cluster.held().items() for key in keys}
        for route in set(routes):
            assert len({found[key] for key, its in zip(KEYS, routes, strict=True) if its == route}) == 1
        assert len(set(found.values())) > 1
        assert pool.remove(KEYS, routes=routes) == len(KEYS)


def test_the_nodes_of_a_batch_are_asked_side_by_side(cluster: Cluster) -> None:
    """Of two nodes that stand still neither is waited for after the other."""
    with kvferry.Pool.connect(cluster.members()) as pool:
        save(pool)
        for name in "bc":
            cluster.nodes[name].signal(signal.SIGSTOP)
        began = time.monotonic()
        waking = threading.Timer(0.5, lambda: [cluster.nodes[name].signal(signal.SIGCONT) for name in "bc"])
        waking.start()
        assert load(pool).prefix == len(KEYS)
        assert time.monotonic() - began > 0.4
        for name in "bc":
            cluster.nodes[name].signal(signal.SIGSTOP)
        began = time.monotonic()
        assert load(pool, timeout_ms=800).reasons.keys() == {"hit", "timeout"}
        assert time.monotonic() - began < 1.5
        began = time.monotonic()
        assert pool.clear(timeout_ms=800) > 50
        assert time.monotonic() - began < 1.5
        waking.join()


# --- the members change -----------------------------------------------------------------------------------------------


def test_a_change_of_the_membership_moves_the_share_of_who_came_or_went_and_no_more(cluster: Cluster) -> None:
    members = StaticMembership(cluster.members())
    with kvferry.Pool.connect(members) as pool:
        save(pool)
        before = owners_of(KEYS, cluster.members())
        cluster.add("d")
        members.set(cluster.members())
        after = owners_of(KEYS, cluster.members())
        moved = np.array([new != old for old, new in zip(before, after, strict=True)])
        assert 30 < moved.sum() < 150
        assert {new for new, went in zip(after, moved, strict=True) if went} == {"d"}
        # What the local node has owned is found there still, for it is asked first.
        lost = moved & (np.array(before) != "a")
        assert load(pool).outcomes == ["never_saved" if gone else "hit" for gone in lost]
        assert save(pool).outcomes == ["saved" if went else "present" for went in moved]
        members.set([member for member in cluster.members() if member.id != "b"])
        said = where(load(pool), cluster.members())
        assert said == {"a": {"hit"}, "b": {"never_saved"}, "c": {"hit"}, "d": {"hit"}}
        members.set([])
        assert set(load(pool).outcomes) == {"node_lost"}
        assert set(load(pool, local_only=True).outcomes) == {"never_saved"}
        members.set(cluster.members())
        assert load(pool).prefix == len(KEYS)


def test_the_members_change_while_others_load(cluster: Cluster) -> None:
    """Whatever the list is at the moment: no error, no wrong byte, and of those that stay all are hits in the end."""
    members = StaticMembership(cluster.members())
    problems: list[BaseException] = []
    end = threading.Event()
    with kvferry.Pool.connect(members) as pool:
        save(pool)

        def work() -> None:
            try:
                while not end.is_set():
                    words = load(pool, timeout_ms=5000).reasons.keys()
                    assert words <= {"hit", "never_saved", "node_lost", "lease_lost"}
            except BaseException as problem:  # noqa: BLE001 - the test's own thread raises it
                problems.append(problem)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for turn in range(12):
            members.set([member for member in cluster.members() if member.id != "abc"[turn % 3]])
            time.sleep(0.02)
            members.set(cluster.members())
            time.sleep(0.02)
        end.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert not problems, problems
        until(lambda: load(pool).prefix == len(KEYS))


# --- one node fails ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["a", "b"], ids=["the_local_one", "another"])
def test_a_node_that_is_killed_costs_its_share_alone(cluster: Cluster, lost: str) -> None:
    members = cluster.members()
    with kvferry.Pool.connect(members) as pool:
        save(pool)
        cluster.nodes[lost].kill()
        began = time.monotonic()
        for _ in range(3):
            said = where(load(pool, timeout_ms=1000), members)
            assert said.pop(lost) <= {"node_lost", "timeout"}
            assert set(map(frozenset, said.values())) == {frozenset({"hit"})}
        assert time.monotonic() - began < 4
        assert where(pool.exists(KEYS), members)[lost] <= {"node_lost", "timeout"}
        if lost == "a":
            assert set(load(pool, local_only=True).outcomes) <= {"node_lost", "timeout"}
        cluster.nodes[lost].start()
        until(lambda: where(load(pool), members)[lost] == {"never_saved"})
        save(pool)
        assert load(pool).prefix == len(KEYS)


@pytest.mark.parametrize("stopped", ["a", "b"], ids=["the_local_one", "another"])
def test_a_node_that_stands_still_costs_its_share_alone_within_the_timeout(cluster: Cluster, stopped: str) -> None:
    members = cluster.members()
    with kvferry.Pool.connect(members) as pool:
        save(pool, local_copy=stopped == "a")  # copies of what is in the one that stands still are hits
        cluster.nodes[stopped].signal(signal.SIGSTOP)
        for verb in (load, lambda pool, **options: pool.exists(KEYS, **options)):
            for _ in range(2):
                began = time.monotonic()
                said = where(verb(pool, timeout_ms=800), members)
                assert time.monotonic() - began < 1.5
                assert said.pop(stopped) == {"timeout"}
                assert set(map(frozenset, said.values())) == {frozenset({"hit"})}
        began = time.monotonic()
        fresh = names(len(KEYS), "fresh")
        outcome = pool.save(fresh, buffers=list(VALUES), routes=KEYS, timeout_ms=800, local_copy=True)
        assert time.monotonic() - began < 1.5
        said = where(outcome, members)
        assert said.pop(stopped) == {"timeout"}
        assert set(map(frozenset, said.values())) == {frozenset({"saved"})}
        cluster.nodes[stopped].signal(signal.SIGCONT)
        until(lambda: load(pool).prefix == len(KEYS))


def test_calls_end_in_time_when_all_threads_wait_for_nodes_that_stand_still(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "THREADS", 2)
    monkeypatch.setattr(client, "BESIDE", 4)
    into = np.zeros_like(VALUES)
    with kvferry.Pool.connect(cluster.members()) as pool:
        assert pool.save(KEYS, buffers=list(VALUES), timeout_ms=5000).prefix == len(KEYS)
        for name in "bc":
            cluster.nodes[name].signal(signal.SIGSTOP)
        others = [threading.Thread(target=lambda: pool.exists(KEYS, timeout_ms=4000)) for _ in range(6)]
        for other in others:
            other.start()
        waiting = [pool.exists_async(KEYS, timeout_ms=4000) for _ in range(2)]
        time.sleep(0.3)
        began = time.monotonic()
        short = pool.load_async(KEYS, buffers=list(into), timeout_ms=100).wait(10_000)
        assert short.outcomes == ["timeout"] * len(KEYS)
        now = pool.load(KEYS, buffers=list(into), timeout_ms=100)
        pool.clear(timeout_ms=100)
        assert time.monotonic() - began < 2.5, "it waited for threads that others hold"
        assert now.reasons["hit"] > 0 and now.reasons["hit"] + now.reasons["timeout"] == len(KEYS)
        for other in others:
            other.join(20)
        for one in waiting:
            one.wait(20_000)


@pytest.mark.parametrize("verb", ["load", "save"])
def test_a_call_that_is_interrupted_leaves_the_memory_alone(cluster: Cluster, verb: str) -> None:
    """A signal handler raises in the calling thread while other threads wait for a node; then the memory is used for
    something else, and the node goes on."""
    memory, armed = VALUES.copy(), [True]

    def interrupt(*_: object) -> None:
        if armed:
            raise Interrupted

    with kvferry.Pool.connect(cluster.members()) as pool:
        if verb == "load":
            assert pool.save(KEYS, buffers=list(memory), timeout_ms=5000).prefix == len(KEYS)
        before = signal.signal(signal.SIGUSR1, interrupt)
        cluster.nodes["b"].signal(signal.SIGSTOP)
        timers = [threading.Timer(s, os.kill, (os.getpid(), signal.SIGUSR1)) for s in (0.4, 0.4001)]
        try:
            for timer in timers:
                timer.start()
            began = time.monotonic()
            with pytest.raises(Interrupted):
                getattr(pool, verb)(KEYS, buffers=list(memory), timeout_ms=8000)
            armed.clear()
            assert time.monotonic() - began < 5, "it waited for the node"
            for timer in timers:
                timer.join()
        finally:
            signal.signal(signal.SIGUSR1, before)
        memory[:] = 17
        cluster.nodes["b"].signal(signal.SIGCONT)
        into = np.zeros_like(memory)
        # What the node was asked for has ended with the call's time; what it has published is whole.
        until(lambda: pool.save(KEYS, buffers=list(VALUES), timeout_ms=5000).prefix == len(KEYS))
        assert (memory == 17).all()
        assert pool.load(KEYS, buffers=list(into), timeout_ms=5000).prefix == len(KEYS)
        assert np.array_equal(into, VALUES)


def test_nothing_of_a_pool_is_left_when_it_is_closed(cluster: Cluster) -> None:
    for _ in range(3):
        with kvferry.Pool.connect(cluster.members()) as pool:
            pool.exists(KEYS)
            pool.exists_async(KEYS).wait(10_000)
    until(lambda: not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvferry")])


def test_calls_that_a_close_comes_into_end_with_words(cluster: Cluster) -> None:
    """Those that had begun: an error is what one gets that begins later."""
    ended: list[Any] = []

    def work(verb: Callable[[], Any]) -> None:
        while True:
            try:
                ended.append(verb())
            except kvferry.NodeClosed as error:
                ended.append(error)
                return

    for _ in range(5):
        into = np.zeros_like(VALUES)
        pool = kvferry.Pool.connect(cluster.members())
        save(pool)
        verbs = [
            partial(pool.load, KEYS, buffers=list(into)),
            partial(pool.exists, KEYS),
            partial(pool.remove, KEYS[:2]),
        ]
        threads = [threading.Thread(target=work, args=(verb,)) for verb in verbs]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        pool.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    errors = [str(one) for one in ended if isinstance(one, Exception)]
    assert errors == ["the pool is closed"] * 15


def test_a_local_node_that_stands_still_delays_one_read_of_what_others_own(cluster: Cluster) -> None:
    members = cluster.members()
    with kvferry.Pool.connect(members) as pool:
        save(pool)
        theirs = [at for at, owner in enumerate(owners_of(KEYS, members)) if owner != "a"]
        keys = [KEYS[at] for at in theirs]
        into = np.zeros((len(keys), SIZE), np.uint8)
        cluster.nodes["a"].signal(signal.SIGSTOP)
        took = []
        for timeout_ms in (0, 4000, 4000):
            if len(took) == 1:
                until(lambda: pool._awake()[0].prompt)  # it has kept nobody waiting for long
            began = time.monotonic()
            outcome = pool.load(keys, buffers=list(into), timeout_ms=timeout_ms)
            took.append(time.monotonic() - began)
            assert outcome.prefix == (len(keys) if timeout_ms else 0)
        assert took[0] < 0.9 < took[1] < 2
        assert took[2] < 0.9
        assert (into == VALUES[theirs]).all()


# --- the node on this host --------------------------------------------------------------------------------------------


def status(cluster: Cluster, name: str) -> dict[str, Any]:
    with cluster.alone(name) as pool:
        peer = pool._awake()[0]
        return dict(peer.ask(kvferry.pool.messages.Status(), kvferry.pool.messages.Facts, time.monotonic() + 5).facts)


def test_local_copies_are_found_here_first_and_with_everything_else_gone(cluster: Cluster) -> None:
    members = cluster.members()
    mine = owners_of(KEYS, members).count("a")
    with kvferry.Pool.connect(members) as pool:
        saved = save(pool)
        assert load(pool, local_only=True).reasons == {"hit": mine, "never_saved": len(KEYS) - mine}
        pool.clear()
        copied = save(pool, local_copy=True)
        assert copied.size_bytes == saved.size_bytes == VALUES.nbytes
        facts = status(cluster, "a")
        assert (facts["keys"], facts["copies"]) == (mine, len(KEYS) - mine)
        assert load(pool, local_only=True).prefix == len(KEYS)
        assert pool.exists(KEYS, local_only=True).prefix == len(KEYS)
        for name in "bc":
            cluster.nodes[name].kill()
        assert load(pool).prefix == len(KEYS)
        assert pool.exists(KEYS).prefix == len(KEYS)
        for name in "bc":
            cluster.nodes[name].start()
        assert load(pool).prefix == len(KEYS)


def test_removing_and_clearing_reach_the_copies_here(cluster: Cluster) -> None:
    with kvferry.Pool.connect(cluster.members()) as pool:
        save(pool, local_copy=True)
        assert pool.remove(KEYS[:200]) == 200
        assert load(pool).reasons == {"removed": 200, "hit": 100}
        assert load(pool, local_only=True).reasons == {"removed": 200, "hit": 100}
        assert pool.clear() == 100
        assert pool.exists(KEYS).prefix == 0
        assert status(cluster, "a")["copies"] == 0


def test_nothing_is_copied_that_somebody_else_has_saved(cluster: Cluster) -> None:
    """The caller's bytes for the key may be others."""
    with kvferry.Pool.connect(cluster.members()) as pool:
        save(pool)
        others = [np.zeros(SIZE, np.uint8)] * len(KEYS)
        assert pool.save(KEYS, buffers=others, local_copy=True, timeout_ms=10_000).reasons == {"present": len(KEYS)}
        assert load(pool).prefix == len(KEYS)
        assert status(cluster, "a")["copies"] == 0


def test_copies_are_dropped_first_when_the_node_is_full(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, memory="2MiB")
    try:
        members = [cluster.member("a"), cluster.member("b", 1000)]
        with kvferry.Pool.connect(members) as pool, cluster.alone("a") as alone:
            save(pool, local_copy=True)
            before = status(cluster, "a")
            assert before["copies"] > 250
            for at in range(4):  # 1.6 MB of 2
                more = block_bytes_of(2 + at, 100, SIZE)
                assert alone.save(names(100, f"own {at}"), buffers=list(more), timeout_ms=5000).prefix == 100
            after = status(cluster, "a")
            assert after["keys"] == before["keys"] + 400
            assert after["copies"] < 120
            for at in range(4):
                assert alone.exists(names(100, f"own {at}")).prefix == 100
            assert load(pool).prefix == len(KEYS)
    finally:
        cluster.stop()


def test_without_a_local_node_every_local_only_read_is_a_miss(cluster: Cluster, monkeypatch: Any) -> None:
    with kvferry.Pool.connect(cluster.members()) as pool:
        save(pool)
        for peer in pool._awake():
            monkeypatch.setattr(peer, "same_host", False)
        assert save(pool, local_copy=True).reasons == {"present": len(KEYS)}
        assert load(pool, local_only=True).reasons == {"never_saved": len(KEYS)}
        assert pool.exists(KEYS, local_only=True).reasons == {"never_saved": len(KEYS)}
        assert load(pool).prefix == len(KEYS)


def test_a_local_node_that_comes_late_or_again_is_found_by_local_only_reads_alone(cluster: Cluster) -> None:
    cluster.nodes["a"].kill()
    with kvferry.Pool.connect(cluster.member("a").address) as pool:
        assert load(pool, local_only=True, timeout_ms=200).prefix == 0
        cluster.nodes["a"].start()
        until(lambda: load(pool, local_only=True).reasons == {"never_saved": len(KEYS)} and pool._local())
        save(pool)
        assert load(pool, local_only=True).prefix == len(KEYS)
        cluster.nodes["a"].kill()
        cluster.nodes["a"].start()
        save_again = until(lambda: pool.exists(KEYS, local_only=True).reasons == {"never_saved": len(KEYS)})
        assert save_again


# --- three hosts ------------------------------------------------------------------------------------------------------

HOST = """
import json, sys
import numpy as np
import kvferry
from kvferry.pool.node import PoolNode
import threading
node = PoolNode(sys.argv[1], 32 << 20, heartbeat_timeout_ms=2000)
threading.Thread(target=node.run, daemon=True).start()
print(node.address, flush=True)
pool = None
for line in sys.stdin:
    verb, options = json.loads(line)
    if verb == "connect":
        pool = kvferry.Pool.connect([kvferry.Member(*member) for member in options["members"]])
        print("{}", flush=True)
        continue
    keys = [f"key {i}" for i in range(300)]
    values = np.random.default_rng(1).integers(0, 256, (300, 4096), dtype=np.uint8)
    if verb == "exists":
        outcome = pool.exists(keys, **options)
    elif verb == "save":
        outcome = pool.save(keys, buffers=list(values), **options)
    else:
        into = np.zeros_like(values)
        outcome = pool.load(keys, buffers=list(into), **options)
        assert (into[outcome.ok] == values[outcome.ok]).all()
    print(json.dumps(outcome.outcomes), flush=True)
"""


@pytest.mark.slow
@pytest.mark.deadline(120)
def test_three_hosts(insides: Callable[..., Inside]) -> None:
    """Each node in a network namespace of its own, over TCP, with a client beside it: nothing of one is another's."""
    with network(insides, HOST, 3) as hosts:
        members = [Member(name, host.line()) for name, host in zip("abc", hosts, strict=True)]
        said = owners_of(KEYS, members)

        def ask(at: int, verb: str, **options: Any) -> list[str]:
            words: list[str] = json.loads(hosts[at].ask(json.dumps([verb, {"timeout_ms": 5000} | options])))
            return words

        def of(words: list[str], owner: str) -> set[str]:
            return {word for word, its in zip(words, said, strict=True) if its == owner}

        for host in hosts:
            host.ask(json.dumps(["connect", {"members": [[one.id, one.address] for one in members]}]))
        assert set(ask(0, "save", local_copy=True)) == {"saved"}
        for at in range(3):
            assert set(ask(at, "load")) == {"hit"}
        # Here there is a copy of everything; on another host what its own node owns is found locally, and the rest is not.
        assert set(ask(0, "load", local_only=True)) == set(ask(0, "exists", local_only=True)) == {"hit"}
        words = ask(1, "load", local_only=True)
        assert (of(words, "a"), of(words, "b"), of(words, "c")) == ({"never_saved"}, {"hit"}, {"never_saved"})
        # From here, outside, none of them is on this host.
        with kvferry.Pool.connect(members) as pool:
            assert load(pool).prefix == len(KEYS)
            assert set(load(pool, local_only=True).outcomes) == {"never_saved"}
            assert pool.exists(KEYS, local_only=True).prefix == 0
            # One host is cut off: its share is lost to all others, which have it as copies or not at all.
            hosts.cut(2)
            began = time.monotonic()
            outcome = load(pool, timeout_ms=800)
            assert time.monotonic() - began < 1.5
            assert of(outcome.outcomes, "c") <= {"timeout", "node_lost"}
            assert of(outcome.outcomes, "a") == of(outcome.outcomes, "b") == {"hit"}
            words = ask(1, "load", timeout_ms=800)
            assert of(words, "c") <= {"timeout", "node_lost"}
            assert of(words, "a") == of(words, "b") == {"hit"}
            assert set(ask(0, "load", timeout_ms=800)) == {"hit"}
            hosts.mend(2)
            until(lambda: load(pool).prefix == len(KEYS), 30)
            until(lambda: set(ask(1, "load")) == {"hit"}, 30)
