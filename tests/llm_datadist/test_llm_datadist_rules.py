"""The native rules, as Python calls them: options, layer ranges, shapes, the status of each kind of error."""

import json

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


def members(table: str, ranks: dict[int, int]) -> list[tuple[int, int, str]]:
    listed = _rules.members_of(table, list(ranks.items()))
    return [(member.cluster_id, member.rank, member.host) for member in listed]


def test_addresses_survive_the_round_trip() -> None:
    for ip in ("0.0.0.0", "127.0.0.1", "192.168.1.2", "255.255.255.255"):
        assert int_to_ip(ip_to_int(ip)) == ip
    with pytest.raises(ValueError, match="IPv4"):
        int_to_ip(1 << 32)


# --- options


def test_completed_adds_role_and_listener() -> None:
    assert _rules.completed(CM | LISTEN, "Mix") == CM | LISTEN | {
        _rules.ROLE: "Mix",
        _rules.LISTEN_IP: "127.0.0.1",
        _rules.LISTEN_PORT: "7000",
    }


def test_completed_leaves_its_argument_alone() -> None:
    given = dict(LISTEN)
    _rules.completed(given, "Mix")
    assert given == LISTEN


@pytest.mark.parametrize("text", ["", "{}"])
def test_local_comm_res_turns_on_both_modes(text: str) -> None:
    completed = _rules.completed({_rules.LOCAL_COMM_RES: text}, "Mix")
    assert (completed[_rules.CACHE_MANAGER], completed[_rules.REMOTE_ACCESSIBLE]) == ("1", "1")
    assert _rules.parse_options(completed).remote
    explicit = _rules.completed({_rules.LOCAL_COMM_RES: text, _rules.REMOTE_ACCESSIBLE: "0"}, "Mix")
    assert not _rules.parse_options(explicit).remote


HIXL = {_rules.TRANSFER_BACKEND: "hixl"}
REFUSED = [
    ({_rules.LOCAL_COMM_RES: "", _rules.CACHE_MANAGER: "0"}, "EnableCacheManager"),
    ({_rules.CACHE_MANAGER: "0"} | HIXL, "EnableCacheManager"),
    (CM | HIXL | LISTEN | {_rules.REMOTE_ACCESSIBLE: "0"}, "EnableRemoteCacheAccessible"),
    (CM | HIXL, "listenIpInfo"),
    (CM | {_rules.LISTEN: "127.0.0.1"}, "listenIpInfo"),
    (CM | {_rules.LISTEN: "::1:7000"}, "listenIpInfo"),
    ({_rules.GRAPH_MEMORY: "1.23"}, "flowGraphMemMaxSize"),
    ({_rules.GRAPH_MEMORY: "-1"}, "flowGraphMemMaxSize"),
    ({_rules.GRAPH_MEMORY: "1,2"}, "flowGraphMemMaxSize"),
]


@pytest.mark.parametrize(("given", "word"), REFUSED)
def test_options_that_contradict_each_other(given: dict[str, str], word: str) -> None:
    with pytest.raises(_rules.OptionError, match=word):
        _rules.completed(given, "Prompt")


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
        | HIXL
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


IMPOSSIBLE = [
    {_rules.DEVICE_ID: "0;1"},
    {_rules.TRANSFER_BACKEND: "other"} | LISTEN,
    {_rules.TRANSFER_BACKEND: ""} | LISTEN,
    {_rules.SYNC_TIMEOUT: "abc"},
    {_rules.SYNC_TIMEOUT: "0"},
    {_rules.LINK_TOTAL_TIME: "x"},
    {_rules.LINK_RETRY_COUNT: "0"},
    {_rules.LINK_RETRY_COUNT: "101"},
    {_rules.DEVICE_POOL: "{"},
    {_rules.DEVICE_POOL: "[]"},
    {_rules.DEVICE_POOL: "{}"},
    {_rules.DEVICE_POOL: '{"memory_size": "1"}'},
    {_rules.DEVICE_POOL: '{"memory_size": 0}'},
    {_rules.HOST_POOL: '{"memory_size": 1, "page_shift": 9}'},
    {_rules.HOST_POOL: '{"memory_size": 1, "page_shift": 31}'},
    HIXL | LISTEN | {_rules.GLOBAL_RESOURCE: "{"},
    {_rules.ATTACH: "all"},
]


@pytest.mark.parametrize("given", IMPOSSIBLE)
def test_options_that_no_engine_starts_with(given: dict[str, str]) -> None:
    with pytest.raises(_rules.OptionError):
        parsed(given)


# --- shapes and ranges


def test_units_are_counted_by_dim_0() -> None:
    assert _rules.unit_geometry(4, [4, 4, 8], 4) == (128, 4)
    assert _rules.unit_geometry(1, [10], 2) == (2, 10)


@pytest.mark.parametrize(
    ("num_tensors", "shape"), [(0, [1]), (1, []), (1, [1] * 32), (1, [2, 0]), (1, [-1]), (1, [1 << 40, 1 << 30])]
)
def test_shapes_that_cannot_be(num_tensors: int, shape: list[int]) -> None:
    with pytest.raises(_rules.RuleError):
        _rules.unit_geometry(num_tensors, shape, 1)


def test_31_dimensions_are_fine() -> None:
    assert _rules.unit_geometry(1, [1] * 31, 2) == (2, 1)


def test_pull_layers() -> None:
    assert _rules.pull_layers(None, None, 3, 2) == (None, None)
    assert _rules.pull_layers(range(0), range(0), 3, 2) == (None, None)
    assert _rules.pull_layers(range(2, 4), range(2), 8, 2) == (range(2, 4), range(2))
    assert _rules.pull_layers(range(2, 6), None, 8, 2) == (range(2, 6), range(4))
    assert _rules.pull_layers(None, range(1, 3), 8, 2) == (None, range(1, 3))


@pytest.mark.parametrize(
    ("source", "destination", "num_tensors", "width"),
    [
        (range(1), range(1), 1, 2),  # no whole layer
        (range(1), None, 8, 2),  # fills one of four layers
        (range(2), range(3), 8, 2),
        (range(1), range(4, 5), 8, 2),  # beyond the destination
    ],
)
def test_pull_layers_that_do_not_fit(source: range, destination: range, num_tensors: int, width: int) -> None:
    with pytest.raises(_rules.RuleError):
        _rules.pull_layers(source, destination, num_tensors, width)


def test_push_layers() -> None:
    assert _rules.push_layers(None, None, 8, 2) == (range(4), range(4))
    assert _rules.push_layers(range(1, 2), range(9, 10), 8, 2) == (range(1, 2), range(9, 10))


def test_push_of_fewer_tensors_than_a_layer_has_is_empty() -> None:
    source, destination = _rules.push_layers(None, None, 1, 2)
    assert not source
    assert not destination


@pytest.mark.parametrize(
    ("source", "destination", "num_tensors", "width"),
    [
        (None, None, 10, 3),
        (range(2), range(3), 8, 2),
        (range(1), None, 8, 2),
        (range(4, 5), range(1), 8, 2),
    ],
)
def test_push_layers_that_do_not_fit(source: range, destination: range, num_tensors: int, width: int) -> None:
    with pytest.raises(_rules.RuleError):
        _rules.push_layers(source, destination, num_tensors, width)


def test_blocks_of_a_row() -> None:
    _rules.check_blocks_of_row(100, 30, 4)
    for block_bytes, listed in ((0, 1), (100, 1), (101, 1), (30, 5)):
        with pytest.raises(_rules.RuleError):
            _rules.check_blocks_of_row(100, block_bytes, listed)


def test_copied_bytes() -> None:
    assert _rules.copied_bytes(0, -1, 8, 12) == 8
    assert _rules.copied_bytes(3, -1, 8, 8) == 5
    assert _rules.copied_bytes(3, 2, 8, 5) == 2
    for offset, size, source, destination in ((8, -1, 8, 9), (0, -1, 9, 8), (4, 1, 8, 4), (3, 6, 8, 20), (3, 3, 20, 5)):
        with pytest.raises(_rules.RuleError):
            _rules.copied_bytes(offset, size, source, destination)


# --- rank tables


def rank_table(*servers: dict[str, object]) -> str:
    return json.dumps({"version": "1.2", "server_list": list(servers)})


def test_members_of_one_server_are_on_this_host_whatever_its_address() -> None:
    server = {"server_id": "10.1.1.1", "device": [{"rank_id": "1"}, {"rank_id": "0"}]}
    expected = [(8, 0, ""), (7, 1, "")]
    assert members(rank_table(server), {8: 0, 7: 1}) == expected
    for without_ranks in ("{}", '{"server_list":[{"device":[{}]}]}', rank_table({"server_id": "10.1.1.1"})):
        assert members(without_ranks, {8: 0, 7: 1}) == expected
    other = {"server_id": "10.1.1.2", "device": [{"rank_id": 2}]}  # nobody of it takes part
    assert members(rank_table(server, other), {8: 0, 7: 1}) == expected


def test_members_of_several_servers_have_their_servers_address() -> None:
    one = {"server_id": "node-1", "host_ip": "10.1.1.1", "device": [{"rank_id": "3"}]}
    two = {"server_id": "10.1.1.2", "device": [{"rank_id": "5"}]}
    assert members(rank_table(two, one), {8: 3, 7: 5}) == [(8, 3, "10.1.1.1"), (7, 5, "10.1.1.2")]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"server_list": {}}',
        '{"server_list": [1]}',
        rank_table({"device": {}}),
        rank_table({"server_id": "a", "device": [{"rank_id": "0"}]}),  # rank 1 is missing
        rank_table({"server_id": "a", "device": [{"rank_id": "0"}, {"rank_id": "one"}]}),
        rank_table({"server_id": "a", "device": [{"rank_id": "0"}]}, {"device": [{"rank_id": "1"}]}),
        rank_table({"server_id": 5, "device": [{"rank_id": "0"}, {"rank_id": "1"}]}),
    ],
)
def test_rank_tables_that_cannot_be(text: str) -> None:
    with pytest.raises(_rules.RuleError, match="rank"):
        members(text, {8: 0, 7: 1})


def test_our_own_options_may_come_from_the_environment() -> None:
    environment = {"KVFERRY_SECRET": "s", "KVFERRY_RENDEZVOUS_PORT": "99", "KVFERRY_ATTACH": "", "KVFERRY_X": "y"}
    given = {"kvferry.secret": "mine", "a": "b"}
    expected = {"kvferry.secret": "mine", "kvferry.rendezvous_port": "99", "a": "b"}
    assert _rules.with_environment(given, environment) == expected
    with pytest.raises(_rules.OptionError, match="rendezvous_port"):
        _rules.parse_options({"kvferry.rendezvous_port": "0"})


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
