"""Prompts that are pruned on the way up: an oracle that looks at every layer, and all that must not change."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import vivace
from tests.every_method import make_model, not_quick_on_pytorch
from tests.prefill.setting import GREEDY, LAYERS, PROMPT, written
from tests.serve.conftest import local
from vivace.core.cache import KVCache
from vivace.core.step import Step
from vivace.decode.session import Session
from vivace.engine import Engine, Options
from vivace.errors import ConfigError, UnsupportedError
from vivace.methods.table import METHODS
from vivace.serve.config import ServeConfig

LAZY: dict[str, Any] = {"prefill": "lazy", "keep": "2:0.5,4:0.4", "min_prompt": 1}
LOSSLESS = [name for name, spec in METHODS.items() if spec.lossless and name not in ("auto", "mod")]


def read(engine: Engine, prompt: Sequence[int] = PROMPT, **options: Any) -> Session:
    """A session once a prompt is read."""
    session = Session(engine.model, num_slots=1, capacity=500)
    session.admit(engine.request(list(prompt), Options.of({"method": "plain", **GREEDY, **options})))
    while not session.cache.lengths[0]:
        session.step()
    while session.cache.lengths[0] < len(prompt) - 1:
        session.step()
    return session


def entries(cache: KVCache, layer: int, count: int) -> Tensor:
    return torch.cat(cache.span(layer, 0, 0, count))


# The note's invariants, by number


def test_1_what_keeps_everything_is_a_full_reading(engine: Engine) -> None:
    full = read(engine).cache
    for keep in ("2:1,4:1", "5:1.0"):
        other = read(engine, **LAZY | {"keep": keep}).cache
        for layer in range(LAYERS):
            assert torch.equal(entries(full, layer, 300), entries(other, layer, 300))
    wanted = engine.generate(PROMPT, method="plain", **GREEDY | {"max_new_tokens": 32})[0]
    found = engine.generate(PROMPT, method="plain", **GREEDY | LAZY | {"max_new_tokens": 32, "keep": "2:1,4:1"})[0]
    assert (wanted.token_ids, wanted.logprobs) == (found.token_ids, found.logprobs)


def test_2_3_9_every_layer_computes_what_the_schedule_says(engine: Engine) -> None:
    [result] = engine.generate(PROMPT, method="plain", **GREEDY | LAZY)
    counts = [301, ceil(0.5 * 301), ceil(0.4 * ceil(0.5 * 301))]
    assert result.stats.prompt_kept == [[2, counts[1]], [4, counts[2]]]
    assert result.stats.num_prompt_layer_passes == 2 * sum(count - 1 for count in counts)
    assert result.stats.prefill == "lazy"
    cache = read(engine, **LAZY).cache
    assert cache.pruned[:, 0].tolist() == [0, 0, *[301 - counts[1]] * 2, *[301 - counts[2]] * 2]


def test_4_8_layers_below_the_first_point_are_exact(engine: Engine) -> None:
    """Whatever chunks there are: 301 tokens are two."""
    full, lazy = read(engine).cache, read(engine, **LAZY).cache
    for layer in range(2):
        assert torch.equal(entries(full, layer, 300), entries(lazy, layer, 300))
    for layer in range(2, LAYERS):
        assert not torch.equal(entries(full, layer, 20), entries(lazy, layer, 20))


class Oracle:
    """Reads a prompt and writes an answer layer by layer, with lists of positions and whole matrices."""

    def __init__(self, engine: Engine, points: dict[int, float]) -> None:
        self.model, self.points = engine.model, points
        self.keys: list[dict[int, Tensor]] = [{} for _ in range(engine.model.config.num_layers)]
        self.values: list[dict[int, Tensor]] = [{} for _ in range(engine.model.config.num_layers)]
        self.alive: list[list[int]] = []

    def attend(self, index: int, h: Tensor, positions: list[int]) -> tuple[Tensor, Tensor]:
        """Rows behind a layer, and the weights (H, rows, entries) with which they read."""
        layer, c = self.model.layers[index], self.model.config
        kept: dict[str, Tensor] = {}

        class Kept(KVCache):
            def put(self, layer: int, step: Step, keys: Tensor, values: Tensor) -> None:
                kept["k"], kept["v"] = keys, values

        cache = Kept(self.model.blocks.specs, 1, 512, dtype=torch.float32)
        place = torch.tensor(positions)
        step = Step.packed(cache, [0] * len(positions), place, place)
        q = layer.project(h, step)
        for row, position in enumerate(positions):
            self.keys[index][position] = kept["k"][row]
            self.values[index][position] = kept["v"][row]
        known = sorted(self.keys[index])
        k = torch.stack([self.keys[index][p] for p in known]).repeat_interleave(c.group, 1)
        v = torch.stack([self.values[index][p] for p in known]).repeat_interleave(c.group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * c.scale
        hidden = torch.tensor(known)[None] > place[:, None]
        hidden = hidden.expand(c.num_heads, -1, -1) | self.closed(index, known)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out = layer.output(h, torch.einsum("hqk,khd->qhd", weights, v), step)
        return layer.feed(out, step), weights

    def closed(self, index: int, known: list[int]) -> Tensor:
        """(H, 1, entries) Whether a head of a layer has given an entry up."""
        return torch.zeros((self.model.config.num_heads, 1, len(known)), dtype=torch.bool)

    def read(self, prompt: Sequence[int]) -> Tensor:
        """Logits behind the prompt."""
        positions = list(range(len(prompt)))
        place = torch.tensor(positions)
        h = self.model.embed(torch.tensor(prompt), Step.dense(1, len(prompt)))
        for index in range(self.model.config.num_layers):
            self.alive.append(positions)
            h, weights = self.attend(index, h, positions)
            if index + 1 in self.points:
                scores = [(-float(s), at) for at, s in enumerate(weights[:, -1].mean(0))]
                scores[-1] = (-9.0, len(scores) - 1)
                count = ceil(self.points[index + 1] * len(positions))
                chosen = sorted(at for _, at in sorted(scores)[:count])
                h, positions = h[chosen], [positions[at] for at in chosen]
        del place
        return self.model.head(h[-1:])

    def write(self, token: int, position: int) -> Tensor:
        """Logits behind one more token."""
        step = Step.dense(1, 1)
        h = self.model.embed(torch.tensor([token]), step)
        for index in range(self.model.config.num_layers):
            h, _ = self.attend(index, h, [position])
        return self.model.head(h)


@torch.inference_mode()
def test_5_6_an_oracle_with_whole_matrices_writes_the_same(exact: Engine) -> None:
    oracle = Oracle(exact, {2: 0.5, 4: 0.4})
    logits = oracle.read(PROMPT)
    tokens = []
    for place in range(12):
        tokens.append(int(logits.argmax()))
        logits = oracle.write(tokens[-1], len(PROMPT) + place)
    for method in ("plain", "lookup"):
        [found] = exact.generate(PROMPT, method=method, **GREEDY | LAZY)
        assert list(found.token_ids) == tokens
    cache = read(exact, **LAZY).cache
    for layer in range(LAYERS):
        alive = oracle.alive[layer][:-1]
        wanted = torch.stack([oracle.keys[layer][p] for p in alive])
        own = cache.span(layer, 0, 0, len(alive))[0].transpose(0, 1)
        assert torch.allclose(wanted, own, atol=1e-4), f"layer {layer}"


@settings(max_examples=8, deadline=None)
@given(
    st.dictionaries(st.integers(1, LAYERS - 1), st.floats(0.05, 1), min_size=1, max_size=4),
    st.integers(3, 60),
)
@torch.inference_mode()
def test_5_random_schedules_agree_with_the_oracle(exact: Engine, points: dict[int, float], length: int) -> None:
    """Every entry that nobody may read is NaN before anybody reads."""
    kept = {layer: round(share, 2) for layer, share in points.items()}
    prompt = [1 + (13 * place + length) % 290 for place in range(length)]
    [pool] = exact.model.blocks.pools
    some = [view[..., pool.size : 9 * pool.size, :] for view in pool._views]  # block 0 stays zero
    for view in some:
        view.fill_(torch.nan)
    try:
        oracle = Oracle(exact, kept)
        wanted = int(oracle.read(prompt).argmax())
        keep = ",".join(f"{layer}:{kept[layer]}" for layer in sorted(kept))
        [found] = exact.generate(prompt, method="plain", **GREEDY | LAZY | {"keep": keep, "max_new_tokens": 1})
    finally:
        for view in some:
            view.zero_()
    assert found.token_ids == (wanted,)


def test_10_the_same_prompt_keeps_the_same_tokens(engine: Engine) -> None:
    one, other = (read(engine, **LAZY).cache for _ in range(2))
    for layer in range(LAYERS):
        count = 300 - int(one.pruned[layer, 0])
        assert torch.equal(entries(one, layer, count), entries(other, layer, count))


def test_11_static_is_lazy_with_one_point(engine: Engine) -> None:
    found = [
        engine.generate(PROMPT, method="plain", **GREEDY | LAZY | {"prefill": p, "keep": "4:0.5"})[0]
        for p in ("lazy", "static")
    ]
    assert found[0].token_ids == found[1].token_ids
    assert found[0].logprobs == found[1].logprobs
    assert engine.generate(PROMPT, **GREEDY | {"prefill": "static", "min_prompt": 9})[0].stats.prompt_kept == [[4, 151]]


# What it is for


@not_quick_on_pytorch("dtype")
@pytest.mark.parametrize("method", LOSSLESS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_lossless_method_writes_the_text_of_plain(tmp_path: Path, method: str, dtype: str) -> None:
    engine = vivace.load(make_model(tmp_path, method), dtype=dtype)
    if method.startswith("quantized") and (dtype == "float32" or engine.kernels.name == "torch"):
        pytest.skip("it drafts in native calls, on weights of bfloat16")
    options = GREEDY | {"prefill": "lazy", "keep": "1:0.4", "min_prompt": 1, "max_new_tokens": 40}
    prompt = PROMPT[:90] * 3
    plain, found = (engine.generate(prompt, **options | {"method": name})[0] for name in ("plain", method))
    assert found.token_ids == plain.token_ids
    assert found.logprobs == plain.logprobs
    assert found.stats.prompt_kept == [[1, 108]]


def test_rows_of_a_batch_prune_by_themselves(engine: Engine) -> None:
    """In 3 slots, with prompts of several lengths and ways to read them; one is cancelled on the way."""
    prompts = [PROMPT, PROMPT[5:140], PROMPT[7:290], PROMPT[:20], PROMPT[30:250], PROMPT[9:99]]
    ways: list[dict[str, Any]] = [
        LAZY,
        {},
        LAZY,
        LAZY,
        {**LAZY, "keep": "3:0.3"},
        {**LAZY, "prefill": "random", "keep": None},
    ]
    made = [
        engine.request(p, Options.of({"method": "plain", **GREEDY, **way}))
        for p, way in zip(prompts, ways, strict=True)
    ]
    alone = [engine.generate(p, method="plain", **GREEDY | way)[0] for p, way in zip(prompts, ways, strict=True)]
    session = Session(engine.model, num_slots=3, capacity=500)
    ids = [session.admit(request) for request in made]
    again = session.admit(made[0])
    tokens = written(session, [*ids, again], cancelled=ids[2])
    for number, result in zip(ids, alone, strict=True):
        if number != ids[2]:
            assert tuple(tokens[number]) == result.token_ids
    assert tuple(tokens[again]) == alone[0].token_ids
    assert not session.cache.has_pruned


def test_a_fork_goes_on_alone(engine: Engine) -> None:
    wanted = engine.generate(PROMPT, method="plain", **GREEDY | LAZY | {"max_new_tokens": 30})[0].token_ids
    session = Session(engine.model, num_slots=2, capacity=500)
    first = session.admit(
        engine.request(PROMPT, Options.of({"method": "plain", **GREEDY, **LAZY, "max_new_tokens": 30}))
    )
    tokens: dict[int, list[int]] = {first: []}
    second = None
    while not session.is_idle:
        for emitted in session.step():
            tokens[emitted.request_id] += emitted.tokens
        if second is None and len(tokens[first]) > 3:
            second = session.fork(first)
            tokens[second] = list(tokens[first])
    assert second is not None
    assert tuple(tokens[first]) == tuple(tokens[second]) == wanted


def test_entries_of_int8_are_pruned_too(folder: Path) -> None:
    engine = vivace.load(folder, dtype="bfloat16", kv="int8")
    texts = [engine.generate(PROMPT, **GREEDY | LAZY | {"method": name})[0].token_ids for name in ("plain", "lookup")]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["random", "lexical"])
def test_tokens_that_are_never_read(engine: Engine, name: str) -> None:
    [result] = engine.generate(PROMPT, method="plain", **GREEDY | {"prefill": name, "min_prompt": 1, "keep": "0:0.4"})
    assert result.stats.prompt_kept == [[0, 121]]
    assert result.stats.num_prompt_layer_passes == LAYERS * 120
    again = engine.generate(PROMPT, method="lookup", **GREEDY | {"prefill": name, "min_prompt": 1, "keep": "0:0.4"})[0]
    assert again.token_ids == result.token_ids


def test_short_prompts_are_read_in_full_and_say_so(engine: Engine) -> None:
    [result] = engine.generate(PROMPT, method="plain", prefill="lazy", **GREEDY)
    assert result.token_ids == engine.generate(PROMPT, method="plain", **GREEDY)[0].token_ids
    assert result.stats.prefill == "full"
    assert result.stats.prefill_reason == "the prompt has 301 tokens; prefill lazy begins at 512"
    assert engine.generate([5], method="plain", prefill="lazy", min_prompt=1, **GREEDY)[0].token_ids


def test_pruned_prompts_are_not_shared(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = vivace.load(folder, prefix_cache="16MiB", prompt_cache=tmp_path / "prompts")
    wanted = engine.generate(PROMPT, **GREEDY | LAZY | {"method": "plain"})[0]
    full = engine.generate(PROMPT, **GREEDY | {"method": "plain"})[0]
    again = engine.generate(PROMPT, **GREEDY | LAZY | {"method": "plain"})[0]
    assert [r.stats.num_cached_tokens for r in (wanted, full, again)] == [0, 0, 0]
    assert again.token_ids == wanted.token_ids
    told = [record.getMessage() for record in caplog.records if "prompt cache" in record.getMessage()]
    assert told == ["prefill lazy prunes prompts, which the prompt cache neither keeps nor gives"]


def test_over_http_ids_are_those_of_python(folder: Path) -> None:
    engine = vivace.load(folder)
    wanted = engine.generate(PROMPT, method="plain", **GREEDY | LAZY)[0].token_ids
    body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    with local(engine, ServeConfig(method="plain")) as server:
        ask = server.http()
        reply = ask.post("/v1/completions", json={**body, **LAZY}).json()
        assert tuple(reply["choices"][0]["token_ids"]) == wanted
        kept = [[2, 151], [4, 61]]
        assert reply["metrics"]["prefill"] == {"name": "lazy", "reason": None, "kept": kept, "computed": kept}
        wrong = ask.post("/v1/completions", json={**body, "prefill": "lasy"})
        assert (wrong.status_code, "did you mean 'lazy'" in wrong.text) == (400, True)
    with local(vivace.load(folder), ServeConfig(method="plain", **LAZY)) as server:
        reply = server.http().post("/v1/completions", json=body).json()
        assert tuple(reply["choices"][0]["token_ids"]) == wanted
        reply = server.http().post("/v1/completions", json={**body, "prefill": "full"}).json()
        assert tuple(reply["choices"][0]["token_ids"]) == engine.generate(PROMPT, method="plain", **GREEDY)[0].token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill": "lasy"}, "did you mean 'lazy'"),
        ({"keep": "2:0.5"}, "keep has no effect on prefill full"),
        ({"min_prompt": 9}, "min_prompt has no effect on prefill full"),
        ({"prefill": "lazy", "min_prompt": 0}, "min_prompt must be at least 1"),
        ({"prefill": "lazy", "keep": "2:0"}, "share 0 behind layer 2; it must be in"),
        ({"prefill": "lazy", "keep": "2:1.5"}, "it must be in"),
        ({"prefill": "lazy", "keep": "2:nan"}, "it must be in"),
        ({"prefill": "lazy", "keep": "6:0.5"}, "layer 6; this model can prune behind 1 to 5"),
        ({"prefill": "lazy", "keep": "0:0.5"}, "layer 0; this model can prune behind 1 to 5"),
        ({"prefill": "lazy", "keep": "4:0.5,2:0.5"}, "in rising order"),
        ({"prefill": "lazy", "keep": "2:0.5,2:0.5"}, "in rising order"),
        ({"prefill": "lazy", "keep": "fats"}, "did you mean 'fast'"),
        ({"prefill": "lazy", "keep": ""}, "write LAYER:SHARE"),
        ({"prefill": "static", "keep": "2:0.5,4:0.5"}, "prunes once"),
        ({"prefill": "random", "keep": "2:0.5"}, "layer 2; this way of reading prunes behind layer 0 only"),
        ({"prefill": "lexical", "keep": "balanced"}, "write LAYER:SHARE"),
    ],
)
def test_wrong_settings_are_one_line(exact: Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        exact.generate(PROMPT, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_lossy_method_cannot_ride_along(tmp_path: Path) -> None:
    engine = vivace.load(make_model(tmp_path, "dynamic"))
    with pytest.raises(UnsupportedError, match="method dynamic skips layers of its own and cannot ride along"):
        engine.generate(PROMPT, method="dynamic", prefill="lazy")
