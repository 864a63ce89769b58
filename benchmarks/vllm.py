"""The connector for vLLM, measured: first tokens on every way, what a dead pool costs, and what a step costs.

    make bench-vllm                                    all of it, some minutes
    .venv-vllm/bin/python benchmarks/vllm.py --rounds 9 --case first-token

Two vLLM servers with a real model (SmolLM2-135M, float32), each on one core, and pool nodes of the benchmark's own. Needs
a machine that does nothing else. Medians of rounds; ways are taken in turns within each round, with a new prompt for each.
"""

import argparse
import itertools
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo import prompt
from demo.pool_node import PoolNode
from demo.report import plain
from demo.serving.servers import Server
from demo.weights import smollm2

DAYS = 78  # about 2,900 tokens
POOL_BYTES = 4 << 30
SAVING_S = 1.0
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}
ALONE = {"kvferry": {"store": False, "read": False}}
Row = tuple[str, str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--days", type=int, default=DAYS, help="the prompt's length, in days of a log book")
    parser.add_argument("--case", choices=sorted(CASES), action="append")
    asked = parser.parse_args()
    rows: list[Row] = [("what", "measured", "target", "met")]
    for name in asked.case or CASES:
        print(f"· {name}", flush=True)
        rows += CASES[name](asked.rounds, asked.days)
    print("\n" + plain(rows))


@contextmanager
def servers(count: int) -> Iterator[tuple[PoolNode, list[Server]]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvferry-bench-")))
        pool = stack.enter_context(PoolNode(POOL_BYTES))
        started = []
        for core in range(count):
            config = {
                "kv_connector": "KvferryConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"pool": pool.address},
            }
            server = Server(smollm2(), config, folder / f"{core}.log", core, "--max-model-len", "4096")
            stack.callback(server.close)
            started.append(server)
        stack.callback(pool.close)
        for server in started:
            server.wait()
            first_token(server, "Ready?")
        yield pool, started


def first_token(server: Server, text: str, params: "dict[str, Any] | None" = None) -> tuple[float, dict[str, Any]]:
    """Seconds of a request for one token, and its answer."""
    body = {"model": "model", "prompt": text, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    began = time.perf_counter()
    answer = server.post("/v1/completions", body | {"kv_transfer_params": params or {}})
    return time.perf_counter() - began, answer


def texts(days: int) -> Iterator[str]:
    """Prompts that have no block in common."""
    return (f"Book {number} of {time.time_ns()}. {prompt.text(days)}" for number in itertools.count())


def ways(rounds: int, days: int) -> list[Row]:
    seen: dict[str, list[float]] = {"computed": [], "pool": [], "local": [], "prefill": [], "handed over": []}
    with servers(2) as (_, (one, other)):
        book = texts(days)
        for _ in range(rounds):
            text = next(book)
            seen["computed"].append(first_token(one, text, ALONE)[0])
            one.forget()
            first_token(other, text)  # saves it; its last blocks are on their way when it answers
            time.sleep(SAVING_S)
            seen["pool"].append(first_token(one, text)[0])
            seen["local"].append(first_token(one, text)[0])
            text = next(book)
            seconds, answer = first_token(other, text, ASKED)
            seen["prefill"].append(seconds)
            one.forget()
            seen["handed over"].append(first_token(one, text, answer["kv_transfer_params"])[0])
    median = {name: statistics.median(values) for name, values in seen.items()}
    near, far = median["pool"] / median["local"], median["computed"] / median["pool"]
    added = median["handed over"] / median["prefill"]
    return [
        *((f"first token, {name}", f"{1e3 * value:.0f} ms", "", "") for name, value in median.items()),
        ("pool against local", f"{near:.2f} x", "≤ 1.5 x", met(near <= 1.5)),
        ("pool against computing", f"{far:.0f} x faster", "≥ 10 x", met(far >= 10)),
        ("handover against prefill", f"+{100 * added:.1f} %", "≤ 10 %", met(added <= 0.1)),
    ]


def killed(rounds: int, days: int) -> list[Row]:
    """The pool is killed while a prompt's blocks are being loaded from it; then requests without it, as before with it."""
    after: list[float] = []
    later: list[float] = []
    with servers(1) as (pool, (server,)):
        book = texts(days)
        computed = statistics.median(first_token(server, next(book), ALONE)[0] for _ in range(rounds))
        text = next(book)
        first_token(server, text)
        time.sleep(1)
        server.forget()
        os.kill(pool.pid, signal.SIGSTOP)  # it stands still in the middle of its answer, and then it is gone
        pid = os.fork()
        if pid == 0:
            time.sleep(0.02)
            os.kill(pool.pid, signal.SIGKILL)
            os._exit(0)
        after.append(first_token(server, text)[0])
        os.waitpid(pid, 0)
        later += [first_token(server, next(book))[0] for _ in range(rounds)]
    extra, later_extra = after[0] - computed, statistics.median(later) - computed
    return [
        ("first token without the pool", f"{1e3 * computed:.0f} ms", "", ""),
        ("next request, pool killed in mid-flight", f"{1e3 * extra:+.0f} ms", "≤ 500 ms", met(extra <= 0.5)),
        ("later ones, median", f"{1e3 * later_extra:+.0f} ms", "0", met(later_extra <= 0.05 * computed)),
    ]


def step(rounds: int, days: int) -> list[Row]:
    """Both sides of a step in which sixteen requests decode and nothing is loaded or saved; without vLLM."""
    import numpy as np

    from kvferry.connectors.vllm.requests import Asked, Scheduled, Step
    from kvferry.connectors.vllm.scheduler import SchedulerSide
    from kvferry.connectors.vllm.settings import Settings
    from kvferry.connectors.vllm.worker import WorkerSide

    class Tensor:
        array = np.zeros((512, 32, 64), np.float32)
        shape, dtype, device = array.shape, "float32", "cpu"

        def data_ptr(self) -> int:
            return int(self.array.ctypes.data)

        def stride(self) -> tuple[int, ...]:
            return (32 * 64, 64, 1)

        def element_size(self) -> int:
            return 4

    with PoolNode(64 << 20) as pool:
        settings = Settings.read({"pool": pool.address})
        worker, scheduler = WorkerSide(settings), SchedulerSide(settings, block_tokens=32, model="m")
        scheduler.placed({0: worker.registered({"layer": Tensor()}, 512)})
        names = [str(number) for number in range(16)]
        for name in names:
            scheduler.began(Asked(name, list(range(510)), 510, {"kvferry": {"read": False}}))
            scheduler.matched(name, 0)
            scheduler.allocated(name, list(range(1, 17)), 0)
        taken = []
        for _ in range(rounds):
            began = time.perf_counter()
            for _ in range(1000):
                orders = scheduler.step(Step([Scheduled(name, [], False, 31) for name in names], frozenset(), 16))
                worker.begin(orders)
                worker.start_loads(orders)
                worker.start_saves(orders)
                worker.finished()
                worker.failed_blocks()
                worker.report()
            taken.append((time.perf_counter() - began) / 1000)
        scheduler.close()
        worker.close()
    median = statistics.median(taken)
    return [("a step of 16 requests", f"{1e6 * median:.0f} µs", "≤ 200 µs", met(median <= 200e-6))]


def met(yes: bool) -> str:
    return "yes" if yes else "NO"


CASES: dict[str, Callable[[int, int], list[Row]]] = {"first-token": ways, "killed-pool": killed, "step": step}

if __name__ == "__main__":
    main()
