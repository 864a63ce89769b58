"""Processes in namespaces of their own, and a cable from their network to this one."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

OUTER, INNER = "10.213.77.1", "10.213.77.2"  # the two ends of a cable
_NAME = f"kvf{os.getpid() % 100000}"
_OUTER_DEVICE, _INNER_DEVICE = f"{_NAME}a", f"{_NAME}b"
AWAIT_CABLE = (
    f"until ip link show {_INNER_DEVICE} >/dev/null 2>&1; do sleep 0.05; done && "
    f"ip addr add {INNER}/30 dev {_INNER_DEVICE} && ip link set {_INNER_DEVICE} up && ip link set lo up"
)


class Inside:
    """Python in namespaces of its own (words for ``unshare``). The script gets its arguments, reads lines and prints lines;
    ``before`` runs there first, in a shell."""

    def __init__(self, script: str, argument: str, namespaces: "list[str]", before: str = "true") -> None:
        command = ["unshare", *namespaces, "--kill-child", "--fork", "sh", "-c", f'{before} && exec "$0" "$@"']
        self.process = subprocess.Popen(
            [*command, sys.executable, "-c", script, argument],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        return self.line()

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def cable(inside: Inside) -> Iterator[None]:
    """Between `OUTER` here and `INNER` there, for a process that has waited for it with `AWAIT_CABLE`."""
    try:
        made = subprocess.run(
            f"ip link add {_OUTER_DEVICE} type veth peer name {_INNER_DEVICE} netns {_child_of(inside.process.pid)}".split(),
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            pytest.skip(f"no pair of network devices can be made here: {made.stderr.strip()}")
        subprocess.run(["ip", "addr", "add", f"{OUTER}/30", "dev", _OUTER_DEVICE], check=True)
        subprocess.run(["ip", "link", "set", _OUTER_DEVICE, "up"], check=True)
        yield
    finally:
        subprocess.run(["ip", "link", "del", _OUTER_DEVICE], capture_output=True, check=False)


def _child_of(pid: int) -> int:
    """Of ``unshare --fork``: the process that is in the new namespaces."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as found:
            if children := found.read().split():
                return int(children[0])
        time.sleep(0.002)
    raise AssertionError("unshare has not forked")
