"""torch's CPU tensors: registered, as buffers, and as lists of integers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ems_support import refused, v1_config

from ems import CcKvOption, CcResult, KvBufferWrapper

pytestmark = pytest.mark.torch
OPTION = CcKvOption(timeout=1000)


@pytest.fixture
def torch() -> Any:
    import torch

    return torch


def test_bfloat16_blocks_come_back(open_cc: Callable[..., Any], torch: Any) -> None:
    cc = open_cc(v1_config())
    source = [[torch.randn(8, 4, 2, 3).to(torch.bfloat16) for _ in "kv"] for _ in range(2)]
    target = [[torch.zeros(8, 4, 2, 3, dtype=torch.bfloat16) for _ in "kv"] for _ in range(2)]
    cc.register_kvcache(source)
    assert cc.save(slot_mapping=list(range(8)), hashes=[1, 2], offsets=[4, 4]) == CcResult(2, 2)
    cc.register_kvcache(target)
    assert cc.load(slot_mapping=list(range(8, 16)), hashes=[1, 2], offsets=[4, 4]) == CcResult(2, 2)
    for layer in range(2):
        for tensor in range(2):
            assert torch.equal(target[layer][tensor][2:4], source[layer][tensor][:2])


def test_types_of_equal_size_are_different_geometries(open_cc: Callable[..., Any], torch: Any) -> None:
    cc = open_cc(v1_config())
    cc.register_kvcache([[torch.zeros(8, 4, 2, 3, dtype=torch.bfloat16)]])
    cc.save(slot_mapping=[0, 1, 2, 3], hashes=[1], offsets=[4])
    cc.register_kvcache([[torch.zeros(8, 4, 2, 3, dtype=torch.float16)]])
    assert cc.exists([1]) == CcResult(0, 1)


def test_torch_and_numpy_share_blocks(open_cc: Callable[..., Any], torch: Any) -> None:
    cc = open_cc(v1_config())
    cc.register_kvcache([[torch.ones(8, 4, 2, 3)]])
    cc.save(slot_mapping=[0, 1, 2, 3], hashes=[1], offsets=[4])
    target = np.zeros((8, 4, 2, 3), np.float32)
    cc.register_kvcache([[target]])
    assert cc.load(slot_mapping=[0, 1, 2, 3], hashes=[1], offsets=[4]) == CcResult(1, 1)
    assert (target[0] == 1).all()


def test_k_and_v_cut_out_of_one_tensor(open_cc: Callable[..., Any], torch: Any) -> None:
    cc = open_cc(v1_config())
    both = torch.randn(8, 2, 4, 2, 3)
    cc.register_kvcache([[both[:, 0], both[:, 1]]])
    cc.save(slot_mapping=[0, 1, 2, 3], hashes=[1], offsets=[4])
    cc.load(slot_mapping=[28, 29, 30, 31], hashes=[1], offsets=[4])
    assert torch.equal(both[7], both[0])


def test_integer_tensors_serve_as_lists(open_cc: Callable[..., Any], torch: Any) -> None:
    cc = open_cc(v1_config())
    cc.register_kvcache([[torch.zeros(8, 4, 2, 3)]])
    for kind in (torch.int64, torch.int32):
        form = {"hashes": torch.tensor([1, 2], dtype=kind), "offsets": torch.tensor([4, 4], dtype=kind)}
        assert cc.save(slot_mapping=torch.arange(8, dtype=kind), **form) == CcResult(2, 2)
    assert cc.load(hashes=[1, 2], chunk_descs=[torch.tensor([[0, 4], [4, 4]])]) == CcResult(2, 2)
    for wrong in (torch.zeros(8), torch.zeros(8, dtype=torch.bool), torch.zeros(2, 4, dtype=torch.int64)):
        with refused():
            cc.save(slot_mapping=wrong, hashes=[1, 2], offsets=[4, 4])


def test_the_samples_uncalled_data_ptr(open_cc: Callable[..., Any], torch: Any) -> None:
    cc, saved, loaded = open_cc(), torch.randn(6), torch.zeros(6)
    size = saved.numel() * saved.element_size()
    cc.save(OPTION, ["a"], [[KvBufferWrapper(saved.data_ptr, size)]])
    assert cc.load(OPTION, ["a"], [[KvBufferWrapper(loaded.data_ptr, size)]]) == CcResult(1, 1)
    assert torch.equal(saved, loaded)


def test_a_buffer_longer_than_its_tensor_is_refused_where_the_tensor_is_registered(
    open_cc: Callable[..., Any], torch: Any
) -> None:
    cc, tensor = open_cc(), torch.ones(2)
    cc.register_memory(tensor)
    with refused("registered memory"):
        cc.load(OPTION, ["a"], [[KvBufferWrapper(tensor.data_ptr, 24)]])


@pytest.mark.parametrize("wrong", ["meta", "strided"])
def test_tensors_that_cannot_be_registered(open_cc: Callable[..., Any], torch: Any, wrong: str) -> None:
    tensor = torch.zeros(8, 4, 2, 3, device="meta") if wrong == "meta" else torch.zeros(8, 4, 3, 2).transpose(2, 3)
    with refused():
        open_cc(v1_config()).register_kvcache([[tensor]])
