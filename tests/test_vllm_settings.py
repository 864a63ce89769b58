"""What may be said to the vLLM connector, and the small machines it stands on."""

from pathlib import Path
from typing import Any

import pytest

import kvferry
from kvferry.connectors.vllm.breaker import LONGEST_S, Breaker
from kvferry.connectors.vllm.identity import config_digest, extend_keys, identity, model_at, of_rank
from kvferry.connectors.vllm.pace import Pace
from kvferry.connectors.vllm.settings import Settings, Wishes


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"poool": "off"}, "poool"),
        ({"pool": ""}, "pool"),
        ({"pool": 3}, "pool"),
        ({"checksum": "sometimes"}, "sometimes"),
        ({"load_timeout_ms": 0}, "load_timeout_ms"),
        ({"load_timeout_ms": 1.5}, "load_timeout_ms"),
        ({"save_timeout_ms": True}, "save_timeout_ms"),
        ({"handover": "yes"}, "handover"),
        ({"bounded": 1}, "bounded"),
        ({"listen": "somewhere"}, "listen"),
        ({"listen": "0.0.0.0:7000"}, "advertise"),
        ({"namespace": 7}, "namespace"),
        ({"advertise": "host:7000"}, "advertise.*the host alone"),
        ({"advertise": "http://host"}, "advertise"),
        ({"advertise": " "}, "advertise"),
        ({"advertise": "::1"}, "advertise"),
        ({"listen": "0.0.0.0:7000", "advertise": "0.0.0.0"}, "advertise"),
        ({"secret_file": "/no/such/file"}, "secret_file.*/no/such/file"),
        ({"node_secret_file": "/"}, "node_secret_file"),
    ],
    ids=str,
)
def test_a_wrong_word_is_named(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(kvferry.InvalidArgument, match=words):
        Settings.read(extra)


def test_pools_as_they_may_be_named(tmp_path: Path) -> None:
    assert Settings.read({}).members is None
    assert Settings.read({"pool": False}).pool_off and not Settings.read({"pool": True}).pool_off
    assert Settings.read({"pool": "unix:/a"}).members == "unix:/a"
    assert Settings.read({"pool": ["a:1", "b:2"]}).members == ["a:1", "b:2"]
    (tmp_path / "secret").write_text("word\n")
    assert Settings.read({"node_secret_file": str(tmp_path / "secret")}).node_secret == "word"


@pytest.mark.parametrize("name", ["secret_file", "node_secret_file"])
@pytest.mark.parametrize("content", [b"", b" \n", b"\xff\xfe"], ids=["empty", "blank", "no text"])
def test_a_file_without_a_secret_is_no_leave_to_do_without_one(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "secret").write_bytes(content)
    with pytest.raises(kvferry.InvalidArgument, match=f"'{name}' is '{tmp_path}/secret'"):
        Settings.read({name: f"{tmp_path}/secret"})


def test_each_rank_listens_at_a_port_of_its_own() -> None:
    assert Settings.read({"listen": "127.0.0.1:7000"}).place_of(2) == "127.0.0.1:7002"
    assert Settings.read({"listen": "127.0.0.1:0"}).place_of(2) == "127.0.0.1:0"
    assert Settings.read({"listen": "0.0.0.0:7000", "advertise": "host"}).place_of(0) == "0.0.0.0:7000"


def test_wishes_of_a_request() -> None:
    assert Wishes.read_from(None) == Wishes.read_from({"do_remote_decode": True}) == Wishes()
    asked = {"kvferry": {"store": False, "read": False, "tenant": "a", "ttl_ms": 5}}
    assert Wishes.read_from(asked) == Wishes(store=False, read=False, tenant="a", ttl_ms=5)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_keys_that_grow_are_those_of_the_whole() -> None:
    tokens = list(range(1000, 1100))
    whole = [row.tobytes() for row in kvferry.prefix_keys(tokens, 8, model="m", salt=b"s")]
    keys: list[bytes] = []
    for full in (0, 1, 1, 4, 12):
        extend_keys(keys, tokens, full, 8, "m", b"s")
        assert keys == whole[:full]


def test_workers_have_keys_of_their_own() -> None:
    assert of_rank([b"k"], 0, 1) == [b"k"]
    assert len({of_rank([b"k"], rank, world)[0] for rank, world in [(0, 1), (0, 2), (1, 2), (0, 4)]}) == 4


def test_a_model_in_a_folder_is_another_when_its_files_change(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    before = model_at(str(tmp_path), None)
    assert model_at(str(tmp_path), None) == before != model_at(str(tmp_path), "revision")
    weights.write_bytes(b"others")
    assert model_at(str(tmp_path), None) != before
    assert model_at("org/name", "9f3c") == "org/name@9f3c"


def test_a_configuration_counts_by_what_it_computes() -> None:
    assert config_digest({"layers": 3, "_name_or_path": "a"}) == config_digest({"_name_or_path": "b", "layers": 3})
    assert config_digest({"layers": 3}) != config_digest({"layers": 4})
    assert identity({"a": "b", "c": "d"}) != identity({"a": "bc", "": "d"})


# --- machines ---------------------------------------------------------------------------------------------------------


def test_a_breaker_opens_after_two_failures_and_lets_one_try_at_a_time() -> None:
    breaker = Breaker(1.0)
    breaker.failed(0.0)
    assert breaker.may_ask(0.0)
    breaker.failed(0.0)
    assert breaker.opened == 1 and not breaker.may_ask(0.9)
    assert breaker.may_ask(1.0) and not breaker.may_ask(1.0), "one tries, and nobody else"
    breaker.failed(1.1)
    assert not breaker.may_ask(3.0) and breaker.may_ask(3.2), "twice as long"
    breaker.went_well()
    assert breaker.may_ask(3.3) and breaker.may_ask(3.3) and breaker.closed


def test_a_breaker_is_open_for_half_a_minute_at_most() -> None:
    breaker, now = Breaker(1.0), 0.0
    for _ in range(20):
        breaker.failed(now)
        now += LONGEST_S
        assert breaker.may_ask(now)


def test_a_try_of_which_nothing_is_heard_is_followed_by_another() -> None:
    breaker = Breaker(1.0, failures=1)
    breaker.failed(0.0)
    assert breaker.may_ask(1.0) and not breaker.may_ask(1.5) and breaker.may_ask(2.0)


def test_one_failure_among_successes_opens_nothing() -> None:
    breaker = Breaker(1.0)
    for _ in range(10):
        breaker.failed(0.0)
        breaker.went_well()
    assert breaker.may_ask(0.0) and not breaker.opened


def test_the_pace_is_that_of_steps_that_compute_much() -> None:
    pace = Pace()
    assert pace.ms(10) > 1e6, "nothing is known yet"
    pace.took(1, 10.0)
    assert pace.ms(10) > 1e6
    pace.took(1000, 2.0)
    assert pace.ms(500) == 1000
