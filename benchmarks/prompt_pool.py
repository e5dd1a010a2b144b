"""Does choosing a soft prompt help a rounded model? ``python -m benchmarks.prompt_pool MODEL FILE FILE --json OUT``.

A small pilot of arXiv:2310.00867. Every matrix of the layers is rounded one by one to a few bits (groups of 64 inputs,
least and largest value). One soft prompt of each length is learnt from each training file; they make the pool. On
held-back rows of all files together the report has the mean loss of the answers' tokens: of the model as stored and
rounded, behind each member, behind the one that the first layer chooses, behind one drawn, behind the best for each row
(which nobody knows beforehand), and with a LoRA of about as many numbers as one member. Intervals are paired.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import vivace
from vivace.adapters.pool.choice import scores_of
from vivace.adapters.pool.pool import PromptPool
from vivace.adapters.pool.training import SoftPrompt, SoftPromptObjective
from vivace.adapters.training import LoraObjective, LoraWeights
from vivace.core.low_rank import site_shapes
from vivace.engine import Engine
from vivace.evaluate.provenance import provenance
from vivace.prompts import load_prompts
from vivace.train.data import DecoderObjective, Rows, TokenBatch, pairs_of
from vivace.train.next_token import NextToken

GROUP = 64
"""Inputs that share a range of values."""


def round_layers(engine: Engine, bits: int) -> None:
    """Round every matrix of the layers, in place."""
    most = 2**bits - 1
    with torch.no_grad():
        for weight in engine.model.layers.parameters():
            if weight.dim() == 2:
                parts = (
                    weight.detach()
                    .float()
                    .unflatten(1, (-1, GROUP if weight.shape[1] % GROUP == 0 else weight.shape[1]))
                )
                least, largest = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
                step = ((largest - least) / most).clamp_min(1e-12)
                weight.data = (((parts - least) / step).round() * step + least).flatten(1).to(weight.dtype)


def train(engine: Engine, objective: DecoderObjective, batches: Sequence[TokenBatch], steps: int, rate: float) -> float:
    """Learn by Adam with a linear fall of the rate; return the seconds of processor time."""
    params = [p for group in objective.groups() for p in group["params"]]  # type: ignore[attr-defined]
    optimiser, begun = torch.optim.Adam(params, lr=rate), time.process_time()
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 10) * (1 - step / steps)
        optimiser.zero_grad()
        for part, _ in objective.losses(engine.model, batches[step % len(batches)]):
            part.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(params, 1.0)
        optimiser.step()
    return time.process_time() - begun


@torch.no_grad()
def losses(engine: Engine, objective: DecoderObjective, rows: Sequence[TokenBatch]) -> Tensor:
    """Return the mean loss of the scored tokens of each row."""
    return torch.tensor([sum(seen.get("loss", 0.0) for _, seen in objective.losses(engine.model, row)) for row in rows])


def interval(difference: Tensor, seed: int = 0, draws: int = 2000) -> dict[str, float]:
    """Return the mean of paired differences and the ends of its 95 % bootstrap interval."""
    generator = torch.Generator().manual_seed(seed)
    means = difference[torch.randint(len(difference), (draws, len(difference)), generator=generator)].mean(1)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975])).tolist()
    return {"mean": float(difference.mean()), "low": low, "high": high}


def run(model: Path, files: Sequence[Path], asked: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the pilot."""
    torch.manual_seed(0)
    engine = vivace.load(model, kernels="torch", dtype="float32")
    encode = Rows(engine.tokenizer, 256, engine.model.device)
    pairs = [pairs_of(load_prompts(path)) for path in files]
    for each in pairs:
        random.Random(0).shuffle(each)
    held = [pair for each in pairs for pair in each[: asked.held_back]]
    rows = [batch for pair in held for batch in encode.batches([pair], 256)]
    plain = NextToken(engine.model)
    found = {"stored": losses(engine, plain, rows)}
    round_layers(engine, asked.bits)
    found["rounded"] = losses(engine, plain, rows)
    members: dict[str, SoftPrompt] = {}
    seconds = {}
    for path, each in zip(files, pairs, strict=True):
        batches = encode.batches(each[asked.held_back : asked.held_back + asked.rows], asked.tokens)
        random.Random(1).shuffle(batches)
        for length in asked.lengths:
            name = f"{path.stem}-{length}"
            members[name] = SoftPrompt.beginning(engine.model, length)
            objective = SoftPromptObjective(engine.model, members[name])
            seconds[name] = train(engine, objective, batches, asked.steps, 0.01)
            found[name] = losses(engine, objective, rows)
            print(name, float(found[name].mean()), seconds[name], flush=True)
    everything = [pair for each in pairs for pair in each[asked.held_back : asked.held_back + asked.rows]]
    batches = encode.batches(everything, asked.tokens)
    random.Random(2).shuffle(batches)
    size = max(weights.embeddings.numel() for weights in members.values())
    layers, shapes = engine.model.config.num_layers, {}
    for layer in range(layers):
        more = site_shapes(engine.model.config, [layer], {"q": 1, "v": 1})
        if sum(low * (wide + out) for wide, low, out in {**shapes, **more}.values()) > size and shapes:
            break
        shapes |= more
    lora = LoraWeights(shapes)
    objective = LoraObjective(engine.model, lora)
    seconds["lora"] = train(engine, objective, batches, asked.steps * len(members) // len(files), 0.003)
    found["lora"] = losses(engine, objective, rows)
    pool = PromptPool(engine.model, {n: w.embeddings.detach() for n, w in members.items()}, engine.memory)
    names, keys = list(members), [member.keys for member in pool.members.values()]
    table = torch.stack([found[name] for name in names])
    contexts = [engine.tokenizer.encode_prompt(text) for text, _ in held]
    choices: dict[str, list[int]] = {}
    for scoring in ("joint", "standalone"):
        scored = torch.tensor([scores_of(engine.model, context, keys, scoring) for context in contexts])  # type: ignore[arg-type]
        choices[scoring] = scored.argmax(1).tolist()
        halves = torch.arange(len(scored)) % 2 == 0
        less = scored / torch.where(halves[:, None], scored[~halves].mean(0), scored[halves].mean(0))
        choices[f"{scoring}, over its mean"] = less.argmax(1).tolist()
    at = torch.arange(len(held))
    for name, chosen in choices.items():
        found[f"chosen ({name})"] = table[torch.tensor(chosen), at]
    found["drawn"] = table.mean(0)
    found["best for each row"] = table.amin(0)
    best = min(names, key=lambda name: float(found[name].mean()))
    return {
        "model": model.name,
        "files": [path.name for path in files],
        "bits": asked.bits,
        "rows": len(held),
        "steps": asked.steps,
        "tokens": asked.tokens,
        "members": {name: len(w.embeddings) for name, w in members.items()},
        "numbers": {"member": size, "lora": sum(p.numel() for p in lora.parameters())},
        "seconds": seconds,
        "loss": {name: interval(values) for name, values in found.items()},
        "best_member": best,
        "against_best_member": {name: interval(values - found[best]) for name, values in found.items() if name != best},
        "choices": {name: dict(Counter(names[place] for place in chosen)) for name, chosen in choices.items()},
    }


def main() -> None:
    """Run the pilot and write a result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[20])
    parser.add_argument("--rows", type=int, default=1000, help="Rows of each file to learn from.")
    parser.add_argument("--held-back", type=int, default=100, help="Rows of each file to measure on.")
    parser.add_argument("--tokens", type=int, default=1024, help="Of a batch, at most.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found = run(asked.model, asked.files, asked)
    text = json.dumps({"provenance": asdict(provenance(torch.device("cpu"))), "pilot": found}, indent=1)
    print(text)
    if asked.json is not None:
        asked.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
