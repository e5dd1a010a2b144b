"""Decoding while experts are foreseen: the plain text, who hears what and when, and nothing of another text."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.decode.runs import finish
from tests.storage.experts.foresight.foreseen import Heard, Sees, check, foresight
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Decoder
from vivace.core.moe import likeliest
from vivace.core.seams import Draft, Verdict, VerifiedStep
from vivace.core.step import Step
from vivace.decode.plain import NoDrafts
from vivace.decode.prefill import FullPrefill, PrefillState
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.kernels.native import NativeBody
from vivace.storage.experts.foresight.config import ForesightPlan
from vivace.storage.experts.foresight.drafter import ForesightDrafter, ForesightForwardPass
from vivace.storage.experts.foresight.routers import ExpertRouters
from vivace.storage.experts.foresight.weights import router_rows


@pytest.mark.slow_where(lambda noise, leads, **_: noise == 0 and leads != (1,))
@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("leads", [(), (1,), (2, 1)])
@pytest.mark.parametrize(
    "fields",
    [{}, {"forecast": 8, "leads": (2,)}, {"forecast": 8, "rate": None}, {"rate": None, "leads": (1, 2)}],
    ids=["p", "all", "forecast", "leads"],
)
def test_the_text_is_the_plain_one(
    model: Decoder, noise: float, leads: tuple[int, ...], fields: dict[str, Any]
) -> None:
    results = []
    for drafter in (NoDrafts(), ForesightDrafter(foresight(model, noise, **fields), ForesightPlan(3, leads))):
        requests = [Request((5, 9, 41, 7), 8, drafter, logprobs=True), Request((8, 3), 8, drafter, logprobs=True)]
        with torch.inference_mode():
            results.append(finish(Session(model, num_slots=2, capacity=32), requests))
    assert [(r.tokens, r.logprobs) for r in results[0]] == [(r.tokens, r.logprobs) for r in results[1]]


def test_routers_asked_together_say_what_each_says(model: Decoder) -> None:
    seen = foresight(model, 0.3)
    p, slow = torch.randn(2, 5, model.config.width, generator=torch.Generator().manual_seed(2)).unbind()
    layers = tuple(index for index in range(1, model.config.num_layers) if model.config.is_moe(index))
    with torch.no_grad():
        together = ExpertRouters.of(model, seen, dict.fromkeys(layers, 2), []).logits(p, slow)
        for index, logits in zip(layers, together, strict=True):
            alone = model.layers[index].route(seen.at(index, p, slow))  # type: ignore[operator]
            torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-5)
            for row in range(2):  # one row, as while decoding, and several
                rows = slice(row + 1) if row else slice(1)
                told = likeliest(alone[None, rows], 2)[0]
                assert set(told) == {int(expert) for each in alone[rows] for expert in each.topk(2)[1]}
                assert told[0] in {int(each.argmax()) for each in alone[rows]}


def test_each_layer_hears_before_it_runs(model: Decoder, heard: Heard) -> None:
    cache = model.new_cache(1, 8)
    with torch.inference_mode():
        ForesightForwardPass(foresight(model, 0.1), ForesightPlan(2)).run(
            model, Draft.committed_only({0: [4, 9, 33]}), cache
        )
    for index in (i for i in range(1, model.config.num_layers) if model.config.is_moe(i)):
        kinds = [kind for kind, layer, _ in heard if layer == index]
        assert kinds == ["expected", "ran"]
        likely = next(experts for kind, layer, experts in heard if (kind, layer) == ("expected", index))
        assert 2 <= len(likely) <= 6
        assert len(set(likely)) == len(likely)


def test_refining_asks_again_from_the_layer_below(model: Decoder, heard: Heard) -> None:
    with torch.inference_mode():
        forward = ForesightForwardPass(foresight(model, 0.1, rate=3), ForesightPlan(2, (1,)))
        forward.run(model, Draft.committed_only({0: [4]}), model.new_cache(1, 8))
    top = model.config.num_layers - 1
    assert [kind for kind, layer, _ in heard if layer == top] == ["expected", "expected", "ran"]


def test_whoever_is_asked_about_the_next_layer_is_asked_once(model: Decoder, heard: Heard) -> None:
    """A low rate speaks for the next layer itself, and knows more of it than the slow residual."""
    assert model.config.moe is not None
    seeing = foresight(model, 0.1, rate=1.25)
    with torch.inference_mode():
        forward = ForesightForwardPass(seeing, ForesightPlan(1, (1,)))
        forward.run(model, Draft.committed_only({0: [4]}), model.new_cache(1, 8))
    told = [experts for kind, layer, experts in heard if (kind, layer) == ("expected", 2)]
    assert [len(experts) for experts in told] == [model.config.moe.top_k] * model.config.is_moe(2)


def test_prompt_chunks_are_not_guessed_for(model: Decoder, heard: Heard) -> None:
    with torch.inference_mode():
        forward = ForesightForwardPass(foresight(model), ForesightPlan())
        forward.run(model, Draft.committed_only({0: [4, 9, 33]}), model.new_cache(1, 8), chunk=True)
    assert {kind for kind, *_ in heard} == {"prompt"}


def test_what_is_expected_of_a_token_does_not_depend_on_later_ones(model: Decoder, heard: Heard) -> None:
    forward = ForesightForwardPass(foresight(model, 0.2), ForesightPlan(2))
    said = []
    for tokens in ([[4], [9]], [[4], [33]]):
        cache = model.new_cache(1, 8)
        for place, given in enumerate(tokens):
            heard.clear()
            with torch.inference_mode():
                forward.run(model, Draft.committed_only({0: given}), cache)
            cache.commit([0], [[0]])
            if place == 0:
                said.append(list(heard))
    assert said[0] == said[1]


def test_native_routers_say_what_torch_says_of_one_row(model: Decoder, body: NativeBody) -> None:
    rounded = copy.deepcopy(model).to(torch.bfloat16).eval()
    pack_decoder(rounded, body)
    seen, layers = foresight(rounded, 0.3), tuple(filter(model.config.is_moe, range(model.config.num_layers)))
    native = ExpertRouters.of(rounded, seen, dict.fromkeys(layers, 3), [(layers[0], 1)])
    assert native.body is body
    assert model.config.moe is not None
    count = model.config.moe.top_k
    draw = torch.Generator().manual_seed(4)
    for _ in range(20):
        p, slow = torch.randn(2, 1, model.config.width, generator=draw).bfloat16().unbind()
        alone = native.likeliest(p, slow)
        assert alone == replace(native, body=None).likeliest(p, slow)
        logits = slow.float() @ native.weight[0]
        assert alone[-1] == logits[0].topk(count)[1].tolist(), "the last is asked about the slow residual alone"
    greedy = ExpertRouters.of(rounded, seen, dict.fromkeys(layers, 99), [])
    assert greedy.likeliest(p, slow) == replace(greedy, body=None).likeliest(p, slow)


def test_a_session_s_first_pass_is_told_from_the_end_of_its_prompt(model: Decoder, heard: Heard) -> None:
    """Of a prompt that goes up in chunks or row by row, in a slot where another text ended at the same place."""
    sees, seen = Sees(model), []
    for rows_up_to in (0, 512):
        model.backend.rows_up_to = rows_up_to
        try:
            session = Session(model, num_slots=1, capacity=32, chunk=4)
            for prompt in ((5, 9, 41, 7, 3, 8), (8, 3, 17, 2, 6, 30)):
                heard.clear()
                finish(session, [Request(prompt, 3, sees.drafter)])
                starts = [place for place, (kind, *_) in enumerate(heard) if kind == "foretold"]
                assert {kind for kind, *_ in heard[: starts[0]]} == {"prompt"}
                stop = next(place for place, (kind, *_) in enumerate(heard) if kind == "ran")
                check(heard[starts[0] : stop], sees.said(sees.ends(prompt[:-1])[-1], prompt[-1]))
                seen.append(heard[starts[0] : stop])
        finally:
            model.backend.rows_up_to = 0
    assert seen[0] != seen[1]


@pytest.mark.parametrize("row_count", [1, 64])
def test_prompts_are_called_so_and_nothing_else_is(model: Decoder, heard: Heard, row_count: int) -> None:
    """Whatever the number of rows: short last chunks are prompts, padded passes and passes of many rows are not."""
    told: list[tuple[bool, bool]] = []

    def heard_in(is_prompt: bool, of: Any) -> Any:
        def call(*args: Any, **fields: Any) -> Any:
            heard.clear()
            out = of(*args, **fields)
            told.extend((kind == "prompt", is_prompt) for kind, *_ in heard)
            return out

        return call

    class Listened(FullPrefill):
        def open(self, *args: Any, **fields: Any) -> PrefillState:
            state = super().open(*args, **fields)
            state.read = heard_in(True, state.read)  # type: ignore[method-assign]
            return state

    drafter, prefill = NoDrafts(), Listened()
    drafter.traversal.run = heard_in(False, drafter.traversal.run)  # type: ignore[method-assign]
    requests = [Request(tuple(range(1, 7 + n)), 3, drafter, prefill=prefill) for n in range(20)]
    finish(Session(model, num_slots=20, capacity=64, chunk=4, row_count=row_count), requests)
    assert {is_prompt for _, is_prompt in told} == {False, True}
    assert all(said == is_prompt for said, is_prompt in told)


def test_what_is_known_of_a_slot_follows_its_text(model: Decoder, heard: Heard) -> None:
    """Forgotten with the text or where it is cut."""

    def is_told(slot: int) -> bool:
        heard.clear()
        sees.run({slot: [6]})
        return any(kind == "foretold" for kind, *_ in heard)

    for change, knows in (
        (lambda drafter: None, [True, False]),
        (lambda drafter: drafter.release([0]), [False, False]),
        (lambda drafter: drafter.truncate([0], [1]), [False, False]),
    ):
        sees = Sees(model)
        sees.run({0: [4, 9]}, kept=[(0, 1)])
        change(sees.drafting)
        assert [is_told(slot) for slot in (0, 1)] == knows


def test_a_rejected_guess_is_followed_by_nothing(model: Decoder, heard: Heard) -> None:
    """Of a root with two guesses below it the second is kept: the next token is told from there."""
    sees = Sees(model)
    root = Draft.committed_only({0: [4]})
    draft, _ = root.grow(root.last_committed(), torch.tensor([[9, 33]]))
    with torch.inference_mode():
        passed = sees.drafting.traversal.run(model, draft, sees.cache)
    sees.drafting.observe(draft, passed, Verdict(((0, 2),), (6,), ((VerifiedStep(2, (1, 1)),),)))
    sees.cache.commit([0], [(0, 2)])
    heard.clear()
    sees.run({0: [6]})
    check([each for each in heard if each[0] != "ran"], sees.said(passed.hidden[2], 6))


@pytest.mark.parametrize("leads", [(), (1,), (2, 1)])
def test_early_routers_are_asked_about_the_residual_so_many_layers_below(
    model: Decoder, heard: Heard, leads: tuple[int, ...]
) -> None:
    """Those that were taught with what they were taught, the others as they are."""
    seen = foresight(model, 0.3, rate=None, leads=leads, forecast=4)
    entering: list[torch.Tensor] = []
    asked, count = (2, 1), model.config.num_layers
    cache, step = model.new_cache(1, 8), Step.dense(1, 1)
    drafting = ForesightDrafter(seen, ForesightPlan(leads=asked)).open(cache)
    with torch.inference_mode():
        entering.append(model.embed(torch.tensor([4]), step))
        model.run(entering[0], step, watch=lambda _, h: entering.append(h))
        heard.clear()
        drafting.traversal.run(model, Draft.committed_only({0: [4]}), cache)
        told = [(layer, set(experts)) for kind, layer, experts in heard if kind == "expected"]
        pairs = [(depth + lead, lead) for depth in range(1, count) for lead in asked if depth + lead < count]
        expected = []
        for index, lead in pairs:
            layer = model.layers[index]
            if not model.config.is_moe(index):
                continue
            rows = router_rows(layer)  # type: ignore[arg-type]
            if lead in leads:
                assert seen.near is not None
                rows = rows + seen.near[leads.index(lead), index]
            logits = F.linear(F.rms_norm(entering[index - lead], rows.shape[1:], eps=model.config.norm_eps), rows)
            expected.append((index, set(logits.topk(model.config.moe.top_k)[1][0].tolist())))  # type: ignore[union-attr]
    assert told == expected
    assert told
