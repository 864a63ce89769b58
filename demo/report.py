"""The outcome as a person reads it: a table (rich's where it is installed), then what follows from it."""

import io
from collections.abc import Sequence

from demo.play import Outcome

HEAD = ("transport", "handed over by", "bytes", "time", "GB/s", "waited after prefill", "hidden", "tokens")
NUMBERS = (2, 3, 4, 5, 6)  # columns set to the right

LEGEND = (
    "time: of the handover alone, median; waited after prefill: until the KV cache was complete at the decode process;\n"
    "hidden: share of the push behind the prefill's computing, 1 - waited / time."
)


def render(outcome: Outcome, width: int | None = None) -> str:
    """Table and conclusions; ``width`` None: plain text, else rich's table of that width."""
    table = _plain(rows(outcome)) if width is None else _rich(rows(outcome), width)
    return "\n".join([table, LEGEND, "", *conclusions(outcome)])


def rows(outcome: Outcome) -> list[tuple[str, ...]]:
    return [
        (
            handover.transport,
            handover.way,
            f"{handover.size_bytes:,}",
            f"{handover.seconds * 1e3:.2f} ms",
            f"{handover.gb_per_s:.1f}",
            f"{handover.waited_s * 1e3:.2f} ms",
            "" if handover.hidden is None else f"{handover.hidden:.1%}",
            "equal" if handover.equal else "DIFFERENT",
        )
        for handover in outcome.handovers
    ]


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
    return lines


def _word(differs: bool) -> str:
    return "differ, as they must" if differs else "are the same, so they do not come from the KV cache that was moved"


def _line(good: bool, sentence: str) -> str:
    return f"{'ok  ' if good else 'FAIL'} {sentence}"


def _plain(cells: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(HEAD, *cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if index in NUMBERS else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()

    return "\n".join([line(HEAD), line(["-" * width for width in widths]), *map(line, cells)])


def _rich(cells: Sequence[tuple[str, ...]], width: int) -> str:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return _plain(cells)
    table = Table()
    for index, title in enumerate(HEAD):
        table.add_column(title, justify="right" if index in NUMBERS else "left")
    for row in cells:
        *figures, tokens = row
        table.add_row(*figures, f"[{'green' if tokens == 'equal' else 'bold red'}]{tokens}[/]")
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    console.print(table)
    return console.file.getvalue().rstrip()
