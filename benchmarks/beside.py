"""What must hold beside the figures: an owner whose Python is stuck, idle processes, extra memory, untouched pages."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench import Bench
from limits import KIB, MIB, one_piece, scattered
from pair import AnonymousMemory, Idle, Pair, idle, segment_pages, spinning_process, status_kib
from table import Row
from turns import ALIKE, Figure, Value, drift

TRANSPORTS = ("map", "cma", "socket")
WINDOW_S = 3.0  # how long the owner's interpreter is held
MOST_IDLE_PERCENT, MOST_THREADS, MOST_EXTRA_MIB = 0.5, 10, 64.0
BUSY_REACH = 0.8


@dataclass(frozen=True, slots=True)
class Beside:
    name: str
    transport: str
    run: Callable[..., Iterator[Row]]


# -- the owner's Python is busy, or holds the GIL inside C


def busy_owner(bench: Bench, what: str) -> Iterator[Row]:
    """Rounds inside windows of time: a C process spins, the owner's Python spins, C again, the GIL is held, C again."""
    work, transport = one_piece(256 * MIB), what
    attempts = 0
    with Pair(bench.setup(work, transport, copy_threads=0), raw=False) as pair:
        pair.pull()
        while True:
            attempts += 1
            counts: list[float] = []
            alone = [_beside_spinner(bench, pair)]
            stuck = _beside_owner(pair, "pass", counts)
            alone.append(_beside_spinner(bench, pair))
            held = _beside_owner(pair, "hold", counts)
            alone.append(_beside_spinner(bench, pair))
            apart = drift([figure.median for figure in alone])
            if apart <= ALIKE or attempts == bench.attempts:
                break
    together = Figure([value for figure in alone for value in figure.values])
    for how, mine, counted in (("pass", stuck, counts[0]), ("hold", held, counts[1])):
        ratio = mine.median / together.median
        doing = "while True: pass" if how == "pass" else f"the GIL held in C for {WINDOW_S:.0f} s"
        yield Row(
            f"{transport}-busy-{how}",
            transport,
            "GB/s",
            mine,
            "the same while a C process spins instead",
            together,
            ratio,
            f">= {BUSY_REACH:.2f} of the limit",
            ratio >= BUSY_REACH,
            notes=[
                f"owner: {doing}; a Python counter thread there counted {counted:.1f} a second"
                f"; {len(mine.values)} rounds, of the limit {len(together.values)}"
            ],
            steady=apart <= ALIKE,
            attempts=attempts,
        )


def _beside_spinner(bench: Bench, pair: Pair) -> Figure:
    with spinning_process(bench.spinner, WINDOW_S + 5):
        time.sleep(0.1)
        return _rounds_until(pair, time.monotonic() + WINDOW_S / 2)


def _beside_owner(pair: Pair, how: str, counts: list[float]) -> Figure:
    """Only rounds that lie wholly inside the owner's window count."""
    pair.owner.send("busy", how, WINDOW_S)
    pair.owner.answer()
    until = time.monotonic() + WINDOW_S - 0.1
    time.sleep(0.1)
    figure = _rounds_until(pair, until)
    counts.append(pair.owner.answer())
    return figure


def _rounds_until(pair: Pair, until: float) -> Figure:
    figure = Figure()
    gigabytes = pair.setup.work.size_bytes / 1e9
    while True:
        sample = pair.pull()
        if time.monotonic() > until and len(figure.values) >= 1:
            return figure
        figure.add(Value(gigabytes / sample.seconds, sample.cpu_s / gigabytes))


# -- idle


def idle_links(bench: Bench, what: str) -> Iterator[Row]:
    """The owner of ``what`` links, over some seconds in which nobody asks it for anything; default options."""
    links = int(what)
    with Pair(bench.setup(one_piece(MIB, 4 * KIB), "map", copy_threads=0), raw=False) as pair:
        if links > 1:
            pair.puller.call("link_further", links - 1)
        pair.pull()
        time.sleep(1.0)
        watched = idle([pair.owner.pid, pair.puller.pid], bench.idle_s)
    owner, puller = watched
    met = owner.percent_of_a_core <= MOST_IDLE_PERCENT and owner.threads <= MOST_THREADS
    notes = [f"{owner.threads} threads, Python's among them; watched for {bench.idle_s:.0f} s"]
    if links == 1:
        met = met and puller.percent_of_a_core <= MOST_IDLE_PERCENT and puller.threads <= MOST_THREADS
        notes.append(f"the puller: {puller.percent_of_a_core:.2f} % of a core, {puller.threads} threads")
    yield Row(
        f"idle-{links}-link" + ("s" if links > 1 else ""),
        "-",
        "% of a core",
        _one(owner),
        target=f"<= {MOST_IDLE_PERCENT} %, <= {MOST_THREADS} threads",
        met=met,
        notes=notes,
    )


def _one(owner: Idle) -> Figure:
    return Figure([owner.percent_of_a_core], higher_is_better=False)


# -- memory


def extra_memory(bench: Bench, what: str) -> Iterator[Row]:
    """RssAnon of both processes during 1 GiB, in four tensors of 256 MiB: in one piece each, then by blocks of 4 KiB.

    The first transfer of the link is among them.
    """
    transport = what
    for shape in (one_piece(256 * MIB), scattered(65536, 4 * KIB, slots=65536)):
        with Pair(bench.setup(shape, transport, copy_threads=0, tensors=4), raw=False) as pair:
            tables = status_kib(pair.puller.pid, "VmPTE")
            pages = segment_pages(pair.owner.pid)
            pair.puller.call("overwrite")
            with AnonymousMemory([pair.owner.pid, pair.puller.pid]) as memory:
                for _ in range(3):
                    pair.puller.call("pull")
            pair.puller.call("check")
            tables = status_kib(pair.puller.pid, "VmPTE") - tables
            pages = segment_pages(pair.owner.pid) - pages
        worst = max(memory.extra_mib)
        yield Row(
            f"{transport}-memory" + ("" if shape.whole else "-blocks"),
            transport,
            "MiB",
            Figure([worst], higher_is_better=False),
            target=f"< {MOST_EXTRA_MIB:.0f} MiB RssAnon a process",
            met=worst < MOST_EXTRA_MIB and pages == 0,
            notes=[
                "extra RssAnon: owner {:.1f}, puller {:.1f} MiB".format(*memory.extra_mib)
                + f", the most of {memory.looks} looks; page tables of the puller {tables / 1024:+.1f} MiB"
                + f"; the owner's segments {pages:+d} pages"
            ],
        )


def untouched_pages(bench: Bench, what: str) -> Iterator[Row]:
    """A reader of a cache that its owner has written in parts only: reading must not make the pages that are missing."""
    work = one_piece(64 * MIB, 4 * KIB)
    with Pair(bench.setup(work, what, copy_threads=0), raw=False) as pair:
        before = segment_pages(pair.owner.pid)
        pair.owner.call("allocate_partly_written")
        owned = segment_pages(pair.owner.pid)
        transports = pair.puller.call("pull_partly_written")
        time.sleep(0.2)  # mappings are populated in the background
        gained = segment_pages(pair.owner.pid) - owned
    whole, written = work.region_bytes // mmap.PAGESIZE, owned - before
    yield Row(
        f"{what}-untouched-pages",
        what,
        "pages",
        Figure([gained], higher_is_better=False),
        target="0 pages allocated by reading",
        met=gained == 0 and written < whole and set(transports) == {what},
        notes=[
            f"of the cache's {whole} pages its owner had touched {written}; all were pulled, in one piece and by"
            " blocks, and what nobody had written was zero"
        ],
    )


CASES = [
    *(Beside(f"{t}-busy", t, busy_owner) for t in TRANSPORTS),
    Beside("idle-1-link", "1", idle_links),
    Beside("idle-64-links", "64", idle_links),
    *(Beside(f"{t}-memory", t, extra_memory) for t in TRANSPORTS),
    Beside("map-untouched-pages", "map", untouched_pages),
]
