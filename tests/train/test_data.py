"""Pairs become rows and batches that can be found again."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.tiny import PAIRS, batches
from vivace.checkpoint.tokenizer import Tokenizer
from vivace.errors import CapacityError, ConfigError
from vivace.prompts import Prompt
from vivace.train.data import (
    Batches,
    BatchPlace,
    Row,
    Rows,
    Unended,
    Untold,
    asked,
    collate,
    grouped,
    pairs_of,
    pieces_of,
    shuffled_groups,
    take_groups,
)
from vivace.train.variation import Variation, VariationConfig


def test_only_the_answer_and_the_end_are_scored(tokenizer: Tokenizer) -> None:
    (row,) = Rows(tokenizer, 128).encode([PAIRS[0]])
    batch = collate([row])
    learnt = batch.tokens[batch.scored].tolist()
    assert learnt == [*tokenizer.encode(PAIRS[0][1], special=False), tokenizer.eos_ids[0]]
    assert batch.tokens[0, : row.num_prompt].tolist() == tokenizer.encode_prompt(PAIRS[0][0])
    assert batch.targets.tolist() == learnt
    assert batch.tokens.reshape(-1)[batch.predicting].tolist() == [row.tokens[row.num_prompt - 1], *learnt[:-1]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(2, 70), min_size=1, max_size=60), st.integers(8, 300))
def test_every_row_is_in_one_batch_of_like_rows(lengths: list[int], room: int) -> None:
    rows = [Row(tuple([index + 1] * length), 1) for index, length in enumerate(lengths)]
    groups = grouped(rows, room, random.Random(0))
    assert sorted(row.tokens[0] for group in groups for row in group) == [row.tokens[0] for row in rows]
    for group in groups:
        batch = collate(group)
        assert batch.tokens.shape[1] - min(len(row.tokens) for row in group) < 8
        assert batch.tokens.numel() <= room or len(group) == 1


def test_a_place_is_found_again(tokenizer: Tokenizer) -> None:
    whole = batches(tokenizer).start_at(BatchPlace())
    seen = [next(whole) for _ in range(11)]
    for index in (0, 4, 9):
        again = batches(tokenizer).start_at(seen[index][0])
        for place, batch in seen[index + 1 :]:
            other_place, other = next(again)
            assert other_place == place
            assert torch.equal(other.tokens, batch.tokens)
    assert seen[-1][0].epoch >= 1


def test_epochs_and_seeds_differ(tokenizer: Tokenizer) -> None:
    first, second = batches(tokenizer), batches(tokenizer, seed=1)
    assert first.epoch(0) != first.epoch(1)
    assert first.epoch(0) != second.epoch(0)


def test_rows_that_are_too_long_are_left_out_and_refused_when_all_are(tokenizer: Tokenizer) -> None:
    long = ("Describe: " + "name " * 300, "x")
    assert len(Rows(tokenizer, 64).encode([long, PAIRS[0]])) == 1
    with pytest.raises(CapacityError, match="the limit is 64"):
        Rows(tokenizer, 64).encode([long])


def test_what_leaves_nothing_to_predict_is_left_out(tokenizer: Tokenizer) -> None:
    piece = (Untold("x"), Unended(""))
    assert len(tokenizer.inner("x", add_special_tokens=False)["input_ids"]) == 1
    rows = Rows(tokenizer, 64)
    assert len(rows.encode([piece, PAIRS[0]])) == 1
    assert all(batch.weight for batch in rows.batches([piece, *PAIRS], 8))
    assert rows.encode([]) == []


def test_prompts_that_leave_no_room_are_refused_and_hang_nothing(tokenizer: Tokenizer) -> None:
    with pytest.raises(CapacityError, match="the limit is 4"):
        Rows(tokenizer, 4, cuts=True).encode([("Describe: " + "name " * 30, "x")])
    with pytest.raises(ConfigError, match="no row was drawn in 1000 epochs"):
        next(Batches(lambda rng, epoch: [], Rows(tokenizer, 64), tokens_per_batch=64).start_at(BatchPlace()))


def test_what_cannot_be_learnt_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="reference"):
        pairs_of([Prompt("Hi")])
    with pytest.raises(ConfigError, match="at least 8"):
        Batches(lambda rng, epoch: PAIRS, Rows(tokenizer, 64), tokens_per_batch=4)
    with pytest.raises(ConfigError, match="token ids"):
        pairs_of([Prompt([1, 2], ("Ho",))])
    assert pairs_of([Prompt("Hi", ("Ho", "Hey"))]) == [("Hi", "Ho"), ("Hi", "Hey")]


def talk(*texts: str, system: str = "") -> list[dict[str, str]]:
    """Turns of user and assistant, in turn."""
    turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *turns] if system else turns


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_every_turn_of_the_assistant_is_learnt_behind_the_turns_before_it(tokenizer: Tokenizer) -> None:
    chat = copy.deepcopy(tokenizer)
    chat.inner.chat_template = TEMPLATE
    turns = talk("Name one.", "Oak Bar.", "Another?", "Fen House.", "And?", system="Be brief.")
    pairs = pairs_of([Prompt(turns, ("No",))])
    assert [answer for _, answer in pairs] == ["Oak Bar.", "Fen House.", "No"]
    rows = Rows(chat, 1024).encode(pairs)
    for row, (prompt, answer), stop in zip(rows, pairs, (2, 4, 6), strict=True):
        assert asked(prompt) == turns[:stop]
        assert list(row.tokens[: row.num_prompt]) == chat.encode_prompt(turns[:stop])
        assert list(row.tokens[row.num_prompt :]) == [*chat.encode(answer, special=False), chat.eos_ids[0]]


def test_a_conversation_that_cannot_be_learnt_is_refused_by_its_row() -> None:
    good = Prompt(talk("Hi", "Ho"))
    wrong = [
        (talk("Hi"), (), "nothing to learn"),
        (talk("Hi", "Ho"), ("Hey",), "end with the assistant"),
        (talk("Hi", " "), (), "is empty"),
        ([*talk("Hi"), *talk("Ho")], ("Hey",), r"\[1\] is of 'user'"),
        ([*talk("Hi", "Ho"), {"role": "system", "content": "x"}], ("Hey",), r"\[2\] is of 'system'"),
        ([{"role": "assistant", "content": "x"}], (), r"\[0\] is of 'assistant'"),
    ]
    for messages, references, reason in wrong:
        with pytest.raises(ConfigError, match=f"row 2: .*{reason}"):
            pairs_of([good, Prompt(messages, references)])


def test_conversations_are_not_varied() -> None:
    pair = pairs_of([Prompt(talk("Describe Oak Bar", "Oak Bar is good"))])[0]
    variation = Variation(VariationConfig(values=(r"(Oak Bar)",), respell=True, invent=1.0), [pair])
    assert variation.drawn(pair, random.Random(0)) is pair
    assert variation.respelled(pair) is pair
    assert variation.exercise(pair, random.Random(0)) is None


def test_what_tells_of_each_other_goes_to_one_side() -> None:
    """Answers to one prompt and turns of one conversation together, pieces of plain text each by itself."""
    conversations = [Prompt(talk(f"q{n}", "a", "more", "b")) for n in range(6)]  # type: ignore[arg-type]
    prompts = [Prompt(f"p{n}", tuple(f"answer {k}" for k in range(3))) for n in range(6)]
    pairs = [*pairs_of(conversations), *pairs_of(prompts), *pairs_of(pieces_of("word " * 400))]
    groups = shuffled_groups(pairs, 0)
    assert sorted(len(group) for group in groups) == [1] * 4 + [2] * 6 + [3] * 6
    assert sorted(map(str, pairs)) == sorted(str(pair) for group in groups for pair in group)
    assert groups != shuffled_groups(pairs, 1)
    taken = take_groups(groups, 5)
    assert 5 <= len(taken) <= 7
    assert not {prompt for prompt, _ in taken if prompt} & {prompt for group in groups for prompt, _ in group}


def test_rows_each_with_a_prompt_of_its_own_lie_as_they_did_before_there_were_groups() -> None:
    """So runs that were begun go on."""
    pairs = [(f"p{n}", f"a{n}") for n in range(50)]
    shuffled = list(pairs)
    random.Random(3).shuffle(shuffled)
    assert [pair for group in shuffled_groups(pairs, 3) for pair in group] == shuffled


def test_an_epoch_that_drew_nothing_but_long_rows_is_empty(tokenizer: Tokenizer) -> None:
    pairs = [("word " * 80, "long"), ("a", "b")]
    drawn = Batches(lambda rng, number: [pairs[number % 2]], Rows(tokenizer, 32), tokens_per_batch=64)
    assert drawn.epoch(0) == []
    assert len(drawn.epoch(1)) == 1
