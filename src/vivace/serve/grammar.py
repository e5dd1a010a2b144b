"""Binds answers to a grammar, for ``response_format`` and forced tool calls, also inside a draft.

The grammar engine is llguidance. A matcher has read some tokens of the answer. For another prefix it goes back to where
the two differ and reads on; prefixes of one draft share all but a few tokens, so this is cheap.

A grammar can stop: the engine has limits, and reports only when asked that it has reached one. Then there is no
distribution to draw from, and the request ends with an error; its text never continues without the grammar. A *guess*
that the grammar does not accept is something else: the row before it gave it no probability, so verification rejects
it, whatever is computed after it. ``keeps_to`` checks tokens that were decided, where it is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from vivace.decode.request import Request
from vivace.serve.api_error import APIError
from vivace.serve.grammar_trial import stuck
from vivace.serve.grammars import Grammar, Grammars
from vivace.serve.tool_format import ToolFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class Binding(Protocol):
    """A logits processor that binds one answer to a grammar."""

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Set impossible tokens to minus infinity: (1, S) tokens so far and (1, V) logits -> (1, V).

        Raises:
            APIError: the grammar stopped.
        """
        ...

    def keeps_to(self, tokens: Sequence[int]) -> bool:
        """Return False if these decided tokens of the answer fit the grammar: it is never a reason to end a text.

        Raises:
            APIError: they do not fit, or the grammar stopped.
        """
        ...


Bind = Callable[[int], Binding]
"""Makes the processor of one answer, given the number of tokens of its prompt."""


def bound(requests: Iterable[Request], binds: Iterable[Bind]) -> tuple[Request, ...]:
    """Return the same requests with their answers bound."""
    made = tuple(requests)
    for bind in binds:
        made = tuple(_bound(request, bind(len(request.tokens))) for request in made)
    return made


def _bound(request: Request, binding: Binding) -> Request:
    criterion = request.stop.criterion

    def ends(tokens: Sequence[int]) -> bool:
        return binding.keeps_to(tokens) or (criterion is not None and criterion(tokens))

    stop = replace(request.stop, criterion=ends)
    return replace(request, processors=(*request.processors, binding), stop=stop)


class Bound:
    """Allows only tokens after which the answer can still conform to the grammar."""

    def __init__(self, grammar: Grammar, num_prompt_tokens: int, param: str = "response_format") -> None:
        """Stand before the first token.

        Args:
            grammar: of the answer.
            num_prompt_tokens: tokens before it.
            param: the field that asked for it, for errors.
        """
        self._grammar = grammar
        self._matcher = grammar.copy()
        self._start = num_prompt_tokens
        self._param = param
        self._taken: list[int] = []

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Implement ``Binding``."""
        if not self._move_to(ids[0, self._start :].tolist()):
            return logits  # a guess that its own row excluded: nothing above it is read
        return _allowed(self._grammar, self._matcher, logits, self._param)

    def keeps_to(self, tokens: Sequence[int]) -> bool:
        """Implement ``Binding``."""
        if not self._move_to(list(tokens)):
            raise _stopped(self._param, "the text does not fit the schema")
        return False

    def _move_to(self, tokens: list[int]) -> bool:
        """Return whether the grammar allows these tokens; the matcher has then read them."""
        shared = 0
        for ours, theirs in zip(self._taken, tokens, strict=False):
            if ours != theirs:
                break
            shared += 1
        if shared < len(self._taken):
            self._matcher.rollback(len(self._taken) - shared)
            del self._taken[shared:]
        wanted = tokens[shared:]
        taken = self._matcher.try_consume_tokens(wanted) if wanted else 0
        self._taken += wanted[:taken]
        if self._matcher.is_error():
            self._grammar.is_spoilt = True
            raise _stopped(self._param, self._matcher.get_error())
        return taken == len(wanted)


class Opening:
    """Tokens that end the tag of a call and hold more: what they hold has to fit the call.

    Which they are depends on the vocabulary; which of them fit, on the grammar. Neither depends on the answer.
    """

    def __init__(self, grammars: Grammars, grammar: Grammar, tag: bytes) -> None:
        """Try what follows the tag in each of them.

        Args:
            grammars: know the vocabulary.
            grammar: of what follows the tag.
            tag: what a call begins with.
        """
        self.tag = tag
        self._barred: list[list[int]] = [[] for _ in tag]
        matcher, table, fits = grammar.copy(), grammars.table(), dict[bytes, bool]()
        for written, token, rest in grammars.straddling(tag):
            if rest not in fits:
                matcher.reset()
                tokens = table.tokenize_bytes(rest)
                fits[rest] = matcher.try_consume_tokens(tokens) == len(tokens)
            if not fits[rest]:
                self._barred[written].append(token)

    def barred(self, written: bytes) -> list[int]:
        """Return the tokens that cannot follow this text, in which no call is open."""
        ends = [size for size in range(len(self.tag)) if written.endswith(self.tag[:size])]
        return [token for size in ends for token in self._barred[size]]


class BoundWithin:
    """Binds the calls in an answer and leaves its other text free."""

    def __init__(
        self, grammar: Grammar, table: LLTokenizer, form: ToolFormat, opening: Opening, num_prompt_tokens: int
    ) -> None:
        """Stand before the first token.

        Args:
            grammar: of what follows a tag, up to and with what closes it.
            table: the vocabulary.
            form: how calls are written.
            opening: of the same grammar and tag.
            num_prompt_tokens: tokens before the answer.
        """
        self._grammar = grammar
        self._matcher = grammar.copy()
        self._table = table
        self._opening = opening
        self._close = form.close.encode()
        self._start = num_prompt_tokens

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Implement ``Binding``."""
        written = self._table.decode_bytes(ids[0, self._start :].tolist())
        text, call = self._divide(written)
        if call is None:
            barred = self._opening.barred(text)
            return logits.index_fill(1, torch.tensor(barred, device=logits.device), -math.inf) if barred else logits
        if not self._stands_after(call):
            return logits  # a guess that its own row excluded: nothing above it is read
        return _allowed(self._grammar, self._matcher, logits, "tools")

    def keeps_to(self, tokens: Sequence[int]) -> bool:
        """Implement ``Binding``."""
        _, call = self._divide(self._table.decode_bytes(list(tokens)))
        if call is not None and not self._stands_after(call):
            raise _stopped("tools", "the call does not fit its schema")
        return False

    def _divide(self, written: bytes) -> tuple[bytes, bytes | None]:
        """Return the text after the last closed call, and the written part of an open call; None between calls."""
        tag = self._opening.tag
        while (at := written.find(tag)) >= 0:
            call = written[at + len(tag) :]
            end = self._end_of(call)
            if end is None:
                return written, call
            written = call[end:]
        return written, None

    def _end_of(self, call: bytes) -> int | None:
        """Return where a call ends: after a closing tag with which the grammar is complete, and not inside a string."""
        at = 0
        while (found := call.find(self._close, at)) >= 0:
            at = found + len(self._close)
            if self._stands_after(call[:at]) and self._matcher.is_accepting():
                return at
        return None

    def _stands_after(self, call: bytes) -> bool:
        """Return whether the grammar allows this beginning of a call; the matcher has then read it."""
        self._matcher.reset()
        tokens = self._table.tokenize_bytes(call)
        taken = self._matcher.try_consume_tokens(tokens) if tokens else 0
        if self._matcher.is_error():
            self._grammar.is_spoilt = True
            raise _stopped("tools", self._matcher.get_error())
        return taken == len(tokens)


def binds(grammar: Grammar, param: str) -> Bind:
    """Return what binds a whole answer to the grammar."""
    return lambda num_prompt_tokens: Bound(grammar, num_prompt_tokens, param)


def binds_within(grammars: Grammars, grammar: Grammar, form: ToolFormat) -> Bind:
    """Return what binds the calls of answers that may contain other text."""
    table = grammars.table()
    opening = Opening(grammars, grammar, form.tag.encode())
    return lambda num_prompt_tokens: BoundWithin(grammar, table, form, opening, num_prompt_tokens)


def _allowed(grammar: Grammar, matcher: LLMatcher, logits: Tensor, param: str) -> Tensor:
    """Return (1, V) logits in which tokens that the matcher does not allow are minus infinity."""
    found = matcher.compute_bitmask()
    if (why := stuck(matcher, found)) is not None:
        grammar.is_spoilt = True
        raise _stopped(param, why)
    mask = torch.frombuffer(bytearray(found), dtype=torch.uint8)
    bits = (mask[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    allowed = bits.reshape(-1)[: logits.shape[1]].bool().to(logits.device)
    return logits.masked_fill(~allowed, -math.inf)


def _stopped(param: str, why: str) -> APIError:
    """Return the error for a grammar with which an answer cannot continue."""
    line = " ".join(why.replace("<non-verbose/>", "").split())[:300]
    return APIError(
        400,
        f"{param}: the answer cannot go on within its schema: {line}; what was sent of it is incomplete",
        param=param,
        code="grammar_stopped",
    )
