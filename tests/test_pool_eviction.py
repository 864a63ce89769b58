"""Who goes when the pool needs room, seen through a store of four equal values."""

import numpy as np
import pytest

from kvferry.pool.eviction import LRU, S3FIFO, Entry, Ghosts
from kvferry.pool.store import CHAIN, Lease, Space, Store


class Four:
    """A store for ``room`` values of 64 bytes, one space; keys are letters."""

    def __init__(self, policy: str, room: int = 4) -> None:
        self.store = Store(
            64 * room,
            segment_bytes=64,
            policy=policy,
            add_segment=lambda number, size: None,
            drop_segment=lambda number: None,
        )
        self.space: Space = self.store.space("test")

    def save(self, letters: str, chain: bool = False) -> list[str]:
        keys = [letter.encode() for letter in letters]
        parents = CHAIN if chain else None
        saving = self.store.reserve(self.space, keys, [64] * len(keys), parents=parents, owner=1, until=9, now=0)
        return self.store.commit(saving, now=0)

    def pin(self, letters: str) -> Lease:
        return self.store.lookup(self.space, [letter.encode() for letter in letters], owner=1, until=9, now=0)

    def load(self, letters: str) -> list[str]:
        lease = self.pin(letters)
        self.store.release(lease)
        return lease.outcomes

    def there(self) -> str:
        return "".join(sorted(key.decode() for key in self.space.entries))


@pytest.fixture(params=["lru", "s3fifo"])
def four(request: pytest.FixtureRequest) -> Four:
    return Four(request.param)


def test_lru_gives_what_was_not_used_for_longest() -> None:
    four = Four("lru")
    for letter in "abcd":
        four.save(letter)
    four.load("a")
    four.save("e")
    assert four.there() == "acde"
    four.load("c")
    four.save("fg")
    assert four.there() == "cefg"


def test_saving_what_is_there_is_a_use() -> None:
    four = Four("lru")
    for letter in "abcd":
        four.save(letter)
    assert four.save("a") == ["present"]
    four.save("e")
    assert four.there() == "acde"


def test_s3fifo_gives_what_was_used_once_before_what_is_used_again_and_again() -> None:
    four = Four("s3fifo")
    four.save("ab")
    for _ in range(2):
        four.load("a")
    for letter in "cdefgh":
        four.save(letter)
    assert "a" in four.there()
    assert "b" not in four.there()


def test_s3fifo_remembers_what_went_early() -> None:
    four = Four("s3fifo")
    for letter in "abcde":
        four.save(letter)
    assert four.load("a") == ["evicted"]
    four.save("a")  # comes back, and stays while new ones pass by
    for letter in "fghijk":
        four.save(letter)
    assert "a" in four.there()


def test_a_chain_is_given_up_from_its_end(four: Four) -> None:
    four.save("abcd", chain=True)
    for new, there in ("w", "abcw"), ("x", "abwx"), ("y", "awxy"):
        four.save(new)
        assert four.there() == there


def test_a_parent_stays_while_its_child_is_there(four: Four) -> None:
    four.save("ab", chain=True)
    lease = four.pin("b")  # of all four, the child alone is used, and cannot go
    four.save("cd")
    four.save("efgh")
    assert four.there()[:2] == "ab"
    four.store.release(lease)
    four.save("ijklmnop")
    assert not {"a", "b"} & set(four.there())


def test_what_is_being_read_stays_and_goes_first_afterwards(four: Four) -> None:
    four.save("abcd")
    leases = [four.pin("abcd") for _ in range(2)]
    assert four.save("e") == ["full"]
    for lease in leases:
        assert four.save("e") == ["full"]
        four.store.release(lease)
    assert four.save("e") == ["saved"]


def test_a_forgotten_entry_costs_no_memory_for_long() -> None:
    for policy in (LRU(), S3FIFO()):
        four = Four("lru", 10)
        four.save("a")
        (entry,) = four.space.entries.values()
        kept = []
        for number in range(1000):
            new = Entry(b"", 0, entry.slab, number, 64)
            policy.add([new], [False])
            policy.touch([new])
            if number % 10:
                new.alive = False
                policy.remove([new])
            else:
                kept.append(new)
        assert policy.bytes == 64 * len(kept)
        queues = policy._queue if isinstance(policy, LRU) else [*policy._small, *policy._main]
        assert len(queues) <= 2 * len(kept) + 128
        gone = []
        while victim := policy.victim():
            gone.append(victim[0])
        assert sorted(map(id, gone)) == sorted(map(id, kept))
        assert policy.bytes == 0


def test_ghosts_are_about_as_many_as_entries_and_the_oldest_go_first() -> None:
    ghosts, keys = Ghosts(), [hash(b"%d" % number) for number in range(100_000)]
    for key in keys:
        ghosts.put(key, "evicted", 20_000)
    remembered = [at for at, key in enumerate(keys) if ghosts.get(key)]
    assert 10_000 < len(remembered) <= 2 * 20_000
    assert sum(ghosts.get(key) is not None for key in keys[-5000:]) > 4950
    assert sum(ghosts.get(key) is not None for key in keys[:20_000]) < 1000


def test_ghosts_that_come_at_once_are_those_that_come_one_after_the_other() -> None:
    chance = np.random.default_rng(3)
    one, many = Ghosts(), Ghosts()
    for count in (1, 3, 5000, 0, 20_000, 100, 100_000):
        keys = chance.integers(-(1 << 63), 1 << 63, count)
        keys[::5] = keys[0] if count else 0  # a bucket that gets more than it has room for
        while count > len(one._words):
            one._grow()
        for key in keys.tolist():
            one.put(key, ("expired", "removed")[count % 2], 0)
        many.put_all(keys, ("expired", "removed")[count % 2])
        assert many._words == one._words
    many._empty(2 * len(one._words))
    for word in filter(None, reversed(one._words)):
        many._push(word)
    one._grow()
    assert many._words == one._words


def test_ghosts_that_are_taken_at_once_are_those_that_are_taken_one_after_the_other() -> None:
    chance = np.random.default_rng(4)
    one, many = Ghosts(), Ghosts()
    assert one.take_all(np.arange(100), "removed") == [False] * 100
    for count in (3000, 10, 3000, 17, 3000, 3000):
        keys = chance.integers(0, 10_000, count) * 7_777_777_777_777 - (1 << 62)
        for ghosts in (one, many):
            ghosts.put_all(keys, ("removed", "early")[count % 2])
            ghosts.put_all(keys[::3], "expired")
        wanted = np.unique(chance.integers(0, 10_000, count) * 7_777_777_777_777 - (1 << 62))
        chance.shuffle(wanted)
        taken = [one.take(key) == "removed" for key in wanted.tolist()]
        assert many.take_all(wanted, "removed") == taken
        assert many._words == one._words
        assert any(taken) or count < 100


def test_a_ghost_that_is_put_again_says_the_newest_reason_and_one_that_is_dropped_nothing() -> None:
    ghosts = Ghosts()
    for live in (0, 10_000):  # which grows it
        ghosts.put(-7, "evicted", live)
        ghosts.put(7, "expired", live)
        ghosts.put(-7, "removed", live)
        assert (ghosts.get(-7), ghosts.get(7), ghosts.get(8)) == ("removed", "expired", None)
    assert ghosts.take(-7) == "removed"
    assert ghosts.get(-7) is None
    assert ghosts.get(7) == "expired"
