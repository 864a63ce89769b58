"""The outcome as a person reads it: a table (rich's where it is installed), then what follows from it."""

import io
import statistics
from collections.abc import Sequence

from demo.play import Outcome
from demo.reuse import AGAIN, RUNS, Answered, Reuse, first_token_s

Rows = Sequence[tuple[str, ...]]  # the first one names the columns, the last of which says whether tokens are equal
TEXTS = ("transport", "handed over by", "prompt's beginning", "tokens")  # columns set to the left

HANDOVERS = (
    "time: of the handover alone, median; waited after prefill: until the KV cache was complete at the decode process;\n"
    "hidden: share of the push behind the prefill's computing, 1 - waited / time."
)
REUSED = (
    "first token: from a request's token ids to its first new token, median of {runs} processes; load and GB/s: of pool.load\n"
    "alone, median. Each process is forked from one that has loaded libraries and weights and never computed a token; it has\n"
    "run one token, has its memory and is connected when it is asked. Compared are all tokens of the first process of each\n"
    "kind, and the first {again} of every other."
)


def render(outcome: Outcome, width: int | None = None) -> str:
    """Tables and conclusions; ``width`` None: plain text, else rich's tables of that width."""
    handovers, reused = (plain(rows) if width is None else _rich(rows, width) for rows in tables(outcome))
    legend = REUSED.format(runs=RUNS, again=AGAIN)
    return "\n".join([handovers, HANDOVERS, "", reused, legend, "", *conclusions(outcome)])


def tables(outcome: Outcome) -> tuple[Rows, Rows]:
    return handover_rows(outcome), reuse_rows(outcome.reuse)


def handover_rows(outcome: Outcome) -> Rows:
    head = ("transport", "handed over by", "bytes", "time", "GB/s", "waited after prefill", "hidden", "tokens")
    return [
        head,
        *(
            (
                handover.transport,
                handover.way,
                f"{handover.size_bytes:,}",
                f"{handover.seconds * 1e3:.2f} ms",
                f"{handover.gb_per_s:.1f}",
                f"{handover.waited_s * 1e3:.2f} ms",
                "" if handover.hidden is None else f"{handover.hidden:.1%}",
                _tokens(handover.equal),
            )
            for handover in outcome.handovers
        ),
    ]


def reuse_rows(reuse: Reuse) -> Rows:
    head = ("prompt's beginning", "first token", "computed", "hit", "bytes", "load", "GB/s", "tokens")
    return [
        head,
        _reuse_row(reuse, "computed again", reuse.without),
        _reuse_row(reuse, "from the pool", reuse.pooled),
    ]


def _reuse_row(reuse: Reuse, where: str, runs: Sequence[Answered]) -> tuple[str, ...]:
    fewest = min(runs, key=lambda run: run.hits)
    load_s = statistics.median(run.load_s for run in runs)
    loaded = ("", "", "", "")
    if load_s:
        hit = f"{fewest.hits} of {reuse.blocks} blocks, {fewest.hits * reuse.block_tokens:,} tokens"
        loaded = (hit, f"{fewest.size_bytes:,}", f"{load_s * 1e3:.2f} ms", f"{fewest.size_bytes / load_s / 1e9:.1f}")
    return (
        where,
        f"{first_token_s(runs) * 1e3:.0f} ms",
        f"{fewest.computed:,} tokens",
        *loaded,
        _tokens(reuse.equal(runs) == len(runs)),
    )


def _tokens(equal: bool) -> str:
    return "equal" if equal else "DIFFERENT"


def conclusions(outcome: Outcome) -> list[str]:
    """What was to be shown, line by line, and whether it was."""
    right = sum(handover.equal for handover in outcome.handovers)
    lines = [f"{transport} was not offered here: {reason}" for transport, reason in outcome.refused.items()]
    lines += [
        _line(
            bool(outcome.handovers) and right == len(outcome.handovers),
            f"{right} of {len(outcome.handovers)} handovers: the decoded tokens equal those of the undivided run",
        ),
        _line(outcome.altered_differs, f"one block altered: the tokens {_word(outcome.altered_differs)}"),
        _line(outcome.left_out_differs, f"pull left out: the tokens {_word(outcome.left_out_differs)}"),
    ]
    return lines + _pool_conclusions(outcome.reuse)


def _pool_conclusions(reuse: Reuse) -> list[str]:
    runs = reuse.without + reuse.pooled
    right = reuse.equal(runs)
    found = (
        f"a process that had computed nothing found {reuse.hits} of the longer prompt's {reuse.blocks} blocks: "
        f"first token {reuse.faster:.1f} times as early"
    )
    none = f"of the longer prompt's {reuse.blocks} blocks one process found none"
    return [
        _line(reuse.hits > 0, f"pool: {found if reuse.hits else none}"),
        _line(
            right == len(runs), f"pool: the tokens of {right} of {len(runs)} requests equal those of the undivided run"
        ),
        _line(reuse.altered_differs, f"pool: one saved block altered: the tokens {_word(reuse.altered_differs)}"),
    ]


def _word(differs: bool) -> str:
    return "differ, as they must" if differs else "are the same, so they do not come from the KV cache that was moved"


def _line(good: bool, sentence: str) -> str:
    return f"{'ok  ' if good else 'FAIL'} {sentence}"


def plain(rows: Rows) -> str:
    head, *cells = rows
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if title in TEXTS else cell.rjust(width)
            for title, cell, width in zip(head, row, widths, strict=True)
        ).rstrip()

    return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, cells)])


def _rich(rows: Rows, width: int) -> str:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return plain(rows)
    head, *cells = rows
    table = Table()
    for title in head:
        table.add_column(title, justify="left" if title in TEXTS else "right")
    for row in cells:
        *figures, tokens = row
        table.add_row(*figures, f"[{'green' if tokens == 'equal' else 'bold red'}]{tokens}[/]")
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    console.print(table)
    return console.file.getvalue().rstrip()
