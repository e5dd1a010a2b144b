"""Tokens that were pruned and come back: an oracle with whole matrices, counts, and all that must not disturb them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import vivace
from tests.core.entries import write_entries
from tests.prefill.setting import GREEDY, LAYERS, PROMPT
from tests.serve.conftest import local
from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.engine import Engine, Options
from vivace.errors import ConfigError, UnsupportedError
from vivace.prefill import pruned, returning
from vivace.prefill.scores import by_attention
from vivace.serve.config import ServeConfig

BACK: dict[str, Any] = {"prefill": "lazy", "keep": "2:0.5,4:0.4", "min_prompt": 1, "decode_keep": "same"}


@pytest.fixture(scope="module")
def native(folder: Path) -> Engine:
    return vivace.load(folder, dtype="bfloat16")


def asked(engine: Engine, prompt: Sequence[int] = PROMPT, **options: Any) -> Request:
    return engine.request(list(prompt), Options.of({**GREEDY, **BACK, **options}))


def texts(session: Session) -> Iterator[list[int]]:
    """What is written so far of the one request, after each step."""
    written: list[int] = []
    while not session.is_idle:
        for emitted in session.step():
            assert emitted.error is None
            written += emitted.tokens
        yield written


def run(engine: Engine, request: Request) -> list[int]:
    session = Session(engine.model, num_slots=1, capacity=500)
    session.admit(request)
    return list(texts(session))[-1]


# What is kept is what a full reading has


def test_keeping_everything_gives_the_entries_and_the_text_of_full(engine: Engine) -> None:
    sessions = []
    for way in ({"prefill": "full", "keep": None, "min_prompt": None, "decode_keep": None}, {"keep": "2:1,4:1"}):
        session = Session(engine.model, num_slots=1, capacity=500, steps_per_call=0)
        session.admit(asked(engine, **way, method="plain", max_new_tokens=40))
        for written in texts(session):
            if len(written) == 33:
                break
        sessions.append((session, written))
    (full, wanted), (lazy, found) = sessions
    assert wanted == found
    for layer in range(LAYERS):
        for one, other in zip(full.cache.span(layer, 0, 0, 332), lazy.cache.span(layer, 0, 0, 332), strict=True):
            assert torch.equal(one, other), f"layer {layer}"


def test_the_first_token_is_that_of_a_prompt_whose_tokens_stay_away(engine: Engine) -> None:
    back = engine.generate(PROMPT, **GREEDY | BACK)[0]
    away = engine.generate(PROMPT, method="plain", **GREEDY | BACK | {"decode_keep": 1})[0]
    assert (back.token_ids[0], back.logprobs[0]) == (away.token_ids[0], away.logprobs[0])
    assert back.stats.prompt_kept == away.stats.prompt_kept == [[2, 151], [4, 61]]
    assert back.stats.came_back[0] == [0, 0]
    assert sum(map(sum, back.stats.came_back)) > 20
    assert not away.stats.came_back
    assert away.stats.prompt_computed == away.stats.prompt_kept
    total = [kept + sum(step[at] for step in back.stats.came_back) for at, (_, kept) in enumerate([[2, 151], [4, 61]])]
    assert back.stats.prompt_computed == [[2, total[0]], [4, total[1]]]


def test_no_token_is_computed_twice_in_a_layer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: Counter[tuple[int, int]] = Counter()
    inner = Decoder.run

    def counted(self: Decoder, h: Tensor, step: Step, start: int = 0, stop: int | None = None, **more: Any) -> Tensor:
        for layer in range(start, self.config.num_layers if stop is None else stop):
            computed.update((layer, position) for position in step.position.tolist())
        return inner(self, h, step, start, stop, **more)

    monkeypatch.setattr(Decoder, "run", counted)
    [result] = engine.generate(PROMPT, **GREEDY | BACK)
    assert set(computed.values()) == {1}
    for layer, number in [(1, 301), (3, 151), (5, 61)]:
        back = sum(step[(layer - 2) // 2] for step in result.stats.came_back) if layer > 1 else 0
        assert sum(at == layer for at, _ in computed) == number + back + 11  # the last token is not computed


# The oracle


class Oracle:
    """A text, layer by layer, with entries in dictionaries by position and explicit matrices."""

    def __init__(self, model: Decoder, points: dict[int, float], choices: Iterator[tuple[Tensor, list[int]]]) -> None:
        self.model, self.points, self.choices = model, points, choices
        self.entries: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in range(model.config.num_layers)]
        self.aux: dict[tuple[int, int], Tensor] = {}
        self.computed: Counter[tuple[int, int]] = Counter()
        self.num_revived = 0

    def layer(self, index: int, h: Tensor, rows: list[int], context: list[int]) -> tuple[Tensor, Tensor]:
        """Rows behind a layer, and the weights (H, n) with which the last one reads the context."""
        layer, c = self.model.layers[index], self.model.config
        kept: list[Tensor] = []

        class Kept(KVCache):
            def put(self, layer: int, step: Step, keys: Tensor, values: Tensor) -> None:
                kept[:] = [keys, values]

        place = torch.tensor(rows)
        step = Step.packed(Kept(self.model.blocks.specs, 1, 512), [0] * len(rows), place, place)
        q = layer.project(h, step)
        for row, position in enumerate(rows):
            self.entries[index][position] = kept[0][row], kept[1][row]
            self.computed[index, position] += 1
        k, v = (
            torch.stack([self.entries[index][p][which] for p in context]).repeat_interleave(c.group, 1)
            for which in (0, 1)
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) * c.scale
        weights = scores.masked_fill(torch.tensor(context)[None] > place[:, None], -torch.inf).softmax(-1)
        out = layer.output(h, torch.einsum("hqk,khd->qhd", weights, v), step)
        return layer.feed(out, step), weights[:, -1]

    def step(self, tokens: Sequence[int], first: int) -> Tensor:
        """Logits after tokens at positions from ``first`` on: the prompt, or one more token."""
        rows, context = list(range(first, first + len(tokens))), list(range(first + len(tokens)))
        place = torch.tensor(rows)
        embedding = Step.packed(KVCache(self.model.blocks.specs, 1, 512), [0] * len(rows), place, place)
        h = self.model.embed(torch.tensor(tokens), embedding)
        for index in range(self.model.config.num_layers):
            revived = [t for t in context if t not in self.entries[index] and t not in rows]
            if revived:
                self.num_revived += len(revived)
                merged = sorted(rows + revived)
                by_position = dict(zip(rows, h, strict=True)) | {t: self.aux.pop((index, t)) for t in revived}
                h, rows = torch.stack([by_position[t] for t in merged]), merged
            h, weights = self.layer(index, h, rows, context)
            if index + 1 in self.points:
                seen, chosen = next(self.choices)
                assert torch.allclose(seen, weights, atol=1e-5), "the weights are those of the last row"
                kept = [context[at] for at in chosen]
                assert len(kept) == ceil(self.points[index + 1] * len(context) - 1e-9)
                assert kept[-1] == rows[-1], "the last token goes on"
                for row, t in enumerate(rows):
                    if t not in kept:
                        assert t not in self.entries[index + 1]
                        self.aux[index + 1, t] = h[row]
                stays = [row for row, t in enumerate(rows) if t in kept]
                h, rows, context = h[stays], [rows[row] for row in stays], kept
        return self.model.head(h[-1:])[0].log_softmax(-1)


class Recorded:
    """Chooses as usual, or at random, and notes what was seen and chosen."""

    def __init__(self, seed: int | None = None) -> None:
        self.random = None if seed is None else random.Random(seed)
        self.choices: list[tuple[Tensor, list[int]]] = []

    def __call__(self, weights: Tensor, count: int) -> Tensor:
        places = by_attention(weights, count)
        if self.random is not None:
            length = weights.shape[1]
            drawn = sorted(self.random.sample(range(length - 1), count - 1))
            places = torch.tensor([*drawn, length - 1])
        self.choices.append((weights.clone(), places.tolist()))
        return places


def poison(cache: KVCache, slot: int, length: int) -> None:
    """Make every entry that no row may read a NaN: those of tokens that a layer has not computed, and of no token."""
    for layer in range(LAYERS):
        for position in [*cache.pending[slot].missing(layer).tolist(), *range(length, cache.reach(slot))]:
            write_entries(cache, layer, slot, position, position + 1, torch.nan)


def compare(
    engine: Engine, points: dict[int, float], shares: str, prompt: list[int], seed: int | None, tolerance: float
) -> Oracle:
    chooses = Recorded(seed)
    request = asked(engine, prompt, keep=",".join(f"{at}:{share}" for at, share in points.items()), decode_keep=shares)
    drafter = request.prefill.drafter
    assert isinstance(drafter, returning.ReturningDrafter)
    assert isinstance(drafter.traversal, returning.ReturningPass)
    traversal, drafter.traversal = drafter.traversal, returning.ReturningPass(drafter.traversal.points, chooses)
    session = Session(engine.model, num_slots=1, capacity=500, chunk=32)
    session.admit(request)
    logprobs, written = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pruned, "by_attention", chooses)
        while not session.is_idle:
            if session.cache.lengths[0] >= len(prompt) - 1:
                poison(session.cache, 0, session.cache.lengths[0])
            for emitted in session.step():
                assert emitted.error is None, emitted.error
                written += emitted.tokens
                logprobs += emitted.logprobs or ()
    drafter.traversal = traversal
    steps = [points] + [points if shares == "same" else dict.fromkeys(points, float(shares))] * (len(written) - 1)
    oracle = Oracle(engine.model, points, iter(chooses.choices))
    text, first = list(prompt), 0
    for token, logprob, kept in zip(written, logprobs, steps, strict=True):
        oracle.points = kept
        wanted = oracle.step(text[first:], first)
        first = len(text)
        assert abs(float(wanted[token]) - logprob) < tolerance
        text.append(token)
    assert next(oracle.choices, None) is None
    assert set(oracle.computed.values()) == {1}
    return oracle


@torch.inference_mode()
def test_the_oracle_writes_the_same(exact: Engine) -> None:
    oracle = compare(exact, {2: 0.5, 4: 0.4}, "same", PROMPT, None, 1e-3)
    assert oracle.num_revived > 20


@settings(max_examples=6, deadline=None)
@given(
    st.dictionaries(st.integers(1, LAYERS - 1), st.floats(0.05, 1), min_size=1, max_size=4),
    st.sampled_from(["same", "0.2", "0.7", "0.95"]),
    st.integers(1, 50),
    st.one_of(st.none(), st.integers(0, 9)),
)
@torch.inference_mode()
def test_random_schedules_agree_with_the_oracle(
    exact: Engine, points: dict[int, float], shares: str, length: int, seed: int | None
) -> None:
    """Also with choices that are drawn, which bring back far more."""
    prompt = [1 + (13 * place + length) % 290 for place in range(length)]
    compare(exact, {at: round(points[at], 2) for at in sorted(points)}, shares, prompt, seed, 1e-3)


def test_native_kernels_read_through_the_index(folder: Path) -> None:
    """With NaN in every entry that nobody may read; tokens come back in more than one piece."""
    for dtype, tolerance in (("float32", 1e-3), ("bfloat16", 0.2)):
        engine = vivace.load(folder, dtype=dtype)
        exact = vivace.load(folder, kernels="torch", dtype="float32")
        chooses = []
        for one in (engine, exact):
            session = Session(one.model, num_slots=1, capacity=500)
            request = asked(one)
            drafter = request.prefill.drafter
            assert isinstance(drafter, returning.ReturningDrafter)
            drafter.traversal = returning.ReturningPass(drafter.traversal.points, Recorded(5))
            session.admit(request)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pruned, "by_attention", Recorded(4))
                found = []
                while not session.is_idle and len(found) < 2:
                    if session.cache.lengths[0] >= len(PROMPT) - 1:
                        poison(session.cache, 0, session.cache.lengths[0])
                    for emitted in session.step():
                        assert emitted.error is None
                        found += emitted.logprobs or ()
            session.close()
            chooses.append(found)
        assert chooses[0] == pytest.approx(chooses[1], abs=tolerance)


def test_a_token_that_was_dropped_is_taken_up_again(exact: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token 7 is dropped behind layer 2 in the prompt, wanted by the second new token, and not by the third."""
    calls: list[int] = []

    def chosen(weights: Tensor, count: int) -> Tensor:
        calls.append(weights.shape[1])
        scores = weights.mean(0)
        scores[7] = 2.0 if len(calls) == 2 else -1.0
        return by_attention(scores[None], count)

    monkeypatch.setattr(pruned, "by_attention", chosen)
    request = asked(exact, keep="2:0.5")
    assert isinstance(request.prefill.drafter, returning.ReturningDrafter)
    traversal = request.prefill.drafter.traversal
    request.prefill.drafter.traversal = returning.ReturningPass(traversal.points, chosen)
    session = Session(exact.model, num_slots=1, capacity=500)
    session.admit(request)
    where = []
    for written in texts(session):
        pending = session.cache.pending[0]
        where.append((len(written), [layer for layer in pending.layers if 7 in pending.at(layer)]))
    request.prefill.drafter.traversal = traversal
    assert (1, [2]) in where  # the first new token comes from the prompt's own choice
    assert (2, []) in where
    assert (3, []) in where, "it stays computed, whether it is read or not"
    assert calls[:3] == [301, 302, 303]


# Beside others


def test_sixteen_slots_with_requests_that_come_and_go(native: Engine) -> None:
    draws = random.Random(3)
    ways: list[dict[str, Any]] = [
        {},
        {"decode_keep": 0.6},
        {"keep": "3:0.3", "decode_keep": "same"},
        {"decode_keep": None, "method": "plain"},
        {"prefill": "full", "keep": None, "min_prompt": None, "decode_keep": None, "method": "plain"},
    ]
    wanted, requests = [], []
    for number in range(40):
        prompt = PROMPT[number : number + draws.randrange(1, 200)]
        options = {**ways[number % 5], "max_new_tokens": draws.randrange(1, 14)}
        requests.append(asked(native, prompt, **options))
        wanted.append(run(native, requests[-1]))
    session = Session(native.model, num_slots=16, capacity=400, prefill_budget=300)
    written: dict[int, list[int]] = {}
    number_of: dict[int, int] = {}
    gone: set[int] = set()
    waiting = list(range(40))
    forks = 0
    for _ in range(10**6):
        while waiting and draws.random() < 0.5:
            number = waiting.pop(0)
            one = session.admit(requests[number])
            number_of[one], written[one] = number, []
        if session.is_idle and not waiting:
            break
        for emitted in session.step():
            assert emitted.error is None, emitted.error
            written[emitted.request_id] += emitted.tokens
        running = [s.id for s in session._live.values() if not s.pieces]
        if running and draws.random() < 0.3:
            which = draws.choice(running)
            if session.num_free and draws.random() < 0.7:
                other = session.fork(which)
                number_of[other], written[other] = number_of[which], list(written[which])
                forks += 1
            elif len(gone) < 6:
                session.cancel(which)
                gone.add(which)
    assert forks > 5
    assert len(gone) > 1
    for one, tokens in written.items():
        if one not in gone:
            assert tokens == wanted[number_of[one]], number_of[one]
    assert not any(session.cache.pending)


def test_a_stop_string_ends_it_and_leaves_nothing(folder: Path) -> None:
    engine = vivace.load(folder)
    whole = engine.generate(PROMPT, **GREEDY | BACK)[0]
    stop = engine.tokenizer.decode(list(whole.token_ids[4:6]))
    cut = engine.generate(PROMPT, **GREEDY | BACK, stop_strings=[stop])[0]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_drawn_tokens_are_the_same_with_the_same_seed(engine: Engine) -> None:
    drawn = {**GREEDY, **BACK, "do_sample": True, "temperature": 1.2}
    one, same, other = (engine.generate(PROMPT, **drawn, seed=seed)[0].token_ids for seed in (1, 1, 2))
    assert one == same != other


def test_a_pass_that_fails_is_undone(native: Engine) -> None:
    """One of two requests fails in the middle of a pass in which tokens had come back."""
    requests = [asked(native), asked(native, PROMPT[3:200])]
    wanted = [run(native, request) for request in requests]
    drafter = requests[0].prefill.drafter
    assert isinstance(drafter, returning.ReturningDrafter)
    assert requests[1].prefill.drafter is drafter
    traversal, calls = drafter.traversal, [0]

    def fails(weights: Tensor, count: int) -> Tensor:
        calls[0] += 1
        if calls[0] == 8:
            raise RuntimeError("planted")
        return by_attention(weights, count)

    drafter.traversal = returning.ReturningPass(traversal.points, fails)
    session = Session(native.model, num_slots=2, capacity=500)
    ids = [session.admit(request) for request in requests]
    written: dict[int, list[int]] = {one: [] for one in ids}
    while not session.is_idle:
        for emitted in session.step():
            assert emitted.error is None
            written[emitted.request_id] += emitted.tokens
    drafter.traversal = traversal
    assert calls[0] > 8
    assert list(written.values()) == wanted


def test_entries_of_int8_come_back_too(folder: Path) -> None:
    engine = vivace.load(folder, dtype="bfloat16", kv="int8")
    [result] = engine.generate(PROMPT, **GREEDY | BACK)
    assert sum(map(sum, result.stats.came_back)) > 20
    assert engine.generate(PROMPT, **GREEDY | BACK)[0].token_ids == result.token_ids


# What is asked for


def test_only_plain_decodes_so(exact: Engine) -> None:
    for method in ("plain", "auto"):
        assert exact.generate(PROMPT, **GREEDY | BACK, method=method)[0].stats.method == "plain"
    with pytest.raises(UnsupportedError, match="method lookup cannot draft where prefill lazy prunes in decoding too"):
        exact.generate(PROMPT, **GREEDY | BACK, method="lookup")
    assert exact.generate(PROMPT, **GREEDY | BACK | {"decode_keep": 1}, method="lookup")[0].stats.method == "lookup"
    short = exact.generate(PROMPT, **GREEDY | BACK | {"min_prompt": 400}, method="lookup")[0]
    assert short.stats.prefill == "full"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_keep": "half"}, "decode_keep is 'half'; give 'same', or a share such as 0.5"),
        ({"decode_keep": 0}, "decode_keep is 0; it must be in (0, 1]"),
        ({"decode_keep": 1.5}, "it must be in (0, 1]"),
        ({"decode_keep": "nan"}, "it must be in (0, 1]"),
        (
            {"prefill": "static", "keep": "2:0.5"},
            "decode_keep has no effect on prefill static; leave it out, or choose",
        ),
        ({"prefill": "full", "keep": None, "min_prompt": None}, "decode_keep has no effect on prefill full"),
    ],
)
def test_wrong_settings_are_one_line(exact: Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        exact.generate(PROMPT, **GREEDY | BACK | options)
    assert message in str(caught.value)
    assert caught.value.field == "decode_keep"
    assert "\n" not in str(caught.value)


def test_over_http(folder: Path) -> None:
    engine = vivace.load(folder)
    [wanted] = engine.generate(PROMPT, **GREEDY | BACK)
    body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    with local(engine, ServeConfig(method="auto")) as server:
        ask = server.http()
        reply = ask.post("/v1/completions", json={**body, **BACK}).json()
        assert tuple(reply["choices"][0]["token_ids"]) == wanted.token_ids
        assert reply["metrics"]["prefill"]["computed"] == wanted.stats.prompt_computed
        for field, value in [("decode_keep", "half"), ("keep", "9:2"), ("prefill", "lasy"), ("method", "lookup")]:
            wrong = ask.post("/v1/completions", json={**body, **BACK, field: value})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, field)
    with local(vivace.load(folder), ServeConfig(method="auto", **BACK)) as server:
        reply = server.http().post("/v1/completions", json=body).json()
        assert tuple(reply["choices"][0]["token_ids"]) == wanted.token_ids


def test_beams_cannot_ride_along(exact: Engine) -> None:
    with pytest.raises(UnsupportedError, match="decode_keep prunes for one text, and there are beams"):
        exact.generate(PROMPT, do_sample=False, num_beams=2, max_new_tokens=4, **BACK)


def test_a_prompt_of_one_token_has_nothing_that_could_come_back(engine: Engine) -> None:
    answer = engine.generate([5], **{**GREEDY, **BACK})[0]
    assert answer.stats.prompt_computed == []
    assert len(answer.token_ids) == GREEDY["max_new_tokens"]
