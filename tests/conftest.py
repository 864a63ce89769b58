"""What every test has: an end to hanging, and ``peers``."""

from collections.abc import Callable, Iterator

import pytest

from support import Peer
from support.watchdog import pytest_configure

__all__ = ["peers", "pytest_configure"]  # pytest calls the second: it installs the watchdog


@pytest.fixture
def peers() -> Iterator[Callable[..., Peer]]:
    """Starts peers (arguments as `Peer`) and closes them all, in reverse, when the test is over."""
    started: list[Peer] = []

    def start(*arguments: object, **keywords: object) -> Peer:
        started.append(Peer(*arguments, **keywords))  # type: ignore[arg-type]
        return started[-1]

    yield start
    problems = []
    for peer in reversed(started):
        try:
            peer.close()
        except Exception as problem:  # noqa: BLE001 - all of them are closed before the first is told
            problems.append(problem)
    if problems:
        raise problems[0]
