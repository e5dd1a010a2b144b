"""Prompt files -> batches of token rows: chat template, what is scored, rows of like length together.

A row is a prompt through the chat template, an answer and the end-of-text token; only the answer and that
token are scored. Batches hold about ``tokens_per_batch`` tokens, padding included, of rows that are padded
to the same multiple of 8. Everything about epoch n is drawn from (seed, n), so a place in training is two
numbers and a resumed run sees the batches the killed one would have seen.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.checkpoint.tokenizer import Tokenizer
from vivace.core.model import Decoder
from vivace.errors import CapacityError, ConfigError
from vivace.prompts import Prompt
from vivace.train.batches import Place
from vivace.train.objective import Objective
from vivace.train.variation import Pair

_GRID = 8  # row lengths are multiples of this, so that few shapes occur


@dataclass(frozen=True)
class Row:
    """One training example as tokens."""

    tokens: tuple[int, ...]
    num_prompt: int
    """Tokens of the prompt, template included; what follows is scored."""


@dataclass(frozen=True)
class TokenBatch:
    """Rows of tokens of one length, padded on the right."""

    tokens: Tensor
    """(B, T) int64."""
    scored: Tensor
    """(B, T) bool: the token here is to be predicted from those before it (an answer's token)."""

    @property
    def num_elements(self) -> int:
        """Count the tokens, padding included."""
        return self.tokens.numel()

    @property
    def weight(self) -> int:
        """Count the scored tokens."""
        return int(self.scored.sum())

    @property
    def predicting(self) -> Tensor:
        """Packed rows (b * T + t) whose next token is scored, (n,)."""
        return F.pad(self.scored[:, 1:], (0, 1)).reshape(-1).nonzero()[:, 0]

    @property
    def targets(self) -> Tensor:
        """The tokens those rows predict, (n,)."""
        return self.tokens.reshape(-1)[self.predicting + 1]


DecoderObjective = Objective[Decoder, TokenBatch]
"""An objective that calls a decoder on rows of tokens."""
Draw = Callable[[random.Random, int], Sequence[Pair]]
"""Pairs of an epoch, given its generator and number."""


def pairs_of(prompts: Sequence[Prompt]) -> list[Pair]:
    """One pair per reference.

    Raises:
        ConfigError: no prompt has a reference, or one is a conversation (not trained on yet).
    """
    texts = texts_of(prompts)
    pairs = [(text, answer) for text, prompt in zip(texts, prompts, strict=True) for answer in prompt.references]
    if not pairs:
        raise ConfigError(f'none of {len(prompts)} rows has a "reference" to learn; regenerate answers first')
    return pairs


def texts_of(prompts: Sequence[Prompt]) -> list[str]:
    """The prompts themselves, in order.

    Raises:
        ConfigError: one is a conversation (not trained on yet).
    """
    texts = [prompt.request for prompt in prompts if isinstance(prompt.request, str)]
    if len(texts) < len(prompts):
        raise ConfigError('training takes rows with "prompt"; found a row with "messages"')
    return texts


class Rows:
    """Pairs as tokens of one tokenizer, at most ``longest`` of them."""

    def __init__(self, tokenizer: Tokenizer, longest: int) -> None:
        """Prepare.

        Raises:
            ConfigError: the tokenizer has no end-of-text token to stop at.
        """
        if not tokenizer.eos_ids:
            raise ConfigError("the tokenizer has no end-of-text token, so a model could not learn to stop")
        self._tokenizer = tokenizer
        self._end = tokenizer.eos_ids[0]
        self._longest = longest

    def encode(self, pairs: Sequence[Pair]) -> list[Row]:
        """Tokens of each pair, in order; pairs longer than the limit are left out.

        Raises:
            CapacityError: none is short enough.
        """
        tokenizer = self._tokenizer
        given = [self._template(prompt) for prompt, _ in pairs]
        prompts = tokenizer.inner(given, add_special_tokens=not tokenizer.has_template)["input_ids"]
        answers = tokenizer.inner([answer for _, answer in pairs], add_special_tokens=False)["input_ids"]
        rows = [Row((*p, *a, self._end), len(p)) for p, a in zip(prompts, answers, strict=True)]
        kept = [row for row in rows if len(row.tokens) <= self._longest]
        if rows and not kept:
            shortest = min(len(row.tokens) for row in rows)
            raise CapacityError(f"the shortest of {len(rows)} rows has {shortest} tokens, the limit is {self._longest}")
        return kept

    def _template(self, prompt: str) -> str:
        if not self._tokenizer.has_template:
            return prompt
        return self._tokenizer.prompt_text([{"role": "user", "content": prompt}])


class Batches:
    """The batches of every epoch, from any place on."""

    def __init__(self, draw: Draw, rows: Rows, *, tokens_per_batch: int, seed: int = 0) -> None:
        """Prepare.

        Args:
            draw: pairs of an epoch.
            rows: makes tokens of them.
            tokens_per_batch: upper bound on B * T; a longer row is a batch of its own.
            seed: of everything drawn.

        Raises:
            ConfigError: no room for a token.
        """
        if tokens_per_batch < _GRID:
            raise ConfigError(f"tokens_per_batch must be at least {_GRID}, found {tokens_per_batch}")
        self._draw = draw
        self._rows = rows
        self._tokens = tokens_per_batch
        self._seed = seed

    def start_at(self, place: Place) -> Iterator[tuple[Place, TokenBatch]]:
        """Batches without end, each with the place after it."""
        epoch, first = place.epoch, place.index
        while True:
            groups = self.epoch(epoch)
            for index in range(first, len(groups)):
                yield Place(epoch, index + 1), collate(groups[index])
            epoch, first = epoch + 1, 0

    def epoch(self, number: int) -> list[list[Row]]:
        """Rows of each batch of an epoch, in order."""
        rng = random.Random(f"{self._seed}/{number}")
        rows = self._rows.encode(self._draw(rng, number))
        return grouped(rows, self._tokens, rng)


def grouped(rows: Sequence[Row], tokens_per_batch: int, rng: random.Random | None = None) -> list[list[Row]]:
    """Rows of like length together, shuffled within a length and then batch by batch; in order without ``rng``."""
    by_length: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_length[_padded(len(row.tokens))].append(row)
    groups = []
    for length in sorted(by_length):
        alike = by_length[length]
        if rng is not None:
            rng.shuffle(alike)
        count = max(1, tokens_per_batch // length)
        groups += [alike[first : first + count] for first in range(0, len(alike), count)]
    if rng is not None:
        rng.shuffle(groups)
    return groups


def collate(rows: Sequence[Row]) -> TokenBatch:
    """One batch, padded on the right with token 0, which is never scored there nor read from there."""
    length = _padded(max(len(row.tokens) for row in rows))
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    scored = torch.zeros(len(rows), length, dtype=torch.bool)
    for index, row in enumerate(rows):
        tokens[index, : len(row.tokens)] = torch.tensor(row.tokens)
        scored[index, row.num_prompt : len(row.tokens)] = True
    return TokenBatch(tokens, scored)


def _padded(length: int) -> int:
    return -(-length // _GRID) * _GRID
