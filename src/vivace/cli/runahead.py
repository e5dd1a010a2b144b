"""``vivace tune runahead``: find by timing where ranks divide prompts, and keep the table beside the model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

import vivace
from vivace.cli.bench_parallel import within
from vivace.cli.console import console
from vivace.cli.first_token import SPACE, prompt_of
from vivace.cli.options import LoadFlags, ParallelFlags
from vivace.cli.prompting import split_numbers
from vivace.errors import ConfigError

if TYPE_CHECKING:
    from vivace.engine import Engine
    from vivace.parallel.partition_table import PartitionEntry
    from vivace.parallel.runahead import RunaheadPrefill

RUNAHEAD = "runahead"
TIMES = 3
"""Readings of which the median counts."""
MOST = 12
"""Most partitions that are timed for one length."""
USED = ("device", "dtype", "kernels", "recovery", "ignore_config_key")
"""Flags of loading that a search obeys. A table does not record the format of weights or of the KV cache, so it is
searched with the default ones."""


def tune_runahead(
    model: str | None,
    lengths: str,
    texts: Sequence[str],
    load: LoadFlags,
    ranks: ParallelFlags,
    *,
    keep: bool,
    as_json: bool,
) -> None:
    """Search under torchrun and write the table to ``MODEL/adapters/runahead-N``; only rank 0 returns.

    Raises:
        ConfigError: a length is no number or leaves no room, a flag has no effect, or this process was not started by
            torchrun.
        WorldError: a rank is gone, hangs or differs.
    """
    from vivace.checkpoint.adapters import base_hash
    from vivace.parallel.loading import SharedLoading, facts_of
    from vivace.parallel.partition_table import Table, entries_before, save_table
    from vivace.parallel.runahead import RunaheadPrefill

    if ranks.parallel not in (None, RUNAHEAD) or ranks.wire is not None:
        raise ConfigError("tune runahead searches for --parallel runahead; leave out --parallel and --wire")
    idle = [each for each in fields(load) if each.name not in USED and getattr(load, each.name) != each.default]
    if idle:
        kinds = ("--no-" if getattr(load, each.name) is False else "--" for each in idle)
        flags = ", ".join(kind + each.name.replace("_", "-") for kind, each in zip(kinds, idle, strict=True))
        raise ConfigError(f"tune runahead times the checkpoint as it is; leave out {flags}")
    sizes = split_numbers(lengths, "--lengths")
    _check_length(min(sizes))  # before anything is searched
    settings = {"device": load.device}
    opening = SharedLoading.of(RUNAHEAD, interface=ranks.link_interface, timeout_s=ranks.timeout, settings=settings)
    opening.reads_table = False
    with opening.world.guarding():
        engine = vivace.load(
            model,
            device=load.device,
            dtype=load.dtype,
            kernels=load.kernels,
            recovery=load.recovery,
            ignore_config_keys=load.ignore_config_key or (),
            parallel=opening,
        )
        assert isinstance(opening.prefill, RunaheadPrefill)
        most = engine.model.config.max_positions - SPACE
        prompts = [prompt_of(engine, texts, size) for size in within(sizes, most)]
        entries = [searched(engine, opening.prefill, prompt) for prompt in prompts]
    for entry in entries:
        pieces = " + ".join(map(str, entry.counts))
        console.note(f"{entry.length} tokens: {pieces}, {entry.seconds:.3f} s; equal pieces {entry.even_s:.3f} s")
    facts = facts_of(opening.world.size, engine.model, engine.kernels.name)
    if keep:
        out = Path(engine.folder) / "adapters" / f"{RUNAHEAD}-{opening.world.size}"
        base = base_hash(engine.folder)
        before = entries_before(out, base, facts, entries)
        save_table(out, base, facts, Table(tuple(sorted((*before, *entries), key=lambda entry: entry.length))))
        kept = f" beside those of {', '.join(str(entry.length) for entry in before)} tokens" if before else ""
        console.note(f"written to {out}{kept}, where --parallel runahead and auto find it")
    if as_json:
        console.json({"facts": facts, "entries": [asdict(entry) for entry in entries]})


def searched(engine: Engine, prefill: RunaheadPrefill, prompt: Sequence[int]) -> PartitionEntry:
    """Return the fastest pieces of a prompt that are found, beside equal ones.

    Raises:
        ConfigError: the prompt is read by one rank alone.
    """
    from vivace.evaluate.ways import GRID
    from vivace.parallel.partition import even
    from vivace.parallel.partition_table import PartitionEntry, search

    _check_length(len(prompt))
    length = len(prompt) - 1

    def measure(counts: Sequence[int]) -> float:
        prefill.fixed = counts
        times = []
        for _ in range(TIMES):
            started = time.perf_counter()
            engine.generate([list(prompt)], method="plain", max_new_tokens=1, ignore_eos=True, do_sample=False)
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    equal = even(length, min(prefill.world.size, -(-length // GRID)), GRID)
    measure(equal)  # not counted: memory is touched for the first time
    even_s = measure(equal)
    prefill.fixed = None
    start = prefill.counts(engine.model, length, GRID)
    counts, seconds = search(start, GRID, measure, MOST)
    prefill.fixed = None
    if even_s < seconds:
        return PartitionEntry(length, tuple(equal), even_s, even_s)
    return PartitionEntry(length, tuple(counts), seconds, even_s)


def _check_length(num_tokens: int) -> None:
    """Refuse a prompt that has no second piece.

    Raises:
        ConfigError: it is read by one rank alone.
    """
    from vivace.evaluate.ways import GRID

    if num_tokens <= GRID + 1:
        raise ConfigError(f"prompts of up to {GRID + 1} tokens are read by one rank; give longer --lengths")
