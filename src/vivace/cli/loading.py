"""Opening a model for a command; all commands that run a model use `open_engine`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vivace
from vivace.cli.console import console
from vivace.cli.options import LoadFlags, ParallelFlags, PromptCacheFlags, StoreFlags, parse_adapters
from vivace.errors import ConfigError, NotFoundError, nearest
from vivace.methods.spec import MethodSpec
from vivace.methods.table import find_method
from vivace.units import format_bytes

if TYPE_CHECKING:
    from vivace.decode.stats import DecodeStats
    from vivace.engine import Engine


NO_FLAGS, NO_STORE_FLAGS, NO_CACHE_FLAGS, NO_RANKS = LoadFlags(), StoreFlags(), PromptCacheFlags(), ParallelFlags()
"""The defaults of all flags."""


def open_engine(
    model: str | None,
    methods: Sequence[str] = (),
    load: LoadFlags = NO_FLAGS,
    store: StoreFlags = NO_STORE_FLAGS,
    cache: PromptCacheFlags = NO_CACHE_FLAGS,
    ranks: ParallelFlags = NO_RANKS,
    *,
    use: str | None = None,
    guard: Path | None = None,
    reads_sources: bool = False,
) -> Engine:
    """Load a model and say so on stderr.

    Args:
        model: folder or Hub id; None is the model that ships.
        methods: methods to decode with, so that flags they cannot use are refused before anything is read; empty for
            any method.
        load: flags that say how it is loaded.
        store: flags for models larger than memory.
        cache: flags that say where texts are kept on disk.
        ranks: flags that say how processes share it; on all but the first of them this function does not return.
        use: name of the LoRA that answers wear; None for none.
        guard: file or folder of what judges prompts and answers; None for none.
        reads_sources: whether the command can use an encoder-decoder model.

    Raises:
        UsageError: a method is unknown, a flag has no effect on any of the methods, or a LoRA is used that is not given
            or given and not used.
        CheckpointError: the checkpoint or an adapter is missing, broken or of another base.
    """
    adapters = parse_adapters(load.adapter)
    drafting = _check_loras(adapters, use)
    if methods:
        _check_use(load, drafting, [find_method(name) for name in methods])
    console.note(f"loading {model or 'the model that ships'}")
    engine = vivace.load(
        model,
        device=load.device,
        dtype=load.dtype,
        adapters=adapters,
        draft_model=load.draft_model,
        kernels=load.kernels,
        weights=load.weights,
        screened_head=load.screened_head,
        recovery=load.recovery,
        kv=load.kv,
        attention=load.attention,
        memory=store.memory,
        reader=store.reader,
        prompt_cache=cache.prompt_cache,
        prompt_cache_ro=cache.prompt_cache_ro,
        prompt_cache_bytes=cache.prompt_cache_bytes,
        ignore_config_keys=load.ignore_config_key or (),
        guard=guard,
        prompt_pool=load.prompt_pool,
        remember=load.remember,
        parallel=ranks.parallel,
        wire=ranks.wire,
        link_interface=ranks.link_interface,
        timeout=ranks.timeout,
    )
    if not reads_sources:
        engine.check_has_no_encoder()
    for note in engine.notes:
        console.note(note)
    if engine.model.encoder is not None:
        console.note(f"attention {engine.sources.name}: {engine.sources.reason}")
    if engine.storage is not None:
        console.note(engine.storage.report)
    if engine.world is not None:
        console.note(f"{engine.world.size} ranks share the model ({ranks.parallel})")
    if engine.memory.room_bytes is not None:
        console.note(f"memory: {engine.memory.report}; {format_bytes(engine.memory.room_bytes)} are left for texts")
    return engine


def _check_loras(adapters: str | dict[str, str] | None, use: str | None) -> bool:
    """Refuse LoRAs that nobody uses, and the use of one that is not given; return whether draft weights are given."""
    if adapters is None and use is None:
        return False
    from vivace.checkpoint.lora_config import is_lora

    named = {Path(adapters).name: adapters} if isinstance(adapters, str) else adapters or {}
    loras = [name for name, folder in named.items() if is_lora(folder)]
    if use is not None and use not in loras:
        hint = nearest(use, loras) if loras else f"; give --adapter {use}=DIR with a LoRA in DIR"
        raise ConfigError(f"--use {use!r}: no LoRA of this name is given{hint}")
    idle = [name for name in loras if name != use]
    if idle and use is not None:
        raise ConfigError(f"--adapter {idle[0]} is a LoRA beside --use {use}; this command uses one, so leave it out")
    if idle:
        raise ConfigError(
            f"--adapter {idle[0]} is a LoRA, and this command does not use it; give --use {idle[0]} to "
            "generate, chat or evaluate, or leave it out"
        )
    return len(named) > len(loras)


def _check_use(load: LoadFlags, drafting: bool, methods: Sequence[MethodSpec]) -> None:
    """Refuse flags that have no effect on any of the methods; ``drafting`` says whether draft weights are given."""
    names = ", ".join(method.name for method in methods)
    if drafting and not any(method.adapter or method.name == "auto" for method in methods):
        raise ConfigError(f"--adapter has no effect on {names}; leave it out, or choose a method that has one")
    if load.draft_model and not any(method.name in ("draft", "auto") for method in methods):
        raise ConfigError(f"--draft-model has no effect on {names}; leave it out, or choose method draft")


def folder_of(model: str | None) -> Path:
    """Return the folder of a model without loading it; None means the model that ships with the package.

    Raises:
        NotFoundError: ``model`` is neither a folder nor a Hub repository, or this installation contains no model.
    """
    from vivace.checkpoint.files import resolve
    from vivace.engine import SHIPPED

    if model is None and not SHIPPED.is_dir():
        raise NotFoundError("this installation carries no model; name a folder or a Hub id")
    return resolve(SHIPPED if model is None else model)


def stats_json(stats: DecodeStats) -> dict[str, Any]:
    """Return statistics as they are written to JSON: the counters and the rates computed from them."""
    derived = [name for name, member in vars(type(stats)).items() if isinstance(member, property)]
    return {**asdict(stats), **{name: getattr(stats, name) for name in derived}}
