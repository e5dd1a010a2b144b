"""Beam search measured: this engine, transformers and CTranslate2 on the same ids, threads and settings, in turns.

Every system answers all prompts in batches; systems take turns, repeat by repeat, so that what else the machine does
hits all of them, and medians are reported. transformers runs in the dtype that was faster on two prompts. Texts are
compared with those of this engine, token by token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from vivace.checkpoint.tokenizer import Tokenizer
from vivace.core.model import Decoder
from vivace.decode.stats import DecodeStats
from vivace.errors import ConfigError, nearest
from vivace.evaluate.beam_peers import TransformersBeams
from vivace.evaluate.ctranslate2 import KINDS, CTranslate2, Search
from vivace.evaluate.memory import peak_memory, resident_memory

Texts = list[tuple[int, ...]]
System = Callable[[Sequence[Sequence[int]], Search], Texts]
"""Answers a batch of prompts, each given and answered in token ids without an end token."""
SHORT = 8
"""New tokens of what runs before the clock starts: first calls, and the choice of a dtype for transformers."""
OURS = "vivace"
CPU = torch.device("cpu")
EL = "el"
"""This program with EL-attention, as a peer: the encoder's states in the place of keys and values of sources."""
PEERS = (EL, "transformers", *KINDS)
PARTS = ("encode", "decode", "select", "text")
"""What a round's seconds go into: reading sources or prompts; passes over beams, the head included; choosing how beams
go on; and the rest, which is turning tokens into text and the loop around all."""


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
    peak_bytes: int | None = None
    """Most that a round took beyond what the process had when it began, which holds the weights of all systems: caches
    and everything that is computed on the way. None where the system does not say it."""
    parts_s: dict[str, float] | None = None
    """Seconds of one round by ``PARTS``, of this program; None for others, and with one beam, where passes and choices
    are not timed."""

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
    few = min(SHORT, search.max_new_tokens)
    short = search._replace(max_new_tokens=few, min_new_tokens=min(few, search.min_new_tokens))
    torch.set_num_threads(num_threads)
    batches = [prompts[first : first + batch_size] for first in range(0, len(prompts), batch_size)]
    engine = engines[OURS]
    rows = [BeamRow(OURS, _name(engine.model.dtype))]
    systems: list[System] = [_Ours(engine)]
    for name in peers:
        system: System
        if name == EL:
            system, dtype = _Ours(engines[EL]), _name(engines[EL].model.dtype)
        elif name == "transformers":
            system, dtype = _transformers(engine, batches[0], short)
        else:
            converted = CTranslate2(engine.folder, engine.tokenizer, name, num_threads=num_threads)
            system, dtype = converted.answer, KINDS[name]
        systems.append(system)
        rows.append(BeamRow(name, dtype))
    for system in systems:
        system(batches[0][:1], short)
        if isinstance(system, _Ours):
            system.parts_s = dict.fromkeys(PARTS, 0.0)
    answers: list[Texts] = [[] for _ in systems]
    for _ in range(repeats):
        for place, (row, system) in enumerate(zip(rows, systems, strict=True)):
            before, started = resident_memory(), time.perf_counter()
            with peak_memory(CPU) as peak:
                answers[place] = [text for batch in batches for text in system(batch, search)]
            row.seconds.append(time.perf_counter() - started)
            if before is not None and peak.num_bytes is not None:
                row.peak_bytes = max(row.peak_bytes or 0, peak.num_bytes - before)
    for row, texts in zip(rows, answers, strict=True):
        _count(row, texts, answers[0], batch_size)
    for row, system in zip(rows, systems, strict=True):
        if isinstance(system, _Ours):
            row.cross_cache_bytes = system.cross_cache_bytes
            if search.num_beams > 1:
                row.parts_s = {part: seconds / repeats for part, seconds in system.parts_s.items()}
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


def shares_of(parts_s: Mapping[str, float] | None) -> str:
    """Return the shares of ``PARTS`` in per cent, with strokes between them; a hyphen where they are not known."""
    whole = sum(parts_s.values()) if parts_s else 0.0
    return "-" if not parts_s or not whole else "/".join(f"{100 * parts_s[part] / whole:.0f}" for part in PARTS) + " %"


def _count(row: BeamRow, texts: Texts, ours: Texts, batch_size: int) -> None:
    row.num_tokens = sum(map(len, texts))
    lengths = [len(text) + 1 for text in texts]
    row.num_steps = sum(max(lengths[first : first + batch_size]) for first in range(0, len(lengths), batch_size))
    row.num_different = sum(one != other for one, other in zip(texts, ours, strict=True))


class _Ours:
    """This engine, batch by batch, with what its sources take."""

    def __init__(self, engine: Searching) -> None:
        self.engine = engine
        self.cross_cache_bytes = 0
        """Most that a batch's sources took, counted in whole blocks of the cache."""
        self.parts_s = dict.fromkeys(PARTS, 0.0)
        """Seconds by part."""

    def __call__(self, batch: Sequence[Sequence[int]], search: Search) -> Texts:
        settings: dict[str, Any] = search._asdict()
        if search.num_beams == 1:
            settings["length_penalty"] = None
        started = time.perf_counter()
        results = self.engine.generate([list(prompt) for prompt in batch], batch_size=len(batch), **settings)
        self._divide(time.perf_counter() - started, [result.stats for result in results])
        if self.engine.model.encoder is not None:
            taken = sum(self.engine.model.source_bytes(len(prompt)) for prompt in batch)
            self.cross_cache_bytes = max(self.cross_cache_bytes, taken)
        ends = set(self.engine.tokenizer.eos_ids)
        return [tuple(token for token in result.token_ids if token not in ends) for result in results]

    def _divide(self, elapsed_s: float, stats: Sequence[DecodeStats]) -> None:
        """Add the seconds of a batch to the parts."""
        shares = [one.prefill_s for one in stats]  # of prompts each has the time of the passes that it was part of
        parts = {
            "encode": sum(shares) if self.engine.model.encoder is not None else max(shares),
            "decode": sum(one.pass_s for one in stats),
            "select": sum(one.select_s for one in stats),
        }
        parts["text"] = max(0.0, elapsed_s - sum(parts.values()))
        for part, seconds in parts.items():
            self.parts_s[part] += seconds


def _repeated_bytes(engine: Searching, batches: Sequence[Sequence[Sequence[int]]], num_beams: int, dtype: str) -> int:
    """Return what transformers keeps of the largest batch's sources: 2 L B b S K D numbers, padded to the longest."""
    c = engine.model.config
    numbers = max(len(batch) * max(map(len, batch)) for batch in batches) * num_beams
    return int(2 * c.num_layers * numbers * c.num_kv_heads * c.head_dim * getattr(torch, dtype).itemsize)


def _transformers(engine: Searching, batch: Sequence[Sequence[int]], search: Search) -> tuple[System, str]:
    """Return transformers in the dtype that answers the first prompts of a batch faster, and its name."""
    tried: dict[str, tuple[float, System]] = {}
    for dtype in ("float32", "bfloat16"):
        system = TransformersBeams(engine.folder, dtype, engine.model.encoder is not None, engine.tokenizer.eos_ids)
        system(batch[:1], search)
        started = time.perf_counter()
        system(batch[:2], search)
        tried[dtype] = time.perf_counter() - started, system
    best = min(tried, key=lambda dtype: tried[dtype][0])
    return tried[best][1], best


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
