"""Rows that draft inside a native call, described as data, and the interface that drafts with them.

A native call cannot call a technique back, so a technique describes its draft rows by weights: ``DraftRows`` of a chain
below an exit layer, or ``StreamRows`` that follow the last kept row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor, nn

from vivace.core.draws import Drawing
from vivace.core.seams import Decided, Draft

if TYPE_CHECKING:
    from vivace.core.cache import KVCache
    from vivace.core.config import ModelConfig
    from vivace.core.draft_head import DraftHead
    from vivace.core.low_rank import LowRankDeltas
    from vivace.kernels.low_bit import LowBit, Weights


class ChainRoot(NamedTuple):
    """The last committed token of a sequence, below which a chain begins."""

    slot: int
    """Slot of the sequence in the cache."""
    token: int
    """The token."""
    limit: int
    """Largest number of tokens below it."""
    drawing: Drawing | None = None
    """How tokens are drawn, guesses too; None takes the likeliest."""


class ChainPlan(NamedTuple):
    """How chains are drafted, and how many in one call."""

    min_confidence: float = 0.0
    """Probability below which a guess is the last of its chain; 0 stops no chain."""
    weights: Weights = "bf16"
    """Format in which drafting reads the layers it runs, the head and the deep reads."""
    head: DraftHead | None = None
    """What guesses are read with; None is the decoder's head."""
    steps: int = 1
    """Largest number of steps of drafting and verification in one call."""
    room: int = 1
    """Largest number of rows that are kept in these steps."""
    length: int = 0
    """Guesses of a chain where nothing limits it."""


@dataclass(frozen=True, eq=False)
class DeepRead:
    """Attention of a draft row to the entries that a deep layer stored for verified positions."""

    layer: int
    """Index of the layer whose keys and values are read."""
    gain: Tensor
    """(E,) weight of the norm before the query."""
    query: Tensor
    """(H D, E) query projection."""
    output: Tensor
    """(E, H D) output projection; its result is added to the residual."""


@dataclass(frozen=True, eq=False)
class DraftRows:
    """One draft row beside each row below an exit layer: it reads the same entries, stores none and guesses a token.

    Without a ``scale`` there are no draft rows beside the others: a row's own residual is what the head reads.
    """

    exit_layer: int
    """Number of layers below the exit layer, from whose residuals the draft rows guess."""
    deltas: LowRankDeltas
    """Low-rank deltas of the draft rows: one adapter, whose weights do not change."""
    is_fed: bool
    """Whether draft rows pass the feed-forward of each layer."""
    scale: Tensor | None
    """(E,) factor on a draft row's residual at the exit layer, before the final norm; None where rows guess themselves,
    which then have no deltas, reads or feedback."""
    reads: tuple[DeepRead, ...] = ()
    """Deep reads, one before each of the first layers."""
    feedback: Tensor | None = None
    """(depths E, E): maps the normed final residual of the last kept row to the offsets of the next chain."""
    copies: Mapping[tuple[int, str], LowBit] = field(default_factory=dict)
    """Matrices in four bits to draft with, by layer and part (``qkv``, ``o``, ``gate``, ``up``, ``down``); others are
    quantized when a draft first needs them."""


@dataclass(frozen=True, eq=False)
class StreamRows:
    """Rows that start from the last kept row's residual at a layer, read its entries and one another, and guess."""

    insertion_layer: int
    """Index of the first layer that the stream rows pass."""
    deltas: LowRankDeltas
    """Low-rank deltas of the stream rows: one adapter, whose weights do not change."""
    embeddings: Tensor
    """(count, E) stream embeddings: row i starts from the last kept row's residual plus embedding i."""
    feedback: Tensor | None = None
    """(count E or more, 2 E): maps the last kept row's normed final residual and the root's normed embedding to offsets
    of the stream rows, in units of the root mean square of the residual they start from."""
    widths: tuple[int, ...] = ()
    """Number of likeliest tokens of each row that are tried, each below each of the row before; empty: one each."""
    rides: bool = False
    """Whether every row of a draft has stream rows while it is verified, in place of those behind the last kept row."""
    early_exit: tuple[Tensor, Tensor] | None = None
    """(rank, E) and (E, rank): factors of the early exit whose guess feeds rows that ride, if they have feedback."""


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Heads that read the last kept row's normed final residual x; each guesses from x + silu(W x)."""

    mix: nn.Module
    """``Backend.projection`` of (heads E, E), W of all heads, one below the other."""
    heads: tuple[DraftHead, ...]
    """What the guesses of each are read with."""
    widths: tuple[int, ...]
    """Number of likeliest tokens of each head that are tried, each below each of the head before."""


class Chain(Protocol):
    """Drafts, and verifies, several tokens in one call; on a CPU to the bits of the same steps made one by one."""

    quantizes: bool
    """Whether it can draft with layers in fewer bits than the decoder's own."""
    draws_by_position: bool
    """Whether tokens are drawn with the noise of their positions (``draw``), by the session too, wherever a text allows
    it; otherwise with the random numbers of its generator."""

    @property
    def can_draw(self) -> bool:
        """Return whether its own steps can draw the tokens of a text, and not only take the likeliest ones."""
        ...

    def draw(self, logits: Tensor, drawing: Drawing, position: int) -> int | None:
        """Draw the token at a position from its logits (V,); None where no token may come there."""
        ...

    def covers(self, rows: DraftRows | StreamRows | HeadRows) -> bool:
        """Return whether it can draft with these rows."""
        ...

    def can_wear(self, cache: KVCache, slots: Sequence[int]) -> bool:
        """Return whether it can add what the adapters of these slots do."""
        ...

    def prepare(self, rows: DraftRows | StreamRows | HeadRows, plan: ChainPlan) -> None:
        """Lay out weights and make quantized copies now, so that the first draft takes no longer than the next."""
        ...

    def draft(
        self,
        roots: Sequence[ChainRoot],
        draft_rows: DraftRows,
        offsets: Tensor | None,
        cache: KVCache,
        plan: ChainPlan,
    ) -> Draft:
        """Draft one chain below each root.

        The draft has residuals at the exit layer, unless the plan's weights are quantized.

        Args:
            roots: last committed token of each of n sequences.
            draft_rows: rows that guess.
            offsets: (n, depths, E) added where draft rows start; None for nothing.
            cache: holds the text before the roots.
            plan: how chains are drafted.
        """
        ...

    def decide(self, roots: Sequence[ChainRoot], cache: KVCache, ends: Sequence[int] = ()) -> Decided:
        """Decode the next tokens below each root with the whole model, none below one of ``ends``."""
        ...

    def speculate(
        self,
        root: ChainRoot,
        draft_rows: DraftRows,
        offsets: Tensor | None,
        cache: KVCache,
        plan: ChainPlan,
        ends: Sequence[int] = (),
    ) -> Decided:
        """Draft and verify several times for one sequence."""
        ...

    def follow(
        self,
        root: ChainRoot,
        rows: StreamRows | HeadRows,
        left: tuple[Tensor, Tensor | None],
        cache: KVCache,
        plan: ChainPlan,
        ends: Sequence[int] = (),
    ) -> tuple[Decided, Tensor]:
        """Do as ``speculate`` with stream rows or heads.

        ``left`` holds what the last kept row left behind. For stream rows that follow it: its residual (E,) where they
        start, and at the top for those with feedback. For those that ride: its streams (count, E) at the top. For
        heads: its normed final residual (E,). The second result is the first of these for the row kept last now.
        """
        ...


def why_no_chain(c: ModelConfig) -> str | None:
    """Return why a model with a span cannot make several steps in one call, or None where it can."""
    if any(rope.depends_on_length for rope in c.ropes):
        return "rotations depend on the length of a text"
    if c.encoder is not None or c.positions in ("sinusoid", "relative") or c.embedding_norm or not c.final_norm:
        return "the text has a source, or its embeddings or positions are of another kind"
    return None
