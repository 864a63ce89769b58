"""Networks of their own for processes of this machine, where that is allowed (it takes root, `unshare` and `ip`).

Two processes in two networks see each other like two hosts: kvferry cannot take the short way over a Unix socket then.
"""

from __future__ import annotations

import functools
import shutil
import subprocess

OWNER, PULLER = (
    "198.51.100.1",
    "198.51.100.2",
)  # addresses set aside for documentation; they exist in these networks only

ALONE = ["unshare", "-n"]  # before a command: a network with nothing in it
ON_LOOPBACK = [*ALONE, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]  # one in which only 127.0.0.1 exists


@functools.cache
def allowed() -> bool:
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    return subprocess.run([*ON_LOOPBACK, "true"], capture_output=True, check=False).returncode == 0


def join(owner_pid: int, puller_pid: int) -> None:
    """Lay a cable (a veth pair) between the networks of two processes that were started with ALONE."""
    ends = (("owner", owner_pid, OWNER), ("puller", puller_pid, PULLER))
    cable = ["ip", "link", "add", "owner", "netns", str(owner_pid), "type", "veth"]
    subprocess.run([*cable, "peer", "name", "puller", "netns", str(puller_pid)], check=True)
    for name, pid, address in ends:
        up = f"ip addr add {address}/30 dev {name} && ip link set {name} up && ip link set lo up"
        subprocess.run(["nsenter", "-t", str(pid), "-n", "sh", "-c", up], check=True)
