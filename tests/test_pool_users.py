"""A pool among ordinary users: nobody may read another process's memory just so, and one user's node is not another's."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import Peer

Peers = Callable[..., Peer]
NOBODY = 65534
MODULES = ("numpy.random", "json", "kvferry.pool.client", "kvferry.pool.node")  # of what another user may not read
root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

pytestmark = pytest.mark.quick("ordinary_user")

NODE = """
import threading
from kvferry.pool.node import PoolNode

node = PoolNode(f"unix:{arguments[0]}/pool.sock", 64 << 20, **arguments[1])
threading.Thread(target=node.run, daemon=True).start()
address = lambda: node.address
"""
CLIENT = """
import numpy as np
import kvferry

pool = kvferry.Pool.connect(arguments[0], namespace="ours", **arguments[1])
def save(count, seed, checksum="auto"):
    kv = np.random.default_rng(seed).integers(0, 256, (count, 32 << 10), dtype=np.uint8)
    return pool.save([b"%d" % i for i in range(count)], buffers=list(kv)).outcomes
def load(count, seed):
    kv = np.random.default_rng(seed).integers(0, 256, (count, 32 << 10), dtype=np.uint8)
    into = np.zeros_like(kv)
    outcome = pool.load([b"%d" % i for i in range(count)], buffers=list(into))
    return outcome.outcomes, bool(np.array_equal(into, kv)) if outcome.prefix == count else bool(into.any())
"""


def ordinary() -> "dict[str, Any]":
    return {"uid": NOBODY, "preload": MODULES} if os.getuid() == 0 else {}


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory that both users can reach, and that belongs to the ordinary one."""
    with tempfile.TemporaryDirectory(prefix="kvferry-", dir="/tmp") as directory:
        if os.getuid() == 0:
            os.chown(directory, NOBODY, NOBODY)
        os.chmod(directory, 0o755)
        yield Path(directory)


@pytest.mark.parametrize("hidden", [False, True], ids=["open", "hidden"])
def test_an_ordinary_user_saves_and_loads_whether_his_memory_may_be_read_or_not(
    peers: Peers, home: Path, hidden: bool
) -> None:
    """Most distributions let no process read another's memory: values are then saved over a socket."""
    node = peers(NODE, str(home), {}, **ordinary())
    client = peers(CLIENT, node.call("address"), {}, dumpable=not hidden, **ordinary())
    assert set(client.call("save", 64, 1)) == {"saved"}
    other = peers(CLIENT, node.call("address"), {}, dumpable=not hidden, **ordinary())
    assert other.call("load", 64, 1) == (["hit"] * 64, True)


@root_only
def test_a_node_of_another_user_is_a_miss_without_a_secret_and_a_pool_with_one(peers: Peers, home: Path) -> None:
    closed = peers(NODE, str(home), {}, **ordinary())
    began = time.monotonic()
    stranger = peers(CLIENT, closed.call("address"), {})
    assert set(stranger.call("save", 4, 1)) == {"node_lost"}
    assert stranger.call("load", 4, 1) == (["node_lost"] * 4, False)
    assert time.monotonic() - began < 10
    closed.terminate()
    (home / "pool.sock").unlink(missing_ok=True)
    shared = peers(NODE, str(home), {"secret": "between us"}, **ordinary())
    friend = peers(CLIENT, shared.call("address"), {"node_secret": "between us"})
    assert set(friend.call("save", 64, 2)) == {"saved"}
    assert friend.call("load", 64, 2) == (["hit"] * 64, True)
    owner = peers(CLIENT, shared.call("address"), {"node_secret": "between us"}, **ordinary())
    assert owner.call("load", 64, 2) == (["hit"] * 64, True)
