"""What the scheduler's side and the workers tell each other, step by step: plain values that can be pickled.

The scheduler's side gives `Orders` with each step, the worker answers with a `Report`. A `Place` says, once, what a worker
has registered and where it can be reached.
"""

from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Load", "Orders", "Place", "Pull", "Receive", "Report", "Save", "Send"]


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks to be filled from the pool; block ``blocks[i]`` from ``keys[i]``."""

    request_id: str
    keys: list[bytes]
    blocks: list[int]
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Save:
    """Blocks that this step completes, to be saved after it."""

    number: int
    request_id: str
    keys: list[bytes]
    blocks: list[int]
    ttl_ms: int | None


@dataclass(frozen=True, slots=True)
class Pull:
    """Blocks to be filled from another instance: ``blocks[i]`` from ``theirs[i]`` of the window ``windows[rank]``.
    No blocks: nothing is wanted, and the other instance is told that it may reuse them."""

    request_id: str
    addresses: list[str]
    windows: list[bytes]
    theirs: list[int]
    blocks: list[int]
    geometry: str
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Blocks that another instance is to push into: its request ``id``, from its block ``first`` on."""

    id: str
    request_id: str
    addresses: list[str]
    first: int
    blocks: list[int]
    geometry: str
    model: str
    prompt: str
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Send:
    """A request that is pushed to who waits for it: all its blocks, of which the first ``whole`` have their last bytes when
    this step has ended. ``complete``: then all of its prompt is computed."""

    id: str
    request_id: str
    blocks: list[int]
    whole: int
    complete: bool
    model: str
    prompt: str


@dataclass(slots=True)
class Orders:
    """Of one step. ``ended``: requests whose blocks are no longer theirs after a preemption, so that no save of theirs may
    read on. ``awaited``: finished requests whose blocks are reused when the worker reports that nothing reads them. ``tokens``:
    how many the step computes. ``sent``: pushed requests that have ended, and whether all of their prompt was computed.
    ``idle``: the engine has nothing to do but to hear what ends in the workers, so that they may wait for it."""

    loads: list[Load] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    awaited: set[str] = field(default_factory=set)
    tokens: int = 0
    receives: list[Receive] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    sent: dict[str, bool] = field(default_factory=dict)
    idle: bool = False

    def __bool__(self) -> bool:
        return bool(
            self.receives
            or self.sends
            or self.sent
            or self.loads
            or self.pulls
            or self.saves
            or self.ended
            or self.awaited
        )


@dataclass(slots=True)
class Report:
    """What has ended in the workers since the last step. Of several workers: put together by :meth:`plus`.

    ``saves``: how many workers have ended each save. ``blocks_loaded``: per request, how many blocks are in place without a
    gap, of the worker that has least; ``why``: for those that lack some. ``pulled``: those of them that came from another
    instance. ``words``: what is counted, such as ``blocks_loaded corrupted``. ``pace``: tokens computed, and in what time.
    """

    saves: "Counter[int]" = field(default_factory=Counter)
    blocks_loaded: dict[str, int] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    pulled: set[str] = field(default_factory=set)
    words: "Counter[str]" = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    pace: tuple[int, float] = (0, 0.0)

    def __bool__(self) -> bool:
        return bool(self.saves or self.blocks_loaded or self.words or self.pace[0])

    def took(self, what: str, seconds: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0) + seconds

    def plus(self, other: "Report") -> "Report":
        loaded = dict(self.blocks_loaded)
        for request_id, blocks in other.blocks_loaded.items():
            loaded[request_id] = min(blocks, loaded.get(request_id, blocks))
        return Report(
            self.saves + other.saves,
            loaded,
            self.why | other.why,
            self.pulled | other.pulled,
            self.words + other.words,
            {
                name: max(self.seconds.get(name, 0), other.seconds.get(name, 0))
                for name in {**self.seconds, **other.seconds}
            },
            max(self.pace, other.pace),
        )


@dataclass(frozen=True, slots=True)
class Place:
    """What a worker has registered: bytes of a block and element type of each tensor, in order; and its node's address,
    ``""`` without handover. ``layout``: what else must be equal where blocks are exchanged. ``token``: what its own scheduler's
    side shows when it asks for a window."""

    units: tuple[int, ...]
    dtype: str
    itemsize: int
    layout: str
    address: str = ""
    token: bytes = b""

    @property
    def geometry(self) -> str:
        return f"{len(self.units)} x {self.units[0]} bytes of {self.dtype}, {self.layout}"
