"""Lossless self-speculation: the accelerated residual guesses, the slow one verifies."""

from __future__ import annotations

from torch import Tensor

from vivace.core.draft_rows import DraftRows
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.decode.lookup import PromptLookup
from vivace.decode.shallow import DraftPlan, ShallowDrafter
from vivace.methods.multirate.residual import Accelerator, dual_forward


class AcceleratedGuess:
    """Fills ``EarlyGuess``: the accelerated residual at the gate, read by the model's own head."""

    def __init__(self, model: Decoder, accelerator: Accelerator) -> None:
        self.model = model
        self.accelerator = accelerator
        self.gate = accelerator.config.gate
        accelerator.run_on(model)
        self.companion: DraftRows | None = accelerator.companion()

    def offsets(self, final: Tensor) -> Tensor | None:
        """Feedback (n, lags, E) from what verification left at the top, (n, E); None for weights without."""
        return None if self.accelerator.feedback is None else self.accelerator.offsets(self.model.norm(final))

    def forward(
        self, model: Decoder, h: Tensor, step: Step, guessing: Tensor, offset: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Slow rows to the gate with accelerated companions behind the guessing ones."""
        return dual_forward(model, self.accelerator, h, step, guessing, offset)


def self_speculation(
    model: Decoder, accelerator: Accelerator, plan: DraftPlan, *, lookup: PromptLookup | None = None
) -> ShallowDrafter:
    """A drafter for ``model`` from its accelerator.

    Args:
        model: the frozen target.
        accelerator: trained on it.
        plan: shape of the draft.
        lookup: drafts instead wherever the text repeats itself (``multirate+lookup``).
    """
    return drafter_by(AcceleratedGuess(model, accelerator), plan, lookup=lookup)


def drafter_by(guess: AcceleratedGuess, plan: DraftPlan, *, lookup: PromptLookup | None = None) -> ShallowDrafter:
    """``self_speculation`` by a guess that other drafters may have too: their rough copies of weights are the same."""
    name = "multirate" if lookup is None else "multirate+lookup"
    return ShallowDrafter(guess.model, guess, plan, name=name, first=lookup)
