"""A front for prefill and decode instances of vLLM: one OpenAI-compatible address, behind which prompts are computed by some
and answers by others.

    python examples/router.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

Each of --prefill and --decode may be given several times; they are taken in turns. With --prefill-node HOST:PORT for each
prefill, the place where its connector listens, prompts are pushed layer by layer while they are computed: both instances
get the request at once. What matters here is what happens when something fails: a prefill that cannot be had costs its head
start and not the answer, a decode that cannot be had is replaced by the next one, and a client that goes away ends its
request wherever that is.

Needs starlette, uvicorn and httpx. This is an example to try a pair with; the proxies that speak the same words
(``do_remote_decode``, ``do_remote_prefill`` in ``kv_transfer_params``) work as well.
"""

import argparse
import asyncio
import itertools
import json
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

T = TypeVar("T")
log = logging.getLogger("router")

CONNECTING_S = 10.0  # a host that is gone; a process that is gone is known at once


class Fleet:
    """Instances of one kind, taken in turns."""

    def __init__(self, urls: list[str], timeout_s: float) -> None:
        timeout = httpx.Timeout(timeout_s, connect=CONNECTING_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self.clients = [httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits) for url in urls]
        self._turn = itertools.count()

    def __iter__(self) -> "itertools.chain[httpx.AsyncClient]":
        """All of them, beginning with the one whose turn it is."""
        first = next(self._turn) % len(self.clients)
        return itertools.chain(self.clients[first:], self.clients[:first])


class Router:
    def __init__(self, prefill: list[str], decode: list[str], nodes: list[str], timeout_s: float) -> None:
        self._prefill, self._decode = Fleet(prefill, timeout_s), Fleet(decode, timeout_s)
        self._nodes = dict(zip(self._prefill.clients, nodes, strict=True)) if nodes else {}
        routes = [
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/health", lambda request: Response()),
        ]
        self.app = Starlette(routes=routes, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        for client in self._prefill.clients + self._decode.clients:
            await client.aclose()

    # --- endpoints ---------------------------------------------------------------------------------------------------

    async def complete(self, request: Request) -> Response:
        try:
            body = _understood(await request.body())
        except ValueError as error:
            return _error(400, str(error))
        except ClientDisconnect:
            return Response(status_code=499)
        try:
            return await _while_there(request, self._completed(request.url.path, _headers(request), body))
        except ClientDisconnect:
            return Response(status_code=499)

    async def models(self, request: Request) -> Response:
        for client in self._decode:
            try:
                return _passed_on(await client.get("/v1/models"))
            except httpx.TransportError:
                continue
        return _error(503, "no decode instance can be reached")

    # -----------------------------------------------------------------------------------------------------------------

    async def _completed(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Response:
        own = body.get("kv_transfer_params") or {}
        if _several_prompts(
            body
        ):  # one answer of a prefill tells of one prompt; the windows of the others would be in vain
            return await self._decoded(path, headers, body | {"kv_transfer_params": own})
        if self._nodes:
            return await self._pushed(path, headers, body, own)
        given = await self._prefilled(path, headers, _first_token_only(body, {**own, "do_remote_decode": True}))
        if isinstance(given, httpx.Response):  # the request itself is wrong, and the prefill instance has said so
            return _passed_on(given)
        return await self._decoded(path, headers, body | {"kv_transfer_params": own | given})

    async def _pushed(self, path: str, headers: dict[str, str], body: dict[str, Any], own: dict[str, Any]) -> Response:
        """Both at once. Should the prefill fail, the decode instance hears of it from its own connector, and computes."""
        client, name = next(iter(self._prefill)), uuid.uuid4().hex
        host, _, port = self._nodes[client].rpartition(":")
        told = {"do_remote_prefill": True, "kvferry_push": name, "remote_host": host, "remote_port": int(port)}
        asked = _first_token_only(body, {**own, "do_remote_decode": True, "kvferry_push": name})
        prefilling = asyncio.ensure_future(client.post(path, json=asked, headers=headers))
        prefilling.add_done_callback(_said)
        try:
            return await self._decoded(path, headers, body | {"kv_transfer_params": {**own, **told}})
        except asyncio.CancelledError:
            prefilling.cancel()
            raise

    async def _prefilled(self, path: str, headers: dict[str, str], asked: dict[str, Any]) -> Any:
        """What the decode instance is to be told; or the answer of a prefill instance that refuses the request."""
        for client in self._prefill:
            try:
                answer = await client.post(path, json=asked, headers=headers)
            except httpx.TransportError as error:
                log.warning("prefill at %s: %r", client.base_url, error)
                continue
            if 400 <= answer.status_code < 500:
                return answer
            given = _given(answer)
            if given is not None:
                return given
            log.warning("prefill at %s answered %d: %.200s", client.base_url, answer.status_code, answer.text)
        return {}  # the decode instance computes it all

    async def _decoded(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Response:
        if not body["kv_transfer_params"]:
            del body["kv_transfer_params"]
        for client in self._decode:
            try:
                answer = await client.send(client.build_request("POST", path, json=body, headers=headers), stream=True)
            except httpx.TransportError as error:
                log.warning("decode at %s: %r", client.base_url, error)
                continue
            if answer.status_code >= 500:
                log.warning("decode at %s answered %d", client.base_url, answer.status_code)
                await answer.aclose()
                continue
            media_type = answer.headers.get("content-type")
            return StreamingResponse(_content(answer), answer.status_code, media_type=media_type)
        return _error(503, "no decode instance can be reached")


def _understood(content: bytes) -> dict[str, Any]:
    """:raises ValueError: a body that is no request, or could not be sent on."""
    try:
        body = json.loads(content)
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()  # as it is sent on
    except (ValueError, RecursionError):  # also of an infinite number, of half a character
        body = None
    if not isinstance(body, dict):
        raise ValueError("the body is no JSON object")
    if not isinstance(body.get("kv_transfer_params") or {}, dict):
        raise ValueError("kv_transfer_params is no JSON object")
    return body


def _several_prompts(body: dict[str, Any]) -> bool:
    prompt = body.get("prompt")
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def _given(answer: httpx.Response) -> dict[str, Any] | None:
    """What a prefill instance says of its request; None: it is none, or ill."""
    try:
        said = answer.json() if answer.status_code == 200 else None
    except ValueError:
        said = None
    given = said.get("kv_transfer_params") or {} if isinstance(said, dict) else None
    return given if isinstance(given, dict) else None


def _first_token_only(body: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    asked = {name: value for name, value in body.items() if name != "stream_options"}
    # One answer as well: each of several would be handed over, and one of them be told of.
    asked |= {name: 1 for name in ("max_completion_tokens", "min_tokens", "n") if asked.get(name)}
    return asked | {"stream": False, "max_tokens": 1, "kv_transfer_params": params}


def _said(prefilling: "asyncio.Future[httpx.Response]") -> None:
    if not prefilling.cancelled() and prefilling.exception() is not None:
        log.warning("prefill: %r", prefilling.exception())


async def _content(answer: httpx.Response) -> AsyncIterator[bytes]:
    """As it comes. When the client goes, this is closed, the connection with it, and the instance aborts the request."""
    try:
        async for piece in answer.aiter_bytes():
            yield piece
    finally:
        await answer.aclose()


async def _while_there(request: Request, work: Awaitable[T]) -> T:
    """Ends ``work`` when the client goes away. :raises ClientDisconnect: it has."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()


def _headers(request: Request) -> dict[str, str]:
    """One id for both halves of a request, and whatever lets it in."""
    kept = {name: request.headers[name] for name in ("x-request-id", "authorization") if name in request.headers}
    return {"x-request-id": uuid.uuid4().hex} | kept


def _passed_on(answer: httpx.Response) -> Response:
    return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


def _error(status: int, sentence: str) -> Response:
    return JSONResponse(
        {"error": {"message": sentence, "type": "BadRequest" if status == 400 else "Unavailable"}}, status
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="A front for prefill and decode instances of vLLM.")
    parser.add_argument("--prefill", action="append", required=True, metavar="URL")
    parser.add_argument("--decode", action="append", required=True, metavar="URL")
    parser.add_argument("--prefill-node", action="append", default=[], metavar="HOST:PORT")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--timeout-s", type=float, default=600.0, help="how long an instance may be silent")
    asked = parser.parse_args()
    for url in asked.prefill + asked.decode:
        if not re.match("https?://[^/]", url):
            parser.error(f"{url!r} is no URL: give it as in http://127.0.0.1:8100")
    for place in asked.prefill_node:
        if not re.fullmatch(r".+:\d+", place) or int(place.rpartition(":")[2]) > 65535:
            parser.error(f"{place!r} is no HOST:PORT: give what 'listen' of that prefill's connector says")
    if asked.prefill_node and len(asked.prefill_node) != len(asked.prefill):
        parser.error(f"{len(asked.prefill)} --prefill and {len(asked.prefill_node)} --prefill-node: give one for each")
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    router = Router(asked.prefill, asked.decode, asked.prefill_node, asked.timeout_s)
    uvicorn.run(router.app, host=asked.host, port=asked.port, log_level="warning")


if __name__ == "__main__":
    main()
