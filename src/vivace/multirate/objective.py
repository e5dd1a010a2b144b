"""Training the accelerator on the frozen model: say what the whole model would say, arrive where it arrives.

    L = a_kd KL(softmax(z / tau) || softmax(z_p / tau)) tau^2 + a_ce CE(z_p, next token) + a_al (1 - cos(p, h^N))

with z the frozen model's logits, z_p the shared head on the accelerated residual p at the gate, h^N the
slow residual after all layers; over answer positions only (padding and prompts would inflate agreement).
One frozen pass without gradients gives z, h^N and the keys and values that p reads; p of a position depends
on no other p, so all positions train at once. Loss weights are ours (the paper's are not known to us).

The last verified position of each is one of the ``max_lag`` before it, drawn at random, as it lies one to
``max_lag`` tokens back while drafting. ``feedback`` gives its normed final residual, ``reach`` what deep layers
stored up to there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.errors import ConfigError
from vivace.multirate.residual import Accelerator
from vivace.train.data import DecoderObjective, TokenBatch
from vivace.train.objective import Parts


@dataclass(frozen=True)
class MultirateLoss:
    """Weights of the three terms."""

    distillation: float = 1.0
    cross_entropy: float = 0.1
    alignment: float = 0.1
    temperature: float = 1.0
    """tau."""
    max_lag: int = 8
    """Farthest last verified position that feedback and reach are trained for."""
    rows: int = 2048
    """Positions whose logits are held at once; the loss is summed in parts of this many."""

    def __post_init__(self) -> None:
        if min(self.distillation, self.cross_entropy, self.alignment) < 0 or self.temperature <= 0:
            raise ConfigError("loss weights must be >= 0 and the temperature > 0")
        if self.max_lag < 1 or self.rows < 1:
            raise ConfigError(f"max_lag and rows must be at least 1, found {self.max_lag} and {self.rows}")


class MultirateObjective(DecoderObjective):
    """Owns an accelerator, leaves the decoder as it is."""

    def __init__(self, accelerator: Accelerator, loss: MultirateLoss) -> None:
        self.accelerator = accelerator
        self.loss = loss

    def groups(self) -> Sequence[Mapping[str, object]]:
        """All adapter weights, no decay."""
        return [{"params": list(self.accelerator.parameters()), "name": "accelerator", "weight_decay": 0.0}]

    def losses(self, model: Decoder, batch: TokenBatch) -> Parts:
        """The loss in parts of ``rows`` positions that add up to the mean, each ready for ``backward``.

        The head runs on a copy of p that is cut from the graph; each part leaves its gradient there, and the
        last one, a product with that gradient, sends it down to the adapters.
        """
        rows, targets = batch.predicting, batch.targets
        step, final = self._frozen(model, batch.tokens)
        gate = self._accelerate(model, batch.tokens, step, final)[rows]
        learns = torch.is_grad_enabled()
        cut = gate.detach().requires_grad_(learns)
        for part in torch.split(torch.arange(len(rows)), self.loss.rows):
            yield self._part(model, cut[part], final[rows[part]], targets[part], share=1 / len(rows))
        if learns:
            assert cut.grad is not None, "back every part through before asking for the next"
            yield (gate * cut.grad).sum(), {}

    @staticmethod
    @torch.no_grad()
    def _frozen(model: Decoder, tokens: Tensor) -> tuple[Step, Tensor]:
        """The frozen pass: its step, which keeps the keys and values, and h^N (B * T, E)."""
        step = Step.dense(*tokens.shape)
        return step, model.run(model.embed(tokens.reshape(-1), step), step)

    def _accelerate(self, model: Decoder, tokens: Tensor, step: Step, final: Tensor) -> Tensor:
        """Residuals p at the gate for every position, (B * T, E)."""
        accelerator, count = self.accelerator, step.num_rows
        deltas = accelerator.deltas(torch.zeros(count, dtype=torch.int64))
        fed = count if accelerator.config.mode == "delta" else 0
        reading = replace(step, num_write=0, num_feed=fed, deltas=(deltas,))
        last = self._last_verified(tokens)
        p = accelerator.start(model.embed(tokens.reshape(-1), step), self._feedback(model, final, last))
        for reach, start, stop in accelerator.stretches():
            p = p if reach is None else reach.over_text(p, model, step, last)
            p = model.run(p, reading, start, stop)
        return accelerator.at_gate(p)

    def _last_verified(self, tokens: Tensor) -> Tensor:
        """A position 1..max_lag tokens before each, drawn at random, -1 before the text, (B, T)."""
        batch, length = tokens.shape
        lag = torch.randint(1, self.loss.max_lag + 1, (batch, length))
        return (torch.arange(length) - lag).clamp(min=-1)

    def _feedback(self, model: Decoder, final: Tensor, last: Tensor) -> Tensor | None:
        """Normed final residual of the last verified position, zeros where there is none."""
        if self.accelerator.feedback is None:
            return None
        batch, length = last.shape
        source = (last.clamp(min=0) + torch.arange(batch)[:, None] * length).reshape(-1)
        with torch.no_grad():
            known = (last >= 0).reshape(-1, 1).to(final.dtype)
            return model.norm(final)[source] * known

    def _part(
        self, model: Decoder, p: Tensor, final: Tensor, targets: Tensor, *, share: float
    ) -> tuple[Tensor, Mapping[str, float]]:
        tau = self.loss.temperature
        guess = model.head(p)
        with torch.no_grad():
            truth = model.head(final)
        kl = F.kl_div(F.log_softmax(guess / tau, -1), F.log_softmax(truth / tau, -1), reduction="sum", log_target=True)
        ce = F.cross_entropy(guess, targets, reduction="sum")
        away = (1 - F.cosine_similarity(p.float(), final.float(), dim=-1)).sum()
        weights = self.loss
        total = weights.distillation * tau**2 * kl + weights.cross_entropy * ce + weights.alignment * away
        agreed = (guess.argmax(-1) == truth.argmax(-1)).sum()
        sums = {"kl": kl, "away": away, "agreement": agreed}
        seen = {name: float(value.detach()) * share for name, value in sums.items()}
        return total * share, seen
