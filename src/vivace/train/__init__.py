"""Training: one loop that takes an ``Objective``; data, optimiser, resume and reports around it.

Three uses: a decoder from scratch with its tokenizer, a full fine-tune, an adapter on a frozen base.
"""

from vivace.train.config import LoopConfig
from vivace.train.data import Batches, Place, Rows, pairs_of
from vivace.train.loop import Course, Lessons, Outcome, fit
from vivace.train.objective import NextToken
from vivace.train.optim import Optimiser, OptimiserConfig
from vivace.train.report import Curves, Lines, Report
from vivace.train.variation import Variation, VariationConfig

__all__ = [
    "Batches",
    "Course",
    "Curves",
    "Lessons",
    "Lines",
    "LoopConfig",
    "NextToken",
    "Optimiser",
    "OptimiserConfig",
    "Outcome",
    "Place",
    "Report",
    "Rows",
    "Variation",
    "VariationConfig",
    "fit",
    "pairs_of",
]
