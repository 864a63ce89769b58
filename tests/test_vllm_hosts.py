"""Prefill and decode on two hosts, as far as one machine can have two: engines in network namespaces of their own, behind a switch."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from namespace_support import Inside, network

pytestmark = pytest.mark.slow

LENGTH = 203

ENGINE = """
import json, sys, time
from engine_support import Engine, prompt

engine = Engine(handover=True, push=True, blocks=200, listen=sys.argv[1], pull_timeout_ms=20_000, push_timeout_ms=20_000)
print(engine.place.address, flush=True)
for number, line in enumerate(sys.stdin):
    verb, seed, params = json.loads(line)
    said = None
    if verb == "run":
        request = engine.add(str(number), prompt(seed, 203), output=3 if params.get("do_remote_prefill") else 1, params=params)
        end = time.monotonic() + 30
        while request.state != "finished" and time.monotonic() < end:
            engine.step()
        said = {"taken": request.taken, "made": request.made, "answer": request.answer}
    else:
        engine.settle(30)
        said = {"counted": engine.counted(), "free": len(engine.free)}
    print(json.dumps(said), flush=True)
"""


class Host:
    def __init__(self, inside: Inside) -> None:
        self._inside, self.address = inside, inside.line()

    def begin(self, verb: str, seed: int = 0, params: "dict[str, Any] | None" = None) -> None:
        assert self._inside.process.stdin is not None
        print(json.dumps([verb, seed, params or {}]), file=self._inside.process.stdin, flush=True)

    def said(self) -> dict[str, Any]:
        return dict(json.loads(self._inside.line()))

    def run(self, seed: int, params: "dict[str, Any]") -> dict[str, Any]:
        self.begin("run", seed, params)
        return self.said()

    def settle(self) -> dict[str, Any]:
        self.begin("settle")
        return self.said()


def test_requests_are_handed_over_from_host_to_host(insides: Callable[..., Inside]) -> None:
    """Values are compared by the engine that has taken them. Nothing but sockets reaches from one to the other."""
    with network(insides, ENGINE, 2) as hosts:
        prefill, decode = Host(hosts[0]), Host(hosts[1])
        given = prefill.run(1, {"do_remote_decode": True})["answer"]
        assert given["remote_host"] == prefill.address.rpartition(":")[0]
        taken = decode.run(1, given)
        assert (taken["taken"], taken["made"]) == (LENGTH, 3)
        settled = prefill.settle()
        assert settled["counted"]["handovers:given"] == 1 and settled["free"] == 199

        host, _, port = prefill.address.rpartition(":")
        told = {"do_remote_prefill": True, "kvferry_push": "p", "remote_host": host, "remote_port": int(port)}
        decode.begin("run", 2, told)
        prefill.run(2, {"do_remote_decode": True, "kvferry_push": "p"})
        prefill.begin("settle")  # it goes on stepping
        taken = decode.said()
        assert (taken["taken"], taken["made"]) == (LENGTH, 3)
        settled = prefill.said()
        assert settled["counted"]["handovers:pushed"] == 1 and settled["free"] == 199


def test_a_host_that_is_cut_off_costs_a_computation_and_is_used_again(insides: Callable[..., Inside]) -> None:
    with network(insides, ENGINE.replace("20_000", "1500"), 2) as hosts:
        prefill, decode = Host(hosts[0]), Host(hosts[1])
        assert decode.run(1, prefill.run(1, {"do_remote_decode": True})["answer"])["taken"] == LENGTH
        given = prefill.run(2, {"do_remote_decode": True})["answer"]
        hosts.cut(0)
        assert decode.run(2, given)["made"] == LENGTH + 2
        hosts.mend(0)
        assert decode.settle()["free"] == 199
        for seed in range(3, 30):
            if decode.run(seed, prefill.run(seed, {"do_remote_decode": True})["answer"])["taken"] == LENGTH:
                return
        raise AssertionError("it is not used again")
