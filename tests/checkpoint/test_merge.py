"""``vivace convert OUT --merge DIR``: a checkpoint with an adapter in it, also one that no request can wear."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import vivace
from tests.adapters.loras import make_lora
from tests.checkpoint.peft_cases import FAMILIES
from tests.checkpoint.test_peft import CASES, IDS, write
from tests.parity.families import make
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.merge import merge_checkpoint
from vivace.errors import ConfigError, MismatchError, UnsupportedError


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make(request.param).save_pretrained(folder)
    return request.param, folder


def logits_of(folder: Path) -> Tensor:
    return vivace.load(folder, kernels="torch", dtype="float32").logits(IDS)


def test_the_merged_checkpoint_writes_what_the_adapted_model_writes(base: tuple[str, Path], tmp_path: Path) -> None:
    """In transformers too; only the matrices that the adapter names have changed."""
    family, folder = base
    for option in ("patterns", "all-linear", "layers"):
        write(tmp_path / option, f"{family} {option}")
        merged = merge_checkpoint(folder, tmp_path / option, tmp_path / f"{option}-merged")
        assert merged.num_changed == len(CASES[f"{family} {option}"]["scales"])
        worn = vivace.load(folder, kernels="torch", adapters={"it": tmp_path / option}).logits(IDS, adapter="it")
        torch.testing.assert_close(logits_of(merged.folder), worn, atol=1e-4, rtol=0)
        theirs = AutoModelForCausalLM.from_pretrained(merged.folder, attn_implementation="eager").float().eval()
        with torch.inference_mode():
            torch.testing.assert_close(theirs(IDS).logits, worn, atol=1e-4, rtol=0)
        before, after = (load_file(each / "model.safetensors") for each in (folder, merged.folder))
        assert sum(not torch.equal(value, after[name]) for name, value in before.items()) == merged.num_changed


def changed(folder: Path, **tensors: Tensor) -> None:
    """Add tensors to an adapter."""
    path = folder / "adapter_model.safetensors"
    have = {name: value.clone() for name, value in load_file(path).items()}
    save_file(have | {name.replace("__", "."): value for name, value in tensors.items()}, path)


PREFIX = "base_model__model__"


def test_dora_scales_rows_to_their_norms(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path / "base")
    write(tmp_path / "it", "llama list", use_dora=True)
    factors = load_file(tmp_path / "it" / "adapter_model.safetensors")
    modules = [name.removesuffix(".lora_A.weight") for name in factors if name.endswith("lora_A.weight")]
    norms = {
        f"{module}.lora_magnitude_vector": torch.rand(len(factors[f"{module}.lora_B.weight"])) + 0.5
        for module in modules
    }
    changed(tmp_path / "it", **norms)
    merge_checkpoint(tmp_path / "base", tmp_path / "it", tmp_path / "out")
    before, after = (load_file(tmp_path / each / "model.safetensors") for each in ("base", "out"))
    for module in modules:
        name = f"{module.removeprefix('base_model.model.')}.weight"
        found = after[name].norm(dim=1)
        torch.testing.assert_close(found, norms[f"{module}.lora_magnitude_vector"])
        delta = 1.5 * factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"]
        wanted = before[name] + delta
        torch.testing.assert_close(torch.cosine_similarity(after[name], wanted, dim=1), torch.ones(len(wanted)))


@pytest.mark.parametrize("tied", [False, True])
def test_whole_modules_beside_the_lora(tmp_path: Path, tied: bool) -> None:
    """A head that was tied becomes its own where it was trained alone."""
    if tied:
        folder = make_checkpoint(tmp_path / "base")
        make_lora(tmp_path / "it", folder)
    else:
        folder = tmp_path / "base"
        make("llama").save_pretrained(folder)
        write(tmp_path / "it", "llama list")
    path = tmp_path / "it" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"modules_to_save": ["lm_head"]}), encoding="utf-8")
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    head = torch.randn(table.shape)
    changed(tmp_path / "it", **{f"{PREFIX}lm_head__weight": head})
    merged = merge_checkpoint(folder, tmp_path / "it", tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(after["lm_head.weight"], head)
    assert torch.equal(after["model.embed_tokens.weight"], table)
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert (merged.is_untied, config["tie_word_embeddings"]) == (tied, False)
    assert vivace.load(tmp_path / "out").model.config.tied_head is False


def test_what_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "base")
    lora = make_lora(tmp_path / "it", folder)
    with pytest.raises(ConfigError, match="is the base or the adapter itself"):
        merge_checkpoint(folder, lora, folder)
    other = make_checkpoint(tmp_path / "other", seed=3)
    with pytest.raises(MismatchError, match="was trained on base"):
        merge_checkpoint(other, lora, tmp_path / "out")
    (tmp_path / "codes").mkdir()
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "codes" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(UnsupportedError, match="stored in codes"):
        merge_checkpoint(tmp_path / "codes", lora, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text()) | {"quantization": {"group_size": 64, "bits": 4}}
    (tmp_path / "codes" / "config.json").write_text(json.dumps(config), encoding="utf-8")  # as MLX says it
    with pytest.raises(UnsupportedError, match="stored in codes"):
        merge_checkpoint(tmp_path / "codes", lora, tmp_path / "out")
    normed, size = make_lora(tmp_path / "normed", folder), vivace.load(folder).model.config
    changed(
        normed,
        **{
            f"{PREFIX}model__embed_tokens__lora_embedding_A": torch.zeros(4, size.vocab_size),
            f"{PREFIX}model__embed_tokens__lora_embedding_B": torch.zeros(size.width, 4),
            f"{PREFIX}model__embed_tokens__lora_magnitude_vector": torch.ones(size.width),
        },
    )
    with pytest.raises(UnsupportedError, match=r"is a DoRA of model\.embed_tokens, which cannot be merged"):
        merge_checkpoint(folder, normed, tmp_path / "out")
    changed(lora, **{f"{PREFIX}model__layers__9__mlp__up_proj__weight": torch.zeros(2, 2)})
    with pytest.raises(MismatchError, match="which this model does not have"):
        merge_checkpoint(folder, lora, tmp_path / "out")
    path = lora / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layer_replication": [[0, 1]]}), encoding="utf-8")
    with pytest.raises(UnsupportedError, match=r"layer_replication.*cannot be merged"):
        merge_checkpoint(folder, lora, tmp_path / "out")
    assert not (tmp_path / "out").exists()


_ODD: dict[str, dict[str, Any]] = {
    "dora": {"target_modules": "all-linear", "r": 3, "lora_alpha": 4, "use_dora": True},
    "biases": {"target_modules": "all-linear", "r": 2, "bias": "all"},
    "own biases": {"target_modules": "all-linear", "r": 2, "bias": "lora_only"},
    "head": {"target_modules": ["lm_head"], "r": 2},
    "whole head": {"target_modules": "all-linear", "r": 2, "modules_to_save": ["lm_head"]},
}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed")
@pytest.mark.parametrize("kind", [*_ODD, "embedding"])
def test_what_only_peft_makes(base: tuple[str, Path], tmp_path: Path, kind: str) -> None:
    """PEFT makes it and computes with it; the merged checkpoint computes the same."""
    family, folder = base
    settings = _ODD.get(kind) or {"target_modules": ["wte" if family == "gpt2" else "embed_tokens"], "r": 2}
    (tmp_path / "base").symlink_to(folder)
    (tmp_path / "ids.json").write_text(json.dumps(IDS.tolist()), encoding="utf-8")
    (tmp_path / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    script = Path(__file__).with_name("peft_cases.py")
    found = subprocess.run([sys.executable, script, "make", tmp_path], capture_output=True, text=True, check=True)
    theirs = torch.tensor(json.loads(found.stdout.splitlines()[-1]))
    merge_checkpoint(folder, tmp_path / "adapter", tmp_path / "out")
    torch.testing.assert_close(logits_of(tmp_path / "out"), theirs, atol=1e-4, rtol=1e-4)
