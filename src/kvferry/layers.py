"""A push whose layers leave one after the other, each as soon as the model has computed it.

The core keeps the order and sends; this is the block that the model's loop runs in. States: open (layers are declared
ready) -> ended (all have arrived, or it was cancelled, or it failed).
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvferry import _core
from kvferry.errors import InvalidArgument, KvferryError
from kvferry.options import LARGEST_UNIT, whole
from kvferry.transfer import Transfer

if TYPE_CHECKING:
    from kvferry.link import Link

__all__ = ["LayerPush"]


class LayerPush:
    """Made by ``link.push_layers``; a context manager, for ``with`` and for ``async with``.

    Leaving the block waits until every layer has arrived; an exception inside, or Ctrl-C while it waits, cancels, waits
    until the receiver has stopped or cannot be heard, and goes on. Leaving while a layer was never declared ready cancels too,
    and is an error.
    """

    __slots__ = ("_core", "_missing", "_transfer")

    def __init__(self, core: _core.LayerPush, link: "Link", layers: Iterable[int]) -> None:
        self._core = core
        self._transfer = Transfer(core.transfer, link)
        self._missing = dict.fromkeys(layers)

    def layer_ready(self, layer: int) -> None:
        """Says that the tensors of ``layer`` hold their final bytes: from here on they may leave. Never waits.

        May be called by any thread, in any order, and again; layers leave in the push's own order. What the push failed
        with is raised when it is waited for, not here.

        :raises InvalidArgument: the layer is not in this push.
        """
        layer = whole("layer", layer, most=LARGEST_UNIT)
        self._core.layer_ready(layer)
        self._missing.pop(layer, None)

    def done(self) -> bool:
        """Whether it has ended, in whatever way; never waits."""
        return self._transfer.done()

    def wait(self, timeout_ms: int | None = None) -> _core.Done:
        """Waits until every layer has arrived, for ``timeout_ms`` at most; see :meth:`kvferry.Transfer.wait`.

        Each layer's deadline counts from the moment it was ready, so None is for when all have been declared.
        """
        if timeout_ms is None and self._missing and not self.done():
            raise InvalidArgument(f"{self._unready()}: waiting for them without a timeout might never end")
        return self._transfer.wait(timeout_ms)

    def cancel(self) -> bool:
        """Asks it to stop; False if it had ended. Layers that have arrived stay where they are."""
        return self._transfer.cancel()

    @property
    def transfer(self) -> Transfer:
        """The whole push as a transfer, to be awaited."""
        return self._transfer

    def __enter__(self) -> "LayerPush":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        forgotten = self._cancel_unless_complete(error)
        try:
            self._transfer.wait()
        except KvferryError as ending:
            self._raise(error, forgotten, ending)
        except BaseException:  # Ctrl-C while it waits, which is an exception inside the block like any other
            self.cancel()
            raise

    async def __aenter__(self) -> "LayerPush":
        return self

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        forgotten = self._cancel_unless_complete(error)
        try:
            await self._transfer
        except KvferryError as ending:
            self._raise(error, forgotten, ending)

    def _cancel_unless_complete(self, error: type[BaseException] | None) -> str:
        """Cancels what cannot end well; says which layers were forgotten, if that is the reason."""
        if error is not None:
            self.cancel()
        elif self._missing and not self.done():
            self.cancel()
            return self._unready()
        return ""

    def _raise(self, error: type[BaseException] | None, forgotten: str, ending: KvferryError) -> None:
        if forgotten:
            raise InvalidArgument(
                f"{forgotten}, so the push was cancelled: call push.layer_ready(layer) for each one inside the block",
                peer=ending.peer,
                cache=ending.cache,
                operation=ending.operation,
                bytes_touched=ending.bytes_touched,
                destination_settled=ending.destination_settled,
            ) from None
        if error is None:
            raise ending

    def _unready(self) -> str:
        missing = list(self._missing)
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        return (
            f"layers {shown} were never declared ready"
            if len(missing) > 1
            else f"layer {shown} was never declared ready"
        )
