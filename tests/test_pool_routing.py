"""Rendezvous hashing: fixed vectors, shares, and that only the share of who came or went moves."""

import math
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvferry
from kvferry.pool.membership import Member
from kvferry.pool.routing import digests, owners, split

KEYS = digests([f"key {number}" for number in range(20_000)])
WEIGHTS = st.floats(0.01, 100.0)
MEMBERS = st.dictionaries(st.text("abcxyz0189-", min_size=1, max_size=8), WEIGHTS, min_size=1, max_size=8)
WORD = 2**64 - 1


def named(weights: "dict[str, float]") -> "list[Member]":
    return [Member(name, f"{name}:7000", weight) for name, weight in weights.items()]


def owner_names(members: "list[Member]", keys: "np.ndarray" = KEYS) -> "np.ndarray":
    return np.array([member.id for member in members])[owners(keys, members)]


# --- the formula ----------------------------------------------------------------------------------------------------


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD
    return x ^ x >> 31


def digest(key: bytes) -> int:
    """docs/pool.md, "Membership and routing", written out once more, a key at a time."""
    state = mix(len(key) + 0x9E3779B97F4A7C15 & WORD)
    padded = key + bytes(-len(key) % 8)
    for (word,) in struct.iter_unpack("<Q", padded):
        state = mix(state ^ word)
    return state


def owner(key: bytes, weights: "dict[str, float]") -> str:
    def bid(name: str) -> float:
        h = ((mix(digest(key) ^ digest(name.encode())) >> 12) + 0.5) / 2**52
        return -weights[name] / math.log(h)

    return max(sorted(weights), key=bid)


# Promised: another answer, and whatever was saved is looked for at the wrong node after an update.
def test_digests_and_owners_are_those_that_were_promised() -> None:
    keys = [b"a", b"12345678", b"123456789", bytes(32), "schlüssel".encode()]
    promised = [
        "3e506e5796335af0",
        "82177327e1e4daac",
        "b0f00539162b363b",
        "b147b9de3ea242e0",
        "e9f89372122aafc9",
    ]
    assert [f"{number:016x}" for number in digests(keys)] == promised
    weights = {"node-1": 1.0, "node-2": 2.0, "node-3": 4.0}
    assert list(owner_names(named(weights), digests(keys))) == ["node-3", "node-2", "node-2", "node-3", "node-2"]


@given(st.lists(st.binary(min_size=1, max_size=255), max_size=30), MEMBERS)
def test_digests_and_owners_follow_the_formula(keys: "list[bytes]", weights: "dict[str, float]") -> None:
    assert list(digests(keys)) == [digest(key) for key in keys]
    assert list(owner_names(named(weights), digests(keys))) == [owner(key, weights) for key in keys]


def test_a_key_has_one_digest_in_whatever_form_and_company_it_comes() -> None:
    keys = kvferry.prefix_keys(range(64), 16)
    alone = digests(keys)
    assert list(digests([key.tobytes() for key in keys])) == list(alone)
    assert list(digests([*(key.tobytes() for key in keys), bytes(255), b"x"])[:4]) == list(alone)
    assert digests(["ü"])[0] == digests(["ü".encode()])[0]
    assert len({int(one) for one in digests([bytes(length) for length in range(1, 256)])}) == 255
    odd = np.arange(22, dtype=np.uint8).reshape(2, 11)
    assert list(digests(odd)) == list(digests([row.tobytes() for row in odd]))


def test_another_process_says_the_same() -> None:
    said = "from kvferry.pool.routing import digests; print([int(one) for one in digests(['a', 'b'])])"
    command = [sys.executable, "-c", said]
    one = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert one.strip() == str([int(number) for number in digests(["a", "b"])])


# --- who moves ------------------------------------------------------------------------------------------------------


@given(MEMBERS, st.text("uvw", min_size=1, max_size=3), WEIGHTS)
@settings(deadline=None)
def test_a_member_that_comes_takes_keys_and_no_other_key_moves(
    weights: "dict[str, float]", name: str, weight: float
) -> None:
    before, after = owner_names(named(weights)), owner_names(named(weights | {name: weight}))
    moved = before != after
    assert set(after[moved]) <= {name}


@given(MEMBERS.filter(lambda weights: len(weights) > 1), st.data())
@settings(deadline=None)
def test_a_member_that_goes_loses_its_keys_and_no_other_key_moves(
    weights: "dict[str, float]", data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(weights)))
    rest = {name: weight for name, weight in weights.items() if name != gone}
    before, after = owner_names(named(weights)), owner_names(named(rest))
    assert set(before[before != after]) <= {gone}


@given(MEMBERS, st.data(), st.floats(1.0, 10.0))
@settings(deadline=None)
def test_a_member_that_grows_only_gets_keys(weights: "dict[str, float]", data: st.DataObject, factor: float) -> None:
    grown = data.draw(st.sampled_from(sorted(weights)))
    before, after = owner_names(named(weights)), owner_names(named(weights | {grown: weights[grown] * factor}))
    assert set(after[before != after]) <= {grown}


@given(MEMBERS, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_of_members_and_their_addresses_do_not_matter(weights: "dict[str, float]", random: object) -> None:
    members = named(weights)
    shuffled = [Member(member.id, "moved", member.weight) for member in members]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert list(owner_names(members)) == list(owner_names(shuffled))


@given(MEMBERS)
@settings(deadline=None)
def test_shares_follow_weights(weights: "dict[str, float]") -> None:
    """Within six standard deviations of a binomial distribution: wrong once in 500 million."""
    found = owner_names(named(weights))
    for name, weight in weights.items():
        share = weight / sum(weights.values())
        expected, deviation = len(KEYS) * share, math.sqrt(len(KEYS) * share * (1 - share))
        assert abs(int(np.sum(found == name)) - expected) <= 6 * deviation + 2, (name, expected)


# --- split ----------------------------------------------------------------------------------------------------------


@given(MEMBERS)
@settings(deadline=None)
def test_split_gives_every_place_once_and_in_order(weights: "dict[str, float]") -> None:
    members = named(weights)
    places = split(KEYS, members)
    assert len(places) == len(members)
    assert sorted(np.concatenate(places)) == list(range(len(KEYS)))
    owner = owners(KEYS, members)
    for number, mine in enumerate(places):
        assert np.all(np.diff(mine) > 0)
        assert np.all(owner[mine] == number)


def test_no_keys_are_split_among_anybody_and_keys_not_among_nobody() -> None:
    none = digests([])
    assert split(none, []) == []
    assert [len(mine) for mine in split(none, named({"a": 1.0, "b": 1.0}))] == [0, 0]
    with pytest.raises(kvferry.InvalidArgument, match="no member"):
        split(digests(["a"]), [])


def test_the_extremes_of_a_hash_are_finite_bids() -> None:
    """h never rounds to 0 or 1: all 2**64 digests have an owner, the first and the last among them."""
    edges = np.array([0, 1, 2**64 - 1, 2**63], np.uint64)
    with np.errstate(all="raise"):
        assert len(owners(edges, named({"a": 1e-20, "b": 1e20}))) == 4
