"""The pool's arena against a simple model: places as intervals."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.pool.arena import GRANULE, Arena, Place, Spot

CAPACITY, SEGMENT = 64 << 10, 16 << 10


class Segments:
    """What the owner of the memory sees."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.asked = 0
        self.refuses = False

    def add(self, number: int, size: int) -> bool:
        self.asked += 1
        if self.refuses:
            return False
        assert number not in self.sizes
        self.sizes[number] = size
        return True

    def drop(self, number: int) -> None:
        del self.sizes[number]


def make(capacity: int = CAPACITY, segment: int = SEGMENT) -> tuple[Arena, Segments]:
    segments = Segments()
    return Arena(capacity, segment_bytes=segment, add_segment=segments.add, drop_segment=segments.drop), segments


class ArenaAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arena, self.segments = make()
        self.taken: list[tuple[Spot, int, str]] = []

    @rule(
        size=st.one_of(st.sampled_from([64, 100, 1000, 4096, SEGMENT, SEGMENT + 1]), st.integers(1, 2 * SEGMENT)),
        times=st.integers(1, 8),
        group=st.sampled_from(["", "", "", "apart"]),
    )
    def take(self, size: int, times: int, group: str) -> None:
        for _ in range(times):
            spot = self.arena.take(size, group)
            if spot is not None:
                self.taken.append((spot, size, group))
            elif not self.taken:
                assert size > CAPACITY

    @rule(size=st.sampled_from([64, 1000, 4096, SEGMENT + 1]), count=st.integers(0, 40))
    def take_all(self, size: int, count: int) -> None:
        slabs, indices = self.arena.take_all(size, count)
        assert len(slabs) == len(indices) <= count
        self.taken += [(spot, size, "") for spot in zip(slabs, indices, strict=True)]
        if len(slabs) < count:
            assert self.arena.take(size) is None

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), times=st.integers(1, 8))
    def give(self, data: Any, times: int) -> None:
        for _ in range(min(times, len(self.taken))):
            spot, _, _ = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
            self.arena.give(*spot)

    @rule()
    def trim(self) -> None:
        self.arena.trim()
        assert set(self.segments.sizes) == {place.segment for place, _ in self.places()}

    def places(self) -> list[tuple[Place, str]]:
        return [(self.arena.place(spot, size), group) for spot, size, group in self.taken]

    @invariant()
    def no_two_places_share_a_byte_and_none_leaves_its_segment(self) -> None:
        ends: dict[int, int] = {}
        groups: dict[int, str] = {}
        for place, group in sorted(self.places()):
            assert place.offset % GRANULE == 0
            assert place.offset >= ends.get(place.segment, 0)
            ends[place.segment] = place.offset + place.size
            assert ends[place.segment] <= self.segments.sizes[place.segment]
            assert groups.setdefault(place.segment, group) == group

    @invariant()
    def it_never_takes_more_than_its_capacity(self) -> None:
        assert self.arena.segments == self.segments.sizes
        assert self.arena.segments_bytes == sum(self.segments.sizes.values()) <= CAPACITY
        assert self.arena.taken_bytes == sum(-(-size // GRANULE) * GRANULE for _, size, _ in self.taken)

    def teardown(self) -> None:
        for spot, _, _ in self.taken:
            self.arena.give(*spot)
        assert len(self.segments.sizes) <= 1  # one that is empty is kept
        self.arena.trim()
        assert not self.segments.sizes
        assert self.arena.take(CAPACITY, "whoever") is not None


TestArenaAgainstModel = ArenaAgainstModel.TestCase
TestArenaAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(size=st.integers(1, SEGMENT))
def test_equal_values_fill_a_segment_but_for_less_than_one_of_them(size: int) -> None:
    arena, segments = make(SEGMENT, SEGMENT)
    spots = []
    while (spot := arena.take(size)) is not None:
        spots.append(spot)
    assert len(spots) == SEGMENT // (-(-size // GRANULE) * GRANULE)
    for spot in spots:
        arena.give(*spot)
    assert arena.take(SEGMENT) is not None
    assert segments.asked == 1


def test_memory_is_taken_as_it_fills() -> None:
    arena, segments = make()
    assert not segments.sizes
    for _ in range(SEGMENT // 1024):
        arena.take(1024)
    assert list(segments.sizes.values()) == [SEGMENT]
    arena.take(1024)
    assert list(segments.sizes.values()) == [SEGMENT, SEGMENT]


def test_a_value_larger_than_a_segment_has_one_of_its_own() -> None:
    arena, segments = make()
    spot = arena.take(SEGMENT + 100)
    assert spot is not None
    assert segments.sizes == {0: SEGMENT + 128}
    assert arena.place(spot, SEGMENT + 100) == Place(0, 0, SEGMENT + 100)


def test_the_last_segment_is_what_is_left() -> None:
    arena, segments = make(SEGMENT + 1000)
    assert arena.take(SEGMENT) is not None
    assert arena.take(900) is not None
    assert segments.sizes == {0: SEGMENT, 1: 960}


def test_an_empty_segment_makes_way_for_a_group_that_needs_one() -> None:
    arena, segments = make(SEGMENT)
    spot = arena.take(100)
    assert spot is not None
    assert arena.take(100, "apart") is None
    arena.give(*spot)
    assert arena.take(100, "apart") is not None
    assert list(segments.sizes) == [1]


def test_one_that_comes_and_goes_costs_no_segment_each_time() -> None:
    arena, segments = make()
    for _ in range(100):
        spot = arena.take(SEGMENT)
        assert spot is not None
        arena.give(*spot)
    assert segments.asked == 1


def test_without_memory_there_is_no_place_and_nobody_is_asked_again_before_it_is_time() -> None:
    arena, segments = make()
    segments.refuses = True
    assert arena.take(100) is None
    assert arena.take(100) is None
    assert segments.asked == 1
    segments.refuses = False
    arena.ask_again()
    assert arena.take(100) is not None


@pytest.mark.parametrize("kept", range(4))
def test_what_is_free_side_by_side_is_one_piece(kept: int) -> None:
    arena, _ = make(SEGMENT)
    spots = [arena.take(SEGMENT // 4 - 64 * at) for at in range(4)]
    for at, spot in enumerate(spots):
        if at != kept:
            assert spot is not None
            arena.give(*spot)
    assert arena.take(SEGMENT // 4 * 2 - 64 * 4) is not None
