"""What a caller asks for and what comes back, in tokens; text is one floor up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from vivace.core.low_rank import Adapter
from vivace.core.sampling import Sampling
from vivace.core.seams import Drafter, Prefix
from vivace.decode.prefill import FULL, Prefill
from vivace.decode.stats import DecodeStats
from vivace.errors import CapacityError, ConfigError, NoTokenError, VivaceError

Processor = Callable[[Tensor, Tensor], Tensor]
"""A logits processor of transformers: (1, S) token ids and (1, V) logits -> (1, V) logits."""

FinishReason = Literal["stop", "length", "error"]
"""Why there is no further token; "error" is for requests that failed, whose last event says how."""


@dataclass(frozen=True)
class StopRule:
    """When a text ends, other than by its length."""

    end_tokens: frozenset[int] = frozenset()
    """End-of-text ids; the one that occurs is the last token returned."""
    stop_strings: tuple[str, ...] = ()
    """The token that completes one of these is the last token returned."""
    detokenize: Callable[[Sequence[int]], str] | None = None
    """Needed for stop strings."""
    min_new_tokens: int = 0
    """End tokens cannot be drawn before this many tokens."""
    criterion: Callable[[Sequence[int]], bool] | None = None
    """Any other reason to stop, asked with the new tokens after each of them."""

    def __post_init__(self) -> None:
        if any(not text for text in self.stop_strings):
            raise ConfigError("a stop string must not be empty")
        assert not self.stop_strings or self.detokenize is not None, "stop strings need a detokenizer"

    def stops_at(self, tokens: Sequence[int]) -> bool:
        """Whether a text whose new tokens are these ends with the last of them."""
        if tokens[-1] in self.end_tokens and len(tokens) > self.min_new_tokens:
            return True
        if self.criterion is not None and self.criterion(tokens):
            return True
        if not self.stop_strings or self.detokenize is None:
            return False
        # a piece is at least one byte and a character at most four, so this many tokens hold any stop string
        longest = 4 * max(len(text) for text in self.stop_strings) + 4
        tail = self.detokenize(tokens[-longest:])
        return any(text in tail for text in self.stop_strings)


@dataclass(frozen=True)
class Request:
    """One sequence to decode."""

    tokens: tuple[int, ...]
    """Prompt ids, at least one."""
    max_new_tokens: int
    drafter: Drafter
    """One object for all requests of a method; a session drafts together for those that share it."""
    sampling: Sampling = field(default_factory=Sampling)
    stop: StopRule = field(default_factory=StopRule)
    seed: int = 0
    logprobs: bool = False
    """Also return log p(token) under the model before any processor."""
    processors: tuple[Processor, ...] = ()
    """Applied to the logits before ``sampling``, in order."""
    num_top_logprobs: int = 0
    """Likeliest tokens returned for every place, with their log p; needs ``logprobs``."""
    shows_guesses: bool = False
    """Also return what was drafted for every place."""
    adapter: Adapter | None = None
    """Low-rank deltas that the model carries for this request; drafts are verified against the model with them."""
    prefill: Prefill = FULL
    """How the prompt is read; one object for all requests that read alike."""
    prefix: Prefix | None = None
    """Asked for entries of the prompt before it is prefilled, and given them after."""

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ConfigError("the prompt is empty; give at least one token")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, found {self.max_new_tokens}")

    @property
    def takes_argmax(self) -> bool:
        """Whether the argmax of the raw logits is always the next token."""
        return self.sampling.is_argmax and self.stop.min_new_tokens == 0 and not self.processors

    @property
    def reads_prefix(self) -> bool:
        """Whether the next token's law depends on earlier tokens beyond the logits."""
        return self.sampling.reads_prefix or self.stop.min_new_tokens > 0 or bool(self.processors)

    def without_a_token(self, num_new: int) -> NoTokenError:
        """What to say when every token is excluded after so many new ones: what of this request excludes some."""
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
        """Refuse what a slot of this capacity cannot hold.

        Raises:
            CapacityError: prompt and new tokens together are longer than the context.
        """
        needed = len(self.tokens) + self.max_new_tokens
        if needed > capacity:
            raise CapacityError(
                f"the prompt has {len(self.tokens)} tokens and max_new_tokens is {self.max_new_tokens}, together "
                f"{needed}; the context holds {capacity}; shorten one of them"
            )


@dataclass(frozen=True)
class Emitted:
    """New tokens of one request, one step's worth."""

    request_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    finish_reason: FinishReason | None
    """Set on the last one."""
    stats: DecodeStats
    """Counters of the request so far (the same object until it finishes)."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    """The likeliest tokens and their log p for the place of each token."""
    guesses: tuple[tuple[int, ...], ...] | None = None
    """What was drafted for the place of each token; the token is among them when it was accepted."""
    error: VivaceError | None = None
    """Set on the last event of a request that failed, which has no tokens."""
