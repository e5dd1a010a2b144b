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
ROWS_AT_ONCE = 256
"""Rows whose weights are held at once."""


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
    grouped = q.view(len(q), c.num_kv_heads, -1, c.head_dim).permute(1, 2, 0, 3)  # (K, group, T, D)
    total = torch.zeros(len(keys), dtype=torch.float64)
    for start in range(0, len(q), ROWS_AT_ONCE):
        rows = grouped[:, :, start : start + ROWS_AT_ONCE]
        mine = _scores(rows, own[:, : start + rows.shape[2]], c.scale, c.attention_softcap)
        later = torch.arange(mine.shape[-1]) > torch.arange(start, start + rows.shape[2])[:, None]
        text = mine.masked_fill(later, -torch.inf).double().logsumexp(-1)
        each = [_scores(rows, key, c.scale, c.attention_softcap).double().logsumexp(-1) for key in keys]
        every = torch.stack([text, *each]).logsumexp(0)
        for place, mass in enumerate(each):
            whole = every if scoring == "joint" else torch.logaddexp(text, mass)
            total[place] += (mass - whole).exp().sum() / (c.num_heads * len(q) * keys[place].shape[1])
    return [float(score) for score in total]


def _scores(rows: Tensor, keys: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return scaled scores of rows (K, group, T, D) with keys (K, n, D), (K, group, T, n)."""
    scores = torch.einsum("kgtd,knd->kgtn", rows, keys) * scale
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)
