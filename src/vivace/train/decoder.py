"""A decoder from prompt files: from scratch with its tokenizer, or a full fine-tune of a base.

A recipe has stages; each may add layers and has a budget and rates of its own. A run lives in
``<out>/run``: the tokenizer first, then a folder of snapshots per stage. The finished checkpoint in
``<out>`` is what plain transformers reads.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from vivace.checkpoint.bpe import save_bpe, train_bpe
from vivace.checkpoint.files import read_json, resolve, staged
from vivace.checkpoint.load import load_decoder
from vivace.checkpoint.save import copy_text_files, forget_shards, write_decoder
from vivace.checkpoint.tokenizer import Tokenizer, load_tokenizer
from vivace.core.model import Decoder
from vivace.errors import ConfigError
from vivace.files import write_text
from vivace.prompts import Prompt
from vivace.train.batches import DataSplit
from vivace.train.config import LoopConfig, TrainConfig
from vivace.train.data import Batches, Rows, TokenBatch, collate, grouped, pairs_of
from vivace.train.loop import TrainResult, fit
from vivace.train.memory import estimate_memory, require_memory
from vivace.train.next_token import BalancedNextToken, NextToken, SparseNextToken
from vivace.train.optim import Optimiser, OptimiserConfig
from vivace.train.report import Report
from vivace.train.scratch import ShapeConfig, deepen, start_decoder
from vivace.train.variation import Pair, Variation, VariationConfig, copying_exercises

_DEFAULTS = "generation_config.json"


@dataclass(frozen=True)
class Stage:
    """A stretch of training at one depth."""

    loop: LoopConfig
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    depth: int | None = None
    """Layers; None is all of the shape's."""
    places: tuple[int, ...] = ()
    """Where the layers of the stage before stand among them; empty when the depth stays."""
    invent: float | None = None
    """Share of pairs with invented values; None is the recipe's."""
    shares: dict[str, float] = field(default_factory=dict)
    """Share of a task's rows (by their "task") drawn each epoch; 1 for those not named."""

    def __post_init__(self) -> None:
        if any(not 0 <= share <= 1 for share in self.shares.values()):
            raise ConfigError(f"shares are between 0 and 1, found {self.shares}")


@dataclass(frozen=True)
class DecoderRecipe:
    """How to train a whole decoder."""

    kind: Literal["decoder"]
    stages: tuple[Stage, ...]
    shape: ShapeConfig | None = None
    """Of a decoder from scratch; None trains the base that is given."""
    variation: VariationConfig = field(default_factory=VariationConfig)
    exercises: float = 0.0
    """Copying exercises per real pair, in the first epoch of the first stage."""
    tokens_per_batch: int = 4096
    longest: int = 256
    """Rows with more tokens are left out."""
    held_back: int = 512
    """Rows that choose the best weights."""
    recompute: bool = False
    """Keep only what enters each layer: less memory, a third more time."""
    balance: float = 0.0
    """Weight of the term that keeps experts of a mixture equally busy."""
    sparsity: float = 0.0
    """Weight of the term that leaves fewer neurons of a ReLU model active."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.stages:
            raise ConfigError("a decoder recipe needs at least one stage")
        if self.held_back < 1 or self.longest < 8 or self.exercises < 0:
            raise ConfigError(
                f"held_back must be >= 1, longest >= 8 and exercises >= 0, found {self.held_back}, {self.longest} and "
                f"{self.exercises}"
            )
        if self.balance < 0 or (self.balance and (self.shape is not None or self.recompute)):
            raise ConfigError(
                f"balance is for mixtures that are fine-tuned without recompute and at least 0, found {self.balance}"
            )
        if self.sparsity < 0 or (self.sparsity and (self.recompute or self.balance)):
            raise ConfigError(
                f"sparsity is at least 0 and goes without recompute and without balance, found {self.sparsity}"
            )
        if self.shape is None:
            if any(stage.depth is not None for stage in self.stages):
                raise ConfigError("a base keeps its depth; leave out stages.depth, or give a shape to start from")
            return
        if self.longest > self.shape.max_positions:
            raise ConfigError(f"longest {self.longest} exceeds the {self.shape.max_positions} positions of the shape")
        depths = [self.shape.num_layers if stage.depth is None else stage.depth for stage in self.stages]
        if depths != sorted(depths) or depths[-1] != self.shape.num_layers:
            raise ConfigError(f"depths must grow to {self.shape.num_layers} layers, found {depths}")


def train_decoder(
    recipe: DecoderRecipe,
    prompts: Sequence[Prompt],
    out: Path,
    report: Report,
    base: str | Path | None = None,
    *,
    objective_of: Callable[[Decoder], NextToken] | None = None,
    part_of: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Train and save a decoder.

    Args:
        recipe: what to train and how.
        prompts: rows with references.
        out: folder of the checkpoint; a run that was killed there goes on.
        report: hears about it.
        base: checkpoint to fine-tune, when the recipe has no shape.
        objective_of: what is lowered, instead of what the recipe says.
        part_of: fields of the recipe that this one is part of; a run goes on with the same ones only.

    Returns:
        How the last stage ended.

    Raises:
        ConfigError: too few rows, neither or both of a shape and a base, or ``out`` is the base.
        CapacityError: not enough memory.
        MismatchError: ``out`` holds a run with another recipe or data.
    """
    if (recipe.shape is None) == (base is None):
        raise ConfigError("train a decoder from a shape in the recipe or from a base (--model), one of the two")
    if base is not None and resolve(base).resolve() == out.resolve():
        raise ConfigError(f"{out} is the base itself; name another folder for what comes of it")
    pairs = pairs_of(prompts)
    tasks = dict(zip(pairs, (prompt.task or "" for prompt in prompts for _ in prompt.references), strict=True))
    _require_tasks(recipe, set(tasks.values()))
    random.Random(recipe.seed).shuffle(pairs)
    if len(pairs) <= recipe.held_back:
        raise ConfigError(f"{len(pairs)} rows leave nothing to train on with held_back {recipe.held_back}; lower it")
    variation = Variation(recipe.variation, pairs)
    respelled = [variation.respelled(pair) for pair in pairs]
    tasks = {new: tasks[pair] for new, pair in zip(respelled, pairs, strict=True)}
    pairs = respelled
    tokenizer, source = _tokenizer(recipe, pairs, out, base)
    held_back = _held_back(recipe, tokenizer, pairs)
    learnt = pairs[recipe.held_back :]
    outcome: TrainResult | None = None
    model = _first_model(recipe, tokenizer, base)
    for number, stage in enumerate(recipe.stages):
        if stage.places:
            depth = stage.depth or (recipe.shape.num_layers if recipe.shape else model.config.num_layers)
            model = deepen(model, depth, stage.places, recipe.seed + number)
        batches = _batches(recipe, tokenizer, learnt, tasks, number)
        plan = json.dumps(
            {"recipe": part_of or asdict(recipe), "rows": len(pairs), "base": str(base or "")}, sort_keys=True
        )
        course = TrainConfig(stage.loop, stage.optimiser, recipe.seed + number, plan)
        objective = objective_of(model) if objective_of is not None else _objective(recipe, model)
        _check_memory(recipe, model, objective, stage, report)
        report.note(f"stage {number + 1} of {len(recipe.stages)}: {model.config.num_layers} layers")
        folder = out / "run" / f"stage-{number + 1}"
        outcome = fit(model, objective, DataSplit(batches, held_back), course, folder=folder, report=report)
    assert outcome is not None
    _save(model, recipe, source, out)
    report.note(f"saved {sum(p.numel() for p in model.parameters()):,} weights to {out}")
    return outcome


def _tokenizer(
    recipe: DecoderRecipe, pairs: Sequence[Pair], out: Path, base: str | Path | None
) -> tuple[Tokenizer, Path]:
    """The base's tokenizer, or one learnt from the pairs (once: a resumed run finds it), and its folder."""
    if base is not None:
        return load_tokenizer(base), resolve(base)
    assert recipe.shape is not None
    folder = out / "run" / "tokenizer"
    if not (folder / "config.json").exists():
        texts = dict.fromkeys(prompt for prompt, _ in pairs)
        pieces = train_bpe([*texts, *(answer for _, answer in pairs)], recipe.shape.vocab_size)
        save_bpe(pieces, folder, recipe.shape.max_positions)
        write_text(folder / "config.json", json.dumps(recipe.shape.hf_config(), indent=2) + "\n")
    return load_tokenizer(folder), folder


def _first_model(recipe: DecoderRecipe, tokenizer: Tokenizer, base: str | Path | None) -> Decoder:
    if recipe.shape is None:
        assert base is not None
        return _own(load_decoder(base))
    spelled = tokenizer.pieces()
    pieces = [spelled.get(index, "") for index in range(recipe.shape.vocab_size)]
    depth = recipe.stages[0].depth or recipe.shape.num_layers
    return start_decoder(recipe.shape, depth, pieces, recipe.seed).to(torch.bfloat16)


def _objective(recipe: DecoderRecipe, model: Decoder) -> NextToken:
    if recipe.sparsity:
        if model.config.activation != "relu" or model.config.moe is not None:
            raise ConfigError(f"the recipe's sparsity is for models with relu, this one has {model.config.activation}")
        return SparseNextToken(model, weight=recipe.sparsity)
    if not recipe.balance:
        return NextToken(model, recompute=recipe.recompute)
    if model.config.moe is None:
        raise ConfigError("the recipe balances experts and the model has none; make them first with `vivace upcycle`")
    return BalancedNextToken(model, weight=recipe.balance)


def _own(model: Decoder) -> Decoder:
    """Parameters in memory of their own: loaded ones are views of the checkpoint's file."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.requires_grad_(True)


def _held_back(recipe: DecoderRecipe, tokenizer: Tokenizer, pairs: Sequence[Pair]) -> list[TokenBatch]:
    rows = Rows(tokenizer, recipe.longest).encode(pairs[: recipe.held_back])
    return [collate(group) for group in grouped(rows, recipe.tokens_per_batch)]


def _batches(
    recipe: DecoderRecipe, tokenizer: Tokenizer, pairs: Sequence[Pair], tasks: Mapping[Pair, str], number: int
) -> Batches:
    stage = recipe.stages[number]
    config = recipe.variation if stage.invent is None else replace(recipe.variation, invent=stage.invent)
    variation = Variation(config, pairs)

    def draw(rng: random.Random, epoch: int) -> list[Pair]:
        chosen = [pair for pair in pairs if rng.random() < stage.shares.get(tasks[pair], 1.0)]
        drawn = [variation.drawn(pair, rng) for pair in chosen]
        if number == 0 and epoch == 0:
            drawn += copying_exercises(pairs, recipe.exercises, variation, rng)
        return drawn

    rows = Rows(tokenizer, recipe.longest)
    return Batches(draw, rows, tokens_per_batch=recipe.tokens_per_batch, seed=recipe.seed + number)


def _require_tasks(recipe: DecoderRecipe, tasks: set[str]) -> None:
    """Refuse a share of a task that no row belongs to."""
    for stage in recipe.stages:
        for name in stage.shares:
            if name not in tasks:
                raise ConfigError(f"stages.shares names the task {name!r}, of which there are no rows")


def _check_memory(recipe: DecoderRecipe, model: Decoder, objective: NextToken, stage: Stage, report: Report) -> None:
    weights = list(model.parameters())
    held = Optimiser(objective.groups(), stage.optimiser).num_bytes()
    need = estimate_memory(model.config, weights, weights, held, recipe.tokens_per_batch, recompute=recipe.recompute)
    report.note(f"memory: {need}")
    require_memory(need, model.device)


def _save(model: Decoder, recipe: DecoderRecipe, source: Path, out: Path) -> None:
    """Weights, configuration and the files beside them, all or nothing."""
    config: dict[str, Any] = read_json(source / "config.json")
    with staged(out) as folder:
        write_decoder(model, folder, config)
        copy_text_files(source, folder)
        if not (folder / _DEFAULTS).exists():
            ends = {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
            text = json.dumps(ends | {"do_sample": False}, indent=2) + "\n"
            (folder / _DEFAULTS).write_text(text, encoding="utf-8")
    forget_shards(out)
