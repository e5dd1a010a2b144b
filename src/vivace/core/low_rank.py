"""Low-rank deltas: products of two small matrices that are added to named projections for some rows of a call.

    y[t] += up s(down x[t])        down (rank, in), up (out, rank), s the identity, or silu at a bottleneck ("mlp")

An accelerated residual, a speculative stream and a request's LoRA (Hu et al. 2021, arXiv:2106.09685) differ only in
which rows carry which factors. So ``LowRankDeltas`` travels as data in the ``Step`` and the decoder never learns whose
they are. ``LowRank`` is the one module that holds such factors while they are trained and after.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.core.config import ModelConfig
from vivace.core.trained import Trained
from vivace.kernels import reference as kernels
from vivace.kernels.huge_pages import HugePages

Site = tuple[int, str]
"""(layer, "q" | "k" | "v" | "o" | "gate" | "up" | "down" | "mlp")."""
Shape = tuple[int, int, int]
"""(in, rank, out) of the two factors at a site."""

ATTENTION = ("q", "k", "v", "o")
"""The projections of a layer's attention half."""
PROJECTIONS = (*ATTENTION, "gate", "up", "down")
"""Every matrix of a dense layer; "mlp" is no matrix but a bottleneck beside the whole feed-forward."""


@dataclass(frozen=True)
class LowRankDeltas:
    """``y[t] += up[a] s(down[a] x[t])`` with a = which[t]; s is silu at "mlp", the identity elsewhere.

    A row with ``which == -1`` is left alone, bit for bit: nothing is added to it, not even zero.
    """

    which: Tensor
    """(T,) adapter of each row, -1 for none."""
    down: Mapping[Site, Tensor]
    """Site -> (A, rank, in), A adapters; PyTorch takes them in any precision, native spans in the rows' own."""
    up: Mapping[Site, Tensor]
    """Site -> (A, out, rank), scale folded in."""
    kept: dict[object, Any] | None = None
    """Where a backend keeps the factors as it lays them out, for all calls; None where they may change in place."""

    @cached_property
    def carriers(self) -> tuple[int, ...]:
        """Return ``which`` as integers of Python, read from the tensor once."""
        return tuple(self.which.tolist())

    @cached_property
    def spans(self) -> tuple[tuple[int, slice | Tensor], ...]:
        """Return each adapter that is used and its rows, as a slice where they are neighbours."""
        which = self.carriers
        spans: list[tuple[int, slice | Tensor]] = []
        for adapter in sorted(set(which) - {-1}):
            rows = [row for row, other in enumerate(which) if other == adapter]
            contiguous = rows[-1] - rows[0] + 1 == len(rows)
            span: slice | Tensor = slice(rows[0], rows[-1] + 1)
            spans.append((adapter, span if contiguous else torch.tensor(rows, device=self.which.device)))
        return tuple(spans)

    def add(self, y: Tensor, x: Tensor, site: Site) -> None:
        """Add this site's deltas to ``y`` in place, computed from ``x``, for the first rows of the call.

        Args:
            y: (n, out), n at most T: rows behind the first n do not pass this projection.
            x: (n, in) inputs of the same rows.
            site: layer and projection.
        """
        down = self.down.get(site)
        if down is None:
            return
        up = self.up[site]
        count = len(x)
        first = self if count == len(self.which) else self.carried(self.which[:count], self.carriers[:count])
        for adapter, rows in first.spans:
            inner = kernels.linear(x[rows].to(down.dtype), down[adapter])
            if site[1] == "mlp":
                inner = kernels.pointwise(F.silu, inner)
            term = kernels.linear(inner, up[adapter]).to(y.dtype)
            if isinstance(rows, slice):
                y[rows].add_(term)
            else:
                y.index_add_(0, rows, term)

    def carried(self, which: Tensor, known: tuple[int, ...]) -> LowRankDeltas:
        """Return the same deltas for rows that carry what ``known`` says, without reading ``which`` from the device."""
        made = replace(self, which=which)
        vars(made)["carriers"] = known
        return made

    def take(self, rows: Tensor) -> LowRankDeltas:
        """Return the same deltas for some rows of the call."""
        return replace(self, which=self.which[rows])

    def extended(self, num_rows: int) -> LowRankDeltas:
        """Return the same deltas for a call with ``num_rows`` further rows, which get none."""
        return replace(self, which=F.pad(self.which, (0, num_rows), value=-1))


def add_low_rank(y: Tensor, x: Tensor, carried: Sequence[LowRankDeltas], layer: int, widths: Mapping[str, int]) -> None:
    """Add to the output of a projection, in place, whatever deltas its rows carry there.

    This is the one place where PyTorch's path adds low-rank deltas, whoever brought them (``Step.low_rank``); native
    spans take the same deltas as data.

    Args:
        y: (n, sum of the widths) outputs, of one projection or of several side by side.
        x: (n, in) inputs.
        carried: deltas of the call.
        layer: number of the layer.
        widths: columns of each projection in ``y``, by the name of its site and in order.
    """
    for deltas in carried:
        first = 0
        for name, width in widths.items():
            deltas.add(y[:, first : first + width], x, (layer, name))
            first += width


class DeltaBank(Protocol):
    """Holds low-rank factors of one or several adapters."""

    def deltas(self, which: Tensor) -> LowRankDeltas:
        """Return the factors as data for a call; ``which`` (T,) is each row's adapter, -1 for none."""
        ...


class AdapterSource(Protocol):
    """The adapter of a request, which need not be in memory before the request runs."""

    @property
    def bank(self) -> DeltaBank:
        """Return what holds its factors; they stay in memory as long as somebody has it.

        Raises:
            BusyError: those of running requests leave no room for it.
        """
        ...

    @property
    def number(self) -> int:
        """Return its number in the bank."""
        ...

    @property
    def version(self) -> str | None:
        """Return what its factors are known by; entries of prompts that were read with them may then be kept, apart
        from all others. None keeps nothing.
        """
        ...

    def is_ready(self) -> bool:
        """Return whether it is in memory, or could be brought there now."""
        ...

    def wait(self) -> None:
        """Note that the request has no slot, from the start or once more, and will need the adapter."""
        ...


class Adapter(NamedTuple):
    """One adapter of a bank, as the rows of a sequence carry it."""

    bank: DeltaBank
    number: int = 0
    version: str | None = None

    def is_ready(self) -> bool:
        """Return True: its factors are in memory."""
        return True

    def wait(self) -> None:
        """Do nothing: its factors stay in memory."""


@dataclass(frozen=True)
class FactorLayout:
    """How the factors of an adapter lie in one piece of memory."""

    shapes: tuple[torch.Size, ...]
    """Of all factors, which lie one behind another."""
    down: Mapping[Site, int]
    """The place among them of each site's down factor; sites may share one."""
    up: Mapping[Site, int]

    @property
    def num_numbers(self) -> int:
        """Return how many numbers all factors have."""
        return sum(shape.numel() for shape in self.shapes)

    def views(self, memory: Tensor) -> list[Tensor]:
        """Return the factors that lie in memory (n,), in their order."""
        parts = memory.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class FixedFactors:
    """Fills ``DeltaBank``: one adapter whose factors never change, so that a backend lays them out once.

    They lie in one piece of memory, so that adapters which come and go leave no gaps behind, and in huge pages: factors
    are many and short, so that a step begins to read in another place thousands of times.
    """

    def __init__(self, memory: Tensor, layout: FactorLayout) -> None:
        """Hold the factors that lie in memory (n,), the scale folded into the up factors."""
        self.memory = HugePages(memory.nbytes).hold(memory)
        self.layout = layout
        held = [view[None] for view in layout.views(self.memory)]
        self.down = {site: held[place] for site, place in layout.down.items()}
        self.up = {site: held[place] for site, place in layout.up.items()}
        self._kept: dict[object, Any] = {}

    @staticmethod
    def of(
        factors: Mapping[Site, tuple[Tensor, Tensor]],
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> FixedFactors:
        """Copy factors into one piece of memory.

        Args:
            factors: down (rank, in) and up (out, rank), the scale folded in, of every site; a down factor that several
                sites share is held once.
            device: where they are held; None is where they are.
            dtype: in which; None is the one that they share.
        """
        parts = {id(part): part for pair in factors.values() for part in pair}
        places = {key: place for place, key in enumerate(parts)}
        layout = FactorLayout(
            tuple(part.shape for part in parts.values()),
            {site: places[id(down)] for site, (down, _) in factors.items()},
            {site: places[id(up)] for site, (_, up) in factors.items()},
        )
        flat = torch.cat([part.reshape(-1) for part in parts.values()]) if parts else torch.empty(0)
        return FixedFactors(flat.to(device or flat.device, dtype or flat.dtype), layout)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the factors; a down factor that several sites share counts once."""
        tensors = (*self.down.values(), *self.up.values())
        return sum({each.data_ptr(): each.nbytes for each in tensors}.values())

    def deltas(self, which: Tensor) -> LowRankDeltas:
        """Return the factors as data for a call; ``which`` (T,) is 0 on rows that carry them and -1 elsewhere."""
        return LowRankDeltas(which, self.down, self.up, self._kept)


class SlotAdapters:
    """Which adapter the rows of each slot carry: a table from slots to deltas, which every call on a cache looks into.

    Rows are given their slot's deltas by slot, whoever makes the call and whatever they are: prompt tokens, guesses, or
    the rows of a drafter that ride behind them. So no traversal and no drafter knows of adapters.
    """

    def __init__(self) -> None:
        """Begin with no slot that carries anything."""
        self._of_slot: dict[int, Adapter] = {}
        self._made: dict[tuple[int, ...], tuple[LowRankDeltas, ...]] = {}
        """By slots of a call's rows: calls of one shape get the same objects, which native spans lay out once."""

    def give(self, slot: int, adapter: AdapterSource | None) -> None:
        """Let the rows of a slot carry an adapter from now on, or none.

        Raises:
            BusyError: there is no room for its factors.
        """
        if adapter is not None:
            self._of_slot[slot] = Adapter(adapter.bank, adapter.number, adapter.version)
        elif self._of_slot.pop(slot, None) is None:
            return
        self._made.clear()

    def version(self, slot: int) -> str:
        """Return what the adapter of a slot is known by, which tells its entries from others; empty for none."""
        adapter = self._of_slot.get(slot)
        return "" if adapter is None or adapter.version is None else adapter.version

    def any_of(self, slots: Iterable[int]) -> bool:
        """Tell whether one of these slots carries an adapter."""
        return bool(self._of_slot) and not self._of_slot.keys().isdisjoint(slots)

    def deltas(self, slot: Tensor) -> tuple[LowRankDeltas, ...]:
        """Return the deltas of a call whose rows are of these slots (T,), one for each bank that is used."""
        if not self._of_slot:
            return ()
        slots = tuple(slot.tolist())
        if slots not in self._made:
            if len(self._made) >= MAX_SHAPES:
                self._made.clear()
            self._made[slots] = self._make(slots, slot.device)
        return self._made[slots]

    def _make(self, slots: tuple[int, ...], device: torch.device) -> tuple[LowRankDeltas, ...]:
        carried = [self._of_slot.get(slot) for slot in slots]
        banks = {id(adapter.bank): adapter.bank for adapter in carried if adapter is not None}
        made = []
        for bank in banks.values():
            which = [-1 if adapter is None or adapter.bank is not bank else adapter.number for adapter in carried]
            made.append(bank.deltas(torch.tensor(which, device=device)))
        return tuple(made)


MAX_SHAPES = 64
"""Shapes of calls whose deltas are remembered."""


class LowRank(Trained):
    """Trainable factors at named sites: down factors are random, up factors zero, so they add nothing at first."""

    def __init__(self, shapes: Mapping[Site, Shape]) -> None:
        """Make the factors of one adapter.

        Args:
            shapes: (in, rank, out) of every site, in the order in which the random factors are drawn.
        """
        super().__init__()
        self.sites = tuple(shapes)
        self.down = nn.ParameterList(random_factor(rank, wide)[None] for wide, rank, _ in shapes.values())
        self.up = nn.ParameterList(torch.zeros(1, out, rank) for _, rank, out in shapes.values())
        self._by_site = tuple(dict(zip(self.sites, factors, strict=True)) for factors in (self.down, self.up))

    def deltas(self, which: Tensor) -> LowRankDeltas:
        """Return the factors as data for a call; ``which`` (T,) is 0 on rows that carry them and -1 elsewhere."""
        down, up = self._by_site
        return LowRankDeltas(which, down, up)

    def items(self) -> Iterator[tuple[Site, Tensor, Tensor]]:
        """Yield every site with its down factor (1, rank, in) and its up factor (1, out, rank)."""
        yield from zip(self.sites, self.down, self.up, strict=True)

    def widen(self) -> None:
        """Turn the factors into float32.

        On a CPU without native kernels PyTorch multiplies matrices this small several times faster than in bfloat16.
        """
        self.down.float()
        self.up.float()


def random_factor(rank: int, wide: int) -> Tensor:
    """Draw a down factor (rank, wide) as ``torch.nn.Linear`` draws its weight (Kaiming, a = sqrt 5)."""
    weight = torch.empty(rank, wide)
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    return weight


def site_shapes(model: ModelConfig, layers: Iterable[int], ranks: Mapping[str, int]) -> dict[Site, Shape]:
    """Return the shapes of factors at some sites of some layers.

    Args:
        model: whose projections they stand beside.
        layers: numbers of the layers.
        ranks: rank by name of the site, in the order of the factors; a rank of 0 leaves the site out. Sites that a
            layer lacks ("gate" without a gated feed-forward, the three of a feed-forward in a mixture) are left out.
    """
    shapes: dict[Site, Shape] = {}
    for layer in layers:
        widths = _site_widths(model, layer)
        for site, rank in ranks.items():
            if rank and site in widths:
                wide, out = widths[site]
                shapes[layer, site] = wide, rank, out
    return shapes


def _site_widths(model: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Return (in, out) of every site of a layer."""
    heads, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    widths = {"q": (model.width, heads), "k": (model.width, keys), "v": (model.width, keys), "o": (heads, model.width)}
    if not model.is_moe(layer):
        halves = ("gate", "up") if model.gated else ("up",)
        widths |= dict.fromkeys(halves, (model.width, model.ffn_width)) | {"down": (model.ffn_width, model.width)}
    return widths | {"mlp": (model.width, model.width)}
