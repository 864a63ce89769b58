"""The samples of the vendor's page for asynchronous load, each in a process of its own: save, or load twice at once.

The same calls in the same order as there, with tensors in host memory (numpy's or torch's, by ``kind``).
"""

from typing import Any

import numpy as np

from ems import (
    CcConfig,
    CcConfig_v1,
    CcFuture,
    CcKvOption,
    CcResult,
    Ems,
    EmsConfig,
    EmsException,
    KvBufferWrapper,
    PrimaryKey,
)

MODEL = "llama2-13b"
KEYS = [PrimaryKey("request-1", "block-0"), PrimaryKey("request-1", "block-1"), PrimaryKey("request-2", "block-0")]
HASHES = [0xABCD, 0x1234]
BLOCK_SIZE = 4


def started(cc_config: Any) -> Any:
    Ems.init(EmsConfig(cc_config=cc_config))
    cc = Ems.get_cc()
    assert cc is not None
    return cc


def told(result: CcResult) -> tuple[int, int]:
    return result.success, result.total


def zeros(kind: str, *shape: int) -> Any:
    if kind == "torch":
        import torch

        return torch.zeros(*shape)
    return np.zeros(shape, np.float32)


class V0:
    """Three keys in two requests. The third value has the second tensor's number of elements, from the first one's address:
    24 bytes where it has 8. The tensors are cut out of one allocation, so that it ends within that."""

    def __init__(self, kind: str) -> None:
        self.cc = started(CcConfig(rank_id=8, device_id=0, model_id=MODEL))
        self.kind = kind
        self.memory = zeros(kind, 64)
        self.tensors = [self.memory[0:2], self.memory[16:22], self.memory[32:34]]

    def register(self, what: str) -> None:
        self.cc.register_memory(*([self.memory] if what == "memory" else self.tensors))

    def requests(self) -> Any:
        sizes = [tensor.itemsize * int(np.prod(tensor.shape)) for tensor in self.tensors]
        first, second, _ = map(self.pointer, self.tensors)
        longer = sizes[1] // self.tensors[1].itemsize * self.tensors[2].itemsize
        values = [
            [KvBufferWrapper(first, sizes[0])],
            [KvBufferWrapper(second, sizes[1])],
            [KvBufferWrapper(first, longer)],
        ]
        return (KEYS[:2], values[:2]), (KEYS[2:], values[2:])

    def pointer(self, tensor: Any) -> Any:
        return tensor.data_ptr if self.kind == "torch" else lambda: tensor.ctypes.data

    def save(self) -> Any:
        self.memory[:] = 7
        for index, tensor in enumerate(self.tensors):
            tensor[:] = index + 1
        option = CcKvOption(timeout=5000)
        return [told(self.cc.async_save(option, *request).result()) for request in self.requests()]

    def load(self) -> Any:
        """Both requests, twice, all four in flight at once: (results, what the memory holds then)."""
        option = CcKvOption(timeout=5000)
        futures: list[CcFuture] = []
        for _ in range(2):
            futures += [self.cc.async_load(option, *request) for request in self.requests()]
        return [told(future.result()) for future in futures], self.memory.tolist()


class V1:
    def __init__(self, kind: str) -> None:
        self.cc = started(CcConfig_v1(rank_id=8, device_id=0, model_id=MODEL))
        self.kvcache = [[zeros(kind, 4, BLOCK_SIZE, 2, 4) for _ in "kv"] for _ in range(2)]
        self.cc.register_kvcache(self.kvcache)

    def form(self, form: str) -> Any:
        if form == "slots":
            return {"slot_mapping": list(range(8)), "hashes": HASHES, "offsets": [4, 4]}
        return {"hashes": HASHES, "chunk_descs": [[(0, 4), (4, 4)]]}

    def save(self, form: str) -> Any:
        for number, tensor in enumerate(tensor for layer in self.kvcache for tensor in layer):
            for block in range(4):
                tensor[block] = 10 * number + block + 1
        future = self.cc.async_save(**self.form(form), option=CcKvOption(timeout=5000))
        return told(self.cc.get_result(future))

    def load(self, form: str) -> Any:
        """(result, [tensor][block]: what one number of the block is, or None where they differ)."""
        future = self.cc.async_load(**self.form(form), option=CcKvOption(timeout=5000))
        while not self.cc.is_ready(future):
            pass
        result = told(self.cc.get_result(future))
        tensors = [np.asarray(tensor) for layer in self.kvcache for tensor in layer]
        return result, [
            [float(block.flat[0]) if np.ptp(block) == 0 else None for block in tensor] for tensor in tensors
        ]

    def six_slots(self) -> str:
        try:
            self.cc.async_load(
                slot_mapping=list(range(6)), hashes=HASHES, offsets=[4, 4], option=CcKvOption(timeout=5000)
            )
        except EmsException as error:
            return str(error)
        return "it was submitted"
