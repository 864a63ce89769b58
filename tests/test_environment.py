"""tools/environment.py: what it refuses, and how it says so."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    import environment

    return environment


def test_a_machine_without_a_compiler_is_told_how_to_get_one(tmp_path: Path) -> None:
    empty = os.environ | {"PATH": str(tmp_path)}
    command = [sys.executable, str(TOOLS / "environment.py"), "base"]
    answer = subprocess.run(command, env=empty, capture_output=True, text=True, check=False, timeout=30)
    assert answer.returncode == 1
    assert "missing" in answer.stderr
    assert "apt install g++" in answer.stderr


@pytest.mark.parametrize(
    ("version", "needs", "is_cuda"),
    [
        ("2.13.0+cpu", ["filelock", "sympy>=1.13"], False),
        ("2.13.0", ["filelock", "sympy>=1.13"], False),
        ("2.13.0", ["filelock", 'nvidia-nccl-cu13==2.29.7; platform_system == "Linux"'], True),
        ("2.13.0", ['cuda-bindings<14,>=13.0.3; platform_system == "Linux"'], True),
        ("2.13.0+cu130", ["triton==3.7.1"], True),
    ],
)
def test_a_cuda_build_of_torch_is_known_by_what_it_needs(
    environment: Any, version: str, needs: list[str], is_cuda: bool
) -> None:
    assert environment.is_cuda_build({"version": version, "requires_dist": needs}) is is_cuda


def test_a_changed_requirement_makes_its_group_stale(
    environment: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environment, "REQUIREMENTS", tmp_path)
    monkeypatch.setattr(environment, "VENV", tmp_path)
    monkeypatch.setattr(environment, "PYTHON", sys.executable)
    (tmp_path / "check.txt").write_text("ruff==1\n")
    assert not environment.is_ready("check")
    environment.set_ready("check")
    assert environment.is_ready("check")
    (tmp_path / "check.txt").write_text("ruff==2\n")
    assert not environment.is_ready("check")


@pytest.mark.torch
def test_the_torch_that_tests_use_is_a_cpu_build() -> None:
    import torch

    assert torch.version.cuda is None
