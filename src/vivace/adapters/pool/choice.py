"""Which soft prompt a text reads most, by the attention of the first layer alone (arXiv:2310.00867).

    A = softmax over [P_1 .. P_m, X up to the row] of q k scale,    score_i = mean of A over heads, rows, entries of i

q and k are those of the first layer, X the tokens of the prompt. The mean over entries keeps long members from winning
by their length. Members do not see one another. The paper's own form is known from its reviews only; joint softmax,
mean over entries and all rows are the reading that its reviewers report, and ``standalone`` scores every member by
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from vivace.core.model import Decoder, Layer
from vivace.core.step import Step

Scoring = Literal["joint", "standalone"]
"""Whether members share one softmax, or each has its own beside the text."""
ROWS_AT_ONCE = 64
"""Rows whose weights are held at once: few enough to stay in a cache."""


@torch.inference_mode()
def scores_of(model: Decoder, tokens: Sequence[int], keys: Sequence[Tensor], scoring: Scoring = "joint") -> list[float]:
    """Return how much of the first layer's attention each member gets per entry.

    Args:
        model: the decoder.
        tokens: the prompt.
        keys: of each member in the first layer, (K, n, D) float32, rotated for the positions in front of the text.
        scoring: which entries share a softmax.
    """
    first, c = model.layers[0], model.config
    assert isinstance(first, Layer)
    step = Step.dense(1, len(tokens), device=model.device)
    ids = torch.tensor(list(tokens), dtype=torch.int64, device=model.device)
    q = first.project(model.embed(ids, step), step).float()
    own = step.memory.stored(0)[0][0].float()
    rows = (q.view(len(q), c.num_kv_heads, -1, c.head_dim) * c.scale).permute(1, 2, 0, 3)  # (K, group, T, D)
    counts = [key.shape[1] for key in keys]
    entries = torch.cat((*keys, own), 1).mT.contiguous()  # (K, D, N + T), those of all members in front
    total = torch.zeros(len(keys), dtype=torch.float64, device=q.device)
    for start in range(0, len(q), ROWS_AT_ONCE):
        some = rows[:, :, start : start + ROWS_AT_ONCE]
        count = some.shape[2]
        scores = some.flatten(1, 2) @ entries[..., : sum(counts) + start + count]  # (K, group T', N + T'')
        if c.attention_softcap is not None:
            scores = c.attention_softcap * torch.tanh(scores / c.attention_softcap)
        later = torch.ones(count, count, dtype=torch.bool, device=scores.device).triu(1)
        scores.view(*some.shape[:3], -1)[..., -count:].masked_fill_(later, -torch.inf)
        total += _masses(scores, counts, scoring)
    return [float(mass) / (c.num_heads * len(q) * count) for mass, count in zip(total, counts, strict=True)]


def _masses(scores: Tensor, counts: Sequence[int], scoring: Scoring) -> Tensor:
    """Return how much of the weights each member gets over all rows, from scores (K, R, N + T) with those of members.

    Masses are added up member by member, so that their order changes nothing.
    """
    sizes = [*counts, scores.shape[-1] - sum(counts)]
    if scoring == "standalone":
        *own, text = (part.logsumexp(-1).double() for part in scores.split(sizes, -1))
        return torch.stack([torch.sigmoid(mass - text).sum() for mass in own])
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    masses = torch.stack([part.sum(-1).double() for part in weights.split(sizes, -1)])
    return (masses[:-1] / masses.sum(0)).sum((1, 2))
