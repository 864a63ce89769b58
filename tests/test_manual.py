"""The manual's examples are one program, run as it stands: the ``python`` blocks of docs/manual.md after ``<!-- run -->``."""

import re
import subprocess
import sys
from pathlib import Path

MANUAL = Path(__file__).resolve().parent.parent / "docs" / "manual.md"
BLOCK = re.compile(r"<!-- run -->\s*```python\n(.*?)```", re.DOTALL)


def test_the_examples_of_the_manual_run_as_they_stand() -> None:
    program = "\n".join(BLOCK.findall(MANUAL.read_text(encoding="utf-8")))
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=45, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert "does not exist" in run.stdout  # what the page says is refused
