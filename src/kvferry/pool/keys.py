"""Keys of KV blocks: a block's key says which tokens stand in it *and before it*, for which model; and what shape it has.

Pure values; knows no pool. The formulas, which other programs may follow, stand in docs/pool.md under "Keys".
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvferry.arrays import element
from kvferry.errors import InvalidArgument
from kvferry.options import LARGEST_UNIT, shown, text, whole

__all__ = ["KEY_BYTES", "fingerprint", "prefix_keys"]

KEY_BYTES = 32
FINGERPRINT_BYTES = 16
_ROOT = "kvferry 2026-11-29 prefix keys v1"  # BLAKE3 key derivation contexts: another one, other keys
_GEOMETRY = "kvferry 2026-11-29 geometry fingerprint v1"


def prefix_keys(
    token_ids: Any, block_tokens: int, *, model: str = "", salt: bytes | str = b""
) -> npt.NDArray[np.uint8]:
    """The chained keys of all full blocks of a prompt: uint8, shape (len(token_ids) // block_tokens, 32).

    Two prompts share a key exactly as far as their tokens, ``block_tokens``, ``model`` and ``salt`` are the same. The
    tokens behind the last full block have no key.

    ``token_ids``: whole numbers from 0 to 2**32 - 1, one dimension: a list, a numpy array, a CPU tensor. ``model``: what
    makes KV blocks of equal tokens differ, such as the model's name and revision. ``salt``: what keeps users apart.

    >>> prefix_keys(range(40), 16, model="smollm2").shape
    (2, 32)

    :raises InvalidArgument: a token that is no such number, more than one dimension, no whole ``block_tokens`` from 1 on.
    """
    block_tokens = whole("block_tokens", block_tokens, 1, LARGEST_UNIT)
    tokens = _token_bytes(token_ids)
    step = 4 * block_tokens
    key = _root(text("model", model).encode(), _salt(salt), block_tokens)
    keys = []
    for begin in range(0, len(tokens) - step + 1, step):
        key = blake3(key + tokens[begin : begin + step]).digest()
        keys.append(key)
    return np.frombuffer(bytearray().join(keys), np.uint8).reshape(-1, KEY_BYTES)


def fingerprint(geometry: Iterable[tuple[int, object]]) -> bytes:
    """16 bytes that stand for the shape of a value: the bytes of a unit and the element type of each tensor, in order.

    Element types are names, numpy or torch dtypes: ``"float16"``, ``np.float16`` and ``torch.float16`` are the same.

    >>> fingerprint([(4096, "bfloat16"), (4096, "bfloat16")]).hex()
    '8072357f96fbeed3911c28d18f66a238'

    :raises InvalidArgument: no tensor at all, a size that is no whole number from 1 on, an unknown element type.
    """
    parts = [(whole("unit_bytes", unit_bytes, 1), element(dtype)[0].encode()) for unit_bytes, dtype in geometry]
    if not parts:
        raise InvalidArgument("a fingerprint needs the unit bytes and element type of at least one tensor")
    said = b"".join(_u64(unit_bytes) + _u64(len(name)) + name for unit_bytes, name in parts)
    return blake3(said, derive_key_context=_GEOMETRY).digest(FINGERPRINT_BYTES)


def _root(model: bytes, salt: bytes, block_tokens: int) -> bytes:
    """The key before the first block's. Lengths stand before what they measure: no two inputs are written alike."""
    said = _u64(block_tokens) + _u64(len(model)) + model + _u64(len(salt)) + salt
    return blake3(said, derive_key_context=_ROOT).digest()


def _u64(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _salt(salt: object) -> bytes:
    if isinstance(salt, bytes | bytearray | memoryview):
        return bytes(salt)
    return text("salt", salt).encode()


def _token_bytes(token_ids: Any) -> bytes:
    """The tokens as little-endian u32, one behind the other."""
    if isinstance(token_ids, (set, frozenset, dict)):
        raise InvalidArgument(f"token_ids={shown(token_ids)} has no order; give a list")
    try:
        tokens = np.asarray(token_ids if hasattr(token_ids, "__array__") else list(token_ids))
    except Exception as error:  # a ragged list, a tensor on a device; what is asked may refuse in any way
        raise InvalidArgument(f"token_ids={shown(token_ids)} is no list of whole numbers: {shown(error)}") from error
    if tokens.ndim != 1:
        raise InvalidArgument(
            f"token_ids has {tokens.ndim} dimensions (shape {tokens.shape}); keys are of one prompt each"
        )
    if not tokens.size:
        return b""
    if tokens.dtype.kind not in "iu":  # also where Python ints did not fit a machine word
        raise InvalidArgument(f"token_ids of {tokens.dtype} are no tokens; give whole numbers from 0 to {LARGEST_UNIT}")
    for extreme in (int(tokens.min()), int(tokens.max())):
        if not 0 <= extreme <= LARGEST_UNIT:
            raise InvalidArgument(f"token_ids holds {extreme}; tokens are whole numbers from 0 to {LARGEST_UNIT}")
    return tokens.astype("<u4").tobytes()
