"""NIXL and Mooncake on the same bytes: the ways in which they are run, and the end that drives their drivers.

peer_driver.py is a puller that starts an owner of its own, store_driver.py the user of a Mooncake Store that it starts;
all their processes are stopped (SIGSTOP) except during their own rounds, since a NIXL progress thread and a Mooncake
caller spin. A driver overwrites and compares like our own puller. Uses nothing of the
peers but their public Python calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import networks
from limits import Work

TUNED_MOONCAKE = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "8192",
    "MC_TCP_LANES_PER_PEER": "16",
    "MC_TCP_SLICE_SIZE": "1048576",
}
ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class Way:
    """One way of running a peer. ``drives`` tells how the owner's engine moves on: a "thread" of its own (which
    spins), the owner's main "loop" (spins too), or "nothing". ``values`` is set for a store, and tells where it keeps
    them: in the "shared" memory of another process, in the process that asks ("own"), or in one asked over "tcp"."""

    name: str
    package: str
    drives: str = "nothing"
    settings: tuple[tuple[str, str], ...] = ()
    values: str = ""


OVER_LOOPBACK = (("UCX_TLS", "tcp"), ("UCX_NET_DEVICES", "lo"))
NIXL_SAME_HOST = [Way("nixl", "nixl", "loop")]  # undriven, a scattered read never ends
NIXL_TCP = [
    Way("nixl tcp", "nixl", "loop", OVER_LOOPBACK),
    Way("nixl tcp, thread", "nixl", "thread", OVER_LOOPBACK),
]
MOONCAKE_TCP = [Way("mooncake tuned", "mooncake", "nothing", tuple(TUNED_MOONCAKE.items()))]
STORE_SAME_HOST = [
    Way("mooncake store, shared memory", "mooncake", values="shared"),
    Way("mooncake store, memory of its own", "mooncake", settings=(("MC_STORE_MEMCPY", "1"),), values="own"),
]
STORE_TCP = [
    Way("mooncake store, tcp", "mooncake", values="tcp"),
    Way("mooncake store, tcp tuned", "mooncake", settings=tuple(TUNED_MOONCAKE.items()), values="tcp"),
]


class PeerUnavailable(Exception):
    """The peer does not run here; the text says why. Its column is left out."""


class Peer:
    """The driving end, in the benchmark's own process."""

    def __init__(self, way: Way, python: str, library: Path, work: Work) -> None:
        self.way, self.work, self._failed = way, work, False
        driver = Path(__file__).with_name("store_driver.py" if way.values else "peer_driver.py")
        arguments = [python, str(driver), json.dumps(asdict(way)), str(library), json.dumps(asdict(work))]
        if way.package == "mooncake":
            if not networks.allowed():
                raise PeerUnavailable(f"{way.name} listens on every address; root, unshare and ip keep it to loopback")
            arguments = [*networks.ON_LOOPBACK, *arguments]
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **dict(way.settings)},
        )
        try:
            self._answer()
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def round(self) -> Any:
        """Seconds and CPU seconds of one checked round; empty once the peer has failed."""
        return self.ask("round")

    def latencies(self, count: int) -> Any:
        return self.ask(f"latencies {count}")

    def ask(self, what: str) -> Any:
        """The driver's answer to one command; empty once the peer has failed."""
        if self._failed:
            return {}
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(what.encode() + b"\n")
            self._process.stdin.flush()
            return self._answer()
        except (PeerUnavailable, OSError) as error:
            self._failed = True
            print(f"left out from here on: {error}", file=sys.stderr)
            return {}
        finally:
            self._signal(signal.SIGSTOP)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        until = time.monotonic() + ANSWER_S
        line = b""
        while time.monotonic() < until:
            ready, _, _ = select.select([self._process.stdout], [], [], 1.0)
            if not ready:
                continue
            byte = os.read(self._process.stdout.fileno(), 1)
            if not byte:
                raise PeerUnavailable(f"{self.way.name} ended, exit status {self._process.wait(5)}")
            line += byte
            if byte == b"\n":
                if line.startswith(b"@@"):  # everything else is the library's chatter
                    answer = json.loads(line[2:])
                    if "error" in answer:
                        raise PeerUnavailable(f"{self.way.name}: {answer['error']}")
                    return answer
                line = b""
        raise PeerUnavailable(f"{self.way.name} gave no answer in {ANSWER_S:.0f} s")

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
