"""Passes as recorded graphs: the texts and bits of the layers one by one, whatever is recorded and launched again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vivace
from tests.core import decoders
from tests.core.recorded import recorded
from tests.decode.runs import finish
from tests.every_method import make_model
from vivace.core.cuda.backend import CudaBackend, graphs_backend
from vivace.core.cuda.graphs import GraphSpan
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.engine import Engine
from vivace.errors import UnsupportedError
from vivace.kernels.choice import choose

PROMPTS = ("aka bob aka bob aka bob", "the quick fox the quick fox the", "fox")
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "seed": 3}
RECORDED = [name for name in decoders.VARIANTS if "moe" not in name and "mixture" not in name]


def build(variant: str = "") -> Decoder:
    """A decoder in bfloat16, whose rows read masked entries on the CPU as on a GPU."""
    return decoders.build(variant or next(iter(decoders.VARIANTS))).to(torch.bfloat16)


def span_of(model: Decoder) -> GraphSpan:
    assert isinstance(model.backend.span, GraphSpan)
    return model.backend.span


def with_graphs(engine: Engine) -> Engine:
    engine.model.run_on(CudaBackend(recorded))
    return engine


def texts(engine: Engine, method: str, **options: Any) -> list[tuple[int, ...]]:
    asked = {"method": method, "max_new_tokens": 9, "ignore_eos": True, **options}
    return [answer.token_ids for answer in engine.generate(PROMPTS, **asked)]


@pytest.mark.parametrize(
    ("method", "options"),
    [(name, GREEDY) for name in ("plain", "lookup", "multirate", "multistream", "eagle")] + [("plain", SAMPLED)],
)
def test_methods_write_the_same_text(tmp_path: Path, method: str, options: dict[str, Any]) -> None:
    folder = make_model(tmp_path, method)
    expected = texts(vivace.load(folder, kernels="torch", dtype="bfloat16"), method, **options)
    engine = with_graphs(vivace.load(folder, kernels="torch", dtype="bfloat16"))
    assert texts(engine, method, **options) == expected
    assert len(span_of(engine.model).recordings) > 0, "something was recorded"


@pytest.mark.parametrize(("variant", "kv"), [*((name, "same") for name in RECORDED), (RECORDED[0], "int8")])
def test_every_kind_of_decoder(variant: str, kv: str) -> None:
    prompts = [tuple(decoders.tokens(length)) for length in (3, 140)]

    def run(model: Decoder) -> list[tuple[int, ...]]:
        model.store_entries(kv)
        requests = [Request(prompt, 6, NoDrafts()) for prompt in prompts]
        return [answer.tokens for answer in finish(Session(model, num_slots=2, capacity=192, chunk=8), requests)]

    expected = run(build(variant))
    model = build(variant)
    model.run_on(CudaBackend(recorded))
    assert run(model) == expected
    if model.backend.span is not None:
        assert len(span_of(model).recordings) > 0


@torch.inference_mode()
def test_a_launch_has_the_bits_of_the_layers() -> None:
    """One call, by layers and by a graph that was recorded from another call of its shape."""
    model = build()
    model.run_on(CudaBackend(recorded))
    span = span_of(model)
    seen = []
    run, one_by_one = span.run, span._one_by_one

    def both(h: Any, step: Any, start: int, stop: int) -> Any:
        expected = one_by_one(h, step, start, stop)
        found = run(h, step, start, stop)
        seen.append((len(span.recordings), torch.equal(found, expected)))
        return found

    span.run = both  # type: ignore[method-assign]
    requests = [Request(tuple(decoders.tokens(length)), 12, NoDrafts()) for length in (20, 3)]
    finish(Session(model, num_slots=2, capacity=96, chunk=8), requests)
    assert all(equal for _, equal in seen)
    assert seen[-1][0] >= 1


def test_graphs_are_recorded_anew_where_the_blocks_moved() -> None:
    """A pool of a GPU grows by moving: graphs of the old place must not be launched."""
    model = build()
    model.run_on(CudaBackend(recorded))
    prompt = tuple(decoders.tokens(20))

    def text() -> tuple[int, ...]:
        [answer] = finish(Session(model, num_slots=1, capacity=64, chunk=8), [Request(prompt, 12, NoDrafts())])
        return answer.tokens

    expected = text()
    span = span_of(model)
    assert len(span.recordings)
    span._decoder._blocks = None  # a new store, at another place
    assert text() == expected
    assert span.recordings.shapes
    assert span.recordings._places[0] == id(model.blocks)


def test_what_graphs_refuse() -> None:
    with pytest.raises(UnsupportedError, match="graphs are for a GPU"):
        choose("graphs")
    assert choose("graphs", device=torch.device("cuda:0")).name == "graphs"
    with pytest.raises(UnsupportedError, match="q4 was asked for"):
        graphs_backend(torch.bfloat16, weights="q4")
    with pytest.raises(UnsupportedError, match="whole head"):
        graphs_backend(torch.bfloat16, screens_head=True)


def test_calls_that_name_what_may_be_read_are_no_graphs() -> None:
    model = build()
    model.run_on(CudaBackend(recorded))
    cache = model.new_cache(1, 96)
    assert span_of(model).covers(Step.at(cache, [0], [5]))
    assert not span_of(model).covers(Step.at(cache, [0], [5], readable={0: torch.tensor([0, 2, 5])}))


@pytest.mark.parametrize("mode", ["lazy", "exits"])
def test_rows_that_may_read_some_entries_only(tmp_path: Path, mode: str) -> None:
    """Prompt tokens that come back, and early exits whose entries are missing: such calls are no graphs."""
    folder = make_model(tmp_path, "lite" if mode == "exits" else "plain")
    engine, other = (vivace.load(folder, kernels="torch", dtype="bfloat16") for _ in range(2))
    with_graphs(engine)
    asked: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "do_sample": False}
    asked |= {"prefill": "lazy", "keep": "1:0.5"} if mode == "lazy" else {"method": "lite"}
    prompts = [" ".join([prompt] * 6) for prompt in PROMPTS]
    found = [[answer.token_ids for answer in one.generate(prompts, **asked)] for one in (engine, other)]
    assert found[0] == found[1]
