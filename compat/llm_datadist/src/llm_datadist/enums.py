"""Small enumerations. Values are the vendor's; in the vendor's newest release role and placement are ``IntEnum``."""

from __future__ import annotations

from enum import Enum, IntEnum


class LLMRole(IntEnum):
    PROMPT = 1
    DECODER = 2
    MIX = 3

    def __str__(self) -> str:
        return f"LLMRole.{self.name}"


class Placement(IntEnum):
    """Serves argument checks only: ``DEVICE`` is host memory here."""

    HOST = 0
    DEVICE = 1

    def __str__(self) -> str:
        return f"Placement.{self.name}"


class RegisterMemStatus(Enum):
    OK = 0
    PREPARING = 1
    FAILED = 2


class Memtype(Enum):
    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


class PushType(Enum):
    NO_CACHE_KEY = 0
    BLOCKS_CACHE_KEY = 1
    CACHE_KEY_BY_ID = 2
