"""``LLMConfig``: what each property takes, refuses and makes."""

import json
from typing import Any

import pytest

from llm_datadist import LLMConfig, LLMException, LLMStatusCode

PARAM_INVALID = LLMStatusCode.LLM_PARAM_INVALID
INT32 = (1 << 31) - 1

UNSET = {
    "device_id": None,
    "listen_ip_info": "",
    "sync_kv_timeout": None,
    "link_total_time": 0,
    "link_retry_count": 1,
    "rdma_traffic_class": None,
    "rdma_service_level": None,
    "buf_pool_cfg": "",
    "mem_pool_cfg": "",
    "host_mem_pool_cfg": "",
    "enable_cache_manager": False,
    "enable_remote_cache_accessible": False,
    "local_comm_res": "",
    "transfer_backend": "",
    "global_resource_config": "",
    "ge_options": {},
    "deploy_res_path": "",
    "enable_switch_role": False,
    "mem_utilization": 0.95,
    "cluster_info": "",
    "output_max_size": None,
}


@pytest.mark.parametrize("name", UNSET)
def test_unset_properties_read_as_the_vendors(name: str) -> None:
    assert getattr(LLMConfig(), name) == UNSET[name]


def test_nothing_is_emitted_for_unset_properties() -> None:
    assert LLMConfig().generate_options() == {"llm.MemoryUtilization": "0.95"}


def test_the_minimal_options_of_the_cache_managers_mode() -> None:
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    assert config.generate_options() == {
        "ge.exec.deviceId": "0",
        "ge.session_device_id": "0",
        "llm.EnableCacheManager": "1",
        "llm.MemoryUtilization": "0.95",
    }


EMITTED = [
    ("device_id", 3, {"ge.exec.deviceId": "3", "ge.session_device_id": "3"}),
    ("device_id", [0, 1], {"ge.exec.deviceId": "0;1", "ge.session_device_id": "0"}),
    ("device_id", (2,), {"ge.exec.deviceId": "2", "ge.session_device_id": "2"}),
    ("listen_ip_info", "127.0.0.1:7000", {"llm.listenIpInfo": "127.0.0.1:7000"}),
    ("listen_ip_info", "", {}),
    ("listen_ip_info", None, {}),
    ("sync_kv_timeout", 5000, {"llm.SyncKvCacheWaitTime": "5000"}),
    ("sync_kv_timeout", "5000", {"llm.SyncKvCacheWaitTime": "5000"}),
    ("link_total_time", 0, {"llm.LinkTotalTime": "0"}),
    ("link_total_time", (1 << 32) - 1, {"llm.LinkTotalTime": "4294967295"}),
    ("link_retry_count", 100, {"llm.LinkRetryCount": "100"}),
    ("rdma_traffic_class", 132, {"llm.RdmaTrafficClass": "132"}),
    ("rdma_service_level", 4, {"llm.RdmaServiceLevel": "4"}),
    ("buf_pool_cfg", "{}", {"llm.BufPoolCfg": "{}"}),
    ("mem_pool_cfg", '{"memory_size": 1}', {"llm.MemPoolConfig": '{"memory_size": 1}'}),
    ("host_mem_pool_cfg", '{"memory_size": 1}', {"llm.HostMemPoolConfig": '{"memory_size": 1}'}),
    ("enable_cache_manager", False, {"llm.EnableCacheManager": "0"}),
    ("enable_remote_cache_accessible", True, {"llm.EnableRemoteCacheAccessible": "1"}),
    ("local_comm_res", "", {"llm.LocalCommRes": ""}),
    ("transfer_backend", "", {"llm.TransferBackend": ""}),
    ("transfer_backend", "hixl", {"llm.TransferBackend": "hixl"}),
    ("global_resource_config", "", {"llm.GlobalResourceConfig": ""}),
    ("ge_options", {"a": "b"}, {"a": "b"}),
    ("deploy_res_path", "/x", {"llm.deployResPath": "/x"}),
    ("enable_switch_role", True, {"llm.EnableSwitchRole": "1"}),
    ("enable_switch_role", False, {}),
    ("mem_utilization", 0.5, {"llm.MemoryUtilization": "0.5"}),
    ("output_max_size", 8, {"llm.OutputMaxSize": "8"}),
]


@pytest.mark.parametrize(("name", "value", "options"), EMITTED)
def test_an_assigned_property_makes_its_option(name: str, value: Any, options: dict[str, str]) -> None:
    config = LLMConfig()
    setattr(config, name, value)
    assert getattr(config, name) == value
    assert config.gen_options() == {"llm.MemoryUtilization": "0.95"} | options


BROKEN_RULES = [
    ("device_id", -1),
    ("device_id", [0, -1]),
    ("sync_kv_timeout", 0),
    ("sync_kv_timeout", -1),
    ("sync_kv_timeout", "abc"),
    ("sync_kv_timeout", "²"),
    ("sync_kv_timeout", "-5"),
    ("link_total_time", -1),
    ("link_total_time", 1 << 32),
    ("link_retry_count", 0),
    ("link_retry_count", 101),
    ("mem_utilization", 1.01),
    ("mem_utilization", -0.1),
]


@pytest.mark.parametrize(("name", "value"), BROKEN_RULES)
def test_broken_rules_are_param_invalid(name: str, value: Any) -> None:
    with pytest.raises(LLMException) as caught:
        setattr(LLMConfig(), name, value)
    assert caught.value.status_code == PARAM_INVALID


OUT_OF_RANGE = [
    ("device_id", INT32 + 1),
    ("sync_kv_timeout", INT32 + 1),
    ("sync_kv_timeout", str(INT32 + 1)),
    ("rdma_traffic_class", -1),
    ("rdma_service_level", 1 << 32),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_out_of_range_is_value_error(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match="out of range"):
        setattr(LLMConfig(), name, value)


WRONG_TYPES = [
    ("device_id", None),
    ("device_id", "0"),
    ("device_id", ["0"]),
    ("listen_ip_info", 7000),
    ("sync_kv_timeout", 1.5),
    ("sync_kv_timeout", None),
    ("link_total_time", "1"),
    ("link_total_time", None),
    ("link_retry_count", 1.0),
    ("rdma_traffic_class", None),
    ("mem_pool_cfg", {}),
    ("enable_cache_manager", 1),
    ("enable_remote_cache_accessible", "1"),
    ("local_comm_res", {}),
    ("transfer_backend", 1),
    ("global_resource_config", {}),
    ("global_resource_config", 1),
    ("global_resource_config", []),
    ("ge_options", []),
    ("ge_options", "x"),
    ("ge_options", {"a": 1}),
    ("ge_options", {1: "a"}),
    ("mem_utilization", 1),
    ("mem_utilization", None),
    ("output_max_size", "8"),
]


@pytest.mark.parametrize(("name", "value"), WRONG_TYPES)
def test_wrong_types_are_type_error(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match="only support"):
        setattr(LLMConfig(), name, value)


def test_ge_options_none_is_attribute_error() -> None:
    with pytest.raises(AttributeError):
        LLMConfig().ge_options = None


def test_no_device_at_all_fails_when_options_are_generated() -> None:
    config = LLMConfig()
    config.device_id = []
    with pytest.raises(IndexError):
        config.generate_options()


def test_the_options_dict_is_one_object_that_only_grows() -> None:
    config = LLMConfig()
    config.listen_ip_info = "127.0.0.1:7000"
    first = config.generate_options()
    config.listen_ip_info = ""
    assert config.generate_options() is first is config.options
    assert first["llm.listenIpInfo"] == "127.0.0.1:7000"


def test_what_is_written_into_ge_options_is_kept() -> None:
    config = LLMConfig()
    config.ge_options["llm.LinkTotalTime"] = "5"  # never assigned before
    assert config.generate_options()["llm.LinkTotalTime"] == "5"
    assert LLMConfig().ge_options == {}


def test_named_properties_overwrite_ge_options() -> None:
    config = LLMConfig()
    config.ge_options = {"ge.exec.deviceId": "7", "ge.flowGraphMemMaxSize": "10"}
    config.device_id = 1
    assert config.generate_options()["ge.exec.deviceId"] == "1"
    assert config.generate_options()["ge.flowGraphMemMaxSize"] == "10"


def test_options_is_read_only() -> None:
    with pytest.raises(AttributeError):
        LLMConfig().options = {}  # type: ignore[misc]


def test_cluster_info_has_its_addresses_rewritten() -> None:
    config = LLMConfig()
    config.cluster_info = json.dumps({"cluster_id": 1, "listen_ip_info": [{"ip": "192.168.1.2", "port": 1}]})
    emitted = json.loads(config.generate_options()["llm.ClusterInfo"])
    assert emitted == {"cluster_id": 1, "listen_ip_info": [{"ip": 33663168, "port": 1}]}


def test_cluster_info_must_be_json() -> None:
    with pytest.raises(json.JSONDecodeError):
        LLMConfig().cluster_info = "{"
    with pytest.raises(TypeError):
        LLMConfig().cluster_info = None
