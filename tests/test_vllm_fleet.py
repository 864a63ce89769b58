"""Two prefill and two decode servers of vLLM with a model that people use (SmolLM2-135M), behind the router of examples/."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from demo.weights import smollm2

from pool_support import until
from vllm_support import (
    Server,
    asked_of,
    ended,
    free_port,
    missed,
    prompt,
    route,
    running,
    tokens_of,
    transfer_config,
    usage,
)

pytestmark = [pytest.mark.vllm, pytest.mark.deadline(500)]

LENGTH = 150
REQUESTS, AT_ONCE = 16, 8


class Fleet:
    """Each pair has a core."""

    def __init__(self, folder: Path) -> None:
        self.model, self.folder, self.port = smollm2(), folder, free_port()
        self.nodes = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        self.prefills = [self.start("prefill", number) for number in range(2)]
        self.decodes = [self.start("decode", number) for number in range(2)]

    def start(self, kind: str, number: int, port: int = 0) -> Server:
        role, listen = {
            "prefill": ("kv_producer", self.nodes[number]),
            "decode": ("kv_consumer", "127.0.0.1:0"),
        }[kind]
        config = transfer_config(role, pool="off", push=True, listen=listen, pull_timeout_ms=20_000)
        few = ["--num-gpu-blocks-override", "64", "--max-model-len", "512"]
        return Server(self.model, config, self.folder / f"{kind}{number}.log", number, *few, port=port)

    @property
    def servers(self) -> list[Server]:
        return self.prefills + self.decodes

    def ask(self, prompts: list[list[int]], port: int = 0) -> list[list[int]]:
        """So many at once, of the router."""
        port = port or self.port
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return [tokens_of(answer) for answer in threads.map(lambda tokens: asked_of(port, tokens), prompts)]

    def alone(self, prompts: list[list[int]]) -> list[list[int]]:
        """What a server answers that hands nothing over, and then forgets."""
        with ThreadPoolExecutor(AT_ONCE) as threads:
            answers = list(threads.map(self.prefills[0].complete, prompts))
        self.at_rest()
        self.prefills[0].forget()
        return [tokens_of(answer) for answer in answers]

    def at_rest(self) -> None:
        """Nobody has a request, nor blocks that are held for one."""
        until(lambda: not any(running(server) or usage(server) for server in self.servers), 60)

    def taken(self) -> list[float]:
        """Tokens that each decode has had from a prefill."""
        return [server.metrics().get("tokens_used:handover", 0) for server in self.decodes]

    def lost_and_taken(self) -> float:
        """Tokens that the decodes have had from a prefill, or else would have."""
        lost = [n for server in self.decodes for n in missed({}, server.metrics()).values()]
        return sum(lost) + sum(self.taken())

    def handovers(self, how: str) -> list[float]:
        """Requests of each prefill."""
        return [server.metrics().get(f"handovers:{how}", 0) for server in self.prefills]

    def close(self) -> None:
        for server in self.servers:
            server.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        for server in fleet.servers:
            server.wait()
        router = route(fleet.port, fleet.prefills, fleet.decodes)
        try:
            yield fleet
        finally:
            ended(router)
    finally:
        fleet.close()


def prompts(seed: int, count: int = REQUESTS) -> list[list[int]]:
    return [prompt(seed + number, LENGTH) for number in range(count)]


def test_every_request_of_a_fleet_is_handed_over(fleet: Fleet) -> None:
    asked = prompts(1000)
    right = fleet.alone(asked)
    assert fleet.ask(asked) == right
    taken = fleet.taken()
    assert sum(taken) == REQUESTS * LENGTH and all(taken), taken
    assert sum(server.metrics()["external_prefix_cache_hits"] for server in fleet.decodes) == REQUESTS * LENGTH
    assert fleet.handovers("offered") == [REQUESTS / 2, REQUESTS / 2]
    fleet.at_rest()


def test_every_request_of_a_fleet_is_pushed(fleet: Fleet) -> None:
    asked = prompts(3000)
    right = fleet.alone(asked)
    taken, port = sum(fleet.taken()), free_port()
    words = [word for node in fleet.nodes for word in ("--prefill-node", node)]
    router = route(port, fleet.prefills, fleet.decodes, words)
    try:
        assert fleet.ask(asked, port) == right
    finally:
        ended(router)
    assert sum(fleet.taken()) == taken + REQUESTS * LENGTH
    fleet.at_rest()
    assert fleet.handovers("pushed") == [REQUESTS / 2, REQUESTS / 2]


def test_a_prefill_of_a_fleet_is_killed_and_comes_back(fleet: Fleet) -> None:
    """Its requests are prefilled by the other one, or computed where its blocks were waited for."""
    asked = prompts(2000, REQUESTS + 8)
    right = fleet.alone(asked)
    before, answers = fleet.lost_and_taken(), dict[int, list[int]]()

    def ask(number: int) -> None:
        answers[number] = tokens_of(asked_of(fleet.port, asked[number]))

    with ThreadPoolExecutor(AT_ONCE) as threads:
        asking = [threads.submit(ask, number) for number in range(REQUESTS)]
        until(lambda: len(answers) >= 4, 120)
        fleet.prefills[1].kill()
        for one in asking:
            one.result(120)
    assert [answers[number] for number in range(REQUESTS)] == right[:REQUESTS]
    assert fleet.lost_and_taken() == before + REQUESTS * LENGTH

    taken = sum(fleet.taken())
    assert fleet.ask(asked[REQUESTS:-4]) == right[REQUESTS:-4]
    assert sum(fleet.taken()) == taken + 4 * LENGTH, "the other prefill does it all"

    fleet.prefills[1] = fleet.start("prefill", 1, fleet.prefills[1].port).wait()
    assert fleet.ask(asked[-4:]) == right[-4:]
    assert sum(fleet.taken()) == taken + 8 * LENGTH
    assert fleet.handovers("offered")[1] == 2
    fleet.at_rest()
