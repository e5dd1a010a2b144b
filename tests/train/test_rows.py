"""Training on rows in memory: every row in each epoch, the same order for a seed, and a rate that falls if it is to."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
import torch
from torch import Tensor

from vivace.train.rows import RowsConfig, fit_rows


def fitted(num_rows: int = 10, **fields: object) -> tuple[list[list[int]], list[float]]:
    """The batches that were learnt from, and how far each moved a parameter whose gradient is always 1."""
    seen, places = [], []
    weight = torch.zeros(1, requires_grad=True)

    def loss(rows: Tensor) -> Tensor:
        seen.append(rows.tolist())
        places.append(float(weight.detach()))
        return weight.sum()

    fit_rows([weight], loss, num_rows, RowsConfig(**{"epochs": 3, "batch_rows": 4, "rate": 0.1, **fields}))  # type: ignore[arg-type]
    places.append(float(weight.detach()))
    return seen, [before - after for before, after in pairwise(places)]


def test_every_row_once_an_epoch() -> None:
    seen, _ = fitted()
    assert [len(rows) for rows in seen] == [4, 4, 2] * 3
    epochs = [list(chain(*seen[first : first + 3])) for first in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1], "in another order"
    assert fitted()[0] == seen
    assert fitted(seed=1)[0] != seen


def test_the_rate_stays_or_falls_to_zero() -> None:
    """AdamW moves a parameter whose gradient is constant by its rate."""
    assert fitted()[1] == pytest.approx([0.1] * 9, rel=1e-4)
    assert fitted(falls=True)[1] == pytest.approx([0.1 * (9 - step) / 9 for step in range(9)], rel=1e-4)
