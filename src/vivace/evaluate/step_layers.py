"""How many layers of the model one step of a drafting method runs, whatever the number of rows in each.

"Tokens a target pass" counts verifications only. A method that drafts with the target's own layers runs more of them
in a step than plain decoding does in a token: below the exit layer once for every guess (multirate, DEED, LayerSkip),
or once more above the insertion layer for the streams that follow the kept node (multistream). Set beside each other,
tokens a step and layers a step say what a step gives for what it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from vivace.core.seams import Drafter
from vivace.decode.shallow import ShallowDrafter
from vivace.methods.multistream.drafter import StreamDrafter


@dataclass(frozen=True)
class StepLayers:
    """Layers of the target that a step with a full draft runs; layers that a drafter brings along are not counted."""

    verify: int
    draft: int

    @property
    def total(self) -> int:
        """Layers of the whole step; a token of plain decoding runs as many as the model has."""
        return self.verify + self.draft


def layers_of_step(drafter: Drafter, num_layers: int) -> StepLayers:
    """What a step of a drafter runs when its draft is as long as its plan.

    Args:
        drafter: of any method that keeps every token.
        num_layers: of the target.
    """
    if isinstance(drafter, StreamDrafter):
        follows = drafter.plan.attach == "kept"
        return StepLayers(num_layers, num_layers - drafter.forward.streams.config.insertion if follows else 0)
    if isinstance(drafter, ShallowDrafter):
        gate, depth = drafter.guess.gate, len(drafter.plan.widths)
        if drafter.plan.weights != "bf16":  # a draft with quantized copies leaves nothing that verification could use
            return StepLayers(num_layers, depth * gate)
        return StepLayers(num_layers - gate, (depth + 1) * gate)
    return StepLayers(num_layers, 0)
