"""Muon for matrices and AdamW for all other parameters, both on float32 master copies of the trained weights.

Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks") replaces the momentum of a weight
matrix by the nearest semi-orthogonal matrix, found by five Newton-Schulz steps

    X <- a X + (b A + c A A) X,   A = X X^T,   (a, b, c) = (3.4445, -4.7750, 2.0315),

so that every direction learns at the same speed. **Where we differ**: matrices of one shape are orthogonalised as one
batch, and projections that are stacked in one weight (query, key, value; gate, up) are separated first, since each has
its own scale.

AdamW: Loshchilov & Hutter 2019, arXiv:1711.05101.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from vivace.errors import ConfigError, MismatchError, nearest

METHODS = ("muon", "adamw")
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class OptimiserConfig:
    """Settings of the optimiser; the loop's schedule multiplies the learning rates by a factor from 0 to 1."""

    muon_rate: float = 0.02
    adamw_rate: float = 3e-3
    momentum: float = 0.95
    momentum_steps: int = 300
    """Number of updates over which Muon's momentum grows linearly from 0.85 to ``momentum``."""
    betas: tuple[float, ...] = (0.9, 0.95)
    weight_decay: float = 0.0
    newton_schulz_steps: int = 5

    def __post_init__(self) -> None:
        rates = self.muon_rate, self.adamw_rate
        if not all(0 < rate < math.inf for rate in rates):
            raise ConfigError(f"learning rates must be positive and finite, found {rates[0]} and {rates[1]}")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"weight_decay must be at least 0 and finite, found {self.weight_decay}")
        for name, count, least in (
            ("momentum_steps", self.momentum_steps, 0),
            ("newton_schulz_steps", self.newton_schulz_steps, 1),
        ):
            if count < least:
                raise ConfigError(f"{name} must be at least {least}, found {count}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in (*self.betas, self.momentum)):
            raise ConfigError(f"betas are two numbers in [0, 1) and momentum one, found {self.betas}, {self.momentum}")


@dataclass(frozen=True)
class _Piece:
    """A projection inside a stacked weight: rows start..stop-1. It is orthogonalised transposed where it is tall."""

    weight: int
    start: int
    stop: int


class Optimiser:
    """Updates the parameters of an objective's groups.

    A group is ``{"params": [...], "name": str}`` with the optional keys ``"method"`` ("muon" or "adamw", the default),
    ``"cuts"`` (for each weight the heights of the projections that are stacked in it), ``"weight_decay"`` and
    ``"rate"`` (a factor on the configured learning rate).
    """

    def __init__(self, groups: Sequence[Mapping[str, object]], config: OptimiserConfig) -> None:
        """Make float32 master copies and zero moments.

        Raises:
            ConfigError: a method is unknown, a parameter is in two groups, or there are no parameters.
        """
        self.config = config
        self.num_updates = 0
        self._parts = [_make(group, config) for group in groups]
        self.params = [p for part in self._parts for p in part.params]
        if not self.params:
            raise ConfigError("there is nothing to train: the objective's groups hold no parameters")
        if len({id(p) for p in self.params}) != len(self.params):
            raise ConfigError("a parameter stands in two optimiser groups")

    @torch.no_grad()
    def update(self, factor: float) -> None:
        """Update the parameters at ``factor`` times the configured rates and clear their gradients."""
        self.num_updates += 1
        for part in self._parts:
            part.update(factor, self.num_updates)
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply all gradients by ``factor``."""
        for p in self.params:
            if p.grad is not None:
                p.grad.mul_(factor)

    @torch.no_grad()
    def clip(self, norm: float) -> float:
        """Scale the gradients down to a global norm of at most ``norm``; return the norm before that."""
        grads = [p.grad for p in self.params if p.grad is not None]
        found = float(torch.stack([g.float().norm() for g in grads]).norm())
        if found > norm:
            for g in grads:
                g.mul_(norm / found)
        return found

    def num_bytes(self) -> int:
        """Return the bytes held besides the parameters: master copies and moments."""
        return sum(part.num_bytes() for part in self._parts)

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as plain tensors and numbers."""
        return {"num_updates": self.num_updates, "parts": [part.state() for part in self._parts]}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state, including the values of the parameters.

        Raises:
            MismatchError: the state belongs to other parameters.
        """
        parts = state["parts"]
        if len(parts) != len(self._parts):
            raise MismatchError(f"the saved state has {len(parts)} optimiser groups, this run {len(self._parts)}")
        for part, saved in zip(self._parts, parts, strict=True):
            part.restore(saved)
        self.num_updates = int(state["num_updates"])


class _Group:
    """Parameters that are updated alike, their float32 master copies and the moments of each."""

    num_moments = 1

    def __init__(self, group: Mapping[str, object], config: OptimiserConfig) -> None:
        self.name = str(group.get("name", "unnamed"))
        self.params = list(cast(Sequence[Tensor], group["params"]))
        self.config = config
        self.rate = float(cast(float, group.get("rate", 1.0)))
        self.decay = float(cast(float, group.get("weight_decay", config.weight_decay)))
        self.masters = [p.detach() if p.dtype == torch.float32 else p.detach().float() for p in self.params]
        self.moments = [[torch.zeros_like(m) for m in self.masters] for _ in range(self.num_moments)]

    def update(self, factor: float, count: int) -> None:
        raise NotImplementedError

    def write_back(self) -> None:
        """Round the master copies into the parameters."""
        for p, master in zip(self.params, self.masters, strict=True):
            if p.dtype != torch.float32:  # else it is the parameter itself
                p.copy_(master)

    def num_bytes(self) -> int:
        own = [m for p, m in zip(self.params, self.masters, strict=True) if p.dtype != torch.float32]
        return sum(t.nbytes for kept in (own, *self.moments) for t in kept)

    def state(self) -> dict[str, Any]:
        return {"name": self.name, "masters": self.masters, "moments": self.moments}

    def restore(self, saved: Mapping[str, Any]) -> None:
        shapes, ours = ([tuple(t.shape) for t in kept] for kept in (saved["masters"], self.masters))
        if saved["name"] != self.name or shapes != ours or len(saved["moments"]) != len(self.moments):
            raise MismatchError(
                f"the saved state's group {saved['name']!r} of {len(shapes)} tensors is not this run's {self.name!r} "
                f"of {len(ours)}; resume with the recipe it was started with"
            )
        for kept, loaded in zip((self.masters, *self.moments), (saved["masters"], *saved["moments"]), strict=True):
            for mine, value in zip(kept, loaded, strict=True):
                mine.copy_(value)
        self.write_back()


class _AdamW(_Group):
    num_moments = 2

    def update(self, factor: float, count: int) -> None:
        first, second = self.config.betas
        rate = self.config.adamw_rate * self.rate * factor
        for p, master, mean, square in zip(self.params, self.masters, *self.moments, strict=True):
            if p.grad is None:
                continue
            grad = p.grad.float()
            mean.lerp_(grad, 1 - first)
            square.lerp_(grad.square(), 1 - second)
            size = (square / (1 - second**count)).sqrt_().add_(1e-8)
            master.mul_(1 - rate * self.decay)
            master.addcdiv_(mean, size, value=-rate / (1 - first**count))
        self.write_back()


class _Muon(_Group):
    def __init__(self, group: Mapping[str, object], config: OptimiserConfig) -> None:
        super().__init__(group, config)
        cuts = cast(Sequence[Sequence[int]], group.get("cuts") or [(m.shape[0],) for m in self.masters])
        self._pieces: defaultdict[tuple[int, int], list[_Piece]] = defaultdict(list)
        for weight, (master, cut) in enumerate(zip(self.masters, cuts, strict=True)):
            if master.dim() != 2 or sum(cut) != master.shape[0]:
                raise ConfigError(
                    f"Muon needs matrices cut into all their rows; group {self.name!r} has a weight of shape "
                    f"{tuple(master.shape)} cut into {tuple(cut)}"
                )
            start = 0
            for height in cut:
                shape = (min(height, master.shape[1]), max(height, master.shape[1]))
                self._pieces[shape].append(_Piece(weight, start, start + height))
                start += height

    def update(self, factor: float, count: int) -> None:
        momentum = self.config.momentum
        momentum = min(momentum, 0.85 + (momentum - 0.85) * count / max(1, self.config.momentum_steps))
        wanted = []
        for p, moment in zip(self.params, self.moments[0], strict=True):
            grad = torch.zeros_like(moment) if p.grad is None else p.grad.float()
            moment.lerp_(grad, 1 - momentum)
            wanted.append(grad.lerp_(moment, momentum))  # Nesterov: look ahead along the momentum
        rate = self.config.muon_rate * self.rate * factor
        for pieces in self._pieces.values():
            self._turn(pieces, wanted, rate)
        self.write_back()

    def _turn(self, pieces: Sequence[_Piece], wanted: Sequence[Tensor], rate: float) -> None:
        """Update projections that have one shape (with the smaller dimension first) as one batch."""
        cut = [wanted[piece.weight][piece.start : piece.stop] for piece in pieces]
        lying = torch.stack([c if c.shape[0] <= c.shape[1] else c.t() for c in cut])
        turned = orthogonalise(lying, self.config.newton_schulz_steps).float()
        for piece, shaped, update in zip(pieces, cut, turned, strict=True):
            height, width = shaped.shape
            master = self.masters[piece.weight][piece.start : piece.stop]
            master.mul_(1 - rate * self.decay)
            master.sub_(update if height <= width else update.t(), alpha=rate * max(1.0, height / width) ** 0.5)


def _make(group: Mapping[str, object], config: OptimiserConfig) -> _Group:
    method = str(group.get("method", "adamw"))
    if method not in METHODS:
        raise ConfigError(f"no optimiser {method!r}{nearest(method, METHODS)}")
    return _Muon(group, config) if method == "muon" else _AdamW(group, config)


def orthogonalise(x: Tensor, steps: int) -> Tensor:
    """Return matrices with the same singular vectors and singular values near 1, by Newton-Schulz iterations.

    Args:
        x: (n, rows, columns), rows <= columns.
        steps: number of iterations; five bring all but the smallest singular values into [0.7, 1.2].

    Returns:
        (n, rows, columns) bfloat16.
    """
    a, b, c = _COEFFICIENTS
    x = x.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x
