"""Recipe for a small draft model with the tokenizer of a frozen decoder, which is its teacher.

It starts untrained in a shape of its own, or as some of the decoder's layers between its embeddings and its head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from vivace.checkpoint.families import translate
from vivace.checkpoint.files import read_json
from vivace.checkpoint.save import write_checkpoint
from vivace.core.config import ModelConfig
from vivace.core.model import Decoder
from vivace.engine import Engine, load
from vivace.errors import ConfigError
from vivace.methods.draft.drafter import DraftModelConfig
from vivace.methods.draft.objective import StudentObjective
from vivace.recipes.frozen import FrozenRecipe, SavedTraining, Trainable, TrainContext, TrainedAdapter
from vivace.recipes.regenerate import placed
from vivace.recipes.scratch import ShapeConfig, start_decoder
from vivace.train.distillation import DistillationLoss


@dataclass(frozen=True, kw_only=True)
class DraftRecipe(FrozenRecipe):
    """How to train a draft model."""

    kind: Literal["draft"] = "draft"
    shape: ShapeConfig
    """Shape of the draft model; its vocabulary size and longest position are the base's, whatever is given here."""
    layers: tuple[int, ...] = ()
    """Layers of the base that the draft model starts as copies of, with the base's width, embeddings and head; then
    ``shape`` is not used. Empty starts untrained."""
    loss: DistillationLoss = field(default_factory=DistillationLoss)
    tokens_per_batch: int = 2048

    def begin(self, context: TrainContext) -> StudentTraining:
        """Make the draft model: layers of the base, or untrained.

        Raises:
            ConfigError: a layer is not one of the base's.
        """
        base, tokenizer = context.engine.model, context.engine.tokenizer
        if self.layers:
            config = cut_config(read_json(context.engine.folder / "config.json"), self.layers, base.config.num_layers)
            return StudentTraining(context, config, cut(base, translate(config), self.layers), self.loss)
        shape = replace(self.shape, vocab_size=base.config.vocab_size, max_positions=base.config.max_positions)
        student = start_decoder(shape, shape.num_layers, tokenizer.pieces(), self.seed)
        student = student.to(base.device, base.dtype)
        known = read_json(context.engine.folder / "config.json")
        config = shape.hf_config() | {key: known.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return StudentTraining(context, config, student, self.loss)


def cut_config(base: Mapping[str, Any], layers: Sequence[int], depth: int) -> dict[str, Any]:
    """Return the ``config.json`` of a base of ``depth`` layers with only some of them.

    Raises:
        ConfigError: the layers do not rise, or one is not the base's.
    """
    if sorted(set(layers)) != list(layers) or not 0 <= layers[0] <= layers[-1] < depth:
        raise ConfigError(f"layers must rise and lie below {depth}, the number of layers of the base, found {layers}")
    per_layer = {key: [kinds[layer] for layer in layers] for key, kinds in base.items() if _is_by_layer(kinds, depth)}
    return {**base, **per_layer, "num_hidden_layers": len(layers)}


def _is_by_layer(value: object, depth: int) -> bool:
    """Return whether a value of ``config.json`` names a kind for each layer."""
    return isinstance(value, list) and len(value) == depth


@torch.no_grad()
def cut(base: Decoder, config: ModelConfig, layers: Sequence[int]) -> Decoder:
    """Return a decoder with copies of some layers of another and of everything around them."""
    found = Decoder(config).to(base.device, base.dtype)
    kept = {f"layers.{layer}.": f"layers.{place}." for place, layer in enumerate(layers)}
    weights = dict[str, torch.Tensor]()
    for name, value in base.state_dict().items():
        head = ".".join(name.split(".")[:2]) + "."
        if not name.startswith("layers."):
            weights[name] = value
        elif head in kept:
            weights[kept[head] + name[len(head) :]] = value
    found.load_state_dict(weights)
    return found


class StudentTraining(Trainable):
    """Trains a draft model; the result is a checkpoint of its own, not an adapter."""

    def __init__(
        self, context: TrainContext, config: Mapping[str, Any], student: Decoder, loss: DistillationLoss
    ) -> None:
        super().__init__(context)
        self.config = config
        """The ``config.json`` of the student."""
        self.student = student
        self.objective = StudentObjective(student, loss)
        self.depth = student.config.num_layers

    @property
    def learner(self) -> Decoder:
        """Return the draft model."""
        return self.student

    def finish(self) -> TrainedAdapter:
        """Return the weights; how many tokens to draft is chosen when decoding."""
        return TrainedAdapter(DraftModelConfig(), self.config, self.student.state_dict())

    def save(self, out: Path, base: str) -> SavedTraining:
        """Write a checkpoint with a copy of the base's tokenizer."""
        engine = self.context.engine
        write_checkpoint(self.student, self.config, engine.folder, out)
        what = f"{sum(p.numel() for p in self.student.parameters()):,} weights"
        return SavedTraining(what, "draft", lambda: _with_draft(engine, out))


def _with_draft(engine: Engine, out: Path) -> Engine:
    """Open the base again, with a draft model."""
    keys = engine.ignored_config_keys
    return load(engine.folder, **placed(engine), ignore_config_keys=keys, draft_model=out)
