"""One side of an ``llm_datadist`` conversation, in the test's own process or as a `Peer`.

Its memory is numpy arrays, registered by their raw addresses as the vendor's callers do with device tensors. What it
returns is plain values, so that a test may ask a side in another process for it.
"""

import ctypes
import itertools
import math
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from ports import LOOPBACK, free_port

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    DataType,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
    RegisterMemStatus,
    TransferConfig,
    TransferWithCacheKeyConfig,
)


def status_of(call: Callable[[], object], match: str = "") -> LLMStatusCode:
    """The status of the ``LLMException`` that the call raises, whose sentence has ``match`` in it."""
    try:
        result = call()
    except LLMException as error:
        raised = error
    else:
        raise AssertionError(f"no LLMException, but {result!r}")
    assert re.search(match, str(raised)), str(raised)
    return raised.status_code


def cluster(cluster_id: int, port: int, host: str = LOOPBACK) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    info.append_local_ip_info(LOOPBACK, 0)
    info.append_remote_ip_info(host, port)
    return info


def named(layers: tuple[int, int] | None) -> range | None:
    return None if layers is None else range(*layers)


class Events(LayerSynchronizer):
    """One event for each layer, set by whoever computes it."""

    def __init__(self, layers: int, answers: "dict[int, Any] | None" = None) -> None:
        self.ready = [threading.Event() for _ in range(layers)]
        self.asked: list[int] = []
        self.answers = answers or {}

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        assert timeout_in_millis is None
        self.asked.append(layer_index)
        self.ready[layer_index].wait(30)
        answer = self.answers.get(layer_index, True)
        if isinstance(answer, BaseException):
            raise answer
        return bool(answer)


class Side:
    def __init__(self, cluster_id: int, listen: bool = True, host: str = LOOPBACK, **settings: Any) -> None:
        self.cluster_id = cluster_id
        self.port = settings.pop("port", None) or free_port()
        self.arrays: dict[int, list[Any]] = {}
        self.caches: dict[int, Cache] = {}
        self.tasks: dict[int, tuple[CacheTask, Events]] = {}
        self.task_numbers = itertools.count()
        config = LLMConfig()
        config.device_id = 0
        config.enable_cache_manager = True
        config.sync_kv_timeout = 5000
        for name, value in settings.items():
            setattr(config, name, value)
        if listen:
            config.listen_ip_info = f"{host}:{self.port}"
        self.options = config.generate_options()
        self.datadist = LLMDataDist(LLMRole.MIX, cluster_id)
        self.datadist.init(self.options)

    @property
    def manager(self) -> Any:
        return self.datadist.cache_manager

    def where(self) -> int:
        return int(self.port)

    def finalize(self) -> None:
        self.datadist.finalize()

    def init_again(self) -> None:
        self.datadist.init(self.options)

    # --- links

    def link(self, cluster_id: int, port: int, timeout: int = 3000, host: str = LOOPBACK) -> tuple[int, list[int]]:
        code, codes = self.datadist.link_clusters([cluster(cluster_id, port, host)], timeout)
        return code, codes

    def unlink(self, cluster_id: int, port: int = 1, timeout: int = 3000, force: bool = False) -> tuple[int, list[int]]:
        code, codes = self.datadist.unlink_clusters([cluster(cluster_id, port)], timeout, force)
        return code, codes

    def link_table(self, name: str, ranks: dict[int, int], table: str) -> int:
        return self.datadist.link(name, ranks, table)

    def link_listed(self, name: str, ranks: Sequence[tuple[int, int]], table: str) -> int:
        """As `link_table`, for who has no dicts with numbers for keys."""
        return self.link_table(name, dict(ranks), table)

    def link_tables(self, names: Sequence[str], ranks: dict[int, int], table: str) -> list[int]:
        """Each from a thread of its own."""
        with ThreadPoolExecutor(len(names)) as threads:
            return list(threads.map(lambda name: self.link_table(name, ranks, table), names))

    def status(self, comm_id: int) -> RegisterMemStatus:
        return self.datadist.query_register_mem_status(comm_id)

    def settled(self, comm_id: int, within_s: float = 20) -> RegisterMemStatus:
        """The status once it is no longer PREPARING."""
        until = time.monotonic() + within_s
        while (status := self.status(comm_id)) is RegisterMemStatus.PREPARING and time.monotonic() < until:
            time.sleep(0.01)
        return status

    def unlink_table(self, comm_id: int) -> None:
        self.datadist.unlink(comm_id)

    def fork_and_sleep(self, seconds: float) -> None:
        """Leaves a child behind that does nothing."""
        if os.fork() == 0:
            time.sleep(seconds)
            os._exit(0)

    # --- memory

    def register(
        self,
        shape: Sequence[int],
        tensors: int = 4,
        *,
        blocks: bool = False,
        req_ids: Sequence[int] = (),
        model: int | None = None,
        order: Sequence[int] | None = None,
        host: bool = False,
        remote_accessible: bool | None = None,
    ) -> int:
        """Registers float32 tensors of zeros and returns the cache's id; ``order``: which tensor stands where."""
        memory = [np.zeros(shape, np.float32) for _ in range(tensors)]
        addresses = [memory[i].ctypes.data for i in (order or range(tensors))]
        placement = Placement.HOST if host else Placement.DEVICE
        desc = CacheDesc(tensors, list(shape), DataType.DT_FLOAT, placement)
        if blocks:
            key = None if model is None else BlocksCacheKey(self.cluster_id, model)
            cache = self.manager.register_blocks_cache(desc, addresses, key, remote_accessible)
        else:
            keys = [CacheKey(self.cluster_id, req_id) for req_id in req_ids]
            cache = self.manager.register_cache(desc, addresses, keys, remote_accessible)
        assert cache.tensor_addrs == addresses
        self.arrays[cache.cache_id] = memory
        self.caches[cache.cache_id] = cache
        return int(cache.cache_id)

    def allocate(
        self, shape: Sequence[int], tensors: int = 2, req_ids: Sequence[int] = (), prefix: int | None = None
    ) -> int:
        """Allocates float32 tensors with a number of its own in every element; a prefix names the row behind the keys."""
        desc = CacheDesc(tensors, list(shape), DataType.DT_FLOAT)
        keys = [CacheKey(self.cluster_id, req_id) for req_id in req_ids]
        if prefix is not None:
            keys.append(CacheKey(self.cluster_id, 2**64 - 1, 0, prefix))
        cache = self.manager.allocate_cache(desc, keys)
        self.arrays[cache.cache_id] = [at(address, shape) for address in cache.tensor_addrs]
        self.caches[cache.cache_id] = cache
        self.fill(cache.cache_id)
        return int(cache.cache_id)

    def deallocate(self, cache_id: int) -> None:
        self.manager.deallocate_cache(self.caches[cache_id])

    def remove_key(self, req_id: int, prefix_id: int = 2**64 - 1) -> None:
        self.manager.remove_cache_key(CacheKey(self.cluster_id, req_id, 0, prefix_id))

    def pool_in_use(self) -> int:
        """Bytes of the pool that are given out, as kvferry counts them."""
        return int(self.manager._engine.node.statistics().pool_used_bytes)

    def unregister(self, cache_id: int) -> None:
        self.manager.unregister_cache(cache_id)

    def addresses(self, cache_id: int) -> list[int]:
        return list(self.caches[cache_id].per_device_tensor_addrs[0])

    def fill(self, cache_id: int) -> None:
        """Every element of every tensor gets a number of its own, none of them 0."""
        for index, array in enumerate(self.arrays[cache_id]):
            array[...] = np.arange(array.size).reshape(array.shape) + 1 + index * 1000

    def fill_tensor(self, cache_id: int, tensor: int, value: float) -> None:
        self.arrays[cache_id][tensor][...] = value

    def tensors(self, cache_id: int) -> list[Any]:
        return [array.copy() for array in self.arrays[cache_id]]

    # --- pull and push

    def pull_cache(
        self, key: tuple[Any, ...], cache_id: int, batch_index: int = 0, size: int = -1, **more: Any
    ) -> None:
        self.manager.pull_cache(key_of(key), self.caches[cache_id], batch_index, size, **layered(more))

    def pull_blocks(
        self, key: tuple[Any, ...], cache_id: int, source: Sequence[int], into: Sequence[int], **more: Any
    ) -> None:
        self.manager.pull_blocks(key_of(key), self.caches[cache_id], list(source), list(into), **layered(more))

    def push_cache(self, key: tuple[Any, ...], cache_id: int, batch_index: int = 0, **more: Any) -> None:
        self.manager.push_cache(key_of(key), self.caches[cache_id], batch_index, **layered(more))

    def push_blocks(
        self, key: tuple[Any, ...], cache_id: int, source: Sequence[int], into: Sequence[int], **more: Any
    ) -> None:
        self.manager.push_blocks(key_of(key), self.caches[cache_id], list(source), list(into), **layered(more))

    # --- layer by layer

    def start(
        self,
        cache_id: int,
        configs: Sequence[tuple[Any, ...]],
        source: Sequence[int] | None = None,
        into: Sequence[int] | None = None,
        answers: "dict[int, Any] | None" = None,
        block_bytes: int | None = None,
    ) -> int:
        """Starts an asynchronous transfer, nothing ready; configs are ("addresses", cluster, addrs, layers, row) or
        ("key", key, source layers, destination layers, row). Returns the task's number."""
        cache = self.caches[cache_id]
        events = Events(cache.cache_desc.num_tensors // 2, answers)
        listed = [config_of(config) for config in configs]
        task = self.manager.transfer_cache_async(cache, events, listed, source, into, block_bytes)
        number = next(self.task_numbers)
        self.tasks[number] = (task, events)
        return number

    def ready(self, number: int, layer: int) -> None:
        self.tasks[number][1].ready[layer].set()

    def compute(self, number: int, cache_id: int, layer: int, value: float) -> None:
        """What a model's thread does: writes the tensors of one layer, then sets its event."""
        for tensor in (2 * layer, 2 * layer + 1):
            self.fill_tensor(cache_id, tensor, value + tensor)
        self.ready(number, layer)

    def all_ready(self, number: int) -> None:
        for event in self.tasks[number][1].ready:
            event.set()

    def results(self, number: int, timeout: int = 10_000) -> list[Any]:
        return list(self.tasks[number][0].get_results(timeout))

    def synchronize(self, number: int, timeout: int = 10_000) -> int:
        return self.tasks[number][0].synchronize(timeout)

    def asked(self, number: int) -> list[int]:
        return list(self.tasks[number][1].asked)

    # --- many threads

    def do_everything(self, cluster_id: int, model: int, far_rows: int, threads: int, rounds: int) -> list[str]:
        """Each thread registers caches of its own, pushes them to a block and a row of its own, pulls them back, copies,
        transfers layer by layer and unregisters, again and again. Returns what was wrong."""
        wrong: list[str] = []

        def work(thread: int) -> None:
            shape = [2, 128]
            for number in range(rounds):
                try:
                    blocks, rows = self.register(shape, 2, blocks=True), self.register(shape, 2)
                    for cache in (blocks, rows):
                        self.arrays[cache][1][0] = thread * 1000 + number
                    self.push_blocks(("blocks", cluster_id, model), blocks, [0], [thread])
                    self.pull_blocks(("blocks", cluster_id, model), blocks, [thread], [1])
                    self.push_cache(("id", cluster_id, far_rows, thread), rows)
                    self.pull_cache(("id", cluster_id, far_rows, thread), rows, 1)
                    task = self.start(rows, [("key", ("id", cluster_id, far_rows, thread), (0, 1), (0, 1), 1)])
                    self.all_ready(task)
                    self.manager.copy_blocks(self.caches[blocks], {1: [0]})
                    if self.results(task) != [0]:
                        wrong.append(f"thread {thread}, round {number}: {self.results(task)}")
                    for cache in (blocks, rows):
                        if not (self.arrays[cache][1] == thread * 1000 + number).all():
                            wrong.append(f"thread {thread}, round {number}: bytes")
                        self.unregister(cache)
                except LLMException as error:
                    wrong.append(f"thread {thread}, round {number}: {error}")

        workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return wrong

    def pull_many(
        self, key: tuple[Any, ...], missing: tuple[Any, ...], cache_id: int, threads: int, pulls: int
    ) -> list[tuple[int, int, int | None]]:
        """``pulls`` pulls by each thread into a block of its own; in the middle of the first one's, a key that does not
        exist. Every good pull's bytes are looked at. Returns (thread, number, status) of each that failed."""
        cache, arrays = self.caches[cache_id], self.arrays[cache_id]
        failed: list[tuple[int, int, int | None]] = []
        good, bad = key_of(key), key_of(missing)

        def work(thread: int) -> None:
            for number in range(pulls):
                wrong = thread == 0 and number == pulls // 2
                source = number % 10
                try:
                    self.manager.pull_blocks(bad if wrong else good, cache, [source], [thread])
                    expected = np.arange(source * 128, (source + 1) * 128, dtype=np.float32) + 1
                    if not (arrays[0][thread] == expected).all():
                        failed.append((thread, number, None))
                except LLMException as error:
                    failed.append((thread, number, error.status_code))

        workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return failed


def key_of(words: tuple[Any, ...]) -> Any:
    kind, *rest = words
    return {"request": CacheKey, "blocks": BlocksCacheKey, "id": CacheKeyByIdAndIndex}[kind](*rest)


def config_of(words: tuple[Any, ...]) -> TransferConfig | TransferWithCacheKeyConfig:
    if words[0] == "addresses":
        _, cluster_id, addresses, layers, row = words
        return TransferConfig(cluster_id, addresses, named(layers), row)
    _, key, source, destination, row = words
    return TransferWithCacheKeyConfig(key_of(key), named(source), named(destination), row)


def layered(more: dict[str, Any]) -> dict[str, Any]:
    return {name: named(value) if name.endswith("range") else value for name, value in more.items()}


def at(address: int, shape: Sequence[int]) -> Any:
    """A float32 array over raw memory of this process."""
    size = math.prod(shape)
    return np.frombuffer((ctypes.c_float * size).from_address(address), np.float32).reshape(tuple(shape))
