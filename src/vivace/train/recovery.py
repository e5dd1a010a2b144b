"""What a decoder in few bits learns that is to say again what it said as it was stored.

Accuracy recovery of *Apple Intelligence Foundation Language Models*, 2024, arXiv:2407.21075; there the loss is the
text's alone, and the divergence is ours: it says what was lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vivace.core.draft_head import DraftHead
from vivace.core.model import Decoder
from vivace.train.data import DecoderObjective, TokenBatch
from vivace.train.distillation import DistillationLoss, FrozenPass, guess_losses
from vivace.train.next_token import NextToken
from vivace.train.objective import LossParts


class RecoveryObjective(DecoderObjective):
    """The distillation loss of a decoder in few bits: divergence from the stored decoder, which reads the text alone,
    and a share of the cross-entropy of the text.
    """

    def __init__(self, own: NextToken, stored: Decoder, loss: DistillationLoss) -> None:
        """Train what ``own`` trains, a LoRA or a soft prompt, to give its rows the distribution of ``stored``."""
        self.own = own
        self.stored = stored
        self.loss = loss

    def groups(self) -> Sequence[Mapping[str, object]]:
        """Return the parameters of ``own``."""
        return self.own.groups()

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """Yield the loss of a batch in parts; ``model`` is the decoder in few bits."""
        frozen = FrozenPass.of(self.stored, batch.tokens)
        top = self.own.residuals(model, batch)
        yield from guess_losses(self.loss, DraftHead(self.stored), model.head, frozen, batch, top)
