"""The first weights of a T5: where its heads look before anything is learnt."""

from __future__ import annotations

import pytest
import torch

from vivace.core.model import Layer
from vivace.recipes.seq2seq import T5Shape
from vivace.recipes.seq2seq_start import start_t5

SHAPE = T5Shape(num_layers=1, num_decoder_layers=2, width=64, ffn_width=96, num_heads=6, head_dim=32, vocab_size=300)
MODEL = start_t5(SHAPE, {index: f"word{index}" for index in range(300)}, seed=1)
LENGTH = 40


@pytest.mark.parametrize("head", range(SHAPE.num_heads))
def test_heads_of_the_encoder_look_before_behind_near_and_anywhere(head: int) -> None:
    assert MODEL.encoder is not None
    assert MODEL.encoder.relative is not None
    biases = MODEL.encoder.relative.within(LENGTH)[head].detach()
    inner = torch.arange(1, LENGTH - 1)
    if head % 4 == 3:
        assert torch.equal(biases, torch.zeros(LENGTH, LENGTH))
    else:
        assert torch.equal(biases.argmax(-1)[inner], inner + (-1, 1, 0)[head % 4])
        assert biases[5, 5] > biases[5, 30] <= biases[5, 20], "further is never better"


def test_heads_of_the_decoder_look_at_the_token_before_too() -> None:
    assert MODEL.relative is not None
    biases = MODEL.relative.within(LENGTH).detach()
    causal = biases.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    assert torch.equal(causal[0].argmax(-1)[1:], torch.arange(LENGTH - 1))
    assert torch.equal(causal[2].argmax(-1), torch.arange(LENGTH))


@pytest.mark.parametrize("layer", list(MODEL.layers))
def test_a_token_of_the_text_looks_at_itself_in_the_source(layer: Layer) -> None:
    assert layer.cross is not None
    x = torch.nn.functional.normalize(MODEL.embedding[:50].detach(), dim=-1) * SHAPE.width**0.5
    q = layer.cross.q(x).view(50, SHAPE.num_heads, SHAPE.head_dim)
    k = layer.cross.kv(x).view(50, 2, SHAPE.num_heads, SHAPE.head_dim)[:, 0]
    scores = torch.einsum("thd,shd->hts", q, k)
    found = scores.argmax(-1) == torch.arange(50)
    assert found.float().mean() > 0.9
