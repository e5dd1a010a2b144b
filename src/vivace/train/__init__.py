"""Training: one loop for any model and any batches; data, optimiser, resume and reports around it.

What is trained is an ``Objective``: all weights of a decoder, or weights of a method beside a frozen one.
"""

from vivace.train.batches import BatchSource, Countable, DataSplit, Place
from vivace.train.config import LoopConfig, TrainConfig
from vivace.train.data import Batches, Rows, TokenBatch, pairs_of
from vivace.train.loop import TrainResult, fit
from vivace.train.next_token import NextToken
from vivace.train.objective import Objective, Part, Parts
from vivace.train.optim import Optimiser, OptimiserConfig
from vivace.train.report import Curves, Lines, Report
from vivace.train.variation import Variation, VariationConfig

__all__ = [
    "BatchSource",
    "Batches",
    "Countable",
    "Curves",
    "DataSplit",
    "Lines",
    "LoopConfig",
    "NextToken",
    "Objective",
    "Optimiser",
    "OptimiserConfig",
    "Part",
    "Parts",
    "Place",
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
