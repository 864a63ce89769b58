"""The C++ door, built against the installed package: the examples as programs, and the API called from Python.

`Door` is one instance of the C++ API; its methods answer statuses, and take the same plain values as `datadist_side.Side`.
"""

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from ports import LOOPBACK, free_port

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent.parent / "compat" / "llm_datadist" / "cpp" / "examples"
SCRIPTS = Path(sysconfig.get_path("scripts"))
DT_FLOAT, DT_INT32 = 0, 3
HOST, DEVICE = 0, 1
UNTOUCHED = 0xDEAD
BUILD_TIMEOUT_S = 300

Layers = tuple[int, int, int, int, int]  # source's first and last layer, destination's, tensors per layer


@cache
def folder(name: str) -> Path:
    """What ``kvferry include-dir`` and its like print."""
    command = [sys.executable, "-m", "kvferry.cli", name]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip())


@cache
def library() -> Path:
    return folder("cmake-dir").parent.parent / "kvferry" / "libllm_datadist.so"


def built_examples(package: Path, where: Path) -> Path:
    """The folder with the example programs, compiled in ``where`` from copies, against the package that lies at ``package``."""
    shutil.copytree(EXAMPLES, where / "examples")
    build = where / "build"
    tools = os.environ | {"PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"}
    for command in (
        ["cmake", "-S", where / "examples", "-B", build, "-G", "Ninja", f"-Dkvferry_DIR={package}"],
        ["cmake", "--build", build],
    ):
        answer = subprocess.run(
            command, env=tools, capture_output=True, text=True, check=False, timeout=BUILD_TIMEOUT_S
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
    return build


def compiled(*arguments: "str | Path") -> "subprocess.CompletedProcess[str]":
    command = [os.environ.get("CXX", "g++"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_TIMEOUT_S)


@cache
def shim() -> Any:
    """The C functions of cpp_shim.cpp; compiled when it, or the headers, have changed, and kept beside the build trees."""
    source, headers, lib = HERE / "cpp_shim.cpp", folder("include-dir"), library()
    text = b"".join(path.read_bytes() for path in (source, *sorted(headers.rglob("*.h")))) + str(lib).encode()
    kept = HERE.parent.parent / ".build" / "cpp-shim"
    kept.mkdir(parents=True, exist_ok=True)
    built = kept / f"shim-{hashlib.sha256(text).hexdigest()[:16]}.so"
    with open(kept / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes of one test want it
        if not built.exists():
            made = built.with_suffix(".making")
            flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{headers}", source, "-o", made]
            answer = compiled(*flags, f"-L{lib.parent}", f"-Wl,-rpath,{lib.parent}", "-lllm_datadist")
            assert answer.returncode == 0, answer.stderr
            made.rename(built)
    loaded = ctypes.CDLL(str(built))
    loaded.door_make.restype = ctypes.c_void_p
    for name in FUNCTIONS:
        getattr(loaded, f"door_{name}").restype = ctypes.c_uint32
    return loaded


FUNCTIONS = (
    *("initialize", "set_role", "link", "unlink", "register", "unregister", "allocate", "deallocate"),
    *("pull_cache", "pull_blocks", "push_cache", "push_blocks", "copy_cache", "copy_blocks"),
)


def words(texts: Sequence["str | None"]) -> Any:
    return (ctypes.c_char_p * max(1, len(texts)))(*[None if text is None else text.encode() for text in texts])


def numbers(kind: Any, values: Sequence[int]) -> Any:
    return (kind * max(1, len(values)))(*values)


def u64(*values: int) -> Any:
    return numbers(ctypes.c_uint64, values)


class Door:
    """One instance, initialised unless ``initialize`` is False."""

    def __init__(self, cluster_id: int, listen: bool = True, initialize: bool = True, **options: str) -> None:
        self.cluster_id = cluster_id
        self.port = free_port()
        self.arrays: dict[int, list[Any]] = {}
        self.options = {"llm.DeviceId": "0", "llm.SyncKvCacheWaitTime": "5000"}
        if listen:
            self.options["llm.ListenIpInfo"] = f"{LOOPBACK}:{self.port}"
        self.options |= {name.replace("__", "."): value for name, value in options.items()}
        self._shim = shim()
        self._door = ctypes.c_void_p(self._shim.door_make(ctypes.c_uint64(cluster_id), 3))
        if initialize:
            assert self.initialize() == 0

    def initialize(self, options: "dict[str, str] | None" = None) -> int:
        return int(self._shim.door_initialize(self._door, *_options(self.options if options is None else options)))

    def finalize(self) -> None:
        self._shim.door_finalize(self._door)

    def drop(self) -> None:
        self._shim.door_drop(self._door)

    def where(self) -> int:
        return self.port

    def set_role(self, role: int, options: "dict[str, str] | None" = None) -> int:
        return int(self._shim.door_set_role(self._door, role, *_options(options or {})))

    # --- links

    def link(self, *clusters: "tuple[int, str | None, int]", timeout: int = 3000) -> tuple[int, list[int]]:
        """Each (cluster id, address or None for none, port); the status, and those of the clusters."""
        rets = numbers(ctypes.c_uint32, [UNTOUCHED] * len(clusters))
        status = self._shim.door_link(self._door, *_clusters(clusters), timeout, rets)
        return int(status), [ret for ret in rets[: len(clusters)] if ret != UNTOUCHED]

    def link_to(self, cluster_id: int, port: int) -> int:
        return self.link((cluster_id, LOOPBACK, port))[0]

    def unlink(
        self, *clusters: "tuple[int, str | None, int]", timeout: int = 3000, force: bool = False
    ) -> tuple[int, list[int]]:
        rets = numbers(ctypes.c_uint32, [UNTOUCHED] * len(clusters))
        status = self._shim.door_unlink(self._door, *_clusters(clusters), timeout, int(force), rets)
        return int(status), [ret for ret in rets[: len(clusters)] if ret != UNTOUCHED]

    # --- memory

    def register(self, shape: Sequence[int], tensors: int = 4, dtype: Any = np.float32) -> int:
        """Registers zeros and returns the cache's id."""
        memory = [np.zeros(shape, dtype) for _ in range(tensors)]
        status, cache_id = self.register_addresses(
            shape, tensors, [array.ctypes.data for array in memory], DT_INT32 if dtype == np.int32 else DT_FLOAT
        )
        assert status == 0
        self.arrays[cache_id] = memory
        return cache_id

    def register_addresses(
        self, shape: Sequence[int], tensors: int, addresses: Sequence[int], data_type: int = DT_FLOAT
    ) -> tuple[int, int]:
        cache_id = ctypes.c_int64(-1)
        dims = numbers(ctypes.c_int64, shape)
        where = u64(*addresses)
        status = self._shim.door_register(
            self._door, tensors, data_type, dims, len(shape), DEVICE, where, len(addresses), ctypes.byref(cache_id)
        )
        return int(status), cache_id.value

    def unregister(self, cache_id: int) -> int:
        return int(self._shim.door_unregister(self._door, ctypes.c_int64(cache_id)))

    def allocate(self, shape: Sequence[int], tensors: int = 2, placement: int = DEVICE) -> tuple[int, int, list[int]]:
        cache_id, addresses = ctypes.c_int64(-1), u64(*[0] * tensors)
        dims = numbers(ctypes.c_int64, shape)
        status = self._shim.door_allocate(
            self._door, tensors, DT_FLOAT, dims, len(shape), placement, ctypes.byref(cache_id), addresses
        )
        return int(status), cache_id.value, list(addresses)

    def deallocate(self, cache_id: int) -> int:
        return int(self._shim.door_deallocate(self._door, ctypes.c_int64(cache_id)))

    def fill(self, cache_id: int) -> None:
        """As `Side.fill`."""
        for index, array in enumerate(self.arrays[cache_id]):
            array[...] = np.arange(array.size).reshape(array.shape) + 1 + index * 1000

    def tensors(self, cache_id: int) -> list[Any]:
        return [array.copy() for array in self.arrays[cache_id]]

    # --- pull and push; `key` is (cluster id, cache id, row)

    def pull_cache(
        self, key: tuple[int, int, int], cache_id: int, row: int = 0, size: int = -1, layers: "Layers | None" = None
    ) -> int:
        return int(
            self._shim.door_pull_cache(
                self._door, *_index(key), ctypes.c_int64(cache_id), row, ctypes.c_int64(size), _layers(layers)
            )
        )

    def pull_blocks(
        self,
        key: tuple[int, int, int],
        cache_id: int,
        source: Sequence[int],
        into: Sequence[int],
        layers: "Layers | None" = None,
    ) -> int:
        lists = (u64(*source), len(source), u64(*into), len(into))
        call = self._shim.door_pull_blocks
        return int(call(self._door, *_index(key), ctypes.c_int64(cache_id), *lists, _layers(layers)))

    def push_cache(
        self,
        key: tuple[int, int, int],
        cache_id: int,
        row: int = 0,
        tensors: int = 4,
        size: int = -1,
        layers: "Layers | None" = None,
        placement: int = DEVICE,
    ) -> int:
        source = (ctypes.c_int64(cache_id), tensors, placement)
        call = self._shim.door_push_cache
        return int(call(self._door, *source, *_index(key), row, ctypes.c_int64(size), _layers(layers)))

    def push_blocks(
        self,
        key: tuple[int, int, int],
        cache_id: int,
        source: Sequence[int],
        into: Sequence[int],
        tensors: int = 4,
        layers: "Layers | None" = None,
        placement: int = DEVICE,
    ) -> int:
        mine = (ctypes.c_int64(cache_id), tensors, placement)
        lists = (u64(*source), len(source), u64(*into), len(into))
        return int(self._shim.door_push_blocks(self._door, *mine, *_index(key), *lists, _layers(layers)))

    # --- within the instance

    def copy_cache(self, source: int, into: int, row: int, into_row: int, offset: int = 0, size: int = -1) -> int:
        caches = (ctypes.c_int64(source), ctypes.c_int64(into))
        where = (row, into_row, ctypes.c_uint64(offset), ctypes.c_int64(size))
        return int(self._shim.door_copy_cache(self._door, *caches, *where))

    def copy_blocks(self, source: int, into: int, blocks: Sequence[int], lists: Sequence[Sequence[int]]) -> int:
        flat = [block for one in lists for block in one]
        caches = (ctypes.c_int64(source), ctypes.c_int64(into))
        return int(self._shim.door_copy_blocks(self._door, *caches, u64(*blocks), len(blocks), u64(*flat), len(lists)))


def _options(options: dict[str, str]) -> tuple[Any, ...]:
    return len(options), words(list(options)), words(list(options.values()))


def _clusters(clusters: "Sequence[tuple[int, str | None, int]]") -> tuple[Any, ...]:
    ids, hosts, ports = zip(*clusters, strict=True) if clusters else ((), (), ())
    return len(clusters), u64(*ids), words(hosts), numbers(ctypes.c_uint16, ports)


def _index(key: tuple[int, int, int]) -> tuple[Any, ...]:
    return ctypes.c_uint64(key[0]), ctypes.c_int64(key[1]), key[2]


def _layers(layers: "Layers | None") -> Any:
    return None if layers is None else numbers(ctypes.c_int32, layers)


__all__ = ["Door", "built_examples", "compiled", "folder", "library", "shim"]
