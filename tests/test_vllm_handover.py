"""Two vLLM servers, one that prefills and one that decodes, the router of examples/ before them, and a pool beside them."""

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pool_support import NodeProcess, until
from vllm_support import (
    ASKED,
    BLOCK,
    Server,
    answer_of,
    asked_of,
    ended,
    free_port,
    make_model,
    prompt,
    route,
    running,
    streamed,
    tokens_of,
    transfer_config,
    usage,
)

pytestmark = [pytest.mark.vllm, pytest.mark.deadline(500)]

LENGTH = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


class Pair:
    """A prefill and a decode server, a pool, and a router."""

    node: NodeProcess

    def __init__(self, model: Path, folder: Path, pool: str, **extra: Any) -> None:
        self.model, self.folder, self.extra = model, folder, {"pool": pool, "revive_ms": 200} | extra
        self.prefill, self.decode = self.start("prefill", 0), self.start("decode", 1)
        try:
            self.prefill.wait()
            self.decode.wait()
            self.port = free_port()
            self.router = route(self.port, [self.prefill], [self.decode])
        except BaseException:
            self.prefill.kill()
            self.decode.kill()
            raise

    def start(self, name: str, core: int, port: int = 0) -> Server:
        role = {"prefill": "kv_producer", "decode": "kv_consumer"}[name]
        return Server(self.model, transfer_config(role, **self.extra), self.folder / f"{name}.log", core, port=port)

    def ask(self, tokens: list[int], **body: Any) -> dict[str, Any]:
        return asked_of(self.port, tokens, **body)

    def close(self) -> None:
        ended(self.router)
        self.prefill.close()
        self.decode.close()


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    node = NodeProcess(f"unix:{folder}/pool.sock", "256MiB")
    try:
        pair = Pair(model, folder, node.address, window_ttl_ms=5000, pull_timeout_ms=3000)
        pair.node = node
        yield pair
        pair.close()
    finally:
        node.stop()


def alone(pair: Pair, tokens: list[int]) -> list[int]:
    """What the decode server answers when it has nothing from elsewhere."""
    return tokens_of(pair.decode.complete(tokens, kv_transfer_params={"kvferry": {"read": False, "store": False}}))


def test_decode_goes_on_where_prefill_has_ended(pair: Pair) -> None:
    tokens = prompt(100, LENGTH)
    answer = tokens_of(pair.ask(tokens))
    counted = pair.decode.metrics()
    assert counted["tokens_used:handover"] == LENGTH
    assert counted["external_prefix_cache_hits"] == LENGTH
    assert answer == tokens_of(pair.prefill.complete(tokens))
    time.sleep(0.2)
    pair.prefill.complete([1, 2, 3])
    assert pair.prefill.metrics()["handovers:given"] >= 1


def test_a_stream_comes_through_the_router(pair: Pair) -> None:
    tokens = prompt(101, LENGTH)
    assert streamed(pair.port, tokens) == (alone(pair, tokens), True)


def test_a_decode_that_asks_again_computes(pair: Pair) -> None:
    tokens = prompt(102, LENGTH)
    given = pair.prefill.complete(tokens, 1, kv_transfer_params=ASKED)["kv_transfer_params"]
    before = pair.decode.metrics()["tokens_used:handover"]
    first = tokens_of(pair.decode.complete(tokens, kv_transfer_params=given))
    assert pair.decode.metrics()["tokens_used:handover"] == before + LENGTH
    # Its local cache has the full blocks; for the rest it asks through a window that is closed.
    assert tokens_of(pair.decode.complete(tokens, kv_transfer_params=given)) == first


def test_fifty_requests_at_once(pair: Pair) -> None:
    prompts = [prompt(200 + number, 100 + 7 * number) for number in range(50)]
    with ThreadPoolExecutor(50) as threads:
        answers = [tokens_of(answer) for answer in threads.map(pair.ask, prompts)]
    for tokens, answer in zip(prompts[::10], answers[::10], strict=True):
        assert answer == tokens_of(pair.prefill.complete(tokens))
    assert all(len(answer) == 8 for answer in answers)


def test_fifty_requests_while_pool_and_prefill_are_killed(pair: Pair) -> None:
    chance = random.Random(1)
    prompts = [prompt(500 + number % 40, 100 + 9 * (number % 40)) for number in range(50)]
    right = {len(tokens): alone(pair, tokens) for tokens in prompts[:40:8]}

    def killing() -> None:
        for _ in range(6):
            time.sleep(chance.uniform(0.1, 0.6))
            pair.node.kill()
            pair.node.start()
        pair.prefill.kill()

    with ThreadPoolExecutor(51) as threads:
        kills = threads.submit(killing)
        answers = [tokens_of(answer) for answer in threads.map(pair.ask, prompts)]
        kills.result()
    pair.prefill = pair.start("prefill", 0, pair.prefill.port).wait()
    assert all(len(answer) == 8 for answer in answers)
    for tokens, answer in zip(prompts, answers, strict=True):
        assert answer == right.get(len(tokens), answer)


def test_fifty_requests_while_pool_and_decode_are_killed(pair: Pair) -> None:
    """One of two decodes: whoever was there goes on at the other; an answer of which a part has come breaks off."""
    prompts = [prompt(800 + number % 40, 100 + 9 * (number % 40)) for number in range(50)]
    with ThreadPoolExecutor(16) as threads:
        right = list(threads.map(lambda tokens: alone(pair, tokens), prompts))
    other = pair.start("decode", 1).wait()
    port = free_port()
    router = route(port, [pair.prefill], [pair.decode, other])
    try:
        answer_of(port, prompts[0])
        answers: dict[int, tuple[list[int], bool]] = {}

        def ask(number: int) -> None:
            tokens = prompts[number]
            answers[number] = streamed(port, tokens) if number % 5 == 0 else (tokens_of(asked_of(port, tokens)), True)

        def killing() -> None:
            until(lambda: len(answers) >= 5, 120)
            pair.node.kill()
            until(lambda: len(answers) >= 10, 120)
            pair.decode.kill()
            pair.node.start()
            until(lambda: len(answers) >= 30, 120)
            pair.node.kill()
            pair.node.start()

        with ThreadPoolExecutor(51) as threads:
            kills = threads.submit(killing)
            list(threads.map(ask, range(50)))
            kills.result()
        for number, (found, whole) in answers.items():
            assert found == (right[number] if whole else right[number][: len(found)]), number
        until(lambda: not usage(pair.prefill), 60)  # what it held for those who never came

        pair.decode = pair.start("decode", 1, pair.decode.port).wait()
        for number in range(40, 44):  # each of the two has some of them
            tokens = prompt(850 + number, LENGTH)
            assert tokens_of(asked_of(port, tokens)) == alone(pair, tokens)
        assert pair.decode.metrics()["tokens_used:handover"] >= LENGTH
    finally:
        ended(router)
        other.close()


def test_router_killed_and_restarted(pair: Pair) -> None:
    """Prefill and decode end the requests of those who have gone with it, and go on."""
    import httpx

    def lost(number: int) -> bool:
        try:
            pair.ask(prompt(900 + number, LENGTH), max_tokens=1000)
        except httpx.TransportError:
            return True
        return False

    with ThreadPoolExecutor(8) as threads:
        asking = [threads.submit(lost, number) for number in range(8)]
        until(lambda: running(pair.decode), 60)
        pair.router.kill()
        pair.router.wait(20)
        until(lambda: not any(running(server) for server in (pair.prefill, pair.decode)), 60)
        pair.router = route(pair.port, [pair.prefill], [pair.decode])
        assert any(one.result(120) for one in asking)
    tokens = prompt(910, LENGTH)
    before = pair.decode.metrics()["tokens_used:handover"]
    assert tokens_of(pair.ask(tokens)) == alone(pair, tokens)
    assert pair.decode.metrics()["tokens_used:handover"] == before + LENGTH
    until(lambda: not any(running(server) or usage(server) for server in (pair.prefill, pair.decode)), 60)


def test_clients_that_go_away_leave_nothing_behind(pair: Pair) -> None:
    import httpx

    for number in range(6):
        asked = {"model": "model", "prompt": prompt(300 + number, LENGTH), "max_tokens": 500, "ignore_eos": True}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"http://127.0.0.1:{pair.port}/v1/completions", json=asked, timeout=0.1 * (number + 1))
    tokens = prompt(310, LENGTH)
    assert tokens_of(pair.ask(tokens)) == alone(pair, tokens)
    until(lambda: not any(running(server) or usage(server) for server in (pair.prefill, pair.decode)), 60)


def test_prefill_killed_and_restarted(pair: Pair) -> None:
    """Between the two halves of a request, and before one."""
    tokens = prompt(400, LENGTH)
    given = pair.prefill.complete(tokens, 1, kv_transfer_params=ASKED)["kv_transfer_params"]
    pair.prefill.kill()
    given["kvferry"] = {"read": False}
    failed = tokens_of(pair.decode.complete(tokens, kv_transfer_params=given))
    missed = {name: n for name, n in pair.decode.metrics().items() if name.startswith("tokens_missed")}
    assert missed.get("tokens_missed:peer_lost", 0) >= LENGTH, missed
    other = prompt(401, LENGTH)
    assert tokens_of(pair.ask(other)) == alone(pair, other), "the router does without"

    pair.prefill = pair.start("prefill", 0, pair.prefill.port).wait()
    assert failed == tokens_of(pair.prefill.complete(tokens))
    fresh = prompt(402, LENGTH)
    given = pair.prefill.complete(fresh, 1, kv_transfer_params=ASKED)["kv_transfer_params"]
    before = pair.decode.metrics()["tokens_used:handover"]
    pair.decode.complete(fresh, kv_transfer_params=given)
    assert pair.decode.metrics()["tokens_used:handover"] == before + LENGTH


def test_prefill_that_stands_still_costs_a_wait_and_no_answer(pair: Pair) -> None:
    tokens = prompt(410, LENGTH)
    given = pair.prefill.complete(tokens, 1, kv_transfer_params=ASKED)["kv_transfer_params"]
    pair.prefill.signal(signal.SIGSTOP)
    try:
        stopped = tokens_of(pair.decode.complete(tokens, kv_transfer_params=given))
    finally:
        pair.prefill.signal(signal.SIGCONT)
    assert stopped == tokens_of(pair.prefill.complete(tokens))


def test_decode_killed_and_restarted(pair: Pair) -> None:
    """Nobody comes for the blocks: prefill has them back when their time is up."""
    tokens = prompt(420, LENGTH)
    given = pair.prefill.complete(tokens, 1, kv_transfer_params=ASKED)["kv_transfer_params"]
    assert given["do_remote_prefill"] and usage(pair.prefill) > 0
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(answer_of, pair.port, prompt(421, LENGTH), max_tokens=1000)
        until(lambda: running(pair.decode), 60)
        pair.decode.kill()
        assert asking.result(120).status_code == 503
    assert answer_of(pair.port, prompt(422, LENGTH)).status_code == 503
    until(lambda: not usage(pair.prefill), 60)
    assert pair.prefill.metrics()["handovers:expired"] >= 1
    pair.decode = pair.start("decode", 1, pair.decode.port).wait()
    given = pair.prefill.complete(tokens, 1, kv_transfer_params=ASKED)["kv_transfer_params"]
    pair.decode.complete(tokens, kv_transfer_params=given)
    assert pair.decode.metrics()["tokens_used:handover"] == LENGTH


def test_two_tensor_parallel_workers(model: Path, tmp_path: Path) -> None:
    """Each saves and loads its part of every block, and gives a window over its part of a request's."""
    node = NodeProcess(f"unix:{tmp_path}/pool.sock", "256MiB")
    server = Server(
        model,
        transfer_config(pool=node.address, save_timeout_ms=20_000, revive_ms=100),
        tmp_path / "server.log",
        "0|1",
        "--tensor-parallel-size",
        "2",
    )
    try:
        server.wait()
        tokens = prompt(700, LENGTH)
        first = tokens_of(server.complete(tokens))
        end = time.monotonic() + 90
        while not server.metrics().get("tokens_used:pool"):  # on a busy machine a pool may be found late
            assert time.monotonic() < end
            server.complete([1, 2, 3])
            server.forget()
            assert tokens_of(server.complete(tokens)) == first
        assert server.metrics()["tokens_used:pool"] == (LENGTH - 1) // BLOCK * BLOCK
        given = server.complete(tokens, 1, kv_transfer_params=ASKED)["kv_transfer_params"]
        assert given["tp_size"] == len(given["kvferry_windows"]) == 2
    finally:
        server.close()
        node.stop()
