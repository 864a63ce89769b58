"""Starting a thread of Python's own, whose want is an error like that of anything else that the system does not give."""

import threading
from collections.abc import Callable
from typing import Any

from kvferry.errors import Busy

__all__ = ["start_thread"]


def start_thread(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    """Starts a daemon thread that runs ``target(*args)``.

    :raises Busy: the system gives this process no more threads; nothing runs.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise Busy(
            f"out of threads: {name} cannot be started ({error}): raise the limit on them (ulimit -u, pids.max of the "
            "control group) or on address space (ulimit -v), or end some"
        ) from error
    except KeyError as error:
        # Of Python's own lists: a signal handler has raised while start() waited, and start() has stumbled over that.
        raise error.__context__ or error from None
    return thread
