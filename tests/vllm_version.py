"""What a release of vLLM does with the connector: run as a script in a process with that release on its path.

    python tests/vllm_version.py prefill MODEL          # hands one request over, says how, and stays until its input ends
    python tests/vllm_version.py all MODEL POOL PARAMS ANSWER

Prints lines of JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from vllm_support import BLOCK, Engine, prompt, transfer_config

LENGTH = 300
FULL = (LENGTH - 1) // BLOCK * BLOCK
TOKENS = prompt(500, LENGTH)


def say(value: Any) -> None:
    print("SAID " + json.dumps(value), flush=True)


def prefill(model: Path) -> None:
    engine = Engine(model, transfer_config(pool="off", window_ttl_ms=120_000))
    counted = counting(engine)
    (out,) = engine.run(TOKENS, tokens=1, params={"do_remote_decode": True})
    say({"params": out.kv_transfer_params, "answer": engine.tokens(TOKENS)})
    sys.stdin.read()
    engine.run([1, 2, 3], tokens=3)
    say(counted)


def everything(model: Path, pool: str, params: "dict[str, Any]", answer: list[int]) -> None:
    import vllm

    engine = Engine(
        model,
        transfer_config(pool=pool, checksum="always", pull_timeout_ms=20_000, save_timeout_ms=20_000),
        num_gpu_blocks_override=100,
    )
    found: dict[str, bool] = {}
    counted = counting(engine)

    def gained(name: str, before: dict[str, float]) -> float:
        engine.run([1, 2, 3], tokens=2)
        return (engine.metrics() | counted).get(name, 0) - before.get(name, 0)

    before = dict(counted)
    same = engine.tokens(TOKENS, params=params) == answer
    found["handover"] = same and gained("tokens_used:handover", before) == LENGTH

    engine.forget()
    before = dict(counted)
    (out,) = engine.run(TOKENS)
    same = list(out.outputs[0].token_ids) == answer
    found["pool hit"] = same and gained("tokens_used:pool", before) == FULL
    found["vLLM counts it"] = out.num_cached_tokens == FULL

    prompts = [prompt(seed, LENGTH) for seed in range(510, 518)]
    alone = [list(out.outputs[0].token_ids) for p in prompts for out in engine.run(p, tokens=100)]
    engine.forget()
    before = engine.metrics()
    together = [list(out.outputs[0].token_ids) for out in engine.run(*prompts, tokens=100)]
    found["preemption"] = together == alone and gained("num_preemptions", before) > 0

    engine.forget()
    failing_look(engine, pool)
    before = dict(counted)
    same = engine.tokens(TOKENS) == answer
    found["failed load computed"] = same and gained("tokens_missed:removed", before) == FULL

    core = engine.llm.llm_engine
    from vllm import SamplingParams

    for steps in range(4):
        engine.forget()
        core.add_request(f"aborted {steps}", {"prompt_token_ids": TOKENS}, SamplingParams(max_tokens=50))
        for _ in range(steps):
            core.step()
        core.abort_request([f"aborted {steps}"], internal=False)
    engine.forget()
    found["aborts"] = engine.tokens(TOKENS) == answer

    say({"version": vllm.__version__, "found": found})


def counting(engine: Engine) -> dict[str, float]:
    """What the connector counts. (vLLM 0.27 loses, in a process without a server, what is counted in steps without output.)"""
    counts = engine.llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler.counts
    add, together = counts.add, dict[str, float]()

    def adding(what: str, label: str, number: float = 1) -> None:
        together[f"{what}:{label}"] = together.get(f"{what}:{label}", 0) + number
        add(what, label, number)

    counts.add = adding
    return together


def failing_look(engine: Engine, pool: str) -> None:
    """The pool forgets everything between its answer to what it has, and the load."""
    import kvferry

    connector = engine.llm.llm_engine.engine_core.engine_core.scheduler.connector
    plan = connector._scheduler
    matched = plan.matched

    def clearing(request_id: str, computed: int) -> Any:
        answer = matched(request_id, computed)
        if answer[0]:
            with kvferry.Pool.connect(pool, namespace="vllm") as other:
                other.clear()
            plan.matched = matched
        return answer

    plan.matched = clearing


if __name__ == "__main__":
    if sys.argv[1] == "prefill":
        prefill(Path(sys.argv[2]))
    else:
        everything(Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]), json.loads(sys.argv[5]))
