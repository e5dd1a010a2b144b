"""Does a method write what plain decoding writes, token for token? And if not, how close was the call?

Where the answers part, the model's logits for the two tokens after the common text are compared. A gap of nearly
zero is a tie that rounding broke either way; a large one is an error of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vivace.evaluate.benchmark import BenchmarkPrompt
from vivace.evaluate.systems import Answering

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Difference:
    """Where a method's answer leaves the plain one."""

    prompt: int
    """Number of the prompt, from 0."""
    position: int
    """Of the first token that differs."""
    plain: int | None
    """Token that plain decoding wrote; None if it had ended."""
    found: int | None
    """Token that the method wrote; None if it had ended."""
    gap: float | None
    """Logit of the plain token minus that of the other; None if one of them had ended."""


@dataclass(frozen=True)
class Sameness:
    """One method's answers beside the plain ones."""

    method: str
    num_prompts: int
    num_tokens: int
    differences: tuple[Difference, ...]

    @property
    def identical(self) -> bool:
        """Every token of every answer is the same."""
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
        engine: The model.
        questions: The prompts.
        methods: What is compared with ``plain``.
        max_new_tokens: Longest answer.
        batch_size: Prompts decoded together by the methods; plain answers them one at a time.
        raw: Prompts go in without the chat template.
        exact: Every decoding pass has one number of rows.
        on_progress: Told (methods done, all).

    Returns:
        New tokens of every plain answer, and each method's answers beside them.
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
    shorter = min(len(plain), len(found))
    position = next((place for place in range(shorter) if plain[place] != found[place]), shorter)
    ours = plain[position] if position < len(plain) else None
    theirs = found[position] if position < len(found) else None
    gap = None
    if ours is not None and theirs is not None:
        logits = engine.logits([[*question.token_ids, *plain[:position]]])[0, -1]
        gap = float(logits[ours] - logits[theirs])
    return Difference(index, position, ours, theirs, gap)
