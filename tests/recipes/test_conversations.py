"""Conversations: learnt turn by turn as they are, or with the model's own answers between the user's turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import vivace
from tests.recipes.test_trainer import RECIPE, WORDS
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import base_hash
from vivace.engine import Engine
from vivace.errors import ConfigError, UnsupportedError
from vivace.prompts import Message, Prompt
from vivace.recipes import own_text as module
from vivace.recipes.answers import read_answers
from vivace.recipes.own_text import Budget, own_text
from vivace.recipes.trainer import train_beside
from vivace.train.data import Turns, Unended, next_question, questions_of
from vivace.train.report import Lines

QUIET = Lines(lambda _: None)


def talk(*contents: str, system: str | None = None) -> list[Message]:
    """Turns of user and assistant in turn."""
    turns: list[Message] = [
        {"role": ("user", "assistant")[place % 2], "content": content} for place, content in enumerate(contents)
    ]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


TALKS = [Prompt(talk(f"{a}{b}", f"{b}{a}{b}", f"{a}{a}"), (f"{b}{b}",)) for a in "abcdefgh" for b in "klmnop"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), layers=4)


@pytest.fixture
def engine(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A random model that ends its answers soon."""
    monkeypatch.setattr(module, "ON_CPU", module.Together(4))
    engine = vivace.load(checkpoint)
    engine.tokenizer.eos_ids = (0, *range(10, 320, 9))
    return engine


def test_weights_learn_conversations_and_decode_one_losslessly(checkpoint: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    recipe = replace(RECIPE, loop=replace(RECIPE.loop, steps=30), find_reach=2, longest=64)
    runs = train_beside(recipe, vivace.load(checkpoint, kernels="torch"), TALKS, tmp_path / "fast", Lines(notes.append))
    assert all(run.identical for run in runs)
    engine = vivace.load(checkpoint, adapters={"multirate": tmp_path / "fast"})
    asked = talk("ak", "kak", "aa", "kk", "bl")
    plain, fast = (engine.generate([asked], method=m, max_new_tokens=24)[0] for m in ("plain", "multirate"))
    assert plain.token_ids == fast.token_ids
    assert fast.stats.num_draft_tokens > 0


def test_what_is_asked_next_follows_the_models_own_answers() -> None:
    asked, one = talk("a", "never said", "b", "nor this", "c", system="s"), Prompt("alone", ("x",))
    [whole, alone] = questions_of([Prompt(asked), one])
    assert isinstance(whole, Turns)
    assert [turn["content"] for turn in whole.messages] == ["s", "a", "b", "c"]
    answers: dict[str, str] = {}
    for said in ([], ["A"], ["A", "B"]):
        following = next_question(whole, answers)
        assert isinstance(following, Turns)
        expected = [text for pair in zip("abc", said, strict=False) for text in pair] + ["abc"[len(said)]]
        assert following.messages == talk(*expected, system="s")
        answers[following] = "ABC"[len(said)]
    assert next_question(whole, answers) is None
    cut: dict[str, str] = {Turns.of(talk("a", system="s")): Unended("A")}
    assert next_question(whole, cut) is None
    assert (next_question(alone, {}), next_question(alone, {"alone": "x"})) == ("alone", None)


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def turns_of(path: Path) -> list[Sequence[Message]]:
    """The rows of conversations."""
    return [row["messages"] for row in rows(path) if "messages" in row]  # type: ignore[misc]


def test_the_users_turns_are_answered_one_after_another(engine: Engine, checkpoint: Path, tmp_path: Path) -> None:
    path, many = tmp_path / "own.jsonl", [Prompt(talk(a, "x", f"{a} b", "y", f"{a} c")) for a in "defghijkl"]
    asked = [*questions_of(many), *questions_of(WORDS[:3])]
    pairs = own_text(engine, path, Budget(1500), 96, asked, lambda _: None)
    lengths = [len(messages) for messages in turns_of(path)]
    assert {1, 3, 5} <= set(lengths)
    known = dict(pairs)
    for row in rows(path):
        asked_for = row.get("messages", row.get("prompt"))
        prompt = engine.tokenizer.encode_prompt(asked_for)  # type: ignore[arg-type]
        answer = engine.generate([prompt], method="plain", do_sample=False, max_new_tokens=96 - len(prompt))[0]
        assert row["reference"] == answer.text
        for place in range(1, len(row.get("messages", [])), 2):  # type: ignore[arg-type]
            before = Turns.of(row["messages"][:place])  # type: ignore[index]
            assert row["messages"][place]["content"] == known[before]  # type: ignore[index]
    cut = [prompt for prompt, answer in pairs if isinstance(prompt, Turns) and isinstance(answer, Unended)]
    assert not [prompt for prompt in known if any(prompt.startswith(each[:-1] + ",") for each in cut)]
    answers = read_answers(path, base_hash(checkpoint))
    assert list(answers.pairs) == pairs
    assert [type(prompt) for prompt, _ in answers.pairs] == [type(prompt) for prompt, _ in pairs]


def test_a_killed_run_goes_on_within_a_conversation(engine: Engine, tmp_path: Path) -> None:
    many = questions_of([Prompt(talk(a, "x", f"{a} b", "y", f"{a} c")) for a in "defgh"])
    whole, path = tmp_path / "whole.jsonl", tmp_path / "own.jsonl"
    own_text(engine, whole, Budget(900), 96, many, lambda _: None)
    first = next(place for place, row in enumerate(rows(whole)) if len(row.get("messages", [])) == 3)  # type: ignore[arg-type]
    path.write_text("".join(whole.read_text(encoding="utf-8").splitlines(keepends=True)[:first]), encoding="utf-8")
    own_text(engine, path, Budget(900), 96, many, lambda _: None)

    def by_turns(place: Path) -> dict[str, object]:
        return {json.dumps(row["messages"]): row["reference"] for row in rows(place) if "messages" in row}

    assert by_turns(path) == by_turns(whole)


def test_what_has_no_place_for_turns_says_so(checkpoint: Path, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", layers=4)
    (base / "chat_template.jinja").unlink()
    recipe = replace(RECIPE, own_tokens=200, longest=64)
    with pytest.raises(UnsupportedError, match="no chat template"):
        train_beside(recipe, vivace.load(base, kernels="torch"), TALKS, tmp_path / "out", QUIET)
    with pytest.raises(ConfigError, match='a row with "messages"'):
        train_beside(
            replace(RECIPE, regenerate=9), vivace.load(checkpoint, kernels="torch"), TALKS, tmp_path / "out", QUIET
        )
