"""What a command says about weights that a file holds as codes."""

from __future__ import annotations

from pathlib import Path
from types import UnionType

import torch
from torch import nn

from vivace.checkpoint.files import is_linked, named_file, open_tensors, read_json
from vivace.checkpoint.quantized.settings import PALETTE, is_quantized, settings_of
from vivace.kernels.grid_codes import GridCodes
from vivace.kernels.palette import IntPalette


def holds_codes(folder: Path) -> bool:
    """Return whether the weights of a checkpoint are in a GGUF file, or quantized by another program."""
    return is_linked(folder) or is_quantized(read_json(folder / "config.json"))


def multiplies_codes(model: nn.Module) -> bool:
    """Return whether kernels multiply the codes of a file as they are, grids or palettes, with inputs in eight bits."""
    return _has(model, GridCodes | IntPalette)


def _has(model: nn.Module, kinds: UnionType | type) -> bool:
    return any(isinstance(getattr(module, "weight", None), kinds) for module in model.modules())


def note_on(folder: Path, weights: str, dtype: torch.dtype, model: nn.Module) -> list[str]:
    """Return what became of a checkpoint's codes in memory, one line; nothing where it holds none.

    Args:
        folder: folder of a checkpoint.
        weights: format of the matrices in memory.
        dtype: dtype of the model.
        model: the model in memory.
    """
    if not holds_codes(folder):
        return []
    stored = open_tensors(folder)
    kinds = sorted({kind for kind in map(stored.kind, stored.names) if getattr(torch, kind, None) is None})
    if not kinds:
        return []
    if weights == "bf16" and (settings_of(read_json(folder / "config.json")) or ("",))[0] == PALETTE:
        return []  # native kernels multiply these codes as they are
    of_file = f" of {Path(named_file(folder)).name}" if is_linked(folder) else ""
    found = f"the {', '.join(kinds)} weights{of_file}"
    if _has(model, GridCodes):
        return [f"{found} keep the codes and scales of the file, and are multiplied with inputs in eight bits"]
    again = "" if weights == "bf16" else f" and rounded once more, to {weights}"
    return [f"{found} are decoded to {str(dtype).removeprefix('torch.')}{again}"]
