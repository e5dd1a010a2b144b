"""The ``quantization_config`` of a ``config.json``: whose format it names, and what a configuration is without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vivace.errors import UnsupportedError, nearest

KEYS = ("quantization_config", "compression_config", "quantization")
"""Keys of ``config.json`` that describe how its weights are stored."""

PALETTE = "palette"
"""The ``quant_method`` of folders that ``vivace compress`` writes."""

READ: Mapping[str, str] = {
    "gptq": "2, 3, 4 and 8 bits, both conventions for zeros, inputs in order or ordered by activation",
    "awq": "4 bits, layout `gemm`",
    "compressed-tensors": "`pack-quantized` (4 and 8 bits), `int-quantized`, `float-quantized` (fp8)",
    "bitsandbytes": "nf4, fp4 (also nested) and int8",
    "fp8": "blocks, outputs or whole matrices with a scale",
    "fbgemm_fp8": "outputs with a scale",
    "mlx": "affine, 2, 3, 4, 5, 6 and 8 bits",
}
"""What is read of each ``quant_method``; ``mlx`` is the name here of what MLX writes, which names none."""


def settings_of(raw: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Return the method by which a checkpoint was quantized and its settings; None if it was not.

    Raises:
        UnsupportedError: its method is not read.
    """
    found = next(
        (raw[key] for key in ("quantization_config", "compression_config", "quantization") if raw.get(key)), None
    )
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise UnsupportedError(f"config.json has a quantization_config that is no object: {found!r}")
    method = found.get("quant_method")
    if method is None and ("mode" in found or {"group_size", "bits"} <= set(found)):
        method = "mlx"
    if method is None and "config_groups" in found:
        method = "compressed-tensors"
    if method not in (*READ, PALETTE):
        raise UnsupportedError(
            f"config.json has a quantization_config of quant_method {method!r}, which is not read"
            f"{nearest(str(method), READ)}; the same model without it, or as a GGUF file, may be"
        )
    return str(method), found


def is_quantized(raw: Mapping[str, Any]) -> bool:
    """Return whether the matrices of a checkpoint are stored as codes; raises as ``settings_of``."""
    return settings_of(raw) is not None


def dense_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` for the same model with its weights decoded."""
    return {key: value for key, value in raw.items() if key not in KEYS}


def dtype_of(raw: Mapping[str, Any]) -> Any:
    """Return the dtype that a ``config.json`` names, or None.

    Quantized checkpoints that name float16 are computed in bfloat16: float16 is then the dtype of other programs'
    products, and that of few weights.
    """
    written = raw.get("dtype") or raw.get("torch_dtype")
    if is_quantized(raw) and str(written).removeprefix("torch.") == "float16":
        return "bfloat16"
    return written
