"""The vendor's samples for asynchronous load, over a real pool node: empty, filled by a process that has exited, and with one
key gone. Every step is a process of its own."""

from collections.abc import Callable
from typing import Any

import ems_samples
import pytest

import kvferry
from ems import CcConfig, CcConfig_v1, EmsConfig, keys
from ems.config import Settings
from ems.registration import KvCaches
from pool_support import NodeProcess
from support import Peer

pytestmark = [pytest.mark.usefixtures("empty_pool"), pytest.mark.quick("v0_on_a_filled_pool[numpy]", "six_slots")]
torch_too = pytest.mark.parametrize("start", ["numpy", pytest.param("torch", marks=pytest.mark.torch)], indirect=True)
FORMS = ["slots", "chunks"]


@pytest.fixture
def empty_pool(node: NodeProcess, in_the_pool: None) -> None:
    with kvferry.Pool.connect(node.address, namespace="ems") as pool:
        pool.clear()


@pytest.fixture
def start(request: pytest.FixtureRequest, peers: Callable[..., Peer]) -> Callable[[str], Peer]:
    return lambda sample: peers(f"ems_samples:{sample}", getattr(request, "param", "numpy"))


def fill(start: Callable[[str], Peer], sample: str, *form: str) -> None:
    saving = start(sample)
    saved = saving.call("save", *form)
    assert saved == ([(2, 2), (1, 1)] if sample == "V0" else (2, 2))
    saving.close()
    assert saving.wait() == 0


def remove(node: NodeProcess, key: bytes) -> None:
    with kvferry.Pool.connect(node.address, namespace="ems") as pool:
        assert pool.remove([key]) == 1


def v0_key(number: int) -> bytes:
    settings = Settings.checked(EmsConfig(cc_config=CcConfig(rank_id=8, device_id=0, model_id=ems_samples.MODEL)))
    return keys.v0_keys(settings, ems_samples.KEYS)[0][number]


def v1_key(number: int) -> bytes:
    settings = Settings.checked(EmsConfig(cc_config=CcConfig_v1(rank_id=8, device_id=0, model_id=ems_samples.MODEL)))
    geometry = KvCaches([[ems_samples.zeros("numpy", 4, 4, 2, 4) for _ in "kv"] for _ in range(2)]).geometry
    return keys.V1Keys(settings, geometry).of_hashes(ems_samples.HASHES)[number]


# -- V0


def test_v0_on_an_empty_pool(start: Callable[[str], Peer]) -> None:
    assert start("V0").call("load") == ([(0, 2), (0, 1)] * 2, [0.0] * 64)


@torch_too
def test_v0_on_a_filled_pool(start: Callable[[str], Peer]) -> None:
    fill(start, "V0")
    loading = start("V0")
    loading.call("register", "memory")
    results, memory = loading.call("load")
    assert results == [(2, 2), (1, 1)] * 2
    assert memory == [1.0] * 2 + [7.0] * 4 + [0.0] * 10 + [2.0] * 6 + [0.0] * 42


def test_v0_with_its_second_key_gone(start: Callable[[str], Peer], node: NodeProcess) -> None:
    fill(start, "V0")
    remove(node, v0_key(1))
    results, memory = start("V0").call("load")
    assert results == [(1, 2), (1, 1)] * 2
    assert memory[:16] == [1.0] * 2 + [7.0] * 4 + [0.0] * 10
    assert memory[22:] == [0.0] * 42


def test_v0_is_refused_where_the_tensors_own_bounds_are_registered(start: Callable[[str], Peer]) -> None:
    loading = start("V0")
    loading.call("register", "tensors")
    with pytest.raises(Exception, match=r"EMS_INVALID_ARGUMENT.*24 bytes.*ends 8 bytes on"):
        loading.call("load")


# -- V1


@pytest.mark.parametrize("form", FORMS)
def test_v1_on_an_empty_pool(start: Callable[[str], Peer], form: str) -> None:
    assert start("V1").call("load", form) == ((0, 2), [[0.0] * 4] * 4)


@torch_too
@pytest.mark.parametrize("form", FORMS)
def test_v1_on_a_filled_pool(start: Callable[[str], Peer], form: str) -> None:
    fill(start, "V1", "slots")
    result, blocks = start("V1").call("load", form)
    assert result == (2, 2)
    assert blocks == [[10.0 * tensor + 1, 10.0 * tensor + 2, 0.0, 0.0] for tensor in range(4)]


@pytest.mark.parametrize("form", FORMS)
def test_v1_with_its_second_key_gone(start: Callable[[str], Peer], node: NodeProcess, form: str) -> None:
    fill(start, "V1", form)
    remove(node, v1_key(1))
    result, blocks = start("V1").call("load", form)
    assert result == (1, 2)
    for tensor in range(4):
        assert blocks[tensor][0] == 10.0 * tensor + 1
        assert blocks[tensor][2:] == [0.0, 0.0]


def test_six_slots_against_eight_are_refused_at_once(start: Callable[[str], Peer]) -> None:
    sentence = start("V1").call("six_slots")
    assert sentence.startswith("EMS_INVALID_ARGUMENT: ")
    assert "6 slots" in sentence
    assert "8" in sentence


def test_the_samples_processes_end_well(start: Callable[[str], Peer], peers: Any) -> None:
    ending = start("V1")
    ending.call("load", "slots")
    ending.close()
    assert ending.wait() == 0
