"""Lossless self-speculation: the accelerated residual guesses, the slow one verifies (notes, section 7)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
        self._final: dict[int, Tensor] = {}
        """Normed final residual of each slot's last verified position, for feedback."""

    def climb(self, model: Decoder, h: Tensor, step: Step, guessing: Tensor) -> tuple[Tensor, Tensor]:
        """Slow rows to the gate with accelerated companions behind the guessing ones."""
        final = None
        if self.accelerator.feedback is not None and len(guessing):
            unknown = h.new_zeros(h.shape[1])
            slots = step.slot[guessing].tolist()
            final = torch.stack([self._final.get(slot, unknown) for slot in slots])
        return dual_climb(model, self.accelerator, h, step, guessing, final)

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Remember the top of the last kept row: the position before the next root."""
        if self.accelerator.feedback is None:
            return
        last = draft.roots().tolist() if verdict is None else [path[-1] for path in verdict.paths]
        finals = self.model.norm(passed.hidden[last])
        self._final.update(zip(draft.slots, finals, strict=True))

    def release(self, slots: Sequence[int]) -> None:
        """Forget these sequences."""
        for slot in slots:
            self._final.pop(slot, None)


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
    name = "multirate" if lookup is None else "multirate+lookup"
    return ShallowDrafter(model, AcceleratedGuess(model, accelerator), plan, name=name, first=lookup)
