"""Context caching of V1: a registered KV cache, blocks named by hashes, keys made here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ems import _pool, arguments
from ems._pool import Pool
from ems.arguments import Integers
from ems.bounds import Bounds
from ems.caching import ContextCaching
from ems.cc_v1.cc_config import CcConfig_v1, KVCacheType
from ems.common.exception import invalid
from ems.config import Settings
from ems.future import CcFuture
from ems.keys import V1Keys
from ems.registration import KvCaches
from ems.values import CcKvOption, CcResult

FORMS = (
    "V1 takes slot_mapping, hashes and offsets; or hashes and chunk_descs; or slot_mapping, token_ids and mask; "
    "V0 takes option, key_list and value_list"
)
KEEP_UNPOLLED = 64  # futures remembered before the ended ones among them are forgotten


class ContextCache_v1(ContextCaching):
    """What ``Ems.get_cc()`` returns for a `CcConfig_v1`. A first argument that is a `CcKvOption` makes a call one of V0."""

    def __init__(self, pool: Pool, settings: Settings) -> None:
        super().__init__(pool, settings)
        self._registered: tuple[KvCaches, V1Keys] | None = None
        self._in_flight: list[CcFuture] = []
        self._look_at = KEEP_UNPOLLED
        self._users = 0  # calls that are using what is registered

    def register_kvcache(self, kvcache: object, store_layer_group_desc: object = None) -> None:
        """Say where the KV cache lies. No byte is moved; the tensors are kept alive until others are registered.

        :param kvcache: for each layer its tensors, any number of them, each [blocks, block_size, heads, head_size]; sizes may
            differ between layers and within one.
        :param store_layer_group_desc: which layers share a block table; None: all of them.
        :raises EmsException: also when another cache is registered and requests on it are in flight.
        """
        caches = KvCaches(kvcache, store_layer_group_desc)
        with self._lock:
            if self._registered is not None:
                if self._registered[0].is_the_same_as(caches):
                    return
                if self._users or any(not future._is_ready() for future in self._in_flight):
                    raise invalid(
                        "another KV cache is registered and requests on it are in flight; wait for their results"
                    )
                earlier = {id(memory) for memory in self._registered[0].memories}
                self._bounds = Bounds([memory for memory in self._bounds.memories if id(memory) not in earlier])
            self._registered = caches, V1Keys(self._settings, caches.geometry)
            self._bounds = self._bounds.with_more(caches.memories)

    # The vendor's order of arguments, and what V0 has in their places.

    def save(  # type: ignore[override]
        self, slot_mapping: Any = None, hashes: Any = None, offsets: Any = None, option: Any = None, **kwargs: Any
    ) -> CcResult:
        """Save the chunks. One that exists counts as saved."""
        return self._submit(slot_mapping, hashes, offsets, option, kwargs, saving=True, wait=True).result()

    def load(  # type: ignore[override]
        self, slot_mapping: Any = None, hashes: Any = None, offsets: Any = None, option: Any = None, **kwargs: Any
    ) -> CcResult:
        """Load the chunks into their slots. From the first missing chunk on the slots' content is unspecified."""
        return self._submit(slot_mapping, hashes, offsets, option, kwargs, saving=False, wait=True).result()

    def async_save(  # type: ignore[override]
        self, slot_mapping: Any = None, hashes: Any = None, offsets: Any = None, option: Any = None, **kwargs: Any
    ) -> CcFuture:
        """As ``save``, without waiting: the slots must stay as they are until the future is resolved."""
        return self._submit(slot_mapping, hashes, offsets, option, kwargs, saving=True, wait=False)

    def async_load(  # type: ignore[override]
        self, slot_mapping: Any = None, hashes: Any = None, offsets: Any = None, option: Any = None, **kwargs: Any
    ) -> CcFuture:
        """As ``load``, without waiting."""
        return self._submit(slot_mapping, hashes, offsets, option, kwargs, saving=False, wait=False)

    def exists(self, hashes: Any = None, option: CcKvOption | None = None, **kwargs: Any) -> CcResult:
        """How many of the chunks, from the first one on, are there. Never raises for the pool's state: that is 0."""
        chosen = arguments.option(option, default=CcKvOption())
        names = self._needs_registered()[1].of_hashes(arguments.hashes(hashes))
        return self._look(names, None, chosen)

    # -- from the three forms to segments

    def _submit(
        self,
        slot_mapping: Any,
        hashes: Any,
        offsets: Any,
        option: Any,
        kwargs: dict[str, Any],
        *,
        saving: bool,
        wait: bool,
    ) -> CcFuture:
        if isinstance(slot_mapping, CcKvOption):  # V0: option, key_list, value_list
            named = {"key_list": hashes, "value_list": offsets} | kwargs
            return self._start_v0(
                slot_mapping, named.pop("key_list"), named.pop("value_list"), (), named, saving=saving, wait=wait
            )
        if "key_list" in kwargs or "value_list" in kwargs:
            named = dict(kwargs)
            key_list, value_list = named.pop("key_list", None), named.pop("value_list", None)
            return self._start_v0(option, key_list, value_list, (), named, saving=saving, wait=wait)
        chosen = arguments.option(option, default=CcKvOption())
        given = {"slot_mapping": slot_mapping, "hashes": hashes, "offsets": offsets} | kwargs
        form = frozenset(name for name, value in given.items() if value is not None)
        if form == {"slot_mapping", "hashes", "offsets"}:
            read = self._read_slot_mapping
        elif form == {"hashes", "chunk_descs"}:
            read = self._read_chunk_descs
        elif form == {"slot_mapping", "token_ids", "mask"}:
            read = self._read_tokens
        else:
            raise invalid(f"got {', '.join(sorted(form)) or 'nothing'}; {FORMS}")
        caches, names_of = self._needs_registered()
        names, tables = read(caches, names_of, given)
        segments = caches.segments(tables) if names else None
        parts = (segments.addresses, segments.sizes, segments.counts) if segments else _NOTHING
        with self._using(caches):
            first = self._stripe(len(names)) if saving else None
            future = self._start(names, parts, chosen, saving=saving, wait=wait, first=first)
            if wait:
                future.result()
            else:
                with self._lock:  # or whoever forgets the ended ones meanwhile forgets this one too
                    self._in_flight.append(future)
        return future

    @contextmanager
    def _using(self, caches: KvCaches) -> Iterator[None]:
        """While this lasts no other cache can be registered."""
        with self._lock:
            if self._registered is None or self._registered[0] is not caches:
                raise invalid("another KV cache was registered meanwhile")
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if len(self._in_flight) >= self._look_at:
                    self._in_flight = [future for future in self._in_flight if not future._is_ready()]
                    self._look_at = max(KEEP_UNPOLLED, 2 * len(self._in_flight))

    def _read_slot_mapping(
        self, caches: KvCaches, names_of: V1Keys, given: dict[str, Any]
    ) -> tuple[list[bytes], list[tuple[Integers, Integers]]]:
        wanted = arguments.hashes(given["hashes"])
        slots = arguments.integers("slot_mapping", given["slot_mapping"])
        counts = arguments.integers("offsets", given["offsets"])
        if len(counts) != len(wanted):
            raise invalid(f"there are {len(wanted)} hashes and {len(counts)} offsets; they must pair one to one")
        _check_counts("offsets", counts)
        total = sum(counts.tolist())  # which, unlike numpy's, does not wrap around
        if total != len(slots):
            raise invalid(f"slot_mapping has {len(slots)} slots, but offsets sum to {total}; they must be equal")
        return names_of.of_hashes(wanted), _one_table(caches, slots, counts)

    def _read_chunk_descs(
        self, caches: KvCaches, names_of: V1Keys, given: dict[str, Any]
    ) -> tuple[list[bytes], list[tuple[Integers, Integers]]]:
        wanted = arguments.hashes(given["hashes"])
        descs = arguments.chunk_descs(given["chunk_descs"], len(caches.groups), len(wanted))
        tables = []
        for index, (group, (starts, counts)) in enumerate(zip(caches.groups, descs, strict=True)):
            name = f"chunk_descs[{index}]"
            _check_counts(name, counts)
            if starts.min() < 0 or np.any(counts > group.slots) or np.any(starts > group.slots - counts):
                raise invalid(f"{name} reaches beyond the group's {group.slots} slots, or below 0")
            slots = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
            group.check(slots, counts, name)
            tables.append((slots, counts))
        lengths = np.stack([counts for _, counts in tables], axis=1)
        uneven = np.flatnonzero((lengths != lengths[:, :1]).any(axis=1)).tolist()
        return names_of.of_hashes(wanted, {chunk: ",".join(map(str, lengths[chunk])) for chunk in uneven}), tables

    def _read_tokens(
        self, caches: KvCaches, names_of: V1Keys, given: dict[str, Any]
    ) -> tuple[list[bytes], list[tuple[Integers, Integers]]]:
        slots = arguments.integers("slot_mapping", given["slot_mapping"])
        tokens = arguments.integers("token_ids", given["token_ids"])
        mask = arguments.mask(given["mask"])
        if not len(slots) == len(tokens) == len(mask):
            raise invalid(
                f"slot_mapping has {len(slots)}, token_ids {len(tokens)} and mask {len(mask)} entries; they must be equally long"
            )
        size = caches.groups[0].block_size
        blocks = len(tokens) // size
        first = -(-int(np.count_nonzero(~mask)) // size)  # the first block that lies in the run of ones as a whole
        if first >= blocks:
            return [], []
        names = names_of.of_prefixes(_pool.prefix_keys(tokens, size)[first:])
        counts = np.full(blocks - first, size, np.int64)
        return names, _one_table(caches, slots[first * size : blocks * size], counts)

    def _needs_registered(self) -> tuple[KvCaches, V1Keys]:
        registered = self._registered
        if registered is None:
            raise invalid("no KV cache is registered; call register_kvcache first")
        return registered

    def _stripe(self, count: int) -> Any:
        """Which keys this rank saves first; None: all."""
        cc = self._settings.cc
        assert isinstance(cc, CcConfig_v1)
        if self._settings.kvcache_type is not KVCacheType.MLA or cc.tp_world_size == 1:
            return None
        return np.arange(cc.rank_in_tp_group % cc.tp_world_size, count, cc.tp_world_size)


_NOTHING = (np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, np.int64))


def _one_table(caches: KvCaches, slots: Integers, counts: Integers) -> list[tuple[Integers, Integers]]:
    """The same slots in every layer group, which is possible where all of them have as many blocks of as many slots."""
    first = caches.groups[0]
    for group in caches.groups:
        if (group.blocks, group.block_size) != (first.blocks, first.block_size):
            raise invalid(
                "the registered layer groups have different blocks, so one slot_mapping cannot say where; use chunk_descs"
            )
    first.check(slots, counts, "slot_mapping")
    return [(slots, counts)] * len(caches.groups)


def _check_counts(name: str, counts: Sequence[int] | Integers) -> None:
    if min(counts) <= 0:
        raise invalid(f"{name} must have at least one token for each chunk, but has {min(counts)}")
