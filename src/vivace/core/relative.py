"""Relative position bias (Raffel et al. 2020, arXiv:1910.10683, section 2.1): a number for each head and distance.

Distances up to a half of the buckets have one each; larger ones share buckets that grow like a logarithm, up to a
largest distance. An encoder tells the two directions apart, and gives each half of the buckets.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.core.config import RelativeBias
from vivace.core.step import Step


class RelativeTable(nn.Module):
    """The numbers that one stack adds to scores, in all of its layers."""

    def __init__(self, config: RelativeBias, num_heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.config = config
        self.is_causal = is_causal
        self.weight = nn.Parameter(torch.empty(config.num_buckets, num_heads))

    def of(self, step: Step) -> Tensor:
        """Return what is added to the scores of a call: (H, T/B, T/B) of a dense one, (T, H, S) of rows.

        S counts ordinals, which are positions, since a row reads its text in the order in which it was written.
        """
        key = id(self)
        if key not in step.biases:
            if step.grid is not None:
                step.biases[key] = self.within(step.grid[1])
            else:
                distance = step.position[:, None] - torch.arange(step.num_visible, device=step.device)
                numbers = F.embedding(self.bucket(distance), self.weight)
                step.biases[key] = numbers.movedim(-1, 1).contiguous()
        return step.biases[key]

    def within(self, length: int) -> Tensor:
        """Return what is added to the scores of a whole text, (H, length, length)."""
        place = torch.arange(length, device=self.weight.device)
        return F.embedding(self.bucket(place[:, None] - place), self.weight).movedim(-1, 0).contiguous()

    @cached_property
    def by_distance(self) -> Tensor:
        """The numbers of a causal stack by distance, (H, R) float32, once they are read; the last is of all beyond."""
        assert self.is_causal
        numbers = self.weight.detach()[self.bucket(torch.arange(self.config.max_distance + 1))]
        return numbers.float().t().contiguous()

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of distances from a row back to what it reads."""
        count, start = self.config.num_buckets, torch.zeros_like(distance)
        if self.is_causal:
            distance = distance.clamp(min=0)
        else:
            count //= 2
            start = torch.where(distance < 0, count, 0)
            distance = distance.abs()
        exact = count // 2
        ratio = math.log(self.config.max_distance / exact)
        far = exact + (torch.log(distance.clamp(min=1).float() / exact) / ratio * (count - exact)).long()
        return start + torch.where(distance < exact, distance, far.clamp(max=count - 1))
