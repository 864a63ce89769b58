"""Handover as the scheduler's side sees it: the words that go from a prefill instance through the proxy to a decode instance,
and asking this instance's own workers for windows.

The words are those that the proxies between prefill and decode instances of vLLM pass on, which take them as they are.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from kvferry import DeadlineExceeded, InvalidArgument, Link, Node
from kvferry.connectors.vllm.orders import Place
from kvferry.connectors.vllm.requests import Handed
from kvferry.connectors.vllm.settings import Settings

__all__ = [
    "Answered",
    "Expecting",
    "Handed",
    "Open",
    "Opened",
    "Pushed",
    "Release",
    "Windows",
    "advertised_at",
    "new_token",
    "read",
    "write",
]

OPENING_MS = 300  # the engine waits for it, once per request that is handed over


class Open(msgspec.Struct, array_like=True, tag="open"):
    """To a worker of one's own: open a window over these blocks, for this request."""

    token: bytes
    request_id: str
    blocks: list[int]
    ttl_ms: int


class Opened(msgspec.Struct, array_like=True):
    window: bytes
    why: str = ""


class Release(msgspec.Struct, array_like=True, tag="release"):
    """To a worker of the other instance: nobody will read through this window any more. ``read``: its blocks were taken."""

    window: bytes
    read: bool


class Expecting(msgspec.Struct, array_like=True, tag="expecting"):
    """To a worker of a prefill: push the blocks of request ``id``, from its block ``first`` on, through this window of the node
    at ``address``, into these blocks."""

    id: str
    window: bytes
    address: str
    first: int
    blocks: list[int]
    geometry: str
    model: str
    prompt: str


class Answered(msgspec.Struct, array_like=True):
    why: str = ""


class Pushed(msgspec.Struct, array_like=True, tag="pushed"):
    """To a worker of a decode: everything of request ``id`` has come, or why it will not."""

    id: str
    why: str


class Windows:
    """Asks the workers of this instance for windows, over links of its own."""

    def __init__(self, places: Sequence[Place], settings: Settings) -> None:
        self.addresses = [advertised_at(place.address, settings.advertise) for place in places]
        self._ttl_ms = settings.window_ttl_ms
        self._places = places
        self._node = Node(secret=settings.node_secret, program="kvferry-vllm-scheduler", copy_threads=1)
        self._links: dict[str, Link] = {}

    def open(self, request_id: str, blocks: list[int]) -> list[bytes]:
        """The names of the windows, by rank. :raises KvferryError: one of the workers gave none."""
        answers = []
        for place in self._places:
            asked = msgspec.msgpack.encode(Open(place.token, request_id, blocks, self._ttl_ms))
            answers.append(self._link(place.address).call_async(asked, timeout_ms=OPENING_MS))
        names = []
        for answer in answers:
            opened = msgspec.msgpack.decode(answer.wait(OPENING_MS), type=Opened)
            if opened.why:
                raise DeadlineExceeded(opened.why)
            names.append(opened.window)
        return names

    def _link(self, address: str) -> Link:
        link = self._links.get(address)
        if link is None or not link.alive:
            link = self._links[address] = self._node.link(address, timeout_ms=OPENING_MS)
        return link

    def close(self) -> None:
        self._node.close()


def write(
    addresses: list[str],
    windows: list[bytes],
    blocks: list[int],
    tokens: int,
    geometry: str,
    model: str,
    prompt: str,
    engine_id: str,
    request_id: str,
) -> dict[str, object]:
    host, _, port = addresses[0].rpartition(":")
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_block_ids": blocks,
        "remote_host": host,
        "remote_port": int(port),
        "remote_num_tokens": tokens,
        "tp_size": len(windows),
        "kvferry_addresses": addresses,
        "kvferry_windows": [name.hex() for name in windows],
        "kvferry_geometry": geometry,
        "kvferry_model": model,
        "kvferry_prompt": prompt,
    }


def read(params: Mapping[str, Any]) -> Handed:
    """:raises InvalidArgument: they are not what :func:`write` makes, and the sentence says what is wrong."""
    if params.get("kvferry_push"):
        try:
            whom = msgspec.convert(
                {name: params[name] for name in _TO_PUSH if name in params}, type=_ToPush, strict=False
            )
        except msgspec.ValidationError as error:
            raise InvalidArgument(
                f"it is to be pushed, and its kv_transfer_params do not say by whom ({error}): remote_host and remote_port are "
                "where the prefill's connector listens, kvferry_push is a string"
            ) from None
        return Handed([f"{whom.remote_host}:{whom.remote_port}"], [], [], 0, "", "", "", whom.kvferry_push)
    try:
        given = msgspec.convert({name: params[name] for name in _NEEDED if name in params}, type=_Words, strict=True)
        windows = [bytes.fromhex(name) for name in given.kvferry_windows]
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidArgument(
            f"its kv_transfer_params are none of kvferry's ({error}): both instances must run kvferry's connector"
        ) from None
    if len(windows) != len(given.kvferry_addresses) or not windows:
        raise InvalidArgument("its kv_transfer_params name another number of windows than of workers")
    return Handed(
        given.kvferry_addresses,
        windows,
        given.remote_block_ids,
        given.remote_num_tokens,
        given.kvferry_geometry,
        given.kvferry_model,
        given.kvferry_prompt,
    )


class _Words(msgspec.Struct):
    remote_block_ids: list[int]
    remote_num_tokens: int
    kvferry_addresses: list[str]
    kvferry_windows: list[str]
    kvferry_geometry: str
    kvferry_model: str
    kvferry_prompt: str


_NEEDED = _Words.__struct_fields__


class _ToPush(msgspec.Struct):
    kvferry_push: str
    remote_host: str
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


_TO_PUSH = _ToPush.__struct_fields__


def new_token() -> bytes:
    return secrets.token_bytes(16)


def advertised_at(address: str, host: str) -> str:
    return f"{host}:{address.rpartition(':')[2]}" if host else address
