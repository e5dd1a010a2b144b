"""Sequences that lie in stages among ranks which all hold the whole model, beside others that lie on rank 0 alone.

The prompt of a staged sequence is read in a pipeline (``pipeline.py``), and every rank keeps the keys and values of its
own layers. Nothing of them is ever sent, so its tokens have to pass the ranks one after the other, too. All other
sequences are rank 0's, as if there were no other ranks. Which ones are staged stands in the cache (``KVCache.staged``);
a call with rows of both kinds runs in two parts, and a row has the same bits in either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.model import Decoder, padded
from vivace.core.step import Step
from vivace.parallel.leading import LedSlots
from vivace.parallel.pipeline import PipelineBackend, PipelineLeader, PipelineSpan


class StagedBackend(PipelineBackend):
    """Implements ``Backend`` on rank 0: rows of staged sequences pass all ranks, others its own backend alone."""

    def finish(self, decoder: Decoder) -> None:
        """Prepare the span, and what decodes several tokens in one call for sequences that are not staged."""
        super().finish(decoder)
        self.split, self.chain = self.inner.split, self.inner.chain
        self.span = StagedSpan(decoder, self._pipeline, self.inner.span)


class StagedSpan(PipelineSpan):
    """Implements ``Span``: each row runs where the entries of its sequence are."""

    def covers(self, step: Step) -> bool:
        """Return whether some rows are staged, or the span of rank 0 runs all of them."""
        return bool(_staged_in(step)) or (self._inner is not None and self._inner.covers(step))

    def run(self, h: Tensor, step: Step, start: int, stop: int) -> Tensor:
        """Run rows (T, E) through layers start..stop-1."""
        staged = _staged_in(step)
        if not staged:
            return self.run_here(h, step, start, stop)
        if staged.issuperset(step.slot.tolist()):
            return super().run(h, step, start, stop)
        written = _written(step)
        is_staged = torch.isin(written.slot, torch.tensor(sorted(staged)))
        found = torch.empty_like(h)
        for rows, run in ((is_staged.nonzero()[:, 0], super().run), ((~is_staged).nonzero()[:, 0], self.run_here)):
            part, its_step = padded(h[rows], written.take(rows))
            found[rows] = run(part, its_step, start, stop)[: len(rows)]
        return found


class StagedSlots(LedSlots):
    """Implements ``SlotState``: repeats on the other ranks what a session does with its staged sequences."""

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep these draft nodes of staged sequences on all ranks."""
        kept = {slot: path for slot, path in zip(slots, paths, strict=True) if slot in self._staged}
        if kept:
            super().commit(list(kept), list(kept.values()))

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Forget positions of staged sequences from these lengths on, on all ranks."""
        kept = {slot: length for slot, length in zip(slots, lengths, strict=True) if slot in self._staged}
        if kept:
            super().truncate(list(kept), list(kept.values()))

    def release(self, slots: Sequence[int]) -> None:
        """Forget these sequences, on all ranks where they are staged."""
        gone = [slot for slot in slots if slot in self._staged]
        if gone:
            super().release(gone)
        self._staged.difference_update(gone)

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Let each target begin with what its source has, wherever that is."""
        pairs = {target: source for source, target in zip(sources, targets, strict=True) if source in self._staged}
        if pairs:
            super().fork(list(pairs.values()), list(pairs))
        self._staged.update(pairs)

    def saved(self) -> object:
        """Return the lengths of staged sequences; the other ranks know nothing of the others."""
        lengths = super().saved()
        assert isinstance(lengths, tuple)
        return tuple(length if slot in self._staged else 0 for slot, length in enumerate(lengths))

    def restore(self, saved: object) -> None:
        """Set all ranks' caches back to these lengths."""
        if self._staged:
            super().restore(saved)

    @property
    def _staged(self) -> set[int]:
        cache = self._cache()
        assert cache is not None
        return cache.staged


def staged_leader(model: Decoder) -> PipelineLeader | None:
    """Return who leads the stages of a model whose sequences may be staged; None for every other model."""
    span = model.backend.span
    return span.leader if isinstance(span, StagedSpan) else None


def _staged_in(step: Step) -> set[int]:
    """Return the slots of a call's rows that are staged."""
    staged = step.memory.staged if isinstance(step.memory, KVCache) else set()
    return staged.intersection(step.slot.tolist()) if staged else staged


def _written(step: Step) -> Step:
    """Return a call without the rows that were appended to fill it up and store nothing."""
    count = step.num_write
    assert not step.deltas, "methods with adapters do not run on several ranks"
    return replace(
        step,
        slot=step.slot[:count],
        position=step.position[:count],
        seen=step.seen[:count],
        tail=None if step.tail is None else step.tail[:count],
        extent=None if step.extent is None else step.extent[:count],
        num_feed=count,
        chunk=None,
    )
