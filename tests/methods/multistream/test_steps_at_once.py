"""Steps of streams in one native call: the text, log p and counts of the steps one by one."""

from __future__ import annotations

import pytest
import torch

from tests.decode.runs import Result, finish
from tests.decode.steps_at_once import MODELS, Noting, packed, stops_at_every_end
from tests.decode.tiny_decoders import prompts
from vivace.core.model import Decoder
from vivace.core.seams import Drafter
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.kernels.native import NativeBody
from vivace.methods.multistream.config import StreamPlan
from vivace.methods.multistream.drafter import StreamDrafter

CHAINS = {
    "two": (StreamPlan((1, 1), "kept"), {}),
    "feedback": (StreamPlan((1, 1), "kept"), {"feedback": True}),
    "fewer than trained, rough": (StreamPlan((1,), "kept", weights="q4"), {"feedback": True}),
    "eight bits": (StreamPlan((1, 1), "kept", weights="int8"), {}),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, body: NativeBody) -> Decoder:
    return packed(request.param, body)


def run(model: Decoder, drafter: Drafter, steps_per_call: int = 4, **fields: object) -> list[Result]:
    requests = [Request(prompt, 9 + 3 * i, drafter, **fields) for i, prompt in enumerate(prompts(6, seed=2))]
    return finish(Session(model, num_slots=1, capacity=64, chunk=8, steps_per_call=steps_per_call), requests)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("logprobs", [False, True])
def test_steps_in_one_call_are_the_steps_one_by_one(model: Decoder, streams, name: str, logprobs: bool) -> None:
    """Guesses too, but for the last bits of where streams start."""
    plan, fields = CHAINS[name]
    drafter = Noting(StreamDrafter(model, streams(torch.bfloat16, insertion_layer=4, noise=0.02, **fields), plan))
    found = run(model, drafter, logprobs=logprobs)
    assert max(drafter.steps) > 1
    drafter.proposed.clear()
    alone = run(model, drafter, steps_per_call=0, logprobs=logprobs)
    assert drafter.proposed
    assert not drafter.steps
    for mine, yours in zip(found, alone, strict=True):
        assert (mine.tokens, mine.logprobs, mine.reason) == (yours.tokens, yours.logprobs, yours.reason)
    counts = [[r.stats.num_accepted_draft_tokens for r in results] for results in (found, alone)]
    assert sum(counts[1]) > 0
    assert abs(sum(counts[0]) - sum(counts[1])) <= 0.1 * sum(counts[1])
    assert [r.tokens for r in found] == [r.tokens for r in run(model, NoDrafts())]


def test_every_end_stops_the_steps(model: Decoder, streams) -> None:
    made = streams(torch.bfloat16, insertion_layer=4, noise=0.02, feedback=True)
    stops_at_every_end(model, Noting(StreamDrafter(model, made, StreamPlan((1, 1), "kept"))))


@pytest.mark.parametrize(
    "plan", [StreamPlan((2, 1), "kept"), StreamPlan((1, 1)), StreamPlan((1, 1), "kept", threshold=0.01)], ids=str
)
def test_trees_and_pruned_drafts_go_step_by_step(model: Decoder, streams, plan: StreamPlan) -> None:
    drafter = Noting(StreamDrafter(model, streams(torch.bfloat16, insertion_layer=4, noise=0.02), plan))
    assert [r.tokens for r in run(model, drafter)] == [r.tokens for r in run(model, NoDrafts())]
    assert not drafter.steps
