"""Drafting with several gates, replayed on what each of them guesses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import gates
from benchmarks.gates import Guessed, Policy, best_policy, known, replay

SHARES = {2: 0.1, 6: 0.3}
answers = st.lists(
    st.lists(st.tuples(st.booleans(), st.floats(0, 1), st.booleans(), st.floats(0, 1)), min_size=1, max_size=12),
    min_size=1,
    max_size=3,
).map(
    lambda texts: [
        {
            2: Guessed([row[0] for row in text], [row[1] for row in text]),
            6: Guessed([row[2] for row in text], [row[3] for row in text]),
        }
        for text in texts
    ]
)


def test_one_gate() -> None:
    answer = {2: Guessed([True, True, False, True, True, True], [1.0] * 6)}
    found = replay([answer], Policy((2,), 2, 0.0, 0.0), SHARES)
    # two kept and a bonus token, then two kept and a bonus token
    assert (found.steps, found.tokens, found.guesses) == (2, 6, 4)
    assert found.read == pytest.approx(2 + 4 * 0.1)
    assert found.gain == pytest.approx(6 / 2.4)


def test_what_follows_a_wrong_guess_is_lost_and_was_paid_for() -> None:
    answer = {2: Guessed([False, True, True, True], [1.0] * 4)}
    found = replay([answer], Policy((2,), 3, 0.0, 0.0), SHARES)
    assert (found.steps, found.tokens, found.guesses) == (2, 4, 6)


def test_an_unsure_guess_is_handed_on_and_ends_the_draft_where_it_is_taken() -> None:
    answer = {2: Guessed([True, False, True], [0.9, 0.2, 0.9]), 6: Guessed([True, True, True], [0.9, 0.5, 0.9])}
    both = Policy((2, 6), 3, 0.6, 0.0)
    assert replay([answer], both, SHARES).read == pytest.approx(1 + 0.1 + 0.3 + 0.1)
    ended = replay([answer], Policy((2, 6), 3, 0.6, 0.55), SHARES)
    assert (ended.steps, ended.guesses, ended.read) == (1, 2, pytest.approx(1 + 0.1 + 0.3))


def test_a_router_that_knows() -> None:
    answer = {2: Guessed([True, False, False, True], [0.0] * 4), 6: Guessed([True, True, False, True], [0.0] * 4)}
    found = known([answer], (2, 6), SHARES, 4)
    assert (found.steps, found.tokens, found.guesses) == (2, 4, 2)
    assert found.read == pytest.approx(2 + 0.1 + 0.3)


@given(answers, st.sampled_from([(2,), (6,), (2, 6)]), st.integers(1, 8), st.floats(0, 1), st.floats(0, 1))
def test_no_policy_beats_what_is_known(
    texts: list[dict[int, Guessed]], which: tuple[int, ...], longest: int, taken: float, ends: float
) -> None:
    found = replay(texts, Policy(which, longest, taken, ends), SHARES)
    bound = known(texts, which, SHARES, longest)
    assert found.tokens == bound.tokens == sum(len(text[2].right) for text in texts)
    assert found.gain <= bound.gain * (1 + 1e-9)


def test_the_best_policy_is_found_by_trying_all() -> None:
    texts = [{2: Guessed([True, False] * 10, [0.9, 0.1] * 10), 6: Guessed([True] * 20, [0.9] * 20)}]
    chosen = best_policy(texts, (2, 6), SHARES)
    # the lower gate's unsure guesses are wrong, the higher gate's are right
    assert 0.1 < chosen.taken <= 0.9
    found, bound = replay(texts, chosen, SHARES), known(texts, (2, 6), SHARES, 8)
    assert found.steps == bound.steps
    assert found.guesses - bound.guesses <= 1, "the last token of an answer"


def test_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gates", "--runs", str(tmp_path), "--json", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit, match="no folder 'exit layer K'"):
        gates.main()


def test_the_table(tmp_path: Path) -> None:
    texts = [{2: Guessed([True] * 8, [0.9] * 8), 6: Guessed([True] * 8, [0.9] * 8)}] * 2
    report = {"prompts": "e2e", "num_prompts": 2, "rows": gates._rows(texts, SHARES)}
    written = {"model": "m", "layers": 24, "provenance": {"commit": "abc+changes"}, "report": [report]}
    (tmp_path / "one.json").write_text(json.dumps(written))
    shown = gates.tables(tmp_path)
    assert "| 2 | 1.00 |" in shown
    assert "| 2 or 6 | 1.00 |" in shown
    assert "**from a tree with uncommitted changes** on top of commit abc; replayed" in shown
