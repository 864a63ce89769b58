"""Whatever is passed for whatever argument: one of the exceptions that callers know, in a sentence of our own."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from datadist_side import Events, Side, cluster
from ports import LOOPBACK, free_port

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    DataType,
    KvCache,
    LLMClusterInfo,
    LLMDataDist,
    LLMException,
    LLMRole,
    MemInfo,
    Memtype,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist.configs import _OPTIONS, LLMConfig
from llm_datadist.v2.cache_manager import CacheManager
from llm_datadist.v2.llm_utils import layer_range_to_tensor_indices, parse_listen_ip_info
from support import Peer

WRONG: list[Any] = [None, object(), int, True, -1, 1.5, 1 << 70, "x", "\udcff", b"x", "", {}, {"x": None}, {-1: -1}]
WRONG += [
    {1: [None]},
    [],
    [None],
    ["x"],
    [-1],
    [1 << 70],
    [1, 2],
    (),
    ("x",),
    range(2, 1),
    range(0, 9, 3),
    range(1 << 69, 1 << 70),
]
OURS: list[tuple[type[Exception], str]] = [
    (TypeError, "only support"),
    (AttributeError, "only support"),
    (KeyError, "only support"),
    (ValueError, "out of range"),
    (ValueError, "of listenIpInfo is no port"),
    (RuntimeError, "Can not parse ip str:"),
    (json.JSONDecodeError, ""),
    (ModuleNotFoundError, "No module named 'llm_datadist_v1'"),  # options of the older mode
]

Call = Callable[..., object]


def desc(num_tensors: int = 4, **more: Any) -> CacheDesc:
    return CacheDesc(num_tensors, [4, 8], DataType.DT_INT8, **more)


def ended_task() -> CacheTask:
    task = CacheTask(1)
    task._end()
    return task


def check_each_argument(call: Call, good: dict[str, Any]) -> None:
    """With the others as they should be."""
    for name in good:
        for wrong in WRONG:
            error = raised_by(call, good | {name: wrong})
            assert error is None or is_ours(error), f"{name}={wrong!r}: {type(error).__name__}: {error}"


def check_true_is_1(call: Call, good: dict[str, Any]) -> None:
    for name, value in good.items():
        for one, true in ((1, True), ([1], [True]), ({1: 1}, {True: True}), ({1: [1]}, {True: [True]})):
            if type(value) is type(one):
                answers = [outcome(call, good | {name: number}) for number in (one, true)]
                assert answers[0] == answers[1], name


def outcome(call: Call, arguments: dict[str, Any]) -> tuple[type, Any]:
    error = raised_by(call, arguments)
    return type(error), getattr(error, "status_code", None)


def raised_by(call: Call, arguments: dict[str, Any]) -> Exception | None:
    try:
        call(**arguments)
    except Exception as error:  # noqa: BLE001 - which of them it may be is what is tested
        return error
    return None


def is_ours(error: Exception) -> bool:
    if isinstance(error, LLMException):
        return str(error) != "" and not re.search("nanobind|incompatible|NoneType' object", str(error))
    return any(type(error) is kind and words in str(error) for kind, words in OURS)


VALUES: list[tuple[Call, dict[str, Any]]] = [
    (CacheKey, {"cluster_id": 1, "req_id": 2, "model_id": 3, "prefix_id": 4}),
    (CacheKey, {"prompt_cluster_id": 1, "req_id": 2}),
    (BlocksCacheKey, {"cluster_id": 1, "model_id": 3}),
    (CacheKeyByIdAndIndex, {"cluster_id": 1, "cache_id": 2, "batch_index": 3}),
    (
        CacheDesc,
        {
            "num_tensors": 1,
            "shape": [2, 3],
            "data_type": DataType.DT_INT8,
            "placement": Placement.HOST,
            "batch_dim_index": 0,
            "seq_len_dim_index": 1,
            "kv_tensor_format": "ND",
        },
    ),
    (lambda data_type: CacheDesc(1, [2], data_type).size, {"data_type": DataType.DT_INT8}),
    (MemInfo, {"mem_type": Memtype.MEM_TYPE_DEVICE, "addr": 1, "size": 2}),
    (TransferConfig, {"dst_cluster_id": 1, "dst_addrs": [1, 2], "src_layer_range": range(1), "src_batch_index": 0}),
    (
        TransferWithCacheKeyConfig,
        {
            "cache_key": BlocksCacheKey(1),
            "src_layer_range": range(1),
            "dst_layer_range": range(1),
            "src_batch_index": 0,
        },
    ),
    (Cache.create_cpu_cache, {"cache_desc": desc(2, placement=Placement.HOST), "addrs": [1, 2]}),
    (KvCache.create_cpu_cache, {"cache_desc": desc(2, placement=Placement.HOST), "addrs": [1, 2]}),
    (LLMClusterInfo().append_local_ip_info, {"ip": LOOPBACK, "port": 1}),
    (LLMClusterInfo().append_remote_ip_info, {"ip": LOOPBACK, "port": 1}),
    (
        lambda remote_cluster_id: setattr(LLMClusterInfo(), "remote_cluster_id", remote_cluster_id),
        {"remote_cluster_id": 1},
    ),
    (lambda remote_role_type: setattr(LLMClusterInfo(), "remote_role_type", remote_role_type), {"remote_role_type": 1}),
    (ended_task().synchronize, {"timeout_in_millis": 0}),
    (LLMDataDist, {"role": LLMRole.MIX, "cluster_id": 1}),
    (CacheManager.check_cache_key, {"cache_key": CacheKey(1, 2)}),
    (parse_listen_ip_info, {"listen_ip_info": "127.0.0.1:1"}),
    (lambda layers: layer_range_to_tensor_indices(layers, layers), {"layers": [1]}),
    (lambda width: layer_range_to_tensor_indices([1], None, width), {"width": 2}),
]


@pytest.mark.parametrize(("call", "good"), VALUES)
def test_arguments_of_values(call: Call, good: dict[str, Any]) -> None:
    check_each_argument(call, good)
    check_true_is_1(call, good)


@pytest.mark.parametrize("name", [*dict.fromkeys(option.name for option in _OPTIONS), "ge_options"])
def test_properties_of_a_config(name: str) -> None:
    check_each_argument(lambda value: setattr(LLMConfig(), name, value), {"value": None})


def test_options_of_init() -> None:
    def init(options: Any) -> None:
        datadist = LLMDataDist(LLMRole.MIX, 1)
        try:
            datadist.init(options)
        finally:
            datadist.finalize()

    check_each_argument(init, {"options": {}})
    for option in ("a", "ge.flowGraphMemMaxSize", "llm.listenIpInfo", "llm.MemPoolConfig", "llm.LinkTotalTime"):
        check_each_argument(
            lambda value, name=option: init({"llm.EnableCacheManager": "1", name: value}), {"value": ""}
        )
    for name in (None, 1, "\udcff"):
        with pytest.raises(TypeError, match="only support"):
            init({name: ""})
    with pytest.raises(KeyError, match="role only support"):
        LLMDataDist(None, 1).init({"llm.EnableCacheManager": "1"})  # type: ignore[arg-type]


@pytest.mark.parametrize("remote", [False, True])
def test_arguments_of_a_cache_manager(start_here: Callable[..., Side], remote: bool) -> None:
    side = start_here(listen=False, enable_remote_cache_accessible=remote, mem_pool_cfg='{"memory_size": 1048576}')
    manager = side.manager
    rows, more_rows = (manager.register_cache(desc(), [1, 2, 3, 4]) for _ in range(2))
    blocks = manager.register_blocks_cache(desc(), [1, 2, 3, 4])
    host = Cache.create_cpu_cache(desc(placement=Placement.HOST), [1, 2, 3, 4])
    by_id, by_model = CacheKeyByIdAndIndex(5, 1), BlocksCacheKey(5)
    layers = {"src_layer_range": range(2), "dst_layer_range": range(2), "tensor_num_per_layer": 2}
    lists = {"src_blocks": [0], "dst_blocks": [1]}
    config = (
        TransferWithCacheKeyConfig(by_id, range(2), range(2)) if remote else TransferConfig(5, [1, 2, 3, 4], range(2))
    )
    calls: dict[str, dict[str, Any]] = {
        "register_cache": {
            "cache_desc": desc(),
            "addrs": [1, 2, 3, 4],
            "cache_keys": [CacheKey(1, 1)],
            "remote_accessible": True,
        },
        "register_blocks_cache": {
            "cache_desc": desc(),
            "addrs": [1, 2, 3, 4],
            "blocks_cache_key": by_model,
            "remote_accessible": True,
        },
        "unregister_cache": {"cache_id": 99},
        "remap_registered_memory": {"mem_infos": MemInfo(Memtype.MEM_TYPE_DEVICE, 1, 1)},
        "allocate_cache": {"cache_desc": desc(), "cache_keys": ()},
        "allocate_blocks_cache": {"cache_desc": desc(), "blocks_cache_key": None},
        "deallocate_cache": {"cache": more_rows},
        "deallocate_blocks_cache": {"cache": manager.register_blocks_cache(desc(), [1, 2, 3, 4])},
        "remove_cache_key": {"cache_key": CacheKey(1, 1)},
        "pull_cache": {"cache_key": by_id, "cache": rows, "batch_index": 0, "size": -1, **layers},
        "pull_blocks": {"src_cache_key": by_model, "dst_cache": blocks, **lists, **layers},
        "push_cache": {"dst_cache_key": by_id, "src_cache": rows, "src_batch_index": 0, "size": -1, **layers},
        "push_blocks": {"dst_cache_key": by_model, "src_cache": blocks, **lists, **layers},
        "transfer_cache_async": {
            "src_cache": rows,
            "layer_synchronizer": Events(2),
            "transfer_configs": [config],
            "src_block_indices": None,
            "dst_block_indices": None,
            "dst_block_memory_size": None,
        },
        "copy_cache": {
            "dst": rows,
            "src": more_rows,
            "dst_batch_index": 0,
            "src_batch_index": 0,
            "offset": 0,
            "size": -1,
            "req_id": 1,
        },
        "copy_blocks": {"cache": blocks, "copy_block_info": {0: [1]}},
        "swap_blocks": {"src_cache": blocks, "dst_cache": host, "src_to_dst": {0: 1}},
        "check_cache_key": {"cache_key": CacheKey(1, 1)},
    }
    assert set(calls) == {name for name in dir(manager) if not name.startswith("_")} - {"set_is_call_linked"}
    for name, good in calls.items():
        check_each_argument(getattr(manager, name), good)
        check_true_is_1(getattr(manager, name), good)


def test_what_was_written_into_a_description_or_a_configuration_since(start_here: Callable[..., Side]) -> None:
    manager = start_here(listen=False).manager
    cache = manager.register_cache(desc(), [1, 2, 3, 4])

    def register(shape: Any) -> None:
        described = desc()
        described._shape = shape
        manager.register_cache(described, [1, 2, 3, 4])

    def transfer(dst_addrs: Any, dst_layer_range: Any) -> None:
        config = TransferConfig(5, [1, 2, 3, 4], range(2))
        config._dst_addrs = dst_addrs
        config.dst_layer_range = dst_layer_range
        manager.transfer_cache_async(cache, Events(2), [config])

    check_each_argument(register, {"shape": [2, 3]})
    check_each_argument(transfer, {"dst_addrs": [1, 2, 3, 4], "dst_layer_range": None})


def test_arguments_of_an_instance(start_here: Callable[..., Side]) -> None:
    ours = {"kvferry.rendezvous_port": str(free_port())}
    datadist = start_here(ge_options=ours).datadist
    one = {"clusters": [cluster(5, 1)], "timeout": 200}
    calls: dict[str, dict[str, Any]] = {
        "link_clusters": one,
        "unlink_clusters": one | {"force": False},
        "switch_role": {"role": LLMRole.MIX, "switch_options": {}},
        "link": {"comm_name": "comm", "cluster_rank_info": {0: 0, 1: 1}, "rank_table": "{}"},
        "unlink": {"comm_id": 1},
        "query_register_mem_status": {"comm_id": 1},
        "check_link_status": {"remote_cluster_id": 1},
        "init": {"options": {}},
    }
    others = {"finalize", "cluster_id", "cache_manager", "kv_cache_manager", "llm_engine_instance"}
    assert set(calls) == {name for name in dir(datadist) if not name.startswith("_")} - others
    for name, good in calls.items():
        check_each_argument(getattr(datadist, name), good)
        check_true_is_1(getattr(datadist, name), good)


def switch_to(datadist: LLMDataDist, listen: Any) -> None:
    datadist.switch_role(LLMRole.MIX, {"llm.listenIpInfo": listen})


def test_the_listener_of_switch_role(start_here: Callable[..., Side]) -> None:
    datadist = start_here().datadist
    check_each_argument(lambda listen: switch_to(datadist, listen), {"listen": "x"})


@pytest.mark.parametrize("ip", [None, -1, 1 << 32])
def test_addresses_that_cannot_be_are_found_by_the_call_that_uses_them(here: Side, ip: Any) -> None:
    info = cluster(5, 1)
    info.append_local_ip_info(ip, 0)
    with pytest.raises(TypeError, match=r"local_ip_info_list\[1\] only support"):
        here.datadist.link_clusters([info], 200)
    here.datadist.unlink_clusters([info], 200)  # which looks at the remote ones alone
    info = cluster(5, 1)
    info.append_remote_ip_info(ip, 0)
    for call in (here.datadist.link_clusters, here.datadist.unlink_clusters):
        with pytest.raises(TypeError, match=r"remote_ip_info_list\[1\] only support"):
            call([info], 200)
    for entry in ("x", (1,), [1, 2], (1, None), (1, 1 << 16)):
        info = cluster(5, 1)
        info.remote_ip_info_list[:] = [entry]  # type: ignore[list-item]
        with pytest.raises(TypeError, match=r"remote_ip_info_list\[0\] only support"):
            here.datadist.link_clusters([info], 200)


@pytest.mark.parametrize("remote", [False, True])
def test_true_is_1_over_a_link(start_here: Callable[..., Side], start_there: Callable[..., Peer], remote: bool) -> None:
    here, there = (
        start_here(False, enable_remote_cache_accessible=remote),
        start_there(1, enable_remote_cache_accessible=remote),
    )
    source, far = there.call("register", [4, 8], req_ids=[0, 1]), there.call("register", [4, 8], blocks=True, model=1)
    for cache in (source, far):
        there.call("fill", cache)
    assert here.link(1, there.call("where"))[0] == 0
    rows, blocks = here.register([4, 8]), here.register([4, 8], blocks=True)
    yes: Any = True
    here.pull_cache(
        ("id", yes, yes, yes), rows, yes, -1, src_layer_range=(0, 2), dst_layer_range=(0, 2), tensor_num_per_layer=yes
    )
    here.pull_blocks(("blocks", yes, yes), blocks, [yes], [yes])
    sent = there.call("tensors", source)
    assert (here.tensors(rows)[0][1] == sent[0][1]).all() and (here.tensors(blocks)[0][1] == sent[0][1]).all()
    if remote:
        here.push_cache(("id", yes, yes, 2), rows, yes, tensor_num_per_layer=yes)
        here.push_blocks(("blocks", yes, yes), blocks, [yes], [2])
        config = ("key", ("id", yes, yes, 3), (0, 1), (0, 1), yes)
    else:
        here.pull_cache(("request", yes, yes), rows)
        config = ("addresses", yes, [int(address) + 3 * 32 for address in there.call("addresses", source)], None, yes)
    task = here.start(rows, [config])
    here.all_ready(task)
    assert here.results(task) == [0]
    rows_that_came = [2, 3] if remote else [3]
    assert (there.call("tensors", source)[0][rows_that_came] == sent[0][1]).all()
