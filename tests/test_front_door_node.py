"""A node and its caches: registering, views, lifetimes, and what must not happen at import, at exit and after fork."""

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry import BlocksKey, PrefixKey, RequestKey


@pytest.fixture
def node() -> Iterator[kvferry.Node]:
    with kvferry.Node(pool=8 << 20) as made:
        yield made


def kv(tensors: int = 4, blocks: int = 6) -> list[Any]:
    return [np.full((blocks, 4, 8), number, np.float32) for number in range(tensors)]


def python(program: str, timeout: float = 30.0, stack_kib: int = 0) -> "subprocess.CompletedProcess[str]":
    """Runs a program of its own; its status, what it printed, what it complained about. ``stack_kib``: of its threads."""
    no_word_of_forks = ["-W", "ignore:This process:DeprecationWarning"]  # beside threads: since Python 3.12
    command = [sys.executable, *no_word_of_forks, "-c", dedent(program)]
    if stack_kib:
        few_arenas = "MALLOC_ARENA_MAX=1"  # they take address space as well
        command = ["sh", "-c", f'ulimit -s {stack_kib} && exec env {few_arenas} "$@"', "sh", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def log_threads() -> int:
    """Nodes of this process that are open, or not quite closed."""
    return sum(thread.name == "kvferry-log" for thread in threading.enumerate())


def ended_well(program: str, stack_kib: int = 0) -> str:
    done = python(program, stack_kib=stack_kib)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


# --- import --------------------------------------------------------------------------------------------------------


def test_importing_is_light() -> None:
    ended_well("""
        import sys, threading
        import kvferry
        heavy = {"torch", "asyncio", "argparse"} & set(sys.modules)
        assert not heavy, heavy
        assert threading.active_count() == 1
    """)


def test_without_a_descriptor_left_the_errors_are_still_kvferrys_own() -> None:
    ended_well("""
        import asyncio, os, resource, sys
        import numpy as np
        import kvferry

        class Dlpack:
            def __init__(self, array): self.array = array
            def __dlpack__(self, **words): return self.array.__dlpack__(**words)
            def __dlpack_device__(self): return self.array.__dlpack_device__()

        kv = [np.zeros((4, 8), np.float32) for _ in range(2)]
        far, near = kvferry.Node(listen="127.0.0.1:0"), kvferry.Node()
        link = near.link(far.address)
        far.register_addresses("kv", [array.ctypes.data for array in kv], unit_bytes=32, count=4)

        def take_all():
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            try:
                while True:
                    os.open("/dev/null", os.O_RDONLY)
            except OSError:
                pass

        async def main():
            take_all()
            mine = near.register("mine", [kv[0].copy(), Dlpack(kv[1].copy())])
            for call in (kvferry.Node, lambda: link.pull("kv", into=mine), mine.numpy):
                try:
                    call()
                except kvferry.KvferryError:
                    pass
            try:
                await link.pull_async("kv", into=mine)
            except kvferry.KvferryError:
                pass

        asyncio.run(main())
    """)


def test_without_threads_to_be_had_the_errors_are_kvferrys_own_and_nothing_is_left_behind() -> None:
    """However many there are: stacks of 256 MiB each, and address space for so many of them."""
    ended_well(
        """
        import gc, mmap, os, resource, signal, tempfile
        import numpy as np
        import kvferry

        STACK = 256 << 20
        assert resource.getrlimit(resource.RLIMIT_STACK)[0] == STACK

        def room_for(threads):
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + threads * STACK + STACK // 2, resource.RLIM_INFINITY))

        def left():
            gc.collect()
            return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), signal.pthread_sigmask(signal.SIG_BLOCK, [])

        def missing(call):
            try:
                call()
            except kvferry.Busy as error:
                assert str(error).startswith("out of threads: kvferry-") and "ulimit -u" in str(error), error
                return str(error).split()[3].removeprefix("kvferry-").rstrip("01")

        kvferry.Node(copy_threads=2).close()
        before = left()
        seen = set()
        for threads in range(5):  # a stack that is left over from a thread before may do for one more
            room_for(threads)
            seen.add(missing(lambda: kvferry.Node(listen="127.0.0.1:0", copy_threads=2, pool=1 << 20).close()))
            assert left() == before, (left(), before)
        assert seen >= {"copy", "control", "log"}, seen
        room_for(8)
        with kvferry.Node(listen="127.0.0.1:0", copy_threads=2) as far, kvferry.Node(copy_threads=2) as near:
            kv = far.register("kv", np.ones((4, 16), np.uint8))
            mine = near.register("mine", np.zeros((4, 16), np.uint8))
            with tempfile.TemporaryFile() as file:
                os.ftruncate(file.fileno(), 4096)
                of_file = near.register("of file", np.frombuffer(mmap.mmap(file.fileno(), 4096), np.uint8)[:64].reshape(4, 16))
            room_for(0)
            before = left()
            assert missing(lambda: near.link("no-such-host.invalid:1")) == "lookup"
            link = near.link(far.address)
            assert link.pull_async("kv", into=mine).wait().size_bytes == 64
            assert missing(lambda: link.pull_async("kv", into=of_file).wait()) == "apart"
            assert link.push(mine, to="kv").size_bytes == 64
            room_for(1)
            assert link.pull_async("kv", into=of_file).wait().size_bytes == 64
            link.close()
        """,
        stack_kib=256 << 10,
    )


def test_everything_promised_is_there() -> None:
    for name in kvferry.__all__:
        assert name == "MEMORY" or getattr(kvferry, name).__name__ == name


# --- registering ---------------------------------------------------------------------------------------------------


def test_a_registered_cache_knows_its_shape(node: kvferry.Node) -> None:
    arrays = kv()
    cache = node.register("kv", arrays, layout="blocks")
    assert (cache.name, cache.layout, cache.kind, cache.allocated) == ("kv", "blocks", "host", False)
    assert (cache.tensors, cache.count, cache.unit_bytes) == (4, 6, 128)
    assert (cache.shape, cache.dtype) == ((6, 4, 8), "float32")
    assert cache.addresses == tuple(array.ctypes.data for array in arrays)
    assert node.caches == [cache]
    assert node.cache(cache.id) is cache
    assert all(mine is given for mine, given in zip(cache.numpy(), arrays, strict=True))
    with pytest.raises(AttributeError):
        cache.id = 7  # type: ignore[misc]


def test_ids_are_never_used_again(node: kvferry.Node) -> None:
    first = node.register("a", kv())
    assert node.unregister(first)
    second = node.register("a", kv())
    assert second.id > first.id
    assert not node.unregister(first)
    assert node.caches == [second]
    with pytest.raises(kvferry.CacheNotFound, match=f"cache {first.id} is not registered"):
        node.cache(first)


def test_a_name_is_taken_once(node: kvferry.Node) -> None:
    with node.register("kv", kv()) as cache:
        with pytest.raises(kvferry.AlreadyExists):
            node.register("kv", kv())
        assert node.caches == [cache]
    node.register("kv", kv())
    assert [node.register("", kv()).name for _ in range(2)] == ["", ""]  # no name is nobody's


def test_one_array_is_a_cache_of_one_tensor(node: kvferry.Node) -> None:
    assert node.register("one", kv(1)[0], layout="rows").tensors == 1


def test_registering_does_not_touch_the_memory(node: kvferry.Node) -> None:
    cache = node.register_addresses("nowhere", [1, 4097], unit_bytes=64, count=4, stride_bytes=128)
    assert (cache.tensors, cache.shape, cache.dtype, cache.addresses) == (2, (4, 64), "uint8", (1, 4097))


def test_addresses_of_real_memory_give_views(node: kvferry.Node) -> None:
    array = np.arange(64, dtype=np.uint8).reshape(4, 16)
    cache = node.register_addresses("raw", [array.ctypes.data], unit_bytes=8, count=4, stride_bytes=16)
    np.testing.assert_array_equal(cache.numpy(0), array[:, :8])
    np.testing.assert_array_equal(cache.numpy()[0], array[:, :8])
    with pytest.raises(kvferry.InvalidArgument, match="no tensor 1"):
        cache.numpy(1)


def test_other_kinds_of_memory_are_refused_by_name(node: kvferry.Node) -> None:
    with pytest.raises(kvferry.Unsupported, match="cuda:0"):
        node.register_addresses("gpu", [4096], unit_bytes=64, count=4, kind="cuda:0")
    assert node.caches == []


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda node: node.register("kv", kv(), layout="columns"), "layout='columns' is none of 'rows', 'blocks'"),
        (lambda node: node.register("kv", kv(), keys=["kv"]), "'kv' is no key"),
        (lambda node: node.register("kv", []), "at least one tensor"),
        (lambda node: node.register_addresses("kv", [], unit_bytes=8, count=1), "at least one address"),
        (lambda node: node.register_addresses("kv", [64], unit_bytes=8, count=1, stride_bytes=4), ""),
        (lambda node: node.allocate("kv", tensors=1, shape=(), dtype="float32"), "dim 0"),
        (lambda node: node.unregister("kv"), "'kv' is no cache of this node"),
        (lambda node: node.register("kv", kv()).window(), "give one of the two"),
        (lambda node: node.register("kv", kv()).window(blocks=[0.5]), "of type float"),
        (lambda node: node.register("kv", kv()).window(blocks=[3, 1, 3]), "lists 3 twice"),
        (lambda node: node.register("kv", kv()).window(blocks=[0], access="rw"), "'read', 'write'"),
        (lambda node: node.register("kv", kv()).window(blocks=[6]), ""),
        (lambda node: kvferry.Node(listen="7000"), "host:port"),
        (lambda node: kvferry.Node(attach="all"), "'same', 'any'"),
        (lambda node: kvferry.Node(secret=""), "non-empty"),
    ],
)
def test_misuse_is_an_invalid_argument(node: kvferry.Node, call: Any, sentence: str) -> None:
    with pytest.raises(kvferry.InvalidArgument) as caught:
        call(node)
    assert sentence in str(caught.value)


def test_keys_are_given_per_row_or_for_the_blocks(node: kvferry.Node) -> None:
    node.register("rows", kv(2), layout="rows", keys=[RequestKey(1), None, PrefixKey(9, model_id=2)])
    node.register("blocks", kv(2), keys=BlocksKey(3))
    node.register("more", kv(2), keys=[BlocksKey(4)])
    with pytest.raises(kvferry.InvalidArgument):
        node.allocate("full", tensors=1, shape=(1, 8), dtype="int8", layout="rows", keys=[RequestKey(1), RequestKey(2)])


# --- memory of the pool --------------------------------------------------------------------------------------------


def test_allocated_memory_is_seen_by_numpy(node: kvferry.Node) -> None:
    cache = node.allocate("kv", tensors=2, shape=(4, 16), dtype="bfloat16")
    assert (cache.allocated, cache.unit_bytes, cache.dtype, cache.shape) == (True, 32, "bfloat16", (4, 16))
    first, second = cache.numpy()
    assert first.dtype == np.uint16
    first[:] = 7
    assert cache.numpy(0).sum() == 7 * 64
    assert second.ctypes.data == cache.addresses[1]


def test_a_view_of_allocated_memory_outlives_cache_and_node() -> None:
    with kvferry.Node(pool=1 << 20) as node:
        seen = node.allocate("kv", tensors=1, shape=(4, 4096), dtype=np.uint8).numpy(0)
        seen[:] = 5
    assert seen.shape == (4, 4096)
    seen.sum()  # no crash; what it holds now is nobody's promise


def test_a_pool_has_an_end(node: kvferry.Node) -> None:
    before = node.statistics().pool_used_bytes
    with pytest.raises(kvferry.OutOfMemory):
        node.allocate("big", tensors=3, shape=(1, 4 << 20), dtype="int8")
    assert node.statistics().pool_used_bytes == before
    cache = node.allocate("small", tensors=1, shape=(1, 1 << 20), dtype="int8")
    assert node.deallocate(cache)
    assert not node.deallocate(cache)
    assert node.statistics().pool_used_bytes == before


def test_without_a_pool_nothing_is_allocated() -> None:
    with kvferry.Node() as node, pytest.raises(kvferry.Unsupported):
        node.allocate("kv", tensors=1, shape=(1, 8), dtype="int8")


def test_a_bound_request_key_can_be_removed(node: kvferry.Node) -> None:
    node.allocate("rows", tensors=1, shape=(2, 8), dtype="int8", layout="rows", keys=[RequestKey(1)])
    assert node.remove_key(RequestKey(1))
    assert not node.remove_key(RequestKey(1))


# --- copies within a node ------------------------------------------------------------------------------------------


def test_copies_between_and_within_caches(node: kvferry.Node) -> None:
    source, target = kv(2), [np.zeros((6, 4, 8), np.float32) for _ in range(2)]
    for number, array in enumerate(source):
        array[:] = np.arange(6).reshape(6, 1, 1) + 10 * number
    a, b = node.register("a", source, layout="mixed"), node.register("b", target, layout="mixed")
    done = node.copy(a, b, blocks={1: 5, 2: 4})
    assert done.size_bytes == 2 * 2 * 128
    assert done.transport == "local"
    assert (target[0][5] == 1).all()
    assert (target[1][4] == 12).all()
    assert (target[0][:4] == 0).all()
    node.copy(b, b, blocks=([5, 0], [0, 1]))  # in this order: 5 to 0, then 0 to 1
    assert (target[0][1] == 1).all()
    node.copy(a, b, row=3, size_bytes=64)
    assert (target[0][3, :2] == 0).all()
    node.copy(a, b, layers=range(1), source_layers=range(1, 2), tensors_per_layer=1, blocks={3: 2})
    assert (target[0][2] == 13).all()
    assert (target[1][2] == 0).all()


def test_a_copy_with_memory_that_is_not_registered(node: kvferry.Node) -> None:
    cache = node.register("kv", kv(2))
    bare = [np.ones((2, 4, 8), np.float32) for _ in range(2)]
    there = kvferry.Addresses([array.ctypes.data for array in bare])
    node.copy(there, cache, blocks={1: 3})
    assert (cache.numpy(1)[3] == 1).all()
    cache.numpy(0)[5] = 7
    node.copy(cache, there, blocks={5: 0})
    assert (bare[0][0] == 7).all() and (bare[0][1] == 1).all()
    # One for each tensor moved, whichever layers of the cache those are.
    one = kvferry.Addresses([bare[0].ctypes.data])
    node.copy(one, cache, layers=range(1, 2), tensors_per_layer=1, blocks={0: 2})
    assert (cache.numpy(1)[2] == 7).all()
    cache.numpy(1)[3] = 9
    node.copy(cache, one, layers=range(1, 2), tensors_per_layer=1, blocks={3: 1})
    assert (bare[0][1] == 9).all()
    with pytest.raises(kvferry.InvalidArgument, match="between its caches"):
        node.copy(there, there, blocks={0: 0})


def test_a_row_is_copied_from_an_offset_on(node: kvferry.Node) -> None:
    source, target = np.arange(24, dtype=np.uint8).reshape(2, 12), np.zeros((2, 12), np.uint8)
    a, b = node.register("a", source, layout="rows"), node.register("b", target, layout="rows")
    node.copy(a, b, row=0, source_row=1, offset_bytes=4, size_bytes=2)
    assert target[0].tolist() == [0] * 4 + [16, 17] + [0] * 6
    with pytest.raises(kvferry.InvalidArgument, match="do not fit"):
        node.copy(a, b, row=0, offset_bytes=4, size_bytes=9)


# --- life ----------------------------------------------------------------------------------------------------------


def test_registered_memory_lives_as_long_as_it_is_registered(node: kvferry.Node) -> None:
    array = kv(1)[0]
    gone = weakref.ref(array)
    cache_id = node.register("kv", array).id
    del array
    gc.collect()
    assert gone() is not None
    node.unregister(cache_id)
    gc.collect()
    assert gone() is None


def test_closing_twice_is_fine_and_ends_everything() -> None:
    node = kvferry.Node(listen="127.0.0.1:0")
    address = node.address
    assert address is not None
    cache = node.register("kv", kv())
    array = weakref.ref(cache.numpy(0))
    node.close()
    node.close()
    assert node.closed
    assert node.address is None
    assert node.caches == []
    with pytest.raises(kvferry.NodeClosed):
        node.register("kv", kv())
    with pytest.raises(kvferry.NodeClosed):
        node.link(address)
    del cache
    gc.collect()
    assert array() is None
    kvferry.Node(listen=address).close()  # the port is free


def test_a_node_that_is_dropped_closes() -> None:
    before = log_threads()
    node = kvferry.Node(listen="127.0.0.1:0")
    address = node.address
    assert address is not None
    node.register("kv", kv())
    window = node.caches[0].window(blocks=[0])
    dropped = weakref.ref(node)
    gc.disable()  # not when the collector comes, but at once
    try:
        del node
        assert dropped() is None
    finally:
        gc.enable()
    assert not window.close()
    assert log_threads() <= before
    with kvferry.Node() as other, pytest.raises(kvferry.LinkFailed):
        other.link(address, timeout_ms=500)


def test_a_cache_keeps_its_node_and_its_node_makes_it_anew_when_nobody_held_it(node: kvferry.Node) -> None:
    held = kvferry.Node().register("held", kv())
    with held.window(blocks=[0]):
        assert held.numpy(3).min() == 3
    assert held.unregister()
    arrays, first = kv(), node.register("first", kv()).id
    second = node.register("second", arrays)
    assert node.cache(second) is second
    assert [(cache.id, cache.name) for cache in node.caches] == [(first, "first"), (second.id, "second")]
    number = second.id
    del second
    again = node.cache(number)
    assert (again.name, again.shape, again.addresses[0]) == ("second", (6, 4, 8), arrays[0].ctypes.data)
    assert again.numpy(0) is arrays[0]
    assert again.unregister()
    assert [cache.id for cache in node.caches] == [first]


def test_a_taken_port_leaves_nothing_behind() -> None:
    before = log_threads()
    with kvferry.Node(listen="127.0.0.1:0") as node:
        with pytest.raises(kvferry.AddressInUse):
            kvferry.Node(listen=node.address)
        node.stop_listening()
        assert node.address is None
        assert node.listen("127.0.0.1:0").startswith("127.0.0.1:")
    assert log_threads() <= before


def test_a_node_says_what_it_holds(node: kvferry.Node) -> None:
    node.register("kv", kv()).window(blocks=[0, 1])
    statistics = node.statistics()
    assert (statistics.node_id, statistics.caches, statistics.windows, statistics.links) == (node.node_id, 1, 1, 0)
    assert statistics.pool_bytes == 8 << 20
    assert 1 <= statistics.threads <= 10
    assert "Node" in repr(node)


def test_leaving_the_interpreter_with_an_open_node_is_clean() -> None:
    ended_well("""
        import numpy, kvferry
        node = kvferry.Node(listen="127.0.0.1:0", pool=1 << 20)
        other = kvferry.Node()
        link = other.link(node.address)
        node.register("kv", numpy.zeros((4, 4)))
        node.allocate("mine", tensors=1, shape=(4, 64), dtype="int8").numpy(0)[:] = 1
    """)


def test_a_forked_child_sees_a_closed_node_and_the_parent_goes_on() -> None:
    printed = ended_well("""
        import os, numpy, kvferry
        arrays = [numpy.arange(64, dtype=numpy.float32).reshape(4, 16)]
        node = kvferry.Node(listen="127.0.0.1:0")
        node.register("kv", arrays)
        other = kvferry.Node()
        mine = other.register("mine", [numpy.zeros((4, 16), numpy.float32)])
        link = other.link(node.address)
        child = os.fork()
        if child == 0:
            try:
                assert node.closed and other.closed
                try:
                    link.pull("kv", into=mine, blocks={0: 0})
                except kvferry.NodeClosed:
                    node.close()
                    with kvferry.Node(listen="127.0.0.1:0") as own:   # a child may have a node of its own
                        own.register("kv", arrays)
                    os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert link.pull("kv", into=mine, blocks={3: 0}).size_bytes == 64
        assert (mine.numpy(0)[0] == arrays[0][3]).all()
        print("well")
    """)
    assert printed == "well\n"


def test_a_forked_child_that_leaves_as_a_program_does_is_clean() -> None:
    ended_well("""
        import os, sys, kvferry
        node = kvferry.Node(listen="127.0.0.1:0")
        child = os.fork()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert not node.closed
    """)


# --- the log -------------------------------------------------------------------------------------------------------

LINK_AND_LOSE = """
    import kvferry
    with kvferry.Node(listen="127.0.0.1:0") as node, kvferry.Node() as other:
        link = other.link(node.address)
        link.unlink(force=True)
"""


def test_the_log_is_silent_by_default() -> None:
    assert ended_well(LINK_AND_LOSE) == ""


def test_the_log_tells_of_links_to_those_who_listen() -> None:
    done = python("    import logging; logging.basicConfig(level=logging.INFO)\n" + LINK_AND_LOSE)
    assert done.returncode == 0, done
    assert "INFO:kvferry.link:" in done.stderr
    assert done.stdout == ""


def test_the_log_tells_of_a_peer_with_another_secret() -> None:
    done = python("""
        import logging; logging.basicConfig(level=logging.WARNING)
        import kvferry
        with kvferry.Node(listen="127.0.0.1:0", secret="one") as node, kvferry.Node(secret="two") as other:
            try:
                other.link(node.address)
            except kvferry.Refused:
                pass
            with kvferry.Node(secret="one") as third:  # its hello comes after the other one's end
                third.link(node.address)
    """)
    assert done.returncode == 0, done
    assert "WARNING:kvferry.link:a link was refused" in done.stderr and "another secret" in done.stderr


# --- torch ---------------------------------------------------------------------------------------------------------


@pytest.mark.torch
def test_torch_tensors_come_back_as_they_went(node: kvferry.Node) -> None:
    import torch

    tensors = [torch.zeros(4, 8, dtype=torch.bfloat16) for _ in range(2)]
    cache = node.register("kv", tensors)
    assert cache.torch(0) is tensors[0]
    assert cache.torch()[1] is tensors[1]
    assert cache.numpy(0).dtype == np.uint16
    tensors[0][1, 0] = 1.0
    assert cache.numpy(0)[1, 0] == 0x3F80


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16", "float32", "int64", "bool", "uint8"])
def test_allocated_memory_is_seen_by_torch_in_its_own_type(node: kvferry.Node, dtype: str) -> None:
    import torch

    cache = node.allocate("kv", tensors=1, shape=(4, 8), dtype=dtype)
    tensor = cache.torch(0)
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.data_ptr() == cache.addresses[0]
    tensor[2] = 1
    assert cache.numpy(0)[2].any()
    assert not cache.numpy(0)[1].any()


@pytest.mark.torch
def test_numpy_memory_is_seen_by_torch_with_its_strides(node: kvferry.Node) -> None:
    array = np.arange(32, dtype=np.float32).reshape(4, 8)
    tensor = node.register("kv", array[:, :4]).torch(0)
    assert tensor.stride() == (8, 1)
    assert tensor[3, 0] == 24


def test_without_torch_everything_else_works() -> None:
    ended_well("""
        import sys
        sys.modules["torch"] = None
        import numpy, kvferry
        with kvferry.Node() as node:
            cache = node.register("kv", numpy.zeros((2, 2)))
            cache.numpy()
            try:
                cache.torch()
            except ModuleNotFoundError:
                pass
    """)


def test_more_tensors_than_the_pool_has_pages_do_not_fit() -> None:
    with kvferry.Node(pool=1 << 20) as node, pytest.raises(kvferry.OutOfMemory, match="tensors do not fit"):
        node.allocate("kv", tensors=2**31, shape=(2, 4), dtype="float32")
