"""Teacher forcing with label smoothing: what an encoder-decoder model learns of pairs of a source and its text.

Every token of a text is predicted from the source and the true tokens before it. With smoothing s the loss of a token
is ``(1 - s) CE(z, x) + s mean_v(-log p_v)``: the model is to keep s of its probability spread over the vocabulary, so
that it is never certain, which searches by beam need more than greedy decoding does (Szegedy et al. 2016,
arXiv:1512.00567, section 7; Vaswani et al. 2017, section 5.4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.core.cache import Fresh
from vivace.core.model import Decoder, Layer
from vivace.core.step import Step
from vivace.train.distillation import head_in_parts, rows_at_once
from vivace.train.next_token import matrices_of
from vivace.train.objective import LossPart, LossParts, Objective
from vivace.train.source_data import SourceBatch


def beside_sources(model: Decoder, sources: Tensor, length: int) -> Step:
    """Read sources (B, S) with gradients; return the dense call of texts (B, length) that stand beside them."""
    assert model.encoder is not None, "the model has an encoder"
    reading = Step.dense(*sources.shape, causal=False, device=sources.device)
    encoder = model.encoder
    states = encoder.norm(encoder.run(encoder.embed(sources.reshape(-1), reading), reading))
    stored = Step.dense(*sources.shape, causal=False, device=sources.device)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        assert layer.cross is not None
        layer.cross.store(states, stored)
    assert isinstance(stored.memory, Fresh)
    return Step.dense(sources.shape[0], length, device=sources.device, memory=Fresh(stored.memory))


class TeacherForcing(Objective[Decoder, SourceBatch]):
    """Trains every parameter of an encoder-decoder model."""

    def __init__(self, model: Decoder, *, smoothing: float = 0.1, rows: int = 1024) -> None:
        """Set what is trained.

        Args:
            model: the decoder to train, with its encoder.
            smoothing: s above, the share of the loss that asks for every token alike.
            rows: number of positions whose logits are held at once.
        """
        self.model = model
        self.smoothing = smoothing
        self.rows = rows

    def groups(self) -> Sequence[Mapping[str, object]]:
        """Return two groups: matrices of the layers of both stacks for Muon, all other parameters for AdamW."""
        assert self.model.encoder is not None
        layers = [*self.model.encoder.layers, *self.model.layers]
        matrices = [found for layer in layers if isinstance(layer, Layer) for found in matrices_of(layer)]
        taken = {id(weight) for weight, _ in matrices}
        others = [p for p in self.model.parameters() if id(p) not in taken]  # the shared embedding comes once
        return [
            {
                "name": "matrices",
                "method": "muon",
                "params": [weight for weight, _ in matrices],
                "cuts": [cut for _, cut in matrices],
            },
            {"name": "others", "method": "adamw", "params": others},
        ]

    def losses(self, model: Decoder, batch: SourceBatch) -> LossParts:
        """Yield the loss in parts of ``rows`` positions, then the part that trains the layers of both stacks.

        ``cross_entropy`` in the metrics is the loss without smoothing.
        """
        step = beside_sources(model, batch.sources, batch.given.shape[1])
        scored = (batch.targets.reshape(-1) >= 0).nonzero()[:, 0]
        targets = batch.targets.reshape(-1)[scored]
        top = model.run(model.embed(batch.given.reshape(-1), step), step)[scored]
        total = len(scored)

        def part_of(h: Tensor, part: slice) -> LossPart:
            logits = model.head(h)
            logarithms = torch.log_softmax(logits, -1)
            plain = F.nll_loss(logarithms, targets[part], reduction="sum") / total
            right = (logits.detach().argmax(-1) == targets[part]).sum() / total
            spread = -logarithms.mean(-1).sum() / total
            loss = (1 - self.smoothing) * plain + self.smoothing * spread
            seen = {"loss": loss, "cross_entropy": plain, "accuracy": right}
            return loss, {name: float(value.detach()) for name, value in seen.items()}

        yield from head_in_parts(top, rows_at_once(self.rows, model.config.vocab_size), part_of)
