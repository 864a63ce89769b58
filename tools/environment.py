"""Makes ``.venv`` and brings it to what ``requirements/`` says; does nothing when nothing changed.

    python3 tools/environment.py base          # what every command needs
    python3 tools/environment.py base check    # and the linters
    python3 tools/environment.py base torch    # and torch (CPU build only) with transformers

Runs on the machine's own Python with the standard library alone, as any user. Ends with 0 (ready), 1 (something is
missing, and the last lines say what and how to get it) or 3 (torch does not exist for this Python: skip its tests).
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
REQUIREMENTS = ROOT / "requirements"

OLDEST_PYTHON = (3, 10)
NEWEST_PYTHON = (3, 13)
TORCH_PYTHON = (3, 11)  # the Python for which a missing torch is an error and not a reason to skip
OLDEST_GCC = 11
NO_TORCH = 3
NOT_INSTALLED = (
    "pip could not install what stands in requirements/ (its words are above). "
    "It needs a package index: check the network and pip's configuration, then run the same command again."
)

GROUPS = {
    "base": ["build.txt", "test.txt"],
    "check": ["check.txt"],
    "torch": ["torch.txt", "models.txt"],
}


def main(groups: Sequence[str]) -> None:
    unknown = [group for group in groups if group not in GROUPS]
    if unknown or not groups:
        stop(f"usage: environment.py {'|'.join(GROUPS)} …")
    check_machine()
    with only_one("environment"):
        make_venv()
        for group in groups:
            if not is_ready(group):
                {"base": install_base, "check": install_check, "torch": install_torch}[group]()
                set_ready(group)


# --- the machine ------------------------------------------------------------------------------------------------


def check_machine() -> None:
    """Stop, naming all that is missing at once, unless this machine can build and run kvferry."""
    missing = []
    if not OLDEST_PYTHON <= sys.version_info[:2] <= NEWEST_PYTHON:
        missing.append(
            f"Python {dotted(OLDEST_PYTHON)} to {dotted(NEWEST_PYTHON)} (this is {dotted(sys.version_info[:2])} at "
            f"{sys.executable}); another one is taken with: make PYTHON=/path/to/python3"
        )
    if not PYTHON.exists() and not has_module("ensurepip"):
        missing.append("the venv module of Python: apt install python3-venv")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing.append("the headers of Python (Python.h): apt install python3-dev")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        missing.append("a C++20 compiler: apt install g++")
    elif compiler.endswith("g++") and gcc_version(compiler) < OLDEST_GCC:
        missing.append(f"g++ {OLDEST_GCC} or newer (C++20); {compiler} is {gcc_version(compiler)}: apt install g++")
    if sys.platform != "linux":
        missing.append("Linux: kvferry moves memory with Linux system calls")
    if missing:
        stop("This machine is missing:\n" + "\n".join(f"  - {item}" for item in missing))


def gcc_version(compiler: str) -> int:
    answer = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True, check=False).stdout.strip()
    return int(answer.split(".")[0]) if answer else 0


def has_module(name: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, check=False).returncode == 0


# --- the environment --------------------------------------------------------------------------------------------


def make_venv() -> None:
    """A working ``.venv``: kept when its Python still runs, made anew when not."""
    if PYTHON.exists():
        if subprocess.run([PYTHON, "-c", "import pip"], capture_output=True, check=False).returncode == 0:
            return
        say(".venv no longer works (its Python has gone or it has no pip); making it anew")
    say(f"making .venv with Python {dotted(sys.version_info[:3])}")
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=False)
    if made.returncode:
        stop("Could not make .venv. On Debian and Ubuntu: apt install python3-venv")


def install_base() -> None:
    say("installing build tools and test packages (half a minute)")
    pip_install("-r", REQUIREMENTS / "build.txt", "-r", REQUIREMENTS / "test.txt")


def install_check() -> None:
    say("installing ruff, mypy and import-linter")
    pip_install("-r", REQUIREMENTS / "check.txt")


def install_torch() -> None:
    """torch first and alone, never as a CUDA build (gigabytes that no test uses); then what stands on it."""
    wanted = (REQUIREMENTS / "torch.txt").read_text().strip()
    if installed_torch() != (wanted.removeprefix("torch=="), None):
        refuse_cuda_build(wanted)
        say(f"installing {wanted}, the CPU build (200 MB, a minute or two)")
        pip_install("-r", REQUIREMENTS / "torch.txt")
        installed = installed_torch()
        if installed is None or installed[1] is not None:
            subprocess.run([PYTHON, "-m", "pip", "uninstall", "-q", "-y", "torch"], check=False)
            stop_for_cuda(wanted)
    say("installing transformers, accelerate and gguf")
    pip_install("-r", REQUIREMENTS / "models.txt")


def installed_torch(python: "Path | None" = None) -> "tuple[str, str | None] | None":
    """``(version without its +tag, CUDA version or None)`` of the torch in ``.venv``, or where that ``python`` is."""
    script = "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda]))"
    answer = subprocess.run([python or PYTHON, "-c", script], capture_output=True, text=True, check=False)
    if answer.returncode:
        return None
    version, cuda = json.loads(answer.stdout)
    return version.split("+")[0], cuda


def refuse_cuda_build(wanted: str) -> None:
    """Ask pip what it would take, before the gigabytes come down."""
    arguments = ["install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-", wanted]
    answer = subprocess.run([PYTHON, "-m", "pip", *arguments], capture_output=True, text=True, check=False)
    if answer.returncode:
        python = venv_version()
        if python != TORCH_PYTHON:
            say(f"{wanted} cannot be had for Python {dotted(python)}; its tests are left out")
            say(f"they run on Python {dotted(TORCH_PYTHON)}: make PYTHON=python{dotted(TORCH_PYTHON)} distclean test")
            raise SystemExit(NO_TORCH)
        stop(f"{answer.stderr.strip()}\n\npip finds no {wanted} for this machine (see its words above).")
    if is_cuda_build(json.loads(answer.stdout)["install"][0]["metadata"]):
        stop_for_cuda(wanted)


def is_cuda_build(metadata: "dict[str, Any]") -> bool:
    """From a wheel's metadata as pip reports them: the CUDA builds need packages of CUDA's own."""
    if "+cpu" in metadata["version"]:
        return False
    return any(re.match(r"(nvidia|cuda|triton)\b", need) for need in metadata.get("requires_dist", []))


def stop_for_cuda(wanted: str) -> NoReturn:
    stop(
        f"pip would take a CUDA build of {wanted} here: gigabytes, and kvferry's tests and demo run on the CPU.\n"
        f"Install the CPU build into .venv yourself, then run the same command again:\n"
        f"  .venv/bin/pip install {wanted} --index-url <PyTorch's index of CPU builds, see its 'Get started' page>\n"
        f"or leave the tests that need torch out: make test TORCH=no"
    )


def pip_install(
    *arguments: "str | Path",
    env: "dict[str, str] | None" = None,
    otherwise: str = NOT_INSTALLED,
    python: "Path | None" = None,
) -> None:
    quiet = [] if sys.stdout.isatty() else ["-q", "-q", "--progress-bar=off"]
    command = [python or PYTHON, "-m", "pip", "install", "--disable-pip-version-check", *quiet, *arguments]
    if subprocess.run(command, env=env, check=False).returncode:
        stop(otherwise)


# --- what was done already --------------------------------------------------------------------------------------


def is_ready(group: str) -> bool:
    stamp = VENV / f"kvferry-{group}.stamp"
    return stamp.exists() and stamp.read_text() == fingerprint(group)


def set_ready(group: str) -> None:
    (VENV / f"kvferry-{group}.stamp").write_text(fingerprint(group))


def fingerprint(group: str) -> str:
    content = b"".join((REQUIREMENTS / name).read_bytes() for name in GROUPS[group])
    return hashlib.sha256(content + dotted(venv_version()).encode()).hexdigest()


def venv_version() -> tuple[int, ...]:
    script = "import sys; print(*sys.version_info[:2])"
    return tuple(map(int, subprocess.check_output([PYTHON, "-c", script], text=True).split()))


# --- shared with the other tools --------------------------------------------------------------------------------


@contextmanager
def only_one(what: str) -> Iterator[None]:
    """Two commands started at once take turns instead of building over each other."""
    path = ROOT / ".build" / f"{what}.lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def dotted(version: "Sequence[int]") -> str:
    return ".".join(map(str, version))


def say(line: str) -> None:
    print(f"· {line}", flush=True)


def stop(message: str) -> NoReturn:
    print(f"\n{message}\n", file=sys.stderr, flush=True)
    raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
