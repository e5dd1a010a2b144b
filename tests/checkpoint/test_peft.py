"""LoRA files of PEFT, both ways: what PEFT wrote is read, and what we write is what PEFT would have written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import vivace
from tests.checkpoint.peft_cases import FAMILIES, STORED, filled, merged
from tests.parity.families import VOCAB, make
from vivace.adapters.lora import lora_factors, table_of
from vivace.checkpoint.adapters import base_hash
from vivace.checkpoint.peft import BASE, ModuleTable, load_lora, save_lora
from vivace.core.low_rank import PROJECTIONS, site_shapes
from vivace.engine import Engine
from vivace.errors import CorruptError, MismatchError, NotFoundError, UnsupportedError, VivaceError

CASES: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8"))
IDS = torch.randint(1, VOCAB, (2, 19), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make(request.param).save_pretrained(folder)
    return request.param, folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def table(llama: Path) -> ModuleTable:
    engine = vivace.load(llama, kernels="torch")
    return table_of(llama, engine.model)


def write(folder: Path, case: str, **changes: Any) -> dict[str, Tensor]:
    """Write an adapter as PEFT did, with factors of our own."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CASES[case]["config"] | changes
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = filled(CASES[case]["shapes"])
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return tensors


def logits_of(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(IDS).logits
    return found


def test_every_option_of_every_family(base: tuple[str, Path], tmp_path: Path) -> None:
    """Against transformers with the matrices that PEFT would have used, by the factors that PEFT itself reported."""
    family, folder = base
    cases = [name for name in CASES if name.split()[0] == family]
    assert len(cases) == 7
    for case in cases:
        tensors = write(tmp_path / case, case)
        engine = vivace.load(folder, kernels="torch", adapters={"it": tmp_path / case})
        expected = logits_of(merged(make(family), tensors, CASES[case]["scales"]))
        torch.testing.assert_close(engine.logits(IDS, adapter="it"), expected, atol=1e-4, rtol=0, msg=case)
        assert not torch.allclose(engine.logits(IDS), expected, atol=1e-2), case


def test_every_family_has_its_cases() -> None:
    """Seven of each of five; the test above counts those that it runs."""
    assert len(CASES) == 7 * len(FAMILIES) == 35


def own(engine: Engine, ranks: dict[str, int], layers: range | None = None) -> dict[Any, tuple[Tensor, Tensor]]:
    """Factors at our own sites, each with a down factor of its own."""
    shapes = site_shapes(engine.model.config, layers or range(engine.model.config.num_layers), ranks)
    generator = torch.Generator().manual_seed(1)
    return {
        site: (torch.randn(rank, wide, generator=generator) * 0.2, torch.randn(out, rank, generator=generator) * 0.2)
        for site, (wide, rank, out) in shapes.items()
    }


@pytest.mark.parametrize(
    ("ranks", "layers"),
    [
        (dict.fromkeys(PROJECTIONS, 4), None),
        ({"q": 2, "v": 3, "down": 5}, None),
        ({"k": 2, "up": 4}, range(1, 3)),
    ],
    ids=["all", "unequal ranks", "some layers"],
)
def test_what_we_write_we_read(
    base: tuple[str, Path], tmp_path: Path, ranks: dict[str, int], layers: range | None
) -> None:
    """The same products at every site, whatever transformers fuses; the configuration says which modules these are."""
    _, folder = base
    engine = vivace.load(folder, kernels="torch")
    names, factors = table_of(folder, engine.model), own(engine, ranks, layers)
    save_lora(tmp_path, factors, names, scale=0.5, base=base_hash(folder))
    read = load_lora(tmp_path, names, base_hash(folder))
    assert read.base == base_hash(folder)
    for site, (down, up) in read.factors.items():
        wanted = factors[site][1] @ factors[site][0] * 0.5 if site in factors else torch.zeros(len(up), down.shape[1])
        torch.testing.assert_close(up @ down, wanted)
    assert set(factors) <= set(read.factors)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed")
def test_peft_reads_what_we_write(base: tuple[str, Path], tmp_path: Path) -> None:
    """In a process of its own, which does not import vivace."""
    _, folder = base
    engine = vivace.load(folder, kernels="torch")
    factors = own(engine, {"q": 2, "v": 3, "o": 4, "gate": 2, "up": 2, "down": 5})
    save_lora(tmp_path / "adapter", factors, table_of(folder, engine.model), scale=0.5, base=base_hash(folder))
    shutil.copytree(folder, tmp_path / "base")
    (tmp_path / "ids.json").write_text(json.dumps(IDS.tolist()), encoding="utf-8")
    script = Path(__file__).with_name("peft_cases.py")
    found = subprocess.run([sys.executable, script, "read", tmp_path], capture_output=True, text=True, check=True)
    theirs = torch.tensor(json.loads(found.stdout.splitlines()[-1]))
    engine.adapters.add("it", tmp_path / "adapter")
    torch.testing.assert_close(engine.logits(IDS, adapter="it"), theirs, atol=1e-4, rtol=0)


def test_a_base_of_another_hash_is_refused(llama: Path, table: ModuleTable, tmp_path: Path) -> None:
    tensors = write(tmp_path, "llama list")
    assert load_lora(tmp_path, table, base_hash(llama)).base is None
    save_file(tensors, tmp_path / "adapter_model.safetensors", metadata={"format": "pt", BASE: "f" * 64})
    with pytest.raises(MismatchError, match="was trained on base ffffffffffff, this model is"):
        load_lora(tmp_path, table, base_hash(llama))


_PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"


def _drop(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{_PREFIX}.lora_B.weight"]


def _drop_pair(tensors: dict[str, Tensor]) -> None:
    for name in "AB":
        del tensors[f"{_PREFIX}.lora_{name}.weight"]


def _not_a_number(tensors: dict[str, Tensor]) -> None:
    tensors[f"{_PREFIX}.lora_A.weight"][0, 0] = float("nan")


def _wide(tensors: dict[str, Tensor]) -> None:
    tensors[f"{_PREFIX}.lora_A.weight"] = torch.zeros(4, 64)


def _elsewhere(module: str, leaf: str = "lora_A.weight") -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"base_model.model.{module}.{leaf}"] = torch.zeros(4, 4)

    return change


@pytest.mark.parametrize(
    ("change", "config", "error", "says"),
    [
        (_drop, {}, CorruptError, "lacks lora_B of layers.0.self_attn.q_proj"),
        (_drop_pair, {}, CorruptError, "lacks the factors of layers.0.self_attn.q_proj"),
        (_not_a_number, {}, CorruptError, "numbers that are not finite"),
        (_wide, {}, MismatchError, r"lora_A of layers.0.self_attn.q_proj is \[4, 64\], expected \[4, 32\]"),
        (_elsewhere("model.layers.7.self_attn.q_proj"), {}, MismatchError, "which this model does not have"),
        (_elsewhere("model.layers.0.mlp.experts.1.up_proj"), {}, UnsupportedError, "experts of a mixture"),
        (_elsewhere("lm_head"), {}, UnsupportedError, "the head, which a request cannot bring; merge it"),
        (_elsewhere("model.embed_tokens", "lora_embedding_A"), {}, UnsupportedError, "the embedding; merge it"),
        (_elsewhere("model.embed_tokens", "weight"), {}, UnsupportedError, "the embedding; merge it"),
        (None, {"r": 0}, CorruptError, "has rank 0"),
        (None, {"r": 8}, MismatchError, "its rank is not the one its configuration says"),
        (None, {"r": "many"}, CorruptError, "is not a LoRA's configuration"),
        (None, {"r": 4.5}, CorruptError, "expected a whole number, found 4.5"),
        (None, {"r": float("inf")}, CorruptError, "expected a whole number, found inf"),
        (None, {"layers_to_transform": [1e999]}, CorruptError, "expected a whole number, found inf"),
        (None, {"lora_alpha": float("nan")}, CorruptError, "expected a number of at most 1e[+]30"),
        (None, {"lora_alpha": 10**400}, CorruptError, "expected a number of at most 1e[+]30"),
        (None, {"alpha_pattern": {"q_proj": float("inf")}}, CorruptError, "expected a number of at most 1e[+]30"),
        (None, {"lora_alpha": "16"}, CorruptError, "expected a number, found '16'"),
        (None, {"use_rslora": "false"}, CorruptError, "expected true or false, found 'false'"),
        (None, {"target_modules": "("}, CorruptError, "is not a LoRA's configuration"),
        (None, {"target_modules": ["c_attn"]}, MismatchError, "adapts c_attn, and this model has no such modules"),
        (None, {"target_modules": ["q_proj"]}, CorruptError, "which adapter_config.json does not name"),
        (None, {"use_dora": True}, UnsupportedError, "is a DoRA .*merge it"),
        (None, {"bias": "lora_only"}, UnsupportedError, 'bias = "lora_only".*merge it'),
        (None, {"modules_to_save": ["lm_head"]}, UnsupportedError, "modules_to_save.*merge it"),
        (None, {"layer_replication": [[0, 1]]}, UnsupportedError, "layer_replication"),
        (None, {"trainable_token_indices": [1]}, UnsupportedError, "trainable_token_indices"),
        (None, {"init_lora_weights": "pissa_niter_16"}, UnsupportedError, 'init_lora_weights = "pissa_niter_16"'),
        (None, {"init_lora_weights": "OLoRA"}, UnsupportedError, 'init_lora_weights = "OLoRA"'),
        (None, {"peft_type": "LOHA"}, UnsupportedError, "of the kind LOHA; only LORA is read"),
    ],
)
def test_bad_files(
    table: ModuleTable,
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], None] | None,
    config: dict[str, Any],
    error: type[VivaceError],
    says: str,
) -> None:
    tensors = write(tmp_path, "llama list", **config)
    if change is not None:
        change(tensors)
        save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(error, match=says) as caught:
        load_lora(tmp_path, table)
    assert "\n" not in str(caught.value)


def test_half_a_file(table: ModuleTable, tmp_path: Path) -> None:
    write(tmp_path, "llama list")
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CorruptError, match="truncated"):
        load_lora(tmp_path, table)
    weights.unlink()
    with pytest.raises(NotFoundError, match=r"has no adapter_model\.safetensors"):
        load_lora(tmp_path, table)
    with pytest.raises(NotFoundError, match="there is no adapter directory"):
        load_lora(tmp_path / "nowhere", table)


def test_targets_that_are_not_said_are_those_of_the_file(table: ModuleTable, tmp_path: Path) -> None:
    write(tmp_path, "llama list", target_modules=None)
    assert len(load_lora(tmp_path, table).factors) == 9


@pytest.mark.parametrize(
    ("config", "left"),
    [
        ({"exclude_modules": r"model\.layers\.0\..*"}, "model.layers.0."),
        ({"exclude_modules": ["model.layers.1.self_attn.q_proj"]}, "model.layers.1.self_attn.q_proj"),
        ({"target_modules": r"(?!model\.layers\.2\.).*\.(q_proj|v_proj|down_proj)"}, "model.layers.2."),
    ],
    ids=["an expression", "a whole name", "a look-ahead"],
)
def test_modules_are_left_out_by_the_names_they_have_in_the_file(
    table: ModuleTable, tmp_path: Path, config: dict[str, Any], left: str
) -> None:
    """PEFT compares whole names, so what names the root too leaves a module out as much as an ending does."""
    tensors = write(tmp_path, "llama list", **config)
    kept = {name: value for name, value in tensors.items() if left not in name}
    save_file(kept, tmp_path / "adapter_model.safetensors")
    assert len(load_lora(tmp_path, table).factors) == len(kept) // 2 < len(tensors) // 2


def test_patterns_are_of_the_names_in_the_file(table: ModuleTable, tmp_path: Path) -> None:
    """A model that was wrapped without its head has no root before its layers."""
    shapes = {name.replace(".model.model.", ".model."): 0 for name in CASES["llama list"]["shapes"]}
    config = {"alpha_pattern": {r"^layers\.0\.self_attn\.q_proj": 60}}
    tensors = write(tmp_path, "llama list", **config)
    save_file(dict(zip(shapes, tensors.values(), strict=True)), tmp_path / "adapter_model.safetensors")
    read, plain = load_lora(tmp_path, table).factors, tensors[f"{_PREFIX}.lora_B.weight"]
    torch.testing.assert_close(read[(0, "q")][1], plain * 60 / 4)


def test_a_file_that_is_known_is_read_in_one_go(base: tuple[str, Path], tmp_path: Path) -> None:
    """The same factors of every site, also of modules that several sites share, unless there are several scales."""
    family, folder = base
    model = vivace.load(folder, kernels="torch", dtype="bfloat16").model
    names, at_once = table_of(folder, model), 0
    for case in (name for name in CASES if name.split()[0] == family):
        write(tmp_path / case, case)
        factors, _, file = lora_factors(tmp_path / case, names, model, base_hash(folder))
        if file is None:
            assert case.endswith("patterns")
            continue
        again, at_once = file.read(), at_once + 1
        for found, right in ((again.down, factors.down), (again.up, factors.up)):
            assert found.keys() == right.keys()
            assert all(torch.equal(found[site], right[site]) for site in right)
    assert at_once >= 6


def test_fused_modules_are_written_with_one_down_factor_where_they_share_it(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    make("phi3").save_pretrained(folder)
    engine = vivace.load(folder, kernels="torch")
    names = table_of(folder, engine.model)
    write(tmp_path / "theirs", "phi3 list")
    save_lora(tmp_path / "ours", load_lora(tmp_path / "theirs", names).factors, names)
    shapes = {n: list(t.shape) for n, t in load_file(tmp_path / "ours" / "adapter_model.safetensors").items()}
    assert shapes == CASES["phi3 list"]["shapes"]
