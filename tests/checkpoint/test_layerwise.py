"""A checkpoint that is read layer by layer computes what it computes in memory, and has one layer in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.families import make
from vivace.checkpoint.layerwise import LayerwiseDecoder
from vivace.checkpoint.load import load_decoder
from vivace.core.model import Layer
from vivace.core.step import Step

FAMILIES = ("llama", "qwen3", "gemma2", "phi3", "gpt2", "opt")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_those_of_the_decoder_in_memory(tmp_path: Path, family: str, dtype: str) -> None:
    make(family).save_pretrained(tmp_path)
    resident, model = load_decoder(tmp_path, dtype), LayerwiseDecoder(tmp_path, dtype)
    assert (model.config, model.dtype) == (resident.config, resident.dtype)
    step = Step.dense(1, 9)
    tokens = torch.arange(3, 12)
    for _ in range(2):  # a second time through begins at the embedding again
        h = model.embed(tokens, step)
        assert torch.equal(h, resident.embed(tokens, step))
        for index, layer in enumerate(model.layers):
            assert isinstance(layer, Layer)
            h = layer(h, step)
            assert torch.equal(h, resident.run(resident.embed(tokens, step), step, stop=index + 1))


def test_one_layer_is_in_memory_and_then_none(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    model = LayerwiseDecoder(tmp_path)

    def resident() -> set[str]:
        parameters = model._decoder.named_parameters()
        return {".".join(name.split(".")[:2]) for name, one in parameters if not one.is_meta}

    assert resident() == set()
    model.embed(torch.arange(3), Step.dense(1, 3))
    assert not any(name.startswith("layers.") for name in resident())
    for index, _ in enumerate(model.layers):
        assert resident() == {f"layers.{index}"}
    assert resident() == set()
