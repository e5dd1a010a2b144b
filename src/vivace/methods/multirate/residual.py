"""The accelerated residual p: it arrives in fewer layers (M2R2, Bhendawade et al. 2025, arXiv:2502.02040).

Beside the slow residual ``h^{n+1} = block_n(h^n)`` runs an accelerated one. It reads the slow stream's keys and values
at positions up to its own, and writes none:

    q  = Wq LN1(p) + dq(LN1(p))             a = attention(q, K_slow, V_slow)
    u  = p + Wo a + do(a)                   p' = u + M(LN2(u))

with low-rank dq, do and ``M(x) = FFN(x) + B silu(A x)`` (``delta``) or ``B silu(A x)`` alone (``lite``). All up factors
start at zero, so an untrained ``delta`` accelerator is the slow stream. p of a token never depends on p of another, so
all positions train in parallel, and p needs no cache.

The paper's text is only partly known to us: the two streams, the shared cache and the adapters are its own; ranks, the
bottleneck's form, ``feedback`` and ``reach`` (``reach.py``) are ours.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vivace.core.config import ModelConfig
from vivace.core.draft_rows import DraftRows
from vivace.core.low_rank import LowRank, site_shapes
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.methods.multirate.config import MultirateConfig
from vivace.methods.multirate.reach import Reach, far_step


class Accelerator(LowRank):
    """The trained weights of an accelerated residual up to one exit layer."""

    def __init__(self, config: MultirateConfig, model: ModelConfig) -> None:
        """Make zero-initialised adapters for the layers below the exit layer.

        Raises:
            ConfigError: the exit layer is not inside the model.
        """
        config.check_fits(model.num_layers)
        ranks = {"q": config.rank, "o": config.rank, "mlp": config.bottleneck}
        super().__init__(site_shapes(model, range(config.exit_layer), ranks))
        self.config = config
        self.scale = nn.Parameter(torch.ones(model.width))
        """(E,) factor before the shared head."""
        self.feedback = nn.Parameter(torch.zeros(model.width, model.width)) if config.feedback else None
        self.reach = nn.ModuleList(Reach(layer, model) for layer in config.reach)
        self._projections: tuple[nn.Module, ...] = ()
        """The feedback projection on the kernels of the model that is drafted for; these are not trained weights."""

    def run_on(self, model: Decoder) -> None:
        """Use the kernels that run the layers of ``model`` for drafts from now on.

        Beside native kernels no PyTorch threads may start: they wait for more work in a loop, on the cores that the
        next native call needs. Without native kernels the factors are converted to float32.
        """
        if model.backend.span is None:
            self.widen()
        for reach in self.reaches():
            reach.run_on(model)
        if self.feedback is not None:
            self._projections = (model.backend.projection(self.feedback),)

    def start(self, h: Tensor, final: Tensor | None) -> Tensor:
        """Return where p begins, (n, E): the embedding, plus the feedback projection where it is used.

        Args:
            h: (n, E) embedded rows.
            final: (n, E) normed final residual of each row's last verified position; zeros where unknown.
        """
        if self.feedback is None or final is None:
            return h
        return h + nn.functional.linear(final, self.feedback)

    def offsets(self, final: Tensor) -> Tensor | None:
        """Return what feedback adds to the start, by distance to the verified position, (n, lags, E).

        Args:
            final: (n, E) as for ``start``.
        """
        for projection in self._projections:
            offsets: Tensor = projection(final)
            return offsets.view(len(final), -1, final.shape[1])
        return None

    def draft_rows(self) -> DraftRows:
        """Return the accelerated rows as data for native code."""
        deltas = self.deltas(torch.zeros(1, dtype=torch.int64, device=self.device))
        reads = tuple(reach.data() for reach in self.reaches())
        return DraftRows(self.config.exit_layer, deltas, self.config.mode == "delta", self.scale, reads, self.feedback)

    def reaches(self) -> Iterator[Reach]:
        """Yield the deep layers that are read, lowest first."""
        for reach in self.reach:
            assert isinstance(reach, Reach)
            yield reach

    def stretches(self) -> Iterator[tuple[Reach | None, int, int]]:
        """Yield the way to the exit layer: a deep layer to read (or None), then layers start..stop-1 to run."""
        for layer, reach in enumerate(self.reaches()):
            is_last = layer + 1 == len(self.reach)
            yield reach, layer, self.config.exit_layer if is_last else layer + 1
        if len(self.reach) == 0:
            yield None, 0, self.config.exit_layer

    def at_exit(self, p: Tensor) -> Tensor:
        """Return what the shared head reads, (n, E)."""
        return p * self.scale


def dual_forward(
    model: Decoder, accelerator: Accelerator, h: Tensor, step: Step, leading: Tensor, offset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run slow rows and accelerated rows through the layers below the exit layer, in calls that read each weight once.

    Args:
        model: the frozen decoder.
        accelerator: its adapters.
        h: (T, E) embedded slow rows; all of them write keys and values.
        step: their call.
        leading: (n,) slow rows that get an accelerated row.
        offset: (n, E) added where the accelerated rows start.

    Returns:
        Slow residuals (T, E) and accelerated residuals (n, E) at the exit layer.
    """
    config = accelerator.config
    count = len(leading)
    if count == 0:
        return model.run(h, step, 0, config.exit_layer), h[:0]
    which = torch.full((step.num_rows + count,), -1, dtype=torch.int64, device=step.device)
    which[step.num_rows :] = 0
    both = step.readers(leading, accelerator.deltas(which), fed=config.mode == "delta")
    slow, p = h, h[leading] if offset is None else h[leading] + offset
    far = far_step(step, leading) if config.reach else None
    for reach, start, stop in accelerator.stretches():
        if reach is not None and far is not None:
            p = reach.over_cache(p, model, *far)
        rows = model.run(torch.cat((slow, p)), both, start, stop)
        slow, p = rows[: step.num_rows], rows[step.num_rows :]
    return slow, accelerator.at_exit(p)
