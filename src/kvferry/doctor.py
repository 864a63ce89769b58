"""Which transports work on this host, and what to change for those that do not.

:func:`diagnose` judges the core's report of the host and touches nothing; the command line prints what it says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Verdict", "diagnose", "render"]

_SERVES = {
    "map": "between processes of one user on this host, memory from node.allocate(...)",
    "cma": "between processes of one user on this host, memory that the caller owns",
    "socket": "any host, any memory; what the others refuse goes this way",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one transport: whether it works, and what it is for, or why not and what to change."""

    transport: str
    works: bool
    sentence: str


def diagnose(report: Mapping[str, Any]) -> tuple[Verdict, ...]:
    """Judges what ``_core.host_report()`` says, fastest transport first."""
    return tuple(
        Verdict(transport, report[transport] == "ok", serves if report[transport] == "ok" else str(report[transport]))
        for transport, serves in _SERVES.items()
    )


def render(report: Mapping[str, Any], verdicts: tuple[Verdict, ...]) -> str:
    """The verdicts as a person reads them."""
    scope = report["yama_scope"]
    yama = "without Yama" if scope is None else f"kernel.yama.ptrace_scope = {scope}"
    lines = [f"Linux {report['kernel']}, {report['cores']} cores, {yama}"]
    lines += [f"  {verdict.transport:<8}{'ok' if verdict.works else 'no':<4}{verdict.sentence}" for verdict in verdicts]
    return "\n".join(lines)
