"""When each expert will be used next: what the expert cache asks before it evicts one.

Time is a *clock* that counts layers: the number of the pass times the layers of the model, plus the layer. An expert is
the pair (layer, expert). The cache tells a policy what was used and what is predicted, and evicts the expert whose next
use lies farthest ahead. Predictions come from outside, from ``foresight`` or, in benchmarks, from the router of the
next layer.

Loading ahead of time because of an accelerated residual is M2R2's (Bhendawade et al. 2025, arXiv:2502.02040). Evicting
by a predicted next use is ours, whether that is learnt (``foresight/forecast.py``) or reckoned from how often an expert
was used lately. The policies it is measured against are in ``benchmarks/expert_policies.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Key = tuple[int, int]
"""An expert: (layer, number within the layer)."""

FloatArray = NDArray[np.float64]
NOT_SEEN = 64.0
"""Passes after a prompt; an expert that none of them uses counts as used then."""
BEHIND = 0.5
"""Layers; an expert that is only held counts as used that much later than one that is predicted for the same layer."""


class Policy(Protocol):
    """Predicts the next use of each expert from what the cache reports."""

    name: str
    keeps: bool
    """Whether experts stay in memory after their layer has run."""

    def used(self, layer: int, chosen: Sequence[int], clock: int, *, is_prompt: bool) -> None:
        """Record that a layer's router chose these experts, for the rows of a prompt or for others."""
        ...

    def predicted(self, layer: int, likely: Sequence[int], due: int) -> None:
        """Record that these experts of a layer, and no others, will probably be chosen at clock ``due``."""
        ...

    def reuse_predicted(self, layer: int, passes: Sequence[float], turn: int) -> None:
        """Record in how many passes after pass ``turn`` each expert of a layer will probably be chosen again."""
        ...

    def next_uses(self, keys: Sequence[Key], clock: int) -> Sequence[float]:
        """Predict the clock at which each expert will be used next."""
        ...

    def prefetches(self, clock: int) -> Iterable[tuple[Key, int]]:
        """Return loads worth beginning when layer ``clock`` runs, most urgent first: (expert, clock it is due)."""
        ...


class NextUse:
    """Predicts the next use from predictions of others and from how often an expert was used lately.

    An expert that is predicted for a layer is used when that layer runs. Any other is used in its layer's turn after
    the passes that it will be idle. Let f be the mean number of passes between two uses of an expert that is used as
    often as this one was lately. Where a forecast says that it will be used again after n passes, the forecast, which
    knows the words, is weighed against the past, which knows this text: n^w f^(1 - w). A prompt chooses nearly all
    experts, which says nothing about the answer: until the first forecast for that answer, an expert counts as used
    when it was first used after earlier prompts.
    """

    keeps = True
    FRESH = 0.07
    """Weight of the last pass in how often an expert is used."""
    RARE = 0.02
    """How often an expert counts as used that has not been seen, or not for long."""
    FORECAST = 0.4
    """w, the weight of the forecast."""
    OPENING = 0.1
    """Weight of the last answer in when an expert is first used after a prompt."""

    def __init__(self, num_layers: int, num_experts: int, name: str = "ahead") -> None:
        """Begin without any history.

        Args:
            num_layers: layers of the model, which make a pass.
            num_experts: experts of a layer.
            name: shown in reports.
        """
        self.name = name
        self.num_layers, self.num_experts = num_layers, num_experts
        shape = num_layers, num_experts
        # The arrays below have one row for each expert: its layer times ``num_experts``, plus its number.
        self._layer = np.repeat(np.arange(num_layers, dtype=np.float64), num_experts)
        self._share, self._then = np.full(shape, self.RARE).reshape(-1), np.zeros(shape).reshape(-1)
        """The share of passes that used the expert, as it stood after pass ``then``."""
        self._due, self._again = np.full(shape, -1.0).reshape(-1), np.full(shape, -1.0).reshape(-1)
        """Clocks for which an expert is predicted, and at which a forecast says it is used again; -1 where neither."""
        # Small operations on arrays cost more than they do, so reports are collected and applied in ``_learn``.
        self._predictions: dict[int, tuple[Sequence[int], int]] = {}
        self._forecasts: dict[int, tuple[Sequence[float], int]] = {}
        self._used: list[int] = []
        self._turn = 0
        """The pass that ``_used`` belongs to."""
        self._opened, self._is_answered, self._knows_openings = -1, False, False
        """Pass of the last prompt; whether a pass of an answer followed; whether that ever happened."""
        self._first = np.full(shape, NOT_SEEN).reshape(-1)
        """Passes from the last prompt to the first use, as far as there was one."""
        self._opening = np.full(shape, np.log2(NOT_SEEN) / 2).reshape(-1)
        """log2 of the same after earlier prompts, a moving average."""

    def used(self, layer: int, chosen: Sequence[int], clock: int, *, is_prompt: bool) -> None:
        """Count one more pass that used these experts."""
        here = clock // self.num_layers
        if here != self._turn:
            self._count()
            self._turn = here
        if not is_prompt:
            self._is_answered = True
        elif self._opened < here:
            self._open(here)
        first = layer * self.num_experts
        self._used += [first + expert for expert in chosen]

    def predicted(self, layer: int, likely: Sequence[int], due: int) -> None:
        """Record for when these experts are predicted."""
        self._predictions[layer] = likely, due

    def reuse_predicted(self, layer: int, passes: Sequence[float], turn: int) -> None:
        """Record a forecast of when each expert of a layer is used again."""
        self._forecasts[layer] = passes, turn

    def next_uses(self, keys: Sequence[Key], clock: int) -> Sequence[float]:
        """Predict all next uses in a few operations, since the cache asks about every expert it holds."""
        self._learn()
        uses = np.where(self._due > clock, self._due, self._later(clock))
        return uses[[layer * self.num_experts + expert for layer, expert in keys]].tolist()  # type: ignore[no-any-return]

    def _learn(self) -> None:
        """Apply the reports that were collected to the arrays."""
        self._count()
        for layer, (likely, due) in self._predictions.items():
            first = layer * self.num_experts
            self._due[first : first + self.num_experts] = -1
            self._due[[first + expert for expert in likely]] = due
        if self._forecasts:
            layers = np.fromiter(self._forecasts, dtype=np.intp)
            turns = np.array([turn for _, turn in self._forecasts.values()])
            passes = np.array([passes for passes, _ in self._forecasts.values()])
            again = self._again.reshape(self.num_layers, -1)
            again[layers] = (turns[:, None] + passes) * self.num_layers + layers[:, None]
        self._predictions.clear()
        self._forecasts.clear()

    def _count(self) -> None:
        """Raise the shares of the experts that this pass used; the shares of others fade with time."""
        if not self._used:
            return
        rows, here = np.array(self._used, dtype=np.intp), self._turn
        share = self._shares(here)[rows]
        self._share[rows], self._then[rows] = share + self.FRESH * (1 - share), here
        if self._opened < here:
            self._first[rows] = np.minimum(self._first[rows], here - self._opened)
        self._used.clear()

    def _open(self, here: int) -> None:
        """Begin a prompt in pass ``here``: forecasts up to now were about another text."""
        if self._is_answered and self._opened >= 0:
            self._opening += self.OPENING * (np.log2(self._first) - self._opening)
            self._knows_openings = True
        self._opened, self._is_answered = here, False
        self._first[:] = NOT_SEEN
        self._forecasts.clear()
        self._again[:] = -1

    def _shares(self, here: int) -> FloatArray:
        """Return the share of passes before ``here`` that used each expert, late passes weighing more."""
        fading: FloatArray = (1 - self.FRESH) ** (here - self._then)
        return self.RARE + (self._share - self.RARE) * fading

    def _later(self, clock: int) -> FloatArray:
        """Return when each expert is used next, were it not predicted for any layer to come."""
        layers = self.num_layers
        if self._knows_openings and clock // layers == self._opened and self._again.max() < 0:
            after: FloatArray = self._opened + np.exp2(self._opening)
            return after * layers + self._layer + BEHIND
        turn = clock + 1 + (self._layer - clock - 1) % layers
        idle = 1 / self._shares(clock // layers)
        forecast = np.maximum((self._again - turn) / layers + 1, 1)
        weighed = forecast**self.FORECAST * idle ** (1 - self.FORECAST)
        later: FloatArray = turn + layers * (np.where(self._again > clock, weighed, idle) - 1) + BEHIND
        return later

    def prefetches(self, clock: int) -> Iterable[tuple[Key, int]]:
        """Return nothing: the cache itself loads whatever is predicted."""
        return ()
