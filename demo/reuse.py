"""The second half: the prompt's KV blocks outlive the process that computed them, and others begin where it ended.

The prefill process saves the prompt's full blocks to a pool node and ends. Then a longer prompt that begins with the same
tokens is answered again and again, in turns without the pool and with it, each time by a process of its own: forked from
one (the *zygote*) that has imported the libraries and loaded the weights and never computed a token, because a process
that does both itself takes seconds and shows the same. Once more, on purpose, from blocks of which one was altered.

Never sees a byte of the cache; needs neither torch nor kvferry. Driven by ``play``.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from demo.channel import Worker
from demo.pool_node import PoolNode

RUNS = 5  # of each kind: the median is shown
AGAIN = 4  # tokens that are decoded and compared after the first run of each kind, which decodes all
SAVED, ALTERED = "demo", "demo-altered"  # namespaces: what is saved in one is not found in the other
ALTERED_BY = -8.0
LEAST_MEMORY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Answered:
    """One request. ``computed`` tokens of its prompt were run through the model, the others came in ``hits`` blocks."""

    tokens: list[int]
    first_token_s: float
    computed: int
    hits: int = 0
    size_bytes: int = 0
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reuse:
    """What was seen. ``expected``: the tokens of the undivided run, the first without the pool. (An undivided run and one
    that begins behind cached blocks add the same numbers in another order; the demo's own prompts leave no doubt.)"""

    blocks: int  # full ones of the longer prompt
    block_tokens: int
    without: tuple[Answered, ...]
    pooled: tuple[Answered, ...]
    altered: Answered

    @property
    def expected(self) -> list[int]:
        return self.without[0].tokens

    def equal(self, runs: Sequence[Answered]) -> int:
        """How many of ``runs`` gave the undivided run's tokens."""
        return sum(run.tokens == self.expected[: len(run.tokens)] for run in runs)

    @property
    def hits(self) -> int:
        """In blocks, of the run that had the fewest."""
        return min(run.hits for run in self.pooled)

    @property
    def altered_differs(self) -> bool:
        return self.altered.hits > 0 and not self.equal([self.altered])

    @property
    def faster(self) -> float:
        """How many times as early the first token is there."""
        return first_token_s(self.without) / first_token_s(self.pooled)

    @property
    def holds(self) -> bool:
        """Every request gave the same tokens, blocks were hit every time, and an altered one is noticed."""
        runs = self.without + self.pooled
        return self.equal(runs) == len(runs) and self.hits > 0 and self.altered_differs


def first_token_s(runs: Sequence[Answered]) -> float:
    return statistics.median(run.first_token_s for run in runs)


def reuse(
    prefill: Worker,
    filled: list[int],
    longer: list[int],
    *,
    model: str,
    new_tokens: int,
    block_tokens: int,
    prompt_bytes: int,
    say: Callable[[str], None],
) -> Reuse:
    """Has ``prefill`` save what lies in its blocks ``filled`` and end; then has the prompt ``longer`` answered.

    :raises WorkerFailedError: a process could not do its part. All that were started here are gone when this returns or raises.
    """
    with PoolNode(max(LEAST_MEMORY_BYTES, 3 * prompt_bytes)) as node:
        say(f"a pool node, process {node.pid}: {node.command}")
        saved = prefill.call("save", pool=node.address, namespace=SAVED, mine=filled)
        say(f"the prompt's blocks saved to it, {_told(saved)}; and once more, in another namespace, with one altered")
        prefill.call("scale_block", block=filled[len(filled) // 2], factor=ALTERED_BY)
        prefill.call("save", pool=node.address, namespace=ALTERED, mine=filled)
        prefill.close()
        with Worker("zygote") as zygote:
            say(
                f"the prefill process has ended; process {zygote.pid} loads the model, and a fork of it answers each request"
            )
            zygote.call("load", name=model)

            def answer(pool: str | None, count: int, namespace: str = SAVED) -> Answered:
                where = {"block_tokens": block_tokens, "pool": pool, "namespace": namespace}
                return Answered(**zygote.call("request", ids=longer, new_tokens=count, **where))

            say(
                f"a prompt of {len(longer):,} tokens that begins like the other, {RUNS} times without the pool and with it"
            )
            counts = [new_tokens, *[min(AGAIN, new_tokens)] * (RUNS - 1)]
            without, pooled = zip(
                *[(answer(None, count), answer(node.address, count)) for count in counts], strict=True
            )
            altered = answer(node.address, new_tokens, ALTERED)
    return Reuse((len(longer) - 1) // block_tokens, block_tokens, without, pooled, altered)


def _told(saved: dict[str, Any]) -> str:
    words = ", ".join(f"{count} {word}" for word, count in saved["reasons"].items())
    return f"{words}: {saved['size_bytes']:,} bytes in {saved['seconds'] * 1e3:.1f} ms"
