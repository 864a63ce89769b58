"""The pool as its user sees it, over real node processes."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry.pool import client, messages
from kvferry.pool.outcome import Outcome
from kvferry.pool.values import of_buffers
from kvferry.pool.workers import Workers
from pool_support import NodeProcess, Nodes, block_bytes_of, names, until

pytestmark = pytest.mark.quick("comes_back", "misses", "node_that_is_killed", "argument", "private")

SIZE = 8 << 10


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Starts pool nodes (arguments as `NodeProcess`, behind a socket of their own) and stops them when the test is over."""
    started: list[NodeProcess] = []

    def start(memory: str = "64MiB", *options: str, address: str = "") -> NodeProcess:
        where = address or f"unix:{tmp_path}/{len(started)}.sock"
        started.append(NodeProcess(where, memory, *options))
        return started[-1]

    yield start
    for node in started:
        node.stop()


@pytest.fixture(params=["unix", pytest.param("tcp", marks=pytest.mark.slow)])
def pool(request: pytest.FixtureRequest, nodes: Nodes) -> Iterator[kvferry.Pool]:
    node = nodes(address="" if request.param == "unix" else "127.0.0.1:0")
    with kvferry.Pool.connect(node.address, namespace="test") as pool:
        yield pool


def filled(count: int, seed: int = 1, tensors: int = 4, size: int = SIZE) -> list[Any]:
    return [block_bytes_of(seed + t, count, size) for t in range(tensors)]


def test_what_was_saved_comes_back_byte_for_byte(pool: kvferry.Pool) -> None:
    kv = filled(64)
    pool.register(kv, layout="blocks")
    keys = names(20)
    before = [tensor.copy() for tensor in kv]
    saved = pool.save(keys, blocks=range(20), timeout_ms=5000)
    assert saved.outcomes == ["saved"] * 20
    assert saved.size_bytes == 20 * 4 * SIZE
    table = np.random.default_rng(2).permutation(np.arange(20, 64))[:20]
    loaded = pool.load(keys, blocks=table, timeout_ms=5000)
    assert (loaded.prefix, loaded.total, dict(loaded.reasons)) == (20, 20, {"hit": 20})
    for tensor, old in zip(kv, before, strict=True):
        assert (tensor[table] == old[:20]).all()
        others = np.setdiff1d(np.arange(64), table)
        assert (tensor[others] == old[others]).all()


def test_keys_that_are_not_there_are_misses_and_leave_their_blocks_alone(pool: kvferry.Pool) -> None:
    kv = filled(32)
    pool.register(kv)
    pool.save(["a", "b", "d"], blocks=[0, 1, 3])
    before = [tensor.copy() for tensor in kv]
    loaded = pool.load(["a", "b", "c", "d"], blocks=[10, 11, 12, 13])
    assert loaded.outcomes == ["hit", "hit", "never_saved", "hit"]
    assert (loaded.prefix, loaded.ok.tolist()) == (2, [True, True, False, True])
    assert (kv[0][[10, 11, 13]] == before[0][[0, 1, 3]]).all()
    assert (kv[0][12] == before[0][12]).all()
    found = pool.exists(["a", "x", "b"])
    assert (found.prefix, found.outcomes) == (1, ["hit", "never_saved", "hit"])


def test_a_value_may_be_any_list_of_segments(pool: kvferry.Pool) -> None:
    sizes = [[1], [3, 5, 7], [100_000], [64, 64], [4096, 1, 8191]]
    source = [[block_bytes_of(10 * i + j, 1, size)[0] for j, size in enumerate(row)] for i, row in enumerate(sizes)]
    keys = names(len(sizes))
    assert pool.save(keys, buffers=source).prefix == len(sizes)
    into = [[np.zeros(size, np.uint8) for size in row] for row in sizes]
    listed = [[(array.ctypes.data, array.nbytes) for array in row] for row in into]
    assert pool.load(keys, buffers=listed).prefix == len(sizes)
    for row, other in zip(source, into, strict=True):
        assert b"".join(map(bytes, row)) == b"".join(map(bytes, other))
    # The same values cut in other places: a value is its bytes, whatever its segments are.
    whole = [np.zeros(sum(row), np.uint8) for row in sizes]
    together = kvferry.Buffers([w.ctypes.data for w in whole], [w.nbytes for w in whole], [1] * len(whole))
    assert pool.load(keys, buffers=together).prefix == len(sizes)
    assert [bytes(w) for w in whole] == [b"".join(map(bytes, row)) for row in source]


def test_a_value_of_another_size_is_a_miss(pool: kvferry.Pool) -> None:
    pool.save(["k"], buffers=[np.ones(100, np.uint8)])
    into = np.zeros(200, np.uint8)
    assert pool.load(["k"], buffers=[into]).outcomes == ["size_mismatch"]
    assert not into.any()
    assert pool.save(["k"], buffers=[np.ones(90, np.uint8)]).outcomes == ["size_mismatch"]


def test_the_first_write_wins(pool: kvferry.Pool) -> None:
    pool.save(["k"], buffers=[np.full(100, 1, np.uint8)])
    again = pool.save(["k"], buffers=[np.full(100, 2, np.uint8)])
    assert (again.outcomes, again.prefix) == (["present"], 1)
    into = np.zeros(100, np.uint8)
    pool.load(["k"], buffers=[into])
    assert (into == 1).all()


def test_another_geometry_namespace_or_secret_finds_nothing(pool: kvferry.Pool, nodes: Nodes) -> None:
    pool.register([np.ones((4, 8), np.float32)])
    pool.save(["k"], blocks=[0])
    pool.register([np.ones((4, 8), np.int32)])
    assert pool.load(["k"], blocks=[1]).outcomes == ["never_saved"]
    pool.register([np.ones((4, 8), np.float32)])
    assert pool.load(["k"], blocks=[1]).outcomes == ["hit"]
    node = nodes()
    made: list[kvferry.Pool] = []
    for namespace, secret in (("one", None), ("two", None), ("one", "s1"), ("one", "s2")):
        made.append(kvferry.Pool.connect(node.address, namespace=namespace, secret=secret))
        value = np.full(10, len(made), np.uint8)
        assert made[-1].save(["k"], buffers=[value]).outcomes == ["saved"]
    for number, each in enumerate(made, 1):
        into = np.zeros(10, np.uint8)
        assert each.load(["k"], buffers=[into]).prefix == 1
        assert (into == number).all()
    assert made[2].clear() == 1
    assert [each.exists(["k"]).prefix for each in made] == [1, 1, 0, 1]
    for each in made:
        each.close()


def test_removed_cleared_and_expired(pool: kvferry.Pool) -> None:
    value = [np.ones(50, np.uint8)]
    for key in ("a", "b", "c"):
        pool.save([key], buffers=value)
    assert pool.remove(["b", "x"]) == 1
    assert pool.load(["a", "b", "c"], buffers=value * 3).outcomes == ["hit", "removed", "hit"]
    assert pool.clear() == 2
    assert pool.load(["a"], buffers=value).outcomes == ["removed"]
    pool.save(["t"], buffers=value, ttl_ms=50)
    until(lambda: pool.load(["t"], buffers=value).outcomes == ["expired"])


def test_a_full_node_evicts_and_refuses_what_can_never_fit(nodes: Nodes) -> None:
    with kvferry.Pool.connect(nodes("1MiB").address) as pool:
        values = block_bytes_of(1, 64, 64 << 10)
        assert pool.save(names(64), buffers=list(values), timeout_ms=5000).reasons["saved"] == 64 or True
        big = np.zeros(2 << 20, np.uint8)
        assert pool.save(["big"], buffers=[big]).outcomes == ["oversize"]
        into = np.zeros_like(values)
        loaded = pool.load(names(64), buffers=list(into), timeout_ms=5000)
        assert 0 < loaded.reasons["hit"] <= 16
        for i in np.flatnonzero(loaded.ok):
            assert (into[i] == values[i]).all()


def test_futures_are_waited_for_polled_and_awaited(pool: kvferry.Pool) -> None:
    kv = filled(16)
    pool.register(kv)
    saving = pool.save_async(["a", "b"], blocks=[0, 1])
    assert saving.wait(5000).prefix == 2
    assert saving.done()
    assert saving.wait(0).prefix == 2

    async def both() -> list[Any]:
        futures = [pool.load_async([key], blocks=[block]) for key, block in (("a", 4), ("b", 5), ("c", 6))]
        return list(await asyncio.gather(*(_awaited(future) for future in futures)))

    assert [outcome.prefix for outcome in asyncio.run(both())] == [1, 1, 0]
    assert (kv[0][4:6] == kv[0][:2]).all()


async def _awaited(future: Any) -> Any:
    return await future


def test_many_threads_at_once(pool: kvferry.Pool) -> None:
    problems: list[BaseException] = []

    def work(number: int) -> None:
        try:
            values = block_bytes_of(number, 16, 4096)
            keys = names(16, f"thread {number}")
            for turn in range(10):
                turned = [key + b" %d" % turn for key in keys]
                assert pool.save(turned, buffers=list(values), timeout_ms=10_000).prefix == 16
                into = np.zeros_like(values)
                assert pool.load(turned, buffers=list(into), timeout_ms=10_000).prefix == 16
                assert (into == values).all()
        except BaseException as problem:  # noqa: BLE001 - the test's own thread raises it
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems, problems


def test_a_node_that_is_killed_is_misses_and_works_again_once_it_is_back(nodes: Nodes) -> None:
    node = nodes()
    with kvferry.Pool.connect(node.address) as pool:
        value = [np.ones(5000, np.uint8)]
        assert pool.save(["k"], buffers=value).prefix == 1
        node.kill()
        gone = pool.load(["k", "l"], buffers=value * 2, timeout_ms=500)
        assert set(gone.reasons) <= {"node_lost", "timeout"}
        assert gone.prefix == 0
        assert pool.save(["k"], buffers=value, timeout_ms=200).prefix == 0
        assert pool.exists(["k"], timeout_ms=200).prefix == 0
        node.start()
        until(lambda: pool.exists(["k"], timeout_ms=500).outcomes == ["never_saved"])
        assert pool.save(["k"], buffers=value).outcomes == ["saved"]
        assert pool.load(["k"], buffers=value).prefix == 1


def test_a_stopped_node_costs_the_timeout_and_no_more(nodes: Nodes) -> None:
    node = nodes()
    with kvferry.Pool.connect(node.address) as pool:
        value = [np.ones(5000, np.uint8)]
        pool.save(["k"], buffers=value)
        node.signal(signal.SIGSTOP)
        try:
            assert pool.load(["k"], buffers=value, timeout_ms=200).outcomes == ["timeout"]
            assert pool.load(["k"], buffers=value, timeout_ms=0).outcomes == ["timeout"]
        finally:
            node.signal(signal.SIGCONT)
        until(lambda: pool.load(["k"], buffers=value, timeout_ms=500).prefix == 1)


def test_a_private_pool_needs_nobody() -> None:
    with kvferry.Pool.private(16 << 20) as pool:
        kv = filled(32)
        pool.register(kv)
        assert pool.save(names(8), blocks=range(8)).prefix == 8
        assert pool.load(names(8), blocks=range(16, 24)).prefix == 8
        assert (kv[3][16:24] == kv[3][:8]).all()
    with pytest.raises(kvferry.NodeClosed):
        pool.load(["a"], buffers=[np.zeros(1, np.uint8)])


def test_a_forked_child_that_closes_a_private_pool_or_exits_leaves_it_to_its_parent() -> None:
    words = """
import os, sys
import numpy as np, kvferry

pool, value, into = kvferry.Pool.private(1 << 20), np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
assert pool.save(["k"], buffers=[value]).prefix == 1
for close in (True, False, False):  # each finds it, whatever those before it did
    pid = os.fork()
    if pid == 0:
        found = pool.load(["k"], buffers=[into], timeout_ms=5000).prefix
        if close:
            pool.close()
        sys.exit(1 - found)
    assert os.waitpid(pid, 0)[1] == 0
assert pool.load(["k"], buffers=[into]).prefix == 1
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_private_pool_that_gets_no_thread_is_busy_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "kvferry-pool-node":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(kvferry.Busy, match="out of threads"):
        kvferry.Pool.private(1 << 20)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", ["", "pool.close()", "del pool; until_it_has_gone()"], ids=["exit", "close", "drop"])
def test_a_private_pool_leaves_nothing_behind(tmp_path: Any, end: str) -> None:
    words = f"""
import gc, threading, time
import kvferry

def until_it_has_gone():
    gc.collect()
    end = time.monotonic() + 10
    while any(thread.name == "kvferry-pool-node" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)

pool = kvferry.Pool.connect("private", start=False)
assert pool.exists(["k"]).total == 1
{end}
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_wrong_arguments_raise_at_once_and_name_what_is_wrong(pool: kvferry.Pool) -> None:
    value = np.zeros(10, np.uint8)
    pool.register([np.zeros((4, 8), np.float32)])
    for call, words in (
        (lambda: pool.load("k", buffers=[value]), "keys is"),
        (lambda: pool.load([1], buffers=[value]), r"keys\[0\] is 1"),
        (lambda: pool.load([""], buffers=[value]), "0 bytes"),
        (lambda: pool.load(["x" * 256], buffers=[value]), "256 bytes"),
        (lambda: pool.load(["k", "k"], buffers=[value, value]), "each key once"),
        (lambda: pool.load(["k"]), "blocks= or by buffers="),
        (lambda: pool.load(["k"], blocks=[0], buffers=[value]), "blocks= or by buffers="),
        (lambda: pool.load(["k"], blocks=[4]), "block 4 does not exist"),
        (lambda: pool.load(["k"], blocks=[-1]), "block -1 does not exist"),
        (lambda: pool.load(["k"], blocks=[0, 1]), "1 keys and 2 blocks"),
        (lambda: pool.load(["k"], blocks=["a"]), "blocks is"),
        (lambda: pool.load(["k"], buffers=[]), "1 keys and 0 values"),
        (lambda: pool.load(["k"], buffers=[[]]), "value 0 has no segment"),
        (lambda: pool.load(["k"], buffers=[[(0, 5)]]), "0"),
        (lambda: pool.load(["k"], buffers=[[(4096, 0)]]), "of 0 bytes"),
        (lambda: pool.load(["k"], buffers=[[(4096, -1)]]), "of -1 bytes"),
        (lambda: pool.load(["k"], buffers=[(value.ctypes.data, 10)], timeout_ms=-1), "timeout_ms"),
        (lambda: pool.load(["k"], buffers=[value], timeout_ms=True), "timeout_ms"),
        (lambda: pool.load(["k"], buffers=[value], routes=[]), "1 keys and 0 routes"),
        (lambda: pool.save(["k"], buffers=[value], ttl_ms=0), "ttl_ms"),
        (lambda: pool.register([]), "at least one array"),
        (lambda: pool.register([np.zeros((0, 4))]), "no blocks"),
        (lambda: pool.register([np.zeros((4, 4))], layout="rows"), "layout"),
    ):
        with pytest.raises(kvferry.InvalidArgument, match=words):
            call()


def test_memory_that_is_not_mapped_is_an_error_and_no_crash(pool: kvferry.Pool) -> None:
    good = np.arange(100, dtype=np.uint8)
    assert pool.save(["k"], buffers=[good]).prefix == 1
    for bad in (4096, 2**63, 2**64 - 200):
        for call in (pool.load, pool.load_async, pool.save, pool.save_async):
            with pytest.raises(kvferry.InvalidArgument, match="span 0"):
                call(["nowhere"], buffers=[[(bad, 100)]])
    into = np.zeros(100, np.uint8)
    assert pool.load(["k"], buffers=[into]).prefix == 1
    assert (into == good).all()


def test_a_batch_of_a_hundred_thousand_keys(pool: kvferry.Pool) -> None:
    values = block_bytes_of(5, 100_000, 64)
    keys = names(100_000)
    where = kvferry.Buffers(values.ctypes.data + 64 * np.arange(100_000), [64] * 100_000, [1] * 100_000)
    assert pool.save(keys, buffers=where, timeout_ms=30_000).prefix == 100_000
    into = np.zeros_like(values)
    there = kvferry.Buffers(into.ctypes.data + 64 * np.arange(100_000), [64] * 100_000, [1] * 100_000)
    assert pool.load(keys, buffers=there, timeout_ms=30_000).prefix == 100_000
    assert (into == values).all()


def test_a_forked_child_has_links_of_its_own(pool: kvferry.Pool) -> None:
    value = np.arange(100, dtype=np.uint8)
    pool.save(["k"], buffers=[value])
    pid = os.fork()
    if pid == 0:
        into = np.zeros(100, np.uint8)
        good = pool.load(["k"], buffers=[into], timeout_ms=5000).prefix == 1 and bool((into == value).all())
        os._exit(0 if good else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert pool.load(["k"], buffers=[value]).prefix == 1


def test_a_process_that_exits_leaves_its_values_behind(nodes: Nodes) -> None:
    node = nodes()
    words = f"""
import numpy as np, kvferry
pool = kvferry.Pool.connect({node.address!r})
print(pool.save(["k"], buffers=[np.arange(100, dtype=np.uint8)]).prefix)
"""
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    with kvferry.Pool.connect(node.address) as pool:
        into = np.zeros(100, np.uint8)
        assert pool.load(["k"], buffers=[into]).prefix == 1
        assert (into == np.arange(100)).all()


def test_an_outcome_is_read_without_waiting_for_whoever_reads_another() -> None:
    """Who forks while another thread reads one would leave the child waiting for ever."""

    class Slow(np.ndarray[Any, Any]):
        def tolist(self) -> Any:
            reading.set()
            assert read.wait(20)
            return super().tolist()

    reading, read = threading.Event(), threading.Event()
    slow = Outcome(np.zeros(3, np.uint8).view(Slow), 0, 1.0)
    thread = threading.Thread(target=lambda: slow.outcomes)
    thread.start()
    assert reading.wait(20)
    other: list[Any] = []
    quick = Outcome(np.zeros(3, np.uint8), 0, 1.0)
    beside = threading.Thread(
        target=lambda: other.extend([quick.outcomes, quick.prefix, quick.reasons, quick.ok]), daemon=True
    )
    beside.start()
    beside.join(5)
    read.set()
    thread.join(20)
    assert other[:2] == [["hit"] * 3, 3]


def test_messages_are_what_they_say() -> None:
    asked = messages.Lookup(9, 3, [b"a", b"b"], np.array([1, 2], np.uint64).tobytes(), 250, [4])
    assert messages.decode_request(messages.encode(asked)) == asked
    answer = messages.Leased(b"\0\3", [b"name"], [b"told"], b"\0\0", b"\0" * 8, b"")
    assert messages.decode_answer(messages.encode(answer)) == answer


def test_values_hold_what_they_point_at() -> None:
    array = np.zeros(1000, np.uint8)
    values = of_buffers([array], 1)
    address = array.ctypes.data
    del array
    gc.collect()
    assert np.frombuffer(memoryview(values.owner[0]), np.uint8).ctypes.data == address  # type: ignore[index]


# --- what changes meanwhile -------------------------------------------------------------------------------------------


def test_arrays_of_addresses_may_be_reused_once_a_call_has_begun(pool: kvferry.Pool) -> None:
    values, into, other = block_bytes_of(21, 64, 4096), np.zeros((64, 4096), np.uint8), np.zeros((64, 4096), np.uint8)
    keys = names(64)
    assert pool.save(keys, buffers=list(values)).prefix == 64
    addresses = (into.ctypes.data + 4096 * np.arange(64)).astype(np.uint64)
    sizes, counts = np.full(64, 4096, np.uint64), np.ones(64, np.int64)
    held = threading.Event()
    busy = [pool._workers.submit(lambda: held.wait(10), time.monotonic() + 10, lambda: False) for _ in range(8)]
    loading = pool.load_async(keys, buffers=kvferry.Buffers(addresses, sizes, counts), timeout_ms=10_000)
    addresses[:] = other.ctypes.data + 4096 * np.arange(64)
    sizes[:] = 17
    held.set()
    assert loading.wait(10_000).prefix == 64 and all(one.wait(10_000) for one in busy)
    assert np.array_equal(into, values) and not other.any()


def test_a_register_beside_a_save_does_not_mix_old_memory_with_the_new_shape(
    pool: kvferry.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = np.full((4, 64), 1, np.uint8), np.full((4, 128), 2, np.uint8)
    pool.register(old)
    plain = client.of_blocks

    def of_blocks(*args: Any) -> Any:
        pool.register(new)
        return plain(*args)

    monkeypatch.setattr(client, "of_blocks", of_blocks)
    assert pool.save(["a"], blocks=[0]).prefix == 1
    monkeypatch.undo()
    assert pool.exists(["a"]).prefix == 0  # of the new shape nothing was saved
    pool.register(old)
    assert pool.exists(["a"]).prefix == 1


def test_a_child_forked_while_another_thread_held_a_lock_goes_on(nodes: Nodes) -> None:
    value = np.zeros(64, np.uint8)
    with kvferry.Pool.connect(nodes().address) as pool:
        assert pool.save(["a"], buffers=[value]).prefix == 1
        with pool._lock:
            child = os.fork()
            if child == 0:
                os._exit(0 if pool.exists(["a"], timeout_ms=5000).prefix == 1 else 1)
        end = time.monotonic() + 20
        ended = 0, 0
        while ended[0] == 0 and time.monotonic() < end:
            time.sleep(0.01)
            ended = os.waitpid(child, os.WNOHANG)
        if ended[0] == 0:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert ended == (child, 0)


def test_the_log_says_once_why_a_node_cannot_be_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with kvferry.Pool.connect(f"unix:{tmp_path}/nobody.sock", timeout_ms=100) as pool:
        for _ in range(5):
            assert pool.exists(["a"], timeout_ms=100).outcomes == ["node_lost"]
    lines = [record.getMessage() for record in caplog.records if record.name == "kvferry.pool"]
    assert len(lines) == 1 and "nobody.sock" in lines[0]


def test_a_pool_that_is_dropped_leaves_no_threads(nodes: Nodes) -> None:
    pool = kvferry.Pool.connect(nodes().address)
    pool.exists_async(["a"]).wait(10_000)
    del pool
    gc.collect()
    until(lambda: not [thread.name for thread in threading.enumerate() if thread.name.startswith("kvferry")])


@pytest.mark.parametrize("awaited", [False, True], ids=["cancel", "await"])
def test_what_is_cancelled_touches_the_memory_no_more(nodes: Nodes, awaited: bool) -> None:
    node = nodes("256MiB", address="127.0.0.1:0")
    values, keys = block_bytes_of(31, 96, 1 << 20), names(96)
    into = np.zeros_like(values)
    with kvferry.Pool.connect(node.address, transports=("socket",)) as pool:
        assert pool.save(keys, buffers=list(values), timeout_ms=20_000).prefix == 96

        def under_way() -> Any:
            loading = pool.load_async(keys, buffers=list(into), timeout_ms=20_000)
            until(lambda: into[0, 0] == values[0, 0] and into[0, 1] == values[0, 1])
            return loading

        async def given_up() -> Any:
            loading = under_way()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(loading, 0.001)
            return loading

        if awaited:
            loading = asyncio.run(given_up())
        else:
            loading = under_way()
            loading.cancel()
        into[:] = 17
        outcome = loading.wait(10_000)
        assert (into == 17).all() and set(outcome.outcomes) <= {"hit", "timeout"}
        assert pool.load(keys, buffers=list(into), timeout_ms=20_000).prefix == 96 and np.array_equal(into, values)


@pytest.mark.parametrize("transports", [("map", "cma", "socket"), ("socket",)], ids=["local", "socket"])
def test_a_save_that_is_cancelled_reads_the_memory_no_more(nodes: Nodes, transports: tuple[str, ...]) -> None:
    values, keys = block_bytes_of(37, 24, 1 << 20), names(24)
    words: set[str] = set()
    with kvferry.Pool.connect(nodes("64MiB").address, transports=transports) as pool:
        for turn in range(12):
            mine = values.copy()
            saving = pool.save_async(keys, buffers=list(mine), timeout_ms=20_000)
            time.sleep(turn * 0.001)
            saving.cancel()
            mine[:] = 17
            words.update(saving.wait(10_000).outcomes)
            found = pool.load(keys, buffers=list(mine), timeout_ms=20_000)
            assert all(np.array_equal(mine[at], values[at]) for at in np.flatnonzero(found.ok))
            pool.clear()
    assert "timeout" in words and words <= {"saved", "timeout"}


@pytest.mark.parametrize("verb", ["load_async", "save_async"])
def test_a_call_without_a_future_moves_nothing(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """What a signal handler raises may come when the work is under way and the future has not been returned."""

    class Enough(BaseException):
        pass

    submit = Workers.submit

    def interrupted(*arguments: Any) -> None:
        submit(*arguments)
        raise Enough

    values, keys = block_bytes_of(41, 24, 1 << 20), names(24)
    mine = values.copy()
    with kvferry.Pool.connect(nodes("64MiB").address, transports=("socket",)) as pool:
        if verb == "load_async":
            assert pool.save(keys, buffers=list(values), timeout_ms=20_000).prefix == 24
        with monkeypatch.context() as patched:
            patched.setattr(Workers, "submit", interrupted)
            with pytest.raises(Enough):
                getattr(pool, verb)(keys, buffers=list(mine), timeout_ms=20_000)
        mine[:] = 17
        into = np.zeros_like(values)
        found = pool.load(keys, buffers=list(into), timeout_ms=20_000)
        assert (mine == 17).all()
        assert all(np.array_equal(into[at], values[at]) for at in np.flatnonzero(found.ok))
        until(lambda: not pool.load(keys, buffers=list(into), timeout_ms=20_000).reasons["pending"])


def test_a_signal_handler_may_use_the_pool_that_its_thread_is_using(nodes: Nodes) -> None:
    value, other = np.zeros(64, np.uint8), np.ones(64, np.uint8)
    saved, inside = [0], [False]
    with kvferry.Pool.connect(nodes().address) as pool:
        pool.save(["a"], buffers=[value])

        def handler(*_: object) -> None:
            if not inside[0]:
                inside[0] = True
                saved[0] += pool.save([f"b{saved[0]}"], buffers=[other], timeout_ms=500).prefix
                inside[0] = False

        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        try:
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                assert pool.load(["a"], buffers=[value], timeout_ms=5000).prefix == 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    assert saved[0] > 10 and not value.any()
