"""What is learnt where a draft vocabulary names the tokens that may be guessed: loops over their logits alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.decode.tiny_decoders import VOCAB
from tests.objectives import rivals, streams
from tests.objectives.case import BATCH, Case
from tests.objectives.naive import cross_entropy, divergence
from tests.objectives.test_objectives import loss_of
from vivace.core.draft_head import DraftHead
from vivace.core.model import Decoder

SOME = torch.arange(0, VOCAB, 2)
"""Half of the tokens: some of those that follow in the texts are among them and some are not."""
RIVALS: dict[str, Callable[[], Case]] = {
    "medusa": rivals.medusa,
    "medusa shared": lambda: rivals.medusa(own_output=False),
    "eagle": rivals.eagle,
    "deed": rivals.deed,
    "uno": rivals.uno,
}


def some_loss(truth: Tensor, guess: Tensor, token: int) -> float:
    """Of one guess: a token that is not among them teaches only what the model gives the others."""
    place = (token == SOME).nonzero()
    said = cross_entropy(guess, int(place)) if len(place) else 0.0
    return 0.7 * divergence(truth, guess) + 0.2 * said


def restricted(case: Case) -> Case:
    """The same case with an objective that guesses some tokens."""
    case.objective.head = DraftHead(case.model, SOME)  # type: ignore[attr-defined]
    return case


@pytest.mark.parametrize("name", RIVALS)
def test_rivals_learn_the_tokens_that_may_be_guessed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < torch.isin(BATCH.targets, SOME).sum() < len(BATCH.targets)
    real = rivals.head

    def head(model: Decoder, row: Tensor) -> Tensor:
        return real(model, row)[SOME]

    monkeypatch.setattr(rivals, "head", head)
    monkeypatch.setattr(rivals, "rival_loss", some_loss)
    monkeypatch.setattr(rivals, "DraftHead", lambda model: DraftHead(model, SOME))
    case = restricted(RIVALS[name]())
    with torch.no_grad():
        expected = case.oracle()
    assert loss_of(case) == pytest.approx(expected, rel=3e-4)


def test_streams_learn_the_tokens_that_may_be_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = streams.log_probs

    def log_probs(logits: Tensor) -> list[float]:
        """Of those tokens; 0 stands for the others, whatever they are multiplied by."""
        found = [0.0] * VOCAB
        for token, value in zip(SOME.tolist(), real(logits[SOME]), strict=True):
            found[token] = value
        return found

    monkeypatch.setattr(streams, "log_probs", log_probs)
    case = restricted(streams.multistream())
    with torch.no_grad():
        expected = case.oracle()
    assert loss_of(case) == pytest.approx(expected, rel=3e-4)
