"""The head that guesses tokens: the decoder's own, or those of its rows that a draft vocabulary names.

A guess reads the whole head, which is a fifth of a model of 135 million weights with 49,152 tokens. The model's own
answers use few of these tokens most of the time, so a drafter may read the rows of the most frequent ones only. The
text does not change: verification reads all rows, and a token outside the vocabulary is one that the draft misses.

The idea is known from FR-Spec (Zhao et al. 2025, arXiv:2502.14856), which ranks tokens by their frequency in a corpus.
**Where we differ**: they are counted in the model's own answers, and ``vivace tune`` chooses how many are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vivace.errors import ConfigError
from vivace.kernels import reference as kernels

if TYPE_CHECKING:
    from vivace.core.model import Decoder


NOT_AMONG = -100
"""Place of a token that is not among those of a draft vocabulary; PyTorch's losses leave it out."""


def check_size(size: int) -> None:
    """Refuse a size of a draft vocabulary that no plan can have.

    Raises:
        ConfigError: it is negative.
    """
    if size < 0:
        raise ConfigError(f"vocabulary must be >= 0 (0 reads all rows of the head), found {size}")


def size_label(size: int) -> str:
    """Return what the label of a plan says about the size of its draft vocabulary; nothing for all tokens."""
    return f" from {size:,} tokens" if size else ""


class DraftHead:
    """Reads guesses from residuals; drafters use it wherever they would use the decoder's head."""

    def __init__(self, model: Decoder, ids: Tensor | None = None, weight: Tensor | None = None) -> None:
        """Take the rows ``ids`` of a head.

        Args:
            model: the decoder that is drafted for.
            ids: (n,) tokens that may be guessed, ascending, so that the smallest of equals is guessed as by the
                decoder itself; None allows all.
            weight: (V, E) head of a drafter's own; None is the decoder's.
        """
        self.model = model
        self.ids = None if ids is None else ids.to(model.device).contiguous()
        self.module: nn.Module | None = None
        """What multiplies normed residuals, on the kernels of the decoder; None is the decoder's head."""
        if self.ids is not None or weight is not None:
            rows, bias = _head_of(model) if weight is None else (weight, None)
            if self.ids is not None:
                rows, bias = rows[self.ids], None if bias is None else bias[self.ids]
            self.module = model.backend.projection(rows.detach().contiguous(), bias)

    def __call__(self, h: Tensor) -> Tensor:
        """Return logits (n, V) float32 of residuals (n, E); those of tokens that are not guessed are -inf."""
        return self._spread(self.among(h))

    def greedy(self, h: Tensor) -> Tensor:
        """Return the likeliest token of each residual, (n, E) -> (n,)."""
        return self.model.greedy(h) if self.module is None else self.best(self.model.norm(h))

    def scores(self, x: Tensor) -> Tensor:
        """Return the logits (n, V) float32 of normed residuals (n, E), before a softcap, which keeps their order."""
        return self._spread(self.scores_among(x))

    def scores_among(self, x: Tensor) -> Tensor:
        """Return the logits of the tokens that may be guessed alone, (n, E) normed -> (n, ``num_rows``) float32, before
        a softcap.
        """
        return self._read(x).float()

    @property
    def num_rows(self) -> int:
        """Number of tokens that may be guessed."""
        return self.model.config.vocab_size if self.ids is None else len(self.ids)

    def among(self, h: Tensor) -> Tensor:
        """Return the logits of the tokens that may be guessed alone, (n, E) -> (n, ``num_rows``) float32."""
        if self.module is None:
            return self.model.head(h)
        return self._capped(self._read(self.model.norm(h)).float())

    def places(self, tokens: Tensor) -> Tensor:
        """Return the place of each token among those that may be guessed, (n,) -> (n,), or ``NOT_AMONG``."""
        if self.ids is None:
            return tokens
        place = torch.searchsorted(self.ids, tokens).clamp(max=len(self.ids) - 1)
        return torch.where(self.ids[place] == tokens, place, NOT_AMONG)

    def best(self, x: Tensor) -> Tensor:
        """Return the likeliest token of each normed residual, (n, E) -> (n,)."""
        read = self.model.lm_head if self.module is None else self.module
        choose = getattr(read, "greedy", None)
        if choose is None:
            return self.scores(x).argmax(-1)
        chosen: Tensor = choose(x)[0]
        return chosen if self.ids is None else self.ids[chosen]

    def _read(self, x: Tensor) -> Tensor:
        """Return the outputs of the rows that are read, (n, E) -> (n, rows)."""
        read = self.model.lm_head if self.module is None else self.module
        logits: Tensor = kernels.linear(x, self.model.embedding) if read is None else read(x)
        return logits

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.model.config.logit_softcap
        return logits if cap is None else cap * kernels.pointwise(torch.tanh, logits / cap)

    def _spread(self, logits: Tensor) -> Tensor:
        """Put the logits of the rows that are read into their places among all tokens."""
        if self.ids is None:
            return logits
        every = torch.full((len(logits), self.model.config.vocab_size), -torch.inf, device=logits.device)
        return every.index_copy_(1, self.ids, logits)


def _head_of(model: Decoder) -> tuple[Tensor, Tensor | None]:
    """Return the decoder's head as a matrix (V, E), and its bias if it has one."""
    head = model.lm_head
    if head is None:
        return model.embedding, None
    packed = getattr(head, "matrix", None)
    bias = getattr(head, "bias", None)
    return head.get_parameter("weight") if packed is None else packed.rows_of_weights(), bias
