"""Text that a model writes to learn from: prompts from its template, its own answers, and what ends and resumes it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import vivace
from tests.recipes.test_trainer import RECIPE, WORDS
from tests.tiny_checkpoints import make_checkpoint
from vivace.core.sampling import Sampling
from vivace.engine import Engine
from vivace.errors import ConfigError, CorruptError, MismatchError, UnsupportedError
from vivace.recipes import own_text as module
from vivace.recipes.frozen import TrainContext
from vivace.recipes.own_text import Budget, UserTurn, own_text, with_text, within
from vivace.recipes.repetition import Repetition
from vivace.recipes.trainer import train_beside
from vivace.train.data import Rows
from vivace.train.report import Lines


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A base model, since a random chat model seldom ends a user's turn."""
    return vivace.load(_without_template(make_checkpoint(tmp_path_factory.mktemp("base"), layers=4)))


def _without_template(folder: Path) -> Path:
    (folder / "chat_template.jinja").unlink()
    return folder


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ON_CPU", module.Together(8))


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_users_turn_is_found_in_the_template(tmp_path: Path) -> None:
    engine = vivace.load(make_checkpoint(tmp_path / "chat"))
    turn, tokenizer = UserTurn.of(engine.tokenizer), engine.tokenizer
    assert tokenizer.spelled(turn.opening) == "<|user|>"
    assert {tokenizer.spelled([end]) for end in turn.end_tokens} == {"<|end|>", "<|assistant|>"}
    plain = vivace.load(engine.folder).tokenizer
    plain.inner.chat_template = "{% for m in messages %}USER: {{ m['content'] }}\n\nANSWER:\n{% endfor %}"
    turn = UserTurn.of(plain)
    assert (plain.spelled(turn.opening), turn.end_text) == ("USER: ", "ANSWER:")
    plain.inner.chat_template = None
    assert UserTurn.of(plain) == UserTurn((0,), frozenset({0}), None, False)
    plain.inner.chat_template = "always the same"
    with pytest.raises(UnsupportedError, match="leaves out the user's message"):
        UserTurn.of(plain)


def test_answers_are_the_models_own_to_prompts_that_are_new(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    pairs = own_text(engine, path, Budget(600), 64, ["aka", "bob"], lambda _: None)
    written = rows(path)
    assert sum(int(str(row["tokens"])) for row in written) >= 600
    assert {"aka", "bob"} <= {prompt for prompt, _ in pairs}
    assert len({prompt for prompt, _ in pairs}) == len(pairs) > 4
    for row in written:
        room = 64 - len(engine.tokenizer.encode_prompt(str(row["prompt"])))
        answer = engine.generate(str(row["prompt"]), method="plain", do_sample=False, max_new_tokens=room)[0]
        assert (row["reference"], row["tokens"]) == (answer.text, len(answer.token_ids))
    drawn = [row for row in written if row["draw"] is not None]
    number, request = module._Drawing(engine, int(str(drawn[0]["draw"])), [], 64).request()
    assert request.sampling == Sampling(do_sample=True)
    assert request.seed == number == drawn[0]["draw"]


def test_texts_that_begin_in_groups_are_the_same_and_read_their_prompts_together(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, begun, fill = [f"word {number} aka" for number in range(40)], list[int](), module._Writing._fill

    def counted(self: Any) -> bool:
        before = self._session.num_waiting
        result = fill(self)
        begun.append(self._session.num_waiting - before)
        return result

    monkeypatch.setattr(module._Writing, "_fill", counted)
    found: dict[int, dict[Any, str]] = {}
    for group in (1, 4):
        monkeypatch.setattr(module, "ON_CPU", module.Together(8, group))
        begun.clear()
        found[group] = dict(own_text(engine, tmp_path / f"{group}.jsonl", Budget(900), 64, asked, lambda _: None))
        assert min(number for number in begun if number) >= group
    both = found[1].keys() & found[4].keys()
    assert len(both) > 8
    assert all(found[1][prompt] == found[4][prompt] for prompt in both)
    assert module.together_on(torch.device("cuda")).group > 1


def test_an_answer_that_repeats_itself_ends_there(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random model repeats nothing, so that twenty different beginnings of tokens count as a repetition here."""
    monkeypatch.setattr(Repetition, "is_found", property(lambda self: len(self._next) >= 20))
    path, asked = tmp_path / "own.jsonl", [f"word {number}" for number in range(12)]
    own_text(engine, path, Budget(200), 120, asked, lambda _: None)
    cut = [row for row in rows(path) if not row["ended"]]
    assert len(cut) > 5
    for row in cut:
        whole = engine.generate(str(row["prompt"]), method="plain", do_sample=False, max_new_tokens=100)[0]
        assert 20 <= int(str(row["tokens"])) < 30
        assert engine.tokenizer.decode(whole.token_ids[: int(str(row["tokens"]))]) == row["reference"]


def test_a_killed_run_goes_on_behind_its_last_answer(engine: Engine, tmp_path: Path) -> None:
    path, notes = tmp_path / "own.jsonl", list[str]()
    first = own_text(engine, path, Budget(300), 64, [], notes.append)
    path.write_bytes(path.read_bytes() + '{"prompt": "cut ö'.encode()[:-1])  # within a character
    more = own_text(engine, path, Budget(900), 64, [], notes.append)
    assert more[: len(first)] == first
    assert len({prompt for prompt, _ in more}) == len(more) > len(first)
    assert any("answers of" in note and "were made before" in note for note in notes)
    assert own_text(engine, path, Budget(900), 64, [], notes.append) == more


def test_minutes_end_it_and_those_before_a_kill_count(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    own_text(engine, path, Budget(200), 64, [], lambda _: None)
    before = path.read_text(encoding="utf-8")
    last = rows(path)[-1] | {"elapsed_s": 121.0}
    path.write_text(before + json.dumps(last) + "\n", encoding="utf-8")
    assert len(own_text(engine, path, Budget(10**9, minutes=2), 64, [], lambda _: None)) == len(rows(path))


def test_what_cannot_be_used_is_one_line(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.jsonl"
    own_text(engine, path, Budget(100), 64, [], lambda _: None)
    other = vivace.load(_without_template(make_checkpoint(tmp_path / "other", seed=1, layers=4)))
    with pytest.raises(MismatchError, match="answers of another model"):
        own_text(other, path, Budget(100), 64, [], lambda _: None)
    (tmp_path / "broken.jsonl").write_text("[1]\n", encoding="utf-8")
    with pytest.raises(CorruptError, match="a line that is no answer"):
        own_text(engine, tmp_path / "broken.jsonl", Budget(100), 64, [], lambda _: None)
    monkeypatch.setattr(module._Drawing, "_text", lambda *_: "")
    with pytest.raises(ConfigError, match=r"of (2[4-9]|3[01]) prompts .* are empty.*--data FILE"):
        own_text(engine, tmp_path / "empty.jsonl", Budget(100), 64, [], lambda _: None)
    monkeypatch.setattr(module._Drawing, "_text", lambda *_: "Alike")
    notes: list[str] = []
    assert len(own_text(engine, tmp_path / "alike.jsonl", Budget(10**6), 64, ["alike", "x"], notes.append)) == 2
    assert any("no new prompt is drawn any more" in note and "repeat" in note for note in notes)


def test_a_budget_too_short_for_one_round_keeps_answers_as_far_as_they_are(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, steps = tmp_path / "own.jsonl", count()
    monkeypatch.setattr(module._Answers, "elapsed_s", property(lambda _: 10.0 * next(steps)))
    asked = [f"word {number}" for number in range(8)]
    pairs = own_text(engine, path, Budget(10**6, minutes=8), 64, asked, lambda _: None)
    cut = [row for row in rows(path) if not row["ended"]]
    assert cut
    assert all(int(str(row["tokens"])) >= module.LEAST_ANSWER for row in cut)
    encode = Rows(engine.tokenizer, 64, cuts=True)
    for row, (prompt, answer) in zip(rows(path), pairs, strict=True):
        whole = engine.generate(prompt, method="plain", do_sample=False, max_new_tokens=60)[0]
        assert engine.tokenizer.decode(whole.token_ids[: int(str(row["tokens"]))]) == answer
        ends = encode.encode([(prompt, answer)])[0].tokens[-1] in engine.tokenizer.eos_ids
        assert ends == row["ended"]


def test_minutes_are_divided_between_writing_and_training() -> None:
    values = {"kind": "multirate", "loop": {"steps": 5}}
    assert within(values, None) == values
    assert within(values, 10)["loop"] == {"steps": None, "minutes": 10}
    both = within(with_text(values, has_data=False), 10)
    assert (both["own_minutes"], both["loop"]["minutes"]) == (4.0, 6.0)
    assert with_text(values, has_data=True) == values
    with pytest.raises(ConfigError, match="above 0"):
        within(values, 0)


def test_little_text_is_learnt_from_whatever_should_be_held_back(engine: Engine, tmp_path: Path) -> None:
    recipe, notes = replace(RECIPE, own_tokens=600, longest=64, held_back=256), list[str]()
    decoder = vivace.load(engine.folder, kernels="torch")
    runs = train_beside(recipe, decoder, [], tmp_path / "few", Lines(notes.append))
    assert all(run.identical for run in runs)
    assert any("rows are held back: 256 are too many" in note for note in notes)


def test_weights_are_trained_without_data(engine: Engine, tmp_path: Path) -> None:
    recipe, notes, out = replace(RECIPE, own_tokens=900, longest=64), list[str](), tmp_path / "fast"
    runs = train_beside(recipe, vivace.load(engine.folder, kernels="torch"), [], out, Lines(notes.append))
    assert all(run.identical for run in runs)
    written = (out / "run" / "own.jsonl").read_text(encoding="utf-8")
    (out / "run" / "own.jsonl").write_text(written.rpartition("\n")[0].rpartition("\n")[0] + "\n", encoding="utf-8")
    with pytest.raises(MismatchError, match="another recipe, base or data"):  # once trained on, nothing is added
        train_beside(recipe, vivace.load(engine.folder, kernels="torch"), [], out, Lines(notes.append))
    mixed = train_beside(
        recipe, vivace.load(engine.folder, kernels="torch"), WORDS, tmp_path / "mixed", Lines(notes.append)
    )
    assert all(run.identical for run in mixed)
    assert {str(row.request) for row in WORDS} & {
        row["prompt"] for row in rows(tmp_path / "mixed" / "run" / "own.jsonl")
    }


def test_text_for_other_prompts_is_not_taken_for_those_that_are_given(engine: Engine, tmp_path: Path) -> None:
    recipe = replace(RECIPE, own_tokens=300, longest=64)
    decoder = vivace.load(engine.folder, kernels="torch")
    TrainContext.of(recipe, decoder, [], tmp_path, Lines(lambda _: None))
    TrainContext.of(recipe, decoder, [], tmp_path, Lines(lambda _: None))
    with pytest.raises(MismatchError, match="is text for other prompts; give --data as then, or start in an empty"):
        TrainContext.of(recipe, decoder, WORDS, tmp_path, Lines(lambda _: None))
    path = tmp_path / "run" / "own.jsonl"
    old = [{key: value for key, value in row.items() if key != "asked"} for row in rows(path)]
    path.write_text("".join(json.dumps(row) + "\n" for row in old))  # as older versions wrote it
    TrainContext.of(recipe, decoder, WORDS, tmp_path, Lines(lambda _: None))
