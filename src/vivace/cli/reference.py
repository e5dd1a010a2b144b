"""Comparison of plain decoding with the checkpoint, for commands that compare other methods with plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vivace.cli.console import console

if TYPE_CHECKING:
    from vivace.engine import Engine
    from vivace.evaluate.benchmark import BenchmarkPrompt
    from vivace.evaluate.reference import Plainness

NUM_SHOWN = 5
"""Number of differences that a command prints; its JSON has all of them."""
FROM_FILE = "the checkpoint in float32, layer by layer in PyTorch, without a cache"
"""Reference of a model whose weights are as in its file."""
AS_KEPT = "the same weights and kernels, layer by layer, without a cache"
"""Reference of a model whose weights are quantized or read from a store."""


def compare_plain(
    engine: Engine, questions: Sequence[BenchmarkPrompt], answers: Sequence[Sequence[int]]
) -> tuple[str, Plainness]:
    """Compare plain answers with their reference; return a description of the reference, and the differences.

    Args:
        engine: the engine that answered.
        questions: the prompts.
        answers: new tokens of each answer.
    """
    from vivace.checkpoint.codes import multiplies_codes
    from vivace.engine import Options
    from vivace.evaluate.reference import Text, beside_checkpoint, beside_itself

    sampling = engine.sampling(Options(do_sample=False))
    texts = [Text(q.token_ids, tuple(answer)) for q, answer in zip(questions, answers, strict=True)]
    has_few_bits = engine.weights not in ("bf16", "exact12")
    if engine.storage is not None or has_few_bits:
        return AS_KEPT, beside_itself(engine.model, texts, sampling, has_few_bits=has_few_bits)
    rounds = multiplies_codes(engine.model)
    return FROM_FILE, beside_checkpoint(engine.folder, engine.model, texts, sampling, rounds_inputs=rounds)


def plain_json(what: str, found: Plainness) -> dict[str, Any]:
    """Return the differences as they are written to JSON."""
    departures = [{**asdict(one), "is_error": one.is_error} for one in found.departures]
    return {
        "reference": what,
        "num_prompts": found.num_prompts,
        "num_tokens": found.num_tokens,
        "identical": not departures,
        "departures": departures,
        "distance": found.distance,
        "usual_distance": found.usual_distance,
        "is_far": found.is_far,
    }


def plain_lines(what: str, found: Plainness) -> list[str]:
    """Return the differences as lines for people: a verdict, then the differences with the largest gaps."""
    same = found.num_prompts - found.num_different
    verdict = "no" if found.departures else "yes"
    lines = [f"plain: identical: {verdict} ({same} of {found.num_prompts} answers beside {what})"]
    widest = sorted(found.departures, key=lambda one: (not one.is_error, -one.gap))
    for one in widest[:NUM_SHOWN]:
        limit = "" if one.rounding is None else f", rounding explains {one.rounding:.4g}"
        gaps = f"logits {one.gap:.4g} apart, the top two {one.top_two_gap:.4g}"
        lines.append(f"  prompt {one.prompt + 1}, token {one.position + 1}: {gaps}{limit}")
    if len(widest) > NUM_SHOWN:
        lines.append(f"  and {len(widest) - NUM_SHOWN} more")
    if found.distance is not None:
        usual = "inputs are in eight bits"
        if found.usual_distance is not None:
            usual = f"those of PyTorch {found.usual_distance:.2g}"
        lines.append(f"  its logits are {found.distance:.2g} from float32's, {usual}")
    return lines


def complain(found: Plainness) -> bool:
    """Return whether plain decoding differs by more than rounding explains, and report it on stderr if so."""
    report = "please report this with the model and the output of vivace doctor"
    if found.errors:
        console.error(
            f"plain decoding wrote {len(found.errors)} of {found.num_tokens} tokens that rounding does not explain; "
            f"{report}"
        )
    if found.is_far:
        console.error(
            f"logits of plain decoding are {found.distance:.2g} from float32's, where rounding explains about "
            f"{found.usual_distance:.2g}; {report}"
        )
    return bool(found.errors) or found.is_far
