"""Which member owns which key: rendezvous hashing, weighted, for a hundred thousand keys at a time.

Every member bids for every key, and the highest bid wins. A bid depends on the key and on its own bidder alone, so a member
that comes or goes moves only the keys that it wins or had won. With h uniform in (0, 1) from the hash of key and member,
the bid ``-weight / ln(h)`` wins a share of keys in proportion to the weight ("logarithmic method"). Pure functions of their
arguments, the same in every process; docs/pool.md, "Membership and routing", has the formula.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvferry.errors import InvalidArgument
from kvferry.pool.membership import Member

__all__ = ["digests", "owners", "split"]

Digests = npt.NDArray[np.uint64]
Places = npt.NDArray[np.intp]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def digests(keys: Sequence[bytes | str] | npt.NDArray[np.uint8]) -> Digests:
    """64 bits for each key, equal for equal keys in whatever form: uint64, shape (n,). Not secret, not collision-free.

    ``keys``: bytes, or str for their UTF-8; or the rows of an (n, bytes) array such as ``prefix_keys`` returns.
    """
    if isinstance(keys, np.ndarray):
        count, longest = keys.shape
        lengths = np.full(count, longest, np.uint64)
        words = np.zeros((count, -(-longest // 8) * 8), np.uint8)
        words[:, :longest] = keys
        return _mixed(words.view("<u8"), lengths)
    said = [key.encode() if isinstance(key, str) else key for key in keys]
    lengths = np.fromiter(map(len, said), np.uint64, len(said))
    width = -(-int(lengths.max(initial=1)) // 8) * 8
    words = np.frombuffer(b"".join([key.ljust(width, b"\0") for key in said]), "<u8").reshape(len(said), width // 8)
    return _mixed(words, lengths)


def owners(keys: Digests, members: Sequence[Member]) -> Places:
    """The place in ``members`` of each key's owner: shape (n,). The order of the members does not matter.

    :raises InvalidArgument: there are keys and no members.
    """
    if not members:
        if len(keys):
            raise InvalidArgument("keys cannot be shared out: there is no member")
        return np.zeros(0, np.intp)
    owner = np.zeros(len(keys), np.intp)
    if len(members) == 1:
        return owner
    highest = np.full(len(keys), -np.inf)
    for place in sorted(range(len(members)), key=lambda place: members[place].id):  # of equal bids the first id's wins
        bid = _bids(keys, _seed(members[place].id), members[place].weight)
        wins = bid > highest
        owner[wins] = place
        np.maximum(highest, bid, out=highest)
    return owner


def split(keys: Digests, members: Sequence[Member]) -> list[Places]:
    """For each member the places of its keys, ascending; together every place once."""
    owner = owners(keys, members)
    if len(members) <= 1:
        return [np.arange(len(keys)) for _ in members]
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=len(members)))
    return np.split(order, ends[:-1])


@lru_cache(1024)
def _seed(member_id: str) -> np.uint64:
    seed: np.uint64 = digests([member_id])[0]
    return seed


def _bids(keys: Digests, seed: np.uint64, weight: float) -> npt.NDArray[np.float64]:
    # 52 bits and a half: every value is a double of its own, neither 0 nor 1.
    h = ((_mix(keys ^ seed) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -weight / np.log(h)


def _mixed(words: Digests, lengths: Digests) -> Digests:
    """Words of 8 bytes, one key a row, as far as each key's length; what lies behind it must not count."""
    state = _mix(lengths + _GOLDEN)
    for place in range(words.shape[1]):
        state = np.where(lengths > 8 * place, _mix(state ^ words[:, place]), state)
    return state


def _mix(x: Digests) -> Digests:
    """A permutation of 64-bit numbers in which each input bit reaches all output bits (SplitMix64's)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
