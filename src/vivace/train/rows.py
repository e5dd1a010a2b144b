"""Training on rows that lie in memory: for small modules over numbers that a frozen model computed once.

The loop of ``loop.py`` reads batches of text, reports, keeps the best parameters on held-back batches and survives
being killed. A classifier over stored rows trains in seconds, and its caller judges it by a measure of its own; it
needs none of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RowsConfig:
    """How often and how fast to learn from rows."""

    epochs: int
    """How often every row is learnt from."""
    batch_rows: int
    """Rows from which one update is made."""
    rate: float
    """Learning rate of AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101), without weight decay."""
    falls: bool = False
    """Whether the rate falls to zero in a straight line."""
    seed: int = 0
    """Seed of the order of the rows."""


def fit_rows(parameters: Sequence[Tensor], loss: Callable[[Tensor], Tensor], num_rows: int, config: RowsConfig) -> None:
    """Minimise a loss over rows in place, in batches drawn without replacement.

    Args:
        parameters: leaves that require gradients.
        loss: takes the numbers (n,) int64 of the rows of a batch, and returns their mean loss, ().
        num_rows: how many rows there are.
        config: how often and how fast.
    """
    optimiser = torch.optim.AdamW(parameters, lr=config.rate, weight_decay=0.0)
    num_updates = config.epochs * -(-num_rows // config.batch_rows)
    end = 0.0 if config.falls else 1.0
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, end, num_updates)
    order = torch.Generator().manual_seed(config.seed)
    for _ in range(config.epochs):
        for rows in torch.randperm(num_rows, generator=order).split(config.batch_rows):
            optimiser.zero_grad()
            loss(rows).backward()
            optimiser.step()
            schedule.step()
