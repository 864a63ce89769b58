"""The pool's store through random steps, against a simple model: what was put where, and what must be true of it.

``make test`` takes some thousand steps; ``KVFERRY_CAMPAIGN=long`` takes two million. A failure names the seed, and
``KVFERRY_TEST_SEED`` starts with it.
"""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.pool.arena import Place
from kvferry.pool.store import CHAIN, Lease, Reservation, Space, Store

LONG = os.environ.get("KVFERRY_CAMPAIGN", "") == "long"
SEED = int(os.environ.get("KVFERRY_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)
STEPS = 250_000 if LONG else 8_000
SEGMENT, CAPACITY = 8 << 10, 64 << 10
QUOTA = 12 << 10
OWNERS = 5


class Value:
    """One saving of a key. ``content`` is what its bytes say; no two are equal."""

    def __init__(self, key: tuple[int, bytes], size: int, expires: float) -> None:
        self.key, self.size, self.expires = key, size, expires
        self.content = object()
        self.parent: Value | None = None
        self.removed = False
        self.copy = False


class Model:
    """``memory`` is what lies at each place: who wrote there last. A value that the store does not find any more has gone
    for a reason that is checked; the model learns of evictions that way alone."""

    def __init__(self, seed: int, policy: str) -> None:
        self.chance = random.Random(f"{seed} {policy}")
        self.now = 0.0
        self.segments: dict[int, int] = {}
        self.memory_left = True
        self.store = Store(CAPACITY, segment_bytes=SEGMENT, policy=policy, add_segment=self.add, drop_segment=self.drop)
        self.spaces = list(map(self.space, range(4)))
        self.memory: dict[int, dict[int, Value]] = {}  # segment, offset
        self.values: dict[tuple[int, bytes], Value] = {}  # published, and neither removed nor expired as far as we know
        self.gone: dict[tuple[int, bytes], str] = {}
        self.saving: dict[Reservation, dict[int, Value]] = {}
        self.leases: dict[Lease, dict[int, Value]] = {}
        self.ended: set[Any] = set()

    def space(self, number: int) -> Space:
        options: list[dict[str, Any]] = [
            {"namespace": "shared", "fingerprint": b"one"},
            {"namespace": "shared", "fingerprint": b"two"},
            {"namespace": "quota", "quota_bytes": QUOTA},
            {"namespace": "apart", "apart": True},
        ]
        return self.store.space(**options[number])

    # --- the memory ---------------------------------------------------------------------------------------------------

    def add(self, number: int, size: int) -> bool:
        if self.memory_left:
            assert number not in self.memory
            self.segments[number], self.memory[number] = size, {}
            assert sum(self.segments.values()) <= CAPACITY
        return self.memory_left

    def drop(self, number: int) -> None:
        del self.segments[number]
        for value in self.memory.pop(number).values():
            self.is_free(value)

    def write(self, place: Place, value: Value) -> None:
        """Nothing that lay there is in use."""
        assert place.offset % 64 == 0
        assert place.offset + place.size <= self.segments[place.segment]
        there = self.memory[place.segment]
        for offset in [offset for offset in there if offset < place.offset + place.size]:
            if offset + there[offset].size > place.offset:
                self.is_free(there.pop(offset))
        there[place.offset] = value

    def is_free(self, value: Value) -> None:
        if self.values.get(value.key) is value:
            assert not self.finds(value), "a live value's place was given away"
        for held in (self.saving, self.leases):
            assert not any(value is other for values in held.values() for other in values.values())

    def read(self, place: Place) -> Value:
        return self.memory[place.segment][place.offset]

    def finds(self, value: Value) -> bool:
        return self.store.exists(self.spaces[value.key[0]], [value.key[1]], self.now) == b"\x01"

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        steps: list[tuple[int, Callable[[], None]]] = [
            (30, self.reserve),
            (30, self.commit),
            (4, self.abort),
            (40, self.lookup),
            (40, self.release),
            (5, self.pass_time),
            (2, self.end_owner),
            (4, self.remove),
            (0.2, self.clear),  # type: ignore[list-item]
            (0.05, self.part),  # type: ignore[list-item]
            (1, self.forget_space),
            (1, self.change_memory),
            (3, self.look),
        ]
        weights = [weight for weight, _ in steps]
        self.chance.choices([step for _, step in steps], weights)[0]()

    def some_keys(self) -> tuple[int, Space, list[bytes]]:
        number = self.chance.randrange(len(self.spaces))
        chain = self.chance.randrange(4)
        begin = self.chance.choice([0, 0, self.chance.randrange(8)])
        keys = [b"%d.%d" % (chain, at) for at in range(begin, begin + self.chance.randint(1, 9))]
        return number, self.spaces[number], keys

    def size_of(self, number: int, key: bytes) -> int:
        """Nearly always the same for a key; a space has equal sizes, sizes of all sorts, or both."""
        if self.chance.random() < 0.003:
            return self.chance.choice([1, SEGMENT, SEGMENT + 5, CAPACITY, CAPACITY + 1])
        odd = random.Random(key).randrange(1, 3000)
        return [512, odd, 640, 512 if odd % 2 else odd][number]

    def owner(self) -> int:
        return self.chance.randrange(OWNERS)

    def reserve(self) -> None:
        number, space, keys = self.some_keys()
        sizes = [self.size_of(number, key) for key in keys]
        parents: Any = self.chance.choice([CHAIN, CHAIN, None, [*keys[1:], None]])
        ttl_ms = self.chance.choice([None, None, 50, 3000])
        until = self.now + self.chance.choice([0.1, 1, 5])
        before = {key: self.values.get((number, key)) for key in keys}
        pending = {
            key for saving in self.saving for key in saving.keys if saving.space is space and key in space.pending
        }
        copy = self.chance.random() < 0.2
        saving = self.store.reserve(
            space, keys, sizes, parents=parents, ttl_ms=ttl_ms, owner=self.owner(), until=until, now=self.now, copy=copy
        )
        for key, size in zip(keys, sizes, strict=True):  # copies make way, whoever reads them
            old = before[key]
            if old is not None and old.copy and (not copy or old.size != size):
                self.lost((number, key), "evicted")
                before[key] = None
        mine = {}
        for at, (key, size, place, outcome) in enumerate(zip(keys, sizes, saving.places, saving.outcomes, strict=True)):
            assert (place is not None) == (outcome == "reserved")
            if outcome == "reserved":
                assert place is not None
                assert place.size == size
                mine[at] = Value((number, key), size, 0)
                mine[at].copy = copy
                self.write(place, mine[at])
            elif outcome in ("present", "size_mismatch"):
                value = before[key]
                assert value is not None
                assert (value.size == size) == (outcome == "present")
            elif outcome == "pending":
                assert key in pending
            else:
                assert outcome == ("oversize" if -(-size // 64) * 64 > (QUOTA if number == 2 else CAPACITY) else "full")
        assert saving.closed == (not mine)
        if mine:
            self.saving[saving] = mine
        self.check_evicted()

    def commit(self) -> None:
        if not self.saving:
            return
        saving = self.chance.choice(list(self.saving))
        mine = self.saving.pop(saving)
        failed = {at: "lost" for at in range(len(saving.keys)) if self.chance.random() < 0.03}
        sums = [mine[at].content if at in mine else None for at in range(len(saving.keys))]
        late = saving.until <= self.now or saving in self.ended
        self.ended.discard(saving)
        outcomes = self.store.commit(saving, failed=failed, checksums=sums, now=self.now)
        for at, value in mine.items():
            if late:
                assert outcomes[at] == "expired"
            elif value.removed:
                assert outcomes[at] == "removed"
            elif at in failed:
                assert outcomes[at] == "lost"
            else:
                assert outcomes[at] == "saved"
                value.expires = self.now + saving.ttl_ms / 1000 if saving.ttl_ms is not None else float("inf")
                key = saving.parents[at] if saving.parents is not None else None
                parent = self.values.get((value.key[0], key)) if key is not None else None
                if parent is not None and parent.copy is not value.copy:
                    parent = None
                value.parent = parent if parent is not None and self.finds(parent) else None
                self.values[value.key] = value
                self.gone.pop(value.key, None)
        assert self.store.commit(saving, now=self.now) is outcomes

    def abort(self) -> None:
        if self.saving:
            saving = self.chance.choice(list(self.saving))
            del self.saving[saving]
            self.ended.discard(saving)
            self.store.abort(saving)
            assert "reserved" not in saving.outcomes

    def lookup(self) -> None:
        number, space, keys = self.some_keys()
        sizes = [self.size_of(number, key) for key in keys] if self.chance.random() < 0.5 else None
        until = self.now + self.chance.choice([0.1, 1, 5])
        found = self.store.exists(space, keys, self.now)
        lease = self.store.lookup(space, keys, sizes=sizes, owner=self.owner(), until=until, now=self.now)
        mine = {}
        for at, key in enumerate(keys):
            value, place, outcome = self.values.get((number, key)), lease.places[at], lease.outcomes[at]
            assert found[at] == (outcome in ("hit", "size_mismatch"))
            assert (place is not None) == (outcome == "hit")
            if outcome == "hit":
                assert value is not None
                assert place is not None
                assert value.expires > self.now
                assert self.read(place) is value, "stale"
                assert lease.checksums[at] is value.content
                assert place.size == value.size
                assert sizes is None or sizes[at] == value.size
                mine[at] = value
            elif outcome == "size_mismatch":
                assert value is not None
                assert sizes is not None
                assert sizes[at] != value.size
            elif outcome == "pending":
                assert value is None
                assert any(key in saving.keys and saving.space is space for saving in self.saving)
            else:
                assert value is None
                assert outcome in (self.gone.get((number, key)), "never_saved")  # ghosts are forgotten, now and then
        if mine:
            self.leases[lease] = mine
        assert lease.closed == (not mine)

    def release(self) -> None:
        if self.leases:
            lease = self.chance.choice(list(self.leases))
            for at, value in self.leases[lease].items():
                place = lease.places[at]
                assert place is not None
                assert self.read(place) is value, "overwritten under its reader"
            del self.leases[lease]
            self.ended.discard(lease)
            self.store.release(lease)

    def pass_time(self) -> None:
        self.now += self.chance.choice([0, 0.01, 0.5])
        ended = self.store.expire(self.now)
        due = {held for held in (*self.saving, *self.leases) if held.until <= self.now and held not in self.ended}
        assert set(ended) == due
        self.ended |= due
        for key, value in list(self.values.items()):
            if value.expires <= self.now:
                assert not self.finds(value)
                self.lost(key, "expired")
        assert self.store.next_end > self.now

    def end_owner(self) -> None:
        owner = self.owner()
        ended = self.store.end_owner(owner)
        assert set(ended) == {held for held in (*self.saving, *self.leases) if held.owner == owner}
        self.ended |= set(ended)

    def remove(self) -> None:
        number, space, keys = self.some_keys()
        found = self.store.exists(space, keys, self.now)
        copies = sum(self.values[number, key].copy for key, there in zip(keys, found, strict=True) if there)
        being_saved = [key for key in keys if key in space.pending and not space.pending[key].copy]
        assert self.store.remove(space, keys) == sum(found) - copies + len(being_saved)
        self.forget(number, keys)
        assert not any(self.store.exists(space, keys, self.now))

    def clear(self) -> None:
        name = self.chance.choice(["shared", "quota", "apart", "nobody's"])
        self.store.clear(name)
        for number, space in enumerate(self.spaces):
            if space.namespace.name == name:
                assert not space.entries
                self.forget(number, [key for at, key in self.values if at == number])
                self.forget(number, [key for saving in self.saving if saving.space is space for key in saving.keys])

    def forget_space(self) -> None:
        number = self.chance.randrange(len(self.spaces))
        space = self.spaces[number]
        there = any(key[0] == number and self.finds(value) for key, value in self.values.items())
        if self.store.forget(space):
            assert not there
            self.spaces[number] = self.space(number)
            assert self.spaces[number] is not space
        else:
            held = space.namespace.bytes if space.namespace.spaces == [space] else space.pending
            assert there or held

    def part(self) -> None:
        """The first time, what it holds goes to a policy of its own, which is full before the quota is reached."""
        assert self.store.space("shared", b"two", quota_bytes=CAPACITY + 64) is self.spaces[1]

    def forget(self, number: int, keys: list[bytes]) -> None:
        for key in keys:
            value = self.values.get((number, key))
            if value is not None:
                self.lost((number, key), "removed")
        for mine in self.saving.values():
            for value in mine.values():
                if value.key[0] == number and value.key[1] in keys:
                    value.removed = True

    def lost(self, key: tuple[int, bytes], reason: str) -> None:
        value = self.values.pop(key)
        self.gone[key] = reason
        for other in self.values.values():
            if other.parent is value:
                other.parent = None

    def change_memory(self) -> None:
        self.memory_left = self.chance.random() < 0.7

    def look(self) -> None:
        """The count of everything, and the one order that holds."""
        statistics = self.store.statistics()
        assert statistics.taken_bytes <= statistics.segments_bytes == sum(self.segments.values())
        assert statistics.namespaces["quota"].bytes <= QUOTA
        assert sum(one.bytes for one in statistics.namespaces.values()) == statistics.taken_bytes
        assert statistics.pending == sum(len(space.pending) for space in self.spaces)
        assert statistics.leases == len(self.leases)
        there = [value for value in self.values.values() if self.finds(value)]
        assert statistics.copies == sum(value.copy for value in there)
        assert statistics.keys == len(there) - statistics.copies
        self.check_evicted()

    def check_evicted(self) -> None:
        """Who is not found any more, without the model having a reason, was evicted: nobody's parent, and not held."""
        evicted: dict[tuple[int, bytes], Value] = {}
        for number, space in enumerate(self.spaces):
            mine = [value for value in self.values.values() if value.key[0] == number]
            found = self.store.exists(space, [value.key[1] for value in mine], self.now)
            evicted.update((value.key, value) for value, there in zip(mine, found, strict=True) if not there)
        for value in evicted.values():
            assert not any(value is other for mine in self.leases.values() for other in mine.values())
        for child in self.values.values():
            assert child.parent is None or child.key in evicted or child.parent.key not in evicted, (
                "parent before child"
            )
        for key in evicted:
            self.lost(key, "evicted")

    def finish(self) -> None:
        """When all have gone, nothing is left."""
        self.saving.clear()
        self.leases.clear()
        for owner in range(OWNERS):
            for held in self.store.end_owner(owner):
                if isinstance(held, Lease):
                    self.store.release(held)
                else:
                    self.store.abort(held)
        self.values.clear()
        while self.store._evict_some():
            pass
        statistics = self.store.statistics()
        assert (statistics.keys, statistics.copies) == (0, 0), "somebody cannot be evicted though nobody holds it"
        self.store.trim()
        statistics = self.store.statistics()
        assert (statistics.keys, statistics.pending, statistics.leases, statistics.taken_bytes) == (0, 0, 0, 0)
        assert self.segments == {}
        assert not self.store._owners
        assert all(
            policy.bytes == 0 and policy.victim() is None for policy in (*self.store._policies, *self.store._copies)
        )
        self.memory_left = True
        saving = self.store.reserve(self.spaces[0], [b"all"], [CAPACITY], owner=1, until=self.now + 1, now=self.now)
        assert saving.outcomes == ["reserved"]


@pytest.mark.deadline(3600 if LONG else 60)
@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
@pytest.mark.parametrize("round", range(4 if LONG else 1))
def test_no_random_walk_finds_anything_stale_overlapping_leaked_or_out_of_order(policy: str, round: int) -> None:
    seed = SEED + round
    model = Model(seed, policy)
    number = 0
    try:
        for number in range(STEPS):  # noqa: B007 - told below
            model.step()
        statistics = model.store.statistics()
        model.finish()
    except BaseException:
        print(f"KVFERRY_TEST_SEED={seed}, policy {policy}, step {number}")
        raise
    assert statistics.evictions > STEPS / 100
    assert statistics.hits > STEPS / 100
    print(f"seed {seed}, {policy}: {STEPS:,} steps, {statistics.hits:,} hits, {statistics.evictions:,} evictions")
