"""The answer to a prompt, as text and tokens, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vivace.checkpoint.tokenizer import TextStream, Tokenizer
from vivace.decode.beams import Hypothesis
from vivace.decode.request import Emitted, FinishReason, Request
from vivace.decode.stats import DecodeStats


@dataclass(frozen=True)
class Alternative:
    """Another text that a beam search found."""

    text: str
    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True)
class Result:
    """The answer to one prompt."""

    text: str
    """The text, without special tokens and without the stop string that ended it."""
    token_ids: tuple[int, ...]
    """The generated tokens, including an end token."""
    logprobs: tuple[float, ...] | None
    """log p of each generated token, if it was asked for."""
    finish_reason: FinishReason
    stats: DecodeStats
    method: str
    """The method that was asked for."""
    choice: str | None = None
    """What ``auto`` chose; None for other methods."""
    score: float | None = None
    """With beams: the sum of log p of the tokens over their number to the power of ``length_penalty``."""
    alternatives: tuple[Alternative, ...] = ()
    """With beams: further texts, the best first; ``num_return_sequences`` in all."""


@dataclass(frozen=True)
class Chunk:
    """A part of an answer while it is generated; the last one also has the result."""

    text: str
    token_ids: tuple[int, ...]
    result: Result | None = None


class Answer:
    """Turns the tokens of one request into text, and holds back what may become a stop string."""

    def __init__(self, tokenizer: Tokenizer, request: Request, method: str) -> None:
        """Start an answer without tokens; ``method`` is the name that was asked for."""
        self._tokenizer = tokenizer
        self._request = request
        self._method = method
        self._stops = request.stop.stop_strings
        self._stream: TextStream = tokenizer.stream()
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._pending = ""
        self._text = ""
        self._last: Emitted | None = None

    def take(self, emitted: Emitted) -> str:
        """Add the tokens of a step and return the text that can no longer change."""
        self._tokens += emitted.tokens
        self._logprobs += emitted.logprobs or ()
        self._last = emitted
        ended = emitted.finish_reason is not None
        self._pending += self._stream.push(emitted.tokens) + (self._stream.finish() if ended else "")
        if ended:
            certain = self._cut_at_stop(self._pending)
        else:
            held = _possible_start(self._pending, self._stops)
            certain = self._pending[: len(self._pending) - held]
        self._pending = self._pending[len(certain) :]
        self._text += certain
        return certain

    def _cut_at_stop(self, text: str) -> str:
        """Return the text before the first stop string."""
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        return text[: min(places)] if places else text

    def result(self) -> Result:
        """Return the finished answer."""
        assert self._last is not None
        assert self._last.finish_reason is not None
        return Result(
            text=self._text,
            token_ids=tuple(self._tokens),
            logprobs=tuple(self._logprobs) if self._request.logprobs else None,
            finish_reason=self._last.finish_reason,
            stats=self._last.stats,
            method=self._method,
            choice=self._last.stats.choice,
            score=self._last.hypotheses[0].score if self._last.hypotheses else None,
            alternatives=self.alternatives,
        )

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """Return what a finished search has found beside the answer."""
        assert self._last is not None
        return tuple(self._alternative(one) for one in self._last.hypotheses[1:])

    def _alternative(self, found: Hypothesis) -> Alternative:
        stream = self._tokenizer.stream()
        text = self._cut_at_stop(stream.push(found.tokens) + stream.finish())
        return Alternative(text, found.tokens, found.score, "stop" if found.is_stopped else "length")


def _possible_start(text: str, stops: Sequence[str]) -> int:
    """Return the number of characters at the end of ``text`` that may be the beginning of a stop string."""
    longest = max((len(stop) for stop in stops), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
