"""What is counted: tokens that were used and tokens that were missed, with the reason, and how it came to that.

A name is ``what:label``. The façade hands them to vLLM's own metrics page.
"""

__all__ = ["COUNTED", "Counts"]

COUNTED = {
    "tokens_used": ("source", "Tokens that were taken from elsewhere and not computed here, by where they came from."),
    "tokens_missed": ("reason", "Tokens of full blocks that had to be computed here, by why they were not there."),
    "blocks_loaded": ("outcome", "Blocks asked of the pool, by outcome."),
    "blocks_saved": ("outcome", "Blocks given to the pool, by outcome."),
    "handovers": ("outcome", "Requests handed over: taken here, given to others, and what else became of them."),
    "seconds": (
        "of",
        "Seconds of looking, loading, saving, pulling and receiving, each beside the engine's steps; pushing: from the end of a "
        "prompt's last step until all of it had arrived.",
    ),
    "breaker": ("event", "How often the pool was left alone because it did not answer."),
}


class Counts:
    """Counters since they were last taken."""

    def __init__(self) -> None:
        self._counted: dict[str, float] = {}

    def add(self, what: str, label: str, number: float = 1) -> None:
        if number:
            name = f"{what}:{label}"
            self._counted[name] = self._counted.get(name, 0) + number

    def take(self) -> dict[str, float]:
        taken, self._counted = self._counted, {}
        return taken
