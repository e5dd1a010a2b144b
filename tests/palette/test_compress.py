"""Folders of palettes: what is written is what is read, natively and in PyTorch, and bad input is one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import vivace
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.files import open_tensors
from vivace.checkpoint.load import load_decoder, open_checkpoint
from vivace.cli.app import run
from vivace.core.cpu.low_bit import LowBitLinear, LowBitRows
from vivace.errors import CheckpointError, ConfigError, CorruptError, UnsupportedError
from vivace.kernels.palette import IntPalette, Palette
from vivace.palette.compress import CompressConfig, compress
from vivace.palette.texts import Texts, read_texts

TEXT = "The cat sat on the mat, and the dog sat on the cat. Who sat on the dog? " * 40


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def texts(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Texts:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return texts_of(base, path)


def texts_of(base: Path, path: Path) -> Texts:
    tokenizer = vivace.load(base).tokenizer
    return read_texts([path], tokenizer, num_tokens=512, longest=32, tokens_per_batch=128)


@pytest.fixture(scope="module")
def made(base: Path, texts: Texts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    compress(base, out, CompressConfig(3, method="gptq"), texts)
    return out


def logits(folder: Path, **options: object) -> Tensor:
    engine = vivace.load(folder, **options)
    return engine.logits([[5, 9, 200, 31, 77, 8]])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("has_scales", [True, False])
def test_what_is_written_is_read(base: Path, texts: Texts, tmp_path: Path, bits: int, has_scales: bool) -> None:
    """Codes stay codes in memory; PyTorch, on decoded weights, gives nearly the same."""
    out = tmp_path / "out"
    done = compress(base, out, CompressConfig(bits, method="kmeans", has_scales=has_scales), texts)
    assert done.measured is not None
    assert done.measured.kl > 0
    stored = sum(tensor.nbytes for tensor in load_file(out / "model.safetensors").values())
    assert done.written.num_bytes == stored
    assert done.written.all_bits == pytest.approx(stored * 8 / done.written.num_weights)
    engine = vivace.load(out)
    for module in engine.model.layers.modules():
        if isinstance(module, LowBitLinear) and bits < 8:
            assert isinstance(module.weight, IntPalette if has_scales else Palette)
            assert module.weight.bits == bits
    assert isinstance(engine.model.embedding_rows, LowBitRows)
    exact = logits(out, kernels="torch", dtype="float32")
    native, torch_bfloat16 = logits(out), logits(out, kernels="torch")
    spread = exact.std()
    assert (torch_bfloat16 - exact).abs().mean() < 0.03 * spread
    assert (native - exact).abs().mean() < 0.06 * spread


def test_generation_and_methods(made: Path) -> None:
    """A folder is given to everything that takes a model; what drafts is lossless on it."""
    engine = vivace.load(made)
    plain, looked = (engine.generate(["a b c", "d"], max_new_tokens=20, method=name) for name in ("plain", "lookup"))
    assert [one.token_ids for one in plain] == [one.token_ids for one in looked]
    assert engine.notes == vivace.load(made).notes
    assert not any("decoded" in note for note in engine.notes)
    assert any("rounded once more, to q4" in note for note in vivace.load(made, weights="q4").notes)
    tight = vivace.load(made, memory=engine.num_bytes + (1 << 20))
    assert tight.generate("a b c", max_new_tokens=5)


def test_dense_is_what_transformers_loads(made: Path, tmp_path: Path) -> None:
    """``convert --dense``: the same weights, and the logits of transformers are ours."""
    assert run(["convert", str(tmp_path / "dense"), "--dense", "--model", str(made), "--dtype", "float32"]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    tokens = torch.tensor([[5, 9, 200, 31, 77, 8]])
    with torch.no_grad():
        expected = theirs(tokens).logits
    assert torch.allclose(logits(made, kernels="torch", dtype="float32"), expected, atol=2e-4)
    stored = open_tensors(made)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(stored.tensor(name), load_file(tmp_path / "dense" / "model.safetensors")[name])


def test_gptq_is_nearer_than_clusters(base: Path, texts: Texts, tmp_path: Path) -> None:
    kinds = ("rtn", "kmeans", "gptq")
    found = [compress(base, tmp_path / kind, CompressConfig(3, method=kind), texts).measured for kind in kinds]
    distances = [one.kl for one in found if one is not None]
    assert distances[2] < distances[1] < distances[0]


def test_fisher(base: Path, texts: Texts, tmp_path: Path) -> None:
    plain = compress(base, tmp_path / "rtn", CompressConfig(3, method="rtn"), texts).measured
    found = compress(base, tmp_path / "fisher", CompressConfig(3, method="fisher"), texts).measured
    assert plain is not None
    assert found is not None
    assert found.kl < plain.kl


def test_every_stage_that_takes_long_counts_to_its_end(base: Path, texts: Texts, tmp_path: Path) -> None:
    """Batches that weigh the matrices, matrices whose loss is predicted, and layers that are rounded."""
    seen: list[tuple[int, int]] = []
    compress(base, tmp_path / "out", CompressConfig(None, 4.0), texts, progress=lambda *at: seen.append(at))
    num_layers = len(load_decoder(base).layers)
    stages = len(texts.calibration), 4 * num_layers, num_layers
    assert seen == [(done, total) for total in stages for done in range(1, total + 1)]


def test_a_budget(base: Path, texts: Texts, tmp_path: Path) -> None:
    """Every budget is kept by the bytes of the file, more is never worse predicted, and the prediction is no dream."""
    losses = []
    for budget in (3.0, 4.0, 6.0):
        done = compress(base, tmp_path / str(budget), CompressConfig(None, budget, "kmeans", has_scales=False), texts)
        assert done.written.matrix_bits <= budget
        assert done.predicted is not None
        assert done.measured is not None
        assert 0.2 < done.predicted / done.measured.kl < 5
        losses.append(done.predicted)
    assert losses == sorted(losses, reverse=True)
    with pytest.raises(ConfigError, match="the least possible is"):
        compress(base, tmp_path / "less", CompressConfig(None, 1.5), texts)
    assert not (tmp_path / "less").exists()


def test_it_is_the_same_twice(base: Path, texts: Texts, made: Path, tmp_path: Path) -> None:
    compress(base, tmp_path / "again", CompressConfig(3, method="gptq"), texts)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()


def test_bad_input(base: Path, made: Path, texts: Texts, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"without a text .* give --data FILE"):
        compress(base, tmp_path / "x", CompressConfig(3, method="kmeans"))
    with pytest.raises(ConfigError, match="gptq rounds for a text"):
        compress(base, tmp_path / "x", CompressConfig(4, method="gptq"))
    with pytest.raises(ConfigError, match="is the model itself"):
        compress(base, base, CompressConfig(3), texts)
    with pytest.raises(ConfigError, match="--bits 5 is not possible"):
        CompressConfig(5)
    with pytest.raises(ConfigError, match="did you mean 'kmeans'"):
        CompressConfig(3, method="kmean")  # type: ignore[arg-type]
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"one \xff")
    with pytest.raises(CorruptError, match="is not UTF-8 text"):
        texts_of(base, binary)
    short = tmp_path / "short.txt"
    short.write_text("a b c", encoding="utf-8")
    with pytest.raises(ConfigError, match="too few to round by"):
        texts_of(base, short)
    assert not (tmp_path / "x").exists()
    for number in (float("nan"), float("inf"), 0.0):
        with pytest.raises(ConfigError, match="--bpw must be a number above 0"):
            CompressConfig(None, number)
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(ConfigError, match="is a file, and a folder is written"):
        compress(base, file, CompressConfig(4, method="kmeans"))
    assert file.read_text() == "precious"
    worn = tmp_path / "worn"
    (worn / "adapters" / "recovery").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"recovers what lies in .* move it away"):
        compress(base, worn, CompressConfig(4, method="kmeans"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_no_numbers_are_named_before_anything_is_written(
    base: Path, tmp_path: Path, value: float
) -> None:
    def spoilt(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = value

    source = broken(base, tmp_path / "source", spoilt)
    for settings in (CompressConfig(4, method="kmeans"), CompressConfig(8), CompressConfig(4, None, "kmeans", False)):
        with pytest.raises(CorruptError, match=r"layers\.1\..*infinite or not a number"):
            compress(source, tmp_path / "x", settings)
    assert not (tmp_path / "x").exists()


def test_what_said_how_weights_were_stored_is_gone_and_ends_that_stay_take_no_more(base: Path, tmp_path: Path) -> None:
    """The source is in MLX's codes, its embedding, too."""
    source = tmp_path / "mlx"
    shutil.copytree(base, source)
    tensors = load_file(source / "model.safetensors")
    weight = tensors["model.embed_tokens.weight"]
    height, width = weight.shape
    codes = torch.randint(0, 2**31, (height, width // 8), dtype=torch.int64).to(torch.uint32)
    scales = torch.full((height, width // 32), 0.01, dtype=torch.bfloat16)
    tensors |= {
        "model.embed_tokens.weight": codes,
        "model.embed_tokens.scales": scales,
        "model.embed_tokens.biases": -8 * scales,
    }
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization"] = {"bits": 4, "group_size": 32}
    (source / "config.json").write_text(json.dumps(config))
    compress(source, tmp_path / "out", CompressConfig(4, method="kmeans", rounds_ends=False))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization" not in written
    assert written["quantization_config"]["quant_method"] == "palette"
    kept = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"]
    assert kept.dtype == torch.bfloat16
    assert torch.equal(kept, open_checkpoint(source).stored.tensor("model.embed_tokens.weight").bfloat16())


def broken(made: Path, to: Path, change: object) -> Path:
    shutil.copytree(made, to)
    tensors = load_file(made / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


STEM = "model.layers.0.self_attn.o_proj"


def test_damaged_folders(made: Path, tmp_path: Path) -> None:
    def lacking(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{STEM}.lut"], tensors[f"{STEM}.scale"]

    def infinite(tensors: dict[str, Tensor]) -> None:
        tensors[f"{STEM}.scale"][3] = torch.inf

    def odd(tensors: dict[str, Tensor]) -> None:
        tensors[f"{STEM}.lut"] = tensors[f"{STEM}.lut"][:, :5].contiguous()

    def short(tensors: dict[str, Tensor]) -> None:
        tensors[f"{STEM}.scale"] = tensors[f"{STEM}.scale"][:-1].contiguous()

    def unscaled(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{STEM}.scale"]

    def whole(tensors: dict[str, Tensor]) -> None:
        tensors[f"{STEM}.scale"] = tensors[f"{STEM}.scale"].int()

    def floats(tensors: dict[str, Tensor]) -> None:
        tensors["model.embed_tokens.idx"] = tensors["model.embed_tokens.idx"].float()

    def beyond(tensors: dict[str, Tensor]) -> None:
        tensors["model.embed_tokens.idx"][1, 1] = -128

    def flat(tensors: dict[str, Tensor]) -> None:
        tensors[f"{STEM}.idx"] = tensors[f"{STEM}.idx"].flatten()

    cases = {
        "whole": (whole, "its scale is torch.int32"),
        "floats": (floats, "its idx is torch.float32"),
        "beyond": (beyond, "a code is -128"),
        "flat": (flat, "1 dimensions, and codes have two"),
        "lacking": (lacking, "has codes, and neither"),
        "infinite": (infinite, "infinite or not a number"),
        "odd": (odd, "5 entries for each sixteen outputs"),
        "short": (short, "do not fit each other"),
        "unscaled": (unscaled, "int8 entries have scales"),
    }
    for name, (change, message) in cases.items():
        with pytest.raises(CorruptError, match=message):
            load_decoder(broken(made, tmp_path / name, change))
    folder = broken(made, tmp_path / "version", lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["version"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="version = 2"):
        load_decoder(folder)


def test_a_full_disk_leaves_nothing(base: Path, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vivace.palette.compress.write_tensors", full)
    with pytest.raises(CheckpointError, match="No space left"):
        compress(base, tmp_path / "out", CompressConfig(3, method="kmeans"), texts)
    assert list(tmp_path.iterdir()) == []


def test_the_command(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed is what is in the folder; a flag that cannot be is one line."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    words = ["--model", str(base), "--data", str(text), "--tokens", "256", "--longest", "32", "--quiet"]
    assert run(["compress", str(tmp_path / "out"), *words, "--bpw", "4.5", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["bits_a_matrix_weight"] <= 4.5
    assert facts["predicted_kl"] > 0
    assert set(facts["matrices"].values()) <= {2, 3, 4, 8}
    assert run(["inspect", str(tmp_path / "out"), "--json", "--tensors"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["bytes"] == facts["bytes"]
    assert shown["bits_a_weight"]["all"] == pytest.approx(facts["bits_a_weight"])
    assert {"int8_rows"} < set(shown["dtypes"])
    assert all(tensor["bits"] > 0 for tensor in shown["tensors"])
    assert run(["compress", str(tmp_path / "out2"), *words, "--bits", "3", "--bpw", "3"]) != 0
    assert run(["compress", str(tmp_path / "out2"), *words, "--bits", "8", "--entries", "bfloat16"]) != 0
    assert "one of the two" in capsys.readouterr().err
    assert run(["compress", str(tmp_path / "out2"), *words, "--entries", "int4"]) != 0
    assert "did you mean 'int8'" in capsys.readouterr().err
    assert run(["compress", str(tmp_path / "out2"), "--model", str(base), "--bits", "2", "--method", "rtn"]) != 0
    assert "give --data FILE" in capsys.readouterr().err
    assert run(["compress", str(tmp_path / "out2"), *words, "--bits", "3", "--method", "edkm"]) != 0
    assert "vivace train palette" in capsys.readouterr().err
    assert not (tmp_path / "out2").exists()
