"""What the demo prints: a table, and what follows from it."""

from demo.__main__ import main
from demo.play import LAYERS, PULL, Handover, Outcome
from demo.report import render

PULLED = Handover("map", PULL, 54_558_720, 0.005, 0.005, equal=True)
BY_LAYERS = Handover("map", LAYERS, 54_558_720, 0.010, 0.001, equal=True)


def outcome(*handovers: Handover, altered: bool = True, left_out: bool = True, **refused: str) -> Outcome:
    return Outcome(handovers, refused, altered, left_out)


def test_a_good_run_has_a_line_for_each_handover_and_three_conclusions() -> None:
    lines = render(outcome(PULLED, BY_LAYERS)).splitlines()
    assert lines[2].split() == ["map", "pull", "54,558,720", "5.00", "ms", "10.9", "5.00", "ms", "equal"]
    assert lines[3].split()[-4:] == ["1.00", "ms", "90.0%", "equal"]
    assert [line[:4] for line in lines[-3:]] == ["ok  "] * 3


def test_the_hidden_share_is_what_did_not_have_to_be_waited_for() -> None:
    assert BY_LAYERS.hidden == 0.9
    assert PULLED.hidden is None


def test_other_tokens_are_shouted_and_the_run_does_not_hold() -> None:
    wrong = Handover("cma", PULL, 1, 1.0, 1.0, equal=False)
    seen = outcome(PULLED, wrong)
    assert not seen.holds
    assert "DIFFERENT" in render(seen)
    assert "FAIL 1 of 2 handovers" in render(seen)


def test_a_run_that_proves_nothing_does_not_hold() -> None:
    assert outcome(PULLED).holds
    assert not outcome().holds
    for seen in (outcome(PULLED, altered=False), outcome(PULLED, left_out=False)):
        assert not seen.holds
        assert "are the same, so they do not come from the KV cache" in render(seen)


def test_a_transport_that_was_not_offered_stands_there_with_its_reason() -> None:
    assert "cma was not offered here: Yama forbids it" in render(outcome(PULLED, cma="Yama forbids it"))


def test_a_table_for_the_screen_holds_the_same(monkeypatch) -> None:
    assert "54,558,720" in render(outcome(PULLED), width=120)


def test_what_this_python_lacks_is_named_with_the_command_that_brings_it(monkeypatch, capsys) -> None:
    monkeypatch.setattr("demo.__main__.NEEDED", ("kvferry", "no_such_torch"))
    assert main(["--tiny"]) == 2
    said = capsys.readouterr().err
    assert "lacks no_such_torch" in said
    assert "`make demo`" in said
