"""Recipe that fine-tunes all weights for decoding with fewer layers: LayerSkip, LITE (and CALM), SkipDecode.

The objectives are defined in ``train/supervised.py`` and ``methods/skipdecode``. The result is an ordinary checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from vivace.core.model import Decoder
from vivace.methods.skipdecode.drafter import SkipObjective, SkipPlan
from vivace.recipes.decoder import DecoderRecipe, WholeRecipe
from vivace.train.next_token import NextToken
from vivace.train.supervised import SupervisedObjective, Supervision


@dataclass(frozen=True)
class SupervisedRecipe(WholeRecipe):
    """How to fine-tune all weights of a base for one of these methods."""

    kind: Literal["layerskip", "supervised", "skipdecode"]
    decoder: DecoderRecipe
    """How the weights are fine-tuned."""
    supervision: Supervision = field(default_factory=Supervision)
    """Exit losses of ``layerskip`` and ``supervised``."""
    schedule: SkipPlan = field(default_factory=SkipPlan)
    """Number of layers by position, of ``skipdecode``."""

    def __post_init__(self) -> None:
        self._require_no_terms(self.kind)

    def decoder_recipe(self) -> DecoderRecipe:
        """Return how the decoder is fine-tuned."""
        return self.decoder

    def objective(self, model: Decoder) -> NextToken:
        """Make the objective of the method.

        Raises:
            ConfigError: an exit layer or the schedule does not fit the model.
        """
        if self.kind == "skipdecode":
            return SkipObjective(model, self.schedule, recompute=self.decoder.recompute)
        return SupervisedObjective(model, self.supervision, recompute=self.decoder.recompute)
