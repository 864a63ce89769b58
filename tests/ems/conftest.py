"""``fake``: a pool of this process, and ``open_cc``, context caching objects that share it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ems_support import open_caching
from fake_pool import Buffers, FakePool

import kvferry
from ems import _pool, facade


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePool]:
    """One pool for all that open one in this test; what is saved for one tenant is kept from others by keys alone."""
    pool = FakePool({})
    monkeypatch.setattr(kvferry, "Buffers", Buffers, raising=False)
    monkeypatch.setattr(_pool, "connect", lambda *credentials, **more: _pool.Pool(pool))
    monkeypatch.setattr(facade, "_processes", {})
    yield pool
    for future in pool.futures:
        future.held = False


@pytest.fixture
def open_cc(fake: FakePool) -> Callable[..., Any]:
    return open_caching
