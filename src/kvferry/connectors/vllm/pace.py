"""How fast the engine computes tokens, as its steps show it: what waiting for a token is worth at most. No clock."""

__all__ = ["Pace"]

LEAST_TOKENS = 64  # steps of fewer say what a step costs, not what a token costs
WEIGHT = 0.3
UNKNOWN_MS = 1 << 30


class Pace:
    def __init__(self) -> None:
        self._per_token: float | None = None

    def took(self, tokens: int, seconds: float) -> None:
        if tokens < LEAST_TOKENS:
            return
        now = seconds / tokens
        self._per_token = now if self._per_token is None else (1 - WEIGHT) * self._per_token + WEIGHT * now

    def ms(self, tokens: int) -> int:
        """What computing so many tokens would take, in whole milliseconds; without end where nothing is known yet."""
        return UNKNOWN_MS if self._per_token is None else int(1000 * self._per_token * tokens)
