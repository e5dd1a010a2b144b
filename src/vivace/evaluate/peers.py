"""Other engines in the benchmark: transformers, its own speculation, and llama.cpp (``llamacpp.py``).

A peer reads the same checkpoint, answers the same token ids with the same number of threads, and is timed in the
same way: tokens after the first block over the time after it, observed through transformers' streamer. transformers
runs in the checkpoint's dtype or in float32, whichever is faster on this machine in a test before the benchmark.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vivace.checkpoint.codes import holds_codes
from vivace.checkpoint.files import is_linked
from vivace.core.footprint import held_bytes
from vivace.errors import ConfigError, UnsupportedError, nearest
from vivace.evaluate.benchmark import BenchmarkPrompt, Trial
from vivace.evaluate.llamacpp import LLAMA_CPP, LlamaCppPeer, enter_llama_cpp
from vivace.evaluate.memory import Holdings, peak_memory

Speculation = Literal["none", "lookup", "assisted"]

TRANSFORMERS: Mapping[str, Speculation] = {
    "transformers": "none",
    "transformers-lookup": "lookup",
    "transformers-assisted": "assisted",
}
"""Kind of speculation of transformers by name on the command line."""

PEERS = (*TRANSFORMERS, *LLAMA_CPP)
"""All names on the command line."""

NUM_LOOKUP_TOKENS = 10
"""``prompt_lookup_num_tokens``: the value in transformers' own documentation."""
HEAT_PROMPTS = 3
"""Number of prompts with which the two dtypes are compared."""


class Stopwatch:
    """A streamer that records when each block of tokens arrives; the first block is the prompt."""

    def __init__(self) -> None:
        self.blocks: list[tuple[float, int]] = []

    def put(self, value: Tensor) -> None:
        """Record the arrival of token ids; transformers calls this."""
        self.blocks.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        """Do nothing; transformers calls this after the last block."""


@dataclass(frozen=True)
class TransformersPeer:
    """A checkpoint run by transformers' ``generate``."""

    name: str
    model: Any
    max_new_tokens: int
    assistant: Any = None

    def answer(self, batch: Sequence[BenchmarkPrompt]) -> Trial:
        """Answer one batch with greedy decoding; shorter prompts are padded on the left."""
        ids, mask = _pad([question.token_ids for question in batch], self.model.device)
        watch = Stopwatch()
        with peak_memory(self.model.device) as peak, torch.inference_mode():
            start = time.perf_counter()
            output = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
                **self._arguments(watch),
            )
            total_s = time.perf_counter() - start
        first_at, num_first = watch.blocks[1]
        return Trial(
            token_ids=tuple(_cut(row, self._end_tokens()) for row in output[:, ids.shape[1] :].tolist()),
            num_first_tokens=num_first,
            decode_s=watch.blocks[-1][0] - first_at,
            total_s=total_s,
            prefill_s=first_at - start,
            peak_memory_bytes=peak.num_bytes,
        )

    def holdings(self, batch: Sequence[BenchmarkPrompt]) -> Holdings:
        """Return the bytes of the model, of the cache after answering a batch, and of the assistant model."""
        ids, mask = _pad([question.token_ids for question in batch], self.model.device)
        settings = {"max_new_tokens": self.max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
        with torch.inference_mode():
            output = self.model.generate(input_ids=ids, attention_mask=mask, **settings)
        entries = [(layer.keys, layer.values) for layer in output.past_key_values.layers]
        return Holdings(*held_bytes(self.model, entries, self.assistant))

    def _arguments(self, watch: Stopwatch) -> dict[str, Any]:
        """Return the arguments of ``generate`` for this kind of speculation, which tell ``watch`` of new tokens."""
        match TRANSFORMERS[self.name]:
            case "lookup":
                return {"streamer": watch, "prompt_lookup_num_tokens": NUM_LOOKUP_TOKENS}
            case "assisted":
                return {"streamer": watch, "assistant_model": self.assistant}
        return {"streamer": watch}

    def _end_tokens(self) -> set[int]:
        """Return the ids that end an answer."""
        found = self.model.generation_config.eos_token_id
        return set() if found is None else set(found) if isinstance(found, list) else {found}


Peer = TransformersPeer | LlamaCppPeer
"""Systems that are other engines."""


@dataclass(frozen=True)
class Heat:
    """The dtype that transformers runs in, and the rates (tokens per second of the whole time) by which it was
    chosen.
    """

    dtype: str
    rates: dict[str, float]


def peer_systems(
    names: Sequence[str],
    folder: Path,
    questions: Sequence[BenchmarkPrompt],
    *,
    max_new_tokens: int,
    device: torch.device,
    batch_size: int = 1,
    draft_folder: Path | None = None,
) -> tuple[list[Peer], Heat | None]:
    """Load the peers of a benchmark.

    Args:
        names: some of `PEERS`.
        folder: the checkpoint.
        questions: the prompts of the benchmark; the first few are used to choose the dtype.
        max_new_tokens: length limit of an answer.
        device: device of the model.
        batch_size: number of prompts answered together, for which llama.cpp allocates its cache.
        draft_folder: the draft model's checkpoint, for ``transformers-assisted``.

    Returns:
        The peers in the order of their names, and how transformers' dtype was chosen if it takes part.

    Raises:
        ConfigError: a name is unknown, or assisted generation has no draft model.
        DependencyError: llama.cpp is named and not installed.
        UnsupportedError: llama.cpp is named and the checkpoint cannot be written for it.
    """
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"no peer {name!r}{nearest(name, PEERS)}")
    if "transformers-assisted" in names and draft_folder is None:
        raise ConfigError("peer transformers-assisted needs a small model that drafts; give --draft-model DIR")
    native = [name for name in names if name in LLAMA_CPP]
    found: dict[str, Peer] = {
        peer.name: peer
        for peer in enter_llama_cpp(native, folder, questions, max_new_tokens=max_new_tokens, batch_size=batch_size)
    }
    heat = None
    if len(native) < len(names):
        heat, model = _hold_heat(folder, questions, max_new_tokens, device)
        wants_assistant = draft_folder is not None and "transformers-assisted" in names
        assistant = _load(draft_folder, heat.dtype, device) if wants_assistant and draft_folder is not None else None
        found |= {
            name: TransformersPeer(name, model, max_new_tokens, assistant) for name in names if name in TRANSFORMERS
        }
    return [found[name] for name in names], heat


def _hold_heat(
    folder: Path, questions: Sequence[BenchmarkPrompt], max_new_tokens: int, device: torch.device
) -> tuple[Heat, Any]:
    """Run transformers in the checkpoint's dtype and in float32; return both rates, and the faster model."""
    rates = {}
    models = {}
    for dtype in ("auto", "float32"):
        if dtype in rates:  # the checkpoint's own
            continue
        model = _load(folder, dtype, device)
        peer = TransformersPeer("transformers", model, max_new_tokens)
        peer.answer(questions[:1])
        trials = [peer.answer([question]) for question in questions[:HEAT_PROMPTS]]
        rates[_dtype(model)] = sum(t.num_tokens for t in trials) / sum(t.total_s for t in trials)
        models[_dtype(model)] = model
    best = max(rates, key=lambda name: rates[name])
    return Heat(best, rates), models[best]


def require_plain(folder: Path) -> None:
    """Refuse a checkpoint that transformers reads otherwise than we do.

    Raises:
        UnsupportedError: its weights are in a GGUF file, or quantized by another program.
    """
    if holds_codes(folder):
        kind = "a GGUF file" if is_linked(folder) else "quantized"
        raise UnsupportedError(f"transformers is compared on folders of plain safetensors, and this model is {kind}")


def _load(folder: Path, dtype: str, device: torch.device) -> Any:
    """Load a model with transformers.

    Raises:
        UnsupportedError: its weights are in a GGUF file, or quantized by another program.
    """
    require_plain(folder)
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()


def _dtype(model: Any) -> str:
    """Return the name of a model's dtype."""
    return str(model.dtype).removeprefix("torch.")


def _pad(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token ids and attention mask, (B, T) each, padded on the left."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, longest - len(row) :] = torch.tensor(row)
        mask[place, longest - len(row) :] = 1
    return ids.to(device), mask.to(device)


def _cut(row: Sequence[int], end_tokens: set[int]) -> tuple[int, ...]:
    """Return the tokens up to and including the first end token."""
    for place, token in enumerate(row):
        if token in end_tokens:
            return tuple(row[: place + 1])
    return tuple(row)
