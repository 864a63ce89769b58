"""A row of the result, its line in the table, and the same as JSON."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turns import Figure

HEADER = (
    f"{'case':<29} {'transport':<10} {'kvferry':>17} {'limit':>17} {'ratio':>7}  {'target':<30} {'met':<4}\n"
    f"{'':<29} {'':<10} {'median / best':>17} {'median / best':>17}"
)


@dataclass(slots=True)
class Row:
    """``ratio`` is ours over the limit's, of the medians; ``met`` is None where there is nothing to judge."""

    case: str
    transport: str
    unit: str  # "GB/s" | "us" | "MiB" | "% of a core" | "pages"
    ours: Figure | None
    limit_name: str = ""
    limit: Figure | None = None
    ratio: float | None = None
    target: str = ""
    met: bool | None = None
    notes: list[str] = field(default_factory=list)
    others: dict[str, Figure] = field(default_factory=dict)  # further contenders of the same turns, for the JSON
    steady: bool = True
    attempts: int = 1


def lines(row: Row) -> str:
    met = {True: "yes", False: "NO", None: "-"}[row.met]
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
    first = (
        f"{row.case:<29} {row.transport:<10} {_pair(row.ours):>17} {_pair(row.limit):>17} {ratio:>7}  "
        f"{row.target or '-':<30} {met:<4}"
    )
    beside = [f"{row.unit}" + (f"; limit: {row.limit_name}" if row.limit_name else "")]
    both = (("kvferry", row.ours), ("limit", row.limit))
    cpu = [f"{name} {figure.cpu:.3f}" for name, figure in both if figure and figure.cpu]
    if cpu:
        beside.append("CPU s per GB, both processes: " + ", ".join(cpu))
    if not row.steady:
        beside.append(f"NOT STEADY: baselines still differ by more than 10 % after {row.attempts} runs")
    elif row.attempts > 1:
        beside.append(f"run {row.attempts} of this case: the baselines of the earlier ones differed by more than 10 %")
    return "\n".join([first.rstrip(), *(f"    {line}" for line in [*beside, *row.notes])])


def _pair(figure: Figure | None) -> str:
    if figure is None or not figure.values:
        return "-"
    digits = 1 if figure.median >= 10 else 2
    return f"{figure.median:.{digits}f} / {figure.best:.{digits}f}"


def write_json(path: Path, rows: list[Row], settings: dict[str, Any]) -> None:
    whole = {"machine": machine(), "settings": settings, "rows": [_plain(row) for row in rows]}
    path.write_text(json.dumps(whole, indent=1) + "\n")


def machine() -> dict[str, Any]:
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    model = [line.split(":", 1)[1].strip() for line in facts if line.startswith("model name")]
    return {
        "system": platform.system(),
        "kernel": platform.release(),
        "processor": model[0] if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_average_at_start": os.getloadavg()[0],
    }


def _plain(row: Row) -> dict[str, Any]:
    return {
        "case": row.case,
        "transport": row.transport,
        "unit": row.unit,
        "kvferry": _figure(row.ours),
        "limit_name": row.limit_name,
        "limit": _figure(row.limit),
        "ratio": row.ratio,
        "target": row.target,
        "met": row.met,
        "steady": row.steady,
        "attempts": row.attempts,
        "notes": row.notes,
        "others": {name: _figure(figure) for name, figure in row.others.items()},
    }


def _figure(figure: Figure | None) -> dict[str, Any] | None:
    if figure is None or not figure.values:
        return None
    return {
        "median": figure.median,
        "best": figure.best,
        "p99": figure.p99,
        "cpu_s_per_gb": figure.cpu,
        "values": figure.values,
    }
