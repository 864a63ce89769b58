"""The transformer of one process: loading it, running a prompt through it, decoding greedily.

Everything is float32 and on one thread, so that the same tokens come out in every process. Knows no kvferry: the cache it
is given may be transformers' own or a ``paged`` one.
"""

from collections.abc import Sequence

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.utils import logging

from demo import prompt
from demo.paged import KvShape

TINY = "tiny"  # the name under which the made-up model goes
TINY_SEED = 20_240
RANDOM_PROMPT_TOKENS = 600  # for a model that comes without a tokenizer
RANDOM_CONTINUATION_TOKENS = 100
SHORTEST_PROMPT = 64


class UnfitModelError(Exception):
    """The demo cannot run this model; the sentence says why."""


def load(name: str) -> PreTrainedModel:
    """The model in the folder ``name``, or the made-up one.

    :raises UnfitModelError: transformers cannot load it.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    if name == TINY:
        return tiny()
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise UnfitModelError(f"transformers cannot load {name}: {error}") from error
    return model.eval()


def tiny() -> PreTrainedModel:
    """A Llama of 4 layers and 128 units with weights from a fixed seed: talks nonsense, always the same."""
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,  # wide, so that every token depends on those before it
    )
    with torch.random.fork_rng():
        torch.manual_seed(TINY_SEED)
        return LlamaForCausalLM(config).to(torch.float32).eval()


def kv_shape(model: PreTrainedModel) -> KvShape:
    """What the model keeps per token, seen from one token that is run through it.

    :raises UnfitModelError: its layers differ, or some do not attend to every token before.
    """
    cache = DynamicCache(config=model.config)
    forward(model, [0], cache)
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        raise UnfitModelError("the demo's cache keeps full attention only, and this model has other layers too")
    shapes = {tuple(tensor.shape) for layer in cache.layers for tensor in (layer.keys, layer.values)}
    if len(shapes) > 1:
        raise UnfitModelError(f"the demo needs K and V of one shape in all layers; this model has {sorted(shapes)}")
    _, kv_heads, _, head_dim = shapes.pop()
    return KvShape(len(cache.layers), kv_heads, head_dim)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """What turns words into the model's tokens and back; None for a model that came without."""
    if name == TINY:
        return None
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, ImportError):
        return None


def prompt_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, room_for: int) -> list[int]:
    """The prompt in the model's own tokens, cut at its start where the model's context is too short for it.

    A model without a tokenizer gets random tokens of a fixed seed.

    :raises UnfitModelError: the context has no room for ``room_for`` new tokens behind a prompt.
    """
    longest = getattr(model.config, "max_position_embeddings", 1 << 30) - room_for
    if longest < SHORTEST_PROMPT:
        raise UnfitModelError(f"the model's context has no room for a prompt and {room_for} new tokens")
    if tokenizer is not None:
        ids = list(tokenizer(prompt.text())["input_ids"])
    else:
        ids = _random_ids(model, RANDOM_PROMPT_TOKENS, seed=1)
    return ids[-longest:]


def continuation_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """What makes a longer prompt of :func:`prompt_ids` when it is put behind them."""
    if tokenizer is not None:
        return list(tokenizer(prompt.continuation(), add_special_tokens=False)["input_ids"])
    return _random_ids(model, RANDOM_CONTINUATION_TOKENS, seed=2)


def _random_ids(model: PreTrainedModel, count: int, seed: int) -> list[int]:
    seeded = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (count,), generator=seeded).tolist()


def words(tokenizer: PreTrainedTokenizerBase | None, tokens: Sequence[int]) -> str:
    """``tokens`` as text, or as numbers for a model without a tokenizer."""
    return tokenizer.decode(tokens) if tokenizer is not None else " ".join(map(str, tokens))


@torch.inference_mode()
def forward(model: PreTrainedModel, tokens: Sequence[int], cache: Cache) -> torch.Tensor:
    """Runs ``tokens`` behind what ``cache`` holds; the scores of the token that comes next."""
    ids = torch.tensor([tokens])
    return model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]


def decode(model: PreTrainedModel, last: int, cache: Cache, count: int) -> list[int]:
    """The ``count`` tokens that follow ``last``, each the likeliest; ``cache`` holds everything before it."""
    tokens = [last]
    for _ in range(count):
        tokens.append(int(forward(model, tokens[-1:], cache).argmax()))
    return tokens[1:]


def undivided(model: PreTrainedModel, ids: Sequence[int], count: int) -> list[int]:
    """What decoding gives when one process does it all, with the cache that transformers brings."""
    cache = DynamicCache(config=model.config)
    forward(model, ids[:-1], cache)
    return decode(model, ids[-1], cache, count)
