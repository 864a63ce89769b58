"""A process may end while daemon threads of it are inside kvferry: it ends well."""

import subprocess
import sys

import pytest

LEAVES_AT_ONCE = """
import random, sys, threading, time
import numpy as np
import kvferry

there = kvferry.Node(listen="127.0.0.1:0")
there.register("kv", np.ones((64, 65536), np.uint8))
here = kvferry.Node()
link = here.link(there.address)
mine = here.register("mine", np.zeros((64, 65536), np.uint8))


def links():
    with kvferry.Node(listen="127.0.0.1:0") as node:
        node.link(there.address).close()


CALLS = {
    "pull": lambda: link.pull("kv", into=mine, transport=random.choice(["cma", "socket"]), timeout_ms=1500),
    "link": links,
}


def for_ever(call):
    while True:
        try:
            call()
        except kvferry.KvferryError:
            pass
        except RuntimeError as error:  # from Python 3.12 on: a node's log thread cannot be started any more
            assert "interpreter shutdown" in str(error)
            return


for _ in range(6):
    threading.Thread(target=for_ever, args=(CALLS[sys.argv[1]],), daemon=True).start()
time.sleep(0.2 + 0.2 * random.random())
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", ["pull", "link"])
def test_a_process_ends_well_while_daemon_threads_are_in_the_middle_of_calls(call: str) -> None:
    for _ in range(6):
        ended = subprocess.run([sys.executable, "-c", LEAVES_AT_ONCE, call], capture_output=True, text=True, timeout=30)
        assert (ended.returncode, ended.stderr) == (0, "")
