"""Builds and runs the test programs of the native code, the core's and the compat package's, plain or under sanitizers.

.venv/bin/python tools/core_tests.py                      # in the build tree that `make test` uses
.venv/bin/python tools/core_tests.py address thread       # each in a tree of its own, warnings as errors
.venv/bin/python tools/core_tests.py strict               # compiles module and core with warnings as errors
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from build import PROJECTS, Project, cmake, forget_a_moved_tree
from environment import VENV, only_one, say, stop

SANITIZERS = {"address": "address,undefined", "thread": "thread"}
RUNTIMES = {"address": "libasan.so", "thread": "libtsan.so"}
OPTIONS = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "second_deadlock_stack=1",
}
TSAN_RANDOM_BITS = 28  # with more randomised address bits the runtimes of g++ before 14 do not start


def main(kinds: list[str]) -> None:
    with only_one("build"):
        if not kinds:
            for project in PROJECTS:
                cmake("--build", project.build, "--target", project.tests)
                ctest(project.build, together=len(os.sched_getaffinity(0)))
        for kind in kinds:
            if kind == "strict":
                say("compiling the native code and its modules with warnings as errors")
                python = (f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind_folder()}")
                for project in PROJECTS:
                    cmake("--build", configured(project, "strict", *python), "--target", *project.targets)
            elif kind in SANITIZERS:
                sanitize(kind)
            else:
                stop(f"usage: core_tests.py [strict] [{'] ['.join(SANITIZERS)}]")


def sanitize(kind: str) -> None:
    say(f"native tests under the {SANITIZERS[kind]} sanitizer")
    need_runtime(kind)
    for project in PROJECTS:
        how = ("-DKVFERRY_MODULE=OFF", "-DKVFERRY_TESTS=ON", f"-DKVFERRY_SANITIZE={SANITIZERS[kind]}")
        tree = configured(project, kind, *how)
        cmake("--build", tree, "--target", project.tests)
        ctest(tree, prefix=fixed_addresses() if kind == "thread" else [])


def configured(project: Project, name: str, *definitions: str) -> Path:
    """A build tree of its own, with warnings as errors."""
    tree = project.trees / name
    forget_a_moved_tree(tree, project)
    ninja = f"-DCMAKE_MAKE_PROGRAM={VENV / 'bin' / 'ninja'}"
    cmake("-S", project.root, "-B", tree, "-G", "Ninja", ninja, "-DKVFERRY_WERROR=ON", *definitions)
    return tree


def ctest(tree: Path, prefix: "list[str] | None" = None, together: int = 1) -> None:
    """``together``: how many programs run at a time. Under a sanitizer each of them has the machine for itself."""
    command = [*(prefix or []), str(VENV / "bin" / "ctest"), "--test-dir", str(tree), "--output-on-failure"]
    command += ["--no-tests=error", f"-j{together}"]
    result = subprocess.run(command, env=OPTIONS | os.environ, check=False)
    if result.returncode:
        kept = tree / f"failed-{time.strftime('%Y%m%d-%H%M%S')}.log"  # the next run writes over ctest's own
        shutil.copyfile(tree / "Testing" / "Temporary" / "LastTest.log", kept)
        stop(f"Tests of the native code failed (see above; {kept} has what every program said).")


def need_runtime(kind: str) -> None:
    compiler = os.environ.get("CXX", "g++")
    answer = subprocess.run(
        [compiler, f"-print-file-name={RUNTIMES[kind]}"], capture_output=True, text=True, check=True
    )
    if answer.stdout.strip() == RUNTIMES[kind]:  # not found: the name comes back as it was given
        stop(f"{compiler} has no {kind} sanitizer ({RUNTIMES[kind]}). Debian and Ubuntu bring it with: apt install g++")


def fixed_addresses() -> list[str]:
    bits = Path("/proc/sys/vm/mmap_rnd_bits")
    return ["setarch", "-R"] if bits.exists() and int(bits.read_text()) > TSAN_RANDOM_BITS else []


def nanobind_folder() -> str:
    return subprocess.check_output([sys.executable, "-m", "nanobind", "--cmake_dir"], text=True).strip()


if __name__ == "__main__":
    main(sys.argv[1:])
