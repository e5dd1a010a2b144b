"""Opening a model on several ranks: what cannot be combined is refused, each rank loads its share, all are compared."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeAlias, TypeVar

import torch

import vivace.parallel.world as worlds
from vivace.checkpoint.adapters import base_hash
from vivace.checkpoint.load import Shard, load_config, load_decoder
from vivace.core.backend import Backend, TorchBackend
from vivace.core.config import ModelConfig
from vivace.core.model import Decoder
from vivace.core.parts import Parts
from vivace.decode.prefill import FULL, Prefill
from vivace.errors import ConfigError, UnsupportedError, WorldError, nearest
from vivace.parallel import passes
from vivace.parallel.auto import AUTO, AutoPrefill
from vivace.parallel.collective import LinkedSum, Wire, find_wire, form_of
from vivace.parallel.following import Follower, Following, follow
from vivace.parallel.leading import Leader, LedBackend
from vivace.parallel.lowbit import KIND, Calibration, LowBitWire
from vivace.parallel.meeting import MetSum
from vivace.parallel.partition_table import KIND as RUNAHEAD
from vivace.parallel.partition_table import Table, read_table
from vivace.parallel.pipeline import KIND as PIPELINE
from vivace.parallel.pipeline import (
    PipelineBackend,
    PipelineFollower,
    PipelineLeader,
    PipelineParts,
    PipelinePrefill,
    has_stages,
)
from vivace.parallel.runahead import WAYS, RunaheadFollower, RunaheadPrefill
from vivace.parallel.scattered import KIND as SCATTERED
from vivace.parallel.scattered import ScatteredPrefill, scattered_followers
from vivace.parallel.shares import columns_of, shares_of
from vivace.parallel.staged import StagedBackend
from vivace.parallel.tensor import ShareParts, shard_of
from vivace.parallel.world import World

MakeBackend: TypeAlias = Callable[[torch.dtype], Backend | None]

MODES = ("tensor", *WAYS, SCATTERED, AUTO, PIPELINE)
"""Ways to share work: every layer is divided among ranks, or every prompt is, or prompts are and then every layer, or
the layers are; "auto" chooses between prompts, layers and one rank alone for each prompt."""
SUMMED = ("tensor", SCATTERED)
"""Ways in which ranks decode together, with sums between them."""


@dataclass(frozen=True)
class LoadOptions:
    """How all ranks load a model."""

    folder: Path
    """The checkpoint."""
    dtype: str
    """As for ``load_decoder``."""
    device: str
    kv: str
    """Format of keys and values."""
    kernels: str
    """Name of the kernels in use."""
    weights: str
    """Format of matrices in memory."""
    backend: MakeBackend
    """Makes what runs a decoder of a dtype; None is PyTorch on the modules as they are."""
    ignored: tuple[str, ...]
    """Unknown keys of ``config.json`` that are read as if they were not there."""

    @property
    def config(self) -> ModelConfig:
        """Read the checkpoint's configuration."""
        return load_config(self.folder, self.ignored)

    def decoder(
        self, backend: MakeBackend | None = None, *, parts: Parts | None = None, shard: Shard | None = None
    ) -> Decoder:
        """Load a decoder as ``load_decoder`` does: with ``backend`` the one it makes runs it instead of the model's."""
        made = self.backend if backend is None else backend
        return load_decoder(
            self.folder, self.dtype, self.device, parts=parts, backend=made, ignored=self.ignored, shard=shard
        )


class SharedLoading:
    """Loads one model on all ranks of a world."""

    def __init__(self, world: World, mode: str, wire: str) -> None:
        """Load among the ranks of a world, which all make the same calls, for a way to share work."""
        self.world = world
        self.wire = wire
        self.mode = mode
        self.prefill: Prefill = AutoPrefill(world) if mode == AUTO else RunaheadPrefill(world, mode)
        if mode == SCATTERED:
            self.prefill = ScatteredPrefill(world)
        elif mode in ("tensor", PIPELINE):
            self.prefill = FULL if mode == "tensor" else PipelinePrefill()
        """How prompts are read in full."""
        self.reads_table = mode in (RUNAHEAD, SCATTERED, AUTO)
        """Whether boundaries of pieces are those of the table beside the model, where there is one."""

    @staticmethod
    def of(
        mode: str, *, interface: str | None, timeout_s: float | None, settings: Mapping[str, object]
    ) -> SharedLoading:
        """Meet the other ranks to load a model in a way to share work.

        Args:
            mode: the way, one of ``MODES``.
            interface: network interface through which ranks talk; None is the loopback interface.
            timeout_s: seconds without an answer after which a rank is said to hang; None is the default.
            settings: the other arguments of ``vivace.load``.

        Raises:
            ConfigError: there is no such way, or this process was not started by torchrun.
            UnsupportedError: a setting cannot be combined with it.
            WorldError: the ranks do not find one another.
        """
        if mode not in MODES:
            raise ConfigError(f"parallel is {mode!r}{nearest(mode, MODES)}")
        for name in ("memory", "prefix_cache", "prompt_cache", "adapters"):
            if settings.get(name) is not None:
                raise UnsupportedError(f"{name} is not supported on several ranks; leave out {name} or parallel")
        wire = settings.get("wire")
        if wire is not None and form_of(str(wire)) is None:
            find_wire(str(wire))
        if wire is not None and mode not in SUMMED:
            raise ConfigError(f"wire has no effect on parallel {mode}, which sends keys and values as they are")
        if settings.get("device", "auto") not in ("auto", "cpu"):
            raise UnsupportedError(f"ranks compute on the CPU, found device {settings['device']!r}; leave out device")
        if settings.get("reader", "auto") != "auto":
            raise UnsupportedError("a store is not read by several ranks; leave out reader or parallel")
        world = worlds.join(interface=interface, timeout_s=timeout_s)
        return SharedLoading(world, mode, "same" if wire is None else str(wire))

    def load(self, options: LoadOptions) -> Decoder:
        """Load this rank's share of a model. Only on rank 0 it returns; the others follow until rank 0 has ended.

        Raises:
            WorldError: the ranks differ, or one of them failed.
            ConfigError: so many ranks cannot share the model.
            UnsupportedError: such a model is not shared.
        """
        if self.mode == PIPELINE:
            decoder = load_stages(self.world, options)
        elif self.mode == "tensor":
            decoder = load_share(self.world, self.wire, options)
        else:
            if self.mode in WAYS and self.mode != RUNAHEAD and any(options.config.windows):
                raise UnsupportedError(
                    f"layers with sliding windows do not keep what parallel {self.mode} gathers; use runahead"
                )
            decoder = load_whole(self.world, options, is_staged=self.mode == AUTO)
        whole = decoder
        if self.mode == SCATTERED:
            whole.store_entries(options.kv)
            decoder = load_share(self.world, self.wire, options)
        decoder.store_entries(options.kv)
        self.world.compare(
            {
                "mode": self.mode,
                "wire": self.wire.partition("=")[0],
                "calibration": getattr(self.world.wire, "fingerprint", None),
                "vivace": getattr(sys.modules.get("vivace"), "__version__", None),
                "checkpoint": base_hash(options.folder)[:16],
                "kernels": options.kernels,
                "weights": options.weights,
                "dtype": str(decoder.dtype).removeprefix("torch."),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "keys and values": options.kv,
            }
        )
        if not self.world.leads:
            end_following(self.world, *self._followers(decoder, whole))
        if isinstance(self.prefill, ScatteredPrefill):
            self.prefill.hold(whole, decoder)
        if isinstance(self.prefill, RunaheadPrefill):
            decoder.backend.num_ranks = self.world.size
            self.prefill.measure(whole)
            facts = facts_of(self.world.size, decoder, options.kernels)
            self.prefill.table = found_table(options.folder, facts) if self.reads_table else None
        return decoder

    def _followers(self, decoder: Decoder, whole: Decoder) -> list[Following]:
        """Return who follows rank 0 with what this rank has loaded: what it decodes with, and the whole model."""
        world = self.world
        if self.mode == SCATTERED:
            return scattered_followers(world, whole, decoder)
        taking = {"tensor": Follower, PIPELINE: PipelineFollower}.get(self.mode, RunaheadFollower)
        staged = [PipelineFollower(world, decoder, passes.CHOSEN_STAGES)] if self.mode == AUTO else []
        return [taking(world, decoder), *staged]


def end_following(world: World, *followers: Following) -> NoReturn:
    """Repeat what rank 0 does until it has ended, and end the process."""
    try:
        follow(world, *followers)
    except WorldError:
        sys.exit(1)  # rank 0 says what happened
    world.close()
    sys.exit(0)


def facts_of(num_ranks: int, decoder: Decoder, kernels: str) -> dict[str, Any]:
    """Return what a table of partitions is valid for."""
    kind = str(decoder.dtype).removeprefix("torch.")
    return {"ranks": num_ranks, "dtype": kind, "kernels": kernels, "threads": torch.get_num_threads()}


def found_table(folder: Path, facts: Mapping[str, Any]) -> Table | None:
    """Return the table of partitions beside a model for so many ranks, or None where there is none.

    Raises:
        MismatchError: it is of another checkpoint, dtype, kernels or number of threads.
    """
    place = folder / "adapters" / f"{RUNAHEAD}-{facts['ranks']}"
    return read_table(place, base_hash(folder), facts) if place.is_dir() else None


def load_share(
    world: World, wire: str | Wire, options: LoadOptions, collective: LinkedSum | MetSum | None = None
) -> Decoder:
    """Load a rank's share of every layer.

    Args:
        world: the ranks.
        wire: the form of sums, or its name.
        options: how the model is loaded.
        collective: adds, in that form; None adds over the links.
    """
    config = options.config
    check_model(config)
    share = shares_of(config, world.size)[world.rank]
    leader = Leader(world) if world.leads else None
    collective = LinkedSum(world) if collective is None else collective
    parts = ShareParts(config, share, collective, () if leader is None else (leader,), has_ends=world.leads)

    def made(kind: torch.dtype) -> Backend | None:
        inner = options.backend(kind)
        return inner if leader is None else LedBackend(TorchBackend() if inner is None else inner, leader)

    shard = shard_of(config, share, has_ends=world.leads)
    decoder = options.decoder(made, parts=parts, shard=shard)
    world.wire = wire_of(wire, options, world.size, decoder.dtype) if isinstance(wire, str) else wire
    collective.wire = world.wire
    return decoder


def load_whole(world: World, options: LoadOptions, *, is_staged: bool) -> Decoder:
    """Load the whole model on every rank.

    Args:
        world: the ranks.
        options: how they load it.
        is_staged: whether sequences may lie in stages among the ranks (``staged.py``), where layers can be divided so.
    """
    if not (is_staged and world.leads and has_stages(options.config, world.size)):
        return options.decoder()
    leader = PipelineLeader(world, passes.CHOSEN_STAGES)

    def made(kind: torch.dtype) -> Backend:
        inner = options.backend(kind)
        return StagedBackend(TorchBackend() if inner is None else inner, leader)

    return options.decoder(made)


def load_stages(world: World, options: LoadOptions, offset: int = 0) -> Decoder:
    """Load a model whose layers are computed by the ranks one after the other.

    Args:
        world: the ranks.
        options: how they load it.
        offset: number of the first operation by which stages know their messages (``passes.py``).
    """
    config = options.config
    check_model(config)
    if not has_stages(config, world.size):
        raise ConfigError(f"{world.size} ranks cannot share {config.num_layers} layers; start fewer")
    leader = PipelineLeader(world, offset) if world.leads else None

    def made(kind: torch.dtype) -> Backend | None:
        inner = options.backend(kind)
        return inner if leader is None else PipelineBackend(TorchBackend() if inner is None else inner, leader)

    return options.decoder(made, parts=PipelineParts(config, leader))


def wire_of(name: str, options: LoadOptions, num_ranks: int, dtype: torch.dtype) -> Wire:
    """Return the form of sums that a user named, with the calibration of a model where it has one.

    Raises:
        ConfigError: there is no such form.
        NotFoundError: there is no calibration.
        MismatchError: it is of another checkpoint, other ranks or another dtype.
    """
    found = form_of(name)
    if found is None:
        return find_wire(name)
    form, given = found
    folder = options.folder
    place = folder / "adapters" if given is None else Path(given)
    if given is None or (place / f"{KIND}-{num_ranks}").is_dir():
        place = place / f"{KIND}-{num_ranks}"
    kind = str(dtype).removeprefix("torch.")
    calibration = Calibration.read(place, base_hash(folder), columns_of(options.config, num_ranks), kind)
    return LowBitWire(calibration, form, feeds_back=options.config.norm_placement == "pre")


def check_model(config: ModelConfig) -> None:
    """Refuse models that are not shared.

    Raises:
        UnsupportedError: the model is a mixture of experts.
    """
    if config.moe is not None:
        raise UnsupportedError("mixtures of experts are not shared among ranks; leave out --parallel")


P = ParamSpec("P")
T = TypeVar("T")


def on_all_ranks(load: Callable[P, T]) -> Callable[P, T]:
    """Let a function that loads a model meet the other ranks first where its caller asks for that.

    ``load`` takes ``vivace.load``'s arguments. If ``parallel`` is a way to share work, it is called with a
    ``SharedLoading`` in its place, and if it fails on one rank all of them end.
    """

    @wraps(load)
    def load_together(*args: P.args, **settings: P.kwargs) -> T:
        if isinstance(settings.get("parallel"), SharedLoading):
            return load(*args, **settings)
        mode, interface, timeout_s = (settings.get(name) for name in ("parallel", "link_interface", "timeout"))
        if mode is None:
            for name in ("wire", "link_interface", "timeout"):
                if settings.get(name) is not None:
                    raise ConfigError(f"{name} has no effect without parallel; leave it out")
            return load(*args, **settings)
        opening = SharedLoading.of(mode, interface=interface, timeout_s=timeout_s, settings=settings)  # type: ignore[arg-type]
        settings["parallel"] = opening
        with opening.world.guarding():
            return load(*args, **settings)

    return load_together
