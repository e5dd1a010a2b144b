"""Mixture of experts: a router and the feed-forwards it chooses among (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from vivace.core.config import MoeConfig
from vivace.core.layers import FeedForward
from vivace.core.seams import Expert, Experts
from vivace.core.step import Step


class ResidentExperts(nn.ModuleList):
    """Fills ``Experts`` for a layer whose experts are all in memory."""

    def fetch(self, chosen: Sequence[int], *, is_prompt: bool) -> Iterator[tuple[int, Expert]]:
        """Yield each chosen expert, in the order given."""
        for expert in chosen:
            yield expert, self[expert]

    def prefetch(self, likely: Sequence[int]) -> None:
        """Do nothing: all experts are in memory already."""

    def predict_reuse(self, passes: Sequence[float]) -> None:
        """Do nothing: no expert is ever evicted."""


def likeliest(logits: Tensor, count: int) -> list[list[int]]:
    """The ``count`` most likely experts of each row, together, the likeliest first, for several routers at once.

    Args:
        logits: (n, T, X), of n routers.
        count: experts for each row; all of them where there are fewer.
    """
    count = min(count, logits.shape[-1])
    if logits.shape[1] == 1:  # as told while decoding, many times a token
        best_first: list[list[int]] = logits[:, 0].topk(count)[1].tolist()
        return best_first
    best, chosen = torch.softmax(logits, -1, dtype=torch.float32).topk(count, -1)
    order = best.flatten(1).argsort(dim=1, descending=True, stable=True)
    ranked: list[list[int]] = chosen.flatten(1).gather(1, order).tolist()
    return [list(dict.fromkeys(experts)) for experts in ranked]


class MixtureOfExperts(nn.Module):
    """``sum_k p_k expert_k(x)`` over the top-k experts, summed in the router's order.

    The order of summation is the router's and not the order in which experts run or arrive, so a row's bits
    do not depend on its neighbours or on where weights come from.
    """

    def __init__(self, config: MoeConfig, router: nn.Module, experts: Sequence[FeedForward] | Experts) -> None:
        """Put together.

        Args:
            config: how rows are routed.
            router: (E) -> (X).
            experts: the feed-forwards themselves, or whoever brings them.
        """
        super().__init__()
        self.config = config
        self.router = router
        self.experts: Experts = ResidentExperts(experts) if isinstance(experts, Sequence) else experts

    def route(self, x: Tensor) -> Tensor:
        """Router logits (T, X) of normed rows (T, E)."""
        logits: Tensor = self.router(x)
        return logits

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shares and numbers of the chosen experts, each (T, top_k), the likeliest first."""
        probs = torch.softmax(self.route(x), -1, dtype=torch.float32)
        weights, chosen = probs.topk(self.config.top_k, -1)
        if self.config.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), chosen

    def mix(self, parts: Sequence[Tensor], weights: Tensor, add: Tensor | None) -> Tensor:
        """``[add +] sum_k weights[:, k] parts[k]``, of (T, E) each, in this order."""
        y = parts[0] * weights[:, :1]
        for place in range(1, len(parts)):
            y = y + parts[place] * weights[:, place : place + 1]
        return y if add is None else add + y

    def forward(self, x: Tensor, step: Step, add: Tensor | None = None) -> Tensor:
        """(T, E) -> (T, E)."""
        weights, chosen = self.choose(x)
        run = self._run_alone if len(x) == 1 else self._run
        return self.mix(run(x, chosen, is_prompt=step.is_prompt), weights, add)

    def _run_alone(self, x: Tensor, chosen: Tensor, *, is_prompt: bool) -> Sequence[Tensor]:
        """As ``_run`` for a single row, as while decoding: it does not have to find its experts."""
        order = chosen[0].tolist()
        made = {expert: feed(x, _BARE) for expert, feed in self.experts.fetch(sorted(order), is_prompt=is_prompt)}
        return [made[expert] for expert in order]

    def _run(self, x: Tensor, chosen: Tensor, *, is_prompt: bool) -> Sequence[Tensor]:
        """What each row's first, second ... expert makes of it, top_k of (T, E), whatever order they come in."""
        if not len(x):
            return [x] * self.config.top_k
        flat, made, places = chosen.reshape(-1), [], []
        for expert, feed in self.experts.fetch(torch.unique(flat).tolist(), is_prompt=is_prompt):
            places.append((flat == expert).nonzero()[:, 0])
            made.append(feed(x.index_select(0, places[-1] // self.config.top_k), _BARE))
        each = torch.cat(made).index_select(0, torch.cat(places).argsort())
        return each.view(*chosen.shape, x.shape[1]).unbind(1)


class _NoDeltas:
    """The part of a step an expert looks at: low-rank terms go to a layer's "mlp" site, never to one expert."""

    deltas: tuple[()] = ()


_BARE: Step = _NoDeltas()  # type: ignore[assignment]
