"""Block maps, rows and layers as callers write them, turned into the core's moves.

``mine`` is the side that the caller registered, ``far`` the other: a pull moves from far to mine, a push from mine to far.
Numbers are passed on as they are: whether a block or row exists is for the cores to say. Knows no caches and no links.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry import _core
from kvferry.errors import InvalidArgument
from kvferry.names import Addresses, PrefixKey, RequestKey, is_window
from kvferry.options import LARGEST_UNIT, shown, whole

__all__ = [
    "BlockMap",
    "Spans",
    "Units",
    "is_list",
    "layer_numbers",
    "layer_width",
    "layers_of",
    "move",
    "pull",
    "push",
    "row_number",
    "tensor_ranges",
    "unit_numbers",
]

Units = Sequence[int] | npt.NDArray[np.integer[Any]]
BlockMap = Mapping[int, int] | tuple[Units, Units] | Units
Spans = npt.NDArray[np.integer[Any]] | Sequence[tuple[int, int, int]]
TensorRange = tuple[int, int]
ALL: TensorRange = (0, -1)
KEY_ROW = -1  # the row that the key names
KEY_ROW_THERE = LARGEST_UNIT  # the same at the far side of a push
_blocks = _core.Moves.blocks


def pull(
    source: object,
    blocks: BlockMap | None,
    row: int | None,
    source_row: int | None,
    row_to_blocks: Units | None,
    size_bytes: int | None,
    layers: range | None,
    source_layers: range | None,
    tensors_per_layer: int,
    spans: Spans | None = None,
) -> _core.Moves:
    """The moves of a pull from ``source``; arguments as in :meth:`kvferry.Link.pull`."""
    if spans is not None:
        return _by_spans(
            spans,
            blocks=blocks,
            row=row,
            source_row=source_row,
            row_to_blocks=row_to_blocks,
            size_bytes=size_bytes,
            layers=layers,
            source_layers=source_layers,
        )
    rowless = row is None and source_row is None and row_to_blocks is None and size_bytes is None
    layerless = (
        layers is None
        and source_layers is None
        and tensors_per_layer.__class__ is int
        and 0 < tensors_per_layer <= LARGEST_UNIT
    )
    if rowless and layerless and blocks.__class__ is dict:
        return _paired(
            list(blocks), list(blocks.values()), ALL, ALL, keep_order=False
        )  # the ordinary call, without the detour
    mine, far = tensor_ranges(layers, source_layers, tensors_per_layer, "source_layers")
    source_row, row = row_number("source_row", source_row), row_number("row", row)
    if source_row is None and isinstance(source, (RequestKey, PrefixKey)):
        source_row = KEY_ROW
    return move(blocks, source_row, row, row_to_blocks, size_bytes, far, mine, window=is_window(source))


def push(
    to: object,
    blocks: BlockMap | None,
    row: int | None,
    destination_row: int | None,
    row_to_blocks: Units | None,
    size_bytes: int | None,
    layers: range | None,
    destination_layers: range | None,
    tensors_per_layer: int,
    spans: Spans | None = None,
) -> _core.Moves:
    """The moves of a push to ``to``; arguments as in :meth:`kvferry.Link.push`."""
    if spans is not None:
        return _by_spans(
            spans,
            blocks=blocks,
            row=row,
            destination_row=destination_row,
            row_to_blocks=row_to_blocks,
            size_bytes=size_bytes,
            layers=layers,
            destination_layers=destination_layers,
        )
    bare = isinstance(to, Addresses)
    mine, far = tensor_ranges(layers, destination_layers, tensors_per_layer, "destination_layers", bare_far=bare)
    row, destination_row = row_number("row", row), row_number("destination_row", destination_row)
    keyed = isinstance(to, (RequestKey, PrefixKey))
    if keyed and (row is None or row_to_blocks is not None):
        raise InvalidArgument("this key names one row of the peer's cache: say which of your rows goes there, row=0")
    if row is not None and destination_row is None and row_to_blocks is None:
        destination_row = KEY_ROW_THERE if keyed else 0
    return move(blocks, row, destination_row, row_to_blocks, size_bytes, mine, far, window=is_window(to))


def move(
    blocks: BlockMap | None,
    source_row: int | None,
    destination_row: int | None,
    row_to_blocks: Units | None,
    size_bytes: int | None,
    source: TensorRange,
    destination: TensorRange,
    keep_order: bool = False,
    window: bool = False,
) -> _core.Moves:
    """Moves between the tensor ranges ``source`` and ``destination`` (first, count).

    ``window``: the far side is one, beside whose blocks, in their order, a plain list of this side's may stand.

    ``keep_order``: a block named twice is written twice, in order, because a later pair may read it in between.
    """
    if (blocks is not None) + (destination_row is not None) + (row_to_blocks is not None) > 1:
        raise InvalidArgument(
            "give one of blocks=, a row to go to, and row_to_blocks=; each says where everything goes"
        )
    if size_bytes is not None:
        size_bytes = whole("size_bytes", size_bytes, 1, 2**63 - 1)
    if size_bytes is not None and destination_row is None:
        raise InvalidArgument(
            f"size_bytes={size_bytes} is how much of a row to move, and no row is given to move it to"
        )
    if destination_row is not None:
        row, size = 0 if source_row is None else source_row, -1 if size_bytes is None else size_bytes
        return _core.Moves.row(row, destination_row, size, source_tensors=source, destination_tensors=destination)
    if row_to_blocks is not None:
        row, units = 0 if source_row is None else source_row, unit_numbers(row_to_blocks)
        return _core.Moves.row_to_blocks(row, units, source_tensors=source, destination_tensors=destination)
    if source_row not in (None, KEY_ROW):
        raise InvalidArgument(
            f"row {source_row} of the source has nowhere to go: give a row to go to, or row_to_blocks="
        )
    if blocks is None and source_row == KEY_ROW:
        raise InvalidArgument(
            "this key names one row of the peer's cache: say where it goes, row=0 or row_to_blocks=[...]"
        )
    if blocks is None:
        return _core.Moves.whole(source_tensors=source, destination_tensors=destination)
    if is_list(blocks) and window:
        mine: Any = blocks
        return _core.Moves.in_window_order(unit_numbers(mine), source_tensors=source, destination_tensors=destination)
    if is_list(blocks):
        raise InvalidArgument(
            f"blocks={shown(blocks)} does not say which block goes where; write blocks={{source: destination, ...}} or "
            "blocks=(sources, destinations); a plain list goes with a window only"
        )
    pair: Any = (list(blocks), list(blocks.values())) if isinstance(blocks, Mapping) else blocks
    return _paired(pair[0], pair[1], source, destination, keep_order)


def is_list(blocks: Any) -> bool:
    """Whether ``blocks`` is one list of numbers, neither a map nor a pair of lists.

    >>> is_list([4, 5]), is_list(([0, 1], [4, 5])), is_list({0: 4})
    (True, False, False)

    A list of pairs is none of the two: it is refused, rather than taken for sources and destinations.

    >>> is_list([(0, 4), (1, 5)])
    True
    """
    if isinstance(blocks, Mapping):
        return False
    pair = (isinstance(blocks, tuple) or (isinstance(blocks, np.ndarray) and blocks.ndim > 0)) and len(blocks) == 2
    return not (pair and all(hasattr(side, "__len__") for side in blocks))


def layers_of(tensors: int, tensors_per_layer: int) -> range:
    """All layers of a cache of ``tensors`` tensors.

    >>> layers_of(8, 2)
    range(0, 4)
    """
    layer_width(tensors_per_layer)
    if tensors % tensors_per_layer:
        raise InvalidArgument(f"{tensors} tensors are no whole layers of tensors_per_layer={tensors_per_layer}")
    return range(tensors // tensors_per_layer)


def layer_numbers(layers: Sequence[int]) -> list[int]:
    """``layers`` as a list of whole numbers, in the order given."""
    return [whole("layer", number, most=LARGEST_UNIT) for number in unit_numbers(layers)]


def row_number(what: str, row: int | None) -> int | None:
    """``row`` if it is the number of a row, or None."""
    return None if row is None else whole(what, row, most=LARGEST_UNIT)


def layer_width(tensors_per_layer: int) -> int:
    """``tensors_per_layer`` if layers can be that wide."""
    try:
        return whole("tensors_per_layer", tensors_per_layer, 1, LARGEST_UNIT)
    except InvalidArgument as error:
        raise InvalidArgument(f"{error}; it is 2 for K and V, 1 for a joint tensor") from None


def tensor_ranges(
    mine: range | None, far: range | None, width: int, far_word: str, bare_mine: bool = False, bare_far: bool = False
) -> tuple[TensorRange, TensorRange]:
    """Tensor ranges (mine, far): ``layers=`` alone is for both sides, the far side's alone leaves all of mine.

    ``bare_mine``, ``bare_far``: that side is addresses, one for each tensor moved, so ``layers=`` alone is for the other one.
    """
    width = layer_width(width)
    if mine is None and far is None:
        return ALL, ALL
    mine_range = ALL if mine is None else _tensor_range(mine, width, "layers")
    if far is not None:
        return mine_range, _tensor_range(far, width, far_word)
    return ALL if bare_mine else mine_range, ALL if bare_far else mine_range


def _tensor_range(layers: range, width: int, word: str) -> TensorRange:
    if not isinstance(layers, range) or layers.step != 1 or layers.start < 0 or not layers:
        raise InvalidArgument(
            f"{word}={shown(layers)} is no range of layers; write range(first, behind_last), as in range(0, 4)"
        )
    if layers.stop * width > LARGEST_UNIT:
        raise InvalidArgument(f"{word}={shown(layers)} goes far beyond what any cache has")
    return layers.start * width, len(layers) * width


def _paired(
    sources: Units, destinations: Units, source: TensorRange, destination: TensorRange, keep_order: bool
) -> _core.Moves:
    if not (isinstance(sources, (list, tuple)) and isinstance(destinations, (list, tuple))):
        sources, destinations = unit_numbers(sources), unit_numbers(destinations)
    if source is ALL and destination is ALL and not keep_order:
        return _blocks(sources, destinations)
    return _blocks(sources, destinations, source_tensors=source, destination_tensors=destination, keep_order=keep_order)


def _by_spans(listed: Spans, **beside: object) -> _core.Moves:
    """The moves of a transfer with ``spans=``; ``beside``: the arguments of other forms, none of which may be given.

    :raises InvalidArgument: it is no (n, 3) array of whole numbers, or one of its spans cannot be.
    """
    for word, value in beside.items():
        if value is not None:
            raise InvalidArgument(f"{word}={shown(value)} beside spans=: spans say where every byte goes; leave it out")
    array = _as_array(listed)
    if array.shape == (0,):  # an empty list
        array = np.empty((0, 3), np.int64)
    if array.ndim != 2 or array.shape[1] != 3 or array.dtype.kind not in "iu":
        raise InvalidArgument(
            f"spans of shape {array.shape} and type {array.dtype} are none: give an (n, 3) array of whole numbers, "
            "source offset, destination offset and bytes of each span"
        )
    if array.dtype != np.uint64:
        return _core.Moves.spans(np.ascontiguousarray(array, dtype=np.int64))
    return _core.Moves.spans(np.ascontiguousarray(array).view(np.int64))


def unit_numbers(units: Units) -> Units:
    """``units`` as the core takes a list of blocks or rows: lists and tuples, whose numbers it looks at itself, as they are
    (quickest for the few blocks of an ordinary call), all else as an array.

    :raises InvalidArgument: they are no list of whole numbers.
    """
    if isinstance(units, (list, tuple)):
        return units
    if isinstance(units, range) and units and max(units[0], units[-1]) > LARGEST_UNIT:
        raise InvalidArgument(f"{shown(units)} goes beyond {LARGEST_UNIT}, the last number of a block or row")
    array = np.arange(units.start, units.stop, units.step) if isinstance(units, range) else _as_array(units)
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidArgument(
            f"{shown(units)} is no list of numbers: blocks, rows and layers are whole numbers, in one dimension"
        )
    if array.dtype == np.uint64 and array.max() > LARGEST_UNIT:  # would come out negative
        raise InvalidArgument(f"{array.max()} is beyond {LARGEST_UNIT}, the last number of a block or row")
    return np.ascontiguousarray(array, dtype=np.int64)


def _as_array(units: Any) -> npt.NDArray[Any]:
    try:
        return np.asarray(units)
    except Exception as error:  # numpy asks somebody else's code, which may raise anything
        raise InvalidArgument(f"{shown(units)} is no list of numbers: numpy makes no array of it") from error
