"""The pool beneath vLLM itself: in-process engines, a small model, real pool nodes."""

import ast
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pool_support import NodeProcess, spoil
from vllm_support import BLOCK, ROOT, Engine, make_model, prompt, transfer_config

pytestmark = [pytest.mark.vllm, pytest.mark.deadline(400)]

LENGTH = 300
FULL = (LENGTH - 1) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    node = NodeProcess(f"unix:{tmp_path_factory.mktemp('pool')}/pool.sock", "256MiB")
    yield node
    node.stop()


@pytest.fixture(scope="module")
def engine(model: Path, node: NodeProcess) -> Iterator[Engine]:
    engine = Engine(
        model,
        transfer_config(pool=node.address, checksum="always", revive_ms=100, save_timeout_ms=10_000),
        num_gpu_blocks_override=100,
        max_num_batched_tokens=512,
    )
    yield engine
    engine.close()


WITHOUT_CONNECTOR = """
import sys
import threading
sys.path.insert(0, "tests")
from pathlib import Path
from vllm_support import Engine

engine = Engine(Path(sys.argv[1]), None)
print("ANSWER", [engine.tokens(tokens) for tokens in eval(sys.argv[2])])
"""
WITH_CONNECTOR = """
import sys
import threading
sys.path.insert(0, "tests")
from pathlib import Path
from vllm_support import Engine, transfer_config

engine = Engine(Path(sys.argv[1]), transfer_config(pool=sys.argv[2]))
print("ANSWER", [engine.tokens(eval(sys.argv[3])), engine.metrics()["tokens_used:pool"]])
"""


def answer_of(script: str, *words: str) -> Any:
    """What a script says in a process of its own: vLLM has one connector for each process."""
    command = [sys.executable, "-c", script, *words]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert said.returncode == 0, said.stderr[-4000:]
    (line,) = [line for line in said.stdout.splitlines() if line.startswith("ANSWER")]
    return ast.literal_eval(line.removeprefix("ANSWER").strip())


@pytest.fixture(scope="module")
def right(model: Path) -> Callable[[list[int]], list[int]]:
    """What this model answers when all is computed, by a process that knows no connector."""
    answers: dict[tuple[int, ...], list[int]] = {}

    def ask(*prompts: list[int]) -> list[int]:
        missing = [p for p in prompts if tuple(p) not in answers]
        if missing:
            said = answer_of(WITHOUT_CONNECTOR, str(model), str(missing))
            answers.update(zip(map(tuple, missing), said, strict=True))
        return answers[tuple(prompts[0])]

    ask(*(prompt(seed, LENGTH) for seed in range(1, 12)))
    return ask


def used(engine: Engine, before: dict[str, float], name: str = "tokens_used:pool") -> float:
    """What a counter has gained; all that have changed are printed, for whoever reads why a test failed."""
    now = engine.metrics()
    print({key: value - before.get(key, 0) for key, value in now.items() if value != before.get(key, 0)})
    return now.get(name, 0) - before.get(name, 0)


def test_a_prompt_hits_after_the_local_cache_was_reset(engine: Engine, right: Any) -> None:
    tokens, before = prompt(1, LENGTH), engine.metrics()
    assert engine.tokens(tokens) == right(tokens)
    assert used(engine, before) == 0
    engine.forget()
    assert engine.tokens(tokens) == right(tokens)
    assert used(engine, before) == FULL
    engine.run([1, 2, 3])
    assert used(engine, before, "external_prefix_cache_hits") == FULL


def test_the_model_s_answers_depend_on_all_of_the_prompt(right: Any) -> None:
    """Else equal answers would prove nothing."""
    assert len({tuple(right(prompt(seed, LENGTH))) for seed in range(1, 12)}) == 11


def test_what_is_in_the_local_cache_is_not_loaded(engine: Engine) -> None:
    tokens = prompt(2, LENGTH)
    engine.tokens(tokens)
    before = engine.metrics()
    engine.tokens(tokens)
    engine.run([1, 2, 3])
    assert used(engine, before) == 0
    assert used(engine, before, "blocks_saved:saved") + used(engine, before, "blocks_saved:present") <= 1


def test_only_what_lies_beyond_the_local_cache_is_loaded(engine: Engine, right: Any) -> None:
    tokens = prompt(3, LENGTH)
    engine.tokens(tokens)
    engine.forget()
    engine.run(tokens[: 4 * BLOCK + 1], tokens=1)
    before = engine.metrics()
    assert engine.tokens(tokens) == right(tokens)
    assert used(engine, before) == FULL - 4 * BLOCK


def test_another_process_hits_what_this_one_has_saved(
    engine: Engine, model: Path, node: NodeProcess, right: Any
) -> None:
    tokens = prompt(4, LENGTH)
    engine.tokens(tokens)
    assert answer_of(WITH_CONNECTOR, str(model), node.address, str(tokens)) == [right(tokens), FULL]


def test_controls_of_one_request(engine: Engine) -> None:
    tokens = prompt(20, LENGTH)
    engine.tokens(tokens, params={"kvferry": {"store": False}})
    engine.forget()
    before = engine.metrics()
    engine.tokens(tokens, params={"kvferry": {"tenant": "a"}})
    engine.forget()
    engine.tokens(tokens, params={"kvferry": {"tenant": "b"}})
    engine.forget()
    engine.tokens(tokens, params={"kvferry": {"tenant": "a", "read": False}})
    engine.forget()
    assert used(engine, before) == 0
    engine.tokens(tokens, params={"kvferry": {"tenant": "a"}})
    assert used(engine, before) == FULL


def test_a_chunked_prefill_is_saved_whole(engine: Engine, model: Path, node: NodeProcess, right: Any) -> None:
    """Three long prompts at once: vLLM cuts them to its budget of tokens per step."""
    prompts = [prompt(seed, 1500) for seed in (31, 32, 33)]
    first = [list(out.outputs[0].token_ids) for out in engine.run(*prompts, tokens=4)]
    engine.forget()
    before = engine.metrics()
    again = [list(out.outputs[0].token_ids) for out in engine.run(*prompts, tokens=4)]
    assert again == first
    assert used(engine, before) > 0


def test_preempted_requests_come_back_right(engine: Engine, right: Any) -> None:
    """100 blocks are too few for all of these at once."""
    prompts = [prompt(seed, LENGTH) for seed in range(1, 9)]
    before = engine.metrics()
    for _ in range(2):
        outs = engine.run(*prompts, tokens=200)
        for tokens, out in zip(prompts, outs, strict=True):
            assert list(out.outputs[0].token_ids)[:16] == right(tokens)
        engine.forget()
    assert used(engine, before) > 0
    assert used(engine, before, "num_preemptions") > 0


def poison(segment: Any) -> int:
    """Changes a bit in every 64 bytes that are not zero."""
    chosen = segment.view("uint32")[::16]
    chosen[chosen != 0] ^= 1 << 30  # of a float: its exponent
    return int((chosen != 0).sum())


def test_poisoned_values_are_refused(engine: Engine, node: NodeProcess, right: Any) -> None:
    tokens = prompt(5, LENGTH)
    engine.tokens(tokens)
    engine.forget()
    assert spoil(node.pid, poison) > 1000
    before = engine.metrics()
    assert engine.tokens(tokens) == right(tokens)
    engine.run([1, 2, 3])
    assert used(engine, before) == 0
    assert used(engine, before, "tokens_missed:corrupted") == FULL
    engine.forget()
    assert engine.tokens(tokens) == right(tokens), "what was computed again was saved again"
    assert used(engine, before) == FULL


CHECKS_OFF = """
import sys
import threading
sys.path.insert(0, "tests")
from pathlib import Path
from pool_support import spoil
from test_vllm_pool import poison
from vllm_support import Engine, transfer_config

model, pool, pid, tokens = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), eval(sys.argv[4])
engine = Engine(model, transfer_config(pool=pool, checksum="never"))
first = engine.tokens(tokens)
engine.forget()
spoil(pid, poison)
second = engine.tokens(tokens)
print("ANSWER", [first, second, engine.metrics()["tokens_used:pool"]])
"""


def test_with_checks_off_poisoned_values_are_used(model: Path, tmp_path: Path, right: Any) -> None:
    """Which proves that what is loaded is what the model computes with."""
    node = NodeProcess(f"unix:{tmp_path}/pool.sock", "256MiB")
    tokens = prompt(6, LENGTH)
    try:
        first, second, loaded = answer_of(CHECKS_OFF, str(model), node.address, str(node.pid), str(tokens))
    finally:
        node.stop()
    assert first == right(tokens) != second and loaded == FULL


def test_a_pool_that_is_killed_and_comes_back(engine: Engine, node: NodeProcess, right: Any) -> None:
    tokens = prompt(7, LENGTH)
    engine.tokens(tokens)
    node.kill()
    try:
        for _ in range(3):
            engine.forget()
            assert engine.tokens(tokens) == right(tokens)
    finally:
        node.start()
    end = time.monotonic() + 30
    before = engine.metrics()
    while not used(engine, before):
        assert time.monotonic() < end
        assert engine.tokens(tokens) == right(tokens)
        engine.forget()


def test_a_pool_that_stands_still_costs_no_request_its_answer(engine: Engine, node: NodeProcess, right: Any) -> None:
    tokens = prompt(8, LENGTH)
    engine.tokens(tokens)
    engine.forget()
    node.signal(signal.SIGSTOP)
    try:
        for _ in range(3):
            assert engine.tokens(tokens) == right(tokens)
    finally:
        node.signal(signal.SIGCONT)
    engine.forget()


def test_a_slow_pool_costs_no_request_its_answer(engine: Engine, node: NodeProcess, right: Any) -> None:
    """It runs for a moment and stands still for much longer, again and again, while prompts are looked for, loaded and saved."""
    over = threading.Event()

    def slow() -> None:
        chance = random.Random(7)
        while not over.wait(chance.uniform(0, 0.005)):
            node.signal(signal.SIGSTOP)
            over.wait(chance.uniform(0, 0.5))
            node.signal(signal.SIGCONT)

    before, prompts = engine.metrics(), [prompt(number, LENGTH) for number in range(40, 44)]
    thread = threading.Thread(target=slow)
    thread.start()
    try:
        for _ in range(4):
            for tokens in prompts:
                assert engine.tokens(tokens) == right(tokens)
            engine.forget()
    finally:
        over.set()
        thread.join(10)
        node.signal(signal.SIGCONT)
    assert not thread.is_alive()
    hits, end = used(engine, before), time.monotonic() + 30
    while used(engine, before) == hits:  # it is asked again, and what came late changed nothing
        assert time.monotonic() < end
        assert engine.tokens(prompts[0]) == right(prompts[0])
        engine.forget()


def test_aborted_requests_leave_no_block_behind(engine: Engine, right: Any) -> None:
    from vllm import SamplingParams

    core = engine.llm.llm_engine
    tokens = prompt(9, LENGTH)
    engine.tokens(tokens)
    engine.forget()
    for steps in range(6):
        sampling = SamplingParams(max_tokens=50, temperature=0, detokenize=False, ignore_eos=True)
        core.add_request(f"aborted {steps}", {"prompt_token_ids": tokens}, sampling)
        for _ in range(steps):
            core.step()
        core.abort_request([f"aborted {steps}"], internal=False)
    engine.forget()
    assert engine.tokens(tokens) == right(tokens)


BENEATH_MULTI = """
import json, sys
sys.path.insert(0, "tests")
from pathlib import Path
from vllm_support import Engine, transfer_config

model, pool, tokens = Path(sys.argv[1]), sys.argv[2], eval(sys.argv[3])
children = [transfer_config(pool="off", pull_timeout_ms=5000), transfer_config(pool=pool, handover=False)]
config = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"connectors": children},
}
engine = Engine(model, config)
engine.run([1, 2, 3])
first = engine.tokens(tokens)
engine.forget()
second = engine.tokens(tokens)
seen = engine.llm.llm_engine.engine_core.engine_core.scheduler.connector._connectors
(given,) = engine.run(tokens[:200], tokens=1, params={"do_remote_decode": True})
print("ANSWER", [first, second, engine.metrics()["external_prefix_cache_hits"], sorted(given.kv_transfer_params)[:2]])
"""


def test_beneath_vllm_s_multi_connector(model: Path, node: NodeProcess, right: Any) -> None:
    tokens = prompt(11, LENGTH)
    first, second, hits, words = answer_of(BENEATH_MULTI, str(model), node.address, str(tokens))
    assert first == second == right(tokens)
    assert hits == FULL
    assert words == ["do_remote_decode", "do_remote_prefill"]
