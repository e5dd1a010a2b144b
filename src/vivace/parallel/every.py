"""All ways to share work in one world, for measuring them in turns: every rank holds the model, a share and stages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vivace.checkpoint.adapters import base_hash
from vivace.core.model import Decoder
from vivace.core.summed import Point
from vivace.decode.prefill import FULL, Prefill
from vivace.errors import ConfigError
from vivace.parallel import passes
from vivace.parallel.auto import AutoPrefill
from vivace.parallel.collective import Wire
from vivace.parallel.loading import (
    LoadOptions,
    SharedLoading,
    end_following,
    load_share,
    load_stages,
    load_whole,
    wire_of,
)
from vivace.parallel.pipeline import PipelineFollower, PipelinePrefill
from vivace.parallel.scattered import ScatteredPrefill, scattered_followers
from vivace.parallel.world import World


class SwitchedWire:
    """Implements ``Wire``: one of several forms, which all ranks change together."""

    def __init__(self) -> None:
        """Begin without forms; they are known once the model is."""
        self.forms: dict[str, Wire] = {}
        self.inner: Wire | None = None

    @property
    def most_in_one_shot(self) -> int:
        """Return with how many ranks at most the form in use adds many rows in one shot."""
        return self._form.most_in_one_shot

    @property
    def _form(self) -> Wire:
        assert self.inner is not None, "a form is chosen before anything is summed"
        return self.inner

    def encode(self, x: Tensor, point: Point, source: int | None) -> tuple[Tensor, ...]:
        """Encode rows in the form in use."""
        return self._form.encode(x, point, source)

    def added(self, parts: Sequence[Sequence[Tensor]], point: Point, dtype: torch.dtype) -> Tensor:
        """Add in the form in use."""
        return self._form.added(parts, point, dtype)

    def decode(self, parts: Sequence[Tensor], point: Point) -> Tensor:
        """Decode in the form in use."""
        return self._form.decode(parts, point)


class _WireFollower:
    """Changes the form of sums when rank 0 says so."""

    operations = frozenset((passes.WIRE,))

    def __init__(self, wire: SwitchedWire) -> None:
        self._wire = wire

    def take(self, operation: int, numbers: list[int], rest: memoryview) -> None:
        """Take the form of this number."""
        self._wire.inner = list(self._wire.forms.values())[numbers[0]]


class EveryLoading(SharedLoading):
    """Loads a model for all ways: give it to ``vivace.load`` for whole models, for shares, for stages of layers, and
    for shares behind prompts that whole models read.
    """

    def __init__(self, world: World, wires: Sequence[str]) -> None:
        """Load among the ranks of a world; ``wires`` are the forms of sums between which it can change."""
        if not wires:
            raise ConfigError("name at least one form of sums")
        super().__init__(world, "every", ",".join(wires))
        self._names = list(wires)
        self._switch = SwitchedWire()
        self._loaded: list[tuple[Decoder, Prefill]] = []
        """What later calls return."""
        self.reading = AutoPrefill(world, "runahead")
        """How the engine that was loaded first reads prompts."""

    def load(self, options: LoadOptions) -> Decoder:
        """Load everything, and return the whole model, at later calls the share, the stages and the share again.

        Only on rank 0 it returns.

        Raises:
            WorldError: the ranks differ, or one of them failed.
            ConfigError: so many ranks cannot share the model.
            UnsupportedError: such a model is not shared.
        """
        if self._loaded:
            decoder, self.prefill = self._loaded.pop(0)
            return decoder
        whole = load_whole(self.world, options, is_staged=True)
        share = load_share(self.world, self._switch, options)
        stages = load_stages(self.world, options, passes.STAGES)
        for decoder in (whole, share, stages):
            decoder.store_entries(options.kv)
        forms = {name: wire_of(name, options, self.world.size, whole.dtype) for name in self._names}
        self._switch.forms = forms
        facts: dict[str, Any] = {
            "vivace": getattr(sys.modules.get("vivace"), "__version__", None),
            "checkpoint": base_hash(options.folder)[:16],
            "kernels": options.kernels,
            "dtype": str(whole.dtype),
            "threads": torch.get_num_threads(),
            "forms": [getattr(form, "fingerprint", name.partition("=")[0]) for name, form in forms.items()],
        }
        self.world.compare(facts)
        if not self.world.leads:
            followers = scattered_followers(self.world, whole, share)
            in_stages = PipelineFollower(self.world, stages, passes.STAGES)
            chosen = PipelineFollower(self.world, whole, passes.CHOSEN_STAGES)
            end_following(self.world, *followers, in_stages, chosen, _WireFollower(self._switch))
        whole.backend.num_ranks = self.world.size
        self.reading.times_masked = True
        self.reading.measure(whole)
        self.prefill = self.reading
        scattered = ScatteredPrefill(self.world)
        scattered.hold(whole, share)
        scattered.costs = self.reading.costs
        self._loaded = [(share, FULL), (stages, PipelinePrefill()), (share, scattered)]
        return whole

    def use(self, wire: str) -> None:
        """Change the form of sums on all ranks."""
        self.world.tell(passes.packed(passes.WIRE, [self._names.index(wire)]))
        self._switch.inner = self._switch.forms[wire]
