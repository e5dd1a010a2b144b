"""The order in which the neurons of a feed-forward lie in a store: neurons that are active together lie side by side.

A device answers so many reads a second, however short they are, so what is needed together should be one read. Alizadeh
et al. (2023, arXiv:2312.11514, appendix D) bundled each neuron with the one it is most often active with, and so read
the few neurons that are nearly always active again and again. Here (ours) each neuron lies in one place: they form a
chain in which each is followed by the one, of those left, whose activity is most like its own. A feed-forward computes
the same function in any order of its neurons.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.checkpoint.files import read_tensors, write_tensors
from vivace.errors import ConfigError
from vivace.kernels.reference import any_order
from vivace.storage.neurons.outputs import LayersInOrder, feeds_of
from vivace.storage.neurons.predictors import gates_of

FILE = "order.safetensors"


@any_order()
def find_orders(model: LayersInOrder, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Find an order of the neurons of each layer, (F,) int64: the neuron that lies at each place.

    Args:
        model: with ReLU feed-forwards.
        texts: token ids; activity is compared on them.

    Raises:
        ConfigError: the model has no ReLU, or there are no texts.
    """
    c = model.config
    if c.activation != "relu" or c.moe is not None:
        raise ConfigError(f"neurons are ordered by what a relu leaves, this model has {c.activation}")
    if not texts:
        raise ConfigError("neurons are ordered by their activity on texts; give at least one")
    return [chain(gates_of(feed, x) > 0) for feed, (x,) in feeds_of(model, texts)]


@torch.no_grad()
def chain(active: Tensor) -> Tensor:
    """Order neurons greedily, (F,), so that each is followed by the one left that is most like it.

    Args:
        active: (n, F) bool, whether a neuron is active at a token; likeness is the cosine of two columns.
    """
    columns = F.normalize(active.float(), dim=0)
    likeness = columns.T @ columns
    place = int(active.sum(0).argmax())
    order = [place]
    for _ in range(active.shape[1] - 1):
        likeness[:, place] = -1.0
        place = int(likeness[place].argmax())
        order.append(place)
    return torch.tensor(order)


def save_orders(folder: Path, orders: Sequence[Tensor]) -> None:
    """Write the orders of the layers into the folder of a store.

    Raises:
        CheckpointError: the disk is full or may not be written.
    """
    write_tensors(folder / FILE, {f"layers.{layer}": order for layer, order in enumerate(orders)})


def load_orders(folder: Path) -> list[Tensor] | None:
    """Read the orders of a store; None where its neurons lie as in the checkpoint."""
    path = folder / FILE
    if not path.is_file():
        return None
    found = read_tensors(path)
    return [found[f"layers.{layer}"] for layer in range(len(found))]
