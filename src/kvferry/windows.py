"""A window: some blocks or rows of a cache that hold one request's data, or may receive it, until it is closed.

Engines reuse blocks while their cache stays registered; a window is what ends with the request. Its name travels with the
request and stands in a pull or push where the cache's name would.
"""

from dataclasses import dataclass

from kvferry import _core
from kvferry.errors import NodeClosed

__all__ = ["Window"]


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Made by :meth:`kvferry.Cache.window`; closed by its time, by :meth:`close`, or with its cache.

    In a pull from it, or a push to it, only its units may be named, by their own numbers, or by a plain list of the other
    side's, in the order in which they were listed here.
    """

    name: bytes
    access: str
    units: int
    _core: _core.Node

    def close(self) -> bool:
        """Ends it; False if it had ended before.

        When this returns nothing can be written through it any more and every later read through it fails, also reads
        that are under way in other processes: its blocks may be reused at once.
        """
        try:
            return self._core.close_window(self.name)
        except NodeClosed:
            return False  # it ended with the node

    def __enter__(self) -> "Window":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Window {self.name.hex()}: {self.units} units to {self.access}>"
