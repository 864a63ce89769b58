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

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MOONCAKE = os.environ.get("KVFERRY_TEST_MOONCAKE_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which(os.environ.get("CC", "gcc")), reason="the limits need a C compiler"),
]


def measured(
    folder: Path, *cases: str, script: str = "transfer.py", options: "tuple[str, ...]" = (), says: str = ""
) -> "dict[str, dict[str, Any]]":
    """The rows of one short round of these cases, by name."""
    out = folder / "rows.json"
    command = [sys.executable, str(BENCHMARKS / script), "--rounds", "1", "--attempts", "1", "--json", str(out)]
    command += [*options, *(word for case in cases for word in ("--case", case))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert says in run.stderr
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


def test_a_store_that_does_not_start_is_left_out_of_the_pool_s_rows_with_a_line_that_says_why(tmp_path: Path) -> None:
    without = ("--mooncake-python", sys.executable)  # Mooncake is not installed for this one
    says = "left out: mooncake store, shared memory"
    rows = measured(tmp_path, "load-1024x32KiB-map", script="pool.py", options=without, says=says)
    assert rows["load-1024x32KiB"]["kvferry"]["values"] and "load-1024x32KiB:mooncake" not in rows


@pytest.mark.skipif(not MOONCAKE, reason="KVFERRY_TEST_MOONCAKE_PYTHON names no Python with Mooncake")
def test_mooncake_s_store_takes_part_in_the_turns_of_the_pool(tmp_path: Path) -> None:
    cases = ("load-1024x32KiB-map", "save-1024x32KiB-socket", "load-64x128x8KiB", "small")
    rows = measured(tmp_path, *cases, script="pool.py", options=("--mooncake-python", MOONCAKE))
    named = {name.removesuffix(":mooncake") for name in rows if name.endswith(":mooncake")}
    assert named == {name for name in rows if not name.endswith(":mooncake")}
    assert rows["load-1x64KiB:mooncake"]["target"] == "<= mooncake's"
