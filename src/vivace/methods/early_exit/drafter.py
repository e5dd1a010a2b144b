"""Drafts read at an early exit of the model itself: LayerSkip and DEED.

In LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710) the shared head reads the residual at the exit layer as it is. Its
model was trained for that as a whole (``train/supervised.py``); on any other model such guesses are seldom right.

DEED (Tang et al. 2023, arXiv:2311.08623) has an adaptation module for each exit. As a drafter on a frozen model:

    u = attention half of the layer below the exit            p = h^exit + B silu(A norm(u))

times a factor per component, read by the shared head. It is an accelerated residual that does not run ahead, and so the
control for distance: the same loss, exit layer and kernels. The bottleneck reads the input of the layer's own
feed-forward instead of its output, so that it is data (``LowRankDeltas``) and one native call drafts whole chains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from vivace.core.config import ModelConfig
from vivace.core.draft_head import DraftHead
from vivace.core.draft_rows import DraftRows
from vivace.core.low_rank import LowRankDeltas, Site, random_factor
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.core.trained import Trained
from vivace.decode.shallow import DraftPlan, ShallowDrafter
from vivace.errors import ConfigError


@dataclass(frozen=True)
class ExitConfig:
    """The exit layer, and the adaptation module there."""

    RENAMED: ClassVar[Mapping[str, str]] = {"gate": "exit_layer"}
    exit_layer: int = 6
    """Number of layers below the exit."""
    bottleneck: int = 0
    """Width of the adaptation module; 0 has none (LayerSkip)."""

    def __post_init__(self) -> None:
        if self.exit_layer < 1 or self.bottleneck < 0:
            raise ConfigError(
                f"exit_layer must be >= 1 and bottleneck >= 0, found {self.exit_layer} and {self.bottleneck}"
            )


class Exit(Trained):
    """Weights of one exit: none, or an adaptation module and a factor per component."""

    def __init__(self, config: ExitConfig, model: ModelConfig) -> None:
        """Make an exit that returns the residual unchanged.

        Raises:
            ConfigError: the exit layer is not inside the model.
        """
        super().__init__()
        if config.exit_layer >= model.num_layers:
            raise ConfigError(
                f"exit_layer {config.exit_layer} must lie below the top of a model of {model.num_layers} layers"
            )
        self.config = config
        self.down = self.up = self.scale = None
        if config.bottleneck:
            self.down = nn.Parameter(random_factor(config.bottleneck, model.width)[None])
            self.up = nn.Parameter(torch.zeros(1, model.width, config.bottleneck))
            self.scale = nn.Parameter(torch.ones(model.width))

    def deltas(self, which: Tensor) -> LowRankDeltas:
        """Return the module as data for a call; ``which`` (T,) is 0 on guessing rows and -1 elsewhere."""
        site: Site = (self.config.exit_layer - 1, "mlp")
        if self.down is None or self.up is None:
            return LowRankDeltas(which, {}, {})
        return LowRankDeltas(which, {site: self.down}, {site: self.up})

    def at_exit(self, p: Tensor) -> Tensor:
        """Return what the shared head reads, (n, E)."""
        return p if self.scale is None else p * self.scale


class ExitGuess:
    """Implements ``EarlyGuess``: the head reads the residual at the exit, after the adaptation module if
    there is one.
    """

    def __init__(self, model: Decoder, exit_: Exit) -> None:
        self.exit = exit_
        self.exit_layer = exit_.config.exit_layer
        self.draft_rows: DraftRows | None = DraftRows(
            self.exit_layer, exit_.deltas(torch.zeros(1, dtype=torch.int64, device=model.device)), True, exit_.scale
        )

    def offsets(self, final: Tensor) -> Tensor | None:
        """Return None: guesses do not depend on the final residual of the position before."""
        return None

    def forward(
        self, model: Decoder, h: Tensor, step: Step, guessing: Tensor, offset: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run rows to the exit layer; return their residuals, and what the head reads for the guessing ones."""
        if self.exit.down is None or len(guessing) == 0:
            h = model.run(h, step, 0, self.exit_layer)
            return h, h[guessing]
        h = model.run(h, step, 0, self.exit_layer - 1)
        which = torch.full((step.num_rows + len(guessing),), -1, dtype=torch.int64, device=step.device)
        which[step.num_rows :] = 0
        both = step.readers(guessing, self.exit.deltas(which))
        h = model.run(torch.cat((h, h[guessing])), both, self.exit_layer - 1, self.exit_layer)
        return h[: step.num_rows], self.exit.at_exit(h[step.num_rows :])


def exit_drafter(model: Decoder, exit_: Exit, plan: DraftPlan, head: DraftHead | None = None) -> ShallowDrafter:
    """Return a drafter of an exit: DEED with an adaptation module, LayerSkip without; ``head`` reads the guesses."""
    name = "deed" if exit_.config.bottleneck else "layerskip"
    return ShallowDrafter(model, ExitGuess(model, exit_), plan, name=name, head=head)
