"""What does not exist, does not fit or is not there: the call says so by name, before the first byte, and nothing changes."""

import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvferry
from failure_support import NEW, OLD, Peers, ended, mapped, words
from kvferry import Addresses, BlocksKey, PrefixKey, RequestKey
from support import Peer

BLOCKS, BLOCK_BYTES, TENSORS = 6, 4096, 4
TRANSPORTS = ("map", "cma", "socket")
TIME_MS = 3000


class Owner:
    """A peer's node with caches of every layout; some of them cannot be touched."""

    def __init__(self, transport: str, where: str) -> None:
        options = {"transports": ("socket",)} if transport == "socket" else {}
        self.node = kvferry.Node(listen="127.0.0.1:0", pool=4 << 20, **options)
        self.caches = {name: self.make(name, layout, where) for name, layout in (("kv", "blocks"), ("rows", "rows"))}
        self.bad = {
            "nowhere": self.node.register_addresses("nowhere", [1], unit_bytes=BLOCK_BYTES, count=BLOCKS),
            "half": self.node.register_addresses("half", half_of(0), unit_bytes=BLOCK_BYTES, count=BLOCKS),
        }

    def make(self, name: str, layout: str, where: str) -> Any:
        shape = (BLOCKS, BLOCK_BYTES // 8)
        keys = [RequestKey(7), None, PrefixKey(8)] if layout == "rows" else None
        if where == "allocated":
            cache = self.node.allocate(name, tensors=TENSORS, shape=shape, dtype="uint64", layout=layout, keys=keys)
        else:
            cache = self.node.register(name, [mapped(shape) for _ in range(TENSORS)], layout=layout, keys=keys)
        for array in cache.numpy():
            array[:] = words(NEW, BLOCKS)
        return cache

    def address(self) -> "str | None":
        return self.node.address

    def addresses(self) -> "list[int]":
        return list(self.caches["kv"].addresses)

    def window(self, access: str) -> bytes:
        return bytes(self.caches["kv"].window(blocks=[1, 2], access=access, ttl_ms=60_000).name)

    def unchanged(self) -> bool:
        return all((array == words(NEW, BLOCKS)).all() for cache in self.caches.values() for array in cache.numpy())


kept: "list[Any]" = []


def half_of(rights: int) -> "list[int]":
    """A tensor whose second half can only be used as ``rights`` says: 0, not at all; 1, for reading."""
    memory = mapped((BLOCKS, BLOCK_BYTES // 8))
    kept.append(memory)
    at, half = memory.ctypes.data, BLOCKS * BLOCK_BYTES // 2
    mprotect = ctypes.CDLL(None).mprotect
    mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert mprotect(at + half, half, rights) == 0
    return [at]


class Here:
    """This process's node, its caches, and its link to the owner."""

    def __init__(self, owner: Peer, transport: str) -> None:
        options = {"transports": ("socket",)} if transport == "socket" else {}
        self.owner, self.transport = owner, transport
        self.node = kvferry.Node(pool=4 << 20, **options)
        self.link = self.node.link(owner.call("address"))
        shape = (BLOCKS, BLOCK_BYTES // 8)
        self.kv = self.node.register("kv", [mapped(shape) for _ in range(TENSORS)])
        self.rows = self.node.register("rows", [mapped(shape) for _ in range(TENSORS)], layout="rows")
        self.two = self.node.register("two", [mapped(shape) for _ in range(2)])
        self.longer = self.node.register("longer", [mapped((BLOCKS + 1, BLOCK_BYTES // 8)) for _ in range(TENSORS)])
        self.wider = self.node.register("wider", [mapped((BLOCKS, BLOCK_BYTES // 4)) for _ in range(TENSORS)])
        self.nowhere = self.node.register_addresses("nowhere", [1], unit_bytes=BLOCK_BYTES, count=BLOCKS)
        self.half = self.node.register_addresses("half", half_of(0), unit_bytes=BLOCK_BYTES, count=BLOCKS)
        self.fixed = self.node.register_addresses("fixed", half_of(1), unit_bytes=BLOCK_BYTES, count=BLOCKS)
        self.good = [self.kv, self.rows, self.two, self.longer, self.wider]
        for cache in self.good:
            for array in cache.numpy():
                array[:] = words(OLD, cache.count)

    def pull(self, source: Any, into: Any, **more: Any) -> Any:
        return self.link.pull(source, into=into, timeout_ms=TIME_MS, transport=self.transport, **more)

    def push(self, mine: Any, to: Any, **more: Any) -> Any:
        return self.link.push(mine, to=to, timeout_ms=TIME_MS, transport=self.transport, **more)

    def push_layers(self, mine: Any, to: Any, ready: "tuple[int, ...]" = (), **more: Any) -> Any:
        more = {"timeout_ms": TIME_MS, "transport": self.transport} | more
        with self.link.push_layers(mine, to=to, **more) as push:
            for layer in ready:
                push.layer_ready(layer)

    def unchanged(self) -> bool:
        mine = all((array == words(OLD, cache.count)).all() for cache in self.good for array in cache.numpy())
        return mine and self.owner.call("unchanged")


@pytest.fixture(scope="module", params=TRANSPORTS)
def here(request: pytest.FixtureRequest) -> Iterator[Here]:
    where = "allocated" if request.param == "map" else "registered"
    with Peer("test_failures_arguments:Owner", request.param, where) as owner:
        side = Here(owner, request.param)
        yield side
        side.node.close()


Call = Callable[[Here], Any]
INVALID, GONE = kvferry.InvalidArgument, kvferry.CacheNotFound

# What is called, the kind of error, and what its sentence names.
WRONG: "dict[str, tuple[Call, type[kvferry.KvferryError], str]]" = {
    # sources
    "no such name": (lambda h: h.pull("no", h.kv), GONE, "'no'"),
    "no such id": (lambda h: h.pull(99, h.kv), GONE, "99"),
    "id 0": (lambda h: h.pull(0, h.kv), GONE, "0"),
    "no such request": (lambda h: h.pull(RequestKey(6), h.rows, row=0), GONE, "request 6"),
    "no such model": (lambda h: h.pull(RequestKey(7, 1), h.rows, row=0), GONE, "model 1"),
    "no such prefix": (lambda h: h.pull(PrefixKey(7), h.rows, row=0), GONE, "prefix 7"),
    "no such blocks key": (lambda h: h.pull(BlocksKey(5), h.kv, blocks={0: 0}), GONE, "model 5"),
    "no such window": (lambda h: h.pull(b"0123456789abcdef", h.kv, blocks={0: 0}), GONE, "window"),
    "a window's name cut short": (lambda h: h.pull(b"01", h.kv, blocks={0: 0}), GONE, "window"),
    "addresses in a pull": (lambda h: h.pull(Addresses([1]), h.kv), INVALID, "address"),
    # destinations
    "no such destination": (lambda h: h.pull("kv", 99), GONE, "99"),
    "no such source of a push": (lambda h: h.push(99, "kv"), GONE, "99"),
    "no such name in a push": (lambda h: h.push(h.kv, "no"), GONE, "'no'"),
    "a request in a push": (lambda h: h.push(h.rows, RequestKey(6), row=0), GONE, "request 6"),
    # blocks
    "source block past the end": (lambda h: h.pull("kv", h.kv, blocks={6: 0}), INVALID, "block 6 of cache 1 'kv'"),
    "destination block past the end": (lambda h: h.pull("kv", h.kv, blocks={0: 6}), INVALID, "destination block 6"),
    "one of many": (lambda h: h.pull("kv", h.kv, blocks={0: 0, 1: 1, 2: 77, 3: 3}), INVALID, "destination block 77"),
    "negative source block": (lambda h: h.pull("kv", h.kv, blocks={-1: 0}), INVALID, "-1"),
    "negative destination block": (lambda h: h.pull("kv", h.kv, blocks={0: -1}), INVALID, "-1"),
    "a block of 2**32": (lambda h: h.pull("kv", h.kv, blocks={2**32: 0}), INVALID, str(2**32)),
    "a block of 2**63": (lambda h: h.pull("kv", h.kv, blocks={2**63: 0}), INVALID, ""),
    "lists of two lengths": (lambda h: h.pull("kv", h.kv, blocks=([0, 1], [2])), INVALID, "2"),
    "pushed block past the end": (lambda h: h.push(h.kv, "kv", blocks={6: 0}), INVALID, "source block 6"),
    "pushed to a block past the end": (lambda h: h.push(h.kv, "kv", blocks={0: 6}), INVALID, "destination block 6"),
    "blocks of rows": (lambda h: h.pull("rows", h.kv, blocks={0: 0}), INVALID, "rows"),
    "blocks into rows": (lambda h: h.pull("kv", h.rows, blocks={0: 0}), INVALID, "'rows'"),
    # rows
    "source row past the end": (lambda h: h.pull("rows", h.rows, row=0, source_row=6), GONE, "row 6"),
    "destination row past the end": (lambda h: h.pull("rows", h.rows, row=6), INVALID, "destination row 6"),
    "negative row": (lambda h: h.pull("rows", h.rows, row=-1), INVALID, "-1"),
    "a row of blocks": (lambda h: h.pull("kv", h.rows, row=0), INVALID, "'kv'"),
    "a row into blocks": (lambda h: h.pull("rows", h.kv, row=0), INVALID, "'kv'"),
    "pushed row past the end": (lambda h: h.push(h.rows, "rows", row=6), GONE, "row 6"),
    "pushed to a row past the end": (lambda h: h.push(h.rows, "rows", row=0, destination_row=6), INVALID, "row 6"),
    "too many blocks for a row": (lambda h: h.pull("rows", h.kv, row_to_blocks=[0, 1]), INVALID, "1 blocks"),
    "a row to blocks past the end": (lambda h: h.pull("rows", h.kv, row_to_blocks=[6]), INVALID, "block 6"),
    # sizes
    "no bytes": (lambda h: h.pull("rows", h.rows, row=0, size_bytes=0), INVALID, "0"),
    "fewer than no bytes": (lambda h: h.pull("rows", h.rows, row=0, size_bytes=-5), INVALID, "-5"),
    "more bytes than a row": (lambda h: h.pull("rows", h.rows, row=0, size_bytes=4097), INVALID, "4097 bytes"),
    "pushed more bytes than a row": (lambda h: h.push(h.rows, "rows", row=0, size_bytes=4097), INVALID, "4097 bytes"),
    "blocks of another size": (lambda h: h.pull("kv", h.wider, blocks={0: 0}), INVALID, "8192"),
    "pushed blocks of another size": (lambda h: h.push(h.wider, "kv", blocks={0: 0}), INVALID, "8192"),
    "another count of blocks": (lambda h: h.pull("kv", h.longer), INVALID, "7"),
    "pushed another count of blocks": (lambda h: h.push(h.longer, "kv"), INVALID, "7"),
    "another count of tensors": (lambda h: h.pull("kv", h.two), INVALID, "tensors"),
    "pushed another count of tensors": (lambda h: h.push(h.two, "kv"), INVALID, "tensors"),
    # layers
    "layer past the end": (lambda h: h.pull("kv", h.kv, layers=range(2, 3)), INVALID, "4 tensors"),
    "source layer past the end": (
        lambda h: h.pull("kv", h.kv, layers=range(1), source_layers=range(2, 3)),
        INVALID,
        "4 tensors",
    ),
    "more layers than there are": (lambda h: h.pull("kv", h.kv, layers=range(3)), INVALID, "4 tensors"),
    "layers of no tensors": (lambda h: h.pull("kv", h.kv, layers=range(1), tensors_per_layer=0), INVALID, "0"),
    "unequal layers": (lambda h: h.pull("kv", h.kv, layers=range(1), source_layers=range(2)), INVALID, "equal"),
    "pushed layer past the end": (lambda h: h.push(h.kv, "kv", layers=range(2, 3)), INVALID, "4 tensors"),
    "pushed to a layer past the end": (
        lambda h: h.push(h.kv, "kv", layers=range(1), destination_layers=range(2, 3)),
        INVALID,
        "4 tensors",
    ),
    "layer push past the end": (lambda h: h.push_layers(h.kv, "kv", layers=[2]), INVALID, "layer 2"),
    "layer push to past the end": (
        lambda h: h.push_layers(h.kv, "kv", (0,), layers=[0], destination_layers=[2]),
        INVALID,
        "4 tensors",
    ),
    "layer push to nothing": (lambda h: h.push_layers(h.kv, "no", (0, 1)), GONE, "'no'"),
    "layer push of unequal lists": (
        lambda h: h.push_layers(h.kv, "kv", layers=[0, 1], destination_layers=[0]),
        INVALID,
        "1 destination layers",
    ),
    "a layer that is not in the list": (lambda h: h.push_layers(h.kv, "kv", (5,)), INVALID, "layer 5"),
    # addresses
    "an address in nothing": (
        lambda h: h.push(h.two, Addresses([1 << 40, 1 << 40]), blocks={0: 0}),
        INVALID,
        "address",
    ),
    "an address at the end": (
        lambda h: h.push(
            h.two, Addresses([a + BLOCKS * BLOCK_BYTES for a in h.owner.call("addresses")[:2]]), blocks={0: 0}
        ),
        INVALID,
        "address",
    ),
    "an address just too far": (
        lambda h: h.push(h.two, Addresses([a + 8 for a in h.owner.call("addresses")[:2]]), blocks={0: BLOCKS - 1}),
        INVALID,
        "address",
    ),
    # windows
    "outside a read window": (lambda h: h.pull(h.owner.call("window", "read"), h.kv, blocks={0: 0}), GONE, "block 0"),
    "all of a read window": (lambda h: h.pull(h.owner.call("window", "read"), h.kv), GONE, "not in the window"),
    "outside a write window": (lambda h: h.push(h.kv, h.owner.call("window", "write"), blocks={1: 3}), GONE, "block 3"),
    "a pull from a write window": (
        lambda h: h.pull(h.owner.call("window", "write"), h.kv, blocks={1: 1}),
        GONE,
        "writ",
    ),
    "a push to a read window": (lambda h: h.push(h.kv, h.owner.call("window", "read"), blocks={1: 1}), GONE, "read"),
    # how
    "no such transport": (lambda h: h.link.pull("kv", into=h.kv, transport="pigeon"), INVALID, "pigeon"),
    "no deadline": (lambda h: h.link.pull("kv", into=h.kv, timeout_ms=None), INVALID, "deadline"),
    "a deadline in the past": (lambda h: h.link.pull("kv", into=h.kv, timeout_ms=-1), INVALID, "-1"),
    "a deadline that never comes": (lambda h: h.link.pull("kv", into=h.kv, timeout_ms=2**31), INVALID, str(2**31)),
    "prepared from nothing": (lambda h: h.link.prepare_pull("no", into=h.kv), GONE, "'no'"),
    "prepared past the end": (lambda h: h.link.prepare_pull("kv", into=h.kv, blocks={9: 0}), INVALID, "block 9"),
    # memory that is not there
    "pulled from address 1": (lambda h: h.pull("nowhere", h.kv, blocks={0: 0}), INVALID, "'nowhere'"),
    "pulled into address 1": (
        lambda h: h.pull("kv", h.nowhere, blocks={0: 0}),
        INVALID,
        "tensor 0 of cache 6 'nowhere'",
    ),
    "pushed to address 1": (
        lambda h: h.push(h.kv, "nowhere", layers=range(1), tensors_per_layer=1),
        INVALID,
        "nowhere",
    ),
    "pushed from address 1": (
        lambda h: h.push(h.nowhere, "kv", blocks={0: 0}),
        INVALID,
        "tensor 0 of cache 6 'nowhere'",
    ),
    "copied from address 1": (lambda h: h.node.copy(h.nowhere, h.two, blocks={0: 0}), INVALID, "'nowhere'"),
    "copied to address 1": (lambda h: h.node.copy(h.two, h.nowhere, blocks={0: 0}), INVALID, "'nowhere'"),
    "pulled from what ends in its middle": (lambda h: h.pull("half", h.kv, blocks={0: 0}), INVALID, "'half'"),
    "pulled into what ends in its middle": (lambda h: h.pull("kv", h.half, blocks={0: 0}), INVALID, "'half'"),
    "pushed from what ends in its middle": (lambda h: h.push(h.half, "kv", blocks={0: 0}), INVALID, "'half'"),
    "pulled into what cannot be written": (
        lambda h: h.pull("kv", h.fixed, blocks={0: 0}),
        INVALID,
        "'fixed' is not writable",
    ),
    # copies within the node
    "copied from nothing": (lambda h: h.node.copy(99, h.kv), GONE, "99"),
    "copied to nothing": (lambda h: h.node.copy(h.kv, 99), GONE, "99"),
    "copied past the end": (lambda h: h.node.copy(h.kv, h.kv, blocks={0: 6}), INVALID, "block 6"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=[name.replace(" ", "_") for name in WRONG])
def test_what_does_not_exist_or_fit_is_said_before_the_first_byte(here: Here, wrong: str) -> None:
    call, kind, named = WRONG[wrong]
    begun = time.monotonic()
    with pytest.raises(kvferry.KvferryError) as caught:
        call(here)
    error = caught.value
    assert type(error) is kind, error
    assert named in str(error)
    assert not error.bytes_touched and error.destination_settled
    assert time.monotonic() - begun < TIME_MS / 2000  # said, not waited for
    assert here.unchanged()
    assert here.link.alive
    if "mov" not in wrong and "copied" not in wrong and "deadline" not in wrong:
        assert error.operation in ("pull", "push", "prepare", ""), error.operation


def test_after_all_that_the_same_link_moves_bytes(here: Here) -> None:
    resets = here.link.statistics().resets
    here.pull("kv", here.kv, blocks={5: 1, 1: 5})
    for array in here.kv.numpy():
        assert array[:, 0].tolist() == [OLD, NEW + 5, OLD + 2, OLD + 3, OLD + 4, NEW + 1]
        array[:] = words(OLD, BLOCKS)
    assert here.link.statistics().resets == resets == 0


@pytest.mark.parametrize("verb", ["pull", "push"])
def test_errors_of_transfers_name_peer_cache_and_operation(here: Here, verb: str) -> None:
    with pytest.raises(kvferry.CacheNotFound) as caught:
        here.pull("no", here.kv) if verb == "pull" else here.push(here.kv, "no")
    error = caught.value
    assert error.peer == here.link.peer
    assert error.cache == f"cache {here.kv.id} 'kv'"
    assert error.operation == verb


MANY = 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["pull", "push"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_million_blocks_go_in_one_call(peers: Peers, verb: str, transport: str) -> None:
    options: dict[str, Any] = {"transports": ("socket",)} if transport == "socket" else {}
    options |= {"pool": MANY * 64}
    where = "allocated" if transport == "map" else "registered"
    side, other = peers("failure_support:Side", options), peers("failure_support:Side", options)
    (source, name), (destination, into) = (other, "far"), (side, "mine")
    if verb == "push":
        (source, name), (destination, into) = (side, "mine"), (other, "far")
    source.call("cache", name, where, MANY, 64, NEW)
    destination.call("cache", into, "registered", MANY, 64, OLD)
    side.call("link", other.call("address"))
    order = np.random.default_rng(5).permutation(MANY)
    move = (
        "move_here",
        verb,
        "far",
        "mine",
        (order[: MANY // 2], order[MANY // 2 :]),
        time.monotonic() + 20,
        transport,
    )
    assert side.call(*move) == (MANY // 2 * 64, transport)
    wanted = words(OLD, MANY)[:, 0]
    wanted[order[MANY // 2 :]] = words(NEW, MANY)[order[: MANY // 2], 0]
    assert (np.array(destination.call("first_words", into), np.uint64) == wanted).all()
    wrong = order[MANY // 2 :].copy()
    wrong[-7] = MANY
    late = ("move_here", verb, "far", "mine", (order[: MANY // 2], wrong), time.monotonic() + 20, transport)
    error = ended(side.call_later(*late), kvferry.InvalidArgument)
    assert f"block {MANY}" in str(error) and not error.bytes_touched
    assert (np.array(destination.call("first_words", into), np.uint64) == wanted).all()
