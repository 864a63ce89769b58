"""The vLLM connector below its façade, driven as vLLM drives it, with real pool nodes and without vLLM."""

import contextlib
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvferry
from engine_support import BLOCK, Engine, Tensor, prompt
from kvferry.connectors.vllm.orders import Report
from kvferry.connectors.vllm.worker import place_of
from kvferry.pool import messages
from pool_support import NodeProcess, until

pytestmark = pytest.mark.quick("what_one_engine", "preempted_request", "killed", "prefilled_request", "refused")
Engines = Callable[..., Engine]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    node = NodeProcess(f"unix:{tmp_path}/pool.sock")
    yield node
    node.stop()


@pytest.fixture
def engines(node: NodeProcess) -> Iterator[Engines]:
    made: list[Engine] = []

    def make(**settings: Any) -> Engine:
        made.append(Engine(**{"pool": node.address} | settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def test_what_one_engine_has_computed_another_one_loads(engines: Engines) -> None:
    tokens = prompt(1, 41)
    one, other = engines(), engines()
    first = one.run("a", tokens)
    one.settle()
    assert first.made == 41 and one.counted()["blocks_saved:saved"] == 10

    second = other.run("b", tokens)
    assert second.taken == 40 and second.made == 1
    assert other.received == ["b"]
    counted = other.counted()
    assert counted["tokens_used:pool"] == 40 and "tokens_missed:absent" not in counted
    assert "blocks_saved:saved" not in counted and "blocks_saved:present" not in counted


def test_at_least_one_token_is_computed(engines: Engines) -> None:
    tokens = prompt(2, 40)  # full blocks to the last token
    engine = engines()
    engine.run("a", tokens)
    engine.settle()
    again = engine.run("b", tokens)
    assert again.taken == 36 and again.made == 4


def test_a_prompt_that_goes_on_differently_takes_the_common_beginning(engines: Engines) -> None:
    engine = engines()
    engine.run("a", prompt(3, 30))
    engine.settle()
    other = engine.run("b", prompt(3, 30)[:17] + prompt(4, 30))
    assert other.taken == 16
    assert engine.counted()["tokens_missed:absent"] > 0


def test_generated_blocks_are_saved_and_are_the_beginning_of_the_next_turn(engines: Engines) -> None:
    engine = engines(chunk=7)
    turn = engine.run("a", prompt(5, 20), output=30)
    engine.settle()
    following = engine.run("b", turn.tokens + prompt(6, 5))
    assert following.taken == len(turn.tokens) // BLOCK * BLOCK


@pytest.mark.parametrize("chunk", [1, 3, 5, 8])
def test_chunks_of_any_length_save_each_block_once(engines: Engines, chunk: int) -> None:
    engine = engines(chunk=chunk)
    engine.run("a", prompt(7, 29))
    engine.settle()
    counted = engine.counted()
    assert counted["blocks_saved:saved"] == 7 and "blocks_saved:present" not in counted


def test_other_models_tenants_salts_adapters_and_shapes_are_others(engines: Engines) -> None:
    tokens = prompt(8, 21)
    engines().run("a", tokens)
    for settings, asked in (
        ({"model": "another"}, {}),
        ({"dtype": "float16"}, {}),
        ({"layers": 3}, {}),
        ({"namespace": "another"}, {}),
        ({}, {"params": {"kvferry": {"tenant": "another"}}}),
        ({}, {"salt": "another"}),
        ({}, {"adapter": "another"}),
    ):
        assert engines(**settings).run("b", tokens, **asked).taken == 0, (settings, asked)
    assert engines().run("b", tokens).taken == 20


def test_a_request_may_ask_not_to_be_stored_or_not_to_read(engines: Engines) -> None:
    engine, tokens = engines(), prompt(9, 21)
    engine.run("a", tokens, params={"kvferry": {"store": False}})
    engine.settle()
    assert engine.run("b", tokens).taken == 0
    engine.settle()
    engine.counted()
    assert engine.run("c", tokens, params={"kvferry": {"read": False}}).taken == 0
    assert engine.counted()["tokens_missed:not_wanted"] == 20
    assert engine.run("d", tokens).taken == 20


def test_what_a_request_stores_for_a_while_is_gone_afterwards(engines: Engines) -> None:
    engine, tokens = engines(), prompt(10, 21)
    engine.run("a", tokens, params={"kvferry": {"ttl_ms": 300}})
    engine.settle()
    time.sleep(0.5)
    assert engine.run("b", tokens).taken == 0


@pytest.mark.parametrize(
    "asked",
    [{"store": 1}, {"tenant": 3}, {"ttl_ms": 0}, {"ttl_ms": True}, {"stroe": False}, "no"],
    ids=str,
)
def test_a_request_that_asks_for_what_there_is_not_is_computed_and_shares_nothing(engines: Engines, asked: Any) -> None:
    engine, tokens = engines(), prompt(11, 21)
    engine.run("a", tokens)
    engine.settle()
    engine.counted()
    odd = engine.run("b", tokens, params={"kvferry": asked})
    assert odd.taken == 0 and "blocks_saved:present" not in engine.counted()


def test_requests_whose_tokens_do_not_tell_their_blocks_are_left_alone(engines: Engines) -> None:
    engine, tokens = engines(), prompt(12, 21)
    engine.run("a", tokens, unkeyed="multimodal")
    engine.settle()
    counted = engine.counted()
    assert counted == {"tokens_missed:multimodal": 20}


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_preempted_request_is_right_when_it_comes_back_and_its_old_blocks_are_not_saved(engines: Engines) -> None:
    engine = engines(chunk=6)
    request, other = engine.add("a", prompt(13, 40)), engine.add("b", prompt(14, 40))
    while request.computed < 20:
        engine.step()
    engine.preempt(request)
    engine.finish(request, other)
    engine.settle()
    fresh = engines()
    for name, tokens in (("c", prompt(13, 40)), ("d", prompt(14, 40))):
        assert fresh.run(name, tokens).taken > 0  # and is right, which `Engine` looks at


def test_an_aborted_load_is_received_once_and_its_blocks_come_back(engines: Engines) -> None:
    engine = engines()
    engine.run("a", prompt(15, 80))
    engine.settle()
    free = sorted(engine.free)
    loading = engine.add("b", prompt(15, 80))
    while loading.state == "waiting":
        engine.step()
    if loading.state == "loading":
        engine.abort(loading)
    engine.settle()
    assert engine.received.count("b") == 1
    assert sorted(engine.free) == free


def test_a_request_that_is_aborted_before_it_is_scheduled_leaves_nothing(engines: Engines) -> None:
    engine = engines()
    engine.abort(engine.add("a", prompt(16, 80)))
    engine.settle()
    assert not engine.scheduler._requests and not engine.received


def test_a_pool_that_is_killed_costs_nothing_but_its_values(engines: Engines, node: NodeProcess) -> None:
    engine, tokens = engines(), prompt(17, 41)
    engine.run("a", tokens)
    engine.settle()
    node.kill()
    assert engine.run("b", tokens).taken == 0
    assert engine.run("c", tokens).taken == 0
    engine.settle()
    counted = engine.counted()
    assert counted["breaker:opened"] == 1, counted
    assert counted["tokens_missed:breaker"] + counted.get("tokens_missed:node_lost", 0) >= 40


def test_a_pool_that_comes_back_is_used_again_by_itself(engines: Engines, node: NodeProcess) -> None:
    engine, tokens = engines(revive_ms=50), prompt(18, 41)
    node.kill()
    for name in "abc":
        assert engine.run(name, tokens).made == 41
    node.start()
    numbers = iter(range(1000))
    until(lambda: engine.run(f"again {next(numbers)}", tokens).taken == 40)


def test_a_pool_that_stands_still_costs_the_configured_wait_and_then_nothing(
    engines: Engines, node: NodeProcess
) -> None:
    engine, tokens = engines(lookup_timeout_ms=50, save_timeout_ms=100, revive_ms=60_000), prompt(19, 41)
    engine.run("a", tokens)
    engine.settle()
    node.signal(signal.SIGSTOP)
    try:
        for name in "bcdef":
            assert engine.run(name, tokens).made == 41
        engine.settle()
    finally:
        node.signal(signal.SIGCONT)
    counted = engine.counted()
    assert counted["breaker:opened"] == 1
    assert counted["tokens_missed:breaker"] >= 3 * 40, counted  # nobody waited for it any more


def test_a_pool_that_wants_to_hear_another_secret_is_a_computation(tmp_path: Path) -> None:
    (tmp_path / "right").write_text("between us")
    (tmp_path / "wrong").write_text("between others")
    node = NodeProcess("127.0.0.1:0", "64MiB", "--secret-file", f"{tmp_path}/right")
    engines = [Engine(pool=node.address, node_secret_file=f"{tmp_path}/{name}") for name in ("right", "right", "wrong")]
    try:
        for engine, taken in zip(engines, (0, 40, 0), strict=True):
            request = engine.run("a", prompt(22, 41))
            engine.settle()
            assert (request.taken, request.made) == (taken, 41 - taken)
        assert engines[2].run("b", prompt(22, 41)).made == 41
        assert engines[2].counted()["breaker:opened"] == 1
    finally:
        for engine in engines:
            engine.close()
        node.stop()


def test_a_pool_of_another_version_is_a_computation(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    one, tokens = engines(), prompt(23, 41)
    one.run("a", tokens)
    one.settle()
    monkeypatch.setattr(messages, "VERSION", messages.VERSION + 1)
    other = engines()
    for name in "bcd":
        assert other.run(name, tokens).made == 41
    other.settle()
    assert other.counted()["breaker:opened"] == 1


def test_values_that_vanish_between_look_and_load_are_computed(engines: Engines, node: NodeProcess) -> None:
    engine, tokens = engines(), prompt(20, 81)
    engine.run("a", tokens)
    engine.settle()
    request = engine.add("b", tokens)
    until(lambda: engine.scheduler._requests["b"].looking.done())  # type: ignore[union-attr]
    with kvferry.Pool.connect(node.address, namespace="vllm") as pool:
        assert pool.clear() == 20
    engine.finish(request)
    engine.settle()
    assert request.made == 81 and len(engine.failed) == 20
    assert engine.counted()["tokens_missed:removed"] == 80
    assert engine.run("c", tokens).taken == 80, "what was computed again was not saved again"


def test_a_full_pool_is_no_error(tmp_path: Path) -> None:
    node = NodeProcess(f"unix:{tmp_path}/small.sock", "1MiB", "--segment", "1MiB")
    engine = Engine(pool=node.address, layers=40, blocks=200)
    try:
        for number in range(6):
            engine.run(f"request {number}", prompt(30 + number, 120))
        engine.settle()
    finally:
        engine.close()
        node.stop()


def test_without_a_pool_everything_is_computed(engines: Engines) -> None:
    engine = engines(pool="off")
    assert engine.run("a", prompt(21, 41)).made == 41
    assert engine.counted() == {"tokens_missed:pool_off": 40}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_every_request_ends_right_and_every_block_comes_back(
    engines: Engines, node: NodeProcess, seed: int
) -> None:
    chance = random.Random(seed)
    engine = engines(chunk=9, blocks=40, revive_ms=20, lookup_timeout_ms=60, save_timeout_ms=200, load_timeout_ms=200)
    stopped, number = False, 0
    for _ in range(400):
        what = chance.random()
        running = [request for request in engine.requests.values() if request.state == "running"]
        if what < 0.10 and len(engine.requests) < 5:
            number += 1
            length = chance.randrange(1, 60)
            engine.add(str(number), prompt(chance.randrange(3), length), output=chance.randrange(1, 8))
        elif what < 0.13 and running:
            engine.preempt(chance.choice(running))
        elif what < 0.16:
            alive = [request for request in engine.requests.values() if request.state != "finished"]
            if alive:
                engine.abort(chance.choice(alive))
        elif what < 0.17:
            node.signal(signal.SIGCONT if stopped else signal.SIGSTOP)
            stopped = not stopped
        elif what < 0.18:
            stopped = False
            node.kill()
            node.start()
        engine.step()
    if stopped:
        node.signal(signal.SIGCONT)
    for _ in range(60):
        with contextlib.suppress(AssertionError):
            engine.settle(1.0)
            break
        # Too few blocks for all that run: the youngest makes room, as in vLLM.
        running = [request for request in engine.requests.values() if request.state == "running"]
        if running:
            engine.preempt(running[-1])
    engine.settle()
    assert sorted(engine.free) == list(range(1, 40))
    assert not engine.scheduler._requests and not engine.scheduler._saving
    assert not engine.worker._loading and not engine.worker._saving and not engine.worker._awaited


def test_a_load_or_save_that_cannot_be_begun_is_a_computation(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, tokens = engines(), prompt(22, 41)
    engine.run("a", tokens)
    engine.settle()

    def busy(*_: Any, **__: Any) -> Any:
        raise kvferry.Busy("out of threads")

    assert engine.worker._pool is not None and engine.scheduler._pool is not None
    monkeypatch.setattr(engine.worker._pool, "load_async", busy)
    monkeypatch.setattr(engine.worker._pool, "save_async", busy)
    assert engine.run("b", tokens).made == 41
    monkeypatch.setattr(engine.scheduler._pool, "exists_async", busy)
    assert engine.run("c", tokens).made == 41
    engine.settle()
    assert engine.counted()["tokens_missed:error"] == 80


# --- caches -----------------------------------------------------------------------------------------------------------


def test_a_cache_on_a_device_is_refused_by_name() -> None:
    with pytest.raises(kvferry.Unsupported, match="cuda"):
        place_of({"layer": Tensor(np.zeros((4, 2), np.float32), "cuda:0")}, 4, "")


def test_a_cache_whose_first_number_is_not_its_blocks_is_refused() -> None:
    with pytest.raises(kvferry.Unsupported, match=r"0\.26"):
        place_of({"layer": Tensor(np.zeros((2, 4, 8), np.float32))}, 4, "")


def test_layers_that_are_not_alike_are_refused() -> None:
    tensors = {"one": Tensor(np.zeros((4, 8), np.float32)), "other": Tensor(np.zeros((4, 16), np.float32))}
    with pytest.raises(kvferry.Unsupported, match="not alike"):
        place_of(tensors, 4, "")


def test_layers_that_share_a_cache_are_one(engines: Engines) -> None:
    shared = Tensor(np.zeros((8, 2, BLOCK, 8), np.float32))
    engine = engines()
    place = engine.worker.registered({"one": shared, "same": shared}, 8)
    assert len(place.units) == 1


def test_caches_of_one_vector_per_token_are_handled_as_any_other() -> None:
    latent = place_of({"layer": Tensor(np.zeros((4, 32, 576), np.uint16))}, 4, "")  # MLA's shape
    assert latent.units == (32 * 576 * 2,)


def test_reports_of_two_workers_together_say_what_both_have() -> None:
    one, other = Report(blocks_loaded={"a": 3}), Report(blocks_loaded={"a": 5})
    one.saves[1] += 1
    other.saves[1] += 1
    both = one.plus(other)
    assert both.blocks_loaded == {"a": 3} and both.saves[1] == 2


# --- handover ---------------------------------------------------------------------------------------------------------


def prefilled(engine: Engine, tokens: list[int], name: str = "a") -> dict[str, object]:
    """What a proxy hands on: it asks for one token, and for what another instance needs to go on."""
    request = engine.add(name, tokens, params={"do_remote_decode": True})
    until(lambda: engine.step() or request.state == "finished")
    assert request.answer is not None and request.delayed
    return request.answer


def pair(engines: Engines, **settings: Any) -> tuple[Engine, Engine]:
    return (engines(pool="off", handover=True, **settings), engines(pool="off", handover=True, **settings))


def test_a_prefilled_request_goes_on_elsewhere_without_computing_its_prompt(engines: Engines) -> None:
    prefill, decode = pair(engines)
    tokens = prompt(50, 43)  # its last block is not full
    answer = prefilled(prefill, tokens)
    request = decode.run("b", tokens, output=9, params=answer)
    assert request.taken == 43 and request.made == 9  # the last token of the prompt is computed again, for its output
    assert decode.counted()["tokens_used:handover"] == 43
    prefill.settle()
    assert prefill.released == ["a"]
    counted = prefill.counted()
    assert counted["handovers:offered"] == 1 and counted["handovers:given"] == 1


def test_caches_of_one_vector_per_token_are_pulled_as_any_other(engines: Engines) -> None:
    prefill, decode = pair(engines, latent=True)
    request = decode.run("b", prompt(49, 43), output=9, params=prefilled(prefill, prompt(49, 43)))
    assert request.taken == 43 and request.made == 9
    other = engines(pool="off", handover=True)  # with keys and values
    assert other.run("c", prompt(48, 43), params=prefilled(prefill, prompt(48, 43), "c")).taken == 0


def test_blocks_stay_until_they_were_pulled_or_their_time_is_up(engines: Engines) -> None:
    prefill = engines(pool="off", handover=True, window_ttl_ms=300)
    free = len(prefill.free)
    prefilled(prefill, prompt(51, 41))
    for _ in range(20):
        prefill.step()
    assert len(prefill.free) == free - 11
    prefill.settle()
    assert len(prefill.free) == free
    assert prefill.counted()["handovers:expired"] == 1


def test_who_comes_too_late_computes(engines: Engines) -> None:
    prefill, decode = pair(engines, window_ttl_ms=100)
    tokens = prompt(52, 41)
    answer = prefilled(prefill, tokens)
    prefill.settle()
    prefill.run("others", prompt(53, 200))  # into the same blocks
    request = decode.run("b", tokens, params=answer)
    assert request.made == 41
    assert decode.counted()["tokens_missed:window_gone"] == 41


def test_who_asks_again_computes(engines: Engines) -> None:
    prefill, decode = pair(engines)
    tokens = prompt(54, 41)
    answer = prefilled(prefill, tokens)
    assert decode.run("b", tokens, params=answer).taken == 41
    prefill.settle()
    assert decode.run("c", tokens, params=answer).made == 41


def test_a_prefill_that_was_restarted_costs_a_computation(engines: Engines) -> None:
    prefill, decode = pair(engines)
    tokens = prompt(55, 41)
    answer = prefilled(prefill, tokens)
    prefill.close()
    assert decode.run("b", tokens, params=answer).made == 41
    again = engines(pool="off", handover=True)
    assert decode.run("c", tokens, params=prefilled(again, tokens)).taken == 41


def test_an_instance_that_wants_to_hear_another_secret_costs_a_computation(engines: Engines, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("between us")
    (tmp_path / "other").write_text("between others")
    prefill, decode = (
        engines(pool="off", handover=True, node_secret_file=f"{tmp_path}/{name}") for name in ("one", "other")
    )
    tokens = prompt(65, 41)
    assert decode.run("b", tokens, params=prefilled(prefill, tokens)).made == 41
    decode.settle()
    assert decode.counted()["tokens_missed:refused"] == 41


def test_an_instance_that_does_not_answer_costs_a_crowd_few_attempts(engines: Engines) -> None:
    """Those who wait for a link have the answer of the attempt that they have waited for, and none waits longer than it may."""
    prefill, decode = engines(pool="off", handover=True), engines(pool="off", handover=True, blocks=400)
    tokens = prompt(64, 21)
    answer = prefilled(prefill, tokens)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        silent.setblocking(False)
        there = answer | {"kvferry_addresses": [f"127.0.0.1:{silent.getsockname()[1]}"]}
        requests = [decode.add(f"b{number}", tokens, params=there) for number in range(30)]
        decode.finish(*requests)
        attempts = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
                attempts += 1
    assert all(request.made == 21 for request in requests)
    assert 1 <= attempts <= 4  # of 400 ms each, within the second that a pull may take


def test_a_request_that_is_not_wanted_any_more_is_told_to_its_prefill(engines: Engines) -> None:
    prefill, decode = pair(engines)
    answer = prefilled(prefill, prompt(56, 41))
    decode.abort(decode.add("b", prompt(56, 41), params=answer))
    decode.settle()
    prefill.settle()
    assert prefill.counted()["handovers:not_wanted"] == 1


def test_an_aborted_pull_is_received_once_and_leaves_no_block_behind(engines: Engines) -> None:
    prefill, decode = pair(engines)
    free = sorted(decode.free)
    request = decode.add("b", prompt(57, 150), params=prefilled(prefill, prompt(57, 150)))
    until(lambda: decode.step() or request.state != "waiting")
    if request.state != "finished":
        decode.abort(request)
    decode.settle()
    assert decode.received == ["b"] and sorted(decode.free) == free
    prefill.settle()


def test_an_aborted_prefill_hands_nothing_over(engines: Engines) -> None:
    prefill, _ = pair(engines, chunk=5)
    request = prefill.add("a", prompt(58, 41), params={"do_remote_decode": True})
    prefill.step()
    prefill.abort(request)
    assert request.answer is None
    prefill.settle()


def test_a_chunked_prefill_is_handed_over_whole(engines: Engines) -> None:
    prefill, decode = pair(engines, chunk=7)
    tokens = prompt(59, 41)
    assert decode.run("b", tokens, params=prefilled(prefill, tokens)).taken == 41


def test_several_prefills_and_decodes(engines: Engines) -> None:
    prefills = [engines(pool="off", handover=True) for _ in range(2)]
    decodes = [engines(pool="off", handover=True) for _ in range(2)]
    for number, (one, other) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)] * 3):
        tokens = prompt(60 + number, 30 + number)
        answer = prefilled(prefills[one], tokens, f"a{number}")
        assert decodes[other].run(f"b{number}", tokens, params=answer).taken == len(tokens)
    for prefill in prefills:
        prefill.settle()


@pytest.mark.parametrize("unlike", [{"model": "another"}, {"layers": 3}, {"dtype": "float16"}], ids=str)
def test_what_is_unlike_is_computed(engines: Engines, unlike: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = engines(pool="off", handover=True), engines(pool="off", handover=True, **unlike)
    tokens = prompt(80, 41)
    assert decode.run("b", tokens, params=prefilled(prefill, tokens)).made == 41
    assert "computed again" in caplog.text
    prefill.settle()  # it was told that nobody will come


def test_a_prompt_of_other_tokens_is_computed(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = pair(engines)
    answer = prefilled(prefill, prompt(84, 41))
    assert decode.run("b", prompt(85, 41), params=answer).made == 41
    assert "other tokens" in caplog.text


def test_another_number_of_workers_is_refused_with_a_sentence(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = pair(engines)
    tokens = prompt(81, 41)
    answer = prefilled(prefill, tokens)
    twice = answer | {name: answer[name] * 2 for name in ("kvferry_windows", "kvferry_addresses")}  # type: ignore[operator]
    assert decode.run("b", tokens, params=twice).made == 41
    assert "tensor-parallel" in caplog.text


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_host": "x", "remote_port": 1},
        {"do_remote_prefill": True, "kvferry_windows": ["zz"], "kvferry_addresses": ["x"], "remote_block_ids": [1]},
    ],
    ids=["nothing", "another connector's", "broken"],
)
def test_words_of_others_are_computed(
    engines: Engines, params: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    _, decode = pair(engines)
    assert decode.run("b", prompt(82, 41), params=params).made == 41
    assert "both instances must run kvferry's connector" in caplog.text


@pytest.mark.parametrize("port", [float("inf"), float("nan"), 1.5, -1, 0, 65536, 10**12, None, [1], {}, ""], ids=str)
@pytest.mark.parametrize("push", [False, True], ids=["no push", "push"])
def test_a_push_by_nobody_is_computed(
    engines: Engines, port: Any, push: bool, caplog: pytest.LogCaptureFixture
) -> None:
    decode = engines(pool="off", handover=True, push=push)
    params = {"do_remote_prefill": True, "kvferry_push": "p", "remote_host": "127.0.0.1", "remote_port": port}
    assert decode.run("b", prompt(82, 41), params=params).made == 41
    assert "do not say by whom" in caplog.text


@pytest.mark.parametrize("name", [1.5, [1], {"a": 1}, True], ids=str)
def test_a_push_by_no_name_is_computed(engines: Engines, name: Any) -> None:
    engine = engines(pool="off", handover=True, push=True)
    for asked in ({"do_remote_prefill": True}, {"do_remote_decode": True}):
        where = {"remote_host": "127.0.0.1", "remote_port": 1}
        assert engine.run(str(asked), prompt(83, 41), params=asked | where | {"kvferry_push": name}).made == 41


def test_half_a_character_in_a_tenant_is_a_tenant(engines: Engines) -> None:
    engine, tokens = engines(), prompt(84, 21)
    for name, taken in (("\ud800", 0), ("\ud801", 0), ("\ud800", 20)):
        assert engine.run("a", tokens, params={"kvferry": {"tenant": name}}).taken == taken
        engine.settle()


def test_a_request_whose_prompt_is_to_be_computed_whole_takes_nothing(engines: Engines) -> None:
    saver, loader = engines(), engines()
    tokens = prompt(85, 41)
    saver.run("a", tokens)
    saver.settle()
    assert loader.run("b", tokens, whole=True).taken == 0
    assert loader.counted()["tokens_missed:not_wanted"] == 40
    prefill, decode = pair(engines)
    answer = prefilled(prefill, tokens)
    assert decode.run("c", tokens, params=answer, whole=True).made == 41
    prefill.settle()  # long before the window's time is up


def test_a_handover_that_fails_may_be_in_the_pool(engines: Engines) -> None:
    prefill, decode = engines(handover=True, window_ttl_ms=50), engines(handover=True)
    tokens = prompt(83, 41)
    answer = prefilled(prefill, tokens)
    prefill.settle()
    request = decode.run("b", tokens, params=answer)
    counted = decode.counted()
    assert request.taken == 40 and counted["tokens_used:pool"] == 40 and counted["tokens_missed:window_gone"] == 41


def test_a_window_is_opened_for_its_own_scheduler_alone(engines: Engines) -> None:
    import msgspec

    from kvferry.connectors.vllm.handed import Open, Opened

    prefill, _ = pair(engines)
    with kvferry.Node() as node, node.link(prefill.place.address) as link:
        said = link.call(msgspec.msgpack.encode(Open(b"guessed", "x", [1], 1000)))
    assert "own scheduler" in msgspec.msgpack.decode(said, type=Opened).why


def test_one_dead_node_of_two_costs_its_own_keys_and_no_breaker(tmp_path: Path) -> None:
    nodes = [NodeProcess(f"unix:{tmp_path}/{number}.sock") for number in range(2)]
    engine = Engine(pool=[node.address for node in nodes])
    try:
        nodes[0].kill()
        prompts = 20  # which node they belong to is chance
        for number in range(prompts):
            engine.run(f"a{number}", prompt(90 + number, 41))
            engine.settle()
        taken = sum(engine.run(f"b{number}", prompt(90 + number, 41)).taken for number in range(prompts))
        engine.settle()
        counted = engine.counted()
        assert taken > 0 and "breaker:opened" not in counted
        assert counted["tokens_missed:node_lost"] > 0
    finally:
        engine.close()
        nodes[1].stop()
