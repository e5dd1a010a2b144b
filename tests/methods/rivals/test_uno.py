"""Blocks that the model drafts itself: training's form is decoding's, and the root's guess is the model's own."""

from __future__ import annotations

import pytest
import torch

from tests.decode.runs import finish
from tests.decode.tiny_decoders import build, prompts
from tests.methods.rivals.conftest import noisy, rival
from vivace.core.branches import Heard, Places, branch_call, run_branches
from vivace.core.model import Decoder
from vivace.core.seams import Draft
from vivace.core.step import Step
from vivace.decode.forward import ForwardPass
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.decode.tree import TreePlan
from vivace.errors import ConfigError
from vivace.methods.uno.drafter import Uno, UnoConfig, UnoDeltas
from vivace.methods.uno.objective import UnoLoss, UnoObjective
from vivace.train.data import TokenBatch

KINDS = [{}, {"windows": (None, 6, None)}, {"positions": "learned"}]
TEXT = [5, 17, 3, 80, 9, 41, 2, 66, 30, 12]


def blocks(model: Decoder, uno: Uno, count: int) -> list[torch.Tensor]:
    """What the rows of a block say below each position of the text, (count, E), while decoding."""
    cache, found = model.new_cache(1, 64), []
    for token in TEXT:
        draft = Draft.committed_only({0: [token]})
        found.append(uno.block(draft, [count], cache))
        ForwardPass().run(model, draft, cache)
        cache.commit([0], [[0]])
    return found


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS, ids=["full", "window", "learned"])
def test_training_form_is_decoding_form(kind) -> None:
    model = build(torch.float32, seed=3, **kind).requires_grad_(False)
    torch.manual_seed(2)
    terms = noisy(UnoDeltas(UnoConfig(4, 4), model.config), torch.float32, 0.2)
    text, tokens = Step.dense(1, len(TEXT)), torch.tensor([TEXT])
    final = model.run(model.embed(tokens[0], text), text)
    position = torch.arange(len(TEXT))[None]
    places = Places(position, torch.ones_like(position, dtype=torch.bool))
    call = branch_call(places, 3, terms.deltas)
    noise = terms.disturbed(model.embed(torch.zeros_like(call.slot), call))
    expected = run_branches(model, noise, call, text, places)
    for place, found in enumerate(blocks(model, Uno(model, terms, TreePlan((1,) * 4)), 4)):
        torch.testing.assert_close(found[0], final[place], atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(found[1:], expected[place], atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_terms_that_learnt_nothing_leave_the_model_as_it_is() -> None:
    model = build(torch.float32, seed=3).requires_grad_(False)
    terms = UnoDeltas(UnoConfig(4, 4), model.config)
    terms.noise.zero_()
    uno = Uno(model, terms, TreePlan((1,) * 4))
    assert {name for name, value in terms.tensors().items() if value.any()} == {
        name for name in terms.tensors() if name.startswith("down")
    }
    for place, found in enumerate(blocks(model, uno, 4)):
        step = Step.dense(1, place + 4)
        tokens = torch.tensor([*TEXT[: place + 1], 0, 0, 0])
        expected = model.run(model.embed(tokens, step), step)[place:]
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["uno chain", "uno sparse"])
def test_the_first_guess_is_the_models_own(name) -> None:
    model = build(torch.bfloat16, seed=3).requires_grad_(False)
    asked = [Request(prompt, 14, rival(name, model)) for prompt in prompts(4, seed=2)]
    for result in finish(Session(model, num_slots=2, capacity=64, chunk=8), asked):
        assert result.stats.acceptance_per_position[0] == 1.0


def test_rows_are_taught_what_the_model_says_behind_them() -> None:
    scored = torch.tensor([[False, True, True, True, False]])
    heard = Heard.of(Places(torch.tensor([[0, 1, 2]]), torch.tensor([[True, True, False]])), 3, scored)
    assert heard.scored.tolist() == [[True, True, False], [True, False, False]]
    assert (heard.position.tolist(), heard.level.tolist()) == ([1, 2, 2], [0, 1, 0])
    guess = torch.eye(4)[[1, 2, 3]]
    seen = heard.agreement(guess, torch.eye(4)[[1, 0, 3]], 2, "noise")
    assert seen == {"noise 1": 1.0, "noise 2": 0.0, "noise 3": 0.0, "kept": 1.0}


def test_a_batch_without_a_drawn_position_still_teaches() -> None:
    model = build(torch.float32, seed=3).requires_grad_(False)
    objective = UnoObjective(UnoDeltas(UnoConfig(3, 4), model.config), UnoLoss(blocks=1))
    torch.manual_seed(0)
    batch = TokenBatch(torch.randint(0, 97, (1, 12)), torch.arange(12)[None] >= 4)
    for _ in range(12):
        assert all(bool(loss > 0) for loss, _ in objective.losses(model, batch))


def test_a_plan_deeper_than_the_block_is_refused() -> None:
    model = build(torch.float32, seed=3)
    with pytest.raises(ConfigError, match="deeper than a block of 3"):
        Uno(model, UnoDeltas(UnoConfig(3, 4), model.config), TreePlan((1,) * 4))
    with pytest.raises(ConfigError, match="block must be between 2 and 16"):
        UnoConfig(1)
