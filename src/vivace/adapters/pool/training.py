"""Training a soft prompt in front of a frozen decoder: the next-token loss of the scored tokens, for its embeddings.

After Lester et al. 2021, arXiv:2104.08691; Hoang et al. 2023, arXiv:2310.00867, learn it for the compressed model. The
soft prompt stands in front of everything, also of a token that begins texts, as when it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.core.trained import Trained
from vivace.train.data import TokenBatch
from vivace.train.distillation import head_in_parts, rows_at_once
from vivace.train.next_token import NextToken, next_token_loss
from vivace.train.objective import LossPart, LossParts


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

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """Yield the cross-entropy in parts of ``rows`` positions, then the part that trains the embeddings."""
        size, length = batch.tokens.shape
        count = len(self.weights.embeddings)
        with torch.no_grad():
            text = model.embed(batch.tokens.reshape(-1), Step.dense(size, length, device=model.device))
        front = self.weights.embeddings.to(text.dtype).expand(size, -1, -1)
        h = torch.cat((front, text.view(size, length, -1)), 1).flatten(0, 1)
        step = Step.dense(size, count + length, device=model.device)
        rows = batch.predicting // length * (count + length) + count + batch.predicting % length
        top, targets = self._trunk(model, h, step)[rows], batch.targets

        def part_of(hidden: Tensor, part: slice) -> LossPart:
            loss, right = next_token_loss(model, hidden, targets[part], len(rows))
            return loss, {"loss": float(loss.detach()), "accuracy": float(right)}

        yield from head_in_parts(top, rows_at_once(self.rows, model.config.vocab_size), part_of)
