"""What the demo prints: a table, and what follows from it."""

from demo.__main__ import main
from demo.play import LAYERS, PULL, Handover, Outcome
from demo.report import render
from demo.reuse import Answered, Reuse

PULLED = Handover("map", PULL, 54_558_720, 0.005, 0.005, equal=True)
BY_LAYERS = Handover("map", LAYERS, 54_558_720, 0.010, 0.001, equal=True)

COMPUTED = Answered([1, 2, 3], first_token_s=4.5, computed=1282)
LOADED = Answered([1, 2, 3], first_token_s=0.5, computed=114, hits=73, size_bytes=53_821_440, load_s=0.016)
WRONG = Answered([1, 2, 4], first_token_s=0.5, computed=114, hits=73, size_bytes=53_821_440, load_s=0.016)
MISSED = Answered([1, 2, 3], first_token_s=4.5, computed=1282, load_s=0.001)


def reuse(*pooled: Answered, altered: Answered = WRONG) -> Reuse:
    return Reuse(80, 16, (COMPUTED,) * len(pooled), pooled, altered)


GOOD_REUSE = reuse(LOADED, LOADED)


def outcome(
    *handovers: Handover, altered: bool = True, left_out: bool = True, reuse: Reuse = GOOD_REUSE, **refused: str
) -> Outcome:
    return Outcome(handovers, refused, altered, left_out, reuse)


def test_a_good_run_has_a_line_for_each_handover_and_all_its_conclusions() -> None:
    lines = render(outcome(PULLED, BY_LAYERS)).splitlines()
    assert lines[2].split() == ["map", "pull", "54,558,720", "5.00", "ms", "10.9", "5.00", "ms", "equal"]
    assert lines[3].split()[-4:] == ["1.00", "ms", "90.0%", "equal"]
    assert [line[:4] for line in lines[-6:]] == ["ok  "] * 6


def test_the_first_token_with_the_pool_and_without_stand_one_above_the_other() -> None:
    said = render(outcome(PULLED))
    computed, loaded = (" ".join(line.split()) for line in said.splitlines() if "blocks, " in line or "again" in line)
    assert computed == "computed again 4500 ms 1,282 tokens equal"
    assert loaded == "from the pool 500 ms 114 tokens 73 of 80 blocks, 1,168 tokens 53,821,440 16.00 ms 3.4 equal"
    assert "found 73 of the longer prompt's 80 blocks: first token 9.0 times as early" in said
    assert "the tokens of 4 of 4 requests equal" in said


def test_one_request_with_other_tokens_is_shouted_and_the_run_does_not_hold() -> None:
    seen = outcome(PULLED, reuse=reuse(LOADED, WRONG))
    assert not seen.holds
    assert "DIFFERENT" in render(seen)
    assert "FAIL pool: the tokens of 3 of 4 requests equal those of the undivided run" in render(seen)


def test_tokens_of_which_fewer_were_decoded_are_compared_as_far_as_they_go() -> None:
    shorter = Answered([1, 2], 0.5, 114, 73, 1, 0.1)
    assert reuse(LOADED, shorter).holds
    assert not reuse(LOADED, Answered([2], 0.5, 114, 73, 1, 0.1)).holds


def test_a_pool_in_which_nothing_was_found_does_not_hold() -> None:
    seen = outcome(PULLED, reuse=reuse(LOADED, MISSED))
    assert not seen.holds
    assert "FAIL pool: of the longer prompt's 80 blocks one process found none" in render(seen)


def test_an_altered_block_that_changes_nothing_or_was_not_found_does_not_hold() -> None:
    for altered in (LOADED, MISSED):
        seen = outcome(PULLED, reuse=reuse(LOADED, altered=altered))
        assert not seen.holds
        assert "FAIL pool: one saved block altered" in render(seen)


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
    shown = render(outcome(PULLED), width=140)
    assert "54,558,720" in shown
    assert "73 of 80 blocks" in shown


def test_what_this_python_lacks_is_named_with_the_command_that_brings_it(monkeypatch, capsys) -> None:
    monkeypatch.setattr("demo.__main__.NEEDED", ("kvferry", "no_such_torch"))
    assert main(["--tiny"]) == 2
    said = capsys.readouterr().err
    assert "lacks no_such_torch" in said
    assert "`make demo`" in said
