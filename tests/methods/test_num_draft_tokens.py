"""The number of guesses that a caller asks for, and statistics of steps that a text ends in."""

from __future__ import annotations

from pathlib import Path

import pytest

import vivace
from tests.every_method import make_model
from vivace.errors import ConfigError
from vivace.kernels.choice import choose

PROMPT = "aka bob aka bob aka bob aka"


@pytest.mark.parametrize("method", ["quantized+lookup", "multirate+lookup"])
def test_both_halves_of_a_composition_take_it(method: str, tmp_path: Path) -> None:
    if choose().body is None:
        pytest.skip("quantized drafts are native")
    engine = vivace.load(make_model(tmp_path, method), dtype="bfloat16")
    for length in (1, 2):
        answer = engine.generate(
            PROMPT, method=method, num_draft_tokens=length, max_new_tokens=40, ignore_eos=True, do_sample=False
        )[0]
        assert 0 < len(answer.stats.drafted_per_position) <= length


@pytest.mark.parametrize("method", ["lookup", "lookahead", "multirate"])
@pytest.mark.parametrize("length", [0, -3, 1000])
def test_a_number_that_cannot_be_is_named(method: str, length: int, tmp_path: Path) -> None:
    engine = vivace.load(make_model(tmp_path, method))
    with pytest.raises(ConfigError, match=f"num_draft_tokens is {length}; a draft has 1 to"):
        engine.generate(PROMPT, method=method, num_draft_tokens=length)


@pytest.mark.parametrize("method", ["lookup", "multirate", "draft"])
def test_guesses_behind_the_end_of_a_text_count_for_nothing(method: str, tmp_path: Path) -> None:
    """Wherever a text ends, every step has given its accepted guesses and one token more."""
    engine = vivace.load(make_model(tmp_path, method))
    whole = engine.generate(PROMPT, method=method, max_new_tokens=48, ignore_eos=True, do_sample=False)[0]
    ends = [engine.tokenizer.decode(whole.token_ids[place : place + 2]) for place in range(4, 46, 3)]
    found = set()
    for end in filter(str.strip, ends):
        answer = engine.generate(
            PROMPT, method=method, max_new_tokens=48, stop_strings=[end], ignore_eos=True, do_sample=False
        )[0]
        stats = answer.stats
        assert stats.num_accepted_draft_tokens + stats.num_spec_steps == stats.num_tokens
        assert sum(stats.accepted_per_position) == stats.num_accepted_draft_tokens
        found.add(stats.num_accepted_draft_tokens > 0)
    assert found


def test_adapters_that_are_no_folders_are_one_line(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "lookup")
    for wrong in (["x"], 5, {"x": ["y"]}):
        with pytest.raises(ConfigError, match="adapters are a folder, or folders by name"):
            vivace.load(folder, adapters=wrong)  # type: ignore[arg-type]
