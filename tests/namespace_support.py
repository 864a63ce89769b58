"""Processes in namespaces of their own, and a cable from their network to this one."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

OUTER, INNER = "10.213.77.1", "10.213.77.2"  # the two ends of a cable
_NAME = f"kvf{os.getpid() % 100000}"
OUTER_DEVICE, _INNER_DEVICE = f"{_NAME}a", f"{_NAME}b"
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
            f"ip link add {OUTER_DEVICE} type veth peer name {_INNER_DEVICE} netns {_child_of(inside.process.pid)}".split(),
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            pytest.skip(f"no pair of network devices can be made here: {made.stderr.strip()}")
        subprocess.run(["ip", "addr", "add", f"{OUTER}/30", "dev", OUTER_DEVICE], check=True)
        subprocess.run(["ip", "link", "set", OUTER_DEVICE, "up"], check=True)
        yield
    finally:
        subprocess.run(["ip", "link", "del", OUTER_DEVICE], capture_output=True, check=False)


def _child_of(pid: int) -> int:
    """Of ``unshare --fork``: the process that is in the new namespaces."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as found:
            if children := found.read().split():
                return int(children[0])
        time.sleep(0.002)
    raise AssertionError("unshare has not forked")


class Network(list[Inside]):
    """Processes, each in a network namespace of its own: 10.213.78.1, 2, … behind one switch, and 10.213.78.254 here."""

    def cut(self, number: int) -> None:
        """Nothing gets through to this one and back any more, and nobody is told."""
        self._set(number, "down")

    def mend(self, number: int) -> None:
        self._set(number, "up")

    def _set(self, number: int, state: str) -> None:
        entered = ["nsenter", "-t", str(_child_of(self[number].process.pid)), "-n"]
        subprocess.run([*entered, "ip", "link", "set", f"{_NAME}y{number}", state], check=True)


@contextlib.contextmanager
def network(insides: "Callable[..., Inside]", script: str, count: int) -> "Iterator[Network]":
    """Starts ``script`` so often; its argument is the address, with port 0, that it is to listen at. Skips where no such
    network can be made."""
    made = Network()
    switch = f"{_NAME}s"
    try:
        _made_or_skipped(f"ip link add {switch} type bridge")
        _made_or_skipped(f"ip addr add 10.213.78.254/24 dev {switch}")
        _made_or_skipped(f"ip link set {switch} up")
        for number in range(count):
            outer, inner, there = f"{_NAME}x{number}", f"{_NAME}y{number}", f"10.213.78.{number + 1}"
            waiting = (
                f"until ip link show {inner} >/dev/null 2>&1; do sleep 0.05; done && ip addr add {there}/24 dev {inner} && "
                f"ip link set {inner} up && ip link set lo up"
            )
            made.append(insides(script, f"{there}:0", ["--net"], before=waiting))
            inside = _child_of(made[-1].process.pid)
            _made_or_skipped(f"ip link add {outer} type veth peer name {inner} netns {inside}")
            _made_or_skipped(f"ip link set {outer} master {switch} up")
        yield made
    finally:
        for device in (*(f"{_NAME}x{number}" for number in range(count)), switch):
            subprocess.run(["ip", "link", "del", device], capture_output=True, check=False)


def _made_or_skipped(command: str) -> None:
    ran = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if ran.returncode:
        pytest.skip(f"no network of several hosts can be made here: `{command}`: {ran.stderr.strip()}")
