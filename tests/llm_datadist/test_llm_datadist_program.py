"""A program as the vendor's callers write them: nothing in it knows kvferry. What it must be told comes by the environment."""

import os
import subprocess
import sys

import pytest
from ports import free_port

PROGRAM = """
import json
import sys
import time

import numpy as np

from llm_datadist import (
    BlocksCacheKey, CacheDesc, CacheKeyByIdAndIndex, DataType, LLMConfig, LLMDataDist, LLMException, LLMRole,
    LLMStatusCode, RegisterMemStatus,
)

MODELS, BLOCKS = range(6), 16
role, mine, other = LLMRole[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
ranks = {0: 0, 1: 1}
table = json.dumps({
    "version": "1.2", "server_count": "2", "status": "completed",
    "server_list": [
        {"server_id": address, "device": [{"device_id": "0", "device_ip": f"10.0.0.{rank}", "rank_id": str(rank)}]}
        for rank, address in enumerate(sys.argv[4:6])
    ],
})

datadist = LLMDataDist(role, mine)
config = LLMConfig()
config.device_id = 0
config.enable_cache_manager = True
config.enable_remote_cache_accessible = True
config.sync_kv_timeout = "10000"
config.link_total_time = 20
datadist.init(config.generate_options())
manager = datadist.cache_manager

memory, caches = [], []
for model in MODELS:  # one paged cache for each model
    tensors = [np.full((BLOCKS, 64), mine * 100 + model, np.float16) for _ in range(4)]
    desc = CacheDesc(4, [BLOCKS, 64], DataType.DT_FLOAT16)
    memory.append(tensors)
    caches.append(manager.register_blocks_cache(desc, [t.ctypes.data for t in tensors], BlocksCacheKey(mine, model)))
rows = [np.zeros((2, 64), np.float16) for _ in range(4)]
row_cache = manager.register_cache(CacheDesc(4, [2, 64], DataType.DT_FLOAT16), [t.ctypes.data for t in rows])

comm = datadist.link("link", ranks, table)
while (status := datadist.query_register_mem_status(comm)) == RegisterMemStatus.PREPARING:
    time.sleep(0.01)
assert status == RegisterMemStatus.OK, status

if role == LLMRole.DECODER:
    for model in MODELS:
        manager.pull_blocks(BlocksCacheKey(other, model), caches[model], [0, 1, 2], [5, 6, 9])
        assert all((t[[5, 6, 9]] == other * 100 + model).all() for t in memory[model])
        assert all((t[[0, 15]] == mine * 100 + model).all() for t in memory[model])
    try:
        manager.pull_blocks(BlocksCacheKey(other, 99), caches[0], [0], [0])
    except LLMException as error:
        assert error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    for tensor in rows:
        tensor[0] = 7
    manager.push_cache(CacheKeyByIdAndIndex(other, row_cache.cache_id, 1), row_cache, 0)
else:
    until = time.monotonic() + 20
    while not all((tensor[1] == 7).all() for tensor in rows):
        assert time.monotonic() < until
        time.sleep(0.01)
datadist.unlink(comm)
for cache in (*caches, row_cache):
    manager.unregister_cache(cache.cache_id)
datadist.finalize()
"""


@pytest.mark.slow
@pytest.mark.parametrize("addresses", [("10.9.8.7", "10.9.8.7"), ("127.0.0.2", "127.0.0.3")], ids=["one", "two"])
def test_prefill_and_decode_on_one_host_and_on_two_addresses(addresses: tuple[str, str]) -> None:
    environment = os.environ | {"KVFERRY_RENDEZVOUS_PORT": str(free_port())}
    sides = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words, *addresses],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for words in (("DECODER", "1", "0"), ("PROMPT", "0", "1"))
    ]
    try:
        for side in sides:
            said, _ = side.communicate(timeout=50)
            assert side.returncode == 0, said
    finally:
        for side in sides:
            side.kill()
            side.wait()
