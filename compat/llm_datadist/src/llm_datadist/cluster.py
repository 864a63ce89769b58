"""One remote cluster to link to or unlink from."""

from __future__ import annotations

from collections.abc import Sequence

from llm_datadist._rules import ip_to_int
from llm_datadist.enums import LLMRole
from llm_datadist.utils.utils import check_isinstance, check_uint16, check_uint64


class LLMClusterInfo:
    """Addresses are kept as little-endian integers. The remote role is stored and not used."""

    def __init__(self) -> None:
        self._remote_cluster_id: int | None = None
        self._remote_role_type: LLMRole | int | None = None
        self._local: list[tuple[int, int]] = []
        self._remote: list[tuple[int, int]] = []

    @property
    def remote_cluster_id(self) -> int | None:
        return self._remote_cluster_id

    @remote_cluster_id.setter
    def remote_cluster_id(self, cluster_id: int) -> None:
        self._remote_cluster_id = check_uint64("remote_cluster_id", cluster_id)

    @property
    def remote_role_type(self) -> LLMRole | int | None:
        return self._remote_role_type

    @remote_role_type.setter
    def remote_role_type(self, role: LLMRole | int) -> None:
        check_isinstance("remote_role_type", role, [LLMRole, int])
        self._remote_role_type = role

    def append_local_ip_info(self, ip: str | int, port: int) -> None:
        self._local.append(_ip_info(ip, port))

    def append_remote_ip_info(self, ip: str | int, port: int) -> None:
        self._remote.append(_ip_info(ip, port))

    @property
    def local_ip_info_list(self) -> list[tuple[int, int]]:
        return self._local

    @property
    def remote_ip_info_list(self) -> list[tuple[int, int]]:
        return self._remote


def _ip_info(ip: str | int, port: int) -> tuple[int, int]:
    check_isinstance("ip", ip, [str, int])
    check_uint16("port", port)
    if isinstance(ip, str):
        ip = ip_to_int(ip.encode(errors="backslashreplace").decode())
    return ip, port


def ip_infos(name: str, infos: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """What a call takes of a list of addresses. ``TypeError`` for what cannot be one: ``append_…`` lets ``None`` and any int
    through, and the list is the caller's to write into."""
    for index, info in enumerate(infos):
        is_pair = isinstance(info, tuple) and len(info) == 2 and all(isinstance(number, int) for number in info)
        if not is_pair or not 0 <= info[0] < 1 << 32 or not 0 <= info[1] < 1 << 16:
            raise TypeError(f"{name}[{index}] only support an IPv4 address and a port, but got {info!r}")
    return tuple((int(ip), int(port)) for ip, port in infos)
