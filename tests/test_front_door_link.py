"""The verbs of a link between two real nodes: what moves where, in which words, and how it is waited for."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry import Addresses, BlocksKey, PrefixKey, RequestKey

BLOCK_BYTES = 4 * 8 * 4  # per tensor


def numbered(tensors: int = 4, blocks: int = 6) -> list[Any]:
    """Every number says which tensor and which block it is in."""
    arrays = [np.zeros((blocks, 4, 8), np.float32) for _ in range(tensors)]
    for number, array in enumerate(arrays):
        array[:] = 100 * number + np.arange(blocks).reshape(blocks, 1, 1)
    return arrays


def empty(tensors: int = 4, blocks: int = 6) -> list[Any]:
    return [np.full((blocks, 4, 8), -1, np.float32) for _ in range(tensors)]


def blocks_of(arrays: list[Any]) -> list[list[int]]:
    """What is in each block of each tensor: the number that fills it, or None if it is not of one piece."""
    return [[int(block.flat[0]) if (block == block.flat[0]).all() else None for block in array] for array in arrays]  # type: ignore[misc]


@pytest.fixture
def ferry() -> Iterator[Any]:
    """P with the cache "kv", D with the cache "mine" and a link from D to P."""
    with contextlib.ExitStack() as stack:
        p = stack.enter_context(kvferry.Node(listen="127.0.0.1:0", pool=4 << 20))
        d = stack.enter_context(kvferry.Node(pool=4 << 20))
        far, here = numbered(), empty()
        kv = p.register("kv", far, keys=BlocksKey(3))
        mine = d.register("mine", here)
        assert p.address
        link = stack.enter_context(d.link(p.address))
        yield SimpleNamespace(p=p, d=d, far=far, here=here, kv=kv, mine=mine, link=link)


# --- pull ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "blocks",
    [
        {0: 2, 1: 3},
        ([0, 1], [2, 3]),
        ((0, 1), (2, 3)),
        (np.array([0, 1]), np.array([2, 3], np.uint32)),
        (range(2), range(2, 4)),
        np.array([[0, 1], [2, 3]]),
        {np.int64(0): np.int32(2), np.int64(1): np.int32(3)},
    ],
    ids=["dict", "lists", "tuples", "arrays", "ranges", "matrix", "numpy numbers"],
)
def test_pulled_blocks_land_where_the_map_says(ferry: Any, blocks: Any) -> None:
    done = ferry.link.pull("kv", into=ferry.mine, blocks=blocks, timeout_ms=2000)
    assert blocks_of(ferry.here) == [[-1, -1, 100 * number, 100 * number + 1, -1, -1] for number in range(4)]
    assert done.size_bytes == 2 * 4 * BLOCK_BYTES
    assert done.transport in ("map", "cma", "socket")
    assert done.seconds > 0
    assert done.gb_per_s == pytest.approx(done.size_bytes / done.seconds / 1e9)
    with pytest.raises(AttributeError):
        done.size_bytes = 0


@pytest.mark.parametrize("source", ["kv", 1, BlocksKey(3)], ids=["name", "id", "key"])
@pytest.mark.parametrize("transport", [None, "socket"])
def test_a_source_has_many_names(ferry: Any, source: Any, transport: str | None) -> None:
    if source == 1:
        source = ferry.kv.id
    for into in (ferry.mine, ferry.mine.id):
        ferry.here[0][:] = -1
        done = ferry.link.pull(source, into=into, blocks={5: 0}, timeout_ms=2000, transport=transport)
        assert blocks_of(ferry.here)[0] == [5, -1, -1, -1, -1, -1]
        assert transport in (None, done.transport)


def test_without_blocks_everything_is_pulled(ferry: Any) -> None:
    assert ferry.link.pull("kv", into=ferry.mine, timeout_ms=2000).size_bytes == 6 * 4 * BLOCK_BYTES
    assert blocks_of(ferry.here) == blocks_of(ferry.far)


def test_a_block_named_twice_keeps_its_last_writer(ferry: Any) -> None:
    ferry.link.pull("kv", into=ferry.mine, blocks=([0, 1, 2], [4, 4, 4]), timeout_ms=2000)
    assert blocks_of(ferry.here)[2] == [-1, -1, -1, -1, 202, -1]


@pytest.mark.parametrize("transport", ["cma", "socket"])
def test_a_block_that_is_not_there_is_refused_also_where_another_overwrites_it(ferry: Any, transport: str) -> None:
    for listed in (([9, 1], [4, 4]), ([1, 1], [9, 9])):
        for call in (
            lambda listed=listed: ferry.link.pull("kv", into=ferry.mine, blocks=listed, transport=transport),
            lambda listed=listed: ferry.link.prepare_pull("kv", into=ferry.mine, blocks=listed, transport=transport),
            lambda listed=listed: ferry.link.push(ferry.mine, to="kv", blocks=listed, transport=transport),
        ):
            with pytest.raises(kvferry.InvalidArgument, match="block 9 of") as caught:
                call()
            assert not caught.value.bytes_touched
    with pytest.raises(kvferry.InvalidArgument, match="block 9 of"):
        ferry.d.copy(ferry.mine, ferry.d.register("more", empty()), blocks=([9, 1], [4, 4]))
    assert blocks_of(ferry.here)[0] == [-1] * 6


def test_layers_are_pairs_of_tensors(ferry: Any) -> None:
    ferry.link.pull("kv", into=ferry.mine, blocks={0: 0}, layers=range(1, 2), timeout_ms=2000)
    assert [row[0] for row in blocks_of(ferry.here)] == [-1, -1, 200, 300]
    ferry.link.pull("kv", into=ferry.mine, blocks={1: 1}, layers=range(1), source_layers=range(1, 2), timeout_ms=2000)
    assert [row[1] for row in blocks_of(ferry.here)] == [201, 301, -1, -1]
    ferry.link.pull("kv", into=ferry.mine, blocks={2: 2}, layers=range(3, 4), tensors_per_layer=1, timeout_ms=2000)
    assert [row[2] for row in blocks_of(ferry.here)] == [-1, -1, -1, 302]


def test_rows_are_named_by_their_keys(ferry: Any) -> None:
    rows = ferry.p.register("rows", numbered(2, 3), layout="rows", keys=[RequestKey(7), None, PrefixKey(9, model_id=2)])
    into = empty(2, 3)
    mine = ferry.d.register("row", into, layout="rows")
    ferry.link.pull(RequestKey(7), into=mine, row=1, timeout_ms=2000)
    ferry.link.pull(PrefixKey(9, 2), into=mine, row=0, timeout_ms=2000)
    ferry.link.pull(rows.id, into=mine, row=2, source_row=1, size_bytes=16, timeout_ms=2000)
    assert blocks_of(into)[1][:2] == [102, 100]
    assert (into[1][2].flat[:4] == 101).all()
    assert (into[1][2].flat[4:] == -1).all()
    with pytest.raises(kvferry.CacheNotFound) as caught:
        ferry.link.pull(RequestKey(8), into=mine, row=1)
    assert not caught.value.bytes_touched
    assert caught.value.peer == ferry.link.peer
    ferry.link.pull(RequestKey(7), into=mine, row=1, timeout_ms=2000)  # a registered cache's key is not used up


def test_a_row_fills_blocks(ferry: Any) -> None:
    whole = np.arange(2 * 3 * 32, dtype=np.float32).reshape(2, 96)
    ferry.p.register("prompt", [whole], layout="rows", keys=[None, RequestKey(1)])
    into = [np.full((6, 32), -1, np.float32)]
    mine = ferry.d.register("paged", into)
    ferry.link.pull(RequestKey(1), into=mine, row_to_blocks=[5, 0, 3], timeout_ms=2000)
    np.testing.assert_array_equal(into[0][[5, 0, 3]].reshape(-1), whole[1])
    ferry.link.pull("prompt", into=mine, source_row=0, row_to_blocks=[1, 2, 4], timeout_ms=2000)
    np.testing.assert_array_equal(into[0][[1, 2, 4]].reshape(-1), whole[0])


def test_a_request_key_of_an_allocated_cache_is_used_up_by_its_pull(ferry: Any) -> None:
    cache = ferry.p.allocate("a", tensors=4, shape=(2, 4, 8), dtype="float32", layout="rows", keys=[RequestKey(5)])
    cache.numpy(0)[:] = 5
    mine = ferry.d.register("row", empty(4, 2), layout="rows")
    ferry.link.pull(RequestKey(5), into=mine, row=1, timeout_ms=2000)
    with pytest.raises(kvferry.CacheNotFound):
        ferry.link.pull(RequestKey(5), into=mine, row=1)
    assert (mine.numpy(0)[1] == 5).all()


def test_a_hundred_thousand_blocks_move_in_one_call() -> None:
    with kvferry.Node(listen="127.0.0.1:0") as p, kvferry.Node() as d:
        source = np.arange(100_000, dtype=np.int64).reshape(100_000, 1)
        into = np.zeros((100_000, 1), np.int64)
        p.register("kv", source)
        mine = d.register("mine", into)
        order = np.random.default_rng(1).permutation(100_000)
        assert p.address
        with d.link(p.address) as link:
            for blocks in ((order, np.arange(100_000)), dict(zip(order.tolist(), range(100_000), strict=True))):
                into[:] = 0
                link.pull("kv", into=mine, blocks=blocks, timeout_ms=10_000)
                np.testing.assert_array_equal(into[:, 0], order)


# --- push ----------------------------------------------------------------------------------------------------------


def test_pushed_blocks_land_where_the_map_says(ferry: Any) -> None:
    ferry.here[1][:] = 7
    done = ferry.link.push(ferry.mine, to="kv", blocks={4: 0}, timeout_ms=2000)
    assert done.size_bytes == 4 * BLOCK_BYTES
    assert [row[0] for row in blocks_of(ferry.far)] == [-1, 7, -1, -1]
    ferry.link.push(ferry.mine.id, to=BlocksKey(3), blocks=([4], [1]), layers=range(1), timeout_ms=2000)
    assert [row[1] for row in blocks_of(ferry.far)] == [-1, 7, 201, 301]


def test_the_side_that_did_not_link_pushes_and_pulls_as_well(ferry: Any) -> None:
    (back,) = ferry.p.links
    assert back is ferry.p.links[0]
    assert back.peer_id == ferry.d.node_id
    back.push(ferry.kv, to="mine", blocks={2: 0}, timeout_ms=2000)
    assert blocks_of(ferry.here)[1][0] == 102
    back.pull("mine", into=ferry.kv, blocks={5: 5}, timeout_ms=2000)
    assert blocks_of(ferry.far)[3][5] == -1


def test_a_row_is_pushed_to_a_row_of_the_far_side(ferry: Any) -> None:
    far, mine = numbered(2, 3), empty(2, 3)
    rows = ferry.p.register("rows", far, layout="rows")
    row = ferry.d.register("row", mine, layout="rows")
    ferry.link.push(row, to="rows", row=2, destination_row=1, timeout_ms=2000)
    assert blocks_of(far) == [[0, -1, 2], [100, -1, 102]]
    ferry.link.push(row, to=rows.id, row=1, timeout_ms=2000)
    assert blocks_of(far)[1] == [-1, -1, 102]


def test_a_push_by_addresses_goes_to_the_tensors_that_begin_there(ferry: Any) -> None:
    addresses = Addresses(ferry.kv.addresses[2:])
    ferry.link.push(ferry.mine, to=addresses, blocks={0: 5}, layers=range(1), timeout_ms=2000)
    assert [row[5] for row in blocks_of(ferry.far)] == [5, 105, -1, -1]
    # One for each tensor moved, whichever layers those are; more of them need destination_layers=.
    ferry.link.push(ferry.mine, to=addresses, blocks={0: 4}, layers=range(1, 2), timeout_ms=2000)
    assert [row[4] for row in blocks_of(ferry.far)] == [4, 104, -1, -1]
    everything = Addresses(ferry.kv.addresses)
    with pytest.raises(kvferry.InvalidArgument, match=r"gives 2 tensors, destination .* takes 4"):
        ferry.link.push(ferry.mine, to=everything, blocks={0: 3}, layers=range(1), timeout_ms=2000)
    ferry.link.push(
        ferry.mine, to=everything, blocks={0: 3}, layers=range(1), destination_layers=range(1, 2), timeout_ms=2000
    )
    assert [row[3] for row in blocks_of(ferry.far)] == [3, 103, -1, -1]
    with pytest.raises(kvferry.InvalidArgument) as caught:
        ferry.link.push(ferry.mine, to=Addresses([4096, 8192]), blocks={0: 5}, layers=range(1), timeout_ms=2000)
    assert not caught.value.bytes_touched


# --- misuse --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"blocks": [0, 1]}, "does not say which block goes where"),
        ({"blocks": ([0.5], [1])}, "is of type float: blocks, rows and layers are whole numbers"),
        ({"blocks": ([0, 1], [2])}, ""),
        ({"blocks": {0: 6}}, ""),
        ({"blocks": {6: 0}}, ""),
        ({"blocks": {0: -1}}, ""),
        ({"blocks": {0: 1}, "row": 0}, "give one of blocks="),
        ({"blocks": {0: 1}, "row_to_blocks": [0]}, "give one of blocks="),
        ({"blocks": {0: 1}, "size_bytes": 8}, "size_bytes=8 is how much of a row"),
        ({"blocks": {0: 1}, "source_row": 1}, "has nowhere to go"),
        ({"source_row": 1}, "has nowhere to go"),
        ({"row": 0, "source_row": 0, "size_bytes": 1 << 40}, ""),
        ({"layers": range(0, 4, 2)}, "no range of layers"),
        ({"layers": range(0)}, "no range of layers"),
        ({"layers": [0, 1]}, "no range of layers"),
        ({"layers": range(1), "tensors_per_layer": 0}, "tensors_per_layer=0 is not a whole number"),
        ({"layers": range(3)}, ""),
        ({"layers": range(2), "source_layers": range(1)}, ""),
        ({"timeout_ms": None}, "waiting without a deadline"),
        ({"timeout_ms": 2**31}, "timeout_ms=2147483648"),
        ({"timeout_ms": -1}, "timeout_ms=-1"),
        ({"transport": "rdma"}, "'map', 'cma', 'socket'"),
        ({"into": "mine"}, "'mine' is no cache of this node"),
        ({"into": True}, "True is no cache of this node"),
    ],
    ids=str,
)
def test_misuse_is_answered_before_the_first_byte(ferry: Any, words: dict[str, Any], sentence: str) -> None:
    with pytest.raises((kvferry.InvalidArgument, kvferry.CacheNotFound)) as caught:
        ferry.link.pull("kv", **({"into": ferry.mine} | words))
    assert sentence in str(caught.value)
    assert not caught.value.bytes_touched
    assert blocks_of(ferry.here) == [[-1] * 6] * 4


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (3.5, "3.5 names no cache"),
        (True, "True names no cache"),
        (-1, "id=-1 is not"),
        (None, "names no cache"),
        ("", "'' stands for no cache"),
        (b"", "b'' stands for no window"),
    ],
)
def test_what_names_nothing_is_refused(ferry: Any, source: Any, sentence: str) -> None:
    with pytest.raises(kvferry.InvalidArgument, match=sentence):
        ferry.link.pull(source, into=ferry.mine)


def test_naming_ones_own_cache_as_the_far_one_is_answered_with_the_right_line(ferry: Any) -> None:
    with pytest.raises(kvferry.InvalidArgument, match=r"is this node's own; .*link.pull\('kv', into=mine\)"):
        ferry.link.pull(ferry.mine, into=ferry.mine)


def test_what_does_not_exist_is_not_found_and_can_be_asked_again(ferry: Any) -> None:
    for source in ("no", 99, b"no such window", RequestKey(1)):
        with pytest.raises(kvferry.CacheNotFound) as caught:
            ferry.link.pull(source, into=ferry.mine, blocks={0: 0}, timeout_ms=2000)
        assert not caught.value.bytes_touched
        assert caught.value.operation == "pull"
    ferry.p.register("no", numbered())
    ferry.link.pull("no", into=ferry.mine, timeout_ms=2000)


def test_a_key_names_a_row_and_its_pull_says_where_the_row_goes(ferry: Any) -> None:
    with pytest.raises(kvferry.InvalidArgument, match="row=0"):
        ferry.link.pull(RequestKey(1), into=ferry.mine)


def test_memory_that_is_not_there_is_an_error_each_time(ferry: Any) -> None:
    ferry.p.register_addresses("nowhere", [1, 4097, 8193, 12289], unit_bytes=BLOCK_BYTES, count=6)
    here = ferry.d.register_addresses("here", [1, 4097, 8193, 12289], unit_bytes=BLOCK_BYTES, count=6)
    for transport in (None, "socket"):
        for call in (
            lambda by: ferry.link.pull("nowhere", into=ferry.mine, blocks={0: 0}, timeout_ms=2000, transport=by),
            lambda by: ferry.link.pull("kv", into=here, blocks={0: 0}, timeout_ms=2000, transport=by),
            lambda by: ferry.link.push(here, to="kv", blocks={0: 0}, timeout_ms=2000, transport=by),
            lambda by: ferry.link.push(ferry.mine, to="nowhere", blocks={0: 0}, timeout_ms=2000, transport=by),
        ):
            with pytest.raises(kvferry.InvalidArgument):
                call(transport)
    with pytest.raises(kvferry.InvalidArgument):
        ferry.d.copy(here, ferry.mine, blocks={0: 0})
    assert blocks_of(ferry.here) == [[-1] * 6] * 4


# --- waiting -------------------------------------------------------------------------------------------------------


def test_a_transfer_is_waited_for_or_asked(ferry: Any) -> None:
    transfer = ferry.link.pull_async("kv", into=ferry.mine, blocks={0: 0}, timeout_ms=2000)
    assert transfer.wait().size_bytes == 4 * BLOCK_BYTES
    assert transfer.done()
    assert transfer.wait(0).size_bytes == 4 * BLOCK_BYTES  # again, and again
    assert not transfer.cancel()
    push = ferry.link.push_async(ferry.mine, to="kv", blocks={0: 5}, timeout_ms=2000)
    assert push.wait(2000).size_bytes == 4 * BLOCK_BYTES


def test_a_transfer_keeps_its_error(ferry: Any) -> None:
    transfer = ferry.link.pull_async("no", into=ferry.mine, timeout_ms=2000)
    for _ in range(2):
        with pytest.raises(kvferry.CacheNotFound):
            transfer.wait()


def test_many_transfers_are_awaited_in_one_loop_after_another(ferry: Any) -> None:
    async def pull_all() -> list[Any]:
        pulls = [
            ferry.link.pull_async("kv", into=ferry.mine, blocks={n % 6: n % 6}, timeout_ms=5000) for n in range(64)
        ]
        return await asyncio.gather(*(wait_for(transfer) for transfer in pulls))

    async def wait_for(transfer: Any) -> Any:
        return await transfer

    for _ in range(3):
        ferry.here[0][:] = -1
        assert all(done.size_bytes == 4 * BLOCK_BYTES for done in asyncio.run(pull_all()))
        assert blocks_of(ferry.here) == blocks_of(ferry.far)


def test_an_awaited_error_is_raised_in_the_task(ferry: Any) -> None:
    async def pull() -> None:
        await ferry.link.pull_async("no", into=ferry.mine)

    with pytest.raises(kvferry.CacheNotFound):
        asyncio.run(pull())


def test_one_transfer_may_be_awaited_by_many(ferry: Any) -> None:
    async def both() -> list[int]:
        transfer = ferry.link.pull_async("kv", into=ferry.mine, timeout_ms=2000)

        async def size() -> int:
            return int((await transfer).size_bytes)

        return list(await asyncio.gather(size(), size()))

    assert asyncio.run(both()) == [6 * 4 * BLOCK_BYTES] * 2


def test_a_cancelled_task_leaves_a_transfer_that_has_ended(ferry: Any) -> None:
    push = ferry.link.push_layers(ferry.mine, to="kv", blocks={0: 0})  # ends only when its layers are ready

    async def wait() -> None:
        await push.transfer

    async def cancel_it() -> None:
        task = asyncio.create_task(wait())
        await asyncio.sleep(0.02)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert push.done()

    asyncio.run(cancel_it())
    with pytest.raises(kvferry.Cancelled):
        push.wait()


def test_a_cancelled_task_cancels_for_all_who_await_unless_it_is_shielded(ferry: Any) -> None:
    async def one_of_two(wrap: Any) -> kvferry.LayerPush:
        push: kvferry.LayerPush = ferry.link.push_layers(ferry.mine, to="kv", blocks={0: 0})
        own, other = (asyncio.ensure_future(awaited(push.transfer, how)) for how in (wrap, lambda awaitable: awaitable))
        await asyncio.sleep(0.02)
        own.cancel()
        await asyncio.wait([own])
        if not push.done():
            for layer in range(2):
                push.layer_ready(layer)
        await asyncio.wait([other])
        other.exception()
        return push

    async def awaited(transfer: kvferry.Transfer, how: Any) -> None:
        await how(transfer)

    with pytest.raises(kvferry.Cancelled):
        asyncio.run(one_of_two(lambda awaitable: awaitable)).wait()
    assert asyncio.run(one_of_two(asyncio.shield)).wait().size_bytes == 4 * BLOCK_BYTES


def test_a_wait_that_is_over_leaves_the_operation_going(ferry: Any) -> None:
    push = ferry.link.push_layers(ferry.mine, to="kv", blocks={0: 0}, timeout_ms=2000)
    began = time.monotonic()
    with pytest.raises(kvferry.DeadlineExceeded):
        push.wait(50)
    assert 0.04 < time.monotonic() - began < 2
    assert not push.done()
    for layer in range(2):
        push.layer_ready(layer)
    assert push.wait().size_bytes == 4 * BLOCK_BYTES


def test_a_prepared_pull_runs_again_and_again(ferry: Any) -> None:
    prepared = ferry.link.prepare_pull("kv", into=ferry.mine, blocks={1: 0}, timeout_ms=2000)
    assert blocks_of(ferry.here)[0][0] == -1
    for number in (7, 8, 9):
        ferry.far[0][1] = number
        assert prepared.run(2000).size_bytes == 4 * BLOCK_BYTES
        assert blocks_of(ferry.here)[0][0] == number
    with pytest.raises(kvferry.InvalidArgument):
        prepared.run(-1)
    ferry.kv.unregister()
    with pytest.raises(kvferry.CacheNotFound):
        prepared.run()
    assert blocks_of(ferry.here)[0][0] == 9


# --- layer by layer ------------------------------------------------------------------------------------------------


def test_layers_leave_as_they_are_declared_ready(ferry: Any) -> None:
    with ferry.link.push_layers(ferry.mine, to="kv", blocks={0: 2}, timeout_ms=2000) as push:
        for layer in range(2):
            for tensor in (2 * layer, 2 * layer + 1):
                ferry.here[tensor][0] = 50 + tensor  # computed late
            push.layer_ready(layer)
    assert push.done()
    assert [row[2] for row in blocks_of(ferry.far)] == [50, 51, 52, 53]


def test_no_layer_leaves_early(ferry: Any) -> None:
    with ferry.link.push_layers(ferry.mine, to="kv", blocks={0: 2}, timeout_ms=2000) as push:
        push.layer_ready(1)  # before layer 0: it waits for its turn
        time.sleep(0.05)
        assert [row[2] for row in blocks_of(ferry.far)] == [2, 102, 202, 302]
        push.layer_ready(0)
    assert [row[2] for row in blocks_of(ferry.far)] == [-1, -1, -1, -1]


def test_some_layers_go_to_others(ferry: Any) -> None:
    with ferry.link.push_layers(ferry.mine, to="kv", blocks={0: 0}, layers=[1], destination_layers=[0]) as push:
        push.layer_ready(1)
    assert [row[0] for row in blocks_of(ferry.far)] == [-1, -1, 200, 300]
    with ferry.link.push_layers(
        ferry.mine, to=Addresses(ferry.kv.addresses[2:]), blocks={0: 0}, layers=range(1), timeout_ms=2000
    ) as push:
        push.layer_ready(0)
    assert [row[0] for row in blocks_of(ferry.far)] == [-1, -1, -1, -1]


def test_an_exception_inside_cancels_and_goes_on(ferry: Any) -> None:
    with pytest.raises(ZeroDivisionError), ferry.link.push_layers(ferry.mine, to="kv", blocks={0: 0}) as push:
        raise ZeroDivisionError
    assert push.done()
    with pytest.raises(kvferry.Cancelled):
        push.wait()
    ferry.link.push(ferry.mine, to="kv", blocks={0: 0}, timeout_ms=2000)  # the link still works


def test_a_forgotten_layer_is_an_error_and_not_a_wait_without_end(ferry: Any) -> None:
    with (
        pytest.raises(kvferry.InvalidArgument, match="layer 1 was never declared ready"),
        ferry.link.push_layers(ferry.mine, to="kv", blocks={0: 0}) as push,
    ):
        push.layer_ready(0)
    assert push.done()
    other = ferry.link.push_layers(ferry.mine, to="kv", blocks={0: 0})
    with pytest.raises(kvferry.InvalidArgument, match="layers 0, 1 were never declared ready"):
        other.wait()
    other.cancel()


def test_what_a_layer_push_fails_with_is_raised_on_leaving(ferry: Any) -> None:
    push = ferry.link.push_layers(ferry.mine, to="no", blocks={0: 0}).__enter__()
    for layer in range(2):
        push.layer_ready(layer)
    with pytest.raises(kvferry.CacheNotFound):
        push.__exit__(None, None, None)


def test_a_layer_that_is_not_in_the_push_is_refused(ferry: Any) -> None:
    with ferry.link.push_layers(ferry.mine, to="kv", blocks={0: 0}, layers=[0], timeout_ms=2000) as push:
        with pytest.raises(kvferry.InvalidArgument):
            push.layer_ready(1)
        push.layer_ready(0)


def test_layers_are_declared_by_a_thread_and_awaited_by_a_loop(ferry: Any) -> None:
    async def push_all() -> None:
        async with ferry.link.push_layers(ferry.mine, to="kv", blocks={0: 1}, timeout_ms=2000) as push:
            model = threading.Thread(target=lambda: [push.layer_ready(layer) for layer in range(2)])
            model.start()
            await asyncio.to_thread(model.join)
        assert push.done()

    asyncio.run(push_all())
    assert [row[1] for row in blocks_of(ferry.far)] == [-1, -1, -1, -1]


# --- windows -------------------------------------------------------------------------------------------------------


def test_a_windows_blocks_have_their_own_numbers(ferry: Any) -> None:
    with ferry.kv.window(blocks=[4, 1], access="read", ttl_ms=5000) as window:
        ferry.link.pull(window, into=ferry.mine, blocks={1: 5}, timeout_ms=2000)
        assert blocks_of(ferry.here)[1] == [-1, -1, -1, -1, -1, 101]
    with ferry.kv.window(blocks=[4, 1], access="write", ttl_ms=5000) as window:
        ferry.link.push(ferry.mine, to=window, blocks={5: 4}, timeout_ms=2000)
        assert blocks_of(ferry.far)[1] == [100, 101, 102, 103, 101, 105]


def test_a_window_is_pulled_from_in_its_own_order(ferry: Any) -> None:
    with ferry.kv.window(blocks=[4, 1], access="read", ttl_ms=5000) as window:
        ferry.link.pull(window.name, into=ferry.mine, blocks=[0, 2], timeout_ms=2000)
        assert blocks_of(ferry.here)[1] == [104, -1, 101, -1, -1, -1]


def test_a_window_is_pushed_to_in_its_own_order(ferry: Any) -> None:
    with ferry.kv.window(blocks=[4, 1], access="write", ttl_ms=5000) as window:
        ferry.here[0][:2] = [[[8]], [[9]]]
        ferry.link.push(ferry.mine, to=window.name, blocks=[0, 1], timeout_ms=2000)
    assert blocks_of(ferry.far)[0] == [0, 9, 2, 3, 8, 5]


def test_a_window_shows_no_more_than_its_blocks(ferry: Any) -> None:
    with ferry.kv.window(blocks=[4, 1]) as window, pytest.raises((kvferry.CacheNotFound, kvferry.InvalidArgument)):
        ferry.link.pull(window.name, into=ferry.mine, blocks={0: 0}, timeout_ms=2000)
    assert blocks_of(ferry.here) == [[-1] * 6] * 4


def test_a_closed_window_is_not_found(ferry: Any) -> None:
    window = ferry.kv.window(blocks=[1], access="read", ttl_ms=5000)
    ferry.link.pull(window.name, into=ferry.mine, blocks={1: 0}, timeout_ms=2000)
    prepared = ferry.link.prepare_pull(window.name, into=ferry.mine, blocks={1: 0}, timeout_ms=2000)
    assert window.close()
    assert not window.close()
    ferry.far[0][1] = 99  # the block is another request's now
    for late in (lambda: ferry.link.pull(window.name, into=ferry.mine, blocks={1: 0}, timeout_ms=2000), prepared.run):
        with pytest.raises(kvferry.CacheNotFound):
            late()
    assert blocks_of(ferry.here)[0][0] == 1


def test_a_window_ends_by_its_time_and_with_its_cache(ferry: Any) -> None:
    short = ferry.kv.window(blocks=[1], ttl_ms=30)
    time.sleep(0.1)
    long = ferry.kv.window(blocks=[1], ttl_ms=60_000)
    ferry.kv.unregister()
    for window in (short, long):
        with pytest.raises(kvferry.CacheNotFound):
            ferry.link.pull(window.name, into=ferry.mine, blocks={1: 0}, timeout_ms=2000)


def test_a_window_for_reading_is_not_for_writing(ferry: Any) -> None:
    with ferry.kv.window(blocks=[1], access="read") as window:
        with pytest.raises(kvferry.KvferryError) as caught:
            ferry.link.push(ferry.mine, to=window.name, blocks={0: 1}, timeout_ms=2000)
        assert not caught.value.bytes_touched
    assert blocks_of(ferry.far)[0][1] == 1


# --- the link itself -----------------------------------------------------------------------------------------------


def test_a_link_says_what_it_is_and_did(ferry: Any) -> None:
    ferry.link.pull("kv", into=ferry.mine, blocks={0: 0}, timeout_ms=2000)
    ferry.link.push(ferry.mine, to="kv", blocks={0: 0}, timeout_ms=2000)
    with pytest.raises(kvferry.CacheNotFound):
        ferry.link.pull("no", into=ferry.mine)
    statistics = ferry.link.statistics()
    assert (statistics.pulls, statistics.pushes, statistics.failures) == (1, 1, 1)
    assert statistics.bytes_pulled == statistics.bytes_pushed == 4 * BLOCK_BYTES
    assert (statistics.peer_id, statistics.alive, statistics.outgoing) == (ferry.p.node_id, True, True)
    assert set(statistics.transports) == {"map", "cma", "socket"}
    assert statistics.transports["socket"] == "ok"
    assert all(statistics.transports.values())
    with pytest.raises(AttributeError):
        statistics.pulls = 0


def test_a_far_cache_can_be_described(ferry: Any) -> None:
    description = ferry.link.describe("kv", timeout_ms=2000)
    assert (description.cache_id, description.name, description.layout) == (ferry.kv.id, "kv", "blocks")
    assert (description.tensors, description.count, description.unit_bytes) == (4, 6, BLOCK_BYTES)
    assert (description.kind, description.window) == ("host", None)
    assert description.transport in ("map", "cma", "socket")
    with pytest.raises(kvferry.CacheNotFound):
        ferry.link.describe("no", timeout_ms=2000)


@pytest.mark.parametrize("access", ["read", "write"])
def test_a_window_tells_its_blocks_in_its_order(ferry: Any, access: str) -> None:
    with ferry.kv.window(blocks=[4, 1], access=access) as window:
        assert ferry.link.describe(window.name, timeout_ms=2000).window == (4, 1)


def test_unlinking_is_seen_on_both_sides_and_closing_again_is_fine(ferry: Any) -> None:
    (back,) = ferry.p.links
    ferry.link.unlink()
    assert not ferry.link.alive
    ferry.link.unlink()
    ferry.link.close()
    until = time.monotonic() + 2
    while back.alive and time.monotonic() < until:
        time.sleep(0.005)
    assert not back.alive
    assert ferry.d.links == []
    with pytest.raises((kvferry.NotLinked, kvferry.PeerLost)) as caught:
        ferry.link.pull("kv", into=ferry.mine)
    assert not caught.value.bytes_touched
    with ferry.d.link(ferry.p.address) as again:
        again.pull("kv", into=ferry.mine, timeout_ms=2000)


def test_unlinking_ends_beside_threads_that_go_on(ferry: Any) -> None:
    """What has begun is waited for, what begins meanwhile is refused: on the side that unlinks, and on the other."""
    (back,) = ferry.p.links
    moved = [0] * 6
    ended: list[Any] = [None] * 6
    spare = [ferry.d.register(f"spare {number}", empty()) for number in range(3)]
    theirs = [ferry.p.register(f"theirs {number}", empty()) for number in range(3)]

    def go_on(number: int) -> None:
        link, into, far = (ferry.link, spare, "kv") if number < 3 else (back, theirs, "mine")
        mine = into[number % 3]
        by = "socket" if number % 3 else None
        while ended[number] is None or link.alive:
            try:
                if number % 3 == 2:
                    link.push(mine, to="theirs 0" if number < 3 else "spare 0", timeout_ms=20_000, transport=by)
                else:
                    link.pull(far, into=mine, timeout_ms=20_000, transport=by)
                moved[number] += 1
            except kvferry.KvferryError as error:
                ended[number] = error

    threads = [threading.Thread(target=go_on, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 20
    while min(moved) < 3 and time.monotonic() < until:
        time.sleep(0.005)
    ferry.link.unlink(timeout_ms=20_000)
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert min(moved) >= 3
    assert {type(error) for error in ended} <= {kvferry.NotLinked, kvferry.PeerLost}, ended
    with ferry.d.link(ferry.p.address) as again:
        again.pull("kv", into=ferry.mine, timeout_ms=2000)


def test_an_unlink_that_was_too_late_leaves_the_link_as_it_was(ferry: Any) -> None:
    with ferry.link.push_layers(ferry.mine, to="kv", timeout_ms=5000) as layers:
        refused: list[Any] = []

        def pull_until_refused() -> None:
            until = time.monotonic() + 20
            while not refused and time.monotonic() < until:
                try:
                    ferry.link.pull("kv", into=ferry.mine, blocks={0: 0}, timeout_ms=2000)
                except kvferry.NotLinked as error:
                    refused.append(error)

        thread = threading.Thread(target=pull_until_refused)
        thread.start()
        until = time.monotonic() + 20
        while not refused and time.monotonic() < until:  # a push whose layers are not ready yet is in flight
            with pytest.raises(kvferry.DeadlineExceeded, match="in flight"):
                ferry.link.unlink(timeout_ms=100)
        thread.join(20)
        assert "is being unlinked" in str(refused[0])
        assert not refused[0].bytes_touched
        assert ferry.link.alive
        ferry.link.pull("kv", into=ferry.mine, blocks={0: 0}, timeout_ms=2000)
        for layer in range(2):
            layers.layer_ready(layer)
    ferry.link.unlink()


def test_what_ended_with_its_node_may_be_closed_afterwards(ferry: Any) -> None:
    with ferry.d.register("more", empty()) as cache, cache.window(blocks=[0]) as window, ferry.link:
        ferry.d.close()
    assert not window.close()
    assert not cache.unregister()
    assert not ferry.d.deallocate(cache.id)
    with pytest.raises(kvferry.NodeClosed):
        ferry.link.pull("kv", into=cache)


def test_linking_again_replaces_the_link_there_was(ferry: Any) -> None:
    again = ferry.d.link(ferry.p.address)
    until = time.monotonic() + 2
    while ferry.link.alive and time.monotonic() < until:
        time.sleep(0.005)
    assert not ferry.link.alive
    assert ferry.d.links == [again]
    assert again.pull("kv", into=ferry.mine, blocks={0: 0}, timeout_ms=2000).size_bytes == 4 * BLOCK_BYTES


def test_linking_again_without_replacing_leaves_the_link_there_was(ferry: Any) -> None:
    port = ferry.p.address.rpartition(":")[2]
    for address in (ferry.p.address, f"localhost:{port}"):
        with pytest.raises(kvferry.AlreadyLinked, match="linked there already") as caught:
            ferry.d.link(address, replace=False)
        assert caught.value.operation == "link"
    assert ferry.link.alive
    assert ferry.d.links == [ferry.link]
    assert ferry.link.pull("kv", into=ferry.mine, blocks={0: 0}, timeout_ms=2000).size_bytes == 4 * BLOCK_BYTES
    ferry.link.unlink()
    assert ferry.d.link(ferry.p.address, replace=False).alive


def test_another_secret_is_refused() -> None:
    with kvferry.Node(listen="127.0.0.1:0", secret="one") as node:
        assert node.address
        for secret in ("two", None):
            with kvferry.Node(secret=secret) as other, pytest.raises(kvferry.Refused):
                other.link(node.address)
        with kvferry.Node(secret=b"one") as other, other.link(node.address) as link:
            assert link.alive


def test_nobody_at_the_address_is_said_at_once() -> None:
    with kvferry.Node(listen="127.0.0.1:0") as node:
        address = node.address
    assert address
    with kvferry.Node() as node, pytest.raises(kvferry.LinkFailed):
        node.link(address, timeout_ms=2000)


# --- torch ---------------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_torch_tensors_are_pulled_into_torch_tensors(ferry: Any) -> None:
    import torch

    source = [torch.randn(4, 8).to(torch.bfloat16) for _ in range(2)]
    into = ferry.d.allocate("torch", tensors=2, shape=(4, 8), dtype=torch.bfloat16)
    ferry.p.register("torch", source)
    ferry.link.pull("torch", into=into, timeout_ms=2000)
    for tensor, pulled in zip(source, into.torch(), strict=True):
        assert torch.equal(tensor, pulled)
    ferry.link.pull("torch", into=into, blocks=(torch.tensor([0, 1]), torch.tensor([1, 0])), timeout_ms=2000)
    assert torch.equal(into.torch(0)[1], source[0][0])
