"""Measures kvferry against what this machine can do, case by case.

`python benchmarks/transfer.py [--case NAME …] [--json FILE] [--nixl-python PYTHON] [--mooncake-python PYTHON]`.

README.md beside this file says what each case and each limit is and how to read the figures.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import beside
import bulk
import networks
import small
from bench import Bench, add_options
from limits import LimitsUnavailable, build
from pair import WorkerFailed
from table import HEADER, Row, lines, machine, write_json


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    run: Callable[[Bench], Iterator[Row]]
    has_limit: bool = True
    apart: bool = False  # needs two networks


CASES = [
    *(Case(case.name, partial(bulk.run, case=case), apart=case.apart) for case in bulk.CASES),
    *(Case(case.name, partial(small.run, case=case), case.kind != "datadist", case.apart) for case in small.CASES),
    *(Case(case.name, partial(case.run, what=case.transport), False) for case in beside.CASES),
]


def main() -> int:
    options = arguments()
    wanted = [case for case in CASES if not options.case or any(fnmatch.fnmatch(case.name, p) for p in options.case)]
    if options.list:
        print("\n".join(case.name for case in wanted))
        return 0
    if not wanted:
        print(f"no case is named {' or '.join(options.case)}; --list names them all", file=sys.stderr)
        return 2
    there = importlib.util.find_spec("kvferry") is not None
    if not there and not options.limits_only:
        print("kvferry is not installed for this Python: pip install . (or --limits-only)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="kvferry-benchmark-") as folder:
        try:
            library, spinner = build(Path(folder))
        except LimitsUnavailable as error:
            print(error, file=sys.stderr)
            return 2
        bench = Bench(
            library,
            spinner,
            kvferry=not options.limits_only,
            rounds=options.rounds,
            attempts=options.attempts,
            threads=min(4, len(os.sched_getaffinity(0))),
            idle_s=options.idle_s,
            peer_pythons=peer_pythons(options),
        )
        return measure(bench, wanted, options.json)


def measure(bench: Bench, wanted: list[Case], json_file: Path | None) -> int:
    began, rows, failed = time.monotonic(), [], 0
    settings = {"rounds": bench.rounds, "attempts": bench.attempts, "threads": bench.threads, **machine()}
    print("  ".join(f"{name}: {value}" for name, value in settings.items()), HEADER, sep="\n\n", flush=True)
    for case in wanted:
        if not bench.kvferry and not case.has_limit:
            continue
        if case.apart and not networks.allowed():
            print(f"{case.name:<29} left out: it takes root, unshare and ip to make two networks", flush=True)
            continue
        try:
            for row in case.run(bench):
                rows.append(row)
                print(lines(row), flush=True)
        except WorkerFailed as error:
            failed += 1
            print(f"{case.name:<29} FAILED: {error}", flush=True)
        if json_file:
            write_json(json_file, rows, {"rounds": bench.rounds, "attempts": bench.attempts, "threads": bench.threads})
    judged = [row for row in rows if row.met is not None]
    met = sum(bool(row.met) for row in judged)
    print(f"\n{met} of {len(judged)} targets met, {failed} cases failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def peer_pythons(options: argparse.Namespace) -> dict[str, str]:
    pythons = {"nixl": options.nixl_python, "mooncake": options.mooncake_python}
    return {name: python for name, python in pythons.items() if python}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="kvferry against the limits of this machine, and against its peers")
    add_options(parser)
    parser.add_argument("--nixl-python", metavar="PYTHON", help="a Python in which the nixl wheel is installed")
    parser.add_argument("--mooncake-python", metavar="PYTHON", help="a Python in which Mooncake's wheel is installed")
    parser.add_argument("--limits-only", action="store_true", help="measure the machine, without kvferry")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
