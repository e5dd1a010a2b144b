"""By which kernels a decoder runs and in which format, and how it is read for them: from a checkpoint or a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from vivace.checkpoint.load import choose_device, load_decoder
from vivace.core.backend import Backend
from vivace.core.cpu.backend import backend_of
from vivace.core.cross import Sources
from vivace.core.cuda.backend import graphs_backend
from vivace.core.footprint import held_bytes
from vivace.core.model import Decoder
from vivace.decode.memory import MemoryBudget
from vivace.engine.arguments import as_texts
from vivace.errors import ConfigError
from vivace.kernels.choice import GRAPHS, KernelChoice, choose
from vivace.kernels.low_bit import Weights, check_weights
from vivace.methods.composition import check_room
from vivace.parallel.loading import LoadOptions, SharedLoading
from vivace.storage import refusals
from vivace.storage.loading import Storage, load_stored


@dataclass(frozen=True)
class Execution:
    """How a decoder is run, as far as it is chosen before its weights are read."""

    kernels: str
    """The kernels that were asked for: a name, whose kernels refuse weights that do not fit them, or "auto"."""
    choice: KernelChoice
    """The kernels that run."""
    weights: Weights
    """Format of matrices in memory."""
    dtype: str
    """As for ``load_decoder``."""
    device: str
    ignored: tuple[str, ...]
    """Unknown keys of ``config.json`` that are taken to change nothing."""

    @staticmethod
    def of(kernels: str, weights: str, dtype: str, device: str, ignore_config_keys: Sequence[str]) -> Execution:
        """Choose kernels and formats from the arguments of ``vivace.load``.

        Raises:
            UsageError: there is no such format, or no such kernels.
            DependencyError: kernels that were asked for by name are not built.
        """
        choice, kept = choose(kernels, device=choose_device(device)), check_weights(weights)
        if kept not in ("bf16", "exact12") and dtype == "auto":
            dtype = "bfloat16"  # what matrices in few bits are multiplied in
        ignored = as_texts("ignore_config_keys", ignore_config_keys)
        return Execution(kernels, choice, kept, dtype, device, ignored)

    def backend(self, dtype: torch.dtype, *, screens_head: bool | None = None) -> Backend | None:
        """Return what runs a decoder of some precision; None is PyTorch on the modules as they are."""
        if self.choice.name == GRAPHS:
            return graphs_backend(dtype, weights=self.weights, screens_head=screens_head)
        is_required = self.kernels != "auto"
        return backend_of(self.choice.body, self.weights, dtype, is_required=is_required, screens_head=screens_head)

    def run_by(self, model: Decoder) -> KernelChoice:
        """Return the kernels that a decoder has got: PyTorch's where there are no native ones for its weights, or no
        graphs of its layers.
        """
        if self.choice.name == GRAPHS and model.backend.span is None:
            return KernelChoice("torch", "mixtures, models with a source and stores have no graphs", None)
        if self.choice.body is None or getattr(model.backend, "body", None) is not None:
            return self.choice
        kind = str(model.dtype).removeprefix("torch.")
        what = f"{kind} weights" if self.weights == "bf16" else f"{self.weights} weights multiplied in {kind}"
        return KernelChoice("torch", f"there are no native kernels for {what}", None)


class Opened(NamedTuple):
    """A decoder with its weights."""

    model: Decoder
    execution: Execution
    """How it runs."""
    storage: Storage | None
    """What reads the weights that stay on disk; None for a checkpoint."""


def load_checkpoint(
    folder: Path,
    execution: Execution,
    budget: MemoryBudget,
    *,
    kv: str,
    screened_head: bool | None,
    ranks: SharedLoading | None,
    sources: Sources,
) -> Opened:
    """Read a checkpoint into memory, on all ranks where there are several.

    Args:
        folder: of the checkpoint.
        execution: how it is to run.
        budget: what may be held.
        kv: format of keys and values.
        screened_head: as ``vivace.load`` takes it.
        ranks: which share it; None for one machine.
        sources: what layers read of a source.

    Raises:
        MemoryLimitError: it does not fit.
        CheckpointError: it is broken.
    """
    hint = ", or a store, which runs in less: vivace convert --store"
    check_room(budget, folder, "the model", execution.dtype, execution.weights, hint, ignored=execution.ignored)
    screens = False if screened_head is None and budget.limit_bytes is not None else screened_head
    backend = partial(execution.backend, screens_head=screens)
    dtype, device, ignored = execution.dtype, execution.device, execution.ignored
    if ranks is None:
        model = load_decoder(
            folder, dtype, device, backend=backend, ignored=ignored, reads_sources=True, sources=sources
        )
        model.store_entries(kv)
    else:
        names = execution.choice.name, execution.weights
        model = ranks.load(LoadOptions(folder, dtype, device, kv, *names, backend, ignored))
    budget.hold(model, held_bytes(model)[0], "weights")
    return Opened(model, execution, None)


def load_store(
    folder: Path, execution: Execution, budget: MemoryBudget, *, kv: str, reader: str, beside_bytes: int
) -> Opened:
    """Open a store, whose weights are read while they are used as far as they do not fit.

    Args:
        folder: what ``vivace convert --store`` wrote.
        execution: how it is to run.
        budget: what may be held.
        kv: format of keys and values.
        reader: how files are read.
        beside_bytes: bytes that other weights will take of the budget.

    Raises:
        MemoryLimitError: not even the least of it fits.
        UnsupportedError: it was converted to another format than is asked for, or for other kernels.
    """
    refusals.check_weights(execution.weights, execution.device)
    body = execution.choice.body
    model, storage = load_stored(folder, budget.limit_bytes, reader=reader, beside_bytes=beside_bytes, body=body)
    refusals.check_dtype(execution.dtype, model.dtype)
    model.store_entries(kv)
    budget.hold(model, storage.held_bytes, "weights")
    if storage.plan.streamed and storage.body is None:
        execution = replace(execution, choice=refusals.torch_only(execution.kernels))
    if storage.body is None and (model.dtype == torch.bfloat16 or not storage.plan.streamed):
        chosen = execution.backend(model.dtype)
        if chosen is not None:
            model.run_on(chosen)
    return Opened(model, execution, storage)


def check_reader(reader: str, folder: Path) -> None:
    """Refuse a way to read stores for a checkpoint.

    Raises:
        ConfigError: one was asked for.
    """
    if reader != "auto":
        raise ConfigError(
            f"reader is for a store, {folder} is a checkpoint: vivace convert OUT --store --model {folder}"
        )
