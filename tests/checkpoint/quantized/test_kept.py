"""Codes of a file that stay what they are: memory, answers, drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vivace
from tests.checkpoint.gguf.families import make, write_file
from tests.checkpoint.quantized.models import write
from vivace.checkpoint.load import least_bytes, load_decoder
from vivace.core.cpu.low_bit import LowBitLinear
from vivace.core.cpu.quantized import quantized_copy
from vivace.core.cpu.span import NativeSpan
from vivace.core.step import Step
from vivace.kernels.choice import choose
from vivace.kernels.grid_codes import GridCodes
from vivace.kernels.low_bit import LowBit

KINDS = {"gptq": "grid4", "gptq-ordered": "grid4", "awq": "grid4", "mlx": "grid4", "int8": "grid8"}
PROMPTS: list[list[int]] = [[5, 17, 40, 3, 88, 21, 60, 9], [7, 7, 7], [1, 90, 33, 64, 2, 18, 5, 17, 40, 3, 88], [50]]

pytestmark = pytest.mark.skipif(choose("auto").body is None, reason="no native kernels here")


def answers(engine: vivace.Engine, prompts: list[list[int]], method: str, **options: Any) -> list[list[int]]:
    results = engine.generate(prompts, max_new_tokens=24, method=method, **options)
    return [list(result.token_ids) for result in results]


def matrices(engine: vivace.Engine) -> list[LowBitLinear]:
    return [module for module in engine.model.modules() if isinstance(module, LowBitLinear)]


@pytest.mark.parametrize("kind", KINDS)
def test_no_weight_changes(kind: str, tmp_path: Path) -> None:
    stored, plain = write(kind, tmp_path, tie_word_embeddings=kind == "mlx")
    engine, twin = vivace.load(stored), load_decoder(plain, "float32")
    assert "keep the codes and scales" in engine.notes[0]
    for index, layer in enumerate(twin.layers):
        ours: Any = engine.model.layers[index]
        feed, theirs = ours.feed_forward, layer.feed_forward
        gate, up = theirs.up.weight.chunk(2)
        pairs = [(ours.qkv, layer.qkv.weight), (ours.o, layer.o.weight)]
        pairs += [(feed.gate, gate), (feed.up, up), (feed.down, theirs.down.weight)]
        for mine, other in pairs:
            assert isinstance(mine.weight, GridCodes)
            assert mine.weight.format == KINDS[kind]
            assert torch.allclose(mine.weight.dense(), other, rtol=1e-6, atol=1e-7)
        assert torch.equal(ours.qkv.bias.float(), layer.qkv.bias.bfloat16().float())
    if kind == "mlx":
        rows: Any = engine.model.embedding_rows
        assert torch.equal(rows(torch.arange(96)), twin.embedding.bfloat16())
    count = sum(part.weight.nbytes for part in matrices(engine))
    assert count < engine.num_bytes
    assert least_bytes(stored) <= engine.num_bytes * 1.2


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_one_model_s(kind: str, tmp_path: Path) -> None:
    """Alone as among others, whatever drafts, and near what float32 computes with these weights."""
    stored, plain = write(kind, tmp_path, tie_word_embeddings=kind == "mlx")
    engine = vivace.load(stored)
    expected = [answers(engine, [prompt], "plain")[0] for prompt in PROMPTS]
    assert answers(engine, PROMPTS * 4, "plain") == expected * 4
    for method in ("lookup", "quantized"):
        assert answers(engine, PROMPTS, method) == expected
        assert [answers(engine, [prompt], method)[0] for prompt in PROMPTS] == expected
    sampled = {"temperature": 1.0, "seed": 5}
    assert answers(engine, PROMPTS[:1], "plain", **sampled) == answers(engine, PROMPTS[:1], "plain", **sampled)
    twin = vivace.load(plain, dtype="float32", kernels="torch")
    ours, theirs = (e.logits([PROMPTS[2]])[0].float().log_softmax(-1) for e in (engine, twin))
    assert float((theirs.exp() * (theirs - ours)).sum(-1).mean()) < 6e-3


@pytest.mark.parametrize("kind", ["q4_0", "q8_0"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3"])
def test_a_gguf_file_keeps_its_codes(architecture: str, kind: str, tmp_path: Path) -> None:
    path = write_file(architecture, make(architecture), tmp_path / "m.gguf", kind)
    engine, twin = vivace.load(path), load_decoder(path, "float32")
    kept = matrices(engine)
    assert len(kept) == 5 * engine.model.config.num_layers + 1
    assert {part.weight.format for part in kept} == {"grid4" if kind == "q4_0" else "grid8"}
    first: Any = engine.model.layers[0]
    assert torch.equal(first.qkv.weight.dense(), twin.layers[0].qkv.weight)
    rows: Any = engine.model.embedding_rows
    assert torch.equal(rows(torch.arange(96)), twin.embedding.bfloat16())
    expected = [answers(engine, [prompt], "plain")[0] for prompt in PROMPTS]
    assert answers(engine, PROMPTS, "lookup") == expected


def test_what_is_rounded_again_is_said(tmp_path: Path) -> None:
    stored, _ = write("gptq", tmp_path)
    engine = vivace.load(stored, weights="q4")
    assert engine.notes[0] == "the gptq-4 weights are decoded to bfloat16 and rounded once more, to q4"
    assert not any(isinstance(part.weight, GridCodes) for part in matrices(engine))
    assert "decoded to float32" in vivace.load(stored, dtype="float32").notes[0]
    assert "decoded to bfloat16" in vivace.load(stored, kernels="torch").notes[0]


def test_drafts_leave_codes_alone_that_have_no_more_bits(tmp_path: Path) -> None:
    narrow = vivace.load(write("gptq", tmp_path / "a")[0]).model
    wide = vivace.load(write("int8", tmp_path / "b")[0]).model
    layers: list[Any] = [narrow.layers[0], wide.layers[0]]
    assert quantized_copy(layers[0].o, "q4") is layers[0].o.matrix
    assert quantized_copy(layers[1].o, "int8") is layers[1].o.matrix
    rounded = quantized_copy(layers[1].o, "q4").weight
    assert isinstance(rounded, LowBit)
    assert rounded.format == "q4"


@torch.inference_mode()
def test_a_gate_and_an_up_of_other_widths_are_rounded_alike(tmp_path: Path) -> None:
    """A file may store one in four bits and the other in eight; both read one quantized input."""
    engines = [
        vivace.load(write_file("llama", make("llama"), tmp_path / f"{kind}.gguf", kind)) for kind in ("q4_0", "q8_0")
    ]
    for low, high in (engines, engines[::-1]):
        model = low.model
        body = choose("auto").body
        assert body is not None
        layers: list[Any] = list(model.layers)
        others: list[Any] = list(high.model.layers)
        own = [layer.feed_forward.gate for layer in layers]
        try:
            for layer, other in zip(layers, others, strict=True):
                layer.feed_forward.gate = other.feed_forward.gate
            span = NativeSpan.of(model, body)
            assert span is not None
            rough = span.quantized(0, len(layers), "q4")
            formats = {(layer.gate.format, layer.up.format) for layer in rough.plan.layers[: len(layers)]}
            assert len({gate for gate, _ in formats} | {up for _, up in formats}) == 1
            cache = model.new_cache(1, 8)
            step = Step.at(cache, [0], [0])
            h = rough.run(model.embed(torch.tensor([5]), step), step, 0, len(layers))
            assert h.isfinite().all()
        finally:
            for layer, gate in zip(layers, own, strict=True):
                layer.feed_forward.gate = gate
