"""Initial weights of a T5.

As in ``scratch.py``: matrices that write to the residual are zero, embeddings depend on the spelling of tokens. T5
divides what enters the head by the square root of its width; the final norm starts with that root, so that logits
begin as if it did not. What its scores know of distances is one number for each head, bucket and stack, which begins
with a slope (``first_biases``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from vivace.checkpoint.families import translate
from vivace.core.layers import FeedForward, RMSNorm
from vivace.core.model import Decoder, Layer
from vivace.core.relative import RelativeTable
from vivace.recipes.scratch import spelled_embeddings
from vivace.recipes.seq2seq import T5Shape

_LOOKS = ((1, 4.0, -12.0), (-1, 4.0, -12.0), (0, 0.1, -12.0), (0, 0.0, 0.0))
"""Where heads look at first: the distance back that they prefer, what each token away from it costs, and the most."""


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
        stack.relative.weight.copy_(first_biases(stack.relative))
        _norm(stack.final_norm, 1.0)
    _norm(model.final_norm, 1 / model.config.head_scale)
    return model


def first_biases(table: RelativeTable) -> Tensor:
    """Return initial numbers for distances, (buckets, H): heads look at the token before, behind, near and anywhere.

    A model that copies has to find the token behind the one that it wrote last, so some head has to tell neighbours
    apart. From zeros a table takes thousands of steps to do so, since every number in it is learnt at the rate of one
    weight. Slopes are those of ALiBi (Press et al. 2022, arXiv:2108.12409) with a centre of their own.
    """
    beyond = table.config.max_distance
    distance = torch.arange(0 if table.is_causal else -beyond, beyond + 1)
    bucket = table.bucket(distance)
    count = torch.zeros(table.config.num_buckets).index_add_(0, bucket, torch.ones(len(bucket)))
    centre = torch.zeros_like(count).index_add_(0, bucket, distance.float()) / count.clamp(min=1)
    numbers = torch.zeros_like(table.weight)
    for head in range(numbers.shape[1]):
        at, slope, least = _LOOKS[head % len(_LOOKS)]
        numbers[:, head] = (-slope * (centre - at).abs()).clamp(min=least)
    return numbers


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
    if layer.cross is not None:  # a token of the text looks at itself in the source at first, where its copy goes on
        query, entries = layer.cross.q.weight, layer.cross.kv.weight
        assert isinstance(query, Tensor)
        assert isinstance(entries, Tensor)
        entries[: len(query)] = query


def _norm(norm: object, value: float) -> None:
    assert isinstance(norm, RMSNorm)
    norm.weight.fill_(value)
