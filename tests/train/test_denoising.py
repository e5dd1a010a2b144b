"""Pairs of damaged and whole pieces of sources, on which a model learns to read."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vivace.errors import ConfigError
from vivace.train.denoising import HIDDEN, Denoising, DenoisingConfig, damaged

PAIRS = [
    ("Sum it up.\n\nAnna: It rains today. I stay in.\nBert: So do I.", "They stay in."),
    ("Sum it up.\n\nCora: Where is my hat?\nDora: On your head.", "A hat is found."),
]


def _words(text: str) -> list[str]:
    return [word for word in text.split() if word != HIDDEN]


@given(count=st.integers(1, 40), seed=st.integers(0, 999), hidden=st.floats(0.05, 0.95), span=st.floats(1, 8))
def test_words_that_are_not_hidden_stay_in_their_order(count: int, seed: int, hidden: float, span: float) -> None:
    words = [f"w{index} " for index in range(count)]
    config = DenoisingConfig(share=1, hidden=hidden, span=span)
    shown = damaged(words, config, random.Random(seed)).split()
    kept = [word for word in shown if word != HIDDEN]
    assert kept == sorted(kept, key=lambda word: int(word[1:]))
    assert set(kept) < {word.strip() for word in words}, "something is hidden"
    assert kept or count == 1, "something stays"
    assert not any(a == b == HIDDEN for a, b in itertools.pairwise(shown)), "a span has one mark"


@pytest.mark.parametrize("hidden", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("span", [2.0, 4.0])
def test_as_many_words_are_hidden_as_asked_in_spans_of_that_length(hidden: float, span: float) -> None:
    words = [f"w{index} " for index in range(200_000)]
    config = DenoisingConfig(share=1, hidden=hidden, span=span)
    shown = damaged(words, config, random.Random(0)).split()
    num_hidden = len(words) - len(_words(" ".join(shown)))
    assert num_hidden / len(words) == pytest.approx(hidden, rel=0.05)
    assert num_hidden / shown.count(HIDDEN) == pytest.approx(span, rel=0.05)


def test_pieces_begin_at_lines_and_sentences_behind_what_all_sources_begin_with() -> None:
    drawn = Denoising(DenoisingConfig(share=50, words=4), PAIRS).drawn(random.Random(0), epoch=0)
    assert len(drawn) == 100
    assert {piece for _, piece in drawn} == {
        "Anna: It rains today.",
        "I stay in.\nBert:",
        "Bert: So do I.",
        "Cora: Where is my",
        "Dora: On your head.",
    }
    assert all(set(_words(source)) < set(piece.split()) for source, piece in drawn)


def test_there_are_none_after_the_first_epochs_and_the_same_seed_draws_the_same() -> None:
    made = Denoising(DenoisingConfig(share=1, epochs=2), PAIRS)
    assert made.drawn(random.Random(3), epoch=1) == made.drawn(random.Random(3), epoch=1) != []
    assert made.drawn(random.Random(3), epoch=2) == []


@pytest.mark.parametrize("pairs", [[], [("same", "a"), ("same", "b")], [("a b", "x"), ("a c", "y")], [(" \n", "x")]])
def test_few_sources_are_enough(pairs: list[tuple[str, str]]) -> None:
    drawn = Denoising(DenoisingConfig(share=2), pairs).drawn(random.Random(0), epoch=0)
    assert all(source and piece for source, piece in drawn)
    assert len(drawn) == (2 * len(pairs) if any(source.strip() for source, _ in pairs) else 0)


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ({"share": -1}, "share >= 0"),
        ({"epochs": 0}, "epochs >= 1"),
        ({"words": 0}, "words >= 1"),
        ({"hidden": 1.0}, "hidden"),
        ({"span": 0.5}, "span"),
        ({"share": float("nan")}, "share"),
        ({"span": float("nan")}, "span"),
    ],
)
def test_settings_that_say_nothing_are_refused(setting: dict[str, float], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        DenoisingConfig(**setting)  # type: ignore[arg-type]
