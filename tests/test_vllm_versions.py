"""The connector with several releases of vLLM, and a table of what each does with it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pool_support import NodeProcess
from vllm_support import ROOT, make_model

pytestmark = [pytest.mark.vllm, pytest.mark.deadline(500)]

RELEASES = ROOT / ".venv-vllm" / "releases"
BESIDE = sorted(folder.name for folder in RELEASES.glob("*") if (folder / "complete").exists())
OWN = "own"  # the one of the environment itself
FOUND: dict[str, dict[str, bool]] = {}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


class Script:
    def __init__(self, release: str, *words: str) -> None:
        surroundings = dict(os.environ)
        if release != OWN:
            surroundings["PYTHONPATH"] = str(RELEASES / release)
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "vllm_version.py"), *words],
            env=surroundings,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.seen: list[str] = []

    def said(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("SAID "):
                return json.loads(line.removeprefix("SAID "))
            self.seen.append(line)
        raise AssertionError("".join(self.seen[-40:]))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        for end in (self.process.stdin, self.process.stdout):
            assert end is not None
            end.close()


@pytest.mark.parametrize("release", [*BESIDE, OWN])
def test_release(release: str, model: Path, tmp_path: Path) -> None:
    node = NodeProcess(f"unix:{tmp_path}/pool.sock", "256MiB")
    prefill = Script(release, "prefill", str(model))
    try:
        given = prefill.said()
        everything = Script(
            release, "all", str(model), node.address, json.dumps(given["params"]), json.dumps(given["answer"])
        )
        try:
            said = everything.said()
        finally:
            everything.close()
        assert prefill.process.stdin is not None
        prefill.process.stdin.close()
        said["found"]["blocks given back"] = prefill.said().get("handovers:given") == 1
    finally:
        prefill.close()
        node.stop()
    assert release in (OWN, said["version"].split("+")[0]), said["version"]
    FOUND[said["version"]] = said["found"]
    assert all(said["found"].values()), said


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    if not FOUND:
        pytest.skip("no release was tried")
    checks = list(next(iter(FOUND.values())))
    lines = [["vLLM (CPU)", *checks]]
    lines += [[version, *("yes" if found.get(check) else "NO" for check in checks)] for version, found in FOUND.items()]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    with capsys.disabled():
        print("\n")
        for line in lines:
            print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip())
