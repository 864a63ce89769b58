"""A pytest plugin: a test that hangs is ended, with the stacks of all its processes printed.

Each test (with its fixtures) has 60 s, or what ``@pytest.mark.deadline(seconds)`` says. When they are over, the
stacks of the peers and of pytest itself go to the real standard error, the peers are killed, and the whole run ends
with status 70: after a hang nothing in this process can be trusted. It works while the interpreter is stuck in C
with the GIL held as well, only without the peers' stacks.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from support import peer

DEADLINE_S = 60.0
GRACE_S = 8.0  # for the stacks of peers, before faulthandler ends the run without the interpreter
HUNG = 70


class Watchdog:
    def __init__(self) -> None:
        # pytest replaces file descriptor 2 while tests run; this one stays the terminal's.
        self.terminal = os.fdopen(os.dup(2), "w", buffering=1)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        marker = item.get_closest_marker("deadline")
        seconds = float(marker.args[0]) if marker else DEADLINE_S
        timer = threading.Timer(seconds, self.bark, [item.nodeid, seconds])
        timer.daemon = True
        timer.name = "support: watchdog"
        timer.start()
        faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True, file=self.terminal)
        try:
            return (yield)
        finally:
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()

    def bark(self, nodeid: str, seconds: float) -> None:
        out = self.terminal
        print(f"\n\nHUNG {nodeid}: not through after {seconds:g} s. The run ends here.\n", file=out)
        peers = list(peer.living)
        for one in peers:
            with contextlib.suppress(OSError, ValueError):
                print(one.stacks(timeout=0.5), file=out)
        print("Stacks of pytest:", file=out)
        faulthandler.dump_traceback(file=out, all_threads=True)
        for one in peers:
            with contextlib.suppress(OSError):
                one._signal(signal.SIGKILL)
        print(f"\nFAILED {nodeid} - hung", file=out, flush=True)
        sys.stdout.flush()
        os._exit(HUNG)


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("usepdb"):  # with a debugger a test takes as long as its reader
        config.pluginmanager.register(Watchdog(), "support-watchdog")
