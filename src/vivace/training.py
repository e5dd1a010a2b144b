"""Training put together: a recipe, a base and prompt files in, an adapter that is ready to decode out.

The loop (``train/``) knows no technique and a technique (``multirate/``) knows no loop; they meet here. A
run lives in ``<out>/run``: snapshots, regenerated answers, and everything else a killed run needs to go on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from vivace.checkpoint.adapters import base_hash, save_adapter
from vivace.core.model import Decoder
from vivace.core.seams import Objective
from vivace.decode.depth import Missing
from vivace.decode.shallow import DraftPlan
from vivace.engine import Engine, load
from vivace.errors import ConfigError, UnsupportedError
from vivace.evaluate.contest import Question, Run, hold, summarise
from vivace.evaluate.entrants import Entrant
from vivace.files import write_text
from vivace.multirate.config import MultirateConfig
from vivace.multirate.dynamic import DynamicConfig, DynamicPlan, DynamicWeights
from vivace.multirate.exits import GatesLoss, GatesObjective, RouterLesson, Trails, fit_router, trails_of
from vivace.multirate.objective import MultirateLoss, MultirateObjective
from vivace.multirate.reach import copying_layers
from vivace.multirate.residual import Accelerator
from vivace.multirate.thresholds import QUALITIES, calibrate, exit_shares, score_all
from vivace.multistream.config import MultistreamConfig, StreamPlan
from vivace.multistream.objective import MultistreamLoss, MultistreamObjective
from vivace.multistream.streams import Streams
from vivace.prompts import Prompt
from vivace.train.config import LoopConfig
from vivace.train.data import Batches, Rows, collate, grouped, pairs_of, texts_of
from vivace.train.loop import Course, Lessons, fit
from vivace.train.memory import estimate_memory, require_memory
from vivace.train.optim import Optimiser, OptimiserConfig
from vivace.train.report import Report
from vivace.train.variation import Pair

PROBED = 8
"""Held-back batches in which layers that copy are looked for."""
NUM_MEASURED = 24
"""Held-back prompts that the trained drafter is timed on."""


@dataclass(frozen=True)
class AdapterRecipe:
    """How to train an adapter on a frozen base."""

    kind: Literal["multirate"]
    loop: LoopConfig
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    adapter: MultirateConfig = field(default_factory=MultirateConfig)
    find_reach: int = 0
    """Layers to find for ``adapter.reach`` where it names none: those that copy; 0 leaves it empty."""
    loss: MultirateLoss = field(default_factory=MultirateLoss)
    plan: DraftPlan = field(default_factory=DraftPlan)
    """Shape of the draft, saved with the weights."""
    tokens_per_batch: int = 4096
    longest: int = 512
    """Rows with more tokens are left out."""
    held_back: int = 256
    """Rows that choose the best weights and time the result."""
    regenerate: int = 0
    """Prompts whose answers the base writes anew first: it will draft for what it says itself."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.held_back < 1 or self.regenerate < 0 or self.longest < 8:
            raise ConfigError(
                f"held_back must be >= 1, regenerate >= 0 and longest >= 8, found {self.held_back}, "
                f"{self.regenerate} and {self.longest}"
            )


@dataclass(frozen=True)
class ExitRecipe:
    """How to train gates and the router that opens them on a frozen base."""

    kind: Literal["dynamic"]
    loop: LoopConfig
    """Of the gates."""
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    lesson: RouterLesson = field(default_factory=RouterLesson)
    """Of the router, after them."""
    adapter: DynamicConfig = field(default_factory=DynamicConfig)
    loss: GatesLoss = field(default_factory=GatesLoss)
    missing: Missing = "deferred"
    """What stands for the entries above an exit when decoding: ``deferred``, ``propagate`` or ``mask``."""
    max_late: int = 8
    """Tokens of a sequence that may wait for their upper layers."""
    tokens_per_batch: int = 4096
    longest: int = 512
    """Rows with more tokens are left out."""
    held_back: int = 256
    """Rows that choose the best weights, set the thresholds and time the result."""
    router_rows: int = 2000
    """Further rows that only the router learns from."""
    regenerate: int = 0
    """Prompts whose answers the base writes anew first: it will leave early in what it says itself."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.held_back < 1 or self.regenerate < 0 or self.longest < 8 or self.router_rows < 1:
            raise ConfigError(
                f"held_back and router_rows must be >= 1, regenerate >= 0 and longest >= 8, found {self.held_back}, "
                f"{self.router_rows}, {self.regenerate} and {self.longest}"
            )


@dataclass(frozen=True)
class StreamRecipe:
    """How to train speculative streams on a frozen base."""

    kind: Literal["multistream"]
    loop: LoopConfig
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    adapter: MultistreamConfig = field(default_factory=MultistreamConfig)
    loss: MultistreamLoss = field(default_factory=MultistreamLoss)
    plan: StreamPlan = field(default_factory=StreamPlan)
    """Shape of the draft, saved with the weights."""
    tokens_per_batch: int = 2048
    longest: int = 512
    """Rows with more tokens are left out."""
    held_back: int = 256
    """Rows that choose the best weights and time the result."""
    regenerate: int = 0
    """Prompts whose answers the base writes anew first: it will draft for what it says itself."""
    seed: int = 0

    def __post_init__(self) -> None:
        self.plan.check_fits(self.adapter)
        if self.held_back < 1 or self.regenerate < 0 or self.longest < 8:
            raise ConfigError(
                f"held_back must be >= 1, regenerate >= 0 and longest >= 8, found {self.held_back}, "
                f"{self.regenerate} and {self.longest}"
            )


AnyRecipe = AdapterRecipe | ExitRecipe | StreamRecipe


def train_adapter(
    recipe: AdapterRecipe, engine: Engine, prompts: Sequence[Prompt], out: Path, report: Report
) -> list[Run]:
    """Train, save and time an accelerator.

    Args:
        recipe: what to train and how.
        engine: the frozen base, with torch's kernels.
        prompts: rows with references (those that are regenerated need none).
        out: folder of the adapter; a run that was killed there goes on.
        report: hears about it.

    Returns:
        Plain decoding and the new method on held-back prompts.

    Raises:
        ConfigError: too few rows, a recipe that does not fit the base, or ``out`` is the base's own folder.
        CapacityError: not enough memory.
        UnsupportedError: the base's weights are packed.
    """
    held_back, learnt = _split(recipe, engine, prompts, out, report)
    lessons = _lessons(recipe, engine, learnt, held_back)
    accelerator = _new_accelerator(recipe, engine.model, lessons, report)
    objective = MultirateObjective(accelerator, recipe.loss)
    _check_memory(recipe, engine, objective, recipe.adapter.gate, report)
    base = base_hash(engine.folder)
    course = Course(recipe.loop, recipe.optimiser, recipe.seed, _plan_text(recipe, base, held_back, learnt))
    fit(engine.model, objective, lessons, course, folder=out / "run", report=report)
    tensors = {name: value.to(engine.model.dtype) for name, value in accelerator.tensors().items()}
    save_adapter(out, recipe.kind, base, asdict(recipe.plan), asdict(accelerator.config), tensors)
    report.note(f"saved {sum(t.numel() for t in tensors.values()):,} weights to {out}")
    return time_adapter(engine, recipe.kind, out, [prompt for prompt, _ in held_back[:NUM_MEASURED]])


def _new_accelerator(recipe: AdapterRecipe, model: Decoder, lessons: Lessons, report: Report) -> Accelerator:
    """Untrained; its deep layers are found here unless the recipe names them."""
    config = recipe.adapter
    if recipe.find_reach and not config.reach:
        found = copying_layers(model, lessons.held_back[:PROBED], config.gate, recipe.find_reach)
        report.note(f"layers that copy, and that will be read while drafting: {', '.join(map(str, found))}")
        config = replace(config, reach=found)
    accelerator = Accelerator(config, model.config)
    for reach in accelerator.reaches():
        reach.start_from(model)
    return accelerator


def train_streams(
    recipe: StreamRecipe, engine: Engine, prompts: Sequence[Prompt], out: Path, report: Report
) -> list[Run]:
    """Train, save and time speculative streams.

    Args:
        recipe: what to train and how.
        engine: the frozen base, with torch's kernels.
        prompts: rows with references (those that are regenerated need none).
        out: folder of the adapter; a run that was killed there goes on.
        report: hears about it.

    Returns:
        Plain decoding and the new method on held-back prompts.

    Raises:
        ConfigError: too few rows, a recipe that does not fit the base, or ``out`` is the base's own folder.
        CapacityError: not enough memory.
        UnsupportedError: the base's weights are packed.
    """
    held_back, learnt = _split(recipe, engine, prompts, out, report)
    torch.manual_seed(recipe.seed)
    streams = Streams(recipe.adapter, engine.model.config)
    objective = MultistreamObjective(streams, recipe.loss)
    depth = (engine.model.config.num_layers - recipe.adapter.insertion) * recipe.adapter.streams
    _check_memory(recipe, engine, objective, depth, report)
    base = base_hash(engine.folder)
    course = Course(recipe.loop, recipe.optimiser, recipe.seed, _plan_text(recipe, base, held_back, learnt))
    fit(engine.model, objective, _lessons(recipe, engine, learnt, held_back), course, folder=out / "run", report=report)
    tensors = {name: value.to(engine.model.dtype) for name, value in streams.tensors().items()}
    save_adapter(out, recipe.kind, base, asdict(recipe.plan), asdict(recipe.adapter), tensors)
    own = recipe.adapter.num_paper_parameters(engine.model.config.width)
    count = sum(t.numel() for t in tensors.values())
    report.note(f"saved {own:,} weights of embeddings and pruner and {count - own:,} of adapters to {out}")
    return time_adapter(engine, recipe.kind, out, [prompt for prompt, _ in held_back[:NUM_MEASURED]])


def train_exits(recipe: ExitRecipe, engine: Engine, prompts: Sequence[Prompt], out: Path, report: Report) -> list[Run]:
    """Train gates, then their router, set the thresholds, save and time dynamic depth.

    Args:
        recipe: what to train and how.
        engine: the frozen base, with torch's kernels.
        prompts: rows with references (those that are regenerated need none).
        out: folder of the adapter; a run that was killed there goes on.
        report: hears about it.

    Returns:
        Plain decoding and the new method on held-back prompts.

    Raises:
        ConfigError: too few rows, a recipe that does not fit the base, or ``out`` is the base's own folder.
        CapacityError: not enough memory.
        UnsupportedError: the base's weights are packed.
    """
    held_back, learnt = _split(recipe, engine, prompts, out, report)
    asked, learnt = learnt[: recipe.router_rows], learnt[recipe.router_rows :]
    if not learnt:
        raise ConfigError(f"{len(asked)} rows for a router of {recipe.router_rows} leave the gates none; lower it")
    torch.manual_seed(recipe.seed)
    weights = DynamicWeights(recipe.adapter, engine.model.config)
    objective = GatesObjective(weights.gates, recipe.loss)
    _check_memory(recipe, engine, objective, recipe.adapter.gates.layers[-1], report)
    base = base_hash(engine.folder)
    course = Course(recipe.loop, recipe.optimiser, recipe.seed, _plan_text(recipe, base, held_back, learnt))
    lessons = _lessons(recipe, engine, learnt, held_back)
    fit(engine.model, objective, lessons, course, folder=out / "run", report=report)
    weights.gates.to(engine.model.dtype)  # the router judges what will decode
    trails = _trails(recipe, engine, weights, asked)
    report.note(f"the router learns from {trails.num_positions} positions")
    fit_router(engine.model, weights.router, trails, recipe.lesson, seed=recipe.seed)
    tensors = {name: value.to(engine.model.dtype) for name, value in weights.tensors().items()}
    weights.load(tensors)  # thresholds belong to the weights as they are stored
    plan = _calibrated(recipe, engine, weights, held_back, report)
    save_adapter(out, recipe.kind, base, asdict(plan), asdict(recipe.adapter), tensors)
    report.note(f"saved {sum(t.numel() for t in tensors.values()):,} weights to {out}")
    return time_adapter(engine, recipe.kind, out, [prompt for prompt, _ in held_back[:NUM_MEASURED]])


def _trails(recipe: ExitRecipe, engine: Engine, weights: DynamicWeights, pairs: Sequence[Pair]) -> Trails:
    """What the router sees of some rows."""
    groups = grouped(Rows(engine.tokenizer, recipe.longest).encode(pairs), recipe.tokens_per_batch)
    router = recipe.adapter.router
    return Trails.join([trails_of(engine.model, weights.gates, router, collate(group)) for group in groups])


def _calibrated(
    recipe: ExitRecipe, engine: Engine, weights: DynamicWeights, held_back: Sequence[Pair], report: Report
) -> DynamicPlan:
    """Thresholds for every stated agreement; says how many tokens would leave."""
    scores = score_all(engine.model, weights.router, _trails(recipe, engine, weights, held_back))
    worthwhile = recipe.adapter.gates.worthwhile(engine.model.config.num_layers)
    plans = tuple(calibrate(scores, quality, worthwhile=worthwhile) for quality in QUALITIES)
    for plan in plans:
        shares = [f"{share:.0%}" for share in exit_shares(scores, plan)]
        report.note(f"at agreement {plan.quality:g}: {', '.join(shares)} of the tokens leave at the gates")
    return DynamicPlan(plans, recipe.missing, recipe.max_late)


def time_adapter(engine: Engine, method: str, folder: Path, prompts: Sequence[str]) -> list[Run]:
    """Plain decoding beside a method with the adapter in ``folder``, by the decoding code and kernels themselves."""
    ready = _as_it_decodes(engine, {method: folder})
    questions = [Question(prompt, tuple(engine.tokenizer.encode_prompt(prompt))) for prompt in prompts]
    entrants = [Entrant(name, ready, max_new_tokens=64) for name in ("plain", method)]
    return summarise(hold(entrants, questions, repeats=1), "plain")


def _split(
    recipe: AnyRecipe, engine: Engine, prompts: Sequence[Prompt], out: Path, report: Report
) -> tuple[list[Pair], list[Pair]]:
    """Rows held back, and rows to learn from."""
    if out.resolve() == engine.folder.resolve():
        raise ConfigError(f"{out} is the model itself; its adapter belongs into {out / 'adapters' / recipe.kind}")
    if engine.kernels.body is not None:
        raise UnsupportedError("packed weights cannot be trained on; load the model with kernels='torch'")
    pairs = _pairs(recipe, engine, prompts, out, report)
    random.Random(recipe.seed).shuffle(pairs)
    if len(pairs) <= recipe.held_back:
        raise ConfigError(f"{len(pairs)} rows leave nothing to train on with held_back {recipe.held_back}; lower it")
    return pairs[: recipe.held_back], pairs[recipe.held_back :]


def _lessons(recipe: AnyRecipe, engine: Engine, learnt: Sequence[Pair], held_back: Sequence[Pair]) -> Lessons:
    rows = Rows(engine.tokenizer, recipe.longest)
    return Lessons(
        Batches(lambda rng, number: learnt, rows, tokens_per_batch=recipe.tokens_per_batch, seed=recipe.seed),
        [collate(group) for group in grouped(rows.encode(held_back), recipe.tokens_per_batch)],
    )


def _plan_text(recipe: AnyRecipe, base: str, held_back: Sequence[Pair], learnt: Sequence[Pair]) -> str:
    """What a resumed run must repeat."""
    rows = len(held_back) + len(learnt)
    return json.dumps({"recipe": asdict(recipe), "base": base, "rows": rows}, sort_keys=True)


def _pairs(recipe: AnyRecipe, engine: Engine, prompts: Sequence[Prompt], out: Path, report: Report) -> list[Pair]:
    if not recipe.regenerate:
        return pairs_of(prompts)
    texts = sorted(set(texts_of(prompts)))
    random.Random(recipe.seed).shuffle(texts)
    return regenerated(
        _as_it_decodes(engine), texts[: recipe.regenerate], out / "run" / "regenerated.jsonl", report.note
    )


def _as_it_decodes(engine: Engine, adapters: Mapping[str, Path] | None = None) -> Engine:
    """The base with the kernels that decode fastest here; its own, for learning, are PyTorch's."""
    dtype = str(engine.model.dtype).removeprefix("torch.")
    return load(engine.folder, device=str(engine.model.device), dtype=dtype, adapters=adapters)


def regenerated(engine: Engine, prompts: Sequence[str], path: Path, note: Callable[[str], None]) -> list[Pair]:
    """The base's own greedy answers, appended to a file so that a killed run keeps what it has.

    Args:
        engine: the base.
        prompts: texts, in a fixed order.
        path: one JSON line per answer; a last line that was cut off is written again.
        note: told how far it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    done = _complete_lines(path)
    if done:
        note(f"{len(done)} of {len(prompts)} answers were regenerated before")
    with path.open("a", encoding="utf-8") as file:
        for first in range(len(done), len(prompts), 64):
            asked = prompts[first : first + 64]
            for prompt, result in zip(asked, _answers(engine, asked), strict=True):
                done.append({"prompt": prompt, "reference": result})
                file.write(json.dumps(done[-1], ensure_ascii=False) + "\n")
            file.flush()
            note(f"regenerated {len(done)} of {len(prompts)} answers")
    return [(row["prompt"], row["reference"]) for row in done[: len(prompts)] if row["reference"]]


def _answers(engine: Engine, prompts: Sequence[str]) -> list[str]:
    results = engine.generate(list(prompts), method="plain", do_sample=False, max_new_tokens=96, logprobs=False)
    return [result.text if result.finish_reason == "stop" else "" for result in results]


def _complete_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a file whose writer may have been killed; an unfinished last line is cut off."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        write_text(path, whole)
    return [json.loads(line) for line in whole.splitlines()]


def _check_memory(recipe: AnyRecipe, engine: Engine, objective: Objective, top: int, report: Report) -> None:
    """Refuse what would not fit; layers above the last gate, ``top``, run without gradients."""
    optimiser = Optimiser(objective.groups(), recipe.optimiser)
    weights = [*engine.model.parameters(), *optimiser.params]
    below_gate = replace(engine.model.config, num_layers=top)
    need = estimate_memory(below_gate, weights, optimiser.params, optimiser.num_bytes(), recipe.tokens_per_batch)
    report.note(f"memory: {need}")
    require_memory(need, engine.model.device)
