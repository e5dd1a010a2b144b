"""Several exit layers, each with an accelerated residual of its own (M2R2, Bhendawade et al. 2025, arXiv:2502.02040).

The paper calls them gates. They stand at depths ``0 = N_0 < N_1 < ... < N_J < N``. In interval j, layers ``N_{j-1} ..
N_j - 1``, an accelerated residual starts from the slow one, ``p[N_{j-1}] = h[N_{j-1}]``, and should arrive at its gate
where the slow one is at the *target depth*

    M_j = min(N, N_{j-1} + R_j (N_j - N_{j-1}))

with ``R_j`` its *rate*: layers of the slow stream covered in one of its own. Without a rate the target is the top, so
every gate has another implied rate, a mixture of rates. The equations of a layer are those of ``residual.py``.

That a stream starts again from the slow one at each gate is how we understand the paper; its ranks, the form of the
adapters and the places of the gates are not known to us. A layer lies in one interval, so it has one set of adapters,
and the intervals do not depend on each other: trained together or one by one they end in the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from vivace.core.config import ModelConfig
from vivace.core.low_rank import LowRank, site_shapes
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.errors import ConfigError

COMPANION = 0.3
"""Estimated cost of an accelerated row relative to the model's own row in a pass bound by reading weights."""


@dataclass(frozen=True)
class GateConfig:
    """The place of one gate, and the rate of its accelerated residual."""

    layer: int
    """Number of layers below the gate."""
    rate: float | None = None
    """Layers of the slow stream covered in one of its own; None: as many as are needed to arrive at the last layer."""

    def __post_init__(self) -> None:
        if self.layer < 1:
            raise ConfigError(f"a gate's layer must be at least 1, found {self.layer}")
        if self.rate is not None and self.rate < 1:
            raise ConfigError(f"a gate's rate must be at least 1 (the slow stream's own), found {self.rate}")


@dataclass(frozen=True)
class GatesConfig:
    """The gates and the adapters below them."""

    gates: tuple[GateConfig, ...] = (GateConfig(6), GateConfig(12), GateConfig(18))
    """From the lowest to the highest."""
    mode: Literal["delta", "lite"] = "delta"
    """``delta`` runs the frozen feed-forward for accelerated rows too; ``lite`` only their bottleneck."""
    rank: int = 8
    """Rank of the query and output deltas; 0 has none."""
    bottleneck: int = 64
    """Width of the silu bottleneck beside (``delta``) or instead of (``lite``) the feed-forward."""

    def __post_init__(self) -> None:
        if not self.gates:
            raise ConfigError("gates must name at least one gate, found none")
        if any(low >= high for low, high in pairwise(self.layers)):
            raise ConfigError(f"gates must stand one above the other, found layers {list(self.layers)}")
        if self.mode not in ("delta", "lite"):
            raise ConfigError(f"mode must be delta or lite, found {self.mode!r}")
        if self.rank < 0 or self.bottleneck < 1:
            raise ConfigError(f"rank must be >= 0 and bottleneck >= 1, found {self.rank} and {self.bottleneck}")

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the exit layers N_1 .. N_J."""
        return tuple(gate.layer for gate in self.gates)

    def interval(self, gate: int) -> tuple[int, int]:
        """Return the first layer of a gate's interval and one past its last."""
        return (self.layers[gate - 1] if gate else 0), self.layers[gate]

    def target(self, gate: int, num_layers: int) -> int:
        """Return M_j: the depth of the slow residual that the gate imitates."""
        rate = self.gates[gate].rate
        start, stop = self.interval(gate)
        return num_layers if rate is None else min(num_layers, start + round(rate * (stop - start)))

    def minimum_exit_share(self, num_layers: int) -> tuple[float, ...]:
        """Return, by gate, the share of tokens asked there that must exit for their accelerated rows to pay."""
        spans = [self.interval(gate) for gate in range(len(self.gates))]
        return tuple(COMPANION * (stop - start) / (num_layers - stop) for start, stop in spans)

    def check_fits(self, num_layers: int) -> None:
        """Raise an error for gates that are not inside the model."""
        if self.layers[-1] >= num_layers:
            raise ConfigError(f"gate {self.layers[-1]} must lie below the top of a model of {num_layers} layers")


class GatedAccelerator(LowRank):
    """The trained weights of the accelerated residuals of all gates."""

    def __init__(self, config: GatesConfig, model: ModelConfig) -> None:
        """Make zero-initialised adapters for the layers below the last gate.

        Raises:
            ConfigError: a gate is not inside the model.
        """
        config.check_fits(model.num_layers)
        ranks = {"q": config.rank, "o": config.rank, "mlp": config.bottleneck}
        super().__init__(site_shapes(model, range(config.layers[-1]), ranks))
        self.config = config
        self.scale = nn.Parameter(torch.ones(len(config.gates), model.width))
        """(J, E) factor before the shared head, by gate."""

    def at_gate(self, gate: int, p: Tensor) -> Tensor:
        """Return what the shared head reads, (n, E)."""
        return p * self.scale[gate]

    def accelerate(self, model: Decoder, gate: int, h: Tensor, step: Step, depths: Sequence[int]) -> Tensor:
        """Return the accelerated residuals of a text whose slow pass is done (training, scoring).

        Args:
            model: the frozen decoder.
            gate: index of the gate, from 0.
            h: (T, E) slow residuals at the start of the gate's interval.
            step: the dense call that holds the slow keys and values.
            depths: depths at which residuals are returned, ascending and up to the gate.

        Returns:
            The trail (T, number of depths, E).
        """
        deltas = self.deltas(torch.zeros_like(step.slot))
        fed = len(h) if self.config.mode == "delta" else 0
        reading = replace(step, num_write=0, num_feed=fed, deltas=(deltas,))
        return torch.stack(_stops(model, h, reading, (self.config.interval(gate)[0], *depths)), 1)

    def forward(
        self, model: Decoder, gate: int, h: Tensor, step: Step, leading: Tensor, depths: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Run slow rows, with accelerated rows beside some of them, up to a gate in calls that read each weight once.

        Args:
            model: the frozen decoder.
            gate: index of the gate, from 0.
            h: (T, E) slow rows at the start of its interval; all of them write keys and values.
            step: their call.
            leading: (n,) slow rows that get an accelerated row.
            depths: depths at which accelerated residuals are returned, ascending; the last is the gate.

        Returns:
            Slow residuals (T, E) at the gate, and the accelerated rows' trail (n, number of depths, E).
        """
        start = self.config.interval(gate)[0]
        count = step.num_rows
        which = torch.full((count + len(leading),), -1, dtype=torch.int64, device=step.device)
        which[count:] = 0
        both = step.readers(leading, self.deltas(which), fed=self.config.mode == "delta")
        stops = _stops(model, torch.cat((h, h[leading])), both, (start, *depths))
        return stops[-1][:count], torch.stack([rows[count:] for rows in stops], 1)


def _stops(model: Decoder, rows: Tensor, step: Step, depths: Sequence[int]) -> list[Tensor]:
    """Run rows and return their residuals at each depth after the first, at which they are now."""
    seen = []
    for low, high in pairwise(depths):
        rows = model.run(rows, step, low, high)
        seen.append(rows)
    return seen
