"""A pair of vLLM servers, one of which is stopped amid a handover, by pull or by push, until the other has gone on without it.

The decode's process stops itself, or the prefill's, between two pieces of what it is just taking over: `AMID` stands before the
two calls of the C library that bring them.
"""

import contextlib
import itertools
import json
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pool_support import until
from vllm_support import (
    ASKED,
    BLOCK,
    Server,
    asked_of,
    body_of,
    ended,
    free_port,
    make_model,
    missed,
    prompt,
    route,
    running,
    tokens_of,
    transfer_config,
    usage,
)

pytestmark = [pytest.mark.vllm, pytest.mark.deadline(500)]

LENGTH = 1000  # 16 MB, of which one call reads 4 at most, and a socket holds less than the rest
BLOCKS = 96  # of which vLLM uses one for itself
TTL_MS, PULL_MS, PUSH_MS = 3000, 7000, 4000

AMID = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

/* Before each piece. Stops the process group that the file ORDER names, once, before the second of at least 16 KiB. */
static void piece(size_t bytes) {
  static int pieces = 0;
  const char *order = getenv("ORDER");
  if (bytes < 16384 || order == NULL || access(order, F_OK) != 0 || __sync_add_and_fetch(&pieces, 1) != 2) return;
  FILE *file = fopen(order, "r");
  int group = 0;
  if (file != NULL && fscanf(file, "%d", &group) == 1 && group > 1) {
    pieces = 0;
    unlink(order);
    kill(-group, SIGSTOP);
  }
  if (file != NULL) fclose(file);
}

/* Refused once the file REFUSED is there, as in a container without the right to it: all goes by socket. */
ssize_t process_vm_readv(pid_t pid, const struct iovec *to, unsigned long n, const struct iovec *from, unsigned long m,
                         unsigned long flags) {
  ssize_t (*real)(pid_t, const struct iovec *, unsigned long, const struct iovec *, unsigned long, unsigned long) =
      dlsym(RTLD_NEXT, "process_vm_readv");
  const char *refused = getenv("REFUSED");
  if (refused != NULL && access(refused, F_OK) == 0) return errno = EPERM, -1;
  size_t bytes = 0;
  for (unsigned long i = 0; i < n; ++i) bytes += to[i].iov_len;
  piece(bytes);
  return real(pid, to, n, from, m, flags);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
  ssize_t (*real)(int, struct msghdr *, int) = dlsym(RTLD_NEXT, "recvmsg");
  size_t bytes = 0;
  for (size_t i = 0; i < message->msg_iovlen; ++i) bytes += message->msg_iov[i].iov_len;
  piece(bytes);
  return real(fd, message, flags);
}
"""


class Pair:
    """A prefill and a decode server that pull and push."""

    def __init__(self, folder: Path) -> None:
        model = make_model(folder / "model", head_dim=128, num_key_value_heads=4)
        self._seeds = itertools.count()
        self.order, self.refused = folder / "order", folder / "refused"
        (folder / "amid.c").write_text(AMID)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "amid.so", folder / "amid.c", "-ldl"], check=True)
        self.node = f"127.0.0.1:{free_port()}"
        times = {"window_ttl_ms": TTL_MS, "pull_timeout_ms": PULL_MS, "push_timeout_ms": PUSH_MS}
        extra = {"pool": "off", "push": True} | times
        few = ["--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "2048"]
        self.prefill = Server(
            model, transfer_config("kv_producer", **extra, listen=self.node), folder / "prefill.log", 0, *few
        )
        with pytest.MonkeyPatch.context() as patched:
            for name, value in (("LD_PRELOAD", folder / "amid.so"), ("ORDER", self.order), ("REFUSED", self.refused)):
                patched.setenv(name, str(value))
            self.decode = Server(model, transfer_config("kv_consumer", **extra), folder / "decode.log", 1, *few)

    def fresh(self, length: int = LENGTH) -> list[int]:
        """A prompt that nobody has seen."""
        return prompt(next(self._seeds), length)

    @contextlib.contextmanager
    def stopped_amid(self, server: Server, tokens: list[int], params: dict[str, Any]) -> "Iterator[Future[list[int]]]":
        """``server`` is stopped between two pieces of what the decode takes over of this prompt, until the block ends.
        Yields the decode's answer, to come."""
        self.order.write_text(str(server.process.pid))
        with ThreadPoolExecutor(1) as threads:
            try:
                asking = threads.submit(self.decode.complete, tokens, kv_transfer_params=params)
                until(lambda: not self.order.exists() or asking.done(), 60)
                assert not self.order.exists(), "it does not take over two pieces"
                until(lambda: standing(server), 60)
                answer: Future[list[int]] = threads.submit(lambda: tokens_of(asking.result()))
                yield answer
            finally:
                self.order.unlink(missing_ok=True)
                server.signal(signal.SIGCONT)

    def close(self) -> None:
        for server in (self.prefill, self.decode):
            server.close()


def standing(server: Server) -> bool:
    return Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("stopped"))
    try:
        pair.prefill.wait()
        pair.decode.wait()
        yield pair
    finally:
        pair.close()


@pytest.fixture(scope="module", params=["cma", "socket"])
def pair(request: pytest.FixtureRequest, started: Pair) -> Pair:
    """By one way; that by socket, once taken, is taken from then on."""
    if request.param == "socket":
        started.refused.touch()
    return started


@pytest.fixture(autouse=True)
def at_rest(started: Pair) -> None:
    until(lambda: not any(running(server) or usage(server) for server in (started.prefill, started.decode)), 60)


def handed_over(pair: Pair) -> None:
    """A handover, as ever."""
    tokens, before = pair.fresh(), pair.decode.metrics().get("tokens_used:handover", 0)
    given = pair.prefill.complete(tokens, 1, kv_transfer_params=ASKED)["kv_transfer_params"]
    answer = tokens_of(pair.decode.complete(tokens, kv_transfer_params=given))
    assert pair.decode.metrics()["tokens_used:handover"] == before + LENGTH
    assert answer == tokens_of(pair.prefill.complete(tokens))


def push(pair: Pair, name: str) -> "tuple[dict[str, Any], dict[str, Any]]":
    """What is said to the prefill, and to the decode."""
    host, _, port = pair.node.rpartition(":")
    told = {"do_remote_prefill": True, "kvferry_push": name, "remote_host": host, "remote_port": int(port)}
    return {"do_remote_decode": True, "kvferry_push": name}, told


def test_pushed_layer_by_layer(started: Pair) -> None:
    """Both get the request at once; prefill pushes what it computes into the window that decode has opened."""
    port = free_port()
    router = route(port, [started.prefill], [started.decode], words=["--prefill-node", started.node])
    try:
        for more in range(3):
            tokens = started.fresh(LENGTH + more)
            assert tokens_of(asked_of(port, tokens)) == tokens_of(started.prefill.complete(tokens))
    finally:
        ended(router)
    assert started.decode.metrics()["tokens_used:handover"] == 3003
    started.prefill.complete([1, 2, 3])
    assert started.prefill.metrics()["handovers:pushed"] == 3


def test_no_words_of_a_request_end_an_engine(started: Pair) -> None:
    """Whatever stands in its kv_transfer_params: it is computed, and its blocks come back."""
    import httpx

    host, _, port = started.node.rpartition(":")
    tokens = started.fresh(40)
    right = tokens_of(started.prefill.complete(tokens))
    to_push = {"do_remote_prefill": True, "kvferry_push": "words", "remote_host": host, "remote_port": int(port)}
    for server, words in (
        (started.decode, to_push | {"remote_port": "INFINITE"}),
        (started.decode, to_push | {"remote_port": -1}),
        (started.decode, to_push | {"remote_host": ["h"], "kvferry_push": {"a": 1}}),
        (started.decode, {"do_remote_prefill": True, "remote_block_ids": ["INFINITE"], "remote_port": None}),
        (started.prefill, {"do_remote_decode": True, "kvferry_push": ["INFINITE"]}),
    ):
        said = json.dumps(body_of(tokens, kv_transfer_params=words)).replace('"INFINITE"', "1e999")
        answer = httpx.post(
            f"{server.url}/v1/completions", content=said, headers={"content-type": "application/json"}, timeout=120
        )
        assert answer.status_code == 200 and tokens_of(answer.json()) == right, (words, answer.text)


def test_requests_that_share_the_name_of_a_push_are_all_answered(started: Pair) -> None:
    """One may be pushed, the others are computed, and none of them waits for good."""
    tokens = [started.fresh(300) for _ in range(3)]
    right = [tokens_of(started.prefill.complete(one)) for one in tokens]
    to_prefill, to_decode = push(started, "one name for all")
    with ThreadPoolExecutor(4) as threads:
        taking = [threads.submit(started.decode.complete, one, kv_transfer_params=to_decode) for one in tokens]
        until(lambda: running(started.decode) > 0 or all(one.done() for one in taking), 60)
        started.prefill.complete(tokens[0], 1, kv_transfer_params=to_prefill)
        assert [tokens_of(one.result(120)) for one in taking] == right


def test_several_answers_or_prompts_of_one_request_to_a_router_that_pushes(started: Pair) -> None:
    port, tokens = free_port(), [started.fresh(300) for _ in range(3)]
    right = [tokens_of(started.prefill.complete(one)) for one in tokens]
    router = route(port, [started.prefill], [started.decode], words=["--prefill-node", started.node])
    try:
        twice = asked_of(port, tokens[0], n=2, temperature=1.0, top_k=1)  # greedy ones are one
        assert [choice["token_ids"] for choice in twice["choices"]] == [right[0]] * 2
        several = asked_of(port, tokens)
        assert [choice["token_ids"] for choice in several["choices"]] == right
    finally:
        ended(router)


def test_a_decode_that_is_stopped_amid_a_pull_until_its_blocks_are_others(pair: Pair) -> None:
    """What it reads of them when it goes on is not used, although its own time is not up."""
    handed_over(pair)
    tokens = pair.fresh()
    right = tokens_of(pair.prefill.complete(tokens))
    before, given_up = pair.decode.metrics(), pair.prefill.metrics().get("handovers:expired", 0)
    given = pair.prefill.complete(tokens, 1, kv_transfer_params=ASKED)["kv_transfer_params"]
    with pair.stopped_amid(pair.decode, tokens, given) as answer:
        until(lambda: pair.prefill.metrics().get("handovers:expired") == given_up + 1, 60)
        until(lambda: not usage(pair.prefill), 60)
        # Two others that are held at once take all blocks that there are.
        reused: set[int] = set()
        for blocks in (63, 32):
            other = pair.fresh(blocks * BLOCK - 16)
            held = pair.prefill.complete(other, 1, kv_transfer_params=ASKED)["kv_transfer_params"]
            reused |= set(held["remote_block_ids"])
        assert reused >= set(given["remote_block_ids"])
    assert answer.result() == right
    why = missed(before, pair.decode.metrics())
    assert sum(why.values()) == LENGTH and why.keys() <= {"window_gone", "timeout", "peer_lost"}, why
    handed_over(pair)


def test_a_prefill_that_is_stopped_amid_a_pull(pair: Pair) -> None:
    """By socket the decode waits as long as it is told to, and computes; what it reads by itself, it has."""
    tokens = pair.fresh()
    right = tokens_of(pair.prefill.complete(tokens))
    before = pair.decode.metrics()
    given = pair.prefill.complete(tokens, 1, kv_transfer_params=ASKED)["kv_transfer_params"]
    with pair.stopped_amid(pair.prefill, tokens, given) as answer:
        assert answer.result(120) == right
    why = missed(before, pair.decode.metrics())
    assert why == ({"timeout": LENGTH} if pair.refused.exists() else {})
    handed_over(pair)


def test_a_prefill_that_is_stopped_amid_a_push_until_its_window_is_closed(pair: Pair) -> None:
    """Nothing of it comes late into blocks that are others' by then."""
    tokens, others = pair.fresh(), [pair.fresh(25 * BLOCK) for _ in range(3)]
    right = [tokens_of(pair.prefill.complete(one, 60)) for one in [tokens, *others]]
    pair.prefill.forget()
    before = pair.decode.metrics()
    to_prefill, to_decode = push(pair, f"push {pair.refused.exists()}")
    with ThreadPoolExecutor(4) as threads:
        pushing = threads.submit(pair.prefill.complete, tokens, 1, kv_transfer_params=to_prefill)
        with pair.stopped_amid(pair.prefill, tokens, to_decode) as answer:
            assert answer.result(120) == right[0][:8]
            answers = [threads.submit(pair.decode.complete, one, 60) for one in others]
            until(lambda: usage(pair.decode) > 0.7, 60)
        assert [tokens_of(one.result(120)) for one in answers] == right[1:]
        pushing.result(120)
    why = missed(before, pair.decode.metrics())
    assert why.pop("timeout", 0) == LENGTH, why
    handed_over(pair)
