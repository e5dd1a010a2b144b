"""Attention of a call's rows to stored keys and values, on the path that the call was built for.

* dense: a whole batch over its own rows (training, scoring);
* whole: texts of different lengths that are read to their ends (encoders);
* chunk: neighbouring prompt positions of a slot (prefill), slot by slot;
* rows: everything else, each row by itself, so that its bits depend only on the row and the entries it reads. On a GPU
  also prompts: one launch for all slots, where slot by slot takes dozens in every layer.

The path is a property of the call and the device and never depends on the call's size, so a request gets the same
numbers whatever else is running.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.config import ModelConfig
from vivace.core.relative import RelativeTable
from vivace.core.step import Step
from vivace.core.whole_texts import WholeTexts
from vivace.kernels import fused
from vivace.kernels import reference as kernels


class Attention:
    """Computes the attention of a layer's queries to stored entries."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        self.layer = layer
        self.scale = config.scale
        self.softcap = config.attention_softcap
        self.window = config.window(layer)
        self.relative: RelativeTable | None = None
        """What is added to scores by distance, where the stack has such a table; it sets this."""

    def __call__(self, q: Tensor, step: Step) -> Tensor:
        """Return the attention of queries (T, H, D) to the entries that their rows read, (T, H, D)."""
        if step.grid is not None:
            return self._dense(q, step)
        if isinstance(step.memory, WholeTexts):
            return self._whole(q, step.memory)
        assert isinstance(step.memory, KVCache), "rows and chunks read a cache"
        if step.chunk is not None and not self._is_fused(q, step.memory):
            return self._chunks(q, step.memory, step)
        return self._rows(q, step.memory, step)

    def _is_fused(self, q: Tensor, cache: KVCache) -> bool:
        """Return whether one kernel attends to entries wherever they lie."""
        is_plain = self.softcap is None and self.relative is None
        return is_plain and fused.can_run(q) and not cache.is_int8(self.layer)

    def _dense(self, q: Tensor, step: Step) -> Tensor:
        assert step.grid is not None
        keys, values = step.memory.stored(self.layer)
        batch, length = step.grid
        visible = step.visible_dense(self.window, q.dtype, is_plain=self.relative is None)
        if self.relative is not None and visible is not None:
            visible = visible + self.relative.of(step)
        streams = [  # the writing rows, then each set of rows that read what they stored
            kernels.attend_chunk(
                rows.view(batch, length, *q.shape[1:]), keys, values, visible, scale=self.scale, softcap=self.softcap
            )
            for rows in torch.split(q, batch * length)
        ]
        return torch.cat([a.reshape(batch * length, *q.shape[1:]) for a in streams])

    def _whole(self, q: Tensor, texts: WholeTexts) -> Tensor:
        """Attend text by text, each row to its whole text."""
        keys, values = texts.stored(self.layer)
        out = torch.empty_like(q)
        for first, stop in texts.bounds:
            k, v = (part[None, first:stop].transpose(1, 2) for part in (keys, values))
            visible = q.new_zeros(1, 1) if self.relative is None else self.relative.within(stop - first)
            rows = q[None, first:stop]
            out[first:stop] = kernels.attend_chunk(rows, k, v, visible, scale=self.scale, softcap=self.softcap)[0]
        return out

    def _chunks(self, q: Tensor, cache: KVCache, step: Step) -> Tensor:
        assert step.chunk is not None
        out = torch.empty_like(q)
        for slot, first, stop in step.chunk:
            longest = int(step.seen[stop - 1])
            visible = step.visible_in_chunk(first, stop, self.window, q.dtype, is_plain=self.relative is None)
            if self.relative is not None and visible is not None:
                visible = visible + self.relative.of(step)[first:stop, :, :longest].transpose(0, 1)
            k, v = cache.entries(self.layer, slot, longest)
            chunk = q[None, first:stop]
            a = kernels.attend_chunk(chunk, k[None], v[None], visible, scale=self.scale, softcap=self.softcap)
            out[first:stop] = a[0]
        return out

    def _rows(self, q: Tensor, cache: KVCache, step: Step) -> Tensor:
        if step.index is not None:
            return self._indexed(q, step)
        if self._is_fused(q, cache):
            address = step.read(cache.store.place_of_layer[self.layer][0])
            return fused.attend(q, *cache.stored(self.layer), address, step.visible(self.window, q.dtype), self.scale)
        if step.single_slot is not None and step.order is None:
            keys, values = (part[None] for part in cache.entries(self.layer, step.single_slot, step.num_visible))
        else:  # each row's entries in the order in which it reads them, (T, K, S, D)
            address = step.read(cache.store.place_of_layer[self.layer][0])
            keys, values = (part.transpose(0, 1) for part in cache.at(self.layer, address))
        visible = step.visible(self.window, q.dtype)
        bias = None if self.relative is None else self.relative.of(step)
        return kernels.attend_rows(q, keys, values, visible, scale=self.scale, softcap=self.softcap, bias=bias)

    def _indexed(self, q: Tensor, step: Step) -> Tensor:
        """Attend slot by slot, so that what rows of a slot read is gathered once."""
        visible, out = step.visible(self.window, q.dtype), torch.empty_like(q)
        for slot in dict.fromkeys(step.slot.tolist()):
            rows = (step.slot == slot).nonzero()[:, 0]
            keys, values = (part[None] for part in step.readable(self.layer, slot, step.num_visible))
            out[rows] = kernels.attend_rows(
                q[rows], keys, values, visible[rows], scale=self.scale, softcap=self.softcap
            )
        return out
