"""The rivals that are adapters of a frozen model: configuration, weights, plan, drafter and objective of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vivace.baselines.eagle import Eagle, EagleConfig, EagleLayer
from vivace.baselines.exits import Exit, ExitConfig, exit_drafter
from vivace.baselines.lookahead import LookaheadPlan
from vivace.baselines.medusa import Medusa, MedusaConfig, MedusaHeads, MedusaPlan
from vivace.baselines.objectives import EagleObjective, ExitObjective, MedusaObjective, RivalLoss, UnoObjective
from vivace.baselines.uno import Uno, UnoConfig, UnoTerms
from vivace.core.config import ModelConfig
from vivace.core.model import Decoder
from vivace.core.seams import Drafter
from vivace.core.trained import Trained
from vivace.decode.shallow import DraftPlan
from vivace.train.data import DecoderObjective

RivalPlan = DraftPlan | MedusaPlan | LookaheadPlan
"""Shape of a rival's draft."""


@dataclass(frozen=True)
class Kind:
    """How one rival is put together; weights are trained on a frozen model."""

    config: type[Any]
    plan: type[Any]
    weights: Callable[[Any, ModelConfig], Trained]
    drafter: Callable[[Decoder, Any, Any], Drafter]
    objective: Callable[[Any, RivalLoss], DecoderObjective]
    what: str
    """In messages."""


KINDS: Mapping[str, Kind] = {
    "medusa": Kind(MedusaConfig, MedusaPlan, MedusaHeads, Medusa, MedusaObjective, "heads"),
    "eagle": Kind(EagleConfig, DraftPlan, EagleLayer, Eagle, EagleObjective, "a feature drafter"),
    "deed": Kind(ExitConfig, DraftPlan, Exit, exit_drafter, ExitObjective, "an exit with an adaptation module"),
    "uno": Kind(UnoConfig, MedusaPlan, UnoTerms, Uno, UnoObjective, "terms that draft a block"),
}
"""By method."""
