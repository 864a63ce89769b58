"""Layer ranges, sizes and shapes: what may be given and which tensors it means.

A layer L is the tensors ``[L * n, (L + 1) * n)`` for n tensors per layer. Rules that an argument breaks raise
``RuleError`` with the sentence; the callers above know which exception a vendor's caller expects.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_DIMS = 31
_MAX_INT64 = (1 << 63) - 1


class RuleError(Exception):
    """A broken rule: the message says which value and what would be right."""


def layer_tensors(layers: Sequence[int] | None, tensors_per_layer: int) -> list[int]:
    """Flat tensor numbers of the layers; ``[]`` for None or none."""
    if not layers:
        return []
    return [layer * tensors_per_layer + i for layer in layers for i in range(tensors_per_layer)]


def unit_geometry(num_tensors: int, shape: Sequence[int], element_bytes: int) -> tuple[int, int]:
    """(bytes of one row or block, how many of them) of each tensor: dim 0 counts, whatever the batch dimension is."""
    if num_tensors < 1:
        raise RuleError("num_tensors is 0")
    if not 1 <= len(shape) <= MAX_DIMS:
        raise RuleError(f"shape has {len(shape)} dimensions, not 1 to {MAX_DIMS}")
    unit_bytes = element_bytes
    for dim in shape:
        if dim <= 0:
            raise RuleError(f"shape {list(shape)} has a dimension that is not positive")
    for dim in shape[1:]:
        unit_bytes *= dim
    if unit_bytes * shape[0] > _MAX_INT64:
        raise RuleError(f"a tensor of shape {list(shape)} has more than 2^63-1 bytes")
    return unit_bytes, shape[0]


def pull_layers(
    source: range | None, destination: range | None, num_tensors: int, tensors_per_layer: int
) -> tuple[range | None, range | None]:
    """The two ranges a pull passes down. A destination range may only be left out if the source fills all tensors;
    a missing source range stays None: all layers that the far cache has, which must then be as many."""
    source, destination = source or None, destination or None
    if source is None and destination is None:
        return None, None
    if num_tensors % tensors_per_layer:
        raise RuleError(f"{num_tensors} tensors are not a whole number of layers of {tensors_per_layer}")
    layers = num_tensors // tensors_per_layer
    if destination is None:
        destination = range(layers)
        if source is not None and len(source) != layers:
            raise RuleError(f"src_layer_range has {len(source)} layers, the destination cache has {layers}")
    if source is not None and len(source) != len(destination):
        raise RuleError(f"src_layer_range has {len(source)} layers, dst_layer_range has {len(destination)}")
    if destination.stop > layers:
        raise RuleError(f"dst_layer_range ends at {destination.stop}, the destination cache has {layers} layers")
    return source, destination


def push_layers(
    source: range | None, destination: range | None, num_tensors: int, tensors_per_layer: int
) -> tuple[range, range]:
    """The two ranges of a push; a missing one is all layers that the source has. Empty: nothing is to be sent."""
    layers = num_tensors // tensors_per_layer
    if source is None:
        source = range(layers)
    if destination is None:
        destination = range(layers)
    if len(source) != len(destination):
        raise RuleError(f"src_layer_range has {len(source)} layers, dst_layer_range has {len(destination)}")
    if source and num_tensors % tensors_per_layer:
        raise RuleError(f"{num_tensors} tensors are not a whole number of layers of {tensors_per_layer}")
    if source.stop > layers:
        raise RuleError(f"src_layer_range ends at {source.stop}, the source cache has {layers} layers")
    return source, destination


def copied_bytes(offset: int, size: int, source_row_bytes: int, destination_row_bytes: int) -> int:
    """How many bytes a copy moves that begins ``offset`` bytes into both rows; size -1: what is left of the source's."""
    for side, row_bytes in (("source", source_row_bytes), ("destination", destination_row_bytes)):
        if offset >= row_bytes:
            raise RuleError(f"offset is {offset}, the {side}'s rows have {row_bytes} bytes")
    moved = source_row_bytes - offset if size == -1 else size
    for side, row_bytes in (("source", source_row_bytes), ("destination", destination_row_bytes)):
        if moved > row_bytes - offset:
            raise RuleError(f"{moved} bytes from offset {offset} do not fit in the {side}'s rows of {row_bytes}")
    return moved


def blocks_of_row(tensor_bytes: int, block_bytes: int, listed: int) -> None:
    """Whether a source tensor can go into ``listed`` blocks of ``block_bytes``."""
    if not 0 < block_bytes < tensor_bytes:
        raise RuleError(
            f"dst_block_memory_size is {block_bytes}, must be over 0 and under the source tensor's {tensor_bytes} bytes"
        )
    most = -(-tensor_bytes // block_bytes)
    if listed > most:
        raise RuleError(f"{listed} destination blocks are listed, the source tensor fills {most}")
