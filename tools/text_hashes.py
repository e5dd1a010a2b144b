"""Hashes of answers, to show that a change to the code left every text and log-probability as it was, bit for bit.

`python -m tools.text_hashes write FILE` answers sixty packaged prompts (thirty of each set) with every method that
runs on the model that ships, greedily and by sampling with a seed, on every kernel backend of this machine, and writes
one SHA-256 for each combination. `python -m tools.text_hashes check FILE` computes them again and lists what differs.
A hash covers token ids, log-probabilities (as float32 bits) and the reason why each answer ended. Half of the prompts
are answered alone and half in batches of eight, since both paths must keep their bits.

Hashes of the PyTorch backend hold for one kind of processor and one version of torch, which the file names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import vivace
from vivace.answer import Result
from vivace.engine import Engine
from vivace.evaluate.provenance import provenance
from vivace.kernels.choice import choose
from vivace.prompts import packaged_prompts

BACKENDS = ("torch", "avx2", "avx512", "amx")
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "seed": 7},
}
NUM_PROMPTS = 60
NEW_TOKENS = 40


def main() -> None:
    """Write or check a file of hashes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=("write", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--backends", nargs="+", default=available_backends())
    parser.add_argument("--limit", type=int, default=NUM_PROMPTS, help="prompts in all, half of each packaged set")
    arguments = parser.parse_args()
    known = json.loads(arguments.file.read_text()) if arguments.action == "check" else {}
    if known.get("num_prompts", arguments.limit) != arguments.limit:
        parser.error(f"{arguments.file} is of {known['num_prompts']} prompts: give --limit {known['num_prompts']}")
    found = dict(hashes(arguments.backends, arguments.limit))
    if arguments.action == "write":
        machine = provenance(torch.device("cpu"))
        written = {"cpu": machine.cpu, "torch": torch.__version__, "system": platform.system()}
        written |= {"num_prompts": arguments.limit, "hashes": found}
        arguments.file.write_text(json.dumps(written, indent=1) + "\n")
        return
    wrong = differences(known["hashes"], found, arguments.backends)
    print(f"{len(found)} hashes compared with {arguments.file}: {len(wrong)} not as there")
    for line in wrong:
        print(line)
    raise SystemExit(bool(wrong))


def differences(expected: Mapping[str, str], found: Mapping[str, str], backends: Sequence[str]) -> list[str]:
    """Return a line for each combination that differs, or that only one side has; those of other backends are left
    out.
    """
    lines = [
        f"{'differs' if name in expected else 'new'}: {name}" for name in found if expected.get(name) != found[name]
    ]
    asked = [name for name in expected if name.partition("/")[0] in backends]
    return lines + [f"did not run: {name}" for name in asked if name not in found]


def available_backends() -> list[str]:
    """Return the kernel backends that run on this machine."""
    names = []
    for name in BACKENDS:
        try:
            choose(name)
        except vivace.VivaceError:
            continue
        names.append(name)
    return names


def hashes(backends: Sequence[str], limit: int) -> Iterator[tuple[str, str]]:
    """Yield (``backend/method/setting``, hash) for every combination, and print each when it is ready."""
    prompts = [prompt.request for name in ("e2e", "sql") for prompt in packaged_prompts(name)[: limit // 2]]
    for backend in backends:
        engine = vivace.load(kernels=backend)
        for method in [*engine.methods.ready(), "auto"]:
            for setting, options in SETTINGS.items():
                if method == "auto" and setting == "sampled":
                    continue  # what auto drafts depends on timing, and a sampled text depends on what was drafted
                value = digest(answers(engine, prompts, method, options))
                print(f"{backend}/{method}/{setting} {value}", flush=True)
                yield f"{backend}/{method}/{setting}", value


def answers(engine: Engine, prompts: Sequence[Any], method: str, options: dict[str, Any]) -> list[Result]:
    """Answer the even prompts one by one, and the odd ones in batches of eight."""
    options = {"method": method, "max_new_tokens": NEW_TOKENS, "logprobs": True, **options}
    alone = [engine.generate(prompt, **options)[0] for prompt in prompts[::2]]
    return alone + engine.generate(list(prompts[1::2]), batch_size=8, **options)


def digest(results: Sequence[Result]) -> str:
    """Return the SHA-256 over token ids, log-probabilities and reasons of ending."""
    total = hashlib.sha256()
    for result in results:
        total.update(struct.pack(f"<{len(result.token_ids)}q", *result.token_ids))
        total.update(str(result.finish_reason).encode() + b"\0")
        if result.logprobs is not None:
            total.update(struct.pack(f"<{len(result.logprobs)}f", *result.logprobs))
    return total.hexdigest()


if __name__ == "__main__":
    main()
