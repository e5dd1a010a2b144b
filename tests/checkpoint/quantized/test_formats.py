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
from vivace.errors import CorruptError, UnsupportedError

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


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes (n, out) along the first dimension in 32-bit words, lowest bits first."""
    per = 32 // bits
    words = sum(codes[place::per].long() << bits * place for place in range(per))
    assert isinstance(words, Tensor)
    return (words - ((words >> 31) << 32)).to(torch.int32)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("width", "group"), [(576, 128), (160, 64)])
def test_the_last_group_of_gptq_may_be_short(width: int, group: int, ordered: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    codes, count = torch.randint(0, 16, (width, 8)), -(-width // group)
    scales, zeros = torch.rand(count, 8) + 0.5, torch.randint(1, 16, (count, 8))
    index = torch.arange(width) // group
    index = index[torch.randperm(width)] if ordered else index
    tensors = {
        "qweight": packed(codes, 4),
        "qzeros": packed((zeros - 1).t().contiguous(), 4).t(),
        "scales": scales,
        "g_idx": index.to(torch.int32),
    }
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": ordered}
    found = opened(tmp_path, config, tensors).tensor(f"{STEM}.weight")
    torch.testing.assert_close(found, (scales[index] * (codes - zeros[index])).t())


def test_the_format_of_gptq_may_be_called_either_name(tmp_path: Path) -> None:
    name = next(name for name in CASES if name.startswith("gptq") and CASES[name].get("checkpoint_format") == "gptq_v2")
    config, tensors, decoded = case(name)
    newer = {key: value for key, value in config.items() if key != "checkpoint_format"} | {"format": "gptq_v2"}
    torch.testing.assert_close(opened(tmp_path, newer, tensors).tensor(f"{STEM}.weight"), decoded)
    for wrong, message in (({"format": "marlin"}, "marlin"), ({**config, "format": "gptq"}, "two formats")):
        with pytest.raises(UnsupportedError, match=message):
            opened(tmp_path, {**newer, **wrong}, tensors)


def test_groups_of_compressed_tensors_are_those_of_the_configuration(tmp_path: Path) -> None:
    torch.manual_seed(0)
    codes, scales = torch.randint(-8, 8, (16, 192)), torch.rand(16, 2) + 0.5
    tensors = {
        "weight_packed": packed((codes + 8).t().contiguous(), 4).t(),
        "weight_scale": scales,
        "weight_shape": torch.tensor([16, 192]),
    }
    config: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    config["config_groups"] = {"group_0": {"weights": {"num_bits": 4, "group_size": 128, "strategy": "group"}}}
    found = opened(tmp_path, config, tensors).tensor(f"{STEM}.weight")
    torch.testing.assert_close(found, scales[:, torch.arange(192) // 128] * codes)
    config["config_groups"]["group_0"]["weights"]["group_size"] = 32
    with pytest.raises(CorruptError, match=r"2 scales an output are no groups of \[32\] of 192 inputs"):
        opened(tmp_path, config, tensors).tensor(f"{STEM}.weight")
