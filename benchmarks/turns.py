"""Measuring in turns: which contender goes when, when baselines are too unlike to be believed, what a figure is.

Knows nothing of processes or transports; a contender is a name and a function that gives one value.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

ALIKE = 1.10  # baselines before, between and after may differ by this factor


@dataclass(frozen=True, slots=True)
class Value:
    """What one round gave: GB/s or microseconds, and whatever else was seen with it."""

    value: float
    cpu_s_per_gb: float | None = None
    p99: float | None = None


@dataclass(slots=True)
class Figure:
    """The values of one contender over its rounds."""

    values: list[float] = field(default_factory=list)
    cpu_s_per_gb: list[float] = field(default_factory=list)
    p99s: list[float] = field(default_factory=list)
    higher_is_better: bool = True

    def add(self, value: Value | None) -> None:
        if value is None:
            return
        self.values.append(value.value)
        if value.cpu_s_per_gb is not None:
            self.cpu_s_per_gb.append(value.cpu_s_per_gb)
        if value.p99 is not None:
            self.p99s.append(value.p99)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def best(self) -> float:
        return max(self.values) if self.higher_is_better else min(self.values)

    @property
    def cpu(self) -> float | None:
        return statistics.median(self.cpu_s_per_gb) if self.cpu_s_per_gb else None

    @property
    def p99(self) -> float | None:
        return statistics.median(self.p99s) if self.p99s else None


@dataclass(frozen=True, slots=True)
class Contender:
    """``most_rounds`` bounds a slow one; 0 means every round. A round may give nothing."""

    name: str
    round: Callable[[], Value | None]
    most_rounds: int = 0


@dataclass(slots=True)
class Turns:
    """What a run in turns gave: the baseline first, then the others by name."""

    baseline: Figure
    others: dict[str, Figure]
    drift: float  # how far the baselines before, between and after lie apart, as a factor
    attempts: int = 1

    def best_of(self, package: str) -> tuple[str, Figure] | None:
        """The fastest of the ways in which a peer was run, and its name; None where none gave a value."""
        ways = [(name, figure) for name, figure in self.others.items() if name.startswith(package) and figure.values]
        best = max if self.baseline.higher_is_better else min
        return best(ways, key=lambda way: way[1].median, default=None)

    @property
    def steady(self) -> bool:
        return self.drift <= ALIKE


def in_turns(baseline: Contender, others: Sequence[Contender], rounds: int, *, higher_is_better: bool = True) -> Turns:
    """baseline, each other, baseline, each other, …, baseline."""
    turns = Turns(
        Figure(higher_is_better=higher_is_better),
        {other.name: Figure(higher_is_better=higher_is_better) for other in others},
        drift=1.0,
    )
    turns.baseline.add(baseline.round())
    for number in range(rounds):
        for other in others:
            if not other.most_rounds or number < other.most_rounds:
                turns.others[other.name].add(other.round())
        turns.baseline.add(baseline.round())
    turns.drift = drift(turns.baseline.values)
    return turns


def drift(values: Sequence[float]) -> float:
    """Largest over smallest of the medians of the first, the middle and the last third."""
    third = max(1, len(values) // 3)
    middle = (len(values) - third) // 2
    parts = [values[:third], values[middle : middle + third], values[-third:]]
    medians = [statistics.median(part) for part in parts]
    return max(medians) / min(medians)


def until_steady(measure: Callable[[], Turns], attempts: int) -> Turns:
    """Repeat a run whose baselines differ too much, a bounded number of times; the steadiest is kept."""
    runs: list[Turns] = []
    while len(runs) < attempts and not (runs and runs[-1].steady):
        runs.append(measure())
    steadiest = min(runs, key=lambda run: run.drift)
    steadiest.attempts = len(runs)
    return steadiest
