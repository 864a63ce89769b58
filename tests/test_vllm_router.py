"""The router of examples/ before instances that only answer; what it does before real ones is in test_vllm_handover.py."""

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from vllm_support import ROOT

pytestmark = pytest.mark.vllm  # whose environment has what the router needs

ROUTER = ROOT / "examples" / "router.py"
PUSHING = ["127.0.0.1:7000"]


class Instance:
    """Says ``given`` of each request, and keeps what it was asked."""

    def __init__(self, given: Any = None, status: int = 200, content: bytes | None = None) -> None:
        self.given, self.status, self.content = given, status, content
        self.asked: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request
        from starlette.responses import JSONResponse, Response

        self.asked.append(await Request(scope, receive).json())
        answer = JSONResponse({"kv_transfer_params": self.given}, self.status)
        await (answer if self.content is None else Response(self.content, self.status))(scope, receive, send)


def answered(prefill: Instance, decode: Instance, content: bytes, nodes: "list[str] | None" = None) -> tuple[int, str]:
    import httpx
    from starlette.testclient import TestClient

    spec = importlib.util.spec_from_file_location("router", ROUTER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    router = module.Router(["http://prefill"], ["http://decode"], nodes or [], 10.0)
    for fleet, instance in ((router._prefill, prefill), (router._decode, decode)):
        fleet.clients[0]._transport = httpx.ASGITransport(instance)
        fleet.clients[0]._mounts = {}
    with TestClient(router.app) as client:
        answer = client.post("/v1/completions", content=content)
    return answer.status_code, answer.text


@pytest.mark.parametrize("nodes", [[], PUSHING], ids=["pull", "push"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nope",
        b"[1]",
        b"\xff",
        b"[" * 100_000,
        b'{"kv_transfer_params": "x"}',
        b'{"kv_transfer_params": [1]}',
        b'{"temperature": NaN}',
        b'{"max_tokens": 1e999}',
        b'{"prompt": "\\ud800"}',
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda content: repr(content[:30]),
)
def test_a_body_that_is_no_request_is_the_clients_fault(content: bytes, nodes: list[str]) -> None:
    prefill, decode = Instance(), Instance()
    status, said = answered(prefill, decode, content, nodes)
    assert status == 400 and "JSON object" in json.loads(said)["error"]["message"]
    assert not prefill.asked and not decode.asked


def test_of_several_answers_the_prefill_makes_one() -> None:
    prefill, decode = Instance({"do_remote_prefill": True}), Instance()
    assert answered(prefill, decode, b'{"prompt": "a", "n": 3}')[0] == 200
    assert prefill.asked[0]["n"] == 1 and decode.asked[0]["n"] == 3
    assert decode.asked[0]["kv_transfer_params"] == {"do_remote_prefill": True}


@pytest.mark.parametrize("nodes", [[], PUSHING], ids=["pull", "push"])
@pytest.mark.parametrize(
    ("asked", "several"),
    [(["a", "b"], True), ([[1, 2], [3]], True), (["a"], False), ([[1, 2]], False), ([1, 2], False), ("ab", False)],
    ids=str,
)
def test_several_prompts_are_computed_where_they_are_answered(asked: Any, several: bool, nodes: list[str]) -> None:
    prefill, decode = Instance({"do_remote_prefill": True}), Instance()
    assert answered(prefill, decode, json.dumps({"prompt": asked}).encode(), nodes)[0] == 200
    assert bool(prefill.asked) != several and ("kv_transfer_params" in decode.asked[0]) != several


@pytest.mark.parametrize(
    "prefill",
    [Instance(content=b"no JSON"), Instance(content=b"[]"), Instance("a word"), Instance(status=500), Instance(None)],
    ids=["no JSON", "no object", "no params", "ill", "nothing to tell"],
)
def test_a_prefill_that_tells_nothing_costs_its_head_start_alone(prefill: Instance) -> None:
    decode = Instance()
    assert answered(prefill, decode, b'{"prompt": "a"}')[0] == 200
    assert "kv_transfer_params" not in decode.asked[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prefill", "127.0.0.1:8100"], "'127.0.0.1:8100' is no URL"),
        (["--prefill", "http://a", "--prefill-node", "host"], "'host' is no HOST:PORT"),
        (["--prefill", "http://a", "--prefill-node", "host:99999"], "'host:99999' is no HOST:PORT"),
        (["--prefill", "http://a", "--prefill", "http://b", "--prefill-node", "host:1"], "give one for each"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_wrong_words_are_refused_when_it_starts(words: list[str], said: str) -> None:
    listed = [sys.executable, str(ROUTER), "--decode", "http://decode", "--port", "0", *words]
    ended = subprocess.run(listed, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 2 and said in ended.stderr
