"""Steps of streams in one native call: the text, log p and counts of the steps one by one."""

from __future__ import annotations

import pytest
import torch

from tests.decode.runs import Result, finish
from tests.decode.steps_at_once import MODELS, Noting, packed, stops_at_every_end
from tests.decode.tiny_decoders import prompts
from vivace.core.model import Decoder
from vivace.core.seams import Draft, Drafter
from vivace.decode.forward import ForwardPass
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
TREES = {
    "tree": (StreamPlan((3, 2), "kept"), {"feedback": True}),
    "every": (StreamPlan((1, 1), "every"), {}),
    "every, feedback": (StreamPlan((1, 1, 1), "every"), {"feedback": True}),
    "every, tree": (StreamPlan((2, 2), "every"), {"feedback": True}),
    "every, behind in eight bits": (StreamPlan((2, 1), "every", weights="int8"), {"feedback": True}),
    "the paper's": (StreamPlan((2, 2, 2, 2), "every"), {"feedback": True}),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, body: NativeBody) -> Decoder:
    return packed(request.param, body)


def run(model: Decoder, drafter: Drafter, steps_per_call: int = 4, **fields: object) -> list[Result]:
    requests = [Request(prompt, 9 + 3 * i, drafter, **fields) for i, prompt in enumerate(prompts(6, seed=2))]
    return finish(Session(model, num_slots=1, capacity=64, chunk=8, steps_per_call=steps_per_call), requests)


@pytest.mark.slow_where(lambda name, logprobs, **_: logprobs == (name in ("two", "eight bits")))
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("logprobs", [False, True])
def test_steps_in_one_call_are_the_steps_one_by_one(model: Decoder, streams, name: str, logprobs: bool) -> None:
    """Guesses too, but for the last bits of where streams start."""
    compare(model, streams, *CHAINS[name], logprobs=logprobs)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("model", ["around"], indirect=True)
def test_trees_and_riding_streams_are_the_steps_one_by_one(model: Decoder, streams, name: str) -> None:
    """Of the model with windows, sandwiched norms and a capped head."""
    compare(model, streams, *TREES[name])


def compare(model: Decoder, streams, plan: StreamPlan, fields, *, logprobs: bool = False) -> None:
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


@pytest.mark.parametrize("attach", ["every", "kept"])
@pytest.mark.parametrize("model", ["plain", "around"], indirect=True)
@torch.inference_mode()
def test_kept_entries_are_those_of_a_prompt(model: Decoder, streams, attach: str) -> None:
    """Where native calls keep nodes of a tree out of order: what they moved is what a fresh prefill stores."""
    made = streams(torch.bfloat16, insertion_layer=4, noise=0.02, feedback=True)
    session = Session(model, num_slots=1, capacity=64, steps_per_call=3)
    text = list(prompts(2, seed=8)[1])
    session.admit(Request(tuple(text), 20, StreamDrafter(model, made, StreamPlan((4, 3), attach))))
    while not session.is_idle:
        text += [token for emitted in session.step() for token in emitted.tokens]
        length = session.cache.lengths[0]
        if session.is_idle or length == 0:
            continue
        fresh = model.new_cache(1, 64)
        ForwardPass().run(model, Draft.committed_only({0: text[:length]}), fresh)
        for layer in range(6):
            ours, theirs = (cache.span(layer, 0, 0, length) for cache in (session.cache, fresh))
            for mine, its in zip(ours, theirs, strict=True):
                window = model.config.window(layer)
                first = 0 if window is None else max(0, length - window)
                assert torch.equal(mine[:, first:], its[:, first:])


def test_pruned_drafts_go_step_by_step(model: Decoder, streams) -> None:
    plan = StreamPlan((1, 1), "kept", threshold=0.01)
    drafter = Noting(StreamDrafter(model, streams(torch.bfloat16, insertion_layer=4, noise=0.02), plan))
    assert [r.tokens for r in run(model, drafter)] == [r.tokens for r in run(model, NoDrafts())]
    assert not drafter.steps
