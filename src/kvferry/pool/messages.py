"""What a pool's client and its nodes say to each other: one request, one answer, each a call over their link.

MessagePack by msgspec: arrays whose first element says which message it is. Lists of numbers, one for each key, travel as
the bytes of little-endian arrays. ``docs/pool.md`` has the conversation.
"""

from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = [
    "LONGEST_KEY",
    "MOST_KEYS",
    "VERSION",
    "WORDS",
    "Answer",
    "Request",
    "code_of",
    "decode_answer",
    "decode_request",
    "encode",
]

VERSION = 3  # of these messages; a client and a node of different versions do not talk
LONGEST_KEY = 255  # bytes
MOST_KEYS = 1 << 16  # of one request: all others wait while a node answers it

# What became of one key, as a byte. The first two are successes of a load, and of a save.
WORDS = (
    "hit",
    "saved",
    "present",  # a save found it there: first write wins
    "never_saved",
    "evicted",
    "expired",
    "removed",
    "pending",  # somebody is saving it at this moment
    "size_mismatch",
    "corrupted",
    "lease_lost",
    "full",
    "oversize",
    "timeout",
    "node_lost",
    "pool_off",
)
_CODES = {word: code for code, word in enumerate(WORDS)}


Key: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=1, max_length=LONGEST_KEY)]
Keys: TypeAlias = Annotated[list[bytes], msgspec.Meta(max_length=MOST_KEYS)]


def code_of(word: str) -> int:
    """The byte that stands for ``word``."""
    return _CODES[word]


HIT, SAVED, _KNOWN = code_of("hit"), code_of("saved"), bytes(range(len(WORDS)))


def _codes(codes: bytes, keys: int) -> npt.NDArray[np.uint8]:
    if len(codes) != keys or codes.translate(None, _KNOWN):
        raise ValueError(f"{len(codes)} codes for {keys} keys, or one that stands for no word")
    return np.frombuffer(codes, np.uint8)


def _placed(places: int, windows: list[bytes], window_of: bytes, offsets: bytes) -> None:
    if len(offsets) != 8 * places or bool(windows) != bool(places):
        raise ValueError(f"{len(offsets)} bytes of offsets and {len(windows)} windows for {places} places")
    if len(windows) > 1 and (
        len(window_of) != 2 * places or int(np.frombuffer(window_of, np.uint16).max()) >= len(windows)
    ):
        raise ValueError("the places are not in the windows")


class Open(msgspec.Struct, array_like=True, tag=1):
    """Which values are meant: a namespace, and what their bytes are."""

    version: int
    namespace: str
    domain: bytes  # a digest of the namespace's secret; empty: it has none
    fingerprint: bytes
    quota_bytes: int | None


class Exists(msgspec.Struct, array_like=True, tag=2):
    space: int
    keys: Keys


class Lookup(msgspec.Struct, array_like=True, tag=3):
    """Leases what is there of ``keys`` for ``left_ms``. ``number``: what the asker calls the lease; none comes twice over a
    link. ``sizes``: u64 for each key. ``released``: earlier leases."""

    number: int
    space: int
    keys: Keys
    sizes: bytes
    left_ms: int
    released: list[int]


class Release(msgspec.Struct, array_like=True, tag=4):
    """Ends leases, and reservations without publishing them, also those whose answer the asker has not waited for."""

    numbers: list[int]


class Reserve(msgspec.Struct, array_like=True, tag=5):
    """Places for values that are about to come. ``continues``: each key continues the one before it, and the first one
    this key, if it is not empty; None: they are no chain. ``number``, ``released``: as in a lookup."""

    number: int
    space: int
    keys: Annotated[list[Key], msgspec.Meta(max_length=MOST_KEYS)]
    sizes: bytes
    continues: bytes | None
    ttl_ms: int | None
    left_ms: int
    copy: bool  # a copy of what another node owns: goes first
    released: list[int]


class Commit(msgspec.Struct, array_like=True, tag=6):
    """``failed``: positions among the reserved ones whose bytes did not come. ``checksums``: u64 each, or nothing."""

    number: int
    failed: list[int]
    checksums: bytes


class Remove(msgspec.Struct, array_like=True, tag=7):
    space: int
    keys: Keys


class Clear(msgspec.Struct, array_like=True, tag=8):
    """Everything of the namespace that this space belongs to."""

    space: int


class Status(msgspec.Struct, array_like=True, tag=9):
    pass


class Stop(msgspec.Struct, array_like=True, tag=10):
    pass


class Opened(msgspec.Struct, array_like=True, tag=64):
    space: int
    node_id: int
    capacity_bytes: int
    beyond_host: bool = False  # processes of other hosts may load what is saved here


class Flags(msgspec.Struct, array_like=True, tag=65):
    """One code for each key."""

    codes: bytes

    def of(self, keys: int) -> npt.NDArray[np.uint8]:
        """The codes, which are those of so many keys. :raises ValueError: they are not."""
        return _codes(self.codes, keys)


class Leased(msgspec.Struct, array_like=True, tag=66):
    """Where the hits are, in the order of the keys: window number (u16) and offset in its segment (u64) of each. Without a
    window there is no lease."""

    codes: bytes
    windows: list[bytes]
    resolutions: list[bytes]  # of the windows, for the core: what their owner would answer if it were asked
    window_of: bytes
    offsets: bytes
    checksums: bytes  # u64 of each hit, or nothing where none is kept

    def of(self, keys: int) -> npt.NDArray[np.uint8]:
        """As in :class:`Flags`; all that is said of the hits is there too."""
        codes = _codes(self.codes, keys)
        hits = self.codes.count(HIT)
        _placed(hits, self.windows, self.window_of, self.offsets)
        if len(self.resolutions) != len(self.windows) or len(self.checksums) not in (0, 8 * hits):
            raise ValueError("the resolutions or checksums are not those of the windows and hits")
        return codes


class Reserved(msgspec.Struct, array_like=True, tag=67):
    """The same for a save: where those go whose code is ``saved``; the others need nothing or get nothing."""

    codes: bytes
    windows: list[bytes]
    window_of: bytes
    offsets: bytes

    def of(self, keys: int) -> npt.NDArray[np.uint8]:
        """As in :class:`Flags`; all that is said of the places is there too."""
        codes = _codes(self.codes, keys)
        _placed(self.codes.count(SAVED), self.windows, self.window_of, self.offsets)
        return codes


class Count(msgspec.Struct, array_like=True, tag=68):
    keys: int


class Facts(msgspec.Struct, array_like=True, tag=69):
    facts: dict[str, int | float | str]


class Failure(msgspec.Struct, array_like=True, tag=70):
    """``word``: "invalid" (the request's fault), "unknown_space" (open it again), "given_up" (by its asker, or
    its time is up), "internal"."""

    word: str
    sentence: str


Request: TypeAlias = Open | Exists | Lookup | Release | Reserve | Commit | Remove | Clear | Status | Stop
Answer: TypeAlias = Opened | Flags | Leased | Reserved | Count | Facts | Failure

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
