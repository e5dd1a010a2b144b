"""``response_format`` and forced calls of tools: answers bound to a grammar, also inside a draft.

The grammar engine is llguidance. A matcher stands after some tokens of the answer and is moved to the prefix that is
asked for: back to where the two part, then on. Prefixes of one draft share all but a few tokens, so this is cheap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vivace.checkpoint.tokenizer import Tokenizer
from vivace.errors import DependencyError
from vivace.serve.refusal import Refusal
from vivace.serve.tool_format import LAYOUT, ToolFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class Grammars:
    """Makes processors that bind an answer to a grammar."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._table: LLTokenizer | None = None

    def json_object(self, num_prompt_tokens: int) -> Bound:
        """Any JSON object."""
        return self.json_schema({"type": "object"}, num_prompt_tokens)

    def json_schema(self, schema: Mapping[str, Any], num_prompt_tokens: int) -> Bound:
        """JSON of a schema.

        Args:
            schema: the JSON schema.
            num_prompt_tokens: tokens before the answer.

        Raises:
            Refusal: the schema is wrong or says something that cannot be kept to.
            DependencyError: llguidance is missing.
        """
        spelt = json.dumps({**schema, "x-guidance": LAYOUT})
        matcher = self._matcher(lambda kind: kind.grammar_from_json_schema(spelt), "response_format")
        return Bound(matcher, num_prompt_tokens, self._vocab_size)

    def calls(self, lark: str, num_prompt_tokens: int) -> Bound:
        """Calls of tools, as a Lark grammar says.

        Args:
            lark: see ``tool_format.grammar``.
            num_prompt_tokens: tokens before the answer.

        Raises:
            Refusal: the schema of a function's arguments is wrong or cannot be kept to.
            DependencyError: llguidance is missing.
        """
        return Bound(
            self._matcher(lambda kind: kind.grammar_from_lark(lark), "tools"), num_prompt_tokens, self._vocab_size
        )

    def calls_within(self, lark: str, form: ToolFormat, num_prompt_tokens: int) -> BoundWithin:
        """Text as it comes, and calls whose arguments fit.

        Args:
            lark: of what follows a tag, see ``tool_format.rest_grammar``.
            form: how calls are written.
            num_prompt_tokens: tokens before the answer.

        Raises:
            Refusal: the schema of a function's arguments is wrong or cannot be kept to.
            DependencyError: llguidance is missing.
        """
        matcher = self._matcher(lambda kind: kind.grammar_from_lark(lark), "tools")
        return BoundWithin(matcher, self._tokens(), form, num_prompt_tokens, self._vocab_size)

    def _matcher(self, make: Callable[[type[LLMatcher]], str], param: str) -> LLMatcher:
        try:
            from llguidance import LLMatcher
        except ImportError as exc:
            raise DependencyError(f"{param} needs llguidance; install vivace[serve]") from exc
        table = self._tokens()
        try:
            grammar = make(LLMatcher)
            problem = LLMatcher.validate_grammar(grammar, table)
        except ValueError as exc:
            problem = str(exc)
        if problem:
            said = " ".join(problem.split())[:300]
            raise Refusal(400, f"{param}: this schema cannot be used: {said}", param=param)
        return LLMatcher(table, grammar)

    def _tokens(self) -> LLTokenizer:
        if self._table is None:
            from llguidance.hf import from_tokenizer

            ends = list(self._tokenizer.eos_ids)
            self._table = from_tokenizer(self._tokenizer.inner, n_vocab=self._vocab_size, eos_token=ends)
        return self._table


class Bound:
    """A logits processor that lets only tokens pass with which the answer can still become what it must be."""

    def __init__(self, matcher: LLMatcher, num_prompt_tokens: int, vocab_size: int) -> None:
        self._matcher = matcher
        self._start = num_prompt_tokens
        self._vocab_size = vocab_size
        self._taken: list[int] = []

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """(1, S) tokens so far and (1, V) logits -> (1, V), impossible tokens at minus infinity."""
        if not self._move_to(ids[0, self._start :].tolist()):
            return logits  # a guess above this place is impossible, so nothing is read here
        return _allowed(self._matcher, logits, self._vocab_size)

    def _move_to(self, tokens: list[int]) -> bool:
        """Whether the grammar allows these tokens; the matcher stands after them then."""
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
        return taken == len(wanted)


class BoundWithin:
    """A logits processor that leaves text alone and binds what stands between the tags of a call."""

    def __init__(
        self, matcher: LLMatcher, table: LLTokenizer, form: ToolFormat, num_prompt_tokens: int, vocab_size: int
    ) -> None:
        self._matcher = matcher
        self._table = table
        self._tag, self._close = form.tag.encode(), form.close.encode()
        self._start = num_prompt_tokens
        self._vocab_size = vocab_size

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """(1, S) tokens so far and (1, V) logits -> (1, V), impossible tokens at minus infinity inside a call."""
        rest = self._open_call(self._table.decode_bytes(ids[0, self._start :].tolist()))
        if rest is None:
            return logits
        self._matcher.reset()
        tokens = self._table.tokenize_bytes(rest)
        if tokens and self._matcher.try_consume_tokens(tokens) < len(tokens):
            return logits  # a guess above this place is impossible, so nothing is read here
        return _allowed(self._matcher, logits, self._vocab_size)

    def _open_call(self, written: bytes) -> bytes | None:
        """What was written of a call that is not closed yet; None between calls."""
        while (at := written.find(self._tag)) >= 0:
            rest = written[at + len(self._tag) :]
            end = rest.find(self._close)
            if end < 0:
                return rest
            written = rest[end + len(self._close) :]
        return None


def _allowed(matcher: LLMatcher, logits: Tensor, vocab_size: int) -> Tensor:
    """(1, V) logits with what the matcher does not allow at minus infinity."""
    mask = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
    bits = (mask[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    allowed = bits.reshape(-1)[:vocab_size].bool().to(logits.device)
    return logits.masked_fill(~allowed, -math.inf)
