"""Memory that only its copier can touch (kind ``test:0``, pages without any right), in every verb and by every transport.

A copy that reached for such bytes by itself would crash the process it is in. So whatever passes here asks the copier, as
memory of an accelerator will need it.
"""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvferry
from failure_support import NEW, OLD, SETTLE_S, Memory, mapped, until, words
from kvferry import Addresses, RequestKey, _core
from support import Peer

pytestmark = pytest.mark.quick(
    "[allocated-test:0-any]",
    "[registered-test:0-any]",
    "[test:0-test:0-tcp]",
)

BLOCKS, BLOCK_BYTES, TENSORS = 9, 8 << 10, 4
TIME_MS = 5000
HIDDEN = "test:0"


class Side:
    """A node with caches "blocks" and "rows" of one kind of memory."""

    def __init__(self, kind: str, transports: "tuple[str, ...]", value: int, block_bytes: int = BLOCK_BYTES) -> None:
        _core.enable_test_kind()
        self.kind, self.block_bytes = kind, block_bytes
        self.node = kvferry.Node(listen="127.0.0.1:0", pool=16 << 20, transports=transports)
        self.caches = {layout: self.make(layout) for layout in ("blocks", "rows")}
        self.fill(value)

    def make(self, layout: str) -> Any:
        keys = [RequestKey(7)] if layout == "rows" else None
        shape = (BLOCKS, self.block_bytes // 8)
        if self.kind == "allocated":
            return self.node.allocate(layout, tensors=TENSORS, shape=shape, dtype="uint64", layout=layout, keys=keys)
        if self.kind == "registered":
            return self.node.register(layout, [mapped(shape) for _ in range(TENSORS)], layout=layout, keys=keys)
        addresses = [_core.test_kind_allocate(BLOCKS * self.block_bytes) for _ in range(TENSORS)]
        more = {"unit_bytes": self.block_bytes, "count": BLOCKS, "kind": HIDDEN, "layout": layout, "keys": keys}
        return self.node.register_addresses(layout, addresses, **more)

    def contents(self, value: int, tensor: int) -> Any:
        column = words(value + 1000 * tensor, BLOCKS)
        return np.broadcast_to(column, (BLOCKS, self.block_bytes // 8)).astype(np.uint64)

    def fill(self, value: int) -> None:
        for cache in self.caches.values():
            for tensor, address in enumerate(cache.addresses):
                if self.kind == HIDDEN:
                    _core.test_kind_write(address, self.contents(value, tensor).tobytes())
                else:
                    cache.numpy(tensor)[:] = self.contents(value, tensor)

    def read(self, layout: str) -> "list[Any]":
        cache, size = self.caches[layout], BLOCKS * self.block_bytes
        if self.kind != HIDDEN:
            return [array.copy() for array in cache.numpy()]
        found = [_core.test_kind_read(address, size) for address in cache.addresses]
        return [np.frombuffer(data, np.uint64).reshape(BLOCKS, -1) for data in found]

    def address(self) -> "str | None":
        return self.node.address

    def addresses(self, layout: str) -> "list[int]":
        return list(self.caches[layout].addresses)

    def unregister(self, layout: str) -> bool:
        return self.node.unregister(self.caches[layout])


KINDS = [(HIDDEN, "registered"), ("registered", HIDDEN), (HIDDEN, HIDDEN), ("allocated", HIDDEN)]
WAYS = {"any": ("map", "cma", "socket"), "tcp": ("socket",)}


class Crossing:
    def __init__(self, far: Peer, far_kind: str, here_kind: str, way: str) -> None:
        self.far, self.far_kind, self.here_kind, self.way = far, far_kind, here_kind, way
        self.here = Side(here_kind, WAYS[way], OLD)
        self.link = self.here.node.link(far.call("address"))
        self.kv, self.rows = self.here.caches["blocks"], self.here.caches["rows"]

    def start_over(self, here: int, there: int) -> None:
        self.here.fill(here)
        self.far.call("fill", there)

    def expected(self, *, pulls: bool) -> str:
        """The transport that the source's kind and the link allow."""
        source = self.far_kind if pulls else self.here_kind
        if self.way == "tcp" or source == HIDDEN:
            return "socket"
        return {"allocated": "map", "registered": "cma"}[source]


@pytest.fixture(scope="module", params=[(*kinds, way) for kinds in KINDS for way in WAYS], ids="-".join)
def crossing(request: pytest.FixtureRequest) -> Iterator[Crossing]:
    far_kind, here_kind, way = request.param
    with Peer("test_failures_kinds:Side", far_kind, WAYS[way], NEW) as far:
        one = Crossing(far, far_kind, here_kind, way)
        yield one
        one.here.node.close()


def first_words(arrays: "list[Any]") -> "list[list[int]]":
    """What each block of each tensor says; it must say the same from its first word to its last."""
    for array in arrays:
        assert (array == array[:, :1]).all()
    return [[int(word) for word in array[:, 0]] for array in arrays]


def says(value: int, tensor: int, block: int) -> int:
    return value + 1000 * tensor + block


def laid_over(below: int, above: int, moved: "dict[tuple[int, int], tuple[int, int]]") -> "list[list[int]]":
    """Cache of ``below`` in which (tensor, block) say what (tensor, block) of ``above`` do."""
    return [
        [
            says(above, *moved[tensor, block]) if (tensor, block) in moved else says(below, tensor, block)
            for block in range(BLOCKS)
        ]
        for tensor in range(TENSORS)
    ]


def of_all_tensors(blocks: "dict[int, int]") -> "dict[tuple[int, int], tuple[int, int]]":
    return {(tensor, to): (tensor, from_) for tensor in range(TENSORS) for from_, to in blocks.items()}


def test_blocks_are_pulled(crossing: Crossing) -> None:
    crossing.start_over(OLD, NEW)
    blocks = {0: 3, 1: 4, 8: 0, 5: 7}
    done = crossing.link.pull("blocks", into=crossing.kv, blocks=blocks, timeout_ms=TIME_MS)
    assert (done.transport, done.size_bytes) == (crossing.expected(pulls=True), 4 * TENSORS * BLOCK_BYTES)
    assert first_words(crossing.here.read("blocks")) == laid_over(OLD, NEW, of_all_tensors(blocks))


def test_blocks_are_pushed(crossing: Crossing) -> None:
    crossing.start_over(NEW, OLD)
    blocks = {0: 3, 1: 4, 8: 0, 5: 7}
    done = crossing.link.push(crossing.kv, to="blocks", blocks=blocks, timeout_ms=TIME_MS)
    assert (done.transport, done.size_bytes) == (crossing.expected(pulls=False), 4 * TENSORS * BLOCK_BYTES)
    assert first_words(crossing.far.call("read", "blocks")) == laid_over(OLD, NEW, of_all_tensors(blocks))


@pytest.mark.parametrize("layout", ["blocks", "rows"])
def test_whole_caches_are_pulled_and_pushed(crossing: Crossing, layout: str) -> None:
    cache, whole = crossing.here.caches[layout], of_all_tensors({block: block for block in range(BLOCKS)})
    crossing.start_over(OLD, NEW)
    crossing.link.pull(layout, into=cache, timeout_ms=TIME_MS)
    assert first_words(crossing.here.read(layout)) == laid_over(OLD, NEW, whole)
    crossing.start_over(NEW, OLD)
    crossing.link.push(cache, to=layout, timeout_ms=TIME_MS)
    assert first_words(crossing.far.call("read", layout)) == laid_over(OLD, NEW, whole)


def test_rows_and_parts_of_rows_are_pulled_and_pushed(crossing: Crossing) -> None:
    crossing.start_over(OLD, NEW)
    if crossing.far_kind == "allocated":  # there the key is used up by the first pull that succeeds
        crossing.link.pull("rows", into=crossing.rows, row=2, timeout_ms=TIME_MS)
    else:
        crossing.link.pull(RequestKey(7), into=crossing.rows, row=2, timeout_ms=TIME_MS)
    assert first_words(crossing.here.read("rows")) == laid_over(OLD, NEW, of_all_tensors({0: 2}))
    part = {"row": 5, "size_bytes": 4104}  # over the edge of a page
    crossing.link.pull("rows", into=crossing.rows, source_row=3, timeout_ms=TIME_MS, **part)
    for tensor, array in enumerate(crossing.here.read("rows")):
        assert (array[5, :513] == says(NEW, tensor, 3)).all()
        assert (array[5, 513:] == says(OLD, tensor, 5)).all()
    crossing.start_over(NEW, OLD)
    crossing.link.push(crossing.rows, to="rows", destination_row=8, timeout_ms=TIME_MS, **part)
    for tensor, array in enumerate(crossing.far.call("read", "rows")):
        assert (array[8, :513] == says(NEW, tensor, 5)).all()
        assert (array[8, 513:] == says(OLD, tensor, 8)).all()


def test_a_row_is_spread_over_blocks(crossing: Crossing) -> None:
    crossing.start_over(OLD, NEW)
    crossing.link.pull("rows", into=crossing.kv, source_row=4, row_to_blocks=[6], timeout_ms=TIME_MS)
    assert first_words(crossing.here.read("blocks")) == laid_over(OLD, NEW, of_all_tensors({4: 6}))


def test_layers_are_pushed_one_after_the_other(crossing: Crossing) -> None:
    crossing.start_over(NEW, OLD)
    with crossing.link.push_layers(crossing.kv, to="blocks", blocks={2: 1}, timeout_ms=TIME_MS) as push:
        push.layer_ready(0)
        push.layer_ready(1)
    assert first_words(crossing.far.call("read", "blocks")) == laid_over(OLD, NEW, of_all_tensors({2: 1}))


def test_a_push_may_name_addresses(crossing: Crossing) -> None:
    crossing.start_over(NEW, OLD)
    there = crossing.far.call("addresses", "blocks")
    to = Addresses([there[1] + BLOCK_BYTES, there[0]])
    more = {"layers": range(1), "timeout_ms": TIME_MS}
    crossing.link.push(crossing.kv, to=to, blocks={7: 2}, **more)
    wanted = laid_over(OLD, NEW, {(1, 3): (0, 7), (0, 2): (1, 7)})
    assert first_words(crossing.far.call("read", "blocks")) == wanted


def test_it_is_copied_within_the_node(crossing: Crossing) -> None:
    crossing.start_over(OLD, NEW)
    crossing.here.node.copy(crossing.kv, crossing.kv, blocks=([0, 1, 5], [1, 2, 0]))
    moved = {(t, b): (t, s) for t in range(TENSORS) for b, s in ((1, 0), (2, 0), (0, 5))}  # in the order given
    assert first_words(crossing.here.read("blocks")) == laid_over(OLD, OLD, moved)
    shape = (BLOCKS, BLOCK_BYTES // 8)
    plain = [mapped(shape) for _ in range(TENSORS)]
    with crossing.here.node.register("plain", plain) as other:
        crossing.here.fill(OLD)
        crossing.here.node.copy(crossing.kv, other)
        assert first_words(plain) == laid_over(OLD, OLD, {})
        for tensor, array in enumerate(plain):
            array[:] = crossing.here.contents(NEW, tensor)
        crossing.here.node.copy(other, crossing.kv, blocks={3: 8})
        assert first_words(crossing.here.read("blocks")) == laid_over(OLD, NEW, of_all_tensors({3: 8}))


@pytest.mark.parametrize("transport", ["map", "cma"])
def test_what_cannot_read_such_a_source_is_refused_before_the_first_byte(crossing: Crossing, transport: str) -> None:
    crossing.start_over(OLD, NEW)
    allowed = crossing.expected(pulls=True)
    if allowed == transport or (allowed == "map" and transport == "cma"):
        crossing.link.pull("blocks", into=crossing.kv, blocks={0: 0}, timeout_ms=TIME_MS, transport=transport)
        return
    with pytest.raises(kvferry.Unsupported) as caught:
        crossing.link.pull("blocks", into=crossing.kv, blocks={0: 0}, timeout_ms=TIME_MS, transport=transport)
    assert not caught.value.bytes_touched
    assert first_words(crossing.here.read("blocks")) == laid_over(OLD, OLD, {})


def test_the_kind_is_told_to_the_peer(crossing: Crossing) -> None:
    described = crossing.link.describe("blocks", TIME_MS)
    assert described.kind == ("host" if crossing.far_kind != HIDDEN else HIDDEN)
    assert described.transport == crossing.expected(pulls=True)


def test_a_view_of_it_is_not_given(crossing: Crossing) -> None:
    if crossing.here_kind == HIDDEN:
        with pytest.raises(kvferry.Unsupported, match="test:0"):
            crossing.kv.numpy()


BIG = 2 << 20  # bytes of a block: 32 MiB in all, many pieces


@pytest.mark.parametrize(("far_kind", "here_kind"), KINDS[:3])
@pytest.mark.parametrize("way", WAYS)
def test_a_big_one_that_ends_with_its_source_has_changed_its_spans_alone(
    peers: Callable[..., Peer], far_kind: str, here_kind: str, way: str
) -> None:
    far = peers("test_failures_kinds:Side", far_kind, WAYS[way], NEW, BIG)
    here = Side(here_kind, WAYS[way], OLD, BIG)
    blocks = {block: block for block in range(1, BLOCKS, 2)}
    with here.node, here.node.link(far.call("address")) as link:
        memory = Memory(os.getpid(), here.caches["blocks"].addresses[0], BLOCKS, BIG)
        moving = link.pull_async("blocks", into=here.caches["blocks"], blocks=blocks, timeout_ms=20_000)
        until(lambda: memory.word(1) != OLD + 1, "a first byte comes", pause_s=0)
        far.call("unregister", "blocks")
        moved = of_all_tensors(blocks)
        try:
            moving.wait()
        except kvferry.CacheNotFound:
            moved = {}
        for tensor, array in enumerate(here.read("blocks")):
            assert (array[::2] == here.contents(OLD, tensor)[::2]).all()
            assert not moved or (array[1::2] == here.contents(NEW, tensor)[1::2]).all()
        here.fill(OLD)
        time.sleep(SETTLE_S)
        assert first_words(here.read("blocks")) == laid_over(OLD, OLD, {})
