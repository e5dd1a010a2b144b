"""Ranks that share what hooks keep are measured, each in a process of its own."""

from __future__ import annotations

import torch

from benchmarks import clustering_memory
from vivace.evaluate.clustering import kept_bytes, pass_cost, random_matrix


def test_two_ranks_keep_less_than_one() -> None:
    found = clustering_memory.on_ranks((512, 512), None, 2)
    alone = kept_bytes(random_matrix((512, 512)), 3, None, 3, "hooks")
    assert (found.mode, found.rows) == ("hooks, 2 ranks", None)
    # What is shared is the list of which weight has which row, of one or two bytes for each weight.
    assert 512 * 512 <= alone - found.kept_bytes <= 512 * 512 * 2
    assert found.peak_bytes > 0


def test_a_pass_is_counted_without_the_matrix() -> None:
    weight = torch.ones(16, 16, requires_grad=True)
    cost = pass_cost("square", None, weight, lambda: (weight * 2).exp())
    assert cost.kept_bytes == weight.nbytes
