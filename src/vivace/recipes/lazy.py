"""``vivace train lazy``: what a model's pruned prompts are scored with, learnt on prompts of the user in minutes."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch

from vivace.checkpoint.adapters import base_hash, save_adapter
from vivace.checkpoint.tokenizer import Tokenizer
from vivace.engine import Engine
from vivace.errors import ConfigError
from vivace.evaluate.quality import contains
from vivace.prefill.learned import (
    KIND,
    OPENING,
    RANK,
    WINDOW,
    HeadsBelow,
    LazyConfig,
    LazyPlan,
    Maps,
    tensors_of,
)
from vivace.prefill.lessons import (
    Example,
    Lesson,
    choose_heads,
    kept_share,
    observe,
    residuals,
    target_in,
    target_of,
    teach,
    teachers_of,
)
from vivace.prefill.passages import divide, largest
from vivace.prefill.pruned import check_model
from vivace.prompts import Prompt
from vivace.train.report import Report

DEPTHS = (0.07, 0.13, 0.2, 0.3)
"""Shares of the layers below which maps are taught."""
DEEPEST_HEADS = 0.55
"""Heads are chosen up to this share of the layers."""
KEEP = 0.3
"""Share of the tokens at which scores are compared while they are learnt."""
READING = 0.6
"""Share of the time, where one is given, in which prompts are read."""
HELD_BACK = 5
"""One prompt in so many is only measured on."""


@dataclass(frozen=True)
class LazyRecipe:
    """How the scores of a model are learnt."""

    rank: int = RANK
    window: int = WINDOW
    opening: int = OPENING
    """Tokens at the beginning of a prompt that ask, as the ``window`` at its end does; 0 where no question is there."""
    prompts: int = 200
    """Prompts at most that are read."""
    whole: int = 40
    """Prompts that are read to the top, from which heads are chosen. A later one is read only up to the highest point
    where a passage of it has its reference in its own words."""
    points: tuple[int, ...] = ()
    """Layers behind which maps are taught; left out, some low ones of the model."""
    longest: int = 2048
    """Longer prompts are left out."""
    steps: int = 120
    answer_tokens: int = 16
    """Tokens of an answer at most that are looked at."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rank", "window", "prompts", "whole", "longest", "steps", "answer_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.opening < 0:
            raise ConfigError(f"opening must be at least 0, found {self.opening}")


@dataclass(frozen=True)
class Learnt:
    """How much of what answers need a score keeps on held-back prompts, where it keeps ``KEEP`` of the tokens."""

    score: str
    point: int
    share: float


def learn(
    recipe: LazyRecipe,
    engine: Engine,
    prompts: Sequence[Prompt],
    out: Path,
    report: Report,
    minutes: float | None = None,
) -> list[Learnt]:
    """Read prompts, learn both scores at several points, and write them.

    Args:
        recipe: how.
        engine: the model.
        prompts: long ones, like those that will be pruned; where one has no reference the model answers it.
        out: folder to write.
        report: told how it goes.
        minutes: for everything; None takes the time it takes.

    Returns:
        How good the scores are, the best first.

    Raises:
        ConfigError: there are too few prompts.
        UnsupportedError: prompts of this model cannot be pruned.
    """
    check_model(engine.model, KIND)
    ends = None if minutes is None else time.monotonic() + 60 * minutes
    num_layers = engine.model.config.num_layers
    points = points_of(recipe, num_layers)
    num_asked = max(1, min(num_layers - 1, round(DEEPEST_HEADS * num_layers)))
    begun = time.monotonic()
    until = None if ends is None else begun + READING * (ends - begun)
    breaks = line_ends(engine.tokenizer)
    read = _lessons(recipe, engine, prompts, points, num_asked, breaks, report, until)
    teachers = teachers_of([each.noted for each in read if each.noted is not None])
    report.note(
        "answers read the prompt with heads " + ", ".join(f"{head} of layer {layer}" for layer, head in teachers)
    )
    wants = [(each, each.target(teachers)) for each in read]
    pupil = _Pupil.of(recipe, [(each, want) for each, want in wants if want is not None])
    heads, found = pupil.choose(range(1, num_asked + 1))
    maps = dict[int, Maps]()
    for done, point in enumerate(points):
        stop = None if ends is None else time.monotonic() + (ends - time.monotonic()) / (len(points) - done)
        maps[point], share = pupil.teach(point, stop)
        found.append(Learnt("taught", point, share))
        report.note(f"taught behind layer {point}: {KEEP:.0%} of the tokens keep {share:.0%} of what is read")
    found.sort(key=lambda each: (-each.share, each.point))
    best = max((each for each in found if each.score == "taught"), key=lambda each: each.share)
    config = LazyConfig(recipe.window, recipe.opening, recipe.rank, breaks, tuple(points), tuple(heads))
    plan = LazyPlan(f"{best.point}:{KEEP}:taught")
    save_adapter(out, KIND, base_hash(engine.folder), asdict(plan), asdict(config), tensors_of(maps))
    return found


def points_of(recipe: LazyRecipe, num_layers: int) -> list[int]:
    """Return behind how many layers maps are taught, in rising order.

    Raises:
        ConfigError: the recipe names a layer that is not below another one.
    """
    for point in recipe.points:
        if not 1 <= point < num_layers:
            raise ConfigError(f"points has layer {point}; it must be from 1 to {num_layers - 1}")
    if recipe.points:
        return sorted(set(recipe.points))
    return sorted({min(num_layers - 1, max(1, round(depth * num_layers))) for depth in DEPTHS})


def line_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens of a vocabulary that hold the end of a line."""
    return tuple(sorted(index for index in tokenizer.pieces() if "\n" in tokenizer.decode([index])))


@dataclass(frozen=True, eq=False)
class _Read:
    """A prompt that was read."""

    hidden: Mapping[int, torch.Tensor]
    """By point, residuals (n, E) of its tokens there."""
    lengths: tuple[int, ...]
    """Of its parts."""
    named: torch.Tensor
    """(n,) whether a token's passage has a reference in its own words."""
    noted: Lesson | None
    """What all layers read; None where it was read up to the highest point only."""

    def target(self, teachers: Sequence[tuple[int, int]]) -> torch.Tensor | None:
        """Return how much of what the answer needs lies at each token (n,); None where that is not known."""
        if self.noted is None:
            return target_in(self.named, self.lengths)
        return target_of(self.noted, teachers, self.lengths, self.named)


def _named(
    tokenizer: Tokenizer, tokens: Sequence[int], lengths: Sequence[int], references: Sequence[str]
) -> torch.Tensor:
    """Return whether each token (n,) is in a passage that contains a reference; the ends are in none."""
    named = torch.zeros(len(tokens), dtype=torch.bool)
    edges = list(accumulate(lengths))
    for start, stop in pairwise(edges[:-1]):
        named[start:stop] = contains(tokenizer.decode(tokens[start:stop]), references)
    return named


def _lessons(
    recipe: LazyRecipe,
    engine: Engine,
    prompts: Sequence[Prompt],
    points: Sequence[int],
    num_asked: int,
    breaks: Collection[int],
    report: Report,
    ends: float | None,
) -> list[_Read]:
    """Read the prompts that are long enough to be pruned and no longer than the recipe says."""
    lessons: list[_Read] = []
    least, num_asked_for = max(4 * recipe.window, 2 * (recipe.window + recipe.opening)), 0
    for row in prompts:
        tokens = list(engine.tokenizer.encode_prompt(row.request, raw=False))
        if not least <= len(tokens) <= recipe.longest:
            continue
        num_asked_for += 1
        lengths = divide(tokens, breaks, recipe.window, recipe.opening)
        named = _named(engine.tokenizer, tokens, lengths, row.references)
        if named.any() and len(lessons) >= recipe.whole:
            lessons.append(_Read(residuals(engine.model, tokens, points), lengths, named, None))
        elif answer := _answer(recipe, engine, tokens, row.references):
            noted = observe(engine.model, tokens, answer, points, recipe.window, num_asked)
            lessons.append(_Read(noted.hidden, lengths, named, noted))
        if len(lessons) % 20 == 0:
            report.note(f"{len(lessons)} prompts are read")
        if len(lessons) == recipe.prompts or (ends is not None and time.monotonic() > ends):
            break
    if len(lessons) < 4:
        raise ConfigError(
            f"{num_asked_for} of {len(prompts)} prompts have {least} to {recipe.longest} tokens; at least 4 are "
            "needed, such as those of: vivace data multidoc SRC OUT"
        )
    return lessons


def _answer(recipe: LazyRecipe, engine: Engine, tokens: list[int], references: Sequence[str]) -> list[int]:
    """Return the first tokens of the first reference, or of what the model answers where there is none."""
    if references:
        return list(engine.tokenizer.encode(references[0], special=False))[: recipe.answer_tokens]
    settings: Mapping[str, Any] = {"method": "plain", "do_sample": False}
    return list(engine.generate(tokens, max_new_tokens=recipe.answer_tokens, **settings)[0].token_ids)


Pair = tuple[_Read, torch.Tensor]
"""A prompt as the model read it, and how much of what its answer needs lies at each token."""


@dataclass(frozen=True)
class _Pupil:
    """Learns scores on some prompts and measures them on others."""

    recipe: LazyRecipe
    train: Sequence[Pair]
    held: Sequence[Pair]

    @staticmethod
    def of(recipe: LazyRecipe, pairs: Sequence[Pair]) -> _Pupil:
        """Hold back every fifth prompt.

        Raises:
            ConfigError: fewer than two are left.
        """
        train = [pair for place, pair in enumerate(pairs) if place % HELD_BACK]
        if len(train) < 2:
            raise ConfigError(f"{len(pairs)} of the prompts have an answer that reads them; give more prompts")
        return _Pupil(recipe, train, pairs[::HELD_BACK])

    def choose(self, points: Iterable[int]) -> tuple[list[HeadsBelow], list[Learnt]]:
        """Choose heads below each layer whose attention shows what answers read; return them, and how good they are."""
        heads, found = list[HeadsBelow](), list[Learnt]()
        train = [(read.noted.asked, want, read.lengths) for read, want in self.train if read.noted is not None]
        held = [(read.noted.asked, want, read.lengths) for read, want in self.held if read.noted is not None]
        if not train or not held:
            return heads, found
        for point in points:
            asked = [each[point - 1] for each, _, _ in train]
            chosen, _ = choose_heads(asked, [want for _, want, _ in train], KEEP, [parts for _, _, parts in train])
            if chosen:
                masses = [largest(each[point - 1][chosen].float().sum(0), parts) for each, _, parts in held]
                heads.append(HeadsBelow(point, tuple(chosen)))
                found.append(Learnt("heads", point, _mean_share(masses, [(want, parts) for _, want, parts in held])))
        return heads, found

    def teach(self, point: int, stop: float | None) -> tuple[Maps, float]:
        """Teach maps behind a layer until a point of the monotonic clock; return them, and the share that they keep."""
        recipe = self.recipe
        maps = teach(
            [Example(read.hidden[point], want, read.lengths) for read, want in self.train],
            rank=recipe.rank,
            steps=recipe.steps,
            seed=recipe.seed,
            opening=recipe.opening > 0,
            stop=lambda: stop is not None and time.monotonic() > stop,
        )
        scores = [maps.scores(read.hidden[point], read.lengths) for read, _ in self.held]
        return maps, _mean_share(scores, [(want, read.lengths) for read, want in self.held])


def _mean_share(scores: Sequence[torch.Tensor], held: Sequence[tuple[torch.Tensor, tuple[int, ...]]]) -> float:
    """Return how much of what is wanted goes on, the mean over held-back prompts, given the lengths of their parts."""
    shares = [kept_share(own, want, KEEP, parts) for own, (want, parts) in zip(scores, held, strict=True)]
    return sum(shares) / len(shares)
