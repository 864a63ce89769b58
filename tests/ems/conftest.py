"""``open_cc``: context caching objects on one pool. ``fake`` is one in this process that answers what a test tells it to;
``node`` is a real one, with ``real_cc`` for objects on it."""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ems_support import open_caching
from fake_pool import FakePool

from ems import _pool, facade
from pool_support import NodeProcess


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePool]:
    """One pool for all that open one in this test; what is saved for one tenant is kept from others by keys alone."""
    pool = FakePool({})
    monkeypatch.setattr(_pool, "connect", lambda *credentials, **more: _pool.Pool(pool))
    monkeypatch.setattr(facade, "_processes", {})
    yield pool
    for future in pool.futures:
        future.held = False


@pytest.fixture
def open_cc(fake: FakePool) -> Callable[..., Any]:
    return open_caching


TENANTS = itertools.count()


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    """A pool node for the tests of one file; nobody there may see another test's values."""
    with tempfile.TemporaryDirectory(prefix="ems") as folder:
        process = NodeProcess(f"unix:{folder}/pool.sock", "256MiB")
        yield process
        process.stop()


@pytest.fixture
def in_the_pool(node: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever says nothing else finds ``node``."""
    monkeypatch.setenv("KVFERRY_POOL", node.address)


@pytest.fixture
def real_cc(in_the_pool: None) -> Iterator[Callable[..., Any]]:
    """`open_caching`, for tenants that no other test has."""
    opened = []
    test = next(TENANTS)

    def start(config: Any = None, access_id: "str | None" = None) -> Any:
        opened.append(open_caching(config, f"test-{test}-{access_id or ''}"))
        return opened[-1]

    yield start
    for cc in opened:
        cc._pool.close()
