"""Batches for encoder-decoder models: pairs of a source and its text.

Sources are not padded. A batch holds sources of one length, so the encoder needs no mask and every source is read as
it is when it is read alone. Texts are padded on the right, where no scored token reads.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vivace.checkpoint.tokenizer import Tokenizer
from vivace.errors import CapacityError, ConfigError
from vivace.train.variation import Pair


@dataclass(frozen=True)
class SourceRow:
    """A training example as token ids."""

    source: tuple[int, ...]
    text: tuple[int, ...]
    """What is to be written, the end token included and the start token not."""


@dataclass(frozen=True)
class SourceBatch:
    """Sources of one length S and their texts, padded on the right to a common length T."""

    sources: Tensor
    """(B, S) int64."""
    given: Tensor
    """(B, T) int64: the start token, then the texts without their last token."""
    targets: Tensor
    """(B, T) int64: the token to be predicted behind each of ``given``; -1 where there is none."""

    @property
    def num_elements(self) -> int:
        """Number of tokens of sources and texts, padding included."""
        return self.sources.numel() + self.given.numel()

    @property
    def weight(self) -> int:
        """Number of tokens to be predicted."""
        return int((self.targets >= 0).sum())


class SourceRows:
    """Encodes pairs as sources of at most ``longest_source`` tokens and texts of at most ``longest``."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        start: int,
        longest_source: int,
        longest: int,
        device: torch.device | None = None,
    ) -> None:
        """Set the limits, beyond which a source is cut and a pair with a longer text is left out.

        Args:
            tokenizer: writes both sides; a tokenizer with an own vocabulary or markers for texts is asked for them.
            start: token with which every text begins.
            longest_source: most tokens of a source, its own end token among them.
            longest: most tokens of a text, the end token among them.
            device: where batches are made for; None is the CPU.

        Raises:
            ConfigError: the tokenizer has no end-of-text token, which every text ends with.
        """
        if not tokenizer.eos_ids:
            raise ConfigError("the tokenizer has no end-of-text token, so a model could not learn to stop")
        self._tokenizer = tokenizer
        self._end = tokenizer.eos_ids[0]
        self._start = start
        self._longest_source = longest_source
        self._longest = longest
        self._device = device

    def encode(self, pairs: Sequence[Pair]) -> list[SourceRow]:
        """Encode pairs in order; sources that are too long are cut, texts that are too long are left out.

        Raises:
            CapacityError: all texts are longer than the limit.
        """
        inner = self._tokenizer.inner
        limit = {"truncation": True, "max_length": self._longest_source}
        sources = inner([source for source, _ in pairs], **limit)["input_ids"]
        texts = inner(text_target=[text for _, text in pairs], verbose=False)["input_ids"]
        ended = [text if text and text[-1] == self._end else [*text, self._end] for text in texts]
        rows = [SourceRow(tuple(s), tuple(t)) for s, t in zip(sources, ended, strict=True) if s]
        kept = [row for row in rows if len(row.text) <= self._longest]
        if rows and not kept:
            shortest = min(len(row.text) for row in rows)
            raise CapacityError(
                f"the shortest of {len(rows)} texts has {shortest} tokens, the limit is {self._longest}"
            )
        return kept

    def note_left_out(self, pairs: Sequence[Pair], note: Callable[[str], None]) -> None:
        """Say how many pairs are left out and how many sources are cut, if any.

        Raises:
            CapacityError: all pairs are left out.
        """
        if left_out := len(pairs) - len(self.encode(pairs)):
            note(
                f"{left_out} of {len(pairs)} rows have texts of more than {self._longest} tokens or empty sources and "
                "are left out"
            )
        lengths = map(len, self._tokenizer.inner([source for source, _ in pairs], verbose=False)["input_ids"])
        if cut := sum(length > self._longest_source for length in lengths):
            note(f"{cut} of {len(pairs)} sources have more than {self._longest_source} tokens and are cut")

    def grouped(
        self, rows: Sequence[SourceRow], tokens_per_batch: int, rng: random.Random | None = None
    ) -> list[list[SourceRow]]:
        """Divide rows into batches of sources of one length, with texts of nearly one length.

        Args:
            rows: encoded examples.
            tokens_per_batch: upper bound on the tokens of a batch, padding of texts included.
            rng: shuffles rows whose texts are equally long, then the batches; None keeps the order of length.
        """
        by_length: defaultdict[int, list[SourceRow]] = defaultdict(list)
        for row in rows:
            by_length[len(row.source)].append(row)
        groups: list[list[SourceRow]] = []
        for length in sorted(by_length):
            alike = by_length[length]
            if rng is not None:
                rng.shuffle(alike)
            groups += _filled(sorted(alike, key=lambda row: -(-len(row.text) // 4)), length, tokens_per_batch)
        if rng is not None:
            rng.shuffle(groups)
        return groups

    def collate(self, rows: Sequence[SourceRow]) -> SourceBatch:
        """Make a batch of rows whose sources are equally long."""
        length = max(len(row.text) for row in rows)
        given = torch.full((len(rows), length), self._start, dtype=torch.int64)
        targets = torch.full((len(rows), length), -1, dtype=torch.int64)
        for index, row in enumerate(rows):
            text = torch.tensor(row.text)
            targets[index, : len(text)] = text
            given[index, 1 : len(text)] = text[:-1]
        sources = torch.tensor([row.source for row in rows], dtype=torch.int64)
        return SourceBatch(sources.to(self._device), given.to(self._device), targets.to(self._device))

    def batches(self, pairs: Sequence[Pair], tokens_per_batch: int) -> list[SourceBatch]:
        """Return batches that hold each pair once, in order of length."""
        return [self.collate(group) for group in self.grouped(self.encode(pairs), tokens_per_batch)]


def _filled(rows: Sequence[SourceRow], source: int, tokens_per_batch: int) -> list[list[SourceRow]]:
    """Fill batches with rows in rising order of their texts' lengths."""
    groups: list[list[SourceRow]] = []
    current: list[SourceRow] = []
    for row in rows:
        if current and (len(current) + 1) * (source + len(row.text)) > tokens_per_batch:
            groups.append(current)
            current = []
        current.append(row)
    return [*groups, current] if current else groups
