"""Several layers in one native call: norm, projections, rotation, cache, attention and feed-forward of each.

Every kind of layer that ``ModelConfig`` describes can run so, with the exceptions that ``why_no_span`` names. Experts
that are fetched from a store run one by one between calls. Low-rank deltas and rows that only read are passed as data.
Prompt chunks and dense batches go through the layers one by one. The bits of a row are those of the layers one by one;
only rows with low-rank deltas may differ in the last bit, since one by one the deltas are computed by PyTorch
(``low_rank.py``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from vivace.core.cache import KVCache
from vivace.core.cpu.plan import (
    Pointers,
    fetches_nothing,
    layer_of,
    pairs_of,
    part_of,
    plan_of,
    pointers,
    why_no_span,
)
from vivace.core.cpu.quantized import is_rounded, quantized_copy, tell_rounding
from vivace.core.low_rank import FixedFactors, LowRankDeltas, Site
from vivace.core.step import Step
from vivace.errors import UnsupportedError
from vivace.kernels.huge_pages import HugePages
from vivace.kernels.library import (
    SITES,
    CCall,
    CDelta,
    CLayer,
    CMatrix,
    CPlaces,
    CPlan,
    LayerPart,
)
from vivace.kernels.low_bit import LowBit, Weights
from vivace.kernels.native import NativeBody, pack

if TYPE_CHECKING:
    from vivace.core.model import Decoder, Layer


class StoredEntries(NamedTuple):
    """Where a cache has keys and values, layer by layer, as native code takes it."""

    keys: Pointers
    values: Pointers
    places: ctypes.Array[CPlaces]


class NativeSpan:
    """Runs layers of one packed decoder on native kernels, several in one call."""

    is_native = True

    def __init__(self, decoder: Decoder, body: NativeBody) -> None:
        self.body = body
        self._layers: list[Layer] = list(decoder.layers)  # type: ignore[arg-type]
        rotaries = {id(layer.rotary): place for place, layer in reversed(list(enumerate(self._layers)))}
        is_rotary = decoder.config.positions == "rotary"
        self.rotating = [self._layers[place] for place in rotaries.values()] if is_rotary else []
        """One layer for each distinct rotary embedding, in the order of the plan's tables; none without rotation."""
        ropes = {rotary: index for index, rotary in enumerate(rotaries)}
        self._kept: list[object] = []
        """What the plan points into and no layer holds: quantized copies, and the structs of mixtures."""
        self.plan = plan_of(decoder, self._layers, [ropes[id(layer.rotary)] for layer in self._layers], self._kept)
        self._stored: WeakKeyDictionary[KVCache, StoredEntries] = WeakKeyDictionary()
        self._packed = WeakIdKeyDictionary()
        self._native_deltas = WeakIdKeyDictionary()

    def quantized(self, start: int, stop: int, weights: Weights) -> NativeSpan:
        """Make a span whose layers start..stop-1 have quantized copies of their matrices; the rest is shared."""
        other = copy(self)
        other.plan, other._kept = self.quantized_copy(start, stop, weights)
        return other

    def quantized_copy(
        self, start: int, stop: int, weights: Weights, made: Mapping[tuple[int, str], LowBit] | None = None
    ) -> tuple[CPlan, list[object]]:
        """Return a plan in which layers start..stop-1 have quantized copies of their matrices, and what it points into.

        Matrices that were ``made`` in this format before, by layer and part, are taken as they are.

        Routers are not quantized: they would choose other experts. Rows in float32 are not multiplied by quantized
        weights: their plan stays as it is.
        """
        kept = list(self._kept)
        if weights == "bf16" or self.body.dtype != torch.bfloat16:
            return self.plan, kept

        known = {
            id(part): copy
            for (layer, name), copy in (made or {}).items()
            if copy.format == weights and (part := part_of(self._layers[layer], name)) is not None
        }
        found = {id(part): part for layer in self._layers[start:stop] for part in layer.modules()}
        fresh = [part for key, part in found.items() if key not in known]
        tell_rounding(f"layers {start} to {stop - 1}", fresh, weights)

        uneven = {
            id(part)
            for layer in self._layers[start:stop]
            for pair in pairs_of(layer.feed_forward)
            if len({id(part) in known or is_rounded(part.matrix, weights) for part in pair}) > 1
            for part in pair
        }

        def matrix(part: object) -> CMatrix:
            copied = quantized_copy(part, weights, known.get(id(part)), always=id(part) in uneven)
            kept.append(copied)
            return copied.struct

        plan = CPlan.from_buffer_copy(self.plan)
        layers = self.plan.layers[: len(self._layers)]
        layers[start:stop] = [
            layer_of(layer, layers[layer.index].rope, kept, matrix) for layer in self._layers[start:stop]
        ]
        plan.layers = (CLayer * len(layers))(*layers)
        return plan, kept

    @staticmethod
    def of(decoder: Decoder, body: NativeBody) -> NativeSpan | None:
        """Make the span of a packed decoder, or return None for the reason that ``why_no_span`` gives, and where layers
        read states, which native calls over several layers do not.
        """
        if why_no_span(decoder.config) is not None or decoder.keeps_states:
            return None
        return NativeSpan(decoder, body) if fetches_nothing(decoder) else MixtureSpan(decoder, body)

    def covers(self, step: Step) -> bool:
        """Return whether a call can run as a span: its rows are single rows over a cache, its deltas of the
        body's dtype.
        """
        if step.grid is not None or step.chunk is not None or not isinstance(step.memory, KVCache):
            return False
        fresh = (deltas for deltas in step.low_rank if deltas not in self._native_deltas)
        return all(self.can_take(deltas) for deltas in fresh)

    def can_take(self, deltas: LowRankDeltas) -> bool:
        """Return whether factors are contiguous and of the body's dtype; asked once for those that never change."""
        if deltas.kept is not None and (type(self), self.body.dtype) in deltas.kept:
            return True
        weights = (*deltas.down.values(), *deltas.up.values())
        return all(weight.dtype == self.body.dtype and weight.is_contiguous() for weight in weights)

    def run(self, h: Tensor, step: Step, start: int, stop: int) -> Tensor:
        """Run rows through layers start..stop-1, (T, E) -> (T, E)."""
        return self._call(h, step, start, stop, step.num_feed)

    def part(self, h: Tensor, step: Step, index: int, part: LayerPart, heads: Tensor | None = None) -> Tensor:
        """Compute a part of a layer, whose queries, keys and values (T, H D + 2 K D) lie in ``heads`` between two."""
        return self._call(h, step, index, index + 1, step.num_feed, part, heads)

    def _call(
        self,
        h: Tensor,
        step: Step,
        start: int,
        stop: int,
        num_feed: int,
        part: LayerPart = LayerPart.WHOLE,
        heads: Tensor | None = None,
    ) -> Tensor:
        """Run rows in one native call; those from ``num_feed`` on get the "mlp" deltas instead of the feed-forward."""
        if h.requires_grad:
            raise UnsupportedError("packed weights cannot be trained; load the model with kernels='torch'")
        h = h.contiguous()
        if start >= stop or len(h) == 0:
            return h
        assert h.dtype == self.body.dtype
        call, version = self._shared(step, h.dtype)
        native_deltas, kept = self.native_deltas(step.low_rank, start, stop, version)
        out = torch.empty_like(h)
        call.h, call.out, call.deltas, call.num_deltas = h.data_ptr(), out.data_ptr(), native_deltas, len(native_deltas)
        call.start, call.stop, call.num_feed, call.part = start, stop, num_feed, part
        call.heads = None if heads is None else heads.data_ptr()
        self.body.span(self.plan, call)
        del kept
        return out

    def _shared(self, step: Step, dtype: torch.dtype) -> tuple[CCall, int]:
        """Return the struct of a call without its range of layers, and its deltas' version; made once per call."""
        if self not in step.laid_out:
            assert isinstance(step.memory, KVCache)
            given = (step.slot, step.seen, step.entry, step.tail, step.index)
            assert all(t.is_contiguous() for t in given if t is not None)
            stored = self.addresses(step.memory)
            rotations = [layer.rotation(step, dtype) for layer in self.rotating]
            call = CCall(
                slot=step.slot.data_ptr(),
                seen=step.seen.data_ptr(),
                tail=None if step.tail is None else step.tail.data_ptr(),
                index=None if step.index is None else step.index.data_ptr(),
                entry=step.entry.data_ptr(),
                keys=stored.keys,
                values=stored.values,
                places=stored.places,
                cosines=pointers([cos for cos, _ in rotations]),
                sines=pointers([sin for _, sin in rotations]),
                rows=step.num_rows,
                num_write=step.num_write,
                tail_width=0 if step.tail is None else step.tail.shape[1],
                index_width=0 if step.index is None else step.index.shape[1],
            )
            if self.plan.reads_sources:
                assert isinstance(step.beside.memory, KVCache)
                sources = self.addresses(step.beside.memory)
                call.cross_keys, call.cross_values, call.cross_places = sources
                call.cross_seen = step.beside.seen.data_ptr()
            step.laid_out[self] = call, _version_of(step.low_rank)
        laid_out: tuple[CCall, int] = step.laid_out[self]
        return laid_out

    def addresses(self, cache: KVCache) -> StoredEntries:
        """Return the addresses of a cache's keys and values in every layer, which are the same as long as it exists."""
        found = self._stored.get(cache)
        if found is None:
            stored = [cache.stored(layer) for layer in range(len(self._layers))]
            places = []
            for layer, (pool, _) in enumerate(cache.store.place_of_layer):
                part = stored[layer][0]
                table = cache.tables[pool].first
                sizes = table.shape[1], cache.store.size, part.shape[1]
                places.append(CPlaces(table.data_ptr(), *sizes, *cache.scales(layer), cache.pruned[layer].data_ptr()))
            keys, values = (pointers([part[which] for part in stored]) for which in (0, 1))
            found = self._stored[cache] = StoredEntries(keys, values, (CPlaces * len(places))(*places))
        return found

    def native_deltas(
        self, applied: Sequence[LowRankDeltas], start: int, stop: int, version: int | None = None
    ) -> tuple[ctypes.Array[CDelta], list[object]]:
        """Return the low-rank deltas of layers start..stop-1 as structs, and what the structs point into.

        What is made for one of ``applied`` is kept for the next call with it, until its weights change.

        Args:
            applied: deltas of the call.
            start: first layer.
            stop: one past the last layer.
            version: number of in-place changes of the weights, where it is known already.
        """
        if not applied:
            return (CDelta * 0)(), []
        version = _version_of(applied) if version is None else version
        found = [self._terms(deltas, start, stop, version) for deltas in applied]
        terms = found[0][0]
        if len(found) > 1:
            terms = torch.cat([part for part, _ in found])
            terms = terms[terms[:, 0].argsort(stable=True)]
        structs = (CDelta * len(terms)).from_address(terms.data_ptr()) if len(terms) else (CDelta * 0)()
        return structs, [terms, *(kept for _, kept in found)]

    def _terms(self, deltas: LowRankDeltas, start: int, stop: int, version: int) -> tuple[Tensor, object]:
        """Return the structs of some layers' deltas as numbers, (n, 8) by layer, and what they point into."""
        kept = self._native_deltas.setdefault(deltas, {})
        if kept.get((start, stop), (None,))[0] != version:
            terms, tensors = self._factors(deltas)
            which = deltas.which.contiguous()
            layers = terms[:, 0].contiguous()
            first, last = torch.searchsorted(layers, torch.tensor([start, stop])).tolist()
            own = terms[first:last].clone()
            own[:, -1] = which.data_ptr()
            kept[start, stop] = (version, own, (which, tensors))
        found: tuple[int, Tensor, object] = kept[start, stop]
        return found[1:]

    def lay_out(self, factors: FixedFactors) -> int:
        """Pack an adapter's factors before its first call; return the bytes that this takes."""
        deltas = factors.deltas(torch.zeros(0, dtype=torch.int64))
        if not self.can_take(deltas):
            return 0
        _, packed = self._factors(deltas)
        assert isinstance(packed, list)
        return sum(each.nbytes for each in packed[1::2])

    def _factors(self, deltas: LowRankDeltas) -> tuple[Tensor, object]:
        """Return the structs of all layers' factors as numbers without ``which``, (n, 8), and what they point into.

        Those that never change are laid out once, whatever the rows that carry them.
        """
        key = (type(self), self.body.dtype)
        if deltas.kept is not None and key in deltas.kept:
            known: tuple[Tensor, object] = deltas.kept[key]
            return known
        ups = {key: up for key, up in deltas.up.items() if key[1] in SITES}
        is_fixed = deltas.kept is not None
        packs = _packed_together(ups) if is_fixed else {key: self._pack_up(up) for key, up in ups.items()}
        kept: list[Tensor] = []
        rows: list[tuple[int, ...]] = []
        for (layer, site), packed in packs.items():
            down, up = deltas.down[layer, site], deltas.up[layer, site]
            kept += [down, packed]
            addresses = (down.data_ptr(), packed.data_ptr(), 0)
            rows.append((layer, SITES[site], down.shape[1], down.shape[2], up.shape[1], *addresses))
        rows.sort(key=lambda row: row[0])
        terms = torch.tensor(rows, dtype=torch.int64).reshape(-1, len(CDelta._fields_))
        if deltas.kept is not None:
            deltas.kept[key] = terms, kept
        return terms, kept

    def _pack_up(self, up: Tensor) -> Tensor:
        """Pack up factors (A, out, rank) adapter by adapter, once until the weights change or are freed."""
        version = _version(up)
        found = self._packed.get(up)
        if found is None or found[0] != version:
            found = self._packed[up] = (version, pack(up.detach()))
        packed: Tensor = found[1]
        return packed


def _packed_together(ups: Mapping[Site, Tensor]) -> dict[Site, Tensor]:
    """Pack up factors (A, out, rank) that stay as they are, those of one shape in one piece of memory."""
    of_shape: dict[torch.Size, list[Site]] = {}
    for site, up in ups.items():
        of_shape.setdefault(up.shape, []).append(site)
    packs = [pack(torch.stack([ups[site] for site in sites])) for sites in of_shape.values()]
    memory = HugePages(sum(each.nbytes for each in packs))
    found: dict[Site, Tensor] = {}
    for sites, packed in zip(of_shape.values(), packs, strict=True):
        found |= zip(sites, memory.hold(packed), strict=True)
    return found


class MixtureSpan(NativeSpan):
    """A span of layers whose experts are fetched: attention and deltas in one native call for each layer, experts one
    by one.
    """

    def covers(self, step: Step) -> bool:
        """Return whether a call can run as a span; rows that pass experts must have no deltas beside them."""
        return super().covers(step) and all(_is_behind(deltas, step.num_feed) for deltas in step.low_rank)

    def run(self, h: Tensor, step: Step, start: int, stop: int) -> Tensor:
        """Run rows through layers start..stop-1, (T, E) -> (T, E)."""
        for index in range(start, stop):
            layer = self._layers[index]
            if not layer.config.is_moe(index):
                h = super().run(h, step, index, index + 1)
                continue
            h = self._call(h, step, index, index + 1, 0)
            fed = h[: step.num_feed]
            x = fed if layer.ffn_norm is None else layer.ffn_norm(fed)
            if layer.ffn_post_norm is None:
                fed = layer.feed_forward(x, step, fed)
            else:
                fed = fed + layer.ffn_post_norm(layer.feed_forward(x, step))
            h = fed if step.num_feed == step.num_rows else torch.cat((fed, h[step.num_feed :]))
        return h


def _is_behind(deltas: LowRankDeltas, num_feed: int) -> bool:
    """Return whether no row before ``num_feed`` has deltas."""
    firsts = (rows.start if isinstance(rows, slice) else int(rows.min()) for _, rows in deltas.spans)
    return all(first >= num_feed for first in firsts)


def _version_of(applied: Sequence[LowRankDeltas]) -> int:
    """Return how often the up factors of deltas were changed in place."""
    return sum(_version(up) for deltas in applied if deltas.kept is None for up in deltas.up.values())


def _version(weight: Tensor) -> int:
    """Return how often a weight was changed in place."""
    return 0 if weight.is_inference() else weight._version
