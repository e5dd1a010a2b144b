"""What pruned prompts cost and save: one reading gives what several would, and tables say what was found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import vivace
from benchmarks import prefill_tables
from benchmarks.prefill_quality import QuestionSet, ask, measure, unlike_before, way_of
from tests.tiny_checkpoints import make_checkpoint
from vivace.prompts import Prompt
from vivace.recipes.lazy_plan import LongPrompt
from vivace.recipes.lazy_plan import ask as ask_by_force


@pytest.mark.parametrize("keep", [None, "1:0.4", "2:0.5"])
def test_the_likelihood_is_that_of_an_answer_that_is_forced(tmp_path: Path, keep: str | None) -> None:
    engine = vivace.load(make_checkpoint(tmp_path, context=1024, layers=4))
    question = Prompt("The river is called Wye and it is long. " * 9, ("Wye and more",), "multidoc")
    found = ask(engine, question, way_of("full" if keep is None else f"lazy:{keep}"))
    tokens = engine.tokenizer.encode_prompt(question.request, raw=False)
    gold = engine.tokenizer.encode(question.references[0], special=False)
    forced = ask_by_force(engine, LongPrompt(tuple(tokens), tuple(gold)), keep)
    assert found["nll"] == pytest.approx(forced.nll, abs=1e-4)
    assert found["share"] == pytest.approx(forced.share, abs=1e-3)
    options: dict[str, Any] = {"method": "plain", "do_sample": False, "max_new_tokens": 12}
    plain = engine.generate(list(tokens), **options, **way_of("full" if keep is None else f"lazy:{keep}"))[0]
    assert found["answer"] == plain.text


def test_halves_do_not_meet_and_a_file_is_gone_on_with(tmp_path: Path) -> None:
    engine = vivace.load(make_checkpoint(tmp_path / "model", context=1024, layers=2))
    source = tmp_path / "rows.jsonl"
    rows = [
        {"question": f"who is {n}", "answers": [str(n)], "ctxs": [{"title": "t", "text": f"{n}"}]} for n in range(8)
    ]
    source.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    own = QuestionSet.of(f"few=multidoc:{source}:2:3")
    a, b = ({one.references[0] for one in own.questions(half, 7)} for half in "AB")
    assert {int(name) % 2 for name in a} == {0}
    assert {int(name) % 2 for name in b} == {1}
    ways = {"full": {}, "lazy:1:0.5": way_of("lazy:1:0.5")}
    found: dict[str, Any] = {}
    measure(engine, [own], ways, "B", float("inf"), found)
    assert [len(answers) for answers in found["few"].values()] == [3, 3]
    assert "answer" not in found["few"]["full"][0], "texts of a data set stay where they are"
    assert all(one["agrees"] for one in found["few"]["full"])
    measure(engine, [own], ways, "B", float("inf"), found)
    assert len(found["few"]["full"]) == 3
    written = {
        "provenance": {"cpu": "A", "num_threads": 1, "commit": "c", "best_kernels": "k"},
        "setting": {"model": "m", "kernels": "k", "half": "B", "others_cpu_share": 0.0},
        "answers": found,
    }
    (tmp_path / "found.json").write_text(json.dumps(written), encoding="utf-8")
    text = prefill_tables.tables(tmp_path)
    assert "few: 3 questions" in text
    assert "| lazy:1:0.5 |" in text
    assert "LazyLLM | 22.31 | 99% | 2.34x" in prefill_tables.beside_paper(tmp_path, "few")


def test_a_file_of_another_machine_or_way_is_not_gone_on_with() -> None:
    setting = {"model": "m", "kernels": "k", "half": "B", "same_documents": False, "sets": {"a": ["kv", "f", 3]}}
    before = {
        "provenance": {"cpu": "A", "commit": "c"},
        "setting": setting,
        "answers": {"a": {"full": [1], "lazy": [1]}},
    }
    ways = ["full", "lazy"]
    assert unlike_before(before, before, ways) == []
    more = {**before, "setting": {**setting, "sets": {"b": ["kv", "f", 4]}}}
    assert unlike_before(before, more, ways) == [], "further sets are added"
    assert unlike_before(before, {**before, "provenance": {"cpu": "B", "commit": "d"}}, ways) == ["cpu", "commit"]
    assert unlike_before(before, {**before, "setting": {**setting, "model": "n", "half": "A"}}, ways) == [
        "model",
        "half",
    ]
    assert unlike_before(before, {**before, "setting": {**setting, "sets": {"a": ["kv", "f", 9]}}}, ways) == ["set a"]
    assert unlike_before(before, before, ["full"]) == ["--way"]


def test_questions_about_the_same_documents_are_read_from_a_prefix_cache(tmp_path: Path) -> None:
    """Figures are those without it, the layer passes too; times are left out of the tables."""
    folder = make_checkpoint(tmp_path / "model", context=1024, layers=2)
    source = tmp_path / "rows.jsonl"
    rows = [
        {"question": f"who is {n}", "answers": [str(n)], "ctxs": [{"title": f"t{n}", "text": f"{n} is here. " * 4}]}
        for n in range(16)
    ]
    source.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    own = QuestionSet.of(f"few=multidoc:{source}:4:6")
    questions = own.about_the_same("B", 7)
    assert len(questions) == 6
    texts = [str(one.request).partition("Question")[0] for one in questions]
    assert texts[0] == texts[3]
    assert texts[3] != texts[4] == texts[5]
    assert all(f": {one.references[0]} is here" in str(one.request) for one in questions)
    ways = {"full": {}, "lazy:1:0.5": way_of("lazy:1:0.5")}
    runs, saved = list[dict[str, Any]](), list[int]()
    for prefix in (None, "64MiB"):
        engine = vivace.load(folder, prefix_cache=prefix)
        found: dict[str, Any] = {}
        measure(engine, [own], ways, "B", float("inf"), found, same_documents=True, save=lambda: saved.append(1))
        runs.append(found["few"])
        assert prefix is None or engine.prefix_cache.num_hits > 100
    assert len(saved) == 12
    for way in ways:
        for alone, shared in zip(runs[0][way], runs[1][way], strict=True):
            assert {**alone, "first_token_s": 0} == {**shared, "first_token_s": 0}
    setting = {"model": "m", "kernels": "k", "half": "B", "sets": {"few": ["multidoc", "rows", 4]}}
    written = {
        "provenance": {"cpu": "A", "num_threads": 1, "commit": "c", "best_kernels": "k"},
        "setting": {**setting, "others_cpu_share": 0.0, "same_documents": True},
        "answers": {"few": {way: [{**one, "contains": True} for one in own] for way, own in runs[1].items()}},
    }
    (tmp_path / "found.json").write_text(json.dumps(written), encoding="utf-8")
    text = prefill_tables.tables(tmp_path)
    assert "few: 6 questions about 2 lots of 4 documents" in text
    assert "x |" not in text
    assert "x |" not in prefill_tables.beside_paper(tmp_path, "few").split("2.34x |")[1]


def test_sets_weigh_the_same_and_the_largest_run_of_each_counts(tmp_path: Path) -> None:
    def asked(right: list[int], nll: float, seconds: float) -> list[dict[str, Any]]:
        return [{"contains": bool(one), "nll": nll, "first_token_s": seconds} for one in right]

    def write(name: str, answers: dict[str, Any], others: float | None, cpu: str = "A", half: str = "B") -> None:
        setting = {"model": "m", "others_cpu_share": others, "half": half}
        (tmp_path / f"{name}.json").write_text(
            json.dumps({"provenance": {"cpu": cpu}, "setting": setting, "answers": answers}), encoding="utf-8"
        )

    many = {"full": asked([1, 0, 0, 0] * 10, 2.0, 3.0), "w": asked([1, 1, 0, 0] * 10, 1.5, 1.0)}
    few = {"full": asked([1] * 40, 1.0, 3.0), "w": asked([1, 1, 1, 0] * 10, 1.2, 1.5)}
    unknown = {"full": asked([0] * 80, 1.0, 3.0), "w": asked([1] * 80, 0.0, 3.0)}
    write("a", {"one": many, "two": few}, others=None)
    write("b", {"one": few, "three": unknown}, others=0.0)
    write("c", {"four": few}, others=0.0, cpu="B")
    write("d", {"five": few}, others=0.0, half="A")
    write("e", {"three": few, "six": {"full": asked([1] * 9, 1.0, 9.0), "w": asked([1] * 9, 1.0, 9.0)}}, others=1.0)
    (row,) = [line for line in prefill_tables.over_sets(tmp_path).splitlines() if " m |" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:7] == ["m", "w", "one, two", "80", "62%", "62%"]  # .50 and .75; .25 and 1
    assert cells[7].startswith("100% (")
    assert cells[8].startswith("-0.150 (")  # -.5 and +.2
    assert cells[9] == "1.20x"  # of both sets of the second run
