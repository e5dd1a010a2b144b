"""The streams: guesses about later tokens that run beside the main stream (arXiv:2402.11131, section 3.1).

Stream j = 1..gamma of a row at position t starts at layer N - Ns, the insertion layer, and ends after the last layer:

    S_tj = M_t + P_j                               P_j: stream embedding
    S_tj <- layer_n(S_tj; K, V of M_<=t and of S_t1..S_tj)
    head(norm(S_tj)) = distribution of the token 1 + j positions after t

The main stream never reads a stream, so its numbers are those of the model without streams. A stream's own keys and
values are read by the later streams of its row and dropped after the pass. Stream j has position t + j: to the layers,
streams are the tokens that come next.

The paper's lossless mode freezes the model and gives stream rows adapters, whose form is not known to us. Ours are
low-rank deltas on q, k, v and o and a silu bottleneck beside the feed-forward, on stream rows only, with up factors of
zero at first. ``feedback`` is ours as well: where streams run after verification, the position's final residual and the
token decided there are known, and

    S_tj = M_t + P_j + |M_t| (A_j norm(final_t) + B_j rms(embed(x_{t+1})))      A, B zero at first

with |M| the root mean square of M's components: residuals grow a hundredfold on their way to the insertion layer, and
what is added there must be as large to have an effect.

Where every node has streams while it is verified, neither is known. The pruning layer (``Pruner``) is an early exit at
the place where streams start: its residual M + B A M stands in for ``final_t``, and its likeliest token for x_{t+1}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.core.config import ModelConfig
from vivace.core.draft_rows import StreamRows
from vivace.core.low_rank import ATTENTION, LowRank, LowRankDeltas, random_factor, site_shapes
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.kernels.reference import linear
from vivace.methods.multistream.config import MultistreamConfig
from vivace.methods.multistream.rotation import ValueRotation


class Streams(LowRank):
    """Trained weights: embeddings, adapters of stream rows, and the layer that prunes drafts."""

    def __init__(self, config: MultistreamConfig, model: ModelConfig) -> None:
        """Make untrained streams.

        Raises:
            ConfigError: the insertion layer is not inside the model.
        """
        config.check_fits(model.num_layers)
        rotates = config.identifier == "rotation"
        embeddings = torch.randn(0 if rotates else config.streams, model.width) * 0.02  # drawn before the factors
        ranks = dict.fromkeys(ATTENTION, config.rank) | {"mlp": config.bottleneck}
        super().__init__(site_shapes(model, range(config.insertion_layer, model.num_layers), ranks))
        self.config = config
        self.embeddings = nn.Parameter(embeddings)
        """P, (streams, E); empty where values are rotated."""
        self.rotation = ValueRotation(config.insertion_layer, config.streams, model) if rotates else None
        fed = config.streams if config.feedback else 0
        self.final = nn.Parameter(torch.zeros(fed, model.width, model.width)) if fed else None
        """A, (streams, E, E)."""
        self.decided = nn.Parameter(torch.zeros(fed, model.width, model.width)) if fed else None
        """B, (streams, E, E)."""
        self._projections: tuple[nn.Module, ...] = ()
        """The feedback projection on the kernels of the model that is drafted for; these are not trained weights."""
        self.pruner = Pruner(model.width, config.pruner_rank) if config.pruner_rank else None

    def start(self, main: Tensor, count: int, known: Tensor | None = None) -> Tensor:
        """Return the first ``count`` streams of rows entering the insertion layer, (n, E) -> (n, count, E).

        Args:
            main: (n, E) the rows.
            count: number of streams of each.
            known: (n, 2, E) the result of ``known_at`` for them, for streams with feedback.
        """
        start = main[:, None].expand(-1, count, -1) if self.rotation else main[:, None] + self.embeddings[:count]
        if known is not None:
            size = main.float().square().mean(-1, keepdim=True).sqrt().to(main.dtype)
            offsets = self._offsets(known.flatten(1)) * size
            start = start + offsets.view(len(main), -1, main.shape[1])[:, :count]
        return start.to(main.dtype)

    def _offsets(self, known: Tensor) -> Tensor:
        for projection in self._projections:
            offsets: Tensor = projection(known)
            return offsets
        return linear(known, self._feedback().to(known.dtype))

    def _feedback(self) -> Tensor:
        """Return A beside B, (streams * E, 2 E)."""
        assert self.final is not None, "only streams with feedback have these weights"
        assert self.decided is not None, "only streams with feedback have these weights"
        return torch.cat((self.final, self.decided), -1).flatten(0, 1)

    def run_on(self, model: Decoder) -> None:
        """Use the kernels that run the layers of ``model`` for drafts from now on.

        Without native kernels the factors are converted to float32.
        """
        if model.backend.span is None:
            self.widen()
        if self.config.feedback:
            self._projections = (model.backend.projection(self._feedback().detach().to(model.dtype)),)

    def deltas(self, which: Tensor, count: int | None = None) -> LowRankDeltas:
        """Return the adapters as data for a call.

        Args:
            which: (T,) 0 on stream rows and -1 elsewhere.
            count: number of streams of each row that has some; None is all.
        """
        deltas = super().deltas(which)
        return deltas if self.rotation is None else self.rotation.over(deltas, count or self.config.streams)

    def stream_rows(self, widths: Sequence[int], *, rides: bool = False) -> StreamRows | None:
        """Return the first streams, one for each of ``widths``, as data for native code; None where values are rotated.

        Args:
            widths: number of likeliest tokens of each that are tried.
            rides: whether every row has streams while it is verified.
        """
        if self.rotation is not None:
            return None
        count = len(widths)
        deltas = self.deltas(torch.zeros(count, dtype=torch.int64, device=self.device), count)
        feedback = self._feedback() if self.config.feedback else None
        exit_ = (self.pruner.down, self.pruner.up) if rides and self.config.feedback and self.pruner else None
        start = self.config.insertion_layer, deltas, self.embeddings[:count], feedback
        return StreamRows(*start, widths=tuple(widths), rides=rides, early_exit=exit_)

    @torch.no_grad()
    def take_over(self, other: Streams, tensors: Mapping[str, Tensor]) -> None:
        """Continue from ``other``, whose config precedes this one, with these weights; what it lacks keeps its initial
        value.
        """
        other.load_state_dict({name: value.float() for name, value in tensors.items()})
        for mine, theirs in zip(self._by_site, other._by_site, strict=True):
            for site, weight in theirs.items():
                mine[site].copy_(weight)
        own = dict(self.named_parameters())
        for name, weight in other.named_parameters():
            if not name.startswith(("down.", "up.")):
                own[name].copy_(weight)


def expected_at(model: Decoder, streams: Streams, entering: Tensor, following: Step) -> Tensor:
    """Return what feedback reads where nothing is decided yet, (n, 2, E): the pruning layer's early exit.

    Args:
        model: the target.
        streams: streams with a pruning layer.
        entering: (n, E) residuals entering the insertion layer.
        following: a call of the positions that follow them, for learned positions.
    """
    assert streams.pruner is not None, "checked by the plan"
    early = streams.pruner(entering)
    return known_at(model, early, model.embed(model.greedy(early), following))


def known_at(model: Decoder, final: Tensor, decided: Tensor) -> Tensor:
    """Return what feedback reads, (n, 2, E).

    Args:
        model: the target.
        final: (n, E) residuals after all layers.
        decided: (n, E) embeddings of the tokens that follow.
    """
    return torch.stack((model.norm(final), F.rms_norm(decided, decided.shape[-1:])), 1)


class Pruner(nn.Module):
    """Predicts the next token at the insertion layer, to prune branches there (arXiv:2402.11131, section 3.2.3).

    ``Z = softmax(head(norm(x + B A x)))`` with A (rank, E), B (E, rank).
    """

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(random_factor(rank, width))
        self.up = nn.Parameter(torch.zeros(width, rank))

    def forward(self, main: Tensor) -> Tensor:
        """Return x + B A x for rows entering the insertion layer, (n, E) -> (n, E)."""
        return main + main @ self.down.to(main.dtype).mT @ self.up.to(main.dtype).mT

    def distribution(self, main: Tensor, model: Decoder) -> Tensor:
        """Return Z, (n, E) -> (n, V) float32."""
        return torch.softmax(model.head(self(main)), -1)
