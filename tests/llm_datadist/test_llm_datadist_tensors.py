"""The vendor's first guide flow with torch tensors: views over a received cache's raw addresses."""

from collections.abc import Callable
from typing import Any

import pytest
from datadist_side import Side

import llm_datadist
from llm_datadist import CacheDesc, CacheKey, DataType, LLMStatusCode
from support import Peer

pytestmark = pytest.mark.torch
HERE, THERE = 1, 0
SHAPE = [4, 4, 8]

PROMPT = """
import torch
from datadist_side import Side
from llm_datadist import CacheDesc, CacheKey, DataType

side = Side(0)
where, finalize, start, compute, results = side.where, side.finalize, side.start, side.compute, side.results

def register():
    desc = CacheDesc(num_tensors=4, shape=[4, 4, 8], data_type=DataType.DT_FLOAT16)
    side.arrays[1] = [torch.full((4, 4, 8), float(i + 1), dtype=torch.float16) for i in range(4)]
    addresses = [tensor.data_ptr() for tensor in side.arrays[1]]
    cache = side.manager.register_cache(desc, addresses, [CacheKey(0, 1, 0)])
    side.caches[cache.cache_id] = cache
    return cache.cache_id
"""


def test_views_are_the_memory_itself() -> None:
    import torch

    memory = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    addresses = [memory[0].data_ptr(), memory[1].data_ptr()]
    one, two = llm_datadist.create_npu_tensors([3, 4], torch.bfloat16, addresses)
    two[1] = 5
    assert one.shape == two.shape == (3, 4)
    assert memory[1, 1].tolist() == [5] * 4
    memory[0, 2, 3] = 7
    assert one[2, 3] == 7
    with pytest.raises(ValueError, match="no bytes"):
        llm_datadist.create_npu_tensors([0, 4], torch.float32, addresses)


def test_whole_cache_then_layer_by_layer(here: Side, peers: Callable[..., Peer]) -> None:
    import torch

    there = peers(PROMPT, name="prompt")
    far = there.call("register")
    tensors = [torch.zeros(SHAPE, dtype=torch.float16) for _ in range(4)]
    desc = CacheDesc(num_tensors=4, shape=SHAPE, data_type=DataType.DT_FLOAT16)
    cache: Any = here.manager.register_cache(desc, [int(tensor.data_ptr()) for tensor in tensors])
    assert here.link(THERE, there.call("where"))[0] == LLMStatusCode.LLM_SUCCESS

    here.manager.pull_cache(CacheKey(prompt_cluster_id=THERE, req_id=1, model_id=0), cache, 1)
    views = llm_datadist.create_npu_tensors(desc.shape, torch.float16, cache.per_device_tensor_addrs[0])
    for index, view in enumerate(views):
        assert (view[1] == index + 1).all()
        assert not view[[0, 2, 3]].any()

    task = there.call("start", far, [("addresses", HERE, cache.per_device_tensor_addrs[0], None, 2)])
    for layer in range(2):
        there.call("compute", task, far, layer, 10.0)
    assert there.call("results", task) == [LLMStatusCode.LLM_SUCCESS]
    for index, view in enumerate(views):
        assert (view[0] == 10 + index).all()
        assert (view[1] == index + 1).all()
        assert torch.equal(view, tensors[index])

    here.manager.unregister_cache(cache.cache_id)
    here.unlink(THERE, there.call("where"))
    here.finalize()
    there.call("finalize")
