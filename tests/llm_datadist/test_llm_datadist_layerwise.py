"""``transfer_cache_async``: no byte early, addresses are names, and what each kind of ending leaves in the task."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from datadist_side import Side

from llm_datadist import LLMException, LLMStatusCode
from support import Peer

pytestmark = pytest.mark.quick(
    "layers_are_asked_for_once[map",
    "is_a_failure[socket-error]",
)

HERE, THERE = 1, 0
SHAPE = [4, 4, 8]
SUCCESS, INVALID = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_PARAM_INVALID
SETTLE_S = 0.15  # how long a byte that leaves early is given to arrive


def arrived(arrays: Sequence[Any]) -> list[bool]:
    return [bool(array.any()) for array in arrays]


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def remote(
    start_here: Callable[..., Side], start_there: Callable[..., Peer], transports: dict[str, Any]
) -> tuple[Side, Peer]:
    """Both sides in the mode that names remote caches by id; this side pushes."""
    here = start_here(enable_remote_cache_accessible=True, **transports)
    there = start_there(enable_remote_cache_accessible=True, **transports)
    assert here.link(THERE, there.call("where"))[0] == SUCCESS
    return here, there


def test_no_byte_leaves_before_its_layer_is_ready(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    layers = 4
    far = there.call("register", SHAPE, 2 * layers)
    mine = here.register(SHAPE, 2 * layers)
    task = here.start(mine, [("addresses", THERE, there.call("addresses", far), None, 0)])

    def model() -> None:
        for layer in range(layers):
            here.fill_tensor(mine, 2 * layer, -1)  # half computed: must never be seen
            here.fill_tensor(mine, 2 * layer + 1, -1)
            time.sleep(SETTLE_S)
            seen.append(arrived(there.call("tensors", far)))
            here.compute(task, mine, layer, 1)
            wait_until(lambda done=2 * layer + 2: sum(arrived(there.call("tensors", far))) == done)

    seen: list[list[bool]] = []
    thread = threading.Thread(target=model)
    thread.start()
    thread.join()
    assert here.results(task) == [SUCCESS]
    assert seen == [[tensor < 2 * layer for tensor in range(2 * layers)] for layer in range(layers)]
    for tensor, array in enumerate(there.call("tensors", far)):
        assert (array[0] == 1 + tensor).all()
        assert not array[1:].any()


def test_a_list_of_all_k_then_all_v_is_right_as_a_whole_and_wrong_by_layers(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    k_then_v = [0, 2, 1, 3]  # memory is K0 V0 K1 V1; this is K0 K1 V0 V1
    far = there.call("register", SHAPE, 4, order=k_then_v, req_ids=[1])
    mine = here.register(SHAPE, 4, order=k_then_v)
    there.call("fill", far)
    here.pull_cache(("request", THERE, 1, 0), mine)
    assert all(
        np.array_equal(got[0], sent[0])
        for got, sent in zip(here.tensors(mine), there.call("tensors", far), strict=True)
    )

    fresh = there.call("register", SHAPE, 4, order=k_then_v)
    task = here.start(mine, [("addresses", THERE, there.call("addresses", fresh), None, 0)])
    here.ready(task, 0)  # K0 and V0 are computed
    wait_until(lambda: sum(arrived(there.call("tensors", fresh))) == 2)
    time.sleep(SETTLE_S)
    assert arrived(there.call("tensors", fresh)) == [True, False, True, False]  # K0 and K1 have left: K1 too early
    here.ready(task, 1)
    assert here.results(task) == [SUCCESS]


def test_addresses_are_names_that_must_lie_inside_one_tensor(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    far = there.call("register", SHAPE)
    mine = here.register(SHAPE)
    here.fill(mine)
    good = there.call("addresses", far)
    row, tensor = 128, 512
    for outside in (tensor, tensor - row + 1, -1):
        task = here.start(mine, [("addresses", THERE, [good[0], good[1] + outside, *good[2:]], None, 0)])
        here.all_ready(task)
        assert here.results(task) == [INVALID], outside
        assert not any(arrived(there.call("tensors", far))), "known before the first byte"
    for nowhere in (1, 2**64 - 8):
        task = here.start(mine, [("addresses", THERE, [nowhere, *good[1:]], None, 0)])
        here.all_ready(task)
        assert here.results(task) == [INVALID]
        assert not any(arrived(there.call("tensors", far))), "known before the first byte"
    last_row = [address + tensor - row for address in good]
    task = here.start(mine, [("addresses", THERE, last_row, None, 2)])
    here.all_ready(task)
    assert here.results(task) == [SUCCESS]
    for got, sent in zip(there.call("tensors", far), here.tensors(mine), strict=True):
        assert np.array_equal(got[3], sent[2])
        assert not got[:3].any()


def test_an_address_outside_in_a_late_layer_writes_nothing_of_that_layer(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    far = there.call("register", SHAPE)
    mine = here.register(SHAPE)
    here.fill(mine)
    good = there.call("addresses", far)
    task = here.start(mine, [("addresses", THERE, [*good[:3], good[3] + 512], None, 0)])
    here.all_ready(task)
    assert here.results(task) == [INVALID]
    assert arrived(there.call("tensors", far))[2:] == [False, False]


def test_an_address_of_an_ended_cache_names_nothing(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    far = there.call("register", SHAPE)
    mine = here.register(SHAPE)
    here.fill(mine)
    addresses = there.call("addresses", far)
    there.call("unregister", far)
    task = here.start(mine, [("addresses", THERE, addresses, None, 0)])
    here.all_ready(task)
    assert here.results(task) == [INVALID]
    assert not any(arrived(there.call("tensors", far)))


def test_source_layers_that_start_late_go_to_the_layers_named(remote: tuple[Side, Peer]) -> None:
    here, there = remote
    far = there.call("register", SHAPE, 8)
    mine = here.register(SHAPE, 8)
    here.fill(mine)
    task = here.start(mine, [("key", ("id", THERE, far, 2), (1, 3), (0, 2), 1)])
    here.all_ready(task)
    assert here.results(task) == [SUCCESS]
    assert here.asked(task) == [1, 2]
    got, sent = there.call("tensors", far), here.tensors(mine)
    for tensor in range(4):
        assert np.array_equal(got[tensor][2], sent[tensor + 2][1])
    assert arrived(got) == [True] * 4 + [False] * 4


def test_blocks_by_key(remote: tuple[Side, Peer]) -> None:
    here, there = remote
    far = there.call("register", [10, 128], 4, blocks=True, model=7)
    mine = here.register([10, 128], 4, blocks=True)
    here.fill(mine)
    task = here.start(mine, [("key", ("blocks", THERE, 7), (0, 2), (0, 2), 0)], [0, 1], [2, 3])
    here.all_ready(task)
    assert here.results(task) == [SUCCESS]
    for got, sent in zip(there.call("tensors", far), here.tensors(mine), strict=True):
        assert np.array_equal(got[[2, 3]], sent[[0, 1]])
        assert not got[[0, 1, *range(4, 10)]].any()


def test_blocks_without_lists_are_the_first_block_alone(remote: tuple[Side, Peer]) -> None:
    here, there = remote
    far = there.call("register", [10, 128], 2, blocks=True, model=7)
    mine = here.register([10, 128], 2, blocks=True)
    here.fill(mine)
    task = here.start(mine, [("key", ("blocks", THERE, 7), (0, 1), (0, 1), 0)])
    here.all_ready(task)
    assert here.results(task) == [SUCCESS]
    for got, sent in zip(there.call("tensors", far), here.tensors(mine), strict=True):
        assert np.array_equal(got[0], sent[0])
        assert not got[1:].any()


def test_rows_fill_blocks_and_the_last_listed_one_gets_the_rest(remote: tuple[Side, Peer]) -> None:
    here, there = remote
    far = there.call("register", [6, 8], 2, blocks=True, model=7)
    mine = here.register([1, 20], 2)
    here.fill(mine)
    config = ("key", ("blocks", THERE, 7), (0, 1), (0, 1), 0)
    for wrong_size in (16, 64):
        task = here.start(mine, [config], None, [5, 0], block_bytes=wrong_size)
        here.all_ready(task)
        assert here.results(task) == [INVALID]
    assert not any(arrived(there.call("tensors", far)))
    task = here.start(mine, [config], None, [5, 0, 3], block_bytes=32)
    here.all_ready(task)
    assert here.results(task) == [SUCCESS]
    for got, sent in zip(there.call("tensors", far), here.tensors(mine), strict=True):
        assert np.array_equal(got[5], sent[0][:8])
        assert np.array_equal(got[0], sent[0][8:16])
        assert np.array_equal(got[3], [*sent[0][16:], 0, 0, 0, 0])
        assert not got[[1, 2, 4]].any()


@pytest.mark.slow
def test_rows_fill_blocks_that_addresses_name(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    far = there.call("register", [6, 8], 4, blocks=True)
    mine = here.register([2, 20], 4)
    here.fill(mine)
    addresses = there.call("addresses", far)
    config = ("addresses", THERE, addresses, None, 1)
    for listed, size in (([5, 0, 6], 32), ([5, 0, 3], 0), ([5, 0, 3], 160)):  # outside, no size, too large a size
        task = here.start(mine, [config], None, listed, block_bytes=size)
        here.all_ready(task)
        assert here.results(task) == [INVALID]
    assert not any(arrived(there.call("tensors", far)))
    task = here.start(mine, [config], None, [5, 0, 3], block_bytes=32)
    here.all_ready(task)
    assert here.results(task) == [SUCCESS]
    for got, sent in zip(there.call("tensors", far), here.tensors(mine), strict=True):
        assert np.array_equal(got[5], sent[1][:8])
        assert np.array_equal(got[0], sent[1][8:16])
        assert np.array_equal(got[3], [*sent[1][16:], 0, 0, 0, 0])
        assert not got[[1, 2, 4]].any()


@pytest.mark.slow
def test_what_the_engine_refuses_is_the_tasks_to_tell(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    far = there.call("register", SHAPE)
    mine = here.register(SHAPE)
    here.unregister(mine)
    config = ("addresses", THERE, there.call("addresses", far), None, 0)
    task = here.start(mine, [config, config])
    assert here.results(task) == [LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, None]
    assert here.synchronize(task) == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert here.asked(task) == []


def test_each_configuration_has_its_own_result_and_layers_are_asked_for_once(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    one, two = there.call("register", SHAPE, 8), there.call("register", SHAPE, 8)
    mine = here.register(SHAPE, 8)
    here.fill(mine)
    first, second = there.call("addresses", one), there.call("addresses", two)
    configs = [("addresses", THERE, first[:4], (0, 2), 0), ("addresses", THERE, second[2:6], (1, 3), 3)]
    task = here.start(mine, configs)
    here.all_ready(task)
    assert here.results(task) == [SUCCESS, SUCCESS]
    assert here.asked(task) == [0, 1, 2]
    sent = here.tensors(mine)
    for tensor, got in enumerate(there.call("tensors", one)):
        assert np.array_equal(got[0], sent[tensor][0]) if tensor < 4 else not got.any()
    for tensor, got in enumerate(there.call("tensors", two)):
        assert np.array_equal(got[0], sent[tensor][3]) if 2 <= tensor < 6 else not got.any()


def test_one_configuration_that_fails_stops_the_job(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    far = there.call("register", SHAPE)
    mine = here.register(SHAPE)
    here.fill(mine)
    good = there.call("addresses", far)
    task = here.start(mine, [("addresses", THERE, good, None, 0), ("addresses", 55, good, None, 0)])
    assert here.results(task) == [None, LLMStatusCode.LLM_NOT_YET_LINK]
    assert here.synchronize(task) == LLMStatusCode.LLM_NOT_YET_LINK
    assert not any(arrived(there.call("tensors", far)))


def test_a_synchronizer_that_says_no_stops_the_job(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    far = there.call("register", SHAPE, 6)
    mine = here.register(SHAPE, 6)
    here.fill(mine)
    addresses = there.call("addresses", far)
    configs = [
        ("addresses", THERE, addresses[:2], (0, 1), 0),
        ("addresses", THERE, addresses[2:4], (1, 2), 0),
        ("addresses", THERE, addresses[4:6], (2, 3), 0),
    ]
    task = here.start(mine, configs, answers={1: False})
    here.all_ready(task)
    assert here.results(task) == [SUCCESS, INVALID, None]
    assert here.synchronize(task) == INVALID
    assert here.asked(task) == [0, 1]
    assert arrived(there.call("tensors", far)) == [True, True, False, False, False, False]


@pytest.mark.parametrize(
    "raised", [KeyError("lost"), SystemExit("lost"), KeyboardInterrupt("lost")], ids=["error", "exit", "interrupt"]
)
def test_a_synchronizer_that_raises_is_a_failure(
    linked: tuple[Side, Peer], capsys: pytest.CaptureFixture[str], raised: BaseException
) -> None:
    here, there = linked
    far = there.call("register", SHAPE)
    mine = here.register(SHAPE)
    task = here.start(mine, [("addresses", THERE, there.call("addresses", far), None, 0)], answers={0: raised})
    here.all_ready(task)
    assert here.results(task) == [LLMStatusCode.LLM_FAILED]
    assert here.synchronize(task) == LLMStatusCode.LLM_FAILED
    assert "lost" in capsys.readouterr().out
    assert not any(arrived(there.call("tensors", far)))


def test_waiting_for_a_task_can_be_cut_short(linked: tuple[Side, Peer]) -> None:
    here, there = linked
    far = there.call("register", SHAPE)
    mine = here.register(SHAPE)
    task = here.start(mine, [("addresses", THERE, there.call("addresses", far), None, 0)])
    assert here.synchronize(task, 20) == LLMStatusCode.LLM_TIMEOUT
    assert here.results(task, 0) == [LLMStatusCode.LLM_TIMEOUT]
    here.all_ready(task)
    assert here.synchronize(task) == SUCCESS


def test_a_push_of_fewer_tensors_than_one_layer_succeeds_and_sends_nothing(remote: tuple[Side, Peer]) -> None:
    here, there = remote
    far = there.call("register", SHAPE, 1)
    mine = here.register(SHAPE, 1)
    here.fill(mine)
    here.push_cache(("id", THERE, far), mine)
    assert not any(arrived(there.call("tensors", far)))


def test_pushed_rows_and_layers_out_of_range(remote: tuple[Side, Peer]) -> None:
    here, there = remote
    far = there.call("register", SHAPE, 4)
    mine = here.register(SHAPE, 8)
    here.fill(mine)
    from llm_datadist import LLMException

    wrong: list[dict[str, Any]] = [
        {"key": ("id", THERE, far, 4), "src_layer_range": (0, 2), "dst_layer_range": (0, 2)},
        {"key": ("id", THERE, far), "src_layer_range": (0, 1), "dst_layer_range": (2, 3)},
        {"key": ("id", THERE, far)},  # four layers into two
    ]
    for arguments in wrong:
        with pytest.raises(LLMException) as caught:
            here.push_cache(cache_id=mine, **arguments)
        assert caught.value.status_code == INVALID
        assert not any(arrived(there.call("tensors", far)))
    with pytest.raises(LLMException) as caught:
        here.push_cache(("id", THERE, 99), mine)
    assert caught.value.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_a_push_to_the_id_of_no_cache_is_one_to_request_0_of_model_0(remote: tuple[Side, Peer]) -> None:
    here, there = remote
    mine = here.register(SHAPE)
    here.fill(mine)
    with pytest.raises(LLMException) as caught:
        here.push_cache(("id", THERE, 0), mine)
    assert caught.value.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    far = there.call("register", SHAPE, req_ids=[0])
    sent = here.tensors(mine)
    for row, cache_id in ((0, 0), (2, -1)):  # batch_index says which row, as with any other id
        here.push_cache(("id", THERE, cache_id, row), mine, 1)
    task = here.start(mine, [("key", ("id", THERE, 0, 3), (0, 2), (0, 2), 1)])
    here.all_ready(task)
    assert here.results(task) == [SUCCESS]
    for got, tensor in zip(there.call("tensors", far), sent, strict=True):
        assert all(np.array_equal(got[row], tensor[1]) for row in (0, 2, 3))
        assert not got[1].any()
