"""Measure how many tokens each shipped drafter has accepted, and write the bands that tests compare with.

    python -m benchmarks.guesses --json benchmarks/results/guesses/shipped.json

An error in a drafter need not change any text: fewer of its tokens are accepted, and decoding is slower. Therefore the
tests answer the same prompts again and compare the tokens per target pass with this file
(``tests/benchmarks/test_guesses.py``). For methods with early exits the mean exit layer is compared instead.

One kind of kernels gives the same figures every time. Other kinds round sums in another order, so that a few draft
tokens differ, and a few tokens whose probabilities are nearly equal. Every kind that runs here is measured, and a band
goes from the lowest figure to the highest, widened on both sides for kinds that do not run here. AVX2 and PyTorch were
up to 2.5 % apart, and the margin is about twice that; the short set of prompts has some forty passes, of which one is
2.5 % too. A broken drafter loses far more (``tests/mutants``).
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
from benchmarks.result_files import write_report
from vivace.engine import SHIPPED, Engine
from vivace.evaluate.provenance import provenance
from vivace.kernels.library import open_library, runnable
from vivace.prompts import TASKS, packaged_prompts

FULL, SHORT = 20, 4
"""Numbers of prompts, half of them from each packaged set: all of them before a release, the few in the default
tests.
"""
MARGINS = {FULL: 0.04, SHORT: 0.06}
"""Share by which a band is widened on both sides, by number of prompts."""
MAX_NEW_TOKENS = 48


def shipped_methods() -> list[str]:
    """Return the methods whose weights ship: those with adapters, and the draft model."""
    return [*sorted(path.name for path in (SHIPPED / "adapters").iterdir()), "multirate+lookup", "draft"]


def measure(engine: Engine, method: str, num_prompts: int = FULL, *, batch_size: int = 1) -> dict[str, float]:
    """Return the tokens per target pass over the prompts, and the mean exit layer if tokens can exit early.

    Args:
        engine: the shipped model.
        method: name of the method.
        num_prompts: number of packaged prompts to answer.
        batch_size: number of prompts decoded together.
    """
    each = num_prompts // len(TASKS)
    asked = [prompt.request for name in TASKS for prompt in packaged_prompts(name)[:each]]
    settings: Mapping[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "logprobs": False}
    stats = [r.stats for r in engine.generate(asked, method=method, batch_size=batch_size, **settings)]
    found = {"tokens_per_target_pass": sum(s.num_tokens for s in stats) / sum(s.num_spec_steps for s in stats)}
    layers = [layer for s in stats for layer in s.exit_layers]
    return found | ({"mean_exit_layer": sum(layers) / len(layers)} if layers else {})


def bands(measured: Sequence[Mapping[str, float]], margin: float) -> dict[str, list[float]]:
    """Return the lowest and highest value of each figure, widened by ``margin``."""
    return {
        name: [min(m[name] for m in measured) * (1 - margin), max(m[name] for m in measured) * (1 + margin)]
        for name in measured[0]
    }


def main(args: Sequence[str]) -> None:
    """Measure every method with every kernel that runs here, and write the file."""
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
    write_report(target, report)


if __name__ == "__main__":
    main(sys.argv[1:])
