"""``python -m demo.serving``: the demonstration with real servers. Exit status: 0 all ways gave the same tokens and each was
taken, 1 some did not, 2 it could not be run."""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo import prompt
from demo.pool_node import PoolNode
from demo.report import plain
from demo.serving.servers import ROOT, Server, ServerFailedError, free_port
from demo.weights import WeightsMissingError, smollm2

POOL_BYTES = 2 << 30
DAYS = 78  # of the log book: about 2,900 tokens
TOKENS = 8
ALONE = {"kv_transfer_params": {"kvferry": {"store": False, "read": False}}}


@dataclass
class Way:
    """One way to a first token: how long it took for each prompt, where tokens came from, and what was answered."""

    name: str
    first_s: list[float] = field(default_factory=list)
    external: float = 0
    answers: list[list[int]] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.serving", description=__doc__)
    parser.add_argument("--prompts", type=int, default=3, help="how many prompts (default 3)")
    parser.add_argument("--days", type=int, default=DAYS, help=f"their length in days of a log book (default {DAYS})")
    asked = parser.parse_args()
    started = time.monotonic()
    try:
        with playing() as (prefill, decode, router_url):
            print(f"· they answer, after {time.monotonic() - started:.0f} s", flush=True)
            ways, prefill_s = play(prefill, decode, router_url, asked.prompts, asked.days)
    except (WeightsMissingError, ServerFailedError) as error:
        print(f"\n{error}\n", file=sys.stderr)
        return 2
    return report(ways, prefill_s, time.monotonic() - started)


@contextmanager
def playing() -> Iterator[tuple[Server, Server, str]]:
    """The pool, the two servers and the router; all of them end with this."""
    model = smollm2()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-demo-")))
        pool = stack.enter_context(PoolNode(POOL_BYTES))
        print("· starting two vLLM servers, one that prefills and one that decodes (half a minute)", flush=True)
        servers = []
        for core, role in enumerate(("kv_producer", "kv_consumer")):
            server = Server(
                model, transfer_config(role, pool.address), folder / f"{role}.log", core, "--max-model-len", "4096"
            )
            stack.callback(server.close)
            servers.append(server)
        port = free_port()
        words = ["--port", str(port), "--prefill", servers[0].url, "--decode", servers[1].url]
        router = subprocess.Popen(
            [sys.executable, str(ROOT / "examples" / "router.py"), *words], start_new_session=True
        )
        stack.callback(router.wait, 20)
        stack.callback(router.terminate)
        stack.callback(pool.close)  # before the servers, whose going it would talk about
        for server in servers:
            server.wait()
        yield servers[0], servers[1], f"http://127.0.0.1:{port}"


def transfer_config(role: str, pool: str) -> dict[str, Any]:
    return {
        "kv_connector": "KvferryConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pool": pool},
    }


def play(prefill: Server, decode: Server, router_url: str, prompts: int, days: int) -> tuple[list[Way], float]:
    for server in (prefill, decode):
        first_token(server.url, "Ready?", ALONE)
    first_token(router_url, "Ready, all of you?")
    cold, handed, pooled, local = ways = [Way("computed"), Way("handed over"), Way("from the pool"), Way("local cache")]
    prefill_s = []
    for number in range(prompts):
        text = f"Log {number}. {prompt.text(days)}"
        decode.forget()
        take(cold, decode, decode.url, text, ALONE)
        decode.forget()
        before = prefill.metrics()
        take(handed, decode, router_url, text)
        prefill_s.append(spent(before, prefill.metrics(), "request_prefill_time_seconds_sum"))
        decode.forget()
        take(pooled, decode, decode.url, text)
        take(local, decode, decode.url, text)
    return ways, statistics.median(prefill_s)


def take(way: Way, decode: Server, url: str, text: str, extra: "dict[str, Any] | None" = None) -> None:
    before = decode.metrics()
    first_s, tokens = first_token(url, text, extra)
    way.first_s.append(first_s)
    way.answers.append(tokens)
    way.external += spent(before, decode.metrics(), "external_prefix_cache_hits")


def spent(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after.get(name, 0) - before.get(name, 0)


def first_token(url: str, text: str, extra: "dict[str, Any] | None" = None) -> tuple[float, list[int]]:
    """Seconds to the first token as a client sees them, and all tokens."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=10)
    body = {"return_token_ids": True, "ignore_eos": True, **(extra or {})}
    began, first, tokens = time.perf_counter(), 0.0, []
    for piece in client.completions.create(
        model="model", prompt=text, max_tokens=TOKENS, temperature=0, stream=True, extra_body=body
    ):
        if piece.choices:
            first = first or time.perf_counter() - began
            tokens += getattr(piece.choices[0], "token_ids", None) or []
    return first, tokens


def report(ways: list[Way], prefill_s: float, seconds: float) -> int:
    cold = statistics.median(ways[0].first_s)
    rows: list[tuple[str, ...]] = [
        ("prompt's tokens are", "first token", "against computing", "external tokens", "answer")
    ]
    for way in ways:
        median = statistics.median(way.first_s)
        equal = way.answers == ways[0].answers and all(len(tokens) == TOKENS for tokens in way.answers)
        rows.append(
            (
                way.name,
                f"{median * 1e3:.0f} ms",
                f"{cold / median:.1f} x",
                f"{way.external:,.0f}",
                "equal" if equal else "DIFFERS",
            )
        )
    handed = statistics.median(ways[1].first_s)
    print("\n" + plain(rows))
    print(
        f"\nfirst token: as the OpenAI client sees it, median of {len(ways[0].first_s)} prompts; external tokens: of all of them "
        f"together, by vLLM's own metrics page.\nThe prefill server took {prefill_s * 1e3:.0f} ms of the {handed * 1e3:.0f} ms "
        "of a request that is handed over."
    )
    held = all(row[-1] == "equal" for row in rows[1:])
    taken = ways[1].external > 0 and ways[2].external > 0 and not ways[0].external and not ways[3].external
    if not held:
        print("\nThe answers are not the same.")
    if not taken:
        print("\nNot each prompt went the way that it was to go.")
    print(f"\n{seconds:.0f} s in all")
    return 0 if held and taken else 1


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
