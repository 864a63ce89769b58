"""The programs of docs/migrating-ems.md run as they stand: each ``python`` block after ``<!-- run -->`` is one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pool_support import NodeProcess

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating-ems.md"
PROGRAMS = re.findall(r"<!-- run -->\s*```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("generation", [0, 1])
def test_a_program_of_the_page_prints_what_the_page_says(generation: int, node: NodeProcess) -> None:
    program = PROGRAMS[generation]
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=45,
        check=False,
        env={**os.environ, "KVFERRY_POOL": node.address},
    )
    assert (run.returncode, run.stderr) == (0, "")
    (said,) = re.findall(r"^print\(.*\)  # (.*)$", program, re.MULTILINE)
    assert run.stdout == f"{said}\n"
