"""Adapters by request: sequences that carry different low-rank deltas, or none, in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.decode.runs import Result, finish
from tests.decode.steps_at_once import Noting
from tests.decode.tiny_decoders import build, prompts
from vivace.core.cpu.backend import pack_decoder
from vivace.core.low_rank import PROJECTIONS, Adapter, LowRank, LowRankDeltas, SlotAdapters, site_shapes
from vivace.core.model import Decoder
from vivace.core.seams import Drafter
from vivace.decode.lookup import LookupConfig, PromptLookup
from vivace.decode.multi_step import MultiStepPlain
from vivace.decode.plain import NoDrafts
from vivace.decode.prefill import FULL
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.kernels.native import NativeBody

COUNT = 12


def factors(model: Decoder, seed: int, rank: int = 4) -> LowRank:
    """Deltas on every projection of every layer, large enough that texts change."""
    torch.manual_seed(seed)
    sites = site_shapes(model.config, range(model.config.num_layers), dict.fromkeys(PROJECTIONS, rank))
    made = LowRank(sites).to(model.dtype).requires_grad_(False)
    for up in made.up:
        up.copy_(torch.randn(up.shape) * 0.3)
    return made


class Bank:
    """Fills ``DeltaBank``: two adapters of one rank, side by side."""

    def __init__(self, *adapters: LowRank) -> None:
        every = [{site: (down, up) for site, down, up in each.items()} for each in adapters]
        self.down = {site: torch.cat([each[site][0] for each in every]) for site in every[0]}
        self.up = {site: torch.cat([each[site][1] for each in every]) for site in every[0]}

    def deltas(self, which: Tensor) -> LowRankDeltas:
        return LowRankDeltas(which, self.down, self.up)


@pytest.fixture
def model(body_or_none: NativeBody | None) -> Decoder:
    made = build(torch.bfloat16, seed=3).requires_grad_(False)
    if body_or_none is not None:
        pack_decoder(made, body_or_none)
    return made


def asked(adapters: Sequence[Adapter | None], drafter: Drafter) -> list[Request]:
    """One prompt for everybody, so that only adapters tell their answers apart, and one of its own for each."""
    texts = prompts(len(adapters), seed=2)
    return [
        Request(prompt, COUNT, drafter, logprobs=True, adapter=adapter)
        for text, adapter in zip(texts, adapters, strict=True)
        for prompt in ((4, 8, 15, 16, 23, 42, 4, 8), text)
    ]


def run(model: Decoder, requests: Sequence[Request], slots: int, every: int = 0) -> list[Result]:
    return finish(Session(model, num_slots=slots, capacity=64, chunk=4), requests, every=every)


@pytest.mark.slow_where(lambda body_or_none, goes_as_chunks, drafter: goes_as_chunks and body_or_none == "torch")
@pytest.mark.parametrize("goes_as_chunks", [False, True])
@pytest.mark.parametrize(
    "drafter", [NoDrafts(), PromptLookup(LookupConfig(min_ngram=1))], ids=lambda drafter: drafter.name
)
def test_a_batch_gives_each_what_it_has_alone(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, drafter: Drafter, goes_as_chunks: bool
) -> None:
    """Two adapters of one bank, one of another rank and a sequence without: text and log p, to the bit."""
    if goes_as_chunks:
        monkeypatch.setattr(model.backend, "rows_up_to", 0)
    pair = Bank(factors(model, 1), factors(model, 2))
    requests = asked((Adapter(pair, 0), Adapter(pair, 1), Adapter(factors(model, 3, rank=2)), None), drafter)
    alone = [run(model, [request], slots=1)[0] for request in requests]
    together = run(model, requests, slots=8)
    joining = run(model, requests, slots=3, every=2)
    for found in (together, joining):
        for mine, yours in zip(found, alone, strict=True):
            assert (mine.tokens, mine.logprobs) == (yours.tokens, yours.logprobs)
    assert len({result.tokens for result in alone[::2]}) == 4, "the same prompt is answered in four ways"
    bare = [run(model, [replace(request, adapter=None)], slots=1)[0] for request in requests[-2:]]
    assert [(r.tokens, r.logprobs) for r in alone[-2:]] == [(r.tokens, r.logprobs) for r in bare]


def test_an_adapter_is_the_model_with_the_deltas_merged() -> None:
    """In float32, prompts in chunks, against a copy of the model whose weights are W + up down."""
    model = build(torch.float32, seed=3).requires_grad_(False)
    deltas, merged = factors(model, 1), deepcopy(model)
    heads, keys = model.config.num_heads * model.config.head_dim, model.config.num_kv_heads * model.config.head_dim
    fed = model.config.ffn_width
    for (layer, name), down, up in deltas.items():
        modules = merged.layers[layer]
        weight, first = {
            "q": (modules.qkv.weight, 0),
            "k": (modules.qkv.weight, heads),
            "v": (modules.qkv.weight, heads + keys),
            "o": (modules.o.weight, 0),
            "gate": (modules.feed_forward.up.weight, 0),
            "up": (modules.feed_forward.up.weight, fed),
            "down": (modules.feed_forward.down.weight, 0),
        }[name]
        weight[first : first + up.shape[1]] += up[0] @ down[0]
    requests = asked((Adapter(deltas), Adapter(deltas)), NoDrafts())
    with_deltas = run(model, requests, slots=4)
    wanted = run(merged, [replace(request, adapter=None) for request in requests], slots=4)
    for mine, yours in zip(with_deltas, wanted, strict=True):
        assert mine.tokens == yours.tokens
        torch.testing.assert_close(torch.tensor(mine.logprobs), torch.tensor(yours.logprobs), atol=1e-4, rtol=0)


def test_native_calls_make_several_steps_with_adapters(body: NativeBody) -> None:
    """Of sequences with different adapters and one without together, to the bits of single steps."""
    model = build(torch.bfloat16, seed=3).requires_grad_(False)
    pack_decoder(model, body)
    drafter = Noting(MultiStepPlain(model))
    requests = asked((Adapter(factors(model, 1)), Adapter(factors(model, 2, rank=2)), None), drafter)
    wanted = [(r.tokens, r.logprobs) for r in run(model, [replace(r, drafter=NoDrafts()) for r in requests], slots=6)]
    assert [(r.tokens, r.logprobs) for r in run(model, requests, slots=6)] == wanted
    assert drafter.steps
    for request, expected in zip(requests, wanted, strict=True):
        drafter.proposed.clear()
        [found] = run(model, [request], slots=1)
        assert (found.tokens, found.logprobs) == expected
        assert drafter.steps


def test_native_calls_leave_what_they_cannot_add_to_single_steps(body: NativeBody) -> None:
    """Factors in another precision than the rows are added by PyTorch."""
    model = build(torch.bfloat16, seed=3).requires_grad_(False)
    pack_decoder(model, body)
    drafter = Noting(MultiStepPlain(model))
    requests = asked((Adapter(factors(model, 1).float()), None), drafter)
    wanted = [(r.tokens, r.logprobs) for r in run(model, [replace(r, drafter=NoDrafts()) for r in requests], slots=1)]
    for adapted, decides in ((True, False), (False, True)):
        drafter.proposed.clear()
        places = [place for place, request in enumerate(requests) if (request.adapter is not None) == adapted]
        found = run(model, [requests[place] for place in places], slots=1)
        assert [(r.tokens, r.logprobs) for r in found] == [wanted[place] for place in places]
        assert bool(drafter.steps) == decides


def test_a_slot_forgets_its_adapter(model: Decoder) -> None:
    session = Session(model, num_slots=1, capacity=64, chunk=4)
    first, _, second, _ = asked((Adapter(factors(model, 1)), None), NoDrafts())
    alone = [run(model, [request], slots=1)[0] for request in (first, second)]
    session.cancel(session.admit(first))
    found = finish(session, [first, second, first])
    assert [r.tokens for r in found] == [alone[0].tokens, alone[1].tokens, alone[0].tokens]
    assert not session.cache.adapters.any_of([0])


def test_entries_of_an_adapted_model_are_shared_with_nobody(model: Decoder) -> None:
    class Asked:
        calls = 0
        keeps_answers = False

        def attach(self, *_: object) -> list[Tensor]:
            self.calls += 1
            return []

        def keep(self, *_: object) -> None:
            self.calls += 1

    for adapter, count in ((None, 2), (Adapter(factors(model, 1)), 0)):
        prefix = Asked()
        run(model, [Request((5,) * 9, 2, NoDrafts(), prefix=prefix, adapter=adapter, prefill=FULL)], slots=1)
        assert prefix.calls == count


def test_calls_of_one_shape_get_the_same_deltas() -> None:
    """So that what lays them out for native code does so once."""
    model = build(torch.float32)
    table, bank = SlotAdapters(), factors(model, 1)
    rows = torch.tensor([2, 0, 2])
    assert table.deltas(rows) == ()
    table.give(2, Adapter(bank))
    [deltas] = table.deltas(rows)
    assert deltas.which.tolist() == [0, -1, 0]
    assert table.deltas(rows.clone())[0] is deltas
    assert table.any_of([2])
    assert not table.any_of([0, 1])
    table.give(2, None)
    assert table.deltas(rows) == ()
