"""Raises in the middle of a call, as a signal handler does, at each of the moments that Python code has for it in turn."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Enough", "interrupted"]


class Enough(BaseException):
    pass


def interrupted(make: Callable[[], Any], call: Callable[[Any], object]) -> Iterator[Any]:
    """What ``make`` gives, after a ``call`` with it that was left at the first moment, another at the second, and so on; the
    last call ran through. The moments are the beginnings and ends of all Python functions in it."""
    moment = 0
    while True:
        seen = 0

        def trace(frame: Any, event: str, argument: object, moment: int = moment) -> Any:
            nonlocal seen
            if event in ("call", "return"):
                seen += 1
                if seen > moment:
                    sys.settrace(None)
                    raise Enough
            return trace

        made, before = make(), sys.gettrace()
        sys.settrace(trace)
        try:
            call(made)
        except Enough:
            pass
        finally:
            sys.settrace(before)
        yield made
        if seen <= moment:
            return
        moment += 1
