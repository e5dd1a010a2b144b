"""How a model goes along with texts that another one wrote, token by token as it decodes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vivace.core.model import Decoder
from vivace.core.sampling import Sampling
from vivace.core.seams import Draft
from vivace.decode.forward import ForwardPass
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session


@dataclass(frozen=True)
class Text:
    """An answer, and how likely each of its tokens was to who wrote it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Followed:
    """What a model made of the tokens of answers, the first of each left out."""

    num_tokens: int
    agreed: float
    """Share of them that it would have written."""
    surprise: float
    """Nats a token by which they were less likely to it than to who wrote them."""
    seconds: float
    """Of the decoding, prompts left out."""


def written(model: Decoder, prompt: Sequence[int], new_tokens: int) -> Text:
    """Return a greedy answer."""
    session = Session(model, num_slots=1, capacity=len(prompt) + new_tokens)
    session.admit(Request(tuple(prompt), new_tokens, NoDrafts(), sampling=Sampling(), logprobs=True))
    with torch.inference_mode():
        emitted = list(session.drain())
    tokens = tuple(t for each in emitted for t in each.tokens)
    return Text(tuple(prompt), tokens, tuple(p for each in emitted for p in each.logprobs or ()))


def followed(model: Decoder, texts: Sequence[Text]) -> Followed:
    """Decode answers of which every token is given."""
    count, agreed, surprise, seconds = 0, 0, 0.0, 0.0
    for text in texts:
        scores, took = scores_of(model, text)
        tokens = torch.tensor(text.tokens[1:])
        agreed += int((scores.argmax(-1) == tokens).sum())
        surprise += sum(text.logprobs[1:]) - scores.gather(1, tokens[:, None]).sum().item()
        count += len(tokens)
        seconds += took
    return Followed(count, agreed / count, surprise / count, seconds)


@torch.inference_mode()
def scores_of(model: Decoder, text: Text) -> tuple[Tensor, float]:
    """Return log-probabilities (n - 1, V) after each token except the last, decoded one by one, and their seconds."""
    cache, scores = model.new_cache(1, len(text.prompt) + len(text.tokens)), []
    ForwardPass().run(model, Draft.committed_only({0: list(text.prompt)}), cache, chunk=True)
    cache.commit([0], [list(range(len(text.prompt)))])
    begun = time.perf_counter()
    for token in text.tokens[:-1]:
        passed = ForwardPass().run(model, Draft.committed_only({0: [token]}), cache)
        cache.commit([0], [[0]])
        scores.append(torch.log_softmax(model.head(passed.hidden)[-1].float(), -1))
    return torch.stack(scores), time.perf_counter() - begun
