"""The pool's keys, by the formula of docs/migrating-ems.md and as fixed bytes: what one version saved, the next one finds."""

import hashlib

from ems_support import kv_cache, v1_config

from ems import CcConfig, EmsConfig, PrimaryKey, keys
from ems.config import Settings
from ems.registration import KvCaches


def by_formula(*parts: "str | bytes", name: bytes = b"") -> bytes:
    framed = b""
    for part in parts:
        encoded = part if isinstance(part, bytes) else part.encode()
        framed += len(encoded).to_bytes(4, "little") + encoded
    return hashlib.blake2b(framed + name, digest_size=32).digest()


def test_v0_keys() -> None:
    config = EmsConfig(access_id="tenant", cc_config=CcConfig(rank_id=0, device_id=0, model_id="m"))
    found, routes = keys.v0_keys(Settings.checked(config), ["k", PrimaryKey("d", "a")])
    assert found == [
        by_formula("ems v0", "tenant", "m", "string", "k"),
        by_formula("ems v0", "tenant", "m", "primary", "d", "a"),
    ]
    assert routes == [b"k", b"d"]
    assert found[0].hex() == "5fee0f5233d7fb6a6ae3b920aafc781ad02321e320f24a5939399fb5b870804d"


def test_v1_keys() -> None:
    config = v1_config(tp_world_size=2, rank_in_tp_group=1)
    geometry = KvCaches(kv_cache()).geometry
    assert geometry == "4:float32*24,float32*24,float32*24,float32*24"
    names = keys.V1Keys(Settings.checked(EmsConfig(access_id="tenant", cc_config_v1=config)), geometry)
    parts = ("ems v1", "tenant", "a-model", "vllm", "2", "1", "1", "0", "GQA", geometry)
    assert names.of_hashes([0x1234, -1]) == [
        by_formula(*parts, "hash", name=b"\x34\x12"),
        by_formula(*parts, "hash", name=b"\xff"),
    ]
    assert names.of_hashes([7, 8], {1: "4,2"})[1] == by_formula(*parts, "uneven 4,2", name=b"\x08")
    assert names.of_prefixes([b"chained"]) == [by_formula(*parts, "token", name=b"chained")]
    assert names.of_hashes([1])[0].hex() == "38bd6ebe880627924bad37c473e4ded20ef5a837b47d639904f6c483a2ad8632"


def test_mla_ranks_have_one_key() -> None:
    def key(rank: int) -> bytes:
        config = v1_config(tp_world_size=2, rank_in_tp_group=rank, kvcache_type="MLA")
        return keys.V1Keys(Settings.checked(EmsConfig(cc_config_v1=config)), "g").of_hashes([1])[0]

    assert (
        key(0)
        == key(1)
        == by_formula("ems v1", "", "a-model", "vllm", "2", "1", "all", "0", "MLA", "g", "hash", name=b"\x01")
    )
