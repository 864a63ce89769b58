"""Over real pool nodes: start order, recovery, nodes that die or stand still, threads, forks, pointers that lead nowhere."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ems_support import buffer, kv_cache, refused, rows, v1_config

from ems import (
    CcConfig,
    CcKvOption,
    CcResult,
    ContextCaching,
    Ems,
    EmsConfig,
    EmsErrorCode,
    EmsException,
    KvBufferWrapper,
    PrimaryKey,
    facade,
)
from pool_support import NodeProcess, until
from support import Peer

pytestmark = pytest.mark.quick("before_the_pool_is_up", "that_was_killed", "lead_nowhere", "many_at_once")
V0 = EmsConfig(cc_config=CcConfig(rank_id=0, device_id=0, model_id="a-model"))
OPTION = CcKvOption(timeout=3000)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a process that has not initialised yet."""
    monkeypatch.setattr(facade, "_processes", {})
    yield
    pool = facade._here().pool
    if pool is not None:
        pool.close()


@pytest.fixture
def own_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], NodeProcess]]:
    """Starts a node for this test alone, where ``KVFERRY_POOL`` says already that it is."""
    address = f"unix:{tmp_path}/pool.sock"
    monkeypatch.setenv("KVFERRY_POOL", address)
    started: list[NodeProcess] = []

    def start() -> NodeProcess:
        started.append(NodeProcess(address))
        return started[0]

    yield start
    for node in started:
        node.stop()


def value(number: int, size: int = 4096) -> Any:
    return np.random.default_rng(number).integers(0, 256, size, np.uint8)


def save_and_load(cc: Any, key: str, number: int = 0) -> None:
    saved, loaded = value(number), np.zeros(4096, np.uint8)
    assert cc.save(OPTION, [key], [[buffer(saved)]]) == CcResult(1, 1)
    assert cc.load(OPTION, [key], [[buffer(loaded)]]) == CcResult(1, 1)
    np.testing.assert_array_equal(saved, loaded)


# -- start order and recovery


@pytest.mark.usefixtures("fresh")
def test_init_before_the_pool_is_up_then_healthy_then_init_again(own_node: Callable[[], NodeProcess]) -> None:
    assert Ems.check_health() is False
    with refused(code=EmsErrorCode.EMS_RECOVERD_ERROR):
        Ems.init(V0)
    assert Ems.get_cc() is None
    assert Ems.check_health() is False
    own_node()
    until(Ems.check_health)
    again = threading.Thread(target=Ems.init, args=(V0,), daemon=True)
    again.start()
    again.join(10)
    cc = Ems.get_cc()
    assert isinstance(cc, ContextCaching)
    save_and_load(cc, "a")


@pytest.mark.usefixtures("fresh")
def test_a_node_that_was_killed_is_an_error_until_it_is_back(own_node: Callable[[], NodeProcess]) -> None:
    node = own_node()
    Ems.init(V0)
    cc = Ems.get_cc()
    assert cc is not None
    save_and_load(cc, "a")
    node.kill()
    loaded = np.zeros(4096, np.uint8)
    begun = time.monotonic()
    with refused(code=EmsErrorCode.EMS_IO_ERROR):
        cc.load(OPTION, ["a"], [[buffer(loaded)]])
    assert time.monotonic() - begun < 4
    assert Ems.check_health() is False
    assert cc.exists(["a"]) == CcResult(0, 1)
    node.start()
    until(Ems.check_health)
    assert cc.load(OPTION, ["a"], [[buffer(loaded)]]) == CcResult(0, 1)  # the cache is empty, and that is no error
    save_and_load(cc, "a")


@pytest.mark.usefixtures("fresh")
def test_a_node_that_stands_still_is_a_timeout_and_writes_nothing_later(own_node: Callable[[], NodeProcess]) -> None:
    node = own_node()
    Ems.init(V0)
    cc = Ems.get_cc()
    assert cc is not None
    save_and_load(cc, "a")
    node.signal(signal.SIGSTOP)
    try:
        loaded = np.zeros(4096, np.uint8)
        begun = time.monotonic()
        futures = [cc.async_load(CcKvOption(timeout=300), ["a"], [[buffer(loaded)]])]
        futures.append(cc.async_save(CcKvOption(timeout=300), ["b"], [[buffer(loaded)]]))
        for future in futures:
            with refused("300 ms", EmsErrorCode.EMS_IO_TIMEOUT):
                future.result()
            assert cc.is_ready(future)
        assert time.monotonic() - begun < 2
        begun = time.monotonic()
        assert cc.exists(["a"], CcKvOption(timeout=200)) == CcResult(0, 1)
        assert Ems.check_health() is False
        assert time.monotonic() - begun < 3
    finally:
        node.signal(signal.SIGCONT)
    until(Ems.check_health)
    assert not loaded.any()
    assert cc.exists(["b"]) == CcResult(0, 1)
    assert cc.load(OPTION, ["a"], [[buffer(loaded)]]) == CcResult(1, 1)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("word", ["off", "private"])
def test_a_pool_that_is_off_misses_and_a_private_one_works(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv("KVFERRY_POOL", word)
    Ems.init(V0)
    cc = Ems.get_cc()
    assert cc is not None
    assert Ems.check_health() is True
    if word == "private":
        save_and_load(cc, "a")
    else:
        assert cc.save(OPTION, ["a"], [[buffer(value(0))]]) == CcResult(0, 1)
        assert cc.load(OPTION, ["a"], [[buffer(value(0))]]) == CcResult(0, 1)
        assert cc.exists(["a"]) == CcResult(0, 1)


@pytest.mark.usefixtures("fresh")
def test_with_nothing_configured_a_node_of_the_users_own_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.delenv("KVFERRY_POOL", raising=False)
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    try:
        until(Ems.check_health)
        Ems.init(V0)
        cc = Ems.get_cc()
        assert cc is not None
        save_and_load(cc, "a")
        loaded = np.zeros(4096, np.uint8)
        assert cc.load(CcKvOption(read_local_only=True), ["a"], [[buffer(loaded)]]) == CcResult(1, 1)
    finally:
        subprocess.run(
            [sys.executable, "-m", "kvferry.cli", "pool", "stop"], check=True, timeout=30, stdout=subprocess.DEVNULL
        )


@pytest.mark.usefixtures("fresh")
def test_two_nodes_one_of_which_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys of one distribute key lie on one node; the other node's death costs them nothing, and is no error."""
    nodes = [NodeProcess(f"unix:{tmp_path}/{number}.sock") for number in range(2)]
    monkeypatch.setenv("KVFERRY_POOL", ",".join(node.address for node in nodes))
    try:
        Ems.init(V0)
        cc = Ems.get_cc()
        assert cc is not None
        groups = [[PrimaryKey(f"group {group}", f"{index}") for index in range(4)] for group in range(12)]
        option, one = CcKvOption(write_rcache=False, timeout=3000), value(0)
        for group in groups:
            assert cc.save(option, group, [[buffer(one)]] * 4) == CcResult(4, 4)
        nodes[0].kill()
        results = [cc.load(option, group, [[buffer(np.zeros(4096, np.uint8))] for _ in group]) for group in groups]
        assert set(results) == {CcResult(4, 4), CcResult(0, 4)}
        assert Ems.check_health() is True
    finally:
        for node in nodes:
            node.stop()


# -- on one node that stays


@pytest.mark.parametrize("call", ["load", "async_load", "save", "async_save"])
def test_pointers_that_lead_nowhere_are_invalid_arguments(real_cc: Callable[..., Any], call: str) -> None:
    cc = real_cc()
    save_and_load(cc, "a")
    keys = ["a"] if "load" in call else ["b"]
    with refused():
        answer = getattr(cc, call)(OPTION, keys, [[KvBufferWrapper(4096, 4096)]])
        answer.result()
    save_and_load(cc, "c")


def test_timeout_0_is_over_at_once(real_cc: Callable[..., Any]) -> None:
    cc, loaded = real_cc(), np.zeros(4096, np.uint8)
    save_and_load(cc, "a")
    begun = time.monotonic()
    for call in (cc.async_load, cc.async_save):
        future = call(CcKvOption(timeout=0), ["a"], [[buffer(loaded)]])
        with refused(code=EmsErrorCode.EMS_IO_TIMEOUT):
            future.result()
    with refused(code=EmsErrorCode.EMS_IO_TIMEOUT):
        cc.load(CcKvOption(timeout=0), ["a"], [[buffer(loaded)]])
    assert cc.exists(["a"], CcKvOption(timeout=0)) == CcResult(0, 1)
    assert time.monotonic() - begun < 1
    assert not loaded.any()


def test_many_threads_and_futures(real_cc: Callable[..., Any]) -> None:
    cc, problems = real_cc(), []

    def work(thread: int) -> None:
        try:
            saved = [value(100 * thread + index) for index in range(10)]
            loaded = [np.zeros(4096, np.uint8) for _ in range(10)]
            keys = [f"{thread}-{index}" for index in range(10)]
            saves = [cc.async_save(OPTION, [key], [[buffer(one)]]) for key, one in zip(keys, saved, strict=True)]
            assert [future.result() for future in saves] == [CcResult(1, 1)] * 10
            loads = [cc.async_load(OPTION, [key], [[buffer(one)]]) for key, one in zip(keys, loaded, strict=True)]
            assert [cc.get_result(future) for future in loads] == [CcResult(1, 1)] * 10
            np.testing.assert_array_equal(saved, loaded)
        except (AssertionError, EmsException) as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not problems


def test_many_at_once_save_the_same_keys_and_all_succeed(real_cc: Callable[..., Any]) -> None:
    """As ranks and instances do: each key is stored once, and a success says that it is there."""
    caches = [real_cc() for _ in range(4)]
    same = [value(index, 1 << 16) for index in range(32)]
    keys = [f"key {index}" for index in range(32)]
    results: list[Any] = []

    def work(cc: Any) -> None:
        result = cc.save(OPTION, keys, [[buffer(one)] for one in same])
        results.append((result, cc.exists(keys)))

    threads = [threading.Thread(target=work, args=(cc,)) for cc in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == [(CcResult(32, 32), CcResult(32, 32))] * 4


def test_concurrent_loads_into_the_same_buffers(real_cc: Callable[..., Any]) -> None:
    """Allowed: of two different values each byte is one of the two's."""
    cc, ones, twos = real_cc(), np.full(1 << 16, 1, np.uint8), np.full(1 << 16, 2, np.uint8)
    cc.save(OPTION, ["ones", "twos"], [[buffer(ones)], [buffer(twos)]])
    around = np.zeros((1 << 16) + 128, np.uint8)
    loaded = around[64:-64]
    futures = [cc.async_load(OPTION, [key], [[buffer(loaded)]]) for key in ("ones", "twos") * 8]
    assert [future.result() for future in futures] == [CcResult(1, 1)] * 16
    assert set(np.unique(loaded)) <= {1, 2}
    assert not around[:64].any()
    assert not around[-64:].any()


def test_mla_ranks_store_each_block_once_and_all_load_it(real_cc: Callable[..., Any]) -> None:
    source, slots = kv_cache(), list(range(32))
    form = {"slot_mapping": slots, "hashes": list(range(8)), "offsets": [4] * 8}
    ranks = [real_cc(v1_config(tp_world_size=4, rank_in_tp_group=rank, kvcache_type="MLA")) for rank in range(4)]
    for cc in ranks:
        cc.register_kvcache(source)
    futures = [cc.async_save(**form, option=OPTION) for cc in ranks]
    assert [future.result() for future in futures] == [CcResult(8, 8)] * 4
    for cc in ranks:
        target = kv_cache(seed=None)
        cc.register_kvcache(target)
        assert cc.load(**form, option=OPTION) == CcResult(8, 8)
        np.testing.assert_array_equal(rows(target, slots), rows(source, slots))


FORKING = """
import os

import numpy as np
from ems import CcConfig, CcKvOption, CcResult, Ems, EmsConfig, KvBufferWrapper

config = EmsConfig(cc_config=CcConfig(rank_id=0, device_id=0, model_id="forks"))
option = CcKvOption(timeout=5000)

def works(key, saved):
    loaded = np.zeros_like(saved)
    cc = Ems.get_cc()
    cc.save(option, [key], [[KvBufferWrapper(saved.ctypes.data, saved.nbytes)]])
    found = cc.load(option, [key], [[KvBufferWrapper(loaded.ctypes.data, loaded.nbytes)]])
    return found == CcResult(1, 1) and (saved == loaded).all()

def child(key):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            fresh = Ems.get_cc() is None
            Ems.init(config)
            os.write(writing, b"fine" if fresh and works(key, np.full(4096, 3, np.uint8)) else b"not so")
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said

def run():
    before = child("before init")
    Ems.init(config)
    here = works("parent", np.full(4096, 1, np.uint8))
    after = child("after init")
    return before, here, after, works("parent again", np.full(4096, 2, np.uint8))
"""


def test_init_after_a_fork(peers: Callable[..., Peer], node: NodeProcess) -> None:
    forking = peers(FORKING, env={"KVFERRY_POOL": node.address})
    assert forking.call("run") == (b"fine", True, b"fine", True)


def test_a_process_ends_with_requests_in_flight(peers: Callable[..., Peer], node: NodeProcess) -> None:
    ending = peers(
        """
        import numpy as np
        from ems import CcConfig, CcKvOption, Ems, EmsConfig, KvBufferWrapper

        Ems.init(EmsConfig(cc_config=CcConfig(rank_id=0, device_id=0, model_id="ends")))
        memory = np.zeros(1 << 24, np.uint8)

        def submit():
            for index in range(8):
                value = [[KvBufferWrapper(memory.ctypes.data, memory.nbytes)]]
                Ems.get_cc().async_save(CcKvOption(), [f"{index}"], value)
        """,
        env={"KVFERRY_POOL": node.address},
    )
    ending.call("submit")
    ending.close()
    assert ending.wait() == 0
