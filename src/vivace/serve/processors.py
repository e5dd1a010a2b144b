"""Logits processors for OpenAI's fields, in the form the decoder calls them: once for every drafted position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


class LogitBias:
    """``logit_bias``: a number added to some logits."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._tokens = torch.tensor(list(bias), dtype=torch.int64)
        self._values = torch.tensor(list(bias.values()), dtype=torch.float32)

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Add the bias: (1, S) tokens so far and (1, V) logits -> (1, V)."""
        return logits.index_add(1, self._tokens.to(logits.device), self._values.to(logits.device)[None])


@dataclass(frozen=True)
class Penalties:
    """``presence_penalty`` and ``frequency_penalty``: lower the logits of tokens that the answer has already."""

    num_prompt_tokens: int
    presence: float
    frequency: float

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Subtract the penalties: (1, S) tokens so far and (1, V) logits -> (1, V)."""
        counts = torch.bincount(ids[0, self.num_prompt_tokens :], minlength=logits.shape[1])
        return logits - self.frequency * counts - self.presence * (counts > 0)
