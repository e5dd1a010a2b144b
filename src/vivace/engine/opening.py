"""Opening a checkpoint or a store as an engine: by which kernels it runs, in which format, in how much memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vivace.adapters.guard.guard import load_guard
from vivace.adapters.lora import recovery_of
from vivace.adapters.pool.pool import load_pool
from vivace.checkpoint.files import OWN_DRAFT, RECOVERY, resolve
from vivace.checkpoint.generation import load_generation_defaults
from vivace.checkpoint.load import read_config
from vivace.checkpoint.lora_config import by_kind
from vivace.checkpoint.tokenizer import Tokenizer, find_tokenizer
from vivace.decode.memory import MemoryBudget
from vivace.engine.arguments import check_flags, check_paths
from vivace.engine.engine import Engine
from vivace.engine.execution import Execution, check_reader, load_checkpoint, load_store
from vivace.engine.sources import choose_sources
from vivace.errors import ConfigError, NotFoundError, UnsupportedError
from vivace.methods.composition import DraftModelSource, Methods, adapters_by_method, read_draft_model
from vivace.parallel.loading import SharedLoading, on_all_ranks
from vivace.prefill.choice import Prefills
from vivace.storage import refusals
from vivace.storage.loading import bytes_beside
from vivace.storage.store import is_store
from vivace.units import parse_bytes

SHIPPED = Path(__file__).parents[1] / "weights" / "vivace-14m"
"""Folder of the model that comes with the package."""


@on_all_ranks
def load(
    path: str | Path | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    adapters: str | Path | Mapping[str, str | Path] | None = None,
    adapter_memory: str | int | None = None,
    draft_model: str | Path | None = None,
    kernels: str = "auto",
    weights: str = "bf16",
    memory: str | int | None = None,
    prefix_cache: str | int | None = None,
    prompt_cache: str | Path | None = None,
    prompt_cache_ro: bool = False,
    prompt_cache_bytes: str | int | None = None,
    kv: str = "same",
    attention: str = "auto",
    reader: str = "auto",
    screened_head: bool | None = None,
    ignore_config_keys: Sequence[str] = (),
    recovery: bool = True,
    guard: str | Path | None = None,
    prompt_pool: str | Path | None = None,
    remember: bool = True,
    parallel: str | SharedLoading | None = None,
    wire: str | None = None,
    link_interface: str | None = None,
    timeout: float | None = None,
) -> Engine:
    """Load a checkpoint.

    Args:
        path: directory or Hub id; None is the model that ships with the package.
        device: "auto" (the CPU), "cpu" or "cuda", which runs and has not been measured.
        dtype: "auto" (the checkpoint's), "bfloat16" or "float32".
        adapters: a folder, or folders by name. A LoRA of PEFT is worn by the calls that name it (``adapter="NAME"``;
            the name of a folder given alone is its own). Draft weights are used by the method named in their
            ``config.json``; a method without any uses ``<model>/adapters/<method>``.
        adapter_memory: most memory for LoRAs, such as "64MiB": those that nobody uses leave and are read again when
            they are named. None keeps all.
        draft_model: a smaller checkpoint for the method ``draft``; None is ``<path>/draft`` if it exists.
        kernels: "auto" (the fastest that run here and fit the weights), "torch", "avx2", "avx512", "amx" or
            "graphs" (PyTorch's on a GPU, a whole pass recorded as one CUDA graph).
        weights: format of matrices in memory, also of the draft model: "bf16" (as in the checkpoint); "int8", "q4",
            "lut4", "lut3" or "lut2", which are quantized while loading and compute in bfloat16 if ``dtype`` is "auto";
            or "exact12", which holds bfloat16 in twelve bits without loss.
        memory: limit for weights, drafters and the keys and values of texts together, such as "2GiB"; texts wait for
            room. Weights of a store (``vivace convert --store``) that do not fit are read while they are used. None
            sets no limit.
        prefix_cache: most memory for texts that were read or written, such as "256MiB", given back when running texts
            need it. Calls whose prompts begin alike read the beginning once; answers do not change. None keeps none.
        prompt_cache: folder in which texts that were read or written are kept on disk, for this process and later
            ones; answers do not change. None keeps none.
        prompt_cache_ro: whether texts are found there and none is added.
        prompt_cache_bytes: most bytes of that folder; None is 4GiB.
        kv: format of keys and values: "same" as the weights' dtype, or "int8", half the memory and lossy.
        attention: what is kept of a source by a model with an encoder: "shared" (keys and values of each layer, which
            all beams share), "el" (the encoder's states, once for all layers: EL-attention, less memory and more
            arithmetic), or "auto", which is "shared" unless ``memory`` does not suffice for it.
        reader: how a store is read: "auto" (the fastest here), "direct", "buffered" or "mmap".
        screened_head: whether the head is kept a second time in int8, so that greedy decoding finds the same tokens
            reading half of its bytes. None does so for large heads on native kernels, unless ``memory`` is limited.
        ignore_config_keys: keys of ``config.json`` that are unknown and that you take to change nothing, also of the
            draft model's where it has them. ``Engine.notes`` says that they were ignored.
        guard: what judges prompts and answers: a file of rules (JSON), or a folder of ``vivace train guard``. An answer
            ends with the reason "content_filter" before what may not be shown.
        recovery: whether answers that name no LoRA wear ``<path>/adapters/recovery``, where it is: what a model in few
            bits has lost, won back (``vivace train recover``).
        prompt_pool: folder of soft prompts (``vivace train prompts``, PEFT's prompt tuning). Each request gets the one
            that its prompt reads most in the first layer, in front of its text (``soft_prompt`` names another), and no
            recovery is worn.
        remember: whether ``auto`` begins with what earlier runs have measured here and keeps what it measures, in
            ``auto.json`` in the cache folder (``VIVACE_CACHE_DIR``).
        parallel: under torchrun, how its processes share the work: "tensor" (each computes a part of every layer),
            "pipeline" (each computes some of the layers), "runahead" (each reads a piece of every prompt, and rank 0
            decodes), "runahead-tensor" (prompts as "runahead" does, answers as "tensor" does), or "auto" (as "runahead"
            does, or otherwise where that is sooner). Only on rank 0 this function returns; the others follow it, and
            their processes end with it.
        wire: how they send sums, all but None lossy: None as they are, "bf16", "int8", or with a calibration
            (``vivace train lowbit``) "int4" or "lowbit"; "lowbit=DIR" names its folder.
        link_interface: network interface through which they talk, in the clear; None is the loopback interface.
        timeout: seconds without an answer after which a rank is said to hang; None is 120.

    Raises:
        ConfigError: an argument is out of range or of another kind.
        CheckpointError: the checkpoint or an adapter is missing, broken or of another base.
        MemoryLimitError: weights do not fit into ``memory``.
        UsageError: something that is not supported was asked for.
        DependencyError: native kernels were asked for by name and are not built.
        WorldError: a rank is gone, hangs or differs from the others.
    """
    paths = {"path": path, "draft_model": draft_model, "prompt_cache": prompt_cache, "guard": guard}
    check_paths(paths | {"prompt_pool": prompt_pool})
    flags = {"prompt_cache_ro": prompt_cache_ro, "screened_head": screened_head, "recovery": recovery}
    check_flags(flags | {"remember": remember})
    ranks = parallel if isinstance(parallel, SharedLoading) else None
    execution = Execution.of(kernels, weights, dtype, device, ignore_config_keys)
    folder = _find(path)
    raw = read_config(folder, execution.ignored)
    loras, folders = by_kind(adapters)
    if adapter_memory is not None and not loras:
        raise ConfigError("adapter_memory has no effect without a LoRA among adapters; leave it out")
    budget = MemoryBudget(None if memory is None else parse_bytes(memory))
    sources = choose_sources(attention, folder, raw, execution, kv=kv, limit=budget.limit_bytes)
    own = folder / OWN_DRAFT if (folder / OWN_DRAFT / "config.json").is_file() else None
    smaller = own if draft_model is None else draft_model
    if is_store(folder):
        refusals.check_screen(screened_head)
        refusals.check_ranks(ranks is not None)
        beside = 0 if memory is None else bytes_beside(folder, smaller, [*folders, *loras.values()])
        opened = load_store(folder, execution, budget, kv=kv, reader=reader, beside_bytes=beside)
    else:
        check_reader(reader, folder)
        how: dict[str, Any] = {"kv": kv, "screened_head": screened_head, "ranks": ranks, "sources": sources.name}
        opened = load_checkpoint(folder, execution, budget, **how)
    model, execution = opened.model, opened.execution
    tokenizer = find_tokenizer(folder)
    second = _draft_model(smaller, tokenizer, budget, execution, is_asked=draft_model is not None)
    methods = Methods(model, folder, adapters_by_method(folders, folder), second, memory=budget)
    methods.remembers = remember
    defaults, choice = load_generation_defaults(folder), execution.run_by(model)
    engine = Engine(model, tokenizer, methods, defaults, choice, execution.weights)
    engine.storage, engine.sources = opened.storage, sources
    engine.ignored_config_keys = execution.ignored
    if ranks is not None:
        engine.world, engine.prefills = ranks.world, Prefills(model, folder, ranks.prefill)
    engine.adapters.limit(None if adapter_memory is None else parse_bytes(adapter_memory))
    for name, lora in loras.items():
        engine.adapters.add(name, lora)
    if recovery and prompt_pool is None:  # a soft prompt was learnt in front of the checkpoint as it is
        _wear_recovery(engine, loras)
    engine.prompt_pool = None if prompt_pool is None else load_pool(prompt_pool, model, tokenizer, budget)
    engine.guard = None if guard is None else load_guard(guard, folder, model, tokenizer)
    engine.prefix_cache = None if prefix_cache is None else engine.new_prefix_cache(parse_bytes(prefix_cache))
    if prompt_cache is not None:
        engine.open_prompt_cache(prompt_cache, is_read_only=prompt_cache_ro, max_bytes=prompt_cache_bytes)
    elif prompt_cache_ro or prompt_cache_bytes is not None:
        name = "prompt_cache_ro" if prompt_cache_ro else "prompt_cache_bytes"
        raise ConfigError(f"{name} has no effect without prompt_cache; name its folder, or leave {name} out")
    return engine


def _find(path: str | Path | None) -> Path:
    """Return the folder of a checkpoint, None for the model that ships."""
    if path is None and not SHIPPED.is_dir():
        raise NotFoundError("this installation carries no model; give --model DIR_OR_HUB_ID")
    return resolve(SHIPPED if path is None else path)


def _draft_model(
    folder: str | Path | None, tokenizer: Tokenizer, budget: MemoryBudget, execution: Execution, *, is_asked: bool
) -> DraftModelSource | None:
    """Return what reads the draft model; one that was named is read now, so that errors come from here."""
    if folder is None:
        return None
    how: dict[str, Any] = {"dtype": execution.dtype, "device": execution.device, "ignored": execution.ignored}
    read = partial(read_draft_model, folder, tokenizer, budget, execution.weights, backend=execution.backend, **how)
    source = DraftModelSource(read, Path(folder), is_asked)
    if is_asked:
        source.decoder  # noqa: B018
    return source


def _wear_recovery(engine: Engine, loras: Collection[str]) -> None:
    """Let answers that name no LoRA wear the model's recovery adapter, where there is one."""
    found = recovery_of(engine.folder)
    if RECOVERY in loras or found is None:
        return
    if engine.world is not None:
        raise UnsupportedError(
            f"{found} is not worn by a model on several ranks; leave out --parallel, or give --no-recovery"
        )
    engine.adapters.add(RECOVERY, found)
    engine.adapters.default = RECOVERY
