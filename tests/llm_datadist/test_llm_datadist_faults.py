"""What a vendor's caller sees when something fails in the middle: which status, how soon, and that it goes on afterwards."""

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from datadist_side import Side, status_of
from ports import LOOPBACK

from cgroup_support import memory_cgroup
from llm_datadist import LLMDataDist, LLMException, LLMRole, LLMStatusCode, _rules
from namespace_support import AWAIT_CABLE, INNER, OUTER, Inside, cable
from support import Peer

pytestmark = pytest.mark.slow

HERE, THERE, MODEL = 1, 0, 3
BLOCKS, BLOCK = 64, [1 << 18]  # 64 MiB of float32
SUCCESS, FAILED, TIMEOUT = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_FAILED, LLMStatusCode.LLM_TIMEOUT
NOT_YET_LINK, PARAM_INVALID = LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_PARAM_INVALID
GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NOT_INITIALISED = -1  # a RuntimeError: asked for the cache manager after `finalize`
LARGEST_ID = (1 << 64) - 1
SOON_S = 2.0
REMOTE = {"enable_remote_cache_accessible": True}  # without it nothing is pushed


class FaultSide(Side):
    def __init__(self, cluster_id: int, settings: "dict[str, Any] | None" = None) -> None:
        super().__init__(cluster_id, **(settings or {}))
        self.stopping = threading.Event()

    def big(self, value: float) -> int:
        cache = self.register([BLOCKS, *BLOCK], 1, blocks=True, model=MODEL)
        self.fill_tensor(cache, 0, value)
        return cache

    def value_of(self, cache_id: int) -> "set[float]":
        """What stands in its blocks: one value where all is well."""
        return {float(value) for value in np.unique(self.arrays[cache_id][0])}

    def use_up_descriptors(self) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        self.used: list[int] = []
        with contextlib.suppress(OSError):
            while True:
                self.used.append(os.open("/dev/null", os.O_RDONLY))

    def give_descriptors_back(self) -> None:
        for descriptor in self.used:
            os.close(descriptor)

    def switch(self, port: int) -> int:
        try:
            self.datadist.switch_role(LLMRole.MIX, {"llm.listenIpInfo": f"{LOOPBACK}:{port}"})
        except LLMException as error:
            return int(error.status_code)
        return int(SUCCESS)


class Load:
    """Threads that pull and push blocks of their own between a cache here and one there, until something fails."""

    def __init__(self, side: FaultSide, far: int, cache_id: int, threads: int = 3, *, pushes: bool = True) -> None:
        self.side, self.far, self.cache_id, self.pushes = side, far, cache_id, pushes
        self.statuses: set[int] = set()
        self.moved = 0
        self.stopping = False
        self.threads = [threading.Thread(target=self._work, args=(number,)) for number in range(threads)]
        for thread in self.threads:
            thread.start()
        until(lambda: self.moved > 5, "bytes move")

    def _work(self, number: int) -> None:
        key, mine = ("blocks", self.far, MODEL), list(range(number, BLOCKS, len(self.threads)))
        while not self.stopping:
            try:
                self.side.pull_blocks(key, self.cache_id, mine, mine)
                self.moved += 1
                if self.pushes:
                    self.side.push_blocks(key, self.cache_id, mine, mine)
            except LLMException as error:
                self.statuses.add(int(error.status_code))
                return
            except RuntimeError:
                self.statuses.add(NOT_INITIALISED)
                return

    def ended(self, within_s: float = SOON_S) -> "set[int]":
        """The statuses with which its threads ended; all of them in time."""
        end = time.monotonic() + within_s
        for thread in self.threads:
            thread.join(max(0.0, end - time.monotonic()))
        assert not any(thread.is_alive() for thread in self.threads), "a call hangs"
        return self.statuses

    def stop(self) -> "set[int]":
        self.stopping = True
        return self.ended(10)


def until(reached: Callable[[], bool], what: str, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.002)


Starting = Callable[..., Any]


@pytest.fixture
def begin_here() -> Iterator[Starting]:
    def start(**settings: Any) -> FaultSide:
        return FaultSide(HERE, settings)

    yield start
    if LLMDataDist.llm_engine_instance is not None:
        LLMDataDist.llm_engine_instance.finalize()


@pytest.fixture
def begin_there(peers: Callable[..., Peer]) -> Starting:
    def start(cluster_id: int = THERE, **settings: Any) -> Peer:
        return peers("test_llm_datadist_faults:FaultSide", cluster_id, settings, name=f"cluster {cluster_id}")

    return start


class Pair:
    def __init__(self, here: FaultSide, begin_there: Starting, settings: "dict[str, Any]") -> None:
        self.here, self.begin_there, self.settings = here, begin_there, settings
        self.there = begin_there(**settings)
        self.port = self.there.call("where")
        self.mine, self.far = here.big(1), self.there.call("big", 2)
        assert here.link(THERE, self.port) == (SUCCESS, [SUCCESS])

    def there_again(self) -> None:
        self.there = self.begin_there(port=self.port, **self.settings)
        self.far = self.there.call("big", 3)

    def goes_on(self, value: float) -> None:
        self.here.pull_blocks(("blocks", THERE, MODEL), self.mine, range(BLOCKS), range(BLOCKS))
        assert self.here.value_of(self.mine) == {value}


@pytest.fixture
def pair(begin_here: Starting, begin_there: Starting, transports: dict[str, Any]) -> Pair:
    settings = transports | REMOTE
    return Pair(begin_here(**settings), begin_there, settings)


# --- the peer ---------------------------------------------------------------------------------------------------------


def test_a_peer_killed_in_the_middle_is_forced_out_and_linked_to_again(pair: Pair) -> None:
    for _ in range(2):
        load = Load(pair.here, THERE, pair.mine)
        pair.there.kill()
        assert load.ended() <= {FAILED, NOT_YET_LINK}
        assert load.statuses
        pair.there_again()
        assert pair.here.unlink(THERE, pair.port, force=True) == (SUCCESS, [SUCCESS])
        assert pair.here.link(THERE, pair.port) == (SUCCESS, [SUCCESS])
        pair.goes_on(3)


def test_a_peer_that_stands_still_in_the_middle_costs_the_timeout(begin_here: Starting, begin_there: Starting) -> None:
    settings = REMOTE | {"sync_kv_timeout": 500, "ge_options": {"kvferry.transports": "socket"}}
    pair = Pair(begin_here(**settings), begin_there, settings)
    load = Load(pair.here, THERE, pair.mine)
    pair.there.stop()
    assert load.ended(0.5 + SOON_S) == {TIMEOUT}
    pair.here.fill_tensor(pair.mine, 0, 7)
    pair.there.cont()
    time.sleep(1)
    assert pair.here.value_of(pair.mine) == {7}
    pair.there.call("fill_tensor", pair.far, 0, 2)
    pair.goes_on(2)


def test_a_peer_that_finalizes_in_the_middle(pair: Pair) -> None:
    load = Load(pair.here, THERE, pair.mine)
    begun = time.monotonic()
    pair.there.call("finalize")
    assert time.monotonic() - begun < SOON_S
    assert load.ended() <= {FAILED, NOT_YET_LINK, GONE}
    assert load.statuses
    pair.there.call("init_again")
    far = pair.there.call("big", 4)
    assert far == 1
    pair.here.unlink(THERE, pair.port, force=True)
    assert pair.here.link(THERE, pair.port) == (SUCCESS, [SUCCESS])
    pair.goes_on(4)


def test_a_peer_that_unregisters_in_the_middle(pair: Pair) -> None:
    load = Load(pair.here, THERE, pair.mine)
    pair.there.call("unregister", pair.far)
    assert load.ended() == {GONE}
    pair.there.call("big", 5)
    pair.goes_on(5)


# --- this side --------------------------------------------------------------------------------------------------------


def test_this_side_finalizes_in_the_middle(pair: Pair) -> None:
    load = Load(pair.here, THERE, pair.mine)
    begun = time.monotonic()
    pair.here.finalize()
    assert time.monotonic() - begun < SOON_S
    array = pair.here.arrays[pair.mine][0]
    array[...] = 9  # nobody writes there any more
    assert load.ended() <= {FAILED, NOT_YET_LINK, PARAM_INVALID, NOT_INITIALISED}
    time.sleep(0.3)
    assert (array == 9).all()
    pair.here.init_again()
    pair.mine = pair.here.big(1)
    assert pair.here.link(THERE, pair.port) == (SUCCESS, [SUCCESS])
    pair.there.call("fill_tensor", pair.far, 0, 2)
    pair.goes_on(2)


def test_unlinking_in_the_middle_waits_for_what_is_running(pair: Pair) -> None:
    """And for nothing that begins meanwhile."""
    load = Load(pair.here, THERE, pair.mine)
    assert pair.here.unlink(THERE, pair.port, 20_000) == (SUCCESS, [SUCCESS])
    assert load.ended(6) == {NOT_YET_LINK}
    assert pair.here.link(THERE, pair.port) == (SUCCESS, [SUCCESS])
    pair.there.call("fill_tensor", pair.far, 0, 2)
    pair.goes_on(2)


def test_unlinking_by_force_in_the_middle_ends_what_is_running(pair: Pair) -> None:
    load = Load(pair.here, THERE, pair.mine)
    begun = time.monotonic()
    assert pair.here.unlink(THERE, pair.port, force=True) == (SUCCESS, [SUCCESS])
    assert time.monotonic() - begun < SOON_S
    assert load.ended() == {NOT_YET_LINK}
    assert pair.here.link(THERE, pair.port) == (SUCCESS, [SUCCESS])
    pair.there.call("fill_tensor", pair.far, 0, 2)
    pair.goes_on(2)


def test_switching_roles_in_the_middle_is_refused_and_nothing_else_happens(pair: Pair) -> None:
    load = Load(pair.here, THERE, pair.mine)
    for side in (pair.here.switch, lambda port: pair.there.call("switch", port)):
        assert side(1) == LLMStatusCode.LLM_EXIST_LINK
    before = load.moved
    until(lambda: load.moved > before + 3, "bytes go on moving")
    assert load.stop() == set()


# --- both, and strangers ----------------------------------------------------------------------------------------------


def test_two_sides_that_restart_at_once_find_each_other_again(begin_there: Starting) -> None:
    ports = [0, 0]
    for _ in range(2):
        sides = [begin_there(10 + i, port=ports[i]) for i in (0, 1)]
        ports = [side.call("where") for side in sides]
        caches = [side.call("big", 10 + i) for i, side in enumerate(sides)]
        linking = [sides[i].call_later("link", 11 - i, ports[1 - i]) for i in (0, 1)]
        for one in linking:
            code, _ = one.result()
            assert code in (SUCCESS, LLMStatusCode.LLM_ALREADY_LINK)
        every = list(range(BLOCKS))
        sides[0].call("pull_blocks", ("blocks", 11, MODEL), caches[0], every, every)
        assert sides[0].call("value_of", caches[0]) == {11}
        sides[1].call_later("pull_blocks", ("blocks", 10, MODEL), caches[1], every, every)
        for side in sides:
            side.kill()


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH\r\n", b"\xff" * 24, None])
def test_a_stranger_at_the_address_is_a_failed_link_in_time(begin_here: Starting, answer: "bytes | None") -> None:
    here = begin_here()
    with socket.create_server((LOOPBACK, 0)) as server:
        kept: list[socket.socket] = []

        def serve() -> None:
            connection, _ = server.accept()
            kept.append(connection)
            if answer is not None:
                connection.recv(4096)
                connection.sendall(answer)
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        begun = time.monotonic()
        code, codes = here.link(9, server.getsockname()[1], 500)
        assert time.monotonic() - begun < 0.5 + SOON_S
        assert code == codes[0] == (LLMStatusCode.LLM_LINK_FAILED if answer is not None else TIMEOUT)
        thread.join()
        for connection in kept:
            connection.close()


def test_another_secret_is_a_failed_link(begin_here: Starting, begin_there: Starting) -> None:
    there = begin_there(ge_options={"kvferry.secret": "one"})
    here = begin_here(ge_options={"kvferry.secret": "another"})
    failed = LLMStatusCode.LLM_LINK_FAILED
    assert here.link(THERE, there.call("where")) == (failed, [failed])
    assert there.call("link", HERE, here.port) == (failed, [failed])


def test_the_largest_cluster_id_is_one_like_any_other(begin_here: Starting, begin_there: Starting) -> None:
    there = begin_there(LARGEST_ID)
    here = begin_here()
    mine, _ = here.big(1), there.call("big", 2)
    assert here.link(LARGEST_ID, there.call("where")) == (SUCCESS, [SUCCESS])
    here.pull_blocks(("blocks", LARGEST_ID, MODEL), mine, [0], [5])
    assert here.value_of(mine) == {1, 2}
    assert here.unlink(LARGEST_ID, there.call("where")) == (SUCCESS, [SUCCESS])


# --- namespaces -------------------------------------------------------------------------------------------------------

INSIDE = """
import json, sys
answers, sys.stdout = sys.stdout, sys.stderr  # where the vendor's logger writes
from datadist_side import Side
from llm_datadist import LLMException
side = Side(0, host=sys.argv[1], enable_remote_cache_accessible=True, link_total_time=20)
print(side.where(), file=answers, flush=True)
for line in sys.stdin:
    name, arguments, keywords = json.loads(line)
    try:
        answer = getattr(side, name)(*arguments, **keywords)
    except LLMException as error:
        answer = str(error)
    print(json.dumps(answer, default=lambda value: getattr(value, "name", None) or value.tolist()), file=answers, flush=True)
"""


def test_a_side_in_network_pid_and_mount_namespaces_of_its_own_is_a_peer_like_any_other(
    begin_here: Starting, insides: Callable[..., Inside]
) -> None:
    """As two containers are to each other: links of both kinds, pulls and pushes from both sides, a death."""
    other = insides(INSIDE, INNER, ["--net", "--pid", "--mount", "--mount-proc"], AWAIT_CABLE)

    def there(name: str, *arguments: Any, **keywords: Any) -> Any:
        return json.loads(other.ask(json.dumps([name, arguments, keywords])))

    with cable(other):
        here = begin_here(host=OUTER, link_total_time=20, **REMOTE)
        port = int(other.line())
        mine = here.register([8, 16], 2, blocks=True, model=MODEL)
        far, rows = there("register", [8, 16], 2, blocks=True, model=MODEL), there("register", [8, 16], 2)
        for cache in (far, rows):
            there("fill", cache)
        sent = np.array(there("tensors", far))

        def everything_moves() -> None:
            for array in here.arrays[mine]:
                array[...] = 0
            here.pull_blocks(("blocks", THERE, MODEL), mine, [1, 7], [3, 0])
            assert (np.array(here.tensors(mine))[:, [3, 0]] == sent[:, [1, 7]]).all()
            here.push_blocks(("blocks", THERE, MODEL), mine, [3], [2])
            assert (np.array(there("tensors", far))[:, 2] == sent[:, 1]).all()
            there("pull_blocks", ("blocks", HERE, MODEL), far, [0], [2])
            assert (np.array(there("tensors", far))[:, 2] == sent[:, 7]).all()
            there("push_blocks", ("blocks", HERE, MODEL), far, [4], [5])
            assert (np.array(here.tensors(mine))[:, 5] == sent[:, 4]).all()
            task = there(
                "start", rows, [("key", ("blocks", HERE, MODEL), (0, 1), (0, 1), 0)], None, [6], block_bytes=64
            )
            there("all_ready", task)
            assert there("results", task) == [SUCCESS]
            assert (np.array(here.tensors(mine))[:, 6] == sent[:, 0]).all()

        assert here.link(THERE, port, host=INNER) == (SUCCESS, [SUCCESS])
        everything_moves()
        assert here.unlink(THERE, port, force=True) == (SUCCESS, [SUCCESS])
        ranks, place = {HERE: 0, THERE: 1}, {HERE: OUTER, THERE: INNER}
        servers = [{"server_id": at, "device": [{"rank_id": str(ranks[side])}]} for side, at in place.items()]
        table = json.dumps({"server_list": servers})
        comm = here.link_table("comm", ranks, table)
        theirs = there("link_listed", "comm", list(ranks.items()), table)
        assert (here.settled(comm).name, there("settled", theirs)) == ("OK", "OK")
        everything_moves()
        other.process.kill()
        until(lambda: other.process.poll() is not None, "it has ended")
        begun = time.monotonic()
        for statuses in ({FAILED, NOT_YET_LINK}, {NOT_YET_LINK}):
            assert status_of(lambda: here.pull_blocks(("blocks", THERE, MODEL), mine, [0], [0])) in statuses
        assert time.monotonic() - begun < SOON_S


# --- nothing left -----------------------------------------------------------------------------------------------------


def test_a_pool_in_a_small_cgroup_is_out_of_memory_before_a_page_is_touched(begin_there: Starting) -> None:
    with memory_cgroup(256 << 20) as cgroup:
        there = begin_there(mem_pool_cfg='{"memory_size": 1073741824}')
        cgroup.take_in(there.pid)
        with pytest.raises(LLMException) as caught:
            there.call("allocate", [256, 1 << 20], 1)  # 1 GiB
        assert caught.value.status_code == LLMStatusCode.LLM_OUT_OF_MEMORY
        assert cgroup.used_bytes() < 32 << 20 and cgroup.kills() == 0
        there.call("allocate", [4, 1 << 20], 1)  # 16 MiB, which are written
        assert there.alive and cgroup.kills() == 0
        there.close()


def test_without_descriptors_linking_fails_and_works_again(begin_here: Starting, begin_there: Starting) -> None:
    there, here = begin_there(), begin_here()
    there.call("use_up_descriptors")
    begun = time.monotonic()
    code, codes = there.call("link", HERE, here.port, 1000)
    assert time.monotonic() - begun < 1 + SOON_S
    assert code == codes[0] == LLMStatusCode.LLM_LINK_FAILED
    assert here.link(THERE, there.call("where"), 500)[0] in (TIMEOUT, LLMStatusCode.LLM_LINK_FAILED)
    there.call("give_descriptors_back")
    with contextlib.suppress(LLMException):
        here.unlink(THERE, there.call("where"), force=True)
    until(lambda: here.link(THERE, there.call("where")) == (SUCCESS, [SUCCESS]), "it is linked")


def test_statuses_of_faults_that_kvferrys_own_tests_bring_about() -> None:
    expected = {
        ("busy", "transfer"): LLMStatusCode.LLM_LINK_BUSY,  # the kernel holds a copy
        ("busy", "register"): LLMStatusCode.LLM_LINK_BUSY,
        ("busy", "link"): LLMStatusCode.LLM_LINK_FAILED,  # no descriptors: LINK_BUSY is for calls over a link
        ("busy", "init"): FAILED,
        ("busy", "listen"): FAILED,
        ("already_linked", "link"): LLMStatusCode.LLM_ALREADY_LINK,
        ("deadline", "unlink"): TIMEOUT,
        ("address_in_use", ""): FAILED,
        ("cancelled", "transfer"): FAILED,
    }
    assert {words: _rules.status_of(*words) for words in expected} == expected


# --- without threads --------------------------------------------------------------------------------------------------

WITHOUT_THREADS = """
import resource, sys
from datadist_side import Side, cluster, status_of
from llm_datadist import LLMStatusCode

HERE, STACK = 1, 256 << 20
here = Side(HERE)
one, other = map(int, sys.argv[1:])
mine = here.register([4, 8], 4)
def no_more_threads():
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + STACK // 2, resource.RLIM_INFINITY))

no_more_threads()
done = LLMStatusCode.LLM_SUCCESS
assert here.datadist.link_clusters([cluster(20, one), cluster(21, other)], 5000) == (done, [done, done])
assert here.results(here.start(mine, [("addresses", 20, here.addresses(mine), None, 0)])) == [LLMStatusCode.LLM_FAILED]
table = '{"server_list": [{"device": [{}]}]}'
assert status_of(lambda: here.link_table("x", {HERE: 0, 20: 1}, table), "out of threads") == LLMStatusCode.LLM_FAILED
here.finalize()
no_more_threads()
assert status_of(here.init_again, "out of threads") == LLMStatusCode.LLM_FAILED
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
here.init_again()
here.finalize()
"""


def test_without_threads_to_be_had_calls_do_without_or_say_failed(begin_there: Starting) -> None:
    """Stacks of 256 MiB each, and address space for none of them."""
    ports = [str(begin_there(20 + i).call("where")) for i in range(2)]
    command = ["sh", "-c", 'ulimit -s 262144 && exec "$@"', "sh", sys.executable, "-c", WITHOUT_THREADS, *ports]
    environment = {"PYTHONPATH": ":".join(sys.path), "MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 0, answer.stderr
