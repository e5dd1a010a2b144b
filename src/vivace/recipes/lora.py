"""Recipe for a LoRA: a fine-tune of a frozen decoder that requests name, in the files of PEFT."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vivace.adapters.lora import table_of, why_no_lora
from vivace.adapters.training import LoraObjective, LoraWeights
from vivace.checkpoint.adapters import base_hash
from vivace.checkpoint.files import named_file
from vivace.checkpoint.peft import load_lora, save_lora
from vivace.core.low_rank import PROJECTIONS, Shape, Site, site_shapes
from vivace.core.model import Decoder
from vivace.errors import ConfigError, UnsupportedError, nearest
from vivace.recipes.frozen import ZERO, FrozenRecipe, SavedTraining, Trainable, TrainContext, TrainedAdapter


@dataclass(frozen=True, kw_only=True)
class LoraRecipe(FrozenRecipe):
    """How to train a LoRA."""

    kind: Literal["lora"] = "lora"
    rank: int | None = None
    """Rows of A and columns of B; None is 16, or the ranks of the LoRA that it begins with."""
    alpha: float | None = None
    """Numerator of the scale ``alpha / rank`` of every product; None is the rank."""
    targets: tuple[str, ...] = PROJECTIONS
    """The matrices that are adapted: q, k, v, o, gate, up and down; those that a layer lacks are passed over."""
    layers: tuple[int, ...] = ()
    """Numbers of the adapted layers; empty is all."""
    init: str = ZERO
    """What it begins with: "zero", which is the base, or the folder of a LoRA, such as the adapter that recovers what
    the base has lost to few bits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None and self.rank < 1:
            raise ConfigError(f"rank must be at least 1, found {self.rank}")
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise ConfigError(f"alpha must be above 0 and finite, found {self.alpha:g}")
        for target in self.targets:
            if target not in PROJECTIONS:
                raise ConfigError(f"targets has {target!r}{nearest(target, PROJECTIONS)}")
        if not self.targets:
            raise ConfigError("targets is empty; name the matrices to adapt, such as targets=[q,v]")

    def why_not(self, model: Decoder) -> str | None:
        """Return why a model takes no LoRA, or None where it does."""
        reason = why_no_lora(model)
        return None if reason is None else f"this model takes no LoRA: {reason}"

    def begin(self, context: TrainContext) -> LoraTraining:
        """Make factors that add nothing yet, or those of the LoRA to begin with."""
        model = context.engine.model
        if self.init == ZERO:
            rank = 16 if self.rank is None else self.rank
            scale = 1.0 if self.alpha is None else self.alpha / rank
            weights = LoraWeights(self._shapes(model, rank), scale)
        else:
            weights = self._begun(context, Path(self.init))
        return LoraTraining(context, weights.to(model.device, model.dtype))

    def _shapes(self, model: Decoder, rank: int) -> dict[Site, Shape]:
        count, most = model.config.num_layers, max(model.config.width, model.config.ffn_width)
        if rank > most:
            raise ConfigError(f"rank {rank} is beyond the widest side of this model's matrices, {most}; lower it")
        if wrong := [layer for layer in self.layers if not 0 <= layer < count]:
            raise ConfigError(f"layers has {wrong[0]}; this model's are 0 to {count - 1}")
        shapes = site_shapes(model.config, self.layers or range(count), dict.fromkeys(self.targets, rank))
        if not shapes:
            raise UnsupportedError(f"this model's layers have none of {', '.join(self.targets)} that takes a LoRA")
        return shapes

    def _begun(self, context: TrainContext, folder: Path) -> LoraWeights:
        """Return the factors of another LoRA, whose sites and ranks are taken over."""
        engine = context.engine
        found = load_lora(folder, table_of(engine.folder, engine.model), base_hash(engine.folder)).factors
        ranks = {len(down) for down, _ in found.values()}
        if self.rank is not None and ranks != {self.rank}:
            raise ConfigError(
                f"rank is {self.rank}, and {folder} has {', '.join(map(str, sorted(ranks)))}; leave rank out, or begin "
                "with a LoRA of that rank"
            )
        if self.targets != PROJECTIONS or self.layers or self.alpha is not None:
            raise ConfigError(f"targets, layers and alpha are those of {folder}; leave them out")
        weights = LoraWeights({site: (d.shape[1], len(d), len(u)) for site, (d, u) in found.items()})
        weights.begin_with(found)
        return weights


class LoraTraining(Trainable):
    """Trains the factors; the result is a folder as PEFT writes it, not one of a method's weights."""

    def __init__(self, context: TrainContext, weights: LoraWeights) -> None:
        super().__init__(context)
        self.weights = weights
        self.objective = LoraObjective(context.engine.model, weights)
        self.depth = context.engine.model.config.num_layers

    def finish(self) -> TrainedAdapter:
        """Return the factors; there is no plan, as nothing drafts with a LoRA."""
        return TrainedAdapter(None, None, self.weights.tensors())

    def save(self, out: Path, base: str) -> SavedTraining:
        """Write the LoRA in the decoder's precision."""
        engine = self.context.engine
        save_lora(
            out,
            self.weights.factors(),
            table_of(engine.folder, engine.model),
            scale=self.weights.scale,
            base=base,
            base_name=named_file(engine.folder),
        )
        return SavedTraining(f"{sum(p.numel() for p in self.weights.parameters()):,} weights of a LoRA", None, None)
