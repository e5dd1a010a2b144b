from __future__ import annotations

import builtins
import importlib

import pytest

from vivace.errors import ConfigError, DependencyError
from vivace.evaluate import overlap
from vivace.evaluate.overlap import bleu, rouge_l
from vivace.evaluate.quality import score
from vivace.evaluate.sql import is_exact_match, normalise_sql
from vivace.prompts import Prompt

REFERENCE = "Fen House is a cheap pub by the river ."


def test_bleu_takes_the_best_of_any_number_of_references() -> None:
    assert bleu([REFERENCE], [[REFERENCE]]) == pytest.approx(100)
    assert bleu([REFERENCE, REFERENCE], [["Nothing like it at all here", REFERENCE], [REFERENCE]]) == pytest.approx(100)
    assert bleu([REFERENCE], [["Nothing like it at all here"]]) < 10
    # four 1-grams, all in the reference, and the same for longer ones; brevity penalty exp(1 - 6/4)
    assert bleu(["a b c d"], [["a b c d e f"]]) == pytest.approx(100 * 2.718281828459045 ** (1 - 6 / 4))


def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence() -> None:
    assert rouge_l(["a b c d"], [["a x c d y z", "q"]]) == [
        pytest.approx(100 * 2 * (3 / 4) * (3 / 6) / (3 / 4 + 3 / 6))
    ]


def test_scoring_needs_matching_references() -> None:
    with pytest.raises(ConfigError, match="2 texts to score, but references for 1"):
        bleu(["a", "b"], [["a"]])
    with pytest.raises(ConfigError, match="1 of 2 texts have no reference, the first is number 2"):
        rouge_l(["a", "b"], [["a"], []])


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(overlap, "import_module", missing)
    with pytest.raises(DependencyError, match=r"sacrebleu is not installed; run: pip install 'vivace\[bench\]'"):
        bleu(["a"], [["a"]])
    assert importlib.import_module is not missing
    assert builtins.__import__ is not missing


@pytest.mark.parametrize(
    ("query", "is_match"),
    [
        ('SELECT COUNT CLUB FROM TABLE WHERE COACH = "Ada Brandt" AND WINS > 3 ;', True),
        ("select  count club from table where coach=ada brandt and wins>3", True),
        ('SELECT CLUB FROM TABLE WHERE COACH = "Ada Brandt" AND WINS > 3 ;', False),
        ('SELECT COUNT CLUB FROM TABLE WHERE COACH = "Ada Brand" AND WINS > 3 ;', False),
        ('SELECT COUNT CLUB FROM TABLE WHERE COACH = "Ada Brandt" AND WINS < 3 ;', False),
        ('SELECT COUNT CLUB FROM TABLE WHERE WINS > 3 AND COACH = "Ada Brandt" ;', False),
        ("", False),
    ],
)
def test_sql_matches_up_to_case_space_quotes_and_semicolon(query: str, is_match: bool) -> None:
    references = ["SELECT X FROM TABLE ;", 'SELECT COUNT CLUB FROM TABLE WHERE COACH = "Ada Brandt" AND WINS > 3 ;']
    assert is_exact_match(query, references) is is_match


def test_longer_operators_stay_whole() -> None:
    assert normalise_sql("A>=3;") == "a >= 3"


def test_each_task_gets_its_metrics() -> None:
    prompts = [
        Prompt("Describe: name[Oak], food[French]", ("Oak serves French food here .",), "e2e"),
        Prompt("Describe: name[Oak], food[French]", (), "e2e"),
        Prompt("Write SQL for: x", ("SELECT X FROM TABLE ;",), "wikisql"),
        Prompt("Write SQL for: y", ("SELECT Y FROM TABLE ;",), "wikisql"),
        Prompt("Hello"),
        Prompt(
            "Write SQL for: z", ('SELECT DISTINCT Aalias0.N FROM A AS Aalias0 WHERE Aalias0.D = "EE" ;',), "advising"
        ),
    ]
    texts = ["Oak serves French food here .", "Oak.", "select x from table", "SELECT X FROM TABLE ;", "Hi"]
    texts.append("SELECT DISTINCT Aalias0.N FROM A AS Aalias0 WHERE Aalias0.D = EE")
    values = score(prompts, texts)
    assert values["e2e"] == {
        "num_texts": 2,
        "bleu": pytest.approx(100),
        "rouge_l": pytest.approx(100),
        "slot_error_rate": 0.25,
        "num_slots": 4,
        "num_slots_wrong": 0,
        "num_slots_missing": 1,
        "num_slots_added": 0,
    }
    assert values["wikisql"] == {"num_texts": 2, "exact_match": 0.5}
    assert values["advising"] == {"num_texts": 1, "exact_match": 1.0}
    assert values["text"] == {"num_texts": 1}
    with pytest.raises(ConfigError, match="6 prompts, but 1 texts"):
        score(prompts, ["x"])


def test_questions_are_answered_by_a_few_words() -> None:
    rows = [Prompt("a", ("New York", "NYC"), "multidoc"), Prompt("b", ("seven",), "multidoc")]
    values = score(rows, ["It is in new-york.", "Seventy"])["multidoc"]
    assert values == {"num_texts": 2, "contains": 0.5, "f1": pytest.approx((2 * 2 / 7) / 2)}
    assert score([Prompt("a", ("?",), "kv")], ["!"])["kv"]["f1"] == 0
