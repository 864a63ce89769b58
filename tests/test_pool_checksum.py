"""Checksums of values in the pool: the formula, and that nothing wrong is served where they are on."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry import _core
from kvferry.options import TRANSPORTS
from kvferry.pool import client
from namespace_support import Inside, network
from pool_support import NodeProcess, block_bytes_of, names, spoil

pytestmark = pytest.mark.quick("formula", "corrupted", "same_host")

DOCUMENT = Path(__file__).parents[1] / "docs" / "pool.md"
SIZE = 8 << 10
CMA, SOCKET = TRANSPORTS["cma"], TRANSPORTS["socket"]
M = 2**64 - 1


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & M
    x = (x ^ x >> 27) * 0x94D049BB133111EB & M
    return x ^ x >> 31


def by_the_book(data: bytes, seed: int) -> int:
    lanes = [mix((seed + (i + 1) * 0x9E3779B97F4A7C15) & M) for i in range(16)]
    padded = data + bytes(-len(data) % 128)
    for number, at in enumerate(range(0, len(padded), 8)):
        x = lanes[number % 16] ^ int.from_bytes(padded[at : at + 8], "little")
        x ^= x >> 32
        lanes[number % 16] = x + (x & 0xFFFFFFFF) * 0x9E3779B6 & M
    found = mix(seed ^ len(data))
    for lane in lanes:
        found = mix(found ^ lane)
    return found or 1


def checksum(parts: list[bytes], seed: int = 0) -> int:
    memory = np.frombuffer(b"".join(parts) + b"\0", np.uint8)
    sizes = np.array([len(part) for part in parts], np.uint64)
    addresses = (memory.ctypes.data + np.cumsum(sizes) - sizes).astype(np.uint64)
    found = _core.checksums(addresses, sizes, np.array([len(parts)]), np.array([seed], np.uint64))
    return int.from_bytes(found, "little")


def test_the_formula_gives_what_another_program_gives() -> None:
    data = np.random.default_rng(1).bytes(5000)
    for length in [*range(200), 4096, 5000]:
        assert checksum([data[:length]], length) == by_the_book(data[:length], length)
    for cuts in ([1, 2], [63, 64, 65], [7, 1000, 1000, 4999]):
        parts = [data[a:b] for a, b in zip([0, *cuts], [*cuts, 5000], strict=True)]
        assert checksum(parts) == by_the_book(data, 0)


def test_the_formula_gives_the_documents_test_vectors() -> None:
    bytes_of = {"": b"", '`b"abc"`': b"abc", "`i % 251` for 1000 bytes `i`": bytes(i % 251 for i in range(1000))}
    rows = re.findall(r"^\| *(.*?) *\| `0x([0-9a-f]+)` \| `([0-9a-f]{16})` \|$", DOCUMENT.read_text(), re.M)
    assert len(rows) == 4
    for what, seed, expected in rows:
        assert f"{checksum([bytes_of[what]], int(seed, 16)):016x}" == expected


def test_arrays_that_do_not_go_together_are_refused() -> None:
    one, none = np.ones(1, np.uint64), np.zeros(0, np.uint64)
    for sizes, counts, seeds in (
        (none, [1], one),
        (one, [2], one),
        (one, [1], none),
        (one, [-1], one),
        (one, [0], one),
    ):
        with pytest.raises(kvferry.InvalidArgument):
            _core.checksums(one, sizes, np.array(counts), seeds)


# --- the pool ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["unix", "tcp"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NodeProcess]:
    node = NodeProcess(f"unix:{tmp_path}/pool.sock" if request.param == "unix" else "127.0.0.1:0")
    yield node
    node.stop()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[NodeProcess]:
    node = NodeProcess(f"unix:{tmp_path}/own.sock")
    yield node
    node.stop()


def flip(pid: int, value: bytes) -> None:
    """One bit of ``value`` in the memory of a node, wherever it lies."""

    def change(segment: Any) -> int:
        found = segment.tobytes().find(value)
        if found >= 0:
            segment[found + len(value) // 2] ^= 16
        return int(found >= 0)

    assert spoil(pid, change) == 1


@pytest.mark.parametrize("transports", [("map", "cma", "socket"), ("socket",)], ids=["map", "socket"])
def test_a_value_that_was_corrupted_is_a_miss_once_and_is_gone(
    node: NodeProcess, transports: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "BYTES_AT_A_TIME", 3 * SIZE)  # several parts, also here
    values, into, keys = block_bytes_of(1, 10, SIZE), np.zeros((10, SIZE), np.uint8), names(10)
    with kvferry.Pool.connect(node.address, checksum="always", transports=transports) as pool:
        assert pool.save(keys, buffers=list(values)).outcomes == ["saved"] * 10
        halves: Any = [[row[:100], row[100:]] for row in into]  # cut otherwise than it was saved
        loaded = pool.load(keys, buffers=halves)
        assert loaded.prefix == 10 and loaded.size_bytes == 10 * SIZE
        assert np.array_equal(into, values)

        flip(node.pid, values[4].tobytes())
        into[:] = 0
        loaded = pool.load(keys, buffers=list(into))
        assert loaded.outcomes == ["hit"] * 4 + ["corrupted"] + ["hit"] * 5
        assert loaded.prefix == 4 and loaded.size_bytes == 9 * SIZE
        assert np.array_equal(np.delete(into, 4, 0), np.delete(values, 4, 0))
        assert pool.statistics()["corrupted"] == 1

        assert pool.load(keys, buffers=list(into)).outcomes[4] == "removed"
        assert pool.save(keys, buffers=list(values)).outcomes == ["present"] * 4 + ["saved"] + ["present"] * 5
        assert pool.load(keys, buffers=list(into)).prefix == 10
        assert np.array_equal(into, values)


def test_on_the_same_host_nothing_is_verified_unless_asked_for(own: NodeProcess) -> None:
    values, into, keys = block_bytes_of(2, 3, SIZE), np.zeros((3, SIZE), np.uint8), names(3)
    with (
        kvferry.Pool.connect(own.address) as auto,
        kvferry.Pool.connect(own.address, checksum="always") as always,
        kvferry.Pool.connect(own.address, checksum="never") as never,
    ):
        auto.save(keys[:1], buffers=list(values[:1]))
        never.save(keys[1:2], buffers=list(values[1:2]))
        always.save(keys[2:], buffers=list(values[2:]))
        for value in values:
            flip(own.pid, value.tobytes())
        for pool in (auto, never):
            assert pool.load(keys, buffers=list(into)).prefix == 3
        assert always.load(keys, buffers=list(into)).outcomes == ["hit", "hit", "corrupted"]


def test_what_other_hosts_may_load_is_saved_with_a_checksum() -> None:
    node = NodeProcess("127.0.0.1:0")
    values, into, keys = block_bytes_of(3, 2, SIZE), np.zeros((2, SIZE), np.uint8), names(2)
    try:
        with kvferry.Pool.connect(node.address) as near, kvferry.Pool.connect(node.address) as far:
            assert near.save(keys, buffers=list(values)).prefix == 2
            flip(node.pid, values[1].tobytes())
            (peer,) = far._awake()
            assert peer.same_host
            peer.same_host = False  # as over a link to another host
            assert far.load(keys, buffers=list(into)).outcomes == ["hit", "corrupted"]
    finally:
        node.stop()


HOST = """
import os, sys
from kvferry.pool.node import PoolNode
node = PoolNode(sys.argv[1], 32 << 20)
print(os.getpid(), node.address, flush=True)
node.run()
"""


@pytest.mark.slow
def test_what_crosses_from_host_to_host_is_verified_unless_told_otherwise(insides: Callable[..., Inside]) -> None:
    values, into, keys = block_bytes_of(5, 3, SIZE), np.zeros((3, SIZE), np.uint8), names(3)
    with network(insides, HOST, 1) as hosts:
        pid, address = hosts[0].line().split()
        with kvferry.Pool.connect(address) as pool, kvferry.Pool.connect(address, checksum="never") as never:
            assert pool.save(keys, buffers=list(values)).prefix == 3
            flip(int(pid), values[1].tobytes())
            assert never.load(keys, buffers=list(into)).prefix == 3
            assert pool.load(keys, buffers=list(into)).outcomes == ["hit", "corrupted", "hit"]
            assert np.array_equal(into[[0, 2]], values[[0, 2]])


@pytest.mark.parametrize("way", ["map and cma", "socket"])
def test_whoever_moves_the_bytes_takes_their_checksums(monkeypatch: Any, tmp_path: Path, way: str) -> None:
    node = NodeProcess("127.0.0.1:0")
    rng = np.random.default_rng(11)
    file = tmp_path / "values"
    file.write_bytes(rng.bytes(4 * 3 * SIZE))
    cases = {  # values, and whether their memory may shrink while somebody reads it
        "many windows": ([rng.integers(0, 256, 3 << 20, dtype=np.uint8) for _ in range(12)], False),
        "scattered": (
            [[rng.integers(0, 256, n, dtype=np.uint8) for n in rng.integers(1, 3000, 50)] for _ in range(300)],
            False,
        ),
        "in many pieces": (
            [[rng.integers(0, 256, n, dtype=np.uint8) for n in [7, 4096] * 1500] for _ in range(3)],
            False,
        ),
        "large and small": ([rng.integers(0, 256, n, dtype=np.uint8) for n in (30 << 20, 1, 5 << 20, 4096)], False),
        "one": ([rng.integers(0, 256, 1, dtype=np.uint8)], False),
        "of a file": ([*np.memmap(file, np.uint8, "r", shape=(4, 3 * SIZE))], True),
    }
    counted: list[int] = []
    took = client.Values.checksums
    monkeypatch.setattr(client.Values, "checksums", lambda *all_of_it: counted.append(1) or took(*all_of_it))
    try:
        with (
            kvferry.Pool.connect(node.address, checksum="always", transports=["socket"]) as by_socket,
            kvferry.Pool.connect(node.address, checksum="always") as one_sided,
        ):
            pool, other = (by_socket, one_sided) if way == "socket" else (one_sided, by_socket)
            for case, (values, shrinks) in cases.items():
                keys = names(len(values), case)
                assert pool.save(keys, buffers=values, timeout_ms=20_000).prefix == len(keys), case
                assert bool(counted) == shrinks, case
                into = [
                    [np.zeros_like(part) for part in (value if isinstance(value, list) else [value])]
                    for value in values
                ]
                assert pool.load(keys, buffers=into, timeout_ms=20_000).reasons == {"hit": len(keys)}, case
                for value, there in zip(values, into, strict=True):
                    for part, copy in zip(value if isinstance(value, list) else [value], there, strict=True):
                        assert np.array_equal(part, copy), case
                # What came in a stream is looked at when all of it is there; each part of a batch apart.
                assert bool(counted) == (shrinks or way == "socket"), case
                # And both ways take the same ones.
                assert other.load(keys, buffers=into, timeout_ms=20_000).reasons == {"hit": len(keys)}, case
                counted.clear()
    finally:
        node.stop()


def test_a_right_value_under_a_wrong_key_is_corrupted() -> None:
    values, into, keys = block_bytes_of(4, 3, SIZE), np.zeros((3, SIZE), np.uint8), names(3)
    with kvferry.Pool.private(32 << 20, checksum="always") as pool:
        assert pool.save(keys, buffers=list(values)).prefix == 3
        (space,) = pool._keep._node._spaces.values()
        first, second = (space.entries[key] for key in keys[:2])
        (first.slab, first.index), (second.slab, second.index) = (second.slab, second.index), (first.slab, first.index)
        assert pool.load(keys, buffers=list(into)).outcomes == ["corrupted", "corrupted", "hit"]


def test_a_file_that_has_been_cut_short_cannot_be_saved_and_ends_nobody(tmp_path: Path) -> None:
    """Whoever moves the bytes learns that they are not there, and no sum of them is taken before."""
    whole = np.memmap(tmp_path / "values", np.uint8, "w+", shape=(1 << 20,))
    whole[:] = 7
    with kvferry.Pool.private(checksum="always") as pool:
        assert pool.save([b"whole"], buffers=[whole]).prefix == 1
        os.truncate(tmp_path / "values", 4096)
        with pytest.raises(kvferry.InvalidArgument, match="not mapped"):
            pool.save([b"cut"], buffers=[whole])
        assert pool.exists([b"whole", b"cut"]).ok.tolist() == [True, False]


@pytest.mark.parametrize("size", [64, 3 << 20])
def test_sums_are_of_the_copy_that_was_the_last(size: int) -> None:
    owner, reader = kvferry.Node(), kvferry.Node()
    source, into = np.full((2, size), 3, np.uint8), np.zeros(2 * size, np.uint8)
    try:
        cache = owner.register("kv", source, layout="blocks")
        link = reader.link(owner.listen("127.0.0.1:0"))
        target = _core.Target.by_id(cache.id)
        sums = _core.ValueSums.of(np.array([size, size], np.uint64), np.array([5, 6], np.uint64))
        spans = [(size, into.ctypes.data + size, size), (0, into.ctypes.data, size)]
        moves = _core.Moves.spans(np.array(spans, np.int64), sums)
        for _ in range(2):
            source[1] += 1
            link._core.pull(target, None, moves, 20_000, CMA)
            taken = np.frombuffer(sums.taken() or b"", np.uint64)
            assert taken.tolist() == [checksum([source[1].tobytes()], 5), checksum([source[0].tobytes()], 6)]
        link._core.pull(target, None, moves, 20_000, SOCKET)  # a stream, of which its reader takes none
        assert sums.taken() is None and (into.reshape(2, size) == source).all()
    finally:
        reader.close()
        owner.close()


def test_checksum_is_one_of_three_words() -> None:
    with pytest.raises(kvferry.InvalidArgument, match="'auto', 'always', 'never'"):
        kvferry.Pool.private(1 << 20, checksum="sometimes")
