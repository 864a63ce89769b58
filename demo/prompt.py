"""The prompt: a ferry's log book, written from a few lists and the same on every run.

Long enough that its KV cache is worth handing over (about 1,180 tokens for the demo's own model), and any model goes on
in the same manner, so that no two tokens are nearly equally likely. Knows nothing of tokens or models.
"""

BOATS = ("Alma", "Heron", "Old Tilda", "Saint Bride", "Marten", "Juniper")
CARGO = (
    "forty crates of apples",
    "a piano for the school",
    "two goats and their shed",
    "the mail and the morning papers",
    "barrels of lamp oil",
    "a wedding party of thirty",
    "slates for the chapel roof",
    "nine bicycles and a tandem",
    "seed potatoes",
    "a bronze bell wrapped in straw",
    "bales of wool",
)
WATER = ("calm water", "a short steep sea", "fog until noon", "a fair wind from the west", "rain on the beam")
REMARKS = (
    "Nobody was late.",
    "The rope at the north landing is worn and was turned end for end.",
    "The pump was run for ten minutes, then the bilge was dry.",
    "One passenger stayed aboard for the way back because of the view.",
    "The bell at the point was heard but not seen.",
)


def text(days: int = 32) -> str:
    """The log book of ``days`` days, and the beginning of the next entry, which the model is to write."""
    entries = [entry(day) for day in range(1, days + 1)]
    return "\n".join(["The log book of a small ferry company.\n", *entries, f"Day {days + 1}."])


def continuation(days: int = 32, more: int = 3) -> str:
    """What follows ``text(days)`` in the log book of ``more`` days more."""
    return text(days + more).removeprefix(text(days))


def entry(day: int) -> str:
    boat = BOATS[day * 5 % len(BOATS)]
    cargo = CARGO[(day - 1) % len(CARGO)]
    landing = ("north", "south", "mill")[day % 3]
    water = WATER[day * 3 % len(WATER)]
    remark = REMARKS[day * 2 % len(REMARKS)]
    return f"Day {day}. The {boat} took {cargo} to the {landing} landing in {water}. {remark}"
