"""Training: one loop for any model and any kind of batch, with its data, optimiser, snapshots and reports.

An ``Objective`` owns the parameters that are trained and computes their loss: all weights of a decoder, or the weights
of a decoding method beside a frozen decoder.
"""

from vivace.train.batches import BatchPlace, BatchSource, Countable, DataSplit
from vivace.train.config import LoopConfig, TrainConfig
from vivace.train.data import Batches, Rows, TokenBatch, pairs_of
from vivace.train.loop import TrainResult, fit
from vivace.train.next_token import NextToken
from vivace.train.objective import LossPart, LossParts, Objective
from vivace.train.optim import Optimiser, OptimiserConfig
from vivace.train.report import Curves, Lines, Report
from vivace.train.variation import Variation, VariationConfig

__all__ = [
    "BatchPlace",
    "BatchSource",
    "Batches",
    "Countable",
    "Curves",
    "DataSplit",
    "Lines",
    "LoopConfig",
    "LossPart",
    "LossParts",
    "NextToken",
    "Objective",
    "Optimiser",
    "OptimiserConfig",
    "Report",
    "Rows",
    "TokenBatch",
    "TrainConfig",
    "TrainResult",
    "Variation",
    "VariationConfig",
    "fit",
    "pairs_of",
]
