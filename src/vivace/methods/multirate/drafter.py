"""Lossless self-speculation: the accelerated residual drafts, the model's own residual verifies."""

from __future__ import annotations

from torch import Tensor

from vivace.core.draft_head import DraftHead
from vivace.core.draft_rows import DraftRows
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.decode.lookup import PromptLookup
from vivace.decode.shallow import DraftPlan, ShallowDrafter
from vivace.methods.multirate.residual import Accelerator, dual_forward


class AcceleratedGuess:
    """Implements ``EarlyGuess``: the model's own head reads the accelerated residual at the exit layer."""

    def __init__(self, model: Decoder, accelerator: Accelerator) -> None:
        self.model = model
        self.accelerator = accelerator
        self.exit_layer = accelerator.config.exit_layer
        accelerator.run_on(model)
        self.draft_rows: DraftRows | None = accelerator.draft_rows()

    def offsets(self, final: Tensor) -> Tensor | None:
        """Return the feedback (n, lags, E) from final residuals (n, E) of verified positions; None for weights without
        feedback.
        """
        return None if self.accelerator.feedback is None else self.accelerator.offsets(self.model.norm(final))

    def forward(
        self, model: Decoder, h: Tensor, step: Step, guessing: Tensor, offset: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the model's rows to the exit layer, with accelerated draft rows beside the guessing ones."""
        return dual_forward(model, self.accelerator, h, step, guessing, offset)


def self_speculation(
    model: Decoder, accelerator: Accelerator, plan: DraftPlan, *, lookup: PromptLookup | None = None
) -> ShallowDrafter:
    """Return a drafter for ``model`` with its accelerator.

    Args:
        model: the frozen target.
        accelerator: trained on it.
        plan: shape of the draft.
        lookup: prompt lookup, which drafts instead where the text repeats itself (``multirate+lookup``).
    """
    return drafter_by(AcceleratedGuess(model, accelerator), plan, lookup=lookup)


def drafter_by(
    guess: AcceleratedGuess, plan: DraftPlan, *, lookup: PromptLookup | None = None, head: DraftHead | None = None
) -> ShallowDrafter:
    """Return a drafter that shares ``guess`` with other drafters, so that they share quantized copies of weights."""
    name = "multirate" if lookup is None else "multirate+lookup"
    return ShallowDrafter(guess.model, guess, plan, name=name, first=lookup, head=head)
