"""Nodes that listen at a path: no port, a file that only its user can reach, and that is there as long as somebody listens."""

import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvferry
from support import Peer

Peers = Callable[..., Peer]


@pytest.fixture
def at(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/kv.sock"


def file_of(address: str) -> Path:
    return Path(address.removeprefix("unix:"))


def exchange(here: kvferry.Node, link: kvferry.Link, transport: "str | None" = None) -> None:
    name = f"mine {time.monotonic_ns()}"
    mine = here.register(name, np.zeros((4, 1 << 20), np.uint8))
    link.pull("kv", into=mine, transport=transport, timeout_ms=10_000)
    assert (mine.numpy(0) == 7).all()
    here.unregister(mine)


@pytest.mark.parametrize("transports", [("map", "cma", "socket"), ("socket",)], ids=["all", "socket"])
@pytest.mark.parametrize("secret", [None, "long and random"], ids=["bare", "secret"])
def test_a_path_is_an_address_like_others(at: str, transports: "tuple[str, ...]", secret: "str | None") -> None:
    with (
        kvferry.Node(listen=at, transports=transports, secret=secret) as there,
        kvferry.Node(transports=transports, secret=secret) as here,
    ):
        assert there.address == at and stat.S_IMODE(file_of(at).lstat().st_mode) == 0o600
        there.register("kv", np.full((4, 1 << 20), 7, np.uint8))
        link = here.link(at)
        assert link.peer == f"node {there.node_id} at {at}" and there.links[0].peer == f"node {here.node_id} at {at}"
        statistics = link.statistics()
        assert statistics.address == at and statistics.same_host
        assert statistics.transports["cma"] == "ok" or transports == ("socket",)
        exchange(here, link)
        there.serve_calls()
        thread = threading.Thread(target=lambda: there.next_call(5000).answer(b"yes"))  # type: ignore[union-attr]
        thread.start()
        assert link.call(b"?", 5000) == b"yes"
        thread.join()
        # Taking no new links: the file goes when no link needs it any more, and those that are up go on.
        there.stop_listening()
        with pytest.raises(kvferry.LinkFailed):
            here.link(at)
        exchange(here, link)
        assert there.listen(at) == at
        exchange(here, here.link(at))
    assert not file_of(at).exists()


def test_paths_are_resolved_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with kvferry.Node(listen="unix:kv.sock") as there, kvferry.Node() as here:
        assert there.address == f"unix:{tmp_path}/kv.sock"
        assert here.link("unix:./kv.sock").alive
    long = f"unix:{tmp_path}/{'x' * 108}"
    for ask in (lambda: kvferry.Node(listen=long), lambda: kvferry.Node().link(long)):
        with pytest.raises(kvferry.InvalidArgument, match="may have 107 bytes"):
            ask()
    for wrong in ("unix:", "unix:a\0b", "unix:\udc80"):
        with pytest.raises(kvferry.InvalidArgument):
            kvferry.Node(listen=wrong)
    with pytest.raises(kvferry.InvalidArgument, match="No such file"):
        kvferry.Node(listen=f"unix:{tmp_path}/nowhere/kv.sock")
    with kvferry.Node() as here, pytest.raises(kvferry.LinkFailed, match=r"cannot reach unix:.*No such file"):
        here.link(f"unix:{tmp_path}/nobody")


def test_a_live_socket_is_left_alone_and_a_dead_one_replaced(at: str, peers: Peers) -> None:
    other = peers(f"import kvferry\nnode = kvferry.Node(listen={at!r})")
    with pytest.raises(kvferry.AddressInUse, match="somebody listens there"):
        kvferry.Node(listen=at)
    other.stop()
    with pytest.raises(kvferry.AddressInUse):
        kvferry.Node(listen=at)
    other.kill()
    assert file_of(at).exists()
    with kvferry.Node() as here, pytest.raises(kvferry.LinkFailed, match="Connection refused"):
        here.link(at)
    with kvferry.Node(listen=at) as there, kvferry.Node() as here:
        assert here.link(at).peer_id == there.node_id
    file_of(at).write_bytes(b"somebody's")
    with pytest.raises(kvferry.AddressInUse, match="another file"):
        kvferry.Node(listen=at)
    assert file_of(at).read_bytes() == b"somebody's"


def test_of_many_that_start_at_once_one_listens(at: str) -> None:
    for _ in range(20):
        stale = socket.socket(socket.AF_UNIX)
        stale.bind(str(file_of(at)))
        stale.close()
        begin, nodes, refused = threading.Barrier(4), [], []

        def start() -> None:
            begin.wait()  # noqa: B023
            try:
                nodes.append(kvferry.Node(listen=at))  # noqa: B023
            except kvferry.AddressInUse as error:
                refused.append(error)  # noqa: B023

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(nodes), len(refused)) == (1, 3)
        nodes[0].close()
        assert not file_of(at).exists()


def test_a_file_that_another_has_put_there_is_not_removed(at: str) -> None:
    there = kvferry.Node(listen=at)
    file_of(at).unlink()
    with kvferry.Node(listen=at):
        there.close()
        assert file_of(at).exists()
    with kvferry.Node(listen=at) as parent:
        child = os.fork()
        if child == 0:
            parent.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert file_of(at).exists()


def test_strangers_and_garbage_cost_their_connection(at: str) -> None:
    with kvferry.Node(listen=at) as there, kvferry.Node() as here:
        there.register("kv", np.full((4, 1 << 20), 7, np.uint8))
        silent = socket.socket(socket.AF_UNIX)
        silent.connect(str(file_of(at)))
        for said in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(200), b"\xff" * 24):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(10)
                stranger.connect(str(file_of(at)))
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
        exchange(here, here.link(at))
        silent.settimeout(10)
        assert silent.recv(1) == b""  # it said nothing for too long
        silent.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_is_refused_without_the_secret(peers: Peers) -> None:
    folder = tempfile.mkdtemp(dir="/tmp")  # pytest's own are closed to others
    at = f"unix:{folder}/kv.sock"
    script = "import kvferry\nnode = kvferry.Node(secret=arguments[1])\ndef link(): return node.link(arguments[0]).peer"
    os.chmod(folder, 0o755)
    with kvferry.Node(listen=at):
        nobody = peers(script, at, None, uid=65534, preload=["kvferry", "numpy"])
        with pytest.raises(kvferry.LinkFailed, match="Permission denied"):
            nobody.call("link")
        file_of(at).chmod(0o666)
        with pytest.raises(kvferry.Refused, match="uid 65534"):
            nobody.call("link")
    with kvferry.Node(listen=at, secret="long and random"):
        file_of(at).chmod(0o666)
        assert peers(script, at, "long and random", uid=65534, preload=["kvferry", "numpy"]).call("link")
        with pytest.raises(kvferry.Refused, match="secret"):
            peers(script, at, "another", uid=65534, preload=["kvferry", "numpy"]).call("link")
    os.rmdir(folder)
