"""The shared mode: what is learnt, what becomes of the model, and what its streams may do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.decode.oracles import plain_text
from tests.decode.runs import finish
from tests.decode.tiny_decoders import build, prompts
from tests.methods.multistream.test_objective import batch
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.errors import ConfigError
from vivace.methods.multistream.config import MultistreamConfig, StreamPlan
from vivace.methods.multistream.drafter import StreamDrafter
from vivace.methods.multistream.shared import SharedLoss, SharedObjective, SharedStreams
from vivace.methods.multistream.streams import Streams

CONFIG = MultistreamConfig(streams=4, insertion_layer=2, rank=0, bottleneck=0, pruner_rank=4)


def base(dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder of its own for every test: merging changes it."""
    with torch.inference_mode(False):
        return build(dtype, num_layers=4, seed=3).requires_grad_(False)


def learning(model: Decoder, noise: float = 0.02, **loss: float) -> SharedObjective:
    torch.manual_seed(5)
    streams = SharedStreams(CONFIG, model.config, rank=4)
    with torch.no_grad():
        for weight in streams.shared.up:
            weight.add_(torch.randn_like(weight) * noise)
    return SharedObjective(streams, SharedLoss(**loss))


def gradients(task: SharedObjective, model: Decoder) -> dict[str, torch.Tensor | None]:
    for loss, _ in task.losses(model, batch(0)):
        loss.backward()
    return {name: p.grad for name, p in task.streams.named_parameters()}


def test_without_streams_it_is_ordinary_low_rank_tuning() -> None:
    """The same gradients on the terms as next-token cross-entropy through the model with these terms."""
    model, text = base(), batch(0)
    task = learning(model, alpha=0.0, pruner=0.0)
    found = gradients(task, model)
    oracle = learning(model)
    step = Step.dense(*text.tokens.shape)
    step = replace(step, deltas=(oracle.streams.deltas(torch.zeros(step.num_rows, dtype=torch.int64)),))
    top = model.run(model.embed(text.tokens.reshape(-1), step), step)
    F.cross_entropy(model.head(top[text.predicting]), text.targets).backward()
    for name, weight in oracle.streams.named_parameters():
        if name.startswith("shared."):
            assert weight.grad is not None
            torch.testing.assert_close(found[name], weight.grad, atol=1e-6, rtol=1e-4)
        else:
            assert found[name] is None


def test_streams_teach_the_terms_below_and_above_them_and_the_pruner_does_not() -> None:
    model = base()
    alone = gradients(learning(model, alpha=0.0, pruner=0.0), model)
    pruned = gradients(learning(model, alpha=0.0, pruner=1.0), model)
    both = gradients(learning(model, alpha=1.0, pruner=0.0), model)
    for name, gradient in alone.items():
        if gradient is not None:
            assert torch.equal(gradient, pruned[name])
    assert both["embeddings"].norm() > 1e-4
    sites = learning(model).streams.shared.sites
    for layer in range(4):
        at = sites.index((layer, "k"))
        assert (both[f"shared.up.{at}"] - alone[f"shared.up.{at}"]).norm() > 1e-6


def test_chunks_give_the_gradient_of_the_whole() -> None:
    model = base()
    few, many = (gradients(learning(model, rows=rows), model) for rows in (8, 4096))
    for name, gradient in many.items():
        torch.testing.assert_close(few[name], gradient, atol=1e-5, rtol=1e-3)


@torch.no_grad()
def test_the_merged_model_is_the_model_with_the_terms() -> None:
    model, tokens = base(), batch(1).tokens
    streams = learning(model, noise=0.1).streams
    step = Step.dense(*tokens.shape)
    terms = replace(step, deltas=(streams.deltas(torch.zeros(step.num_rows, dtype=torch.int64)),))
    expected = model.run(model.embed(tokens.reshape(-1), step), terms)
    before = model.run(model.embed(tokens.reshape(-1), step), Step.dense(*tokens.shape))
    streams.merge(model)
    found = model.run(model.embed(tokens.reshape(-1), step), Step.dense(*tokens.shape))
    assert not torch.allclose(before, expected, atol=1e-2)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "plan",
    [
        *(StreamPlan((1,) * depth, attach) for depth in (1, 2, 3, 4) for attach in ("every", "kept")),
        *(StreamPlan((width, 1)) for width in (2, 3, 4)),
        *(StreamPlan((2, 2, 1), "kept", threshold) for threshold in (0.01, 0.1, 0.99)),
    ],
    ids=str,
)
def test_greedy_text_is_that_of_the_merged_model(plan: StreamPlan) -> None:
    """S2 and S3 in this mode: the merged model is the reference."""
    model = base(torch.bfloat16)
    shared = learning(model, noise=0.1).streams
    shared.merge(model)
    made = Streams(CONFIG, model.config)
    made.load_state_dict(shared.tensors())
    drafter = StreamDrafter(model, made.to(torch.bfloat16).requires_grad_(False), plan)
    texts = [plain_text(model, prompt, 14) for prompt in prompts(2, seed=2)]
    session = Session(model, num_slots=2, capacity=64, chunk=8)
    found = finish(session, [Request(t.prompt, 14, drafter) for t in texts])
    assert [r.tokens for r in found] == [t.new for t in texts]


def test_streams_with_adapters_of_their_own_and_no_terms_are_refused() -> None:
    config = base().config
    with pytest.raises(ConfigError, match=r"adapter\.rank and adapter\.bottleneck"):
        SharedStreams(replace(CONFIG, rank=4), config, 4)
    with pytest.raises(ConfigError, match="rank must be at least 1"):
        SharedStreams(CONFIG, config, 0)
    with pytest.raises(ConfigError, match="alpha"):
        SharedLoss(alpha=-1.0)
