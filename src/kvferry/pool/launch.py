"""Becomes a user's own node: run as a script, by a fresh interpreter that ``embedded`` spawned, with the standard library alone.

    launch.py LOCK STATE PROGRAM [ARGUMENT …]

Leaves everything of its starter behind (descriptors and how many there may be, terminal, directory), takes LOCK, and replaces itself
by PROGRAM in a process of its own that nobody waits for. The lock stays with that process for as long as it lives, so
"somebody holds the lock" and "the node lives" are one. STATE is JSON; with the pid in it, it is written into LOCK.

Ends with 0: the node lives from now on. BUSY: somebody else holds the lock. Else the log has the reason.
"""

import contextlib
import fcntl
import json
import os
import resource
import sys
import time

BUSY = 75
PATIENCE_S = 1.0  # whoever looks whether the lock is held has it for a moment


def main() -> None:
    lock_path, state, *program = sys.argv[1:]
    close_what_was_inherited()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every client is some descriptors
    os.setsid()
    os.chdir("/")
    os.umask(0o077)
    lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if not locked(lock):
        sys.exit(BUSY)
    if os.fork():
        os._exit(0)
    # Not the leader of its session any more: no terminal that it opens can become its own.
    os.ftruncate(lock, 0)
    os.pwrite(lock, json.dumps({**json.loads(state), "pid": os.getpid()}).encode(), 0)
    os.set_inheritable(lock, True)
    os.execv(program[0], program)


def close_what_was_inherited() -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # the one that listed them
                os.close(int(name))


def locked(lock: int) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)


if __name__ == "__main__":
    main()
