"""The examples' steps (compat/llm_datadist/cpp/examples) as a Python program, so that either of the two sides may be one:

python guide_side.py whole_cache|blocks prompt|decoder IP:PORT
"""

import sys
import time
from collections.abc import Callable

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)

PROMPT, DECODER = 1, 2
TENSORS, UNITS, WORDS = 4, 8, 16
CACHE = 1  # the id of the only cache of either side


def made(cluster: int) -> "list[np.ndarray]":
    elements = np.arange(UNITS * WORDS, dtype=np.int32).reshape(UNITS, WORDS)
    return [elements + 1 + cluster * 10000 + tensor * 1000 for tensor in range(TENSORS)]


def wait(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.001)


def main(scenario: str, role: str, address: str) -> None:
    by_blocks, is_prompt = scenario == "blocks", role == "prompt"
    cluster = PROMPT if is_prompt else DECODER
    theirs = made(DECODER if is_prompt else PROMPT)
    mine = made(cluster)
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    config.sync_kv_timeout = 5000
    if is_prompt:
        config.listen_ip_info = address
    datadist = LLMDataDist(LLMRole.PROMPT if is_prompt else LLMRole.DECODER, cluster)
    datadist.init(config.generate_options())
    manager = datadist.cache_manager
    desc = CacheDesc(TENSORS, [UNITS, WORDS], DataType.DT_INT32)
    addresses = [array.ctypes.data for array in mine]
    if (
        by_blocks
    ):  # the other side names blocks by the id of a cache, and this one by a key, which is that id for a C++ side
        cache = manager.register_blocks_cache(desc, addresses, BlocksCacheKey(cluster, CACHE))
    else:
        cache = manager.register_cache(desc, addresses)
    assert cache.cache_id == CACHE
    if is_prompt:
        wait(lambda: all((mine[t][7] == theirs[t][7]).all() for t in range(TENSORS)))
        for layer in (range(1), range(1, 2)):
            if by_blocks:
                key = BlocksCacheKey(DECODER, CACHE)
                manager.push_blocks(key, cache, [4, 5], [6, 5], src_layer_range=layer, dst_layer_range=layer)
            else:
                row = CacheKeyByIdAndIndex(DECODER, CACHE, 2)
                manager.push_cache(row, cache, 3, src_layer_range=layer, dst_layer_range=layer)
        print("stays until its input ends", flush=True)
        sys.stdin.readline()
    else:
        host, _, port = address.rpartition(":")
        prompt = LLMClusterInfo()
        prompt.remote_cluster_id = PROMPT
        prompt.append_local_ip_info(host, 0)
        prompt.append_remote_ip_info(host, int(port))
        assert datadist.link_clusters([prompt], 5000) == (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS])
        before = made(DECODER)
        if by_blocks:
            manager.pull_blocks(BlocksCacheKey(PROMPT, CACHE), cache, [0, 1, 2, 3], [3, 2, 1, 0])
            for t in range(TENSORS):
                assert (mine[t][:4] == theirs[t][[3, 2, 1, 0]]).all() and (mine[t][4] == before[t][4]).all()
            manager.push_blocks(BlocksCacheKey(PROMPT, CACHE), cache, [7], [7])
            wait(lambda: all((mine[t][[6, 5]] == theirs[t][[4, 5]]).all() for t in range(TENSORS)))
        else:
            manager.pull_cache(CacheKeyByIdAndIndex(PROMPT, CACHE, 0), cache, 1)
            for t in range(TENSORS):
                assert (mine[t][1] == theirs[t][0]).all() and (mine[t][0] == before[t][0]).all()
            manager.push_cache(CacheKeyByIdAndIndex(PROMPT, CACHE, 7), cache, 7)
            wait(lambda: all((mine[t][2] == theirs[t][3]).all() for t in range(TENSORS)))
        assert datadist.unlink_clusters([prompt], 5000)[0] == LLMStatusCode.LLM_SUCCESS
    manager.unregister_cache(CACHE)
    datadist.finalize()
    print("finalized", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
