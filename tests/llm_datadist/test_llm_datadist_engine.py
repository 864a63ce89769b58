"""``LLMDataDist``: init and finalize, links by address, roles; with real nodes."""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from datadist_side import Events, Side, cluster, status_of
from ports import LOOPBACK, free_port

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
    TransferWithCacheKeyConfig,
)
from llm_datadist.v2.llm_datadist import _shutdown_handler
from support import Peer

HERE, THERE = 1, 0
POOLS = ["llm.MemPoolConfig", "llm.HostMemPoolConfig"]
SHAPE = [4, 4, 8]
SUCCESS, INVALID = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_PARAM_INVALID
ALREADY = LLMStatusCode.LLM_ALREADY_LINK


def both(code: LLMStatusCode) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
    return code, [code]


# --- life


def test_constructor_checks() -> None:
    with pytest.raises(TypeError, match="only support"):
        LLMDataDist(1, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out of range"):
        LLMDataDist(LLMRole.MIX, -1)
    assert LLMDataDist(LLMRole.MIX, 2**64 - 1).cluster_id == 2**64 - 1
    assert [LLMDataDist._role_to_str(role) for role in LLMRole] == ["Prompt", "Decoder", "Mix"]


def test_everything_needs_init() -> None:
    datadist = LLMDataDist(LLMRole.MIX, 1)
    datadist.finalize()
    calls: list[Callable[[], object]] = [
        lambda: datadist.cache_manager,
        lambda: datadist.kv_cache_manager,
        lambda: datadist.link_clusters([]),
        lambda: datadist.unlink_clusters([]),
        lambda: datadist.switch_role(LLMRole.MIX),
        lambda: datadist.link("a", {0: 0, 1: 1}, ""),
        lambda: datadist.unlink(1),
        lambda: datadist.query_register_mem_status(1),
        lambda: datadist.check_link_status(1),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="llm datadist is not initialized") as caught:
            call()
        assert not isinstance(caught.value, LLMException)


def test_one_instance_at_a_time(here: Side) -> None:
    assert LLMDataDist.llm_engine_instance is here.datadist
    here.init_again()  # silent
    other = LLMDataDist(LLMRole.MIX, 9)
    assert status_of(lambda: other.init(here.options)) == LLMStatusCode.LLM_FAILED
    here.finalize()
    assert LLMDataDist.llm_engine_instance is None
    other.init(here.options)
    other.finalize()


def test_init_again_after_finalize_counts_caches_from_1(here: Side) -> None:
    manager = here.manager
    assert here.manager is manager
    assert [here.register(SHAPE), here.register(SHAPE, blocks=True)] == [1, 2]
    here.finalize()
    here.init_again()
    assert here.manager is not manager
    assert here.register(SHAPE) == 1


@pytest.mark.parametrize("pool", ["", '{"memory_size": 1048576}'])
def test_a_kept_manager_of_a_finalized_engine_answers_errors(start_here: Callable[..., Side], pool: str) -> None:
    """``LLM_FAILED`` for what registers, allocates or maps, ``LLM_PARAM_INVALID`` for what names a cache or a key."""
    here = start_here(listen=False, enable_remote_cache_accessible=True, mem_pool_cfg=pool)
    manager = here.manager
    rows, blocks = here.caches[here.register(SHAPE)], here.caches[here.register(SHAPE, blocks=True)]
    pooled = manager.allocate_cache(rows.cache_desc) if pool else rows
    stranger = Cache(99, rows.cache_desc, rows.tensor_addrs, manager)
    host = CacheDesc(4, SHAPE, DataType.DT_FLOAT, Placement.HOST)
    cpu = Cache.create_cpu_cache(host, [array.ctypes.data for array in here.arrays[rows.cache_id]])
    by_id, by_model = CacheKeyByIdAndIndex(THERE, 1), BlocksCacheKey(THERE)
    config = TransferWithCacheKeyConfig(by_id, range(2), range(2))
    addresses = list(rows.tensor_addrs)
    here.finalize()
    broken = CacheDesc(4, [0], DataType.DT_FLOAT)
    failed: list[Callable[[], object]] = [
        lambda: manager.register_cache(rows.cache_desc, addresses),
        lambda: manager.register_cache(broken, addresses),
        lambda: manager.register_blocks_cache(rows.cache_desc, addresses),
        lambda: manager.unregister_cache(rows.cache_id),
        lambda: manager.unregister_cache(99),
        lambda: manager.remap_registered_memory(MemInfo(Memtype.MEM_TYPE_DEVICE, 1, 1)),
        lambda: manager.remap_registered_memory([]),
    ]
    if pool:
        failed.append(lambda: manager.allocate_cache(rows.cache_desc))
        failed.append(lambda: manager.allocate_blocks_cache(CacheDesc(1, [1 << 20], DataType.DT_INT8)))
    invalid: list[Callable[[], object]] = [
        lambda: manager.deallocate_cache(rows),
        lambda: manager.deallocate_cache(pooled),
        lambda: manager.deallocate_cache(stranger),
        lambda: manager.deallocate_blocks_cache(blocks),
        lambda: manager.remove_cache_key(CacheKey(0, 1)),
        lambda: manager.pull_cache(by_id, rows),
        lambda: manager.pull_cache(by_id, stranger),
        lambda: manager.pull_blocks(by_model, blocks, [0], [0]),
        lambda: manager.push_cache(by_id, rows),
        lambda: manager.push_blocks(by_model, blocks, [0], [0]),
        lambda: manager.copy_cache(rows, rows, 1, 0),
        lambda: manager.copy_cache(rows, stranger),
        lambda: manager.copy_blocks(blocks, {0: [1]}),
        lambda: manager.swap_blocks(blocks, cpu, {0: 1}),
    ]
    assert [status_of(call) for call in failed] == [LLMStatusCode.LLM_FAILED] * len(failed)
    assert [status_of(call) for call in invalid] == [INVALID] * len(invalid)
    for cache in (rows, stranger):
        assert manager.transfer_cache_async(cache, Events(2), [config]).synchronize(5000) == INVALID
    assert rows.tensor_addrs == addresses
    with pytest.raises(RuntimeError, match="not initialized"):
        _ = here.datadist.cache_manager


@pytest.mark.parametrize("other", [0, 1 << 30, (1 << 63) - 1])
@pytest.mark.parametrize("name", POOLS)
def test_a_pool_that_the_machine_can_never_give_fails_init(name: str, other: int) -> None:
    options = {"llm.EnableCacheManager": "1", name: json.dumps({"memory_size": 9_000_000_000_000_000})}
    if other:
        options |= {key: json.dumps({"memory_size": other}) for key in POOLS if key != name}
    datadist = LLMDataDist(LLMRole.MIX, 1)
    told = "pools are to have 9[0-9]+ bytes, and this machine has [0-9]+"
    assert status_of(lambda: datadist.init(options), told) == LLMStatusCode.LLM_OUT_OF_MEMORY
    assert LLMDataDist.llm_engine_instance is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"ge.exec.deviceId": "0;1"}, LLMException),
        ({"llm.SyncKvCacheWaitTime": "soon"}, LLMException),
        ({"llm.MemPoolConfig": "{"}, LLMException),
        ({"llm.listenIpInfo": "127.0.0.1"}, LLMException),
        ({"llm.listenIpInfo": "127.0.0.1:http"}, ValueError),
        ({"llm.SyncKvCacheWaitTime": 5}, TypeError),
        ({"llm.EnableCacheManager": "0"}, ModuleNotFoundError),
        ({"llm.TransferBackend": "other", "llm.listenIpInfo": "127.0.0.1:1"}, LLMException),
    ],
)
def test_init_refuses(options: dict[str, Any], error: type[Exception]) -> None:
    datadist = LLMDataDist(LLMRole.MIX, 1)
    with pytest.raises(error) as caught:
        datadist.init({"llm.EnableCacheManager": "1"} | options)
    if isinstance(caught.value, LLMException):
        assert caught.value.status_code == INVALID
    assert LLMDataDist.llm_engine_instance is None


@pytest.mark.parametrize("options", [[], "x"])
def test_init_takes_a_dict(options: Any) -> None:
    with pytest.raises(TypeError, match="only support"):
        LLMDataDist(LLMRole.MIX, 1).init(options)


def test_init_without_options_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        LLMDataDist(LLMRole.MIX, 1).init(None)  # type: ignore[arg-type]


def test_an_address_where_nobody_can_listen_fails_init_and_leaves_nothing(start_here: Callable[..., Side]) -> None:
    """As `switch_role` there: `LLM_FAILED` is for a bind that fails, for whatever reason."""
    assert status_of(lambda: start_here(host="192.0.2.1"), "cannot listen on 192.0.2.1") == LLMStatusCode.LLM_FAILED
    assert LLMDataDist.llm_engine_instance is None
    start_here()


def test_a_port_in_use_fails_init_and_leaves_nothing(start_here: Callable[..., Side]) -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        assert status_of(lambda: start_here(port=taken.getsockname()[1])) == LLMStatusCode.LLM_FAILED
    assert LLMDataDist.llm_engine_instance is None
    start_here()


def test_local_comm_res_alone_is_enough(start_here: Callable[..., Side]) -> None:
    datadist = LLMDataDist(LLMRole.PROMPT, 0)
    config = LLMConfig()
    config.device_id = 0
    config.local_comm_res = ""
    datadist.init(config.generate_options())
    assert datadist.cache_manager is not None
    assert status_of(lambda: datadist.kv_cache_manager) == INVALID
    datadist.finalize()


def test_shutdown_handler_finalizes(here: Side) -> None:
    _shutdown_handler()
    _shutdown_handler()
    assert LLMDataDist.llm_engine_instance is None


def in_a_fork(work: Callable[[], None]) -> None:
    """Runs it in a forked child, which has to get to its end."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - said here, for the parent's handlers are not the child's
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_forked_child_has_an_instance_of_its_own(linked: tuple[Side, Peer]) -> None:
    """As a worker process has that was forked from one that is linked already."""
    here, there = linked
    source, mine = there.call("register", SHAPE), here.register(SHAPE)
    there.call("fill", source)
    there_at, expected = there.call("where"), there.call("tensors", source)
    here.pull_cache(("id", THERE, source, 1), mine)
    parents, kept = here.datadist, here.manager

    def work() -> None:
        assert LLMDataDist.llm_engine_instance is None
        with pytest.raises(RuntimeError, match="not initialized"):
            here.unlink(THERE)
        assert status_of(lambda: kept.unregister_cache(mine)) == LLMStatusCode.LLM_FAILED
        assert status_of(lambda: kept.pull_cache(CacheKeyByIdAndIndex(THERE, source), here.caches[mine])) == INVALID
        parents.finalize()
        del here.options["llm.listenIpInfo"]  # the parent listens there
        here.datadist = LLMDataDist(LLMRole.DECODER, 7)  # two that live and bear one id do not link to one peer
        here.init_again()
        assert here.link(THERE, there_at) == both(SUCCESS)
        into = here.register(SHAPE)
        assert into == 1
        here.pull_cache(("id", THERE, source, 1), into)
        assert all((array[0] == filled[1]).all() for array, filled in zip(here.tensors(into), expected, strict=True))
        here.finalize()
        parents.init(here.options)
        parents.finalize()

    in_a_fork(work)
    here.pull_cache(("id", THERE, source, 2), mine)
    assert (here.tensors(mine)[0][0] == expected[0][2]).all()
    assert LLMDataDist.llm_engine_instance is parents


def test_a_fork_beside_threads_that_hold_locks_leaves_its_child_free(here: Side) -> None:
    """Whatever they are in the middle of, in the child nobody would end it."""

    def work() -> None:
        with pytest.raises(LLMException):
            kept.pull_cache(CacheKeyByIdAndIndex(THERE, 1), here.caches[mine])
        Side(3, listen=False).finalize()

    kept, mine = here.manager, here.register(SHAPE)
    with LLMDataDist._life, here.datadist._initialised()._lock, ThreadPoolExecutor(1) as thread:
        thread.submit(in_a_fork, work).result()


def test_a_process_may_end_without_finalize(start_there: Callable[..., Peer], here: Side) -> None:
    script = f"""
from datadist_side import Side
side = Side(7, port={free_port()})
assert side.link({HERE}, {here.port})[0] == 0
"""
    answer = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert answer.returncode == 0, answer.stderr


# --- links


def test_linking_and_unlinking(here: Side, there: Peer) -> None:
    port = there.call("where")
    assert here.link(THERE, port) == both(SUCCESS)
    assert here.link(THERE, port) == both(ALREADY)
    assert here.unlink(THERE, port) == both(SUCCESS)
    assert here.unlink(THERE, port) == both(SUCCESS)
    assert here.link(THERE, port) == both(SUCCESS)


@pytest.mark.slow
def test_after_unlink_nothing_is_pulled_from_either_side(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    mine, far = here.register(SHAPE, req_ids=[1]), there.call("register", SHAPE, req_ids=[1])
    here.pull_cache(("request", THERE, 1), mine)
    there.call("pull_cache", ("request", HERE, 1), far)
    assert here.unlink(THERE, there.call("where")) == both(SUCCESS)
    assert status_of(lambda: here.pull_cache(("request", THERE, 1), mine)) == LLMStatusCode.LLM_NOT_YET_LINK
    call = lambda: there.call("pull_cache", ("request", HERE, 1), far)  # noqa: E731
    assert status_of(call) == LLMStatusCode.LLM_NOT_YET_LINK


def test_the_side_that_did_not_link_may_unlink_by_force(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    mine = here.register(SHAPE)
    there.call("register", SHAPE, req_ids=[1])
    assert there.call("unlink", HERE, force=True) == both(SUCCESS)
    with pytest.raises(LLMException):
        here.pull_cache(("request", THERE, 1), mine)
    here.unlink(THERE, force=True)
    assert here.link(THERE, there.call("where")) == both(SUCCESS)
    here.pull_cache(("request", THERE, 1), mine)


@pytest.mark.slow
def test_unlinking_without_an_address_needs_force(linked: tuple[Side, Peer]) -> None:
    here, _ = linked
    info = LLMClusterInfo()
    info.remote_cluster_id = THERE
    assert here.datadist.unlink_clusters([info]) == both(INVALID)
    assert here.datadist.unlink_clusters([info], force=True) == both(SUCCESS)


def test_linking_to_a_linked_peer_by_another_id_leaves_its_link_alone(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    mine, port = here.register([64, 1 << 16]), there.call("where")
    there.call("register", [64, 1 << 16])
    ended: list[str] = []

    def pull() -> None:
        for _ in range(30):
            try:
                here.pull_cache(("id", THERE, 1, 0), mine)
            except LLMException as error:
                ended.append(str(error))
            else:
                ended.append("")

    pulling = threading.Thread(target=pull)
    pulling.start()
    try:
        for _ in range(10):
            clusters = [cluster(77, port), cluster(78, port), cluster(THERE, port)]
            assert here.datadist.link_clusters(clusters, 3000) == (ALREADY, [ALREADY] * 3)
    finally:
        pulling.join(60)
    assert ended == [""] * 30
    assert status_of(lambda: here.pull_cache(("id", 77, 1, 0), mine)) == LLMStatusCode.LLM_NOT_YET_LINK


def test_nobody_at_the_address(here: Side) -> None:
    assert here.link(THERE, free_port(), 500) == both(LLMStatusCode.LLM_LINK_FAILED)


def test_somebody_who_never_answers(here: Side) -> None:
    with socket.socket() as silent:
        silent.bind((LOOPBACK, 0))
        silent.listen()
        assert here.link(THERE, silent.getsockname()[1], 300) == both(LLMStatusCode.LLM_TIMEOUT)


@pytest.mark.slow
def test_a_wrong_id_still_links_but_is_not_the_peers(here: Side, there: Peer) -> None:
    mine = here.register(SHAPE)
    there.call("register", SHAPE, req_ids=[1])
    assert here.link(55, there.call("where")) == both(SUCCESS)
    assert status_of(lambda: here.pull_cache(("request", 55, 1), mine)) == LLMStatusCode.LLM_NOT_YET_LINK
    here.pull_cache(("request", THERE, 1), mine)


@pytest.mark.slow
def test_several_clusters_in_one_call(here: Side, start_there: Callable[..., Peer]) -> None:
    one, two = start_there(20), start_there(2**64 - 1)
    asked = [cluster(20, one.call("where")), cluster(3, free_port()), cluster(2**64 - 1, two.call("where"))]
    failed = LLMStatusCode.LLM_LINK_FAILED
    assert here.datadist.link_clusters(asked, 2000) == (failed, [SUCCESS, failed, SUCCESS])
    mine = here.register(SHAPE)
    for peer, cluster_id in ((one, 20), (two, 2**64 - 1)):
        peer.call("register", SHAPE, req_ids=[1])
        here.pull_cache(("request", cluster_id, 1), mine)
    assert here.datadist.unlink_clusters(asked, force=True) == (SUCCESS, [SUCCESS] * 3)


def test_empty_lists_and_incomplete_clusters(here: Side) -> None:
    assert here.datadist.link_clusters([]) == (INVALID, [])
    assert here.datadist.unlink_clusters(()) == (INVALID, [])
    info = LLMClusterInfo()
    assert status_of(lambda: here.datadist.link_clusters([info]), "local_ip_info_list is empty") == INVALID
    info.append_local_ip_info(LOOPBACK, 0)
    with pytest.raises(TypeError):
        here.datadist.link_clusters([info])
    info.remote_cluster_id = 5
    assert here.datadist.link_clusters([info]) == both(INVALID)
    info.append_remote_ip_info(LOOPBACK, 1)
    info.append_remote_ip_info(LOOPBACK, 2)
    assert here.datadist.link_clusters([info]) == both(INVALID)


@pytest.mark.parametrize("name", ["link_clusters", "unlink_clusters"])
def test_arguments_of_linking(here: Side, name: str) -> None:
    call = getattr(here.datadist, name)
    assert status_of(lambda: call([cluster(1, 1)], 0)) == INVALID
    assert status_of(lambda: call([cluster(1, 1)], -1)) == INVALID
    with pytest.raises(ValueError, match="out of range"):
        call([cluster(1, 1)], 1 << 31)
    for wrong in (([cluster(1, 1)], "1"), (cluster(1, 1),), (None,), ([1],)):
        with pytest.raises(TypeError):
            call(*wrong)


def test_force_is_a_bool(here: Side) -> None:
    with pytest.raises(TypeError, match="only support"):
        here.datadist.unlink_clusters([cluster(1, 1)], force=1)  # type: ignore[arg-type]


def test_linking_to_itself_works_and_pulling_from_itself_does_not(here: Side) -> None:
    mine = here.register(SHAPE, req_ids=[1])
    assert here.link(HERE, here.port) == both(SUCCESS)
    assert status_of(lambda: here.pull_cache(("request", HERE, 1), mine)) == INVALID
    assert here.unlink(HERE, here.port) == both(SUCCESS)


@pytest.mark.slow
def test_two_processes_of_one_cluster_id_may_share(here: Side, start_there: Callable[..., Peer]) -> None:
    namesake = start_there(HERE)
    namesake.call("register", SHAPE, req_ids=[1])
    mine = here.register(SHAPE)
    assert here.link(HERE, namesake.call("where")) == both(SUCCESS)
    here.pull_cache(("request", HERE, 1), mine)


@pytest.mark.slow
def test_a_peer_that_came_back_is_reached_after_relinking(here: Side, start_there: Callable[..., Peer]) -> None:
    there = start_there()
    port = there.call("where")
    there.call("register", SHAPE, req_ids=[1])
    mine = here.register(SHAPE)
    assert here.link(THERE, port) == both(SUCCESS)
    here.pull_cache(("request", THERE, 1), mine)
    there.kill()
    with pytest.raises(LLMException):
        here.pull_cache(("request", THERE, 1), mine)
    again = start_there(port=port)
    again.call("register", SHAPE, req_ids=[1])
    here.unlink(THERE, port, force=True)
    assert here.link(THERE, port) == both(SUCCESS)
    here.pull_cache(("request", THERE, 1), mine)


@pytest.mark.slow
def test_a_peer_that_was_finalized_and_came_back(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    mine = here.register(SHAPE)
    there.call("finalize")
    with pytest.raises(LLMException):
        here.pull_cache(("request", THERE, 1), mine)
    there.call("init_again")
    there.call("register", SHAPE, req_ids=[1])
    here.unlink(THERE, there.call("where"), force=True)
    assert here.link(THERE, there.call("where")) == both(SUCCESS)
    here.pull_cache(("request", THERE, 1), mine)


@pytest.mark.slow
def test_a_restarted_client_replaces_its_stale_link(here: Side, start_there: Callable[..., Peer]) -> None:
    first = start_there()
    assert first.call("link", HERE, here.port) == both(SUCCESS)
    first.kill()
    second = start_there()
    assert second.call("link", HERE, here.port) == both(SUCCESS)
    second.call("register", SHAPE, req_ids=[1])
    here.pull_cache(("request", THERE, 1), here.register(SHAPE))


@pytest.mark.slow
def test_sides_of_different_modes_do_not_link(
    start_here: Callable[..., Side], start_there: Callable[..., Peer]
) -> None:
    here, there = start_here(enable_remote_cache_accessible=True), start_there()
    assert here.link(THERE, there.call("where")) == both(INVALID)
    assert there.call("link", HERE, here.port) == both(INVALID)
    mine = here.register(SHAPE)
    assert status_of(lambda: here.pull_cache(("id", THERE, 1), mine)) == LLMStatusCode.LLM_NOT_YET_LINK


@pytest.mark.slow
def test_unlinking_a_peer_that_is_gone_needs_force(here: Side, start_there: Callable[..., Peer]) -> None:
    there = start_there()
    port = there.call("where")
    assert here.link(THERE, port) == both(SUCCESS)
    there.kill()
    failed = LLMStatusCode.LLM_UNLINK_FAILED
    mine = here.register(SHAPE)
    with pytest.raises(LLMException):
        here.pull_cache(("request", THERE, 1), mine)
    for _ in range(2):  # the entry stays
        assert here.unlink(THERE, port, 500) == (failed, [failed])
    assert here.unlink(THERE, port, force=True) == both(SUCCESS)
    assert here.unlink(THERE, port) == both(SUCCESS)


@pytest.mark.slow
def test_a_link_that_the_peer_ended_is_unlinked_without_force(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    assert there.call("unlink", HERE, here.port) == both(SUCCESS)
    assert here.unlink(THERE, 1) == both(SUCCESS)


@pytest.mark.slow
def test_a_link_that_the_peer_dropped_is_unlinked_where_it_listens(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    assert there.call("unlink", HERE, force=True) == both(SUCCESS)
    mine = here.register(SHAPE)
    with pytest.raises(LLMException):
        here.pull_cache(("request", THERE, 1), mine)
    assert here.unlink(THERE, there.call("where")) == both(SUCCESS)


@pytest.mark.slow
def test_each_side_of_the_hixl_backend_links_for_itself(
    start_here: Callable[..., Side], start_there: Callable[..., Peer]
) -> None:
    here, there = start_here(transfer_backend="hixl"), start_there(transfer_backend="hixl")
    assert here.link(THERE, there.call("where")) == both(SUCCESS)
    assert there.call("link", HERE, here.port) == both(SUCCESS)
    assert here.link(THERE, there.call("where")) == both(ALREADY)


# --- roles


def test_switch_role_to_an_address_that_is_not_here_fails_and_keeps_the_old_one(here: Side, there: Peer) -> None:
    elsewhere = {"llm.listenIpInfo": "192.0.2.1:4444"}
    assert status_of(lambda: here.datadist.switch_role(LLMRole.PROMPT, elsewhere)) == LLMStatusCode.LLM_FAILED
    here.datadist.switch_role(LLMRole.PROMPT, here.options)


@pytest.mark.slow
def test_switch_role_moves_the_listener(here: Side, there: Peer) -> None:
    datadist, port = here.datadist, free_port()
    datadist.switch_role(LLMRole.DECODER, {"llm.listenIpInfo": f"{LOOPBACK}:{port}"})
    assert there.call("link", HERE, here.port, 500)[0] == LLMStatusCode.LLM_LINK_FAILED
    assert there.call("link", HERE, port) == both(SUCCESS)
    assert status_of(lambda: datadist.switch_role(LLMRole.PROMPT)) == LLMStatusCode.LLM_EXIST_LINK
    here.unlink(THERE, force=True)
    datadist.switch_role(LLMRole.PROMPT, here.options)
    datadist.switch_role(LLMRole.PROMPT, here.options)
    assert there.call("unlink", HERE, force=True) == both(SUCCESS)
    assert there.call("link", HERE, here.port) == both(SUCCESS)


@pytest.mark.slow
def test_switch_role_without_an_address_closes_the_listener(here: Side, there: Peer) -> None:
    here.datadist.switch_role(LLMRole.DECODER)
    assert there.call("link", HERE, here.port, 500)[0] == LLMStatusCode.LLM_LINK_FAILED


@pytest.mark.slow
def test_switch_role_to_a_port_in_use_leaves_the_listener(here: Side, there: Peer) -> None:
    options = {"llm.listenIpInfo": f"{LOOPBACK}:{there.call('where')}"}
    assert status_of(lambda: here.datadist.switch_role(LLMRole.DECODER, options)) == LLMStatusCode.LLM_FAILED
    assert there.call("link", HERE, here.port) == both(SUCCESS)


def test_arguments_of_switch_role(here: Side) -> None:
    with pytest.raises(TypeError, match="only support"):
        here.datadist.switch_role(1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="only support"):
        here.datadist.switch_role(LLMRole.MIX, [])  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        here.datadist.switch_role(None)  # type: ignore[arg-type]


@pytest.mark.slow
def test_switch_role_of_the_hixl_backend_minds_its_port_and_not_its_links(
    start_here: Callable[..., Side], start_there: Callable[..., Peer]
) -> None:
    here, there = start_here(transfer_backend="hixl"), start_there(transfer_backend="hixl")
    assert here.link(THERE, there.call("where")) == both(SUCCESS)
    here.datadist.switch_role(LLMRole.PROMPT, here.options)
    other = {"llm.listenIpInfo": f"{LOOPBACK}:{free_port()}"}
    assert status_of(lambda: here.datadist.switch_role(LLMRole.PROMPT, other)) == LLMStatusCode.LLM_FEATURE_NOT_ENABLED


def test_our_own_options_may_come_from_the_environment(
    start_here: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_RENDEZVOUS_PORT", "no port")
    assert status_of(start_here) == INVALID
    start_here(ge_options={"kvferry.rendezvous_port": "1"})  # what the program says counts more


# --- rank tables, the older mode, remapping


def test_arguments_of_rank_table_links(here: Side) -> None:
    link = here.datadist.link
    good = {0: 0, 1: 1}
    for name in ("", "x" * 128):
        assert status_of(lambda n=name: link(n, good, "{}")) == INVALID
    for ranks in ({0: 0}, {i: i for i in range(5)}, {0: 1, 1: 0}):
        assert status_of(lambda r=ranks: link("a", r, "{}")) == INVALID
    for wrong in ((None, good, "{}"), ("a", [0, 1], "{}"), ("a", {"0": 0, "1": 1}, "{}"), ("a", good, {})):
        with pytest.raises(TypeError):
            link(*wrong)
    for ranks in ({-1: 0, 1: 1}, {0: 0, 1: 1 << 32}):
        with pytest.raises(ValueError, match="out of range"):
            link("a", ranks, "{}")
    assert status_of(lambda: link("a", {5: 0, 6: 1}, "{}")) == INVALID  # this cluster is not among them
    assert status_of(lambda: link("a", good, "{")) == INVALID
    assert link("a", good, '{"server_list":[{"device":[{}]}]}') == 1
    assert link("a", good, "{}") == 2


def test_unknown_communicators(here: Side) -> None:
    for call in (here.datadist.unlink, here.datadist.query_register_mem_status):
        assert status_of(lambda c=call: c(1)) == LLMStatusCode.LLM_NOT_YET_LINK
        with pytest.raises(TypeError, match="only support"):
            call("1")


def test_check_link_status_is_the_older_modes(here: Side) -> None:
    assert status_of(lambda: here.datadist.check_link_status(1)) == INVALID


def test_remapping(here: Side, there: Peer) -> None:
    remap = here.manager.remap_registered_memory
    device, host = Memtype.MEM_TYPE_DEVICE, Memtype.MEM_TYPE_HOST
    assert status_of(lambda: remap([])) == INVALID
    for wrong in (1, [1], MemInfo(host, 1, 1), MemInfo(device, 0, 1), [MemInfo(device, 1, 0)]):
        assert status_of(lambda w=wrong: remap(w)) == INVALID
    assert status_of(lambda: remap(MemInfo(device, 1, 1))) == LLMStatusCode.LLM_NOT_YET_LINK
    assert here.link(THERE, there.call("where")) == both(SUCCESS)
    remap([MemInfo(device, 1, 1), MemInfo(device, 2, 1)])
    remap(MemInfo(device, 1, 1))


def test_finalize_gives_its_descriptors_back_without_the_collector() -> None:
    datadist = LLMDataDist(LLMRole.PROMPT, HERE)
    gc.collect()
    gc.disable()
    try:
        left = []
        for _ in range(4):
            datadist.init({"llm.EnableCacheManager": "1"})
            datadist.finalize()
            left.append(len(os.listdir("/proc/self/fd")))
    finally:
        gc.enable()
    assert left[1:] == left[:1] * 3  # what the first one opened for good may stay
