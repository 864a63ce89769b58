"""Keys and fingerprints: fixed vectors, the chain, and what is no token."""

import struct
import time
from pathlib import Path

import blake3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvferry
from kvferry.pool.keys import fingerprint, prefix_keys

DOCS = (Path(__file__).resolve().parent.parent / "docs" / "pool.md").read_text()
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def formula(tokens: "list[int]", block_tokens: int, model: bytes = b"", salt: bytes = b"") -> "list[bytes]":
    """docs/pool.md, "Keys", written out once more."""
    said = struct.pack("<QQ", block_tokens, len(model)) + model + struct.pack("<Q", len(salt)) + salt
    key = blake3.blake3(said, derive_key_context="kvferry 2026-11-29 prefix keys v1").digest()
    keys = []
    for block in range(len(tokens) // block_tokens):
        hasher = blake3.blake3()
        hasher.update(key)
        for token in tokens[block * block_tokens : (block + 1) * block_tokens]:
            hasher.update(struct.pack("<I", token))
        key = hasher.digest()
        keys.append(key)
    return keys


def as_bytes(keys: "np.ndarray") -> "list[bytes]":
    return [key.tobytes() for key in keys]


# What is here has been promised: whoever changes it loses every value that is saved anywhere.
@pytest.mark.parametrize(
    ("tokens", "block_tokens", "words", "last"),
    [
        (range(16), 16, {}, "f754924deb908adba86224690e4cff57649e90d39f36124fcee93c7a9d208d34"),
        (range(40), 16, {}, "19c25b3106c6073851c40785c6c439668b6bd6a128c8ebaf43f9cf1e0e44b0aa"),
        (
            [0, 2**32 - 1, 7],
            1,
            {"model": "smollm2@9f3c"},
            "17bbc5d5f9a922d13f6fff45e5f5579882c1fa6ae30ae95e598f4f0625682f2e",
        ),
        (
            [1, 2, 3, 4],
            2,
            {"model": "mödel", "salt": b"\x00tenant"},
            "8a7b14265dcebca1f1bffe7f71c44861e9b2a62f06243b2e253d446e0d84f964",
        ),
    ],
)
def test_keys_are_those_that_were_promised(
    tokens: "list[int]", block_tokens: int, words: "dict[str, str]", last: str
) -> None:
    keys = prefix_keys(tokens, block_tokens, **words)
    assert keys.dtype == np.uint8
    assert keys.shape == (len(tokens) // block_tokens, 32)
    assert bytes(keys[-1]).hex() == last
    assert last in DOCS
    assert as_bytes(keys) == formula(
        list(tokens), block_tokens, words.get("model", "").encode(), words.get("salt", b"")
    )


@given(TOKENS, st.integers(1, 9), st.text(st.characters(exclude_categories=["Cs"]), max_size=5), st.binary(max_size=5))
def test_keys_follow_the_formula(tokens: "list[int]", block_tokens: int, model: str, salt: bytes) -> None:
    keys = prefix_keys(tokens, block_tokens, model=model, salt=salt)
    assert as_bytes(keys) == formula(tokens, block_tokens, model.encode(), salt)


@given(TOKENS.filter(bool), st.integers(1, 9), st.data())
def test_one_other_token_changes_the_keys_from_its_block_on(
    tokens: "list[int]", block_tokens: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens]
    other[place] ^= 1 << data.draw(st.integers(0, 31))
    one, two = as_bytes(prefix_keys(tokens, block_tokens)), as_bytes(prefix_keys(other, block_tokens))
    block = place // block_tokens
    assert one[:block] == two[:block]
    assert not set(one[block:]) & set(two)


@given(TOKENS, TOKENS, st.integers(1, 9))
def test_a_longer_prompt_begins_with_the_keys_of_its_beginning(
    tokens: "list[int]", more: "list[int]", block_tokens: int
) -> None:
    short = as_bytes(prefix_keys(tokens, block_tokens))
    assert as_bytes(prefix_keys(tokens + more, block_tokens))[: len(short)] == short


def test_equal_tokens_in_other_blocks_have_other_keys() -> None:
    keys = as_bytes(prefix_keys([5] * 64, 16))
    assert len(set(keys)) == 4


def test_model_salt_and_block_size_keep_keys_apart() -> None:
    tokens = list(range(32))
    runs = [
        prefix_keys(tokens, 16),
        prefix_keys(tokens, 16, model="a"),
        prefix_keys(tokens, 16, salt=b"a"),
        prefix_keys(tokens, 16, model="ab", salt=b"c"),
        prefix_keys(tokens, 16, model="a", salt=b"bc"),
        prefix_keys(tokens, 8),
        prefix_keys(tokens, 32),
    ]
    keys = [key for run in runs for key in as_bytes(run)]
    assert len(set(keys)) == len(keys)
    assert as_bytes(prefix_keys(tokens, 16, salt="a")) == as_bytes(runs[2])


@pytest.mark.parametrize(
    "tokens",
    [
        (1, 2, 3, 4),
        range(1, 5),
        np.array([1, 2, 3, 4]),
        np.array([1, 2, 3, 4], ">i2"),
        np.arange(9, dtype=np.uint64)[1:5],
    ],
)
def test_tokens_come_in_any_array_of_whole_numbers(tokens: object) -> None:
    assert as_bytes(prefix_keys(tokens, 2)) == as_bytes(prefix_keys([1, 2, 3, 4], 2))


@pytest.mark.torch
def test_tokens_come_in_a_tensor() -> None:
    torch = pytest.importorskip("torch")
    assert as_bytes(prefix_keys(torch.tensor([1, 2, 3, 4]), 2)) == as_bytes(prefix_keys([1, 2, 3, 4], 2))


@pytest.mark.parametrize("tokens", [[], (), np.array([]), [1, 2, 3]])
def test_without_a_full_block_there_are_no_keys(tokens: object) -> None:
    assert prefix_keys(tokens, 4).shape == (0, 32)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([1, -1], "-1"),
        ([1, 2**32], "4294967296"),
        ([1, 2**64], "object"),
        ([1.0, 2.0], "float64"),
        ([True, False], "bool"),
        ("1234", "tokens"),
        ([[1, 2], [3, 4]], "2 dimensions"),
        ([[1], [2, 3]], "list of whole numbers"),
        (7, "list of whole numbers"),
        (None, "list of whole numbers"),
    ],
)
def test_what_is_no_token_is_refused(tokens: object, said: str) -> None:
    with pytest.raises(kvferry.InvalidArgument, match=said):
        prefix_keys(tokens, 1)


@pytest.mark.parametrize("block_tokens", [0, -1, True, 1.5, None, 2**32])
def test_a_block_is_a_whole_number_of_tokens(block_tokens: object) -> None:
    with pytest.raises(kvferry.InvalidArgument, match="block_tokens"):
        prefix_keys([1, 2], block_tokens)  # type: ignore[arg-type]


def test_keys_belong_to_their_caller() -> None:
    keys = prefix_keys(range(4), 1)
    keys[0] = 0
    assert as_bytes(prefix_keys(range(4), 1))[0] != bytes(32)


def test_a_long_prompt_is_hashed_fast() -> None:
    """Two million tokens a second are promised; a tenth of it here, on a machine that may be busy."""
    tokens = np.arange(200_000, dtype=np.int64)
    fastest = min(timed(tokens) for _ in range(5))
    assert len(tokens) / fastest > 200_000


def timed(tokens: "np.ndarray") -> float:
    begin = time.perf_counter()
    prefix_keys(tokens, 16)
    return time.perf_counter() - begin


def test_the_front_door_has_prefix_keys_and_imports_the_pool_only_for_it() -> None:
    assert kvferry.prefix_keys is prefix_keys
    assert "prefix_keys" in dir(kvferry)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = kvferry.nonsense


def test_a_fingerprint_is_the_one_that_was_promised() -> None:
    name = b"bfloat16"
    said = (struct.pack("<QQ", 4096, len(name)) + name) * 2
    made = fingerprint([(4096, "bfloat16"), (4096, "bfloat16")])
    context = "kvferry 2026-11-29 geometry fingerprint v1"
    assert made == blake3.blake3(said, derive_key_context=context).digest(16)
    assert made.hex() == "8072357f96fbeed3911c28d18f66a238"


def test_fingerprints_separate_sizes_types_and_order() -> None:
    shapes = [
        [(4096, "float16")],
        [(4096, "bfloat16")],
        [(2048, "float16")],
        [(4096, "float16"), (4096, "float16")],
        [(4096, "float16"), (2048, "float16")],
        [(2048, "float16"), (4096, "float16")],
    ]
    assert len({fingerprint(shape) for shape in shapes}) == len(shapes)
    assert fingerprint([(4096, np.float16)]) == fingerprint(shapes[0])
    assert fingerprint([(4096, np.dtype("float16"))]) == fingerprint(shapes[0])


@pytest.mark.parametrize("geometry", [[], [(0, "float16")], [(16, "no such type")], [(1.5, "float16")]])
def test_what_is_no_geometry_has_no_fingerprint(geometry: "list[tuple[int, object]]") -> None:
    with pytest.raises(kvferry.InvalidArgument):
        fingerprint(geometry)
