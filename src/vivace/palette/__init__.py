"""Weights clustered to a few values: checkpoints rounded to palettes of two to four bits, with the loss that costs, and
clustering while weights are trained.
"""

from vivace.palette.clustering import Clusters, cluster

__all__ = ["Clusters", "cluster"]
