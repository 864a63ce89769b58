"""What every test has: an end to hanging, and ``peers``; and which tests `make quick` leaves out."""

import os
from collections.abc import Callable, Iterator

import pytest

from namespace_support import Inside
from support import Peer
from support.watchdog import pytest_configure

__all__ = ["peers", "pytest_configure"]  # pytest calls the second: it installs the watchdog


@pytest.hookimpl(tryfirst=True)  # before pytest looks for marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``quick("that", "this[map]")`` makes every test slow whose name contains none of these parts."""
    unused: dict[str, set[str]] = {}
    for item in items:
        if chosen := item.get_closest_marker("quick"):
            parts = {part for part in chosen.args if part in item.name}
            unused.setdefault(item.path.name, set(chosen.args)).difference_update(parts)
            if not parts:
                item.add_marker(pytest.mark.slow)
    some_of_a_file = config.getoption("lf") or any("::" in argument for argument in config.args)
    for name, parts in unused.items():
        if parts and not some_of_a_file:
            raise pytest.UsageError(f"{name}: pytest.mark.quick names {sorted(parts)}, and no test there is called so")


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


@pytest.fixture
def insides() -> Iterator[Callable[..., Inside]]:
    """Starts processes in namespaces of their own (arguments as `Inside`) and ends them all when the test is over."""
    if os.geteuid() != 0:
        pytest.skip("namespaces of its own take root")
    started: list[Inside] = []

    def start(*arguments: object, **keywords: object) -> Inside:
        started.append(Inside(*arguments, **keywords))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for one in started:
        one.close()
