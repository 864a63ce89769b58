"""vLLM itself for tests: a small model of a fixed seed, engines within this process, and servers in processes of their own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from demo.serving.servers import BLOCK, ROOT, SURROUNDINGS, free_port
from demo.serving.servers import Server as Started

__all__ = [
    "ASKED",
    "BLOCK",
    "ROOT",
    "Engine",
    "Server",
    "answer_of",
    "asked_of",
    "ended",
    "free_port",
    "make_model",
    "missed",
    "prompt",
    "route",
    "running",
    "streamed",
    "tokens_of",
    "transfer_config",
    "usage",
]


# What the proxies of this dialect tell a prefill, whole.
ASKED = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)


def make_model(folder: Path, **options: int) -> Path:
    """A Llama of 4 layers with weights so large that its greedy output depends on every token before it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2} | options
    config = LlamaConfig(vocab_size=512, max_position_embeddings=4096, initializer_range=0.3, **shape)
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
        os.environ.update(SURROUNDINGS | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.llm = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            disable_log_stats=False,
            **{"dtype": "float32", "block_size": BLOCK, "max_model_len": 2048, "max_num_seqs": 8} | options,
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


class Server(Started):
    """As the demonstration starts it, and what tests ask of it."""

    def complete(self, prompt: Sequence[int], tokens: int = 8, timeout_s: float = 120.0, **body: Any) -> dict[str, Any]:
        return self.post("/v1/completions", body_of(list(prompt), max_tokens=tokens, **body), timeout_s)


def route(
    port: int, prefills: Sequence[Server], decodes: Sequence[Server], words: Sequence[str] = ()
) -> "subprocess.Popen[bytes]":
    """The router of examples/ before them; see `ended`."""
    listed = ["--port", str(port)]
    for kind, servers in (("--prefill", prefills), ("--decode", decodes)):
        for server in servers:
            listed += [kind, server.url]
    return subprocess.Popen([sys.executable, str(ROOT / "examples" / "router.py"), *listed, *words])


def ended(router: "subprocess.Popen[bytes]") -> None:
    router.terminate()
    router.wait(20)


def body_of(tokens: list[int], **body: Any) -> dict[str, Any]:
    asked = {"model": "model", "prompt": tokens, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return asked | {"return_token_ids": True} | body


def answer_of(port: int, tokens: list[int], **body: Any) -> Any:
    """What the router's client hears, whatever it is."""
    import httpx

    end = time.monotonic() + 60
    while True:
        try:
            return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body_of(tokens, **body), timeout=120)
        except httpx.ConnectError:  # the router is still starting
            assert time.monotonic() < end
            time.sleep(0.1)


def asked_of(port: int, tokens: list[int], **body: Any) -> dict[str, Any]:
    answer = answer_of(port, tokens, **body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def streamed(port: int, tokens: list[int]) -> tuple[list[int], bool]:
    """The tokens that come, and whether the answer has come to its end."""
    import httpx

    found: list[int] = []
    whole = False
    try:
        with httpx.stream(
            "POST", f"http://127.0.0.1:{port}/v1/completions", json=body_of(tokens, stream=True), timeout=120
        ) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    found += json.loads(line.removeprefix("data: "))["choices"][0].get("token_ids") or []
                whole |= line == "data: [DONE]"
    except httpx.TransportError:
        assert not whole
    return found, whole


def tokens_of(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


def running(server: Server) -> float:
    seen = server.metrics()
    return seen["num_requests_running"] + seen["num_requests_waiting"]


def usage(server: Server) -> float:
    return server.metrics()["kv_cache_usage_perc"]


def missed(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """How many tokens of handovers, and why. Then the pool is asked, which is off."""
    names = [name for name in after if name.startswith("tokens_missed:") and name != "tokens_missed:pool_off"]
    grown = {name.partition(":")[2]: after[name] - before.get(name, 0) for name in names}
    return {why: count for why, count in grown.items() if count}
