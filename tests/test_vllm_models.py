"""Models whose KV caches are not like a Llama's: those that the connector handles, and those that it refuses by name."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pool_support import NodeProcess
from vllm_support import BLOCK, ROOT, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.deadline(400)]

LENGTH = 300
FULL = (LENGTH - 1) // BLOCK * BLOCK
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
}
# One latent vector per token and layer in place of keys and values; all of its layers dense.
MLA = TINY | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 4,
}
SLIDING_AND_FULL = TINY | {
    "head_dim": 32,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
CONVOLUTION_AND_FULL = TINY | {
    "layer_types": ["conv", "full_attention"] * 2,
    "conv_dim": 128,
    "block_dim": 128,
    "block_ff_dim": 256,
    "block_multiple_of": 64,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
SLIDING = TINY | {"sliding_window": 64}

SCRIPT = """
import sys
sys.path.insert(0, "tests")
from pathlib import Path
import torch, transformers
from pool_support import spoil
from test_vllm_pool import poison
from vllm_support import Engine, transfer_config

folder, name, words, options, pool, pid, tokens = Path(sys.argv[1]), sys.argv[2], *map(eval, sys.argv[3:])
torch.manual_seed(7)
config = getattr(transformers, name + "TextConfig", None) or getattr(transformers, name + "Config")
getattr(transformers, name + "ForCausalLM")(config(**words)).to(torch.float32).save_pretrained(folder)
engine = Engine(folder, transfer_config(pool=pool, checksum="never"), **options)
alone = {"kvferry": {"read": False, "store": False}}
answers = [engine.tokens(tokens, params=alone), engine.tokens(tokens, params=alone)]
engine.forget()
engine.tokens(tokens, tokens=1)
engine.forget()
answers.append(engine.tokens(tokens))
used = engine.metrics()["tokens_used:pool"]
engine.forget()
spoil(pid, poison)
answers.append(engine.tokens(tokens))
(group,) = engine.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
print("ANSWER", [type(group.kv_cache_spec).__name__, used, answers])
"""


def serve(
    folder: Path, name: str, words: dict[str, Any], options: dict[str, Any]
) -> "subprocess.CompletedProcess[str]":
    node = NodeProcess(f"unix:{folder}/pool.sock", "256MiB")
    try:
        said = [str(folder / "model"), name, *map(repr, (words, options, node.address, node.pid, prompt(1, LENGTH)))]
        command = [sys.executable, "-c", SCRIPT, *said]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=350, check=False)
    finally:
        node.stop()


def hit(folder: Path, name: str, words: dict[str, Any], options: dict[str, Any], kind: str) -> list[list[int]]:
    """The answers when computed, with the local prefix cache, with the pool, and with a pool that is poisoned."""
    done = serve(folder, name, words, options)
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    seen, used, answers = ast.literal_eval(line.removeprefix("ANSWER").strip())
    assert (seen, used) == (kind, FULL)
    return list(answers)


def test_sliding_layers_beside_full_ones_hit(tmp_path: Path) -> None:
    """vLLM gives the sliding layers whole blocks where a connector wants a single group. What is loaded is what they compute
    with: poisoned, it gives another answer."""
    computed, local, loaded, poisoned = hit(tmp_path, "Gemma3", SLIDING_AND_FULL, {}, "FullAttentionSpec")
    assert loaded == local == computed != poisoned


@pytest.mark.skipif("amx_tile" not in Path("/proc/cpuinfo").read_text(), reason="vLLM's MLA with a prefix wants AMX")
def test_mla_hits_where_vllm_computes_it_behind_a_prefix(tmp_path: Path) -> None:
    """In bfloat16, which is all that this backend has; in it a prompt that is computed in two pieces may have another answer,
    so that the local prefix cache is what is to be equalled."""
    _, local, loaded, poisoned = hit(tmp_path, "DeepseekV2", MLA, {"dtype": "bfloat16"}, "MLAAttentionSpec")
    assert loaded == local != poisoned


@pytest.mark.parametrize(
    ("name", "words", "options", "sentence"),
    [
        ("Mistral", SLIDING, {}, "this model's KV cache is a SlidingWindowSpec"),
        (
            "DeepseekV2",
            MLA,
            {"attention_backend": "CPU_MLA"},
            "is a MLAAttentionSpec, and vLLM computes its prompts in one piece",
        ),
        # These two by vLLM, which knows that the connector is for models of one group.
        ("Gemma3", SLIDING_AND_FULL, {"disable_hybrid_kv_cache_manager": False}, "KvferryConnector"),
        ("Lfm2", CONVOLUTION_AND_FULL, {}, "Failed to promote local KV cache specs to one unified type"),
    ],
    ids=["sliding alone", "MLA in one piece", "two groups", "convolution beside full"],
)
def test_models_that_are_not_handled_are_refused_by_name(
    tmp_path: Path, name: str, words: Any, options: Any, sentence: str
) -> None:
    done = serve(tmp_path, name, words, options)
    assert done.returncode != 0 and sentence in done.stderr, done.stderr[-4000:]
