"""Feed-forwards of which only the active neurons are read (Alizadeh et al. 2023, LLM in a flash, arXiv:2312.11514).

There are two ways to tell which neurons are active, one for each layout of a store:

* ``selected``: the gate's matrix (or, without a gate, up's) stays in memory and is computed exactly; neurons whose
  activation is larger in size than a threshold are active (Lee et al. 2024, CATS, arXiv:2404.08763). With ReLU and
  threshold 0 nothing is left out. All other neurons count as zero, so the result does not depend on what happens to be
  in memory.
* ``neurons``: low-rank predictors tell it from the input (``predictors.py``). A neuron that was missed and is in memory
  is computed too, so a longer window misses less.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vivace.core.config import ModelConfig
from vivace.core.layers import activate
from vivace.core.parts import DenseParts
from vivace.core.seams import Stateful
from vivace.core.step import Step
from vivace.errors import UnsupportedError
from vivace.kernels import reference as kernels
from vivace.kernels.native import Matrix, NativeBody
from vivace.kernels.widened import multiplies_bfloat16
from vivace.storage.neurons.loader import NeuronLoader, Records

TOGETHER = 128
"""Neurons of one of PyTorch's products: it compiles a kernel for each shape, and keeps it with its working space."""


class NeuronBias(nn.Module):
    """Holds the bias of a matrix that is not in memory."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(width)) if bias else None


class NeuronFeedForward(nn.Module):
    """Computes ``down(act(gate(x)) * up(x))`` or ``down(act(up(x)))`` over the neurons that are active."""

    def __init__(self, config: ModelConfig, layer: int, neurons: NeuronLoader) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.neurons = neurons
        self.up = NeuronBias(config.ffn_width * (2 if config.gated else 1), bias=config.ffn_bias)
        self.down = NeuronBias(config.width, bias=config.ffn_bias)

    def forward(self, x: Tensor, step: Step, add: Tensor | None = None) -> Tensor:
        """Compute the feed-forward of the neurons that are predicted to be active, (T, E) -> (T, E).

        Raises:
            UnsupportedError: the call adds low-rank deltas inside the feed-forward, or needs gradients.
            CheckpointError: neurons cannot be read.
        """
        sites = [(self.layer, site) for site in ("gate", "up", "down")]
        if any(site in deltas.down for deltas in step.low_rank for site in sites):
            raise UnsupportedError("adapters on feed-forwards need them whole; convert the model with layout layers")
        if torch.is_grad_enabled() and x.requires_grad:
            raise UnsupportedError("adapters learn from every neuron; convert the model with layout layers")
        is_prompt = step.chunk is not None or step.grid is not None
        gate = self._gate(x) if is_prompt else self._selected(x)
        if not is_prompt:
            self.neurons.take(step.memory)
        y = None if is_prompt else self._some(x, gate)
        y = self._all(x, gate) if y is None else y
        if self.down.bias is not None:
            y = y + self.down.bias
        y = y.to(x.dtype)
        return y if add is None else add + y

    def _some(self, x: Tensor, gate: Tensor | None) -> Tensor | None:
        """Compute with the active neurons, without the last bias; return None where all should be read."""
        neurons = self.neurons
        if gate is None:
            active = neurons.predictors[self.layer].active(x, neurons.body)
        else:
            active = (gate != 0).any(0).nonzero()[:, 0]
        if neurons.is_dense(self.layer, active):
            return None
        y = x.new_zeros(x.shape, dtype=torch.float32)
        for records in neurons.bring(self.layer, active):
            if self._body is None:
                self._add(x, records, gate, y)
            elif records.first < records.stop:
                parts = {name: part[records.first : records.stop] for name, part in records.parts.items()}
                known = None if gate is None else gate[:, records.neurons[records.first : records.stop]]
                self._body.add_neurons(parts, x, y, self.config.activation, known)
        return y

    @property
    def _body(self) -> NativeBody | None:
        """The native kernels, where they run this feed-forward: one with a gate and without biases, in bfloat16."""
        return self.neurons.body if self.config.gated and self.up.bias is None else None

    def _add(self, x: Tensor, records: Records, gate: Tensor | None, y: Tensor) -> None:
        """Add the contributions of neurons to ``y`` (T, E)."""
        for first in range(records.first, records.stop, TOGETHER):
            at = max(0, min(first, len(records.neurons) - TOGETHER))
            found = {name: part[at : at + TOGETHER] for name, part in records.parts.items()}
            inner = self._inner(x, found, records.neurons[at : at + TOGETHER], gate)
            inner[:, : first - at] = 0
            inner[:, records.stop - at :] = 0
            y += inner @ found["down"]

    def _all(self, x: Tensor, gate: Tensor | None) -> Tensor:
        """Compute with all neurons, block by block, without the last bias."""
        y = x.new_zeros(x.shape, dtype=torch.float32)
        body = None if multiplies_bfloat16() else self._body
        for first, found in self.neurons.every(self.layer):
            which = torch.arange(first, first + len(found["down"]))
            if body is None:
                y += self._inner(x, found, which, gate) @ found["down"]
            else:
                body.add_neurons(found, x, y, self.config.activation, None if gate is None else gate[:, which])
        return y

    def _selected(self, x: Tensor) -> Tensor | None:
        """Return the selector's activations without those that a row leaves out, however many neurons are read."""
        gate = self._gate(x)
        return None if gate is None else torch.where(gate.abs() > self.neurons.thresholds[self.layer], gate, 0.0)

    def _gate(self, x: Tensor) -> Tensor | None:
        """Return the activations of the selector, (T, F); None for a layer without one."""
        if self.layer not in self.neurons.selectors:
            return None
        selector = self.neurons.selectors[self.layer]
        if self._body is not None:
            matrix = Matrix(selector, None, selector.shape[1], selector.shape[0])
            return self._body.activate(self._body.linear(matrix, x), None, self.config.activation)
        bias = None if self.up.bias is None else self.up.bias[: self.config.ffn_width]
        return activate(kernels.linear(x, selector, bias), self.config.activation)

    def _inner(self, x: Tensor, found: dict[str, Tensor], which: Tensor, gate: Tensor | None) -> Tensor:
        """Return the inner activations of the neurons ``which`` (n,), as (T, n)."""
        if gate is not None and not self.config.gated:
            return gate[:, which]
        width = self.config.ffn_width
        last = width if self.config.gated else 0
        biases = (None, None) if self.up.bias is None else (self.up.bias[which], self.up.bias[which + last])
        if not self.config.gated:
            return activate(kernels.linear(x, found["up"], biases[0]), self.config.activation)
        up = kernels.linear(x, found["up"], biases[1])
        if gate is None:
            return activate(kernels.linear(x, found["gate"], biases[0]), self.config.activation) * up
        return gate[:, which] * up


class NeuronParts(DenseParts):
    """Builds layers whose feed-forwards are over neurons; all other matrices are resident."""

    def __init__(self, config: ModelConfig, neurons: NeuronLoader) -> None:
        super().__init__(config)
        self.neurons = neurons

    def feed_forward(self, layer: int) -> nn.Module:
        """Return a feed-forward over neurons."""
        return NeuronFeedForward(self.config, layer, self.neurons)

    def stateful(self) -> Sequence[Stateful]:
        """Return the loader, whose caches remember which neurons a session used last."""
        return (self.neurons,)
