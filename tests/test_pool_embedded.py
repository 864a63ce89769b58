"""A user's own node: started once however many want it, found, stopped, and kept out of where it could be hurt.

Processes are real; the node itself is mostly `support/pool_node.py`, which only binds the socket.
"""

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvferry
from cgroup_support import memory_cgroup
from failure_support import until
from kvferry.pool import embedded, places, seat
from pool_support import NodeProcess
from support import Peer

Peers = Callable[..., Peer]
STUB = str(Path(__file__).parent / "support" / "pool_node.py")
NOBODY = 65534
SYSTEM_PYTHON = "/usr/bin/python3"  # which another user can read
root_only = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

pytestmark = pytest.mark.quick(
    "outlives",
    "after_its_end",
    "inherits_nothing",
    "starters_at_once",
    "is_replaced",
    "again_and_again",
    "is_refused[link-",
    "resolve",
)

STARTER = """
import os, resource
from kvferry.pool import embedded

def ensure(*arguments, **keywords): return embedded.ensure(*arguments, **keywords)
def start_or_find(*arguments, **keywords): return embedded.start_or_find(*arguments, **keywords)
def stop(*arguments): return embedded.stop(*arguments)
def status(): return embedded.status()
def inheritable():
    "A descriptor that every program started from here gets, unless somebody sees to it."
    end = os.open("/dev/zero", os.O_RDONLY)
    os.set_inheritable(end, True)
    return end
def children():
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
def few_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))
def use_up_descriptors():
    few_descriptors()
    try:
        while True:
            os.dup(0)
    except OSError:
        pass
def ignore_children():
    import signal
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
"""


def program(way: str = "plain") -> "list[str]":
    return [sys.executable, STUB, way]


class Home:
    """A user's directories, of this test alone."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runtime, self.state, self.config = root / "run", root / "state", root / "config"
        self.runtime.mkdir(0o700)
        self.directory = self.runtime / "kvferry"
        self.socket = self.directory / "pool.sock"
        self.address = f"unix:{self.socket}"
        self.log = self.state / "kvferry" / "pool.log"

    def environment(self) -> "dict[str, str]":
        return {
            "XDG_RUNTIME_DIR": str(self.runtime),
            "XDG_STATE_HOME": str(self.state),
            "XDG_CONFIG_HOME": str(self.config),
        }

    def configure(self, **words: Any) -> Path:
        path = self.config / "kvferry" / "pool.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(words))
        return path

    def nodes(self) -> "list[int]":
        """Pids of what was started to listen here."""
        return [pid for pid, words in commands() if self.address.encode() in words]


def commands() -> "Iterator[tuple[int, list[bytes]]]":
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(folder.name), (folder / "cmdline").read_bytes().split(b"\0")


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> "Iterator[Home]":
    root = Path(tempfile.mkdtemp(prefix="kvf-", dir="/tmp"))  # pytest's own are too long for a socket's name
    home = Home(root)
    for name, value in home.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("KVFERRY_POOL", raising=False)
    yield home
    for pid in home.nodes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not home.nodes(), "the nodes have ended", 10)
    shutil.rmtree(root)


# --- starting and finding -------------------------------------------------------------------------------------------


def test_a_node_outlives_who_started_it_and_is_found_by_others(home: Home, peers: Peers) -> None:
    assert embedded.find() is None
    assert embedded.status().state == "nobody"
    starter = peers(STARTER)
    assert starter.call("ensure", 10_000, program=program()) == home.address
    starter.close()
    assert embedded.find() == home.address
    assert embedded.ensure(0, program=["/nowhere"]) == home.address
    (pid,) = home.nodes()
    seen = embedded.status()
    assert (seen.state, seen.address, seen.pid, seen.log) == ("listening", home.address, pid, str(home.log))
    assert seen.idle_s == 900
    assert abs(seen.started - time.time()) < 60
    assert embedded.stop() == "stopped"
    assert embedded.find() is None
    assert home.nodes() == []
    assert embedded.stop() == "nobody"


def test_it_says_once_where_it_is_how_big_and_how_to_stop_it(home: Home, capfd: pytest.CaptureFixture[str]) -> None:
    embedded.ensure(10_000, program=program())
    embedded.ensure(10_000, program=program())
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    for word in (home.address, "GiB", str(home.log), "900 s", "kvferry pool stop"):
        assert word in said


@pytest.mark.deadline(120)
@pytest.mark.parametrize("rounds", [pytest.param(2, id="a few"), pytest.param(20, id="many", marks=pytest.mark.slow)])
def test_two_starters_at_once_end_with_one_node(home: Home, peers: Peers, rounds: int) -> None:
    starters = [peers(STARTER), peers(STARTER)]
    for _ in range(rounds):
        both = [starter.call_later("ensure", 15_000, program=program()) for starter in starters]
        assert [one.result() for one in both] == [home.address, home.address]
        assert len(home.nodes()) == 1
        assert starters[0].call("stop") == "stopped"


def test_many_threads_at_once_end_with_one_node(home: Home) -> None:
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(embedded.start_or_find(15_000, program=program("slow"))))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [home.address] * 12
    assert len(home.nodes()) == 1


def test_a_slow_start_is_waited_for_by_the_next_one_and_not_doubled(home: Home) -> None:
    with pytest.raises(kvferry.DeadlineExceeded):
        embedded.ensure(300, program=program("slow"))
    until(lambda: len(home.nodes()) == 1, "it was started", 10)
    assert embedded.status().state == "starting"
    assert embedded.find() is None
    assert embedded.ensure(15_000, program=program("dies")) == home.address
    assert len(home.nodes()) == 1


def test_a_node_inherits_nothing(home: Home, peers: Peers) -> None:
    starter = peers(STARTER, env={"CUDA_VISIBLE_DEVICES": "3", "LD_BIND_NOW": "1", "A_SECRET": "word", "LC_ALL": "C"})
    starter.call("few_descriptors")
    starter.call("inheritable")
    starter.call("ensure", 10_000, program=program())
    (pid,) = home.nodes()
    opened = {os.readlink(end) for end in Path(f"/proc/{pid}/fd").iterdir()}
    sockets = {name for name in opened if name.startswith("socket:")}
    assert opened - sockets == {"/dev/null", str(home.log), str(home.directory / "node.lock")}
    assert len(sockets) == 1
    environment = dict(word.split(b"=", 1) for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if word)
    assert environment[b"CUDA_VISIBLE_DEVICES"] == b""
    assert environment[b"LC_ALL"] == b"C"
    assert not {b"LD_BIND_NOW", b"A_SECRET", b"KVFERRY_TEST_PEER"} & set(environment)
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert os.getsid(pid) not in (pid, os.getsid(starter.pid))
    assert os.getpgid(pid) != os.getpgid(starter.pid)
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (4096, 4096)
    blocked, ignored = (signals(pid, name) for name in ("SigBlk", "SigIgn"))
    assert blocked == 0
    assert not ignored & 1 << signal.SIGTERM - 1
    for file in (home.log, home.socket, home.directory):
        assert file.stat().st_mode & 0o077 == 0, file


def signals(pid: int, name: str) -> int:
    words = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(words[name], 16)


def test_a_node_finds_its_modules_where_its_starter_finds_them(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(STUB).parent.parent)
    monkeypatch.setenv("PYTHONPATH", f"nowhere{os.pathsep}support")
    found = embedded.ensure(10_000, program=[sys.executable, "-m", Path(STUB).stem, "plain"])
    assert found == home.address


def test_a_log_that_is_no_file_is_refused_and_not_waited_for(home: Home) -> None:
    home.log.parent.mkdir(parents=True)
    os.mkfifo(home.log)
    with pytest.raises(kvferry.LinkFailed, match=r"pool\.log, which is no file: move it away"):
        embedded.ensure(10_000, program=program())


def test_a_node_has_no_terminal_though_its_starter_has_one(home: Home) -> None:
    code = f"from kvferry.pool import embedded; embedded.ensure(15000, program={program()!r})"
    pid, terminal = os.forkpty()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", code])
    said = b""
    with contextlib.suppress(OSError):  # the terminal's end
        while more := os.read(terminal, 4096):
            said += more
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0, said
    (node,) = home.nodes()  # the hang-up of the terminal has not ended it
    assert Path(f"/proc/{node}/stat").read_text().rpartition(")")[2].split()[4] == "0"


def test_a_node_has_no_port_and_is_linked_to_by_its_socket(home: Home) -> None:
    """With a node of the core, as kvferry's own has."""
    code = """
import signal, sys, kvferry
words = sys.argv
node = kvferry.Node(listen=words[words.index("--listen") + 1])
signal.sigwait({signal.SIGTERM})
"""
    address = embedded.ensure(20_000, program=[sys.executable, "-c", code])
    (pid,) = home.nodes()
    sockets = {name for end in Path(f"/proc/{pid}/fd").iterdir() if (name := os.readlink(end)).startswith("socket:")}
    ports = {f"socket:[{words.split()[9]}]" for kind in ("tcp", "tcp6") for words in lines(f"/proc/{pid}/net/{kind}")}
    assert sockets
    assert not sockets & ports
    with kvferry.Node() as mine:
        assert mine.link(address).alive
    os.kill(pid, signal.SIGTERM)
    until(lambda: not home.nodes(), "it has left", 10)


def lines(path: str) -> "list[str]":
    return Path(path).read_text().splitlines()[1:]


@pytest.mark.parametrize("habit", ["none", "ignore_children"])
def test_a_starter_has_no_child_afterwards(home: Home, peers: Peers, habit: str) -> None:
    starter = peers(STARTER)
    if habit != "none":
        starter.call(habit)
    starter.call("ensure", 10_000, program=program())
    assert starter.call("children") is None


def test_a_forked_child_of_the_starter_keeps_no_lock(home: Home) -> None:
    place = seat.Seat(places.runtime_directory(create=True))
    ready, go = os.pipe()
    with place.only_starter() as lock:
        assert lock is not None
        child = os.fork()
        if child == 0:
            os.read(ready, 1)
            os._exit(0)
    try:
        with place.only_starter() as lock:
            assert lock is not None
    finally:
        os.write(go, b"x")
        os.waitpid(child, 0)
        os.close(ready)
        os.close(go)


# --- its end --------------------------------------------------------------------------------------------------------


def test_a_node_that_was_killed_is_replaced_by_the_next_who_needs_one(home: Home) -> None:
    embedded.ensure(10_000, program=program())
    (pid,) = home.nodes()
    os.kill(pid, signal.SIGKILL)
    until(lambda: embedded.find() is None, "it is gone", 10)
    assert home.socket.exists()  # nobody listens there any more
    assert embedded.ensure(10_000, program=program()) == home.address
    assert home.nodes() != [pid]


def test_a_node_that_dies_again_and_again_is_started_only_now_and_then(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(seat.STARTS):
        with pytest.raises(kvferry.LinkFailed, match=str(home.log)):
            embedded.ensure(10_000, program=program("dies"))
    with pytest.raises(kvferry.Busy, match=r"may start in \d+ s"):
        embedded.ensure(10_000, program=program())
    assert embedded.start_or_find(10_000, program=program()) is None
    assert "within 60 s" in caplog.text
    assert home.log.read_text().count("no wish to live") == seat.STARTS
    monkeypatch.setattr(seat, "START_WINDOW_S", 0.1)
    time.sleep(0.2)
    assert embedded.ensure(10_000, program=program()) == home.address


def test_stopping_on_purpose_is_no_reason_to_wait(home: Home) -> None:
    for _ in range(seat.STARTS + 1):
        embedded.ensure(10_000, program=program())
        assert embedded.stop() == "stopped"


def test_one_that_never_listens_costs_its_deadline_and_can_be_stopped(home: Home) -> None:
    begin = time.monotonic()
    with pytest.raises(kvferry.DeadlineExceeded, match=str(home.log)):
        embedded.ensure(1000, program=program("deaf"))
    assert time.monotonic() - begin < 8
    until(lambda: embedded.status().pid is not None, "its pid is known", 10)
    assert embedded.status().state == "starting"
    assert embedded.stop() == "stopped"
    assert home.nodes() == []


def test_one_that_does_not_leave_is_killed(home: Home) -> None:
    embedded.ensure(10_000, program=program("stubborn"))
    assert embedded.stop(300) == "killed"
    assert home.nodes() == []


def test_one_that_stands_still_is_found_and_stopped(home: Home) -> None:
    embedded.ensure(10_000, program=program())
    (pid,) = home.nodes()
    os.kill(pid, signal.SIGSTOP)
    assert embedded.ensure(0, program=program()) == home.address  # its memory is still there: no second one
    assert embedded.stop() == "stopped"


def test_what_cannot_be_started_is_named(home: Home) -> None:
    with pytest.raises(kvferry.LinkFailed, match="/nowhere/python"):
        embedded.ensure(1000, program=["/nowhere/python"])
    with pytest.raises(kvferry.LinkFailed, match="'' cannot be started"):
        embedded.ensure(1000, program=[""])


def test_a_process_without_descriptors_has_no_node_and_no_other_trouble(home: Home, peers: Peers) -> None:
    starter = peers(STARTER)
    starter.call("status")  # whatever is imported, is imported
    starter.call("use_up_descriptors")
    assert starter.call("start_or_find", 1000, program=program()) is None
    with pytest.raises(kvferry.LinkFailed, match="Too many open files"):
        starter.call("ensure", 1000, program=program())
    starter.kill()


def test_a_process_of_its_own_can_be_the_node(home: Home) -> None:
    address, lock = embedded.claim(1 << 30, None)
    assert address == home.address
    seen = embedded.status()
    assert (seen.state, seen.pid, seen.memory_bytes, seen.idle_s) == ("starting", os.getpid(), 1 << 30, None)
    with pytest.raises(kvferry.AlreadyExists, match="kvferry pool stop"):
        embedded.claim(1 << 30, None)
    with pytest.raises(kvferry.DeadlineExceeded):
        embedded.ensure(100, program=program())
    os.close(lock)
    assert embedded.status().state == "nobody"


def test_a_long_log_is_put_aside(home: Home) -> None:
    home.log.parent.mkdir(parents=True)
    home.log.write_text("x" * (places.LOG_BYTES + 1))
    embedded.ensure(10_000, program=program())
    assert home.log.stat().st_size == 0
    assert Path(f"{home.log}.1").stat().st_size == places.LOG_BYTES + 1


# --- where it does not go -------------------------------------------------------------------------------------------


def link(home: Home) -> None:
    (home.root / "elsewhere").mkdir(mode=0o700)
    home.directory.symlink_to(home.root / "elsewhere")


def dangling_link(home: Home) -> None:
    home.directory.symlink_to(home.root / "nowhere")


def file(home: Home) -> None:
    home.directory.write_text("")


def open_to_others(home: Home) -> None:
    home.directory.mkdir()
    home.directory.chmod(0o770)


def of_another_user(home: Home) -> None:
    home.directory.mkdir(0o700)
    os.chown(home.directory, NOBODY, NOBODY)


def in_another_users(home: Home) -> None:
    os.chown(home.runtime, NOBODY, NOBODY)


def below_an_open_one(home: Home) -> None:
    home.runtime.chmod(0o777)


def too_long(home: Home) -> None:
    home.runtime = home.root / ("x" * 100)
    home.runtime.mkdir(0o700)
    os.environ["XDG_RUNTIME_DIR"] = str(home.runtime)  # which the fixture puts back


@pytest.mark.parametrize(
    ("hostile", "said"),
    [
        (link, "is a symbolic link"),
        (dangling_link, "is a symbolic link"),
        (file, "is no directory"),
        (open_to_others, r"written to by others \(mode 770\)"),
        pytest.param(of_another_user, "belongs to uid 65534", marks=root_only),
        pytest.param(in_another_users, "belongs to uid 65534", marks=root_only),
        (below_an_open_one, r"written to by others \(mode 777\)"),
        (too_long, "too long for a socket"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_runtime_directory_that_others_can_meddle_with_is_refused(
    home: Home, caplog: pytest.LogCaptureFixture, hostile: "Callable[[Home], None]", said: str
) -> None:
    hostile(home)
    for call in (lambda: embedded.ensure(1000, program=program()), embedded.stop, embedded.status):
        with pytest.raises(kvferry.Refused, match=said) as refusal:
            call()
        assert "KVFERRY_POOL" in str(refusal.value)
    assert embedded.start_or_find(1000, program=program()) is None
    assert said.split(" (")[0].split(r" \(")[0] in caplog.text
    assert embedded.find() is None
    assert home.nodes() == []


@root_only
def test_a_node_of_another_user_is_refused(home: Home, peers: Peers) -> None:
    stranger = peers(
        """
        import os, socket
        listener = socket.socket(socket.AF_UNIX)
        def listen(path):
            listener.bind(path)
            listener.listen(4)
        """,
        uid=NOBODY,
    )
    home.root.chmod(0o711)
    theirs = home.root / "theirs"
    theirs.mkdir()
    theirs.chmod(0o777)
    stranger.call("listen", str(theirs / "sock"))
    home.directory.mkdir(0o700)
    (theirs / "sock").rename(home.socket)
    with pytest.raises(kvferry.Refused, match="is served by uid 65534"):
        embedded.ensure(1000, program=program())
    assert embedded.find() is None
    with pytest.raises(kvferry.Refused):
        embedded.stop()


@root_only
@pytest.mark.skipif(not os.access(SYSTEM_PYTHON, os.X_OK), reason=f"there is no {SYSTEM_PYTHON}")
def test_an_ordinary_user_without_a_home_has_a_node_too(home: Home, peers: Peers) -> None:
    home.root.chmod(0o755)
    os.chown(home.runtime, NOBODY, NOBODY)
    stub = home.root / "stub.py"
    shutil.copy(STUB, stub)
    script = home.root / "launch.py"
    shutil.copy(embedded.launch.__file__, script)
    environment = {"XDG_STATE_HOME": "", "HOME": "/root", "XDG_CONFIG_HOME": ""}
    starters = [
        peers(
            STARTER + f"\nembedded.launch.__file__ = {str(script)!r}",
            env=environment,
            uid=NOBODY,
            preload=["kvferry.pool.embedded"],
        )
        for _ in range(2)
    ]
    words = [SYSTEM_PYTHON, str(stub), "plain"]
    both = [starter.call_later("ensure", 15_000, program=words) for starter in starters]
    assert [one.result() for one in both] == [home.address, home.address]
    (pid,) = home.nodes()
    assert Path(f"/proc/{pid}").stat().st_uid == NOBODY
    assert starters[1].call("status").log == str(home.directory / "pool.log")
    with pytest.raises(kvferry.Refused, match="uid 65534"):
        embedded.ensure(1000, program=program())  # root is another user
    assert starters[1].call("stop") == "stopped"


def test_without_a_runtime_directory_there_is_one_in_tmp(monkeypatch: pytest.MonkeyPatch) -> None:
    uid = 4_000_000_123  # of nobody
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    for there_is_none in ("", "/nowhere", "relative"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", there_is_none)
        assert places.runtime_directory(create=False) == Path(f"/tmp/kvferry-{uid}")


# --- how big --------------------------------------------------------------------------------------------------------


def test_a_node_takes_a_quarter_of_what_is_free_and_no_more_than_configured(home: Home) -> None:
    words = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(words["MemAvailable"].split()[0]) * 1024
    assert 0 < embedded.fitting_memory() <= 1.1 * available / 4
    assert embedded.fitting_memory("64MiB") == 64 << 20
    with pytest.raises(kvferry.OutOfMemory, match=r"15.0 MiB here, and needs 16.0 MiB"):
        embedded.fitting_memory("15MiB")
    home.configure(memory="64MiB", idle_s=5)
    embedded.ensure(10_000, program=program())
    seen = embedded.status()
    assert (seen.memory_bytes, seen.idle_s) == (64 << 20, 5)
    (pid,) = home.nodes()
    given = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    assert given[given.index(b"--memory") + 1 :][:3] == [str(64 << 20).encode(), b"--idle-s", b"5"]


def test_a_memory_cgroup_bounds_it(home: Home, peers: Peers) -> None:
    starter = peers(STARTER)
    with memory_cgroup(400 << 20) as group:
        group.take_in(starter.pid)
        starter.call("ensure", 10_000, program=program())
        size = starter.call("status").memory_bytes
        assert embedded.stop() == "stopped"
        starter.close()
    assert 50 << 20 < size <= 100 << 20


def test_with_too_little_memory_there_is_no_node(home: Home, peers: Peers) -> None:
    starter = peers(STARTER)
    with memory_cgroup(60 << 20) as group:
        group.take_in(starter.pid)
        with pytest.raises(kvferry.OutOfMemory, match="memory cgroup"):
            starter.call("ensure", 10_000, program=program())
        for _ in range(seat.STARTS):  # which counts as no start
            assert starter.call("start_or_find", 1000, program=program()) is None
        with pytest.raises(kvferry.OutOfMemory):
            starter.call("ensure", 1000, program=program())
        starter.close()
    assert home.nodes() == []


# --- which pool is meant --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("off", None),
        ("private", "private"),
        ("own", "own"),
        ("unix:/p.sock", ["unix:/p.sock"]),
        ("10.0.0.1:7000, [::1]:7001", ["10.0.0.1:7000", "[::1]:7001"]),
        (["h:1", "unix:/p"], ["h:1", "unix:/p"]),
    ],
)
def test_resolve_knows_words_and_addresses(
    home: Home, monkeypatch: pytest.MonkeyPatch, said: "str | list[str]", meant: object
) -> None:
    assert places.resolve(said) == meant
    home.configure(members=said)
    assert places.resolve(None) == meant
    home.configure(members="elsewhere:1")
    if isinstance(said, str):
        monkeypatch.setenv("KVFERRY_POOL", f" {said} ")
        assert places.resolve(None) == meant
    assert places.resolve(["h:2"]) == ["h:2"]


def test_resolve_with_nothing_said_means_a_node_of_ones_own(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    assert places.resolve(None) == places.OWN
    monkeypatch.setenv("KVFERRY_POOL", "")
    assert places.resolve(None) == places.OWN
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/nowhere")
    assert places.resolve(None) == places.OWN


@pytest.mark.parametrize("where", ["environment", "file"])
def test_the_secret_of_nodes_that_are_configured_is_configured_too(
    home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    held = tmp_path / "secret"
    held.write_bytes(b"between us\n")
    node = NodeProcess(f"unix:{tmp_path}/pool.sock", "8MiB", "--secret-file", str(held))
    value, into = np.arange(1000, dtype=np.uint8), np.zeros(1000, np.uint8)
    try:
        home.configure(members=[node.address])
        with kvferry.Pool.connect() as pool:
            assert pool.save([b"a"], buffers=[value]).outcomes == ["node_lost"]
        if where == "file":
            home.configure(members=[node.address], secret_file=str(held))
        else:
            monkeypatch.setenv("KVFERRY_POOL", node.address)
            monkeypatch.setenv("KVFERRY_POOL_SECRET_FILE", str(held))
        with kvferry.Pool.connect() as pool:
            assert pool.save([b"a"], buffers=[value]).outcomes == ["saved"]
            assert pool.load([b"a"], buffers=[into]).outcomes == ["hit"]
            assert np.array_equal(into, value)
        with kvferry.Pool.connect(node_secret="another") as pool:  # what the caller says counts
            assert pool.load([b"a"], buffers=[into]).outcomes == ["node_lost"]
        for content, wrong in ((b"\n", "is empty"), (None, "cannot be read")):
            held.unlink() if content is None else held.write_bytes(content)
            with pytest.raises(kvferry.InvalidArgument, match=f"(?i)secret_file.*{wrong}"):
                kvferry.Pool.connect()
        with kvferry.Pool.connect("private"):  # which asks for none
            pass
    finally:
        node.stop()


@pytest.mark.parametrize("said", ["", "h", "h:1,,h:2", "unix:relative", "of", [], [7], ["off"]])
def test_resolve_refuses_what_is_no_address_and_says_where_it_stands(
    home: Home, monkeypatch: pytest.MonkeyPatch, said: "str | list[str]"
) -> None:
    with pytest.raises(kvferry.InvalidArgument, match="members"):
        places.resolve(said)
    if said and isinstance(said, str):
        monkeypatch.setenv("KVFERRY_POOL", said)
        with pytest.raises(kvferry.InvalidArgument, match="KVFERRY_POOL"):
            places.resolve(None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"member": []}, "unknown field"),
        ({"members": 7}, "members"),
        ({"memory": "much"}, "memory='much' is no size"),
        ({"idle_s": 0}, "idle_s=0"),
        ({"idle_s": 2e6}, "idle_s=2000000.0"),  # which a node could not be told
        ({"idle_s": "soon"}, "idle_s"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused_by_name(home: Home, words: "dict[str, Any]", said: str) -> None:
    path = home.configure(**words)
    with pytest.raises(kvferry.InvalidArgument, match=said) as error:
        places.settings()
    assert str(path) in str(error.value)
    path.write_text("{")
    with pytest.raises(kvferry.InvalidArgument, match=str(path)):
        places.settings()


def test_the_launcher_leaves_the_lock_to_who_has_it(home: Home) -> None:
    _, lock = embedded.claim(1 << 30, None)
    command = [
        sys.executable,
        "-I",
        "-S",
        embedded.launch.__file__,
        str(home.directory / "node.lock"),
        "{}",
        *program(),
    ]
    assert subprocess.run(command, check=False, timeout=30).returncode == embedded.launch.BUSY
    os.close(lock)


# --- with kvferry's own node ----------------------------------------------------------------------------------------

CLIENT = """
import kvferry, numpy as np

pool = None
def connect(**words):
    global pool
    pool = kvferry.Pool.connect(namespace="own", **words)
def save(names):
    values = [np.frombuffer(name.encode() * 1000, np.uint8).copy() for name in names]
    return pool.save(names, buffers=[[value] for value in values], timeout_ms=15_000).outcomes
def load(names, timeout_ms=15_000):
    values = [np.zeros(1000 * len(name), np.uint8) for name in names]
    found = pool.load(names, buffers=[[value] for value in values], timeout_ms=timeout_ms)
    assert all(bytes(value) == name.encode() * 1000 for name, value, ok in zip(names, values, found.ok) if ok)
    return found.outcomes
def load_until(names, outcomes):
    import time
    until = time.monotonic() + 15
    while (seen := load(names)) != outcomes and time.monotonic() < until:
        time.sleep(0.05)
    return seen
"""


def test_what_a_process_has_saved_is_loaded_after_its_end(home: Home, peers: Peers) -> None:
    first = peers(CLIENT)
    first.call("connect")
    assert first.call("save", ["a", "b", "c"]) == ["saved"] * 3
    first.close()
    second = peers(CLIENT)
    second.call("connect")
    assert second.call("load", ["a", "b", "c", "d"]) == ["hit", "hit", "hit", "never_saved"]
    assert len(home.nodes()) == 1
    assert "kvferry pool node at" in home.log.read_text()
    assert "kvferry pool stop" in home.log.read_text()


def test_when_the_node_dies_its_values_are_misses_and_there_is_another(home: Home, peers: Peers) -> None:
    client = peers(CLIENT)
    client.call("connect")
    assert client.call("save", ["a"]) == ["saved"]
    (pid,) = home.nodes()
    os.kill(pid, signal.SIGKILL)
    assert client.call("load", ["a"])[0] in ("node_lost", "never_saved")
    assert client.call("load_until", ["a"], ["never_saved"]) == ["never_saved"]
    assert client.call("save", ["a"]) == ["saved"]
    (other,) = home.nodes()
    assert other != pid


class FullDisk:
    """A file system of its own at ``path``, of 64 KiB and 64 files, all taken until :meth:`clear`."""

    def __init__(self, path: Path, of: str) -> None:
        self._path, self._of = path, of
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        options = "size=64k,nr_inodes=64,mode=0700"
        command = ["mount", "-t", "tmpfs", "-o", options, "kvferry-test", path]
        if subprocess.run(command, check=False, timeout=30).returncode:
            pytest.skip("a file system cannot be mounted here")

    def fill(self) -> None:
        with contextlib.suppress(OSError):
            if self._of == "bytes":
                with open(self._path / "fill", "wb", buffering=0) as file:
                    while file.write(b"x" * 4096):
                        pass
            else:
                for number in range(100):
                    (self._path / f"fill {number}").touch()

    def clear(self) -> None:
        for file in self._path.glob("fill*"):
            file.unlink()

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", self._path], check=True, timeout=30)


@pytest.fixture
def full_disk() -> "Iterator[Callable[[Path, str], FullDisk]]":
    made: list[FullDisk] = []

    def make(path: Path, of: str) -> FullDisk:
        made.append(FullDisk(path, of))
        return made[-1]

    yield make
    for disk in made:
        disk.close()


@root_only
@pytest.mark.parametrize("of", ["bytes", "files"])
@pytest.mark.parametrize("where", ["runtime", "state"])
def test_a_full_disk_costs_misses_while_it_is_full_and_nothing_after(
    home: Home, peers: Peers, full_disk: "Callable[[Path, str], FullDisk]", where: str, of: str
) -> None:
    disk = full_disk(getattr(home, where), of)
    disk.fill()
    client = peers(CLIENT)
    client.call("connect")
    assert client.call("load", ["a"])[0] in ("node_lost", "never_saved")
    assert client.call("save", ["a"])[0] in ("node_lost", "saved")
    if where == "state":  # there the log alone would be, and the node serves without it
        assert client.call("save", ["b"]) in (["saved"], ["present"])
    disk.clear()
    assert client.call("load_until", ["c"], ["never_saved"]) == ["never_saved"]
    assert client.call("save", ["c"]) == ["saved"]
    disk.fill()
    assert client.call("load", ["c"]) == ["hit"]
    assert client.call("save", ["d"]) == ["saved"]
    assert embedded.status().state == "listening"
    assert embedded.stop() == "stopped"


@pytest.mark.parametrize(
    ("variable", "words", "outcome"),
    [("off", {}, "pool_off"), ("", {"start": False}, "node_lost"), ("private", {}, "never_saved")],
    ids=["off", "start=False", "private"],
)
def test_no_node_is_started_where_none_is_wanted(
    home: Home, peers: Peers, variable: str, words: "dict[str, Any]", outcome: str
) -> None:
    client = peers(CLIENT, env={"KVFERRY_POOL": variable})
    client.call("connect", **words)
    assert client.call("load", ["a"]) == [outcome]
    assert home.nodes() == []
    assert not home.directory.exists()


def test_a_node_leaves_when_nobody_has_used_it_for_its_idle_time(home: Home, peers: Peers) -> None:
    home.configure(idle_s=1, memory="64MiB")
    client = peers(CLIENT)
    client.call("connect")
    client.call("save", ["a"])
    time.sleep(2)
    assert client.call("load", ["a"]) == ["hit"]  # who is linked keeps it
    client.close()
    until(lambda: embedded.status().state == "nobody", "it has left", 10)
    assert not home.socket.exists()


def test_a_node_that_was_started_by_hand_is_the_one_of_ones_own(home: Home, peers: Peers) -> None:
    words = [sys.executable, "-m", "kvferry.cli", "pool", "serve", "--memory", "64MiB", "--segment", "8MiB"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        line = node.stdout.readline()
        assert home.address in line
        assert line.endswith("stop it with SIGTERM or `kvferry pool stop`\n")
        client = peers(CLIENT)
        client.call("connect")
        assert client.call("save", ["a"]) == ["saved"]
        again = command("pool", "serve")
        assert again.returncode == 1
        assert "kvferry pool stop" in again.stderr
        seen = command("pool", "status")
        assert f"pid       {node.pid}" in seen.stdout
        assert "64.0 MiB" in seen.stdout
        assert "keys      1, of 1.0 KiB" in seen.stdout
        assert "copies    0, of 0 bytes, of what other nodes own" in seen.stdout
        assert command("pool", "stop").returncode == 0
        assert node.wait(15) == 0


def test_a_node_that_was_started_by_hand_takes_what_the_configuration_says_unless_it_is_told(home: Home) -> None:
    path = home.configure(memory="64MiB", idle_s=3600)
    for options, memory, idle in ([], "64.0 MiB", 3600), (["--memory", "6MiB", "--idle-s", "60"], "6.0 MiB", 60):
        words = [sys.executable, "-m", "kvferry.cli", "pool", "serve", *options]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as node:
            try:
                assert node.stdout is not None
                line = node.stdout.readline()
                assert line.startswith(f"kvferry pool node at {home.address}: {memory} at most, process {node.pid}; ")
                assert embedded.status().idle_s == idle
            finally:
                node.terminate()
        assert node.returncode == 0
    path.write_text("{")
    refused = command("pool", "serve", "--idle-s", "0.1")
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (1, "", 1)
    assert refused.stderr.startswith(f"kvferry pool serve: {path}: ")
    listen = ["--listen", f"unix:{home.root}/other.sock", "--memory", "64MiB", "--idle-s", "0.1"]
    assert command("pool", "serve", *listen).returncode == 0  # of which the file says nothing


# --- the command ----------------------------------------------------------------------------------------------------


def command(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "kvferry.cli", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_command_finds_it_and_stops_it(home: Home) -> None:
    nobody = command("pool", "status")
    assert nobody.returncode == 1
    assert home.address in nobody.stdout
    embedded.ensure(10_000, program=program())
    seen = command("pool", "status")
    assert seen.returncode == 0
    for word in (home.address, str(home.nodes()[0]), "GiB", "900 s", str(home.log), "kvferry pool stop"):
        assert word in seen.stdout
    assert json.loads(command("pool", "status", "--json").stdout)["state"] == "listening"
    assert (command("pool", "stop").stdout, home.nodes()) == ("The pool node has left\n", [])
    assert command("pool", "stop").stdout == "No pool node of your own runs\n"
    embedded.ensure(10_000, program=program("stubborn"))
    assert "was killed" in command("pool", "stop", "--timeout-s", "0.3").stdout


@pytest.mark.parametrize("verb", ["status", "stop", "serve"])
def test_the_command_says_in_one_line_what_is_wrong(home: Home, verb: str) -> None:
    open_to_others(home)
    answer = command("pool", verb)
    assert answer.returncode == 1
    assert answer.stderr.count("\n") == 1
    assert "written to by others" in answer.stderr
