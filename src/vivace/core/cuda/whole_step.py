"""A whole step of decoding, as it is recorded: guesses one below the other, verification, and what is left of them.

It computes what ``decode/shallow.py`` computes step by step for drafters that guess with ``DraftRows``, with the
modules of the decoder, and reads no number of the device. A chain is always drafted to its length: a guess that is not
sure takes no longer here than one that is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.cuda.fixed_rows import FixedRows
from vivace.core.cuda.recordings import Results
from vivace.core.draft_rows import DeepRead, DraftRows
from vivace.core.step import Step
from vivace.kernels import reference as kernels

if TYPE_CHECKING:
    from vivace.core.draft_head import DraftHead
    from vivace.core.model import Decoder, Layer

WHOLE_STEP = "whole step"
"""First part of the shape of a graph that holds one."""


class Work(NamedTuple):
    """What a step does, which must be equal for two steps to be launches of one graph."""

    slots: int
    """Number of sequences, n, rounded up."""
    guesses: int
    entries: int
    """Entries that a row reads, visible or masked."""
    draft_rows: DraftRows | None
    """None where nothing is drafted."""
    head: DraftHead | None
    """What guesses are read with; None is the decoder's head."""
    is_verified: bool
    """Whether the decoder verifies the guesses in the same graph."""

    @property
    def shape(self) -> tuple[object, ...]:
        """Return what a graph is found by: draft rows and heads by their identity, which it ends with."""
        return WHOLE_STEP, self.slots, self.guesses, self.entries, id(self.draft_rows), id(self.head), self.is_verified

    @property
    def owners(self) -> tuple[object, ...]:
        """Return the objects whose identity is in the shape."""
        return tuple(owner for owner in (self.draft_rows, self.head) if owner is not None)


class WholeStep:
    """Computes whole steps of one decoder."""

    def __init__(self, decoder: Decoder) -> None:
        """Compute with a decoder's modules."""
        self._decoder = decoder
        self._layers: Sequence[Layer] = list(decoder.layers)  # type: ignore[arg-type]
        self.rotaries = [layer.rotary for layer in self._layers if layer.rotary is not None]
        """What rotates queries and keys, layer by layer."""
        self._memories: dict[tuple[int, int], KVCache] = {}

    def __call__(self, work: Work, values: Sequence[Tensor]) -> Results:
        """Compute a step from its arguments (``GraphChain._arguments``).

        Returns:
            (n, guesses + 1) tokens that were run, and (n, guesses + 1, E) their residuals, at the top where they are
            verified, else at the exit layer. A verified step also returns (n, 1) lengths of the texts behind it, and
            the arguments of the next one that are not as before.
        """
        num_pools = len(self._decoder.blocks.pools)
        state, *offsets = values[:-num_pools]
        memory = self._memory(work, values[-num_pools:])
        root, length, stop = state.unbind(1)
        count, device = work.guesses + 1, state.device
        slots = torch.arange(work.slots, device=device)
        position = (length[:, None] + torch.arange(count, device=device)).flatten()
        rows = FixedRows(self._decoder, memory, slots.repeat_interleave(count), position, position + 1, work.entries)
        whole, start = rows.call(slice(None), writing=len(position), fed=len(position)), 0
        if work.draft_rows is None:
            tokens, h = root[:, None], self._decoder.embed(root, whole)
        else:
            tokens, h = self._drafted(work, work.draft_rows, memory, root, length, offsets)
            start = work.draft_rows.exit_layer
            if not work.is_verified:
                return tokens, h.view(work.slots, count, -1)
        h = self._through(h, whole, start, len(self._layers))
        chosen = self._decoder.greedy(h).view(work.slots, count)
        accepted = (chosen[:, :-1] == tokens[:, 1:]).long().cumprod(1).sum(1)
        h, after = h.view(work.slots, count, -1), length + accepted + 1
        goes_on = after < stop  # else later launches make this step again, and store the same entries
        following = torch.where(goes_on, chosen[slots, accepted], root)
        left = [torch.stack((following, torch.where(goes_on, after, length), stop), 1)]
        if offsets:
            assert work.draft_rows is not None
            assert work.draft_rows.feedback is not None
            final = self._decoder.norm(h[slots, accepted])
            new = kernels.linear(final, work.draft_rows.feedback).view(offsets[0].shape)
            left.append(torch.where(goes_on[:, None, None], new, offsets[0]))
        return tokens, h, after[:, None], *left

    def _drafted(
        self,
        work: Work,
        draft_rows: DraftRows,
        memory: KVCache,
        root: Tensor,
        length: Tensor,
        offsets: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Guess depth by depth: a row of the decoder for each slot, and a draft row beside it, to the exit layer.

        Returns:
            (n, guesses + 1) roots and guesses, and (n (guesses + 1), E) the decoder's residuals at the exit layer.
        """
        n, count, device = work.slots, work.guesses + 1, root.device
        slots, beside = torch.arange(n, device=device), 1 if draft_rows.scale is None else 2
        depths = torch.arange(count, device=device)
        position = (length.repeat(beside) + depths[:, None]).flatten()  # depth by depth: the slots, their draft rows
        slot = slots.repeat(beside * count)
        rows = FixedRows(self._decoder, memory, slot, position, position + 1, work.entries)
        far = None
        if draft_rows.reads:
            own = length.repeat(count).clamp(min=1)
            at = (length + depths[:, None]).flatten()
            far = FixedRows(self._decoder, memory, slots.repeat(count), at, own, work.entries)
        carries = (-1,) * n + (0,) * n
        which = torch.cat((torch.full((n,), -1, device=device), torch.zeros(n, dtype=torch.int64, device=device)))
        deltas = draft_rows.deltas.carried(which, carries)
        fed = 2 * n if draft_rows.is_fed else n
        tokens, hidden = [root], []
        for depth in range(count):
            first = beside * n * depth
            alone = rows.call(slice(first, first + n), writing=n, fed=n)
            h = self._decoder.embed(tokens[-1], alone)
            if depth == work.guesses or beside == 1:
                h = self._through(h, alone, 0, draft_rows.exit_layer)
                p = h
            else:
                both = rows.call(slice(first, first + 2 * n), writing=n, fed=fed, deltas=(deltas,))
                p = h if not offsets else h + offsets[0][:, min(depth, offsets[0].shape[1] - 1)]
                reading = None if far is None else far.call(slice(n * depth, n * depth + n), writing=0, fed=0)
                h, p = self._beside(draft_rows, h, p, both, reading, length > 0)
            hidden.append(h)
            if depth < work.guesses:
                tokens.append(self._decoder.greedy(p) if work.head is None else work.head.greedy(p))
        return torch.stack(tokens, 1), torch.stack(hidden, 1).flatten(0, 1)

    def _beside(
        self, draft_rows: DraftRows, h: Tensor, p: Tensor, both: Step, reading: Step | None, is_known: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run rows (n, E) and the draft rows beside them to the exit layer; return what the head reads of these, too.

        Args:
            draft_rows: what draft rows carry.
            h: rows of the decoder.
            p: draft rows.
            both: the call of all 2 n rows.
            reading: the call in which draft rows read deep layers, if they do.
            is_known: (n,) whether anything of a slot has been verified that they could read.
        """
        n, reads = len(h), draft_rows.reads or (None,)
        assert draft_rows.scale is not None
        for layer, read in enumerate(reads):
            if read is not None:
                assert reading is not None
                p = self._read_deep(p, read, reading, is_known)
            is_last = layer + 1 == len(reads)
            stop = draft_rows.exit_layer if is_last else layer + 1
            rows = self._through(torch.cat((h, p)), both, layer, stop)
            h, p = rows[:n], rows[n:]
        return h, p * draft_rows.scale

    def _read_deep(self, p: Tensor, read: DeepRead, reading: Step, is_known: Tensor) -> Tensor:
        """Let draft rows (n, E) attend to what a deep layer stored about verified positions."""
        layer = self._layers[read.layer]
        q = kernels.linear(kernels.rms_norm(p, read.gain, self._decoder.config.norm_eps), read.query)
        q = q.view(len(p), -1, self._decoder.config.head_dim)
        if layer.rotary is not None:
            q = kernels.rotate(q, *layer.rotation(reading, q.dtype))
        a = layer.read(q, reading) * is_known[:, None, None]
        return p + kernels.linear(a.flatten(1), read.output)

    def _through(self, h: Tensor, step: Step, start: int, stop: int) -> Tensor:
        for layer in self._layers[start:stop]:
            h = layer(h, step)
        return h

    def _memory(self, work: Work, blocks: Sequence[Tensor]) -> KVCache:
        """Return a cache over the blocks of the decoder's texts in which slot i has the blocks of sequence i."""
        key = work.slots, work.entries
        if key not in self._memories or self._memories[key].store is not self._decoder.blocks:
            self._memories[key] = self._decoder.new_cache(work.slots, work.entries)
        memory = self._memories[key]
        for table, there in zip(memory.tables, blocks, strict=True):
            table.lies_at(there)
        return memory
