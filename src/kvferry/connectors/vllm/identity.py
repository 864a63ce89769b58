"""What makes KV blocks of equal tokens differ, as one string for `kvferry.prefix_keys`; and the keys of a growing request.

Conservative: two instances that are told nothing share blocks only if nothing that is known here differs between them.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from kvferry import prefix_keys

__all__ = ["config_digest", "extend_keys", "identity", "model_at", "of_rank", "prompt_digest"]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Of a model's configuration: what says where it came from, and not what it computes.
_NOT_COMPUTED = ("_name_or_path", "name_or_path", "transformers_version", "architectures_source")


def model_at(name: str, revision: str | None) -> str:
    """A model by its name and revision; one in a folder also by the names, sizes and dates of its files of weights, since
    others may lie there tomorrow."""
    said = f"{name}@{revision or ''}"
    folder = Path(name)
    if not folder.is_dir():
        return said
    files = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.suffix in _WEIGHTS]
    listed = [(file, stat.st_size, stat.st_mtime_ns) for file, stat in files]
    return f"{folder.resolve()}@{revision or ''}#{hashlib.sha256(repr(listed).encode()).hexdigest()[:32]}"


def config_digest(configuration: Mapping[str, Any]) -> str:
    """Of a model's configuration: a context that is stretched or a changed head count is another model."""
    kept = {name: value for name, value in configuration.items() if name not in _NOT_COMPUTED}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:32]


def identity(parts: Mapping[str, object]) -> str:
    """All of it in one string; two that differ in anything differ.

    >>> identity({"model": "smollm2@9f3c", "dtype": "bfloat16"})
    '[["dtype", "bfloat16"], ["model", "smollm2@9f3c"]]'
    """
    return json.dumps(sorted((name, str(value)) for name, value in parts.items()))


def extend_keys(
    keys: list[bytes], tokens: Sequence[int], full: int, block_tokens: int, model: str, salt: bytes
) -> None:
    """Appends keys until there is one for each of the first ``full`` blocks; as `kvferry.prefix_keys` gives them, which
    would begin with the first token each time."""
    if len(keys) >= full:
        return
    if not keys:
        made = prefix_keys(tokens[: full * block_tokens], block_tokens, model=model, salt=salt)
        keys.extend(row.tobytes() for row in made)
        return
    at = len(keys) * block_tokens
    raw = np.asarray(tokens[at : full * block_tokens], "<u4").tobytes()
    for begin in range(0, len(raw), 4 * block_tokens):
        keys.append(blake3(keys[-1] + raw[begin : begin + 4 * block_tokens]).digest())


def prompt_digest(tokens: Sequence[int]) -> str:
    """Two instances may make other tokens of one text (another template, another tokenizer)."""
    return blake3(np.asarray(tokens, "<u4").tobytes()).hexdigest()[:32]


def of_rank(keys: list[bytes], rank: int, world: int) -> list[bytes]:
    """Each worker has a part of every block, and saves it under a key of its own."""
    if world == 1:
        return keys
    suffix = rank.to_bytes(2, "little") + world.to_bytes(2, "little")
    return [key + suffix for key in keys]
