"""Ways of others to leave out tokens of a prompt: each beside an oracle with whole matrices and lists of positions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import vivace
from tests.every_method import make_model
from tests.parity.families import make
from tests.prefill.setting import GREEDY, LAYERS, PROMPT, written
from tests.prefill.test_pruned import LOSSLESS, Oracle, entries, read
from tests.serve.conftest import local
from tests.tiny_checkpoints import make_checkpoint
from vivace.cli.app import run as run_cli
from vivace.core.layers import Linear
from vivace.core.model import Layer
from vivace.core.step import Step
from vivace.decode.session import Session
from vivace.engine import Engine, Options
from vivace.errors import ConfigError, UnsupportedError
from vivace.prefill.rivals.fastkv import WINDOW
from vivace.prefill.rivals.specprefill import LOOKAHEAD
from vivace.recipes.lazy_plan import candidates
from vivace.serve.config import ServeConfig

WAYS: dict[str, dict[str, Any]] = {
    "gemfilter": {"prefill": "gemfilter", "keep": "2:0.4", "min_prompt": 1},
    "fastkv": {"prefill": "fastkv", "keep": "3:0.4:0.2", "min_prompt": 1},
    "specprefill": {"prefill": "specprefill", "keep": "3:0.4", "min_prompt": 1},
}


WAYS_OF_TWO: dict[str, Any] = {**WAYS["specprefill"], "keep": "1:0.3"}
"""For models of few layers."""


@pytest.fixture(scope="module", params=["torch", "auto"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Engine:
    return vivace.load(folder, kernels=request.param, dtype="bfloat16")


def over_neighbours(scores: Tensor, width: int) -> list[float]:
    """Means over neighbours, with zeros beyond the ends, in plain loops."""
    reach = range(-(width // 2), width // 2 + 1)
    values = scores.tolist()
    return [sum(values[at + off] for off in reach if 0 <= at + off < len(values)) / width for at in range(len(values))]


def largest(scores: Sequence[float], count: int, ends: int) -> list[int]:
    """Places of the last ``ends`` scores and the largest others, ties to the earlier."""
    first = max(0, len(scores) - min(ends, count))
    ranked = sorted(range(first), key=lambda at: (-scores[at], at))[: count - (len(scores) - first)]
    return sorted([*ranked, *range(first, len(scores))])


class GemFilterOracle(Oracle):
    """Reads lower layers, picks, forgets everything, and reads what was picked."""

    def read(self, prompt: Sequence[int]) -> Tensor:
        [(stop, share)] = self.points.items()
        c, positions = self.model.config, list(range(len(prompt)))
        h = self.model.embed(torch.tensor(prompt), Step.dense(1, len(prompt)))
        for index in range(stop):
            below = h
            h, _ = self.attend(index, h, positions)
        last = torch.tensor([len(prompt) - 1])
        step = Step.packed(self.model.new_cache(1, len(prompt)), [0], last, last)
        query = self.model.layers[stop - 1].query(below[-1:], step)[0]
        keys = torch.stack([self.keys[stop - 1][p] for p in positions]).repeat_interleave(c.group, 1)
        products = torch.stack([(query[head] * keys[:, head]).sum(-1) for head in range(c.num_heads)]).sum(0)
        chosen = largest(over_neighbours(products, 5), ceil(share * len(prompt)), 1)
        self.keys, self.values = ([{} for _ in range(c.num_layers)] for _ in range(2))
        h = self.model.embed(torch.tensor([prompt[at] for at in chosen]), Step.dense(1, len(chosen)))
        for index in range(c.num_layers):
            self.alive.append(chosen)
            h, _ = self.attend(index, h, chosen)
        return self.model.head(h[-1:])


class FastKVOracle(Oracle):
    """Picks tokens behind one layer, and closes entries head by head once the prompt is read."""

    def __init__(self, engine: Engine, points: dict[int, float], share: float) -> None:
        super().__init__(engine, points)
        self.share = share
        self.given_up: dict[int, list[set[int]]] = {}

    def closed(self, index: int, known: list[int]) -> Tensor:
        c = self.model.config
        heads = self.given_up.get(index, [set()] * c.num_kv_heads)
        return torch.tensor([[[at in heads[head // c.group] for at in known]] for head in range(c.num_heads)])

    def read(self, prompt: Sequence[int]) -> Tensor:
        [(stop, keep)] = self.points.items()
        c, positions = self.model.config, list(range(len(prompt)))
        given_up: dict[int, list[set[int]]] = {}
        h = self.model.embed(torch.tensor(prompt), Step.dense(1, len(prompt)))
        for index in range(c.num_layers):
            self.alive.append(positions)
            h, weights = self.attend(index, h, positions)
            window = weights[:, -WINDOW:].mean(1)
            count = min(len(positions), ceil(self.share * len(prompt)))
            given_up[index] = []
            for head in range(c.num_kv_heads):
                own = window[head * c.group : (head + 1) * c.group].mean(0)
                kept = largest(over_neighbours(own, 7), count, WINDOW)
                given_up[index].append({at for place, at in enumerate(positions) if place not in kept})
            if index + 1 == stop:
                chosen = largest(over_neighbours(window.mean(0), 7), ceil(keep * len(positions)), WINDOW)
                h, positions = h[chosen], [positions[at] for at in chosen]
        self.given_up = given_up  # the answer begins over what was kept
        return self.write(prompt[-1], len(prompt) - 1)


class SpecOracle(Oracle):
    """Lets lower layers guess tokens, and picks the blocks that they read."""

    def __init__(
        self,
        engine: Engine,
        points: dict[int, float],
        over_heads: Callable[[Tensor], Tensor] = lambda weights: weights.amax(0),
    ) -> None:
        super().__init__(engine, points)
        self.over_heads = over_heads

    def read(self, prompt: Sequence[int]) -> Tensor:
        [(stop, share)] = self.points.items()
        c, length = self.model.config, len(prompt)
        positions, tokens = list(range(length)), list(prompt)
        h = self.model.embed(torch.tensor(tokens), Step.dense(1, length))
        reads = [torch.zeros(length)]
        for index in range(stop):
            self.alive.append(positions)
            h, weights = self.attend(index, h, positions)
            reads[-1] = torch.maximum(reads[-1], self.over_heads(weights[:, -1]))
        residuals, last = h, h[-1:]
        for place in range(length, length + LOOKAHEAD):
            tokens.append(int(self.model.head(last).argmax()))
            last = self.model.embed(torch.tensor(tokens[-1:]), Step.dense(1, 1))
            reads.append(torch.zeros(length))
            for index in range(stop):
                last, weights = self.attend(index, last, [place])
                reads[-1] = torch.maximum(reads[-1], self.over_heads(weights[:, -1, :length]))
        for index in range(stop):
            for place in range(length, length + LOOKAHEAD):
                del self.keys[index][place], self.values[index][place]
        mean = torch.stack(reads).mean(0)
        count = ceil(share * length)
        blocks = [range(at, min(at + 32, length - 32)) for at in range(4, length - 32, 32)]
        kept = [*range(4), *range(length - 32, length)]
        for block in sorted(blocks, key=lambda own: -float(mean[list(own)].sum())):
            kept += list(block)[: count - len(kept)]
        chosen = sorted(kept)
        h = residuals[chosen]
        for index in range(stop, c.num_layers):
            self.alive.append(chosen)
            h, _ = self.attend(index, h, chosen)
        return self.model.head(h[-1:])


def oracle_of(name: str, engine: Engine) -> Oracle:
    if name == "gemfilter":
        return GemFilterOracle(engine, {2: 0.4})
    return FastKVOracle(engine, {3: 0.4}, 0.2) if name == "fastkv" else SpecOracle(engine, {3: 0.4})


@torch.inference_mode()
@pytest.mark.parametrize("name", WAYS)
def test_an_oracle_with_whole_matrices_writes_the_same(exact: Engine, name: str) -> None:
    oracle = oracle_of(name, exact)
    logits = oracle.read(PROMPT)
    tokens, chances = [], []
    for place in range(12):
        tokens.append(int(logits.argmax()))
        chances.append(float(logits.log_softmax(-1).max()))
        logits = oracle.write(tokens[-1], len(PROMPT) + place)
    [found] = exact.generate(PROMPT, method="plain", **GREEDY | WAYS[name])
    assert list(found.token_ids) == tokens
    assert found.logprobs == pytest.approx(chances, abs=1e-4)
    if name != "fastkv":
        cache = read(exact, **WAYS[name]).cache
        for layer in range(LAYERS):
            alive = oracle.alive[layer][:-1]
            wanted = torch.stack([oracle.keys[layer][p] for p in alive])
            own = cache.span(layer, 0, 0, len(alive))[0].transpose(0, 1)
            assert torch.allclose(wanted, own, atol=1e-4), f"layer {layer}"


@torch.inference_mode()
def test_the_largest_of_the_heads_counts_and_not_their_mean(folder: Path) -> None:
    """Each head reads few tokens, as trained ones do: heads of drawn weights read all, and their mean is much alike."""
    engine = vivace.load(folder, kernels="torch", dtype="float32")
    for layer in engine.model.layers[:3]:
        assert isinstance(layer, Layer)
        assert isinstance(layer.qkv, Linear)
        layer.qkv.weight[: engine.model.config.num_heads * engine.model.config.head_dim] *= 100
    oracle = SpecOracle(engine, {3: 0.4})
    oracle.read(PROMPT)
    mean = SpecOracle(engine, {3: 0.4}, over_heads=lambda weights: weights.mean(0))
    mean.read(PROMPT)
    assert oracle.alive[-1] != mean.alive[-1]
    cache = read(engine, **WAYS["specprefill"]).cache
    wanted = torch.stack([oracle.keys[LAYERS - 1][p] for p in oracle.alive[-1][:-1]])
    own = cache.span(LAYERS - 1, 0, 0, len(wanted))[0].transpose(0, 1)
    assert torch.allclose(wanted, own, atol=1e-2)  # such heads magnify rounding; another token's key is units away


def test_guesses_end_where_the_positions_of_a_model_do(tmp_path: Path) -> None:
    """A model with learned positions has no more of them than its context."""
    make("gpt2").save_pretrained(tmp_path)
    engine = vivace.load(tmp_path, kernels="torch")
    most = engine.model.config.max_positions
    for length in (most - 1, most - LOOKAHEAD - 1):
        [found] = engine.generate([[5] * length], max_new_tokens=1, ignore_eos=True, **WAYS_OF_TWO)
        assert len(found.token_ids) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", WAYS)
@torch.inference_mode()
def test_prompts_of_any_length_agree_with_the_oracle(exact: Engine, name: str, seed: int) -> None:
    """Every entry that nobody may read is NaN before anybody reads."""
    draws = torch.Generator().manual_seed(seed)
    prompt = torch.randint(1, 290, (301 - 37 * seed,), generator=draws).tolist()
    [pool] = exact.model.blocks.pools
    some = [view[..., pool.size : 9 * pool.size, :] for view in pool._views]  # block 0 stays zero
    for view in some:
        view.fill_(torch.nan)
    try:
        wanted = int(oracle_of(name, exact).read(prompt).argmax())
        [found] = exact.generate(prompt, method="plain", **GREEDY | WAYS[name] | {"max_new_tokens": 3})
    finally:
        for view in some:
            view.zero_()
    assert found.token_ids[0] == wanted
    assert all(chance == chance for chance in found.logprobs or [float("nan")])


@pytest.mark.parametrize("name", WAYS)
def test_what_keeps_everything_is_a_full_reading(engine: Engine, name: str) -> None:
    keep = "3:1:1" if name == "fastkv" else "3:1"
    full, other = read(engine).cache, read(engine, **WAYS[name] | {"keep": keep}).cache
    for layer in range(LAYERS):
        assert torch.equal(entries(full, layer, 300), entries(other, layer, 300))
    wanted = engine.generate(PROMPT, method="plain", **GREEDY)[0]
    found = engine.generate(PROMPT, method="plain", **GREEDY | WAYS[name] | {"keep": keep})[0]
    assert (wanted.token_ids, wanted.logprobs) == (found.token_ids, found.logprobs)


def test_layers_compute_what_the_schedule_says(engine: Engine) -> None:
    count = ceil(0.4 * 301)
    passes = {"gemfilter": 2 * 300 + LAYERS * (count - 1), "fastkv": 3 * 300 + 3 * (count - 1)}
    passes["specprefill"] = passes["fastkv"]
    lacks = {"gemfilter": [301 - count] * 6, "fastkv": [301 - 61] * 6, "specprefill": [0] * 3 + [301 - count] * 3}
    for name, way in WAYS.items():
        [result] = engine.generate(PROMPT, method="plain", **GREEDY | way)
        assert result.stats.num_prompt_layer_passes == passes[name]
        assert result.stats.prompt_kept == [[2 if name == "gemfilter" else 3, count]]
        assert read(engine, **way).cache.pruned[:, 0].tolist() == lacks[name]


def test_rows_of_a_batch_go_by_themselves(engine: Engine) -> None:
    """In 3 slots, with prompts of several lengths, a cancelled one, and one that is read in full beside them."""
    prompts = [PROMPT, PROMPT[5:140], PROMPT[7:290], PROMPT[:20], PROMPT[30:250], PROMPT[:3]]
    ways: list[dict[str, Any]] = [*WAYS.values(), {}, WAYS["fastkv"], WAYS["fastkv"]]
    pairs = list(zip(prompts, ways, strict=True))
    alone = [engine.generate(p, method="plain", **GREEDY | way)[0].token_ids for p, way in pairs]
    session = Session(engine.model, num_slots=3, capacity=500)
    made = [engine.request(p, Options.of({"method": "plain", **GREEDY, **way})) for p, way in pairs]
    ids = [session.admit(request) for request in (*made, *made)]
    tokens = written(session, ids, cancelled=ids[2])
    for place, number in enumerate(ids):
        if place != 2:
            assert tuple(tokens[number]) == alone[place % len(made)], f"request {place}"
    assert not session.cache.has_pruned


@pytest.mark.parametrize("method", ["lookup", pytest.param("eagle", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WAYS)
def test_drafts_write_the_text_of_plain(tmp_path: Path, method: str, name: str) -> None:
    engine = vivace.load(make_model(tmp_path, method), dtype="bfloat16")
    options = GREEDY | WAYS[name] | {"keep": "1:0.4:0.3" if name == "fastkv" else "1:0.4", "max_new_tokens": 40}
    prompt = PROMPT[:90] * 3
    plain, found = (engine.generate(prompt, **options | {"method": each})[0] for each in ("plain", method))
    assert (found.token_ids, found.logprobs) == (plain.token_ids, plain.logprobs)


@pytest.mark.slow
@pytest.mark.parametrize("method", LOSSLESS)
@pytest.mark.parametrize("name", WAYS)
def test_every_lossless_method_writes_the_text_of_plain(tmp_path: Path, method: str, name: str) -> None:
    if method == "eagle":
        pytest.skip("has a test of its own")
    engine = vivace.load(make_model(tmp_path, method), dtype="bfloat16")
    if method.startswith("quantized") and engine.kernels.name == "torch":
        pytest.skip("it drafts in native calls")
    options = GREEDY | WAYS[name] | {"keep": "1:0.4", "max_new_tokens": 40}
    plain, found = (engine.generate(PROMPT[:90] * 3, **options | {"method": each})[0] for each in ("plain", method))
    assert (found.token_ids, found.logprobs) == (plain.token_ids, plain.logprobs)


def test_entries_of_int8_are_selected_too(folder: Path) -> None:
    engine = vivace.load(folder, dtype="bfloat16", kv="int8")
    for way in WAYS.values():
        texts = [
            engine.generate(PROMPT, **GREEDY | way | {"method": name})[0].token_ids for name in ("plain", "lookup")
        ]
        assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("name", "keep", "message"),
    [
        ("gemfilter", "2:0.5,4:0.5", "prunes once"),
        ("gemfilter", "2:0.5:heads", "has one score, leave it out"),
        ("gemfilter", "2:0", "it must be in"),
        ("fastkv", "2:0.5:heads", "write LAYER:SHARE or LAYER:SHARE:ENTRIES"),
        ("fastkv", "2:0.5:0", "it must be in"),
        ("fastkv", "2:0.5:1.5", "it must be in"),
        ("fastkv", "6:0.5", "this model can prune behind 1 to 5"),
        ("specprefill", "x%:0.5", "write LAYER:SHARE"),
        ("specprefill", "balanced", "write LAYER:SHARE"),
    ],
)
def test_wrong_schedules_are_one_line(exact: Engine, name: str, keep: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        exact.generate(PROMPT, prefill=name, keep=keep)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", WAYS)
def test_they_are_refused_by_name(tmp_path: Path, exact: Engine, name: str) -> None:
    with pytest.raises(ConfigError, match=f"decode_keep has no effect on prefill {name}"):
        exact.generate(PROMPT, prefill=name, decode_keep="same")
    engine = vivace.load(make_model(tmp_path, "dynamic"))
    with pytest.raises(UnsupportedError, match="method dynamic skips layers of its own"):
        engine.generate(PROMPT, method="dynamic", prefill=name)


def test_over_http_ids_are_those_of_python(folder: Path) -> None:
    engine = vivace.load(folder)
    body = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    with local(engine, ServeConfig(method="plain")) as server:
        wrong = {"prefill": "gemfiltr", "keep": "9:0.5", "min_prompt": 0, "decode_keep": "same"}
        for field, value in wrong.items():
            way = {} if field == "prefill" else {"prefill": "gemfilter"}
            error = server.http().post("/v1/completions", json={**body, **way, field: value}).json()["error"]
            assert error["param"] == field, error
        for way in WAYS.values():
            reply = server.http().post("/v1/completions", json={**body, **way}).json()
            wanted = engine.generate(PROMPT, method="plain", **GREEDY | way)[0].token_ids
            assert tuple(reply["choices"][0]["token_ids"]) == wanted


def test_each_is_tuned_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "model", context=2048, layers=4)
    rows = [" ".join(f"the {word} of {at + word} is {7 * word % 50}." for word in range(60)) for at in range(4)]
    data = tmp_path / "long.jsonl"
    lines = [json.dumps({"prompt": row, "reference": "7"}) for row in rows]
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    line = ["tune", "gemfilter", "--floor", "0.01", "--model", str(folder), "--prompts", str(data)]
    assert run_cli([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["prefill"], len(found["trials"])) == ("gemfilter", 16)
    assert {trial["keep"] for trial in found["trials"]} >= {"30%:0.5", "60%:0.2"}
    assert not (folder / "adapters").exists()
    engine = vivace.load(folder)
    assert len(candidates(engine, "fastkv")) == 48
    assert candidates(engine, "lexical") == ["0:0.5", "0:0.4", "0:0.3", "0:0.2"]
