"""The C++ door: what is installed, the examples as real processes, and either door against the other."""

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cpp_side import EXAMPLES, SCRIPTS, Door, built_examples, compiled, folder, library
from datadist_side import Side
from ports import LOOPBACK, free_port

from llm_datadist import LLMStatusCode
from support import Peer

pytestmark = pytest.mark.quick("rows_and_blocks", "only_the_api", "one_line", "both_doors_in_one_process")

ROOT = Path(__file__).resolve().parent.parent.parent
OK = int(LLMStatusCode.LLM_SUCCESS)
SHAPE = (8, 16)


@pytest.fixture
def cpp_there(peers: Callable[..., Peer]) -> Callable[..., Peer]:
    """Starts a process with an instance of the C++ API and nothing of kvferry for Python."""

    def start(cluster_id: int, **options: str) -> Peer:
        script = "from cpp_side import Door\ndoor = Door(*arguments[0], **arguments[1])\n"
        names = [name for name in vars(Door) if not name.startswith("_")]
        script += "".join(f"{name} = door.{name}\n" for name in names)
        return peers(script, (cluster_id,), options, name=f"C++ cluster {cluster_id}")

    return start


# --- what is installed


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled outside the source tree, against the installed package."""
    return built_examples(folder("cmake-dir"), tmp_path_factory.mktemp("examples"))


def test_only_the_api_is_seen_from_outside() -> None:
    listed = subprocess.run(["nm", "-DC", "--defined-only", library()], capture_output=True, text=True, check=True)
    names = [line.split(maxsplit=2)[2] for line in listed.stdout.splitlines()]
    assert names
    assert all(re.match(r"llm_datadist::LlmDataDist::~?\w+\(", name) for name in names), names
    methods = {re.match(r"llm_datadist::LlmDataDist::(~?\w+)", name).group(1) for name in names}  # type: ignore[union-attr]
    declared = (folder("include-dir") / "llm_datadist" / "llm_datadist.h").read_text()
    assert {name for name in methods if name[0].isupper() and name != "LlmDataDist"} == set(
        re.findall(r"^  (?:Status|void) (\w+)\(", declared, re.MULTILINE)
    )


@pytest.mark.parametrize("standard", ["c++14", "c++17", "c++20"])
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_the_headers_compile_without_a_warning(compiler: str, standard: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    forms = EXAMPLES.parent / "tests" / "forms.cpp"
    flags = f"-std={standard} -Wall -Wextra -pedantic -Werror -fsyntax-only".split()
    answer = subprocess.run(
        [compiler, *flags, f"-I{folder('include-dir')}", forms], capture_output=True, text=True, check=False, timeout=60
    )
    assert (answer.returncode, answer.stderr) == (0, "")


def test_pkg_config_names_the_same_folders(tmp_path: Path) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("there is no pkg-config")
    command = ["pkg-config", "--cflags", "--libs", "kvferry-llm-datadist"]
    where = os.environ | {"PKG_CONFIG_PATH": str(folder("pkgconfig-dir"))}
    flags = subprocess.run(command, env=where, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    source = tmp_path / "small.cpp"
    source.write_text(
        '#include "llm_datadist/llm_datadist.h"\nint main() { llm_datadist::LlmDataDist one(1, {}); one.Finalize(); }\n'
    )
    answer = compiled("-std=c++14", source, "-o", tmp_path / "small", *flags)
    assert answer.returncode == 0, answer.stderr
    subprocess.run([tmp_path / "small"], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.deadline(400)
def test_a_build_without_python_is_installed_where_one_says(tmp_path: Path) -> None:
    tools = os.environ | {"PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"}
    build, prefix = ROOT / ".build" / "plain", tmp_path / "prefix"  # kept: a second build compiles what changed
    for command in (
        ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DKVFERRY_MODULE=OFF"],
        ["cmake", "--build", build, f"-j{os.cpu_count()}"],
        ["cmake", "--install", build, "--prefix", prefix],
    ):
        answer = subprocess.run(command, env=tools, capture_output=True, text=True, check=False, timeout=350)
        assert answer.returncode == 0, answer.stdout + answer.stderr
    package = next(prefix.glob("lib*/**/cmake/kvferry"))
    built = built_examples(package, tmp_path)
    answer = subprocess.run([built / "blocks"], capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == 2
    assert "usage" in answer.stderr


def test_the_example_of_the_docs_compiles(tmp_path: Path) -> None:
    (block,) = re.findall(r"```cpp\n(.*?)```", (ROOT / "docs" / "cpp.md").read_text(), re.DOTALL)
    head, body = block.split("\n\n", 1)
    source = tmp_path / "example.cpp"
    source.write_text(f"{head}\nStatus example(uint64_t k_address, uint64_t v_address) {{\n{body}return ret;\n}}\n")
    flags = ["-std=c++14", "-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only"]
    answer = compiled(*flags, f"-I{folder('include-dir')}", source)
    assert answer.returncode == 0, answer.stderr


# --- the examples


def started(examples: Path, scenario: str, language: str, role: str, address: str) -> "subprocess.Popen[str]":
    python = [sys.executable, str(Path(__file__).parent / "guide_side.py"), scenario]
    command = [str(examples / scenario)] if language == "cpp" else python
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*command, role, address], **pipes)  # type: ignore[call-overload,no-any-return]


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=40)
    finally:
        process.kill()
    return process.returncode, output


def listens_at(port: int) -> bool:
    """Whether somebody does: the kernel's table is looked at, and nobody is disturbed."""
    wanted = f"{port:04X} "
    with open("/proc/net/tcp") as table:
        return any(
            line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in table if wanted in line
        )


@pytest.mark.parametrize("sides", ["cpp-cpp", "cpp-python", "python-cpp"])
@pytest.mark.parametrize("scenario", ["whole_cache", "blocks"])
def test_the_examples_run_as_two_processes(examples: Path, scenario: str, sides: str) -> None:
    prompt_language, decoder_language = sides.split("-")
    address = f"{LOOPBACK}:{free_port()}"
    prompt = started(examples, scenario, prompt_language, "prompt", address)
    try:
        while not listens_at(int(address.rpartition(":")[2])):
            assert prompt.poll() is None, ended(prompt)
        decoder = ended(started(examples, scenario, decoder_language, "decoder", address))
    finally:
        prompt_end = ended(prompt)
    for status, output in (decoder, prompt_end):
        assert status == 0, output
        assert output.rstrip().endswith("finalized")
        assert "ERROR" not in output
    if decoder_language == "cpp":
        assert decoder[1].count("what was pulled: ok") == decoder[1].count("what was pushed: ok") == 4


@pytest.mark.parametrize("scenario", ["whole_cache", "blocks"])
def test_an_example_that_finds_nobody_cleans_up(examples: Path, scenario: str) -> None:
    status, output = ended(started(examples, scenario, "cpp", "decoder", f"{LOOPBACK}:{free_port()}"))
    assert status == 1
    lines = [line for line in output.splitlines() if "ERROR" not in line]
    failed = f"link: failed with {int(LLMStatusCode.LLM_LINK_FAILED)}"
    assert lines[2:] == [failed, "an error: cleaning up", "unregister: ok", "finalized"]
    assert output.count("ERROR") == 1


# --- either door with the other


@pytest.fixture(params=["map,cma,socket", "socket"])
def cpp_transports(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_rows_and_blocks_go_between_a_python_and_a_cpp_process(
    start_here: Callable[..., Side], cpp_there: Callable[..., Peer], cpp_transports: str
) -> None:
    here = start_here(1, enable_remote_cache_accessible=True, ge_options={"kvferry.transports": cpp_transports})
    there = cpp_there(2, kvferry__transports=cpp_transports)
    both_ways(here, there)


def test_both_doors_in_one_process_link_to_each_other(
    start_here: Callable[..., Side], doors: Callable[..., Door], cpp_transports: str
) -> None:
    here = start_here(1, enable_remote_cache_accessible=True, ge_options={"kvferry.transports": cpp_transports})
    there = doors(2, kvferry__transports=cpp_transports)

    class Near:
        @staticmethod
        def call(name: str, *arguments: object, **keywords: object) -> object:
            return getattr(there, name)(*arguments, **keywords)

    both_ways(here, Near())


def both_ways(here: Side, there: "Peer | object") -> None:
    """The Python side ``here`` (cluster 1) and a C++ instance (cluster 2): whoever asks, bytes go where they should."""
    ask = there.call  # type: ignore[attr-defined]
    rows, blocks = here.register(SHAPE), here.register(SHAPE, blocks=True, model=2)
    mixed = ask("register", SHAPE)
    here.fill(rows)
    here.fill(blocks)
    assert here.link(2, ask("where"))[0] == OK

    # Rows that C++ pulls, and pushes back into another.
    assert ask("pull_cache", (1, rows, 3), mixed, 5) == OK
    theirs = ask("tensors", mixed)
    for mine, far in zip(here.tensors(rows), theirs, strict=True):
        assert (far[5] == mine[3]).all() and not far[:5].any() and not far[6:].any()
    assert ask("push_cache", (1, rows, 0), mixed, 5) == OK
    for mine in here.tensors(rows):
        assert (mine[0] == mine[3]).all() and not (mine[1] == mine[3]).any()

    # Blocks in reverse order, and single layers.
    assert ask("pull_blocks", (1, blocks, 0), mixed, [0, 1, 2, 3], [3, 2, 1, 0]) == OK
    for mine, far in zip(here.tensors(blocks), ask("tensors", mixed), strict=True):
        assert (far[[3, 2, 1, 0]] == mine[:4]).all() and not far[4].any()
    ask("fill", mixed)
    for layer in range(2):
        pushed = (layer, layer, 1 - layer, 1 - layer, 2)  # to the other layer
        assert ask("push_blocks", (1, blocks, 0), mixed, [0, 1], [7, 6], layers=pushed) == OK
        theirs, mine_now = ask("tensors", mixed), here.tensors(blocks)
        for t in range(2):
            assert (mine_now[2 * (1 - layer) + t][[7, 6]] == theirs[2 * layer + t][[0, 1]]).all()

    # The same asked by Python.
    here.fill(rows)
    here.pull_cache(("id", 2, mixed, 4), rows, 2)
    for mine, far in zip(here.tensors(rows), ask("tensors", mixed), strict=True):
        assert (mine[2] == far[4]).all()
    here.push_cache(("id", 2, mixed, 0), rows, 6, src_layer_range=(0, 1), dst_layer_range=(1, 2))
    theirs = ask("tensors", mixed)
    for t, mine in enumerate(here.tensors(rows)[:2]):
        assert (theirs[2 + t][0] == mine[6]).all()
        assert not (theirs[t][0] == mine[6]).any()
    here.pull_blocks(("blocks", 2, mixed), blocks, [0, 1, 2, 3], [3, 2, 1, 0])
    for mine, far in zip(here.tensors(blocks), ask("tensors", mixed), strict=True):
        assert (mine[[3, 2, 1, 0]] == far[:4]).all()
    here.push_blocks(("blocks", 2, mixed), blocks, [3, 2], [4, 5])
    for mine, far in zip(here.tensors(blocks), ask("tensors", mixed), strict=True):
        assert (far[[4, 5]] == mine[[3, 2]]).all()
    assert here.unlink(2, ask("where"))[0] == OK
    assert ask("pull_cache", (1, rows, 0), mixed) == int(LLMStatusCode.LLM_NOT_YET_LINK)


@pytest.mark.parametrize("described", [0, 2, 400])
def test_layers_that_a_push_names_are_the_caches_own_whatever_its_description_says(
    doors: Callable[..., Door], described: int
) -> None:
    here, there = doors(1), doors(2)
    mine, far = here.register(SHAPE), there.register(SHAPE)
    here.fill(mine)
    assert here.link_to(2, there.port) == OK
    second = (1, 1, 1, 1, 2)
    assert here.push_cache((2, far, 5), mine, 3, described, layers=second) == OK
    assert here.push_blocks((2, far, 0), mine, [4], [6], described, layers=second) == OK
    for number, (source, array) in enumerate(zip(here.tensors(mine), there.tensors(far), strict=True)):
        wanted = array * 0
        if number >= 2:
            wanted[5], wanted[6] = source[3], source[4]
        assert (array == wanted).all()
    beyond = (2, 2, 0, 0, 2)
    assert here.push_cache((2, far, 5), mine, 3, described, layers=beyond) == int(LLMStatusCode.LLM_PARAM_INVALID)
    # By default as many are sent as the description counts.
    sent = here.push_cache((2, far, 0), mine, 0, described)
    assert sent == (OK if described == 2 else int(LLMStatusCode.LLM_PARAM_INVALID))
    for number, (source, array) in enumerate(zip(here.tensors(mine), there.tensors(far), strict=True)):
        assert (array[0] == source[0] * (number < described == 2)).all()


def test_two_copies_of_the_core_in_one_process_leave_each_other_alone(
    start_here: Callable[..., Side], doors: Callable[..., Door]
) -> None:
    here, first, second = start_here(1, enable_remote_cache_accessible=True), doors(2), doors(3)
    rows, far, farther = here.register(SHAPE), first.register(SHAPE), second.register(SHAPE)
    first.fill(far)
    assert here.link(2, first.port)[0] == OK
    assert second.link_to(2, first.port) == OK
    # A fork closes what both copies have in the child, and nothing in this process.
    child = os.fork()
    if child == 0:
        own = os.open("/dev/null", os.O_RDONLY)  # takes the number of a descriptor that was closed
        failed = int(LLMStatusCode.LLM_FAILED)
        told = first.pull_cache((1, rows, 0), far) == failed and first.initialize() == failed
        first.finalize()
        second.finalize()
        os.fstat(own)
        os._exit(0 if told else 1)
    assert os.waitpid(child, 0)[1] == 0
    here.pull_cache(("id", 2, far, 1), rows)
    assert second.pull_cache((2, far, 1), farther) == OK
    for mine, theirs, third in zip(here.tensors(rows), first.tensors(far), second.tensors(farther), strict=True):
        assert (mine[0] == theirs[1]).all() and (third[0] == theirs[1]).all()
    # The end of one is the end of no other.
    second.finalize()
    here.pull_cache(("id", 2, far, 2), rows)
    here.finalize()
    assert first.pull_cache((1, rows, 0), far) != OK
    here.init_again()
    assert second.initialize() == OK
    assert second.link_to(2, first.port) == OK
    assert second.pull_cache((2, far, 0), second.register(SHAPE)) == OK


# --- misuse


@pytest.mark.parametrize(("asks", "transports"), [("pull", "socket"), ("push", "socket"), ("push", "map,cma,socket")])
def test_finalize_ends_what_another_thread_asks_of_a_peer_that_stands_still(
    doors: Callable[..., Door],
    cpp_there: Callable[..., Peer],
    capfd: pytest.CaptureFixture[str],
    asks: str,
    transports: str,
) -> None:
    options = {"kvferry__transports": transports, "llm__SyncKvCacheWaitTime": "300000"}
    there, here = cpp_there(9, **options), doors(2, **options)
    far, near = there.call("register", SHAPE), here.register(SHAPE)
    assert here.link_to(9, there.call("where")) == OK
    mine = here.arrays[near]
    here.fill(near)
    statuses: list[int] = []

    def ask() -> None:
        if asks == "pull":
            statuses.append(here.pull_blocks((9, far, 0), near, [0, 1], [2, 3]))
        else:
            statuses.append(here.push_blocks((9, far, 0), near, [0, 1], [2, 3]))

    # Descriptions are answered before the peer stands still, so that bytes are what is waited for.
    ask()
    assert statuses.pop() == OK
    for array in mine:
        array[...] = 7
    before = there.call("tensors", far)
    capfd.readouterr()
    there.stop()
    asking, ending = threading.Thread(target=ask), threading.Thread(target=here.finalize)
    asking.start()
    time.sleep(0.3)
    ending.start()
    ending.join(60)
    ended_first = not ending.is_alive()
    for array in mine:  # the caller's own again
        array[...] = 8
    there.cont()
    ending.join(60)
    asking.join(60)
    told = capfd.readouterr().err
    assert ended_first
    assert statuses == [int(LLMStatusCode.LLM_FAILED)]
    assert "closed" in told or "finalized" in told, told  # and not because the peer is given up as lost
    assert all((array == 8).all() for array in mine)
    for now, then in zip(there.call("tensors", far), before, strict=True):
        assert ((now == then) | (now == 7)).all()


def test_a_peer_that_dies_amid_pulls_ends_them_and_what_came_is_whole(
    doors: Callable[..., Door], cpp_there: Callable[..., Peer]
) -> None:
    there, here = cpp_there(9), doors(2)
    source = there.call("register", SHAPE)
    there.call("fill", source)
    assert here.link_to(9, there.call("where")) == OK
    expected = there.call("tensors", source)
    came, wrong, ends = [0] * 3, [], set()

    def pull_on(number: int) -> None:
        into = here.register(SHAPE)
        while True:
            if number == 0:
                status = here.pull_cache((9, source, 3), into, 1)
            else:
                status = here.pull_blocks((9, source, 0), into, [3], [1])
            if status != OK:
                return ends.add(status)
            came[number] += 1
            for array, filled in zip(here.arrays[into], expected, strict=True):
                if not (array[1] == filled[3]).all():
                    wrong.append(number)
                array[1] = 0

    threads = [threading.Thread(target=pull_on, args=(number,)) for number in range(len(came))]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 20
    while min(came) < 20 and time.monotonic() < until:
        time.sleep(0.002)
    there.kill()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert min(came) >= 20
    assert not wrong
    assert ends <= {int(LLMStatusCode.LLM_FAILED), int(LLMStatusCode.LLM_NOT_YET_LINK)}


MISUSE = [
    "door.pull_cache((9, 1, 0), cache)",
    "door.pull_cache((9, 1, 0), 77)",
    "door.pull_cache((9, 1, 0), cache, 0, 0)",
    "door.pull_blocks((9, 1, 0), cache, [1 << 63], [0])",
    "door.pull_blocks((9, 1, 0), cache, [], [])",
    "door.push_cache((9, 1, 0), cache, layers=(-2, 0, 0, 0, 2))",
    "door.push_blocks((9, 1, 0), cache, [0], [0], placement=0)",
    "door.register_addresses((8, 16), 2, [4096])[0]",
    "door.register_addresses((8, 0), 1, [4096])[0]",
    "door.allocate((8, 16))[0]",
    "door.deallocate(1)",
    "door.copy_cache(cache, 99, 0, 0)",
    "door.copy_blocks(cache, cache, [9], [[0]])",
    "door.link()[0]",
    "door.link((9, '127.0.0.1', 1), (8, None, 0))[0]",
    "door.link((9, 'nowhere', 1))[0]",
    "door.link((9, '127.0.0.1', 1), timeout=0)[0]",
    "door.unlink((9, '127.0.0.1', 1), timeout=-1)[0]",
    "door.copy_blocks(cache, cache, [1], [[2**64 - 1]])",
    "door.set_role(9)",
    "door.set_role(1, {'llm.ListenIpInfo': 'x\\ny'})",
    "closed.initialize({})",
    "closed.initialize({'llm.DeviceId': '0', 'llm.TransferBackend': 'other'})",
    "closed.initialize({'llm.DeviceId': '2147483648'})",
    "closed.initialize({'llm.DeviceId': '0', 'llm.ListenIpInfo': '999.0.0.1:1'})",
    "closed.pull_cache((9, 1, 0), 1)",
    "closed.unregister(1)",
]


def test_misuse_gives_a_status_and_one_line() -> None:
    script = "import sys\nfrom cpp_side import Door\ndoor, closed = Door(2), Door(3, initialize=False)\n"
    script += "cache = door.register((8, 16))\nprint('begin', file=sys.stderr, flush=True)\n"
    for call in MISUSE:
        script += f"print({call}, file=sys.stderr, flush=True)\n"
    script += "assert door.unregister(cache) == 0\nfor one in (door, closed): one.drop()\n"
    where = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    answer = subprocess.run(
        [sys.executable, "-c", script], env=where, capture_output=True, text=True, timeout=60, check=False
    )
    assert answer.returncode == 0, answer.stderr
    lines = answer.stderr.split("begin\n")[1].splitlines()
    assert len(lines) == 2 * len(MISUSE), answer.stderr
    for call, line, status in zip(MISUSE, lines[::2], lines[1::2], strict=True):
        assert re.match(r"\[ERROR\] LLM_DATADIST\(\d+,\S+\):\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \d+ \w+: \S", line), (
            line
        )
        assert int(status) != OK, call
    assert "[0] is 18446744073709551615: blocks" in answer.stderr, answer.stderr  # as it was given
