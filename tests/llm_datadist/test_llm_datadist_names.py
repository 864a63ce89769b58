"""What callers import: top-level names, deep paths, the older mode's lazy names, constants, the logger."""

import importlib
import logging
import subprocess
import sys
import threading

import pytest

import llm_datadist
from llm_datadist import LLMStatusCode
from llm_datadist.utils import log

OLDER_MODE = ["TensorDesc", "Tensor", "KvCacheManager"]
NAMES = """
    LLMClusterInfo LLMStatusCode LLMException LLMRole LlmConfig LLMConfig DataType Status CacheDesc CacheKey
    CacheKeyByIdAndIndex KvCache Cache BlocksCacheKey LLMDataDist Placement RegisterMemStatus LayerSynchronizer
    TransferConfig CacheTask TransferWithCacheKeyConfig Memtype MemInfo
"""
ALL = {*NAMES.split(), *OLDER_MODE}


def test_all_lists_the_vendors_26_names() -> None:
    assert set(llm_datadist.__all__) == ALL
    assert len(llm_datadist.__all__) == 26


def test_every_name_of_v2_list_exists() -> None:
    assert set(llm_datadist.v2_list) == ALL - set(OLDER_MODE)
    for name in llm_datadist.v2_list:
        assert getattr(llm_datadist, name) is not None


def test_both_spellings_of_the_config_are_one_class() -> None:
    assert llm_datadist.LLMConfig is llm_datadist.LlmConfig


@pytest.mark.parametrize("name", OLDER_MODE)
def test_older_mode_names_need_a_package_that_is_not_here(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="llm_datadist_v1"):
        getattr(llm_datadist, name)


def test_star_import_fails_without_the_older_mode() -> None:
    with pytest.raises(ImportError):
        exec("from llm_datadist import *", {})


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute"):
        llm_datadist.no_such_name  # noqa: B018


DEEP = {
    "llm_datadist.v2.llm_types": "RegisterMemStatus Cache Memtype MemInfo TransferWithCacheKeyConfig PushType CacheTask",
    "llm_datadist.v2.llm_datadist": "LLMDataDist _shutdown_handler EngineConfig",
    "llm_datadist.v2.llm_utils": "layer_range_to_tensor_indices parse_listen_ip_info",
    "llm_datadist.v2.cache_manager": "CacheManager",
    "llm_datadist.configs": "LlmConfig LLMConfig",
    "llm_datadist.status": "LLMException Status code_2_status handle_llm_status raise_if_false raise_if_true",
    "llm_datadist.data_type": (
        "DataType dtype_to_np_dtype valid_np_dtypes np_dtype_to_dtype python_dtype_2_dwrapper_dtype "
        "get_python_dtype_from_wrapper_dtype"
    ),
    "llm_datadist.utils.utils": (
        "check_uint64 check_int64 check_int32 check_uint32 check_uint16 check_uint8 check_list_int32 check_list_int64 "
        "check_list_uint64 check_isinstance check_dict check_inner check_positive_or_set_default"
    ),
    "llm_datadist.utils.log": "_find_caller get_logger",
    "llm_datadist.metadef_wrapper": "",
    "llm_datadist.llm_datadist_wrapper": "kSuccess calc_tensor_size dict_to_vector",
}


@pytest.mark.parametrize("path", DEEP)
def test_deep_import_paths(path: str) -> None:
    module = importlib.import_module(path)
    for name in DEEP[path].split():
        assert hasattr(module, name), f"{path}.{name}"


def test_wrapper_constants_are_the_status_numbers() -> None:
    from llm_datadist import llm_datadist_wrapper as wrapper

    constants = {name: value for name, value in vars(wrapper).items() if name.startswith("k") and name[1].isupper()}
    assert len(constants) == 28
    assert set(constants.values()) == {int(code) for code in LLMStatusCode} - {-1}
    assert constants["kSuccess"] == 0
    assert constants["kLinKFailed"] == LLMStatusCode.LLM_LINK_FAILED


def test_wrapper_functions() -> None:
    from llm_datadist import llm_datadist_wrapper as wrapper

    assert wrapper.calc_tensor_size([2, 3], 1) == 12
    assert wrapper.calc_tensor_size([2, -3], 1) < 0
    assert wrapper.calc_tensor_size([2, 3], 5) < 0
    assert wrapper.dict_to_vector({"a": "b"}) == [("a", "b")]


def test_numpy_maps_have_the_vendors_sizes() -> None:
    from llm_datadist import data_type

    assert len(data_type.dtype_to_np_dtype) == 14
    assert len(data_type.valid_np_dtypes) == 14
    assert len(data_type.np_dtype_to_dtype) == 13
    assert data_type.DataType.DT_BF16 not in data_type.np_dtype_to_dtype.values()
    assert data_type.get_python_dtype_from_wrapper_dtype(27) is data_type.DataType.DT_BF16
    with pytest.raises(AttributeError, match="has no attribute"):
        data_type.no_such_map  # noqa: B018


def test_importing_does_not_import_torch() -> None:
    script = "import sys, llm_datadist; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=30).returncode == 0


def test_logger_writes_its_line_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    log.get_logger().error("said %s", "so")
    line = capsys.readouterr().out
    assert line.startswith("[ERROR] LLM_DATADIST(")
    assert "test_llm_datadist_names.py:" in line
    assert line.endswith("test_logger_writes_its_line_to_stdout: said so\n")


def test_logger_is_quiet_below_error() -> None:
    assert log.get_logger() is logging.getLogger("LLM_DATADIST")
    assert log.get_logger().level == logging.ERROR


@pytest.mark.parametrize(
    ("number", "level"), [("0", "DEBUG"), ("1", "INFO"), ("2", "WARNING"), ("3", "ERROR"), ("9", "ERROR")]
)
def test_level_comes_from_the_environment(number: str, level: str) -> None:
    script = (
        "import logging; from llm_datadist.utils.log import get_logger; print(logging.getLevelName(get_logger().level))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script],
        env={"ASCEND_GLOBAL_LOG_LEVEL": number, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert answer.stdout.strip() == level


def test_find_caller_works_in_a_threads_top_frame() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(log._find_caller()))
    thread.start()
    thread.join()
    assert len(found[0]) == 4
