"""A Mooncake Store in the same turns as the pool: which commands its driver is given, and the rows that come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from bench import Bench
from limits import Work
from peers import Peer, Way
from table import Row
from turns import Contender, Figure, Turns, Value


def opened(bench: Bench, stack: ExitStack, ways: Sequence[Way], work: Work, values: int) -> list[Peer]:
    """The store run in each of these ways, with that many values in it, until the stack ends; those that run here."""
    peers = []
    for way in ways:
        peer = bench.open_peer(way, work) if way.package in bench.peer_pythons else None
        if peer:
            stack.callback(peer.close)
            peer.ask(f"save {values}")
            peers.append(peer)
    return peers


def batches(peers: Sequence[Peer], verb: str, values: int) -> list[Contender]:
    """GB/s of all the values, loaded or saved in one call; the bytes are compared each time."""

    def value(answer: Any, gigabytes: float) -> Value:
        return Value(gigabytes / answer["seconds"], answer["cpu_s"] / gigabytes)

    return [_asked(peer, f"{verb} {values}", lambda got, p=peer: value(got, p.work.size_bytes / 1e9)) for peer in peers]


def latencies(peers: Sequence[Peer], command: str, value: Callable[[Any], Value]) -> list[Contender]:
    return [_asked(peer, command, lambda answer: value(answer["us"])) for peer in peers]


def _asked(peer: Peer, command: str, value: Callable[[Any], Value]) -> Contender:
    def measured() -> Value | None:
        answer = peer.ask(command)
        return value(answer) if answer else None

    return Contender(peer.way.name, measured)


def against_mooncake(
    case: str, transport: str, unit: str, mine: Figure, turns: Turns, *, as_fast: bool = False
) -> Iterator[Row]:
    """Ours against the store's best way of the same turns, where it took part; judged if we are to be ``as_fast``."""
    if best := turns.best_of("mooncake"):
        name, figure = best
        target, met = ("<= mooncake's", mine.median <= figure.median) if as_fast else ("", None)
        yield Row(
            f"{case}:mooncake", transport, unit, mine, name, figure, mine.median / figure.median, target, met,
            steady=turns.steady, attempts=turns.attempts,
        )  # fmt: skip
