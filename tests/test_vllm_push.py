"""Handover by push, layer by layer, below the façade: two engines, each with a worker of its own."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from engine_support import Engine, Running, prompt
from kvferry.connectors.vllm import worker as worker_module
from pool_support import until

pytestmark = pytest.mark.quick("layer_by_layer")
Pair = Callable[..., tuple[Engine, Engine]]


@pytest.fixture
def pair() -> Iterator[Pair]:
    made: list[Engine] = []

    def make(**settings: Any) -> tuple[Engine, Engine]:
        made.extend(Engine(handover=True, **{"layers": 5, "push": True} | settings) for _ in range(2))
        return made[-2], made[-1]

    yield make
    for engine in made:
        engine.close()


def asked(prefill: Engine, name: str = "p") -> tuple[dict[str, Any], dict[str, Any]]:
    """What a router that pushes says to the two."""
    host, _, port = prefill.place.address.rpartition(":")
    return (
        {"do_remote_decode": True, "kvferry_push": name},
        {"do_remote_prefill": True, "kvferry_push": name, "remote_host": host, "remote_port": int(port)},
    )


def together(prefill: Engine, decode: Engine, *requests: Running) -> None:
    """Both engines step until these requests have ended and nothing is held."""

    def over() -> bool:
        for engine in (prefill, decode):
            engine.step()
        return all(request.state == "finished" and not request.delayed for request in requests)

    until(over, 30.0)


def waits(prefill: Engine, decode: "Engine | None", name: str = "p") -> None:
    """Until the prefill knows where its request is to go. ``decode``: it steps meanwhile."""

    def known() -> bool:
        if decode is not None:
            decode.step()
        ferry = prefill.worker._ferry
        assert ferry is not None
        return name in ferry._sending._sent

    until(known)


@pytest.mark.parametrize("settings", [{}, {"chunk": 7}, {"latent": True}, {"latent": True, "chunk": 7}], ids=str)
def test_a_request_is_pushed_layer_by_layer_while_it_is_computed(pair: Pair, settings: dict[str, Any]) -> None:
    prefill, decode = pair(**settings)
    tokens = prompt(1, 43)
    to_prefill, to_decode = asked(prefill)
    taker = decode.add("b", tokens, output=6, params=to_decode)
    waits(prefill, decode)
    giver = prefill.add("a", tokens, params=to_prefill)
    prefill.step()
    ferry = prefill.worker._ferry
    assert ferry is not None and len(ferry._sending._sent["p"].pushes) == 1, "it leaves with the first step"
    together(prefill, decode, giver, taker)
    assert taker.taken == 43 and taker.made == 6
    given, had = prefill.counted(), decode.counted()
    assert given["handovers:pushed"] == 1 and given["seconds:pushing"] > 0
    assert had["tokens_used:handover"] == 43 and had["seconds:receiving"] > 0


def test_a_decode_goes_on_as_soon_as_everything_has_come_whatever_its_prefill_does(pair: Pair) -> None:
    """The prefill's engine does not step once more."""
    prefill, decode = pair()
    tokens = prompt(14, 43)
    to_prefill, to_decode = asked(prefill)
    taker = decode.add("b", tokens, output=6, params=to_decode)
    waits(prefill, decode)
    giver = prefill.add("a", tokens, output=2, params=to_prefill)
    prefill.step()
    assert giver.state == "running"
    decode.finish(taker)
    assert taker.taken == 43
    together(prefill, decode, giver)
    assert prefill.counted()["handovers:pushed"] == 1


def test_a_prefill_that_is_preempted_when_everything_has_come_pushes_nothing_again(pair: Pair) -> None:
    prefill, decode = pair()
    tokens = prompt(15, 43)
    to_prefill, to_decode = asked(prefill)
    taker = decode.add("b", tokens, params=to_decode)
    waits(prefill, decode)
    giver = prefill.add("a", tokens, output=3, params=to_prefill)
    prefill.step()
    decode.finish(taker)
    prefill.preempt(giver)
    decode.run("c", prompt(16, 43))  # into the same blocks
    together(prefill, decode, giver)
    assert taker.taken == 43 and prefill.counted()["handovers:pushed"] == 1


def test_a_decode_that_says_late_where_it_waits_gets_everything(pair: Pair) -> None:
    prefill, decode = pair(chunk=5)
    tokens = prompt(2, 43)
    to_prefill, to_decode = asked(prefill)
    giver = prefill.add("a", tokens, params=to_prefill)
    until(lambda: prefill.step() or giver.state == "finished")
    taker = decode.add("b", tokens, params=to_decode)
    together(prefill, decode, giver, taker)
    assert taker.taken == 43


def test_a_prefill_that_is_preempted_pushes_what_it_computes_again(pair: Pair) -> None:
    prefill, decode = pair(chunk=5)
    tokens = prompt(3, 60)
    to_prefill, to_decode = asked(prefill)
    taker = decode.add("b", tokens, params=to_decode)
    waits(prefill, decode)
    giver = prefill.add("a", tokens, params=to_prefill)
    while giver.computed < 30:
        prefill.step()
    prefill.preempt(giver)
    together(prefill, decode, giver, taker)
    assert taker.taken == 60  # and right, which the engine looks at


def test_nobody_who_waits(pair: Pair) -> None:
    prefill, _ = pair(window_ttl_ms=200)
    free = len(prefill.free)
    giver = prefill.add("a", prompt(4, 43), params=asked(prefill)[0])
    until(lambda: prefill.step() or giver.state == "finished")
    assert len(prefill.free) < free
    prefill.settle()
    assert len(prefill.free) == free and prefill.counted()["handovers:expired"] == 1


def test_nobody_who_pushes(pair: Pair) -> None:
    prefill, decode = pair(push_timeout_ms=200)
    taker = decode.run("b", prompt(5, 43), params=asked(prefill)[1])
    assert taker.made == 43 and decode.counted()["tokens_missed:timeout"] == 43


def test_a_prefill_that_dies_while_it_is_waited_for(pair: Pair) -> None:
    prefill, decode = pair()
    taker = decode.add("b", prompt(6, 43), params=asked(prefill)[1])
    waits(prefill, decode)
    prefill.close()
    decode.finish(taker)
    assert taker.made == 43 and decode.counted()["tokens_missed:peer_lost"] == 43


def test_a_prefill_that_is_aborted_says_so(pair: Pair) -> None:
    prefill, decode = pair(chunk=5)
    tokens = prompt(7, 60)
    to_prefill, to_decode = asked(prefill)
    taker = decode.add("b", tokens, params=to_decode)
    waits(prefill, decode)
    giver = prefill.add("a", tokens, params=to_prefill)
    prefill.step()
    prefill.abort(giver)
    together(prefill, decode, giver, taker)
    assert taker.made == 60 and decode.counted()["tokens_missed:aborted"] == 60


def test_a_decode_that_is_aborted_is_written_to_no_more(pair: Pair) -> None:
    prefill, decode = pair(chunk=5)
    free = sorted(decode.free)
    tokens = prompt(8, 60)
    to_prefill, to_decode = asked(prefill)
    taker = decode.add("b", tokens, params=to_decode)
    waits(prefill, decode)
    giver = prefill.add("a", tokens, params=to_prefill)
    prefill.step()
    decode.abort(taker)
    decode.settle()
    assert sorted(decode.free) == free
    other = decode.run("c", prompt(9, 60))  # into the same blocks
    assert other.made == 60
    prefill.finish(giver)
    prefill.settle()


def test_other_tokens_are_refused(pair: Pair) -> None:
    prefill, decode = pair()
    to_prefill, to_decode = asked(prefill)
    taker = decode.add("b", prompt(10, 43), params=to_decode)
    waits(prefill, decode)
    giver = prefill.add("a", prompt(11, 43), params=to_prefill)
    together(prefill, decode, giver, taker)
    assert taker.made == 43 and decode.counted()["tokens_missed:unlike"] == 43


def test_another_shape_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = Engine(handover=True, push=True), Engine(handover=True, push=True, layers=3)
    try:
        assert decode.run("b", prompt(12, 43), params=asked(prefill)[1]).made == 43
        assert "3 x" in caplog.text
    finally:
        prefill.close()
        decode.close()


def test_who_takes_no_pushes_says_so(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(handover=True)
    try:
        assert engine.run("b", prompt(13, 43), params=asked(engine)[1]).made == 43
        assert '"push": true' in caplog.text
    finally:
        engine.close()


def test_many_at_once(pair: Pair) -> None:
    prefill, decode = pair(chunk=6, blocks=400)
    requests = []
    for number in range(10):
        tokens = prompt(20 + number, 30 + 5 * number)
        to_prefill, to_decode = asked(prefill, f"p{number}")
        requests.append(decode.add(f"b{number}", tokens, params=to_decode))
        requests.append(prefill.add(f"a{number}", tokens, params=to_prefill))
    together(prefill, decode, *requests)
    assert all(request.taken == request.prompt for request in requests[::2])


# --- what a step does that has nothing to compute ---------------------------------------------------------------------


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that waits without being woken is seen by its test's deadline."""
    monkeypatch.setattr(worker_module, "IDLE_S", 60.0)


@contextmanager
def counting_waits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    ferry, waits = engine.worker._ferry, list[float]()
    assert ferry is not None
    wait = ferry.wait

    def counted(seconds: float) -> None:
        waits.append(seconds)
        wait(seconds)

    with monkeypatch.context() as patched:
        patched.setattr(ferry, "wait", counted)
        yield waits


def test_a_step_that_waits_for_a_push_is_woken_by_its_arrival(pair: Pair, endless: None) -> None:
    prefill, decode = pair()
    tokens = prompt(30, 43)
    to_prefill, to_decode = asked(prefill)
    taker = decode.add("b", tokens, output=6, params=to_decode)
    with ThreadPoolExecutor(1) as threads:
        stepping = threads.submit(decode.finish, taker)
        waits(prefill, None)
        giver = prefill.add("a", tokens, params=to_prefill)
        prefill.step()
        until(lambda: prefill.step() or (giver.state == "finished" and not giver.delayed))
        stepping.result(15)
    assert taker.taken == 43


def test_a_step_that_waits_for_a_pull_is_woken_by_its_end(pair: Pair, endless: None) -> None:
    prefill, decode = pair()
    giver = prefill.add("a", prompt(31, 43), params={"do_remote_decode": True})
    until(lambda: prefill.step() or giver.state == "finished")
    with ThreadPoolExecutor(1) as threads:
        held = threads.submit(prefill.settle)  # its steps wait until somebody has come for the blocks
        taker = decode.run("b", prompt(31, 43), output=6, params=giver.answer)
        held.result(15)
    assert taker.taken == 43 and prefill.released == ["a"]


def test_a_step_waits_so_long_at_most_and_not_when_there_is_something_to_do(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair(push_timeout_ms=2000)
    _, to_decode = asked(prefill)
    taker = decode.add("b", prompt(32, 43), params=to_decode)
    with counting_waits(decode, monkeypatch) as waited:
        decode.step()
        decode.step()
        assert waited, "it waits, and comes back although nothing has come"
        other = decode.add("c", prompt(33, 20), output=50)
        waited.clear()
        decode.finish(other)
        assert not waited, "nobody is computed later because somebody else waits"
        decode.step()
        assert not waited, "nor right after a step that has computed, whose end may bring more"
        decode.finish(taker)
        waited.clear()
        for _ in range(3):
            decode.step()
        assert not waited, "there is nothing to wait for"


def test_a_worker_that_others_wait_for_in_each_step_does_not_wait(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = pair(push_timeout_ms=300)
    decode.worker._may_wait = False  # as of one of several data-parallel engines
    _, to_decode = asked(prefill)
    with counting_waits(decode, monkeypatch) as waited:
        decode.run("b", prompt(34, 43), params=to_decode)
    assert not waited


def test_requests_of_one_name_all_end_right(pair: Pair) -> None:
    """As of a router that gives one name to all answers, or all prompts, of a request."""
    prefill, decode = pair(chunk=7)
    to_prefill, to_decode = asked(prefill)
    prompts = [prompt(61, 43), prompt(61, 43), prompt(62, 43)]
    takers = [decode.add(f"b{i}", tokens, output=3, params=to_decode) for i, tokens in enumerate(prompts)]
    waits(prefill, decode)
    givers = [prefill.add(f"a{i}", tokens, params=to_prefill) for i, tokens in enumerate(prompts)]
    together(prefill, decode, *takers, *givers)
    assert [taker.taken for taker in takers] == [43, 0, 0]
    prefill.settle()
    decode.settle()


def test_who_expects_what_is_being_pushed_to_another_one_computes(pair: Pair) -> None:
    """Part of it has left: the rest must not be taken for all. As of a router that asks another decode instance."""
    prefill, first = pair(chunk=7)
    _, second = pair()
    to_prefill, to_decode = asked(prefill)
    tokens = prompt(63, 43)
    taker = first.add("b", tokens, params=to_decode)
    waits(prefill, first)
    giver = prefill.add("a", tokens, params=to_prefill)
    prefill.step()
    assert giver.state == "running"
    assert second.run("c", tokens, output=3, params=to_decode).taken == 0
    together(prefill, first, giver, taker)
    assert taker.taken == 43


def test_a_prefill_that_pushes_none_holds_no_window_that_nobody_comes_for(pair: Pair) -> None:
    prefill, _ = pair(push=False)
    prefill.run("a", prompt(64, 43), params={"do_remote_decode": True, "kvferry_push": "p"})
    prefill.settle()
    assert "handovers:offered" not in prefill.counted()
