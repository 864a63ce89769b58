"""What became of a batch: one word for each key, and how far it went unbroken."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.pool.messages import WORDS, code_of

__all__ = ["SUCCESSES", "Codes", "Outcome"]

Codes = npt.NDArray[np.uint8]
SUCCESSES = np.zeros(256, np.bool_)
for _word in ("hit", "saved", "present"):
    SUCCESSES[code_of(_word)] = True


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a load, a save or an ``exists`` came to. A miss is no error: it has a word here.

    ================  ==============================================================================================
    ``prefix``        how many keys from the first on were hits (loads), or are in the pool now (saves)
    ``total``         how many keys there were
    ``ok``            a bool for each key
    ``outcomes``      a word for each key: ``hit``, ``saved``, ``present`` (a save found it there), or why not:
                      ``never_saved`` ``evicted`` ``expired`` ``removed`` ``pending`` (somebody is saving it) ``size_mismatch``
                      ``corrupted`` ``lease_lost`` ``full`` ``oversize`` ``timeout`` ``node_lost`` ``pool_off``
    ``reasons``       how often each word occurs
    ``size_bytes``    bytes moved; ``seconds`` from the call, or its submission, to its end
    ================  ==============================================================================================

    After a load the buffers of keys that are not ``ok`` hold unspecified bytes, and nothing beside them has changed.
    """

    # Nothing is kept: until Python 3.12 a cached_property has a lock, which may be held for ever in a forked child.

    codes: Codes
    size_bytes: int
    seconds: float

    @property
    def total(self) -> int:
        return len(self.codes)

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        return SUCCESSES[self.codes]

    @property
    def prefix(self) -> int:
        wrong = np.flatnonzero(~self.ok)
        return int(wrong[0]) if len(wrong) else len(self.codes)

    @property
    def outcomes(self) -> list[str]:
        return [WORDS[code] for code in self.codes.tolist()]

    @property
    def reasons(self) -> "Counter[str]":
        numbers, counts = np.unique(self.codes, return_counts=True)
        return Counter({WORDS[n]: c for n, c in zip(numbers.tolist(), counts.tolist(), strict=True)})

    @property
    def gb_per_s(self) -> float:
        """1e9 bytes."""
        return self.size_bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    def __repr__(self) -> str:
        return f"<Outcome: {self.prefix} of {self.total} unbroken, {dict(self.reasons)}>"
