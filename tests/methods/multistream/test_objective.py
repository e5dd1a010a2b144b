"""Training: the base stays, who sees whom, the training form is the decoding form, and streams learn."""

from __future__ import annotations

import pytest
import torch

from tests.decode.oracles import plain_text
from tests.decode.runs import finish
from tests.decode.tiny_decoders import build
from vivace.core.branches import Places
from vivace.core.seams import Draft
from vivace.core.step import Step
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.errors import ConfigError
from vivace.methods.multistream.config import MultistreamConfig, StreamPlan
from vivace.methods.multistream.drafter import StreamDrafter
from vivace.methods.multistream.forward import StreamForwardPass, Verified
from vivace.methods.multistream.objective import (
    MultistreamLoss,
    MultistreamObjective,
    expected_in_text,
    known_in_text,
    run_streams,
)
from vivace.methods.multistream.streams import Streams
from vivace.train.data import TokenBatch


def batch(seed: int, length: int = 24) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 97, (4, length), generator=generator)
    starts = torch.tensor([3, 4, 7, 4])[:, None]
    stops = torch.tensor([length, length - 3, length, 12])[:, None]
    place = torch.arange(length)
    return TokenBatch(tokens, (place >= starts) & (place < stops))


def own_words(model, length: int = 24) -> TokenBatch:
    """What the model says after four prompts of six tokens."""
    tokens = [
        [*given, *plain_text(model, given, length - 6).new] for given in (tuple(range(p, p + 6)) for p in range(4))
    ]
    return TokenBatch(torch.tensor(tokens), torch.arange(length).expand(4, length) >= 6)


def teacher_forced(model, streams, tokens: torch.Tensor) -> torch.Tensor:
    """Streams of every position in training's form, (B, T, streams, E)."""
    has_feedback = streams.config.feedback
    step = Step.dense(*tokens.shape)
    entering = model.run(model.embed(tokens.reshape(-1), step), step, 0, streams.config.insertion_layer)
    final = model.run(entering, step, streams.config.insertion_layer)
    known = known_in_text(model, tokens, final) if has_feedback else None
    position = torch.arange(tokens.shape[1]).expand(tokens.shape)
    places = Places(position, torch.ones_like(position, dtype=torch.bool))
    found = run_streams(model, streams, entering.view(*tokens.shape, -1), step, places, known)
    return found.view(*tokens.shape, *found.shape[1:])


@torch.no_grad()
@pytest.mark.parametrize("kind", [{}, {"windows": (None, 6) * 3}], ids=["full", "window"])
def test_training_form_is_decoding_form(streams, kind) -> None:
    model = build(torch.float32, num_layers=6, seed=3, **kind).requires_grad_(False)
    made = streams(torch.float32, streams=3)
    tokens = batch(0).tokens[:1, :16]
    expected = teacher_forced(model, made, tokens)[0]
    for attach in ("every", "kept"):
        climb = StreamForwardPass(made, StreamPlan((1, 1, 1), attach))
        cache = model.new_cache(1, 64)
        for place, token in enumerate(tokens[0].tolist()):
            passed = climb.run(model, Draft.committed_only({0: [token]}), cache)
            cache.commit([0], [[0]])
            found = passed.streams
            if attach == "kept":
                found = climb.follow(model, [0], passed.entering, cache)
            torch.testing.assert_close(found[0], expected[place], atol=2e-4, rtol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", [{}, {"positions": "learned"}], ids=["rotary", "learned"])
def test_feedback_is_the_same_in_training_and_decoding(streams, kind) -> None:
    """The final residual of the kept position, and the token that follows it."""
    model = build(torch.float32, num_layers=6, seed=3, **kind).requires_grad_(False)
    made = streams(torch.float32, streams=3, feedback=True)
    text = batch(0).tokens[0, :12].tolist()
    expected = teacher_forced(model, made, torch.tensor([text]))[0]
    climb = StreamForwardPass(made, StreamPlan((1, 1, 1), "kept"))
    cache = model.new_cache(1, 64)
    for place, token in enumerate(text[:-1]):
        passed = climb.run(model, Draft.committed_only({0: [token]}), cache)
        cache.commit([0], [[0]])
        decided = Verified(passed.hidden, torch.tensor(text[place + 1 : place + 2]))
        found = climb.follow(model, [0], passed.entering, cache, decided)
        torch.testing.assert_close(found[0], expected[place], atol=2e-4, rtol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", [{}, {"positions": "learned"}], ids=["rotary", "learned"])
def test_what_is_expected_is_the_same_in_training_and_decoding(streams, kind) -> None:
    """On every node: the pruning layer's residual, and its likeliest token, whatever is decided later."""
    model = build(torch.float32, num_layers=6, seed=3, **kind).requires_grad_(False)
    made = streams(torch.float32, streams=3, feedback=True)
    tokens = batch(0).tokens[:1, :12]
    step = Step.dense(*tokens.shape)
    entering = model.run(model.embed(tokens.reshape(-1), step), step, 0, 3)
    known = expected_in_text(model, made, entering[None])
    position = torch.arange(12)[None]
    model.run(entering, step, 3)
    expected = run_streams(model, made, entering[None], step, Places(position, position >= 0), known)
    climb = StreamForwardPass(made, StreamPlan((1, 1, 1), "every"))
    cache = model.new_cache(1, 64)
    for place, token in enumerate(tokens[0].tolist()):
        passed = climb.run(model, Draft.committed_only({0: [token]}), cache)
        cache.commit([0], [[0]])
        if place < 11:  # the last position of a text has no learned position behind it
            torch.testing.assert_close(passed.streams[0], expected[place], atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_a_stream_sees_its_past_and_the_streams_before_it(deep, streams) -> None:
    """Not later tokens, not streams of other positions, not later streams of its own."""
    model, made = deep(torch.float32), streams(torch.float32, streams=3)
    tokens = batch(1).tokens[:1, :12]
    expected = teacher_forced(model, made, tokens)
    changed = tokens.clone()
    changed[0, 8] += 1
    found = teacher_forced(model, made, changed)
    torch.testing.assert_close(found[:, :8], expected[:, :8])
    assert not torch.allclose(found[:, 8], expected[:, 8])
    made.embeddings[2] += 1.0
    found = teacher_forced(model, made, tokens)
    torch.testing.assert_close(found[:, :, :2], expected[:, :, :2])
    assert not torch.allclose(found[:, :, 2], expected[:, :, 2])


def test_chunks_give_the_gradient_of_the_whole(deep, streams) -> None:
    model, gradients = deep(torch.float32), []
    for rows in (8, 4096):
        task = MultistreamObjective(streams(torch.float32, streams=3).requires_grad_(True), MultistreamLoss(rows=rows))
        parts = 0
        for loss, _ in task.losses(model, batch(0)):
            loss.backward()
            parts += 1
        assert (parts > 3) is (rows == 8)
        gradients.append(torch.cat([p.grad.flatten() for p in task.streams.parameters()]))
    assert gradients[0].norm() > 1e-3
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def taught(deep) -> tuple[Streams, list[dict[str, float]]]:
    return teach(deep(torch.float32))


def teach(model, attach="kept", **fields: object) -> tuple[Streams, list[dict[str, float]]]:
    """Streams that learnt by heart what the model says, and what was seen while they did."""
    text = own_words(model)
    torch.manual_seed(0)
    config = MultistreamConfig(streams=3, insertion_layer=2, rank=16, bottleneck=64, **fields)
    task = MultistreamObjective(Streams(config, model.config), MultistreamLoss(), attach=attach)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimiser = torch.optim.AdamW([{"params": g["params"]} for g in task.groups()], lr=4e-3)
    seen = []
    for _ in range(80):
        optimiser.zero_grad()
        metrics: dict[str, float] = {}
        for loss, part in task.losses(model, text):
            loss.backward()
            metrics |= {**part, "loss": metrics.get("loss", 0.0) + float(loss.detach())}
        optimiser.step()
        seen.append(metrics)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return task.streams.requires_grad_(False), seen


def test_training_teaches_streams_and_pruner_and_leaves_the_base(taught) -> None:
    _, seen = taught
    assert seen[-1]["loss"] < 0.8 * seen[0]["loss"]
    assert seen[-1]["kept"] > seen[0]["kept"] + 0.3
    assert seen[-1]["stream 1"] > 0.3
    assert seen[-1]["pruner"] < seen[0]["pruner"]


@pytest.mark.parametrize("attach", ["every", "kept"])
def test_streams_with_feedback_learn_and_draft_what_is_kept(deep, attach) -> None:
    model = deep(torch.float32)
    made, seen = teach(model, attach, feedback=True)
    assert seen[-1]["kept"] > seen[0]["kept"] + 0.3
    for part in (made.final, made.decided):
        assert part.norm() > 0.1
    drafter = StreamDrafter(model, made, StreamPlan((1, 1, 1), attach))
    asked = [Request(tuple(range(p, p + 6)), 18, drafter) for p in range(4)]
    found = finish(Session(model, num_slots=2, capacity=64, chunk=8), asked)
    assert [r.tokens for r in found] == [tuple(row[6:]) for row in own_words(model).tokens.tolist()]
    passes = sum(r.stats.num_spec_steps for r in found)
    assert sum(r.stats.num_tokens for r in found) > 2.7 * passes


@pytest.mark.parametrize("attach", ["every", "kept"])
def test_taught_streams_draft_what_is_kept(deep, taught, attach) -> None:
    """Streams of the last kept node: those of the root, say, would guess one token late and keep nothing."""
    model, (made, _) = deep(torch.float32), taught
    drafter = StreamDrafter(model, made, StreamPlan((2, 2, 1), attach))
    asked = [Request(tuple(range(p, p + 6)), 18, drafter) for p in range(4)]
    found = finish(Session(model, num_slots=2, capacity=64, chunk=8), asked)
    assert [r.tokens for r in found] == [tuple(row[6:]) for row in own_words(model).tokens.tolist()]
    passes = sum(r.stats.num_spec_steps for r in found)
    assert sum(r.stats.num_tokens for r in found) > 2.7 * passes


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"hard": 2.0}, "hard must be"), ({"decay": 0.0}, "decay"), ({"rows": 0}, "rows >= 1")],
)
def test_losses_that_mean_nothing_are_refused(fields, message) -> None:
    with pytest.raises(ConfigError, match=message):
        MultistreamLoss(**fields)
