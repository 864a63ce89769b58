"""The cases that move one block at a time, called from Python: what a pull costs beside what it moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

import numpy as np
from bench import Bench
from limits import KIB, MIB, Times, Work, scattered
from pair import Pair, Worker, place
from peers import NIXL_SAME_HOST, NIXL_TCP, Way
from table import Row
from turns import Contender, Figure, Turns, Value, in_turns, until_steady

CALLS = 1000  # of one batch; a batch gives one p50 and one p99
ASK_BYTES = 64  # a raw request and an answer as small
COLD_NAMES = 1800
LOOKING = "both ends looking 50 us before they sleep"
# A round trip between two sleeping processes costs several times more when each sits on a core of its own that has to
# wake up, and which of the two happens is the scheduler's mood. So it is measured as it comes, and in both placements.
PLACES = ("free", "two cores", "one core")


@dataclass(frozen=True, slots=True)
class Small:
    """``kind``: "prepared", "named" (one-off, the name repeated), "cold" (one-off, a name never asked for before),
    "datadist" (the vendor's pull_blocks). ``most_us`` and ``most_ratio`` are the targets."""

    kind: str
    transport: str
    unit: int
    most_us: float | None = None
    most_ratio: float | None = None
    apart: bool = False  # over TCP between two networks

    @property
    def name(self) -> str:
        way = "tcp" if self.apart else self.transport
        verb = {"prepared": "block", "named": "oneoff", "cold": "cold", "datadist": "datadist"}[self.kind]
        return f"{way}-{verb}-{self.unit // KIB}KiB"

    @property
    def work(self) -> Work:
        slots = 64 * MIB // self.unit
        return scattered(64, self.unit, slots)


CASES = [
    *(Small("prepared", t, u, most_us=us) for t in ("map", "cma") for u, us in ((4 * KIB, 4.5), (64 * KIB, 7.7))),
    *(Small("named", t, u, most_us=10.0) for t in ("map", "cma") for u in (4 * KIB, 64 * KIB)),
    *(Small("cold", t, u, most_ratio=1.3) for t in ("map", "cma") for u in (4 * KIB, 64 * KIB)),
    *(Small("datadist", "cma", u, most_us=20.0) for u in (4 * KIB, 64 * KIB)),
    *(
        Small(kind, "socket", u, most_ratio=1.3, apart=apart)
        for apart in (False, True)
        for kind in ("prepared", "named")
        for u in (4 * KIB, 64 * KIB)
    ),
]


def run(bench: Bench, case: Small) -> Iterator[Row]:
    if case.kind == "datadist":
        yield from _run_datadist(bench, case)
        return
    notes: list[str] = []
    with ExitStack() as stack:
        names = COLD_NAMES if case.kind == "cold" else 0
        pair = stack.enter_context(Pair(bench.setup(case.work, case.transport, cold_names=names, apart=case.apart)))
        puller = pair.puller
        baseline, more = _limits(pair, case)
        contenders = list(more)
        if bench.kvferry:
            contenders.append(Contender("kvferry", _ours(pair, case, bench)))
        contenders += _peer_contenders(bench, stack, case)
        for where in PLACES if case.most_ratio is not None else PLACES[:1]:
            place(pair, where)
            if where == "one core":  # who looks there keeps the other from answering
                contenders = [contender for contender in contenders if LOOKING not in contender.name]
            turn = partial(in_turns, baseline, contenders, bench.rounds, higher_is_better=False)
            turns = until_steady(turn, bench.attempts)
            if bench.kvferry and case.kind == "prepared" and where == "free":
                beside = puller.call("prepared_latencies", CALLS, spinning=True)
                stated = "with a second Python thread spinning in the puller: p50 {:.1f}, p99 {:.1f} us"
                notes.append(stated.format(*_points(beside)))
            yield _row(case, where, turns, notes)
            notes = []
            contenders = [contender for contender in contenders if "nixl" not in contender.name]


def _limits(pair: Pair, case: Small) -> tuple[Contender, list[Contender]]:
    """The raw figure that the case is held against, and further ones that are printed beside it."""
    puller = pair.puller

    def asked(wire: str, size_bytes: int, look: bool = False) -> Contender:
        name = f"raw {'Unix' if wire == 'unix' else 'TCP'} request and answer of {_size(size_bytes)}"
        name += f", {LOOKING}" if look else ""
        return Contender(name, lambda: _p50(puller.call("ask_latencies", wire, size_bytes, CALLS, look)))

    if case.transport == "socket":
        # Nodes that may use nothing but sockets have TCP lanes, on one host too.
        return asked("tcp", case.unit), [asked("tcp", case.unit, look=True)]
    copied = Contender("bare copy of the block", lambda: _p50(puller.call("copy_latencies", CALLS)))
    answered = asked("unix", ASK_BYTES)
    if case.kind == "prepared":
        return copied, [answered]
    return answered, [copied, asked("unix", ASK_BYTES, look=True), asked("unix", case.unit)]


def _ours(pair: Pair, case: Small, bench: Bench):  # type: ignore[no-untyped-def]
    if case.kind == "prepared":
        return lambda: _p50(pair.puller.call("prepared_latencies", CALLS))
    if case.kind == "named":
        return lambda: _p50(pair.puller.call("named_latencies", CALLS))
    each = max(1, COLD_NAMES // (bench.rounds * bench.attempts * len(PLACES)))
    starts = iter(range(0, COLD_NAMES, each))
    return lambda: _p50(pair.puller.call("cold_latencies", next(starts), each))


def _peer_contenders(bench: Bench, stack: ExitStack, case: Small) -> list[Contender]:
    """NIXL on the same host beside prepared pulls; a handle made for each read, and one posted again and again."""
    if case.kind != "prepared" or case.apart or "nixl" not in bench.peer_pythons:
        return []
    contenders = []
    for way in NIXL_TCP if case.transport == "socket" else NIXL_SAME_HOST:
        contenders += _nixl_contenders(bench, stack, case, way)
    return contenders


def _nixl_contenders(bench: Bench, stack: ExitStack, case: Small, way: Way) -> list[Contender]:
    peer = bench.open_peer(way, case.work)
    if peer is None:
        return []
    stack.callback(peer.close)
    kept: dict[str, Times] = {}

    def fresh() -> Value | None:
        kept.clear()
        kept.update({name: np.array(us) for name, us in peer.latencies(CALLS // 2).items()})
        return _p50(kept["fresh"]) if "fresh" in kept else None

    def reposted() -> Value | None:
        return _p50(kept["reposted"]) if "reposted" in kept else None

    return [Contender(f"{way.name}, fresh handle", fresh), Contender(f"{way.name}, reposted handle", reposted)]


def _row(case: Small, where: str, turns: Turns, notes: list[str]) -> Row:
    mine = turns.others.pop("kvferry", None)
    limit_name = "bare copy of the block" if case.kind == "prepared" else f"raw Unix round trip of {ASK_BYTES} B"
    if case.transport == "socket":
        limit_name = f"raw TCP request and answer of {_size(case.unit)}"
    named = case.name if where == "free" else f"{case.name}:{where.replace(' ', '-')}"
    ratio = met = None
    if mine:
        notes.insert(0, f"p99 {mine.p99:.1f} us (median over the batches)")
        copy = turns.others["bare copy of the block"].median if case.kind == "cold" else 0.0
        ratio = (mine.median - copy) / turns.baseline.median
        nixl = [f.median for name, f in turns.others.items() if "fresh handle" in name and f.values]
        met = _met(case, mine, ratio, nixl)
    for name, figure in turns.others.items():
        if figure.values:
            times = f"; kvferry takes {mine.median / figure.median:.2f} times that" if mine else ""
            notes.append(f"{name}: p50 {figure.median:.2f} / {figure.best:.2f}, p99 {figure.p99:.1f} us{times}")
    return Row(
        named,
        case.transport,
        "us (p50)",
        mine,
        limit_name,
        turns.baseline,
        ratio,
        _target(case),
        met,
        notes=notes,
        others=turns.others,
        steady=turns.steady,
        attempts=turns.attempts,
    )


def _met(case: Small, mine: Figure, ratio: float, nixl: list[float]) -> bool:
    if case.most_ratio is not None:
        return ratio <= case.most_ratio
    assert case.most_us is not None
    return mine.median <= max([case.most_us, *(nixl if case.transport != "socket" else [])])


def _target(case: Small) -> str:
    if case.most_us is not None:
        return f"<= {case.most_us} us" + (" or NIXL's" if case.kind == "prepared" else "")
    return f"<= {case.most_ratio} x the limit" + (" + the copy" if case.kind == "cold" else "")


def _run_datadist(bench: Bench, case: Small) -> Iterator[Row]:
    """Owner and puller are two processes of their own, since llm_datadist keeps one instance a process."""
    if not bench.kvferry:
        return
    mine = Figure(higher_is_better=False)
    with ExitStack() as stack:
        prefill, decode = (stack.enter_context(closing(Worker(role))) for role in ("prefill", "decode"))
        for worker in (prefill, decode):
            worker.answer()
        prefill.start(str(bench.library), case.unit)
        decode.start(str(bench.library), case.unit, prefill.call("listens_on"))
        decode.call("latencies", CALLS)
        for _ in range(bench.rounds):
            mine.add(_p50(decode.call("latencies", CALLS)))
    yield Row(
        case.name,
        case.transport,
        "us (p50)",
        mine,
        target=_target(case),
        met=mine.median <= (case.most_us or 0),
        notes=[f"through llm_datadist pull_blocks; p99 {mine.p99:.1f} us"],
    )


def _p50(us: Times) -> Value:
    p50, p99 = _points(us)
    return Value(p50, p99=p99)


def _points(us: Times) -> tuple[float, float]:
    return float(np.percentile(us, 50)), float(np.percentile(us, 99))


def _size(size_bytes: int) -> str:
    return f"{size_bytes // KIB} KiB" if size_bytes >= KIB else f"{size_bytes} B"
