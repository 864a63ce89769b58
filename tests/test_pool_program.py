"""A pool node as a program: its options, each refused by name where it cannot be, and how it says that it is to be ended."""

from pathlib import Path

import pytest

import kvferry.cli
from kvferry.pool import program
from pool_support import NodeProcess

pytestmark = pytest.mark.quick("refused", "stop")


@pytest.mark.parametrize(
    "run", [lambda words: kvferry.cli.main(["pool", "serve", *words]), program.main], ids=["cli", "module"]
)
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--listen", "nonsense", "write 'host:port'"),
        ("--listen", "127.0.0.1:99999", "ports end at 65535"),
        ("--listen", "unix:", "write 'unix:path'"),
        ("--memory", "much", "write 8GiB"),
        ("--memory", "99999999999TiB", "write 8GiB"),
        ("--segment", "1", "write 8GiB"),
        ("--idle-s", "nan", "give seconds"),
        ("--idle-s", "inf", "give seconds"),
        ("--idle-s", "0", "give seconds"),
        ("--policy", "nonsense", "s3fifo"),
        ("--secret-file", "{}/none", "none' cannot be read: No such file"),
        ("--secret-file", "{}", "cannot be read: Is a directory"),
        ("--secret-file", "{}/empty", "empty' is empty"),
        ("--node-id", "0", "from 1 to"),
        ("--node-id", "9" * 5000, "from 1 to"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(
    run: "object", option: str, value: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(SystemExit, match="2"):
        run([option, value.format(tmp_path)])  # type: ignore[operator]
    words = capsys.readouterr().err.splitlines()[-1]
    assert words.startswith(f"kvferry pool serve: error: argument {option}: ")
    assert said in words
    assert len(words) < 200


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e400", "soon"])
def test_a_time_to_stop_that_cannot_be_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        kvferry.cli.main(["pool", "stop", "--timeout-s", value])
    assert f"argument --timeout-s: '{value}' is no time: give seconds, from 0" in capsys.readouterr().err


def test_where_it_cannot_listen_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--listen", f"unix:{tmp_path}/none/sock", "--memory", "1MiB"]) == 1
    assert capsys.readouterr().err == (
        f"kvferry pool serve: cannot listen on unix:{tmp_path}/none/sock: No such file or directory\n"
    )


def test_it_warns_when_it_listens_beyond_this_host_without_a_secret(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text("long and random\n")
    for options, warned in ([], True), (["--secret-file", f"{tmp_path}/secret"], False):
        node = NodeProcess("0.0.0.0:0", "1MiB", *options)
        assert node.stop() == 0
        assert ("secret" in capfd.readouterr().err) == warned


def test_it_says_how_to_stop_it(tmp_path: Path) -> None:
    node = NodeProcess(f"unix:{tmp_path}/sock", "1MiB")
    assert node.line.endswith("; stop it with SIGTERM\n")  # `kvferry pool stop` ends another one: that of its user
    assert node.stop() == 0
