"""What may be said to the connector: once for an engine (``kv_connector_extra_config``), and with each request
(``kv_transfer_params``). Pure values; every wrong word gets a sentence that names it and what is possible.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvferry import InvalidArgument

__all__ = ["Settings", "Wishes"]

LONGEST_MS = 24 * 3600 * 1000
ANYWHERE = ("0.0.0.0", "[::]", "")  # where one may listen, and nobody can be found
HOST = re.compile(r"[\w.-]+|\[[\w:.%]+\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``kv_connector_extra_config``.

    =======================  =========================================================================================
    ``pool``                 where blocks are kept beyond their request: ``"on"`` (whatever ``KVFERRY_POOL`` or kvferry's
                             configuration says, else a node of this user's own), ``"off"``, an address, several with
                             commas in between, or a list of them
    ``namespace``            blocks of one are never found in another
    ``secret_file``          a file whose content keeps a namespace's blocks to those who know it
    ``node_secret_file``     a file with the secret that the pool's nodes, and other instances, want to hear
    ``checksum``             ``"auto"``, ``"always"`` or ``"never"``, as for ``kvferry.Pool.connect``
    ``model``                what the blocks' keys are made of in place of the model's path and revision and its files'
                             dates; say it where hosts with differing paths are to share blocks
    ``lookup_timeout_ms``    how long a new request may wait for the pool to say what it has
    ``load_timeout_ms``      how long it may wait for what is loaded from the pool
    ``bounded``              whether these two waits also end when computing would have been as fast, as far as known
    ``pull_timeout_ms``      how long it may wait for what another instance hands over
    ``save_timeout_ms``      how long a block may be kept from being reused because it is still being saved
    ``handover``             whether requests are handed over between prefill and decode instances
    ``push``                 whether requests may also be handed over by push, layer by layer (see docs/vllm.md)
    ``push_timeout_ms``      how long a request waits for what is pushed, its computing elsewhere included
    ``listen``               where other instances may link to this one's workers: ``"host:port"``; port 0 takes a free one,
                             any other is the port of rank 0
    ``advertise``            the host that they are told; that of ``listen`` unless given
    ``window_ttl_ms``        how long a finished prefill waits for somebody to come for it
    ``revive_ms``            how long a sick pool is left alone at first; doubled each time it is still sick, up to 30 s
    =======================  =========================================================================================
    """

    pool: str | tuple[str, ...] = "on"
    namespace: str = "vllm"
    secret_file: str = ""
    node_secret_file: str = ""
    checksum: str = "always"
    model: str = ""
    lookup_timeout_ms: int = 100
    load_timeout_ms: int = 400
    bounded: bool = True
    pull_timeout_ms: int = 1000
    save_timeout_ms: int = 2000
    handover: bool = True
    push: bool = False
    push_timeout_ms: int = 30_000
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    window_ttl_ms: int = 60_000
    revive_ms: int = 1000

    @classmethod
    def read(cls, extra: Mapping[str, Any]) -> "Settings":
        """:raises InvalidArgument: a word that is none of these, or not of its kind."""
        known = {field.name for field in fields(cls)}
        unknown = [name for name in extra if name not in known]
        if unknown:
            raise InvalidArgument(
                f"kv_connector_extra_config has {unknown[0]!r}, which kvferry does not know; it knows {', '.join(sorted(known))}"
            )
        given = dict(extra)
        if isinstance(given.get("pool"), bool):
            given["pool"] = "on" if given["pool"] else "off"
        if isinstance(given.get("pool"), list):
            given["pool"] = tuple(given["pool"])
        settings = cls(**given)
        for field in fields(cls):
            _check(f"kv_connector_extra_config {field.name!r}", field.name, getattr(settings, field.name))
        settings.secret, settings.node_secret  # noqa: B018 - a file that has none is told of now
        if settings.handover and not settings.advertise and settings.listen.rpartition(":")[0] in ANYWHERE:
            raise InvalidArgument(
                f"kv_connector_extra_config 'listen' is {settings.listen!r}: say with 'advertise' at which host other instances "
                "are to find this one"
            )
        return settings

    @property
    def pool_off(self) -> bool:
        return self.pool == "off"

    @property
    def members(self) -> list[str] | str | None:
        """As `kvferry.Pool.connect` takes them."""
        return None if self.pool == "on" else self.pool if isinstance(self.pool, str) else list(self.pool)

    @property
    def secret(self) -> str | None:
        return _content("secret_file", self.secret_file)

    @property
    def node_secret(self) -> str | None:
        return _content("node_secret_file", self.node_secret_file)

    def place_of(self, rank: int) -> str:
        """Where the worker of this rank listens."""
        host, _, port = self.listen.rpartition(":")
        return f"{host}:{int(port) + rank if int(port) else 0}"


def _check(what: str, name: str, value: Any) -> None:
    if name.endswith("_ms"):
        if type(value) is not int or not 1 <= value <= LONGEST_MS:
            raise InvalidArgument(f"{what} is {value!r}: give whole milliseconds from 1 to {LONGEST_MS}")
    elif name in ("handover", "bounded", "push"):
        if not isinstance(value, bool):
            raise InvalidArgument(f"{what} is {value!r}: give true or false")
    elif name == "pool":
        words = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(word, str) and word for word in words) or not words:
            raise InvalidArgument(f'{what} is {value!r}: give "on", "off", an address or a list of addresses')
    elif not isinstance(value, str):
        raise InvalidArgument(f"{what} is {value!r}: give a string")
    elif name == "checksum" and value not in ("auto", "always", "never"):
        raise InvalidArgument(f'{what} is {value!r}: give "auto", "always" or "never"')
    elif name == "listen" and not value.rpartition(":")[2].isdecimal():
        raise InvalidArgument(f'{what} is {value!r}: give "host:port", with port 0 for a free one')
    elif name == "advertise" and value and (value in ANYWHERE or not HOST.fullmatch(value)):
        raise InvalidArgument(
            f"{what} is {value!r}: give the host alone at which other instances find this one, such as "
            '"10.0.0.7" or "[fd00::7]"; the port is that of \'listen\''
        )


def _content(name: str, file: str) -> str | None:
    if not file:
        return None
    try:
        content = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no path
        raise InvalidArgument(
            f"kv_connector_extra_config {name!r} is {file!r}, which cannot be read: {error}; give a file of text with the secret"
        ) from None
    if not content:
        raise InvalidArgument(
            f"kv_connector_extra_config {name!r} is {file!r}, which is empty: write the secret into it, or leave {name!r} out "
            "to do without one"
        )
    return content


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What one request asks for: ``kv_transfer_params={"kvferry": {"store": False, "read": False, "tenant": "a",
    "ttl_ms": 60000}}``, any of them.

    ``tenant``: blocks of one are never found by another. ``ttl_ms``: how long what this request saves may stay.
    """

    store: bool = True
    read: bool = True
    tenant: str = ""
    ttl_ms: int | None = None

    @classmethod
    def read_from(cls, params: Mapping[str, Any] | None) -> "Wishes":
        """:raises InvalidArgument: it asks for something that there is not."""
        asked = (params or {}).get("kvferry")
        if asked is None:
            return cls()
        if not isinstance(asked, Mapping):
            raise InvalidArgument(
                f'kv_transfer_params "kvferry" is {asked!r}: give an object such as {{"store": false}}'
            )
        for name, value in asked.items():
            what = f'kv_transfer_params "kvferry" has {name!r} = {value!r}'
            if name in ("store", "read"):
                if not isinstance(value, bool):
                    raise InvalidArgument(f"{what}: give true or false")
            elif name == "tenant":
                if not isinstance(value, str):
                    raise InvalidArgument(f"{what}: give a string")
            elif name == "ttl_ms":
                if type(value) is not int or value < 1:
                    raise InvalidArgument(f"{what}: give whole milliseconds from 1 on")
            else:
                raise InvalidArgument(f"{what}; there are store, read, tenant and ttl_ms")
        return cls(**asked)
