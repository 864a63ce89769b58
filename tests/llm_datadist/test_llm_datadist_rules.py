"""The native rules as Python calls them: values both ways, exceptions, the status of each kind of error.

What the rules say is tested beside them, in ``native/tests``.
"""

import json
from collections.abc import Callable

import pytest

import kvferry
from llm_datadist import LLMStatusCode, _rules
from llm_datadist._rules import int_to_ip, ip_to_int

CM = {_rules.CACHE_MANAGER: "1"}
LISTEN = {_rules.LISTEN: "127.0.0.1:7000"}


def parsed(given: dict[str, str]) -> _rules.EngineOptions:
    return _rules.parse_options(_rules.completed(CM | given, "Prompt"))


def values(options: _rules.EngineOptions) -> dict[str, object]:
    named = {name: getattr(options, name) for name in dir(options) if not name.startswith("_")}
    return {
        name: (value.size_bytes, value.page_shift) if isinstance(value, _rules.Pool) else value
        for name, value in named.items()
    }


def test_addresses_survive_the_round_trip() -> None:
    for ip in ("0.0.0.0", "127.0.0.1", "192.168.1.2", "255.255.255.255"):
        assert int_to_ip(ip_to_int(ip)) == ip
    with pytest.raises(ValueError, match="IPv4"):
        int_to_ip(1 << 32)


# --- values and exceptions


def test_completed_leaves_its_argument_alone() -> None:
    given = dict(LISTEN)
    _rules.completed(given, "Mix")
    assert given == LISTEN


def test_odd_option_types() -> None:
    with pytest.raises(ValueError, match="x"):
        _rules.completed(CM | {_rules.LISTEN: "127.0.0.1:x"}, "Prompt")
    with pytest.raises(TypeError):
        _rules.completed({_rules.GRAPH_MEMORY: 1}, "Prompt")  # type: ignore[dict-item]


def test_defaults_of_the_engine() -> None:
    assert (
        values(parsed({}))
        == values(_rules.EngineOptions())
        == {
            "remote": False,
            "hixl": False,
            "listen": None,
            "timeout_ms": 1000,
            "link_total_time_s": 120,
            "link_retry_count": 1,
            "local_comm_res": "",
            "device_pool": None,
            "host_pool": None,
            "secret": None,
            "transports": None,
            "attach": "same",
            "rendezvous_port": 18517,
        }
    )


def test_everything_set() -> None:
    options = parsed(
        LISTEN
        | {_rules.TRANSFER_BACKEND: "hixl"}
        | {
            _rules.SYNC_TIMEOUT: "5000",
            _rules.LINK_TOTAL_TIME: "7",
            _rules.LINK_RETRY_COUNT: "3",
            _rules.DEVICE_POOL: '{"memory_size": 1048576}',
            _rules.HOST_POOL: '{"memory_size": 4096, "page_shift": 12}',
            _rules.SECRET: "s",
            _rules.TRANSPORTS: "map, socket",
            _rules.ATTACH: "any",
        }
    )
    assert values(options) == {
        "remote": True,
        "hixl": True,
        "listen": ("127.0.0.1", 7000),
        "timeout_ms": 5000,
        "link_total_time_s": 7,
        "link_retry_count": 3,
        "local_comm_res": "",
        "device_pool": (1048576, 16),
        "host_pool": (4096, 12),
        "secret": "s",
        "transports": ["map", "socket"],
        "attach": "any",
        "rendezvous_port": 18517,
    }


def test_layers_are_ranges_both_ways() -> None:
    assert _rules.pull_layers(None, None, 3, 2) == (None, None)
    assert _rules.pull_layers(range(2, 6), None, 8, 2) == (range(2, 6), range(4))
    assert _rules.push_layers(None, None, 8, 2) == (range(4), range(4))
    assert _rules.push_layers(range(1, 2), range(9, 10), 8, 2) == (range(1, 2), range(9, 10))
    assert _rules.layer_tensors([1, 0], 2) == [2, 3, 0, 1]


def test_members_are_values() -> None:
    server = {"server_id": "10.1.1.1", "device": [{"rank_id": "1"}, {"rank_id": "0"}]}
    listed = _rules.members_of(json.dumps({"server_list": [server]}), [(2**64 - 1, 0), (7, 1)])
    assert [(member.cluster_id, member.rank, member.host) for member in listed] == [(2**64 - 1, 0, ""), (7, 1, "")]


BROKEN: list[Callable[[], object]] = [
    lambda: _rules.unit_geometry(1, [2, 0], 1),
    lambda: _rules.unit_geometry(1, [4, 3], 29),  # DT_INT4, of which Python has no name: a row and a half byte
    lambda: _rules.pull_layers(range(1), None, 8, 2),
    lambda: _rules.pull_layers(range(1 << 70), range(1 << 70), 8, 2),
    lambda: _rules.push_layers(None, None, 10, 3),
    lambda: _rules.copied_bytes(8, -1, 8, 9),
    lambda: _rules.check_blocks_of_row(100, 30, 5),
    lambda: _rules.members_of("[]", [(8, 0), (7, 1)]),
    lambda: _rules.completed(CM | {_rules.TRANSFER_BACKEND: "hixl"}, "Prompt"),
    lambda: _rules.parse_options({_rules.RENDEZVOUS_PORT: "0"}),
]


@pytest.mark.parametrize("call", BROKEN)
def test_a_broken_rule_is_an_exception_with_a_sentence(call: Callable[[], object]) -> None:
    with pytest.raises(_rules.RuleError, match=r"\w"):
        call()


def test_a_broken_rule_of_an_option_is_told_apart() -> None:
    for call in BROKEN[-2:]:
        with pytest.raises(_rules.OptionError):
            call()
    with pytest.raises(_rules.RuleError) as caught:
        BROKEN[0]()
    assert not isinstance(caught.value, _rules.OptionError)


# --- statuses


def test_every_kind_of_error_has_a_status() -> None:
    kinds = {error.kind for error in kvferry.KvferryError.__subclasses__()}
    assert kinds == set(_rules.known_kinds())
    for kind in kinds:
        LLMStatusCode(_rules.status_of(kind))


def test_statuses_of_transfers() -> None:
    expected = {
        "invalid_argument": LLMStatusCode.LLM_PARAM_INVALID,
        "not_found": LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        "not_linked": LLMStatusCode.LLM_NOT_YET_LINK,
        "deadline": LLMStatusCode.LLM_TIMEOUT,
        "peer_lost": LLMStatusCode.LLM_FAILED,
        "closed": LLMStatusCode.LLM_PARAM_INVALID,
        "out_of_memory": LLMStatusCode.LLM_OUT_OF_MEMORY,
        "nobody thought of this": LLMStatusCode.LLM_FAILED,
    }
    assert {kind: _rules.status_of(kind, "transfer") for kind in expected} == expected


def test_statuses_of_linking() -> None:
    assert _rules.status_of("refused", "link") == LLMStatusCode.LLM_LINK_FAILED
    assert _rules.status_of("peer_lost", "link") == LLMStatusCode.LLM_LINK_FAILED
    assert _rules.status_of("deadline", "link") == LLMStatusCode.LLM_TIMEOUT
    assert _rules.status_of("peer_lost", "unlink") == LLMStatusCode.LLM_UNLINK_FAILED
    assert _rules.status_of("not_linked", "unlink") == LLMStatusCode.LLM_SUCCESS
    assert _rules.status_of("closed", "register") == LLMStatusCode.LLM_FAILED
