"""One process of a pair: worker.py ROLE DESCRIPTOR, driven over the pipe behind that descriptor by pair.py.

A command is the name of a method of the role and its arguments, the answer is what the method returned. Knows nothing
of cases, targets or tables.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from datadist import Decode, Prefill
from limits import end_with_parent
from owner import Owner
from puller import Puller

ROLES = {"owner": Owner, "puller": Puller, "prefill": Prefill, "decode": Decode}


def serve_commands(pipe: Connection, role: type) -> None:
    """Say that this process runs, then answer until the pipe closes. The first command gives the role's arguments."""
    side: Any = None
    pipe.send((True, "running"))
    while True:
        try:
            name, arguments, options = pipe.recv()
        except EOFError:
            return
        try:
            if side is None:
                side = role(*arguments, **options)
                pipe.send((True, None))
                continue
            answer = getattr(side, name)(*arguments, **options)
            for part in answer if isinstance(answer, Iterator) else (answer,):
                pipe.send((True, part))
        except Exception:  # noqa: BLE001  the root of this process: the driving end hears of it
            pipe.send((False, traceback.format_exc()))


if __name__ == "__main__":
    end_with_parent()
    serve_commands(Connection(int(sys.argv[2])), ROLES[sys.argv[1]])
    os._exit(0)
