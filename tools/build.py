"""Builds kvferry into ``.venv``, compiling only what changed, and installs the compat packages beside it.

    .venv/bin/python tools/build.py

kvferry is installed *editable*: Python files are read from ``src/``, so an edit counts at once; the native module
lies in ``.venv`` and its build tree in ``.build/``, where ninja knows what an edit touches. pip (two or three
seconds even with nothing to do) is asked only when ``pyproject.toml`` changed. We do not use scikit-build-core's
rebuild-on-import: a test starts many processes, and each would look at the build tree first.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from environment import ROOT, VENV, only_one, pip_install, say, stop

BUILD = ROOT / ".build" / str(sys.implementation.cache_tag)  # `build-dir` of pyproject.toml says the same
COMPAT = ROOT / "compat" / "llm_datadist"
DOES_NOT_BUILD = "The native core does not build (the compiler's words are above)."


def main() -> None:
    with only_one("build"):
        install_or_build()
        install_compat()


def install_or_build() -> None:
    forget_a_moved_tree()
    stamp = VENV / "kvferry-editable.stamp"
    wanted = fingerprint(ROOT / "pyproject.toml")
    if stamp.exists() and stamp.read_text() == wanted and (BUILD / "build.ninja").exists():
        cmake("--build", BUILD, "--target", "_core")
        cmake("--install", BUILD, "--prefix", sysconfig.get_path("platlib"))
        return
    say("building kvferry's native core (about a minute the first time)")
    stamp.unlink(missing_ok=True)
    tests_too = "--config-settings=cmake.define.KVFERRY_TESTS=ON"  # pip before 23.1 has no -C
    pip_install(
        "--no-build-isolation", "--no-deps", tests_too, "-e", ROOT, env=surroundings(), otherwise=DOES_NOT_BUILD
    )
    stamp.write_text(wanted)


def install_compat() -> None:
    """The vendor-named package, a distribution of its own; editable for the same reason."""
    if not (COMPAT / "pyproject.toml").exists():
        return
    stamp = VENV / "llm-datadist-editable.stamp"
    wanted = fingerprint(COMPAT / "pyproject.toml")
    if not (stamp.exists() and stamp.read_text() == wanted):
        otherwise = "compat/llm_datadist could not be installed (pip's words are above)."
        pip_install("--no-build-isolation", "--no-deps", "-e", COMPAT, otherwise=otherwise)
        stamp.write_text(wanted)


def forget_a_moved_tree() -> None:
    """A build tree copied or moved with its folder still points at the old place."""
    cache = BUILD / "CMakeCache.txt"
    if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache.read_text():
        shutil.rmtree(BUILD)


def cmake(*arguments: "str | Path") -> None:
    """Run CMake, quietly when all is well."""
    command = [VENV / "bin" / "cmake", *arguments]
    answer = subprocess.run(
        command, env=surroundings(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if answer.returncode:
        print(answer.stdout, file=sys.stderr)
        stop(DOES_NOT_BUILD)
    if "warning:" in answer.stdout:
        print(answer.stdout, file=sys.stderr)


def surroundings() -> dict[str, str]:
    """CMake and ninja from ``.venv``, and no more compilers at once than cores (ninja alone would start two more)."""
    path = f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {"CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)} | dict(os.environ) | {"PATH": path}


def fingerprint(path: Path) -> str:
    return hashlib.sha256(path.read_bytes() + str(ROOT).encode()).hexdigest()


if __name__ == "__main__":
    main()
