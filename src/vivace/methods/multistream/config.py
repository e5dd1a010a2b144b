"""Settings of speculative streams, saved next to their weights, and how they draft."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import ClassVar, Literal

from vivace.core.draft_head import check_size, size_label
from vivace.decode.shallow import shape_label
from vivace.errors import ConfigError
from vivace.kernels.low_bit import Weights, check_weights

MAX_ROWS = 160
"""Largest number of draft nodes and streams of one slot in one pass, without the root: room for the paper's gamma 4 and
k 2 with streams on every node, 30 + 31 x 4 rows."""
TRIED_ROWS = 24
"""Largest number of rows of the drafts with streams on every node that ``vivace tune`` tries."""
QUANTIZED: tuple[Weights, ...] = ("int8", "q4")
"""Quantized formats that ``vivace tune`` tries for streams."""


@dataclass(frozen=True)
class MultistreamConfig:
    """The streams, the layer at which they start, and their adapters."""

    RENAMED: ClassVar[Mapping[str, str]] = {"insertion": "insertion_layer", "marks": "identifier"}
    streams: int = 4
    """gamma: stream j of a row guesses the token 1 + j positions after it."""
    insertion_layer: int = 12
    """Number of layers that only the main stream passes; streams start at the layer with this index."""
    rank: int = 16
    """Rank of the query, key, value and output deltas of stream rows; 0 has none."""
    bottleneck: int = 64
    """Width of a silu bottleneck beside the feed-forward of stream rows; 0 has none. It is ours, not the paper's."""
    pruner_rank: int = 8
    """Rank of the layer that prunes unlikely branches; 0 trains none."""
    identifier: Literal["embedding", "rotation"] = "embedding"
    """How streams differ: by an ``embedding`` of each, added at the start, or by a ``rotation`` of their values."""
    feedback: bool = False
    """Whether streams also start from their node's final residual and from the token decided there, so that stream 1
    need not guess what is decided. This is ours. Both are known where streams follow the kept node (``attach: kept``);
    where they ride on verification (``attach: every``) the pruning layer's early exit stands in for both."""

    def __post_init__(self) -> None:
        if self.identifier not in ("embedding", "rotation"):
            raise ConfigError(f"identifier must be embedding or rotation, found {self.identifier!r}")
        if not 1 <= self.streams <= 8:
            raise ConfigError(f"streams must be between 1 and 8, found {self.streams}")
        if self.insertion_layer < 1:
            raise ConfigError(f"insertion_layer must be at least 1, found {self.insertion_layer}")
        if min(self.rank, self.bottleneck, self.pruner_rank) < 0:
            raise ConfigError(
                f"rank, bottleneck and pruner_rank must be >= 0, found {self.rank}, {self.bottleneck} "
                f"and {self.pruner_rank}"
            )

    def precedes(self, other: MultistreamConfig) -> bool:
        """Return whether training can go on from streams of this config as ``other``: inserted no lower, feedback only
        added.
        """
        as_other = replace(self, insertion_layer=other.insertion_layer, feedback=other.feedback)
        return as_other == other and self.insertion_layer >= other.insertion_layer and other.feedback >= self.feedback

    def check_fits(self, num_layers: int) -> None:
        """Raise an error for an insertion layer that is not inside the model."""
        if self.insertion_layer >= num_layers:
            raise ConfigError(
                f"insertion_layer {self.insertion_layer} must lie below the top of a model of {num_layers} layers"
            )

    def num_paper_parameters(self, width: int) -> int:
        """Return the paper's count of parameters, ``gamma E + 2 r E``: embeddings and pruner, without adapters."""
        return (self.streams * (self.identifier == "embedding") + 2 * self.pruner_rank) * width

    def num_medusa_parameters(self, width: int, vocab_size: int) -> int:
        """Return the parameters of as many Medusa heads, each with one block and one output: ``gamma (E^2 + E V)``."""
        return self.streams * width * (width + vocab_size)


@dataclass(frozen=True)
class StreamPlan:
    """The shape of a draft."""

    widths: tuple[int, ...] = (1, 1, 1)
    """Number of likeliest tokens of each stream; each stands below each token of the stream before."""
    attach: Literal["every", "kept"] = "every"
    """With ``every``, each node carries streams through the pass that verifies it (the paper). With ``kept``, streams
    follow the last kept node in a short pass of their own: fewer rows, but the upper weights are read once more."""
    threshold: float = 0.0
    """Branches that are less likely at the insertion layer are pruned there."""
    weights: Weights = "bf16"
    """Format in which streams read the upper layers; verification reads them unquantized. Quantized streams of every
    node run behind the rows that they belong to. Without native kernels the weights are used as they are."""
    vocabulary: int = 0
    """Number of tokens that may be guessed, the most frequent ones of the draft vocabulary; 0 allows all."""

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ConfigError(f"draft widths must be positive and at least one, found {list(self.widths)}")
        if self.num_rows > MAX_ROWS:
            raise ConfigError(
                f"draft widths {list(self.widths)} make {self.num_rows} rows with streams attached to {self.attach} "
                f"node; a pass has at most {MAX_ROWS}"
            )
        if not 0 <= self.threshold < 1:
            raise ConfigError(f"threshold must be in [0, 1), found {self.threshold}")
        check_weights(self.weights)
        check_size(self.vocabulary)

    @property
    def num_nodes(self) -> int:
        """Return the number of guesses of the whole tree."""
        return sum(accumulate(self.widths, operator.mul))

    @property
    def num_rows(self) -> int:
        """Return the number of guesses and of streams of all nodes that carry them."""
        carriers = self.num_nodes + 1 if self.attach == "every" else 1
        return self.num_nodes + carriers * len(self.widths)

    @property
    def label(self) -> str:
        """Return a short description: ``tree 2-1-1 from every node``, ``chain 3 from kept node if >= 0.1 in int8``."""
        sure = f" if >= {self.threshold:g}" if self.threshold else ""
        kind = "" if self.weights == "bf16" else f" in {self.weights}"
        return f"{shape_label(self.widths)} from {self.attach} node{sure}{kind}{size_label(self.vocabulary)}"

    def check_fits(self, config: MultistreamConfig) -> None:
        """Raise an error for a draft deeper than the number of streams, or for settings that these streams do not
        support.
        """
        if len(self.widths) > config.streams:
            raise ConfigError(
                f"draft widths {list(self.widths)} go deeper than the {config.streams} streams that exist"
            )
        if config.feedback and self.attach == "every" and not config.pruner_rank:
            raise ConfigError(
                "on every node these streams start from what the pruning layer expects, and they were trained without "
                "one; set attach to kept, or train with pruner_rank above 0"
            )
        if self.threshold and not config.pruner_rank:
            raise ConfigError(f"threshold is {self.threshold:g}, but these streams were trained without a pruner")


def plans_to_try(config: MultistreamConfig) -> list[StreamPlan]:
    """Return plans of every depth, chains and small trees, with streams on every node and on the kept one."""
    deep = range(1, config.streams + 1)
    shapes: list[tuple[int, ...]] = [(1,) * depth for depth in deep]
    shapes += [(width, *[1] * (depth - 1)) for depth in deep for width in (2, 3)]
    shapes += [(2, 2, *[1] * (depth - 2)) for depth in deep if depth > 1]
    plans = [StreamPlan(widths, "kept") for widths in shapes]
    if config.pruner_rank or not config.feedback:
        plans += [StreamPlan(widths) for widths in shapes if StreamPlan(widths).num_rows <= TRIED_ROWS]
    plans += [StreamPlan((1,) * depth, "kept", weights=kind) for depth in deep for kind in QUANTIZED]
    if config.pruner_rank:
        plans += [StreamPlan(widths, "kept", sure) for widths in shapes if max(widths) > 1 for sure in (0.01, 0.05)]
    return plans
