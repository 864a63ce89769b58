"""The lines that the README shows are run as they stand, by two processes at once, and by two that use a pool in turns.

A fenced ``python`` block is run if the line before it is one of these comments, which a reader of the page does not see:

    <!-- run: prefill -->          a program: process P
    <!-- run: decode -->           a program: process D
    <!-- run: decode, inside -->   lines that stand inside D's last ``with``
    <!-- run: pool -->             lines of a coroutine, in each process that uses the pool

All find ``kv``, ``model`` and what else the page says ready. The port on the page is replaced by a free one, the deadline of
the pool's load by one for a busy machine, and KVFERRY_POOL names a node of the test's own.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from textwrap import indent

from pool_support import NodeProcess

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"<!-- run: (?P<where>[a-z, ]+) -->\s*```python\n(?P<text>.*?)```", re.DOTALL)
ADDRESS = re.compile(r"127\.0\.0\.1:7000")

# What the page takes for granted: K0 V0 K1 V1, and a model that fills them and whose layers can be called.
GIVEN = """
import sys
import numpy

kv = [numpy.zeros((8, 4, 2, 16), numpy.float32) for _ in range(4)]
prompt = "a prompt"
x = None


class Model:
    def prefill(self, prompt, kv):
        for number, tensor in enumerate(kv):
            tensor[:] = 1 + number
        print("prefilled", flush=True)
        sys.stdin.readline()  # decoding goes on elsewhere, and this process is busy

    @property
    def layers(self):
        def layer(number):
            def compute(x, kv):
                for tensor in kv[2 * number : 2 * number + 2]:
                    tensor[0] = 10 + number
            return compute
        return [layer(0), layer(1)]


model = Model()
"""
# The same for the lines about the pool, in a prompt of so many full blocks as the argument says.
POOL_GIVEN = """
import asyncio
import sys
import kvferry
import numpy

count = int(sys.argv[1])
kv = [numpy.zeros((100, 16, 2, 4), numpy.float32) for _ in range(4)]
table = list(range(99, 99 - count, -1))
token_ids = list(range(16 * count))


class Model:
    def prefill(self, tokens, kv):
        for token in tokens:
            for number, tensor in enumerate(kv):
                tensor[table[token // 16], token % 16] = 1 + number + 4 * token


model = Model()


async def request():
"""
POOL_CHECKS = """
asyncio.run(request())
for number, tensor in enumerate(kv):
    found = tensor[table].reshape(len(token_ids), -1)
    assert (found == 1 + number + 4 * numpy.array(token_ids)[:, None]).all(), "every block is loaded or computed"
"""
CHECKS = """
assert (kv[3][2] == 4).all() and (kv[0][3] == 1).all(), "the blocks that the page pulls"
"""


def programs() -> dict[str, str]:
    """The page's programs, with a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found: dict[str, list[str]] = {}
    for block in BLOCK.finditer(README.read_text(encoding="utf-8")):
        where, _, how = block["where"].partition(", ")
        text = ADDRESS.sub(f"127.0.0.1:{port}", block["text"])
        found.setdefault(where, []).append(indent(text, "    ") if how == "inside" else text)
    return {where: "".join(texts) for where, texts in found.items()}


def start(program: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def test_the_lines_of_the_readme_run_as_they_stand() -> None:
    run = programs()
    assert set(run) == {"prefill", "decode", "pool"}, "README.md marks what is to be run; see this test's first lines"
    with start(GIVEN + run["prefill"]) as prefill:
        try:
            assert prefill.stdout is not None
            assert prefill.stdout.readline() == "prefilled\n", prefill.communicate()[1]
            with start(GIVEN + run["decode"] + CHECKS) as decode:
                shown, complaints = decode.communicate(timeout=30)
            assert (decode.returncode, complaints) == (0, "")
            assert re.search(r"(map|cma|socket)", shown), shown
            _, complaints = prefill.communicate("\n", timeout=30)
            assert (prefill.returncode, complaints) == (0, "")
        finally:
            prefill.kill()


def test_the_lines_about_the_pool_find_what_an_ended_process_has_saved(tmp_path: Path) -> None:
    """The second process hits what the page's comment says that it would."""
    lines = programs()["pool"]
    said = re.search(r"# (Counter\(.*\))$", lines, re.MULTILINE)
    assert said is not None
    assert "timeout_ms=200" in lines
    program = POOL_GIVEN + indent(lines.replace("timeout_ms=200", "timeout_ms=20_000"), "    ") + POOL_CHECKS
    node = NodeProcess(f"unix:{tmp_path}/pool.sock")
    try:
        for blocks, expected in ((90, "0 90 Counter({'never_saved': 90})"), (93, f"90 93 {said[1]}")):
            with start(program, str(blocks), KVFERRY_POOL=node.address) as process:
                shown, complaints = process.communicate(timeout=60)
            assert (process.returncode, complaints) == (0, "")
            assert shown.strip() == expected
    finally:
        assert node.stop() == 0
