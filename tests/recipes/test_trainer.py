"""Recipe in, working adapter out; killed runs go on; wrong bases are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vivace
from tests.parity.families import make
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import load_adapter
from vivace.checkpoint.draft_vocabulary import has_vocabulary
from vivace.decode.shallow import DraftPlan
from vivace.errors import ConfigError, MismatchError, NotFoundError
from vivace.methods.dynamic.drafter import DynamicConfig
from vivace.methods.dynamic.gates import GateConfig, GatesConfig
from vivace.methods.dynamic.objective import RouterTraining
from vivace.methods.multirate.config import MultirateConfig
from vivace.methods.multistream.config import MultistreamConfig, StreamPlan
from vivace.methods.multistream.shared import SharedObjective
from vivace.prompts import Prompt
from vivace.recipes.dynamic import DynamicRecipe
from vivace.recipes.frozen import FrozenRecipe, TrainContext
from vivace.recipes.kinds import recipe_named, recipe_of
from vivace.recipes.multirate import MultirateRecipe
from vivace.recipes.regenerate import regenerated
from vivace.recipes.shared import SharedRecipe
from vivace.recipes.trainer import train_beside
from vivace.train.config import LoopConfig
from vivace.train.memory import LOGITS_AT_ONCE
from vivace.train.optim import OptimiserConfig
from vivace.train.report import Lines

WORDS = [Prompt(f"{a}{b}{a}", (f"{b}{a}{b}",)) for a in "abcdefgh" for b in "klmnopqr"]
RECIPE = MultirateRecipe(
    kind="multirate",
    loop=LoopConfig(steps=8, warmup_steps=2, report_steps=4),
    adapter=MultirateConfig(exit_layer=2, rank=4, bottleneck=8),
    plan=DraftPlan.chain(3),
    tokens_per_batch=128,
    held_back=8,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), layers=4)


def test_a_trained_adapter_decodes_the_same_text(checkpoint: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    runs = train_beside(RECIPE, vivace.load(checkpoint, kernels="torch"), WORDS, tmp_path / "fast", Lines(notes.append))
    assert [run.method for run in runs] == ["plain", "multirate"]
    assert all(run.identical for run in runs)
    assert runs[1].acceptance_per_position
    assert any("memory: about" in note for note in notes)
    engine = vivace.load(checkpoint, adapters={"multirate": tmp_path / "fast"})
    plain, fast = (engine.generate("aka", method=m, max_new_tokens=24)[0] for m in ("plain", "multirate"))
    assert plain.token_ids == fast.token_ids
    assert fast.stats.num_draft_tokens > 0
    found, _ = load_adapter(tmp_path / "fast")
    assert (found["kind"], found["plan"]["widths"]) == ("multirate", [1, 1, 1])


def test_streams_of_a_shared_model_learn_as_their_plan_drafts(checkpoint: Path, tmp_path: Path) -> None:
    recipe = SharedRecipe(
        loop=LoopConfig(steps=2, warmup_steps=1),
        adapter=MultistreamConfig(streams=2, insertion_layer=2, rank=0, bottleneck=0, pruner_rank=4),
        rank=4,
        plan=StreamPlan((1, 1), vocabulary=64),
        tokens_per_batch=128,
        held_back=8,
    )
    engine, quiet = vivace.load(checkpoint, kernels="torch"), Lines(lambda _: None)
    objective = recipe.begin(TrainContext.of(recipe, engine, WORDS, tmp_path / "none", quiet)).objective
    assert isinstance(objective, SharedObjective)
    assert objective.attach == "every"
    assert objective.head is not None
    assert objective.head.num_rows == 64
    runs = train_beside(recipe, engine, WORDS, tmp_path / "both", quiet)
    assert [run.method for run in runs] == ["plain", "multistream"]
    assert has_vocabulary(tmp_path / "both" / "adapters" / "multistream")


def test_layers_that_copy_are_found_and_written_down(checkpoint: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    recipe = replace(RECIPE, find_reach=2)
    runs = train_beside(recipe, vivace.load(checkpoint, kernels="torch"), WORDS, tmp_path / "far", Lines(notes.append))
    assert all(run.identical for run in runs)
    assert load_adapter(tmp_path / "far")[0]["config"]["reach"] == [2, 3]
    assert any("layers that copy, and that will be read while drafting: 2, 3" in note for note in notes)
    named = replace(RECIPE, find_reach=2, adapter=replace(RECIPE.adapter, reach=(3,)))
    train_beside(named, vivace.load(checkpoint, kernels="torch"), WORDS, tmp_path / "named", Lines(notes.append))
    assert load_adapter(tmp_path / "named")[0]["config"]["reach"] == [3]


def test_a_training_begins_with_weights_of_before(checkpoint: Path, tmp_path: Path) -> None:
    """Their shape holds; what it begins with is what was trained, so that steps of nearly no size keep it."""
    base, notes = shutil.copytree(checkpoint, tmp_path / "base"), list[str]()
    before = base / "adapters" / "multirate"
    train_beside(RECIPE, vivace.load(base, kernels="torch"), WORDS, before, Lines(notes.append))
    other = replace(
        RECIPE, adapter=replace(RECIPE.adapter, exit_layer=1, rank=2), optimiser=OptimiserConfig(adamw_rate=1e-9)
    )
    for init in ("base", str(before)):
        out = tmp_path / f"from-{Path(init).name}"
        train_beside(replace(other, init=init), vivace.load(base, kernels="torch"), WORDS, out, Lines(notes.append))
        (found, tensors), (wanted, start) = load_adapter(out), load_adapter(before)
        assert found["config"] == wanted["config"]
        torch.testing.assert_close(tensors, start, atol=1e-6, rtol=1e-4)
    assert sum(f"begins with {before} and its shape: exit layer" in note for note in notes) == 2
    with pytest.raises(ConfigError, match="init=base brings its exit layer along"):
        replace(RECIPE, init="base", find_exit=(1, 2))
    with pytest.raises(NotFoundError, match="nowhere"):
        train_beside(
            replace(RECIPE, init=str(tmp_path / "nowhere")), vivace.load(base, kernels="torch"), WORDS, tmp_path / "x",
            Lines(notes.append),
        )  # fmt: skip


def test_an_adapter_of_another_base_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    train_beside(RECIPE, vivace.load(checkpoint, kernels="torch"), WORDS, tmp_path / "fast", Lines(lambda _: None))
    other = make_checkpoint(tmp_path / "other", seed=1, layers=4)
    with pytest.raises(MismatchError, match="was trained on base"):
        vivace.load(other, adapters={"multirate": tmp_path / "fast"}).generate("aka", method="multirate")
    with pytest.raises(NotFoundError, match="vivace train multirate --model"):
        vivace.load(other).generate("aka", method="multirate")


def test_a_finished_run_is_not_trained_again(checkpoint: Path, tmp_path: Path) -> None:
    out, notes = tmp_path / "fast", list[str]()
    train_beside(RECIPE, vivace.load(checkpoint, kernels="torch"), WORDS, out, Lines(lambda _: None))
    first = (out / "adapter_model.safetensors").read_bytes()
    train_beside(RECIPE, vivace.load(checkpoint, kernels="torch"), WORDS, out, Lines(notes.append))
    assert (out / "adapter_model.safetensors").read_bytes() == first
    assert any("resumed after step 8" in note for note in notes)
    others = [replace(row, references=("quite another",)) for row in WORDS]
    with pytest.raises(MismatchError, match="another recipe"):
        train_beside(RECIPE, vivace.load(checkpoint, kernels="torch"), others, out, Lines(notes.append))


def test_regenerated_answers_go_on_after_a_cut(checkpoint: Path, tmp_path: Path) -> None:
    engine = vivace.load(checkpoint, kernels="torch")
    prompts = [str(row.request) for row in WORDS[:12]] + ["extra one", "extra two"]
    whole = regenerated(engine, prompts, tmp_path / "a.jsonl", lambda _: None)
    text = (tmp_path / "a.jsonl").read_text()
    lines = text.splitlines(keepends=True)
    (tmp_path / "b.jsonl").write_text("".join(lines[:5]) + lines[5][:9])
    assert regenerated(engine, prompts, tmp_path / "b.jsonl", lambda _: None) == whole
    assert (tmp_path / "b.jsonl").read_text() == text
    assert len([json.loads(line) for line in lines]) == len(prompts)
    other = vivace.load(make_checkpoint(tmp_path / "other", seed=4), kernels="torch")
    for asked, of in ((["another", *prompts[1:]], engine), (prompts, other)):
        with pytest.raises(MismatchError, match="has answers of another model or to other prompts"):
            regenerated(of, asked, tmp_path / "a.jsonl", lambda _: None)


def test_float32_beside_bfloat16_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    engine = vivace.load(checkpoint, kernels="torch", dtype="bfloat16")
    with pytest.raises(ConfigError, match="autocast=false trains beside weights in float32, this model's are bfloat16"):
        train_beside(RECIPE, engine, WORDS, tmp_path / "out", Lines(lambda _: None))


def test_too_few_rows_are_an_error(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="8 rows leave nothing to train on"):
        train_beside(RECIPE, vivace.load(checkpoint, kernels="torch"), WORDS[:8], tmp_path / "x", Lines(lambda _: None))


EXITS = DynamicRecipe(
    kind="dynamic",
    loop=LoopConfig(steps=6, warmup_steps=2, report_steps=3),
    router_training=RouterTraining(epochs=2, positions=64),
    adapter=DynamicConfig(GatesConfig((GateConfig(1), GateConfig(2), GateConfig(3)), rank=4, bottleneck=8)),
    tokens_per_batch=128,
    held_back=20,
    router_rows=10,
)


def test_trained_exits_decode_and_say_how_often_they_left(checkpoint: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    runs = train_beside(EXITS, vivace.load(checkpoint, kernels="torch"), WORDS, tmp_path / "early", Lines(notes.append))
    assert [run.method for run in runs] == ["plain", "dynamic"]
    assert sum("of the tokens leave at the gates" in note for note in notes) == 4
    written, tensors = load_adapter(tmp_path / "early")
    assert [plan["quality"] for plan in written["plan"]["qualities"]] == [0.9, 0.95, 0.98, 0.99]
    assert {name.partition(".")[0] for name in tensors} == {"gates", "router"}
    engine = vivace.load(checkpoint, adapters={"dynamic": tmp_path / "early"})
    for quality in (None, 0.9):
        stats = engine.generate("aka", method="dynamic", quality=quality, max_new_tokens=24)[0].stats
        assert len(stats.exit_layers) == stats.num_tokens
        assert stats.early_exit_share is not None
    with pytest.raises(ConfigError, match=r"thresholds of this adapter are for 0\.9, 0\.95, 0\.98, 0\.99"):
        engine.generate("aka", method="dynamic", quality=0.5)


def test_a_finished_exit_training_ends_with_the_same_weights(checkpoint: Path, tmp_path: Path) -> None:
    """Gates come from their snapshot; what the router learns depends on nothing else."""
    found = []
    for _ in range(2):
        train_beside(EXITS, vivace.load(checkpoint, kernels="torch"), WORDS, tmp_path / "early", Lines(lambda _: None))
        found.append({name: value.clone() for name, value in load_adapter(tmp_path / "early")[1].items()})
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_exits_refuse_what_cannot_be(checkpoint: Path, tmp_path: Path) -> None:
    engine = vivace.load(checkpoint, kernels="torch")
    with pytest.raises(NotFoundError, match="vivace train dynamic"):
        engine.generate("aka", method="dynamic")
    with pytest.raises(ConfigError, match="router_rows"):
        replace(EXITS, router_rows=0)
    with pytest.raises(ConfigError, match="nothing to train on with held_back 63 and 10 for calibration"):
        train_beside(replace(EXITS, held_back=63), engine, WORDS, tmp_path / "early", Lines(lambda _: None))


def test_rows_that_are_left_out_are_told(checkpoint: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    long = [Prompt("say " * 90, (str(number),)) for number in range(3)]
    recipe = replace(RECIPE, longest=64)
    engine = vivace.load(checkpoint, kernels="torch")
    context = TrainContext.of(recipe, engine, [*WORDS, *long], tmp_path, Lines(notes.append))
    assert "3 of 67 rows have more than 64 tokens and are left out" in notes
    assert len(context.rows([*context.train, *context.held_back])) == len(WORDS)


def test_rows_end_where_the_positions_of_a_model_do(tmp_path: Path) -> None:
    """GPT-2 has no position beyond its context, however long a row may be."""
    make("gpt2").save_pretrained(tmp_path / "gpt2")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(make_checkpoint(tmp_path / "other") / name, tmp_path / "gpt2" / name)
    engine, notes = vivace.load(tmp_path / "gpt2", kernels="torch"), list[str]()
    most = engine.model.config.max_positions
    rows = [*WORDS, Prompt("say " * most, ("no",))]
    context = TrainContext.of(replace(RECIPE, longest=4 * most), engine, rows, tmp_path / "out", Lines(notes.append))
    assert f"1 of 65 rows have more than {most} tokens and are left out" in notes
    assert max(batch.tokens.shape[1] for batch in context.batches(context.train)) <= most


def test_a_prompt_is_held_back_with_all_its_answers(checkpoint: Path, tmp_path: Path) -> None:
    rows = [replace(row, references=("one", "two", "three", "four")) for row in WORDS]
    engine = vivace.load(checkpoint, kernels="torch")
    context = TrainContext.of(replace(RECIPE, held_back=30), engine, rows, tmp_path, Lines(lambda _: None))
    assert len(context.held_back) == 32
    assert not {prompt for prompt, _ in context.held_back} & {prompt for prompt, _ in context.train}
    with pytest.raises(ConfigError, match="4 rows of 1 prompts leave nothing to train on"):
        TrainContext.of(RECIPE, engine, rows[:1], tmp_path, Lines(lambda _: None))


def test_the_memory_of_a_draft_model_is_that_of_its_own_layers(checkpoint: Path, tmp_path: Path) -> None:
    engine, found = vivace.load(checkpoint, kernels="torch"), list[int]()
    for factor in (1, 4):
        shape = {"num_layers": 2, "width": 32 * factor, "ffn_width": 64 * factor, "num_heads": 4 * factor}
        values = {**recipe_named("draft"), "held_back": 8}
        recipe = recipe_of({**values, "shape": {**values["shape"], **shape, "num_kv_heads": 2, "head_dim": 8}})
        assert isinstance(recipe, FrozenRecipe)
        context = TrainContext.of(recipe, engine, WORDS, tmp_path / "out", Lines(lambda _: None))
        found.append(context.memory(recipe.begin(context)).activations)
    logits = 4 * 6 * min(recipe.tokens_per_batch * engine.model.config.vocab_size, LOGITS_AT_ONCE)
    assert found[1] - logits > 2 * (found[0] - logits)


def test_the_memory_beside_a_model_whose_layers_differ_is_told(checkpoint: Path, tmp_path: Path) -> None:
    engine = vivace.load(checkpoint, kernels="torch")
    engine.model.config = replace(engine.model.config, windows=(8, None, 8, None), rope_of_layer=(0,) * 4)
    context = TrainContext.of(RECIPE, engine, WORDS, tmp_path / "out", Lines(lambda _: None))
    assert context.memory(RECIPE.begin(context)).activations > 0


def test_streams_take_the_memory_of_the_positions_that_are_held(checkpoint: Path, tmp_path: Path) -> None:
    """Not that of whole batches; the main pass of a shared model has gradients, and takes it."""
    engine = vivace.load(checkpoint, kernels="torch")
    of = {"streams": 2, "insertion_layer": 2, "rank": 0, "bottleneck": 0}

    def activations(kind: str, tokens: int, rows: int, longest: int = 64) -> int:
        values = {"loop": {"steps": 2, "warmup_steps": 1}, "held_back": 8, "plan": {"widths": [1]}, "kind": kind}
        recipe = recipe_of(
            {**values, "tokens_per_batch": tokens, "longest": longest, "adapter": of, "loss": {"rows": rows}}
        )
        assert isinstance(recipe, FrozenRecipe)
        context = TrainContext.of(recipe, engine, WORDS, tmp_path / "memory", Lines(lambda _: None))
        logits = 4 * 6 * min(tokens * engine.model.config.vocab_size, LOGITS_AT_ONCE)
        return context.memory(recipe.begin(context)).activations - logits

    held = activations("multistream", 4096, 64)
    assert activations("multistream", 8192, 64) == held
    assert activations("multistream", 32, 64) * 2 == held
    assert activations("multistream", 4096, 128) == 2 * held
    assert held < activations("multistream", 4096, 64, 128) < 2 * held
    assert activations("shared", 8192, 64) - held == 2 * (activations("shared", 4096, 64) - held)
