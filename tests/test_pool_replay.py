"""``kvferry replay``: traces through the store, against simple counts, a simple LRU and the best of all choices.

``KVFERRY_TRACE`` is the path of the published conversation trace (docs/pool.md, "Which policy"); without it, the one
test of the published figures is skipped.
"""

import itertools
import json
import os
import random
import time
from collections import OrderedDict
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvferry.cli
from kvferry.pool.replay import Request, capacity_tokens, optimum, plot, read, replay

BLOCK = 16
TRACE = os.environ.get("KVFERRY_TRACE", "")


def conversations(seed: int, count: int = 400) -> list[Request]:
    """People who talk in turns, at once, all behind one system prompt; each turn's prompt has all before it."""
    chance = random.Random(seed)
    fresh = itertools.count(1)
    talks: list[list[int]] = []
    requests = []
    for _ in range(count):
        if not talks or chance.random() < 0.3:
            talks.append([0])
        talk = chance.choice(talks[-6:])
        talk.extend(next(fresh) for _ in range(chance.randint(1, 4)))
        partial = next(fresh)
        requests.append(Request(len(talk) * BLOCK + chance.randint(1, BLOCK - 1), [*talk, partial]))
        if len(talk) > 20:
            talks.remove(talk)
    return requests


def hits_without_limit(requests: Sequence[Request]) -> int:
    seen: set[int] = set()
    hits = 0
    for request in requests:
        hits += sum(1 for _ in itertools.takewhile(seen.__contains__, request.blocks)) * BLOCK
        seen.update(request.blocks)
    return hits


def hits_of_a_simple_lru(requests: Sequence[Request], room: int) -> int:
    order: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        hits += sum(1 for _ in itertools.takewhile(order.__contains__, request.blocks)) * BLOCK
        for block in reversed(request.blocks):
            order[block] = None
            order.move_to_end(block)
        while len(order) > room:
            order.popitem(last=False)
    return hits


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_with_room_for_all_every_prefix_is_found_again(policy: str) -> None:
    requests = conversations(1)
    result = replay(requests, 1_000_000, policy, block_tokens=BLOCK)
    assert (
        result.hit_tokens == hits_without_limit(requests) == optimum(requests, 1_000_000, block_tokens=BLOCK).hit_tokens
    )
    assert result.tokens == sum(request.tokens for request in requests)
    assert result.evictions == 0
    assert result.saved_bytes == len({block for request in requests for block in request.blocks}) * BLOCK << 17
    assert result.loaded_bytes == result.hit_tokens << 17
    assert 0.5 < result.hit_rate < result.token_hit_rate < 1


@pytest.mark.parametrize("room", [24, 40, 80, 160])
def test_lru_is_lru(room: int) -> None:
    requests = conversations(room)
    result = replay(requests, room * BLOCK, "lru", block_tokens=BLOCK)
    assert result.hit_tokens == hits_of_a_simple_lru(requests, room)
    assert result.evictions > 0


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
@pytest.mark.parametrize("room", [1, 10, 24, 40, 80, 160])
def test_nobody_is_better_than_the_optimum(room: int, policy: str) -> None:
    for seed in range(3):
        requests = conversations(seed, 150)
        best = optimum(requests, room * BLOCK, block_tokens=BLOCK)
        assert replay(requests, room * BLOCK, policy, block_tokens=BLOCK).hit_tokens <= best.hit_tokens


def best_of_all_choices(requests: Sequence[Request], room: int) -> int:
    """Every set of blocks that could be kept after every request."""
    best = {frozenset[int](): 0}
    for request in requests:
        after: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            hits += sum(1 for _ in itertools.takewhile(kept.__contains__, request.blocks))
            at_hand = kept | set(request.blocks)
            for choice in map(frozenset, itertools.combinations(sorted(at_hand), min(room, len(at_hand)))):
                after[choice] = max(after.get(choice, 0), hits)
        best = after
    return max(best.values())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "ab", "abc", "abd", "e", "ef", "efg", "h"]), min_size=1, max_size=7),
    st.integers(1, 4),
)
def test_the_optimum_is_the_best_of_all_choices(prompts: list[str], room: int) -> None:
    requests = [Request(len(prompt), [ord(letter) for letter in prompt]) for prompt in prompts]
    assert optimum(requests, room, block_tokens=1).hit_tokens == best_of_all_choices(requests, room)


@pytest.mark.parametrize(
    ("words", "tokens"),
    [
        ("10", 10),
        ("3M", 3_000_000),
        ("1.5k", 1500),
        ("1G", 10**9),
        ("1GiB", 1 << 13),
        ("512MiB", 1 << 12),
        ("2TiB", 1 << 24),
    ],
)
def test_capacities_are_tokens_or_bytes(words: str, tokens: int) -> None:
    assert capacity_tokens(words, 1 << 17) == tokens


@pytest.mark.parametrize("words", ["", "M", "three", "-3", "0", "1B", "3Mi", "nan", "1KiB", "1e30"])
def test_other_words_are_no_capacity(words: str) -> None:
    with pytest.raises(ValueError, match="is no capacity: say tokens"):
        capacity_tokens(words, 1 << 17)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    records = [{"input_length": one.tokens, "hash_ids": list(one.blocks)} for one in conversations(5)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + "\n")
    return path


def test_the_command_prints_a_row_for_each_policy_and_capacity(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvferry.cli.main(["replay", str(trace), "--capacity", "640,1M", "--block-tokens", str(BLOCK)]) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if line.lstrip()[:1].isdigit()][1:]
    assert [row[:2] for row in rows] == [
        [capacity, policy] for capacity in ("640", "1,000,000") for policy in ("lru", "s3fifo", "optimum")
    ]
    requests = read(trace)
    assert rows[0][2] == f"{100 * replay(requests, 640, 'lru', block_tokens=BLOCK).hit_rate:.1f}"
    assert said.startswith("400 requests, ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "lru,best"], "no policy is called 'best'; there are lru, s3fifo"),
        (["--capacity", "much"], "'much' is no capacity"),
        (["--block-tokens", "0"], "from 1 to"),
        (["--token-bytes", "9" * 5000], "from 1 to"),
        (["--plot", "/no/where/out.png"], "/no/where" if find_spec("matplotlib") else "matplotlib"),
        (["--plot", "out.xyz"], ".png, .pdf, .svg" if find_spec("matplotlib") else "matplotlib"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(
    trace: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        kvferry.cli.main(["replay", str(trace), *options])
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {options[0]}: " in said
    assert words in said


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"input_length": 5}', "there is no 'hash_ids'"),
        (b'{"input_length": 5, "hash_ids": [1, -1]}', "hash_ids[1]=-1 is not a whole number from 0"),
        (b'{"input_length": 5, "hash_ids": [99999999999999999999]}', "hash_ids[0]=99999999999999999999"),
        (b'{"input_length": 5, "hash_ids": "12"}', "is no list"),
        (b'{"input_length": -5, "hash_ids": [1]}', "input_length=-5 is not"),
        (b'{"input_length": 1e400, "hash_ids": [1]}', "input_length=inf is not"),
        (b'{"input_length": 1.5, "hash_ids": [1]}', "input_length=1.5 is not"),
        (b"[1]", "no JSON object"),
        (b'{"input_length": 5, "hash_ids": "\xff"}', "decode"),
        (b"[" * 200_000, "recursion"),
        (b"nonsense", "Expecting value"),
    ],
    ids=lambda words: repr(words[:40]) if isinstance(words, bytes) else "",
)
def test_a_file_that_is_no_trace_is_named_with_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes, why: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"input_length": 5, "hash_ids": [1]}\n' + line + b"\n")
    assert kvferry.cli.main(["replay", str(path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"kvferry: {path}, line 2: not a request with input_length and hash_ids")
    assert why in said
    assert said.count("\n") == 1


def test_a_trace_that_is_not_there_or_empty_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvferry.cli.main(["replay", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err == f"kvferry: {tmp_path / 'none'}: No such file or directory\n"
    (tmp_path / "empty").touch()
    assert kvferry.cli.main(["replay", str(tmp_path / "empty")]) == 1
    assert "empty holds no requests" in capsys.readouterr().err


def test_ctrl_c_ends_the_command_without_a_traceback(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvferry.pool.replay.optimum", interrupted)
    assert kvferry.cli.main(["replay", str(trace)]) == 130


def test_a_plot_without_matplotlib_is_refused_before_the_work(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvferry.cli, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        kvferry.cli.main(["replay", str(trace), "--plot", "out.png"])
    assert "--plot: it needs matplotlib, which is not installed: pip install matplotlib" in capsys.readouterr().err


def test_a_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, which is not installed here")
    requests = conversations(3, 100)
    results = [
        replay(requests, room * BLOCK, policy, block_tokens=BLOCK) for policy in ("lru", "s3fifo") for room in (20, 40)
    ]
    plot([*results, optimum(requests, 320, block_tokens=BLOCK)], tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


# --- the published figures --------------------------------------------------------------------------------------------

PUBLISHED = {10**4: 4, 10**5: 7, 10**6: 9, 3 * 10**6: 17, 10**7: 33, 5 * 10**7: 40, 10**9: 40}
"""Hit rates in per cent at capacities in tokens, as read off figure 9 of the Mooncake paper (FAST '25)."""


@pytest.mark.slow
@pytest.mark.deadline(300)
@pytest.mark.skipif(not TRACE, reason="KVFERRY_TRACE does not name the published conversation trace")
def test_the_published_curve_is_reproduced_within_three_points() -> None:
    """By LRU, with what blocks of 512 tokens cut off estimated."""
    requests = read(Path(TRACE))
    assert len(requests) == 12_031
    for capacity, published in PUBLISHED.items():
        begin = time.process_time()
        result = replay(requests, capacity, "lru")
        assert time.process_time() - begin < 10
        assert abs(100 * result.token_hit_rate - published) < 3
        assert result.hit_tokens <= optimum(requests, capacity).hit_tokens
    assert 100 * result.hit_rate == pytest.approx(37.4, abs=0.05)
