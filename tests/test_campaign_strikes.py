"""Kills and stops by the hundred, for every transport and both directions. `campaign_support` says how it is done.

``make test`` strikes a tenth as often as ``make check``, which sets ``KVFERRY_CAMPAIGN=long``. The seed is printed;
``KVFERRY_TEST_SEED`` repeats the choices of an earlier run.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from campaign_support import Plan
from failure_support import dice, seed
from support.peer import TESTS

LONG = os.environ.get("KVFERRY_CAMPAIGN", "") == "long"
PARTS = 1 if LONG else 10
KILLS, KILLS_MOVING, STOPS, STOPS_MOVING = (-(-count // PARTS) for count in (200, 150, 100, 75))
WORKERS = 5
DEADLINE_S = 900 if LONG else 240

PLANS = [
    Plan(verb, transport, KILLS, KILLS_MOVING, STOPS, STOPS_MOVING, WORKERS)
    for verb in ("pull", "push")
    for transport in ("map", "cma", "socket")
]
pytestmark = [pytest.mark.slow, pytest.mark.deadline(DEADLINE_S)]


@pytest.fixture(scope="module")
def reports() -> Iterator["dict[str, list[dict[str, Any]]]"]:
    """What came of each plan, a report of each of its workers. All plans are carried out at the same time."""
    dice()
    program = subprocess.Popen(
        [sys.executable, "-c", "from campaign_support import main; main()"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        said, _ = program.communicate(json.dumps({"plans": [asdict(plan) for plan in PLANS], "seed": seed}))
        yield {line["plan"]: line["reports"] for line in map(json.loads, said.splitlines())}
    finally:
        program.kill()
        program.wait()


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_whoever_is_killed_or_stopped_at_whatever_moment(
    reports: "dict[str, list[dict[str, Any]]]", plan: Plan
) -> None:
    """Bytes outside the spans stay as they were, those inside too where the error says so; whoever fills the spans then
    finds them 2 s later as it has filled them; linked anew, the next transfer arrives; nothing is left behind."""
    dice()
    counts: Counter[str] = Counter()
    for report in reports[plan.name]:
        assert not report["problem"], report["problem"]
        counts.update(report["counts"])
    for what, count in sorted(counts.items()):
        print(f"{count:5}  {what}")
    answers = sorted(answer for report in reports[plan.name] for answer in report["answer_s"])
    print(f"answers after a death or a deadline: median {median_ms(answers)} ms, last {answers[-1] * 1e3:.1f} ms")
    assert counts["kills"] >= plan.kills and counts["kills while bytes moved"] >= plan.kills_moving
    assert counts["stops"] >= plan.stops and counts["stops while bytes moved"] >= plan.stops_moving
    for side in ("source", "destination"):
        assert counts[f"kills of the {side}"] and counts[f"stops of the {side}"]
    assert counts["times that what is left was counted"]


def median_ms(answers: "list[float]") -> str:
    return f"{answers[len(answers) // 2] * 1e3:.1f}"
