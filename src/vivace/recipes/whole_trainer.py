"""The trainer of all weights of a decoder, in stages that may add layers, to a Hugging Face checkpoint.

While it runs, ``<out>/run`` holds the tokenizer (of a decoder from scratch) and a folder of snapshots per stage. The
finished checkpoint in ``<out>`` can be read by transformers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from vivace.checkpoint.files import read_json, resolve
from vivace.checkpoint.load import choose_device, load_config, load_decoder
from vivace.checkpoint.save import copy_text_files, staged_checkpoint, write_decoder
from vivace.checkpoint.tokenizer import Tokenizer, load_tokenizer
from vivace.core.model import Decoder
from vivace.errors import ConfigError
from vivace.prompts import Prompt
from vivace.recipes.decoder import DecoderRecipe, Stage, WholeRecipe
from vivace.recipes.own_tokenizer import own_tokenizer
from vivace.recipes.scratch import deepen, start_decoder
from vivace.train.batches import DataSplit
from vivace.train.config import TrainConfig
from vivace.train.data import Batches, Row, Rows, TokenBatch, pairs_of, pairs_of_row, shuffled_groups, take_groups
from vivace.train.loop import TrainResult, fit
from vivace.train.memory import estimate_memory, require_memory
from vivace.train.next_token import NextToken
from vivace.train.optim import Optimiser
from vivace.train.report import Report
from vivace.train.variation import Pair, Variation, copying_exercises, digest_of

_DEFAULTS = "generation_config.json"


def train_whole(
    recipe: WholeRecipe,
    prompts: Sequence[Prompt],
    out: Path,
    report: Report,
    base: str | Path | None = None,
    device: str | torch.device = "auto",
) -> TrainResult:
    """Train and save a decoder.

    Args:
        recipe: what to train and how.
        prompts: rows with references.
        out: folder of the checkpoint; a run that was killed is continued there.
        report: receives progress.
        base: checkpoint to fine-tune, where the recipe has no shape.
        device: where it is trained, as for ``choose_device``.

    Returns:
        The end of the last stage.

    Raises:
        ConfigError: there are too few rows, neither or both of a shape and a base, or ``out`` is the base.
        CapacityError: the training needs more memory than is free.
        MismatchError: ``out`` holds a run with another recipe or data.
        UnsupportedError: there is no such device.
    """
    decoder, place = recipe.decoder_recipe(), choose_device(device)
    if (decoder.shape is None) == (base is None):
        raise ConfigError("train a decoder from a shape in the recipe or from a base (--model), one of the two")
    if base is not None and resolve(base).resolve() == out.resolve():
        raise ConfigError(f"{out} is the base itself; name another folder for what comes of it")
    reserved, kept, tasks = _pairs(decoder, prompts)
    pairs = [*reserved, *kept]
    tokenizer, source = _tokenizer(decoder, pairs, out, base)
    longest = decoder.longest if base is None else min(decoder.longest, load_config(base).max_positions)
    rows = Rows(tokenizer, longest, place)
    rows.note_left_out(pairs, report.note)
    held_back = rows.batches(reserved, decoder.tokens_per_batch)
    known = {"recipe": asdict(recipe), "rows": len(pairs), "data": digest_of(pairs), "base": str(base or "")}
    plan = json.dumps(known, sort_keys=True)
    model = _first_model(decoder, tokenizer, base).to(place)
    for number, stage in enumerate(decoder.stages):
        if stage.places:
            depth = stage.depth or (decoder.shape.num_layers if decoder.shape else model.config.num_layers)
            model = deepen(model, depth, stage.places, decoder.seed + number).to(place)
        batches = _batches(decoder, rows, kept, tasks, number)
        config = TrainConfig(stage.loop, stage.optimiser, decoder.seed + number, plan)
        objective = recipe.objective(model)
        _check_memory(decoder, model, objective, stage, report)
        report.note(f"stage {number + 1} of {len(decoder.stages)}: {model.config.num_layers} layers")
        folder = out / "run" / f"stage-{number + 1}"
        result = fit(model, objective, DataSplit(batches, held_back), config, folder=folder, report=report)
    _save(model, decoder, source, out)
    report.note(f"saved {sum(p.numel() for p in model.parameters()):,} weights to {out}")
    recipe.finish(objective, out, prompts, report)
    return result


def _pairs(recipe: DecoderRecipe, prompts: Sequence[Prompt]) -> tuple[list[Pair], list[Pair], dict[Pair, str]]:
    """Return the pairs that are held back, those to train on, in a random order, and the task of each pair."""
    pairs = pairs_of(prompts)
    tasks = {
        pair: prompt.task or "" for number, prompt in enumerate(prompts, 1) for pair in pairs_of_row(prompt, number)
    }
    _require_tasks(recipe, set(tasks.values()))
    groups = shuffled_groups(pairs, recipe.seed)
    pairs = [pair for group in groups for pair in group]
    num_held_back = len(take_groups(groups, recipe.held_back))
    if not groups:
        raise ConfigError(f"{len(pairs)} rows leave nothing to train on with held_back {recipe.held_back}; lower it")
    variation = Variation(recipe.variation, pairs)
    respelled = [variation.respelled(pair) for pair in pairs]
    named = {new: tasks[pair] for new, pair in zip(respelled, pairs, strict=True)}
    return respelled[:num_held_back], respelled[num_held_back:], named


def _tokenizer(
    recipe: DecoderRecipe, pairs: Sequence[Pair], out: Path, base: str | Path | None
) -> tuple[Tokenizer, Path]:
    """Return the base's tokenizer, or one trained on the pairs and kept for resumed runs; and its folder."""
    if base is not None:
        return load_tokenizer(base), resolve(base)
    assert recipe.shape is not None
    folder = own_tokenizer(out / "run", pairs, recipe.shape.hf_config(), recipe.shape.max_positions)
    return load_tokenizer(folder), folder


def _first_model(recipe: DecoderRecipe, tokenizer: Tokenizer, base: str | Path | None) -> Decoder:
    if recipe.shape is None:
        assert base is not None
        return _own(load_decoder(base))
    depth = recipe.stages[0].depth or recipe.shape.num_layers
    return start_decoder(recipe.shape, depth, tokenizer.pieces(), recipe.seed).to(torch.bfloat16)


def _own(model: Decoder) -> Decoder:
    """Copy the parameters, which are views of the checkpoint's file, so that they can be changed."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.requires_grad_(True)


def _batches(
    recipe: DecoderRecipe, rows: Rows, pairs: Sequence[Pair], tasks: Mapping[Pair, str], number: int
) -> Batches[Row, TokenBatch]:
    """Return the batches of a stage: some of its tasks' pairs, varied anew in each epoch, and copying exercises."""
    stage = recipe.stages[number]
    config = recipe.variation if stage.invent is None else replace(recipe.variation, invent=stage.invent)
    variation = Variation(config, pairs)

    def draw(rng: random.Random, epoch: int) -> list[Pair]:
        chosen = [pair for pair in pairs if rng.random() < stage.shares.get(tasks[pair], 1.0)]
        drawn = [variation.drawn(pair, rng) for pair in chosen]
        if number == 0 and epoch == 0:
            drawn += copying_exercises(pairs, recipe.exercises, variation, rng)
        return drawn

    return Batches(draw, rows, tokens_per_batch=recipe.tokens_per_batch, seed=recipe.seed + number)


def _require_tasks(recipe: DecoderRecipe, tasks: set[str]) -> None:
    """Refuse a stage that names a task of which there are no rows."""
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
    """Write weights, configuration and tokenizer, either all of them or nothing."""
    config: dict[str, Any] = read_json(source / "config.json")
    with staged_checkpoint(out) as folder:
        write_decoder(model, folder, config)
        copy_text_files(source, folder)
        if not (folder / _DEFAULTS).exists():
            ends = {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
            text = json.dumps(ends | {"do_sample": False}, indent=2) + "\n"
            (folder / _DEFAULTS).write_text(text, encoding="utf-8")
