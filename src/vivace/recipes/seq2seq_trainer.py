"""The trainer of encoder-decoder models: from pairs to a folder that transformers reads.

While it runs, ``<out>/run`` holds the tokenizer (of a model from scratch) and snapshots; the same call goes on from
there after it was killed, with the same steps.
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
from vivace.checkpoint.generation import load_generation_defaults
from vivace.checkpoint.load import choose_device, load_decoder
from vivace.checkpoint.save import copy_text_files, staged_checkpoint, write_decoder
from vivace.checkpoint.tokenizer import Tokenizer, load_tokenizer
from vivace.core.model import Decoder
from vivace.errors import ConfigError, UnsupportedError
from vivace.prompts import Prompt
from vivace.recipes.own_tokenizer import own_tokenizer
from vivace.recipes.seq2seq import Seq2SeqRecipe
from vivace.recipes.seq2seq_start import start_t5
from vivace.train.batches import DataSplit
from vivace.train.config import TrainConfig
from vivace.train.data import Batches, pairs_of, shuffled_groups, take_groups, texts_of
from vivace.train.denoising import Denoising
from vivace.train.loop import TrainResult, fit
from vivace.train.memory import estimate_memory, require_memory
from vivace.train.optim import Optimiser, OptimiserConfig
from vivace.train.report import Report
from vivace.train.source_data import SourceBatch, SourceRow, SourceRows
from vivace.train.teacher_forcing import TeacherForcing
from vivace.train.variation import Pair, Variation, copying_exercises, digest_of

_DEFAULTS = "generation_config.json"
_TOKENIZER = "tokenizer_config.json"


def train_seq2seq(
    recipe: Seq2SeqRecipe,
    prompts: Sequence[Prompt],
    out: Path,
    report: Report,
    base: str | Path | None = None,
    device: str | torch.device = "auto",
) -> TrainResult:
    """Train and save an encoder-decoder model.

    Args:
        recipe: how.
        prompts: sources with references, which are the texts to write.
        out: folder of the checkpoint; a run that was killed is continued there.
        report: receives progress.
        base: checkpoint to go on from; without, a T5 of the recipe's shape.
        device: where it is trained, as for ``choose_device``.

    Raises:
        ConfigError: there are too few rows, neither a shape nor a base, or ``out`` is the base.
        UnsupportedError: the base has no encoder, or there is no such device.
        CapacityError: the training needs more memory than is free, or all texts are too long.
        MismatchError: ``out`` holds a run with another recipe or data.
    """
    place = choose_device(device)
    if base is None and recipe.shape is None:
        raise ConfigError("give a base (--model), or a recipe with the shape of a model to train from scratch")
    if base is not None and resolve(base).resolve() == out.resolve():
        raise ConfigError(f"{out} is the base itself; name another folder for what comes of it")
    if base is None and recipe.languages:
        raise ConfigError("languages are for a base whose tokenizer names them; leave them out, or give --model")
    reserved, kept = _pairs(recipe, prompts)
    pairs = [*reserved, *kept]
    tokenizer, source = _tokenizer(recipe, pairs, out, base)
    model = _first_model(recipe, tokenizer, base).to(place)
    start = load_generation_defaults(source).get("decoder_start_token_id")
    if start is None:
        raise ConfigError(f"{source} names no decoder_start_token_id, with which texts of this model begin; add it")
    rows = SourceRows(tokenizer, int(start), recipe.longest_source, recipe.longest, place)
    rows.note_left_out(pairs, report.note)
    held_back = rows.batches(reserved, recipe.tokens_per_batch)
    batches = _batches(recipe, rows, kept)
    known = {"recipe": asdict(recipe), "rows": len(pairs), "data": digest_of(pairs), "base": str(base or "")}
    plan = json.dumps(known, sort_keys=True)
    config = TrainConfig(recipe.loop, _rates(recipe, base), recipe.seed, plan)
    objective = TeacherForcing(model, smoothing=recipe.smoothing)
    _check_memory(recipe, model, objective, config.optimiser, report)
    result = fit(model, objective, DataSplit(batches, held_back), config, folder=out / "run", report=report)
    _save(model, source, out, _language_settings(tokenizer, recipe.languages))
    report.note(f"saved {sum(p.numel() for p in model.parameters()):,} weights to {out}")
    return result


def _pairs(recipe: Seq2SeqRecipe, prompts: Sequence[Prompt]) -> tuple[list[Pair], list[Pair]]:
    """Return the pairs that are held back and those to train on, in a random order of their sources.

    A source goes to one side with all its texts. A held-back source that is trained on with another text says little
    about new ones, so as many whole sources are held back as it takes to have ``recipe.held_back`` pairs or more.
    """
    texts_of(prompts)  # a source is one text
    pairs = pairs_of(prompts)
    variation = Variation(recipe.variation, pairs)
    groups = [[variation.respelled(pair) for pair in group] for group in shuffled_groups(pairs, recipe.seed)]
    num_sources = len(groups)
    held_back = take_groups(groups, recipe.held_back)
    if not groups:
        raise ConfigError(
            f"{len(pairs)} rows of {num_sources} sources leave nothing to train on with held_back "
            f"{recipe.held_back}; lower it"
        )
    return held_back, [pair for group in groups for pair in group]


def _tokenizer(
    recipe: Seq2SeqRecipe, pairs: Sequence[Pair], out: Path, base: str | Path | None
) -> tuple[Tokenizer, Path]:
    """Return the base's tokenizer, or one trained on the pairs and kept for resumed runs; and its folder."""
    if base is not None:
        tokenizer = load_tokenizer(base)
        if recipe.languages:
            _speak(tokenizer, recipe.languages)
        return tokenizer, resolve(base)
    assert recipe.shape is not None
    folder = own_tokenizer(out / "run", pairs, recipe.shape.hf_config(), recipe.longest_source, is_chat=False)
    return load_tokenizer(folder), folder


def _speak(tokenizer: Tokenizer, languages: Sequence[str]) -> None:
    """Let a tokenizer write sources and texts in two languages.

    Raises:
        ConfigError: it knows no languages, or not these.
    """
    inner = tokenizer.inner
    if not hasattr(inner, "src_lang"):
        raise ConfigError("the base's tokenizer knows no languages; leave out languages")
    try:
        inner.src_lang, inner.tgt_lang = languages
        marks = [*inner("")["input_ids"], *inner(text_target="")["input_ids"]]
    except KeyError as error:
        raise ConfigError(
            f"the base's tokenizer knows no language {error}; it spells them as eng_Latn or en"
        ) from error
    if inner.unk_token_id is not None and inner.unk_token_id in marks:
        raise ConfigError(f"the base's tokenizer knows one of the languages {', '.join(languages)} by another name")


def _first_model(recipe: Seq2SeqRecipe, tokenizer: Tokenizer, base: str | Path | None) -> Decoder:
    """Return the weights to begin with, which belong to nobody else.

    Raises:
        UnsupportedError: the base has no encoder.
    """
    if base is None:
        assert recipe.shape is not None
        return start_t5(recipe.shape, tokenizer.pieces(), recipe.seed).to(torch.bfloat16)
    model = load_decoder(base, reads_sources=True)
    if model.encoder is None:
        raise UnsupportedError(
            f"{base} is a decoder without an encoder; `vivace train finetune --model {base}` is for it"
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.requires_grad_(True)


def _rates(recipe: Seq2SeqRecipe, base: str | Path | None) -> OptimiserConfig:
    """Return the recipe's rates, lowered where a base is trained on."""
    factor, rates = (1.0 if base is None else recipe.base_rate), recipe.optimiser
    return replace(rates, muon_rate=rates.muon_rate * factor, adamw_rate=rates.adamw_rate * factor)


def _batches(recipe: Seq2SeqRecipe, rows: SourceRows, pairs: Sequence[Pair]) -> Batches[SourceRow, SourceBatch]:
    """Return the batches: the pairs, varied anew in each epoch, in the first epochs with exercises and pieces."""
    variation = Variation(recipe.variation, pairs)
    denoising = Denoising(recipe.denoising, pairs)

    def draw(rng: random.Random, epoch: int) -> list[Pair]:
        drawn = [variation.drawn(pair, rng) for pair in pairs]
        if epoch == 0:
            drawn += copying_exercises(pairs, recipe.exercises, variation, rng)
        return drawn + denoising.drawn(rng, epoch)

    return Batches(draw, rows, tokens_per_batch=recipe.tokens_per_batch, seed=recipe.seed)


def _check_memory(
    recipe: Seq2SeqRecipe, model: Decoder, objective: TeacherForcing, rates: OptimiserConfig, report: Report
) -> None:
    """Refuse a run that does not fit; every token is counted as if it passed the layers of both stacks."""
    assert model.encoder is not None
    weights = list(model.parameters())
    held = Optimiser(objective.groups(), rates).num_bytes()
    both = replace(model.config, num_layers=model.config.num_layers + model.encoder.config.num_layers)
    need = estimate_memory(both, weights, weights, held, recipe.tokens_per_batch)
    report.note(f"memory: {need}")
    require_memory(need, model.device)


def _language_settings(tokenizer: Tokenizer, languages: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a translator's ``tokenizer_config.json`` and ``generation_config.json`` say of its languages."""
    if not languages:
        return {}, {}
    marks = tokenizer.inner(text_target="")["input_ids"]  # the language of the text and its end, in most families
    begins = len(marks) == 2 and marks[-1] in tokenizer.eos_ids
    spoken = {"src_lang": languages[0], "tgt_lang": languages[1]}
    return spoken, {"forced_bos_token_id": int(marks[0])} if begins else {}


def _save(model: Decoder, source: Path, out: Path, languages: tuple[Mapping[str, Any], Mapping[str, Any]]) -> None:
    """Write weights, configuration and tokenizer, either all of them or nothing.

    Args:
        model: the trained model.
        source: folder of the configuration and the tokenizer.
        out: folder to write.
        languages: settings that change, of the tokenizer and of generation.
    """
    config: dict[str, Any] = read_json(source / "config.json")
    with staged_checkpoint(out) as folder:
        write_decoder(model, folder, config)
        copy_text_files(source, folder)
        if not (folder / _DEFAULTS).exists():
            names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
            settings = {name: config.get(name) for name in names} | {"do_sample": False}
            settings |= load_generation_defaults(source)  # a base may have them in its config.json
            (folder / _DEFAULTS).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        for name, changed in zip((_TOKENIZER, _DEFAULTS), languages, strict=True):
            if changed:
                settings = read_json(folder / name) if (folder / name).exists() else {}
                text = json.dumps(settings | dict(changed), indent=2, ensure_ascii=False) + "\n"
                (folder / name).unlink(missing_ok=True)  # it may be a link to the base's
                (folder / name).write_text(text, encoding="utf-8")
