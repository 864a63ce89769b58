"""Transfers by spans between two real processes: every byte that was listed, no other, and what is refused before the first."""

import asyncio
import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvferry
from failure_support import PATIENCE_S, SETTLE_S, Memory, Peers, dice
from kvferry import MEMORY
from support import Peer

pytestmark = pytest.mark.quick(
    "[700-",
    "edge_of_every_span",
    "not_there",
    "from_a_file",
    "stopped_owner",
    "after_its_end[cma]",
    "in_a_sentence",
    "no_other_form",
    "integer_type",
    "spans_overlap",
)

BYTES = 1 << 20
BLOCK = 256
OWNER = """
import numpy as np
import kvferry

node = kvferry.Node(listen="127.0.0.1:0", pool=64 << 20)
caches, arrays, windows = {}, {}, []

def make(name, where, seed, size_bytes, block_bytes):
    shape = (size_bytes // block_bytes, block_bytes)
    if where == "allocated":
        caches[name] = node.allocate(name, tensors=1, shape=shape, dtype="uint8")
        arrays[name] = caches[name].numpy(0)
    else:
        arrays[name] = np.empty(shape, np.uint8)
        caches[name] = node.register(name, arrays[name])
    arrays[name].reshape(-1)[:] = np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)
    return node.address, caches[name].addresses[0]

def window(name, blocks, access):
    windows.append(caches[name].window(blocks=blocks, access=access, ttl_ms=60_000))
    return windows[-1].name

def close_window():
    return windows.pop().close()

def content(name):
    return arrays[name].tobytes()

def fill(name, value):
    arrays[name][:] = value

def unregister(name):
    caches.pop(name).unregister()
"""

Bytes = npt.NDArray[np.uint8]
Spans = npt.NDArray[np.int64]


def noise(seed: int, size: int = BYTES) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def random_spans(n: int, size: int = BYTES) -> Spans:
    """Sources anywhere, destinations that do not overlap, in any order."""
    rng = np.random.default_rng(dice().randrange(1 << 32))
    room = size // n
    lengths = rng.integers(1, room, n)
    into = np.arange(n) * room + rng.integers(0, room - lengths + 1)
    spans = np.stack([rng.integers(0, size - lengths + 1), into, lengths], 1)
    rng.shuffle(spans)
    return np.ascontiguousarray(spans, dtype=np.int64)


def modelled(source: Bytes, destination: Bytes, spans: Any) -> Bytes:
    out = destination.copy()
    for from_, to, size in np.asarray(spans).tolist():
        out[to : to + size] = source[from_ : from_ + size]
    return out


def address(array: Bytes) -> int:
    return int(array.ctypes.data)


def at(spans: Any, *, source: int = 0, destination: int = 0) -> Spans:
    return np.asarray(spans, dtype=np.int64) + np.array([source, destination, 0])


class Ferry:
    """This process's node, linked to the owner of a cache "kv"."""

    def __init__(self, peer: Peer, where: str, size: int = BYTES, block: int = BLOCK) -> None:
        self.peer = peer
        listening, self.far_address = peer.call("make", "kv", where, 5, size, block)
        self.far = noise(5, size)
        self.node = kvferry.Node(pool=64 << 20)
        self.link = self.node.link(listening, timeout_ms=5000)

    def content(self) -> Bytes:
        return np.frombuffer(self.peer.call("content", "kv"), np.uint8)


@pytest.fixture
def ferry(peers: Peers) -> Any:
    made: list[Ferry] = []

    def make(where: str = "registered", size: int = BYTES, block: int = BLOCK) -> Ferry:
        made.append(Ferry(peers(OWNER), where, size, block))
        return made[-1]

    yield make
    for one in made:
        one.node.close()


Make = Callable[..., Ferry]
WAYS = [("allocated", "map"), ("registered", "cma"), ("registered", "socket"), ("allocated", "socket")]


@pytest.mark.parametrize(("where", "transport"), WAYS)
@pytest.mark.parametrize("n", [1, 700, 20_000])
def test_pulled_spans_are_the_sources_and_nothing_else_changes(ferry: Make, where: str, transport: str, n: int) -> None:
    one, spans = ferry(where), random_spans(n)
    into = noise(6)
    expected = modelled(one.far, into, spans)
    given = at(spans, destination=address(into)).astype(np.uint64)
    done = one.link.pull("kv", into=MEMORY, spans=given, timeout_ms=5000, transport=transport)
    assert (done.size_bytes, done.transport) == (spans[:, 2].sum(), transport)
    np.testing.assert_array_equal(into, expected)

    cache = one.node.register("mine", noise(7).reshape(-1, 4096))
    one.link.pull_async("kv", into=cache, spans=spans, timeout_ms=5000, transport=transport).wait()
    np.testing.assert_array_equal(cache.numpy(0).reshape(-1), modelled(one.far, noise(7), spans))
    np.testing.assert_array_equal(one.content(), one.far)


@pytest.mark.parametrize("transport", ["cma", "socket"])
@pytest.mark.parametrize("n", [1, 700, 20_000])
def test_pushed_spans_land_where_they_are_listed(ferry: Make, transport: str, n: int) -> None:
    one, spans, mine = ferry("allocated"), random_spans(n), noise(6)
    given = at(spans, source=address(mine))
    done = one.link.push(MEMORY, to="kv", spans=given, timeout_ms=5000, transport=transport)
    assert (done.size_bytes, done.transport) == (spans[:, 2].sum(), transport)
    expected = modelled(noise(6), one.far, spans)
    np.testing.assert_array_equal(one.content(), expected)
    np.testing.assert_array_equal(mine, noise(6))

    async def pushed() -> None:
        await one.link.push_async(cache, to="kv", spans=spans[::-1], timeout_ms=5000)

    cache = one.node.allocate("mine", tensors=1, shape=(BYTES // 64, 64), dtype="uint8")
    cache.numpy(0).reshape(-1)[:] = noise(8)
    asyncio.run(pushed())
    np.testing.assert_array_equal(one.content(), modelled(noise(8), expected, spans))


@pytest.mark.parametrize(("where", "transport"), WAYS[:3])
def test_a_hundred_thousand_spans_are_one_call(ferry: Make, where: str, transport: str) -> None:
    size = 16 << 20
    one, spans, into = ferry(where, size), random_spans(100_000, size), noise(6, size)
    expected = modelled(one.far, into, spans)
    listed = at(spans, destination=address(into))
    for _ in range(2):  # the second finds its memory known
        one.link.pull("kv", into=MEMORY, spans=listed, timeout_ms=20_000, transport=transport)
        np.testing.assert_array_equal(into, expected)
    by = "socket" if transport == "socket" else None
    back = at(spans[:, [1, 0, 2]][:1], source=address(into))
    one.link.push(MEMORY, to="kv", spans=back, timeout_ms=20_000, transport=by)
    one.link.push(MEMORY, to="kv", spans=at(spans, source=address(into)), timeout_ms=20_000, transport=by)
    assert np.frombuffer(one.content(), np.uint8).size == size


@pytest.mark.parametrize("transport", ["map", "cma", "socket"])
def test_a_window_is_the_edge_of_every_span(ferry: Make, transport: str) -> None:
    one = ferry("allocated" if transport == "map" else "registered")
    blocks = [8, 9, 10, 40]
    first, end, other = 8 * BLOCK, 11 * BLOCK, 40 * BLOCK
    into = np.zeros(4096, np.uint8)
    readable = one.peer.call("window", "kv", blocks, "read")
    inside = [(first, 0, end - first), (other, 1000, BLOCK), (end - 1, 2000, 1)]
    spans = at(inside, destination=address(into))
    one.link.pull(readable, into=MEMORY, spans=spans, timeout_ms=5000, transport=transport)
    np.testing.assert_array_equal(into, modelled(one.far, np.zeros(4096, np.uint8), inside))
    outside = [(first - 1, 0, 2), (end - 1, 0, 2), (end, 0, 1), (other - 1, 0, 1), (first, 0, other), (0, 0, 1)]
    before = into.copy()
    for span in outside:
        if span[2] > 4000:
            span = (first, 0, end - first + 1)
        spans = at([inside[0], span], destination=address(into))
        with pytest.raises(kvferry.CacheNotFound, match="span 1") as caught:
            one.link.pull(readable, into=MEMORY, spans=spans, timeout_ms=5000, transport=transport)
        assert not caught.value.bytes_touched
        np.testing.assert_array_equal(into, before)
    assert one.peer.call("close_window")
    with pytest.raises(kvferry.CacheNotFound):
        one.link.pull(readable, into=MEMORY, spans=spans, transport=transport)

    writable = one.peer.call("window", "kv", blocks, "write")
    by = "socket" if transport == "socket" else None
    mine = noise(9, 4096)
    for offset, _, size in outside:
        spans = at([(0, first, 8), (0, offset, min(size, 4000))], source=address(mine))
        with pytest.raises(kvferry.CacheNotFound, match="span 1") as caught:
            one.link.push(MEMORY, to=writable, spans=spans, timeout_ms=5000, transport=by)
        assert not caught.value.bytes_touched
    np.testing.assert_array_equal(one.content(), one.far)
    good = [(5, first, end - first), (0, other, BLOCK)]
    one.link.push(MEMORY, to=writable, spans=at(good, source=address(mine)), timeout_ms=5000, transport=by)
    np.testing.assert_array_equal(one.content(), modelled(mine, one.far, good))


@pytest.mark.parametrize("transport", ["cma", "socket"])
@pytest.mark.parametrize("later", [False, True], ids=["here", "async"])
def test_memory_that_is_not_there_is_named_before_the_first_byte(ferry: Make, transport: str, later: bool) -> None:
    one = ferry()
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    writable = np.frombuffer(memory, np.uint8)
    read_only = np.frombuffer(mmap.mmap(-1, page, prot=mmap.PROT_READ), np.uint8)

    def ended(call: Any, verb: str, spans: Any) -> None:
        more = {"spans": spans, "transport": transport, "timeout_ms": 5000}
        moving = call("kv", into=MEMORY, **more) if verb == "pull" else call(MEMORY, to="kv", **more)
        if later:
            moving.wait()

    def fails(verb: str, span: "tuple[int, int, int]", good: "tuple[int, int, int]", words: str) -> None:
        call = getattr(one.link, f"{verb}_async" if later else verb)
        with pytest.raises(kvferry.InvalidArgument, match=words) as caught:
            ended(call, verb, [good, good, span])
        assert not caught.value.bytes_touched
        assert caught.value.destination_settled

    for bad in (16, address(writable) + (1 << 46), 2**62):
        fails("pull", (0, bad, 8), (0, address(writable), 8), rf"span 2 \(8 bytes at {bad:#x}\) is not writable")
        fails("push", (bad, 0, 8), (address(writable), 0, 8), rf"span 2 \(8 bytes at {bad:#x}\) is not readable")
    fails("pull", (0, address(read_only), 8), (0, address(writable), 8), "span 2 .* is not writable memory of this")
    assert not writable.any()
    np.testing.assert_array_equal(one.content(), one.far)
    one.link.push(MEMORY, to="kv", spans=[(address(read_only), 0, 8)], transport=transport, timeout_ms=5000)
    assert not one.content()[:8].any()


def test_memory_mapped_from_a_file_goes_by_socket(ferry: Make) -> None:
    one = ferry()
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), 1 << 16)
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 1 << 16), np.uint8)
        spans = [(0, address(mapped), 1 << 16)]
        assert one.link.pull("kv", into=MEMORY, spans=spans, timeout_ms=5000).transport == "socket"
        np.testing.assert_array_equal(mapped, one.far[: 1 << 16])
        done = one.link.push(MEMORY, to="kv", spans=[(address(mapped), 1 << 16, 1 << 16)], timeout_ms=5000)
        assert done.transport == "socket"
        np.testing.assert_array_equal(one.content()[1 << 16 : 2 << 16], one.far[: 1 << 16])


# --- when the other side does not answer ------------------------------------------------------------------------------


def test_a_stopped_owner_is_read_one_sided_and_missed_by_socket(ferry: Make) -> None:
    one, into = ferry("allocated"), np.zeros(BYTES, np.uint8)
    spans = [(0, address(into), BYTES)]
    one.link.pull("kv", into=MEMORY, spans=spans, timeout_ms=5000)  # what it stands for is kept
    one.peer.stop()
    into[:] = 0
    assert one.link.pull("kv", into=MEMORY, spans=spans, timeout_ms=5000).transport == "map"
    np.testing.assert_array_equal(into, one.far)
    into[:] = 0
    begun = time.monotonic()
    with pytest.raises(kvferry.DeadlineExceeded) as caught:
        one.link.pull("kv", into=MEMORY, spans=spans, timeout_ms=100, transport="socket")
    assert time.monotonic() - begun < PATIENCE_S
    assert caught.value.destination_settled
    one.peer.cont()
    time.sleep(SETTLE_S)
    assert not into.any()
    one.link.pull("kv", into=MEMORY, spans=spans, timeout_ms=5000, transport="socket")
    np.testing.assert_array_equal(into, one.far)


@pytest.mark.parametrize("transport", ["cma", "socket"])
def test_a_push_to_a_stopped_receiver_reads_nothing_after_its_end(ferry: Make, transport: str) -> None:
    one, mine = ferry(), noise(9)
    spans = at(random_spans(5000), source=address(mine))
    one.link.push(MEMORY, to="kv", spans=spans[:1], timeout_ms=5000, transport=transport)
    far = Memory(one.peer.pid, one.far_address, BYTES // BLOCK, BLOCK)
    before = far.read()
    one.peer.stop()
    with pytest.raises(kvferry.DeadlineExceeded) as caught:
        one.link.push(MEMORY, to="kv", spans=spans, timeout_ms=100, transport=transport)
    assert not caught.value.destination_settled
    mine[:] = 0xAA  # it is the caller's again: none of this may arrive
    one.peer.cont()
    time.sleep(SETTLE_S)
    np.testing.assert_array_equal(far.read(), before)
    one.link.push(MEMORY, to="kv", spans=spans, timeout_ms=5000, transport=transport)
    np.testing.assert_array_equal(
        one.content(), modelled(mine, before.view(np.uint8).reshape(-1), at(spans, source=-address(mine)))
    )


@pytest.mark.parametrize("verb", ["pull", "push"])
@pytest.mark.parametrize("transport", ["cma", "socket"])
def test_a_peer_that_is_killed_in_the_middle_is_lost(ferry: Make, verb: str, transport: str) -> None:
    size = 24 << 20
    one, mine = ferry("registered", size), np.zeros(size, np.uint8)
    spans = random_spans(20_000, size)
    more = {"timeout_ms": 20_000, "transport": transport}
    if verb == "pull":
        moving = one.link.pull_async("kv", into=MEMORY, spans=at(spans, destination=address(mine)), **more)
    else:
        moving = one.link.push_async(MEMORY, to="kv", spans=at(spans, source=address(mine)), **more)
    time.sleep(dice().uniform(0, 0.01))
    one.peer.kill()
    with contextlib.suppress(kvferry.PeerLost):
        moving.wait(5000)
    expected = modelled(noise(5, size), np.zeros(size, np.uint8), spans)
    assert verb == "push" or not mine[expected == 0].any()  # bytes outside the spans, most of these, are as they were


def test_a_closed_node_moves_nothing(ferry: Make) -> None:
    one, mine = ferry(), noise(9)
    moving = one.link.push_async(MEMORY, to="kv", spans=[(address(mine), 0, BYTES)], timeout_ms=5000)
    one.node.close()
    with contextlib.suppress(kvferry.NodeClosed):
        moving.wait(5000)
    for call in (
        lambda: one.link.pull("kv", into=MEMORY, spans=[(0, address(mine), 8)]),
        lambda: one.link.push(MEMORY, to="kv", spans=[(address(mine), 0, 8)]),
    ):
        with pytest.raises(kvferry.NodeClosed):
            call()
    np.testing.assert_array_equal(mine, noise(9))


def test_cancelled_pushes_of_memory_leave_nothing_behind(ferry: Make) -> None:
    size = 32 << 20
    one, mine = ferry("registered", size), noise(9, size)
    spans = at(random_spans(30_000, size), source=address(mine))
    chance = dice()
    for turn in range(20):
        moving = one.link.push_async(
            MEMORY, to="kv", spans=spans, timeout_ms=10_000, transport=("cma", "socket")[turn % 2]
        )
        time.sleep(chance.uniform(0, 0.01))
        moving.cancel()
        with contextlib.suppress(kvferry.Cancelled):
            moving.wait(5000)
    assert one.node.statistics().slots_open == 0
    one.link.push(MEMORY, to="kv", spans=spans, timeout_ms=10_000)


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def near() -> Any:
    with kvferry.Node(listen="127.0.0.1:0") as far, kvferry.Node() as node:
        far.register("kv", np.zeros((8, 64), np.uint8))
        far.register("two", [np.zeros((8, 64), np.uint8)] * 2)
        far.register("gaps", np.zeros((8, 128), np.uint8)[:, :64])
        assert far.address
        with node.link(far.address) as link:
            yield node.register("mine", np.zeros((8, 64), np.uint8)), link


BAD = [
    (np.zeros((2, 4), np.int64), "an .n, 3. array of whole numbers"),
    (np.zeros(3, np.int64), r"spans of shape \(3,\)"),
    (np.zeros((1, 3)), "type float64"),
    (np.ones((1, 3), bool), "type bool"),
    ([(0, 0, 1), (0, 0)], "numpy makes no array"),
    ("spans", "an .n, 3. array"),
    ([(0, 0, 0)], "span 0 has 0 bytes"),
    ([(0, 0, 1), (-1, 0, 1)], "span 1: its offsets"),
    ([(0, -5, 1)], "span 0: its offsets"),
    ([(0, 0, -1)], "span 0: its offsets"),
    (np.array([(0, 2**63, 1)], np.uint64), "span 0: its offsets"),
    (np.array([(2**63 - 1, 0, 1)], np.uint64), "span 0: its offsets"),
    ([(0, 0, 2**63 - 1), (0, 0, 1)], "more than can be counted"),
    (
        [(0, 511, 2)],
        "span 0 of destination cache 1 'mine', 2 bytes from byte 511 on, does not lie inside its 512 bytes",
    ),
    ([(0, 0, 1), (512, 0, 1)], "span 1 of source cache 1 'kv'"),
]


@pytest.mark.parametrize(("spans", "words"), BAD, ids=range(len(BAD)))
def test_spans_that_cannot_be_are_answered_in_a_sentence(near: Any, spans: Any, words: str) -> None:
    mine, link = near
    with pytest.raises(kvferry.InvalidArgument, match=words) as caught:
        link.pull("kv", into=mine, spans=spans, timeout_ms=5000)
    assert not caught.value.bytes_touched


def test_spans_go_with_no_other_form_and_memory_with_nothing_else(near: Any) -> None:
    mine, link = near
    span = [(0, 0, 8)]
    for word, value in {"blocks": {0: 0}, "row": 0, "row_to_blocks": [1], "size_bytes": 8, "layers": range(1)}.items():
        with pytest.raises(kvferry.InvalidArgument, match=f"{word}=.* beside spans="):
            link.pull("kv", into=mine, spans=span, **{word: value})
        with pytest.raises(kvferry.InvalidArgument, match=f"{word}=.* beside spans="):
            link.push_async(mine, to="kv", spans=span, **{word: value})
    for more in ({}, {"blocks": {0: 0}}, {"row": 0}):
        with pytest.raises(kvferry.InvalidArgument, match="say with spans="):
            link.pull("kv", into=MEMORY, **more)
        with pytest.raises(kvferry.InvalidArgument, match="say with spans="):
            link.push_async(MEMORY, to="kv", **more)
    for name, words in {"two": "has 2 tensors", "gaps": "has gaps"}.items():
        for transport in ("cma", "socket"):
            with pytest.raises(kvferry.InvalidArgument, match=words):
                link.pull(name, into=mine, spans=span, transport=transport)
            with pytest.raises(kvferry.InvalidArgument, match=words):
                link.push(mine, to=name, spans=span, transport=transport)
    with pytest.raises(kvferry.InvalidArgument, match="names no cache"):
        link.pull(MEMORY, into=mine, spans=span)
    with pytest.raises(kvferry.InvalidArgument, match="names no cache"):
        link.push(mine, to=MEMORY, spans=span)
    with pytest.raises(kvferry.InvalidArgument, match="by addresses"):
        link.push(mine, to=kvferry.Addresses([mine.addresses[0]]), spans=span)
    with pytest.raises(kvferry.CacheNotFound, match="no cache 0"):
        link.pull("kv", into=0, spans=span)
    assert repr(MEMORY) == "kvferry.MEMORY"


def test_arrays_of_any_integer_type_and_order_and_no_spans_at_all(near: Any) -> None:
    mine, link = near
    wanted = [(0, 0, 8), (16, 32, 8)]
    for spans in (
        np.array(wanted, np.int32),
        np.array(wanted, np.uint8),
        np.asfortranarray(np.array(wanted)),
        np.array(wanted * 2, np.uint64)[::2],
        wanted,
    ):
        assert link.pull("kv", into=mine, spans=spans, timeout_ms=5000).size_bytes == 16
    for transport in ("cma", "socket"):
        for nothing in ([], np.empty((0, 3), np.int64)):
            assert link.pull("kv", into=mine, spans=nothing, timeout_ms=5000, transport=transport).size_bytes == 0
            assert link.push(MEMORY, to="kv", spans=nothing, timeout_ms=5000, transport=transport).size_bytes == 0


def test_where_spans_overlap_nothing_else_is_written(near: Any) -> None:
    mine, link = near
    mine.numpy(0)[:] = 9
    link.pull("kv", into=mine, spans=[(0, 10, 20), (64, 15, 20), (0, 10, 1)], timeout_ms=5000)
    content = mine.numpy(0).reshape(-1)
    assert not content[10:35].any()
    assert (content[:10] == 9).all()
    assert (content[35:] == 9).all()
