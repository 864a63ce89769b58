"""The core's log lines under Python's ``logging``: ``kvferry.node`` and ``kvferry.link``, silent unless the caller listens.

The core never calls into Python; one daemon thread per node asks it for lines. The thread holds the core's node and not
the front door's, so it keeps nothing alive, and it ends when that node closes.
"""

import logging
import threading

from kvferry import _core
from kvferry.threads import start_thread

__all__ = ["start"]

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING}
_OF_A_LINK = ("link ", "a link ", "a lane ")  # how the core's lines on links begin
_LOOK_AROUND_MS = 60_000  # how long one request for a line may take; closing the node ends it at once


def start(core: _core.Node) -> threading.Thread:
    """Starts the thread that logs what ``core`` has to say until it is closed.

    :raises Busy: there is no thread to be had.
    """
    root = logging.getLogger("kvferry")
    if not root.handlers:
        root.addHandler(logging.NullHandler())
    return start_thread("kvferry-log", _drain, core)


def _drain(core: _core.Node) -> None:
    node, link = logging.getLogger("kvferry.node"), logging.getLogger("kvferry.link")
    while True:
        event = core.next_event(_LOOK_AROUND_MS)
        if event:
            level, sentence = event
            logger = link if sentence.startswith(_OF_A_LINK) else node
            logger.log(_LEVELS.get(level, logging.WARNING), "%s", sentence)
        elif core.closed:
            return
