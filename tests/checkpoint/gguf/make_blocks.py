"""How ``blocks.safetensors`` was made: random blocks of every number format, decoded by the ``gguf`` package 0.19.0.

    pip install gguf==0.19.0 && python tests/checkpoint/gguf/make_blocks.py

Every block is random bytes, so that all bits of all codes and scales count; only the exponents of its float16 numbers
are kept from being all ones, which would be infinite.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import save_file

HALVES = {
    **{"q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_k": (80, 82), "q3_k": (108,)},
    **{"q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,)},
}
"""Bytes of a block at which a float16 begins."""

if __name__ == "__main__":
    random, made = np.random.default_rng(0), {}
    for name, places in HALVES.items():
        kind = GGMLQuantizationType[name.upper()]
        block, num_bytes = GGML_QUANT_SIZES[kind]
        raw = random.integers(0, 256, (512 // block, num_bytes), dtype=np.uint8)
        for place in places:
            raw[:, place + 1] &= 0xBF
        made[f"{name}.raw"] = torch.from_numpy(raw)
        made[f"{name}.values"] = torch.from_numpy(dequantize(raw, kind).reshape(len(raw), block).copy())
    save_file(made, Path(__file__).with_name("blocks.safetensors"))
