"""vLLM itself for tests: a small model of a fixed seed, engines within this process, and servers in processes of their own."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from demo.serving.servers import BLOCK, ROOT, SURROUNDINGS, free_port
from demo.serving.servers import Server as Started

__all__ = ["BLOCK", "ROOT", "Engine", "Server", "free_port", "make_model", "prompt", "transfer_config"]


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
        asked = {"model": "model", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return self.post("/v1/completions", asked | {"return_token_ids": True} | body, timeout_s)
