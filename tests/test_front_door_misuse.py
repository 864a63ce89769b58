"""Every argument of every public call, given all sorts of things that it is not: the answer is one of kvferry's own errors.

A table says how each call is made well; one argument at a time is then replaced. What no table entry covers is found too.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvferry
from kvferry import Addresses, BlocksKey, PoolOptions, PrefixKey, RequestKey

LONG = 10**5000  # has no repr


class Refuses:
    """Says no to every question in its own words."""

    def _no(self, *_: object, **__: object) -> Any:
        raise RuntimeError("ask somebody else")

    __index__ = __array__ = __iter__ = __len__ = __getitem__ = __int__ = __float__ = __repr__ = __str__ = _no
    __array_interface__ = __dlpack_device__ = device = property(_no)


THINGS: "dict[str, Any]" = {
    "None": None,
    "text": "x",
    "no text": "",
    "half a character": "\ud800",
    "bytes": b"1",
    "no bytes": b"",
    "fraction": 1.5,
    "nan": float("nan"),
    "infinity": float("inf"),
    "True": True,
    "texts": ["x"],
    "Nones": [None],
    "nothing": [],
    "lists": [[1], [2, 3]],
    "dict": {"a": "b"},
    "set": {1},
    "object": object(),
    "-1": -1,
    "2**32": 2**32,
    "2**63": 2**63,
    "2**64": 2**64,
    "huge": LONG,
    "fractions": np.array([1.5]),
    "words": np.array(["a"]),
    "plane": np.zeros((2, 2)),
    "no dimensions": np.array(3),
    "refusal": Refuses(),
    "class": int,
    "complex": 1j,
    "endless": range(2**70),
    "pair": ("a", "b"),
    "function": lambda: 1,
}
NEVER = (
    "fraction",
    "nan",
    "infinity",
    "True",
    "object",
    "refusal",
    "class",
    "complex",
    "function",
)  # right for (almost) nothing
OTHERWISE = {"force": ("True",), "reachable": ("True",), "replace": ("True",), "dtype": ("class",)}  # but for these


def kv() -> "list[Any]":
    return [np.zeros((4, 8), np.uint64) for _ in range(4)]


class Ends:
    def __init__(self) -> None:
        self.node = kvferry.Node(pool=1 << 22)
        self.far_node = kvferry.Node(listen="127.0.0.1:0")
        self.address = self.far_node.address
        self.far = self.far_node.register("kv", kv())
        self.far_node.register("rows", kv(), layout="rows", keys=[RequestKey(7), PrefixKey(7)])
        self.mine = self.node.register("mine", kv())
        self.rows = self.node.register("rows", kv(), layout="rows")
        self.raw = kv()
        self.link = self.node.link(self.address)
        self.other = kvferry.Node()  # linking anew replaces a link

    def layer_push(self, ready: Any = 0, wait: Any = 1000, **words: Any) -> None:
        push = self.link.push_layers(**({"mine": self.mine, "to": "kv"} | words))
        try:
            push.layer_ready(ready)
            push.layer_ready(1)
            push.wait(wait)
        finally:
            push.cancel()

    def close(self) -> None:
        self.other.close()
        self.node.close()
        self.far_node.close()


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    both = Ends()
    yield both
    both.close()


def no_node(**words: Any) -> None:
    kvferry.Node(**words).close()


Base = Callable[[Ends], "dict[str, Any]"]
Call = Callable[..., Any]
PULL: Base = lambda e: {"source": "kv", "into": e.mine}  # noqa: E731
PULL_ROW: Base = lambda e: {"source": "rows", "into": e.rows, "row": 0}  # noqa: E731
PUSH: Base = lambda e: {"mine": e.mine, "to": "kv"}  # noqa: E731
PUSH_ROW: Base = lambda e: {"mine": e.rows, "to": "rows", "row": 0}  # noqa: E731
CALL: Base = lambda e: {"payload": b"x"}  # noqa: E731
NONE: Base = lambda e: {}  # noqa: E731


# The call that the arguments are those of; how it is made; with what, at the least.
CALLS: "list[tuple[Any, Call, Base]]" = [
    (kvferry.Node, lambda e, **w: no_node(**w), NONE),
    (kvferry.Node.listen, lambda e, **w: e.node.listen(**w), NONE),
    (kvferry.Node.link, lambda e, **w: e.other.link(**w).close(), lambda e: {"address": e.address}),
    (
        kvferry.Node.register,
        lambda e, **w: e.node.unregister(e.node.register(**w)),
        lambda e: {"name": "", "tensors": e.raw},
    ),
    (
        kvferry.Node.register_addresses,
        lambda e, **w: e.node.unregister(e.node.register_addresses(**w)),
        lambda e: {"name": "", "addresses": [array.ctypes.data for array in e.raw], "unit_bytes": 64, "count": 4},
    ),
    (
        kvferry.Node.allocate,
        lambda e, **w: e.node.unregister(e.node.allocate(**w)),
        lambda e: {"name": "", "tensors": 1, "shape": (2, 8), "dtype": "uint8"},
    ),
    (kvferry.Node.unregister, lambda e, **w: e.node.unregister(**w), NONE),
    (kvferry.Node.deallocate, lambda e, **w: e.node.deallocate(**w), NONE),
    (kvferry.Node.remove_key, lambda e, **w: e.node.remove_key(**w), NONE),
    (kvferry.Node.cache, lambda e, **w: e.node.cache(**w), NONE),
    (
        kvferry.Node.open_window,
        lambda e, **w: e.node.open_window(**w).close(),
        lambda e: {"cache": e.mine, "units": [0], "access": "read", "ttl_ms": 1000},
    ),
    (kvferry.Node.copy, lambda e, **w: e.node.copy(**w), lambda e: {"source": e.mine, "into": e.mine}),
    (kvferry.Node.copy, lambda e, **w: e.node.copy(**w), lambda e: {"source": e.rows, "into": e.rows, "row": 0}),
    (kvferry.Cache.numpy, lambda e, **w: e.mine.numpy(**w), NONE),
    (kvferry.Cache.torch, lambda e, tensor: tensor is None or e.mine.torch(tensor), NONE),  # None would need torch
    (kvferry.Cache.window, lambda e, **w: e.mine.window(**w).close(), lambda e: {"blocks": [0]}),
    (kvferry.Link.pull, lambda e, **w: e.link.pull(**w), PULL),
    (kvferry.Link.pull, lambda e, **w: e.link.pull(**w), PULL_ROW),
    (kvferry.Link.pull_async, lambda e, **w: e.link.pull_async(**w).wait(), PULL),
    (kvferry.Link.prepare_pull, lambda e, **w: e.link.prepare_pull(**w), PULL),
    (kvferry.Prepared.run, lambda e, **w: e.link.prepare_pull("kv", into=e.mine).run(**w), NONE),
    (kvferry.Link.push, lambda e, **w: e.link.push(**w), PUSH),
    (kvferry.Link.push, lambda e, **w: e.link.push(**w), PUSH_ROW),
    (kvferry.Link.push_async, lambda e, **w: e.link.push_async(**w).wait(), PUSH),
    (kvferry.Link.push_layers, lambda e, **w: e.layer_push(**w), PUSH),
    (kvferry.LayerPush.layer_ready, lambda e, layer: e.layer_push(ready=layer), NONE),
    (kvferry.LayerPush.wait, lambda e, timeout_ms: e.layer_push(wait=timeout_ms), NONE),
    (kvferry.Transfer.wait, lambda e, **w: e.link.pull_async("kv", into=e.mine).wait(**w), NONE),
    (kvferry.Node.next_call, lambda e, **w: e.node.next_call(**w), NONE),
    (kvferry.Link.call, lambda e, **w: e.link.call(**w), CALL),
    (kvferry.Link.call_async, lambda e, **w: e.link.call_async(**w).wait(), CALL),
    (kvferry.Link.send, lambda e, **w: e.link.send(**w), CALL),
    (kvferry.Answer.wait, lambda e, **w: e.link.call_async(b"x").wait(**w), NONE),
    (kvferry.Link.describe, lambda e, **w: e.link.describe(**w), lambda e: {"source": "kv"}),
    (kvferry.Link.unlink, lambda e, **w: e.other.link(e.address).unlink(**w), NONE),
    (PoolOptions, lambda e, **w: no_node(pool=PoolOptions(**w)), lambda e: {"size_bytes": 1 << 20}),
    (
        Addresses,
        lambda e, **w: e.link.push(e.mine, to=Addresses(**w)),
        lambda e: {"addresses": list(e.far.addresses)},
    ),
    (RequestKey, lambda e, **w: e.node.remove_key(RequestKey(**w)), lambda e: {"request_id": 1}),
    (RequestKey, lambda e, **w: e.link.pull(RequestKey(**w), into=e.rows, row=0), lambda e: {"request_id": 7}),
    (PrefixKey, lambda e, **w: e.node.remove_key(PrefixKey(**w)), lambda e: {"prefix_id": 1}),
    (PrefixKey, lambda e, **w: e.link.pull(PrefixKey(**w), into=e.rows, row=0), lambda e: {"prefix_id": 7}),
    (BlocksKey, lambda e, **w: e.link.pull(BlocksKey(**w), into=e.mine), NONE),
]
MADE_BY_OTHERS = (
    kvferry.Link,
    kvferry.Cache,
    kvferry.Window,
    kvferry.Transfer,
    kvferry.Prepared,
    kvferry.LayerPush,
    kvferry.Answer,
)
PUBLIC = (kvferry.Node, *MADE_BY_OTHERS, PoolOptions, Addresses, RequestKey, PrefixKey, BlocksKey)


def parameters(call: Any) -> "list[str]":
    return [name for name in inspect.signature(call).parameters if name != "self"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # numpy's, of some words for element types
@pytest.mark.parametrize("number", range(len(CALLS)), ids=[f"{c.__qualname__}-{n}" for n, (c, *_) in enumerate(CALLS)])
def test_whatever_is_given_the_answer_is_kvferrys_own(ends: Ends, number: int) -> None:
    call, make, base = CALLS[number]
    complaints = []
    for name in parameters(call):
        for label, thing in THINGS.items():
            try:
                make(ends, **(base(ends) | {name: thing}))
            except kvferry.KvferryError as error:
                if isinstance(error, kvferry.InternalError) or "incompatible" in str(error):
                    complaints.append(f"{name}={label}: {error!r}")
            except ModuleNotFoundError as error:  # the number was right, and where there is no torch there is none
                if error.name != "torch" or call is not kvferry.Cache.torch:
                    complaints.append(f"{name}={label}: {error!r}")
            except Exception as error:  # noqa: BLE001 - any other is what is looked for
                complaints.append(f"{name}={label}: {type(error).__name__}")
            else:
                if label in NEVER and label not in OTHERWISE.get(name, ()):
                    complaints.append(f"{name}={label} was taken")
    assert not complaints
    assert ends.link.alive


def test_no_public_call_is_left_out() -> None:
    covered = {call for call, *_ in CALLS}
    for kind in PUBLIC:
        assert kind in covered or kind in MADE_BY_OTHERS
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_") and parameters(method):
                assert method in covered, f"{kind.__name__}.{name}"


@pytest.mark.parametrize("source", [0.5, "a", None, True, (1,), LONG], ids=lambda value: type(value).__name__)
def test_what_is_no_block_is_refused_wherever_it_stands(ends: Ends, source: Any) -> None:
    for blocks in (([0, source], [0, 1]), ([0, 1], (0, source)), {0: source}):
        with pytest.raises(kvferry.InvalidArgument):
            ends.link.pull("kv", into=ends.mine, blocks=blocks)
    with pytest.raises(kvferry.InvalidArgument):
        ends.link.push_layers(ends.mine, to="kv", layers=[source])


@pytest.mark.parametrize("change", ["clears", "drops the last", "appends"])
def test_a_list_that_changes_while_it_is_read_is_refused(ends: Ends, change: str) -> None:
    """Asking an item for its number runs the item's code, which may do anything to the list that it stands in."""
    changes = {"clears": list.clear, "drops the last": list.pop, "appends": lambda listed: listed.append(1)}
    listed: list[Any] = []

    class Meddler:
        def __index__(self) -> int:
            changes[change](listed)
            return 0

    for use in (
        lambda: ends.node.copy(ends.mine, ends.mine, blocks=(listed, list(range(1000)))),
        lambda: ends.link.pull("kv", into=ends.mine, blocks=(listed, list(range(1000)))),
        lambda: ends.link.pull("rows", into=ends.mine, source_row=0, row_to_blocks=listed),
        lambda: ends.mine.window(blocks=listed),
    ):
        for place in (0, 1, 999):
            listed[:] = range(1000)
            listed[place] = Meddler()
            with pytest.raises(kvferry.InvalidArgument, match="was changed while it was read"):
                use()  # type: ignore[no-untyped-call]


def test_the_sentence_names_the_argument_and_what_it_takes(ends: Ends) -> None:
    for call, sentence in (
        (lambda: kvferry.Node(lanes="2"), "lanes='2' is not a whole number from 0 to 2**32 - 1"),
        (lambda: ends.node.register(1, kv()), "name=1 is no str"),  # type: ignore[arg-type]
        (lambda: ends.link.pull("rows", into=ends.rows, row=1.5), "row=1.5 is not a whole number"),
        (lambda: ends.link.pull("rows", into=ends.rows, row=0, size_bytes=-1), "size_bytes=-1 is not a whole number"),
        (lambda: ends.node.unregister(-1), "-1 is no cache of this node"),
        (lambda: ends.mine.window(blocks=[0], ttl_ms="1"), "ttl_ms='1' is not a whole number of milliseconds"),
        (lambda: ends.mine.window(blocks=[0, 1, 0]), "lists each block or row once, and this one lists 0 twice"),
        (lambda: ends.link.unlink(force=1), "force=1 is neither True nor False"),
        (lambda: ends.link.pull("", into=ends.mine), "the name '' stands for no cache"),
        (lambda: ends.link.pull(b"", into=ends.mine), "the name b'' stands for no window"),
    ):
        with pytest.raises(kvferry.InvalidArgument) as caught:
            call()  # type: ignore[no-untyped-call]
        assert sentence in str(caught.value)


def test_numpys_whole_numbers_are_whole_numbers(ends: Ends) -> None:
    one = np.int64(1)
    with ends.mine.window(blocks=np.array([2, 1]), ttl_ms=np.int32(1000)):
        ends.link.pull("rows", into=np.int64(ends.rows.id), row=one, source_row=np.uint8(2), timeout_ms=np.int64(1000))
    ends.link.push(ends.mine, to="kv", blocks={one: np.uint32(0)})
    assert ends.node.cache(np.int16(ends.mine.id)) is ends.mine


def test_lists_without_dimensions_are_refused_beside_a_window_too(ends: Ends) -> None:
    blocks: Any = np.array(3)
    with ends.far.window(blocks=[0, 1]) as source, ends.far.window(blocks=[0, 1], access="write") as destination:
        for call in (
            lambda: ends.link.pull(source, into=ends.mine, blocks=blocks),
            lambda: ends.link.pull_async(source, into=ends.mine, blocks=blocks),
            lambda: ends.link.prepare_pull(source, into=ends.mine, blocks=blocks),
            lambda: ends.link.push(ends.mine, to=destination, blocks=blocks),
            lambda: ends.link.push_layers(ends.mine, to=destination, blocks=blocks),
            lambda: ends.mine.window(blocks=blocks),
            lambda: ends.node.copy(ends.mine, ends.mine, blocks=blocks),
            lambda: ends.link.pull("kv", into=ends.mine, blocks=(blocks, blocks)),
        ):
            with pytest.raises(kvferry.InvalidArgument, match=r"array\(3\)"):
                call()  # type: ignore[no-untyped-call]


def test_another_nodes_cache_is_not_taken_for_the_own_one_of_its_number(ends: Ends) -> None:
    assert ends.far.id == ends.mine.id
    for call in (
        lambda: ends.link.pull("kv", into=ends.far),
        lambda: ends.link.push(ends.far, to="kv"),
        lambda: ends.node.copy(ends.far, ends.mine),
        lambda: ends.node.unregister(ends.far),
        lambda: ends.node.open_window(ends.far, [0], "read", 1000),
    ):
        with pytest.raises(kvferry.InvalidArgument, match="another node's cache"):
            call()  # type: ignore[no-untyped-call]
