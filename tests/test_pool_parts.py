"""A batch goes in parts that overlap: the node looks for the places of one while the bytes of another are moved."""

import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry.errors import KvferryError
from kvferry.pool import client
from kvferry.pool.moving import Moving, Way
from kvferry.pool.peer import Peer, Unreachable
from pool_support import block_bytes_of, names, until

SIZE = 8 << 10


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[kvferry.Pool]:
    """A pool whose batches go in parts of two values."""
    monkeypatch.setattr(client, "BYTES_AT_A_TIME", 2 * SIZE)
    with kvferry.Pool.private(32 << 20) as pool:
        yield pool


def test_every_byte_of_every_part_arrives(pool: kvferry.Pool) -> None:
    values, into, keys = block_bytes_of(1, 9, SIZE), np.zeros((11, SIZE), np.uint8), names(9)
    assert pool.save(keys, buffers=list(values)).outcomes == ["saved"] * 9
    assert pool.save([*keys, b"new"], buffers=[*values, values[0]]).outcomes == ["present"] * 9 + ["saved"]
    loaded = pool.load([b"none", *keys], buffers=list(into[:10]))
    assert loaded.outcomes == ["never_saved", *["hit"] * 9] and loaded.size_bytes == 9 * SIZE
    assert np.array_equal(into[1:10], values) and not into[0].any() and not into[10].any()
    assert pool.exists(keys).prefix == 9 and pool.remove(keys) == 9


def test_the_next_part_is_asked_for_before_the_bytes_of_one_have_moved(
    pool: kvferry.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(owner: Any, name: str, word: Any) -> None:
        plain = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            order.append(word(args))
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    noted(Peer, "asking", lambda args: type(args[1]).__name__)
    noted(Moving, "end", lambda args: "end")
    values, keys = block_bytes_of(2, 6, SIZE), names(6)
    assert pool.save(keys, buffers=list(values), chain=True).prefix == 6
    assert order == ["Reserve", "Reserve", "Reserve", "end", "Commit", "end", "Commit", "end", "Commit"]
    order.clear()
    assert pool.load(keys, buffers=list(values)).prefix == 6
    assert order == ["Lookup", "Lookup", "Lookup", "end", "end", "end"]


@pytest.mark.parametrize("verb", ["load", "save"])
def test_what_another_thread_carries_out_can_be_stopped(
    pool: kvferry.Pool, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    values = block_bytes_of(8, 1, SIZE)
    begun: list[Moving] = []
    monkeypatch.setattr(Moving, "begin", lambda moving: begun.append(moving) or begin(moving))
    begin = Moving._begin
    assert pool.save([b"a"], buffers=list(values)).prefix == 1 and not begun  # by the caller himself
    assert (
        getattr(pool, f"{verb}_async")([b"a" if verb == "load" else b"b"], buffers=list(values)).wait(9000).prefix == 1
    )
    assert len(begun) == 1


def test_a_chain_goes_on_from_part_to_part(pool: kvferry.Pool) -> None:
    values, keys = block_bytes_of(3, 7, SIZE), names(7)
    assert pool.save(keys, buffers=list(values), chain=True).prefix == 7
    (space,) = pool._keep._node._spaces.values()
    entries = [space.entries[key] for key in keys]
    assert [entry.parent for entry in entries] == [None, *entries[:-1]]


def test_a_part_that_fails_leaves_the_others_as_they_are(pool: kvferry.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    values, into, keys = block_bytes_of(4, 8, SIZE), np.zeros((8, SIZE), np.uint8), names(8)
    plain, ended = Moving.end, []

    def end(moving: Moving) -> str:
        ended.append(plain(moving))
        return "lease_lost" if len(ended) == 2 else ended[-1]

    monkeypatch.setattr(Moving, "end", end)
    assert pool.save(keys, buffers=list(values)).outcomes == ["saved"] * 2 + ["lease_lost"] * 2 + ["saved"] * 4
    assert pool.exists(keys).outcomes == ["hit"] * 2 + ["never_saved"] * 2 + ["hit"] * 4
    loaded = pool.load(keys, buffers=list(into))
    assert loaded.outcomes == ["hit"] * 2 + ["never_saved"] * 2 + ["hit"] * 4
    assert np.array_equal(into[4:], values[4:])


def test_a_node_that_is_lost_in_the_middle_costs_what_is_left(
    pool: kvferry.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, into, keys = block_bytes_of(5, 10, SIZE), np.zeros((10, SIZE), np.uint8), names(10)
    assert pool.save(keys, buffers=list(values)).prefix == 10
    plain, asked = Peer.asking, []

    def asking(peer: Peer, request: Any, *rest: Any) -> Any:
        asked.append(len(request.keys))
        if len(asked) == 3:
            raise Unreachable("timeout", "as if")
        return plain(peer, request, *rest)

    monkeypatch.setattr(Peer, "asking", asking)
    loaded = pool.load(keys, buffers=list(into))
    assert loaded.outcomes == ["hit"] * 4 + ["timeout"] * 6
    assert asked == [2, 2, 2]  # and nothing more of it
    assert np.array_equal(into[:4], values[:4]) and not into[4:].any()


@pytest.mark.parametrize("verb", ["load", "save"])
def test_a_call_that_is_interrupted_ends_with_nothing_under_way(
    pool: kvferry.Pool, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    values, keys = block_bytes_of(6, 8, SIZE), names(8)
    if verb == "load":
        assert pool.save(keys, buffers=list(values)).prefix == 8
    moving: list[Moving] = []
    plain_begin, plain_end = Moving._begin, Moving.end

    def begin(one: Moving) -> None:
        moving.append(one)
        plain_begin(one)

    def end(one: Moving) -> str:
        if len(moving) == 3:
            raise KeyboardInterrupt
        return plain_end(one)

    monkeypatch.setattr(Moving, "_begin", begin)
    monkeypatch.setattr(Moving, "end", end)
    into = values.copy()
    with pytest.raises(KeyboardInterrupt):
        getattr(pool, verb)(keys, buffers=list(into), timeout_ms=500)
    assert len(moving) == 3 and all(one._begun and one.ended for one in moving)
    assert np.array_equal(into, values)
    monkeypatch.undo()
    # What the call had reserved is free again by its deadline at the latest.
    until(lambda: pool.save(keys, buffers=list(values)).prefix == 8)
    into[:] = 0
    assert pool.load(keys, buffers=list(into)).prefix == 8 and np.array_equal(into, values)


class Interrupted(BaseException):
    pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may fall into a finalizer
def test_whatever_a_signal_handler_interrupts_nothing_moves_afterwards(pool: kvferry.Pool) -> None:
    """The signal comes at any moment of the call, also in the middle of beginning to move a part."""
    values, into, keys = block_bytes_of(7, 16, SIZE), np.zeros((16, SIZE), np.uint8), names(16)
    assert pool.save(keys, buffers=list(values)).prefix == 16
    chance, interrupted = np.random.default_rng(7), 0

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, 4e-3))
                pool.load(keys, buffers=list(into))
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                interrupted += 1
            into[:] = 17
            time.sleep(0.001)
            assert (into == 17).all()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 20
    assert pool.load(keys, buffers=list(into)).prefix == 16 and np.array_equal(into, values)


def test_giving_up_waits_for_a_transfer_that_takes_its_time() -> None:
    order: list[str] = []

    class Transfer:
        def done(self) -> bool:
            return order.count("waited") == 2

        def cancel(self) -> bool:
            order.append("cancelled")
            return True

        def wait(self, timeout_ms: int) -> None:
            order.append("waited")
            raise KvferryError("cancelled")

    way = Way(lambda: None, lambda moves, left_ms: Transfer(), (), ())  # type: ignore[arg-type, return-value]
    one = Moving(way, np.array([[0, 1, 1]], np.uint64), 1e12)
    one.begin()
    one.give_up()
    one.give_up()
    assert order == ["cancelled", "waited"] * 2
