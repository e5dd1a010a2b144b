"""Streams told apart by their values: the turn itself, and the same streams in training and decoding."""

from __future__ import annotations

import math

import pytest
import torch

from tests.decode.oracles import plain_text
from tests.decode.runs import finish
from tests.decode.tiny_decoders import build, prompts
from tests.methods.multistream.test_objective import batch, teacher_forced
from vivace.core.model import Decoder
from vivace.core.seams import Draft
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.errors import ConfigError, UnsupportedError
from vivace.methods.multistream.config import MultistreamConfig, StreamPlan
from vivace.methods.multistream.drafter import StreamDrafter
from vivace.methods.multistream.forward import StreamForwardPass
from vivace.methods.multistream.objective import MultistreamLoss, MultistreamObjective
from vivace.methods.multistream.rotation import ValueRotation
from vivace.methods.multistream.streams import Streams


@pytest.fixture
def model() -> Decoder:
    with torch.inference_mode(False):
        return build(torch.float32, num_layers=6, seed=3).requires_grad_(False)


@pytest.fixture
def turned(model, streams) -> Streams:
    made = streams(torch.float32, streams=3, identifier="rotation")
    made.rotation.read(model)
    return made


@torch.no_grad()
def test_values_are_multiplied_by_a_complex_number(model) -> None:
    rotation = ValueRotation(2, 3, model.config)
    rotation.read(model)
    heads, half = model.config.num_kv_heads, model.config.head_dim // 2
    values = torch.randn(heads * 2 * half)
    first, second = values.view(heads, 2, half).unbind(1)
    for number, turn in enumerate(rotation.turns(), 1):
        factor = torch.exp(torch.tensor(1j * math.pi / 2 * number / 3))
        expected = torch.complex(first, second) * factor
        found = (values + turn @ values).view(heads, 2, half).unbind(1)
        torch.testing.assert_close(torch.complex(*found), expected)


@torch.no_grad()
@pytest.mark.parametrize("attach", ["every", "kept"])
def test_training_form_is_decoding_form_for_fewer_streams_too(model, turned, attach) -> None:
    tokens = batch(0).tokens[:1, :8]
    expected = teacher_forced(model, turned, tokens)[0]
    for depth in (3, 2):
        climb = StreamForwardPass(turned, StreamPlan((1,) * depth, attach))
        cache = model.new_cache(1, 64)
        for place, token in enumerate(tokens[0].tolist()):
            passed = climb.run(model, Draft.committed_only({0: [token]}), cache)
            cache.commit([0], [[0]])
            found = passed.streams
            if attach == "kept":
                found = climb.follow(model, [0], passed.entering, cache)
            torch.testing.assert_close(found[0], expected[place, :depth], atol=2e-4, rtol=2e-4)


def test_text_is_plain_decodings_and_streams_learn(model, turned) -> None:
    drafter = StreamDrafter(model, turned, StreamPlan((2, 1, 1)))
    texts = [plain_text(model, prompt, 14) for prompt in prompts(2, seed=2)]
    found = finish(Session(model, num_slots=2, capacity=64), [Request(t.prompt, 14, drafter) for t in texts])
    assert [r.tokens for r in found] == [t.new for t in texts]
    task = MultistreamObjective(turned.requires_grad_(True), MultistreamLoss())
    [group] = task.groups()
    for loss, _ in task.losses(model, batch(0)):
        loss.backward()
    assert all(p.grad is not None for p in group["params"])


def test_what_cannot_be_turned_is_refused() -> None:
    with pytest.raises(ConfigError, match="identifier must be"):
        MultistreamConfig(identifier="colour")
    biased = build(torch.float32, num_layers=2, qkv_bias=True).config
    with pytest.raises(UnsupportedError, match="bias"):
        ValueRotation(1, 2, biased)
