"""What a text says about matrices: outputs count by the tokens that are scored, and small changes lose what is said."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.load import load_decoder
from vivace.core.model import Decoder
from vivace.palette.statistics import distance, gather, matrices
from vivace.train.data import Row, TokenBatch, collate


@pytest.fixture
def model(tmp_path: Path) -> Decoder:
    return load_decoder(make_checkpoint(tmp_path / "model"), dtype="float32")


def batch_of(num_prompt: int, count: int = 12) -> TokenBatch:
    drawn = torch.Generator().manual_seed(1)
    texts = torch.randint(4, 300, (count, 24), generator=drawn).tolist()
    return collate([Row(tuple(text), num_prompt) for text in texts], torch.device("cpu"))


def test_tokens_are_drawn_where_the_text_is_scored(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, drawn, real = batch_of(20), [], torch.multinomial

    def counted(chances: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        drawn.append(len(chances))
        return real(chances, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "multinomial", counted)
    found = gather(model, [batch])
    assert sum(drawn) == found.num_scored == len(batch.predicting) == 12 * 4
    assert found.num_rows == 12 * 24
    name = "layers.1.feed_forward.down.weight"
    torch.testing.assert_close(found.mean_gains(name), found.gains[name] / 48)


@pytest.mark.parametrize("num_prompt", [1, 18])
def test_what_a_small_change_loses_is_predicted(model: Decoder, num_prompt: int) -> None:
    """Of random changes of one matrix, which have no pattern that inputs share, within a third."""
    batches = [batch_of(num_prompt, 48)]
    found = gather(model, batches)
    name = "layers.1.feed_forward.down.weight"
    stored = matrices(model)[name].weight.detach()
    change = 0.02 * stored.std() * torch.randn(stored.shape, generator=torch.Generator().manual_seed(2))
    lost = torch.einsum("oi,ij,oj->o", change, found.mean_moments(name), change)
    predicted = 0.5 * float((lost * found.mean_gains(name)).sum())
    changed = copy.deepcopy(model)
    matrices(changed)[name].weight = torch.nn.Parameter(stored + change, requires_grad=False)
    assert predicted == pytest.approx(distance(changed, model, batches).kl, rel=0.35)
