"""The connector for vLLM, measured: first tokens on every way, what a dead pool costs, and what a step costs.

    make bench-vllm                                    all of it, some minutes
    .venv-vllm/bin/python benchmarks/vllm.py --rounds 9 --case first-token

Two vLLM servers with a real model (SmolLM2-135M, float32), each on one core, and pool nodes of the benchmark's own. Needs
a machine that does nothing else. Medians of rounds; ways are taken in turns within each round, with a new prompt for each
round. benchmarks/README.md says what the rows mean.
"""

import argparse
import itertools
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo import prompt
from demo.pool_node import PoolNode
from demo.report import plain
from demo.serving.servers import Server, free_port
from demo.weights import smollm2

DAYS = 78  # about 2,900 tokens
SHORT_DAYS = 20  # about 740, for what does not depend on the length
POOL_BYTES = 4 << 30
SAVING_S = 1.0
WAITED = "request_queue_time_seconds_sum"
STANDING_S = 0.02  # a pool that dies stands still for a moment first, in the middle of whatever it is saying
STRIKING_S = 0.015  # after a request has been sent, its prompt is looked for and loaded within so long
PATIENCE_S = 60.0
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}
ALONE = {"kvferry": {"store": False, "read": False}}
Row = tuple[str, str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--days", type=int, default=DAYS, help="the prompt's length, in days of a log book")
    parser.add_argument("--case", choices=sorted(CASES), action="append")
    asked = parser.parse_args()
    rows: list[Row] = [("what", "measured", "target", "met")]
    for name in asked.case or CASES:
        print(f"· {name}", flush=True)
        rows += CASES[name](asked.rounds, asked.days)
    print("\n" + plain(rows))


class Instance(Server):
    node: str  # where its connector listens


@contextmanager
def servers(count: int) -> Iterator[tuple[PoolNode, list[Instance]]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvferry-bench-")))
        pool = stack.enter_context(PoolNode(POOL_BYTES))
        started = []
        for core in range(count):
            node = f"127.0.0.1:{free_port()}"
            config = {
                "kv_connector": "KvferryConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"pool": pool.address, "push": True, "listen": node},
            }
            server = Instance(smollm2(), config, folder / f"{core}.log", core, "--max-model-len", "4096")
            server.node = node
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
    seen: dict[str, list[float]] = {}

    def take(name: str, value: float) -> None:
        seen.setdefault(name, []).append(value)

    with servers(2) as (_, (one, other)):
        book = texts(days)
        for _ in range(rounds):
            text = next(book)
            take("computed", first_token(one, text, ALONE)[0])
            one.forget()
            prefill_s, answer = first_token(other, text, ASKED)
            before = counted(one)
            handed_s = first_token(one, text, answer["kv_transfer_params"])[0]
            take("prefilled elsewhere", prefill_s)
            take("then handed over", handed_s)
            take("added", handed_s / prefill_s)
            take("pulling", gained(one, before, "seconds:pulling", "tokens_used:handover"))
            one.forget()
            time.sleep(SAVING_S)  # its last blocks were on their way to the pool when it answered
            before = counted(one)
            pool_s = first_token(one, text)[0]
            gained(one, before, "seconds:loading", "tokens_used:pool")
            local_s = first_token(one, text)[0]
            take("pool", pool_s)
            take("local cache", local_s)
            take("near", pool_s / local_s)
            before = counted(other)
            take("pushed to meanwhile", pushed(other, one, next(book)))
            take("pushing", gained(other, before, "seconds:pushing", "handovers:pushed"))
    median = {name: statistics.median(values) for name, values in seen.items()}
    far, hidden = median["computed"] / median["pool"], 1 - median["pushing"] / median["pulling"]
    names = ("computed", "pool", "local cache", "prefilled elsewhere", "then handed over", "pushed to meanwhile")
    return [
        *((f"first token, {name}", ms(median[name]), "", "") for name in names),
        ("pool against local cache", f"{median['near']:.2f} x", "≤ 1.5 x", met(median["near"] <= 1.5)),
        ("pool against computing", f"{far:.0f} x faster", "≥ 10 x", met(far >= 10)),
        ("handover against prefill", f"+{100 * median['added']:.1f} %", "≤ 10 %", met(median["added"] <= 0.1)),
        ("all blocks pulled, when computed", f"{1e3 * median['pulling']:.1f} ms", "", ""),
        ("pushed: still to come, when computed", f"{1e3 * median['pushing']:.1f} ms", "", ""),
        ("hidden by pushing", f"{100 * hidden:.0f} %", "≥ 80 %", met(hidden >= 0.8)),
    ]


def pushed(prefill: Instance, decode: Instance, text: str) -> float:
    """Both get it at once; seconds of decode's."""
    name, (host, _, port) = str(time.time_ns()), prefill.node.rpartition(":")
    told = {"do_remote_prefill": True, "kvferry_push": name, "remote_host": host, "remote_port": int(port)}
    with ThreadPoolExecutor(1) as threads:
        decoding = threads.submit(first_token, decode, text, told)
        first_token(prefill, text, {"do_remote_decode": True, "kvferry_push": name})
        return decoding.result()[0]


def counted(server: Server) -> dict[str, float]:
    """Its metrics, with what its last request has left to count."""
    first_token(server, "Ready?", ALONE)
    return server.metrics()


def gained(server: Server, before: dict[str, float], name: str, proof: str) -> float:
    """What a counter has gained. ``proof``: one that has gained too if the way was taken that is measured."""
    after = counted(server)
    if after.get(proof, 0) <= before.get(proof, 0):
        raise SystemExit(f"{proof} has not grown: that was another way than the one to be measured")
    return after.get(name, 0) - before.get(name, 0)


def killed(rounds: int, days: int) -> list[Row]:
    """The pool is killed while a prompt is looked for and loaded, each round a bit later in that time; then there is none.

    What that adds is what the request has waited before its prompt was computed, by vLLM's own account: two computations
    of the same length differ by more than these waits."""
    waits: list[float] = []
    later: list[float] = []
    added: list[float] = []
    later_added: list[float] = []
    undisturbed: list[float] = []
    apart: list[float] = []
    with servers(1) as (pool, (server,)), ThreadPoolExecutor(1) as threads:
        book = texts(SHORT_DAYS)

        def ask(
            text: str, params: "dict[str, Any] | None" = None, strike_s: float | None = None
        ) -> tuple[float, float, bool]:
            """Seconds to its first token, those of them before it was computed, and whether any of it was missed.
            ``strike_s``: so long after it was sent the pool is killed."""
            before = counted(server)
            striking = None if strike_s is None else threads.submit(strike, pool, strike_s)
            seconds = first_token(server, text, params)[0]
            if striking is not None:
                striking.result()
            after = counted(server)
            return seconds, after[WAITED] - before[WAITED], missed(after) > missed(before)

        for number in range(rounds):
            text = kept(server, book)
            first = ask(next(book), ALONE)[0]
            seconds, waited, in_time = ask(text, strike_s=STRIKING_S * number / rounds)
            if in_time:  # else all was there before the pool was gone
                waits.append(waited)
                added.append(seconds - first)
            asked = [ask(next(book), params) for params in (None, ALONE, None, ALONE)]
            later += [asked[0][1], asked[2][1]]
            times = [seconds for seconds, *_ in asked]
            later_added.append((times[0] - times[1] + times[2] - times[3]) / 2)
            apart.append(abs(times[1] - times[3]))
            undisturbed += [first, times[1], times[3]]
            pool.start()
    if not waits:
        raise SystemExit("the pool was never killed in time to be missed: this machine is faster than STRIKING_S")
    wait, after = statistics.median(waits), statistics.median(later)
    return [
        ("pool killed in time to be missed", f"{len(waits)} of {rounds}", "", ""),
        ("pool killed in mid-flight: adds", ms(wait), "≤ 500 ms", met(wait <= 0.5)),
        ("the worst of them", ms(max(waits)), "≤ 500 ms", met(max(waits) <= 0.5)),
        ("to each of the later ones", ms(after), "≤ 10 ms", met(after <= 0.01)),
        ("the worst of them", ms(max(later)), "", ""),
        ("first token, without the pool", ms(statistics.median(undisturbed)), "", ""),
        ("two of them differ by", ms(statistics.median(apart)), "", ""),
        ("the one in mid-flight differs by", ms(statistics.median(added)), "", ""),
        ("later ones differ by", ms(statistics.median(later_added)), "", ""),
    ]


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


def missed(metrics: dict[str, float]) -> float:
    return sum(number for name, number in metrics.items() if name.startswith("tokens_missed"))


def kept(server: Server, book: Iterator[str]) -> str:
    """A prompt that is in the pool and not in the local cache. A pool that has just come back is found within its time."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        text = next(book)
        first_token(server, text)
        time.sleep(SAVING_S)
        server.forget()
        before = counted(server)
        first_token(server, text)
        if counted(server).get("tokens_used:pool", 0) > before.get("tokens_used:pool", 0):
            server.forget()
            return text
    raise SystemExit("the pool is not used any more")


def strike(pool: PoolNode, after_s: float) -> None:
    time.sleep(after_s)
    os.kill(pool.pid, signal.SIGSTOP)
    time.sleep(STANDING_S)
    pool.kill()


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
