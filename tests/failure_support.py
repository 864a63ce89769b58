"""What the tests of failing peers share: sides that do what a test says, and a look at their memory from outside.

A `Ferry` is two real processes and one transfer between them that is large enough to be stopped in its middle. The bytes
are judged by the test's own process, which reads the memory of both sides whether they run, stand still or hang.
"""

import contextlib
import ctypes
import gc
import mmap
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import kvferry
from kvferry import _core
from support import Peer, Pending

Peers = Callable[..., Peer]
Words = npt.NDArray[np.uint64]

TRANSPORTS = ("map", "cma", "socket")
WHERE = {"map": "allocated", "cma": "registered", "socket": "registered"}
BLOCK_BYTES = 1 << 10
MOVED = 24 << 10  # blocks: 24 MiB so finely scattered that they take several milliseconds by any transport
NEW, OLD, REFILL = 1 << 32, 2 << 32, 3 << 32  # what a word says beside the number of its block
PATIENCE_S = 15.0
SETTLE_S = 0.07  # long after anything that was still under way would have come

seed = int(os.environ.get("KVFERRY_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)


def dice() -> random.Random:
    """A source of chance; its seed is printed (and seen when the test fails), ``KVFERRY_TEST_SEED`` repeats it."""
    print(f"KVFERRY_TEST_SEED={seed}")
    return random.Random(seed)


# --- in the peer ------------------------------------------------------------------------------------------------------


class Side:
    """A node in a peer, and the verbs that a test calls by name. ``options`` are the node's."""

    def __init__(self, options: "dict[str, Any] | None" = None) -> None:
        options = {"listen": "127.0.0.1:0", "copy_threads": 1} | (options or {})
        self.node = kvferry.Node(**options)
        self.caches: dict[str, Any] = {}
        self.arrays: dict[str, list[Words]] = {}
        self.links: list[Any] = []
        self.prepared: Any = None
        self.windows: dict[bytes, Any] = {}

    def address(self) -> "str | None":
        return self.node.address

    def node_id(self) -> int:
        return self.node.node_id

    def cache(self, name: str, where: str, blocks: int, block_bytes: int, value: int, tensors: int = 1) -> "list[int]":
        """Makes a cache whose every word says ``value`` and the number of its block; the tensors' addresses. One of that name
        that there was is ended."""
        if name in self.caches:
            self.unregister_and_free(name)
        shape = (blocks, block_bytes // 8)
        if where == "allocated":
            cache = self.node.allocate(name, tensors=tensors, shape=shape, dtype="uint64")
            self.arrays[name] = cache.numpy()
        else:
            self.arrays[name] = [mapped(shape) for _ in range(tensors)]
            cache = self.node.register(name, self.arrays[name])
        self.caches[name] = cache
        self.fill(name, value)
        return list(cache.addresses)

    def fill(self, name: str, value: int) -> None:
        for array in self.arrays[name]:
            array[:] = words(value, len(array))

    def link(self, address: str, timeout_ms: int = 3000) -> None:
        self.links.append(self.node.link(address, timeout_ms))

    def _link(self) -> Any:
        live = [link for link in self.links if link.alive] or self.node.links or self.links
        if not live:
            raise kvferry.NotLinked("the peer has dropped the link that it had opened")
        return live[-1]

    def _call(self, verb: str, far: Any, mine: str, **more: Any) -> Any:
        """A verb of the link, "pull_async" say, between a cache of the other side and one of this."""
        cache, call = self.caches[mine], getattr(self._link(), verb)
        return call(far, into=cache, **more) if verb.startswith("pull") else call(cache, to=far, **more)

    def interrupt(
        self,
        verb: str,
        far: Any,
        mine: str,
        blocks: Any,
        after_s: float,
        timeout_ms: int,
        transport: str,
        then_fill: Any,
    ) -> str:
        """Starts to move, cancels it ``after_s`` later unless its deadline comes first, and fills a cache as soon as it has
        ended. How it ended."""
        more = {"blocks": blocks, "timeout_ms": timeout_ms, "transport": transport}
        moving = self._call(f"{verb}_async", far, mine, **more)
        with contextlib.suppress(kvferry.DeadlineExceeded):
            time.sleep(after_s)
            moving.cancel()
        try:
            moving.wait()
            how = "arrived"
        except kvferry.KvferryError as error:
            how = f"{error.kind}{' touched' if error.bytes_touched else ''}{' settled' if error.destination_settled else ''}"
        self._then(then_fill)
        return how

    def move(self, verb: str, far: Any, mine: str, blocks: Any, until: float, transport: "str | None") -> Any:
        """Pulls or pushes by the core's threads; the size and the transport used. ``until``: of the clock of all processes."""
        more = {"blocks": blocks, "timeout_ms": left_ms(until), "transport": transport}
        return plain(self._call(f"{verb}_async", far, mine, **more).wait())

    def move_here(self, verb: str, far: Any, mine: str, blocks: Any, until: float, transport: "str | None") -> Any:
        """The same, on this very thread."""
        more = {"blocks": blocks, "timeout_ms": left_ms(until), "transport": transport}
        return plain(self._call(verb, far, mine, **more))

    def prepare(self, source: Any, into: Any, blocks: Any, transport: "str | None") -> None:
        self.prepared = self._link().prepare_pull(source, into=self.caches[into], blocks=blocks, transport=transport)

    def run_prepared(self, timeout_ms: int) -> Any:
        return plain(self.prepared.run(timeout_ms))

    def cache_id(self, name: str) -> int:
        return int(self.caches[name].id)

    def unregister(self, name: str, then_fill: Any = None) -> bool:
        found = self.node.unregister(self.caches[name])
        return bool(found) and self._then(then_fill)

    def unregister_and_fill(self, name: str, value: int) -> bool:
        return self.unregister(name, (name, value))

    def unregister_and_free(self, name: str) -> None:
        """The memory itself goes back to the kernel (or to the pool)."""
        self.node.unregister(self.caches.pop(name))
        del self.arrays[name]

    def open_window(self, name: str, blocks: "Sequence[int]", access: str, ttl_ms: int = 60_000) -> bytes:
        window = self.caches[name].window(blocks=blocks, access=access, ttl_ms=ttl_ms)
        self.windows[window.name] = window
        return bytes(window.name)

    def close_window(self, window: bytes, then_fill: Any = None) -> bool:
        closed = self.windows[window].close()
        return bool(closed) and self._then(then_fill)

    def close_window_and_fill(self, window: bytes, name: str, value: int) -> bool:
        return self.close_window(window, (name, value))

    def _then(self, fill: Any) -> bool:
        if fill:
            self.fill(*fill)
        return True

    def alive(self) -> "list[bool]":
        return [link.alive for link in self.links[-1:] or self.node.links]

    def statistics(self) -> "dict[str, Any]":
        found = self._link().statistics()
        return {name: getattr(found, name) for name in found.__slots__} | {"transports": dict(found.transports)}

    def close(self) -> None:
        self.node.close()

    def close_and_fill(self, name: str, value: int) -> None:
        self.node.close()
        self.fill(name, value)

    def begin_layers(self, to: Any, mine: str, blocks: Any, timeout_ms: int, transport: str) -> None:
        more = {"tensors_per_layer": 1, "timeout_ms": timeout_ms, "transport": transport}
        self.layers = self._link().push_layers(self.caches[mine], to=to, blocks=blocks, **more)

    def layer_ready(self, layer: int) -> None:
        self.layers.layer_ready(layer)

    def end_layers(self) -> Any:
        return plain(self.layers.wait(5000))

    def unlink_by_force(self) -> None:
        self._link().unlink(force=True)

    def leave_flying(self, verb: str, far: str, mine: str, count: int) -> None:
        """Starts transfers and forgets them."""
        for _ in range(count):
            self._call(f"{verb}_async", far, mine, timeout_ms=60_000, transport="socket")

    def peer_ids(self) -> "list[int]":
        return [link.peer_id for link in self.node.links]

    def push_over(self, number: int, mine: str, to: str) -> Any:
        return plain(self.node.links[number].push(self.caches[mine], to=to, timeout_ms=5000))

    def statistics_of_node(self) -> "dict[str, int]":
        found = self.node.statistics()
        return {name: getattr(found, name) for name in found.__slots__}

    def threads(self) -> int:
        """Those of the core."""
        names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
        return sum(name.startswith("kvferry") for name in names)

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def limit_descriptors(self, most: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def cpu_seconds(self) -> float:
        return time.process_time()

    def left_behind(self) -> "dict[str, int]":
        """What grows when something is forgotten."""
        gc.collect()
        mappings = len(Path("/proc/self/maps").read_text().splitlines())
        node = self.statistics_of_node()
        counted = {name: node[name] for name in ("slots_open", "windows", "caches", "links", "pool_used_bytes")}
        threads = len(os.listdir("/proc/self/task"))
        return counted | {"descriptors": self.descriptors(), "threads": threads, "mappings": mappings}

    def first_words(self, name: str) -> "list[int]":
        return [int(word) for word in self.arrays[name][0][:, 0]]

    def fork_one_that_lives_on(self) -> None:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)

    def become(self, places: "list[tuple[int, int]]") -> None:
        """Another program, which has bytes of its own where this one had its cache and its identity."""
        os.execv(sys.executable, [sys.executable, "-S", "-c", OTHER_PROGRAM, repr(places)])

    def prctl(self, option: int, value: int) -> int:
        return int(ctypes.CDLL(None).prctl(option, value, 0, 0, 0))


OTHER_PROGRAM = """
import ctypes, sys, time
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
for address, size in reversed(eval(sys.argv[1])):
    assert libc.mmap(address, size, 3, 0x32, -1, 0) == address  # private, anonymous, at that very address
    ctypes.memset(address, 0xEE, size)
time.sleep(60)
"""


class RacingPuller(Side):
    """Pulls as fast as it can, and looks at what it got."""

    def pull_until_it_ends(self, blocks: Any, transport: str) -> "tuple[int, str, str]":
        cache, array, wanted = self.caches["destination"], self.arrays["destination"][0], words(NEW, len(blocks[0]))
        for count in range(1 << 30):
            try:
                self._link().pull("source", into=cache, blocks=blocks, timeout_ms=5000, transport=transport)
            except kvferry.KvferryError as error:
                return count, type(error).__name__, str(error)
            if not (array[1::2] == wanted).all():
                return count, "wrong bytes", str(array[1::2, 0])
        raise AssertionError


def mapped(shape: "tuple[int, int]") -> Words:
    """Memory of its own, which goes back to the kernel as soon as nobody has it any more."""
    memory = mmap.mmap(-1, shape[0] * shape[1] * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.uint64).reshape(shape)


def left_ms(until: float) -> int:
    return max(0, int((until - time.monotonic()) * 1000))


def plain(done: Any) -> "tuple[int, str]":
    return done.size_bytes, done.transport


def words(value: int, blocks: int) -> Words:
    """What is in each block, as a column."""
    return (np.uint64(value) + np.arange(blocks, dtype=np.uint64)).reshape(blocks, 1)


# --- in the test ------------------------------------------------------------------------------------------------------


class Memory:
    """A tensor of ``blocks`` blocks in a process, read from outside."""

    def __init__(self, pid: int, address: int, blocks: int, block_bytes: int = BLOCK_BYTES) -> None:
        self.file = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
        self.address, self.blocks, self.block_bytes = address, blocks, block_bytes

    def __del__(self) -> None:
        os.close(self.file)

    def word(self, block: int) -> int:
        """The first word of a block."""
        return int.from_bytes(os.pread(self.file, 8, self.address + block * self.block_bytes), "little")

    def read(self) -> Words:
        out = np.empty((self.blocks, self.block_bytes // 8), np.uint64)
        step = (16 << 20) // self.block_bytes
        for at in range(0, self.blocks, step):
            part = out[at : at + step]
            assert os.preadv(self.file, [part], self.address + at * self.block_bytes) == part.nbytes
        return out


@dataclass(frozen=True)
class Case:
    """How a ferry goes: whose call it is, by what, who linked, and whether the call waits in the core or outside."""

    verb: str
    transport: str
    over: str = ""  # sockets: "tcp" as between hosts, or "unix" as between two processes of one host
    dialler: str = "actor"
    here: bool = True  # on the calling thread; else handed to the core's threads

    def __str__(self) -> str:
        return "-".join(filter(None, [self.verb, self.transport, self.over]))


CASES = (
    Case("pull", "map"),
    Case("pull", "cma", here=False),
    Case("pull", "socket", "tcp"),
    Case("pull", "socket", "unix", dialler="other", here=False),
    Case("push", "map", here=False),
    Case("push", "cma"),
    Case("push", "socket", "tcp", dialler="other", here=False),
    Case("push", "socket", "unix"),
)


FEW = tuple(case for case in CASES if case.over != "unix")  # where each test needs processes of its own


class Ferry:
    """A transfer from the blocks of "source" to the odd blocks of "destination", each a cache of a peer of its own.

    Whoever the verb belongs to acts; the destination's process is the one that copies, in a pull and in a push alike.
    """

    def __init__(
        self, peers: Peers, case: Case, *, moved: int = MOVED, block_bytes: int = BLOCK_BYTES, **options: Any
    ) -> None:
        self.case, self.moved, self.block_bytes = case, moved, block_bytes
        options = {"pool": moved * block_bytes + (1 << 20)} | options
        if case.over == "tcp":
            options["transports"] = ("socket",)
        self.source = peers("failure_support:Side", options, name="source")
        self.destination = peers("failure_support:Side", options, name="destination")
        pair = self.destination, self.source
        self.actor, self.other = pair if case.verb == "pull" else pair[::-1]
        self.blocks = (np.arange(moved), 2 * np.arange(moved) + 1)
        self.start_over()
        self.link()

    def start_over(self) -> None:
        """Both caches are new, and both processes run."""
        for peer in (self.source, self.destination):
            peer.cont()
        size = 2 * self.moved + 1, self.block_bytes
        self.source.call("cache", "source", WHERE[self.case.transport], self.moved, self.block_bytes, NEW)
        (at,) = self.destination.call("cache", "destination", "registered", *size, OLD)
        self.memory = Memory(self.destination.pid, at, *size)
        self.far: Any = "source" if self.case.verb == "pull" else "destination"

    def link(self) -> None:
        dialler, listener = (self.actor, self.other) if self.case.dialler == "actor" else (self.other, self.actor)
        dialler.call("link", listener.call("address"))
        until(lambda: any(listener.call("alive")), "the listener knows of the link")

    # --- acting

    def start(self, timeout_ms: int = 20_000) -> Pending:
        """The actor begins to move the bytes, on a thread of its own."""
        return self.actor.call_later(*self._words(timeout_ms), thread=True)

    def run(self, timeout_ms: int = 20_000) -> Any:
        return self.actor.call(*self._words(timeout_ms))

    def _words(self, timeout_ms: int) -> "tuple[Any, ...]":
        here = "move_here" if self.case.here else "move"
        mine = "destination" if self.case.verb == "pull" else "source"
        self.begun = time.monotonic()
        self.deadline = self.begun + timeout_ms / 1000
        return here, self.case.verb, self.far, mine, self.blocks, self.deadline, self.case.transport

    def stopped_in_the_middle(self, peer: Peer, timeout_ms: int = 20_000) -> Pending:
        """Starts a transfer and stops ``peer`` when the first bytes have come and the last eighth has not."""
        late = self.moved * 7 // 8  # well behind every piece in hand
        for _ in range(40):
            self.ended_before = self.copies_ended()
            moving = self.start(timeout_ms)
            until(lambda: self.memory.word(1) != OLD + 1 or moving.done(), "a first byte comes", pause_s=0)  # noqa: B023
            peer.stop()
            if self.memory.word(1) != OLD + 1 and self.memory.word(2 * late + 1) == OLD + 2 * late + 1:
                return moving
            peer.cont()  # too late, or (on a busy machine) the deadline passed before anything had begun
            with contextlib.suppress(kvferry.DeadlineExceeded):
                moving.result()
            self.refill(OLD)
        raise AssertionError("each transfer was over before it could be stopped")

    def too_late_s(self) -> float:
        """Seconds that the deadline of the last transfer is over."""
        return time.monotonic() - self.deadline

    def wait_past_the_deadline(self) -> None:
        time.sleep(max(0.0, 0.1 - self.too_late_s()))  # the core counts from its own beginning

    def wait_for_the_end_of_the_copy(self) -> None:
        """In the destination's process, of the transfer that was stopped."""
        until(lambda: self.copies_ended() > self.ended_before, "the copy has ended")

    def copies_ended(self) -> int:
        """How many transfers into the destination have ended, well or not."""
        found = self.destination.call("statistics")
        return int(found["pulls"]) + int(found["failures"])

    def refill(self, value: int = REFILL) -> None:
        self.destination.call("fill", "destination", value)

    # --- judging

    def nothing_outside_changed(self, value: int = OLD) -> Words:
        """The blocks that no span lies in are as they were. Returns the others."""
        found = self.memory.read()
        assert (found[::2] == words(value, 2 * self.moved + 1)[::2]).all()
        return found[1::2]

    def all_arrived(self) -> None:
        assert (self.nothing_outside_changed() == words(NEW, self.moved)).all()

    def nothing_changes(self, value: int = REFILL) -> None:
        """Neither has anything changed, nor does it later."""
        time.sleep(SETTLE_S)
        assert (self.memory.read() == words(value, 2 * self.moved + 1)).all()

    def has_ended_in_its_middle(self, moving: Pending) -> None:
        """Because what it went through has; from then on the blocks may be used for something else."""
        error = ended(moving, kvferry.CacheNotFound)
        assert error.bytes_touched and error.destination_settled
        self.nothing_outside_changed()
        self.refill()
        self.nothing_changes()

    def goes_on(self) -> None:
        """The next transfer works, over the link that there is."""
        self.refill(OLD)
        self.run()
        self.all_arrived()

    def lost(self, peer: Peer) -> bool:
        return not any(peer.call("alive"))


def kept(case: Case) -> Iterator[Ferry]:
    """A ferry for several tests in which nobody dies."""
    started: list[Peer] = []

    def peers(*arguments: Any, **keywords: Any) -> Peer:
        started.append(Peer(*arguments, **keywords))
        return started[-1]

    yield Ferry(peers, case)
    for peer in reversed(started):
        peer.close()


def outcome(pending: Pending, timeout: float = PATIENCE_S) -> "kvferry.KvferryError | None":
    """The error that a call has ended with; None if it ended well."""
    try:
        pending.result(timeout)
    except kvferry.KvferryError as error:
        return error
    return None


def ended(pending: Pending, kind: type, timeout: float = PATIENCE_S) -> Any:
    """The error of that kind with which a call has ended."""
    error = outcome(pending, timeout)
    assert error is not None, "it ended well"
    assert isinstance(error, kind), f"{type(error).__name__}: {error}"
    assert str(error)
    return error


def until(reached: Callable[[], bool], what: str, seconds: float = PATIENCE_S, pause_s: float = 0.002) -> float:
    """Waits; returns how long."""
    begun = time.monotonic()
    while not reached():
        assert time.monotonic() - begun < seconds, f"not within {seconds:g} s: {what}"
        time.sleep(pause_s)
    return time.monotonic() - begun


def hidden_cache(node: Any, name: str, blocks: int, block_bytes: int, tensors: int = 1, **more: Any) -> Any:
    """A cache of memory that only its copier can look at."""
    addresses = [_core.test_kind_allocate(blocks * block_bytes) for _ in range(tensors)]
    return node.register_addresses(name, addresses, unit_bytes=block_bytes, count=blocks, kind="test:0", **more)
