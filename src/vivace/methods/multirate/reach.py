"""Reach: the accelerated residual reads what deep layers stored about verified positions. This is ours.

Some guesses no shallow row can make alone. To copy a word from the prompt, a layer must know which word preceded each
entry, and the layers that know it lie far above the exit layer. Rows of a draft have not passed those layers, but the
text before the draft has, and its keys and values are in the cache. So before each of its first layers the accelerated
residual attends to one deep layer d:

    p <- p + O attention(rotate(Q norm(p)), K_d, V_d)          verified positions only

Q starts as the layer's own query projection and O at zero, so untrained the reach changes nothing. It stores no entries
and needs no row above the exit layer; it costs two square matrices for each deep layer that is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from vivace.core.cache import KVCache
from vivace.core.config import ModelConfig
from vivace.core.draft_rows import DeepRead
from vivace.core.model import Decoder, Layer
from vivace.core.step import Step
from vivace.kernels import reference as kernels
from vivace.train.data import TokenBatch

_Projection = Callable[[Tensor], Tensor]


class Reach(nn.Module):
    """Attention of accelerated rows to one deep layer."""

    def __init__(self, layer: int, model: ModelConfig) -> None:
        super().__init__()
        self.layer = layer
        self.eps = model.norm_eps
        heads = model.num_heads * model.head_dim
        self.gain = nn.Parameter(torch.ones(model.width))
        self.query = nn.Parameter(torch.empty(heads, model.width))
        self.output = nn.Parameter(torch.zeros(model.width, heads))
        nn.init.kaiming_uniform_(self.query, a=math.sqrt(5))
        self._projections: tuple[_Projection, _Projection] | None = None
        """Query and output on the kernels of the model that is drafted for; these are not trained weights."""

    def run_on(self, model: Decoder) -> None:
        """Use the kernels that run the layers of ``model`` for drafts from now on."""
        self._projections = model.backend.projection(self.query), model.backend.projection(self.output)

    @torch.no_grad()
    def start_from(self, model: Decoder) -> None:
        """Start from the query projection of the layer itself."""
        weight = _layer(model, self.layer).qkv.get_parameter("weight")
        self.query.copy_(weight[: len(self.query)])

    def data(self) -> DeepRead:
        """Return its weights as data for native code."""
        return DeepRead(self.layer, self.gain, self.query, self.output)

    def over_cache(self, p: Tensor, model: Decoder, far: Step, is_known: Tensor) -> Tensor:
        """Attend from rows of a draft, (n, E) -> (n, E).

        Args:
            p: accelerated rows.
            model: the frozen decoder.
            far: their call, in which each row reads the verified entries of its slot.
            is_known: (n, 1) whether there are any.
        """
        layer = _layer(model, self.layer)
        ask, answer = self._projections or (partial(kernels.linear, weight=w) for w in (self.query, self.output))
        a: Tensor = layer.read(self._queries(p, model, far, ask), far)
        return p + answer((a * is_known[:, None]).flatten(1))

    def over_text(self, p: Tensor, model: Decoder, step: Step, last: Tensor) -> Tensor:
        """Attend from all positions of a dense batch, (B * T, E) -> (B * T, E).

        Args:
            p: accelerated rows.
            model: the frozen decoder.
            step: its frozen pass, which holds the keys and values.
            last: (B, T) the last verified position before each, -1 where there is none.
        """
        attention = _layer(model, self.layer).attention
        queries = self._queries(p, model, step, partial(kernels.linear, weight=self.query))
        entry = torch.arange(last.shape[1], device=last.device)
        reach = last.clamp(min=0)[..., None]
        hidden = entry > reach
        if attention.window is not None:
            hidden |= entry <= reach - attention.window
        visible = torch.zeros_like(hidden, dtype=queries.dtype).masked_fill_(hidden, -math.inf)[:, None]
        keys, values = step.memory.stored(self.layer)
        q = queries.view(*last.shape, *queries.shape[1:])
        scale, softcap = attention.scale, attention.softcap
        a = kernels.attend_chunk(q, keys, values, visible, scale=scale, softcap=softcap)
        known = (last >= 0).reshape(-1, 1).to(a.dtype)
        return p + kernels.linear(a.reshape(len(p), -1) * known, self.output)

    def _queries(self, p: Tensor, model: Decoder, step: Step, ask: _Projection) -> Tensor:
        layer = _layer(model, self.layer)
        q = ask(kernels.rms_norm(p, self.gain, self.eps))
        q = q.view(len(p), -1, model.config.head_dim)
        return q if layer.rotary is None else kernels.rotate(q, *layer.rotation(step, q.dtype))


@torch.no_grad()
def copying_layers(model: Decoder, batches: Iterable[TokenBatch], exit_layer: int, count: int) -> tuple[int, ...]:
    """Return the layers above the exit layer whose heads attend most to what followed the same token before.

    Copying shows in attention weights (induction heads, Olsson et al. 2022, arXiv:2209.11895): at a token that occurred
    before, such a head attends to the token after it.

    Args:
        model: the frozen decoder.
        batches: texts. Only positions that predict are counted, and of those the ones whose next token did follow the
            same token before.
        exit_layer: layers below it are not considered.
        count: number of layers to return; fewer where the model has fewer.

    Returns:
        The layers with most weight there, lowest first.
    """
    weight = torch.zeros(model.config.num_layers, device=model.device)
    for batch in batches:
        tokens = batch.tokens
        step, length = Step.dense(*tokens.shape, device=tokens.device), tokens.shape[1]
        following = torch.zeros(*tokens.shape, length, dtype=torch.bool, device=tokens.device)
        following[:, :-1, 1:] = (tokens[:, :-1, None] == tokens[:, None, :-1]) & (
            tokens[:, 1:, None] == tokens[:, None, 1:]
        )
        following &= torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        predicts = torch.zeros_like(step.slot, dtype=torch.bool).index_fill(0, batch.predicting, True)
        following &= predicts.view(*tokens.shape, 1)
        h = model.embed(tokens.reshape(-1), step)
        for index in range(len(model.layers)):
            layer = _layer(model, index)
            q = layer.project(h, step)
            weight[index] += (_weights(q, layer, step) * following[:, None]).sum()
            h = layer.feed(layer.output(h, layer.read(q, step), step), step)
    weight[:exit_layer] = -1
    chosen = weight.topk(min(count, len(weight) - exit_layer)).indices
    return tuple(sorted(chosen.tolist()))


def _weights(q: Tensor, layer: Layer, step: Step) -> Tensor:
    """Return the causal attention weights of a dense call, (B, H, T, T)."""
    keys, _ = step.memory.stored(layer.index)
    batch, kv_heads, length, width = keys.shape
    q = q.view(batch, length, -1, width).transpose(1, 2)
    scores = (q @ keys.repeat_interleave(q.shape[1] // kv_heads, 1).mT).float() * layer.attention.scale
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(future, -math.inf), -1)


def far_step(step: Step, leading: Tensor) -> tuple[Step, Tensor]:
    """Return the call in which rows ``leading`` of a draft read their slots' verified entries, and whether there are
    any.

    Returns:
        The call of those n rows, and (n, 1) bool.
    """
    assert isinstance(step.memory, KVCache)
    lengths = step.memory.lengths
    verified = torch.tensor([lengths[slot] for slot in step.slot[leading].tolist()], device=step.device)
    rows = step if len(leading) == step.num_rows else step.take(leading)
    far = Step(step.memory, rows.slot, rows.position, rows.entry, verified.clamp(min=1), None, 0, 0, extent=rows.extent)
    return far, (verified > 0)[:, None]


def _layer(model: Decoder, index: int) -> Layer:
    found = model.layers[index]
    assert isinstance(found, Layer)
    return found
