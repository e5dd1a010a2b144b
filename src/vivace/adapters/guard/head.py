"""A head that judges prompts and answers by residuals which the model computes anyway.

    score_c = sigmoid(w_c . (x - m) / s + b_c),    x = [mean over rows of norm(h), norm(h) of the last row]

h are residuals after the last layer: those of all prompt tokens, or of the new tokens so far. Reading them costs one
product per token beside a forward pass of the whole model. The paper's guardrails (*Apple Intelligence Foundation
Language Models*, 2024, arXiv:2407.21075, section on responsible AI) are models of their own; this is the part of them
that costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vivace.checkpoint.adapters import base_hash, load_adapter, save_adapter
from vivace.configuration import build
from vivace.decode.guarding import ALLOWED, Action, GuardVerdict
from vivace.errors import ConfigError, CorruptError, MismatchError

KIND = "guard"
"""What the folder of a head says it is for."""


@dataclass(frozen=True)
class HeadConfig:
    """The categories that a head finds, and in which texts."""

    categories: tuple[str, ...]
    """Names, in the order of the rows of its weights."""
    where: tuple[str, ...]
    """Whether each judges "input" or "output"."""

    def __post_init__(self) -> None:
        if not self.categories or len(self.categories) != len(self.where):
            raise ConfigError("a guard has one or more categories, each for input or output")
        if wrong := [each for each in self.where if each not in ("input", "output")]:
            raise ConfigError(f"a guard judges input or output, found {wrong[0]!r}")


@dataclass(frozen=True)
class HeadPlan:
    """From which score on a head acts."""

    thresholds: tuple[float, ...]
    """Of each category."""
    action: Action = "block"

    def __post_init__(self) -> None:
        if wrong := [each for each in self.thresholds if not 0 < each <= 1]:
            raise ConfigError(f"a threshold is above 0 and at most 1, found {wrong[0]:g}")


@dataclass(frozen=True)
class GuardHead:
    """The weights of a guard."""

    config: HeadConfig
    plan: HeadPlan
    weight: Tensor
    """(categories, 2 E)."""
    bias: Tensor
    """(categories,)."""

    def scores(self, features: Tensor) -> Tensor:
        """Return the score of every category, (n, 2 E) -> (n, categories), 0 to 1."""
        return torch.sigmoid(features.float() @ self.weight.T + self.bias)

    def verdict(self, scores: Tensor, where: str) -> GuardVerdict:
        """Return what follows from the scores (categories,) of a prompt ("input") or an answer ("output")."""
        found = ALLOWED
        for place, score in enumerate(scores.tolist()):
            is_over = self.config.where[place] == where and score >= self.plan.thresholds[place]
            if is_over and score > found.score:
                found = GuardVerdict(self.config.categories[place], score, self.plan.action)
        return found

    def judges(self, where: str) -> bool:
        """Return whether one of its categories is about prompts ("input") or answers ("output")."""
        return where in self.config.where

    def save(self, folder: Path, base: Path) -> None:
        """Write the head of the model whose checkpoint is in ``base``."""
        tensors = {"weight": self.weight.contiguous(), "bias": self.bias.contiguous()}
        plan = {"thresholds": self.plan.thresholds, "action": self.plan.action}
        config = {"categories": self.config.categories, "where": self.config.where}
        save_adapter(folder, KIND, base_hash(base), plan, config, tensors)


class Features:
    """What a head reads of a text that grows: the mean of its residuals and the last of them."""

    def __init__(self, width: int) -> None:
        """Begin with no row of ``width`` numbers."""
        self._sum = torch.zeros(width, dtype=torch.float64)
        self._count = 0
        self._last = torch.zeros(width)

    @property
    def count(self) -> int:
        """Return the number of rows."""
        return self._count

    def copy(self) -> Features:
        """Return features that begin as these and grow apart from them."""
        other = Features(len(self._sum))
        other._sum, other._count, other._last = self._sum, self._count, self._last
        return other

    def add(self, rows: Tensor) -> None:
        """Take further rows (n, E), normed and in float32."""
        if len(rows):
            self._sum, self._count, self._last = self._sum + rows.double().sum(0), self._count + len(rows), rows[-1]

    def each(self, rows: Tensor) -> Tensor:
        """Take further rows (n, E) one by one; return what is read after each of them, (n, 2 E)."""
        counts = torch.arange(self._count + 1, self._count + len(rows) + 1)
        sums = self._sum + rows.double().cumsum(0)
        self.add(rows)
        return torch.cat(((sums / counts[:, None]).float(), rows), 1)

    def read(self) -> Tensor:
        """Return what is read now, (2 E,)."""
        return torch.cat(((self._sum / max(1, self._count)).float(), self._last))


def load_head(folder: Path, base: Path, width: int) -> GuardHead:
    """Read a head for a model.

    Args:
        folder: as ``Head.save`` wrote it.
        base: checkpoint of the model.
        width: of the model, E.

    Raises:
        CheckpointError: it is missing, broken or of another model.
    """
    stored, tensors = load_adapter(folder, base_hash(base))
    if stored["kind"] != KIND:
        raise MismatchError(f"{folder} holds weights for {stored['kind']}, not a guard")
    config, plan = build(HeadConfig, stored["config"]), build(HeadPlan, stored["plan"])
    if missing := {"weight", "bias"} - tensors.keys():
        raise CorruptError(f"{folder} lacks {', '.join(sorted(missing))}")
    weight, bias = tensors["weight"].float(), tensors["bias"].float()
    shape = (len(config.categories), 2 * width)
    if weight.shape != shape or bias.shape != shape[:1] or len(plan.thresholds) != shape[0]:
        raise CorruptError(f"{folder}: weights are {list(weight.shape)}, expected {list(shape)}")
    if not (weight.isfinite().all() and bias.isfinite().all()):
        raise CorruptError(f"{folder} has numbers that are not finite")
    return GuardHead(config, plan, weight, bias)
