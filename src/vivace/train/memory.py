"""An estimate of the memory that a training run needs, compared with the free memory before the run starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vivace.core.config import ModelConfig
from vivace.errors import CapacityError
from vivace.units import format_bytes

LOGITS_AT_ONCE = 2**24
"""Largest number of logits that a part of a loss holds of each kind, 64 MiB in float32."""
_KINDS = 6
"""Kinds of logits in a part of a distillation loss: the model's and the guesses', their logarithms, and gradients."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by purpose; ``activations`` is an upper estimate of what is kept for the backward pass."""

    weights: int
    gradients: int
    optimiser: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all purposes in bytes."""
        return self.weights + self.gradients + self.optimiser + self.activations

    def __str__(self) -> str:
        parts = ("weights", "gradients", "optimiser", "activations")
        shown = ", ".join(f"{name} {format_bytes(getattr(self, name))}" for name in parts)
        return f"about {format_bytes(self.total)}: {shown}"


def estimate_memory(
    config: ModelConfig,
    weights: Sequence[Tensor],
    trained: Sequence[Tensor],
    optimiser_bytes: int,
    tokens_per_batch: int,
    *,
    recompute: bool = False,
) -> MemoryEstimate:
    """Estimate the memory of a training run.

    Args:
        config: configuration of the model, with as many layers as gradients pass through.
        weights: all weights in memory.
        trained: weights that get gradients.
        optimiser_bytes: ``Optimiser.num_bytes()``.
        tokens_per_batch: B * T.
        recompute: whether each layer keeps only its input and computes the rest again in the backward pass.
    """
    width = max((p.element_size() for p in weights), default=4)
    of_layer = kept_per_token(config)  # with ``recompute`` one layer at a time keeps it, beside the inputs of all
    kept = config.num_layers * config.width + of_layer if recompute else config.num_layers * of_layer
    activations = tokens_per_batch * width * kept
    return MemoryEstimate(
        weights=sum(p.nbytes for p in weights),
        gradients=sum(p.nbytes for p in trained),
        optimiser=optimiser_bytes,
        activations=activations + _KINDS * 4 * min(tokens_per_batch * config.vocab_size, LOGITS_AT_ONCE),
    )


def require_memory(estimate: MemoryEstimate, device: torch.device) -> None:
    """Refuse a run that does not fit into the free memory of a device.

    On a GPU the weights are there by now, so that what is free is compared with the rest. On a CPU they are mostly
    pages of files, which count as free.

    Raises:
        CapacityError: the run needs more than is free; the message has both numbers.
    """
    free = free_bytes(device)
    if free is not None and device.type == "cuda":
        free += estimate.weights
    if free is not None and estimate.total > free:
        raise CapacityError(
            f"training needs {estimate}, but {format_bytes(free)} are free; "
            "lower tokens_per_batch, raise accumulate, or set recompute"
        )


def kept_per_token(config: ModelConfig) -> int:
    """Return how many numbers a layer keeps of a token: norms, projections, rotation, attention, gate, residuals."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return 8 * config.width + 3 * heads + 5 * config.ffn_width * (2 if config.gated else 1)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that a run could take on a device; None where the system does not say."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # PyTorch's own, and unused
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _page_cache_bytes()
    except (ValueError, OSError):
        return None


def _page_cache_bytes() -> int:
    """Return the bytes of cached file pages, which Linux frees on demand; they count as free memory."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file if "kB" in line}
    except OSError:
        return 0
    return sizes.get("Cached", 0)
