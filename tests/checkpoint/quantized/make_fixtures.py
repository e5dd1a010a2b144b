"""How ``fixtures.safetensors`` was made: small matrices, quantized and decoded by the programs whose formats are read.

    pip install torch==2.13.0 transformers==5.23.0 bitsandbytes==0.50.2 compressed-tensors==0.20.0 mlx[cpu]==0.32.4
    pip install --no-deps gptqmodel==7.7.0        # its packing classes run without its compiled kernels
    python tests/checkpoint/quantized/make_fixtures.py

GPTQModel packs GPTQ and AWQ, compressed-tensors (the library in which llm-compressor stores) its own formats,
bitsandbytes nf4, fp4 and int8, transformers fp8 in blocks (its ``Fp8Quantize``), and MLX its own. Each case is the
stored tensors of one module, the settings that stand in ``config.json``, and the weights as that program decodes them.
Scales are widened to float32 before the program decodes, so that it does not round the product to 16 bits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

OUT, IN = 32, 128
STEM = "model.layers.0.mlp.up_proj"


def matrix(seed: int) -> Tensor:
    """Return normally distributed weights with a few large ones, exact in float16."""
    torch.manual_seed(seed)
    values = torch.randn(OUT, IN) * 0.05
    values[::7, ::11] *= 6
    return values.half().float()


def linear(values: Tensor) -> nn.Linear:
    """Return a linear layer without bias."""
    layer = nn.Linear(values.shape[1], values.shape[0], bias=False)
    layer.weight.data = values.clone()
    return layer


def affine(values: Tensor, bits: int, group: int, index: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Return float16 scales and zeros (out, groups) for the groups of ``index``."""
    top = (1 << bits) - 1
    scales, zeros = [], []
    for g in range(int(index.max()) + 1):
        part = values[:, index == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scale = ((high - low) / top).half().float()
        scales.append(scale)
        zeros.append(torch.full_like(scale, (top + 1) // 2) if symmetric else (-low / scale).round().clamp(1, top))
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def gptq(made: dict[str, Any]) -> None:
    """Add GPTQ by GPTQModel: four widths, both conventions, with and without an order of inputs."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT
    from gptqmodel.utils.model_dequant import _revert_gptq_v1_qzeros_correction

    for bits in (2, 3, 4, 8):
        for convention in ("gptq", "gptq_v2"):
            for is_ordered in (False, True):
                values, group = matrix(bits), 32
                index = torch.arange(IN) // group
                if is_ordered:
                    index = index[torch.randperm(IN)]
                scales, zeros = affine(values, bits, group, index, symmetric=False)
                settings = {"bits": bits, "group_size": group, "desc_act": is_ordered, "sym": False}
                layer = TorchLinear(
                    **settings, in_features=IN, out_features=OUT, bias=False, pack_dtype=torch.int32,
                    format=FORMAT.GPTQ_V2, register_buffers=True,
                )  # fmt: skip
                layer.pack_original(linear(values), scales, zeros, index.int())
                names = ("qweight", "qzeros", "scales", "g_idx")
                stored = {name: getattr(layer, name).clone() for name in names}
                if convention == "gptq":
                    stored["qzeros"] = _revert_gptq_v1_qzeros_correction(stored["qzeros"], bits)
                layer.scales = layer.scales.float()
                layer.qzero_format(format=2)
                decoded = layer.dequantize_weight().t().float()
                config = {"quant_method": "gptq", "checkpoint_format": convention, **settings}
                made[f"gptq-{bits}-{convention}{'-ordered' if is_ordered else ''}"] = (config, stored, decoded)


def awq(made: dict[str, Any]) -> None:
    """Add AWQ by GPTQModel."""
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    for group in (32, 64):
        values = matrix(group)
        scales, zeros = affine(values, 4, group, torch.arange(IN) // group, symmetric=False)
        settings = {"bits": 4, "group_size": group}
        layer = AwqTorchLinear(
            **settings, sym=False, desc_act=False, in_features=IN, out_features=OUT, bias=False, register_buffers=True
        )
        layer.pack(linear(values), scales, zeros)
        stored = {name: getattr(layer, name).clone() for name in ("qweight", "qzeros", "scales")}
        decoded = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, group).t().float()
        config = {"quant_method": "awq", "version": "gemm", "zero_point": True, **settings}
        made[f"awq-{group}"] = (config, stored, decoded)


def compressed(made: dict[str, Any]) -> None:
    """Add the formats of compressed-tensors by its own compressors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "packed-4-group": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        "packed-4-zeros": (
            "pack-quantized",
            {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False},
        ),
        "packed-4-channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
        "packed-8-group": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 64}),
        "packed-8-channel": ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
        "int8-channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        "int8-zeros": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
        "int8-tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
        "float8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        "float8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        "float8-block": (
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
        ),
    }
    for name, (kind, settings) in cases.items():
        values, args = matrix(len(name)), QuantizationArgs(**settings)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=kind)
        match settings["strategy"]:
            case "tensor":
                low, high = values.amin().view(1), values.amax().view(1)
            case "channel":
                low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
            case "block":
                blocks = values.view(OUT // 16, 16, IN // 32, 32)
                low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
            case _:
                groups = values.view(OUT, -1, settings["group_size"])
                low, high = groups.amin(2), groups.amax(2)
        scales, zeros = calculate_qparams(low, high, args)
        compressor: Any = BaseCompressor.get_value_from_registry(kind)
        state = {"weight": values, "weight_scale": scales, "weight_zero_point": zeros}
        stored = compressor.compress(state, scheme)
        decoded = compressor.decompress(dict(stored), scheme)["weight"].float()
        config = {
            "quant_method": "compressed-tensors",
            "format": kind,
            "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
        }
        made[f"compressed-{name}"] = (config, {k: v for k, v in stored.items() if v is not None}, decoded)


def bitsandbytes(made: dict[str, Any]) -> None:
    """Add nf4 and fp4, also nested, and int8 by bitsandbytes on the CPU."""
    import bitsandbytes.functional as bnb

    for kind in ("nf4", "fp4"):
        for is_nested in (False, True):
            values = matrix(4 + is_nested)
            codes, state = bnb.quantize_4bit(values, quant_type=kind, compress_statistics=is_nested, blocksize=64)
            stored = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
            decoded = bnb.dequantize_4bit(codes, state).float()
            config = {
                **{"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind},
                "bnb_4bit_use_double_quant": is_nested,
            }
            name = f"bitsandbytes-{kind}{'-nested' if is_nested else ''}"
            made[name] = (config, {"weight": codes, **stored}, decoded)
    values = matrix(8)
    codes, largest, _ = bnb.int8_vectorwise_quant(values.half())
    decoded = bnb.int8_vectorwise_dequant(codes, largest).float()
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
    stored = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    made["bitsandbytes-int8"] = (config, stored, decoded)


def fp8(made: dict[str, Any]) -> None:
    """Add fp8 in blocks by transformers."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    settings = FineGrainedFP8Config(weight_block_size=(16, 32))
    quantizer = FineGrainedFP8HfQuantizer(settings)
    values = matrix(9)
    found = Fp8Quantize(quantizer).convert({f"{STEM}.weight": values})
    stored = {name.removeprefix(f"{STEM}."): tensor for name, tensor in found.items()}
    # its way back works on whole blocks, which is what scales are for
    decoded = Fp8Dequantize(quantizer).convert({f"{STEM}.{k}": [v] for k, v in stored.items()})
    ((only,),) = decoded.values()
    config = {"quant_method": "fp8", "weight_block_size": [16, 32], "activation_scheme": "dynamic"}
    made["fp8-blocks"] = (config, stored, only.float())


def mlx(made: dict[str, Any]) -> None:
    """Add affine quantization by MLX."""
    import mlx.core as mx
    import numpy as np

    for bits in (2, 3, 4, 5, 6, 8):
        for group in (32, 64):
            parts = mx.quantize(mx.array(matrix(bits).numpy()), group_size=group, bits=bits)
            decoded = torch.from_numpy(np.array(mx.dequantize(*parts, group_size=group, bits=bits)))
            names = ("weight", "scales", "biases")
            stored = {name: torch.from_numpy(np.array(part)) for name, part in zip(names, parts, strict=True)}
            config = {"group_size": group, "bits": bits, "mode": "affine"}
            made[f"mlx-{bits}-{group}"] = (config, stored, decoded)


if __name__ == "__main__":
    cases: dict[str, Any] = {}
    for make in (gptq, awq, compressed, bitsandbytes, fp8, mlx):
        make(cases)
    tensors, settings = {}, {}
    for name, (config, stored, decoded) in cases.items():
        settings[name] = json.dumps(config)
        tensors |= {f"{name}/{part}": tensor.contiguous() for part, tensor in stored.items()}
        tensors[f"{name}/decoded"] = decoded.float().contiguous()
    save_file(tensors, Path(__file__).with_name("fixtures.safetensors"), metadata=settings)
