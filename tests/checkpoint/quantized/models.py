"""Tiny models as other programs store them, each beside the same model with its weights decoded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from tests.parity.families import randomise

GROUP = 32
Module = tuple[dict[str, Tensor], Tensor]
"""Stored tensors by their name without the stem, and the decoded weights."""


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes (rows, n) as one string of bits a row, lowest first, in int32."""
    each = codes.to(torch.uint8).numpy()[:, :, None] >> np.arange(bits, dtype=np.uint8) & 1
    raw = np.packbits(each.reshape(len(codes), -1), axis=1, bitorder="little")
    return torch.from_numpy(raw.view(np.int32).copy())


def _rounded(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (out, in), scales and zeros (out, groups)."""
    groups = weight.view(len(weight), -1, GROUP)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / ((1 << bits) - 1)).half().float()
    zeros = (-low / scales).round().clamp(1, (1 << bits) - 1)
    codes = (groups / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, (1 << bits) - 1)
    return codes.view_as(weight).to(torch.uint8), scales, zeros


def _decoded(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    groups = codes.float().view(*scales.shape, GROUP)
    return ((groups - zeros[:, :, None]) * scales[:, :, None]).view(len(codes), -1)


def gptq(weight: Tensor, index: Tensor | None = None) -> Module:
    """Four bits, zeros one too low; with an index of groups the inputs are in another order."""
    order = torch.arange(weight.shape[1]) if index is None else torch.argsort(index, stable=True)
    codes, scales, zeros = _rounded(weight[:, order], 4)
    values, plain = torch.empty_like(weight), torch.empty_like(codes)
    values[:, order], plain[:, order] = _decoded(codes, scales, zeros), codes
    stored = {
        "qweight": packed(plain, 4).t(),
        "qzeros": packed((zeros - 1).t(), 4),
        "scales": scales.t().half(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP if index is None else index).int(),
    }
    return stored, values


def ordered(weight: Tensor) -> Module:
    """The same, with one order for all matrices of as many inputs."""
    count = weight.shape[1]
    index = (torch.arange(count) // GROUP)[torch.randperm(count, generator=torch.Generator().manual_seed(1))]
    return gptq(weight, index)


def awq(weight: Tensor) -> Module:
    """Four bits, outputs in pairs."""
    codes, scales, zeros = _rounded(weight, 4)
    places = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def turned(values: Tensor) -> Tensor:
        return packed(values.t().reshape(values.shape[1], -1, 8)[:, :, places].flatten(1), 4)

    stored = {"qweight": turned(codes), "qzeros": turned(zeros), "scales": scales.t().half()}
    return stored, _decoded(codes, scales, zeros)


def mlx(weight: Tensor) -> Module:
    """Four bits with biases."""
    codes, scales, zeros = _rounded(weight, 4)
    biases = (-scales * zeros).half().float()
    values = (codes.float().view(*scales.shape, GROUP) * scales[:, :, None] + biases[:, :, None]).view_as(weight)
    stored = {"weight": packed(codes, 4).view(torch.uint32), "scales": scales.half(), "biases": biases.half()}
    return stored, values


def int8(weight: Tensor) -> Module:
    """Eight bits of bitsandbytes."""
    largest = weight.abs().amax(1)
    codes = (weight * 127 / largest[:, None]).round().to(torch.int8)
    return {"weight": codes, "SCB": largest}, codes.float() * (largest / 127.0)[:, None]


def fp8(weight: Tensor) -> Module:
    """Blocks of 32 x 32."""
    wide = weight.new_full((len(weight) // 32, weight.shape[1] // 32), 0.003)
    wide[0, 0] = 0.004
    each = wide.repeat_interleave(32, 0).repeat_interleave(32, 1)
    codes = (weight / each).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": wide}, codes.float() * each


STORED: Mapping[str, tuple[dict[str, Any], Callable[[Tensor], Module]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}, gptq),
    "gptq-ordered": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}, ordered),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "mlx": ({"group_size": GROUP, "bits": 4, "mode": "affine"}, mlx),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, fp8),
}
"""Settings and writer of each kind of model."""


def write(kind: str, folder: Path, **settings: Any) -> tuple[Path, Path]:
    """Write a model and its decoded twin; return their folders."""
    config, quantize = STORED[kind]
    sizes = {
        **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False},
    }
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**sizes | settings))
    randomise(model, 5)
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, values in model.state_dict().items():
        stem = name.removesuffix(".weight")
        is_end = stem.endswith("embed_tokens") or stem == "lm_head"
        if stem == "lm_head" and model.config.tie_word_embeddings:
            continue
        values = values.half()
        if values.dim() != 2 or (is_end and kind != "mlx"):
            stored[name] = plain[name] = values.clone()
            continue
        parts, decoded = quantize(values.float())
        stored |= {f"{stem}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        plain[name] = decoded
    key = "quantization" if kind == "mlx" else "quantization_config"
    for path, tensors, more in (
        (folder / "stored", stored, {key: config, "dtype": "float16"}),
        (folder / "plain", plain, {"dtype": "float32"}),
    ):
        path.mkdir(parents=True)
        written = {**json.loads(model.config.to_json_string()), **more}
        (path / "config.json").write_text(json.dumps(written), encoding="utf-8")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return folder / "stored", folder / "plain"
