"""The two roles that measure pulls through `llm_datadist`, by the vendor's calls only; further roles of worker.py."""

from __future__ import annotations

import socket

from limits import MIB, Limits, PrivateMemory, Times, Work, scattered

REGION_BYTES = 64 * MIB


def blocks_of(unit: int) -> Work:
    return scattered(64, unit, REGION_BYTES // unit)


def _started(role: str, cluster_id: int, port: int):  # type: ignore[no-untyped-def]
    import llm_datadist

    engine = llm_datadist.LLMDataDist(getattr(llm_datadist.LLMRole, role), cluster_id)
    config = llm_datadist.LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    if port:
        config.listen_ip_info = f"127.0.0.1:{port}"
    engine.init(config.generate_options())
    return engine


def _described(unit: int):  # type: ignore[no-untyped-def]
    from llm_datadist import CacheDesc, DataType, Placement

    return CacheDesc(1, [REGION_BYTES // unit, unit], DataType.DT_INT8, Placement.DEVICE)


class Prefill:
    """Registers a blocks cache and listens."""

    def __init__(self, library: str, unit: int) -> None:
        from llm_datadist import BlocksCacheKey

        self._memory = PrivateMemory(REGION_BYTES)
        Limits(library).fill_pattern(self._memory.address, REGION_BYTES)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._engine = _started("PROMPT", 0, self.port)
        key = BlocksCacheKey(0, 0)
        self._engine.cache_manager.register_blocks_cache(_described(unit), [self._memory.address], key)

    def listens_on(self) -> int:
        return self.port


class Decode:
    """Links to it and pulls one block after the other."""

    def __init__(self, library: str, unit: int, port: int) -> None:
        from llm_datadist import LLMClusterInfo

        self._limits, self._work = Limits(library), blocks_of(unit)
        self._memory = PrivateMemory(REGION_BYTES)
        self._engine = _started("DECODER", 1, 0)
        self._manager = self._engine.cache_manager
        self._cache = self._manager.register_blocks_cache(_described(unit), [self._memory.address])
        far = LLMClusterInfo()
        far.remote_cluster_id = 0
        far.append_local_ip_info("127.0.0.1", 0)
        far.append_remote_ip_info("127.0.0.1", port)
        code, _ = self._engine.link_clusters([far], 5000)
        if code != 0:
            raise RuntimeError(f"link_clusters answered {code}")

    def latencies(self, count: int) -> Times:
        from exchange import latencies

        from llm_datadist import BlocksCacheKey

        sources, destinations = (side.tolist() for side in self._work.lists())
        key, pull, cache = BlocksCacheKey(0, 0), self._manager.pull_blocks, self._cache
        self._limits.overwrite(self._memory.address, REGION_BYTES, 7)
        lists = [([s], [d]) for s, d in zip(sources, destinations, strict=True)]
        us = latencies(count, lambda i: pull(key, cache, *lists[i % len(lists)]))
        self._limits.check(self._memory.address, self._work, self._work.lists())
        return us
