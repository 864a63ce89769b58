"""Pushes that name a row by its key, and lists that stand in a window's order: what they mean is the receiver's to say."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvferry
from failure_support import Peers
from kvferry import PrefixKey, RequestKey

ROWS = 4


@pytest.fixture(params=["map", "socket"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[kvferry.Node, kvferry.Node, kvferry.Link]]:
    transports = ("socket",) if request.param == "socket" else ("map", "cma", "socket")
    with (
        kvferry.Node(listen="127.0.0.1:0", pool=16 << 20, transports=transports) as far,
        kvferry.Node(transports=transports, pool=16 << 20) as near,
    ):
        assert far.address is not None
        yield far, near, near.link(far.address)


def rows(node: kvferry.Node, kind: Any = RequestKey, registered: bool = False) -> tuple[kvferry.Cache, list[Any]]:
    keys = [kind(10 + row) for row in range(ROWS)]
    if registered:
        arrays = [np.zeros((ROWS, 64), np.uint8) for _ in range(2)]
        return node.register("far", arrays, layout="rows", keys=keys), arrays
    cache = node.allocate("far", tensors=2, shape=(ROWS, 64), dtype="uint8", layout="rows", keys=keys)
    return cache, cache.numpy()


def mine(node: kvferry.Node) -> kvferry.Cache:
    cache = node.allocate("mine", tensors=2, shape=(ROWS, 64), dtype="uint8", layout="rows")
    for tensor in cache.numpy():
        tensor[:] = 9
    return cache


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("kind", [RequestKey, PrefixKey])
def test_a_push_to_a_key_writes_the_row_that_it_names(pair: Any, kind: Any, registered: bool) -> None:
    far, near, link = pair
    _, tensors = rows(far, kind, registered)
    source = mine(near)
    link.push(source, to=kind(12), row=0)
    link.push_async(source, to=kind(10), row=1, timeout_ms=5000).wait()
    with link.push_layers(source, to=kind(13), row=2, tensors_per_layer=1) as push:
        push.layer_ready(0)
        push.layer_ready(1)
    for tensor in tensors:
        assert tensor[:, 0].tolist() == [9, 0, 9, 9]
        assert (tensor == tensor[:, :1]).all()


def test_a_push_to_a_key_writes_nothing_beside_its_row(pair: Any) -> None:
    far, near, link = pair
    cache, tensors = rows(far)
    source = mine(near)
    for options, words in (
        ({}, "names one row"),
        ({"row_to_blocks": [0]}, "names one row"),
        ({"row": 0, "destination_row": 1}, "names row 2, not 1"),
    ):
        with pytest.raises(kvferry.InvalidArgument, match=words) as caught:
            link.push(source, to=RequestKey(12), **options)
        assert not caught.value.bytes_touched
    with pytest.raises(kvferry.CacheNotFound):
        link.push(source, to=RequestKey(99), row=0)
    assert not any(tensor.any() for tensor in tensors)
    link.push(source, to=RequestKey(12), row=0, destination_row=2)
    link.push(source, to=cache.name, row=0)
    assert tensors[0][:, 0].tolist() == [9, 0, 9, 0]


def test_a_list_beside_a_window_stands_in_the_windows_order(pair: Any) -> None:
    far, near, link = pair
    theirs = np.arange(8 * 64, dtype=np.uint8).reshape(8, 64)
    cache = far.register("kv", [theirs.copy()], layout="blocks")
    into = np.zeros((8, 64), np.uint8)
    here = near.register("here", [into], layout="blocks")
    with cache.window(blocks=[5, 1, 2], access="read") as window:
        link.pull(window.name, into=here, blocks=[7, 0, 3])
        assert (into[[7, 0, 3]] == theirs[[5, 1, 2]]).all()
        into[:] = 0
        link.prepare_pull(window.name, into=here, blocks=[4, 6, 5]).run()
        assert (into[[4, 6, 5]] == theirs[[5, 1, 2]]).all()
        with pytest.raises(kvferry.InvalidArgument, match="of 3 blocks, and 2"):
            link.pull(window.name, into=here, blocks=[1, 2])
    with cache.window(blocks=[6, 0], access="write") as window:
        link.push(here, to=window.name, blocks=[5, 4])
        written = cache.numpy(0)
        assert (written[[6, 0]] == theirs[[2, 5]]).all()
        with pytest.raises(kvferry.InvalidArgument, match="of 2 blocks, and 3"):
            link.push(here, to=window.name, blocks=[1, 2, 3])


def test_asking_for_a_windows_order_costs_no_deadline_of_its_own(peers: Peers) -> None:
    peer = peers("failure_support:Side")
    peer.call("cache", "kv", "registered", 8, 64, 1)
    window = peer.call("open_window", "kv", [1, 2], "read", 60_000)
    with kvferry.Node() as node, node.link(peer.call("address")) as link:
        here = node.register("here", [np.zeros((8, 64), np.uint8)], layout="blocks")
        peer.stop()
        turns = 0

        async def counted() -> None:
            nonlocal turns
            pulling = asyncio.ensure_future(_wait(link.pull_async(window, into=here, blocks=[0, 1], timeout_ms=400)))
            while not pulling.done():
                turns += 1
                await asyncio.sleep(0.005)
            with pytest.raises(kvferry.DeadlineExceeded):
                await pulling

        asyncio.run(counted())
        assert turns > 5  # the loop went on while the peer stood still
        peer.cont()


async def _wait(transfer: Any) -> Any:
    return await transfer


def test_a_key_of_the_other_sort_than_the_layout_is_refused() -> None:
    row, blocks = kvferry.RequestKey(1), kvferry.BlocksKey(1)
    with kvferry.Node(pool=1 << 20) as node:
        for layout, keys in (("blocks", [row]), ("blocks", [None, kvferry.PrefixKey(1)]), ("rows", blocks)):
            with pytest.raises(kvferry.InvalidArgument, match=r"and layout '(blocks|rows)' has none"):
                node.register("kv", np.zeros((4, 8), np.uint8), layout=layout, keys=keys)
            with pytest.raises(kvferry.InvalidArgument, match=r"and layout '(blocks|rows)' has none"):
                node.allocate("kv", tensors=1, shape=(4, 8), dtype="u1", layout=layout, keys=keys)
        assert node.caches == []
        node.register("kv", np.zeros((4, 8), np.uint8), layout="mixed", keys=[row])
