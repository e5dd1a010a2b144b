"""Recipe that makes a base a Mixture-of-Depths (``methods/mod``): a fine-tuned checkpoint with routers beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from vivace.checkpoint.adapters import base_hash, save_adapter
from vivace.core.model import Decoder
from vivace.engine import load
from vivace.errors import ConfigError
from vivace.methods.mod.drafter import ModConfig
from vivace.methods.mod.objective import ModObjective, thresholds_on
from vivace.prompts import Prompt
from vivace.recipes.decoder import DecoderRecipe, WholeRecipe
from vivace.train.data import Rows, pairs_of, shuffled_groups, take_groups
from vivace.train.next_token import NextToken
from vivace.train.report import Report


@dataclass(frozen=True)
class ModRecipe(WholeRecipe):
    """How to fine-tune a base as a Mixture-of-Depths."""

    RENAMED: ClassVar[Mapping[str, str]] = {"telling": "router_weight"}
    kind: Literal["mod"]
    decoder: DecoderRecipe
    """How the weights are fine-tuned, in one stage."""
    adapter: ModConfig = field(default_factory=ModConfig)
    anneal_steps: int = 100
    """Number of steps over which the share of tokens that pass a routed layer falls to ``adapter.capacity``."""
    router_weight: float = 0.1
    """Weight of the loss that trains routers to decide for each token alone whether it is among the chosen."""

    def __post_init__(self) -> None:
        if self.anneal_steps < 0 or not 0 < self.router_weight < math.inf:
            raise ConfigError(
                f"anneal_steps must be >= 0 and router_weight above 0 and finite, found {self.anneal_steps} and "
                f"{self.router_weight:g}"
            )
        if len(self.decoder.stages) != 1:
            raise ConfigError(f"mod trains in one stage, found {len(self.decoder.stages)}")
        self._require_no_terms(self.kind)
        if self.decoder.recompute:
            raise ConfigError("mod keeps what its routed layers compute; leave out decoder.recompute")

    def decoder_recipe(self) -> DecoderRecipe:
        """Return how the decoder is fine-tuned."""
        return self.decoder

    def objective(self, model: Decoder) -> ModObjective:
        """Make the objective with untrained routers."""
        return ModObjective(model, self.adapter, anneal_steps=self.anneal_steps, router_weight=self.router_weight)

    def finish(self, objective: NextToken, out: Path, prompts: Sequence[Prompt], report: Report) -> None:
        """Calibrate the routers' thresholds on the held-back rows and save both to ``<out>/adapters/mod``."""
        assert isinstance(objective, ModObjective)
        engine = load(out, kernels="torch")
        groups = shuffled_groups(pairs_of(prompts), self.decoder.seed)
        rows = Rows(engine.tokenizer, min(self.decoder.longest, engine.model.config.max_positions))
        batches = rows.batches(take_groups(groups, self.decoder.held_back), self.decoder.tokens_per_batch)
        routers = objective.routers.to(
            engine.model.device, engine.model.dtype
        )  # thresholds belong to the weights as they are stored
        plan = thresholds_on(engine.model, routers, batches)
        folder = out / "adapters" / "mod"
        save_adapter(folder, "mod", base_hash(out), asdict(plan), asdict(self.adapter), routers.tensors())
        shown = ", ".join(f"{at:.2f}" for at in plan.thresholds)
        report.note(f"saved routers to {folder}; {self.adapter.capacity:.0%} go through above {shown}")
