"""Steps as recorded graphs: the drafts, texts and bits of the same steps made one by one, whoever guesses."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.core.recorded import recorded
from tests.decode.runs import Result, finish
from tests.decode.steps_at_once import FIELDS, MODELS, Noting, stops_at_every_end
from tests.decode.tiny_decoders import build, prompts
from tests.methods.multirate.test_chain import drafted
from vivace.core.cuda.backend import CudaBackend
from vivace.core.cuda.chain import GraphChain
from vivace.core.cuda.whole_step import WHOLE_STEP
from vivace.core.model import Decoder
from vivace.core.seams import Drafter
from vivace.decode.multi_step import MultiStepPlain
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.decode.shallow import DraftPlan
from vivace.methods.multirate.drafter import AcceleratedGuess, drafter_by, self_speculation
from vivace.methods.multirate.residual import Accelerator

Accelerators = Callable[..., Accelerator]
KINDS: dict[str, dict[str, Any]] = {
    "bare": {},
    "feedback": {"feedback": True},
    "lite": {"mode": "lite", "feedback": True},
    "reaching": {"feedback": True, "reach": (5, 4)},
    "reaching everywhere": {"reach": (3, 4, 5)},
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Decoder:
    made = build(torch.bfloat16, num_layers=6, seed=3, **FIELDS[request.param]).requires_grad_(False)
    made.run_on(CudaBackend(recorded))
    return made


def launched(model: Decoder) -> list[Any]:
    """What was recorded of whole steps."""
    chain = model.backend.chain
    assert isinstance(chain, GraphChain)
    return [shape for shape in chain._recordings.shapes if shape[0] == WHOLE_STEP]


def run(model: Decoder, drafter: Drafter, slots: int = 1, steps: int | None = 4, **asked: Any) -> list[Result]:
    session = Session(model, num_slots=slots, capacity=96, chunk=8, steps_per_call=steps)
    texts = [*prompts(2, seed=2), (5,)]
    return finish(session, [Request(prompt, 21 + place, drafter, **asked) for place, prompt in enumerate(texts)])


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_plain_text_of_several_steps(model: Decoder, slots: int) -> None:
    """Ragged, with texts that end at different lengths in one call."""
    drafter = Noting(MultiStepPlain(model))
    found = run(model, drafter, slots, logprobs=True)
    assert max(drafter.steps) > 1
    assert launched(model)
    for mine, yours in zip(found, run(model, NoDrafts(), slots, 0, logprobs=True), strict=True):
        assert (mine.tokens, mine.logprobs) == (yours.tokens, yours.logprobs)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_chains_are_those_of_single_steps(model: Decoder, accelerator: Accelerators, kind: str) -> None:
    """Ragged sequences with limits of their own; offsets that differ by slot and depth, one slot without any."""
    fast = accelerator(torch.bfloat16, noise=0.3, exit_layer=3, **KINDS[kind])
    drafter = self_speculation(model, fast, DraftPlan.chain(5))
    offsets = {slot: torch.randn(3, 48).bfloat16() for slot in (2, 3)} if fast.config.feedback else {}
    steps, _ = drafted(model, drafter, at_once=False, offsets=offsets)
    for _ in range(4):
        draft, _ = drafted(model, drafter, at_once=True, offsets=offsets)
        for name in ("tokens", "slot", "node", "parent", "hidden"):
            assert torch.equal(getattr(draft, name), getattr(steps, name)), name
    assert launched(model)


@pytest.mark.slow_where(
    lambda model, kind, noise, **_: model != "around" or (kind, noise) not in (("bare", 0.0), ("reaching", 0.1))
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_steps_in_one_call(model: Decoder, accelerator: Accelerators, kind: str, noise: float) -> None:
    """Text and log p of plain decoding; guesses that are kept are those of the steps one by one."""
    fast = accelerator(torch.bfloat16, noise=noise, exit_layer=5, **KINDS[kind])
    plan = DraftPlan.chain(4)
    drafter = Noting(self_speculation(model, fast, plan))
    plain = run(model, NoDrafts(), logprobs=True)
    decided: list[int] = []
    for slots in (1, 3):
        drafter.proposed.clear()
        found = run(model, drafter, slots, logprobs=True)
        decided += drafter.steps
        alone = run(model, drafter, slots, 0, logprobs=True)
        for mine, yours, theirs in zip(found, alone, plain, strict=True):
            assert (mine.tokens, mine.logprobs) == (yours.tokens, yours.logprobs) == (theirs.tokens, theirs.logprobs)
            assert mine.stats.accepted_per_position[:3] == yours.stats.accepted_per_position[:3]
    assert max(decided) > 1
    assert launched(model)
    assert sum(r.stats.num_accepted_draft_tokens for r in found) > 0


@pytest.mark.slow_where(lambda model, **_: model != "learned")
def test_every_end_stops_the_steps(model: Decoder, accelerator: Accelerators) -> None:
    fast = accelerator(torch.bfloat16, exit_layer=5, feedback=True)
    drafter = Noting(self_speculation(model, fast, DraftPlan.chain(3)))
    stops_at_every_end(model, drafter)
    assert launched(model)
    del drafter
    gc.collect()
    assert not [shape for shape in launched(model) if shape[2]], "graphs end with the weights that they read"


def test_chains_reach_behind_the_last_position(accelerator: Accelerators) -> None:
    """Texts that fill the context of a model with learned positions: guesses behind it have none, and are not kept."""
    model = build(torch.bfloat16, num_layers=6, seed=3, max_positions=48, **FIELDS["learned"]).requires_grad_(False)
    model.run_on(CudaBackend(recorded))
    fast = accelerator(torch.bfloat16, exit_layer=5, feedback=True)
    [prompt, *_] = prompts(1, seed=2)
    room = 48 - len(prompt)

    def text(drafter: Drafter) -> list[tuple[int, ...]]:
        session = Session(model, num_slots=1, capacity=48, chunk=8, steps_per_call=4)
        return [r.tokens for r in finish(session, [Request(prompt, room, drafter)] * 2)]

    drafter = self_speculation(model, fast, DraftPlan.chain(6))
    assert text(drafter) == text(NoDrafts())
    assert launched(model)


@pytest.mark.parametrize("length", [2, 5])
def test_a_plan_drafts_its_own_length(model: Decoder, accelerator: Accelerators, length: int) -> None:
    """Also after a longer one with the same rows."""
    guess = AcceleratedGuess(model, accelerator(torch.bfloat16, exit_layer=5))
    run(model, drafter_by(guess, DraftPlan.chain(5)))
    found = run(model, drafter_by(guess, DraftPlan.chain(length)))
    assert max(len(r.stats.drafted_per_position) for r in found) == length
