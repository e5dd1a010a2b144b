"""Initial weights of a T5.

As in ``scratch.py``: matrices that write to the residual are zero, embeddings depend on the spelling of tokens. T5
divides what enters the head by the square root of its width; the final norm starts with that root, so that logits
begin as if it did not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from vivace.checkpoint.families import translate
from vivace.core.layers import FeedForward, RMSNorm
from vivace.core.model import Decoder, Layer
from vivace.recipes.scratch import spelled_embeddings
from vivace.recipes.seq2seq import T5Shape


@torch.no_grad()
def start_t5(shape: T5Shape, pieces: Mapping[int, str], seed: int) -> Decoder:
    """Make a T5 with initial weights, float32.

    Args:
        shape: its shape.
        pieces: spelling of each token by id; ids without one are allowed.
        seed: seed of the weights.
    """
    generator = torch.Generator().manual_seed(seed)
    model = Decoder(translate(shape.hf_config()))
    assert model.encoder is not None
    spelled = [pieces.get(index, "") for index in range(shape.vocab_size)]
    model.embedding.copy_(spelled_embeddings(spelled, shape.width, generator))
    for stack in (model.encoder, model):
        for layer in stack.layers:
            assert isinstance(layer, Layer)
            _start(layer, generator)
        assert stack.relative is not None
        stack.relative.weight.zero_()
        _norm(stack.final_norm, 1.0)
    _norm(model.final_norm, 1 / model.config.head_scale)
    return model


def _start(layer: Layer, generator: torch.Generator) -> None:
    """Set norms to one, matrices that read the residual to normal numbers, those that write to it to zero."""
    feed = layer.feed_forward
    assert isinstance(feed, FeedForward)
    reading, writing = [layer.qkv.weight, feed.up.weight], [layer.o.weight, feed.down.weight]
    for norm in (layer.attention_norm, layer.ffn_norm):
        _norm(norm, 1.0)
    if layer.cross is not None:
        reading += [layer.cross.q.weight, layer.cross.kv.weight]
        writing.append(layer.cross.o.weight)
        _norm(layer.cross.norm, 1.0)
    for weight in reading:
        assert isinstance(weight, Tensor)
        weight.copy_(torch.randn(weight.shape, generator=generator) * (0.5 / math.sqrt(weight.shape[1])))
    for weight in writing:
        assert isinstance(weight, Tensor)
        weight.zero_()


def _norm(norm: object, value: float) -> None:
    assert isinstance(norm, RMSNorm)
    norm.weight.fill_(value)
