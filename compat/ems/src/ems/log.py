"""This package's logger."""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("ems")
_said: set[str] = set()


def say_once(sentence: str) -> None:
    """A warning, the first time in a process."""
    if sentence not in _said:
        _said.add(sentence)
        LOGGER.warning(sentence)
