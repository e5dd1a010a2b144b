"""LoRA adapters as PEFT writes them, for tiny models of five families, with every option that is read.

``python -m tests.checkpoint.peft_cases write`` needs PEFT. It has PEFT make each adapter and writes down what PEFT
stored (its configuration, the names and shapes of its tensors) and the factor by which PEFT multiplied each module, to
``peft.json``. The tests fill factors of these shapes themselves, so that PEFT is not needed to run them.
``python -m tests.checkpoint.peft_cases read FOLDER`` lets PEFT read adapters of ours, and with ``make`` it makes one by
the settings that lie there: both take nothing from vivace.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

STORED = Path(__file__).with_name("peft.json")
FAMILIES = ("llama", "qwen2", "gemma3_text", "phi3", "gpt2")

_SOME = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "qwen2": ["k_proj", "o_proj", "gate_proj"],
    "gemma3_text": ["q_proj", "up_proj", "down_proj"],
    "phi3": ["qkv_proj", "gate_up_proj"],
    "gpt2": ["c_attn", "mlp.c_proj"],
}
_ATTENTION = {"phi3": r".*\.self_attn\.(qkv|o)_proj", "gpt2": r".*\.attn\.c_(attn|proj)"}
_STACK = {"gpt2": "h"}


def options(family: str) -> dict[str, dict[str, Any]]:
    """Settings of PEFT's ``LoraConfig`` by the name of what they try."""
    some, stack = _SOME[family], _STACK.get(family, "layers")
    first = some[0].rpartition(".")[2]
    return {
        "list": {"target_modules": some, "r": 4, "lora_alpha": 6},
        "patterns": {
            **{"target_modules": some, "r": 4, "lora_alpha": 8},
            "rank_pattern": {first: 2, rf"{stack}\.1\..*{some[-1]}": 6},
            "alpha_pattern": {some[-1]: 3, rf"^.*{stack}\.2\..*{first}": 16},
        },
        "rslora": {"target_modules": some, "r": 3, "lora_alpha": 5, "use_rslora": True},
        "expression": {
            "target_modules": _ATTENTION.get(family, r".*\.self_attn\.(q|k|v|o)_proj"),
            **{"r": 2, "lora_alpha": 4},
        },
        "all-linear": {"target_modules": "all-linear", "r": 2, "lora_alpha": 2},
        "layers": {
            **{"target_modules": some, "r": 4, "lora_alpha": 4},
            **{"layers_to_transform": [0, 2], "layers_pattern": stack, "exclude_modules": [some[-1]]},
        },
        "layer": {"target_modules": some, "r": 5, "lora_alpha": 1, "layers_to_transform": 1},
    }


def filled(shapes: dict[str, list[int]], seed: int = 0) -> dict[str, Tensor]:
    """Return factors of these shapes with numbers that depend on nothing but a seed and their order."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def merged(model: nn.Module, tensors: dict[str, Tensor], scales: dict[str, float]) -> nn.Module:
    """Add ``scale B A`` to the matrices of a model of transformers, in place."""
    for module, scale in scales.items():
        down, up = (tensors[f"base_model.model.{module}.lora_{name}.weight"] for name in "AB")
        weight, delta = model.get_submodule(module).weight, scale * up @ down
        weight.data += delta.t() if type(model.get_submodule(module)).__name__ == "Conv1D" else delta
    return model


def _write() -> None:
    """Have PEFT make every adapter and write down what it stored."""
    from peft import LoraConfig, get_peft_model

    from tests.parity.families import make

    found: dict[str, Any] = {}
    for family in FAMILIES:
        for name, settings in options(family).items():
            model = get_peft_model(make(family), LoraConfig(task_type="CAUSAL_LM", **settings))
            scales = {
                path.removeprefix("base_model.model."): module.scaling["default"]
                for path, module in model.named_modules()
                if isinstance(getattr(module, "scaling", None), dict)
            }
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                config = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
                shapes = {n: list(t.shape) for n, t in load_file(Path(folder) / "adapter_model.safetensors").items()}
            kept = {key: value for key, value in config.items() if value is not None}
            if isinstance(kept["target_modules"], list):
                kept["target_modules"] = sorted(kept["target_modules"])
            found[f"{family} {name}"] = {"config": kept, "shapes": shapes, "scales": scales}
    lines = (f"{json.dumps(key)}: {json.dumps(case, sort_keys=True)}" for key, case in sorted(found.items()))
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _read(folder: Path) -> None:
    """Let PEFT put an adapter on the model beside it; print logits of the ids that lie there."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    ids = torch.tensor(json.loads((folder / "ids.json").read_text(encoding="utf-8")))
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder / "adapter").eval()
    with torch.inference_mode():
        sys.stdout.write(json.dumps(model(ids).logits.tolist()))


def _make(folder: Path) -> None:
    """Let PEFT make an adapter by the settings that lie in a folder, with random numbers in all that it trains; print
    logits of the ids that lie there.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    ids = torch.tensor(json.loads((folder / "ids.json").read_text(encoding="utf-8")))
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder / "adapter")
    with torch.inference_mode():
        sys.stdout.write(json.dumps(model(ids).logits.tolist()))


if __name__ == "__main__":
    _write() if sys.argv[1] == "write" else (_read if sys.argv[1] == "read" else _make)(Path(sys.argv[2]))
