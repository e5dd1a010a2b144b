"""How unlikely a branch may be at the insertion layer before it is pruned.

The paper does not give its threshold. Ours is measured on text: of the edges that verification would keep, from a
position to the token that the whole model predicts next, a stated share must survive.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vivace.core.model import Decoder
from vivace.errors import ConfigError
from vivace.methods.multistream.streams import Streams
from vivace.train.data import TokenBatch
from vivace.train.distillation import FrozenPass

SURVIVING = 0.98
"""Share of kept edges that survive a calibrated threshold."""


@torch.no_grad()
def kept_edges(model: Decoder, streams: Streams, batch: TokenBatch) -> Tensor:
    """Return the probability (n,) that the pruning layer gives to edges that verification would keep.

    Raises:
        ConfigError: the streams were trained without a pruner.
    """
    if streams.pruner is None:
        raise ConfigError("these streams were trained without a pruner; set adapter.pruner_rank and train again")
    insertion_layer, rows = streams.config.insertion_layer, batch.predicting
    frozen = FrozenPass.of(model, batch.tokens, (insertion_layer,))
    distribution = streams.pruner.distribution(frozen.residuals[insertion_layer][rows], model)
    return distribution.gather(1, model.greedy(frozen.final[rows])[:, None])[:, 0]


def threshold_for(edges: Iterable[Tensor], surviving: float = SURVIVING) -> float:
    """Return the largest threshold under which this share of the edges survives.

    Args:
        edges: results of ``kept_edges`` for some batches.
        surviving: share, above 0 and at most 1.

    Raises:
        ConfigError: there is no edge, or the share is out of range.
    """
    chances = torch.cat([torch.empty(0), *edges]).sort().values
    if not 0 < surviving <= 1 or len(chances) == 0:
        raise ConfigError(f"a threshold needs edges and a share in (0, 1], found {len(chances)} and {surviving}")
    return float(chances[int((1 - surviving) * len(chances))])
