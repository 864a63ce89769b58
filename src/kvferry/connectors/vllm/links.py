"""Links to the workers of other instances: one to each, made when it is needed and again when it is lost.

One caller at a time makes an attempt; what it comes to is the answer of all who have waited for it, so that an instance that
does not answer costs a crowd of requests one attempt and not one each. Used by many threads.
"""

import time
from dataclasses import dataclass, field
from threading import Lock

from kvferry import DeadlineExceeded, KvferryError, Link, LinkFailed, Node

__all__ = ["Links"]


@dataclass(slots=True)
class _Way:
    linking: Lock = field(default_factory=Lock)
    link: Link | None = None
    failed: int = 0
    why: str = ""


class Links:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = Lock()
        self._ways: dict[str, _Way] = {}

    def to(self, address: str, timeout_ms: int) -> Link:
        """:raises KvferryError: there is none, and no time left to make one."""
        until = time.monotonic() + timeout_ms / 1000
        with self._lock:
            way = self._ways.setdefault(address, _Way())
        failed = way.failed
        if not way.linking.acquire(timeout=max(0, timeout_ms) / 1000):
            raise DeadlineExceeded(f"{address} is still being linked to")
        try:
            if way.link is not None and way.link.alive:
                return way.link
            if way.failed > failed:
                raise LinkFailed(way.why)
            left_ms = int(1000 * (until - time.monotonic()))
            if left_ms < 1:
                raise DeadlineExceeded(f"no time is left to link to {address}")
            try:
                way.link = self._node.link(address, timeout_ms=left_ms)
            except KvferryError as error:
                way.failed, way.why = way.failed + 1, str(error)
                raise
            return way.link
        finally:
            way.linking.release()
