"""A request as the scheduler's side knows it, from its arrival to its end. Data alone; `scheduler` moves it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry import Future, Outcome
from kvferry.connectors.vllm.settings import Wishes

__all__ = ["Asked", "Handed", "Offer", "Request", "Scheduled", "Step"]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the engine has it. ``tokens`` grows with its output. ``unkeyed``: why its blocks cannot be told by their
    tokens alone, ``""`` if they can. ``salt`` and ``adapter`` become part of its keys. ``whole``: all of its prompt is to be
    computed here, for what is asked of it is more than its blocks, such as its tokens' probabilities."""

    id: str
    tokens: Sequence[int]
    prompt_tokens: int
    params: Mapping[str, Any] | None = None
    salt: str = ""
    adapter: str = ""
    unkeyed: str = ""
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request in a step: the blocks it got (``all_blocks``: these are all it has), and how many of its tokens are computed
    when the step has ended."""

    id: str
    blocks: list[int]
    all_blocks: bool
    computed_after: int


@dataclass(frozen=True, slots=True)
class Step:
    scheduled: list[Scheduled]
    preempted: frozenset[str] = frozenset()
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Handed:
    """What another instance said of a request that it has prefilled: ``kv_transfer_params``, understood. ``pushed_as``: it
    prefills it now, and pushes it under this name; then there are no windows and no blocks."""

    addresses: list[str]
    windows: list[bytes]
    blocks: list[int]
    tokens: int
    geometry: str
    model: str
    prompt: str
    pushed_as: str = ""


@dataclass(slots=True)
class Offer:
    """What the engine was last told that it can have: ``tokens`` beyond ``computed``; then ``why`` there are no more."""

    computed: int
    tokens: int
    handed: Handed | None
    why: str


@dataclass(slots=True)
class Request:
    """``present[i]``: block i is in the pool, as far as is known; blocks before ``saved`` have been given to it or need not be.
    ``loading``: the first block and their number, while blocks are filled. ``digest``: of its prompt, if it is pushed."""

    asked: Asked
    wishes: Wishes
    salt: bytes
    model: str
    handed: Handed | None = None
    hands_over: bool = False
    pushed_as: str = ""
    digest: str = ""
    keys: list[bytes] = field(default_factory=list)
    present: list[bool] = field(default_factory=list)
    why_absent: str = ""
    looking: "Future[Outcome] | None" = None
    look_until: float = 0.0
    looked: bool = False
    counted: bool = False
    offer: Offer | None = None
    blocks: list[int] = field(default_factory=list)
    saved: int = 0
    loading: tuple[int, int] | None = None
    saves: set[int] = field(default_factory=set)
