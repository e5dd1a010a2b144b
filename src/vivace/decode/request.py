"""What a caller asks of a session and what the session returns, in tokens. Text is handled by the layers above."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from vivace.core.config import ModelConfig
from vivace.core.draws import TEMPERATURES
from vivace.core.low_rank import AdapterSource
from vivace.core.sampling import Sampling
from vivace.core.seams import Drafter, Prefix
from vivace.decode.beams import BeamPlan, Hypothesis
from vivace.decode.guarding import Guarding, GuardVerdict
from vivace.decode.prefill import FULL, Prefill
from vivace.decode.stats import DecodeStats
from vivace.errors import CapacityError, ConfigError, NoTokenError, VivaceError

if TYPE_CHECKING:
    from vivace.core.cache import KVCache

Processor = Callable[[Tensor, Tensor], Tensor]
"""A logits processor as in transformers: token ids (1, S) and logits (1, V) -> logits (1, V)."""

FinishReason = Literal["stop", "length", "content_filter", "error"]
"""Why no further token follows. A request that failed ends with "error", and its last event carries the error. With
"content_filter" a guard refused the prompt, or what the answer would have gone on with."""


@dataclass(frozen=True)
class StopRule:
    """The reasons for which a text ends before its length limit."""

    end_tokens: frozenset[int] = frozenset()
    """Ids of end-of-text tokens. The one that occurs is the last token returned."""
    stop_strings: tuple[str, ...] = ()
    """The text ends with the token that completes one of these strings; that token is still returned."""
    detokenize: Callable[[Sequence[int]], str] | None = None
    """Turns token ids into text; required where there are stop strings."""
    min_new_tokens: int = 0
    """End tokens cannot be drawn before this many new tokens."""
    criterion: Callable[[Sequence[int]], bool] | None = None
    """A further reason to stop, called with all new tokens after each of them."""

    def __post_init__(self) -> None:
        if any(not text for text in self.stop_strings):
            raise ConfigError("a stop string must not be empty")
        assert not self.stop_strings or self.detokenize is not None, "stop strings need a detokenizer"

    @property
    def reads_text(self) -> bool:
        """Return whether it depends on more than the last token and the number of tokens."""
        return self.criterion is not None or bool(self.stop_strings)

    def ends_with(self, token: int, num_tokens: int) -> bool:
        """Return whether a text of ``num_tokens`` new ones ends since ``token`` is the last of them."""
        return token in self.ends_at(num_tokens)

    def ends_at(self, num_tokens: int) -> frozenset[int]:
        """Return the tokens that end a text as the last of ``num_tokens`` new ones."""
        return self.end_tokens if num_tokens > self.min_new_tokens else frozenset()

    def stops_at(self, tokens: Sequence[int]) -> bool:
        """Return whether a text whose new tokens are ``tokens`` ends with the last of them."""
        if self.ends_with(tokens[-1], len(tokens)):
            return True
        if self.criterion is not None and self.criterion(tokens):
            return True
        if not self.stop_strings or self.detokenize is None:
            return False
        # a token has at least one byte and a character at most four, so this many tokens cover any stop string
        longest = 4 * max(len(text) for text in self.stop_strings) + 4
        tail = self.detokenize(tokens[-longest:])
        return any(text in tail for text in self.stop_strings)


class Lead(Protocol):
    """Entries in front of a text that belong to no token: a soft prompt."""

    @property
    def name(self) -> str:
        """Return what it is called in statistics."""
        ...

    @property
    def count(self) -> int:
        """Return how many entries it has."""
        ...

    @property
    def version(self) -> str:
        """Return what its entries are known by, which tells entries of texts behind them from others."""
        ...

    def attach(self, slot: int, cache: KVCache) -> None:
        """Let an empty slot begin with its entries."""
        ...


@dataclass(frozen=True)
class Request:
    """One sequence to decode: its prompt, its limits, how it is drafted, sampled and stopped."""

    tokens: tuple[int, ...]
    """Prompt ids, at least one."""
    max_new_tokens: int
    drafter: Drafter
    """The method. Requests that share the object are drafted for together."""
    sampling: Sampling = field(default_factory=Sampling)
    stop: StopRule = field(default_factory=StopRule)
    seed: int = 0
    logprobs: bool = False
    """Whether log p(token) under the model before any processor is returned."""
    processors: tuple[Processor, ...] = ()
    """Logits processors, applied in this order before ``sampling``."""
    num_top_logprobs: int = 0
    """Number of likeliest tokens returned with their log p for every position; needs ``logprobs``."""
    shows_guesses: bool = False
    """Whether the tokens drafted for every position are returned."""
    adapter: AdapterSource | None = None
    """Low-rank deltas added to the model for this request; drafts are verified against the model with them."""
    prefill: Prefill = FULL
    """How the prompt is read. Requests that share the object may be read in one pass."""
    prefill_reason: str | None = None
    """Why the prompt is read in full although something else was asked for."""
    beams: BeamPlan | None = None
    """How the likeliest text is searched for; None takes or draws one token after the other."""
    source: tuple[int, ...] | Tensor | None = field(default=None, compare=False)
    """What the encoder of an encoder-decoder model reads: token ids, or its output for them, (S, E)."""
    barred: tuple[int, ...] = ()
    """Tokens that are never written."""
    forced_first: int | None = None
    """First new token, whatever the model says."""
    forced_last: int | None = None
    """Token that a text of ``max_new_tokens`` has to end with, if nothing else has ended it."""
    guard: Guarding | None = field(default=None, compare=False)
    """Judges the text while it is written; nothing of it is shown before."""
    lead: Lead | None = field(default=None, compare=False)
    """Entries that stand in front of the text and belong to no token; None for none."""
    refused: GuardVerdict | None = None
    """A guard's verdict on the prompt, known before it is read; if there is one, it is not read."""
    prefix: Prefix | None = None
    """A cache of prompts: asked for entries of this prompt before it is prefilled, and given its entries afterwards."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ConfigError("the prompt is empty; give at least one token")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, found {self.max_new_tokens}")

    @property
    def num_entries(self) -> int:
        """Return the largest number of entries that prompt and new tokens take in a slot: beams have their own each."""
        count = len(self.tokens) + self.max_new_tokens * (1 if self.beams is None else self.beams.num_beams)
        return count + self.num_leading

    @property
    def num_leading(self) -> int:
        """Return the number of entries in front of the text."""
        return 0 if self.lead is None else self.lead.count

    @property
    def takes_argmax(self) -> bool:
        """Return whether the next token is always the argmax of the raw logits."""
        return self.sampling.is_argmax and not self._changes_scores

    @property
    def reads_prefix(self) -> bool:
        """Return whether the distribution of the next token depends on earlier tokens beyond the logits."""
        return self.sampling.reads_prefix or self._changes_scores

    @property
    def is_drawn_from_logits(self) -> bool:
        """Return whether tokens are drawn, and nothing but a temperature and top-p changes the distribution."""
        sampling, (least, most) = self.sampling, TEMPERATURES
        is_plain = sampling.top_k == 0 and sampling.min_p == 0 and not self.reads_prefix
        return is_plain and sampling.do_sample and least <= sampling.temperature <= most

    @property
    def _changes_scores(self) -> bool:
        is_forced = self.forced_first is not None or self.forced_last is not None
        return self.stop.min_new_tokens > 0 or bool(self.processors) or bool(self.barred) or is_forced

    def without_a_token(self, num_new: int) -> NoTokenError:
        """Return the error for a text after whose ``num_new`` new tokens none may follow: it names what
        excludes them.
        """
        bars = {
            "its logits processors (a grammar, a bias)": bool(self.processors),
            "its least length": num_new < self.stop.min_new_tokens,
            "its ban on repeated n-grams": self.sampling.no_repeat_ngram_size > 0,
        }
        found = " and ".join(name for name, is_set in bars.items() if is_set) or "the model itself"
        return NoTokenError(
            f"no token may come after {num_new} new ones: every one is excluded by {found}; ask for less of that"
        )

    def check_fits(self, capacity: int) -> None:
        """Raise an error if prompt and new tokens exceed a slot of ``capacity`` tokens.

        Raises:
            CapacityError: prompt and new tokens together are longer than the context.
        """
        needed = len(self.tokens) + self.max_new_tokens + self.num_leading
        if needed > capacity:
            behind = f" behind a soft prompt of {self.num_leading}" if self.num_leading else ""
            raise CapacityError(
                f"the prompt has {len(self.tokens)} tokens{behind} and max_new_tokens is {self.max_new_tokens}, "
                f"together {needed}; the context holds {capacity}; shorten one of them"
            )

    def check_entries(self, capacity: int) -> None:
        """Raise an error if the beams of this request may need more than the ``capacity`` entries of a slot.

        Raises:
            CapacityError: they may.
        """
        if self.beams is not None and self.num_entries > capacity:
            raise CapacityError(
                f"{self.beams.num_beams} beams of {self.max_new_tokens} tokens behind a prompt of {len(self.tokens)} "
                f"may need {self.num_entries} entries; there are {capacity}: ask for fewer beams or a shorter answer"
            )

    def check_source(self, config: ModelConfig) -> None:
        """Raise an error for a source that the model's encoder cannot read, and for one that it lacks.

        Raises:
            ConfigError: there is none, or the model has no encoder.
            CapacityError: it is longer than the encoder's positions.
        """
        if (self.source is None) != (config.encoder is None):
            what = "reads a source beside its text" if self.source is None else "has no encoder that reads a source"
            raise ConfigError(f"this model {what}; make the request with an engine of this model")
        if self.source is None or config.encoder is None:
            return
        count, most = len(self.source), config.encoder.max_positions
        if not count:
            raise ConfigError("the source is empty; give at least one character")
        if count > most:
            raise CapacityError(
                f"the source has {count} tokens; the encoder of this model holds {most}; shorten or divide it"
            )

    def check_rotation(self, config: ModelConfig) -> None:
        """Refuse a text that would go beyond the length at which the model's rotary embedding changes.

        Raises:
            CapacityError: the prompt is of the length of short texts, and the answer may not be.
        """
        room = config.room(len(self.tokens))
        if room < config.max_positions and len(self.tokens) + self.max_new_tokens > room:
            raise CapacityError(
                f"the prompt has {len(self.tokens)} tokens and max_new_tokens is {self.max_new_tokens}; this model "
                f"rotates texts of more than {room} tokens in another way (longrope), so a text that begins with a "
                f"shorter prompt ends there: ask for {max(0, room - len(self.tokens))} new tokens at most, or give "
                f"more than {room} tokens"
            )


@dataclass(frozen=True)
class Emitted:
    """New tokens of one request from one step, or its failure."""

    request_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason | None
    """Why the text ends here; None while it goes on."""
    stats: DecodeStats
    """Counters of the request so far; the same object until the request finishes."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    """For the position of each token: the likeliest tokens and their log p."""
    guesses: tuple[tuple[int, ...], ...] | None = None
    """For the position of each token: the tokens drafted there. An accepted token is among them."""
    hypotheses: tuple[Hypothesis, ...] = ()
    """On the last event of a beam search: what it found, the best first, whose tokens the events have."""
    error: VivaceError | None = None
    """What went wrong, on the last event of a request that failed; that event has no tokens."""
