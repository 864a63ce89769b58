"""The command ``kvferry``: ``kvferry doctor`` says which transports work on this host, and what to change."""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from importlib.metadata import version

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; its exit status. ``doctor`` ends with 1 if a transport does not work, else with 0."""
    parser = argparse.ArgumentParser(prog="kvferry", description="Moves KV caches between processes and machines.")
    parser.add_argument("--version", action="version", version=f"kvferry {version('kvferry')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    doctor = commands.add_parser("doctor", help="which transports work on this host, and what to change")
    doctor.add_argument("--json", action="store_true", help="for programs: the report and the verdicts")
    doctor.set_defaults(run=_doctor)
    chosen = parser.parse_args(arguments)
    status: int = chosen.run(chosen)
    return status


def _doctor(chosen: argparse.Namespace) -> int:
    from kvferry import _core
    from kvferry.doctor import diagnose, render

    report = _core.host_report()
    verdicts = diagnose(report)
    if chosen.json:
        print(
            json.dumps({"host": report, "transports": [dataclasses.asdict(verdict) for verdict in verdicts]}, indent=2)
        )
    else:
        print(render(report, verdicts))
    return 0 if all(verdict.works for verdict in verdicts) else 1
