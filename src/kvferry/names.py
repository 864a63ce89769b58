"""What a pull or push can name on the far side: a cache by name or id, a request's row by its key, a window, addresses.

Names are values; whether they stand for anything is looked up by the owner when they are used. This module turns them
into the core's targets and knows no links.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry import _core
from kvferry.errors import InvalidArgument
from kvferry.options import index, shown, text, whole, whole_numbers
from kvferry.windows import Window

__all__ = ["Addresses", "BlocksKey", "PrefixKey", "RequestKey"]


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Names the row that holds one request. In an allocated cache it is used up by the pull that got the row."""

    request_id: int
    model_id: int = 0


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """Names the row that holds a prefix shared by requests; it stays until its cache ends."""

    prefix_id: int
    model_id: int = 0


@dataclass(frozen=True, slots=True)
class BlocksKey:
    """Names a cache of blocks by the model it belongs to."""

    model_id: int = 0


@dataclass(frozen=True, slots=True)
class Addresses:
    """Names the destination of a push by raw addresses of the far process, one for each tensor moved, in order: ``layers=``
    alone is of the source's layers.

    Each is where a tensor, or the row to be written, begins. It is a name, not a permission: the whole span written must
    lie inside one tensor of one cache that is registered there, else InvalidArgument before the first byte.
    ``unit_bytes``: the size of the far side's blocks, 0: the same as the source's.
    """

    addresses: Sequence[int]
    unit_bytes: int = 0


Key = RequestKey | PrefixKey | BlocksKey
FarCache = str | int | RequestKey | PrefixKey | BlocksKey | Window | bytes


def key_words(key: object) -> tuple[str, int, int]:
    """A key as the core takes it."""
    if isinstance(key, RequestKey):
        return "request", whole("request_id", key.request_id), whole("model_id", key.model_id)
    if isinstance(key, PrefixKey):
        return "prefix", whole("prefix_id", key.prefix_id), whole("model_id", key.model_id)
    if isinstance(key, BlocksKey):
        return "blocks", 0, whole("model_id", key.model_id)
    raise InvalidArgument(f"{shown(key)} is no key; make one with RequestKey(id), PrefixKey(id) or BlocksKey(model)")


class Targets:
    """The targets that one link has used, by name and by id; those are few and come again, keys and windows come once."""

    __slots__ = ("_kept",)
    LIMIT = 256

    def __init__(self) -> None:
        self._kept: dict[object, _core.Target] = {}

    def of(self, named: object) -> _core.Target:
        """The same as :func:`target`, quicker for a name or an id seen before."""
        if named.__class__ is not str and named.__class__ is not int:
            return target(named)
        kept = self._kept.get(named)
        if kept is None:
            if len(self._kept) >= self.LIMIT:
                self._kept.clear()
            kept = self._kept[named] = target(named)
        return kept


def is_window(named: object) -> bool:
    """Whether ``named`` is a window, whose units are counted in its own order."""
    return isinstance(named, (Window, bytes))


def target(named: object) -> _core.Target:
    """The core's target for ``named``.

    :raises InvalidArgument: nothing far away can be named like this.
    """
    made = _made(named)
    if made is not None:
        return made
    if hasattr(named, "unit_bytes"):
        raise InvalidArgument(
            f"{shown(named)} is this node's own; name the far side's by name, id, key or window: link.pull('kv', into=mine)"
        )
    raise InvalidArgument(f"{shown(named)} names no cache; give a name, an id, a key, a window or its name")


def _made(named: object) -> _core.Target | None:
    make = _core.Target
    if isinstance(named, str):
        if not named:
            raise InvalidArgument(
                "the name '' stands for no cache: one that was registered without a name goes by its id"
            )
        return make.by_name(text("name", named))
    if isinstance(named, RequestKey):
        return make.by_request(*key_words(named)[1:])
    if isinstance(named, BlocksKey):
        return make.by_blocks_key(key_words(named)[2])
    if isinstance(named, bytes):
        if not named:
            raise InvalidArgument("the name b'' stands for no window: give window.name as it is")
        return make.by_window(named)
    if isinstance(named, Window):
        return make.by_window(named.name)
    if isinstance(named, PrefixKey):
        return make.by_prefix(*key_words(named)[1:])
    if isinstance(named, Addresses):
        return make.by_addresses(whole_numbers("addresses", named.addresses), whole("unit_bytes", named.unit_bytes))
    return None if index(named) is None else make.by_id(whole("id", named))
