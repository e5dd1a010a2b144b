"""Lossless self-speculation: the accelerated residual guesses, the slow one verifies (notes, section 7)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vivace.core.guessers import Companion
from vivace.core.model import Decoder
from vivace.core.seams import Draft, TargetPass, Verdict
from vivace.core.step import Step
from vivace.decode.lookup import PromptLookup
from vivace.decode.shallow import DraftPlan, ShallowDrafter
from vivace.multirate.residual import Accelerator, dual_climb


class AcceleratedGuess:
    """Fills ``EarlyGuess``: the accelerated residual at the gate, read by the model's own head."""

    def __init__(self, model: Decoder, accelerator: Accelerator) -> None:
        self.model = model
        self.accelerator = accelerator
        self.gate = accelerator.config.gate
        accelerator.run_on(model)
        self.companion: Companion | None = accelerator.companion()
        self._offsets: dict[int, Tensor] = {}
        """What feedback adds, (lags, E), from each slot's last verified position."""

    def offsets(self, slots: Sequence[int]) -> Tensor | None:
        """Feedback for drafts that start here; nothing where no position has been verified yet."""
        known = next((self._offsets[slot] for slot in slots if slot in self._offsets), None)
        if known is None:
            return None
        if len(slots) == 1:
            return known[None]
        unknown = torch.zeros_like(known)
        return torch.stack([self._offsets.get(slot, unknown) for slot in slots])

    def climb(self, model: Decoder, h: Tensor, step: Step, guessing: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Slow rows to the gate with accelerated companions behind the guessing ones."""
        offsets = self.offsets(step.slot[guessing].tolist())
        offset = None if offsets is None else offsets[:, min(depth, offsets.shape[1] - 1)]
        return dual_climb(model, self.accelerator, h, step, guessing, offset)

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Remember the top of the last kept row: the position before the next root."""
        if self.accelerator.feedback is None:
            return
        last = draft.root_rows if verdict is None else [path[-1] for path in verdict.paths]
        final = passed.hidden[last] if len(last) > 1 else passed.hidden[last[0] : last[0] + 1]
        offsets = self.accelerator.offsets(self.model.norm(final))
        assert offsets is not None
        self._offsets.update(zip(draft.slots, offsets.unbind(), strict=True))

    def release(self, slots: Sequence[int]) -> None:
        """Forget these sequences."""
        for slot in slots:
            self._offsets.pop(slot, None)


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
