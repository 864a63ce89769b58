"""What ``Ems.init`` takes, and its rules. Plain values: assigned after construction, they count too."""

from __future__ import annotations

from dataclasses import dataclass, field

from ems.cc_v1.cc_config import CcConfig_v1, KVCacheType
from ems.common.exception import invalid

LONGEST_ID = 512  # characters


@dataclass
class CcConfig:
    """The configuration of V0, whose callers make their own keys."""

    rank_id: int
    device_id: int
    model_id: str
    tp_world_size: int = 1
    pp_world_size: int = 1


@dataclass
class EmsConfig:
    """``cc_config`` takes either generation's configuration; with none, context caching is off."""

    access_id: str | None = None
    access_key: str | None = field(default=None, repr=False)
    cc_config: CcConfig | CcConfig_v1 | None = None
    cc_config_v1: CcConfig_v1 | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """A checked `EmsConfig`: what can be assigned to it later changes nothing here."""

    access_id: str
    access_key: str | None
    cc: CcConfig | CcConfig_v1 | None
    kvcache_type: KVCacheType

    @classmethod
    def checked(cls, config: object) -> Settings:
        """:raises EmsException: ``EMS_INVALID_ARGUMENT``, naming the field."""
        if not isinstance(config, EmsConfig):
            raise invalid(f"Ems.init takes an EmsConfig, but got {type(config).__name__}")
        access_id = _identifier("access_id", config.access_id, optional=True)
        access_key = config.access_key or None  # callers without a key pass ""
        if access_key is not None and not isinstance(access_key, str):
            raise invalid(f"access_key must be a string or None, but is of type {type(access_key).__name__}")
        if access_key and not access_id:
            raise invalid("an access_key belongs to an access_id, and none is given")
        if config.cc_config is not None and config.cc_config_v1 is not None:
            raise invalid("cc_config and cc_config_v1 are both given; a process has one context caching object")
        given = config.cc_config if config.cc_config_v1 is None else config.cc_config_v1
        if given is None:
            return cls(access_id, access_key, None, KVCacheType.GQA)
        if isinstance(given, CcConfig):
            _check_common(given)
            copy: CcConfig | CcConfig_v1 = CcConfig(**vars(given))
            return cls(access_id, access_key, copy, KVCacheType.GQA)
        if not isinstance(given, CcConfig_v1):
            raise invalid(f"cc_config must be a CcConfig or CcConfig_v1, but is of type {type(given).__name__}")
        _check_common(given)
        for name in ("rank_in_tp_group", "rank_in_pp_group"):
            _number(name, getattr(given, name), least=0)
        if not isinstance(given.llm_engine, str) or not given.llm_engine.isprintable():
            raise invalid(f"llm_engine must be a printable string, but is {given.llm_engine!r:.80}")
        return cls(access_id, access_key, CcConfig_v1(**vars(given)), _kvcache_type(given.kvcache_type))


def _check_common(config: CcConfig | CcConfig_v1) -> None:
    # Not compared with each other: the vendor's samples have rank 8 of 1.
    for name, least in (("rank_id", 0), ("device_id", 0), ("tp_world_size", 1), ("pp_world_size", 1)):
        _number(name, getattr(config, name), least)
    _identifier("model_id", config.model_id, optional=False)


def _number(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise invalid(f"{name} must be an integer of at least {least}, but is {value!r}")


def _identifier(name: str, value: object, *, optional: bool) -> str:
    """The vendor's alphabet is not asked for: its own clients have an ``@`` in both."""
    if optional and (value is None or value == ""):
        return ""
    if not isinstance(value, str) or not 1 <= len(value) <= LONGEST_ID or not value.isprintable():
        raise invalid(f"{name} must be a string of 1 to {LONGEST_ID} printable characters, but is {value!r:.80}")
    return value


def _kvcache_type(value: object) -> KVCacheType:
    if isinstance(value, KVCacheType):
        return value
    try:
        return KVCacheType(value)
    except ValueError:
        names = ", ".join(KVCacheType.__members__)
        raise invalid(f"kvcache_type must be one of {names}, but is {value!r}") from None
