"""Plans of rivals play like any other, and the winner is found again by the method."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

import vivace
from tests.methods.rivals.conftest import noisy
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import base_hash, save_adapter
from vivace.decode.shallow import DraftPlan
from vivace.decode.tree import TreePlan
from vivace.errors import ConfigError, NotFoundError
from vivace.evaluate.benchmark import BenchmarkPrompt
from vivace.methods.composition import adapters_by_method, stored_of
from vivace.methods.lookahead.drafter import LookaheadPlan
from vivace.methods.medusa.drafter import MedusaConfig
from vivace.methods.uno.drafter import UnoConfig
from vivace.tuning import candidates_of, keep_plan, search, tuned_methods


@pytest.fixture
def engine(tmp_path: Path) -> vivace.Engine:
    """A tiny model with random Medusa heads and random terms of UNO."""
    place = make_checkpoint(tmp_path / "base", layers=4)
    model = vivace.load(place).model
    for kind, config in (("medusa", MedusaConfig(2)), ("uno", UnoConfig(3, 4))):
        tensors = noisy(stored_of(kind).weights(config, model.config), model.dtype).tensors()
        plan = asdict(TreePlan((1, 1)))
        save_adapter(place / "adapters" / kind, kind, base_hash(place), plan, asdict(config), tensors)
    return vivace.load(place)


def test_every_candidate_is_another_draft(engine: vivace.Engine) -> None:
    for method in set(tuned_methods()) - {"multistream"}:  # its plans depend on an adapter, see tests/multistream
        plans = candidates_of(engine, method, 4)
        assert len({plan.label for plan in plans}) == len(plans) > 2, method
    for method, deepest in (("medusa", 2), ("uno", 3)):
        plans = candidates_of(engine, method)
        assert max(len(plan.widths) for plan in plans if isinstance(plan, TreePlan)) == deepest
    with pytest.raises(NotFoundError, match="multistream"):
        candidates_of(engine, "multistream", 4)
    with pytest.raises(ConfigError, match="'plain' has no draft to tune"):
        candidates_of(engine, "plain")


@pytest.mark.parametrize(
    ("method", "plan"),
    [
        ("medusa", TreePlan((2, 1), 2)),
        ("uno", TreePlan((1, 2, 2), 4)),
        ("layerskip", DraftPlan.chain(2)),
        ("lookahead", LookaheadPlan(3, 2, 2)),
    ],
)
def test_the_winner_is_used_from_then_on(engine: vivace.Engine, method: str, plan: object) -> None:
    question = BenchmarkPrompt("aka", tuple(engine.tokenizer.encode_prompt("aka")))
    [trial] = search(engine, method, [plan], [question], max_new_tokens=8)
    assert trial.run.identical
    keep_plan(engine, method, plan)
    drafter = vivace.load(engine.folder).methods.drafter(method)
    assert drafter.plan == plan
    assert drafter.name == method
    folder = engine.folder / "adapters" / method
    named = vivace.load(engine.folder, adapters=adapters_by_method([folder], engine.folder)).methods
    assert (named.adapters, named.drafter(method).plan) == ({method: folder}, plan)


def test_a_draft_model_keeps_no_plan(engine: vivace.Engine) -> None:
    with pytest.raises(ConfigError, match="keeps no plan"):
        keep_plan(engine, "draft", DraftPlan.chain(2))
