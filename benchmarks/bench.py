"""What every case is given: the compiled limits, how many rounds, and which of the contenders are there."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exchange import Setup
from limits import Work
from peers import Peer, PeerUnavailable, Way


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every benchmark can be told."""
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="only this (a pattern); repeatable")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each contender; at least 5 to quote a figure")
    parser.add_argument("--attempts", type=int, default=3, help="how often a case with unlike baselines is run at most")
    parser.add_argument("--idle-s", type=float, default=10.0, help="how long an idle process is watched")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every value there as well")


@dataclass(slots=True)
class Bench:
    library: Path
    spinner: Path
    kvferry: bool
    rounds: int
    attempts: int
    threads: int  # as many as kvferry takes by default
    idle_s: float
    peer_pythons: dict[str, str] = field(default_factory=dict)  # "nixl" | "mooncake" -> its interpreter

    def setup(self, work: Work, transport: str, **options: Any) -> Setup:
        return Setup(str(self.library), work, transport, kvferry=self.kvferry, **options)

    def open_peer(self, way: Way, work: Work) -> Peer | None:
        """None, and a line that says why, where it does not run: then its column is left out."""
        try:
            return Peer(way, self.peer_pythons[way.package], self.library, work)
        except (PeerUnavailable, OSError) as error:
            print(f"left out: {error}", file=sys.stderr)
            return None
