"""``vivace train lora``: a folder of PEFT comes out, killed runs go on, and one LoRA may begin with another."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import vivace
from tests.adapters.loras import make_lora
from tests.tiny_checkpoints import make_adapter, make_checkpoint
from vivace.adapters.lora import table_of
from vivace.adapters.training import LoraObjective, LoraWeights
from vivace.checkpoint.adapters import base_hash
from vivace.checkpoint.peft import load_lora
from vivace.core.low_rank import site_shapes
from vivace.engine import Engine
from vivace.errors import ConfigError, MismatchError, NotFoundError
from vivace.prompts import Prompt
from vivace.recipes.frozen import FrozenRecipe
from vivace.recipes.kinds import recipe_named, recipe_of
from vivace.recipes.lora import LoraRecipe
from vivace.recipes.over_lora import check_over_lora, wear
from vivace.recipes.trainer import train_beside
from vivace.train.config import LoopConfig
from vivace.train.optim import OptimiserConfig
from vivace.train.report import Lines

WORDS = [Prompt(f"{a}{b}{a}", (f"{b}{a}{b}",)) for a in "abcdefgh" for b in "klmnopqr"]
RECIPE = LoraRecipe(
    kind="lora",
    loop=LoopConfig(steps=30, warmup_steps=2, report_steps=10, evaluate_steps=10),
    optimiser=OptimiserConfig(adamw_rate=0.02),
    rank=4,
    tokens_per_batch=256,
    held_back=8,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"))


def train(checkpoint: Path, out: Path, recipe: LoraRecipe = RECIPE) -> list[str]:
    notes: list[str] = []
    assert train_beside(recipe, vivace.load(checkpoint, kernels="torch"), WORDS, out, Lines(notes.append)) == []
    return notes


def stored(folder: Path) -> dict[str, Tensor]:
    """The factors in a folder, in memory."""
    return {name: value.clone() for name, value in load_file(folder / "adapter_model.safetensors").items()}


def same(some: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return set(some) == set(others) and all(torch.equal(value, others[name]) for name, value in some.items())


def loss_of(engine: Engine, adapter: str | None) -> float:
    """Mean -log p of the answers."""
    total, count = 0.0, 0
    for row in WORDS[:16]:
        asked = engine.tokenizer.encode_prompt(str(row.request))
        answer = [*engine.tokenizer.encode(row.references[0], special=False), engine.tokenizer.eos_ids[0]]
        logits = engine.logits([[*asked, *answer]], adapter=adapter)[0].log_softmax(-1)
        total -= sum(float(logits[len(asked) - 1 + place, token]) for place, token in enumerate(answer))
        count += len(answer)
    return total / count


def test_what_was_learnt_is_there_when_it_is_worn(checkpoint: Path, tmp_path: Path) -> None:
    notes = train(checkpoint, tmp_path / "words", replace(RECIPE, alpha=8.0))
    assert any("weights of a LoRA" in note for note in notes)
    engine = vivace.load(checkpoint, adapters={"words": tmp_path / "words"})
    assert loss_of(engine, "words") < 0.7 * loss_of(engine, None)
    config = json.loads((tmp_path / "words" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8.0, "LORA")
    assert len(config["target_modules"]) == 7
    tensors = load_file(tmp_path / "words" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 7


def test_a_finished_run_is_not_trained_again(checkpoint: Path, tmp_path: Path) -> None:
    train(checkpoint, tmp_path / "words")
    first = stored(tmp_path / "words")
    assert any("resumed after step 30" in note for note in train(checkpoint, tmp_path / "words"))
    assert same(stored(tmp_path / "words"), first)
    with pytest.raises(MismatchError):
        train(checkpoint, tmp_path / "words", replace(RECIPE, rank=8))


def test_a_run_that_is_cut_goes_on_to_the_same_bits(checkpoint: Path, tmp_path: Path) -> None:
    whole = replace(RECIPE, loop=replace(RECIPE.loop, snapshot_s=0.0))
    train(checkpoint, tmp_path / "whole", whole)

    class Stop(Exception):
        pass

    def note(text: str) -> None:
        if "step 20" in text or " 20 " in f" {text} ":
            raise Stop

    engine = vivace.load(checkpoint, kernels="torch")
    with pytest.raises(Stop):
        train_beside(whole, engine, WORDS, tmp_path / "cut", Lines(note))
    assert any("resumed after step" in note for note in train(checkpoint, tmp_path / "cut", whole))
    assert same(stored(tmp_path / "cut"), stored(tmp_path / "whole"))


def test_targets_and_layers(checkpoint: Path, tmp_path: Path) -> None:
    train(checkpoint, tmp_path / "few", replace(RECIPE, targets=("q", "v"), layers=(1,)))
    engine = vivace.load(checkpoint)
    found = load_lora(tmp_path / "few", table_of(checkpoint, engine.model), base_hash(checkpoint))
    assert set(found.factors) == {(1, "q"), (1, "v")}
    assert found.base == base_hash(checkpoint)


def test_one_begins_with_another(checkpoint: Path, tmp_path: Path) -> None:
    """Before the first step it is that LoRA; its rank and matrices are taken over."""
    first = make_lora(tmp_path / "recovery", checkpoint, rank=3, size=0.05)
    recipe = LoraRecipe(**{**vars(RECIPE), "rank": None, "init": str(first)})
    train(checkpoint, tmp_path / "words", recipe)
    config = json.loads((tmp_path / "words" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["r"] == 3
    model = vivace.load(checkpoint, kernels="torch").model
    read = load_lora(first, table_of(checkpoint, model)).factors
    weights = LoraWeights({site: (d.shape[1], len(d), len(u)) for site, (d, u) in read.items()}, scale=0.5)
    weights.begin_with(read)
    deltas = weights.deltas(torch.zeros(1, dtype=torch.int64))
    for site, (down, up) in read.items():
        torch.testing.assert_close(deltas.up[site][0] @ deltas.down[site][0], up @ down)


def test_only_factors_learn(checkpoint: Path) -> None:
    """The base has no gradients and no group; a LoRA that was not trained adds nothing."""
    engine = vivace.load(checkpoint, kernels="torch")
    weights = LoraWeights(site_shapes(engine.model.config, range(2), {"q": 2, "down": 2}))
    objective = LoraObjective(engine.model, weights)
    [group] = objective.groups()
    assert {id(p) for p in group["params"]} == {id(p) for p in weights.parameters()}  # type: ignore[attr-defined]
    assert not any(p.requires_grad for p in engine.model.parameters())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"rank": 0}, "rank must be at least 1, found 0"),
        ({"alpha": 0.0}, "alpha must be above 0"),
        ({"targets": ["q", "gat"]}, "targets has 'gat'; did you mean 'gate'"),
        ({"targets": []}, "targets is empty"),
        ({"ranks": 4}, "rank"),
        ({"seed": 10**23}, "seed must be between 0 and"),
    ],
)
def test_recipes_that_cannot_be(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        recipe_of(recipe_named("lora") | values)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: {"rank": 10**9}, "rank 1000000000 is beyond the widest side of this model's matrices"),
        (lambda folder: {"layers": (2,)}, "layers has 2; this model's are 0 to 1"),
        (lambda folder: {"init": str(folder)}, "rank is 4, and .* has 3"),
        (lambda folder: {"init": str(folder), "rank": None, "targets": ("q",)}, "targets, layers and alpha are those"),
    ],
)
def test_recipes_that_do_not_fit(
    checkpoint: Path, tmp_path: Path, change: Callable[[Path], dict[str, Any]], says: str
) -> None:
    first = make_lora(tmp_path / "recovery", checkpoint, rank=3)
    with pytest.raises(ConfigError, match=says):
        train(checkpoint, tmp_path / "x", LoraRecipe(**{**vars(RECIPE), **change(first)}))


def test_drafts_are_trained_over_a_lora_and_taken_with_it(checkpoint: Path, tmp_path: Path) -> None:
    """The objective sees the adapted model; requests that wear the LoRA, and no others, are drafted for with them."""
    lora = make_lora(tmp_path / "sql", checkpoint, rank=3, size=0.05)
    engine = vivace.load(checkpoint, kernels="torch", dtype="float32")
    tokens = [[1, 2, 3, 4, 5, 6, 7, 8]]
    plain = engine.logits(tokens)
    adapted = vivace.load(checkpoint, kernels="torch", dtype="float32", adapters={"sql": lora}).logits(
        tokens, adapter="sql"
    )
    wear(engine, lora)
    assert torch.allclose(engine.logits(tokens), adapted, atol=1e-4)
    assert not torch.allclose(engine.logits(tokens), plain, atol=1e-2)
    make_adapter(lora / "drafting" / "multirate", checkpoint)
    opened = vivace.load(
        checkpoint, dtype="bfloat16", adapters={"sql": lora, "other": make_lora(tmp_path / "o", checkpoint)}
    )
    assert opened.methods_of("other") is opened.methods_of(None) is opened.methods
    assert "multirate" in opened.methods_of("sql").runnable()
    assert "multirate" not in opened.methods.runnable()
    settings = {"max_new_tokens": 12, "ignore_eos": True, "adapter": "sql"}
    [drafted] = opened.generate("abc", method="multirate", **settings)
    [want] = opened.generate("abc", method="plain", **settings)
    assert drafted.token_ids == want.token_ids
    assert drafted.stats.num_draft_tokens > 0
    assert opened.methods.remembers
    assert opened.methods_of("sql").remembers
    opened.adapters.remove("other")
    make_adapter(tmp_path / "o" / "drafting" / "multirate", checkpoint)
    opened.adapters.add("other", tmp_path / "o")
    assert "multirate" in opened.methods_of("other").runnable()


def test_what_cannot_be_trained_over_a_lora_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    lora, found = make_lora(tmp_path / "sql", checkpoint), recipe_of(recipe_named("multirate"))
    check_over_lora(found, lora, has_data=True)
    with pytest.raises(ConfigError, match="over a LoRA weights learn from --data"):
        check_over_lora(found, lora, has_data=False)
    with pytest.raises(ConfigError, match="the prompts that own_tokens asks for"):
        check_over_lora(replace(found, own_tokens=100), lora, has_data=True)
    with pytest.raises(ConfigError, match="a method that drafts"):
        check_over_lora(recipe_of(recipe_named("lora")), lora, has_data=True)
    with pytest.raises(NotFoundError, match="there is no LoRA"):
        check_over_lora(found, tmp_path, has_data=True)


def test_drafts_over_one_lora_are_not_gone_on_with_over_another(checkpoint: Path, tmp_path: Path) -> None:
    words = [Prompt(f"{a}{b}", (f"{b}{a}",)) for a in "abcdefgh" for b in "klmnopqr"]

    one, other = (make_lora(tmp_path / f"{seed}", checkpoint, rank=3, size=0.05, seed=seed) for seed in (1, 2))

    def train_over(lora: Path) -> None:
        engine = vivace.load(checkpoint, kernels="torch")
        over = wear(engine, lora)
        recipe = recipe_of({**recipe_named("medusa"), "loop": {"steps": 4, "warmup_steps": 1}, "held_back": 8})
        assert isinstance(recipe, FrozenRecipe)
        train_beside(recipe, engine, words, tmp_path / "out", Lines(lambda _: None), over=over, is_timed=False)

    train_over(one)
    train_over(one)
    with pytest.raises(MismatchError, match="another recipe, base or data"):
        train_over(other)


def test_drafts_over_a_lora_learn_from_what_the_adapted_model_answers(checkpoint: Path, tmp_path: Path) -> None:
    words = [Prompt(f"{a}{b}", ()) for a in "abcdefgh" for b in "klmnopqr"]
    lora, notes = make_lora(tmp_path / "sql", checkpoint, size=0.3), list[str]()
    base = ending_soon(shutil.copytree(checkpoint, tmp_path / "base"), lora)

    def train_over(place: Path | None) -> None:
        engine = vivace.load(base, kernels="torch")
        over = None if place is None else wear(engine, place)
        recipe = recipe_of(
            {**recipe_named("medusa"), "loop": {"steps": 2, "warmup_steps": 1}, "held_back": 4, "regenerate": 48}
        )
        assert isinstance(recipe, FrozenRecipe)
        train_beside(recipe, engine, words, tmp_path / "out", Lines(notes.append), over=over, is_timed=False)

    train_over(lora)
    engine = vivace.load(base, adapters={"sql": lora})
    rows = [json.loads(line) for line in (tmp_path / "out" / "run" / "regenerated.jsonl").read_text().splitlines()]
    assert len(rows) == 48
    asked = [row["prompt"] for row in rows]
    settings: dict[str, Any] = {"method": "plain", "do_sample": False, "max_new_tokens": 96}
    adapted, plain = (
        [result.text if result.finish_reason == "stop" else "" for result in results]
        for results in (engine.generate(asked, adapter=name, **settings) for name in ("sql", None))
    )
    assert [row["reference"] for row in rows] == adapted
    assert sum(map(bool, adapted)) > 8
    assert adapted != plain
    train_over(lora)
    with pytest.raises(MismatchError, match="answers of another model"):
        train_over(None)


def ending_soon(base: Path, lora: Path) -> Path:
    """Let a token that answers with a LoRA often have end them."""
    engine = vivace.load(base, adapters={"sql": lora})
    found = engine.generate(["ak", "bl", "cm", "dn"], adapter="sql", max_new_tokens=40, do_sample=False)
    [(often, _)] = Counter(token for result in found for token in result.token_ids[8:]).most_common(1)
    settings = base / "generation_config.json"
    written = json.loads(settings.read_text()) if settings.is_file() else {}
    settings.write_text(json.dumps(written | {"eos_token_id": often}))
    return base
