"""``here``: the side of the conversation in the test's own process; ``there``: the one in a process of its own."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cpp_side import Door
from datadist_side import Side

from llm_datadist import LLMDataDist, LLMStatusCode
from support import Peer

HERE, THERE = 1, 0  # cluster ids


@pytest.fixture
def start_here() -> Iterator[Callable[..., Side]]:
    """Starts this process's side: ``start_here(cluster_id=1, **settings of LLMConfig)``."""

    def start(cluster_id: int = HERE, **settings: Any) -> Side:
        return Side(cluster_id, **settings)

    yield start
    if LLMDataDist.llm_engine_instance is not None:
        LLMDataDist.llm_engine_instance.finalize()


@pytest.fixture
def start_there(peers: Callable[..., Peer]) -> Callable[..., Peer]:
    """Starts a process with a side: ``start_there(cluster_id=0, **settings of LLMConfig)``."""

    def start(cluster_id: int = THERE, **settings: Any) -> Peer:
        script = "from datadist_side import Side\nside = Side(*arguments[0], **arguments[1])\n"
        names = [name for name in vars(Side) if not name.startswith("_") and name != "manager"]
        script += "".join(f"{name} = side.{name}\n" for name in names)
        return peers(script, (cluster_id,), settings, name=f"cluster {cluster_id}")

    return start


@pytest.fixture
def doors() -> Iterator[Callable[..., Door]]:
    """Makes instances of the C++ API in this process (arguments as `Door`), and drops them."""
    made: list[Door] = []

    def make(*arguments: Any, **options: Any) -> Door:
        made.append(Door(*arguments, **options))
        return made[-1]

    yield make
    for door in made:
        door.drop()


@pytest.fixture
def here(start_here: Callable[..., Side]) -> Side:
    return start_here()


@pytest.fixture
def there(start_there: Callable[..., Peer]) -> Peer:
    return start_there()


@pytest.fixture(params=["map,cma,socket", "socket"])
def transports(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of a side: whatever is fastest on one host, and what there is between two."""
    return {"ge_options": {"kvferry.transports": request.param}}


@pytest.fixture
def linked(
    start_here: Callable[..., Side], start_there: Callable[..., Peer], transports: dict[str, Any]
) -> tuple[Side, Peer]:
    """Both sides, this one linked to the other."""
    here, there = start_here(**transports), start_there(**transports)
    assert here.link(THERE, there.call("where")) == (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS])
    return here, there
