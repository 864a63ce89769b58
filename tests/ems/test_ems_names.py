"""What callers import, and the small values: exceptions, options, keys, buffers, results."""

import importlib
import pickle
import subprocess
import sys
from enum import Enum

import pytest

import ems
from ems import CcKvOption, CcResult, EmsErrorCode, EmsException, KvBufferWrapper, KVCacheType, PrimaryKey

NAMES = """
    Ems EmsConfig EmsException EmsErrorCode ContextCaching ContextCache_v1 CcConfig CcConfig_v1 CcKvOption KvBufferWrapper
    PrimaryKey CcFuture CcResult KVCacheType EmsExcepiton
"""
DEEP = {"ems.common.exception": "EmsErrorCode EmsException", "ems.cc_v1.cc_config": "KVCacheType CcConfig_v1"}


def test_all_has_the_union_of_the_four_generations() -> None:
    assert set(ems.__all__) == set(NAMES.split())
    for name in ems.__all__:
        assert getattr(ems, name) is not None


@pytest.mark.parametrize("path", DEEP)
def test_deep_import_paths_lead_to_the_same_classes(path: str) -> None:
    module = importlib.import_module(path)
    for name in DEEP[path].split():
        assert getattr(module, name) is getattr(ems, name)


def test_importing_changes_nothing_and_imports_no_torch() -> None:
    script = (
        "import os, sys, threading; before = dict(os.environ); import ems; "
        "sys.exit('torch' in sys.modules or threading.active_count() != 1 or dict(os.environ) != before)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=30).returncode == 0


def test_an_exception_has_methods_for_code_and_message_and_says_both() -> None:
    error = EmsException(EmsErrorCode.EMS_IO_TIMEOUT, "too slow")
    assert error.status_code() == EmsErrorCode.EMS_IO_TIMEOUT
    assert error.status_code().name == "EMS_IO_TIMEOUT"
    assert error.message() == "too slow"
    assert str(error) == "EMS_IO_TIMEOUT: too slow"


def test_an_exception_survives_the_way_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(EmsException(EmsErrorCode.EMS_IO_ERROR, "gone")))
    assert (error.status_code(), error.message()) == (EmsErrorCode.EMS_IO_ERROR, "gone")


def test_error_codes_are_an_enum_with_the_vendors_spelling_and_the_right_one() -> None:
    assert issubclass(EmsErrorCode, Enum)
    assert [code.name for code in EmsErrorCode] == [
        "EMS_INVALID_ARGUMENT",
        "EMS_IO_ERROR",
        "EMS_IO_TIMEOUT",
        "EMS_INTERNAL_ERROR",
        "EMS_RECOVERD_ERROR",
    ]
    assert EmsErrorCode.EMS_RECOVERED_ERROR is EmsErrorCode.EMS_RECOVERD_ERROR
    assert ems.EmsExcepiton is EmsException


def test_options_have_the_documented_defaults() -> None:
    option = CcKvOption()
    assert (option.write_rcache, option.read_local_only, option.timeout) == (True, False, 5000)
    assert CcKvOption(timeout=3).timeout == 3


def test_primary_keys_are_equal_and_hash_by_both_parts() -> None:
    assert PrimaryKey("a", "b") == PrimaryKey("a", "b") != PrimaryKey("b", "a")
    assert len({PrimaryKey("a", "b"), PrimaryKey("a", "b"), PrimaryKey("a", "c")}) == 2
    assert repr(PrimaryKey("a", "b")) == "PrimaryKey(distribute_key='a', attribute_key='b')"


def test_a_buffer_calls_the_method_that_the_samples_pass_uncalled() -> None:
    assert KvBufferWrapper(lambda: 4096, 8).data_ptr == 4096
    assert KvBufferWrapper(data_ptr=4096, length=8).length == 8


def test_a_buffer_is_tiny_and_cannot_be_changed() -> None:
    one = KvBufferWrapper(4096, 8)
    assert not hasattr(one, "__dict__")
    with pytest.raises(AttributeError):
        one.length = 9  # type: ignore[misc]


def test_results_read_well_in_a_log() -> None:
    assert f"{CcResult(1, 2)}" == "CcResult(success=1, total=2)"


def test_cache_types_have_their_names_as_values() -> None:
    assert {kind.name: kind.value for kind in KVCacheType} == {name: name for name in ("GQA", "MHA", "MLA", "MQA")}
