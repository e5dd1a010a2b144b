"""New decoders are identities to grow from; growing keeps the function."""

from __future__ import annotations

import pytest
import torch

from tests.train.tiny import tiny_decoder
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.errors import ConfigError
from vivace.recipes.scratch import ShapeConfig, deepen, spelled_embeddings, start_decoder

SHAPE = ShapeConfig(
    num_layers=4, width=32, ffn_width=48, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=300, max_positions=64
)


def logits(model: Decoder) -> torch.Tensor:
    step = Step.dense(2, 9)
    tokens = torch.arange(18) * 7 % 300
    with torch.no_grad():
        return model.head(model.run(model.embed(tokens, step), step))


def test_a_deeper_decoder_is_the_same_function() -> None:
    model = tiny_decoder(vocab=300)
    grown = deepen(model, 6, (1, 4), seed=0)
    assert grown.config.num_layers == 6
    torch.testing.assert_close(logits(grown), logits(model), rtol=0, atol=0)
    assert all(torch.isfinite(p).all() for p in grown.parameters())


@pytest.mark.parametrize("places", [(0,), (1, 0), (0, 6), (0, 0), (-1, 2)])
def test_places_that_do_not_fit_are_refused(places: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="place"):
        deepen(tiny_decoder(), 6, places, seed=0)


def test_a_new_decoder_is_complete_and_drawn_from_its_seed() -> None:
    pieces = {index: f"Ġw{index}" for index in range(300)}
    first, again, other = (start_decoder(SHAPE, 2, pieces, seed) for seed in (0, 0, 1))
    assert first.config.num_layers == 2
    assert all(torch.isfinite(p).all() for p in first.parameters())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.embedding, other.embedding)
    assert logits(first).std() > 0.1


def test_pieces_of_the_same_letters_start_near_each_other() -> None:
    rows = spelled_embeddings(["The", "ĠThe", "THE", "_the", "Weir", ""], 64, torch.Generator().manual_seed(0))
    near = torch.nn.functional.cosine_similarity(rows[0], rows[1:4])
    assert near.min() > 0.7
    assert torch.nn.functional.cosine_similarity(rows[0], rows[4], dim=0) < 0.5
    assert abs(float(rows.std()) - 0.05) < 1e-3


def test_a_shape_without_width_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shape\.width"):
        ShapeConfig(num_layers=1, width=0, ffn_width=1, num_heads=1, num_kv_heads=1, head_dim=2)
