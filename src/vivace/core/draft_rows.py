"""Who guesses inside native calls, as data, and what drafts with them: no technique is called back from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from vivace.core.seams import Decided, Draft

if TYPE_CHECKING:
    from vivace.core.cache import KVCache
    from vivace.core.low_rank import LowRankDeltas
    from vivace.kernels.low_bit import Weights


class Root(NamedTuple):
    """Where a chain begins."""

    slot: int
    token: int
    limit: int
    """Tokens below it at most."""


class ChainPlan(NamedTuple):
    """How a companion drafts chains."""

    min_confidence: float = 0.0
    """A guess less likely than this is the last of its chain; 0 stops none."""
    weights: Weights = "bf16"
    """What the layers below the gate, the head and the companion's readings are copied as for drafting."""
    steps: int = 1
    """Chains that are drafted and verified before the way back."""
    room: int = 1
    """Rows that may be kept in them."""


@dataclass(frozen=True, eq=False)
class DeepRead:
    """Attention of a companion to what a deep layer stored about verified positions."""

    layer: int
    """Whose keys and values are read."""
    gain: Tensor
    """(E,) of the norm before the query."""
    query: Tensor
    """(H D, E)."""
    output: Tensor
    """(E, H D), added to the residual."""


@dataclass(frozen=True, eq=False)
class DraftRows:
    """A row behind each slow row below a gate: it reads what that one reads, stores nothing, and guesses."""

    gate: int
    deltas: LowRankDeltas
    """Its terms; one adapter, weights that do not change."""
    is_fed: bool
    """It passes the feed-forward."""
    scale: Tensor
    """(E,) on its residual at the gate, before the final norm."""
    reads: tuple[DeepRead, ...] = ()
    """One before each of the first layers."""
    feedback: Tensor | None = None
    """(depths E, E): offsets of the next chain from the normed final residual of the last row kept."""


@dataclass(frozen=True, eq=False)
class StreamRows:
    """Rows that follow the last kept row from a layer on, read what it stored and one another, and guess at the top."""

    insertion: int
    """The layer they enter first."""
    deltas: LowRankDeltas
    """Their terms; one adapter, weights that do not change."""
    marks: Tensor
    """(count, E) added to what the row had there, one by one."""
    feedback: Tensor | None = None
    """(count E or more, 2 E): added too, times that row's size, from its normed final residual and the root's normed
    embedding."""


class Chain(Protocol):
    """Drafts chains of guesses at once, bit for bit what the steps one by one give."""

    def covers(self, companion: DraftRows) -> bool:
        """Whether it can draft with this one."""
        ...

    def prepare(self, companion: DraftRows, weights: Weights) -> None:
        """Make now whatever the first draft would have to make."""
        ...

    def draft(
        self,
        roots: Sequence[Root],
        companion: DraftRows,
        offsets: Tensor | None,
        cache: KVCache,
        plan: ChainPlan,
    ) -> Draft:
        """One chain below each root; ``offsets`` (n, depths, E) start companions.

        With residuals at the gate; without, and with copies in few bits, where the plan's weights say so.
        """
        ...

    def decide(self, roots: Sequence[Root], cache: KVCache, ends: Sequence[int] = ()) -> Decided:
        """Steps of plain greedy decoding below each root, none below one of ``ends``."""
        ...

    def speculate(
        self,
        root: Root,
        companion: DraftRows,
        offsets: Tensor | None,
        cache: KVCache,
        plan: ChainPlan,
        ends: Sequence[int] = (),
    ) -> Decided:
        """Steps of drafting and verification of one greedy sequence."""
        ...

    def follow(
        self,
        root: Root,
        followers: StreamRows,
        left: tuple[Tensor, Tensor | None],
        cache: KVCache,
        plan: ChainPlan,
        ends: Sequence[int] = (),
    ) -> tuple[Decided, Tensor]:
        """The same with followers; what the last kept row left (E,) where they enter, before and after."""
        ...
