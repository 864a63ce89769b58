"""`Ems`: init, get_cc, check_health; configurations and their rules."""

import os
import threading
from typing import Any

import pytest
from ems_support import refused, v1_config
from fake_pool import FakePool

import kvferry
from ems import CcConfig, CcConfig_v1, ContextCache_v1, ContextCaching, Ems, EmsConfig, EmsErrorCode, KVCacheType, _pool
from ems.config import Settings

pytestmark = pytest.mark.usefixtures("fake")
V0 = {"rank_id": 8, "device_id": 0, "model_id": "llama2-13b"}  # the samples' rank, beyond the default world size


def test_get_cc_is_none_before_init() -> None:
    assert Ems.get_cc() is None


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (EmsConfig(cc_config=CcConfig(**V0)), ContextCaching),
        (EmsConfig(cc_config=CcConfig_v1(**V0)), ContextCache_v1),
        (EmsConfig(cc_config_v1=CcConfig_v1(**V0)), ContextCache_v1),
    ],
)
def test_the_configurations_type_decides_the_generation(config: EmsConfig, kind: type) -> None:
    Ems.init(config)
    assert type(Ems.get_cc()) is kind
    assert Ems.get_cc() is Ems.get_cc()


def test_without_a_configuration_context_caching_is_off() -> None:
    Ems.init(EmsConfig())
    assert Ems.get_cc() is None
    assert Ems.check_health() is True
    Ems.init(EmsConfig())
    Ems.init(EmsConfig(cc_config=CcConfig(**V0)))  # it is not off for ever
    first = Ems.get_cc()
    assert type(first) is ContextCaching
    Ems.init(EmsConfig())
    assert Ems.get_cc() is first


def test_a_second_init_changes_nothing() -> None:
    Ems.init(EmsConfig(cc_config=CcConfig(**V0)))
    first = Ems.get_cc()
    Ems.init(EmsConfig(cc_config_v1=CcConfig_v1(**V0)))
    assert Ems.get_cc() is first


@pytest.mark.parametrize("config", [None, CcConfig(**V0), "config"])
def test_init_takes_an_ems_config(config: Any) -> None:
    with refused("EmsConfig"):
        Ems.init(config)


def test_init_fails_recoverably_while_no_node_answers_and_works_later_with_the_same_config(fake: FakePool) -> None:
    config = EmsConfig(cc_config=CcConfig(**V0))
    fake.word = "node_lost"
    assert Ems.check_health() is False
    with refused(code=EmsErrorCode.EMS_RECOVERD_ERROR):
        Ems.init(config)
    assert Ems.get_cc() is None
    assert Ems.check_health() is False
    fake.word = ""
    assert Ems.check_health() is True
    assert Ems.get_cc() is None
    again = threading.Thread(target=Ems.init, args=(config,))
    again.start()
    again.join(10)
    assert isinstance(Ems.get_cc(), ContextCaching)


def test_init_fails_recoverably_when_connecting_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(**_: Any) -> Any:
        raise kvferry.LinkFailed("nobody listens there")

    monkeypatch.undo()
    monkeypatch.setattr(kvferry, "Pool", type("Pool", (), {"connect": staticmethod(cannot)}), raising=False)
    with refused("nobody listens there", EmsErrorCode.EMS_RECOVERD_ERROR):
        Ems.init(EmsConfig(cc_config=CcConfig(**V0)))
    assert Ems.check_health() is False


def test_a_wrong_pool_address_is_an_invalid_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: Any, **__: Any) -> Any:
        with _pool.kvferry_errors():
            raise kvferry.InvalidArgument("KVFERRY_POOL is no address")

    monkeypatch.setattr(_pool, "connect", cannot)
    with refused("KVFERRY_POOL"):
        Ems.init(EmsConfig(cc_config=CcConfig(**V0)))


def test_health_is_true_where_one_node_of_several_answers(fake: FakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    Ems.init(EmsConfig(cc_config=CcConfig(**V0)))
    answers = iter(["node_lost"] * 3 + ["never_saved"] + ["timeout"] * 4)
    outcome = type("Outcome", (), {"outcomes": list(answers)})()
    monkeypatch.setattr(fake, "exists", lambda *_, **__: outcome)
    assert Ems.check_health() is True


def test_health_never_raises(fake: FakePool) -> None:
    Ems.init(EmsConfig(cc_config=CcConfig(**V0)))
    fake.error = kvferry.NodeClosed("closed")
    assert Ems.check_health() is False


def test_health_asks_for_a_second_at_most(fake: FakePool) -> None:
    Ems.check_health()
    assert fake.calls[-1][2]["timeout_ms"] <= 1000


def test_a_forked_child_starts_afresh() -> None:
    Ems.init(EmsConfig(cc_config=CcConfig(**V0)))
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            before = Ems.get_cc() is None
            Ems.init(EmsConfig(cc_config_v1=CcConfig_v1(**V0)))
            os.write(writing, b"fine" if before and type(Ems.get_cc()) is ContextCache_v1 else b"not so")
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"fine"
    assert type(Ems.get_cc()) is ContextCaching


def test_many_threads_initialise_once() -> None:
    config = EmsConfig(cc_config=CcConfig(**V0))
    found: list[Any] = []

    def start() -> None:
        Ems.init(config)
        found.append(Ems.get_cc())

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


# -- the rules of a configuration


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank_id", -1),
        ("rank_id", True),
        ("rank_id", "0"),
        ("device_id", -1),
        ("device_id", None),
        ("model_id", ""),
        ("model_id", None),
        ("model_id", "m" * 513),
        ("model_id", "line\nbreak"),
        ("tp_world_size", 0),
        ("pp_world_size", 1.0),
        ("rank_in_tp_group", -1),
        ("rank_in_pp_group", None),
        ("llm_engine", 3),
        ("kvcache_type", "LSTM"),
        ("kvcache_type", None),
    ],
)
def test_wrong_fields_are_named(field: str, value: Any) -> None:
    with refused(field):
        Ems.init(EmsConfig(cc_config_v1=v1_config(**{field: value})))


def test_v0_fields_are_checked_too() -> None:
    with refused("rank_id"):
        Ems.init(EmsConfig(cc_config=CcConfig(rank_id=-1, device_id=0, model_id="m")))


def test_clients_identifiers_are_accepted() -> None:
    """Both of them break the documented alphabet, and the key its length."""
    access_id, model_id = "cc_kvstore@_@ds_default_ns_001", "cc_kvstore@_@model"
    settings = Settings.checked(
        EmsConfig(access_id=access_id, access_key="", cc_config_v1=v1_config(model_id=model_id))
    )
    assert (settings.access_id, settings.access_key) == (access_id, None)


@pytest.mark.parametrize("access_id", ["a" * 513, 7])
def test_wrong_access_ids(access_id: Any) -> None:
    with refused("access_id"):
        Ems.init(EmsConfig(access_id=access_id))


def test_a_key_needs_an_id() -> None:
    with refused("access_key"):
        Ems.init(EmsConfig(access_key="s" * 32))


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(EmsConfig(access_id="a", access_key="secret" * 6))


def test_two_configurations_are_refused() -> None:
    with refused("both"):
        Ems.init(EmsConfig(cc_config=CcConfig(**V0), cc_config_v1=CcConfig_v1(**V0)))


def test_the_cache_type_may_be_assigned_later_and_be_a_string() -> None:
    config = v1_config()
    config.kvcache_type = KVCacheType.MLA
    assert Settings.checked(EmsConfig(cc_config_v1=config)).kvcache_type is KVCacheType.MLA
    config.kvcache_type = "MLA"
    assert Settings.checked(EmsConfig(cc_config_v1=config)).kvcache_type is KVCacheType.MLA


def test_what_is_assigned_after_init_changes_nothing() -> None:
    config = v1_config()
    settings = Settings.checked(EmsConfig(cc_config_v1=config))
    config.model_id = "another"
    assert settings.cc is not None
    assert settings.cc.model_id == "a-model"
