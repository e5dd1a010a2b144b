"""The JSON of answers: whole ones and the chunks of a stream, for chats and for completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vivace.serve.choice import Choice, NewTokens, TokenInfo
from vivace.serve.token_text import TokenPiece


@dataclass(frozen=True)
class Head:
    """The fields with which every object of one reply begins."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a whole reply, or one event of a stream, around its choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }


@dataclass(frozen=True)
class Extras:
    """Optional parts of a reply that the request asked for."""

    logprobs: bool = False
    token_ids: bool = False
    trace: bool = False

    def of(self, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        """Return the fields of a choice beside its text."""
        found: dict[str, Any] = {}
        if self.token_ids:
            found["token_ids"] = [token.piece.id for token in tokens]
        if self.trace:
            found["trace"] = [token.trace for token in tokens]
        return found


class ResponseShape(Protocol):
    """Protocol of an interface's JSON: whole choices, and the pieces of a stream."""

    id_prefix: str
    kind: str
    chunk_kind: str

    def whole(self, choice: Choice, extras: Extras) -> dict[str, Any]:
        """Return a complete choice."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the first event of a choice's stream, None where there is none of its own."""
        ...

    def piece(self, index: int, fresh: NewTokens, extras: Extras) -> dict[str, Any]:
        """Return what one step added to a choice."""
        ...

    def closing(self, index: int, finish_reason: str) -> dict[str, Any] | None:
        """Return the last event of a choice; None puts the reason into its last piece."""
        ...


class ChatShape:
    """The JSON of chats: ``chat.completion`` and its chunks."""

    id_prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def whole(self, choice: Choice, extras: Extras) -> dict[str, Any]:
        """Return a complete choice."""
        return {
            "index": choice.index,
            "message": self._message(choice),
            "logprobs": self._logprobs(choice.tokens) if extras.logprobs else None,
            "finish_reason": choice.reason,
            **extras.of(choice.tokens),
        }

    @staticmethod
    def _message(choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.reader is not None and choice.reader.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [call.whole for call in choice.reader.calls]
        return message

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the first event of a chat's stream, which names the role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, fresh: NewTokens, extras: Extras) -> dict[str, Any]:
        """Return what one step added to a choice."""
        delta: dict[str, Any] = {"content": fresh.text} if fresh.text or not fresh.calls else {}
        if fresh.calls:
            delta["tool_calls"] = list(fresh.calls)
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(fresh.tokens) if extras.logprobs else None,
            "finish_reason": None,
            **extras.of(fresh.tokens),
        }

    def closing(self, index: int, finish_reason: str) -> dict[str, Any] | None:
        """Return the last event of a choice, which says why it ended."""
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": finish_reason}

    @staticmethod
    def _logprobs(tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **_token(token.piece, token.logprob or 0.0),
                    "top_logprobs": [_token(other, logprob) for other, logprob in token.top],
                }
                for token in tokens
            ],
            "refusal": None,
        }


class TextShape:
    """The JSON of completions: ``text_completion``."""

    id_prefix = "cmpl-"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def whole(self, choice: Choice, extras: Extras) -> dict[str, Any]:
        """Return a complete choice."""
        everything = NewTokens(choice.echo_text + choice.text, [*choice.echo, *choice.tokens])
        scored = {} if choice.score is None else {"score": choice.score}
        return {**self.piece(choice.index, everything, extras), "finish_reason": choice.reason, **scored}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return nothing: streams of completions have no first event of their own."""
        return None

    def piece(self, index: int, fresh: NewTokens, extras: Extras) -> dict[str, Any]:
        """Return what one step added to a choice."""
        return {
            "index": index,
            "text": fresh.text,
            "logprobs": self._logprobs(fresh.tokens) if extras.logprobs else None,
            "finish_reason": None,
            **extras.of(fresh.tokens),
        }

    def closing(self, index: int, finish_reason: str) -> dict[str, Any] | None:
        """Return the last event of a choice, which says why it ended."""
        return {"index": index, "text": "", "logprobs": None, "finish_reason": finish_reason}

    @staticmethod
    def _logprobs(tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        return {
            "tokens": [token.piece.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_by_text(token.top) or None for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }


def _by_text(top: Sequence[tuple[TokenPiece, float]]) -> dict[str, float]:
    """Return log-probabilities by text; bytes that are no text are spelt, and of equal texts the likeliest counts."""
    found: dict[str, float] = {}
    for piece, logprob in top:
        is_text = piece.raw == piece.text.encode()
        found.setdefault(piece.text if is_text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece.raw), logprob)
    return found


def _token(piece: TokenPiece, logprob: float) -> dict[str, Any]:
    return {"token": piece.text, "logprob": logprob, "bytes": list(piece.raw)}
