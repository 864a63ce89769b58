"""The same calls to both doors: each answers with the same statuses, and moves the same bytes."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cpp_side import Door
from datadist_side import Side, cluster, key_of
from ports import LOOPBACK, free_port

from llm_datadist import Cache, CacheDesc, CacheKeyByIdAndIndex, DataType, LLMException, LLMRole
from llm_datadist import LLMStatusCode as S
from support import Peer

CALLS = 500
PEER, TWIN, NOBODY, ITSELF = 9, 8, 5, -1  # clusters; two of them are there
ROWS, WORDS, TENSORS = 8, 16, 4
POOL = '{"memory_size": 1048576}'
SEEN = {
    S.LLM_SUCCESS, S.LLM_FAILED, S.LLM_KV_CACHE_NOT_EXIST, S.LLM_PARAM_INVALID, S.LLM_NOT_YET_LINK, S.LLM_ALREADY_LINK,
    S.LLM_LINK_FAILED, S.LLM_EXIST_LINK, S.LLM_OUT_OF_MEMORY,
}  # fmt: skip

Layers = tuple[range, range, int] | None  # of source and destination, tensors per layer
Made = tuple[int, int]  # a status and the id of a cache
Linked = tuple[int, list[int]]


class Python:
    """The Python door by ids, as the C++ API names caches. Ids that are known nowhere get an object all the same."""

    def __init__(self, side: Side) -> None:
        self.side, self.cluster_id = side, side.cluster_id
        self.made: dict[int, Cache] = {}

    def register(self, shape: list[int], addresses: list[int], blocks: bool) -> Made:
        desc = CacheDesc(TENSORS, shape, DataType.DT_FLOAT)
        if blocks:
            return self._make(lambda m: m.register_blocks_cache(desc, addresses))
        return self._make(lambda m: m.register_cache(desc, addresses))

    def allocate(self, shape: list[int], tensors: int) -> Made:
        return self._make(lambda m: m.allocate_cache(CacheDesc(tensors, shape, DataType.DT_FLOAT)))

    def unregister(self, cache_id: int) -> int:
        return self._asked(lambda m: m.unregister_cache(cache_id))

    def deallocate(self, cache_id: int) -> int:
        return self._asked(lambda m: m.deallocate_cache(self._cache(cache_id)))

    def pull_cache(self, key: Any, cache_id: int, row: int, size: int, layers: Layers) -> int:
        named, mine = CacheKeyByIdAndIndex(*key), self._cache(cache_id)
        return self._asked(lambda m: m.pull_cache(named, mine, row, size, **_layered(layers)))

    def push_cache(self, key: Any, cache_id: int, row: int, layers: Layers) -> int:
        named, mine = CacheKeyByIdAndIndex(*key), self._cache(cache_id)
        return self._asked(lambda m: m.push_cache(named, mine, row, **_layered(layers)))

    def pull_blocks(self, key: Any, cache_id: int, source: list[int], into: list[int], layers: Layers) -> int:
        named, mine = key_of(("blocks", *key[:2])), self._cache(cache_id, blocks=True)
        return self._asked(lambda m: m.pull_blocks(named, mine, source, into, **_layered(layers)))

    def push_blocks(self, key: Any, cache_id: int, source: list[int], into: list[int], layers: Layers) -> int:
        named, mine = key_of(("blocks", *key[:2])), self._cache(cache_id, blocks=True)
        return self._asked(lambda m: m.push_blocks(named, mine, source, into, **_layered(layers)))

    def copy_cache(self, source: int, into: int, row: int, into_row: int, offset: int, size: int) -> int:
        caches = self._cache(into), self._cache(source)
        return self._asked(lambda m: m.copy_cache(*caches, into_row, row, offset, size))

    def copy_blocks(self, cache_id: int, blocks: dict[int, int]) -> int:
        listed = {source: [into] for source, into in blocks.items()}
        return self._asked(lambda m: m.copy_blocks(self._cache(cache_id, blocks=True), listed))

    def link(self, clusters: Any, timeout: int) -> Linked:
        return self._linked(lambda: self.side.datadist.link_clusters(_infos(clusters), timeout))

    def unlink(self, clusters: Any, timeout: int, force: bool) -> Linked:
        return self._linked(lambda: self.side.datadist.unlink_clusters(_infos(clusters), timeout, force))

    def set_role(self, role: int, listen: str | None) -> int:
        options = {} if listen is None else {"llm.listenIpInfo": listen}
        return self._asked(lambda _: self.side.datadist.switch_role(LLMRole(role), options))

    def _cache(self, cache_id: int, blocks: bool = False) -> Cache:
        desc = CacheDesc(TENSORS, [ROWS, WORDS], DataType.DT_FLOAT)
        return self.made.get(cache_id) or Cache(cache_id, desc, [], self.side.manager, is_blocks_cache=blocks)

    def _asked(self, call: Callable[[Any], object]) -> int:
        try:
            call(self.side.manager)
        except LLMException as error:
            return int(error.status_code)
        return 0

    def _make(self, make: Callable[[Any], Cache]) -> Made:
        made: list[Cache] = []
        status = self._asked(lambda manager: made.append(make(manager)))
        if not made:
            return status, -1
        self.made[made[0].cache_id] = made[0]
        return status, made[0].cache_id

    def _linked(self, call: Callable[[], Linked]) -> Linked:
        try:
            status, statuses = call()
        except LLMException as error:
            return int(error.status_code), []
        return int(status), [int(one) for one in statuses]


class Cpp:
    """The C++ door in the same words."""

    def __init__(self, door: Door) -> None:
        self.door, self.cluster_id = door, door.cluster_id
        for same in ("unregister", "deallocate", "copy_cache"):
            setattr(self, same, getattr(door, same))

    def register(self, shape: list[int], addresses: list[int], blocks: bool) -> Made:
        del blocks  # used both ways
        return self.door.register_addresses(shape, TENSORS, addresses)

    def allocate(self, shape: list[int], tensors: int) -> Made:
        return self.door.allocate(shape, tensors)[:2]

    def pull_cache(self, key: Any, cache_id: int, row: int, size: int, layers: Layers) -> int:
        return self.door.pull_cache(key, cache_id, row, size, _inclusive(layers))

    def push_cache(self, key: Any, cache_id: int, row: int, layers: Layers) -> int:
        return self.door.push_cache(key, cache_id, row, TENSORS, layers=_inclusive(layers))

    def pull_blocks(self, key: Any, cache_id: int, source: list[int], into: list[int], layers: Layers) -> int:
        return self.door.pull_blocks((*key[:2], 0), cache_id, source, into, _inclusive(layers))

    def push_blocks(self, key: Any, cache_id: int, source: list[int], into: list[int], layers: Layers) -> int:
        return self.door.push_blocks((*key[:2], 0), cache_id, source, into, TENSORS, _inclusive(layers))

    def copy_blocks(self, cache_id: int, blocks: dict[int, int]) -> int:
        return self.door.copy_blocks(cache_id, cache_id, list(blocks), [list(blocks.values())])

    def link(self, clusters: Any, timeout: int) -> Linked:
        return self.door.link(*clusters, timeout=timeout)

    def unlink(self, clusters: Any, timeout: int, force: bool) -> Linked:
        return self.door.unlink(*clusters, timeout=timeout, force=force)

    def set_role(self, role: int, listen: str | None) -> int:
        return self.door.set_role(role, {} if listen is None else {"llm.ListenIpInfo": listen})


def _layered(layers: Layers) -> dict[str, Any]:
    if layers is None:
        return {}
    return {"src_layer_range": layers[0], "dst_layer_range": layers[1], "tensor_num_per_layer": layers[2]}


def _inclusive(layers: Layers) -> tuple[int, int, int, int, int] | None:
    if layers is None:
        return None
    source, into, width = layers
    return source.start, source.stop - 1, into.start, into.stop - 1, width


def _infos(clusters: Any) -> list[Any]:
    infos = []
    for cluster_id, host, port in clusters:
        infos.append(cluster(cluster_id, port))
        if host is None:
            infos[-1].remote_ip_info_list.clear()
    return infos


class Calls:
    """Draws calls that both doors can be told: mostly such as succeed, with something wrong here and there."""

    def __init__(self, seed: int, ports: dict[int, int]) -> None:
        self.random = random.Random(seed)
        self.ports = ports
        # Of the caches that were made here, by whether they are of blocks; the first of each sort stays.
        self.ids = {False: [1], True: [2]}

    def draw(self) -> tuple[str, tuple[Any, ...]]:
        odds = {
            "pull_cache": 8, "pull_blocks": 7, "push_cache": 7, "push_blocks": 6, "register": 3, "unregister": 1, "allocate": 2,
            "deallocate": 1, "copy_cache": 2, "copy_blocks": 2, "link": 5, "unlink": 2, "set_role": 2,
        }  # fmt: skip
        name = self.random.choices(list(odds), list(odds.values()))[0]
        return name, getattr(self, f"_{name}")()

    def _mostly(self, usual: Any, *others: Any) -> Any:
        return self.random.choice(others) if self.random.random() < 0.12 else usual

    def _row(self) -> int:
        return int(self._mostly(self.random.randrange(ROWS), ROWS))

    def _mine(self, blocks: bool = False) -> tuple[int, Layers]:
        """A cache of this side and layers of it; of a cache that is none the two doors look at layers sooner or later."""
        ids = self.ids[blocks]
        cache_id = self._mostly(self.random.choice(ids[:1] * 2 + ids[-2:]), 99, -1)
        if cache_id != ids[0] or self.random.random() < 0.5:
            return cache_id, None
        count, first, into = self.random.choice([1, 1, 2]), self._mostly(0, 1), self._mostly(0, 1)
        return cache_id, (
            range(first, first + count),
            range(into, into + self._mostly(count, count + 1)),
            self._mostly(2, 1, 3),
        )

    def _key(self, *cache_ids: int) -> tuple[int, int, int]:
        owner = self._mostly(PEER, TWIN, NOBODY, ITSELF)
        return (
            owner,
            self._mostly(self.random.choice(cache_ids), 77),
            self._mostly(self.random.randrange(ROWS), ROWS, 2**32 - 2),
        )

    def _pull_cache(self) -> tuple[Any, ...]:
        cache_id, layers = self._mine()
        return self._key(1, 2), cache_id, self._row(), self._mostly(-1, 4, 64, 65, 0, -2), layers

    def _push_cache(self) -> tuple[Any, ...]:
        cache_id, layers = self._mine()
        return self._key(1, 2), cache_id, self._row(), layers

    def _pull_blocks(self) -> tuple[Any, ...]:
        cache_id, layers = self._mine(blocks=True)
        n = self._mostly(self.random.randrange(1, 5), 0)
        source = [self._mostly(self._row(), 2**32) for _ in range(n)]
        return self._key(2, 3), cache_id, source, [self._row() for _ in range(self._mostly(n, n + 1))], layers

    _push_blocks = _pull_blocks

    def _register(self) -> tuple[Any, ...]:
        shape = self._mostly([ROWS, WORDS], [ROWS, 0], [-1, 2], [ROWS])
        wanted = [self.random.random() > 0.03 for _ in range(self._mostly(TENSORS, TENSORS + 1, 0))]
        return shape, wanted, self.random.random() < 0.5

    def _allocate(self) -> tuple[Any, ...]:
        return self._mostly([ROWS, WORDS], [ROWS, 1 << 20], [0, 1]), self._mostly(TENSORS, 0)

    def _unregister(self) -> tuple[Any, ...]:
        return (self.random.choice([*self.ids[False][1:], *self.ids[True][1:], 99, -1]),)

    def _deallocate(self) -> tuple[Any, ...]:
        return (self.random.choice([*self.ids[False], 99, -1]),)

    def _copy_cache(self) -> tuple[Any, ...]:
        return (
            self._mine()[0],
            self._mine()[0],
            self._row(),
            self._row(),
            self._mostly(0, 8, 64, 2**63),
            self._mostly(-1, 4, 65, 0),
        )

    def _copy_blocks(self) -> tuple[Any, ...]:
        return self._mine(blocks=True)[0], {self._row(): self._row() for _ in range(self.random.randrange(4))}

    def _clusters(self) -> list[tuple[int, str | None, int]]:
        chosen = self.random.sample([PEER, TWIN], self._mostly(1, 2, 0)) + self._mostly([], [NOBODY])
        return [(one, self._mostly(LOOPBACK, None), self.ports[one]) for one in chosen]

    def _link(self) -> tuple[Any, ...]:
        return self._clusters(), self._mostly(5000, 0, -1)

    def _unlink(self) -> tuple[Any, ...]:
        return self._clusters(), self._mostly(5000, 0), self.random.choice([True, False])

    def _set_role(self) -> tuple[Any, ...]:
        return self.random.choice([1, 2, 3]), self.random.choice([None, "own", "taken"])


def test_a_block_that_is_not_there_is_refused_also_where_another_overwrites_it(
    start_here: Callable[..., Side],
    start_there: Callable[..., Peer],
    doors: Callable[..., Door],
    transports: dict[str, Any],
) -> None:
    there = start_there(PEER, enable_remote_cache_accessible=True)
    assert there.call("register", (ROWS, WORDS), blocks=True, model=1) == 1
    side, door = start_here(1, enable_remote_cache_accessible=True, **transports), doors(2, **transports["ge_options"])
    both = Python(side), Cpp(door)
    array = np.zeros((TENSORS, ROWS, WORDS), np.float32)
    for one in both:
        assert one.link([(PEER, LOOPBACK, there.call("where"))], 5000)[0] == 0
        assert one.register([ROWS, WORDS], [tensor.ctypes.data for tensor in array], True) == (0, 1)
        for source, into in (
            ([ROWS, 1], [5, 5]),
            ([1, 1], [ROWS, ROWS]),
            ([2**32 - 1, 1], [5, 5]),
            ([2**64 - 1, 1], [5, 5]),
        ):
            assert one.pull_blocks((PEER, 1, 0), 1, source, into, None) == S.LLM_PARAM_INVALID
            assert one.push_blocks((PEER, 1, 0), 1, source, into, None) == S.LLM_PARAM_INVALID
        assert one.pull_blocks((PEER, 1, 0), 1, [2, 1], [5, 5], None) == 0


def test_each_call_ends_its_own_kind_of_caches(start_here: Callable[..., Side], doors: Callable[..., Door]) -> None:
    both = (
        Python(start_here(1, enable_remote_cache_accessible=True, mem_pool_cfg=POOL)),
        Cpp(doors(2, llm__MemPoolConfig=POOL)),
    )
    memory = [np.zeros((ROWS, WORDS), np.float32) for _ in range(TENSORS)]
    for door in both:
        assert door.register([ROWS, WORDS], [array.ctypes.data for array in memory], False) == (0, 1)
        assert door.allocate([ROWS, WORDS], TENSORS) == (0, 2)
        assert [door.unregister(2), door.deallocate(1)] == [0, 0]  # to either it is an id that nobody has
        assert door.copy_cache(1, 2, 0, 1, 0, -1) == 0
        assert [door.unregister(1), door.deallocate(2)] == [0, 0]
        assert door.copy_cache(1, 1, 0, 1, 0, -1) == S.LLM_KV_CACHE_NOT_EXIST
        assert door.copy_cache(2, 2, 0, 1, 0, -1) == S.LLM_KV_CACHE_NOT_EXIST


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.deadline(120)
def test_both_doors_answer_alike(
    seed: int, start_here: Callable[..., Side], start_there: Callable[..., Peer], doors: Callable[..., Door]
) -> None:
    there = {who: start_there(who, enable_remote_cache_accessible=True) for who in (PEER, TWIN)}
    for peer in there.values():
        assert peer.call("register", (ROWS, WORDS)) == 1
        assert peer.call("register", (ROWS, WORDS), blocks=True, model=2) == 2
        assert peer.call("register", (ROWS, WORDS // 2), blocks=True, model=3) == 3
    ports = {who: peer.call("where") for who, peer in there.items()} | {NOBODY: free_port()}
    side = start_here(1, enable_remote_cache_accessible=True, mem_pool_cfg=POOL)
    both = Python(side), Cpp(doors(2, llm__MemPoolConfig=POOL))
    own = {1: f"{LOOPBACK}:{side.port}", 2: f"{LOOPBACK}:{both[1].door.port}"}
    calls, memory, seen = Calls(seed, ports), {1: [], 2: []}, set()  # type: ignore[var-annotated]

    def addresses(door: Python | Cpp, wanted: list[bool]) -> list[int]:
        start = np.arange(ROWS * WORDS, dtype=np.float32) + len(memory[door.cluster_id])
        arrays = [start.copy() for _ in wanted]
        memory[door.cluster_id] += arrays
        return [array.ctypes.data if one else 0 for array, one in zip(arrays, wanted, strict=True)]

    def told(door: Python | Cpp, name: str, arguments: tuple[Any, ...]) -> Any:
        first, *others = arguments
        if name == "register":
            others = [addresses(door, others[0]), others[1]]
        elif name == "set_role":
            others = [{"own": own[door.cluster_id], "taken": f"{LOOPBACK}:{ports[PEER]}", None: None}[others[0]]]
        elif isinstance(first, tuple) and first[0] == ITSELF:
            first = (door.cluster_id, *first[1:])
        return getattr(door, name)(first, *others)

    drawn: list[Any] = [("register", ([ROWS, WORDS], [True] * TENSORS, blocks)) for blocks in (False, True)]
    drawn += [("set_role", (1, "taken")), ("set_role", (1, None)), ("set_role", (1, "own"))]
    drawn.append(("link", ([(PEER, LOOPBACK, ports[PEER])], 5000)))
    for number in range(CALLS):
        name, arguments = drawn[number] if number < len(drawn) else calls.draw()
        answers = [told(door, name, arguments) for door in both]
        assert answers[0] == answers[1], f"call {number} of seed {seed}, {name}{arguments}: {answers}"
        status = answers[0][0] if isinstance(answers[0], tuple) else answers[0]
        seen.add(S(status))
        if name in ("register", "allocate") and status == 0 and number >= len(drawn):
            calls.ids[name == "register" and arguments[2]].append(answers[0][1])
        for mine, far in zip(memory[1], memory[2], strict=True):
            assert (mine == far).all(), f"call {number} of seed {seed}, {name}{arguments}: other bytes"
    assert seen == SEEN
