"""The memory plan: what stays in memory and what is read again, decided before anything is loaded.

A budget is for weights, buffers and the key/value cache of the longest text together. What every pass needs comes
first; then, by kind of store:

* layers: two buffers as large as the largest streamed bundle, and as many whole bundles as fit beside them, spread
  over the depth so that reading one overlaps computing its neighbours;
* neurons and selected: attention and selectors, and equal room for the neurons of each layer;
* experts: attention, and slots for experts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from math import prod

import torch

from vivace.core.cache import slot_bytes, specs_of
from vivace.core.config import ModelConfig
from vivace.decode.memory import DRAFT_SLACK
from vivace.errors import MemoryLimitError
from vivace.storage.neurons.predictors import predictor_bytes
from vivace.storage.store import Store
from vivace.units import format_bytes

NUM_BUFFERS = 2
BLOCK_BYTES = 4 << 20
"""Bytes of neurons that are read together where a layer needs all of them."""
LEAST_SHARE = 32
"""A layer must have room for at least one in this many of its neurons."""


@dataclass(frozen=True)
class MemoryPlan:
    """How a budget is divided."""

    budget_bytes: int | None
    """None where all of the model stays in memory."""
    resident: tuple[str, ...]
    """Names of the bundles that stay in memory."""
    streamed: tuple[str, ...]
    """Names of the bundles that are read whenever they are needed, in the order of their use."""
    resident_bytes: int
    buffer_bytes: int
    cache_bytes: int
    """Bytes of the keys and values of ``num_tokens``."""
    num_tokens: int
    """Longest text, prompt and answer together."""
    total_bytes: int
    """Bytes of all weights of the store."""
    neurons_per_layer: int = 0
    """Neurons of each layer that fit in memory; 0 for a store without neurons."""
    num_experts: int = 0
    """Slots for experts, of all layers together."""
    pool_bytes: int = 0
    """Bytes for neurons or experts in memory."""
    beside_bytes: int = 0
    """Bytes left for a draft model and adapters."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole plan."""
        return self.resident_bytes + self.buffer_bytes + self.cache_bytes + self.pool_bytes + self.beside_bytes

    def pass_bytes(self, store: Store, num_rows: int = 1) -> int:
        """Estimate the bytes that are read for a pass: the streamed bundles, or the experts chosen and not in memory.

        Args:
            store: the store that is planned for.
            num_rows: rows of the pass, drafts included; neurons are counted for one.
        """
        if self.num_experts:
            missing = 1 - self.num_experts / max(1, len(self.streamed))
            return int(chosen_experts(store.config, num_rows) * missing * store[self.streamed[0]].num_bytes)
        if self.neurons_per_layer:
            kept = self.neurons_per_layer / store.config.ffn_width
            return int((1 - kept) * sum(store[name].num_bytes for name in self.streamed))
        return sum(store[name].num_pages_bytes for name in self.streamed)

    def expected(
        self, store: Store, read_gb_per_s: float, compute_gb_per_s: float, *, num_rows: int = 1, tokens: float = 1.0
    ) -> float:
        """Estimate tokens a second: a pass reads and computes at the same time, and takes as long as the slower.

        Args:
            store: the store that is planned for.
            read_gb_per_s: speed of the reader, 10^9 bytes a second.
            compute_gb_per_s: speed of memory, from which a pass reads every weight it computes with once.
            num_rows: rows of a pass, drafts included.
            tokens: tokens that a pass yields.
        """
        computed = self.total_bytes
        if self.num_experts:
            idle = len(self.streamed) - chosen_experts(store.config, num_rows)
            computed -= int(idle * store[self.streamed[0]].num_bytes)
        seconds = self.pass_bytes(store, num_rows) / read_gb_per_s / 1e9
        return tokens / max(seconds, computed / compute_gb_per_s / 1e9)


def chosen_experts(config: ModelConfig, num_rows: int) -> float:
    """Estimate the experts that n rows of a pass choose together: ``X (1 - (1 - k / X)^n)`` a layer, over all layers.

    This is the expectation where routers choose k of X evenly and each row for itself. Neighbouring rows choose alike,
    so it is an upper estimate, and ``auto`` goes by the time that passes really took.
    """
    if config.moe is None:
        return 0.0
    layers = sum(map(config.is_moe, range(config.num_layers)))
    count, chosen = config.moe.num_experts, config.moe.top_k
    return layers * count * (1 - (1 - chosen / count) ** num_rows)


def plan_memory(store: Store, budget_bytes: int | None, num_tokens: int, beside_bytes: int = 0) -> MemoryPlan:
    """Divide a budget.

    Args:
        store: the model.
        budget_bytes: for weights, buffers and cache; None keeps everything in memory.
        num_tokens: longest text, prompt and answer together.
        beside_bytes: of the budget that are for a draft model and adapters.

    Raises:
        MemoryLimitError: the budget is too small; the message says what it would take.
    """
    cache = slot_bytes(specs_of(store.config), num_tokens + DRAFT_SLACK, store.dtype)
    neurons = [name for name in store.bundles if name.endswith(".neurons")]
    experts = [name for name in store.bundles if ".experts." in name]
    pooled = {*neurons, *experts}
    units = [name for name in store.bundles if name != "resident" and name not in pooled]
    total = sum(bundle.num_bytes for bundle in store.bundles.values())
    table = 0 if store.page_sums is None else store.page_sums.num_bytes
    fixed = store["resident"].num_bytes + predictor_bytes(store) + table
    plan = MemoryPlan(budget_bytes, (), (), fixed, 0, cache, num_tokens, total, beside_bytes=beside_bytes)
    if pooled:
        beside = sum(_dense_bytes(store, unit) for unit in units)
        plan = replace(plan, resident=tuple(units), resident_bytes=fixed + beside)
        return _with_neurons(plan, store, neurons) if neurons else _with_experts(plan, store, experts)
    return _with_units(plan, store, units)


def _dense_bytes(store: Store, unit: str) -> int:
    """Return the bytes that a bundle takes in memory beside pooled ones, where quantized matrices become bfloat16."""
    parts = [part for part in store[unit].parts if part.weights]
    return store[unit].num_bytes + sum(prod(part.shape) * torch.bfloat16.itemsize - part.num_bytes(0) for part in parts)


def _with_units(plan: MemoryPlan, store: Store, units: list[str]) -> MemoryPlan:
    fixed = plan.num_bytes
    everything = replace(
        plan, resident=tuple(units), resident_bytes=plan.resident_bytes + sum(store[unit].num_bytes for unit in units)
    )
    if plan.budget_bytes is None or everything.num_bytes <= plan.budget_bytes:
        return everything
    buffers = NUM_BUFFERS * max(store[unit].num_pages_bytes for unit in units)
    room = _room(plan, store, fixed + buffers, f"{NUM_BUFFERS} buffers of a layer's matrices {format_bytes(buffers)}")
    kept = set(_spread(units, {unit: store[unit].num_bytes for unit in units}, room))
    return replace(
        plan,
        resident=tuple(unit for unit in units if unit in kept),
        streamed=tuple(unit for unit in units if unit not in kept),
        resident_bytes=plan.resident_bytes + sum(store[unit].num_bytes for unit in kept),
        buffer_bytes=buffers,
    )


def _spread(units: list[str], sizes: dict[str, int], room: int) -> list[str]:
    """Choose units that fit, evenly spread: they are tried in the order of the reversed bits of their places."""
    width = max(1, (len(units) - 1).bit_length())
    order = sorted(range(len(units)), key=lambda place: int(f"{place:0{width}b}"[::-1], 2))
    kept = []
    for place in order:
        if sizes[units[place]] <= room:
            kept.append(units[place])
            room -= sizes[units[place]]
    return kept


def _with_neurons(plan: MemoryPlan, store: Store, neurons: list[str]) -> MemoryPlan:
    bundle = store[neurons[0]]
    stride, width = bundle.stride, bundle.count
    buffers = NUM_BUFFERS * block_of(width, stride) * stride
    least = -(-width // LEAST_SHARE)
    needed = plan.num_bytes + buffers + least * stride * len(neurons)
    room = width * stride * len(neurons)
    if plan.budget_bytes is not None:
        what = f"{least} of {width} neurons a layer {format_bytes(least * stride * len(neurons))}, "
        what += f"{NUM_BUFFERS} buffers {format_bytes(buffers)}"
        room = _room(plan, store, needed, what) + least * stride * len(neurons)
    count = min(width, room // (stride * len(neurons)))
    pool = count * stride * len(neurons)
    return replace(plan, streamed=tuple(neurons), buffer_bytes=buffers, neurons_per_layer=count, pool_bytes=pool)


def block_of(count: int, stride: int) -> int:
    """Return how many of ``count`` neurons with records of ``stride`` bytes are read together where all are needed."""
    return min(count, max(1, BLOCK_BYTES // stride))


def _with_experts(plan: MemoryPlan, store: Store, experts: list[str]) -> MemoryPlan:
    moe = store.config.moe
    assert moe is not None
    size = store[experts[0]].num_pages_bytes
    count = len(experts)
    if plan.budget_bytes is not None:
        needed = plan.num_bytes + moe.top_k * size
        what = f"{moe.top_k} experts {format_bytes(moe.top_k * size)}"
        count = min(count, moe.top_k + _room(plan, store, needed, what) // size)
    return replace(plan, streamed=tuple(experts), num_experts=count, pool_bytes=count * size)


def _room(plan: MemoryPlan, store: Store, needed: int, what: str) -> int:
    """Return what is left of the budget when ``needed`` bytes are taken.

    Raises:
        MemoryLimitError: it is not enough.
    """
    assert plan.budget_bytes is not None
    if needed > plan.budget_bytes:
        beside = f", drafters {format_bytes(plan.beside_bytes)}" if plan.beside_bytes else ""
        raise MemoryLimitError(
            f"{format_bytes(plan.budget_bytes)} of memory are too few for {store.folder.name}: what always stays there "
            f"takes {format_bytes(plan.resident_bytes)}, {what}, the cache of {plan.num_tokens} tokens "
            f"{format_bytes(plan.cache_bytes)}{beside}; give at least {format_bytes(needed * 21 // 20)}"
        )
    return plan.budget_bytes - needed


def memory_gb_per_s(num_bytes: int = 32 << 20, repeats: int = 4) -> float:
    """Measure how fast this process reads memory, 10^9 bytes a second, the best of a few repeats."""
    numbers = torch.ones(num_bytes // 4)
    best = 0.0
    for _ in range(repeats):
        begun = time.perf_counter()
        numbers.sum()
        best = max(best, num_bytes / (time.perf_counter() - begun) / 1e9)
    return best
