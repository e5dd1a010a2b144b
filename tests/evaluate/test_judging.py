"""Judging by likelihood: against transformers, the oracle without a cache, and figures worked out by hand."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import vivace
from tests.adapters.loras import make_lora
from tests.tiny_checkpoints import make_checkpoint
from vivace.engine import Engine
from vivace.errors import CapacityError, ConfigError, CorruptError, MismatchError
from vivace.evaluate.judging import JudgedSystem, judge, mean_accuracy
from vivace.evaluate.likelihood import ContextOptions, LikelihoodReader, dense_logits, log_likelihoods, question_of
from vivace.evaluate.zeroshot import TaskRow, convert_task, load_task

CHOICES = [
    TaskRow("places", ("Describe: name[The Eagle]\nAnswer:",), (" The Eagle", " a cheap pub", " it is"), 1),
    TaskRow("places", ("Describe: food[Chinese], area[city centre]\nAnswer:",), (" Chinese food", " no"), 0),
    TaskRow("places", ("Which one",), (" is", " is it", " is it now"), 2),
]
SCHEMA = [TaskRow("who", ("The Eagle saw the pub, and the Eagle", "The Eagle saw the pub, and the pub"), (" ate.",), 0)]
TEXT = [TaskRow("text", text="The Eagle is a cheap Chinese restaurant in the city centre. " * 8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("judged"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return vivace.load(folder, dtype="float32")


def theirs(folder: Path, context: str, option: str) -> float:
    """The plain loop: one text for each option, through transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    first, whole = tokenizer.encode(context), tokenizer.encode(context + option)
    assert whole[: len(first)] == first
    with torch.inference_mode():
        chances = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(float(chances[at - 1, whole[at]]) for at in range(len(first), len(whole)))


def test_likelihoods_are_those_of_a_plain_loop_over_transformers(folder: Path, engine: Engine) -> None:
    rows = [(row.contexts[0], row.options) for row in CHOICES]
    found = log_likelihoods(engine, rows)
    for (context, options), values in zip(rows, found, strict=True):
        expected = [theirs(folder, context, option) for option in options]
        assert [value.total for value in values] == pytest.approx(expected, abs=1e-4)
        assert sorted({round(value, 3) for value in expected}) == sorted(round(value, 3) for value in expected)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_branches_are_read_as_whole_texts_are(folder: Path, kernels: str) -> None:
    model = vivace.load(folder, dtype="float32", kernels=kernels).model
    drawn = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(4, 300, (count,), generator=drawn).tolist())

    for context, lengths in [(1, (1, 5)), (140, (3, 1, 70, 2, 30, 33)), (9, (120,)), (1, (40,))]:
        question = ContextOptions(tokens(context), tuple(tokens(length) for length in lengths))
        for found, expected in zip(
            LikelihoodReader(model).logits(question), dense_logits(model, question), strict=True
        ):
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_options_share_only_tokens_that_all_have(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    question = question_of(tokenizer, "Describe: na", ("me[The Eagle]", " is"))
    for option, text in zip(question.options, ("me[The Eagle]", " is"), strict=True):
        assert list(question.context + option) == tokenizer.encode("Describe: na" + text)
    ids = question_of(tokenizer, [5, 6], [[7], [8, 9]])
    assert (ids.context, ids.options) == ((5, 6), ((7,), (8, 9)))


def test_an_adapter_is_worn_by_the_rows(folder: Path, tmp_path: Path) -> None:
    lora = make_lora(tmp_path / "lora", folder, seed=3)
    engine = vivace.load(folder, dtype="float32", adapters={"mine": lora})
    ids = engine.tokenizer.encode("Describe: name[The Eagle] is")
    (plain,), (worn,) = (log_likelihoods(engine, [(ids[:-1], [ids[-1:]])], adapter=name)[0] for name in (None, "mine"))
    logits = engine.logits([ids[:-1]], adapter="mine")[0, -1].log_softmax(-1)
    assert worn.total == pytest.approx(float(logits[ids[-1]]), abs=1e-4)
    assert abs(worn.total - plain.total) > 1e-3


def test_a_model_beside_itself_differs_in_nothing_and_beside_another_by_what_a_hand_counts(
    folder: Path, engine: Engine, tmp_path: Path
) -> None:
    other = vivace.load(make_checkpoint(tmp_path / "other", seed=1), dtype="float32")
    rows = [*CHOICES, *SCHEMA, *TEXT]
    found = judge([JudgedSystem("a", engine), JudgedSystem("same", engine), JudgedSystem("b", other)], rows, window=32)
    by_name = {(one.task, one.system): one for one in found}
    assert len(found) == 9
    for task in ("places", "who", "text"):
        same = by_name[task, "same"]
        assert (same.kl, same.nll_change.estimate) == (0, 0)  # type: ignore[union-attr]
    assert by_name["places", "same"].flips == 0
    assert by_name["text", "a"].accuracy is None
    chosen = {
        name: [max(range(len(values)), key=lambda at: values[at].total) for values in scored]
        for name, scored in {
            each: log_likelihoods(model, [(row.contexts[0], row.options) for row in CHOICES])
            for each, model in (("a", engine), ("b", other))
        }.items()
    }
    right = [at == row.gold for at, row in zip(chosen["b"], CHOICES, strict=True)]
    assert by_name["places", "b"].accuracy == pytest.approx(sum(right) / 3)
    flips = [mine != first for mine, first in zip(chosen["b"], chosen["a"], strict=True)]
    assert by_name["places", "b"].flips == pytest.approx(sum(flips) / 3)
    context = [theirs(folder, each, SCHEMA[0].options[0]) for each in SCHEMA[0].contexts]
    assert by_name["who", "a"].accuracy == float(context[0] > context[1])
    assert mean_accuracy(found, "b") == pytest.approx(
        (by_name["places", "b"].accuracy_by_byte + by_name["who", "b"].accuracy_by_byte) / 2  # type: ignore[operator]
    )


def test_perplexity_and_divergence_of_a_text_are_those_of_its_windows(engine: Engine, tmp_path: Path) -> None:
    other = vivace.load(make_checkpoint(tmp_path / "other", seed=1), dtype="float32")
    ids = engine.tokenizer.encode(TEXT[0].text or "", special=False)
    lost, apart, count = 0.0, 0.0, 0
    for at in range(0, len(ids), 32):
        piece = ids[at : at + 32]
        mine, theirs = (each.logits([piece])[0, :-1].log_softmax(-1) for each in (other, engine))
        lost -= float(mine.gather(1, torch.tensor(piece[1:])[:, None]).sum())
        apart += float((theirs.exp() * (theirs - mine)).sum())
        count += len(piece) - 1
    _, found = judge([JudgedSystem("a", engine), JudgedSystem("b", other)], TEXT, window=32)
    assert found.perplexity == pytest.approx(math.exp(lost / count), rel=1e-4)
    assert found.kl == pytest.approx(apart / count, rel=1e-4)


def test_a_text_of_one_token_has_no_change(engine: Engine, tmp_path: Path) -> None:
    other = vivace.load(make_checkpoint(tmp_path / "other", seed=1), dtype="float32")
    short = [TaskRow("t", text="a")]
    _, found = judge([JudgedSystem("a", engine), JudgedSystem("b", other)], short)
    assert found.nll_change is None
    assert math.isnan(found.perplexity)


def test_public_files_become_task_files(tmp_path: Path) -> None:
    public = {
        "arc.jsonl.gz": {"query": "Question: Why? ", "choices": ["a", "b "], "gold": 1},
        "pronouns.jsonl.gz": {"context_options": ["The cat", "The dog "], "continuation": "ran.", "gold": 0},
        "words.jsonl.gz": {"context": "It was a ", "continuation": "dog"},
        "sums.jsonl.gz": {"context": "1 + 1 =", "answer": "2"},
    }
    (tmp_path / "in").mkdir()
    for name, row in public.items():
        with gzip.open(tmp_path / "in" / name, "wt", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    done = convert_task("zeroshot", tmp_path / "in", tmp_path / "out")
    assert [each.num_rows for each in done] == [1, 1, 0, 1]
    assert done[2].output is None
    (arc,) = load_task(tmp_path / "out" / "arc.jsonl")
    assert arc == TaskRow("arc", ("Question: Why?\nAnswer:",), (" a", " b"), 1)
    (pronouns,) = load_task(tmp_path / "out" / "pronouns.jsonl")
    assert pronouns == TaskRow("pronouns", ("The cat", "The dog"), (" ran.",), 0)
    assert load_task(tmp_path / "out" / "words.jsonl")[0].gold is None
    with pytest.raises(CorruptError, match="answered in words"):
        convert_task("zeroshot", tmp_path / "in" / "sums.jsonl.gz", tmp_path / "sums.jsonl")
    (tmp_path / "wiki.txt").write_text(
        " \n = One = \n\n One is .\n = = Part = = \n more\n = Two = \n Two \u2028 is .\n"
    )
    convert_task("wikitext", tmp_path / "wiki.txt", tmp_path / "wiki.jsonl")
    rows = load_task(tmp_path / "wiki.jsonl")
    assert [(row.text or "")[:7] for row in rows] == [" = One ", " = Two "]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"query": "Why?", "choices": "ab", "gold": 0}, "a list of texts, found str"),
        ({"query": "Why?", "choices": ["a", "b"], "gold": "first"}, "first"),
        ({"query": "Why?", "choices": ["a", 2], "gold": 0}, "strip"),
        ({"context_options": "ab", "continuation": "c", "gold": 0}, "a list of texts, found str"),
        ({"query": "Why?", "choices": ["a", "b"]}, "gold"),
    ],
)
def test_what_is_no_public_row_is_said_in_one_line(tmp_path: Path, row: dict[str, object], complaint: str) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(CorruptError, match=f"line 1: not a row of choices .*{complaint}"):
        convert_task("zeroshot", tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 1: not JSON"),
        ('{"task": "t", "contexts": ["a"], "options": ["b", "c"], "gold": 2}', "gold is 2"),
        ('{"task": "t", "contexts": ["a"], "options": ["b", "c"]}', "which of several"),
        ('{"task": "t", "contexts": ["a", "b"], "options": ["b", "c"], "gold": 0}', "one context and some options"),
        ('{"prompt": "t"}', "vivace data zeroshot"),
        ('{"task": "t", "contexts": ["a"], "options": " a", "gold": 0}', "options must be tuple, found ' a'"),
        ('{"task": "t", "contexts": "ab", "options": [" a"], "gold": 0}', "contexts must be tuple, found 'ab'"),
        ('{"task": "t", "contexts": ["a"], "options": [1, 2], "gold": 0}', r"options\[0\] must be str, found 1"),
        ('{"task": "t", "contexts": ["a"], "options": ["b", "c"], "gold": true}', "gold must be int, found True"),
        ('{"task": "t", "contexts": ["a"], "options": ["b", "c"], "gold": "0"}', "gold must be int, found '0'"),
        ('{"task": 3, "text": "a"}', "task must be str, found 3"),
        ('{"text": "a"}', "it names no task"),
        pytest.param("[" * 5000, "line 1: not JSON", id="deep"),
    ],
)
def test_what_is_no_task_file_is_said_in_one_line(tmp_path: Path, line: str, complaint: str) -> None:
    (tmp_path / "t.jsonl").write_text(line + "\n")
    with pytest.raises(CorruptError, match=complaint):
        load_task(tmp_path / "t.jsonl")


def test_texts_beyond_the_context_and_other_tokenizers_are_refused(
    folder: Path, engine: Engine, tmp_path: Path
) -> None:
    with pytest.raises(CapacityError, match="holds 256"):
        log_likelihoods(engine, [([5] * 250, [[5] * 8])])
    with pytest.raises(ConfigError, match="at least one token"):
        log_likelihoods(engine, [([5], [[]])])
    swapped = make_checkpoint(tmp_path / "other") / "tokenizer.json"
    spec = json.loads(swapped.read_text())
    pieces = spec["model"]["vocab"]
    first, second = sorted(pieces, key=pieces.__getitem__)[100:102]
    pieces[first], pieces[second] = pieces[second], pieces[first]
    swapped.write_text(json.dumps(spec))
    other = vivace.load(swapped.parent, dtype="float32")
    with pytest.raises(MismatchError, match="differ"):
        judge([JudgedSystem("a", engine), JudgedSystem("b", other)], CHOICES)
