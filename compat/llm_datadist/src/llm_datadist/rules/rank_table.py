"""Who is where, according to a rank table: JSON that lists servers, their devices, and the rank of each device.

The table names addresses and no port; how members meet all the same is `llm_datadist.rendezvous`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llm_datadist.rules.ranges import RuleError


@dataclass(frozen=True, slots=True)
class Member:
    """One cluster of a communicator. ``host``: its server's address, ``""`` if all members are on one server."""

    cluster_id: int
    rank: int
    host: str = ""


def members(rank_table: str, cluster_rank_info: Mapping[int, int]) -> tuple[Member, ...]:
    """The members in the order of their ranks.

    A table without ranks (callers' tests have such) puts everybody on one server, and so does one with one server.
    """
    hosts = _hosts(rank_table)
    ranked = sorted((rank, cluster_id) for cluster_id, rank in cluster_rank_info.items())
    if hosts:
        for rank, cluster_id in ranked:
            if rank not in hosts:
                raise RuleError(f"rank {rank} of cluster {cluster_id} is not in rank_table, which has {sorted(hosts)}")
    where = {rank: hosts.get(rank, "") for rank, _ in ranked}
    if len(set(where.values())) == 1:
        where = dict.fromkeys(where, "")
    elif not all(where.values()):
        raise RuleError("rank_table has several servers, and one of them has neither host_ip nor server_id")
    return tuple(Member(cluster_id, rank, where[rank]) for rank, cluster_id in ranked)


def _hosts(rank_table: str) -> dict[int, str]:
    """The server's address of each rank: ``host_ip``, else ``server_id``."""
    try:
        table: Any = json.loads(rank_table)
    except ValueError as error:
        raise RuleError(f"rank_table is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise RuleError("rank_table must be a JSON object")
    hosts: dict[int, str] = {}
    for server in _objects(table, "server_list"):
        host = server.get("host_ip") or server.get("server_id") or ""
        if not isinstance(host, str):
            raise RuleError(f"rank_table has a server whose address is {host!r}, not a string")
        for device in _objects(server, "device"):
            if (rank := device.get("rank_id")) is not None:
                hosts[_number(rank)] = host
    return hosts


def _objects(parent: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    listed = parent.get(name, [])
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise RuleError(f"rank_table's {name} must be a list of objects")
    return listed


def _number(rank: object) -> int:
    if isinstance(rank, int) or (isinstance(rank, str) and rank.isascii() and rank.isdigit()):
        return int(rank)
    raise RuleError(f"rank_table has rank_id {rank!r}, which is no number")
