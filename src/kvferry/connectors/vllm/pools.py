"""The connector's way to the pool: opening it as configured, and the stand-ins by which the scheduler's side names the shape
of blocks that lie in its workers' memory."""

from dataclasses import dataclass

from kvferry import Pool
from kvferry.connectors.vllm.orders import Place
from kvferry.connectors.vllm.settings import Settings

__all__ = ["SICK", "open_pool", "stand_ins"]

SICK = frozenset(("timeout", "node_lost"))
"""Words of an outcome that say that its node did not answer; all others are answers."""


def open_pool(settings: Settings) -> Pool:
    """Nothing that is missing there is an error; the pool is found when it comes up."""
    return Pool.connect(
        settings.members,
        namespace=settings.namespace,
        secret=settings.secret,
        node_secret=settings.node_secret,
        checksum=settings.checksum,
        timeout_ms=3000,
    )


@dataclass(frozen=True, slots=True)
class _StandIn:
    """An array of one block that is never moved: a pool that looks for keys wants to know what shape their values have."""

    unit_bytes: int
    dtype: str
    itemsize: int

    @property
    def shape(self) -> tuple[int, int]:
        return (1, self.unit_bytes // self.itemsize)

    def data_ptr(self) -> int:
        return 0

    def stride(self) -> tuple[int, int]:
        return (self.unit_bytes // self.itemsize, 1)

    def element_size(self) -> int:
        return self.itemsize


def stand_ins(place: Place) -> list[_StandIn]:
    return [_StandIn(unit, place.dtype, place.itemsize) for unit in place.units]
