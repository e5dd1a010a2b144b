"""The model drafts for itself: all its layers, with their weights quantized to four bits.

Decoding one sequence reads every weight for every token. With weights of four bits that takes a quarter to a third of
the time of bfloat16, and gives the same token in most places. A draft has no cache of its own: its rows read the
entries of the text and write theirs behind it, and verification, which runs every layer with the weights as they are,
writes the exact ones over them. Nothing is trained, and nothing depends on the kind of text.

QSpec (Zhao et al. 2025, arXiv:2410.11305) drafts so with quantized weights and activations, on the cache of the
verifying model. **Where we differ**: the verifying model is not quantized at all, so that the text is that of the
checkpoint; guesses may be read from a draft vocabulary; and several steps of drafting and verification are one native
call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.draft_head import DraftHead
from vivace.core.draft_rows import DraftRows
from vivace.core.low_rank import LowRankDeltas
from vivace.core.model import Decoder
from vivace.core.seams import Context, Decided, Draft
from vivace.core.step import Step
from vivace.decode.lookup import LookupConfig, LookupState, PromptLookup
from vivace.decode.shallow import DraftPlan, ShallowDrafter, ShallowState
from vivace.errors import ConfigError
from vivace.kernels.low_bit import LowBit


@dataclass(frozen=True)
class QuantizedConfig:
    """Nothing: all layers draft, and the plan has the rest."""


class OwnGuess:
    """Implements ``EarlyGuess``: the head reads the rows' own residuals."""

    def __init__(self, model: Decoder, copies: Mapping[tuple[int, str], LowBit] | None = None) -> None:
        """Guess with ``copies`` of matrices, by layer and part; the others are quantized when they are first needed."""
        self.exit_layer = model.config.num_layers
        nothing = LowRankDeltas(torch.zeros(1, dtype=torch.int64, device=model.device), {}, {})
        self.draft_rows: DraftRows | None = DraftRows(self.exit_layer, nothing, True, None, copies=copies or {})

    def offsets(self, final: Tensor) -> Tensor | None:
        """Return None: guesses do not depend on the final residual of the position before."""
        return None

    def forward(
        self, model: Decoder, h: Tensor, step: Step, guessing: Tensor, offset: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run rows to the exit layer; return their residuals, and those of the guessing ones."""
        h = model.run(h, step, 0, self.exit_layer)
        return h, h[guessing]


LOOKUP = LookupConfig(num_draft_tokens=6, max_ngram=4, min_ngram=3)
"""Which repetitions are drafted in place of quantized guesses: two equal tokens are followed by the same less often
than these guesses are right."""


class QuantizedDrafter(ShallowDrafter):
    """Drafts chains with quantized layers, in native calls."""

    def __init__(
        self,
        model: Decoder,
        guess: OwnGuess,
        plan: DraftPlan,
        head: DraftHead | None = None,
        *,
        lookup: PromptLookup | None = None,
    ) -> None:
        """Draft for ``model`` with the layers of ``guess``; ``head`` reads the guesses.

        Where ``lookup`` finds a continuation for every sequence of a step, that is the draft.

        Raises:
            ConfigError: the plan has a tree, or its weights are not quantized.
        """
        if not plan.is_chain or plan.weights == "bf16":
            raise ConfigError(f"method quantized drafts chains with quantized weights, found the plan {plan.label!r}")
        name = "quantized" if lookup is None else "quantized+lookup"
        super().__init__(model, guess, plan, name=name, head=head)
        self.lookup = lookup

    def open(self, cache: KVCache) -> QuantizedState:
        """Return the state of a session."""
        return QuantizedState(self, None if self.lookup is None else self.lookup.open(cache))


class QuantizedState(ShallowState):
    """Drafts where one native call can, and nothing elsewhere: layers one by one are not quantized."""

    def __init__(self, drafter: QuantizedDrafter, lookup: LookupState | None) -> None:
        """Draft as ``drafter`` does, where ``lookup`` does not find a continuation for all."""
        super().__init__(drafter, None)
        self._lookup = lookup

    def propose(self, context: Context) -> Draft | Decided:
        """Return verified steps, or committed tokens with a chain of guesses."""
        if self._lookup is not None:
            draft, known = self._lookup.seed(context.committed(), context)
            if len(known) == len(context.slots):
                return draft
        return self._decided(context) or self._at_once(context) or context.committed()

    def release(self, slots: Sequence[int]) -> None:
        """Forget these slots."""
        super().release(slots)
        if self._lookup is not None:
            self._lookup.release(slots)

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Forget the texts of these slots, which are read again."""
        self.release(slots)
