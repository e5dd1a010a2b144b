"""The effect of quantizing weights: each format's answers compared with those of the model as stored.

* *task quality*: the metrics of ``quality.py`` on the format's own greedy answers;
* *answer nll*: mean negative log-likelihood per token of those answers under the model as stored;
* *reference nll*: mean negative log-likelihood per token of the first reference of each prompt under the format
  itself, if there are references;
* *agreement*: at each position of the stored model's answers, whether the format would choose the same token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from vivace.evaluate.benchmark import BenchmarkPrompt
from vivace.evaluate.quality import score
from vivace.prompts import Prompt

Progress = Callable[[int, int], None]

BATCH = 16
"""Number of prompts answered at once; the bits of an answer do not depend on it."""


class GreedyAnswer(Protocol):
    """The part of an answer that is used here."""

    @property
    def text(self) -> str:
        """Text without special tokens."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens, including an end token."""


class Scorer(Protocol):
    """The part of an engine that is used here."""

    @property
    def num_bytes(self) -> int:
        """Number of bytes that its weights take in memory."""

    def logits(self, token_ids: Sequence[Sequence[int]]) -> Tensor:
        """Return the next-token logits at every position, (B, T) -> (B, T, V)."""


@dataclass(frozen=True)
class Sheet:
    """The prompts, and the answers of one format."""

    questions: Sequence[BenchmarkPrompt]
    answers: Sequence[GreedyAnswer]
    references: Sequence[tuple[int, ...]]
    """Tokens of each prompt's first reference, the end token included; empty if there is none."""


@dataclass(frozen=True)
class Fidelity:
    """One format compared with the stored weights."""

    weights: str
    num_bytes: int
    num_tokens: int
    """Number of tokens of its answers."""
    answer_nll: float
    reference_nll: float | None
    agreement: float | None
    identical_share: float
    """Share of its answers that have exactly the stored model's tokens."""
    tasks: dict[str, dict[str, float]]


def compare_weights(
    weights: str,
    engine: Scorer,
    base: Scorer,
    prompts: Sequence[Prompt],
    own: Sheet,
    stored: Sheet,
    *,
    on_progress: Progress | None = None,
) -> Fidelity:
    """Compare one format with the stored weights.

    Args:
        weights: name of the format.
        engine: the model in that format.
        base: the model as stored; it may be the same engine.
        prompts: the prompts, with references and task names.
        own: the format's answers.
        stored: the stored model's answers to the same prompts.
        on_progress: called with the number of prompts done and their total.
    """
    written, matched, places, referred = [0.0, 0], 0, 0, [0.0, 0]
    for index, question in enumerate(own.questions):
        prompt = question.token_ids
        lost, _ = read_answer(base, prompt, own.answers[index].token_ids)
        written = [written[0] + sum(lost), written[1] + len(lost)]
        _, hits = read_answer(engine, prompt, stored.answers[index].token_ids)
        matched, places = matched + sum(hits), places + len(hits)
        lost, _ = read_answer(engine, prompt, own.references[index])
        referred = [referred[0] + sum(lost), referred[1] + len(lost)]
        if on_progress is not None:
            on_progress(index + 1, len(own.questions))
    same = [mine.token_ids == theirs.token_ids for mine, theirs in zip(own.answers, stored.answers, strict=True)]
    return Fidelity(
        weights=weights,
        num_bytes=engine.num_bytes,
        num_tokens=int(written[1]),
        answer_nll=written[0] / written[1] if written[1] else math.nan,
        reference_nll=referred[0] / referred[1] if referred[1] else None,
        agreement=matched / places if places else math.nan,
        identical_share=sum(same) / len(same),
        tasks=score(prompts, [answer.text for answer in own.answers]),
    )


def read_answer(engine: Scorer, prompt: Sequence[int], answer: Sequence[int]) -> tuple[list[float], list[bool]]:
    """Return the negative log-likelihood of each token of an answer, and whether it is the likeliest token."""
    if not answer:
        return [], []
    logits = engine.logits([[*prompt, *answer[:-1]]])[0, len(prompt) - 1 :]
    at = logits.new_tensor(answer).long()
    lost = -logits.log_softmax(-1).gather(1, at[:, None])[:, 0]
    return lost.tolist(), (logits.argmax(-1) == at).tolist()
