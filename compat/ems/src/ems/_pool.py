"""The seam to kvferry's pool: the only module here that opens one, and what the others call of it.

``KVFERRY_POOL`` or kvferry's configuration file says where the pool is; with neither, it is a node of this user's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import kvferry as front_door
from ems.arguments import Addresses, Integers
from ems.common.exception import kvferry_errors
from ems.values import CcKvOption

kvferry: Any = front_door

HEALTH_TIMEOUT_MS = 1000
PROBES = [b"ems: is anybody there? %d" % number for number in range(8)]  # so many that they go to several nodes
NO_ANSWER = frozenset({"timeout", "node_lost"})


class Outcome(Protocol):
    """What became of each key of a request."""

    @property
    def outcomes(self) -> Sequence[str]: ...
    @property
    def ok(self) -> Sequence[bool]: ...


class Future(Protocol):
    def done(self) -> bool: ...
    def wait(self) -> Outcome: ...


@dataclass(frozen=True)
class Batch:
    """Keys with their memory: ``counts[i]`` of the segments belong to key i. ``routes``: what else a key is routed by."""

    keys: list[bytes]
    addresses: Addresses
    sizes: Addresses
    counts: Integers
    routes: list[bytes] | None = None

    def part(self, indexes: npt.NDArray[np.intp]) -> Batch:
        """Some of the keys, ascending."""
        if len(indexes) == len(self.keys):
            return self
        chosen = np.zeros(len(self.keys), np.bool_)
        chosen[indexes] = True
        segments = np.repeat(chosen, self.counts)
        return replace(
            self,
            keys=[self.keys[index] for index in indexes],
            addresses=self.addresses[segments],
            sizes=self.sizes[segments],
            counts=self.counts[indexes],
            routes=self.routes and [self.routes[index] for index in indexes],
        )


class Pool:
    """An open pool, in the words of this package. Errors are ``EmsException``."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def close(self) -> None:
        self._pool.close()

    def load(self, batch: Batch, option: CcKvOption, timeout_ms: int, *, wait: bool) -> Future:
        return self._start("load", batch, timeout_ms, wait, local_only=bool(option.read_local_only))

    def save(self, batch: Batch, option: CcKvOption, timeout_ms: int, *, wait: bool) -> Future:
        return self._start("save", batch, timeout_ms, wait, local_copy=bool(option.write_rcache))

    def _start(self, verb: str, batch: Batch, timeout_ms: int, wait: bool, **how: bool) -> Future:
        buffers = kvferry.Buffers(batch.addresses, batch.sizes, batch.counts)
        with kvferry_errors():
            if wait:  # on this thread: handing it to another costs more than a small copy
                call = getattr(self._pool, verb)
                return Ended(call(batch.keys, buffers=buffers, routes=batch.routes, timeout_ms=timeout_ms, **how))
            call = getattr(self._pool, f"{verb}_async")
            return Running(call(batch.keys, buffers=buffers, routes=batch.routes, timeout_ms=timeout_ms, **how))

    def exists(self, keys: list[bytes], option: CcKvOption, routes: list[bytes] | None = None) -> Outcome:
        with kvferry_errors():
            local = bool(option.read_local_only)
            found: Outcome = self._pool.exists(keys, routes=routes, timeout_ms=option.timeout, local_only=local)
            return found

    def is_reachable(self, timeout_ms: int = HEALTH_TIMEOUT_MS) -> bool:
        """Whether any node answers."""
        with kvferry_errors():
            answers = self._pool.exists(PROBES, timeout_ms=timeout_ms).outcomes
        return any(word not in NO_ANSWER for word in answers)


class Ended:
    """A request that is over."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def done(self) -> bool:
        return True

    def wait(self) -> Outcome:
        return self._outcome


class Running:
    """A request of kvferry's in flight."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def done(self) -> bool:
        return bool(self._future.done())

    def wait(self) -> Outcome:
        with kvferry_errors():
            outcome: Outcome = self._future.wait()  # has the request's own deadline
            return outcome


def connect(access_id: str, access_key: str | None, timeout_ms: int = 5000) -> Pool:
    """The values of one tenant. Unreachable nodes may or may not raise: ask :meth:`Pool.is_reachable`."""
    namespace = f"ems/{access_id}" if access_id else "ems"
    with kvferry_errors():
        return Pool(kvferry.Pool.connect(namespace=namespace, secret=access_key, timeout_ms=timeout_ms))


def prefix_keys(token_ids: Integers, block_tokens: int) -> list[bytes]:
    """Chained keys of the full blocks."""
    with kvferry_errors():
        return [key.tobytes() for key in kvferry.prefix_keys(token_ids, block_tokens)]
