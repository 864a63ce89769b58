"""The order of events: who is asked what, and what is concluded from it.

Two processes load one model. The prefill process also decodes, undivided, the tokens that all others are compared with. Then,
over each transport that the machine offers, its KV cache goes to the decode process in three ways, which decodes from
it; and twice on purpose not as it should: with one block altered, and not at all. What then becomes of the prompt's
blocks is ``reuse``.

Never sees a token's meaning nor a byte of the cache; needs neither torch nor kvferry. Driven by ``__main__``.
"""

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.channel import Worker
from demo.reuse import Reuse, reuse

TRANSPORTS = ("map", "cma", "socket")
PULL, PUSH, LAYERS = "pull", "push", "push by layers"
ALTERED_BY = -8.0  # a power of two, so that dividing by it gives the very numbers back
ROUNDS = 5  # each timed this often: the median is shown

BLOCK_TOKENS = 16
PREFILL_FIRST_BLOCK = 3  # different numbers at the two ends, as in two engines that serve other requests too
DECODE_FIRST_BLOCK = 11

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Handover:
    """One KV cache handed over. ``waited_s`` is what decoding had to wait for after the prefill had ended."""

    transport: str
    way: str
    size_bytes: int
    seconds: float
    waited_s: float
    equal: bool

    @property
    def gb_per_s(self) -> float:
        return self.size_bytes / self.seconds / 1e9

    @property
    def hidden(self) -> float | None:
        """The share of the push that ran behind the prefill's computing; None where it began after it."""
        return 1 - self.waited_s / self.seconds if self.way == LAYERS else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the demo saw. ``refused`` says why a transport was not used."""

    handovers: tuple[Handover, ...]
    refused: dict[str, str]
    altered_differs: bool
    left_out_differs: bool
    reuse: Reuse

    @property
    def holds(self) -> bool:
        """Every handover gave the undivided run's tokens, both wrong ones did not, and the same holds for the pool."""
        good = bool(self.handovers) and all(handover.equal for handover in self.handovers)
        return good and self.altered_differs and self.left_out_differs and self.reuse.holds


def play(model: str, new_tokens: int, say: Say) -> Outcome:
    """Runs all of it with the model of that name.

    :raises WorkerFailedError: a process could not do its part. All of them are gone when this returns or raises.
    """
    with ExitStack() as stack:
        prefill = stack.enter_context(Worker("prefill"))
        decode = stack.enter_context(Worker("decode"))
        say(f"prefill is process {prefill.pid}, decode is process {decode.pid}; both load {Path(model).name}")
        prefill.ask("load", name=model, new_tokens=new_tokens)
        decode.ask("load", name=model)
        prompt = prefill.answer()
        decode.answer()
        say(
            f"the undivided run: a prompt of {prompt['length']:,} tokens, then {new_tokens} more, all in the prefill process"
        )
        undivided = prefill.call("undivided", new_tokens=new_tokens)
        say(f"{undivided['seconds']:.1f} s, and it goes on like this: {undivided['words'].strip()!r}")
        handing_over = _Play(prefill, decode, prompt["length"], prompt["last"], new_tokens, undivided["tokens"], say)
        handovers, refused, (altered, left_out) = handing_over.run()
        decode.close()
        reused = reuse(
            prefill,
            handing_over.there,
            prompt["longer"],
            model=model,
            new_tokens=new_tokens,
            block_tokens=BLOCK_TOKENS,
            prompt_bytes=prompt["length"] * prompt["token_bytes"],
            say=say,
        )
        return Outcome(tuple(handovers), refused, altered, left_out, reused)


class _Play:
    """One prompt, again and again, between two processes that have loaded the model."""

    def __init__(
        self, prefill: Worker, decode: Worker, length: int, last: int, new_tokens: int, expected: list[int], say: Say
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self.length, self.last, self.new_tokens = length, last, new_tokens
        self.expected = expected
        self.say = say
        filled = _blocks_for(length - 1)  # the last token's keys and values are the decode process's to compute
        self.there = list(range(PREFILL_FIRST_BLOCK, PREFILL_FIRST_BLOCK + filled))
        self.all_here = list(range(DECODE_FIRST_BLOCK, DECODE_FIRST_BLOCK + _blocks_for(length - 1 + new_tokens)))
        self.here = self.all_here[:filled]

    def run(self) -> tuple[list[Handover], dict[str, str], tuple[bool, bool]]:
        """Handovers, refusals, and what :meth:`wrong_handovers` says; the prompt's blocks stay as the last one left them."""
        handovers: list[Handover] = []
        refused: dict[str, str] = {}
        wrong: tuple[bool, bool] | None = None
        for transport in TRANSPORTS:
            reason = self.open(transport)
            if reason is None:
                handovers += self.handovers(transport)
                wrong = wrong or self.wrong_handovers()
            else:
                self.say(f"{transport}: not offered here: {reason}")
                refused[transport] = reason
        return handovers, refused, wrong or (False, False)

    def open(self, transport: str) -> str | None:
        """Nodes, caches and a link, in place of those before; why that transport is not to be had, or None."""
        self.decode.call("close")
        self.prefill.call("close")
        size = {"transport": transport, "block_tokens": BLOCK_TOKENS}
        address = self.prefill.call("open", blocks=self.there[-1] + 2, listen=True, **size)
        self.decode.call("open", blocks=self.all_here[-1] + 2, **size)
        reason = self.decode.call("link", address=address)[transport]
        return None if reason == "ok" else reason

    # --- the three ways ----------------------------------------------------------------------------------------------

    def handovers(self, transport: str) -> list[Handover]:
        """By layers first, because its prefill computes what the other two ways hand over."""
        push = {"mine": self.there, "theirs": self.here}
        pull = {"mine": self.here, "theirs": self.there}
        self.decode.call("pull", **pull)  # of nothing yet: memory is mapped on first use, and first uses are not timed

        self.say(f"{transport}: prefill, each layer pushed while the next ones are computed")
        self.forget()
        overlapped = self.prefill.call("prefill_and_push", **push)
        equal = self.decodes_the_same()
        alone = [self.timed(self.prefill, "push_ready_layers", push) for _ in range(ROUNDS)]
        by_layers = self.handover(transport, LAYERS, alone, equal, waited_s=overlapped["after_prefill_s"])

        self.say(f"{transport}: push, then pull")
        times = [self.timed(self.prefill, "push", push) for _ in range(ROUNDS)]
        pushed = self.handover(transport, PUSH, times, self.decodes_the_same())

        times = [self.timed(self.decode, "pull", pull) for _ in range(ROUNDS)]
        pulled = self.handover(transport, PULL, times, self.decodes_the_same())
        return [pulled, pushed, by_layers]

    def timed(self, worker: Worker, what: str, blocks: dict[str, list[int]]) -> dict[str, Any]:
        """One handover into memory that holds nothing of the one before."""
        self.forget()
        return worker.call(what, **blocks)

    def forget(self) -> None:
        """One value left of these, and every score would be no number."""
        self.decode.call("fill", value=float("nan"))

    def handover(
        self, transport: str, way: str, figures: list[dict[str, Any]], equal: bool, waited_s: float | None = None
    ) -> Handover:
        for other in {figure["transport"] for figure in figures} - {transport}:
            self.say(f"{transport}: {way} went by {other} instead")
        seconds = statistics.median(figure["seconds"] for figure in figures)
        waited_s = seconds if waited_s is None else waited_s
        return Handover(transport, way, figures[0]["size_bytes"], seconds, waited_s, equal)

    # --- what must not work ------------------------------------------------------------------------------------------

    def wrong_handovers(self) -> tuple[bool, bool]:
        """Whether the tokens differ with one block altered, and with the pull left out."""
        block = self.there[len(self.there) // 2]
        self.say(f"on purpose: block {block} of {len(self.there)} altered, then the pull left out")
        self.forget()
        self.prefill.call("scale_block", block=block, factor=ALTERED_BY)
        self.decode.call("pull", theirs=self.there, mine=self.here)
        self.prefill.call("scale_block", block=block, factor=1 / ALTERED_BY)
        altered = not self.decodes_the_same()
        self.decode.call("fill", value=0.0)
        return altered, not self.decodes_the_same()

    def decodes_the_same(self) -> bool:
        """Decodes from whatever lies in the blocks. No word of the prompt goes along."""
        tokens = self.decode.call(
            "decode", blocks=self.all_here, length=self.length, last=self.last, new_tokens=self.new_tokens
        )
        return tokens == self.expected


def _blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
