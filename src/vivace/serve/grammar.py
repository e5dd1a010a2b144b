"""``response_format``: answers bound to JSON, also inside a draft.

The grammar engine is llguidance. A matcher stands after some tokens of the answer and is moved to the prefix that is
asked for: back to where the two part, then on. Prefixes of one draft share all but a few tokens, so this is cheap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vivace.checkpoint.tokenizer import Tokenizer
from vivace.errors import DependencyError
from vivace.serve.refusal import Refusal

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

_LAYOUT: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line as most programs print it: a model cannot fill an answer with blanks."""


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
        try:
            from llguidance import LLMatcher
        except ImportError as exc:
            raise DependencyError("response_format needs llguidance; install vivace[serve]") from exc
        table = self._tokens()
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=_LAYOUT)
            problem = LLMatcher.validate_grammar(grammar, table)
        except ValueError as exc:
            problem = str(exc)
        if problem:
            said = " ".join(problem.split())[:300]
            raise Refusal(400, f"response_format: this schema cannot be used: {said}", param="response_format")
        return Bound(LLMatcher(table, grammar), num_prompt_tokens, self._vocab_size)

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
        mask = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = (mask[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        allowed = bits.reshape(-1)[: self._vocab_size].bool().to(logits.device)
        return logits.masked_fill(~allowed, -math.inf)

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
