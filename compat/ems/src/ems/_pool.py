"""The seam to kvferry's pool: the only module here that opens one, and what the others call of it.

``KVFERRY_POOL`` or kvferry's configuration file says where the pool is; with neither, it is a node of this user's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

import kvferry
from ems.arguments import Addresses, Integers
from ems.common.exception import kvferry_errors
from ems.values import CcKvOption

HEALTH_TIMEOUT_MS = 1000
PROBES = [b"ems: is anybody there? %d" % number for number in range(8)]  # so many that they go to several nodes
NO_ANSWER = frozenset({"timeout", "node_lost"})


@dataclass(frozen=True)
class Batch:
    """Keys with their memory: ``counts[i]`` of the segments belong to key i. ``routes``: what else a key is routed by."""

    keys: list[bytes]
    addresses: Addresses
    sizes: Addresses
    counts: Integers
    routes: list[bytes] | None = None

    def named(self) -> dict[str, Any]:
        """As arguments of kvferry's verbs."""
        return {
            "keys": self.keys,
            "buffers": kvferry.Buffers(self.addresses, self.sizes, self.counts),
            "routes": self.routes,
        }

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

    def __init__(self, pool: kvferry.Pool) -> None:
        self._pool = pool

    def close(self) -> None:
        self._pool.close()

    def load(self, batch: Batch, option: CcKvOption, timeout_ms: int, *, wait: bool) -> Ended | Running:
        with kvferry_errors():
            call = self._pool.load if wait else self._pool.load_async
            local = bool(option.read_local_only)
            return _request(call(**batch.named(), timeout_ms=timeout_ms, local_only=local))

    def save(self, batch: Batch, option: CcKvOption, timeout_ms: int, *, wait: bool) -> Ended | Running:
        with kvferry_errors():
            call = self._pool.save if wait else self._pool.save_async
            copied = bool(option.write_rcache)
            return _request(call(**batch.named(), timeout_ms=timeout_ms, local_copy=copied))

    def exists(self, keys: list[bytes], option: CcKvOption, routes: list[bytes] | None = None) -> kvferry.Outcome:
        with kvferry_errors():
            local = bool(option.read_local_only)
            return self._pool.exists(keys, routes=routes, timeout_ms=int(option.timeout), local_only=local)

    def is_reachable(self, timeout_ms: int = HEALTH_TIMEOUT_MS) -> bool:
        """Whether any node answers."""
        with kvferry_errors():
            answers = self._pool.exists(PROBES, timeout_ms=timeout_ms).outcomes
        return any(word not in NO_ANSWER for word in answers)


class Ended:
    """A request that was waited for: on the caller's thread, since handing it to another costs more than a small copy."""

    def __init__(self, outcome: kvferry.Outcome) -> None:
        self._outcome = outcome

    def done(self) -> bool:
        return True

    def wait(self) -> kvferry.Outcome:
        return self._outcome


class Running:
    """A request in flight."""

    def __init__(self, future: kvferry.Future[kvferry.Outcome]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> kvferry.Outcome:
        with kvferry_errors():
            return self._future.wait()  # has the request's own deadline


def _request(started: kvferry.Outcome | kvferry.Future[kvferry.Outcome]) -> Ended | Running:
    return Running(started) if isinstance(started, kvferry.Future) else Ended(started)


def connect(access_id: str, access_key: str | None, timeout_ms: int = 5000) -> Pool:
    """The values of one tenant. Unreachable nodes may or may not raise: ask :meth:`Pool.is_reachable`."""
    namespace = f"ems/{access_id}" if access_id else "ems"
    with kvferry_errors():
        return Pool(kvferry.Pool.connect(namespace=namespace, secret=access_key, timeout_ms=timeout_ms))


def prefix_keys(token_ids: Integers, block_tokens: int) -> list[bytes]:
    """Chained keys of the full blocks."""
    with kvferry_errors():
        return [key.tobytes() for key in kvferry.prefix_keys(token_ids, block_tokens)]
