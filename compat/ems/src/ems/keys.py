"""The pool's keys: 32 bytes of BLAKE2b over everything that must tell two values apart.

Each part goes in as its length (4 bytes, little-endian) and its UTF-8, so no two lists of parts read the same. The formula
stands in docs/migrating-ems.md and in the tests: values that one version saved are found by the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from ems.cc_v1.cc_config import CcConfig_v1, KVCacheType
from ems.config import Settings
from ems.values import PrimaryKey

KEY_BYTES = 32


def v0_keys(settings: Settings, keys: Iterable[str | PrimaryKey]) -> tuple[list[bytes], list[bytes]]:
    """(keys, what they are routed by)."""
    base = _hash("ems v0", settings.access_id, settings.cc.model_id if settings.cc else "")
    digests, routes = [], []
    for key in keys:
        own = base.copy()
        if isinstance(key, PrimaryKey):
            own.update(_framed("primary", key.distribute_key, key.attribute_key))
            routes.append(key.distribute_key.encode())
        else:
            own.update(_framed("string", key))
            routes.append(key.encode())
        digests.append(own.digest())
    return digests, routes


class V1Keys:
    """Keys of blocks by their hashes, for one rank and the geometry of its registered cache."""

    def __init__(self, settings: Settings, geometry: str) -> None:
        cc = settings.cc
        assert isinstance(cc, CcConfig_v1)
        # All ranks of a TP group have the same MLA cache, so they share its keys.
        tp_rank = "all" if settings.kvcache_type is KVCacheType.MLA else str(cc.rank_in_tp_group)
        self._base = _hash(
            "ems v1",
            settings.access_id,
            cc.model_id,
            cc.llm_engine,
            str(cc.tp_world_size),
            str(cc.pp_world_size),
            tp_rank,
            str(cc.rank_in_pp_group),
            settings.kvcache_type.value,
            geometry,
        )

    def of_hashes(self, hashes: Sequence[int], uneven: Mapping[int, str] | None = None) -> list[bytes]:
        """``uneven``: of chunks whose layer groups hold unequal numbers of slots, by index, those numbers. Where they are
        equal the value's size tells them, and whoever asks whether a hash exists need not know them."""
        keys = self._keys("hash", map(_bytes_of, hashes))
        for index, lengths in (uneven or {}).items():
            (keys[index],) = self._keys(f"uneven {lengths}", [_bytes_of(hashes[index])])
        return keys

    def of_prefixes(self, prefixes: Iterable[bytes]) -> list[bytes]:
        """Of blocks of tokens, by the chained keys of the token form."""
        return self._keys("token", prefixes)

    def _keys(self, form: str, names: Iterable[bytes]) -> list[bytes]:
        base = self._base.copy()
        base.update(_framed(form))
        keys = []
        for name in names:
            own = base.copy()
            own.update(name)
            keys.append(own.digest())
        return keys


def _bytes_of(number: int) -> bytes:
    """Its shortest two's complement, for integers of any size."""
    return number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)


def _hash(*parts: str) -> hashlib.blake2b:
    return hashlib.blake2b(_framed(*parts), digest_size=KEY_BYTES)


def _framed(*parts: str) -> bytes:
    return b"".join(len(encoded).to_bytes(4, "little") + encoded for encoded in map(str.encode, parts))
