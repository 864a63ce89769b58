"""A transformer's KV cache whose storage is registered memory: attention reads and writes those very tensors.

The tensors come from outside, K0 V0 K1 V1 …, each ``[blocks, block_tokens, kv_heads, head_dim]``, so that a block is what
kvferry moves. A request owns some of the blocks; seen as ``[1, kv_heads, tokens, head_dim]``, the shape attention asks
for, neighbouring blocks are a strided *view*: nothing is copied in or out, before a handover or after it.
(An engine with a paged attention kernel takes blocks from anywhere; a view needs them side by side.)

Does not know who registered the tensors, nor whether what lies in them was computed here or came from another process.
Driven by the model, through ``update``, once per layer and forward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one layer keeps of one token, and for how many layers."""

    layers: int
    kv_heads: int
    head_dim: int

    @property
    def tensors(self) -> int:
        """K and V of every layer."""
        return 2 * self.layers

    @property
    def token_bytes(self) -> int:
        """Of one token in all tensors, float32."""
        return self.tensors * self.kv_heads * self.head_dim * torch.float32.itemsize


class PagedLayer(CacheLayerMixin):
    """K and V of one layer. ``filled`` tokens are in place; whatever lies behind them is never read."""

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, filled: int, written: Callable[[], None]):
        super().__init__()
        self.keys, self.values = keys, values
        self.filled = filled
        self._written = written
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens behind the filled ones; give attention views of everything up to them."""
        end = self.filled + key_states.shape[-2]
        if end > self.get_max_length():
            raise ValueError(f"{end} tokens do not fit the {self.get_max_length()} of this request's blocks")
        self.keys[:, :, self.filled : end].copy_(key_states)
        self.values[:, :, self.filled : end].copy_(value_states)
        self.filled = end
        self._written()
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.filled

    def get_max_length(self) -> int:
        return self.keys.shape[-2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.filled + query_length, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the storage was there first."""


class PagedCache(Cache):
    """The cache of one request in ``blocks`` of ``tensors`` (K0 V0 K1 V1 …), ``filled`` tokens of which are in place.

    ``layer_written(i)`` is called as soon as K and V of layer i are in their blocks, before that layer's attention
    runs: from then on they may leave.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        blocks: Sequence[int],
        filled: int = 0,
        layer_written: Callable[[int], None] = lambda layer: None,
    ):
        views = [as_attention_sees_it(storage, blocks) for storage in tensors]
        pairs = zip(views[::2], views[1::2], strict=True)
        super().__init__(
            layers=[
                PagedLayer(keys, values, filled, partial(layer_written, layer))
                for layer, (keys, values) in enumerate(pairs)
            ]
        )


def as_attention_sees_it(storage: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """These blocks of ``storage`` as ``[1, kv_heads, tokens, head_dim]``: the same memory, not a copy.

    :raises ValueError: the blocks are not there, or not side by side.
    """
    count, block_tokens, kv_heads, head_dim = storage.shape
    first, behind = blocks[0], blocks[0] + len(blocks)
    if list(blocks) != list(range(first, behind)) or not 0 <= first < behind <= count:
        raise ValueError(f"a view needs neighbouring blocks out of {count}, not {list(blocks)}")
    tokens = storage[first:behind].view(len(blocks) * block_tokens, kv_heads, head_dim)
    return tokens.transpose(0, 1).unsqueeze(0)
