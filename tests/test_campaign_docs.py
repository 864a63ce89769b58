"""docs/failures.md names tests; they are there."""

import re

from support.peer import TESTS

PROJECT = TESTS.parent
NAMED = re.compile(r"`(?:(test_\w+\.cpp): )?(\w+)`")


def defined() -> "dict[str, set[str]]":
    """What each file of native tests, and "" for the others, defines."""
    found = {
        path.name: set(re.findall(r"^static void (\w+)\(", path.read_text(), re.MULTILINE))
        for path in (PROJECT / "core" / "tests").glob("test_*.cpp")
    }
    pattern = re.compile(r"^def (test_\w+)\(", re.MULTILINE)
    return found | {"": {name for path in TESTS.rglob("test_*.py") for name in pattern.findall(path.read_text())}}


def test_every_row_names_tests_that_exist() -> None:
    text, tests = (PROJECT / "docs" / "failures.md").read_text(), defined()
    missing = [
        (file, name)
        for file, name in NAMED.findall(text)
        if (file or name.startswith("test_")) and name not in tests.get(file, set())
    ]
    assert not missing
    rows = [line for line in text.splitlines() if line.startswith("|") and not set(line) <= set("|- ")]
    bare = [row for row in rows if not re.search(r"`test_\w+(\.cpp: \w+)?`[^|]*\|$", row) and "| Tests |" not in row]
    assert len(rows) > 40 and not bare
