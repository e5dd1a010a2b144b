"""Comparison of a method's answers with plain decoding's, token by token, and how close the choice was if they differ.

Where two answers diverge, the model's logits of the two tokens after the common text are compared. A gap of nearly
zero is a tie that rounding broke either way; a large one is an error in the method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vivace.evaluate.benchmark import BenchmarkPrompt
from vivace.evaluate.systems import Answering

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Difference:
    """The place where a method's answer diverges from the plain one."""

    prompt: int
    """Index of the prompt."""
    position: int
    """Index of the first token that differs."""
    plain: int | None
    """Token that plain decoding wrote; None if its answer had ended."""
    found: int | None
    """Token that the method wrote; None if its answer had ended."""
    gap: float | None
    """Logit of the plain token minus that of the other; None if one of the answers had ended."""


@dataclass(frozen=True)
class Sameness:
    """One method's answers compared with the plain ones."""

    method: str
    num_prompts: int
    num_tokens: int
    differences: tuple[Difference, ...]

    @property
    def identical(self) -> bool:
        """Return whether every token of every answer is the same."""
        return not self.differences


def compare(
    engine: Answering,
    questions: Sequence[BenchmarkPrompt],
    methods: Sequence[str],
    *,
    max_new_tokens: int,
    batch_size: int = 1,
    raw: bool = False,
    exact: bool = False,
    on_progress: Progress | None = None,
) -> tuple[list[tuple[int, ...]], list[Sameness]]:
    """Compare the greedy answers of methods with those of plain decoding, prompt by prompt.

    Args:
        engine: the engine that answers.
        questions: the prompts.
        methods: names of the methods to compare with ``plain``.
        max_new_tokens: length limit of an answer.
        batch_size: number of prompts that the methods decode together; plain decoding answers them one at a time.
        raw: whether prompts are used without the chat template.
        exact: whether every decoding pass has the same number of rows.
        on_progress: called with the number of methods done and their total.

    Returns:
        The new tokens of every plain answer, and the comparison of each method.
    """

    def answers(method: str, size: int) -> list[tuple[int, ...]]:
        requests = [question.request for question in questions]
        settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "raw": raw, "logprobs": False, "exact": exact}
        results = engine.generate(requests, method=method, batch_size=size, **settings)
        return [tuple(result.token_ids) for result in results]

    plain = answers("plain", 1)
    found = []
    for done, method in enumerate(methods, 1):
        pairs = zip(questions, plain, answers(method, batch_size), strict=True)
        differences = tuple(
            _difference(engine, index, question, expected, other)
            for index, (question, expected, other) in enumerate(pairs)
            if expected != other
        )
        found.append(Sameness(method, len(questions), sum(map(len, plain)), differences))
        if on_progress is not None:
            on_progress(done, len(methods))
    return plain, found


def _difference(
    engine: Answering, index: int, question: BenchmarkPrompt, plain: Sequence[int], found: Sequence[int]
) -> Difference:
    """Find where two answers diverge and how far apart the logits are there."""
    shorter = min(len(plain), len(found))
    position = next((place for place in range(shorter) if plain[place] != found[place]), shorter)
    ours = plain[position] if position < len(plain) else None
    theirs = found[position] if position < len(found) else None
    gap = None
    if ours is not None and theirs is not None:
        logits = engine.logits([[*question.token_ids, *plain[:position]]])[0, -1]
        gap = float(logits[ours] - logits[theirs])
    return Difference(index, position, ours, theirs, gap)
