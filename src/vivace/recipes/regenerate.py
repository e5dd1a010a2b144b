"""Generates the base's own answers as training text, since drafts have to agree with the text that the base writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from vivace.checkpoint.adapters import base_hash
from vivace.core.cuda.backend import graphs_backend
from vivace.engine import Engine, load
from vivace.errors import CorruptError, MismatchError
from vivace.files import whole_lines, write_text
from vivace.kernels.choice import choose
from vivace.methods.composition import Methods
from vivace.recipes.answers import MODEL_DIGITS
from vivace.train.variation import Pair

WORN = "worn"
"""Name of the LoRA that a decoder wears while weights are trained beside it."""


@dataclass(frozen=True)
class OverLora:
    """A LoRA that a frozen decoder wears while weights are trained beside it (``over_lora.py``)."""

    folder: Path
    version: str
    """Hash of its files."""


def placed(engine: Engine) -> dict[str, Any]:
    """Return the device and precision of an engine, as options of ``load``."""
    return {"device": str(engine.model.device), "dtype": str(engine.model.dtype).removeprefix("torch.")}


def decodes_apart(device: torch.device) -> bool:
    """Return whether a decoder on a device decodes on other kernels than it is trained on, which lay out a copy."""
    return choose(device=device).body is not None


def as_it_decodes(engine: Engine, adapters: Mapping[str, Path] | None = None, over: OverLora | None = None) -> Engine:
    """Return the same decoder on the kernels that decode fastest, with weights of methods by name, and what it wears.

    While training it runs on PyTorch's kernels. Where the fastest leave weights as they are, as graphs on a GPU do, it
    is not loaded twice; whole texts, as a training reads them, run as before.
    """
    stored = engine.storage
    if stored is None and not decodes_apart(engine.model.device):
        if engine.model.device.type == "cuda" and engine.model.backend.span is None:
            engine.model.run_on(graphs_backend(engine.model.dtype))
        second, memory = engine.methods.second, engine.memory
        return engine.drafting_by(Methods(engine.model, engine.folder, adapters or {}, second, memory=memory))
    worn = {} if over is None else {WORN: over.folder}
    made = load(
        engine.folder,
        **placed(engine),
        ignore_config_keys=engine.ignored_config_keys,
        adapters={**(adapters or {}), **worn},
        memory=engine.memory.limit_bytes,
        reader="auto" if stored is None else stored.reader.reader.name,
    )
    if worn:
        made.adapters.default = WORN
    return made


def regenerated(
    engine: Engine, prompts: Sequence[str], path: Path, note: Callable[[str], None], over: OverLora | None = None
) -> list[Pair]:
    """Generate greedy answers, appending them to a file so that a killed run continues after the last one.

    Args:
        engine: the base, wearing the LoRA if there is one.
        prompts: texts, in an order that is the same in every run.
        path: file with one JSON line per answer; an incomplete last line is written again.
        note: receives a line of progress after every batch.
        over: the LoRA; answers of the base alone, or with another, are another model's.

    Returns:
        Pairs of prompt and answer, without the prompts whose answer did not end within the length limit.

    Raises:
        MismatchError: the file has answers of another model, or to other prompts.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    model = base_hash(engine.folder)
    if over is not None:
        model = sha256(f"{model} {over.version}".encode()).hexdigest()
    done, model = complete_lines(path), model[:MODEL_DIGITS]
    known = zip(done, prompts, strict=False)
    if any(row.get("model") != model for row in done) or any(row["prompt"] != prompt for row, prompt in known):
        raise MismatchError(
            f"{path} has answers of another model or to other prompts; delete it, or name another folder"
        )
    if done:
        note(f"{len(done)} of {len(prompts)} answers were regenerated before")
    with path.open("a", encoding="utf-8") as file:
        for first in range(len(done), len(prompts), 64):
            asked = prompts[first : first + 64]
            for prompt, result in zip(asked, _answers(engine, asked), strict=True):
                done.append({"prompt": prompt, "reference": result, "model": model})
                file.write(json.dumps(done[-1], ensure_ascii=False) + "\n")
            file.flush()
            note(f"regenerated {len(done)} of {len(prompts)} answers")
    return [(row["prompt"], row["reference"]) for row in done[: len(prompts)] if row["reference"]]


def _answers(engine: Engine, prompts: Sequence[str]) -> list[str]:
    results = engine.generate(list(prompts), method="plain", do_sample=False, max_new_tokens=96, logprobs=False)
    return [result.text if result.finish_reason == "stop" else "" for result in results]


def complete_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines whose writer may have been killed, cutting off an incomplete last line.

    Raises:
        CorruptError: a complete line is not a JSON object.
    """
    if not path.exists():
        return []
    try:
        whole = whole_lines(path)
        rows = [json.loads(line) for line in whole.split("\n")[:-1]]
    except ValueError as exc:
        raise CorruptError(f"{path} is not a file of JSON lines: {exc}; delete it to begin again") from exc
    if strange := next(
        (row for row in rows if not isinstance(row, dict) or not {"prompt", "messages"} & row.keys()), None
    ):
        raise CorruptError(f"{path} has a line that is no answer: {str(strange)[:60]}; delete it to begin again")
    if len(whole.encode()) != path.stat().st_size:
        write_text(path, whole)
    return rows
