"""Training a whole model so that a rival works on it: LayerSkip, LITE (and CALM), SkipDecode.

What is lowered stands elsewhere (``train/supervised.py``, ``methods/skipdecode``). What comes out is an
ordinary checkpoint.
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
    """How to train a whole model for a rival."""

    kind: Literal["layerskip", "supervised", "skipdecode"]
    decoder: DecoderRecipe
    """As for any fine-tuning."""
    supervision: Supervision = field(default_factory=Supervision)
    schedule: SkipPlan = field(default_factory=SkipPlan)
    """Of ``skipdecode``."""

    def decoder_recipe(self) -> DecoderRecipe:
        """How the decoder is fine-tuned."""
        return self.decoder

    def objective(self, model: Decoder) -> NextToken:
        """What is lowered.

        Raises:
            ConfigError: a layer or a schedule that is not inside the model.
        """
        if self.kind == "skipdecode":
            return SkipObjective(model, self.schedule)
        return SupervisedObjective(model, self.supervision)
