"""Learning which tokens of a prompt an answer needs, from what the model itself reads while it writes the answer.

A prompt is read in full once and its answer is given. Then every head has read something for every token of the
answer. Heads that read the very token that is written next are the ones that find things (the retrieval score of Wu et
al. 2024, arXiv:2404.15574); what the few best of them read, block by block, is what a score at a low point has to
foretell. No passage is marked by hand. Two scores learn it (``learned.py``): heads below a point are chosen, by how
much of it they would keep, and maps of the residuals at a point are taught, by cross entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.core.model import Decoder, Layer
from vivace.core.step import Step
from vivace.prefill.learned import Maps, normed
from vivace.prefill.scores import BLOCK, SINKS, by_masses

TEACHERS = 5
"""Heads from which is learnt."""
MOST_HEADS = 3
"""Heads that are asked at a point at most."""
CHUNK = 256
_BATCH, _RATE, _DROPOUT, _DECAY = 4, 2e-3, 0.1, 0.1


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


def blocks_of(masses: Tensor, value: float = 0.0) -> Tensor:
    """Return masses (n,) by block, (blocks, BLOCK), filled up with ``value``."""
    return F.pad(masses, (0, -len(masses) % BLOCK), value=value).view(-1, BLOCK)


def teachers_of(lessons: Sequence[Lesson]) -> list[tuple[int, int]]:
    """Return the heads, as (layer, head), that read what is written next with most weight, best first."""
    copies = torch.stack([lesson.copies for lesson in lessons]).mean(0)
    best = copies.flatten().argsort(descending=True, stable=True)[:TEACHERS]
    return [divmod(int(place), copies.shape[1]) for place in best]


def target_of(lesson: Lesson, teachers: Sequence[tuple[int, int]], window: int) -> Tensor | None:
    """Return which share of what teachers read lies at each token (n,), the ends left out; None where it is nothing."""
    read = torch.stack([lesson.reads[layer, head].float() for layer, head in teachers]).mean(0)
    read[:SINKS] = 0
    read[max(0, len(read) - window) :] = 0
    return None if read.sum() < 1e-3 else read / read.sum()


def kept_share(masses: Tensor, wanted: Tensor, keep: float, window: int) -> float:
    """Return how much of what is wanted (n,) goes on if tokens are kept by their masses (n,)."""
    return float(wanted[by_masses(masses, max(1, int(keep * len(masses))), window)].sum())


def choose_heads(
    asked: Sequence[Tensor], wanted: Sequence[Tensor], keep: float, window: int
) -> tuple[list[int], float]:
    """Return the heads of a layer that together keep most of what is wanted, and how much that is.

    Args:
        asked: of each prompt, with how much weight the window reads it, (H, n).
        wanted: of each prompt, (n,).
        keep: share of the tokens that goes on.
        window: tokens at the end that go on.
    """
    chosen, best = list[int](), 0.0
    sums = [torch.zeros_like(each[0], dtype=torch.float32) for each in asked]
    while len(chosen) < MOST_HEADS:
        shares = []
        for head in range(len(asked[0])):
            own = zip(sums, asked, wanted, strict=True)
            found = [kept_share(total + each[head].float(), want, keep, window) for total, each, want in own]
            shares.append(-1.0 if head in chosen else sum(found) / len(found))
        head = max(range(len(shares)), key=lambda at: shares[at])
        if shares[head] <= best + 0.005:
            break
        chosen.append(head)
        best = shares[head]
        sums = [total + each[head].float() for total, each in zip(sums, asked, strict=True)]
    return chosen, best


def teach(
    hidden: Sequence[Tensor],
    wanted: Sequence[Tensor],
    *,
    rank: int,
    window: int,
    steps: int,
    seed: int,
    stop: Callable[[], bool] = lambda: False,
) -> Maps:
    """Teach maps what is wanted of prompts whose residuals at a point are given.

    Args:
        hidden: of each prompt, (n, E).
        wanted: of each prompt, the share of each token, (n,).
        rank: of the maps.
        window: tokens at the end of a prompt that are asked.
        steps: of the optimiser.
        seed: of what is drawn.
        stop: whether the time is over.
    """
    generator, draws = torch.Generator().manual_seed(seed), Random(seed)
    first = torch.randn(rank, hidden[0].shape[1], generator=generator) / sqrt(hidden[0].shape[1])
    query, key = (torch.nn.Parameter(first.clone()) for _ in range(2))
    optimiser = torch.optim.AdamW([query, key], lr=_RATE, weight_decay=_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
    goals = [blocks_of(want).sum(1) for want in wanted]
    for _ in range(steps):
        loss = torch.zeros(())
        batch = draws.sample(range(len(hidden)), min(_BATCH, len(hidden)))
        for place in batch:
            x = normed(hidden[place])
            x = x * (torch.rand(x.shape, generator=generator) >= _DROPOUT) / (1 - _DROPOUT)
            scores = ((x[-window:] @ query.T) @ (x @ key.T).T / sqrt(rank)).logsumexp(0)
            likely = blocks_of(scores, -1e9).logsumexp(1).log_softmax(0)
            loss = loss - (goals[place] * likely).sum() / len(batch)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if stop():
            break
    return Maps(query.detach(), key.detach())
