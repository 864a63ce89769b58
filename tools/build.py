"""Builds kvferry and the compat packages into ``.venv``, compiling only what changed.

    .venv/bin/python tools/build.py

All are installed *editable*: Python files are read from ``src/``, so an edit counts at once; the native modules
lie in ``.venv`` and their build trees in the projects, where ninja knows what an edit touches. pip (two or three
seconds even with nothing to do) is asked only when a ``pyproject.toml`` changed. We do not use scikit-build-core's
rebuild-on-import: a test starts many processes, and each would look at the build tree first.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from environment import ROOT, VENV, only_one, pip_install, say, stop

DOES_NOT_BUILD = "The native code does not build (the compiler's words are above)."


@dataclass(frozen=True)
class Project:
    """One distribution with native code. ``trees``: where its build trees lie; its ``build-dir`` says the same."""

    name: str
    root: Path
    trees: Path
    targets: tuple[str, ...]  # what is installed
    tests: str  # the target that builds its test programs

    @property
    def build(self) -> Path:
        return self.trees / str(sys.implementation.cache_tag)


KVFERRY = Project("kvferry", ROOT, ROOT / ".build", ("_core", "llm_datadist"), "kvferry_core_tests")
COMPAT_ROOT = ROOT / "compat" / "llm_datadist"
COMPAT = Project("llm_datadist", COMPAT_ROOT, COMPAT_ROOT / "build", ("_rules",), "llm_datadist_tests")
PROJECTS = (KVFERRY, COMPAT)
WITHOUT_NATIVE_CODE = {"ems": ROOT / "compat" / "ems"}


def main() -> None:
    with only_one("build"):
        for project in PROJECTS:
            install_or_build(project)
        for name, root in WITHOUT_NATIVE_CODE.items():
            if not is_installed(name, root):
                install(name, root)


def install_or_build(project: Project) -> None:
    forget_a_moved_tree(project.build, project)
    if is_installed(project.name, project.root) and (project.build / "build.ninja").exists():
        cmake("--build", project.build, "--target", *project.targets)
        cmake("--install", project.build, "--prefix", sysconfig.get_path("platlib"))
        return
    say(f"building the native code of {project.name}" + (" (about a minute)" if project is KVFERRY else ""))
    install(project.name, project.root, "--config-settings=cmake.define.KVFERRY_TESTS=ON")  # pip before 23.1 has no -C


def is_installed(name: str, root: Path) -> bool:
    stamp = editable_stamp(name)
    return stamp.exists() and stamp.read_text() == fingerprint(root / "pyproject.toml")


def install(name: str, root: Path, *settings: str) -> None:
    stamp = editable_stamp(name)
    stamp.unlink(missing_ok=True)
    where = ("-e", root)
    pip_install("--no-build-isolation", "--no-deps", *settings, *where, env=surroundings(), otherwise=DOES_NOT_BUILD)
    stamp.write_text(fingerprint(root / "pyproject.toml"))


def editable_stamp(name: str) -> Path:
    return VENV / f"{name}-editable.stamp"


def forget_a_moved_tree(tree: Path, project: Project) -> None:
    """A build tree copied or moved with its folder still points at the old place."""
    cache = tree / "CMakeCache.txt"
    if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={project.root}\n" not in cache.read_text():
        shutil.rmtree(tree)


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
