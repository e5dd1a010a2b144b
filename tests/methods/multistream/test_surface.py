"""Streams where users meet them: training, the engine, ``inspect``, ``tune``, the wide twin, transformers."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import base_hash, load_adapter, save_adapter
from vivace.checkpoint.widen import widen_checkpoint
from vivace.cli.inspect import adapter_facts
from vivace.errors import MismatchError
from vivace.methods.composition import twins
from vivace.methods.multistream.config import MultistreamConfig, StreamPlan, plans_to_try
from vivace.methods.multistream.streams import Streams
from vivace.prompts import Prompt, packaged_prompts
from vivace.recipes.multistream import MultistreamRecipe
from vivace.recipes.shared import SharedRecipe
from vivace.recipes.trainer import train_beside
from vivace.train.config import LoopConfig
from vivace.train.optim import OptimiserConfig
from vivace.train.report import Lines
from vivace.tuning import candidates_of

WORDS = [Prompt(f"{a}{b}{a}", (f"{b}{a}{b}",)) for a in "abcdefgh" for b in "klmnopqr"]
CONFIG = MultistreamConfig(streams=2, insertion_layer=2, rank=4, bottleneck=8)
PLAN = StreamPlan((2, 1))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random streams beside it."""
    folder = make_checkpoint(tmp_path_factory.mktemp("base"), layers=4)
    model = vivace.load(folder).model
    torch.manual_seed(1)
    tensors = {
        name: value + 0.1 * torch.randn_like(value) for name, value in Streams(CONFIG, model.config).tensors().items()
    }
    save_adapter(
        folder / "adapters" / "multistream", "multistream", base_hash(folder), asdict(PLAN), asdict(CONFIG), tensors
    )
    return folder


def answers(folder: Path, **options: object) -> list[vivace.Result]:
    settings = {"max_new_tokens": 12, "do_sample": False, **options}
    return list(vivace.load(folder).generate(["aka", "bob"], **settings))


def test_the_engine_answers_as_plain_decoding_does(place) -> None:
    plain, ours = answers(place, method="plain"), answers(place, method="multistream")
    assert [r.token_ids for r in ours] == [r.token_ids for r in plain]
    assert all(r.stats.num_draft_tokens > 0 for r in ours)
    longer = answers(place, method="multistream", num_draft_tokens=1)
    assert [r.token_ids for r in longer] == [r.token_ids for r in plain]
    assert max(len(r.stats.drafted_per_position) for r in longer) == 1


def test_transformers_generates_with_streams(place) -> None:
    model = AutoModelForCausalLM.from_pretrained(place)
    ids = torch.tensor([[5, 6, 7]])
    given = {"max_new_tokens": 9, "do_sample": False}
    ours = model.generate(
        ids,
        custom_generate=vivace.custom_generate,
        method="multistream",
        adapter=place / "adapters" / "multistream",
        **given,
    )
    assert ours.tolist() == model.generate(ids, **given).tolist()


def test_inspect_counts_as_the_paper_does(place) -> None:
    facts = adapter_facts(place / "adapters" / "multistream")
    width = vivace.load(place).model.config.width
    assert facts["embeddings_pruner"] == CONFIG.num_paper_parameters(width)
    assert facts["embeddings_pruner"] + facts["low_rank_adapters"] == facts["parameters"]


def test_tune_tries_what_the_streams_can_fill(place) -> None:
    engine = vivace.load(place)
    assert candidates_of(engine, "multistream") == plans_to_try(CONFIG)
    assert all(len(plan.widths) == 1 for plan in candidates_of(engine, "multistream", longest=1))


@pytest.mark.parametrize("fields", [{}, {"feedback": True}, {"identifier": "rotation"}], ids=str)
def test_the_wide_twin_drafts_the_same(place, tmp_path, fields) -> None:
    base, config, plan = tmp_path / "base", replace(CONFIG, **fields), replace(PLAN, attach="kept")
    shutil.copytree(place, base)
    model = vivace.load(base, kernels="torch").model
    torch.manual_seed(1)
    made = Streams(config, model.config)
    if made.rotation is not None:
        made.rotation.read(model)
    tensors = {name: value + 0.1 * torch.randn_like(value) for name, value in made.tensors().items()}
    save_adapter(
        base / "adapters" / "multistream", "multistream", base_hash(base), asdict(plan), asdict(config), tensors
    )
    widen_checkpoint(base, tmp_path / "wide", 2, twins())
    for one, twin in zip(*(answers(path, method="multistream") for path in (base, tmp_path / "wide")), strict=True):
        assert one.token_ids == twin.token_ids
        assert one.stats.accepted_per_position == twin.stats.accepted_per_position


def test_a_recipe_makes_streams_and_goes_on_from_them(place, tmp_path) -> None:
    engine = vivace.load(place, kernels="torch")
    said: list[str] = []
    recipe = MultistreamRecipe(
        loop=LoopConfig(steps=6, warmup_steps=2, report_steps=4),
        adapter=CONFIG,
        plan=PLAN,
        tokens_per_batch=128,
        held_back=8,
    )
    runs = train_beside(recipe, engine, WORDS, tmp_path / "first", Lines(said.append))
    assert [run.method for run in runs] == ["plain", "multistream"]
    assert runs[1].identical
    assert any("heads of Medusa would have" in line for line in said)
    first, tensors = load_adapter(tmp_path / "first", base_hash(place))
    assert (first["config"], first["plan"]) == (asdict(CONFIG), {**asdict(PLAN), "widths": [2, 1]})
    again = MultistreamRecipe(
        loop=LoopConfig(steps=1, warmup_steps=1),
        adapter=CONFIG,
        plan=PLAN,
        start=str(tmp_path / "first"),
        held_back=8,
    )
    train_beside(again, engine, WORDS, tmp_path / "second", Lines(said.append))
    moved = load_adapter(tmp_path / "second")[1]["up.0"] - tensors["up.0"]
    assert 0 < moved.abs().max() < 0.02
    other = replace(again, adapter=replace(CONFIG, rank=2))
    with pytest.raises(MismatchError, match="goes on from"):
        train_beside(other, engine, WORDS, tmp_path / "third", Lines(said.append))


def test_the_shared_mode_makes_a_model_of_its_own_and_leaves_the_base(place, tmp_path) -> None:
    """The base's file keeps its bits; plain decoding of what was made is the reference for its streams."""
    before = base_hash(place)
    recipe = SharedRecipe(
        loop=LoopConfig(steps=6, warmup_steps=2, report_steps=4),
        optimiser=OptimiserConfig(adamw_rate=0.01),
        adapter=replace(CONFIG, rank=0, bottleneck=0),
        rank=4,
        plan=PLAN,
        tokens_per_batch=128,
        held_back=8,
    )
    said: list[str] = []
    runs = train_beside(recipe, vivace.load(place, kernels="torch"), WORDS, tmp_path / "made", Lines(said.append))
    assert [run.method for run in runs] == ["plain", "multistream"]
    assert runs[1].identical
    assert base_hash(place) == before != base_hash(tmp_path / "made")
    written, tensors = load_adapter(tmp_path / "made" / "adapters" / "multistream", base_hash(tmp_path / "made"))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert sum(t.numel() for t in tensors.values()) == CONFIG.num_paper_parameters(reference.config.hidden_size)
    assert written["plan"]["widths"] == [2, 1]
    plain, ours = (answers(tmp_path / "made", method=method) for method in ("plain", "multistream"))
    assert [r.token_ids for r in ours] == [r.token_ids for r in plain]


def test_shipped_streams_beat_repeating_the_main_stream_on_text_they_have_not_seen() -> None:
    """Better than the main stream's own choice said again, and worse the farther they look."""
    asked = [str(prompt.request) for prompt in packaged_prompts("e2e")[:3]]
    found = list(vivace.load().generate(asked, max_new_tokens=32, do_sample=False, method="multistream"))
    drafted, accepted = (
        [sum(counts) for counts in zip(*(getattr(r.stats, name) for r in found), strict=True)]
        for name in ("drafted_per_position", "accepted_per_position")
    )
    shares = [kept / tried for kept, tried in zip(accepted, drafted, strict=True)]
    pairs = [pair for r in found for pair in pairwise(r.token_ids)]
    repeated = sum(one == other for one, other in pairs) / len(pairs)
    assert shares[0] > repeated + 0.2
    assert shares == sorted(shares, reverse=True)
