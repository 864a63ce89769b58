"""What a node can be told, as values: its pool, its addresses, its transports, its times.

Parses and checks the words that only the front door knows; numbers that the core checks are passed on as they are.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvferry.errors import InvalidArgument

__all__ = ["PoolOptions"]

LONGEST_MS = 2**31 - 1
TRANSPORTS = {"map": 1, "cma": 2, "socket": 4}
LAYOUTS = {"rows": 0, "blocks": 1, "mixed": 2}
ACCESSES = {"read": 1, "write": 2}
KEY_USES = {"key": 0, "row": 1, "never": 2}
ATTACH = {"same": False, "any": True}


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The node's pool of memory that kvferry allocates itself and that peers on the same host may map.

    ``size_bytes`` in all, handed out in pages of ``1 << page_shift`` bytes from segments of ``segment_bytes`` that are
    made when they are first needed and given back whole when they are empty.
    """

    size_bytes: int
    page_shift: int = 16
    segment_bytes: int = 256 << 20


def pool_options(pool: int | PoolOptions) -> PoolOptions:
    """``pool=`` of a node: its size in bytes, or all of it."""
    return pool if isinstance(pool, PoolOptions) else PoolOptions(pool)


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``; port 0 stands for any free one.

    >>> parse_address("127.0.0.1:7000"), parse_address("[::1]:0")
    (('127.0.0.1', 7000), ('::1', 0))
    """
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or not host or (":" in host) != bracketed or not (port.isascii() and port.isdigit()):
        raise InvalidArgument(
            f"{address!r} is not an address; write 'host:port' or '[v6]:port', as in '127.0.0.1:7000'"
        )
    if int(port) > 65535:
        raise InvalidArgument(f"{address!r} has port {port}; ports end at 65535")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """The inverse of :func:`parse_address`.

    >>> format_address("::1", 7000)
    '[::1]:7000'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def checked_timeout(timeout_ms: Any) -> int:
    """``timeout_ms`` itself if it is a whole number of milliseconds in ``0 .. 2**31 - 1``, else InvalidArgument."""
    if timeout_ms.__class__ is int and 0 <= timeout_ms <= LONGEST_MS:
        return timeout_ms
    if timeout_ms is None:
        raise InvalidArgument(
            f"timeout_ms=None: waiting without a deadline does not exist; give milliseconds, at most {LONGEST_MS}"
        )
    raise InvalidArgument(f"timeout_ms={timeout_ms!r} is not a whole number of milliseconds from 0 to {LONGEST_MS}")


def one_of(what: str, word: str, words: dict[str, int] | dict[str, bool]) -> int:
    """The number that ``word`` stands for, or InvalidArgument with the words that there are."""
    try:
        return words[word]
    except (KeyError, TypeError):
        raise InvalidArgument(f"{what}={word!r} is none of {', '.join(map(repr, words))}") from None


def transport_bit(transport: str | None) -> int:
    """One transport as the core's bit; None, the fastest that there is, is 0."""
    return 0 if transport is None else one_of("transport", transport, TRANSPORTS)


def transport_bits(transports: Iterable[str]) -> int:
    """The transports that a node may use, as the core's bits; at least one."""
    names = (transports,) if isinstance(transports, str) else tuple(transports)
    if not names:
        raise InvalidArgument("transports=() leaves no way to move a byte; name at least 'socket'")
    bits = 0
    for name in names:
        bits |= one_of("transport", name, TRANSPORTS)
    return bits


def secret_bytes(secret: str | bytes | None) -> bytes:
    """The shared secret as the hello uses it; no secret is ``b""``, and an empty one is a mistake."""
    if secret is None:
        return b""
    if not isinstance(secret, str | bytes) or not secret:
        raise InvalidArgument("secret must be a non-empty str or bytes; leave it out to link without one")
    return secret.encode() if isinstance(secret, str) else secret


def random_node_id() -> int:
    """A node id that no other node is likely to have: 48 random bits, never 0."""
    return int.from_bytes(os.urandom(6), "big") or 1
