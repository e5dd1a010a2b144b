"""Our own decoding methods as systems of the benchmark; the engine is passed in, since it is on a floor above."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

from torch import Tensor

from vivace.core.model import Decoder
from vivace.decode.stats import DecodeStats
from vivace.errors import ConfigError
from vivace.evaluate.benchmark import BenchmarkPrompt, Trial
from vivace.evaluate.memory import peak_memory


class Answered(Protocol):
    """The answer to one prompt."""

    @property
    def text(self) -> str:
        """Text of the answer without special tokens."""

    @property
    def token_ids(self) -> Sequence[int]:
        """New tokens."""

    @property
    def stats(self) -> DecodeStats:
        """Statistics of how the answer was decoded."""


class Answering(Protocol):
    """The part of an engine that the benchmark uses."""

    @property
    def model(self) -> Decoder:
        """The decoder."""

    def generate(self, prompts: Any, **options: Any) -> Sequence[Answered]:
        """Answer prompts together."""

    def logits(self, token_ids: Any) -> Tensor:
        """Return the next-token logits at every position, (B, T) -> (B, T, V)."""


@dataclass(frozen=True)
class MethodSystem:
    """One of our decoding methods, or ``METHOD@TARGET`` for one with early exits."""

    name: str
    engine: Answering
    max_new_tokens: int
    raw: bool = False

    @property
    def quality(self) -> float | None:
        """Agreement target behind the @; None if there is none.

        Raises:
            ConfigError: the target is not a number.
        """
        _, at, quality = self.name.partition("@")
        try:
            return float(quality) if at else None
        except ValueError:
            raise ConfigError(f"{self.name!r}: a quality is a number, as in dynamic@0.98") from None

    def answer(self, batch: Sequence[BenchmarkPrompt]) -> Trial:
        """Answer one batch with greedy decoding."""
        requests = [question.request for question in batch]
        with peak_memory(self.engine.model.device) as peak:
            start = time.perf_counter()
            results = self.engine.generate(
                requests,
                method=self.name.partition("@")[0],
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
                raw=self.raw,
                logprobs=False,
                batch_size=len(batch),
                quality=self.quality,
            )
            total_s = time.perf_counter() - start
        stats = [result.stats for result in results]
        return Trial(
            token_ids=tuple(tuple(result.token_ids) for result in results),
            num_first_tokens=sum(s.num_first_tokens for s in stats),
            decode_s=max(s.decode_s for s in stats),
            total_s=total_s,
            prefill_s=max(s.prefill_s for s in stats),
            draft_s=max(s.draft_s for s in stats),
            verify_s=max(s.verify_s for s in stats),
            peak_memory_bytes=peak.num_bytes,
            num_steps=sum(s.num_spec_steps for s in stats),
            num_drafted=sum(s.num_draft_tokens for s in stats),
            num_accepted=sum(s.num_accepted_draft_tokens for s in stats),
            drafted_per_position=_column_sums([s.drafted_per_position for s in stats]),
            accepted_per_position=_column_sums([s.accepted_per_position for s in stats]),
            exit_layers=tuple(layer for s in stats for layer in s.exit_layers),
            num_early_exits=sum(s.num_early_exits for s in stats),
            num_layer_passes=sum(s.num_layer_passes for s in stats),
        )


def _column_sums(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Add up rows of different lengths, position by position."""
    return tuple(sum(column) for column in zip_longest(*rows, fillvalue=0))
