"""The decoder against transformers, family by family: the same logits and the same greedy text."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.decode.runs import finish
from tests.parity.families import CONFIGS, VOCAB, make
from vivace.checkpoint.load import load_decoder, put
from vivace.core.config import ModelConfig
from vivace.core.model import Decoder
from vivace.core.seams import Draft
from vivace.core.step import Step
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session

TOLERANCE = 1e-4
NUM_FAMILIES = 13
LENGTHS = (23, 37, 58, 83)
NUM_STEPS = 12

_seen: set[str] = set()


@dataclass(frozen=True)
class Pair:
    """The same weights in both."""

    theirs: nn.Module
    ours: Decoder

    def reset(self) -> None:
        """Dynamic rotary embeddings of transformers remember the longest text until a short one comes."""
        self.theirs(torch.tensor([[1]]))


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    theirs = make(request.param)
    theirs.save_pretrained(folder)
    _seen.add(request.param)
    with torch.inference_mode():
        yield Pair(theirs, load_decoder(folder))


def tokens(length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def written_at_once(step: Step, length: int) -> Step:
    """transformers rotates every row of a call as part of a text as long as that call's."""
    return replace(step, extent=torch.full((step.num_rows,), length))


def ascend(model: Decoder, draft: Draft, step: Step) -> Tensor:
    return model.head(model.run(model.embed(draft.tokens, step), step))


def stepwise(theirs: nn.Module, text: Tensor, prompt: int) -> Tensor:
    """transformers' logits with a cache: the prompt at once, then token by token."""
    out = theirs(text[None, :prompt], use_cache=True)
    logits = [out.logits[0]]
    for place in range(prompt, len(text)):
        out = theirs(text[None, place : place + 1], past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits[0])
    return torch.cat(logits)


def test_full(pair: Pair) -> None:
    batch = torch.stack([tokens(96, seed) for seed in range(2)])
    pair.reset()
    expected = pair.theirs(batch).logits
    step = written_at_once(Step.dense(2, 96), 96)
    got = pair.ours.head(pair.ours.run(pair.ours.embed(batch.view(-1), step), step)).view_as(expected)
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_cached_step_by_step(pair: Pair) -> None:
    text = tokens(96)
    pair.reset()
    expected = stepwise(pair.theirs, text, 80)
    cache = pair.ours.new_cache(1, 96)
    cache.prompts[0] = 80
    got = []
    for first, stop in ((0, 48), (48, 80)):
        draft = Draft.committed_only({0: text[first:stop].tolist()})
        got.append(ascend(pair.ours, draft, Step.of(draft, cache, chunk=True)))
        cache.commit([0], [range(stop - first)])
    for token in text[80:].tolist():
        draft = Draft.committed_only({0: [token]})
        got.append(ascend(pair.ours, draft, Step.of(draft, cache)))
        cache.commit([0], [[0]])
    torch.testing.assert_close(torch.cat(got), expected, atol=TOLERANCE, rtol=0)


def test_ragged_batch(pair: Pair) -> None:
    texts = [tokens(length + NUM_STEPS, seed) for seed, length in enumerate(LENGTHS)]
    expected = []
    for text, length in zip(texts, LENGTHS, strict=True):
        pair.reset()
        expected.append(stepwise(pair.theirs, text, length))
    cache = pair.ours.new_cache(5, 128)
    slots = (3, 0, 4, 1)
    draft = Draft.committed_only({slot: t[:n].tolist() for slot, t, n in zip(slots, texts, LENGTHS, strict=True)})
    for slot, length in zip(slots, LENGTHS, strict=True):
        cache.prompts[slot] = length
    got = [[rows] for rows in ascend(pair.ours, draft, Step.of(draft, cache, chunk=True)).split(LENGTHS)]
    cache.commit(slots, [range(length) for length in LENGTHS])
    for place in range(NUM_STEPS):
        draft = Draft.committed_only({s: [int(t[n + place])] for s, t, n in zip(slots, texts, LENGTHS, strict=True)})
        for mine, row in zip(got, ascend(pair.ours, draft, Step.of(draft, cache)).split(1), strict=True):
            mine.append(row)
        cache.commit(slots, [[0]] * 4)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.cat(mine), theirs, atol=TOLERANCE, rtol=0)


def test_greedy_text(pair: Pair) -> None:
    prompt = tokens(75, 7)
    pair.reset()
    expected = pair.theirs.generate(prompt[None], max_new_tokens=64, do_sample=False, pad_token_id=0)[0, 75:]
    cache = pair.ours.new_cache(1, 160)
    cache.prompts[0] = 75
    given, text = prompt.tolist(), list[int]()
    while len(text) < 64:
        draft = Draft.committed_only({0: given})
        logits = ascend(pair.ours, draft, Step.of(draft, cache, chunk=len(given) > 1))
        cache.commit([0], [range(len(given))])
        text.append(int(logits[-1].argmax()))
        given = text[-1:]
    assert text == expected.tolist()
    assert len(set(text)) > 5, "a text that repeats one token proves little"


def test_a_session_writes_transformers_texts(pair: Pair) -> None:
    """Ragged, in chunks, all at once: the text each prompt has alone in transformers."""
    prompts = [tokens(length, 20 + length) for length in LENGTHS]
    expected = []
    for prompt in prompts:
        pair.reset()
        text = pair.theirs.generate(prompt[None], max_new_tokens=NUM_STEPS, do_sample=False, pad_token_id=0)
        expected.append(tuple(text[0, len(prompt) :].tolist()))
    session = Session(pair.ours, num_slots=3, capacity=128, chunk=32)
    plain = NoDrafts()
    texts = finish(session, [Request(tuple(prompt.tolist()), NUM_STEPS, plain) for prompt in prompts])
    assert [text.tokens for text in texts] == expected


def test_bfloat16_is_as_close_as_transformers(pair: Pair, tmp_path: Path) -> None:
    """Both round differently; neither may be further from the float32 numbers."""
    pair.theirs.save_pretrained(tmp_path)
    batch = torch.stack([tokens(60, seed) for seed in range(4)])
    pair.reset()
    exact = pair.theirs(batch).logits
    rounded = copy.deepcopy(pair.theirs).bfloat16()(batch).logits.float()
    ours = load_decoder(tmp_path, torch.bfloat16)
    step = written_at_once(Step.dense(4, 60), 60)
    got = ours.head(ours.run(ours.embed(batch.view(-1), step), step)).view_as(exact)
    assert (got - exact).abs().mean() < 1.25 * (rounded - exact).abs().mean()


def test_every_family_ran() -> None:
    assert len(CONFIGS) == NUM_FAMILIES
    if not _seen:
        pytest.skip("asked for this test alone")
    assert len(_seen) == NUM_FAMILIES


NEUTRAL: dict[str, object] = {
    "windows": (),
    "rope_of_layer": (),
    "attention_softcap": None,
    "logit_softcap": None,
    "attention_scale": None,
    "qkv_clip": None,
    "norm_offset": 0.0,
    "embedding_scale": 1.0,
    "position_offset": 0,
}
"""Settings and the value at which they do nothing."""


def variants(config: ModelConfig) -> dict[str, ModelConfig]:
    """The configuration with one of its peculiarities taken away at a time."""
    plain = {name: value for name, value in NEUTRAL.items() if getattr(config, name) != value}
    found = {name: replace(config, **{name: value}) for name, value in plain.items()}
    if config.positions == "rotary":
        for name, value in {"kind": "default", "width": None, "attention_factor": 1.0, "truncate": True}.items():
            bare = tuple(replace(rope, **{name: value}) for rope in config.ropes)
            if bare != config.ropes and not (name == "width" and bare[0].kind == "longrope"):  # as many as divisors
                found[f"rope {name}"] = replace(config, ropes=bare)
        short = tuple(replace(rope, long_factors=rope.short_factors) for rope in config.ropes)
        if short != config.ropes:
            found["rope long_factors"] = replace(config, ropes=short)
    if config.moe is not None:
        found["normalise"] = replace(config, moe=replace(config.moe, normalise=not config.moe.normalise))
    found["activation"] = replace(config, activation="silu" if config.activation != "silu" else "gelu")
    return found


def test_every_peculiarity_shows(pair: Pair) -> None:
    """The comparisons above would notice if any one of the family's settings were ignored."""
    text = tokens(96)
    step = written_at_once(Step.dense(1, 96), 96)
    expected = ascend(pair.ours, Draft.committed_only({0: text.tolist()}), step)
    for name, config in variants(pair.ours.config).items():
        other = Decoder(config)
        for ours, parameter in pair.ours.named_parameters():
            put(other, ours, parameter)
        step = written_at_once(Step.dense(1, 96), 96)
        got = ascend(other, Draft.committed_only({0: text.tolist()}), step)
        assert (got - expected).abs().max() > 10 * TOLERANCE, f"{name} makes no difference"
