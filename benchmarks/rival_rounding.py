"""Round a model as other projects do, into folders that ``benchmarks.palette_quality`` judges beside ours.

    python -m benchmarks.rival_rounding hqq|autoround --model M --data FILE --out DIR

The projects have to be installed (``hqq``, ``auto-round``). The folder has plain safetensors with the numbers that the
other project would compute with, and ``bits.json``, which says how many bits it would store for each weight.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from vivace.checkpoint.files import resolve
from vivace.checkpoint.tokenizer import load_tokenizer
from vivace.palette.texts import read_texts

GROUP = 64
"""Weights that share a scale and a zero point, as in our palettes."""


def hqq(model: nn.Module, bits: int) -> float:
    """Round the layers' matrices by half-quadratic quantization (Badri and Shaji 2023), which reads no text.

    Returns:
        The bits of a weight, with a scale and a zero point of 16 bits for each group.
    """
    from hqq.core.quantize import Quantizer  # type: ignore[import-not-found]

    for module in _matrices(model):
        codes, meta = Quantizer.quantize(
            module.weight.data, nbits=bits, group_size=GROUP, axis=1, device="cpu", compute_dtype=torch.float32
        )
        module.weight.data = Quantizer.dequantize(codes, meta).to(module.weight.dtype)
    return bits + 32 / GROUP


def autoround(model: nn.Module, tokenizer: Any, rows: list[list[int]], bits: int, iterations: int) -> float:
    """Round them by signed gradient descent block by block (Cheng et al. 2023, arXiv:2309.05516).

    Returns:
        The bits of a weight, with a scale of 16 bits and a zero point of ``bits`` for each group.
    """
    from auto_round import AutoRound  # type: ignore[import-not-found]

    batches = [{"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row))} for row in rows]
    rounding = AutoRound(
        model, tokenizer, scheme="W4A16", bits=bits, group_size=GROUP, sym=False, iters=iterations, dataset=batches,
        seqlen=len(rows[0]), nsamples=len(rows), batch_size=4, device_map="cpu", enable_torch_compile=False,
    )  # fmt: skip
    rounding.quantize()
    return bits + (16 + bits) / GROUP


def _matrices(model: nn.Module) -> list[nn.Linear]:
    return [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in f".{name}"]


def main() -> None:
    """Round and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=("hqq", "autoround"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="text to round by; hqq needs none")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    from transformers import AutoModelForCausalLM

    source = resolve(options.model)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    if options.method == "hqq":
        bits = hqq(model, options.bits)
    else:
        tokenizer = load_tokenizer(source)
        texts = read_texts(
            options.data, tokenizer, num_tokens=options.tokens, longest=options.length, tokens_per_batch=options.length
        )
        tokens = [token for batch in texts.calibration for token in batch.tokens.flatten().tolist()]
        rows = [tokens[at : at + options.length] for at in range(0, len(tokens) - options.length + 1, options.length)]
        bits = autoround(model, tokenizer.inner, rows, options.bits, options.iterations)
    count = sum(module.weight.numel() for module in _matrices(model))
    rest = sum(p.numel() for p in model.parameters()) - count
    shutil.copytree(source, options.out, ignore=shutil.ignore_patterns("*.safetensors*", "adapters"))
    state = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, options.out / "model.safetensors", metadata={"format": "pt"})
    facts = {"matrix_bits": bits, "all_bits": (bits * count + 16 * rest) / (count + rest)}
    (options.out / "bits.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
    print(options.out, facts)


if __name__ == "__main__":
    main()
