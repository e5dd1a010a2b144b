"""Layers that a step runs, counted by watching native and PyTorch spans against what is said of the plan."""

from __future__ import annotations

import pytest

from vivace.decode.shallow import DraftPlan
from vivace.engine import SHIPPED, Engine, load
from vivace.evaluate.step_layers import StepLayers, layers_of_step
from vivace.methods.multistream.config import StreamPlan
from vivace.tuning import planned

PROMPT = "Describe: name[The Eagle], food[Chinese], area[riverside]"


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load(SHIPPED, kernels="torch")


def said(engine: Engine, method: str) -> StepLayers:
    return layers_of_step(engine.methods.drafter(method), 24)


def test_a_plan_says_how_many_layers_a_step_runs(engine: Engine) -> None:
    assert said(engine, "plain") == StepLayers(24, 0)
    assert said(engine, "medusa") == said(engine, "draft") == said(engine, "lookup") == StepLayers(24, 0)
    assert said(planned(engine, DraftPlan((1,) * 4)), "multirate") == StepLayers(21, 15)
    assert said(planned(engine, DraftPlan((1,) * 4, weights="q4")), "multirate") == StepLayers(24, 12)
    kept = StreamPlan((1, 1, 1), "kept")
    assert said(planned(engine, kept), "multistream") == StepLayers(24, 12)
    assert said(planned(engine, kept), "multistream").total == 36


@pytest.mark.parametrize(
    ("method", "plan"), [("multirate", DraftPlan((1,) * 3)), ("multistream", StreamPlan((1,) * 3, "kept"))]
)
def test_no_step_runs_more_layers_than_are_said(
    engine: Engine, method: str, plan: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On PyTorch every layer is a call: those of an answer, over its steps."""
    drawn = planned(engine, plan)  # type: ignore[arg-type]
    calls = 0
    for layer in engine.model.layers:
        true = layer.forward

        def counted(*args: object, true=true, **more: object) -> object:  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            return true(*args, **more)

        monkeypatch.setattr(layer, "forward", counted)
    stats = drawn.generate([PROMPT], method=method, max_new_tokens=40, do_sample=False)[0].stats
    told = said(drawn, method)
    prompt = 24
    assert stats.num_spec_steps * told.verify < calls - prompt <= (stats.num_spec_steps + 1) * told.total
    assert calls - prompt > 0.8 * stats.num_spec_steps * told.total, "nearly every step drafts"
