"""Tokens of a text whose keys and values are missing from some layer on, with what is needed to compute them later."""

from __future__ import annotations

import torch
from torch import Tensor


class PendingKV:
    """The tokens of one text that have passed some layers and wait in front of the next.

    For each such layer there is one block: the positions of the tokens, in rising order, and the residuals that enter
    the layer. A token is in one block at most; it has entries in all layers below, and none from there on. Blocks are
    replaced, never changed, so that a copy costs nothing. Positions lie on the CPU, where Python reads them.

    Tokens that exit early wait here (``decode/depth.py``), and tokens of a prompt that were pruned
    (``prefill/returning.py``).
    """

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        """Return the number of tokens that wait."""
        return sum(len(positions) for positions, _ in self._blocks.values())

    @property
    def layers(self) -> list[int]:
        """Return the layers in front of which tokens wait, in rising order."""
        return sorted(self._blocks)

    @property
    def first(self) -> int | None:
        """Return the position of the first token that waits, or None where none does."""
        return min((int(positions[0]) for positions, _ in self._blocks.values()), default=None)

    def at(self, layer: int) -> Tensor:
        """Return the positions of the tokens that wait in front of a layer, (n,) in rising order."""
        return self._blocks[layer][0] if layer in self._blocks else torch.empty(0, dtype=torch.int64)

    def missing(self, layer: int) -> Tensor:
        """Return the positions of all tokens that have no entries in a layer, (n,) in rising order."""
        waiting = [positions for below, (positions, _) in self._blocks.items() if below <= layer]
        return torch.cat(waiting).sort().values if waiting else torch.empty(0, dtype=torch.int64)

    def add(self, layer: int, positions: Tensor, hidden: Tensor) -> None:
        """Let tokens wait in front of a layer.

        Args:
            layer: the first one that they have not passed.
            positions: (n,) of the tokens, none of which waits already.
            hidden: (n, E) residuals that enter the layer.
        """
        if len(positions) == 0:
            return
        if layer in self._blocks:
            known, residuals = self._blocks[layer]
            positions, hidden = torch.cat((known, positions)), torch.cat((residuals, hidden))
        order = positions.argsort()
        self._blocks[layer] = _some(positions, hidden, order)

    def take(self, layer: int, wanted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Remove tokens that wait in front of a layer and return their positions (n,) and residuals (n, E).

        Args:
            layer: the layer.
            wanted: positions of tokens to take, those that wait elsewhere or nowhere being left out; None takes all.
        """
        positions, hidden = self._blocks.pop(layer)
        if wanted is None:
            return positions, hidden
        taken = torch.isin(positions, wanted)
        if not taken.all():
            self._blocks[layer] = _some(positions, hidden, ~taken)
        return _some(positions, hidden, taken)

    def truncate(self, length: int) -> None:
        """Forget the tokens from a position on."""
        for layer, (positions, hidden) in list(self._blocks.items()):
            stays = positions < length
            if not stays.any():
                del self._blocks[layer]
            elif not stays.all():
                self._blocks[layer] = _some(positions, hidden, stays)

    def copy(self) -> PendingKV:
        """Return another one with the same tokens."""
        other = PendingKV()
        other._blocks = dict(self._blocks)
        return other


def _some(positions: Tensor, hidden: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions and residuals of some tokens of a block."""
    return positions[which], hidden[which.to(hidden.device)]
