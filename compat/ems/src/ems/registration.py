"""The registered KV cache of V1: from slots to runs of bytes in its tensors.

A *slot* is one token's place: block ``slot // block_size``, row ``slot % block_size``. A *chunk* is what one hash names: some
slots in each layer group. Its value is the bytes of those slots, in this order: groups, layers of a group, tensors of a
layer, slots as given. Nothing here moves a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ems.arguments import Addresses, Integers
from ems.common.exception import invalid
from ems.tensors import Memory, memory_of


@dataclass(frozen=True)
class Segments:
    """Runs of bytes, chunk after chunk: ``counts[i]`` of them belong to chunk i."""

    addresses: Addresses
    sizes: Addresses
    counts: Integers


class LayerGroup:
    """Layers that share a block table. All their tensors have as many blocks of as many rows."""

    def __init__(self, memories: Sequence[Memory], name: str) -> None:
        first = memories[0]
        for memory in memories:
            if memory.shape[:2] != first.shape[:2]:
                raise invalid(
                    f"{name} has tensors of {first.shape[0]} blocks of {first.shape[1]} slots and of "
                    f"{memory.shape[0]} blocks of {memory.shape[1]}; within a layer group both must be equal"
                )
        self.blocks, self.block_size = first.shape[:2]
        filled = [memory for memory in memories if memory.row_bytes]  # MLA models may have an empty one beside
        if not filled:
            raise invalid(f"{name} has no tensor with any bytes")
        self._bases = np.array([memory.address for memory in filled], np.uint64)[:, None]
        self._rows = np.array([memory.row_bytes for memory in filled], np.uint64)[:, None]
        dense = self._rows[:, 0] * np.uint64(self.block_size)
        distances = [memory.strides[0] if self.blocks > 1 else 0 for memory in filled]
        self._strides = np.where(np.array(distances) == 0, dense, np.array(distances, np.uint64))[:, None]
        self._runs_cross_blocks = bool(np.all(self._strides[:, 0] == dense))
        #: What two caches must have in common to exchange chunks.
        self.geometry = f"{self.block_size}:" + ",".join(f"{memory.dtype}*{memory.row_bytes}" for memory in filled)
        self.places = (self.blocks, *self._bases.flat, *self._strides.flat)

    @property
    def slots(self) -> int:
        return self.blocks * self.block_size

    def segments(self, slots: Integers, counts: Integers) -> tuple[Addresses, Addresses, Integers]:
        """(addresses, sizes, chunk) of every run of each tensor; chunk i has the next ``counts[i]`` slots."""
        chunk = np.repeat(np.arange(len(counts)), counts)
        begins = np.ones(len(slots), np.bool_)
        begins[1:] = (np.diff(slots) != 1) | (np.diff(chunk) != 0)
        if not self._runs_cross_blocks:
            begins |= slots % self.block_size == 0
        (starts,) = np.nonzero(begins)
        lengths = np.diff(starts, append=len(slots)).astype(np.uint64)
        first = slots[starts].astype(np.uint64)
        size = np.uint64(self.block_size)
        addresses = self._bases + first // size * self._strides + first % size * self._rows
        of_chunk = np.broadcast_to(chunk[starts], addresses.shape)
        return addresses.ravel(), (lengths * self._rows).ravel(), of_chunk.ravel()

    def check(self, slots: Integers, counts: Integers, name: str) -> None:
        """Inside the cache, no slot twice, and what is less than a block begins where a block does."""
        if slots.min() < 0 or slots.max() >= self.slots:
            wrong = slots[(slots < 0) | (slots >= self.slots)][0]
            raise invalid(f"{name} has slot {wrong}; the registered cache has slots 0 to {self.slots - 1}")
        ordered = np.sort(slots)
        repeated = ordered[1:][np.diff(ordered) == 0]
        if len(repeated):
            raise invalid(f"{name} has slot {repeated[0]} twice")
        starts = np.cumsum(counts) - counts
        partial = np.flatnonzero(counts < self.block_size)
        for index in partial:
            own = slots[starts[index] : starts[index] + counts[index]]
            if own[0] % self.block_size or np.any(np.diff(own) != 1):
                raise invalid(
                    f"{name}: chunk {index} has {counts[index]} of a block's {self.block_size} slots, so they must follow each "
                    f"other from the block's first one on, but they are {own.tolist()}"
                )


class KvCaches:
    """What ``register_kvcache`` was given. Keeps the tensors as long as it lives."""

    def __init__(self, kvcache: object, store_layer_group_desc: object = None) -> None:
        layers = [
            [_tensor(tensor, f"kvcache[{index}][{number}]") for number, tensor in enumerate(layer)]
            for index, layer in enumerate(_layers(kvcache))
        ]
        wanted = _layer_groups(store_layer_group_desc, len(layers))
        self.groups = [
            LayerGroup([memory for layer in group for memory in layers[layer]], f"layer group {index}")
            for index, group in enumerate(wanted)
        ]
        self.memories = [memory for layer in layers for memory in layer]
        self.geometry = "|".join(group.geometry for group in self.groups)
        self._places = (self.geometry, [group.places for group in self.groups])

    def is_the_same_as(self, other: KvCaches) -> bool:
        return self._places == other._places

    def segments(self, tables: Sequence[tuple[Integers, Integers]]) -> Segments:
        """``tables``: for each group the slots of all chunks, checked, and how many of them each chunk has."""
        parts = [group.segments(*table) for group, table in zip(self.groups, tables, strict=True)]
        addresses, sizes, chunk = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(chunk, kind="stable")
        chunks = len(tables[0][1])
        return Segments(addresses[order], sizes[order], np.bincount(chunk, minlength=chunks).astype(np.int64))


def _layers(kvcache: object) -> list[list[Any]]:
    if not isinstance(kvcache, (list, tuple)) or not kvcache:
        raise invalid("kvcache must be a non-empty list of layers, each a list of tensors")
    for index, layer in enumerate(kvcache):
        if not isinstance(layer, (list, tuple)) or not layer:
            raise invalid(f"kvcache[{index}] must be a non-empty list of tensors, but is a {type(layer).__name__}")
    return list(kvcache)


def _tensor(tensor: object, name: str) -> Memory:
    memory = memory_of(tensor, name)
    if len(memory.shape) < 3 or 0 in memory.shape[:2]:
        raise invalid(f"{name} has shape {memory.shape}; [blocks, block_size, heads, head_size] is needed")
    if memory.row_bytes and not memory.address:
        raise invalid(f"{name} has no memory: its address is 0")
    if memory.row_bytes and not memory.has_dense_units():
        raise invalid(
            f"{name} (shape {memory.shape}, strides {memory.strides} bytes) has blocks that are not contiguous"
        )
    return memory


def _layer_groups(desc: object, layers: int) -> list[list[int]]:
    """The layers of each group, in order: from None (one group of all), lists of layer numbers, ranges, pairs
    (first layer, how many), or objects and dicts with ``layers`` or ``layer_ids``."""
    if desc is None:
        return [list(range(layers))]
    if not isinstance(desc, (list, tuple)) or not desc:
        raise invalid("store_layer_group_desc must be None or a non-empty list of layer groups")
    groups = [_layers_of(group, f"store_layer_group_desc[{index}]") for index, group in enumerate(desc)]
    seen: set[int] = set()
    for index, group in enumerate(groups):
        for layer in group:
            if not 0 <= layer < layers:
                raise invalid(f"store_layer_group_desc[{index}] names layer {layer} of {layers}")
            if layer in seen:
                raise invalid(f"store_layer_group_desc names layer {layer} twice; layer groups must be disjoint")
            seen.add(layer)
    return groups


def _layers_of(group: object, name: str) -> list[int]:
    for attribute in ("layers", "layer_ids"):
        named = group.get(attribute) if isinstance(group, dict) else getattr(group, attribute, None)
        if named is not None:
            return _layers_of(named, name)
    if isinstance(group, np.ndarray):
        group = group.tolist()
    if isinstance(group, tuple) and len(group) == 2 and all(_is_number(item) for item in group):
        group = range(group[0], group[0] + group[1])  # (start, count); a list of two is two layers
    if not isinstance(group, (list, tuple, range)) or not all(_is_number(item) for item in group):
        raise invalid(f"{name} must be a list of layer numbers, a range, (start, count), or have layers or layer_ids")
    if not group:
        raise invalid(f"{name} is empty")
    return list(group)


def _is_number(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)
