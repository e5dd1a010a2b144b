"""Weights that are no numbers: one clear line instead of an answer that looks like one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.errors import CorruptError, DecodingError


@pytest.fixture(params=[math.nan, math.inf], ids=["nan", "inf"])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint one of whose weights is no number."""
    folder = make_checkpoint(tmp_path / "damaged")
    [file] = folder.glob("*.safetensors")
    weights = load_file(file)
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = request.param
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "seed": 1}, {"num_beams": 2}, {"logprobs": True}])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_answer_is_made_of_scores_that_are_no_numbers(
    damaged: Path, dtype: str, settings: dict[str, object]
) -> None:
    engine = vivace.load(damaged, dtype=dtype)
    for prompt in ("abc", "a"):
        with pytest.raises(DecodingError, match="are not numbers; check the weights"):
            engine.generate(prompt, max_new_tokens=4, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["int8", "q4", "lut4"])
def test_such_weights_are_not_rounded(damaged: Path, format: str) -> None:
    with pytest.raises(CorruptError, match="infinite or no numbers; the checkpoint is damaged"):
        vivace.load(damaged, dtype="bfloat16", weights=format)
