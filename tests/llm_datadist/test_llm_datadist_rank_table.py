"""Links by rank table, between real processes: who comes first, how many at a time, and what happens when nobody comes."""

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from datadist_side import Side, status_of
from ports import LOOPBACK, free_port

from llm_datadist import LLMException, LLMRole, LLMStatusCode, RegisterMemStatus
from support import Peer

HERE, THERE = 1, 0
RANKS = {THERE: 0, HERE: 1}
SHAPE = [4, 4, 8]
OK, PREPARING, FAILED = RegisterMemStatus.OK, RegisterMemStatus.PREPARING, RegisterMemStatus.FAILED
NOT_YET_LINK = LLMStatusCode.LLM_NOT_YET_LINK


def table(*servers: tuple[str, list[int]]) -> str:
    """A rank table as the vendor's samples have it; a server is its address and the ranks of its devices."""
    listed = [
        {
            "server_id": server,
            "device": [
                {"device_id": str(number), "device_ip": f"10.9.8.{rank}", "rank_id": str(rank)}
                for number, rank in enumerate(ranks)
            ],
        }
        for server, ranks in servers
    ]
    return json.dumps(
        {"server_count": str(len(servers)), "status": "completed", "version": "1.2", "server_list": listed}
    )


ONE_SERVER = table(("10.9.8.7", [0, 1]))  # whose address is nobody's here: all of its devices are on this host
TWO_SERVERS = table(("127.0.0.2", [0]), ("127.0.0.3", [1]))


@pytest.fixture
def meeting() -> dict[str, Any]:
    """Settings of sides that meet at a port of this test's own; nobody listens by itself."""
    return {"listen": False, "ge_options": {"kvferry.rendezvous_port": str(free_port())}}


@pytest.fixture
def sides(
    start_here: Callable[..., Side], start_there: Callable[..., Peer], meeting: dict[str, Any]
) -> tuple[Side, Peer]:
    return start_here(**meeting), start_there(**meeting)


def linked(here: Side, there: Peer, name: str, rank_table: str = ONE_SERVER) -> tuple[int, int]:
    comms = here.link_table(name, RANKS, rank_table), there.call("link_table", name, RANKS, rank_table)
    assert (here.settled(comms[0]), there.call("settled", comms[1])) == (OK, OK)
    return comms


@pytest.mark.parametrize("rank_table", [ONE_SERVER, TWO_SERVERS], ids=["one-server", "two-servers"])
@pytest.mark.parametrize("first", ["here", "there"])
def test_both_sides_call_link_in_either_order(sides: tuple[Side, Peer], rank_table: str, first: str) -> None:
    here, there = sides
    mine, far = here.register(SHAPE, req_ids=[9]), there.call("register", SHAPE, req_ids=[1])
    here.fill(mine)
    there.call("fill", far)
    calls = {
        "here": lambda: here.link_table("comm", RANKS, rank_table),
        "there": lambda: there.call("link_table", "comm", RANKS, rank_table),
    }
    waits = {"here": here.settled, "there": lambda comm: there.call("settled", comm)}
    other = "there" if first == "here" else "here"
    started = time.monotonic()
    comms = {first: calls[first]()}
    assert comms[first] == 1
    assert time.monotonic() - started < 1  # it waits for nobody
    time.sleep(0.3)
    assert (here.status(1) if first == "here" else there.call("status", 1)) is PREPARING
    if first == "here":
        assert status_of(lambda: here.pull_cache(("request", THERE, 1), mine)) == NOT_YET_LINK
    comms[other] = calls[other]()
    for side, comm in comms.items():
        assert waits[side](comm) is OK

    here.pull_cache(("request", THERE, 1), mine, 2)
    there.call("pull_cache", ("request", HERE, 9), far, 3)
    assert np.array_equal(here.tensors(mine)[0][2], there.call("tensors", far)[0][0])
    assert np.array_equal(there.call("tensors", far)[1][3], here.tensors(mine)[1][0])

    here.unlink_table(1)
    assert status_of(lambda: here.pull_cache(("request", THERE, 1), mine)) == NOT_YET_LINK
    assert status_of(lambda: here.unlink_table(1)) == NOT_YET_LINK
    assert status_of(lambda: here.status(1)) == NOT_YET_LINK
    there.call("unlink_table", 1)
    assert linked(here, there, "comm", rank_table) == (2, 2)
    here.pull_cache(("request", THERE, 1), mine)


def test_servers_that_are_mere_numbers_meet_at_the_addresses_of_their_devices(sides: tuple[Side, Peer]) -> None:
    here, there = sides
    numbered = json.loads(TWO_SERVERS)
    for number, server in enumerate(numbered["server_list"], 1):
        server["device"][0]["device_ip"], server["server_id"] = server["server_id"], str(number)
    assert linked(here, there, "comm", json.dumps(numbered)) == (1, 1)
    mine = here.register(SHAPE)
    there.call("register", SHAPE, req_ids=[1])
    here.pull_cache(("request", THERE, 1), mine)


def test_a_communicator_that_needs_another_address_leaves_those_under_construction_theirs(
    sides: tuple[Side, Peer],
) -> None:
    here, there = sides
    ranks = {HERE: 0, THERE: 1}  # so that the other side dials this one
    near = here.link_table("near", ranks, ONE_SERVER)
    time.sleep(0.3)
    here.link_table("far", {HERE: 0, 7: 1}, table(("127.0.0.3", [0]), ("127.0.0.4", [1])))  # to which nobody comes
    time.sleep(0.3)
    comm = there.call("link_table", "near", ranks, ONE_SERVER)
    assert (here.settled(near), there.call("settled", comm)) == (OK, OK)
    third = {HERE: 0, THERE: 1}, table(("127.0.0.5", [0]), ("127.0.0.6", [1]))
    comms = here.link_table("third", *third), there.call("link_table", "third", *third)
    assert (here.settled(comms[0]), there.call("settled", comms[1])) == (OK, OK)


@pytest.mark.slow
def test_several_are_under_construction_at_a_time_from_many_threads(sides: tuple[Side, Peer]) -> None:
    here, there = sides
    names = [f"comm {number % 6}" for number in range(12)]  # each name twice
    ours = here.link_tables(names, RANKS, ONE_SERVER)
    time.sleep(0.2)
    theirs = there.call("link_tables", list(reversed(names)), RANKS, ONE_SERVER)
    assert sorted(ours) == sorted(theirs) == list(range(1, 13))
    assert {here.settled(comm) for comm in ours} == {there.call("settled", comm) for comm in theirs} == {OK}
    mine = here.register(SHAPE)
    there.call("register", SHAPE, req_ids=[1])
    for comm in ours[:-1]:
        here.unlink_table(comm)
        here.pull_cache(("request", THERE, 1), mine)  # the others need the link
    here.unlink_table(ours[-1])
    assert status_of(lambda: here.pull_cache(("request", THERE, 1), mine)) == NOT_YET_LINK


@pytest.mark.slow
def test_four_members_are_linked_each_to_each(
    start_here: Callable[..., Side], start_there: Callable[..., Peer], meeting: dict[str, Any]
) -> None:
    ranks = {10: 0, HERE: 1, 12: 2, 2**64 - 1: 3}
    rank_table = table(("127.0.0.2", [0, 1]), ("127.0.0.3", [2, 3]))
    here = start_here(**meeting)
    peers = {cluster: start_there(cluster, **meeting) for cluster in ranks if cluster != HERE}
    comm = here.link_table("four", ranks, rank_table)
    for peer in peers.values():
        assert peer.call("link_table", "four", ranks, rank_table) == 1
    assert here.settled(comm) is OK
    for cluster, peer in peers.items():
        assert peer.call("settled", 1) is OK
        peer.call("register", SHAPE, req_ids=[1])
        here.pull_cache(("request", cluster, 1), here.register(SHAPE))
    far = peers[12].call("register", SHAPE)
    peers[12].call("pull_cache", ("request", 2**64 - 1, 1), far)


def test_a_peer_that_never_comes_ends_as_failed(start_here: Callable[..., Side], meeting: dict[str, Any]) -> None:
    here = start_here(link_total_time=1, **meeting)
    started = time.monotonic()
    comm = here.link_table("alone", RANKS, ONE_SERVER)
    assert here.status(comm) is PREPARING
    assert here.settled(comm) is FAILED
    assert 0.9 < time.monotonic() - started < 5
    assert here.status(comm) is FAILED
    here.unlink_table(comm)


@pytest.mark.parametrize("ranks", [RANKS, {HERE: 0, THERE: 1}], ids=["higher", "lowest"])
def test_a_role_is_not_switched_while_a_communicator_is_under_construction(
    sides: tuple[Side, Peer], ranks: dict[int, int]
) -> None:
    here, there = sides
    comm = here.link_table("comm", ranks, ONE_SERVER)
    time.sleep(0.3)  # it is at the meeting place and has said where it listens
    switch = lambda: here.datadist.switch_role(LLMRole.DECODER)  # noqa: E731
    assert status_of(switch, r"communicators \[1\] are under construction") == LLMStatusCode.LLM_EXIST_LINK
    theirs = there.call("link_table", "comm", ranks, ONE_SERVER)
    assert (here.settled(comm), there.call("settled", theirs)) == (OK, OK)
    assert status_of(switch) == LLMStatusCode.LLM_EXIST_LINK
    here.unlink_table(comm)
    switch()
    there.call("unlink_table", theirs)
    comms = here.link_table("comm", ranks, ONE_SERVER), there.call("link_table", "comm", ranks, ONE_SERVER)
    assert (here.settled(comms[0]), there.call("settled", comms[1])) == (OK, OK)


def test_roles_are_switched_once_a_communicator_is_given_up(
    start_here: Callable[..., Side], meeting: dict[str, Any]
) -> None:
    here = start_here(link_total_time=1, **meeting)
    comm = here.link_table("given up", RANKS, ONE_SERVER)
    here.unlink_table(comm)
    here.datadist.switch_role(LLMRole.DECODER)
    assert here.settled(here.link_table("failed", RANKS, ONE_SERVER)) is FAILED
    here.datadist.switch_role(LLMRole.PROMPT)


def test_ranks_that_differ_do_not_meet(
    start_here: Callable[..., Side], start_there: Callable[..., Peer], meeting: dict[str, Any]
) -> None:
    here, there = start_here(link_total_time=1, **meeting), start_there(link_total_time=1, **meeting)
    here.link_table("comm", RANKS, ONE_SERVER)
    there.call("link_table", "other", RANKS, ONE_SERVER)
    assert (here.settled(1), there.call("settled", 1)) == (FAILED, FAILED)


@pytest.mark.slow
def test_sides_of_different_modes_end_as_failed(
    start_here: Callable[..., Side], start_there: Callable[..., Peer], meeting: dict[str, Any]
) -> None:
    here = start_here(link_total_time=2, enable_remote_cache_accessible=True, **meeting)
    there = start_there(link_total_time=2, **meeting)
    comms = here.link_table("comm", RANKS, ONE_SERVER), there.call("link_table", "comm", RANKS, ONE_SERVER)
    assert (here.settled(comms[0]), there.call("settled", comms[1])) == (FAILED, FAILED)


@pytest.mark.slow
def test_a_member_that_is_done_at_once_is_not_missed(sides: tuple[Side, Peer]) -> None:
    here, there = sides
    for comm in range(1, 21):
        theirs = there.call_later("link_table", "comm", RANKS, ONE_SERVER)
        assert here.link_table("comm", RANKS, ONE_SERVER) == comm
        while here.status(comm) is PREPARING:
            pass
        here.unlink_table(comm)
        assert theirs.result() == comm
        assert there.call("settled", comm) is OK


@pytest.mark.slow
def test_a_member_that_is_killed_may_come_back(
    start_here: Callable[..., Side], start_there: Callable[..., Peer], meeting: dict[str, Any]
) -> None:
    here, there = start_here(**meeting), start_there(**meeting)
    linked(here, there, "comm")
    there.kill()
    mine = here.register(SHAPE)
    with pytest.raises(LLMException):
        here.pull_cache(("request", THERE, 1), mine)
    here.unlink_table(1)
    assert linked(here, start_there(**meeting), "comm") == (2, 1)


@pytest.mark.slow
def test_the_meeting_outlives_the_process_that_opened_the_place(
    start_here: Callable[..., Side], start_there: Callable[..., Peer], meeting: dict[str, Any]
) -> None:
    opener = start_there(77, **meeting)
    opener.call("link_table", "another", {77: 0, 78: 1}, ONE_SERVER)
    port = int(meeting["ge_options"]["kvferry.rendezvous_port"])
    wait_for(lambda: answers(port))
    here = start_here(**meeting)
    comm = here.link_table("comm", RANKS, ONE_SERVER)
    time.sleep(0.3)
    assert here.status(comm) is PREPARING
    opener.kill()
    there = start_there(**meeting)
    assert there.call("link_table", "comm", RANKS, ONE_SERVER) == 1
    assert (here.settled(comm), there.call("settled", 1)) == (OK, OK)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def answers(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_a_forked_child_does_not_keep_the_meeting_place(sides: tuple[Side, Peer], meeting: dict[str, Any]) -> None:
    here, there = sides
    there.call("link_table", "comm", RANKS, ONE_SERVER)
    port = int(meeting["ge_options"]["kvferry.rendezvous_port"])
    wait_for(lambda: answers(port))
    there.call("fork_and_sleep", 30)
    there.kill()
    wait_for(lambda: not answers(port))
    assert here.link_table("comm", RANKS, ONE_SERVER) == 1
    wait_for(lambda: answers(port))


@pytest.mark.slow
def test_strangers_at_the_meeting_place_are_shown_out(sides: tuple[Side, Peer], meeting: dict[str, Any]) -> None:
    here, there = sides
    comm = here.link_table("comm", RANKS, ONE_SERVER)
    port = int(meeting["ge_options"]["kvferry.rendezvous_port"])
    wait_for(lambda: answers(port))
    silent = [socket.create_connection((LOOPBACK, port), timeout=10) for _ in range(20)]
    lines = [b"GET / HTTP/1.1\r\n\r\n", b"\xff\xfe\n", b"{}\n", b"[1]\n", b"null\n", b"x" * 10_000]
    lines.append(b'{"llm_datadist": 1, "group": ["comm", 0, [[0, 0], [1, 1]]], "cluster_id": 5, "address": "x"}\n')
    for line in lines:
        with socket.create_connection((LOOPBACK, port), timeout=10) as stranger:
            stranger.sendall(line)
            if line.endswith(b"\n") and line != b"GET / HTTP/1.1\r\n\r\n":
                assert stranger.recv(10) == b""
    there.call("link_table", "comm", RANKS, ONE_SERVER)
    assert (here.settled(comm), there.call("settled", 1)) == (OK, OK)
    for connection in silent:
        assert connection.recv(10) == b""  # closed after the time that a guest has to say who it is
        connection.close()


@pytest.mark.slow
def test_finalize_does_not_wait_for_what_is_under_construction(
    start_here: Callable[..., Side], meeting: dict[str, Any]
) -> None:
    before = threading.active_count()
    here = start_here(**meeting)
    for number in range(5):
        here.link_table(f"comm {number}", RANKS, TWO_SERVERS if number % 2 else ONE_SERVER)
    time.sleep(0.2)
    started = time.monotonic()
    here.finalize()
    assert time.monotonic() - started < 3
    assert threading.active_count() <= before
    here.init_again()
    assert here.link_table("comm", RANKS, ONE_SERVER) == 1


def test_caches_registered_after_link_are_private_by_default(
    start_here: Callable[..., Side], meeting: dict[str, Any]
) -> None:
    here = start_here(**meeting)
    here.link_table("comm", RANKS, ONE_SERVER)
    here.register(SHAPE)
    assert status_of(lambda: here.register(SHAPE, remote_accessible=True)) == LLMStatusCode.LLM_PARAM_INVALID


def test_the_hixl_backend_has_no_rank_tables(start_here: Callable[..., Side]) -> None:
    here = start_here(transfer_backend="hixl")
    not_enabled = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    assert status_of(lambda: here.link_table("comm", RANKS, ONE_SERVER)) == not_enabled
    assert status_of(lambda: here.unlink_table(1)) == not_enabled


def test_at_most_512_communicators(start_here: Callable[..., Side], monkeypatch: pytest.MonkeyPatch) -> None:
    from llm_datadist import communicators

    monkeypatch.setattr(communicators, "MOST", 2)
    here = start_here(listen=False, ge_options={"kvferry.rendezvous_port": str(free_port())})
    for number in (1, 2):
        assert here.link_table("comm", RANKS, ONE_SERVER) == number
    assert status_of(lambda: here.link_table("comm", RANKS, ONE_SERVER)) == LLMStatusCode.LLM_PARAM_INVALID
    here.unlink_table(1)
    assert here.link_table("comm", RANKS, ONE_SERVER) == 3
