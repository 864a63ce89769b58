"""The ``LLM_DATADIST`` logger: lines on stdout, level from ``ASCEND_GLOBAL_LOG_LEVEL`` (0..3), ``ERROR`` otherwise."""

from __future__ import annotations

import logging
import os
import sys
import time
from types import FrameType

_NAME = "LLM_DATADIST"
_LEVELS = {"0": logging.DEBUG, "1": logging.INFO, "2": logging.WARNING, "3": logging.ERROR}


def get_logger() -> logging.Logger:
    """The logger, set up at the first call."""
    logger = logging.getLogger(_NAME)
    if not any(isinstance(handler, _StdoutHandler) for handler in logger.handlers):
        handler = _StdoutHandler()
        handler.setFormatter(_LineFormatter())
        logger.addHandler(handler)
        logger.setLevel(_LEVELS.get(os.environ.get("ASCEND_GLOBAL_LOG_LEVEL", ""), logging.ERROR))
        logger.propagate = False
    return logger


class _StdoutHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever ``sys.stdout`` is when the line is written."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


class _LineFormatter(logging.Formatter):
    """``[LEVEL] LLM_DATADIST(pid,process):date time.mmm [file:line]thread function: message``"""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = (
            f"[{record.levelname}] {_NAME}({record.process},{record.processName}):{moment}.{int(record.msecs):03d} "
            f"[{record.filename}:{record.lineno}]{record.thread} {record.funcName}: {record.getMessage()}"
        )
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _find_caller(stack_info: bool = False, stacklevel: int = 1) -> tuple[str, int, str, str | None]:
    """(file, line, function, None) of the first frame outside this file; the outermost frame if there is none."""
    here = __file__
    frame: FrameType | None = sys._getframe(0)
    last = frame
    while frame is not None and frame.f_code.co_filename == here:
        last, frame = frame, frame.f_back
    found = frame or last
    assert found is not None
    return found.f_code.co_filename, found.f_lineno, found.f_code.co_name, None
