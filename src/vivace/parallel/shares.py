"""Which heads and feed-forward columns of a model each rank computes.

Key/value heads and the query heads that read them stay together. Where there are fewer key/value heads than ranks,
several ranks hold the same one, and each of them takes some of its query heads. Shares need not be equal: with three
key/value heads on two ranks, one rank takes two of them and fewer feed-forward columns, and rank 0 takes fewer because
it has the head besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vivace.core.config import ModelConfig
from vivace.errors import ConfigError

GRAINS = (32, 16, 8, 4, 2, 1)
"""Feed-forward columns are dealt out in the largest of these portions of which every rank gets several: native kernels
take them in tiles."""
HEAD_PART = 1 / 8
"""What the head counts beside the layers. Rank 0 alone computes it, and only for tokens of answers: an eighth of all,
where a text has seven tokens of prompt for each one that is written."""


@dataclass(frozen=True)
class Share:
    """What one rank computes of every layer: ranges, first and one past the last."""

    heads: tuple[int, int]
    kv_heads: tuple[int, int]
    columns: tuple[int, int]
    num_holders: int
    """Number of ranks that hold these key/value heads."""

    def config(self, whole: ModelConfig) -> ModelConfig:
        """Return the model as this rank's layers are built."""
        return replace(
            whole,
            num_heads=self.heads[1] - self.heads[0],
            num_kv_heads=self.kv_heads[1] - self.kv_heads[0],
            ffn_width=self.columns[1] - self.columns[0],
        )


def shares_of(config: ModelConfig, num_ranks: int, speeds: Sequence[float] | None = None) -> tuple[Share, ...]:
    """Divide every layer of a dense model among ranks.

    Args:
        config: the model.
        num_ranks: number of ranks.
        speeds: how fast each rank is; None takes all for equal.

    Raises:
        ConfigError: there are fewer query heads or columns than ranks.
    """
    weights = [1.0] * num_ranks if speeds is None else list(speeds)
    c, group = config, config.group
    if num_ranks > c.num_heads or num_ranks > c.ffn_width:
        raise ConfigError(
            f"{num_ranks} ranks cannot share a model of {c.num_heads} query heads and {c.ffn_width} feed-forward "
            f"columns; start at most {min(c.num_heads, c.ffn_width)}"
        )
    if num_ranks <= c.num_kv_heads:
        bounds = _bounds(_dealt(c.num_kv_heads, weights))
        held = [((first * group, stop * group), (first, stop), 1) for first, stop in bounds]
    else:
        held = []
        per_head = _dealt(num_ranks, [1.0] * c.num_kv_heads)
        for kv_head, holders in enumerate(per_head):
            if holders > group:
                raise ConfigError(
                    f"{num_ranks} ranks cannot share {c.num_kv_heads} key/value heads with {group} query heads each; "
                    f"start at most {c.num_kv_heads * group}"
                )
            own = _dealt(group, weights[len(held) : len(held) + holders])
            held += [
                ((kv_head * group + first, kv_head * group + stop), (kv_head, kv_head + 1), holders)
                for first, stop in _bounds(own)
            ]
    columns = _bounds(_columns(c, held, weights))
    return tuple(Share(h, k, f, n) for (h, k, n), f in zip(held, columns, strict=True))


def columns_of(config: ModelConfig, num_ranks: int) -> list[int]:
    """Return how many feed-forward columns each of equally fast ranks computes, on which the parts of sums depend.

    Raises:
        ConfigError: so many ranks cannot share the model.
    """
    return [stop - first for first, stop in (share.columns for share in shares_of(config, num_ranks))]


def _columns(
    c: ModelConfig, held: Sequence[tuple[tuple[int, int], tuple[int, int], int]], weights: Sequence[float]
) -> list[int]:
    """Return how many feed-forward columns each rank takes, so that every rank has its part of all work."""
    matrices = 3 if c.gated else 2
    attention = [2 * c.head_dim * (h[1] - h[0] + k[1] - k[0]) for h, k, _ in held]
    head = HEAD_PART * c.vocab_size / c.num_layers
    besides = [own + (head if rank == 0 else 0.0) for rank, own in enumerate(attention)]
    total = sum(besides) + matrices * c.ffn_width
    wanted = [max(0.0, (total * w / sum(weights) - own) / matrices) for w, own in zip(weights, besides, strict=True)]
    grain = next(g for g in GRAINS if g == 1 or (c.ffn_width % g == 0 and c.ffn_width // g >= 4 * len(weights)))
    return [grain * count for count in _dealt(c.ffn_width // grain, wanted)]


def _dealt(count: int, weights: Sequence[float]) -> list[int]:
    """Divide ``count`` things in proportion to weights, at least one for each."""
    wanted = [count * weight / sum(weights) for weight in weights]
    dealt = [1] * len(weights)
    for _ in range(count - len(weights)):
        dealt[max(range(len(dealt)), key=lambda place: (wanted[place] - dealt[place], -place))] += 1
    return dealt


def _bounds(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return first and one past the last of neighbouring ranges of these lengths."""
    starts = [sum(counts[:place]) for place in range(len(counts))]
    return [(start, start + count) for start, count in zip(starts, counts, strict=True)]
