"""Measures how good the guesses of every drafter that ships are, and writes the bands that the tests hold them to.

    python -m benchmarks.guesses --json benchmarks/results/guesses/shipped.json

A drafter may be crippled without any text changing: it only guesses worse, and decoding is slower. So the tests answer
the same prompts again and compare tokens a target pass with this file (``tests/benchmarks/test_guesses.py``). Methods
whose tokens leave early are held to their mean exit layer instead.

One kind of kernels gives the same figures every time. Another rounds sums in another order, so that here and there a
guess, or a token that two were nearly as likely for, is another one. Every kind that runs here is measured, and a band
goes from the lowest figure to the highest, widened on both sides for kinds that do not run here. AVX2 and PyTorch were
up to 2.5 % apart, and a margin is about twice that: the few prompts have some forty passes, so one of them is 2.5 %,
too. A drafter that is broken loses far more (``tests/mutants``).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import vivace
from vivace.engine import SHIPPED, Engine
from vivace.evaluate.provenance import provenance
from vivace.files import write_text
from vivace.kernels.library import open_library, runnable
from vivace.prompts import PACKAGED, packaged_prompts

FULL, SHORT = 20, 4
"""Prompts, half of them of each packaged set; tests answer the few, and all of them before a release."""
MARGINS = {FULL: 0.04, SHORT: 0.06}
"""By the number of prompts, how far a band is widened on either side."""
MAX_NEW_TOKENS = 48


def shipped_methods() -> list[str]:
    """Methods that draft or leave early with weights that ship: those of adapters, and the draft model."""
    return [*sorted(path.name for path in (SHIPPED / "adapters").iterdir()), "multirate+lookup", "draft"]


def measure(engine: Engine, method: str, num_prompts: int = FULL, *, batch_size: int = 1) -> dict[str, float]:
    """Tokens a target pass over the prompts, and the mean exit layer where tokens may leave early.

    Args:
        engine: The shipped model.
        method: How it decodes.
        num_prompts: How many of the packaged prompts are answered.
        batch_size: Prompts decoded together.
    """
    each = num_prompts // len(PACKAGED)
    asked = [prompt.request for name in PACKAGED for prompt in packaged_prompts(name)[:each]]
    settings: Mapping[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "logprobs": False}
    stats = [r.stats for r in engine.generate(asked, method=method, batch_size=batch_size, **settings)]
    found = {"tokens_per_target_pass": sum(s.num_tokens for s in stats) / sum(s.num_spec_steps for s in stats)}
    layers = [layer for s in stats for layer in s.exit_layers]
    return found | ({"mean_exit_layer": sum(layers) / len(layers)} if layers else {})


def bands(measured: Sequence[Mapping[str, float]], margin: float) -> dict[str, list[float]]:
    """Lowest and highest of each figure, widened."""
    return {
        name: [min(m[name] for m in measured) * (1 - margin), max(m[name] for m in measured) * (1 + margin)]
        for name in measured[0]
    }


def main(args: Sequence[str]) -> None:
    """Measure every method on every kernel that runs here, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="Write the results there.")
    target = parser.parse_args(args).json
    kernels = ["torch", *runnable(open_library())]
    engines = {name: vivace.load(kernels=name) for name in kernels}
    methods: dict[str, Any] = {}
    for method in shipped_methods():
        methods[method] = {}
        for count, margin in MARGINS.items():
            measured = {name: measure(engine, method, count) for name, engine in engines.items()}
            methods[method][count] = {"measured": measured, "bands": bands(list(measured.values()), margin)}
            print(method, count, json.dumps(measured), flush=True)
    report = {
        "provenance": asdict(provenance(engines["torch"].model.device)),
        "setting": {"max_new_tokens": MAX_NEW_TOKENS, "margins": MARGINS},
        "methods": methods,
    }
    write_text(target, json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
