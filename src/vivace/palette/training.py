"""Training a decoder whose matrices are palettes to stay the model that is stored: clustered in every step (eDKM), or
with codes that stay and entries that are trained.

A matrix W is kept as values ``v = w / s`` with the scales s of its palette, which stay as they were found. Each step
clusters the values softly (``clustering.py``) from the centroids of the step before, at a temperature that falls, and
the loss is taken of ``s`` times the clustered values. Evaluation takes the nearest entries, rounded as they are stored,
so the best weights are those of the best folder, not of the softest clusters.

Training begins at the codes of GPTQ: values start as those stored, moved into the cell of their code.

``entries.py`` leaves the codes as they are and trains what they stand for.

Source: Cho et al. 2024, arXiv:2309.00964. **Where we differ**: eDKM begins from the stored weights, trains on the text
alone, and has one temperature for all steps; here the loss is also the divergence from the stored model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.core.draft_head import DraftHead
from vivace.core.layers import Linear
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.kernels.coded import PaletteCodes
from vivace.kernels.library import GROUP, LANES
from vivace.kernels.palette import nearest
from vivace.palette.clustering import cluster
from vivace.palette.entries import TrainedEntries, spacing_of
from vivace.palette.statistics import matrices
from vivace.train.data import DecoderObjective, TokenBatch
from vivace.train.distillation import DistillationLoss, FrozenPass, guess_losses
from vivace.train.objective import LossParts

INSIDE = 0.02
"""Share of a cell that a value is moved beyond its border, so that it has the code that it is to have."""
SETTLING = 10
"""Rounds of clustering after the last step."""


class PalettePart(Protocol):
    """A projection with a palette that is trained."""

    @property
    def trained(self) -> nn.Parameter:
        """What is trained."""

    @property
    def unit(self) -> float:
        """What moves weights by the mean distance of neighbouring entries, so that rates are shares of that."""

    def codes(self) -> PaletteCodes:
        """Return the palette as it is stored."""

    def settle(self) -> None:
        """Make up for what no snapshot holds, when the best parameters have been restored."""


class ClusteredLinear(nn.Module):
    """``x W^T + b`` with a matrix whose values are clustered: softly with gradients, to stored codes without."""

    def __init__(self, weight: Tensor, codes: PaletteCodes, bias: Tensor | None, rounds: int) -> None:
        """Begin at codes.

        Args:
            weight: (out, in) weights as they are stored.
            codes: what they were rounded to.
            bias: (out,) or None.
            rounds: updates of the centroids in each step.
        """
        super().__init__()
        self.bits, self.rounds = codes.bits, rounds
        width = weight.shape[1]
        self.bias: Tensor | None
        self.scales: Tensor | None
        self.centroids: Tensor
        self.register_buffer("bias", bias, persistent=False)
        self.register_buffer("scales", None if codes.scales is None else codes.scales.float(), persistent=False)
        self.register_buffer("centroids", codes.entries.float(), persistent=False)
        self.unit = spacing_of(codes)
        self.share = 0.1
        """Temperature as a share of the mean squared distance of neighbouring centroids."""
        values = weight.float() if self.scales is None else _divided(weight.float(), self._wide(width))
        self.values = nn.Parameter(_within(values, codes))

    @property
    def trained(self) -> nn.Parameter:
        """The values."""
        return self.values

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Project rows, (T, in) -> (T, out), and add ``add`` (T, out) if it is given."""
        if torch.is_grad_enabled():
            found = cluster(self.values, self.bits, rounds=self.rounds, share=self.share, centroids=self.centroids)
            self.centroids, weight = found.centroids, found.weight
            weight = weight if self.scales is None else weight * self._wide(weight.shape[1])
        else:
            weight = self.codes().dense()
        y = F.linear(x, weight, self.bias)
        return y if add is None else add + y

    @torch.no_grad()
    def codes(self) -> PaletteCodes:
        """Return the codes that the values have, with entries and scales as they are stored."""
        entries = self.centroids.sort(1).values
        entries = entries.bfloat16() if self.scales is None else entries.round().clamp(-127, 127).to(torch.int8)
        flat = self.values.view(len(entries), -1)
        codes = nearest(flat, entries.float()).view(self.values.shape)
        return PaletteCodes(codes, entries, None if self.scales is None else self.scales.bfloat16())

    @torch.no_grad()
    def settle(self) -> None:
        """Let the centroids follow the values, when these have been restored."""
        found = cluster(self.values, self.bits, rounds=SETTLING, share=self.share, centroids=self.centroids)
        self.centroids = found.centroids

    def _wide(self, width: int) -> Tensor:
        assert self.scales is not None
        return self.scales.repeat_interleave(GROUP, 1)[:, :width]


class PaletteObjective(DecoderObjective):
    """Trains the palettes of a decoder to have the distribution of the stored one."""

    def __init__(self, student: Decoder, parts: Mapping[str, PalettePart], loss: DistillationLoss) -> None:
        """Set what is trained and how.

        Args:
            student: the decoder whose matrices are palettes.
            parts: these matrices, by the names of their parameters.
            loss: weights of divergence and cross-entropy.
        """
        self.student = student
        self.parts = dict(parts)
        self.loss = loss

    def groups(self) -> Sequence[Mapping[str, object]]:
        """Return what each matrix trains, with the unit of its rate."""
        return [{"name": name, "params": [part.trained], "rate": part.unit} for name, part in self.parts.items()]

    def losses(self, model: Decoder, batch: TokenBatch) -> LossParts:
        """Yield the loss of a batch in parts; ``model`` is the stored decoder."""
        frozen = FrozenPass.of(model, batch.tokens)
        step = Step.dense(*batch.tokens.shape, device=batch.tokens.device)
        h = self.student.embed(batch.tokens.reshape(-1), step)
        top = self.student.run(h, step, 0, len(self.student.layers))
        yield from guess_losses(self.loss, DraftHead(model), self.student.head, frozen, batch, top)


class ClusteringObjective(PaletteObjective):
    """The same with matrices that are clustered, at a temperature that falls."""

    def __init__(
        self,
        student: Decoder,
        clustered: Mapping[str, ClusteredLinear],
        loss: DistillationLoss,
        shares: tuple[float, float],
        cooling_steps: int,
    ) -> None:
        """Set what is trained and how.

        Args:
            student: the decoder with clustered matrices.
            clustered: these matrices, by the names of their parameters.
            loss: weights of divergence and cross-entropy.
            shares: temperature at first and after ``cooling_steps``, as ``cluster`` takes it.
            cooling_steps: updates during which it falls.
        """
        super().__init__(student, clustered, loss)
        self.clustered = dict(clustered)
        self.shares = shares
        self.cooling_steps = cooling_steps
        self.step = 0
        self._cool()

    def updated(self) -> None:
        """Lower the temperature."""
        self.step += 1
        self._cool()

    def state(self) -> Mapping[str, Any]:
        """Return centroids and the number of updates."""
        return {"step": self.step, "centroids": [part.centroids for part in self.clustered.values()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        self.step = int(state["step"])
        for part, centroids in zip(self.clustered.values(), state["centroids"], strict=True):
            part.centroids = centroids
        self._cool()

    def _cool(self) -> None:
        first, last = self.shares
        share = first * (last / first) ** min(1.0, self.step / max(1, self.cooling_steps))
        for part in self.clustered.values():
            part.share = share


def with_clusters(
    student: Decoder, stored: Mapping[str, Tensor], codes: Mapping[str, PaletteCodes], rounds: int
) -> dict[str, ClusteredLinear]:
    """Replace the matrices of a decoder's layers by clustered ones, and return them by name.

    Args:
        student: the decoder to change.
        stored: the weights as they are stored, by the names of the parameters.
        codes: what they were rounded to; a matrix that is not among them stays as it is.
        rounds: updates of the centroids in each step.
    """
    made, parts = {}, matrices(student)
    for name, found in codes.items():
        made[name] = ClusteredLinear(stored[name], found, _bias_of(parts[name]), rounds)
        _replace(student, name, made[name])
    return made


def with_entries(student: Decoder, codes: Mapping[str, PaletteCodes]) -> dict[str, TrainedEntries]:
    """Replace matrices of a decoder's layers by palettes whose entries are trained, and return them by name."""
    made, parts = {}, matrices(student)
    for name, found in codes.items():
        made[name] = TrainedEntries(found, _bias_of(parts[name]))
        _replace(student, name, made[name])
    return made


def _bias_of(part: Linear) -> Tensor | None:
    return None if part.bias is None else part.bias.detach()


def _replace(student: Decoder, name: str, part: nn.Module) -> None:
    path, _, leaf = name.removesuffix(".weight").rpartition(".")
    setattr(student.get_submodule(path), leaf, part)


def _divided(weight: Tensor, scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 0.0, weight / scales)


def _within(values: Tensor, codes: PaletteCodes) -> Tensor:
    """Move values into the cells of their codes, (out, in)."""
    entries = codes.entries.float()
    middles = (entries[:, 1:] + entries[:, :-1]) / 2
    edge = torch.full((len(entries), 1), torch.inf)
    inside = INSIDE * entries.diff(dim=1)
    low = torch.cat((-edge, middles + inside), 1).repeat_interleave(LANES, 0)[: len(values)]
    high = torch.cat((middles - inside, edge), 1).repeat_interleave(LANES, 0)[: len(values)]
    place = codes.codes.long()
    lowest, highest = low.gather(1, place), high.gather(1, place)
    chosen = entries.repeat_interleave(LANES, 0)[: len(values)].gather(1, place)
    return torch.where(lowest <= highest, values.clamp(lowest, highest), chosen)
