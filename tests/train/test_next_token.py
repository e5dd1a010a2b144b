"""Next-token loss: parts add up to the whole, in value and in gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.train.tiny import PAIRS, tiny_decoder
from vivace.checkpoint.tokenizer import Tokenizer
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.train.data import Rows, TokenBatch, collate
from vivace.train.next_token import NextToken


@pytest.fixture
def batch(tokenizer: Tokenizer) -> TokenBatch:
    return collate(Rows(tokenizer, 128).encode(PAIRS[:7]))


def plain_loss(model: Decoder, batch: TokenBatch) -> torch.Tensor:
    step = Step.dense(*batch.tokens.shape)
    logits = model.head(model.run(model.embed(batch.tokens.reshape(-1), step), step)).view(*batch.tokens.shape, -1)
    losses = [
        F.cross_entropy(logits[row, place - 1], batch.tokens[row, place])
        for row, place in batch.scored.nonzero().tolist()
    ]
    return torch.stack(losses).mean()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rows", [3, 10_000])
def test_parts_have_the_gradient_of_the_whole(batch: TokenBatch, rows: int, recompute: bool) -> None:
    model, reference = tiny_decoder(), tiny_decoder()
    loss = plain_loss(reference, batch)
    loss.backward()
    seen = 0.0
    for part, metrics in NextToken(model, rows=rows, recompute=recompute).losses(model, batch):
        part.backward()
        seen += metrics.get("loss", 0.0)
    assert abs(seen - float(loss.detach())) < 1e-4
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-4, atol=2e-6, msg=name)


def test_padding_and_prompts_are_not_learnt(batch: TokenBatch, model: Decoder) -> None:
    changed = batch.tokens.clone()
    changed[~batch.scored & (changed == 0)] = 7
    with torch.no_grad():
        before, after = (
            sum(float(part) for part, _ in NextToken(model).losses(model, TokenBatch(tokens, batch.scored)))
            for tokens in (batch.tokens, changed)
        )
    assert before == after


def test_without_gradients_only_the_loss_comes(batch: TokenBatch, model: Decoder) -> None:
    with torch.no_grad():
        parts = [(float(loss), seen) for loss, seen in NextToken(model, rows=16).losses(model, batch)]
    assert abs(sum(loss for loss, _ in parts) - float(plain_loss(model, batch).detach())) < 1e-4
    assert all("loss" in seen for _, seen in parts)


def test_every_parameter_is_in_one_group_and_cuts_cover_the_weights(model: Decoder) -> None:
    groups = {group["name"]: group for group in NextToken(model).groups()}
    params = [p for group in groups.values() for p in group["params"]]  # type: ignore[attr-defined]
    assert sorted(map(id, params)) == sorted(map(id, model.parameters()))
    matrices = groups["matrices"]
    assert len(matrices["params"]) == 4 * model.config.num_layers  # type: ignore[arg-type]
    for weight, cut in zip(matrices["params"], matrices["cuts"], strict=True):  # type: ignore[call-overload]
        assert sum(cut) == weight.shape[0]
    assert (32, 16, 16) in matrices["cuts"]  # type: ignore[operator]
