"""vLLM's OpenAI server as a process of one's own, with whatever it starts in one session, which ends as a whole."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

__all__ = ["BLOCK", "ROOT", "SURROUNDINGS", "Server", "ServerFailedError", "free_port"]

ROOT = Path(__file__).resolve().parent.parent.parent
BLOCK = 32  # tokens; vLLM's attention on the CPU wants a multiple of it
STARTS_WITHIN_S = 240.0
ENDS_WITHIN_S = 30.0
SURROUNDINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
    "TQDM_DISABLE": "1",
}


class ServerFailedError(Exception):
    """It did not start, or has ended; the sentence has its last words."""


class Server:
    """``core``: the only one on which it computes; of several workers ``0|1``."""

    def __init__(
        self,
        model: Path,
        config: dict[str, Any] | None,
        log: Path,
        core: "int | str",
        *options: str,
        port: int = 0,
        packages: str = "",
    ) -> None:
        self.port, self.log = port or free_port(), log
        self.url = f"http://127.0.0.1:{self.port}"
        words = ["--model", str(model), "--served-model-name", "model", "--host", "127.0.0.1", "--port", str(self.port)]
        words += ["--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK), "--max-num-seqs", "16"]
        if not (model / "tokenizer_config.json").exists():
            words += ["--skip-tokenizer-init"]
        if config is not None:
            words += ["--kv-transfer-config", json.dumps(config)]
        surroundings = os.environ | SURROUNDINGS | {"VLLM_CPU_OMP_THREADS_BIND": str(core)}
        if packages:
            surroundings["PYTHONPATH"] = packages
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, *options],
                env=surroundings,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> "Server":
        """Until it answers. :raises ServerFailedError: it does not."""
        end = time.monotonic() + STARTS_WITHIN_S
        while True:
            if self.process.poll() is not None or time.monotonic() > end:
                raise ServerFailedError(f"vLLM did not start; the end of {self.log}:\n{self.log.read_text()[-4000:]}")
            try:
                self.get("/health", 1)
                return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)

    def get(self, path: str, timeout_s: float = 10) -> str:
        with urllib.request.urlopen(self.url + path, timeout=timeout_s) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 120) -> dict[str, Any]:
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, kind)
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return dict(json.loads(answer.read() or b"{}"))

    def forget(self) -> None:
        """The local prefix cache. A finished request's blocks are free as soon as the workers have said so."""
        self.post("/reset_prefix_cache", {})

    def metrics(self) -> dict[str, float]:
        """Of its metrics page: kvferry's counters as ``what:label``, and others by their name, added up."""
        from prometheus_client.parser import text_string_to_metric_families

        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                name = sample.name.removeprefix("vllm:").removesuffix("_total")
                if name.endswith("_created"):
                    continue
                if name.startswith("kvferry_"):
                    label = next(v for k, v in sample.labels.items() if k not in ("model_name", "engine"))
                    name = f"{name.removeprefix('kvferry_')}:{label}"
                found[name] = found.get(name, 0) + sample.value
        return found

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """All of its processes, at once."""
        try:
            self.signal(signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            self.process.wait(ENDS_WITHIN_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(ENDS_WITHIN_S)
        self.kill()  # also whoever has outlived it


_kept: list[socket.socket] = []


def free_port() -> int:
    """Kept for whoever listens there before long, and sets SO_REUSEADDR as servers do: the kernel gives it to nobody else while
    this process lives."""
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    _kept.append(kept)
    return int(kept.getsockname()[1])
