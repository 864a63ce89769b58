"""Status codes, the one exception class, and the checks that raise it."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from llm_datadist.utils.log import get_logger


class LLMStatusCode(IntEnum):
    LLM_SUCCESS = 0x0
    LLM_FAILED = 0xFFFFFFFF
    LLM_WAIT_PROCESS_TIMEOUT = 0x5010B001
    LLM_KV_CACHE_NOT_EXIST = 0x5010B002
    LLM_REPEAT_REQUEST = 0x5010B003
    LLM_REQUEST_ALREADY_COMPLETED = 0x5010B004
    LLM_PARAM_INVALID = 0x5010B005
    LLM_ENGINE_FINALIZED = 0x5010B006
    LLM_NOT_YET_LINK = 0x5010B007
    LLM_ALREADY_LINK = 0x5010B008
    LLM_LINK_FAILED = 0x5010B009
    LLM_UNLINK_FAILED = 0x5010B00A
    LLM_NOTIFY_PROMPT_UNLINK_FAILED = 0x5010B00B
    LLM_CLUSTER_NUM_EXCEED_LIMIT = 0x5010B00C
    LLM_PROCESSING_LINK = 0x5010B00D
    LLM_DEVICE_OUT_OF_MEMORY = 0x5010B00E
    LLM_PREFIX_ALREADY_EXIST = 0x5010B00F
    LLM_PREFIX_NOT_EXIST = 0x5010B010
    LLM_SEQ_LENOVERLIMIT = 0x5010B011  # spelt so by the vendor
    LLM_NO_FREE_BLOCK = 0x5010B012
    LLM_BLOCKS_OUT_OF_MEMORY = 0x5010B013
    LLM_EXIST_LINK = 0x5010B018
    LLM_FEATURE_NOT_ENABLED = 0x5010B019
    LLM_TIMEOUT = 0x5010B01A
    LLM_LINK_BUSY = 0x5010B01B
    LLM_OUT_OF_MEMORY = 0x5010B01C
    LLM_DEVICE_MEM_ERROR = 507053
    LLM_SUSPECT_REMOTE_ERROR = 507057
    LLM_UNKNOWN_ERROR = -1

    def __str__(self) -> str:
        return f"LLMStatusCode.{self.name}"


class LLMException(RuntimeError):
    """Raised for every broken rule and failed operation that is not a plain type or range error.

    ``status_code`` is ``LLM_SUCCESS`` when nobody gave one; no code here leaves it out but ``CacheDesc.size``.
    """

    def __init__(self, *args: object, status_code: LLMStatusCode = LLMStatusCode.LLM_SUCCESS) -> None:
        super().__init__(*args)
        self._status_code = status_code

    @property
    def status_code(self) -> LLMStatusCode:
        return self._status_code


class Status:
    def __init__(self, status: LLMStatusCode) -> None:
        self._status = status

    def is_ok(self) -> bool:
        return self._status == LLMStatusCode.LLM_SUCCESS

    @property
    def status_code(self) -> LLMStatusCode:
        return self._status


_BY_NUMBER = {int(code): code for code in LLMStatusCode if code != LLMStatusCode.LLM_UNKNOWN_ERROR}


def code_2_status(code: int) -> LLMStatusCode:
    """The member with this number; ``LLM_FAILED`` for numbers that have none."""
    return _BY_NUMBER.get(code, LLMStatusCode.LLM_FAILED)


def failure(code: int, function: str, context: object) -> LLMException:
    """The exception for a failed call of ``function``."""
    status = code_2_status(code)
    return LLMException(f"[{function}] failed, error code is {status}, {context}.", status_code=status)


def no_thread(function: str, error: RuntimeError) -> LLMException:
    """The exception for a call that needs a thread, of which there is none to be had."""
    way_out = "raise the limit on them (ulimit -u, pids.max of the control group), or end some"
    return failure(LLMStatusCode.LLM_FAILED, function, f"out of threads ({error}): {way_out}")


def handle_llm_status(code: int, function: str, context: object) -> None:
    """Raises ``LLMException`` unless ``code`` is 0."""
    if code != LLMStatusCode.LLM_SUCCESS:
        error = failure(code, function, context)
        get_logger().error("%s", error, stacklevel=2)
        raise error


def raise_if_false(
    predicate: object,
    message: str,
    *args: object,
    status_code: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID,
    **kwargs: Any,
) -> None:
    """Logs and raises ``LLMException(message.format(*args, **kwargs))`` unless ``predicate`` is true."""
    if not predicate:
        _raise(message.format(*args, **kwargs), status_code)


def raise_if_true(
    predicate: object,
    message: str,
    *args: object,
    status_code: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID,
    **kwargs: Any,
) -> None:
    """Logs and raises ``LLMException(message.format(*args, **kwargs))`` if ``predicate`` is true."""
    if predicate:
        _raise(message.format(*args, **kwargs), status_code)


def _raise(message: str, status_code: LLMStatusCode) -> None:
    get_logger().error("%s", message, stacklevel=3)
    raise LLMException(message, status_code=status_code)
