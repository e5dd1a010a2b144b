"""A forecast: who hears what and when, from which row, and a loss that teaches what is chosen and how soon again."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.storage.experts.foresight.foreseen import Heard, Sees, batch, check, foresight
from vivace.core.model import Decoder
from vivace.storage.experts.foresight.config import ForesightLoss
from vivace.storage.experts.foresight.forecast import MAX_PASSES, Forecast, forecast_loss, until_next
from vivace.storage.experts.foresight.objective import ForesightObjective


def test_a_pass_is_told_from_the_end_of_the_one_before(model: Decoder, heard: Heard) -> None:
    sees = Sees(model)
    last = sees.run({1: [4, 9, 33]}, kept=[(0, 1, 2)], is_prompt=True)[-1]
    assert {kind for kind, *_ in heard} == {"prompt"}, "nothing goes before a prompt"
    for token in (7, 12):
        heard.clear()
        sees.run({0: [5]}, kept=[(0,)])  # somebody else's pass in between, the first with nothing before it
        heard.clear()
        after = sees.run({1: [token]})[0]
        ran = next(place for place, (kind, *_) in enumerate(heard) if kind == "ran")
        assert all(kind == "ran" for kind, *_ in heard[ran:]), "it was told before anything ran"
        check(heard[:ran], sees.said(last, token))
        last = after


def test_rows_together_are_told_together(model: Decoder, heard: Heard) -> None:
    """An expert is expected if one of the rows wants it, and needed as soon as the first does."""
    sees = Sees(model)
    ends = sees.run({0: [4], 2: [9]}, kept=[(0,), (0,)])
    heard.clear()
    sees.run({2: [7], 0: [11]}, kept=[(0,), (0,)])
    one, other = sees.said(ends[1], 7), sees.said(ends[0], 11)
    likely = [a | b for a, b in zip(one[0], other[0], strict=True)]
    soon = [tuple(map(min, a, b)) for a, b in zip(one[1], other[1], strict=True)]
    check([each for each in heard if each[0] != "ran"], (likely, soon))


def test_of_several_guesses_the_one_that_is_followed_counts(model: Decoder, heard: Heard) -> None:
    """A pass over four tokens of which two stay is followed from its second row."""
    sees = Sees(model)
    ends = sees.run({0: [4, 9, 33, 2]}, kept=[(0, 1)])
    heard.clear()
    sees.run({0: [6]})
    check([each for each in heard if each[0] != "ran"], sees.said(ends[1], 6))


def test_the_probability_decides_who_is_expected(model: Decoder, heard: Heard) -> None:
    counts = []
    for at_least in (0.01, 0.5, 0.99):
        sees = Sees(model, at_least)
        sees.run({0: [4]})
        heard.clear()
        sees.run({0: [9]})
        counts.append(sum(len(told) for kind, _, told in heard if kind == "expected"))
    assert counts[0] > counts[1] > counts[2]


def test_until_next_is_what_it_says() -> None:
    draw = random.Random(5)
    for count in (1, 7, 90, 200):
        chosen = np.array([[draw.random() < rate for rate in (0.5, 0.1, 0.01, 0.0)] for _ in range(count)])
        found = until_next(chosen)
        for place in range(count):
            for column in range(4):
                after = (n for n in range(1, MAX_PASSES) if chosen[(place + n) % count, column])
                assert found[place, column] == next(after, MAX_PASSES)


def test_a_batch_in_which_nothing_follows_teaches_nothing(model: Decoder) -> None:
    seeing = foresight(model, rate=None, forecast=4)
    alone = batch(8, 2)
    alone.scored[:, 2:] = False
    ((loss, said),) = ForesightObjective(seeing, ForesightLoss()).losses(model, alone)
    loss.backward()
    assert (float(loss.detach()), said["forecast"]) == (0.0, 0.0)


def test_training_raises_recall_and_lowers_the_error_of_passes(model: Decoder) -> None:
    seeing = foresight(model, rate=None, forecast=32)
    objective = ForesightObjective(seeing, ForesightLoss())
    optimiser = torch.optim.AdamW(seeing.forecast.parameters(), 0.02)  # type: ignore[union-attr]
    losses, recalls = [], []
    for _ in range(60):
        optimiser.zero_grad()
        ((loss, said),) = objective.losses(model, batch())
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
        recalls.append(said["forecast"])
    assert losses[-1] < 0.5 * losses[0]
    assert recalls[-1] > recalls[0] + 0.2


@pytest.mark.parametrize("given", [0, 5])
def test_the_loss_sees_what_decoding_sees(model: Decoder, heard: Heard, given: int) -> None:
    """Where the loss compares f with what was chosen, decoding tells that f of that pass, from a prompt's last on."""
    sees, text = Sees(model), batch(12, 1)
    text.scored[:, :given] = False
    tokens, seen = text.tokens[0].tolist(), []
    for token in tokens:
        heard.clear()
        sees.run({0: [token]})
        ran = {layer: set(told) for kind, layer, told in heard if kind == "ran"}
        foretold = [torch.tensor(told) for kind, _, told in heard if kind == "foretold"]
        if foretold:
            seen.append((ran, torch.stack(foretold)))
    calls: list[tuple[Tensor, Tensor]] = []

    def spy(forecast: Forecast, last: Tensor, entering: Tensor, chosen: Tensor, top_k: int) -> tuple[Tensor, float]:
        calls.append((chosen, forecast(last, entering)[1].exp2().detach()))
        return forecast_loss(forecast, last, entering, chosen, top_k)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vivace.storage.experts.foresight.objective.forecast_loss", spy)
        list(ForesightObjective(sees.foresight, ForesightLoss()).losses(model, text))
    ((chosen, passes),) = calls
    first = max(0, given - 2)
    assert len(chosen) == len(tokens) - 2 - first, "the first follows nothing, the last is followed by nothing"
    for place, (ran, foretold) in enumerate(seen[first:-1]):
        torch.testing.assert_close(passes[place], foretold, rtol=1e-3, atol=1e-3)
        assert [set(each.nonzero()[:, 0].tolist()) for each in chosen[place]] == [ran[layer] for layer in sorted(ran)]
