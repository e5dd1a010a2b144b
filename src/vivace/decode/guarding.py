"""The seam of a guard: what judges a text while it is written, and what is held back until it is judged.

A guard belongs to a request (``Request.guard``); a sequence opens its own ``Watch`` from it. The session gives it every
token that is decided, with the residual that the token follows, which is there anyway. What the watch is not certain of
is withheld: neither token ids nor text nor log-probabilities of it leave the session. Where a verdict blocks, the
sequence ends before the first token that the verdict is about, and its entries are cut at the same place. So nothing
depends on how tokens are divided into drafts, calls or blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from vivace.decode.request import Emitted

Action = Literal["allow", "flag", "block"]
"""What follows from a verdict: nothing, a note in the statistics, or the end of the text."""


class GuardVerdict(NamedTuple):
    """What a guard says about a text; never a part of the text itself."""

    category: str | None
    """The category that was found, None where nothing was."""
    score: float
    """How sure the guard is of it, 0 to 1; rules are always sure."""
    action: Action

    @property
    def blocks(self) -> bool:
        """Return whether the text must not be shown, or not be answered."""
        return self.action == "block"


ALLOWED = GuardVerdict(None, 0.0, "allow")
"""Nothing was found."""


class Watch(Protocol):
    """Judges one text while it is written."""

    scores: dict[str, float]
    """By category, the highest score that was seen of what was flagged or blocked."""

    @property
    def num_certain(self) -> int:
        """Return how many of the new tokens may be shown whatever follows them."""
        ...

    def read_prompt(self, hidden: Tensor) -> None:
        """Take residuals of prompt tokens after the last layer, (n, E), the next ones in order."""
        ...

    def take(self, tokens: Sequence[int], hidden: Tensor) -> GuardVerdict:
        """Judge the text with further tokens.

        Args:
            tokens: the next new tokens, in order.
            hidden: (n, E) residual after the last layer of the token before each of them: of the last prompt token, for
                the first.

        Returns:
            The first verdict that blocks, after which no further token may be given; else one that allows.

        Raises:
            UsageError: a rule took too long on this text.
        """
        ...

    def end(self) -> GuardVerdict:
        """Judge the text as one that ends here."""
        ...

    def forked(self) -> Watch:
        """Return a watch of a text that begins with all that this one has."""
        ...


class Guarding(Protocol):
    """Opens watches for the sequences of a request."""

    def open(self) -> Watch:
        """Return the watch of a sequence that has no new token yet."""
        ...


class Withheld:
    """Passes on the tokens of one sequence once they are judged."""

    def __init__(self, watch: Watch) -> None:
        """Begin with no token; ``watch`` judges."""
        self.watch = watch
        self._held: Emitted | None = None
        self.num_shown = 0
        """Number of new tokens that were passed on."""

    def forked(self) -> Withheld:
        """Return the same for a text that goes on by itself."""
        other = Withheld(self.watch.forked())
        other._held, other.num_shown = self._held, self.num_shown
        return other

    def judged(self, event: Emitted, hidden: Tensor) -> Emitted:
        """Judge the tokens of a block and return the event with those that may be shown now, older ones first.

        Args:
            event: the block as it would be without a guard.
            hidden: (n, E) residuals that its tokens follow.

        Returns:
            The event; its reason is "content_filter" where the text ends here since what follows is blocked.

        Raises:
            UsageError: a rule took too long on this text.
        """
        verdict = self.watch.take(event.tokens, hidden)
        if not verdict.blocks and event.finish_reason is not None:
            verdict = self.watch.end()
        event.stats.guard = dict(self.watch.scores)
        if verdict.blocks:
            event = replace(event, finish_reason="content_filter")
        whole = event if self._held is None else _joined(self._held, event)
        count = self.watch.num_certain - self.num_shown
        self._held = _part(whole, count, len(whole.tokens))
        self.num_shown += count
        return _part(whole, 0, count)


def _joined(first: Emitted, second: Emitted) -> Emitted:
    """Return two events of one text as one, with what the second says besides tokens."""
    parts: dict[str, Any] = {}
    for name in _PARALLEL:
        one, other = getattr(first, name), getattr(second, name)
        parts[name] = None if other is None else (*(one or ()), *other)
    return replace(second, **parts)


def _part(event: Emitted, start: int, stop: int) -> Emitted:
    """Return an event with some of its tokens and their data."""
    values: dict[str, Any] = {name: getattr(event, name) for name in _PARALLEL}
    return replace(event, **{name: value and value[start:stop] for name, value in values.items()})


_PARALLEL = ("tokens", "logprobs", "top_logprobs", "guesses")
"""What an event has of each of its tokens."""
