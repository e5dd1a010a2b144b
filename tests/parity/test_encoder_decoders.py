"""Encoder-decoder models against transformers, family by family: states, logits, greedy and beam texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vivace
from tests.parity.encoder_decoders import ENCODER_DECODERS, make_encoder_decoder
from tests.parity.families import VOCAB
from vivace.checkpoint.load import load_decoder
from vivace.checkpoint.share import share_module
from vivace.core.cpu.backend import backend_of
from vivace.core.cpu.span import NativeSpan
from vivace.core.model import Decoder, Layer
from vivace.core.step import Step
from vivace.errors import UnsupportedError
from vivace.kernels.choice import choose

TOLERANCE = 1e-4
LENGTHS = (9, 23, 16)
TEXT = 14


@dataclass(frozen=True)
class Pair:
    """The same weights in both."""

    name: str
    theirs: nn.Module
    ours: Decoder
    folder: Path


@pytest.fixture(scope="module", params=sorted(ENCODER_DECODERS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    theirs = make_encoder_decoder(request.param)
    theirs.save_pretrained(folder)
    with torch.inference_mode():
        yield Pair(request.param, theirs, load_decoder(folder, reads_sources=True), folder)


def tokens(length: int, seed: int) -> list[int]:
    return torch.randint(4, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def stepped(model: Decoder, sources: list[list[int]], texts: list[list[int]]) -> list[Tensor]:
    """Logits (text, V) of each text, all of them one token at a time in one pass."""
    cache = model.new_cache(len(sources), 64)
    for slot, source in enumerate(sources):
        model.read_source(source, slot, cache)
    slots, logits = list(range(len(sources))), []
    for place in range(len(texts[0])):
        step = Step.at(cache, slots, [place] * len(slots))
        hidden = model.run(model.embed(torch.tensor([text[place] for text in texts]), step), step)
        cache.commit(slots, [[0]] * len(slots))
        logits.append(model.head(hidden))
    return list(torch.stack(logits, 1))


def whole(theirs: nn.Module, source: list[int], text: list[int]) -> Tensor:
    return theirs(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([text])).logits[0]


def test_every_family_is_here() -> None:
    assert len(ENCODER_DECODERS) == 8


def test_encoder_states(pair: Pair) -> None:
    assert pair.ours.encoder is not None
    sources = [tokens(length, seed) for seed, length in enumerate((*LENGTHS, *range(3, 16)))]
    together = pair.ours.encoder.states(*sources)
    for source, found in zip(sources, together, strict=True):
        expected = pair.theirs.get_encoder()(torch.tensor([source])).last_hidden_state[0]
        assert (found - expected).abs().max() < TOLERANCE
        assert torch.equal(pair.ours.encoder.states(source)[0], found), "the same bits alone and among sixteen"


def test_logits_of_a_ragged_batch_and_alone(pair: Pair) -> None:
    sources = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    texts = [tokens(TEXT, seed + 10) for seed in range(len(LENGTHS))]
    together = stepped(pair.ours, sources, texts)
    for source, text, found in zip(sources, texts, together, strict=True):
        assert (found - whole(pair.theirs, source, text)).abs().max() < TOLERANCE
        assert torch.equal(stepped(pair.ours, [source], [text])[0], found), "a row's bits are its own"


def test_a_module_of_transformers_is_shared(pair: Pair) -> None:
    source, text = tokens(LENGTHS[0], 0), tokens(TEXT, 1)
    found = stepped(share_module(pair.theirs), [source], [text])[0]
    assert (found - whole(pair.theirs, source, text)).abs().max() < TOLERANCE


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_native_kernels(pair: Pair, weights: str) -> None:
    dtype = torch.float32 if weights == "bf16" else torch.bfloat16
    body = choose("auto", device=torch.device("cpu")).body
    native = backend_of(body, weights, dtype, is_required=False)  # type: ignore[arg-type]
    if native is None:
        pytest.skip("no native kernels here")
    packed = load_decoder(pair.folder, dtype, backend=lambda _: native, reads_sources=True)
    sources = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    texts = [tokens(TEXT, seed + 10) for seed in range(len(LENGTHS))]
    together = stepped(packed, sources, texts)
    for source, text, found in zip(sources, texts, together, strict=True):
        expected = whole(pair.theirs, source, text)
        assert torch.equal(stepped(packed, [source], [text])[0], found)
        if weights == "bf16":  # eight bits are lossy, and these models are sharp
            assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_span_has_the_bits_of_its_layers(pair: Pair, dtype: torch.dtype) -> None:
    """All layers in one native call, with paths behind a common beginning, and one after the other."""
    native = backend_of(choose("auto", device=torch.device("cpu")).body, "bf16", dtype, is_required=False)
    if native is None:
        pytest.skip("no native kernels here")
    model = load_decoder(pair.folder, dtype, backend=lambda _: native, reads_sources=True)
    assert isinstance(model.backend.span, NativeSpan)
    assert model.encoder is not None
    sources = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    together = model.encoder.states(*sources)
    assert all(torch.equal(model.encoder.states(source)[0], one) for source, one in zip(sources, together, strict=True))
    cache = model.new_cache(len(sources), 64)
    model.read_sources(dict(enumerate(sources)), cache)
    for slot, count in enumerate((40, 3, 17)):  # texts that are stored, longer than the buckets of distances
        step = Step.at(cache, [slot] * count, list(range(count)))
        model.run(model.embed(torch.tensor(tokens(count, slot + 5)), step), step)
        cache.commit([slot], [range(count)])
    slots, lengths = [0, 0, 0, 1, 1, 2], [40, 40, 40, 3, 3, 17]
    entry = torch.tensor([41, 42, 43, 4, 5, 17])
    cache.reserve(slots, entry.tolist())
    step = Step(
        *(cache, torch.tensor(slots), torch.tensor(lengths), entry, torch.tensor(lengths)),
        *(entry[:, None].contiguous(), 6, 6),
    )
    h = model.embed(torch.tensor(tokens(6, 9)), step)
    joined, apart = model.run(h, step), h
    assert model.backend.span.covers(step)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        apart = layer(apart, step)
    assert torch.isfinite(joined.float()).all()
    assert torch.equal(joined, apart)


SEARCHES = [
    {"num_beams": 1},
    {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0, "min_length": 6, "no_repeat_ngram_size": 3},
    {"num_beams": 3, "num_return_sequences": 3, "early_stopping": "never", "length_penalty": 0.6},
    {"num_beams": 4, "num_return_sequences": 2, "forced_bos_token_id": 7, "forced_eos_token_id": 2},
    {"num_beams": 2, "bad_words_ids": [[5], [9]], "repetition_penalty": 1.3},
    {"num_beams": 1, "encoder_repetition_penalty": 2.5, "encoder_no_repeat_ngram_size": 2},
    {"num_beams": 2, "encoder_repetition_penalty": 2.5, "encoder_no_repeat_ngram_size": 1},
]


def batch(count: int) -> dict[str, Tensor]:
    sources = [tokens(length, seed + 30) for seed, length in enumerate((*LENGTHS, *range(3, 16))[:count])]
    longest = max(map(len, sources))
    return {
        "input_ids": torch.tensor([source + [1] * (longest - len(source)) for source in sources]),
        "attention_mask": torch.tensor([[1] * len(source) + [0] * (longest - len(source)) for source in sources]),
    }


def compared(pair: Pair, asked: dict[str, Any], count: int) -> int:
    """Compare all texts of a batch with those of transformers; return how many there were."""
    settings = batch(count) | {"max_new_tokens": 18, "do_sample": False, "eos_token_id": 2} | asked
    scored = {"return_dict_in_generate": True, "output_scores": asked["num_beams"] > 1}
    usual = pair.theirs.generate(**settings, **scored)
    ours = pair.theirs.generate(**settings, **scored, custom_generate=vivace.custom_generate)
    assert type(ours) is type(usual)
    width = min(usual.sequences.shape[1], ours.sequences.shape[1])
    assert torch.equal(ours.sequences[:, :width], usual.sequences[:, :width])
    if asked["num_beams"] > 1:
        limits = 1e-5 * usual.sequences_scores.abs().clamp(min=1)
        assert bool(((ours.sequences_scores - usual.sequences_scores).abs() <= limits).all())
    return len(usual.sequences)


@pytest.mark.parametrize("asked", SEARCHES, ids=str)
def test_texts_are_those_of_generate(pair: Pair, asked: dict[str, Any]) -> None:
    assert compared(pair, asked, 3) == 3 * asked.get("num_return_sequences", 1)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_texts_that_begin_with_padding(pair: Pair, num_beams: int) -> None:
    """Where only distances count, padding in front of a text changes nothing; elsewhere it moves its positions."""
    start = pair.theirs.generation_config.decoder_start_token_id
    ids, mask = torch.tensor([[1, 1, start, 5], [start, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    settings = batch(2) | {"decoder_input_ids": ids, "num_beams": num_beams, "max_new_tokens": 8, "do_sample": False}
    settings |= {"repetition_penalty": 1.2, "eos_token_id": 2}
    padded = settings | {"decoder_attention_mask": mask}
    if pair.ours.config.positions == "relative":
        usual = pair.theirs.generate(**padded)
        assert torch.equal(pair.theirs.generate(**padded, custom_generate=vivace.custom_generate), usual)
    else:
        with pytest.raises(UnsupportedError, match="decoder_attention_mask has zeros, and this model counts"):
            pair.theirs.generate(**padded, custom_generate=vivace.custom_generate)
    holes = settings | {"decoder_attention_mask": mask.flip(1)}
    with pytest.raises(UnsupportedError, match="decoder_attention_mask has zeros behind ones"):
        pair.theirs.generate(**holes, custom_generate=vivace.custom_generate)


@pytest.mark.slow
@pytest.mark.parametrize("asked", SEARCHES, ids=str)
@pytest.mark.parametrize("num_beams", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 3, 16])
def test_texts_of_every_width_and_batch(pair: Pair, asked: dict[str, Any], num_beams: int, count: int) -> None:
    if num_beams == 1 and asked["num_beams"] > 1:
        asked = {key: value for key, value in asked.items() if key in ("min_length", "no_repeat_ngram_size")}
    asked = {**asked, "num_beams": num_beams}
    asked["num_return_sequences"] = min(num_beams, asked.get("num_return_sequences", 1))
    assert compared(pair, asked, count) == count * asked["num_return_sequences"]
