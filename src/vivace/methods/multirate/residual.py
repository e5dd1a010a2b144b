"""The accelerated residual p: fewer layers to the same place (M2R2, Bhendawade et al. 2025, arXiv:2502.02040).

Beside the slow stream ``h^{n+1} = block_n(h^n)`` an accelerated one reads the slow stream's keys and values
and writes none, positions <= its own:

    q  = Wq LN1(p) + dq(LN1(p))             a = attention(q, K_slow, V_slow)
    u  = p + Wo a + do(a)                   p' = u + M(LN2(u))

with low-rank dq, do and ``M(x) = FFN(x) + B silu(A x)`` (``delta``) or ``B silu(A x)`` alone (``lite``).
Both up factors start at zero, so an untrained ``delta`` accelerator is the slow stream. p of a token never
depends on p of another, so all positions train in parallel, and it costs no cache.

The paper's text is only partly known to us: the two streams, the shared cache and the adapters are its
own; ranks, the bottleneck's form, ``feedback`` and ``reach`` (``reach.py``) are ours.
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
    """The trained weights of an accelerated residual up to one gate."""

    def __init__(self, config: MultirateConfig, model: ModelConfig) -> None:
        """Make zero-initialised adapters for the layers below the gate.

        Raises:
            ConfigError: the gate is not inside the model.
        """
        config.check_fits(model.num_layers)
        ranks = {"q": config.rank, "o": config.rank, "mlp": config.bottleneck}
        super().__init__(site_shapes(model, range(config.gate), ranks))
        self.config = config
        self.scale = nn.Parameter(torch.ones(model.width))
        """Per-component scale before the shared head."""
        self.feedback = nn.Parameter(torch.zeros(model.width, model.width)) if config.feedback else None
        self.reach = nn.ModuleList(Reach(layer, model) for layer in config.reach)
        self._projections: tuple[nn.Module, ...] = ()
        """Feedback on the kernels of the model that is drafted for; no weights of ours."""

    def run_on(self, model: Decoder) -> None:
        """Draft for this model from now on, on the kernels that its layers run on.

        Beside native kernels PyTorch's threads must not wake: they wait for more work in a loop, on the cores that
        the next native call needs. Without them the factors are widened.
        """
        if model.backend.span is None:
            self.widen()
        for reach in self.reaches():
            reach.run_on(model)
        if self.feedback is not None:
            self._projections = (model.backend.projection(self.feedback),)

    def start(self, h: Tensor, final: Tensor | None) -> Tensor:
        """Where p begins, (n, E): the slow residual, plus the feedback projection when it is used.

        Args:
            h: (n, E) embedded rows.
            final: (n, E) normed final residual of each row's last verified position; zeros where unknown.
        """
        if self.feedback is None or final is None:
            return h
        return h + nn.functional.linear(final, self.feedback)

    def offsets(self, final: Tensor) -> Tensor | None:
        """What feedback adds to the start, by how far back the verified position lies, (n, lags, E).

        Args:
            final: (n, E) as for ``start``.
        """
        for projection in self._projections:
            offsets: Tensor = projection(final)
            return offsets.view(len(final), -1, final.shape[1])
        return None

    def companion(self) -> DraftRows:
        """Accelerated rows as data."""
        deltas = self.deltas(torch.zeros(1, dtype=torch.int64, device=self.device))
        reads = tuple(reach.data() for reach in self.reaches())
        return DraftRows(self.config.gate, deltas, self.config.mode == "delta", self.scale, reads, self.feedback)

    def reaches(self) -> Iterator[Reach]:
        """The deep layers that are read, bottom first."""
        for reach in self.reach:
            assert isinstance(reach, Reach)
            yield reach

    def stretches(self) -> Iterator[tuple[Reach | None, int, int]]:
        """The way to the gate: what is reached for, then layers start..stop-1, again and again."""
        for layer, reach in enumerate(self.reaches()):
            is_last = layer + 1 == len(self.reach)
            yield reach, layer, self.config.gate if is_last else layer + 1
        if len(self.reach) == 0:
            yield None, 0, self.config.gate

    def at_gate(self, p: Tensor) -> Tensor:
        """What the shared head reads, (n, E)."""
        return p * self.scale


def dual_forward(
    model: Decoder, accelerator: Accelerator, h: Tensor, step: Step, leading: Tensor, offset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Slow rows and accelerated rows through the layers below the gate, sharing every weight read.

    Args:
        model: the frozen decoder.
        accelerator: its adapters.
        h: (T, E) embedded slow rows; all of them write keys and values.
        step: their call.
        leading: (n,) slow rows that get an accelerated companion.
        offset: (n, E) added to where the companions start.

    Returns:
        Slow residuals (T, E) and accelerated residuals (n, E) at the gate.
    """
    config = accelerator.config
    count = len(leading)
    if count == 0:
        return model.run(h, step, 0, config.gate), h[:0]
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
    return slow, accelerator.at_gate(p)
