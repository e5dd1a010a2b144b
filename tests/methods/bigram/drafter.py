"""The mathematics of the toy: a matrix of scores (V, V), the next token's by the last one's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.core.config import ModelConfig
from vivace.core.model import Decoder
from vivace.core.seams import Context, Draft, TargetPass, Traversal, Verdict
from vivace.core.trained import Trained
from vivace.decode.forward import ForwardPass
from vivace.decode.plain import Stateless
from vivace.decode.shallow import DraftPlan
from vivace.train.data import DecoderObjective, TokenBatch


@dataclass(frozen=True)
class BigramConfig:
    """The toy has nothing to choose."""


class BigramTable(Trained):
    """Scores of followers."""

    depth = 0

    def __init__(self, config: BigramConfig, model: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.scores = nn.Parameter(torch.zeros(model.vocab_size, model.vocab_size))


class BigramDrafter(Stateless):
    """Fills ``Drafter``: a chain of likeliest followers."""

    name = "bigram"

    def __init__(self, table: BigramTable, plan: DraftPlan) -> None:
        self.traversal: Traversal = ForwardPass()
        self.plan = plan
        self._follower = table.scores.argmax(-1)

    def propose(self, context: Context) -> Draft:
        """A chain below each root, as far as the slot with the least room allows."""
        draft = context.committed()
        room = min((context.max_nodes.get(slot, len(self.plan.widths)) for slot in context.slots), default=0)
        leaves = draft.last_committed()
        for _ in range(min(room, len(self.plan.widths))):
            draft, leaves = draft.grow(leaves, self._follower[draft.tokens[leaves]][:, None])
        return draft

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Nothing to learn."""


class BigramObjective(DecoderObjective):
    """Cross entropy of the next token; the model is not asked."""

    def __init__(self, table: BigramTable, loss: object, head: object = None) -> None:
        self.table = table

    def groups(self) -> Sequence[Mapping[str, object]]:
        """All of it."""
        return [{"params": [self.table.scores], "name": "scores", "weight_decay": 0.0}]

    def losses(self, model: Decoder, batch: TokenBatch) -> Iterator[tuple[Tensor, Mapping[str, float]]]:
        """One part."""
        last = batch.tokens.reshape(-1)[batch.predicting]
        yield F.cross_entropy(self.table.scores[last].float(), batch.targets), {}
