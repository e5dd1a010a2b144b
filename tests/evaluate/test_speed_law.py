"""The speed law against arithmetic by hand and against a measurement."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.speed_law import compare, table
from vivace import load
from vivace.cli.prompting import questions_of, read_prompts
from vivace.errors import ConfigError
from vivace.evaluate.benchmark import Record, Trial
from vivace.evaluate.speed_law import ModelShape, StepCosts, head_share, judge, keeping, tokens_per_step

PARTS = StepCosts(plain_s=1.0, draft_s=(0.25, 0.5), verify_s=(1.25, 1.5))


@pytest.mark.parametrize(("alpha", "guesses", "gain"), [(0.7, 3, 1.8), (0.8, 5, 2.1), (0.9, 8, 2.8)])
def test_the_notes_examples(alpha: float, guesses: int, gain: float) -> None:
    """Gate 4 of 32 layers, width 3072, 32 thousand tokens."""
    phi = ModelShape(exit_layer=4, layers=32, head_share=head_share(3072, 8192, 32, 32064))
    assert phi.head_share == pytest.approx(0.026, abs=0.001)
    assert phi.speed_up(keeping(alpha, guesses)) == pytest.approx(gain, abs=0.05)


def test_the_best_draft_is_as_long_as_guesses_pay() -> None:
    cheap, dear = ModelShape(1, 32, 0.0), ModelShape(16, 32, 0.4)
    kept = [0.9, 0.6, 0.02, 0.01]
    assert cheap.best(kept) == (2, pytest.approx(2.5 / (1 + 2 / 32)))
    assert dear.best([0.5, 0.1]) == (0, 1.0)
    rough = ModelShape(4, 32, 0.1, adapters=0.2, read=0.25, head_read=0.5)
    assert rough.speed_up([1.0, 1.0]) == pytest.approx(3 / (1 + 2 * (0.25 * 0.9 * 1.2 / 8 + 0.05)))


def test_means_of_drafts_lie_between_them() -> None:
    assert [PARTS.step_s(n) for n in (0, 1, 1.5, 2)] == pytest.approx([1.0, 1.5, 1.75, 2.0])
    with pytest.raises(ConfigError, match="up to 2 guesses were measured, found 3"):
        PARTS.step_s(3)


def test_what_is_decided_behind_an_end_is_no_token() -> None:
    parts = replace(PARTS, plain_host_s=0.2, host_s=0.4)
    trial = Trial(((7,) * 11,), 3, decode_s=4.4, total_s=5.0, num_steps=5, num_drafted=10, num_accepted=9)
    found = judge(parts, Record("multirate", [[trial]]), 2.0)
    assert (found.tokens_per_step, found.guesses_per_step) == (2.0, 2.0)
    assert found.law == pytest.approx(2.0 * 1.2 / 2.4)
    assert found.off == pytest.approx(2.0 / found.law - 1)
    with pytest.raises(ConfigError, match="multirate answered in 1 first blocks"):
        tokens_per_step(Record("multirate", [[replace(trial, num_steps=1)]]))


@pytest.mark.slow
def test_measured_speed_is_the_laws() -> None:
    """Within 15 % of the law fed with measured acceptance and costs; the best of three on a busy machine."""
    torch.set_num_threads(1)
    engine = load(None)
    asked = questions_of(engine, read_prompts("e2e", 6), raw=False)
    rows = []
    for _ in range(3):
        rows.append(compare(engine, "multirate", asked, max_new_tokens=48, repeats=3))
        if abs(rows[-1]["off"]) <= 0.15:
            break
    assert min(abs(row["off"]) for row in rows) <= 0.15
    assert rows[0]["identical"]
    shown = table({"rows": [{"model": "m", "prompts": "p", "kernels": "k", **row} for row in rows]})
    assert f"{rows[0]['law']:.2f}x" in shown
