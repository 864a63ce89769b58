"""Something that happens once and is waited for."""

import threading

__all__ = ["Latch"]


class Latch:
    """As a ``threading.Event`` that is never cleared, but whole whatever a signal handler raises amid a wait: an event's one lock
    may stay held then, and whoever comes next waits for ever. Here each wait has a lock of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: list[threading.Lock] = []
        self._happened = False

    def is_set(self) -> bool:
        return self._happened

    def set(self) -> None:
        with self._lock:
            self._happened = True
            waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it has happened, within ``timeout_s`` if that is given."""
        mine = threading.Lock()
        mine.acquire()
        with self._lock:
            if self._happened:
                return True
            self._waiting.append(mine)
        if mine.acquire(True, -1 if timeout_s is None else timeout_s):
            return True
        with self._lock:
            if not self._happened:
                self._waiting.remove(mine)
            return self._happened
