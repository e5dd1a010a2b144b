"""The slow, obvious loops that every method has to agree with, and the test for laws."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vivace.core.model import Decoder
from vivace.core.seams import Draft
from vivace.core.step import Step

CAPACITY = 128


@dataclass(frozen=True)
class Text:
    """A prompt and what plain greedy decoding makes of it."""

    prompt: tuple[int, ...]
    new: tuple[int, ...]
    logprobs: tuple[float, ...]


@torch.inference_mode()
def plain_text(model: Decoder, prompt: tuple[int, ...], count: int, chunk: int = 8) -> Text:
    """One sequence, one row at a time, no session: the oracle, to the bit."""
    cache = model.new_cache(1, CAPACITY)
    for at in range(0, len(prompt) - 1, chunk):
        span = prompt[at : min(at + chunk, len(prompt) - 1)]
        step = Step.of(Draft.committed_only({0: span}), cache, chunk=True)
        model.run(model.embed(torch.tensor(span), step), step)
        cache.commit([0], [range(len(span))])
    tokens, logprobs = list(prompt), []
    for _ in range(count):
        step = Step.of(Draft.committed_only({0: tokens[-1:]}), cache)
        logits = model.head(model.run(model.embed(torch.tensor(tokens[-1:]), step), step))[0]
        cache.commit([0], [range(1)])
        tokens.append(int(logits.argmax()))
        logprobs.append(float(torch.log_softmax(logits, -1)[tokens[-1]]))
    return Text(prompt, tuple(tokens[len(prompt) :]), tuple(logprobs))


@torch.inference_mode()
def recomputed_text(model: Decoder, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The same without a cache: the whole text again for every token."""
    tokens = list(prompt)
    for _ in range(count):
        step = Step.dense(1, len(tokens))
        hidden = model.run(model.embed(torch.tensor(tokens), step), step)
        tokens.append(int(model.head(hidden[-1:])[0].argmax()))
    return tuple(tokens[len(prompt) :])


def chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """p-value of Pearson's test; cells that expect fewer than five are pooled.

    Args:
        observed: counts.
        expected: probabilities of the same cells, summing to one.
    """
    counts, mass = observed.double().reshape(-1), expected.double().reshape(-1)
    total = counts.sum()
    if bool((counts[mass == 0] > 0).any()):
        return 0.0
    rare = mass * total < 5
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    mass = torch.cat((mass[~rare], mass[rare].sum()[None]))
    counts, mass = counts[mass > 0], mass[mass > 0]
    statistic = ((counts - mass * total) ** 2 / (mass * total)).sum()
    return float(torch.special.gammaincc(torch.tensor((len(mass) - 1) / 2).double(), statistic / 2))
