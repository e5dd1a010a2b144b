"""Quality beside cost, against counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.tradeoff_measures import Guessing, Judgement, Reading, costs, envelope, judge_texts, point
from vivace.errors import ConfigError
from vivace.evaluate.benchmark import Record, Trial, summarise
from vivace.prompts import Prompt

READING = Reading(layers=6, layer_bytes=10.0, head_bytes=30.0)
TAKE = Trial(((1,) * 10,), 1, decode_s=1.0, total_s=1.0)


def record(**fields: object) -> Record:
    return Record("plain", [[replace(TAKE, **fields)]])


def test_plain_decoding_reads_everything_for_every_token() -> None:
    assert costs(record(), READING, None) == (6.0, 90.0)


def test_guesses_cost_rows_and_readings() -> None:
    """Four steps and six guesses for ten tokens, below a gate at two."""
    drafting = record(num_steps=4, num_drafted=6)
    assert costs(drafting, READING, None) == (6.0, 36.0), "a free draft"
    companions = costs(drafting, READING, Guessing(2))
    assert companions == (pytest.approx(6.0 + 6 * 2 / 10), pytest.approx(36.0 + 0.6 * (20 + 30)))
    rough = costs(drafting, READING, Guessing(2, read=0.25, head_read=0.5))
    assert rough == (pytest.approx(6.0 + 6 * 4 / 10), pytest.approx(36.0 + 0.6 * (5 + 15)))


def test_exits_read_up_to_where_they_leave() -> None:
    leaving = record(exit_layers=(2,) * 5 + (6,) * 5, num_layer_passes=70)
    assert costs(leaving, READING, None) == (7.0, 4 * 10.0 + 30.0)


class Whole:
    """Finds token 1 likeliest everywhere, with half of the probability of three tokens."""

    num_bytes = 0

    def logits(self, token_ids: list[list[int]]) -> torch.Tensor:
        return torch.tensor([0.25, 0.5, 0.25]).log().expand(1, len(token_ids[0]), 3)


def test_a_text_is_judged_by_its_task_and_the_whole_model() -> None:
    prompts = [Prompt("Write SQL for: x", ("SELECT X ;",), "wikisql"), Prompt("y", ("SELECT Y ;",), "wikisql")]
    found = judge_texts(Whole(), prompts, [(0, 0), (0,)], [(1, 1), (1, 2)], ["select x", "SELECT Z ;"])
    assert found.values == (1.0, 0.0)
    assert found.metrics["wikisql"]["exact_match"] == 0.5
    assert found.agreement == 0.75
    assert found.nll == (pytest.approx(0.6931, abs=1e-3), pytest.approx((0.6931 + 1.3863) / 2, abs=1e-3))
    assert found.slot_errors == ()
    described = [Prompt("Describe: name[Oak], food[French]", ("Oak serves French food.",), "e2e")]
    assert judge_texts(Whole(), described, [(0,)], [(1,)], ["Oak."]).slot_errors == (1.0,)
    with pytest.raises(ConfigError, match="one task"):
        judge_texts(Whole(), [*prompts, *described], [(0,)] * 3, [(1,)] * 3, ["a"] * 3)


def test_nothing_on_the_envelope_is_beaten_in_both() -> None:
    run = summarise([record()], "plain")[0]
    told = {name: Judgement({}, (value,), (), (0.0,), 1.0) for name, value in (("a", 0.5), ("b", 0.4), ("c", 0.9))}
    read = {"a": 0.3, "b": 0.6, "c": 1.0}
    points = [point(replace(run, method=n), False, (1.0, read[n]), told[n], told["c"]) for n in told]
    assert envelope(points) == ["a", "c"]
    assert points[0].quality_change == (pytest.approx(-0.4), pytest.approx(-0.4), pytest.approx(-0.4))
    assert points[0].slot_errors_change is None
