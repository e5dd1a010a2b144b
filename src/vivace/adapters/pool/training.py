"""Training a soft prompt in front of a frozen decoder: the loss of the scored tokens behind it, for its embeddings.

After Lester et al. 2021, arXiv:2104.08691; Hoang et al. 2023, arXiv:2310.00867, learn it for the compressed model, from
the text. Learning it from the distribution of the model as it was stored is ours. The soft prompt stands in front of
everything, also of a token that begins texts, as when it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vivace.core.draft_head import DraftHead
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.core.trained import Trained
from vivace.train.data import TokenBatch
from vivace.train.distillation import DistillationLoss, FrozenPass, guess_losses, head_in_parts, rows_at_once
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
        rows, targets = batch.predicting, batch.targets
        top = self._behind(model, batch)[rows]

        def part_of(hidden: Tensor, part: slice) -> LossPart:
            loss, right = next_token_loss(model, hidden, targets[part], len(rows))
            return loss, {"loss": float(loss.detach()), "accuracy": float(right)}

        yield from head_in_parts(top, rows_at_once(self.rows, model.config.vocab_size), part_of)

    def _behind(self, model: Decoder, batch: TokenBatch) -> Tensor:
        """Return the residuals of the text behind the soft prompt after the last layer, (B * T, E)."""
        size, length = batch.tokens.shape
        count = len(self.weights.embeddings)
        with torch.no_grad():
            text = model.embed(batch.tokens.reshape(-1), Step.dense(size, length, device=model.device))
        front = self.weights.embeddings.to(text.dtype).expand(size, -1, -1)
        h = torch.cat((front, text.view(size, length, -1)), 1).flatten(0, 1)
        top = self._trunk(model, h, Step.dense(size, count + length, device=model.device))
        return top.view(size, count + length, -1)[:, count:].flatten(0, 1)


class RecoveringPromptObjective(SoftPromptObjective):
    """The distillation loss of a decoder in few bits behind a soft prompt: divergence from the stored decoder, which
    reads the text without one, and a share of the cross-entropy of the text.
    """

    def __init__(self, model: Decoder, weights: SoftPrompt, stored: Decoder, loss: DistillationLoss) -> None:
        """Train ``weights`` in front of a frozen ``model`` to give it the distribution of ``stored``."""
        super().__init__(model, weights)
        self.stored = stored
        self.loss = loss

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """Yield the loss of a batch in parts; ``model`` is the decoder in few bits."""
        frozen = FrozenPass.of(self.stored, batch.tokens)
        top = self._behind(model, batch)
        yield from guess_losses(self.loss, DraftHead(self.stored), model.head, frozen, batch, top)
