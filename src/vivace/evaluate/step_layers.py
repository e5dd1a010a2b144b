"""Number of layers of the model that one step of a drafting method runs, whatever the number of rows in each.

"Tokens per target pass" only counts verifications. A method that drafts with the target's own layers runs more of them
per step than plain decoding does per token: the layers below the exit layer once for every draft token (multirate,
DEED, LayerSkip), or those above the insertion layer once more for the streams that follow the accepted node
(multistream). Tokens per step and layers per step together show what a step yields for what it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from vivace.core.seams import Drafter
from vivace.decode.shallow import ShallowDrafter
from vivace.methods.multistream.drafter import StreamDrafter


@dataclass(frozen=True)
class StepLayers:
    """Layers of the target that a step with a full draft runs; layers that belong to the drafter are not counted."""

    verify: int
    draft: int

    @property
    def total(self) -> int:
        """Number of layers of the whole step; a token of plain decoding runs as many as the model has."""
        return self.verify + self.draft


def layers_of_step(drafter: Drafter, num_layers: int) -> StepLayers:
    """Count the layers that a step of a drafter runs if its draft is as long as its plan.

    Args:
        drafter: drafter of a lossless method.
        num_layers: number of layers of the target.
    """
    if isinstance(drafter, StreamDrafter):
        follows = drafter.plan.attach == "kept"
        return StepLayers(num_layers, num_layers - drafter.forward.streams.config.insertion_layer if follows else 0)
    if isinstance(drafter, ShallowDrafter):
        exit_layer, depth = drafter.guess.exit_layer, len(drafter.plan.widths)
        if drafter.plan.weights != "bf16":  # verification cannot reuse residuals computed by quantized copies of layers
            return StepLayers(num_layers, depth * exit_layer)
        return StepLayers(num_layers - exit_layer, (depth + 1) * exit_layer)
    return StepLayers(num_layers, 0)
