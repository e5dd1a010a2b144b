"""Drafts from an early exit of the model itself: LayerSkip and DEED.

LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710): the residual at the gate goes to the shared head as it is. Its
model was trained for that as a whole (``train/supervised.py``); on any other the exit of the frozen model guesses,
seldom right.

DEED (Tang et al. 2023, arXiv:2311.08623) has an adaptation module for each exit. As a drafter on a frozen model:

    u = attention half of the layer below the gate            p = h^gate + B silu(A norm(u))

times a gain per component, read by the shared head. It is what an accelerated residual is without running ahead, the
control for distance: the same loss, gate and kernels. The bottleneck reads what the layer's own feed-forward reads
instead of its output, so that it travels as data (``LowRankDeltas``) and whole chains are drafted in one native call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vivace.core.config import ModelConfig
from vivace.core.draft_rows import DraftRows
from vivace.core.low_rank import LowRankDeltas, Site, random_factor
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.core.trained import Trained
from vivace.decode.shallow import DraftPlan, ShallowDrafter
from vivace.errors import ConfigError


@dataclass(frozen=True)
class ExitConfig:
    """Where the guess is made, and by what."""

    gate: int = 6
    """Layers below the exit."""
    bottleneck: int = 0
    """Width of the adaptation module; 0 has none (LayerSkip)."""

    def __post_init__(self) -> None:
        if self.gate < 1 or self.bottleneck < 0:
            raise ConfigError(f"gate must be >= 1 and bottleneck >= 0, found {self.gate} and {self.bottleneck}")


class Exit(Trained):
    """Weights of one exit: none, or an adaptation module and a gain."""

    def __init__(self, config: ExitConfig, model: ModelConfig) -> None:
        """Make an exit that says what the residual says.

        Raises:
            ConfigError: the gate is not inside the model.
        """
        super().__init__()
        if config.gate >= model.num_layers:
            raise ConfigError(f"gate {config.gate} must lie below the top of a model of {model.num_layers} layers")
        self.config = config
        self.down = self.up = self.scale = None
        if config.bottleneck:
            self.down = nn.Parameter(random_factor(config.bottleneck, model.width)[None])
            self.up = nn.Parameter(torch.zeros(1, model.width, config.bottleneck))
            self.scale = nn.Parameter(torch.ones(model.width))

    def deltas(self, which: Tensor) -> LowRankDeltas:
        """The module as data for a call; ``which`` (T,) is 0 on guessing rows and -1 elsewhere."""
        site: Site = (self.config.gate - 1, "mlp")
        if self.down is None or self.up is None:
            return LowRankDeltas(which, {}, {})
        return LowRankDeltas(which, {site: self.down}, {site: self.up})

    def at_gate(self, p: Tensor) -> Tensor:
        """What the shared head reads, (n, E)."""
        return p if self.scale is None else p * self.scale


class ExitGuess:
    """Fills ``EarlyGuess``."""

    def __init__(self, model: Decoder, exit_: Exit) -> None:
        self.exit = exit_
        self.gate = exit_.config.gate
        bare = torch.ones(model.config.width, dtype=model.dtype, device=model.device)
        scale = bare if exit_.scale is None else exit_.scale
        self.companion: DraftRows | None = DraftRows(
            self.gate, exit_.deltas(torch.zeros(1, dtype=torch.int64, device=model.device)), True, scale
        )

    def offsets(self, final: Tensor) -> Tensor | None:
        """Guesses start where the rows do, whatever the position before them said."""
        return None

    def forward(
        self, model: Decoder, h: Tensor, step: Step, guessing: Tensor, offset: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Rows to the gate, and what the guessing ones say there."""
        if self.exit.down is None or len(guessing) == 0:
            h = model.run(h, step, 0, self.gate)
            return h, h[guessing]
        h = model.run(h, step, 0, self.gate - 1)
        which = torch.full((step.num_rows + len(guessing),), -1, dtype=torch.int64, device=step.device)
        which[step.num_rows :] = 0
        both = step.readers(guessing, self.exit.deltas(which))
        h = model.run(torch.cat((h, h[guessing])), both, self.gate - 1, self.gate)
        return h[: step.num_rows], self.exit.at_gate(h[step.num_rows :])


def exit_drafter(model: Decoder, exit_: Exit, plan: DraftPlan) -> ShallowDrafter:
    """A drafter from an exit: DEED with an adaptation module, LayerSkip without."""
    return ShallowDrafter(model, ExitGuess(model, exit_), plan, name="deed" if exit_.config.bottleneck else "layerskip")
