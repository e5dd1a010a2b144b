"""Matrices as other programs stored them decode to what those programs decode; ``make_fixtures.py`` made them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vivace.checkpoint.files import TensorFiles
from vivace.checkpoint.quantized.settings import READ, settings_of
from vivace.checkpoint.quantized.stored import FORMATS, QuantizedTensors

FIXTURES = Path(__file__).with_name("fixtures.safetensors")
STEM = "model.layers.0.mlp.up_proj"
with safetensors.safe_open(FIXTURES, "pt") as _file:
    CASES: Mapping[str, dict[str, Any]] = {name: json.loads(text) for name, text in sorted(_file.metadata().items())}


def case(name: str) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    """Settings, stored tensors and decoded weights of a case."""
    tensors = {k.removeprefix(f"{name}/"): v for k, v in load_file(FIXTURES).items() if k.startswith(f"{name}/")}
    decoded = tensors.pop("decoded")
    return CASES[name], tensors, decoded


def opened(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> QuantizedTensors:
    """The tensors of a module, stored as a file."""
    path = folder / "model.safetensors"
    save_file({f"{STEM}.{name}": tensor.contiguous() for name, tensor in tensors.items()}, path)
    found = settings_of({"quantization_config": dict(config)})
    assert found is not None
    return QuantizedTensors(TensorFiles({f"{STEM}.{name}": path for name in tensors}), *found)


def test_every_method_has_a_case() -> None:
    methods = {found[0] for config in CASES.values() if (found := settings_of({"quantization_config": config}))}
    assert methods == set(READ) - {"fbgemm_fp8"}  # which is written on GPUs only
    assert set(FORMATS) == set(READ)
    assert len(CASES) == 47


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_program_that_wrote_them(name: str, tmp_path: Path) -> None:
    config, tensors, decoded = case(name)
    stored = opened(tmp_path, config, tensors)
    assert list(stored.names) == [f"{STEM}.weight"]
    assert stored.shape(f"{STEM}.weight") == tuple(decoded.shape)
    found = stored.tensor(f"{STEM}.weight")
    ulp = torch.finfo(torch.float32).eps * torch.maximum(found.abs(), decoded.abs())
    # an offset is added to a product: its rounding is one of the larger of the two
    if name.startswith("mlx"):
        ulp = ulp + torch.finfo(torch.float32).eps * tensors["biases"].abs().amax()
    assert bool(((found - decoded).abs() <= ulp).all()), float((found - decoded).abs().max())
    assert torch.equal(stored.tensor(f"{STEM}.weight", torch.bfloat16), found.bfloat16())
    assert stored.num_bytes(f"{STEM}.weight") == sum(tensor.nbytes for tensor in tensors.values())
