"""``vivace train prompts``: a pool of PEFT's folders comes out, and a run that was killed goes on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.adapters.pool.training import SoftPrompt, SoftPromptObjective
from vivace.checkpoint.adapters import base_hash
from vivace.configuration import build
from vivace.core.draft_head import DraftHead
from vivace.core.step import Step
from vivace.errors import ConfigError, MismatchError
from vivace.prompts import Prompt
from vivace.recipes.prompts import PromptsRecipe, train_pool
from vivace.train.data import Rows, pairs_of
from vivace.train.distillation import DistillationLoss, FrozenPass, divergence
from vivace.train.next_token import NextToken
from vivace.train.recovery import RecoveryObjective
from vivace.train.report import Lines

WORDS = [Prompt(f"{a}{b}{a}", (f"{b}{a}{b}",)) for a in "abcdefgh" for b in "klmnopqr"]
VALUES = {
    "lengths": [3],
    "seeds": [0, 1],
    "loop": {"minutes": None, "steps": 12, "warmup_steps": 1},
    "optimiser": {"adamw_rate": 0.05},
    "held_back": 4,
    "tokens_per_batch": 512,
}


def test_every_member_is_learnt_and_the_model_stays_as_it_is(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base")
    engine = vivace.load(base, kernels="torch")
    weights = {name: value.clone() for name, value in engine.model.state_dict().items()}
    recipe, rows = build(PromptsRecipe, VALUES), WORDS[:40]
    assert train_pool(recipe, engine, rows, tmp_path / "pool", Lines(str)) == ["3-0", "3-1"]
    assert all(torch.equal(value, weights[name]) for name, value in engine.model.state_dict().items())
    config = json.loads((tmp_path / "pool" / "3-0" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["num_virtual_tokens"], config["token_dim"]) == ("PROMPT_TUNING", 3, 32)
    first = (tmp_path / "pool" / "3-0" / "adapter_model.safetensors").read_bytes()
    assert train_pool(recipe, engine, rows, tmp_path / "pool", Lines(str)) == ["3-0", "3-1"]
    assert (tmp_path / "pool" / "3-0" / "adapter_model.safetensors").read_bytes() == first
    with pytest.raises(MismatchError, match="another recipe"):
        train_pool(replace(recipe, held_back=5), engine, rows, tmp_path / "pool", Lines(str))
    shutil.rmtree(tmp_path / "pool" / "3-0" / "run")
    notes: list[str] = []
    train_pool(recipe, engine, rows, tmp_path / "pool", Lines(notes.append))
    assert "3-0 is there without its run, and is left as it is" in notes
    opened = vivace.load(base, dtype="float32", prompt_pool=tmp_path / "pool")
    assert opened.prompt_pool is not None
    assert set(opened.prompt_pool.members) == {"3-0", "3-1"}
    assert opened.generate("abc", max_new_tokens=4)[0].stats.prompt_pool in ("3-0", "3-1")
    assert base_hash(base) == base_hash(engine.folder)


def test_a_few_steps_lower_the_loss_and_no_entry_is_plain_training(tmp_path: Path) -> None:
    engine = vivace.load(make_checkpoint(tmp_path / "base"), kernels="torch")
    pairs = pairs_of(WORDS[:12])
    [batch, *_] = Rows(engine.tokenizer, 512, engine.model.device).batches(pairs, 4096)
    torch.manual_seed(0)
    weights = SoftPrompt.beginning(engine.model, 4)
    objective = SoftPromptObjective(engine.model, weights)
    optimiser, losses = torch.optim.Adam(weights.parameters(), lr=0.05), []
    for _ in range(10):
        optimiser.zero_grad()
        total = 0.0
        for part, seen in objective.losses(engine.model, batch):
            part.backward()
            total += seen.get("loss", 0.0)
        optimiser.step()
        losses.append(total)
    assert losses[-1] < losses[0]
    with torch.no_grad():
        empty = SoftPromptObjective(engine.model, SoftPrompt(torch.empty(0, 32))).losses(engine.model, batch)
        plain = NextToken(engine.model).losses(engine.model, batch)
        want, got = (sum(seen.get("loss", 0.0) for _, seen in parts) for parts in (plain, empty))
    assert got == pytest.approx(want, rel=1e-5)


def test_the_divergence_is_that_of_the_stored_model_without_the_soft_prompt(tmp_path: Path) -> None:
    stored = vivace.load(make_checkpoint(tmp_path / "stored"), kernels="torch", dtype="float32").model
    engine = vivace.load(make_checkpoint(tmp_path / "rounded", seed=1), kernels="torch", dtype="float32")
    model = engine.model
    [batch, *_] = Rows(engine.tokenizer, 512, model.device).batches(pairs_of(WORDS[:6]), 4096)
    torch.manual_seed(0)
    weights = SoftPrompt.beginning(model, 4)
    loss = DistillationLoss(distillation=1.0, cross_entropy=0.0)
    objective = RecoveryObjective(SoftPromptObjective(model, weights), stored, loss)
    with torch.no_grad():
        got = float(sum(part for part, _ in objective.losses(model, batch)))
        truth = FrozenPass.of(stored, batch.tokens).logits(DraftHead(stored), batch.predicting)
        guesses = []
        for row in batch.tokens:  # one text at a time, the soft prompt written out in front of it
            step = Step.dense(1, 4 + len(row))
            embedded = torch.cat((weights.embeddings, model.embed(row, Step.dense(1, len(row)))))
            guesses.append(model.head(model.run(embedded, step)[4:]))
        want = float(divergence(torch.cat(guesses)[batch.predicting], truth)) / len(batch.predicting)
    assert got == pytest.approx(want, rel=1e-4)
    for part, _ in objective.losses(model, batch):
        part.backward()
    assert weights.embeddings.grad is not None
    assert float(weights.embeddings.grad.abs().max()) > 0


def test_a_member_learns_to_give_back_what_a_stored_model_says(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base")
    engine = vivace.load(make_checkpoint(tmp_path / "other", seed=1), kernels="torch", dtype="float32")
    recipe = build(PromptsRecipe, VALUES | {"seeds": [0], "stored": str(base), "loop": {"steps": 4, "warmup_steps": 1}})
    assert train_pool(recipe, engine, WORDS[:40], tmp_path / "pool", Lines(str)) == ["3-0"]
    deeper = replace(recipe, stored=str(make_checkpoint(tmp_path / "deeper", layers=3)))
    with pytest.raises(MismatchError, match="another shape"):
        train_pool(deeper, engine, WORDS[:40], tmp_path / "deep", Lines(str))


def test_members_that_leave_no_room_are_refused_before_any_is_learnt(tmp_path: Path) -> None:
    engine = vivace.load(make_checkpoint(tmp_path / "base"), kernels="torch")
    recipe = build(PromptsRecipe, VALUES | {"lengths": [3, 256]})
    with pytest.raises(ConfigError, match="lengths has 256, and the model holds 256 positions"):
        train_pool(recipe, engine, WORDS[:40], tmp_path / "pool", Lines(str))
    assert not (tmp_path / "pool").exists()


@pytest.mark.parametrize("change", [{"lengths": [0]}, {"seeds": [1, 1]}, {"lengths": []}])
def test_what_cannot_be_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="different numbers"):
        build(PromptsRecipe, VALUES | change)


def test_weights_of_a_stored_model_that_is_not_named_are_refused() -> None:
    with pytest.raises(ConfigError, match="name it with stored=MODEL"):
        build(PromptsRecipe, VALUES | {"loss": {"cross_entropy": 0.5}})
