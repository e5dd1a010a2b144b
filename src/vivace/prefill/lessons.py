"""Learning which tokens of a prompt an answer needs, from what the model itself reads while it writes the answer.

A prompt is read in full once and its answer is given. Then every head has read something for every token of the
answer. Heads that read the very token that is written next are the ones that find things (the retrieval score of Wu et
al. 2024, arXiv:2404.15574); what the few best of them read, passage by passage, is what a score at a low point has to
foretell. No passage is marked by hand; where the answer's own words stand in some passages, only those count, and a
prompt of which only that is known need not be read above the points (``residuals``). Two scores learn it
(``learned.py``): heads below a point are chosen, by how much of it they would keep, and maps of the residuals at a
point are taught by cross entropy, among the passages of all prompts of a batch: those of the others are read by nobody
who asks this question, so a few hundred prompts give many thousand examples (in-batch negatives, as in Karpukhin et al.
2020, arXiv:2004.04906).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from random import Random
from typing import Any

import torch
from torch import Tensor

from vivace.core.model import Decoder, Layer
from vivace.core.step import Step
from vivace.prefill.learned import Maps, normed
from vivace.prefill.passages import by_passages, largest, sums

TEACHERS = 5
"""Heads from which is learnt."""
MOST_HEADS = 3
"""Heads that are asked at a point at most."""
CHUNK = 256
LEAST = 1e-3
"""Weight below which heads have read nothing."""
_BATCH, _RATE, _DROPOUT, _DECAY, _WARMUP = 12, 2e-3, 0.1, 0.1, 20


@dataclass(frozen=True, eq=False)
class Lesson:
    """What a model read of one prompt."""

    hidden: dict[int, Tensor]
    """By point, residuals (n, E) of the prompt's tokens there."""
    reads: Tensor
    """(L, H, n) mean weight with which the tokens that write the answer read those of the prompt."""
    copies: Tensor
    """(L, H) mean weight with which they read tokens that are the one to be written."""
    asked: Tensor
    """(l, H, n) weight with which the window reads the prompt in the first l layers, summed over its tokens."""


@torch.inference_mode()
def observe(
    model: Decoder, prompt: Sequence[int], answer: Sequence[int], points: Sequence[int], window: int, num_asked: int
) -> Lesson:
    """Read a prompt in full, let its answer be written, and note what is read.

    Args:
        model: the decoder.
        prompt: its tokens.
        answer: tokens of the answer, at least one.
        points: number of layers below each point at which residuals are kept.
        window: tokens at the end of the prompt that are asked.
        num_asked: layers whose heads are asked.
    """
    length, config = len(prompt), model.config
    ids = torch.tensor([*prompt, *answer])
    cache = model.new_cache(1, len(ids))
    kept: dict[int, list[Tensor]] = {point: [] for point in points}

    def called(positions: Tensor, *, is_chunk: bool = False, writes: bool = True) -> tuple[Step, list[Tensor]]:
        """Run rows and return their call and what enters each layer."""
        step = Step.packed(cache, [0] * len(positions), positions, positions, chunk=is_chunk)
        step = step if writes else step.without_writing()
        entering = [model.embed(ids[positions], step)]
        model.run(entering[0], step, watch=lambda index, h: entering.append(h.clone()))
        return step, entering

    for first in range(0, length - 1, CHUNK):
        positions = torch.arange(first, min(length - 1, first + CHUNK))
        _, entering = called(positions, is_chunk=int(positions[-1]) >= model.backend.rows_up_to)
        for point in points:
            kept[point].append(entering[point])
    step, entering = called(torch.arange(length - 1, len(ids) - 1))
    for point in points:
        kept[point].append(entering[point][:1])
    reads, copies = [], []
    same = torch.tensor(answer)[:, None] == ids[:length]
    for index in range(config.num_layers):
        layer = model.layers[index]
        assert isinstance(layer, Layer)
        weights = torch.stack([w[:, :length] for w in layer.weigh(layer.query(entering[index], step), step)])
        reads.append(weights.mean(0).half())
        copies.append((weights * same[:, None]).sum(-1).mean(0))
    step, entering = called(torch.arange(max(0, length - window), length), writes=False)
    asked = torch.zeros(num_asked, config.num_heads, length)
    for index in range(num_asked):
        layer = model.layers[index]
        assert isinstance(layer, Layer)
        for weights in layer.weigh(layer.query(entering[index], step), step):
            asked[index, :, : weights.shape[1]] += weights
    hidden = {point: torch.cat(parts).bfloat16() for point, parts in kept.items()}
    return Lesson(hidden, torch.stack(reads), torch.stack(copies), asked.half())


@torch.inference_mode()
def residuals(model: Decoder, prompt: Sequence[int], points: Sequence[int]) -> dict[int, Tensor]:
    """Read a prompt up to the highest point only, and return the residuals (n, E) of its tokens at each point.

    They are ``Lesson.hidden``, for prompts of which is known without an answer which passages it needs.
    """
    ids, cache = torch.tensor(list(prompt)), model.new_cache(1, len(prompt))
    kept: dict[int, list[Tensor]] = {point: [] for point in sorted(points)}
    for first in range(0, len(prompt), CHUNK):
        positions = torch.arange(first, min(len(prompt), first + CHUNK))
        is_chunk = int(positions[-1]) >= model.backend.rows_up_to
        step = Step.packed(cache, [0] * len(positions), positions, positions, chunk=is_chunk)
        h, start = model.embed(ids[positions], step), 0
        for point, parts in kept.items():
            h, start = model.run(h, step, start, point), point
            parts.append(h)
    return {point: torch.cat(parts).bfloat16() for point, parts in kept.items()}


def teachers_of(lessons: Sequence[Lesson]) -> list[tuple[int, int]]:
    """Return the heads, as (layer, head), that read what is written next with most weight, best first."""
    copies = torch.stack([lesson.copies for lesson in lessons]).mean(0)
    best = copies.flatten().argsort(descending=True, stable=True)[:TEACHERS]
    return [divmod(int(place), copies.shape[1]) for place in best]


def target_of(
    lesson: Lesson, teachers: Sequence[tuple[int, int]], lengths: Sequence[int], named: Tensor | None = None
) -> Tensor | None:
    """Return which share of what an answer needs lies at each token (n,), the ends left out; None where it is nothing.

    Args:
        lesson: what was read.
        teachers: heads that tell.
        lengths: of the prompt's parts, of which the first and the last are left out.
        named: (n,) whether a token's passage has the answer in its own words; where some have, only those count.
    """
    read = torch.stack([lesson.reads[layer, head].float() for layer, head in teachers]).mean(0)
    if named is not None and named.any():
        inside = read * named
        read = inside if inside.sum() >= LEAST else named.float()
    return _between_ends(read, lengths)


def target_in(named: Tensor, lengths: Sequence[int]) -> Tensor | None:
    """Return the target where only is known which passages have the answer in its own words: equal shares of these.

    Args:
        named: (n,) whether a token's passage has it.
        lengths: of the prompt's parts, of which the first and the last are left out.
    """
    return _between_ends(named.float(), lengths)


def _between_ends(read: Tensor, lengths: Sequence[int]) -> Tensor | None:
    """Return what was read (n,) without the ends as shares, or None where that is nothing."""
    read[: lengths[0]] = 0
    read[len(read) - lengths[-1] :] = 0
    return None if read.sum() < LEAST else read / read.sum()


def kept_share(scores: Tensor, wanted: Tensor, keep: float, lengths: Sequence[int]) -> float:
    """Return how much of what is wanted (n,) goes on if passages are kept by their scores (P,)."""
    return float(wanted[by_passages(scores, lengths, max(1, int(keep * len(wanted))))].sum())


def choose_heads(
    asked: Sequence[Tensor], wanted: Sequence[Tensor], keep: float, parts: Sequence[Sequence[int]]
) -> tuple[list[int], float]:
    """Return the heads of a layer that together keep most of what is wanted, and how much that is.

    Args:
        asked: of each prompt, with how much weight the window reads it, (H, n).
        wanted: of each prompt, (n,).
        keep: share of the tokens that goes on.
        parts: of each prompt, the lengths of its parts.
    """
    chosen, best = list[int](), 0.0
    totals = [torch.zeros_like(each[0], dtype=torch.float32) for each in asked]
    while len(chosen) < MOST_HEADS:
        shares = []
        for head in range(len(asked[0])):
            own = zip(totals, asked, wanted, parts, strict=True)
            found = [
                kept_share(largest(total + each[head].float(), lengths), want, keep, lengths)
                for total, each, want, lengths in own
            ]
            shares.append(-1.0 if head in chosen else sum(found) / len(found))
        head = max(range(len(shares)), key=lambda at: shares[at])
        if shares[head] <= best + 0.005:
            break
        chosen.append(head)
        best = shares[head]
        totals = [total + each[head].float() for total, each in zip(totals, asked, strict=True)]
    return chosen, best


@dataclass(frozen=True, eq=False)
class Example:
    """A prompt from which maps at one point are taught."""

    hidden: Tensor
    """(n, E) residuals at the point."""
    wanted: Tensor
    """(n,) share of what the answer needs that lies at each token."""
    lengths: Sequence[int]
    """Of the prompt's parts."""


def teach(
    examples: Sequence[Example],
    *,
    rank: int,
    steps: int,
    seed: int,
    opening: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Maps:
    """Teach maps what is wanted of prompts whose residuals at a point are given.

    Args:
        examples: the prompts.
        rank: of the maps.
        steps: of the optimiser.
        seed: of what is drawn.
        opening: whether a prompt's opening asks, too.
        stop: whether the time is over.
    """
    generator, draws = torch.Generator().manual_seed(seed), Random(seed)
    width = examples[0].hidden.shape[1]
    first = torch.randn(rank, width, generator=generator) / sqrt(width)
    maps = Maps(*(torch.nn.Parameter(each) for each in (first.clone(), first.clone(), torch.zeros(1 + opening, width))))
    groups: list[dict[str, Any]] = [{"params": [maps.query, maps.key]}, {"params": [maps.weight], "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=_RATE, weight_decay=_DECAY)
    rise = min(_WARMUP, steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1, (step + 1) / rise) * (1 - step / steps))
    for _ in range(steps):
        batch = draws.sample(examples, min(_BATCH, len(examples)))
        optimiser.zero_grad()
        loss_of(maps, batch, generator).backward()
        optimiser.step()
        schedule.step()
        if stop():
            break
    return Maps(maps.query.detach(), maps.key.detach(), maps.weight.detach())


def loss_of(maps: Maps, batch: Sequence[Example], generator: torch.Generator) -> Tensor:
    """Return the mean cross entropy of the wanted passages of each prompt, among the passages of all of them."""
    hidden = []
    for example in batch:
        x = normed(example.hidden)
        hidden.append(x * (torch.rand(x.shape, generator=generator) >= _DROPOUT) / (1 - _DROPOUT))
    asked = [maps.asking(x, each.lengths) for x, each in zip(hidden, batch, strict=True)]
    asking, counts = (torch.cat(each) for each in zip(*asked, strict=True))
    found = [maps.matches(asking, counts, x, each.lengths) for x, each in zip(hidden, batch, strict=True)]
    by_prompt = torch.cat(found).split([len(tokens) for tokens, _ in asked], 1)
    likely = torch.stack([own.sum(1) for own in by_prompt], 1).log_softmax(0)  # (passages, prompts)
    own = likely.split([len(each) for each in found])
    goals = [sums(each.wanted, each.lengths) for each in batch]
    losses = [-(goal * mine[:, place]).sum() for place, (goal, mine) in enumerate(zip(goals, own, strict=True))]
    return torch.stack(losses).mean()
