"""vLLM itself for tests: a small model of a fixed seed, engines within this process, and servers in processes of their own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
BLOCK = 32  # vLLM's attention on the CPU wants a multiple of it
SURROUNDINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TQDM_DISABLE": "1",
}
STARTS_WITHIN_S = 150.0


def make_model(folder: Path) -> Path:
    """A Llama of 4 layers with weights so large that its greedy output depends on every token before it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


def transfer_config(role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KvferryConnector",
        "kv_connector_module_path": "kvferry.connectors.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        # Of a model as small as that of the tests, computing is faster than a busy machine's pool.
        "kv_connector_extra_config": {"bounded": False, "lookup_timeout_ms": 2000, "load_timeout_ms": 5000} | extra,
    }


class Engine:
    """vLLM within this process."""

    def __init__(self, model: Path, config: "dict[str, Any] | None", **options: Any) -> None:
        os.environ.update(SURROUNDINGS)
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.llm = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            disable_log_stats=False,
            **{"block_size": BLOCK, "max_model_len": 2048, "max_num_seqs": 8} | options,
            kv_transfer_config=None if config is None else KVTransferConfig(**config),
        )

    def run(self, *prompts: Sequence[int], tokens: int = 16, params: "dict[str, Any] | None" = None) -> list[Any]:
        from vllm import SamplingParams

        extra = {"extra_args": {"kv_transfer_params": params}} if params else {}
        sampling = SamplingParams(max_tokens=tokens, temperature=0, detokenize=False, ignore_eos=True, **extra)
        return self.llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)

    def tokens(self, prompt: Sequence[int], **options: Any) -> list[int]:
        return list(self.run(prompt, **options)[0].outputs[0].token_ids)

    def forget(self) -> None:
        """The local prefix cache, and nothing else. A step of something else first: a finished request's blocks are free
        when the workers have said so."""
        for _ in range(50):
            self.run([1, 2, 3], tokens=2)
            if self.llm.reset_prefix_cache():
                return
            time.sleep(0.05)
        raise AssertionError("blocks stay taken")

    def metrics(self) -> dict[str, float]:
        """kvferry's counters, as ``what:label``, and vLLM's of external tokens."""
        found: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            name = metric.name.removeprefix("vllm:")
            if name.startswith("kvferry_"):
                label = next(value for key, value in metric.labels.items() if key not in ("model_name", "engine"))
                found[f"{name.removeprefix('kvferry_')}:{label}"] = metric.value
            elif name.startswith(("external_prefix_cache", "num_preemptions")):
                found[name] = metric.value
        return found

    def close(self) -> None:
        import gc

        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        cleanup_dist_env_and_memory()
        gc.collect()


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """vLLM's OpenAI server, with all its processes in a session of their own, which ends with this object."""

    def __init__(
        self,
        model: Path,
        config: "dict[str, Any] | None",
        log: Path,
        core: int,
        *options: str,
        path: str = "",
        port: int = 0,
    ) -> None:
        import json

        self.port, self.log = port or free_port(), log
        self.url = f"http://127.0.0.1:{self.port}"
        words = ["--model", str(model), "--served-model-name", "model", "--host", "127.0.0.1", "--port", str(self.port)]
        words += ["--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK), "--max-num-seqs", "16"]
        if "--tokenizer" not in options and not (model / "tokenizer_config.json").exists():
            words += ["--skip-tokenizer-init"]
        if config is not None:
            words += ["--kv-transfer-config", json.dumps(config)]
        surroundings = (
            os.environ
            | SURROUNDINGS
            | {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                "VLLM_CPU_OMP_THREADS_BIND": str(core),
            }
        )
        if path:
            surroundings["PYTHONPATH"] = path
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, *options],
            env=surroundings,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self) -> "Server":
        import httpx

        end = time.monotonic() + STARTS_WITHIN_S
        while True:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                if httpx.get(f"{self.url}/health", timeout=1).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            assert time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.2)

    def complete(
        self, prompt: "Sequence[int] | str", tokens: int = 8, timeout_s: float = 60.0, **body: Any
    ) -> dict[str, Any]:
        import httpx

        asked = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(
            f"{self.url}/v1/completions", json=asked | {"return_token_ids": True} | body, timeout=timeout_s
        )
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def metrics(self) -> dict[str, float]:
        import httpx
        from prometheus_client.parser import text_string_to_metric_families

        found: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=10).text):
            for sample in family.samples:
                name = sample.name.removeprefix("vllm:").removesuffix("_total")
                if name.startswith("kvferry_") and not name.endswith("_created"):
                    label = next(v for k, v in sample.labels.items() if k not in ("model_name", "engine"))
                    found[f"{name.removeprefix('kvferry_')}:{label}"] = sample.value
                elif name.startswith("external_prefix_cache"):
                    found[name] = sample.value
        return found

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """All of its processes, at once."""
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
            self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # whoever has outlived it
        except ProcessLookupError:
            return
