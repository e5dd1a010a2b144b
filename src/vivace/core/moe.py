"""Mixture of experts: a router and the feed-forwards it chooses among (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from vivace.core.config import MoeConfig
from vivace.core.layers import FeedForward
from vivace.core.step import Step


class Expert(Protocol):
    """The feed-forward of one expert."""

    def __call__(self, x: Tensor, step: Step, add: Tensor | None = None, /) -> Tensor:
        """Return the expert's output for rows, (T, E) -> (T, E), added to ``add`` if it is given."""
        ...


class Experts(Protocol):
    """Supplies the experts of a layer, from memory that holds them all or from an expert cache."""

    def fetch(self, chosen: Sequence[int], *, is_prompt: bool) -> Iterator[tuple[int, Expert]]:
        """Yield each chosen expert once, as soon as it is ready; it may be used until the next one is asked for.

        Args:
            chosen: numbers of the experts that some of the rows chose.
            is_prompt: whether the rows belong to prompts, which choose nearly all experts, so that the choice says
                little about
                the rows to come.
        """
        ...

    def prefetch(self, likely: Sequence[int]) -> None:
        """Read these experts, the likeliest first, before the layer runs; this replaces the last prediction.

        Predicting is optional and never changes what is computed.
        """
        ...

    def predict_reuse(self, passes: Sequence[float]) -> None:
        """Record in how many passes after the next one each expert is expected to be used; eviction may use it."""
        ...


class ResidentExperts(nn.ModuleList):
    """All experts of a layer in memory (an ``Experts`` that fetches nothing)."""

    def fetch(self, chosen: Sequence[int], *, is_prompt: bool) -> Iterator[tuple[int, Expert]]:
        """Yield each chosen expert, in the order of ``chosen``."""
        for expert in chosen:
            yield expert, self[expert]

    def prefetch(self, likely: Sequence[int]) -> None:
        """Do nothing, since every expert is in memory."""

    def predict_reuse(self, passes: Sequence[float]) -> None:
        """Do nothing, since no expert is ever evicted."""


def likeliest(logits: Tensor, count: int) -> list[list[int]]:
    """Return, for each of several routers, the union of the ``count`` likeliest experts of all rows, likeliest first.

    Args:
        logits: (n, T, X) logits of n routers.
        count: number of experts for each row; all of them where there are fewer.
    """
    count = min(count, logits.shape[-1])
    if logits.shape[1] == 1:  # the case of decoding, several times a token
        best_first: list[list[int]] = logits[:, 0].topk(count)[1].tolist()
        return best_first
    best, chosen = torch.softmax(logits, -1, dtype=torch.float32).topk(count, -1)
    order = best.flatten(1).argsort(dim=1, descending=True, stable=True)
    ranked: list[list[int]] = chosen.flatten(1).gather(1, order).tolist()
    return [list(dict.fromkeys(experts)) for experts in ranked]


class MixtureOfExperts(nn.Module):
    """``sum_k p_k expert_k(x)`` over the top-k experts of each row, summed in the router's order.

    The sum is not in the order in which experts run or are fetched, so a row's bits do not depend on the other rows or
    on where weights come from.
    """

    def __init__(self, config: MoeConfig, router: nn.Module, experts: Sequence[FeedForward] | Experts) -> None:
        """Set the router and the experts.

        Args:
            config: how rows are routed.
            router: maps rows (T, E) to logits (T, X).
            experts: the feed-forwards, or an ``Experts`` that fetches them.
        """
        super().__init__()
        self.config = config
        self.router = router
        self.experts: Experts = ResidentExperts(experts) if isinstance(experts, Sequence) else experts

    def route(self, x: Tensor) -> Tensor:
        """Return router logits (T, X) of normed rows (T, E)."""
        logits: Tensor = self.router(x)
        return logits

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and indices of the chosen experts, each (T, top_k), the likeliest first."""
        probs = torch.softmax(self.route(x), -1, dtype=torch.float32)
        weights, chosen = probs.topk(self.config.top_k, -1)
        if self.config.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), chosen

    def mix(self, parts: Sequence[Tensor], weights: Tensor, add: Tensor | None) -> Tensor:
        """Return ``[add +] sum_k weights[:, k] parts[k]``, (T, E), summed in this order."""
        y = parts[0] * weights[:, :1]
        for place in range(1, len(parts)):
            y = y + parts[place] * weights[:, place : place + 1]
        return y if add is None else add + y

    def forward(self, x: Tensor, step: Step, add: Tensor | None = None) -> Tensor:
        """Compute the mixture of rows, (T, E) -> (T, E), and add ``add`` (T, E) if it is given."""
        weights, chosen = self.choose(x)
        run = self._run_alone if len(x) == 1 else self._run
        return self.mix(run(x, chosen, is_prompt=step.is_prompt), weights, add)

    def _run_alone(self, x: Tensor, chosen: Tensor, *, is_prompt: bool) -> Sequence[Tensor]:
        """Do as ``_run`` for a single row, the case of decoding, which needs no gathering of rows by expert."""
        order = chosen[0].tolist()
        made = {expert: feed(x, _BARE) for expert, feed in self.experts.fetch(sorted(order), is_prompt=is_prompt)}
        return [made[expert] for expert in order]

    def _run(self, x: Tensor, chosen: Tensor, *, is_prompt: bool) -> Sequence[Tensor]:
        """Return the outputs of each row's first, second, ... expert, top_k of (T, E)."""
        if not len(x):
            return [x] * self.config.top_k
        flat, made, places = chosen.reshape(-1), [], []
        for expert, feed in self.experts.fetch(torch.unique(flat).tolist(), is_prompt=is_prompt):
            places.append((flat == expert).nonzero()[:, 0])
            made.append(feed(x.index_select(0, places[-1] // self.config.top_k), _BARE))
        each = torch.cat(made).index_select(0, torch.cat(places).argsort())
        return each.view(*chosen.shape, x.shape[1]).unbind(1)


class _NoDeltas:
    """A stand-in for the step of an expert's call: low-rank deltas go to a layer's "mlp" site, never to one expert."""

    low_rank: tuple[()] = ()


_BARE: Step = _NoDeltas()  # type: ignore[assignment]
