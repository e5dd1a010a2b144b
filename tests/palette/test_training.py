"""Training palettes begins at GPTQ's codes and comes nearer to the stored model; a killed run gives the same bits."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.load import coded_of, open_checkpoint
from vivace.cli.app import run
from vivace.errors import ConfigError, MismatchError, UnsupportedError
from vivace.kernels.coded import PaletteCodes, RowCodes
from vivace.palette.entries import TrainedEntries
from vivace.palette.rounding import round_matrix
from vivace.palette.training import ClusteredLinear
from vivace.prompts import Prompt, save_prompts
from vivace.recipes.palette import PaletteRecipe
from vivace.recipes.trainer import train_beside
from vivace.train.config import LoopConfig
from vivace.train.data import Rows, pairs_of, pieces_of
from vivace.train.optim import OptimiserConfig
from vivace.train.report import Report

RECIPE = PaletteRecipe(
    loop=LoopConfig(steps=16, warmup_steps=1, evaluate_steps=8, snapshot_s=0),
    optimiser=OptimiserConfig(adamw_rate=0.05),
    bits=2,
    trains="codes",
    held_back=4,
    longest=96,
    tokens_per_batch=256,
    calibration_tokens=512,
    cooling_steps=8,
)
WORDS = re.findall(r"\w+", "the cat sat on a mat and the dog ate what was left of it by the river")


class Notes(Report):
    """Keeps what is noted."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    def reading(self, *_: object) -> None:
        pass

    def held_back(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "model")


def rows() -> list[Prompt]:
    turned = [WORDS[n % 16 :] + WORDS[: n % 16] for n in range(24)]
    return [Prompt(" ".join(each[:4]), (" ".join(each[4:]),)) for each in turned]


def trained(base: Path, out: Path, recipe: PaletteRecipe = RECIPE) -> list[str]:
    report = Notes()
    train_beside(recipe, vivace.load(base, kernels="torch"), rows(), out, report)
    return report.lines


def test_it_comes_nearer(base: Path, tmp_path: Path) -> None:
    """Nearer to the stored model than the codes that it began with; the folder is read as any other."""
    lines = trained(base, tmp_path / "out")
    last = lines[-1]
    assert "training came no nearer" not in last
    kl, gptq = (float(found) for found in re.findall(r"(?:: |gptq )(\d\.\d+)", last))
    assert kl < 0.95 * gptq
    engine = vivace.load(tmp_path / "out")
    assert engine.generate("the cat", max_new_tokens=5)[0].token_ids


def test_a_killed_run_gives_the_same_bits(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(base, tmp_path / "whole")
    from vivace.palette.training import ClusteringObjective

    updated, count = ClusteringObjective.updated, [0]

    def killed(self: ClusteringObjective) -> None:
        updated(self)
        count[0] += 1
        if count[0] == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(ClusteringObjective, "updated", killed)
    with pytest.raises(KeyboardInterrupt):
        trained(base, tmp_path / "parts")
    monkeypatch.setattr(ClusteringObjective, "updated", updated)
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    lines = trained(base, tmp_path / "parts")
    assert any("resumed after step" in line for line in lines)
    assert "training came no nearer" not in lines[-1]
    whole, parts = (tmp_path / name / "model.safetensors" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()


@pytest.mark.parametrize("has_scales", [True, False])
def test_entries_come_nearer_while_codes_stay(base: Path, tmp_path: Path, has_scales: bool) -> None:
    save_prompts(tmp_path / "rows.jsonl", rows())
    words = ["compress", tmp_path / "first", "--model", base, "--bits", "2", "--data", tmp_path / "rows.jsonl"]
    words += [] if has_scales else ["--entries", "bfloat16"]
    assert run([*map(str, words), "--tokens", "512", "--quiet"]) == 0
    recipe = replace(RECIPE, trains="entries", has_scales=has_scales, init=str(tmp_path / "first"))
    last = trained(base, tmp_path / "out", recipe)[-1]
    kl, begun = (float(found) for found in re.findall(r" (\d\.\d+)", last)[-2:])
    assert kl < begun, last
    first, out = (dict(load_file(tmp_path / name / "model.safetensors")) for name in ("first", "out"))
    codes = [name for name in first if name.endswith(".idx")]
    assert codes
    assert all(torch.equal(first[name], out[name]) for name in codes)
    kept, moved = (".lut", ".scale") if has_scales else (".idx", ".lut")
    assert all(torch.equal(value, out[name]) for name, value in first.items() if name.endswith(kept))
    assert any(not torch.equal(value, out[name]) for name, value in first.items() if name.endswith(moved))


@pytest.mark.parametrize("has_scales", [True, False])
def test_gradient_of_entries_is_that_of_the_weights(has_scales: bool) -> None:
    """Outputs that no sixteen divide and inputs that no 64 divide, beside autograd through a gather."""
    torch.manual_seed(0)
    out, width = 40, 100
    codes = torch.randint(8, (out, width), dtype=torch.uint8)
    entries = torch.randn(3, 8).sort(1).values
    scales = torch.rand(out, 2) + 0.5 if has_scales else None
    kept = (entries * 40).round().to(torch.int8) if has_scales else entries.bfloat16()
    begun = PaletteCodes(codes, kept, None if scales is None else scales.bfloat16())
    part = TrainedEntries(begun, None)
    x, given = torch.randn(5, width), torch.randn(5, out)
    part(x).backward(given)
    leaf = part.trained.detach().clone().requires_grad_()
    chosen = (kept.float() if has_scales else leaf).repeat_interleave(16, 0)[:out].gather(1, codes.long())
    weight = chosen * leaf.repeat_interleave(64, 1)[:, :width] if has_scales else chosen
    F.linear(x, weight).backward(given)
    assert part.trained.grad is not None
    assert leaf.grad is not None
    assert torch.allclose(part.trained.grad, leaf.grad, rtol=1e-5, atol=1e-4)


def test_plain_text_is_learnt_from(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pieces hold all of it, end between words, and begin with no template; who needs questions refuses it."""
    text = " ".join(WORDS * 80)
    pieces = pieces_of(text)
    assert "".join(answer for piece in pieces for answer in piece.references) == text
    assert all(len(piece.references[0]) <= 600 for piece in pieces)
    assert all(text.startswith(answer) for piece in pieces[:1] for answer in piece.references)
    tokenizer = vivace.load(base, kernels="torch").tokenizer
    [row] = Rows(tokenizer, 4096).encode(pairs_of(pieces_of("the cat sat")))
    assert row.tokens == tuple(tokenizer.encode("the cat sat"))
    assert row.num_prompt == 1
    mixed = Rows(tokenizer, 40).encode([*pairs_of(pieces), ("a question", "too long an answer " * 9)])
    assert [len(row.tokens) for row in mixed] == [40] * len(pieces), "pieces end there, and answers are left out"
    place = tmp_path / "text.txt"
    place.write_text(text)
    words = ["train", "palette", "--model", base, "--data", place, "--out", tmp_path / "out", "bits=2"]
    settings = ["loop.steps=1", "loop.warmup_steps=0", "held_back=1", "longest=400", "calibration_tokens=256"]
    assert run([*map(str, words), *settings, "--quiet"]) == 0
    capsys.readouterr()
    words = ["train", "multirate", "--model", base, "--data", place, "--out", tmp_path / "other"]
    assert run([*map(str, words)]) == 2
    assert "plain text, in which nothing is asked" in capsys.readouterr().err


def test_it_begins_at_a_folder(base: Path, tmp_path: Path) -> None:
    """A folder's codes are those that training begins with, and those that are written where nothing is learnt."""
    save_prompts(tmp_path / "rows.jsonl", rows())
    words = ["compress", tmp_path / "first", "--model", base, "--bits", "2", "--data", tmp_path / "rows.jsonl"]
    assert run([*map(str, words), "--tokens", "512", "--quiet"]) == 0
    still = replace(RECIPE, init=str(tmp_path / "first"), optimiser=OptimiserConfig(adamw_rate=1e-9))
    lines = trained(base, tmp_path / "out", replace(still, loop=LoopConfig(steps=1, warmup_steps=0), share=0.01))
    assert not any("rounding by gptq" in line for line in lines)
    first, out = (vivace.load(tmp_path / name, dtype="float32", kernels="torch") for name in ("first", "out"))
    away, own = (dict(engine.model.named_parameters()) for engine in (first, out))
    same = [float((own[name] == value).float().mean()) for name, value in away.items() if value.dim() == 2]
    assert min(same) > 0.5
    with pytest.raises(MismatchError, match=r"has 2 bits in .*, and the recipe says 3"):
        trained(base, tmp_path / "other", replace(still, bits=3))
    with pytest.raises(MismatchError, match=r"has integers with scales in .*, and the recipe says otherwise"):
        trained(base, tmp_path / "other", replace(still, has_scales=False))
    with pytest.raises(MismatchError, match="no palette of"):
        trained(base, tmp_path / "other", replace(still, init=str(base)))


@pytest.mark.parametrize("trains", ["entries", "codes"])
def test_a_folder_with_mixed_bits_is_trained_as_it_is(
    base: Path, tmp_path: Path, trains: Literal["entries", "codes"]
) -> None:
    """Every palette keeps its own number of bits, and matrices of eight bits are written as they were."""
    save_prompts(tmp_path / "rows.jsonl", rows())
    words = ["compress", tmp_path / "first", "--model", base, "--bpw", "4.4", "--data", tmp_path / "rows.jsonl"]
    assert run([*map(str, words), "--tokens", "512", "--method", "rtn", "--quiet"]) == 0
    first = coded_of(tmp_path / "first", open_checkpoint(base).plan)
    assert len({codes.kind for codes in first.values()}) > 2
    recipe = replace(RECIPE, trains=trains, init=str(tmp_path / "first"), bits=None)
    last = trained(base, tmp_path / "out", recipe)[-1]
    assert "training came no nearer" not in last
    out = coded_of(tmp_path / "out", open_checkpoint(base).plan)
    assert {name: codes.kind for name, codes in out.items()} == {name: codes.kind for name, codes in first.items()}
    with pytest.raises(MismatchError, match=r"has . bits in .*, and the recipe says 2"):
        trained(base, tmp_path / "other", replace(recipe, bits=2))
    for name, codes in first.items():
        made = out[name].dense()
        assert torch.equal(made, codes.dense()) == isinstance(codes, RowCodes)


def test_a_folder_of_eight_bits_has_nothing_to_train(base: Path, tmp_path: Path) -> None:
    assert run(["compress", str(tmp_path / "first"), "--model", str(base), "--bits", "8", "--quiet"]) == 0
    with pytest.raises(MismatchError, match=r"no palette to train in .*eight bits"):
        trained(base, tmp_path / "out", replace(RECIPE, init=str(tmp_path / "first"), bits=None))


def test_a_run_is_not_resumed_on_other_codes(base: Path, tmp_path: Path) -> None:
    """A snapshot holds what was trained; the codes that it was trained on lie in the folder to begin with."""
    save_prompts(tmp_path / "rows.jsonl", rows())
    words = ["compress", tmp_path / "first", "--model", base, "--bits", "2", "--data", tmp_path / "rows.jsonl"]
    recipe = replace(RECIPE, init=str(tmp_path / "first"))
    for method in ("gptq", "rtn"):
        shutil.rmtree(tmp_path / "first", ignore_errors=True)
        assert run([*map(str, words), "--tokens", "512", "--quiet", "--method", method]) == 0
        if method == "gptq":
            trained(base, tmp_path / "out", recipe)
    with pytest.raises(MismatchError, match="other"):
        trained(base, tmp_path / "out", recipe)


def test_codes_that_are_no_whole_tiles_are_refused_before_anything_is_rounded(base: Path, tmp_path: Path) -> None:
    ragged = tmp_path / "model"
    shutil.copytree(base, ragged)
    config = LlamaConfig.from_pretrained(base)
    config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim = 40, 2, 2, 16
    LlamaForCausalLM(config).save_pretrained(ragged)
    with pytest.raises(
        UnsupportedError, match=r"40 outputs, and codes are trained in tiles of 16; give trains=entries"
    ):
        trained(ragged, tmp_path / "out")


@pytest.mark.parametrize("has_scales", [True, False])
def test_it_begins_at_the_codes(has_scales: bool) -> None:
    """Values lie in the cells of GPTQ's codes, as near to the stored ones as these let them; zeros are no harm."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 128, generator=generator) * 0.05
    weight[3], weight[:, 7] = 0, 0
    x = torch.randn(400, 128, generator=generator) @ torch.randn(128, 128, generator=generator)
    codes = round_matrix(weight, 3, "gptq", moments=x.T @ x / 400, has_scales=has_scales)
    assert isinstance(codes, PaletteCodes)
    linear = ClusteredLinear(weight, codes, None, rounds=1)
    assert torch.equal(linear.codes().dense(), codes.dense())
    with torch.no_grad():
        hard = linear(x)
    assert torch.allclose(hard, x @ codes.dense().T, rtol=1e-5, atol=1e-4)
    linear(x).square().sum().backward()
    gradient = linear.values.grad
    assert isinstance(gradient, Tensor)
    assert torch.isfinite(gradient).all()
    assert gradient.abs().sum() > 0


def test_the_command(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_prompts(tmp_path / "rows.jsonl", rows())
    words = ["train", "palette", "--model", str(base), "--data", str(tmp_path / "rows.jsonl"), "--out"]
    changes = [
        "loop.steps=2",
        "loop.warmup_steps=0",
        "held_back=4",
        "longest=96",
        "calibration_tokens=256",
        "tokens_per_batch=256",
    ]
    assert run([*words, str(tmp_path / "out"), *changes]) == 0
    assert "bits a weight" in capsys.readouterr().err
    assert run(["inspect", str(tmp_path / "out")]) == 0
    assert "lut3_ints" in capsys.readouterr().out
    assert run([*words, str(tmp_path / "out2"), "bits=5"]) != 0
    assert "bits are 2, 3 or 4, found 5" in capsys.readouterr().err
    assert run([*words, str(base), *changes]) != 0
    assert "is the model itself" in capsys.readouterr().err


def test_recipes_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="shares fall"):
        replace(RECIPE, share=0.01, last_share=0.1)
    with pytest.raises(ConfigError, match="rounds and calibration_tokens"):
        replace(RECIPE, rounds=0)
