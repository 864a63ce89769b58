"""A breaker: stops asking what does not answer, and finds out by itself when it answers again.

A state machine over events and ``now``; no clock and no thread. Closed: everything may ask. Open: nobody may, until a time.
Then one may try: if that goes well it is closed, else it is open for twice as long.
"""

__all__ = ["Breaker"]

FAILURES = 2  # in a row; one may be the accident of one connection
LONGEST_S = 30.0


class Breaker:
    def __init__(self, first_s: float, failures: int = FAILURES) -> None:
        self._first_s, self._allowed = first_s, failures
        self._failed = 0
        self._open_s = first_s
        self._until: float | None = None  # open, or half open, since it has a time
        self.opened = 0

    def may_ask(self, now: float) -> bool:
        """Whether to ask now. If it was open and its time has come, this asker is the one who tries: say how it went."""
        if self._until is None:
            return True
        if now < self._until:
            return False
        self._until = now + self._open_s  # nobody else, unless nothing is heard of this try
        return True

    @property
    def closed(self) -> bool:
        return self._until is None

    def went_well(self) -> None:
        self._failed, self._until, self._open_s = 0, None, self._first_s

    def failed(self, now: float) -> None:
        self._failed += 1
        if self._until is not None:
            self._open_s = min(2 * self._open_s, LONGEST_S)
        elif self._failed < self._allowed:
            return
        else:
            self.opened += 1
        self._until = now + self._open_s
