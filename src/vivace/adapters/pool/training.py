"""Training a soft prompt in front of a frozen decoder: the loss of the scored tokens behind it, for its embeddings.

After Lester et al. 2021, arXiv:2104.08691; Hoang et al. 2023, arXiv:2310.00867, learn it for the compressed model, from
the text. The soft prompt stands in front of
everything, also of a token that begins texts, as when it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.core.trained import Trained
from vivace.train.data import TokenBatch
from vivace.train.next_token import NextToken


class SoftPrompt(Trained):
    """The embeddings of one soft prompt while they are trained."""

    def __init__(self, embeddings: Tensor) -> None:
        """Begin with embeddings (n, E), which are copied; n may be 0."""
        super().__init__()
        self.embeddings = nn.Parameter(embeddings.detach().float().clone())

    @staticmethod
    def beginning(model: Decoder, length: int) -> SoftPrompt:
        """Return one that begins as the embeddings of random tokens, drawn from torch's generator."""
        tokens = torch.randint(model.config.vocab_size, (length,))
        with torch.no_grad():
            rows = model.embed(tokens.to(model.device), Step.dense(1, length, device=model.device))
        return SoftPrompt(rows)


class SoftPromptObjective(NextToken):
    """The next-token loss of the scored tokens behind a soft prompt, whose own positions are not scored."""

    def __init__(self, model: Decoder, weights: SoftPrompt, *, rows: int = 1024) -> None:
        """Train ``weights`` in front of a frozen ``model``; ``rows`` positions have their logits held at once."""
        super().__init__(model, rows=rows)
        self.weights = weights

    def groups(self) -> Sequence[dict[str, object]]:
        """Return the embeddings, which AdamW trains."""
        return [{"name": "prompt", "method": "adamw", "params": list(self.weights.parameters())}]

    def residuals(self, model: Decoder, batch: TokenBatch) -> Tensor:
        """Return the residuals of the text behind the soft prompt after the last layer, (B * T, E), with gradients."""
        size, length = batch.tokens.shape
        count = len(self.weights.embeddings)
        with torch.no_grad():
            text = model.embed(batch.tokens.reshape(-1), Step.dense(size, length, device=model.device))
        front = self.weights.embeddings.to(text.dtype).expand(size, -1, -1)
        h = torch.cat((front, text.view(size, length, -1)), 1).flatten(0, 1)
        top = self._trunk(model, h, Step.dense(size, count + length, device=model.device))
        return top.view(size, count + length, -1)[:, count:].flatten(0, 1)
