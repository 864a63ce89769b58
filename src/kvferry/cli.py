"""The command ``kvferry``.

``kvferry doctor`` says which transports work on this host, and what to change; ``kvferry pool`` looks at the pool node of
whoever runs it, and ends it.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version

from kvferry.errors import KvferryError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; its exit status.

    ``doctor`` ends with 1 if a transport does not work, ``pool status`` with 1 if no node listens, and whatever fails with 1
    and one line that says why; else it is 0.
    """
    parser = argparse.ArgumentParser(prog="kvferry", description="Moves KV caches between processes and machines.")
    parser.add_argument("--version", action="version", version=f"kvferry {version('kvferry')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    doctor = commands.add_parser("doctor", help="which transports work on this host, and what to change")
    doctor.add_argument("--json", action="store_true", help="for programs: the report and the verdicts")
    doctor.set_defaults(run=_doctor)
    _add_pool(commands.add_parser("pool", help="the pool node of your own on this host"))
    chosen = parser.parse_args(arguments)
    status: int = chosen.run(chosen)
    return status


def _add_pool(pool: argparse.ArgumentParser) -> None:
    commands = pool.add_subparsers(title="commands", metavar="COMMAND", required=True)
    status = commands.add_parser("status", help="whether it runs, where it listens, how big it may become")
    status.add_argument("--json", action="store_true", help="for programs")
    status.set_defaults(run=_pool_status)
    stop = commands.add_parser("stop", help="ask it to leave; what it holds is lost, and loads of it are misses")
    stop.add_argument("--timeout-s", type=float, default=10.0, help="after which it is killed (default 10)")
    stop.set_defaults(run=_pool_stop)


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


def _pool_status(chosen: argparse.Namespace) -> int:
    from kvferry.options import format_size
    from kvferry.pool import embedded

    try:
        seen = embedded.status()
    except (KvferryError, OSError) as error:
        return _failed(error)
    if chosen.json:
        print(json.dumps(dataclasses.asdict(seen), indent=2))
    elif seen.state == "nobody":
        print(f"No pool node of your own runs; it would listen at {seen.address}, and its log is {seen.log}")
    else:
        print(f"{'A pool node listens' if seen.state == 'listening' else 'A pool node starts'} at {seen.address}")
        lines = {
            "pid": seen.pid or None,
            "memory": seen.memory_bytes and f"up to {format_size(seen.memory_bytes)}",
            "started": seen.started and time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seen.started)),
            "leaves": seen.idle_s and f"after {seen.idle_s:g} s without use",
            "log": seen.log,
            "stop it": "kvferry pool stop",
        }
        print("\n".join(f"  {name:<10}{value}" for name, value in lines.items() if value))
    return 0 if seen.state == "listening" else 1


def _pool_stop(chosen: argparse.Namespace) -> int:
    from kvferry.pool import embedded

    try:
        how = embedded.stop(int(1000 * chosen.timeout_s))
    except (KvferryError, OSError) as error:
        return _failed(error)
    said = {
        "nobody": "No pool node of your own runs",
        "stopped": "The pool node has left",
        "killed": f"The pool node did not leave within {chosen.timeout_s:g} s and was killed",
    }
    print(said[how])
    return 0


def _failed(error: Exception) -> int:
    print(f"kvferry: {error}", file=sys.stderr)
    return 1
