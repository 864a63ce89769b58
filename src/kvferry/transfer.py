"""Operations in flight, transfers and calls, and pulls that are prepared to be run again and again.

The core does the work and knows the end; these are the ways to wait for it: with a time limit, by polling, or by await.
"""

from collections.abc import Callable, Generator
from itertools import starmap
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvferry import _core
from kvferry.completion import InFlight, settled
from kvferry.options import LONGEST_MS, checked_timeout

if TYPE_CHECKING:
    from kvferry.link import Link

__all__ = ["Answer", "Prepared", "Transfer", "begun"]

Made = TypeVar("Made")
Result = TypeVar("Result")


class _Awaitable(Generic[Result]):
    __slots__ = ("_core", "_link")

    def __init__(self, core: InFlight[Result], link: "Link") -> None:
        self._core = core
        self._link = link  # the link, and with it the node, lives as long as this

    def done(self) -> bool:
        """Whether it has ended, in whatever way; never waits."""
        return self._core.done()

    def wait(self, timeout_ms: int | None = None) -> Result:
        """Waits until it ends, for ``timeout_ms`` at most; None: until its own deadline ends it at the latest.

        :raises DeadlineExceeded: with ``done()`` False, the wait is over and the operation goes on: wait again or
            cancel it. With ``done()`` True, the operation itself was too late.
        :raises KvferryError: what it ended with; ``bytes_touched`` says what is known of its destination.
        :raises KeyboardInterrupt: the wait is over and the operation goes on.
        """
        return self._core.wait(LONGEST_MS if timeout_ms is None else checked_timeout(timeout_ms))

    def cancel(self) -> bool:
        """Asks it to stop; False if it had ended. It has stopped when it is ``done()``, which is soon: after the piece in
        hand. Waiting for it then raises Cancelled, or gives the result if the end came first."""
        return self._core.cancel()

    def __await__(self) -> Generator[Any, None, Result]:
        """Waits in the running asyncio loop. A task that is cancelled here cancels the operation and waits until it has
        stopped before it leaves, for every task that awaits it: to wait along without that, ``asyncio.shield`` it."""
        return settled(self._core).__await__()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} with {self._link.peer}: {'ended' if self.done() else 'in flight'}>"


class Transfer(_Awaitable[_core.Done]):
    """A pull or push in flight; made by ``link.pull_async`` and ``link.push_async``, and awaitable.

    When a pull has ended, in whatever way, no byte of its destination is written on its behalf any more; when a push has
    failed, ``destination_settled`` of its error says whether that is known. Dropping this object does not end the
    operation; its own deadline does.
    """

    __slots__ = ()


class Answer(_Awaitable[bytes]):
    """The answer to a call, on its way; made by ``link.call_async``, and awaitable. Waiting for it gives its bytes.

    Dropping this object does not end the call; its own deadline does. A call that is cancelled may have been heard.
    """

    __slots__ = ()


def begun(made: Callable[[Any, "Link"], Made], link: "Link", begin: Callable[..., Any], *arguments: Any) -> Made:
    """``made(begin(*arguments), link)``, ``begin`` being one of the core's functions that start an operation.

    A signal handler that raises is heard when that call returns. By then it is C that has put the operation into the list,
    so that it is cancelled, and not left to go on in memory that nobody knows to be in use.
    """
    box: list[Any] = []
    try:
        box.extend(starmap(begin, (arguments,)))
        return made(box[0], link)
    except BaseException:
        for core in box:
            core.cancel()
        raise


class Prepared:
    """A pull with everything resolved that can be; made by ``link.prepare_pull``.

    It holds no memory: when its source, its window or its destination has ended, :meth:`run` says so.
    """

    __slots__ = ("_link", "_run")

    def __init__(self, core: _core.Prepared, link: "Link") -> None:
        self._run = core.run
        self._link = link

    def run(self, timeout_ms: int = 1000) -> _core.Done:
        """Pulls once more, like :meth:`kvferry.Link.pull` and with the same errors."""
        if timeout_ms.__class__ is not int or not 0 <= timeout_ms <= LONGEST_MS:
            timeout_ms = checked_timeout(timeout_ms)
        return self._run(timeout_ms)
