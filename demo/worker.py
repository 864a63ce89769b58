"""One process of the demo: the model, and a KV cache that a kvferry node or pool knows.

``python -m demo.worker prefill|decode|zygote`` carries out what the demo asks over its pipe (``channel``). The public
methods below are those orders. What the decode process is told is all it knows: block numbers, how long the prompt is, and
its last token. The prompt itself never comes there.
"""

import sys
import time
from typing import Any

import torch
from transformers import PreTrainedModel

import kvferry
from demo import model
from demo.channel import ChildFailedError, in_a_child, serve
from demo.paged import KvShape, PagedCache
from kvferry import Pool, prefix_keys

CACHE = "kv"
TIMEOUT_MS = 10_000
POOL_PAGE_BYTES = 1 << 16
TRANSPORTS = {"map": ("map", "cma", "socket"), "cma": ("map", "cma", "socket"), "socket": ("socket",)}


class Side:
    """What both processes can do: load the model, hold a node with a registered KV cache, give it back."""

    node: kvferry.Node | None = None

    def load_model(self, name: str) -> None:
        self.model = model.load(name)
        self.shape: KvShape = model.kv_shape(self.model)

    def open(self, transport: str, blocks: int, block_tokens: int, listen: bool = False) -> str | None:
        """A node and, registered with it, KV tensors of ``blocks`` blocks; where it listens.

        ``map`` reads memory that kvferry allocated; for the others torch does, as in an engine that has its own.
        """
        shape = (blocks, block_tokens, self.shape.kv_heads, self.shape.head_dim)
        tensor_bytes = torch.Size(shape).numel() * torch.float32.itemsize
        pool = self.shape.tensors * (tensor_bytes + POOL_PAGE_BYTES) if transport == "map" else None
        listen_at = "127.0.0.1:0" if listen else None
        self.node = kvferry.Node(listen_at, transports=TRANSPORTS[transport], pool=pool)
        if transport == "map":
            self.cache = self.node.allocate(CACHE, tensors=self.shape.tensors, shape=shape, dtype=torch.float32)
        else:
            self.cache = self.node.register(CACHE, [torch.zeros(shape) for _ in range(self.shape.tensors)])
        self.tensors: list[torch.Tensor] = self.cache.torch()
        return self.node.address

    def close(self) -> None:
        """Ends links and registration, if there are any. The views go first: the memory is the node's."""
        if self.node is not None:
            del self.tensors
            self.node.close()
            self.node = None


class Prefill(Side):
    """Has the prompt and computes its KV cache."""

    def load(self, name: str, new_tokens: int) -> dict[str, Any]:
        self.load_model(name)
        self.tokenizer = model.load_tokenizer(name)
        more = model.continuation_ids(self.model, self.tokenizer)
        self.ids = model.prompt_ids(self.model, self.tokenizer, room_for=len(more) + new_tokens)
        return {
            "length": len(self.ids),
            "last": self.ids[-1],
            "longer": [*self.ids, *more],
            "token_bytes": self.shape.token_bytes,
        }

    def undivided(self, new_tokens: int) -> dict[str, Any]:
        """The run that all others are compared with; nothing of it is registered anywhere."""
        started = time.perf_counter()
        tokens = model.undivided(self.model, self.ids, new_tokens)
        seconds = time.perf_counter() - started
        return {"tokens": tokens, "seconds": seconds, "words": model.words(self.tokenizer, tokens)}

    def prefill_and_push(self, mine: list[int], theirs: list[int]) -> dict[str, Any]:
        """Computes the prompt's KV cache; each layer leaves for the decode process while the next ones are computed."""
        with self._push_layers(mine, theirs) as push:
            cache = PagedCache(self.tensors, mine, layer_written=push.layer_ready)
            model.forward(self.model, self.ids[:-1], cache)
            prefilled = time.perf_counter()
            done = push.wait()
            pushed = time.perf_counter()
        return {**_figures(done), "after_prefill_s": pushed - prefilled}

    def push_ready_layers(self, mine: list[int], theirs: list[int]) -> dict[str, Any]:
        """The same push alone: all its layers are there already."""
        started = time.perf_counter()
        with self._push_layers(mine, theirs) as push:
            for layer in range(self.shape.layers):
                push.layer_ready(layer)
            done = push.wait()
            pushed = time.perf_counter()
        return {**_figures(done), "seconds": pushed - started}

    def push(self, mine: list[int], theirs: list[int]) -> dict[str, Any]:
        (link,) = self.node.links
        return _figures(link.push(self.cache, to=CACHE, blocks=(mine, theirs), timeout_ms=TIMEOUT_MS))

    def scale_block(self, block: int, factor: float) -> None:
        """Multiplies everything in one block of every tensor."""
        for tensor in self.tensors:
            tensor[block].mul_(factor)

    def save(self, pool: str, namespace: str, mine: list[int]) -> dict[str, Any]:
        """Saves the full blocks of the prompt, as they lie in the registered tensors."""
        block_tokens = self.tensors[0].shape[1]
        with Pool.connect(pool, namespace=namespace) as shared:
            shared.register(self.tensors, layout="blocks")
            keys = prefix_keys(self.ids[:-1], block_tokens)  # the last token's keys and values were not computed here
            saved = shared.save(keys, blocks=mine[: len(keys)], chain=True, timeout_ms=TIMEOUT_MS)
        return {"reasons": saved.reasons, "size_bytes": saved.size_bytes, "seconds": saved.seconds}

    def _push_layers(self, mine: list[int], theirs: list[int]) -> kvferry.LayerPush:
        (link,) = self.node.links
        return link.push_layers(self.cache, to=CACHE, blocks=(mine, theirs), timeout_ms=TIMEOUT_MS)


class Decode(Side):
    """Continues from a KV cache that it did not compute."""

    def load(self, name: str) -> None:
        self.load_model(name)

    def link(self, address: str) -> dict[str, Any]:
        """Links to the prefill process; says of each transport whether it is offered here."""
        self.peer = self.node.link(address)
        return dict(self.peer.statistics().transports)

    def fill(self, value: float) -> None:
        """Overwrites everything, so that nothing of an earlier handover can be taken for this one's."""
        for tensor in self.tensors:
            tensor.fill_(value)

    def pull(self, theirs: list[int], mine: list[int]) -> dict[str, Any]:
        done = self.peer.pull(CACHE, into=self.cache, blocks=(theirs, mine), timeout_ms=TIMEOUT_MS)
        return _figures(done)

    def decode(self, blocks: list[int], length: int, last: int, new_tokens: int) -> list[int]:
        """The tokens that follow a prompt of ``length`` tokens, the last of which is ``last``; keys and values of those
        before it lie in ``blocks``. Attention reads them where they arrived, and adds its own behind them."""
        cache = PagedCache(self.tensors, blocks, filled=length - 1)
        return model.decode(self.model, last, cache, new_tokens)


class Zygote:
    """Has the libraries and the weights, and never computes a token: each request gets a process forked from it."""

    def load(self, name: str) -> None:
        self.model = model.load(name)

    def request(self, **how: Any) -> dict[str, Any]:
        return in_a_child(lambda: answer_request(self.model, **how))


def answer_request(
    serving: PreTrainedModel, ids: list[int], new_tokens: int, block_tokens: int, pool: str | None, namespace: str
) -> dict[str, Any]:
    """The tokens that follow ``ids``, of which those that ``pool`` has blocks for are not computed again.

    Everything that a serving process has done before it is asked is done before the clock starts: it has seen the shape
    of its cache by running one token, has memory for its blocks, and is connected.
    """
    shape = model.kv_shape(serving)
    blocks = range(1, 1 - (-(len(ids) + new_tokens) // block_tokens))
    size = (blocks.stop, block_tokens, shape.kv_heads, shape.head_dim)
    tensors = [torch.full(size, float("nan")) for _ in range(shape.tensors)]  # one that is read, and no token is right
    hit, filled = None, 0
    with Pool.connect(pool or "off", namespace=namespace) as shared:
        shared.register(tensors, layout="blocks")
        started = time.perf_counter()
        if pool is not None:
            keys = prefix_keys(ids[:-1], block_tokens)  # at least one token is run: the next one's scores come of it
            hit = shared.load(keys, blocks=blocks[: len(keys)], timeout_ms=TIMEOUT_MS)
            filled = hit.prefix * block_tokens
        cache = PagedCache(tensors, blocks, filled)
        first = int(model.forward(serving, ids[filled:], cache).argmax())
        seconds = time.perf_counter() - started
        tokens = [first, *model.decode(serving, first, cache, new_tokens - 1)]
    loaded = {} if hit is None else {"hits": hit.prefix, "size_bytes": hit.size_bytes, "load_s": hit.seconds}
    return {"tokens": tokens, "first_token_s": seconds, "computed": len(ids) - filled, **loaded}


def _figures(done: kvferry.Done) -> dict[str, Any]:
    return {"size_bytes": done.size_bytes, "seconds": done.seconds, "transport": done.transport}


if __name__ == "__main__":
    side = {"prefill": Prefill, "decode": Decode, "zygote": Zygote}[sys.argv[1]]()
    serve(side, (kvferry.KvferryError, model.UnfitModelError, ChildFailedError))
