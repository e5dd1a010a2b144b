"""From prompt files to a checkpoint that plain transformers reads, in stages, and on from a base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.train.tiny import PAIRS
from vivace.checkpoint.load import load_decoder
from vivace.checkpoint.tokenizer import load_tokenizer
from vivace.configuration import build
from vivace.core.step import Step
from vivace.errors import ConfigError, MismatchError
from vivace.prompts import Prompt
from vivace.recipes.decoder import DecoderRecipe, Stage
from vivace.recipes.own_tokenizer import own_tokenizer
from vivace.recipes.reading import read_recipe
from vivace.recipes.scratch import ShapeConfig
from vivace.recipes.whole_trainer import train_whole
from vivace.train.config import LoopConfig
from vivace.train.data import Rows, pairs_of
from vivace.train.report import Lines
from vivace.train.variation import VariationConfig

SHAPE = ShapeConfig(
    num_layers=3, width=32, ffn_width=48, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=400, max_positions=64
)
LOOP = LoopConfig(steps=8, warmup_steps=2, evaluate_steps=4, report_steps=4)
RECIPE = DecoderRecipe(
    kind="decoder",
    stages=(Stage(LOOP, depth=1), Stage(LOOP, depth=3, places=(1,))),
    shape=SHAPE,
    variation=VariationConfig(values=(r"(?:name|area)\[([^\]]+)\]",), invent=0.5),
    exercises=0.3,
    tokens_per_batch=256,
    longest=64,
    held_back=3,
)
PROMPTS = [Prompt(prompt, (answer,)) for prompt, answer in PAIRS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    out = tmp_path_factory.mktemp("base") / "model"
    said: list[str] = []
    train_whole(RECIPE, PROMPTS, out, Lines(said.append))
    return out, said


def test_transformers_reads_what_was_trained(trained: tuple[Path, list[str]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, said = trained
    theirs = AutoModelForCausalLM.from_pretrained(out).eval()
    assert theirs.dtype == torch.bfloat16
    assert theirs.config.num_hidden_layers == 3
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PAIRS[0][0]}], tokenize=False, add_generation_prompt=True
    )
    ids = load_tokenizer(out).encode_prompt(PAIRS[0][0])
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids
    model = load_decoder(out)
    step = Step.dense(1, len(ids))
    with torch.no_grad():
        ours = model.head(model.run(model.embed(torch.tensor(ids), step), step))
        reference = theirs(torch.tensor([ids])).logits[0].float()
    torch.testing.assert_close(ours, reference, rtol=0.05, atol=0.05)
    assert theirs.generation_config.eos_token_id == 0
    assert any(line.startswith("memory: about") for line in said)
    assert sum("layers" in line for line in said) == 2


def test_a_finished_run_is_not_trained_again(trained: tuple[Path, list[str]]) -> None:
    out, _ = trained
    before = (out / "model.safetensors").read_bytes()
    said: list[str] = []
    train_whole(RECIPE, PROMPTS, out, Lines(said.append))
    assert (out / "model.safetensors").read_bytes() == before
    assert not any("tokens/s" in line for line in said)


def test_a_base_is_trained_on_and_stays_as_it_was(trained: tuple[Path, list[str]], tmp_path: Path) -> None:
    base, _ = trained
    before = (base / "model.safetensors").read_bytes()
    recipe = replace(RECIPE, shape=None, stages=(Stage(LOOP),), exercises=0.0)
    outcome = train_whole(recipe, PROMPTS, tmp_path / "tuned", Lines(lambda line: None), base=base)
    assert outcome.progress.step == 8
    assert (base / "model.safetensors").read_bytes() == before
    tuned = load_decoder(tmp_path / "tuned")
    assert not torch.equal(tuned.embedding, load_decoder(base).embedding)
    assert load_tokenizer(tmp_path / "tuned").encode("Fen") == load_tokenizer(base).encode("Fen")


def test_what_cannot_be_trained_is_refused_before_it_starts(tmp_path: Path) -> None:
    quiet = Lines(lambda line: None)
    with pytest.raises(ConfigError, match="one of the two"):
        train_whole(RECIPE, PROMPTS, tmp_path, quiet, base=tmp_path)
    with pytest.raises(ConfigError, match="held_back"):
        train_whole(replace(RECIPE, held_back=500), PROMPTS, tmp_path, quiet)
    with pytest.raises(ConfigError, match="positions"):
        replace(RECIPE, longest=65)
    with pytest.raises(ConfigError, match="grow"):
        replace(RECIPE, stages=(Stage(LOOP, depth=2),))
    with pytest.raises(ConfigError, match="keeps its depth"):
        replace(RECIPE, shape=None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("places", [(), (0, 1), (3,), (-1,)])
def test_a_stage_that_adds_layers_says_where_the_others_go(places: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"stage 2 has 3 layers after 1; its stages\.places must be 1 rising"):
        replace(RECIPE, stages=(Stage(LOOP, depth=1), Stage(LOOP, depth=3, places=places)))


def test_a_stage_of_the_same_depth_needs_no_places_and_takes_only_its_own() -> None:
    replace(RECIPE, stages=(Stage(LOOP), Stage(LOOP, places=(0, 1, 2)), Stage(LOOP)))
    with pytest.raises(ConfigError, match="stage 1 has 3 layers after 3"):
        replace(RECIPE, stages=(Stage(LOOP, places=(0,)),))
    with pytest.raises(ConfigError, match=r"leave out stages\.depth and stages\.places"):
        replace(RECIPE, shape=None, stages=(Stage(LOOP, places=(0, 1, 2)),))


def test_a_stage_alone_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"stages\.depth must be at least 1, found 0"):
        Stage(LOOP, depth=0)
    with pytest.raises(ConfigError, match=r"stages\.invent is a share between 0 and 1, found 1\.5"):
        Stage(LOOP, invent=1.5)


def test_the_recipe_that_ships_describes_the_model_that_ships() -> None:
    recipe = build(DecoderRecipe, read_recipe("base"))
    assert recipe.shape is not None
    assert (recipe.shape.num_layers, recipe.shape.width, recipe.shape.vocab_size) == (24, 256, 4096)
    assert recipe.stages[-1].depth == 24


def test_the_recipe_for_fine_tuning_starts_from_a_base() -> None:
    recipe = build(DecoderRecipe, read_recipe("finetune"))
    assert recipe.shape is None
    assert len(recipe.stages) == 1


def test_a_share_of_a_task_is_drawn_each_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[tuple[str, str]]] = []
    plain = Rows.encode

    def spy(rows: Rows, pairs: list[tuple[str, str]]) -> object:
        drawn.append(list(pairs))
        return plain(rows, pairs)

    monkeypatch.setattr(Rows, "encode", spy)
    prompts = [replace(prompt, task="one" if index % 2 else "two") for index, prompt in enumerate(PROMPTS)]
    stage = Stage(LOOP, invent=0.0, shares={"one": 0.0})
    train_whole(replace(RECIPE, stages=(stage,), exercises=0.0), prompts, tmp_path, Lines(lambda line: None))
    of_task = {prompt.request: prompt.task for prompt in prompts}
    epochs = drawn[2:]  # behind all rows and those held back
    assert epochs
    assert all({of_task[asked] for asked, _ in epoch} == {"two"} for epoch in epochs)
    with pytest.raises(ConfigError, match="no rows"):
        train_whole(replace(RECIPE, stages=(stage,)), PROMPTS, tmp_path / "b", Lines(lambda line: None))
    with pytest.raises(ConfigError, match="between 0 and 1"):
        Stage(LOOP, shares={"one": 2.0})


def test_a_tokenizer_of_other_rows_is_learnt_anew_before_the_first_step_and_refused_behind_it(tmp_path: Path) -> None:
    quiet, others = Lines(lambda line: None), [replace(prompt, references=("quite another",)) for prompt in PROMPTS]
    pairs, other_pairs = pairs_of(PROMPTS), pairs_of(others)
    config = SHAPE.hf_config()
    folder = own_tokenizer(tmp_path / "run", pairs, config, 64)
    first = (folder / "tokenizer.json").read_bytes()
    assert own_tokenizer(tmp_path / "run", pairs, config, 64) == folder
    assert (folder / "tokenizer.json").read_bytes() == first
    own_tokenizer(tmp_path / "run", other_pairs, config, 64)
    assert (folder / "tokenizer.json").read_bytes() != first
    train_whole(RECIPE, others, tmp_path, quiet)
    assert load_tokenizer(tmp_path).encode("quite another") == load_tokenizer(folder).encode("quite another")
    with pytest.raises(MismatchError, match="belongs to a run with another recipe or other data"):
        train_whole(RECIPE, PROMPTS, tmp_path, quiet)
