"""Recipe for soft prompts: each member of a pool is learnt by itself, in front of a frozen decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from vivace.adapters.pool.pool import why_no_pool
from vivace.adapters.pool.training import SoftPrompt, SoftPromptObjective
from vivace.checkpoint.files import named_file
from vivace.checkpoint.soft_prompt import save_soft_prompt
from vivace.core.model import Decoder
from vivace.engine import Engine
from vivace.errors import ConfigError
from vivace.prompts import Prompt
from vivace.recipes.answers import AnswersFile
from vivace.recipes.frozen import FrozenRecipe, SavedTraining, Trainable, TrainContext, TrainedAdapter
from vivace.recipes.stored import stored_model
from vivace.recipes.trainer import train_beside
from vivace.train.distillation import DistillationLoss
from vivace.train.recovery import RecoveryObjective
from vivace.train.report import Report


@dataclass(frozen=True, kw_only=True)
class PromptsRecipe(FrozenRecipe):
    """How to train the soft prompts of a pool."""

    kind: Literal["prompts"] = "prompts"
    lengths: tuple[int, ...] = (20, 100)
    """Entries of the members; each length is learnt with every seed."""
    seeds: tuple[int, ...] = (0, 1)
    """Seeds of the members. A seed chooses where a member begins, and which part of the rows it learns from: there are
    as many parts as seeds."""
    stored: str = ""
    """Folder or Hub id of the model that a checkpoint in few bits was made of, whose distribution is then learnt; empty
    learns the text of the rows."""
    loss: DistillationLoss = field(default_factory=DistillationLoss)
    """Weights of the divergence from the stored model and of the text's cross-entropy, where there is one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lengths", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values) or min(values) < (name == "lengths"):
                raise ConfigError(f"{name} are different numbers, lengths above 0; found {list(values)}")
        if not self.stored and self.loss != DistillationLoss():
            raise ConfigError("loss weighs what a stored model says; name it with stored=MODEL, or leave loss out")

    @property
    def beside(self) -> tuple[str, ...]:
        """The stored model, where its distribution is learnt."""
        return (self.stored,) if self.stored else ()

    @property
    def num_trainings(self) -> int:
        """Number of members, each of which is trained by itself."""
        return len(self.lengths) * len(self.seeds)

    def why_not(self, model: Decoder) -> str | None:
        """Return why texts of a model cannot stand behind a soft prompt, or None where they can."""
        reason = why_no_pool(model)
        return None if reason is None else f"this model takes no soft prompts: {reason}"

    def begin(self, context: TrainContext) -> PromptTraining:
        """Begin as embeddings of random tokens, and read the stored model where one is named.

        Raises:
            NotFoundError: there is no such model.
            MismatchError: it is of another shape than the checkpoint.
        """
        stored = stored_model(self.stored, context.engine) if self.stored else None
        return PromptTraining(context, SoftPrompt.beginning(context.engine.model, self.lengths[0]), stored)


class PromptTraining(Trainable):
    """Trains one soft prompt; the result is a folder as PEFT writes it."""

    def __init__(self, context: TrainContext, weights: SoftPrompt, stored: Decoder | None) -> None:
        super().__init__(context)
        recipe, model = context.recipe, context.engine.model
        assert isinstance(recipe, PromptsRecipe)
        self.weights = weights
        own = SoftPromptObjective(model, weights)
        self.objective = own if stored is None else RecoveryObjective(own, stored, recipe.loss)
        self.depth = model.config.num_layers

    def finish(self) -> TrainedAdapter:
        """Return the embeddings; there is no plan, as nothing drafts with them."""
        return TrainedAdapter(None, None, self.weights.tensors())

    def save(self, out: Path, base: str) -> SavedTraining:
        """Write the soft prompt."""
        engine = self.context.engine
        save_soft_prompt(out, self.weights.embeddings, engine.tokenizer, named_file(engine.folder))
        return SavedTraining(f"a soft prompt of {len(self.weights.embeddings)} entries", None, None)


def train_pool(
    recipe: PromptsRecipe,
    engine: Engine,
    prompts: Sequence[Prompt],
    out: Path,
    report: Report,
    answers: AnswersFile | None = None,
) -> list[str]:
    """Train every member of a pool that is not there yet, one after the other; return their names.

    Members are folders ``LENGTH-SEED`` of ``out``. A run that was killed goes on when it is called again. A member
    whose run is finished takes no further step, and one whose run was removed is left as it is.

    Raises:
        ConfigError: there are too few rows, or no text has room behind a member.
        MismatchError: a member belongs to a run with another recipe, base or data.
    """
    most, names = engine.model.config.max_positions, []
    if max(recipe.lengths) >= most:
        raise ConfigError(f"lengths has {max(recipe.lengths)}, and the model holds {most} positions, texts included")
    for length in recipe.lengths:
        for place, seed in enumerate(recipe.seeds):
            name = f"{length}-{seed}"
            names.append(name)
            if (out / name / "adapter_config.json").is_file() and not (out / name / "run").is_dir():
                report.note(f"{name} is there without its run, and is left as it is")
                continue
            report.note(f"soft prompt {name}")
            own = replace(recipe, lengths=(length,), seed=seed)
            rows = list(prompts)[place :: len(recipe.seeds)]
            part = None if answers is None else answers.part(place, len(recipe.seeds))
            train_beside(own, engine, rows, out / name, report, answers=part)
    return names
