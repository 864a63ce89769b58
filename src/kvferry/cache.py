"""A cache: a group of equally shaped tensors that peers may pull from and push to by name, id or key.

Holds the memory, gives views of it and opens windows on it. It moves nothing: transfers are the link's verbs, and
registering is the node's.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

import numpy as np
import numpy.typing as npt

from kvferry import arrays
from kvferry.errors import InvalidArgument, Unsupported
from kvferry.moves import Units
from kvferry.options import LARGEST, index, named, shown
from kvferry.windows import Window

if TYPE_CHECKING:
    import torch

    from kvferry.node import Node

__all__ = ["MEMORY", "Cache", "OwnMemory"]

_View = TypeVar("_View")


class _Weak:
    """Lets a class with slots be referred to weakly; dataclasses can say so themselves from Python 3.11 on."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Cache(_Weak):
    """Made by :meth:`kvferry.Node.register`, ``register_addresses`` and ``allocate``; ends by :meth:`unregister`.

    ================  ==============================================================================================
    ``id``            1, 2, 3 … in the order of registration at its node; never used again
    ``name``          its name there; ``""`` if it has none
    ``layout``        ``"blocks"`` or ``"rows"``: what dim 0 of each tensor counts; ``"mixed"``: usable both ways
    ``kind``          where its memory is: ``"host"``
    ``tensors``       how many tensors it has
    ``count``         blocks or rows in each tensor
    ``unit_bytes``    bytes of one block or row in one tensor
    ``shape``         of each tensor, ``(count, ...)``
    ``dtype``         the name of the element type, such as ``"bfloat16"``
    ``addresses``     where each tensor begins in this process
    ``allocated``     True: the memory is the pool's; peers on this host map it
    ================  ==============================================================================================

    The arrays given to ``register`` are kept alive while the cache is registered, and its node while this object is held.
    """

    id: int
    name: str
    layout: str
    kind: str
    tensors: int
    count: int
    unit_bytes: int
    shape: tuple[int, ...]
    dtype: str
    addresses: tuple[int, ...]
    allocated: bool
    _memories: tuple[arrays.Memory, ...]
    _node: "Node"

    @overload
    def numpy(self, tensor: None = None) -> list[npt.NDArray[Any]]: ...
    @overload
    def numpy(self, tensor: int) -> npt.NDArray[Any]: ...
    def numpy(self, tensor: int | None = None) -> list[npt.NDArray[Any]] | npt.NDArray[Any]:
        """Tensor number ``tensor`` as a numpy array of ``shape`` over the very same memory; without a number, all of them.

        What was registered as a numpy array comes back as that array. Element types that numpy does not know (bfloat16)
        are shown as unsigned integers of the same width. A view keeps its memory: one of an allocated cache may be read
        after the cache has ended, but then its bytes may be another cache's.

        :raises Unsupported: the memory is not the host's.
        """
        return self._views(tensor, arrays.view)

    @overload
    def torch(self, tensor: None = None) -> "list[torch.Tensor]": ...
    @overload
    def torch(self, tensor: int) -> "torch.Tensor": ...
    def torch(self, tensor: int | None = None) -> "list[torch.Tensor] | torch.Tensor":
        """Like :meth:`numpy`, as torch tensors of the cache's own element type. This call imports torch.

        What was registered as a torch tensor comes back as that tensor.
        """
        return self._views(tensor, _torch_view)

    def window(
        self,
        *,
        blocks: Units | None = None,
        rows: Units | None = None,
        access: str = "read",
        ttl_ms: int = 60_000,
    ) -> Window:
        """Says that these blocks or rows hold one request's data (``access="read"``), or may receive it (``"write"``).

        The window ends when it is closed, after ``ttl_ms``, or with its cache. Send its ``name`` along with the request.

        The other side may count them by their places in the list, so each is listed once.

        :raises InvalidArgument: a number is not in this cache, is listed twice, none is listed, or they make up more than
            8,000,000 runs of neighbours.
        :raises CacheNotFound: the cache is not registered any more.
        """
        units = blocks if rows is None else rows
        if units is None or (blocks is not None and rows is not None):
            raise InvalidArgument("a window is over blocks= or over rows=: give one of the two")
        return self._node.open_window(self, units, access, ttl_ms)

    def unregister(self) -> bool:
        """Ends the cache; False if it had ended before. The same as :meth:`kvferry.Node.unregister`."""
        return self._node.unregister(self)

    def __enter__(self) -> "Cache":
        return self

    def __exit__(self, *_: object) -> None:
        self.unregister()

    def __repr__(self) -> str:
        name = f" {named(self.name)}" if self.name else ""
        return (
            f"<Cache {self.id}{name}: {self.tensors} tensors of {self.count} {self.layout} x {self.unit_bytes} bytes>"
        )

    def _views(self, tensor: int | None, make: Callable[[arrays.Memory], _View]) -> list[_View] | _View:
        if self.kind != "host":
            raise Unsupported(f"cache {self.id} is in memory of kind {self.kind!r}, which this process cannot look at")
        if tensor is None:
            return [make(memory) for memory in self._memories]
        number = index(tensor)
        if number is None or not 0 <= number < self.tensors:
            raise InvalidArgument(f"cache {self.id} has no tensor {shown(tensor)}; it has {self.tensors}, from 0 on")
        return make(self._memories[number])


class OwnMemory(enum.Enum):
    """The type of :data:`MEMORY`, its only value."""

    MEMORY = "MEMORY"

    def __repr__(self) -> str:
        return "kvferry.MEMORY"


MEMORY: Final = OwnMemory.MEMORY
"""In place of this side's cache in a transfer with ``spans=``: the memory of this process, whether registered or not.

Offsets of that side are addresses then. Before the first byte the spans are looked up: what is not mapped, or not with the
right that is needed, is InvalidArgument. What was found good is not looked up again, so memory that was used like this must
not be unmapped or made read-only while it is still given to transfers. The caller keeps it until the transfer has ended.
"""


def own_memory_or_id(side: object, node: "Node", spans: object) -> int | None:
    """What :func:`own_id` gives, or None for :data:`MEMORY`, which goes with spans only."""
    if side is not MEMORY:
        return own_id(side, node)
    if spans is None:
        raise InvalidArgument("MEMORY has no blocks and no rows: say with spans= which bytes of it are moved")
    return None


def own_id(cache: object, node: "Node") -> int:
    """The id of a cache of ``node``, given as such or as its id."""
    if isinstance(cache, Cache):
        if cache._node is node:
            return cache.id
        raise InvalidArgument(f"{cache!r} is another node's cache, and ids are each node's own")
    number = index(cache)
    if number is None or not 0 <= number <= LARGEST:
        raise InvalidArgument(
            f"{shown(cache)} is no cache of this node: give what node.register(...) returned, or its id"
        )
    return number


def _torch_view(memory: arrays.Memory) -> "torch.Tensor":
    import torch

    if isinstance(memory.array, torch.Tensor):
        return memory.array
    dtype = getattr(torch, memory.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidArgument(f"torch has no element type {memory.dtype!r}; take the cache's numpy() view")
    if isinstance(memory.array, np.ndarray) and not memory.array.dtype.isnative:
        raise InvalidArgument(
            f"torch has no {memory.array.dtype.str!r}, whose bytes are in the other order; take the numpy() view"
        )
    if memory.itemsize > 2:
        return torch.from_numpy(arrays.view(memory))
    # Of the narrow types numpy knows some and torch others; plain integers are known to both.
    bits = arrays.view_as(memory, np.dtype(np.uint8 if memory.itemsize == 1 else np.int16))
    return torch.from_numpy(bits).view(dtype)
