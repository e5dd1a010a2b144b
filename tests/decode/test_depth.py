"""Dynamic depth with exits that a script decides: what leaves, what is owed, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.core.entries import write_entries
from tests.decode.oracles import Text, plain_text
from tests.decode.runs import finish
from tests.decode.tiny_decoders import build, prompts
from vivace.core.cache import KVCache
from vivace.core.model import Decoder, Layer
from vivace.core.sampling import Sampling
from vivace.core.seams import Draft
from vivace.core.step import Step
from vivace.decode.depth import Depth, EarlyExit, Missing
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request, StopRule
from vivace.decode.session import Session
from vivace.errors import ConfigError

GATES = (1, 3, 4)
LAYERS = 6
COUNT = 20
POLICIES: list[Missing] = ["deferred", "propagate", "mask"]
Rule = Callable[[int, int], bool]
"""(position, gate) -> whether the row leaves."""


def never(position: int, gate: int) -> bool:
    return False


def mixed(position: int, gate: int) -> bool:
    return (position * 7 + gate * 3) % 5 in (0, 1)


class Scripted:
    """Leaves by a rule; logits are read from the slow residual itself."""

    exit_layers = GATES

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def forward(self, model: Decoder, gate: int, h: Tensor, step: Step, asking: Tensor) -> EarlyExit:
        h = model.run(h, step, (0, *GATES)[gate], GATES[gate])
        leaves = torch.tensor([self.rule(int(step.position[row]), gate) for row in asking], dtype=torch.bool)
        return EarlyExit(h, leaves, h[asking])


class Shallow(NoDrafts):
    """The drafter around it."""

    name = "shallow"

    def __init__(self, rule: Rule, missing: Missing = "deferred", max_pending: int = 8) -> None:
        self.traversal = Depth(Scripted(rule), missing=missing, max_pending=max_pending)


@pytest.fixture(scope="module")
def model() -> Callable[[torch.dtype], Decoder]:
    made = {d: build(d, num_layers=LAYERS, seed=3).requires_grad_(False) for d in (torch.float32, torch.bfloat16)}
    return made.__getitem__


@cache
@torch.inference_mode()
def oracle(model: Decoder, prompt: Sequence[int], rule: Rule, max_pending: int = 8) -> tuple[list[int], list[int]]:
    """Tokens and exit layers when every stored entry is exact: one row at a time through all layers."""
    cache = model.new_cache(1, 128)
    tokens, exits, owed = list(prompt), [], list[int]()
    for at in range(0, len(prompt) - 1, 8):
        span = tuple(prompt[at : min(at + 8, len(prompt) - 1)])
        step = Step.of(Draft.committed_only({0: span}), cache, chunk=True)
        model.run(model.embed(torch.tensor(span), step), step)
        cache.commit([0], [range(len(span))])
    for _ in range(COUNT):
        step = Step.of(Draft.committed_only({0: tokens[-1:]}), cache)
        h, out, left = model.embed(torch.tensor(tokens[-1:]), step), None, LAYERS
        for gate, (low, high) in enumerate(pairwise((0, *GATES, LAYERS))):
            h = model.run(h, step, low, high)
            may = high < LAYERS and out is None and len(owed) < max_pending
            if may and rule(len(tokens) - 1, gate):
                out, left = h, high
        # what waits below the exit came along up to it
        owed = [layer for layer in (*(max(layer, left) for layer in owed), left) if layer < LAYERS]
        cache.commit([0], [range(1)])
        tokens.append(int(model.head(h if out is None else out).argmax()))
        exits.append(left)
    return tokens[len(prompt) :], exits


@cache
def whole(model: Decoder) -> list[Text]:
    """What plain decoding makes of five prompts."""
    return [plain_text(model, prompt, COUNT) for prompt in prompts(5, seed=2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("missing", POLICIES)
def test_nobody_leaves_is_plain_decoding(model, dtype, missing) -> None:
    """With closed gates all three policies give the whole model's text."""
    texts = whole(model(dtype))
    session = Session(model(dtype), num_slots=3, capacity=64, chunk=8)
    drafter = Shallow(never, missing)
    found = finish(session, [Request(t.prompt, COUNT, drafter, logprobs=True) for t in texts], every=2)
    for result, text in zip(found, texts, strict=True):
        assert result.tokens == text.new
        assert result.logprobs == text.logprobs
        assert result.stats.exit_layers == [LAYERS] * COUNT
        assert result.stats.num_layer_passes == LAYERS * COUNT
        assert result.stats.early_exit_share == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("slots", [1, 3, 5])
def test_deferred_rows_are_exact(model, dtype, slots) -> None:
    """What leaves differs, what is stored does not; alone and among others that leave elsewhere."""
    session = Session(model(dtype), num_slots=slots, capacity=64, chunk=8)
    drafter = Shallow(mixed)
    asked = prompts(5, seed=2)
    found = finish(session, [Request(p, COUNT, drafter) for p in asked], every=2)
    for result, prompt in zip(found, asked, strict=True):
        tokens, exits = oracle(model(dtype), prompt, mixed)
        assert result.stats.exit_layers == exits
        assert list(result.tokens) == tokens
        assert 0 < result.stats.num_early_exits < COUNT


def fill(model: Decoder, cache: KVCache, slot: int) -> None:
    """What is owed of a slot, each row alone from where it left to the top, oldest first."""
    owed: dict[int, tuple[int, Tensor]] = {}
    for layer in cache.pending[slot].layers:
        owed |= {int(p): (layer, hidden) for p, hidden in zip(*cache.pending[slot].take(layer), strict=True)}
    for low, high in pairwise((*GATES, LAYERS)):
        for position in sorted(p for p, (layer, _) in owed.items() if layer <= low):
            step = Step.at(cache, [slot], [position])
            owed[position] = high, model.run(owed[position][1][None], step, low, high)[0]


@torch.inference_mode()
def test_what_is_owed_fills_the_cache(model) -> None:
    """With it every layer holds what a pass of all tokens through all layers holds."""
    bf16 = model(torch.bfloat16)
    drafter = Shallow(mixed)
    session = Session(bf16, num_slots=1, capacity=64)
    session.admit(Request((5, 9, 2), COUNT, drafter))
    text, owed = [5, 9, 2], 0
    while not session.is_idle:
        for emitted in session.step():
            text += emitted.tokens
        if session.is_idle:
            break
        owed = max(owed, len(session.cache.pending[0]))
        length = session.cache.lengths[0]
        if len(text) % 4:
            continue
        fill(bf16, session.cache, 0)
        fresh = bf16.new_cache(1, 64)
        for span in (text[:2], *([token] for token in text[2:length])):
            step = Step.of(Draft.committed_only({0: span}), fresh, chunk=len(span) == 2)
            bf16.run(bf16.embed(torch.tensor(span), step), step)
            fresh.commit([0], [range(len(span))])
        for layer in range(LAYERS):
            pairs = zip(session.cache.span(layer, 0, 0, length), fresh.span(layer, 0, 0, length), strict=True)
            for ours, theirs in pairs:
                assert torch.equal(ours, theirs)
    assert owed > 1


def test_always_leaving_stops_at_the_first_gate_until_too_much_is_owed(model) -> None:
    """A sequence may owe so many rows; then one goes to the top and takes them along."""
    session = Session(model(torch.bfloat16), num_slots=1, capacity=64)
    drafter = Shallow(lambda position, gate: True, max_pending=3)
    [result] = finish(session, [Request((5, 6), COUNT, drafter)])
    assert result.stats.exit_layers == ([1, 1, 1, LAYERS] * COUNT)[:COUNT]
    whole, rest = divmod(COUNT, 4)
    assert result.stats.num_layer_passes == whole * 4 * LAYERS + rest
    session = Session(model(torch.bfloat16), num_slots=1, capacity=64)
    [free] = finish(session, [Request((5, 6), COUNT, Shallow(lambda position, gate: True, "mask"))])
    assert free.stats.exit_layers == [1] * COUNT
    assert free.stats.num_layer_passes == COUNT
    assert (free.stats.early_exit_share, free.stats.mean_exit_layer, free.stats.layer_passes_per_token) == (1, 1, 1)


@torch.inference_mode()
def test_masked_entries_are_never_read_and_propagated_ones_are_written(model, monkeypatch) -> None:
    """Every entry above an exit is poisoned: masking must not notice, propagating must have filled it."""
    for missing in ("mask", "propagate"):
        session = Session(model(torch.float32), num_slots=1, capacity=64, chunk=8)
        session.admit(Request((5, 9, 2, 4), COUNT, Shallow(mixed, missing)))
        seen = 0
        for _ in range(COUNT):
            before = session.cache.lengths[0]
            [emitted] = session.step()
            left = emitted.stats.exit_layers[-1]
            seen += left < LAYERS
            if session.is_idle:
                break
            for layer in range(LAYERS):
                keys, values = session.cache.span(layer, 0, max(3, before), max(3, before) + 1)
                if layer >= left and missing == "mask":
                    assert not keys.any()
                    keys.fill_(1e9)
                    values.fill_(1e9)
                assert keys.any()
        assert seen > 3
        assert all(0 <= token < 97 for token in emitted.tokens)


def test_exact_calls_are_padded_where_rows_leave(model, monkeypatch) -> None:
    """Entries above an exit are made in calls of one number of rows, too, and the text stays."""
    runs, rows = [], set()
    project = Layer.project

    def recorded(self: Layer, h: Tensor, step: Step) -> Tensor:
        if step.chunk is None:
            rows.add(len(h))
        return project(self, h, step)

    for row_count in (1, 16):
        session = Session(model(torch.bfloat16), num_slots=3, capacity=64, chunk=8, row_count=row_count)
        drafter = Shallow(mixed, "propagate")
        runs.append(finish(session, [Request(prompt, COUNT, drafter) for prompt in prompts(5, seed=2)]))
        monkeypatch.setattr(Layer, "project", recorded)
    assert rows == {16}
    assert [(r.tokens, r.stats.exit_layers) for r in runs[0]] == [(r.tokens, r.stats.exit_layers) for r in runs[1]]


def test_masking_equals_an_attention_that_skips(model) -> None:
    """Poison above exits changes nothing: two runs with different poison say the same."""
    texts = []
    for poison in (0.0, 1e6):
        session = Session(model(torch.bfloat16), num_slots=2, capacity=64, chunk=8)
        for prompt in prompts(2, seed=4):
            session.admit(Request(prompt, COUNT, Shallow(mixed, "mask")))
        found: dict[int, list[int]] = {0: [], 1: []}
        while not session.is_idle:
            for emitted in session.step():
                found[emitted.request_id] += emitted.tokens
            for slot, late in enumerate(session.cache.pending):
                for layer in range(LAYERS):
                    for gone in late.missing(layer).tolist():
                        write_entries(session.cache, layer, slot, gone, gone + 1, poison)
        texts.append(found)
    assert texts[0] == texts[1]


def test_slots_that_come_and_go_leave_nothing_behind(model) -> None:
    """Sixteen requests in three slots, stops and cancels in between: each answer is the answer alone."""
    bf16 = model(torch.bfloat16)
    asked = prompts(16, seed=6)
    alone = []
    for prompt in asked:
        [result] = finish(Session(bf16, num_slots=1, capacity=64, chunk=8), [Request(prompt, COUNT, Shallow(mixed))])
        alone.append(result.tokens)
    stops = [StopRule(end_tokens=frozenset([tokens[7]])) for tokens in alone]
    drafter = Shallow(mixed)
    session = Session(bf16, num_slots=3, capacity=64, chunk=8)
    ids = [session.admit(Request(p, COUNT, drafter, stop=s)) for p, s in zip(asked, stops, strict=True)]
    texts: dict[int, tuple[int, ...]] = dict.fromkeys(ids, ())
    for number in range(400):
        if number == 9:
            session.cancel(ids[2])
        for emitted in session.step():
            texts[emitted.request_id] += emitted.tokens
    assert session.is_idle
    for place, (tokens, stop) in enumerate(zip(alone, stops, strict=True)):
        if place != 2:
            assert texts[ids[place]] == tokens[: tokens.index(*stop.end_tokens) + 1]
    assert not any(session.cache.pending)


def test_sampling_draws_from_the_gate(model) -> None:
    hot = Sampling(do_sample=True, temperature=1.3)
    drafter = Shallow(mixed)

    def text(seed: int) -> tuple[int, ...]:
        session = Session(model(torch.bfloat16), num_slots=1, capacity=64)
        return finish(session, [Request((5, 6), COUNT, drafter, hot, seed=seed)])[0].tokens

    assert text(1) == text(1) != text(2)


def test_what_is_cut_is_owed_no_more(model) -> None:
    session = Session(model(torch.bfloat16), num_slots=2, capacity=64)
    session.admit(Request((5, 6), COUNT, Shallow(lambda position, gate: True)))
    for _ in range(4):
        session.step()
    cache = session.cache
    owing = next(slot for slot in range(2) if cache.pending[slot])
    assert cache.pending[owing].missing(LAYERS).tolist() == [1, 2, 3, 4]
    cache.truncate([owing], [3])
    assert cache.pending[owing].missing(LAYERS).tolist() == [1, 2]


def test_what_depth_is_told_is_checked() -> None:
    with pytest.raises(ConfigError, match="missing"):
        Depth(Scripted(never), missing="forget")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_pending"):
        Depth(Scripted(never), max_pending=0)
