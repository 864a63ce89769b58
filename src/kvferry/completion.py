"""How an asyncio loop hears that transfers have ended: one eventfd per loop, in that loop's own selector.

asyncio is imported by what runs in a loop, where it is there already; this module itself with the package, because a
process that has run out of descriptors can import nothing. An awaiting task that is cancelled cancels its transfer and
leaves only when that is settled, so that its memory may be reused at once.
"""

import threading
from typing import TYPE_CHECKING, Protocol, TypeVar
from weakref import WeakKeyDictionary

from kvferry import _core

if TYPE_CHECKING:
    import asyncio

__all__ = ["InFlight", "settled"]

Result = TypeVar("Result", covariant=True)


class InFlight(Protocol[Result]):
    """What the core has in flight: a transfer, or a call."""

    def done(self) -> bool: ...
    def wait(self, timeout_ms: int) -> Result: ...
    def cancel(self) -> bool: ...
    def notify(self, notifier: _core.Notifier, token: int) -> bool: ...


async def settled(transfer: InFlight[Result]) -> Result:
    """What ``transfer`` ends with, waited for in the running loop."""
    import asyncio

    if not transfer.done():
        completions = _completions_of(asyncio.get_running_loop())
        token = completions.watch(transfer)
        try:
            await completions.ended(token)
        except asyncio.CancelledError:
            transfer.cancel()
            await completions.ended_whatever_comes(token)
            raise
    return transfer.wait(0)


class _Completions:
    """The transfers that one loop waits for; used by that loop's thread alone."""

    def __init__(self, loop: "asyncio.AbstractEventLoop") -> None:
        self._notifier = _core.Notifier()
        self._waiting: dict[int, asyncio.Future[None] | None] = {}
        self._last = 0
        loop.add_reader(self._notifier.fileno(), self._collect)

    def watch(self, transfer: InFlight[object]) -> int:
        self._last += 1
        if transfer.notify(self._notifier, self._last):
            self._waiting[self._last] = None
        return self._last

    async def ended(self, token: int) -> None:
        import asyncio

        if token in self._waiting:
            self._waiting[token] = future = asyncio.get_running_loop().create_future()
            await future

    async def ended_whatever_comes(self, token: int) -> None:
        import asyncio

        while token in self._waiting:
            try:
                await self.ended(token)
            except asyncio.CancelledError:
                continue  # it is cancelled already; what is left is the piece in hand

    def close(self) -> None:
        self._notifier.close()

    def _collect(self) -> None:
        for token in self._notifier.take():
            future = self._waiting.pop(token, None)
            if future is not None and not future.done():
                future.set_result(None)


# By loop, because a loop is what has a selector: a transfer may be awaited in any loop, whatever node it belongs to.
_by_loop: "WeakKeyDictionary[asyncio.AbstractEventLoop, _Completions]" = WeakKeyDictionary()
_by_loop_lock = threading.Lock()


def _completions_of(loop: "asyncio.AbstractEventLoop") -> _Completions:
    with _by_loop_lock:
        completions = _by_loop.get(loop)
        if completions is None:
            for other in [other for other in _by_loop if other.is_closed()]:
                _by_loop.pop(other).close()
            completions = _by_loop[loop] = _Completions(loop)
    return completions
