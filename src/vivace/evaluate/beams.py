"""Beam search measured: this engine, transformers and CTranslate2 on the same ids, threads and settings, in turns.

Every system answers all prompts in batches; systems take turns, repeat by repeat, so that what else the machine does
hits all of them, and medians are reported. transformers runs in the dtype that was faster on the first batch. Texts are
compared with those of this engine, token by token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from vivace.checkpoint.tokenizer import Tokenizer
from vivace.core.model import Decoder
from vivace.errors import ConfigError, nearest
from vivace.evaluate.beam_peers import TransformersBeams
from vivace.evaluate.ctranslate2 import KINDS, CTranslate2, Search

Texts = list[tuple[int, ...]]
System = Callable[[Sequence[Sequence[int]]], Texts]
"""Answers a batch of prompts, each given and answered in token ids without an end token."""
OURS = "vivace"
EL = "el"
"""This program with EL-attention, as a peer: the encoder's states in the place of keys and values of sources."""
PEERS = (EL, "transformers", *KINDS)


class Searching(Protocol):
    """What is measured of an engine."""

    model: Decoder
    tokenizer: Tokenizer

    @property
    def folder(self) -> Path:
        """Folder of the checkpoint."""
        ...

    def generate(self, prompts: Any, **options: Any) -> list[Any]:
        """Answer prompts."""
        ...


@dataclass
class BeamRow:
    """What was measured of one system."""

    system: str
    dtype: str
    seconds: list[float] = field(default_factory=list)
    """Of all prompts, repeat by repeat."""
    num_tokens: int = 0
    """Of all answers, end tokens left out."""
    num_steps: int = 0
    """Of the longest answer of each batch, summed over batches: each step is one pass of the decoder."""
    num_different: int = 0
    """Answers that are other tokens than those of this engine."""
    cross_cache_bytes: int | None = None
    """Of what is kept of the sources of the largest batch (keys and values of every layer, or with ``EL`` the states);
    None where nothing is known of them."""
    encode_s: float | None = None
    """Seconds of one round over all prompts that went into reading sources or prompts."""

    def figures(self, num_prompts: int) -> dict[str, float]:
        """Return inputs and tokens a second and milliseconds a step, of the median repeat."""
        seconds = median(self.seconds)
        return {
            "inputs_per_s": num_prompts / seconds,
            "tokens_per_s": self.num_tokens / seconds,
            "ms_per_step": 1e3 * seconds / max(1, self.num_steps),
        }


def measure_beams(
    engines: Mapping[str, Searching],
    prompts: Sequence[Sequence[int]],
    search: Search,
    peers: Sequence[str],
    *,
    batch_size: int,
    repeats: int,
    num_threads: int,
) -> list[BeamRow]:
    """Measure this engine and peers.

    Args:
        engines: of one checkpoint, with the weights in memory: ``OURS``, and ``EL`` where that is a peer.
        prompts: token ids.
        search: settings of all systems.
        peers: names among ``PEERS``.
        batch_size: prompts that are answered together.
        repeats: rounds, in each of which every system answers all prompts.
        num_threads: of each system.

    Raises:
        ConfigError: a peer is unknown.
        DependencyError: a peer is not installed.
    """
    check_peers(peers)
    torch.set_num_threads(num_threads)
    batches = [prompts[first : first + batch_size] for first in range(0, len(prompts), batch_size)]
    engine = engines[OURS]
    rows = [BeamRow(OURS, _name(engine.model.dtype))]
    systems: list[System] = [_Ours(engine, search)]
    for name in peers:
        system: System
        if name == EL:
            system, dtype = _Ours(engines[EL], search), _name(engines[EL].model.dtype)
        elif name == "transformers":
            system, dtype = _transformers(engine, batches[0], search)
        else:
            converted = CTranslate2(engine.folder, engine.tokenizer, name, num_threads=num_threads)
            system, dtype = partial(converted.answer, search=search), KINDS[name]
        systems.append(system)
        rows.append(BeamRow(name, dtype))
    for system in systems:
        system(batches[0])
        if isinstance(system, _Ours):
            system.encode_s = 0.0
    answers: list[Texts] = [[] for _ in systems]
    for _ in range(repeats):
        for place, (row, system) in enumerate(zip(rows, systems, strict=True)):
            started = time.perf_counter()
            answers[place] = [text for batch in batches for text in system(batch)]
            row.seconds.append(time.perf_counter() - started)
    for row, texts in zip(rows, answers, strict=True):
        _count(row, texts, answers[0], batch_size)
    for row, system in zip(rows, systems, strict=True):
        if isinstance(system, _Ours):
            row.cross_cache_bytes, row.encode_s = system.cross_cache_bytes, system.encode_s / repeats
        if row.system == "transformers" and engine.model.encoder is not None:
            row.cross_cache_bytes = _repeated_bytes(engine, batches, search.num_beams, row.dtype)
    return rows


def check_peers(peers: Sequence[str]) -> None:
    """Refuse names that are none of ``PEERS``.

    Raises:
        ConfigError: one of them is none.
    """
    for name in peers:
        if name not in PEERS:
            raise ConfigError(f"--peers {name!r} is none of {', '.join(PEERS)}{nearest(name, PEERS)}")


def _count(row: BeamRow, texts: Texts, ours: Texts, batch_size: int) -> None:
    row.num_tokens = sum(map(len, texts))
    lengths = [len(text) + 1 for text in texts]
    row.num_steps = sum(max(lengths[first : first + batch_size]) for first in range(0, len(lengths), batch_size))
    row.num_different = sum(one != other for one, other in zip(texts, ours, strict=True))


class _Ours:
    """This engine, batch by batch, with what its sources take."""

    def __init__(self, engine: Searching, search: Search) -> None:
        self.engine = engine
        self.settings: dict[str, Any] = {
            "num_beams": search.num_beams,
            "max_new_tokens": search.max_new_tokens,
            "min_new_tokens": search.min_new_tokens,
            "length_penalty": search.length_penalty if search.num_beams > 1 else None,
            "no_repeat_ngram_size": search.no_repeat_ngram_size,
        }
        self.cross_cache_bytes = 0
        """Most that a batch's sources took, counted in whole blocks of the cache."""
        self.encode_s = 0.0

    def __call__(self, batch: Sequence[Sequence[int]]) -> Texts:
        results = self.engine.generate([list(prompt) for prompt in batch], batch_size=len(batch), **self.settings)
        self.encode_s += sum(result.stats.prefill_s for result in results)
        if self.engine.model.encoder is not None:
            taken = sum(self.engine.model.source_bytes(len(prompt)) for prompt in batch)
            self.cross_cache_bytes = max(self.cross_cache_bytes, taken)
        ends = set(self.engine.tokenizer.eos_ids)
        return [tuple(token for token in result.token_ids if token not in ends) for result in results]


def _repeated_bytes(engine: Searching, batches: Sequence[Sequence[Sequence[int]]], num_beams: int, dtype: str) -> int:
    """Return what transformers keeps of the largest batch's sources: 2 L B b S K D numbers, padded to the longest."""
    c = engine.model.config
    numbers = max(len(batch) * max(map(len, batch)) for batch in batches) * num_beams
    return int(2 * c.num_layers * numbers * c.num_kv_heads * c.head_dim * getattr(torch, dtype).itemsize)


def _transformers(engine: Searching, batch: Sequence[Sequence[int]], search: Search) -> tuple[System, str]:
    """Return transformers in the dtype that answers a batch faster, and its name."""
    tried: dict[str, tuple[float, System]] = {}
    for dtype in ("float32", "bfloat16"):
        system = TransformersBeams(
            engine.folder, dtype, engine.model.encoder is not None, search, engine.tokenizer.eos_ids
        )
        system(batch[:1])
        started = time.perf_counter()
        system(batch)
        tried[dtype] = time.perf_counter() - started, system
    best = min(tried, key=lambda dtype: tried[dtype][0])
    return tried[best][1], best


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
