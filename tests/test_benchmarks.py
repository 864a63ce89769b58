"""The benchmarks run, and look at the bytes; how fast anything is does not matter here."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "transfer.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which(os.environ.get("CC", "gcc")), reason="the limits need a C compiler"),
]


def measured(folder: Path, *cases: str) -> "dict[str, dict[str, Any]]":
    """The rows of one short round of these cases, by name."""
    out = folder / "rows.json"
    command = [sys.executable, str(BENCHMARK), "--rounds", "1", "--attempts", "1", "--json", str(out)]
    command += [word for case in cases for word in ("--case", case)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return {row["case"]: row for row in json.loads(out.read_text())["rows"]}


def test_reading_what_nobody_has_written_makes_no_page_of_its_owner(tmp_path: Path) -> None:
    row = measured(tmp_path, "map-untouched-pages")["map-untouched-pages"]
    assert row["met"] and row["kvferry"]["values"] == [0]
    all_of_it, touched = map(int, re.findall(r"\d+", row["notes"][0])[:2])
    assert 0 < touched < all_of_it


def test_small_blocks_are_held_against_raw_round_trips_in_the_same_places(tmp_path: Path) -> None:
    rows = measured(tmp_path, "socket-block-4KiB", "map-cold-4KiB")
    for case in ("socket-block-4KiB", "map-cold-4KiB"):
        assert {case, f"{case}:one-core", f"{case}:two-cores"} <= set(rows)
        looking = [
            any("before they sleep" in name for name in rows[case + where]["others"])
            for where in (":two-cores", ":one-core")
        ]
        assert looking == [True, False]
