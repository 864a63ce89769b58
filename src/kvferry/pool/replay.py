"""``kvferry replay TRACE``: a recorded trace of requests, through the store that a pool node runs; bytes are simulated.

A trace has one JSON object a line: ``input_length`` (tokens of the prompt) and ``hash_ids`` (one id per block of the
prompt, the last block may be partial; equal ids stand for equal prefixes). Each request loads the blocks of its prompt
and saves what it did not find, as an engine does. Requests come one after the other; their times do not matter.

What is counted: a *hit* is a token of a prompt in a block of the unbroken prefix that was found. The hit rate is hits
over all tokens of all prompts. Generated tokens are neither counted nor saved. A prefix that is shared up to the middle
of a block is a hit for the whole blocks only; `Result.token_hit_rate` estimates what smaller blocks would find there.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from typing import Any

from kvferry.options import whole, whole_numbers
from kvferry.pool.store import Store
from kvferry.pool.words import HIT, SAVED

__all__ = [
    "HEAD",
    "OPTIMUM",
    "Request",
    "Result",
    "capacity_tokens",
    "compare",
    "optimum",
    "plot",
    "read",
    "replay",
    "row",
]

OPTIMUM = "optimum"

SEGMENT_BYTES = 256 << 20
MOST_TOKENS = 10**15
SCALES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True, slots=True)
class Request:
    tokens: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class Result:
    policy: str
    capacity_tokens: int
    tokens: int
    hit_tokens: int
    cut_tokens: int
    """Half a block for each prompt that had a hit and went on with a block that nobody had before: as much of that block
    is shared with others, on average, and counts for nothing."""
    loaded_bytes: int
    saved_bytes: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    @property
    def token_hit_rate(self) -> float:
        """An estimate of what blocks of one token would hit."""
        return (self.hit_tokens + self.cut_tokens) / self.tokens if self.tokens else 0.0


def read(path: Path) -> list[Request]:
    """ValueError with file and line if it is not such a trace."""
    requests = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise TypeError("it is no JSON object")
                tokens = whole("input_length", record["input_length"])
                blocks = whole_numbers("hash_ids", record["hash_ids"])
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                why = f"there is no {error}" if isinstance(error, KeyError) else error
                raise ValueError(
                    f"{path}, line {number}: not a request with input_length and hash_ids: {why}"
                ) from error
            requests.append(Request(tokens, blocks))
    if not requests:
        raise ValueError(f"{path} holds no requests: one JSON object a line, with input_length and hash_ids")
    return requests


def capacity_tokens(words: str, token_bytes: int) -> int:
    """``3M`` (tokens; k, M, G) or ``64GiB`` (bytes; MiB, GiB, TiB) as tokens. ValueError for anything else."""
    digits = words.rstrip("kMGTiB")
    scale = SCALES.get(words[len(digits) :])
    try:
        amount = float(digits) * (scale or inf)
        tokens = int(amount / token_bytes if words.endswith("B") else amount)
    except (ValueError, OverflowError):
        tokens = 0
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{words!r} is no capacity: say tokens (500k, 3M, 1G) or bytes (512MiB, 64GiB, 2TiB)")
    return tokens


def compare(
    requests: Sequence[Request],
    capacities: Sequence[int],
    policies: Sequence[str],
    *,
    block_tokens: int,
    token_bytes: int,
) -> Iterator[tuple[Result, Result]]:
    """Each policy at each capacity (tokens), with the optimum there, as they are done."""
    for capacity in capacities:
        best = optimum(requests, capacity, block_tokens=block_tokens, token_bytes=token_bytes)
        for policy in policies:
            yield replay(requests, capacity, policy, block_tokens=block_tokens, token_bytes=token_bytes), best
        yield best, best


def replay(
    requests: Sequence[Request], capacity: int, policy: str, *, block_tokens: int = 512, token_bytes: int = 1 << 17
) -> Result:
    """``capacity`` in tokens; ``token_bytes`` is what the KV cache of one token takes: it changes the bytes that are told,
    and nothing else. Segments hold whole blocks."""
    block_bytes = block_tokens * token_bytes
    store = Store(
        capacity * token_bytes,
        segment_bytes=max(SEGMENT_BYTES // block_bytes, 1) * block_bytes,
        policy=policy,
        add_segment=lambda number, size: None,
        drop_segment=lambda number: None,
    )
    space = store.space("replay")
    tally = _Tally(requests, block_tokens)
    loaded = saved = 0
    for request in requests:
        keys = [block.to_bytes(8, "little") for block in request.blocks]
        lease = store.lookup(space, keys, owner=0, until=inf, now=0)
        prefix = next((at for at, outcome in enumerate(lease.outcomes) if outcome != HIT), len(keys))
        store.release(lease)
        loaded += prefix
        tally.hit(request, prefix)
        new = keys[prefix:]
        if new:
            parents = [keys[prefix - 1] if prefix else None, *new[:-1]]
            saving = store.reserve(space, new, [block_bytes] * len(new), parents=parents, owner=0, until=inf, now=0)
            saved += store.commit(saving, now=0).count(SAVED)
    return tally.result(policy, capacity, loaded * block_bytes, saved * block_bytes, store.statistics().evictions)


def optimum(
    requests: Sequence[Request], capacity: int, *, block_tokens: int = 512, token_bytes: int = 1 << 17
) -> Result:
    """The most blocks that any policy could hit with this capacity: Belady's MIN, which knows the future.

    Of all blocks at hand, those of the request included, it keeps the ones that are used again soonest, and saves no
    others. Whoever uses a block uses the blocks before it too, so they are used again no later; among equals the end of
    a chain goes first. So what it keeps are whole prefixes, each of its hits is a prefix hit, and no policy has more of
    either. This is the optimum in blocks; in tokens a partial last block makes a difference of less than a block a prompt.
    """
    room = capacity // block_tokens
    uses: dict[int, list[int]] = {}  # of each block, the last first
    for at in reversed(range(len(requests))):
        for block in requests[at].blocks:
            uses.setdefault(block, []).append(at)
    kept: dict[int, tuple[int, int, int]] = {}
    furthest: list[tuple[int, int, int]] = []  # (-next use, -depth, block); counts only if `kept` says the same
    tally = _Tally(requests, block_tokens)
    loaded = saved = evictions = 0
    for request in requests:
        prefix = next((at for at, block in enumerate(request.blocks) if block not in kept), len(request.blocks))
        loaded += prefix
        tally.hit(request, prefix)
        new = set(request.blocks[prefix:])
        saved += len(new)
        for depth, block in enumerate(request.blocks):
            later = uses[block]
            later.pop()
            if later:
                kept[block] = (-later[-1], -depth, block)
                heappush(furthest, kept[block])
            else:
                kept.pop(block, None)
                saved -= block in new
        while len(kept) > room:
            last = heappop(furthest)
            if kept.get(last[2]) == last:
                del kept[last[2]]
                saved -= last[2] in new
                evictions += last[2] not in new
    block_bytes = block_tokens * token_bytes
    return tally.result(OPTIMUM, capacity, loaded * block_bytes, saved * block_bytes, evictions)


class _Tally:
    """Counts tokens of hits, which is the same for everybody."""

    def __init__(self, requests: Sequence[Request], block_tokens: int) -> None:
        self.tokens = sum(request.tokens for request in requests)
        self.block_tokens = block_tokens
        self.hits = self.cuts = 0
        self.seen: set[int] = set()

    def hit(self, request: Request, prefix: int) -> None:
        blocks = request.blocks
        hits = min(prefix * self.block_tokens, request.tokens)
        self.hits += hits
        if 0 < prefix < len(blocks) and blocks[prefix] not in self.seen:
            self.cuts += min(self.block_tokens, request.tokens - hits) // 2
        self.seen.update(blocks)

    def result(self, policy: str, capacity: int, loaded_bytes: int, saved_bytes: int, evictions: int) -> Result:
        return Result(policy, capacity, self.tokens, self.hits, self.cuts, loaded_bytes, saved_bytes, evictions)


# --- for people ---------------------------------------------------------------------------------------------------

HEAD = """\
   capacity  policy    hit rate  to the    by token      loaded       saved   evictions
     tokens                       optimum  (estimate)       GiB         GiB"""


def row(result: Result, best: Result) -> str:
    distance = "" if result is best else f"{100 * (best.hit_rate - result.hit_rate):5.1f}"
    return (
        f"{result.capacity_tokens:>11,}  {result.policy:<8}  {100 * result.hit_rate:5.1f} %  {distance:>8}  "
        f"{100 * result.token_hit_rate:7.1f} %  {result.loaded_bytes / 2**30:>10,.0f}  {result.saved_bytes / 2**30:>10,.0f}"
        f"  {result.evictions:>10,}"
    )


def plot(results: Sequence[Result], path: Path) -> None:
    """Hit rate against capacity, a line per policy. ImportError without matplotlib."""
    figures: Any = __import__("matplotlib.figure", fromlist=["Figure"])
    figure = figures.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for policy in dict.fromkeys(result.policy for result in results):
        points = sorted(
            (result.capacity_tokens, 100 * result.hit_rate) for result in results if result.policy == policy
        )
        style = {"color": "0.4", "linestyle": "--"} if policy == OPTIMUM else {"marker": "o"}
        axes.plot(*zip(*points, strict=True), label=policy, **style)
    axes.set(xscale="log", xlabel="capacity (tokens)", ylabel="hit rate (% of prompt tokens)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
