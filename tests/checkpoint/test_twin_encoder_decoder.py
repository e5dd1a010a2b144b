"""The wide twin of an encoder-decoder computes the same function, here and in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.parity.encoder_decoders import ENCODER_DECODERS, make_encoder_decoder
from tests.parity.test_encoder_decoders import LENGTHS, TEXT, stepped, tokens
from vivace.checkpoint.load import load_decoder
from vivace.checkpoint.widen import widen_checkpoint
from vivace.errors import UnsupportedError
from vivace.methods.composition import twins

SINUSOIDS = ("m2m_100", "marian", "pegasus")


def saved(family: str, folder: Path) -> Path:
    theirs: Any = make_encoder_decoder(family)
    theirs.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("factor", [2, 4])
@pytest.mark.parametrize("family", sorted(set(ENCODER_DECODERS) - set(SINUSOIDS)))
def test_it_says_the_same(tmp_path: Path, family: str, factor: int) -> None:
    folder = saved(family, tmp_path / "base")
    twin = widen_checkpoint(folder, tmp_path / "wide", factor, twins())
    small, wide = (load_decoder(path, reads_sources=True) for path in (folder, twin))
    assert wide.config.width == factor * small.config.width
    assert wide.config.tied_head == small.config.tied_head
    assert wide.encoder is not None
    assert small.encoder is not None
    assert wide.encoder.config.num_heads == factor * small.encoder.config.num_heads
    sources = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    texts = [tokens(TEXT, seed + 10) for seed in range(len(LENGTHS))]
    with torch.no_grad():
        for one, other in zip(stepped(small, sources, texts), stepped(wide, sources, texts), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
        theirs, stock = (
            transformers.AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float32).eval()
            for path in (twin, folder)
        )
        asked = {"input_ids": torch.tensor(sources[:1]), "decoder_input_ids": torch.tensor(texts[:1])}
        torch.testing.assert_close(theirs(**asked).logits, stock(**asked).logits, rtol=1e-4, atol=1e-4)
        words: dict[str, Any] = {"num_beams": 4, "max_new_tokens": 12, "do_sample": False}
        assert torch.equal(theirs.generate(asked["input_ids"], **words), stock.generate(asked["input_ids"], **words))


@pytest.mark.parametrize("family", SINUSOIDS)
def test_sinusoids_are_refused(tmp_path: Path, family: str) -> None:
    folder = saved(family, tmp_path / "base")
    with pytest.raises(UnsupportedError, match="sinusoids"):
        widen_checkpoint(folder, tmp_path / "wide", 2, twins())
    assert not (tmp_path / "wide").exists()
