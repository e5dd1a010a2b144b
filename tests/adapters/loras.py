"""LoRAs with random factors, as large as it takes to change what a tiny model writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from vivace.adapters.lora import table_of
from vivace.checkpoint.adapters import base_hash
from vivace.checkpoint.load import load_decoder
from vivace.checkpoint.peft import save_lora
from vivace.core.low_rank import ATTENTION, PROJECTIONS, site_shapes


def make_lora(
    folder: Path,
    base: Path,
    *,
    seed: int = 1,
    rank: int = 4,
    size: float = 0.3,
    ranks: Mapping[str, int] | None = None,
    says_base: bool = True,
) -> Path:
    """Write a LoRA on every projection of a checkpoint, or on those of ``ranks``, with the base's hash or without."""
    model = load_decoder(base)
    sites = ATTENTION if model.config.moe is not None else PROJECTIONS
    shapes = site_shapes(model.config, range(model.config.num_layers), ranks or dict.fromkeys(sites, rank))
    generator = torch.Generator().manual_seed(seed)
    factors = {
        site: (
            torch.randn(rank, wide, generator=generator) / wide**0.5,
            torch.randn(out, rank, generator=generator) * size,
        )
        for site, (wide, rank, out) in shapes.items()
    }
    save_lora(folder, factors, table_of(base, model), base=base_hash(base) if says_base else None)
    return folder
