"""The value classes: enumerations, statuses, descriptions, keys, cluster addresses, configurations, tasks."""

import enum
import threading
from typing import Any

import pytest

from interrupt_support import interrupted
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    DataType,
    KvCache,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMException,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
    RegisterMemStatus,
    Status,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist.status import code_2_status, handle_llm_status, raise_if_false, raise_if_true
from llm_datadist.utils import utils
from llm_datadist.v2.llm_types import PushType
from llm_datadist.v2.llm_utils import layer_range_to_tensor_indices, parse_listen_ip_info

PARAM_INVALID = LLMStatusCode.LLM_PARAM_INVALID
NO_ID = 2**64 - 1


def fails_param_invalid(call: Any, match: str | None = None) -> None:
    with pytest.raises(LLMException, match=match) as caught:
        call()
    assert caught.value.status_code == PARAM_INVALID


# --- enumerations and statuses


def test_enumerations_have_the_vendors_members() -> None:
    assert {member.name: member.value for member in LLMRole} == {"PROMPT": 1, "DECODER": 2, "MIX": 3}
    assert {member.name: member.value for member in Placement} == {"HOST": 0, "DEVICE": 1}
    assert {member.name: member.value for member in RegisterMemStatus} == {"OK": 0, "PREPARING": 1, "FAILED": 2}
    assert {member.name: member.value for member in Memtype} == {"MEM_TYPE_DEVICE": 0, "MEM_TYPE_HOST": 1}
    assert [member.value for member in PushType] == [0, 1, 2]
    assert len(DataType) == 14
    assert DataType.DT_BF16.value == 27


def test_role_placement_and_status_are_ints_and_the_others_are_not() -> None:
    for kind in (LLMRole, Placement, LLMStatusCode):
        assert issubclass(kind, enum.IntEnum)
    for other in (RegisterMemStatus, Memtype, DataType, PushType):
        assert not issubclass(other, int)
    assert str(LLMRole.PROMPT) == "LLMRole.PROMPT"
    assert str(Placement.DEVICE) == "Placement.DEVICE"
    assert str(LLMStatusCode.LLM_TIMEOUT) == f"{LLMStatusCode.LLM_TIMEOUT}" == "LLMStatusCode.LLM_TIMEOUT"
    assert len({*DataType, *LLMStatusCode, *RegisterMemStatus}) == len(DataType) + len(LLMStatusCode) + 3


def test_status_numbers() -> None:
    assert len(LLMStatusCode) == 29
    assert LLMStatusCode.LLM_FAILED == 4294967295
    assert LLMStatusCode.LLM_KV_CACHE_NOT_EXIST == 1343270914
    assert LLMStatusCode.LLM_OUT_OF_MEMORY == 1343270940


def test_exception_and_status() -> None:
    assert issubclass(LLMException, RuntimeError)
    assert LLMException("x").status_code == LLMStatusCode.LLM_SUCCESS
    assert LLMException("x", status_code=PARAM_INVALID).status_code == PARAM_INVALID
    assert Status(LLMStatusCode.LLM_SUCCESS).is_ok()
    assert not Status(PARAM_INVALID).is_ok()
    assert Status(PARAM_INVALID).status_code == PARAM_INVALID


def test_code_2_status_maps_unknown_codes_to_failed() -> None:
    assert code_2_status(0x5010B002) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    for unknown in (0x5010B014, 0x5010B015, 0x5010B016, 0x5010B017, -1, 12345):
        assert code_2_status(unknown) is LLMStatusCode.LLM_FAILED


def test_handle_llm_status_raises_for_all_but_success() -> None:
    handle_llm_status(0, "f", "context")
    with pytest.raises(LLMException) as caught:
        handle_llm_status(0x5010B01A, "f", "context")
    assert str(caught.value) == "[f] failed, error code is LLMStatusCode.LLM_TIMEOUT, context."
    assert caught.value.status_code == LLMStatusCode.LLM_TIMEOUT


def test_raise_if_formats_its_message() -> None:
    raise_if_false(True, "{}")
    raise_if_true(False, "{}")
    fails_param_invalid(lambda: raise_if_false(False, "{} of {n}", 1, n=2), "1 of 2")
    with pytest.raises(LLMException) as caught:
        raise_if_true(True, "no", status_code=LLMStatusCode.LLM_FAILED)
    assert caught.value.status_code == LLMStatusCode.LLM_FAILED
    with pytest.raises((KeyError, IndexError)):
        raise_if_false(False, "a literal {brace}")


@pytest.mark.parametrize(
    ("check", "low", "high"),
    [
        (utils.check_uint8, 0, 2**8 - 1),
        (utils.check_uint16, 0, 2**16 - 1),
        (utils.check_uint32, 0, 2**32 - 1),
        (utils.check_int32, -(2**31), 2**31 - 1),
        (utils.check_uint64, 0, 2**64 - 1),
        (utils.check_int64, -(2**63), 2**63 - 1),
    ],
)
def test_integer_checks(check: Any, low: int, high: int) -> None:
    for fine in (low, high, True):
        check("x", fine)
    for outside in (low - 1, high + 1):
        with pytest.raises(ValueError, match="out of range"):
            check("x", outside)
    for wrong in (None, "1", 1.0):
        with pytest.raises(TypeError, match="only support"):
            check("x", wrong)


def test_other_checks() -> None:
    assert utils.check_isinstance("x", None, [int]) is None
    for check in (utils.check_list_int32, utils.check_list_int64, utils.check_list_uint64):
        check("x", [1, 2])
        with pytest.raises(TypeError, match="only support"):
            check("x", ["1"])
    utils.check_dict("x", {"a": 1}, str, int)
    with pytest.raises(TypeError, match="only support"):
        utils.check_dict("x", {"a": "b"}, str, int)
    assert utils.check_positive_or_set_default("x", None) == -1
    assert utils.check_positive_or_set_default("x", 4) == 4
    with pytest.raises(ValueError, match="out of range"):
        utils.check_positive_or_set_default("x", -4)


def test_type_checks_look_into_what_is_held() -> None:
    held = [1, 2]
    assert utils.check_isinstance("ids", held, [list, tuple], int) is held
    assert utils.check_isinstance("ids", None, list, int) is None
    with pytest.raises(TypeError, match=r"ids\[1\] only support int"):
        utils.check_isinstance("ids", [1, "2"], [list, tuple], inner_class=int)
    with pytest.raises(TypeError, match="link: ids only support list, tuple, but got float"):
        utils.check_isinstance("ids", 1.5, [list, tuple], extra_fmt="link: ")
    utils.check_dict("moves", {"a": [1], "b": []}, str, list, int)
    with pytest.raises(TypeError, match=r"moves dict key.* only support"):
        utils.check_dict("moves", {1: [1]}, str, list, int)
    with pytest.raises(TypeError, match=r"moves dict value.* only support"):
        utils.check_dict("moves", {"a": [1], "b": ["2"]}, str, list, int)


# --- addresses


def test_cluster_info_keeps_little_endian_addresses() -> None:
    cluster = LLMClusterInfo()
    assert cluster.remote_cluster_id is None
    assert cluster.remote_role_type is None
    cluster.remote_cluster_id = NO_ID
    cluster.remote_role_type = LLMRole.PROMPT
    cluster.append_local_ip_info("192.168.1.2", 0)
    cluster.append_local_ip_info("127.1", 65535)
    cluster.append_remote_ip_info(16777343, 26000)
    assert cluster.local_ip_info_list == [(33663168, 0), (16777343, 65535)]
    assert cluster.remote_ip_info_list == [(16777343, 26000)]


@pytest.mark.parametrize("ip", ["localhost", "::1", "1.2.3.4.5", ""])
def test_what_is_no_ipv4_address_is_a_runtime_error(ip: str) -> None:
    with pytest.raises(RuntimeError, match="Can not parse ip str:"):
        LLMClusterInfo().append_local_ip_info(ip, 1)


def test_cluster_info_checks_types_and_ranges() -> None:
    cluster = LLMClusterInfo()
    with pytest.raises(ValueError, match="out of range"):
        cluster.remote_cluster_id = 1 << 64
    with pytest.raises(TypeError):
        cluster.remote_cluster_id = "1"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="out of range"):
        cluster.append_remote_ip_info("127.0.0.1", 65536)
    with pytest.raises(TypeError):
        cluster.append_remote_ip_info("127.0.0.1", "1")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        cluster.append_remote_ip_info(1.5, 1)  # type: ignore[arg-type]


def test_listen_strings() -> None:
    assert parse_listen_ip_info("127.0.0.1:7000") == ("127.0.0.1", 7000)
    fails_param_invalid(lambda: parse_listen_ip_info("127.0.0.1"), "listenIpInfo")
    fails_param_invalid(lambda: parse_listen_ip_info("::1:7000"), "listenIpInfo")
    with pytest.raises(ValueError, match="x"):
        parse_listen_ip_info("127.0.0.1:x")


def test_layer_ranges_as_tensors() -> None:
    assert layer_range_to_tensor_indices(range(1, 3), range(2)) == ([2, 3, 4, 5], [0, 1, 2, 3])
    assert layer_range_to_tensor_indices(None, range(0), 3) == ([], [])
    assert layer_range_to_tensor_indices(range(1, 2), None, 3) == ([3, 4, 5], [])


# --- descriptions and caches


def test_cache_desc_members() -> None:
    desc = CacheDesc(1, [2, 4], DataType.DT_FLOAT16)
    assert repr(desc) == (
        "CacheDesc(num_tensors=1, shape=[2, 4], data_type=DataType.DT_FLOAT16, placement=Placement.DEVICE, "
        "batch_dim_index=0, seq_len_dim_index=-1,kv_tensor_format=None)"
    )
    assert (desc.num_tensors, desc.shape, desc.batch_dim, desc.batch_size) == (1, [2, 4], 0, 2)
    assert desc.placement is Placement.DEVICE
    assert desc.size == 16
    desc.update_dim(0, 5)
    assert (desc.size, desc.batch_size) == (40, 2)


def test_cache_desc_keeps_the_callers_list() -> None:
    shape = [2, 4]
    CacheDesc(1, shape, DataType.DT_INT8).update_dim(1, 9)
    assert shape == [2, 9]
    with pytest.raises(TypeError):
        CacheDesc(1, (2, 4), DataType.DT_INT8).update_dim(1, 9)


@pytest.mark.parametrize(
    ("dtype", "bytes_each"),
    [
        (DataType.DT_FLOAT, 4),
        (DataType.DT_BF16, 2),
        (DataType.DT_BOOL, 1),
        (DataType.DT_STRING, 16),
        (DataType.DT_DOUBLE, 8),
    ],
)
def test_size_of_one_tensor(dtype: DataType, bytes_each: int) -> None:
    assert CacheDesc(4, [3, 5], dtype).size == 15 * bytes_each


def test_size_of_an_impossible_shape_has_no_failure_status() -> None:
    with pytest.raises(LLMException) as caught:
        CacheDesc(1, [2, -1], DataType.DT_INT8).size  # noqa: B018
    assert caught.value.status_code == LLMStatusCode.LLM_SUCCESS


def test_cache_desc_rules() -> None:
    fails_param_invalid(lambda: CacheDesc(1, [], DataType.DT_INT8))
    fails_param_invalid(lambda: CacheDesc(1, [2], DataType.DT_INT8, batch_dim_index=1))
    fails_param_invalid(lambda: CacheDesc(1, [2], DataType.DT_INT8, batch_dim_index=-1))
    fails_param_invalid(lambda: CacheDesc(1, [2], DataType.DT_INT8, seq_len_dim_index=1))
    fails_param_invalid(lambda: CacheDesc(1, [2], DataType.DT_INT8, seq_len_dim_index=-2))
    CacheDesc(0, (2, 3), DataType.DT_INT8, Placement.HOST, 1, 1, "ND")


@pytest.mark.parametrize(
    "arguments",
    [
        ("1", [2], DataType.DT_INT8),
        (1, "2", DataType.DT_INT8),
        (1, ["2"], DataType.DT_INT8),
        (1, [2], 2),
        (1, [2], DataType.DT_INT8, 1),
    ],
)
def test_cache_desc_types(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="only support"):
        CacheDesc(*arguments)


def test_cache_desc_ranges() -> None:
    for arguments in ((-1, [2]), (1 << 32, [2]), (1, [1 << 63])):
        with pytest.raises(ValueError, match="out of range"):
            CacheDesc(*arguments, DataType.DT_INT8)


def test_cpu_cache_is_for_swapping_alone() -> None:
    host = CacheDesc(2, [4, 2], DataType.DT_INT8, Placement.HOST)
    cache = Cache.create_cpu_cache(host, [1, 2])
    assert (cache.cache_id, cache.is_blocks_cache, cache.tensor_addrs) == (-1, True, [1, 2])
    assert str(cache) == "Cache(cache_id = -1, device_tensor_addrs = 2, is_blocks_cache = True)"
    fails_param_invalid(lambda: Cache.create_cpu_cache(host, [1]))
    fails_param_invalid(lambda: Cache.create_cpu_cache(CacheDesc(2, [4], DataType.DT_INT8), [1, 2]))
    with pytest.raises(TypeError, match="only support"):
        Cache.create_cpu_cache(host, (1, 2))  # type: ignore[arg-type]


def test_per_device_addresses_are_the_addresses_of_one_device() -> None:
    cache = Cache.create_cpu_cache(CacheDesc(2, [4], DataType.DT_INT8, Placement.HOST), [1, 2])
    assert cache.per_device_tensor_addrs == [[1, 2]]


def test_older_modes_cpu_cache() -> None:
    host = CacheDesc(2, [4, 2], DataType.DT_INT8, Placement.HOST)
    assert KvCache.create_cpu_cache(host, [1, 2]).per_device_tensor_addrs == [[1, 2]]
    cache = KvCache.create_cpu_cache(host, [[1, 2], [3, 4]])
    assert str(cache) == "KvCache(cache_id = -1, num_devices = 2)"
    fails_param_invalid(lambda: KvCache.create_cpu_cache(host, []))
    fails_param_invalid(lambda: KvCache.create_cpu_cache(host, [[1, 2], [3]]))


# --- keys


def test_cache_key_takes_both_names_of_the_cluster() -> None:
    key = CacheKey(1, 2, 3, 4)
    assert (key.cluster_id, key.prompt_cluster_id, key.req_id, key.model_id, key.prefix_id) == (1, 1, 2, 3, 4)
    key = CacheKey(prompt_cluster_id=0, req_id=1, model_id=0)
    assert repr(key) == f"CacheKey(cluster_id=0, req_id=1, prefix_id={NO_ID}, model_id=0)"
    assert CacheKey(prompt_cluster_id=7, cluster_id=8, req_id=1).cluster_id == 8
    assert CacheKey(5, 6, cluster_id=9).cluster_id == 5


def test_cache_key_rules() -> None:
    fails_param_invalid(lambda: CacheKey(req_id=1), "cluster_id is required")
    fails_param_invalid(lambda: CacheKey(1), "req_id is required")
    fails_param_invalid(lambda: CacheKey(1, 2, foo=3), "Unsupported param:foo")
    fails_param_invalid(lambda: CacheKey(1, 2, 3, 4, 5))
    with pytest.raises(ValueError, match="out of range"):
        CacheKey(-1, 2)
    with pytest.raises(TypeError, match="only support"):
        CacheKey(1, None)  # type: ignore[arg-type]


def test_keys_compare_by_identity() -> None:
    assert CacheKey(1, 2) != CacheKey(1, 2)
    assert BlocksCacheKey(1) != BlocksCacheKey(1)


def test_blocks_cache_key() -> None:
    assert repr(BlocksCacheKey(1, 2)) == "BlocksCacheKey(cluster_id=1, model_id=2)"
    key = BlocksCacheKey(prompt_cluster_id=1)
    assert repr(key) == "BlocksCacheKey(prompt_cluster_id=1, model_id=0)"
    assert (key.cluster_id, key.prompt_cluster_id, key.model_id) == (1, 1, 0)
    fails_param_invalid(lambda: BlocksCacheKey(), "cluster_id is required")
    fails_param_invalid(lambda: BlocksCacheKey(1, 2, 3))
    fails_param_invalid(lambda: BlocksCacheKey(1, req_id=3), "Unsupported param:req_id")
    with pytest.raises(TypeError, match="only support"):
        BlocksCacheKey("1")  # type: ignore[arg-type]
    BlocksCacheKey(-1)  # noticed when it is used


def test_key_by_id_and_index() -> None:
    key = CacheKeyByIdAndIndex(1, 2)
    assert repr(key) == "CacheKeyByIdAndIndex(cluster_id=1, cache_id=2, batch_index=0)"
    assert CacheKeyByIdAndIndex(1, -1, batch_index=3).batch_index == 3
    for arguments in ((-1, 1), (1, 1 << 63), (1, 1, -1)):
        with pytest.raises(ValueError, match="out of range"):
            CacheKeyByIdAndIndex(*arguments)


# --- memory, configurations, tasks


def test_mem_info() -> None:
    info = MemInfo(Memtype.MEM_TYPE_DEVICE, 1, 2)
    assert repr(info) == "MemInfo(mem_type=Memtype.MEM_TYPE_DEVICE, addr=1, size=2)"
    with pytest.raises(TypeError, match="only support"):
        MemInfo(0, 1, 2)  # type: ignore[arg-type]


def test_a_synchronizer_must_implement_its_method() -> None:
    with pytest.raises(TypeError):
        LayerSynchronizer()  # type: ignore[abstract]


def test_transfer_config() -> None:
    config = TransferConfig(1, [2, 3], range(1))
    assert (
        repr(config)
        == "TransferConfig(dst_cluster_id=1, dst_addrs=[2, 3], src_layer_range=range(0, 1), src_batch_index=0)"
    )
    config.src_layer_range = None
    config.dst_addrs = (4, 5)
    config.src_batch_index = 7
    assert (config.src_layer_range, config.dst_layer_range, config.src_batch_index) == (None, None, 7)


@pytest.mark.parametrize("layers", [range(0), range(2, 1), range(0, 4, 2), range(-1, 2)])
def test_layer_ranges_must_be_plain(layers: range) -> None:
    fails_param_invalid(lambda: TransferConfig(1, [2, 3], layers))
    fails_param_invalid(lambda: TransferWithCacheKeyConfig(BlocksCacheKey(1), layers, layers))


def test_transfer_config_types() -> None:
    with pytest.raises(TypeError, match="only support"):
        TransferConfig(1, [2, 3], [0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="only support"):
        TransferConfig(1, 2)  # type: ignore[arg-type]
    for arguments in ((-1, []), (1, [-1]), (1, [], None, -1)):
        with pytest.raises(ValueError, match="out of range"):
            TransferConfig(*arguments)


def test_transfer_with_cache_key_config() -> None:
    key = CacheKeyByIdAndIndex(4, 1)
    config = TransferWithCacheKeyConfig(key, range(1, 3), range(2), 1)
    assert (config.cache_key, config.dst_cluster_id, config.src_batch_index) == (key, 4, 1)
    config.src_layer_range = None
    config.dst_layer_range = range(9)
    config.cache_key = CacheKeyByIdAndIndex(5, 1)
    assert config.dst_cluster_id == 4


def test_transfer_with_cache_key_config_rules() -> None:
    key = BlocksCacheKey(1)
    for layers in ((None, range(1)), (range(1), None), ([0], [0])):
        with pytest.raises(TypeError, match="only support"):
            TransferWithCacheKeyConfig(key, *layers)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="only support"):
        TransferWithCacheKeyConfig(None, range(1), range(1))  # type: ignore[arg-type]
    fails_param_invalid(lambda: TransferWithCacheKeyConfig(key, range(1), range(2)))
    fails_param_invalid(lambda: TransferWithCacheKeyConfig(key, range(1), range(1), 1))


def test_a_running_task_answers_timeout() -> None:
    task = CacheTask(2)
    assert task.synchronize(10) == LLMStatusCode.LLM_TIMEOUT
    assert task.get_results(0) == [LLMStatusCode.LLM_TIMEOUT] * 2


def test_a_task_whose_waits_signal_handlers_leave_answers_the_next_one() -> None:
    for task in interrupted(lambda: CacheTask(1), lambda task: task.synchronize(1)):
        came: list[LLMStatusCode] = []
        threads = [threading.Thread(target=work, args=(task, came), daemon=True) for work in (_synchronize, _end)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert came == [LLMStatusCode.LLM_SUCCESS]


def _synchronize(task: CacheTask, came: "list[LLMStatusCode]") -> None:
    came.append(task.synchronize())


def _end(task: CacheTask, came: "list[LLMStatusCode]") -> None:
    task._record(0, LLMStatusCode.LLM_SUCCESS)
    task._end()


def test_a_task_answers_its_first_failure() -> None:
    task = CacheTask(3)
    task._record(0, LLMStatusCode.LLM_SUCCESS)
    task._record(2, LLMStatusCode.LLM_NOT_YET_LINK)
    threading.Timer(0.05, task._end).start()
    assert task.synchronize() == LLMStatusCode.LLM_NOT_YET_LINK
    assert task.get_results() == [LLMStatusCode.LLM_SUCCESS, None, LLMStatusCode.LLM_NOT_YET_LINK]
    with pytest.raises(ValueError, match="out of range"):
        task.synchronize(-1)
    with pytest.raises(TypeError, match="only support"):
        task.get_results("1")  # type: ignore[arg-type]
