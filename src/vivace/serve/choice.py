"""One answer while it is written: its text, its tokens, and the data of each token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vivace.answer import Answer
from vivace.checkpoint.tokenizer import Tokenizer
from vivace.decode.request import Emitted, FinishReason, Request
from vivace.decode.stats import DecodeStats
from vivace.serve.token_text import Offsets, TokenPiece, piece
from vivace.serve.tool_reader import ToolReader


@dataclass(frozen=True)
class TokenInfo:
    """One token of an answer, with the data that the request asked for."""

    piece: TokenPiece
    logprob: float | None
    top: tuple[tuple[TokenPiece, float], ...] = ()
    """The likeliest tokens at its position, with log p of each."""
    offset: int = 0
    """Number of characters before it in the text."""
    step: int = 0
    guesses: tuple[TokenPiece, ...] = ()
    """Tokens that were drafted for its position."""
    layer: int | None = None
    """Number of layers that it passed, for methods with early exits."""

    @property
    def trace(self) -> dict[str, Any]:
        """Return the step that wrote the token and what was drafted, as ``return_trace`` shows it."""
        return {
            "id": self.piece.id,
            "text": self.piece.text,
            "step": self.step,
            "accepted": any(guess.id == self.piece.id for guess in self.guesses),
            "guesses": [{"id": guess.id, "text": guess.text} for guess in self.guesses],
            "layer": self.layer,
        }


@dataclass(frozen=True)
class NewTokens:
    """The tokens that a step added to an answer."""

    text: str
    tokens: Sequence[TokenInfo] = ()
    calls: Sequence[dict[str, Any]] = ()
    """Parts of tool calls, as streams contain them."""


@dataclass
class Choice:
    """One of the answers to a request (OpenAI's choice), as far as it has been written."""

    index: int
    request: Request
    tokenizer: Tokenizer
    method: str
    spells: bool = True
    """Whether the text of each single token is wanted."""
    reader: ToolReader | None = None
    """Finds tool calls in the text, where the request has tools."""
    tokens: list[TokenInfo] = field(default_factory=list)
    text: str = ""
    echo: list[TokenInfo] = field(default_factory=list)
    """The prompt, if the answer begins with it."""
    echo_text: str = ""
    num_steps: int = 0
    finish_reason: FinishReason | None = None
    stats: DecodeStats | None = None
    score: float | None = None
    """Of a text that was found by beam search: log p over the length to the power of the length penalty."""
    auto_choice: str | None = None
    """What ``auto`` did in the last step, and why."""
    first_at: float = 0.0
    last_at: float = 0.0

    def __post_init__(self) -> None:
        self._answer = Answer(self.tokenizer, self.request, self.method)
        self._offsets = Offsets(self.tokenizer)

    @property
    def reason(self) -> str | None:
        """Return why the answer ended, in OpenAI's words: calls are to be made only when the last of them is whole."""
        has_calls = self.reader is not None and self.reader.calls and not self.reader.is_cut
        return "tool_calls" if has_calls and self.finish_reason == "stop" else self.finish_reason

    def take(self, emitted: Emitted) -> NewTokens:
        """Add the tokens of a step; return what will not change any more."""
        self.last_at = time.perf_counter()
        self.first_at = self.first_at or self.last_at
        text = self._answer.take(emitted)
        read = self.reader.push(text, is_last=emitted.finish_reason is not None) if self.reader else None
        text = text if read is None else read.text
        fresh = self._infos(emitted)
        self.num_steps += 1
        self.tokens += fresh
        self.text += text
        if emitted.finish_reason is not None:
            self.finish_reason = emitted.finish_reason
            self.stats = emitted.stats
            self.score = emitted.hypotheses[0].score if emitted.hypotheses else None
            self.auto_choice = self._answer.result().choice
        return NewTokens(text, fresh, () if read is None else read.deltas)

    def _infos(self, emitted: Emitted) -> list[TokenInfo]:
        """Return the data of a step's tokens."""
        if not self.spells:
            return [TokenInfo(TokenPiece(token, "", b""), None) for token in emitted.tokens]
        pieces = [piece(self.tokenizer, token) for token in emitted.tokens]
        offsets = self._offsets.push(pieces)
        return [self._info(emitted, place, *pair) for place, pair in enumerate(zip(pieces, offsets, strict=True))]

    def _info(self, emitted: Emitted, place: int, own: TokenPiece, offset: int) -> TokenInfo:
        top = () if emitted.top_logprobs is None else emitted.top_logprobs[place]
        guesses = () if emitted.guesses is None else emitted.guesses[place]
        exits, at = emitted.stats.exit_layers, len(self.tokens) + place
        return TokenInfo(
            piece=own,
            logprob=None if emitted.logprobs is None else emitted.logprobs[place],
            top=tuple((piece(self.tokenizer, other), logprob) for other, logprob in top),
            offset=len(self.echo_text) + offset,
            step=self.num_steps,
            guesses=tuple(piece(self.tokenizer, guess) for guess in guesses),
            layer=exits[at] if exits else None,
        )
