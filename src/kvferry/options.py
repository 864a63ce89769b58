"""What callers say, as values: numbers, names, times, words, and what a node can be told.

Every argument of the front door that is of the wrong type, or that no machine word can hold, is refused here in a sentence
that names it. Whether a number makes sense is for the core to say.
"""

import operator
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.errors import InvalidArgument

__all__ = ["PoolOptions"]

LONGEST_MS = 2**31 - 1
LARGEST_UNIT = 2**32 - 1  # of a block, row, layer or tensor
LARGEST = 2**64 - 1
MOST_LISTED = 1 << 20  # tensors, or dimensions
LONGEST_NAME_SHOWN = 80
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
    if not isinstance(pool, PoolOptions):
        return PoolOptions(whole("pool", pool))
    return PoolOptions(
        whole("size_bytes", pool.size_bytes),
        whole("page_shift", pool.page_shift, most=63),
        whole("segment_bytes", pool.segment_bytes),
    )


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``; port 0 stands for any free one.

    >>> parse_address("127.0.0.1:7000"), parse_address("[::1]:0")
    (('127.0.0.1', 7000), ('::1', 0))
    """
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    numbered = port.isascii() and port.isdigit()
    if not colon or not host or not host.isprintable() or (":" in host) != bracketed or not numbered:
        raise InvalidArgument(
            f"{shown(address)} is not an address; write 'host:port', '[v6]:port' or 'unix:path', as in '127.0.0.1:7000'"
        )
    if len(port) > 5 or int(port) > 65535:
        raise InvalidArgument(f"{shown(address)} has port {port[:9]}; ports end at 65535")
    return host, int(port)


def parse_place(address: str) -> tuple[str, int] | str:
    """Host and port, or the absolute path of the socket that ``unix:path`` names.

    >>> parse_place("127.0.0.1:7000"), parse_place("unix:/run/user/1000/kv.sock")
    (('127.0.0.1', 7000), '/run/user/1000/kv.sock')
    """
    if not isinstance(address, str) or not address.startswith("unix:"):
        return parse_address(address)
    path = text("the address", address)[len("unix:") :]
    if not path or "\0" in path:
        raise InvalidArgument(
            f"{shown(address)} names no socket; write 'unix:path', as in 'unix:/run/user/1000/kv.sock'"
        )
    return os.path.abspath(path)


def format_address(host: str, port: int) -> str:
    """The inverse of :func:`parse_address`.

    >>> format_address("::1", 7000)
    '[::1]:7000'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", re.ASCII | re.IGNORECASE)


def parse_size(what: str, size: int | str) -> int:
    """Bytes: a whole number above 0, or a word with a unit of 1024 (KiB, K) or 1000 (KB).

    >>> parse_size("memory", "8GiB"), parse_size("memory", "1.5 MB"), parse_size("memory", "64k"), parse_size("memory", 7)
    (8589934592, 1500000, 65536, 7)
    """
    if not isinstance(size, str):
        return whole(what, size, 1)
    found = _SIZE.fullmatch(size.strip())
    if found is None:
        raise InvalidArgument(f"{what}={shown(size)} is no size; write bytes, or a number with a unit, as in '8GiB'")
    number, letter, binary = found.groups()
    decimal = letter and not binary and size.strip()[-1] in "bB"
    unit = (1000 if decimal else 1024) ** " KMGT".index(letter.upper()) if letter else 1
    return whole(what, int(float(number) * unit) if "." in number else int(number) * unit, 1)


def format_size(size_bytes: int) -> str:
    """A size as a person reads it.

    >>> format_size(8 << 30), format_size(5_800_000_000), format_size(700)
    ('8.0 GiB', '5.4 GiB', '700 bytes')
    """
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << power:
            return f"{size_bytes / (1 << power):.1f} {unit}"
    return f"{size_bytes} bytes"


def shown(value: object) -> str:
    """``value`` as a sentence shows it, in at most 60 characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001 - an int of more than 4,300 digits has no repr, and a class may refuse in any way
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."


def named(name: str) -> str:
    """A name as a sentence shows it: in quotes, on one line, at most 80 characters of it.

    >>> print(named("kv"), named("two\\nlines"), named("a" * 81)[-4:])
    'kv' 'two\\nlines' aa…'
    """
    return repr(name if len(name) <= LONGEST_NAME_SHOWN else name[:LONGEST_NAME_SHOWN] + "…")


def index(value: Any) -> int | None:
    """``value`` as an int if it is a whole number, numpy's and torch's among them; None for all else, and for bools."""
    if value.__class__ is int:
        return value
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except Exception:  # noqa: BLE001 - a TypeError from what is no number, and a class may refuse in any way
        return None


def whole(what: str, value: Any, least: int = 0, most: int = LARGEST) -> int:
    """``value`` as an int if it is a whole number from ``least`` to ``most``, else InvalidArgument.

    >>> whole("lanes", np.int32(2)), whole("row", 7)
    (2, 7)
    """
    number = index(value)
    if number is None or not least <= number <= most:
        raise InvalidArgument(f"{what}={shown(value)} is not a whole number from {least} to {_power(most)}")
    return number


def whole_numbers(what: str, values: Any, least: int = 0, most: int = LARGEST) -> list[int]:
    """A list of whole numbers, from any sequence or numpy array of them."""
    listed = isinstance(values, Sequence | np.ndarray) and not isinstance(values, str | bytes | bytearray | memoryview)
    if not listed or (isinstance(values, np.ndarray) and values.ndim != 1):
        raise InvalidArgument(f"{what}={shown(values)} is no list of whole numbers")
    if len(values[MOST_LISTED : MOST_LISTED + 1]):  # not len(values): a range may be longer than any len()
        raise InvalidArgument(f"{what}={shown(values)} is too long: {MOST_LISTED} numbers are allowed")
    return [whole(f"{what}[{place}]", value, least, most) for place, value in enumerate(values)]


def text(what: str, value: Any) -> str:
    """``value`` if it is a string that can be sent, else InvalidArgument."""
    try:
        if isinstance(value, str):
            value.encode()
            return value
    except UnicodeEncodeError:
        raise InvalidArgument(f"{what}={shown(value)} holds half a character (a lone surrogate)") from None
    raise InvalidArgument(f"{what}={shown(value)} is no str")


def truth(what: str, value: Any) -> bool:
    """``value`` if it is True or False, else InvalidArgument."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{what}={shown(value)} is neither True nor False")
    return value


def checked_timeout(timeout_ms: Any, what: str = "timeout_ms") -> int:
    """``timeout_ms`` if it is a whole number of milliseconds in ``0 .. 2**31 - 1``, else InvalidArgument."""
    if timeout_ms.__class__ is int and 0 <= timeout_ms <= LONGEST_MS:
        return timeout_ms
    if timeout_ms is None:
        raise InvalidArgument(
            f"{what}=None: waiting without a deadline does not exist; give milliseconds, at most {LONGEST_MS}"
        )
    number = index(timeout_ms)
    if number is None or not 0 <= number <= LONGEST_MS:
        raise InvalidArgument(
            f"{what}={shown(timeout_ms)} is not a whole number of milliseconds from 0 to {LONGEST_MS}"
        )
    return number


def one_of(what: str, word: str, words: dict[str, int] | dict[str, bool]) -> int:
    """The number that ``word`` stands for, or InvalidArgument with the words that there are."""
    try:
        return words[word]
    except (KeyError, TypeError):
        raise InvalidArgument(f"{what}={shown(word)} is none of {', '.join(map(repr, words))}") from None


def transport_bit(transport: str | None) -> int:
    """One transport as the core's bit; None, the fastest that there is, is 0."""
    return 0 if transport is None else one_of("transport", transport, TRANSPORTS)


def transport_bits(transports: Iterable[str]) -> int:
    """The transports that a node may use, as the core's bits; at least one."""
    try:
        names = iter((transports,) if isinstance(transports, str) else transports)
    except Exception as error:  # a TypeError as a rule, and a class may refuse in any way
        raise InvalidArgument(
            f"transports={shown(transports)} is no list of words such as ('map', 'cma', 'socket')"
        ) from error
    bits = 0
    for name in names:
        bits |= one_of("transport", name, TRANSPORTS)
    if not bits:
        raise InvalidArgument("transports=() leaves no way to move a byte; name at least 'socket'")
    return bits


def secret_bytes(secret: str | bytes | None) -> bytes:
    """The shared secret as the hello uses it; no secret is ``b""``, and an empty one is a mistake."""
    if secret is None:
        return b""
    if not isinstance(secret, str | bytes) or not secret:
        raise InvalidArgument("secret must be a non-empty str or bytes; leave it out to link without one")
    return text("secret", secret).encode() if isinstance(secret, str) else secret


def _power(number: int) -> str:
    bits = number.bit_length()
    return f"2**{bits} - 1" if bits > 31 and number == 2**bits - 1 else str(number)


def random_node_id() -> int:
    """A node id that no other node is likely to have: 48 random bits, never 0."""
    return int.from_bytes(os.urandom(6), "big") or 1
