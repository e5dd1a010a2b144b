"""Steps of Medusa's heads in one native call: the text, log p and guesses of the steps one by one."""

from __future__ import annotations

import pytest
import torch

from tests.decode.runs import Result, finish
from tests.decode.steps_at_once import Noting, packed, stops_at_every_end
from tests.decode.tiny_decoders import prompts
from tests.methods.rivals.conftest import noisy
from vivace.core.model import Decoder
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.decode.tree import TreePlan
from vivace.kernels.native import NativeBody
from vivace.methods.medusa.drafter import Medusa, MedusaConfig, MedusaHeads

SHAPES = {
    "chain": (MedusaConfig(3), TreePlan((1, 1, 1)), None),
    "tree": (MedusaConfig(3), TreePlan((3, 2, 1)), None),
    "model's head": (MedusaConfig(2, own_output=False), TreePlan((2, 2)), None),
    "few tokens": (MedusaConfig(2), TreePlan((2, 1)), torch.arange(0, 97, 2)),
}


@pytest.fixture(params=["around", "learned"])
def model(request: pytest.FixtureRequest, body: NativeBody) -> Decoder:
    """A packed decoder of six layers."""
    return packed(request.param, body)


def medusa(model: Decoder, name: str) -> Medusa:
    """Heads near the model's own, so that some guesses are kept."""
    config, plan, vocabulary = SHAPES[name]
    torch.manual_seed(4)
    heads = MedusaHeads(config, model.config)
    torch.nn.init.normal_(heads.mix, std=0.1)
    if heads.output is not None:
        rows = model.embedding if model.lm_head is None else model.lm_head.matrix.rows_of_weights()
        with torch.no_grad():
            heads.output.copy_(rows)
    return Medusa(model, noisy(heads, torch.bfloat16, 0.02), plan, vocabulary)


def run(model: Decoder, drafter: object, steps: int = 4, **fields: object) -> list[Result]:
    requests = [Request(prompt, 9 + 3 * i, drafter, **fields) for i, prompt in enumerate(prompts(6, seed=2))]
    return finish(Session(model, num_slots=1, capacity=64, chunk=8, steps_per_call=steps), requests)


@pytest.mark.parametrize("name", SHAPES)
def test_steps_in_one_call_are_the_steps_one_by_one(model: Decoder, name: str) -> None:
    drafter = Noting(medusa(model, name))
    found = run(model, drafter, logprobs=True)
    assert max(drafter.steps) > 1
    drafter.proposed.clear()
    alone = run(model, drafter, steps=0, logprobs=True)
    assert not drafter.steps
    for mine, yours in zip(found, alone, strict=True):
        assert (mine.tokens, mine.logprobs, mine.reason) == (yours.tokens, yours.logprobs, yours.reason)
    counts = [[r.stats.num_accepted_draft_tokens for r in results] for results in (found, alone)]
    assert sum(counts[1]) > 0
    assert abs(sum(counts[0]) - sum(counts[1])) <= 0.1 * sum(counts[1])
    drafted = [[r.stats.drafted_per_position for r in results] for results in (found, alone)]
    assert sum(map(sum, drafted[0])) == pytest.approx(sum(map(sum, drafted[1])), rel=0.2)
    assert [r.tokens for r in found] == [r.tokens for r in run(model, NoDrafts())]


def test_every_end_stops_the_steps(model: Decoder) -> None:
    stops_at_every_end(model, Noting(medusa(model, "tree")))


def test_the_likeliest_nodes_of_a_tree_go_step_by_step(model: Decoder) -> None:
    """Which nodes these are needs probabilities, that native calls do not compute."""
    heads = medusa(model, "tree")
    whole = Medusa(model, MedusaHeads(MedusaConfig(3), model.config).requires_grad_(False), TreePlan((3, 2, 1), 5))
    assert heads.head_rows is not None
    assert whole.head_rows is None
