"""The cases that move 128 or 256 MiB a round: every transport, in one piece and scattered, pulled and pushed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from bench import Bench
from exchange import Sample
from limits import KIB, MIB, Work, one_piece, scattered
from pair import Pair, place
from peers import MOONCAKE_TCP, NIXL_SAME_HOST, NIXL_TCP, Peer, Way
from table import Row
from turns import Contender, Figure, Turns, Value, in_turns, until_steady

SHAPES = {
    "256MiB": one_piece(256 * MIB),
    "4096x32KiB": scattered(4096, 32 * KIB, slots=8192),
    "65536x4KiB": scattered(65536, 4 * KIB, slots=65536),
}
LIMIT_NAMES = {
    "memcpy": "memcpy from the owner's shared pages",
    "gather": "plain gather loop over the owner's shared pages",
    "attach": "batched process_vm_readv",
    "tcp": "one raw TCP socket",
}


@dataclass(frozen=True, slots=True)
class Bulk:
    """One case: a shape over a transport, the limit it chases and how much of it is to be reached."""

    transport: str
    shape: str
    limit: str
    reach: float
    push: bool = False
    apart: bool = False  # over TCP between two networks, like between two hosts
    peers: tuple[tuple[str, float], ...] = ()  # (package, how many times its figure is to be reached)

    @property
    def name(self) -> str:
        return ("tcp" if self.apart else self.transport) + f"-{self.shape}" + ("-push" if self.push else "")

    @property
    def work(self) -> Work:
        return SHAPES[self.shape]


CASES = [
    Bulk("map", "256MiB", "memcpy", 0.90, peers=(("nixl", 0),)),
    Bulk("map", "256MiB", "memcpy", 0.90, push=True),
    Bulk("map", "4096x32KiB", "gather", 0.95, peers=(("nixl", 1.7),)),
    Bulk("map", "65536x4KiB", "gather", 0.95, peers=(("nixl", 4.0),)),
    Bulk("cma", "256MiB", "attach", 0.95),
    Bulk("cma", "4096x32KiB", "attach", 0.95),
    Bulk("cma", "65536x4KiB", "attach", 0.95),
    Bulk("socket", "256MiB", "tcp", 0.95, peers=(("nixl", 2.5), ("mooncake", 1.2))),
    Bulk("socket", "4096x32KiB", "tcp", 0.85, peers=(("nixl", 0), ("mooncake", 0))),
    Bulk("socket", "65536x4KiB", "tcp", 0.60, peers=(("nixl", 0),)),
    Bulk("socket", "256MiB", "tcp", 0.95, apart=True, peers=(("nixl", 2.5), ("mooncake", 1.2))),
    Bulk("socket", "4096x32KiB", "tcp", 0.85, apart=True),
    Bulk("socket", "65536x4KiB", "tcp", 0.60, apart=True),
]


def run(bench: Bench, case: Bulk) -> Iterator[Row]:
    """With one thread against one thread, peers in the same turns; then with kvferry's default against as many."""
    yield from _measure(bench, case, threads=1)
    if bench.threads > 1:
        yield from _measure(bench, case, threads=bench.threads)


def _measure(bench: Bench, case: Bulk, threads: int) -> Iterator[Row]:
    one = threads == 1
    setup = bench.setup(case.work, case.transport, copy_threads=1 if one else 0, apart=case.apart)
    limit_threads = 1 if case.transport == "socket" else threads
    notes: list[str] = []
    with ExitStack() as stack:
        pair = stack.enter_context(Pair(setup))
        if one and case.transport == "socket":
            place(
                pair, "two cores"
            )  # else the scheduler puts sender and receiver on one core in some rounds and not in others
        ours = pair.push if case.push else pair.pull
        contenders = []
        if bench.kvferry:
            notes.append(_first_rounds(pair, case, ours))
            contenders.append(_contender("kvferry", case.work, ours))
        peers = [_open(bench, stack, way, case.work) for way in _ways(bench, case)] if one else []
        contenders += [_peer_contender(peer, case.work) for peer in peers if peer]
        baseline = _contender(case.limit, case.work, lambda: pair.limit(case.limit, limit_threads))
        baseline.round()
        turns = until_steady(lambda: in_turns(baseline, contenders, bench.rounds), bench.attempts)

    mine = turns.others.pop("kvferry", None)
    named = case.name if one else f"{case.name}:threads"
    limit_name = LIMIT_NAMES[case.limit] + ("" if limit_threads == 1 else f", {limit_threads} threads")
    for name, figure in turns.others.items():
        if figure.values:
            cpu = f", CPU s per GB {figure.cpu:.3f}" if figure.cpu else ""
            ours_of_it = f"; kvferry reaches {mine.median / figure.median:.2f} of it" if mine else ""
            notes.append(f"{name}: {figure.median:.2f} / {figure.best:.2f} GB/s{cpu}{ours_of_it}")
    reach = f">= {case.reach:.2f} of the limit"
    row = _row(named, case, mine, limit_name, turns.baseline, case.reach, reach, turns.steady)
    row.notes, row.others = notes, turns.others
    rows = [row]
    if one:
        rows += _against_peers(case, mine, turns)
    for row in rows:
        row.attempts = turns.attempts
        yield row


def _first_rounds(pair: Pair, case: Bulk, ours: Callable[[], Sample]) -> str:
    """The first round of a fresh link and the second, before any turn is taken: mappings are populated meanwhile."""
    pair.puller.call("relink")
    first, second = ours(), ours()
    stated = (case.work.size_bytes / sample.seconds / 1e9 for sample in (first, second))
    return "first round after linking {:.2f}, second {:.2f} GB/s".format(*stated) + f"; over {first.transport}"


def _contender(name: str, work: Work, call: Callable[[], Sample]) -> Contender:
    return Contender(name, lambda: _value(work, call()))


def _value(work: Work, sample: Sample) -> Value:
    gigabytes = work.size_bytes / 1e9
    return Value(gigabytes / sample.seconds, sample.cpu_s / gigabytes)


def _ways(bench: Bench, case: Bulk) -> list[Way]:
    wanted = {package for package, _ in case.peers}
    nixl = NIXL_TCP if case.transport == "socket" else NIXL_SAME_HOST
    return [way for way in [*nixl, *MOONCAKE_TCP] if way.package in wanted and way.package in bench.peer_pythons]


def _open(bench: Bench, stack: ExitStack, way: Way, work: Work) -> Peer | None:
    peer = bench.open_peer(way, work)
    if peer:
        stack.callback(peer.close)
    return peer


def _peer_contender(peer: Peer, work: Work) -> Contender:
    def measured() -> Value | None:
        answer = peer.round()
        return _value(work, Sample(answer["seconds"], answer["cpu_s"])) if answer else None

    return Contender(peer.way.name, measured, most_rounds=5)


def _against_peers(case: Bulk, mine: Figure | None, turns: Turns) -> Iterator[Row]:
    """One more row for each peer: its best way of running against ours."""
    for package, times in case.peers:
        if best := turns.best_of(package):
            target = f">= {times:.1f} times {package}" if times else ""
            yield _row(f"{case.name}:{package}", case, mine, *best, times, target, turns.steady)


def _row(
    named: str, case: Bulk, mine: Figure | None, other: str, limit: Figure, reach: float, target: str, steady: bool
) -> Row:
    """``reach`` 0 judges nothing."""
    ratio = mine.median / limit.median if mine else None
    met = ratio >= reach if ratio is not None and reach else None
    return Row(named, case.transport, "GB/s", mine, other, limit, ratio, target, met, steady=steady)
