"""Steps of decoding as recorded graphs: drafting, verification and what is kept of them, without waiting for a token.

A step of a small model is a millisecond on a GPU, and reading its token back before the next begins takes as long. So
one graph holds a whole step: the guesses of a draft one below the other, the pass that verifies them, and which of them
stay. What it leaves (the token to go on from, the length of the text, the offsets of the next draft) is the argument
of the next launch. The tokens of several steps are then read at once.

A step computes what ``decode/shallow.py`` computes step by step for drafters that guess with ``DraftRows``, with the
modules of the decoder. A chain is always drafted to its length: a guess that is not sure takes no longer here than one
that is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.cuda.fixed_rows import FixedRows, carried
from vivace.core.cuda.recordings import Recordings, Results
from vivace.core.draft_rows import ChainPlan, ChainRoot, DeepRead, DraftRows, HeadRows, StreamRows
from vivace.core.draws import Drawing, drawn
from vivace.core.seams import Decided, Draft, RowLists, TargetPass, VerifiedStep
from vivace.core.step import Step
from vivace.kernels import reference as kernels
from vivace.kernels.reference import KEY_BLOCK

if TYPE_CHECKING:
    from vivace.core.draft_head import DraftHead
    from vivace.core.model import Decoder, Layer

FEWEST_ENTRIES = 4 * KEY_BLOCK
"""Entries that a graph reads at least; shorter texts read masked ones, which costs less than graphs of their own."""


class _Work(NamedTuple):
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
        """Return what a graph is found by."""
        return "chain", self.slots, self.guesses, self.entries, self.draft_rows, self.head, self.is_verified


class GraphChain:
    """Drafts and verifies with one decoder, whose steps are recorded."""

    quantizes = False
    draws = False
    """The session draws tokens from their distribution: the noise of all tokens takes longer than a step."""
    can_draw = False

    def __init__(self, decoder: Decoder, recordings: Recordings) -> None:
        """Decode with graphs that are kept among a decoder's recordings."""
        self._decoder = decoder
        self._layers: Sequence[Layer] = list(decoder.layers)  # type: ignore[arg-type]
        self._recordings = recordings
        self._memories: dict[tuple[int, int], KVCache] = {}
        rotaries = {id(layer.rotary): layer.rotary for layer in self._layers if layer.rotary is not None}
        self._rotaries = list(rotaries.values())
        self._longest: WeakKeyDictionary[DraftRows, int] = WeakKeyDictionary()
        """Guesses of the longest draft that was asked for: shorter ones run it too and leave out what is too much."""

    def draw(self, logits: Tensor, drawing: Drawing, position: int) -> int | None:
        """Draw the token at a position from its logits (V,); None where no token may come there."""
        return drawn(logits, drawing, position, torch.arange(len(logits), device=logits.device))

    def covers(self, rows: DraftRows | StreamRows | HeadRows) -> bool:
        """Return whether it can draft with these rows: those of chains below an exit layer."""
        return isinstance(rows, DraftRows) and not rows.copies

    def can_wear(self, cache: KVCache, slots: Sequence[int]) -> bool:
        """Return whether it can decode these slots: they carry no adapters, and none of their prompts was pruned."""
        return not cache.adapters.any_of(slots) and not cache.has_pruned and cache.store is self._decoder.blocks

    def prepare(self, rows: DraftRows | StreamRows | HeadRows, plan: ChainPlan) -> None:
        """Do nothing: weights are used as they are, and a graph is recorded once its shape has been used."""

    def draft(
        self,
        roots: Sequence[ChainRoot],
        draft_rows: DraftRows,
        offsets: Tensor | None,
        cache: KVCache,
        plan: ChainPlan,
    ) -> Draft:
        """Draft one chain below each root (see ``Chain.draft``); the draft has residuals at the exit layer."""
        guesses = self._rounded(draft_rows, max(root.limit for root in roots))
        stops = [cache.lengths[root.slot] + guesses + 1 for root in roots]
        work = self._work(roots, max(stops), guesses, draft_rows, plan, is_verified=False)
        with self._recordings.lock:
            (tokens, hidden, *_), _ = self._launch(work, self._begun(work, roots, cache, stops, offsets))
            kept = [(place, node) for node in range(guesses + 1) for place, r in enumerate(roots) if node <= r.limit]
            rows = torch.tensor([place * (guesses + 1) + node for place, node in kept], device=tokens.device)
            tokens, hidden = tokens.flatten()[rows], hidden.flatten(0, 1)[rows]
        row_of = {at: row for row, at in enumerate(kept)}
        slot, node = [roots[place].slot for place, _ in kept], [node for _, node in kept]
        parent = [row_of.get((place, node - 1), -1) for place, node in kept]
        of_slot, of_node, of_parent = torch.tensor([slot, node, parent], device=tokens.device).unbind()
        slots, given = tuple(root.slot for root in roots), (1,) * len(roots)
        at = draft_rows.exit_layer
        return Draft(slots, given, tokens, of_slot, of_node, of_parent, hidden=hidden, entry_layer=at)

    def decide(self, roots: Sequence[ChainRoot], cache: KVCache, ends: Sequence[int] = ()) -> Decided:
        """Decode the next tokens below each root with the whole model, none below one of ``ends``."""
        stops = [cache.lengths[root.slot] + root.limit + 1 for root in roots]
        work = self._work(roots, max(stops), 0, None, ChainPlan(), is_verified=True)
        ran, hidden = self._launches(work, roots, cache, stops, None, max(root.limit for root in roots) + 1)
        rows, tokens = [], []
        for place, root in enumerate(roots):
            own = [step[place][0] for step in ran[: root.limit + 1]]
            tokens.append([root.token, *own[1 : 1 + _before(own[1:], ends)]])
            rows += [hidden[step][place] for step in range(len(tokens[-1]))]
        return self._decided(roots, tokens, torch.cat(rows), tuple((VerifiedStep(1, ()),) * len(t) for t in tokens))

    def speculate(
        self,
        root: ChainRoot,
        draft_rows: DraftRows,
        offsets: Tensor | None,
        cache: KVCache,
        plan: ChainPlan,
        ends: Sequence[int] = (),
    ) -> Decided:
        """Draft and verify several times for one sequence."""
        guesses = self._rounded(draft_rows, root.limit)
        first = cache.lengths[root.slot]
        stop = first + plan.room
        work = self._work([root], stop + guesses, guesses, draft_rows, plan, is_verified=True)
        ran, hidden = self._launches(work, [root], cache, [stop], offsets, plan.steps)
        kept: list[int] = []
        steps: list[VerifiedStep] = []
        rows: list[Tensor] = []
        for [(*tokens, length)], [residuals] in zip(ran, hidden, strict=True):
            tokens = tokens[: min(length, stop) - first - len(kept)]
            count = _before(tokens, ends) if steps else 1 + _before(tokens[1:], ends)
            if count:
                kept += tokens[:count]
                rows.append(residuals[:count])
                steps.append(VerifiedStep(count, tuple(range(1, guesses + 1))))
            if count < len(tokens) or length >= stop:
                break
        return self._decided([root], [kept], torch.cat(rows), (tuple(steps),))

    def follow(
        self,
        root: ChainRoot,
        rows: StreamRows | HeadRows,
        left: tuple[Tensor, Tensor | None],
        cache: KVCache,
        plan: ChainPlan,
        ends: Sequence[int] = (),
    ) -> tuple[Decided, Tensor]:
        """Refuse: these rows are not covered."""
        raise AssertionError("stream rows and heads are not recorded")

    # Calls

    def _rounded(self, draft_rows: DraftRows, guesses: int) -> int:
        """Return how many guesses are drafted: as many as the longest draft had, whose graph there is."""
        self._longest[draft_rows] = max(guesses, self._longest.get(draft_rows, 0))
        return self._longest[draft_rows]

    @staticmethod
    def _work(
        roots: Sequence[ChainRoot],
        last: int,
        guesses: int,
        draft_rows: DraftRows | None,
        plan: ChainPlan,
        *,
        is_verified: bool,
    ) -> _Work:
        """Describe a step whose rows read up to ``last`` entries."""
        entries = max(FEWEST_ENTRIES, KEY_BLOCK << (-(-last // KEY_BLOCK) - 1).bit_length())
        head = None if plan.head is None or plan.head.module is None else plan.head
        return _Work(1 << (len(roots) - 1).bit_length(), guesses, entries, draft_rows, head, is_verified)

    def _begun(
        self, work: _Work, roots: Sequence[ChainRoot], cache: KVCache, stops: Sequence[int], offsets: Tensor | None
    ) -> list[Tensor]:
        """Return the arguments of the first step: (n, 3) roots, lengths and one past the last entry that may be kept;
        (n, depths, E) offsets, where draft rows have feedback; and for each pool where the blocks of each slot begin.

        There is a graph for every power of two of sequences; where there are fewer, the last one is there several
        times, and stores the same entries as often.
        """
        slots, device = [root.slot for root in roots], self._decoder.device
        cache.extend(slots, [stop + work.guesses for stop in stops])
        state = [[root.token, cache.lengths[root.slot], stop] for root, stop in zip(roots, stops, strict=True)]
        missing = work.slots - len(roots)
        state += [state[-1]] * missing
        slots += [slots[-1]] * missing
        values = [torch.tensor(state, device=device)]
        if work.draft_rows is not None and work.draft_rows.feedback is not None:
            feedback, width = work.draft_rows.feedback, self._decoder.config.width
            known = feedback.new_zeros(len(roots), len(feedback) // width, width) if offsets is None else offsets
            values.append(torch.cat((known, known[-1:].expand(missing, -1, -1))).to(self._decoder.dtype))
        at = torch.tensor(slots, device=device)
        blocks = -(-work.entries // cache.store.size)
        for table in cache.tables:
            there = table.there[at, :blocks]
            values.append(F.pad(there, (0, blocks - there.shape[1])))
        return values

    def _launches(
        self,
        work: _Work,
        roots: Sequence[ChainRoot],
        cache: KVCache,
        stops: Sequence[int],
        offsets: Tensor | None,
        steps: int,
    ) -> tuple[list[list[list[int]]], list[Tensor]]:
        """Make several steps, each from what the one before it left.

        Returns:
            For each step and slot the tokens that were run and the length of the text afterwards; and for each step the
            residuals (n, guesses + 1, E) of those rows at the top.
        """
        ran, hidden = [], []
        with self._recordings.lock:
            values = self._begun(work, roots, cache, stops, offsets)
            for _ in range(steps):
                (tokens, residuals, after, *left), arguments = self._launch(work, values)
                ran.append(torch.cat((tokens, after), 1))
                hidden.append(residuals.clone())
                values = [*left, *arguments[len(left) :]]
        return torch.stack(ran).tolist(), hidden

    def _launch(self, work: _Work, values: Sequence[Tensor]) -> tuple[Results, Sequence[Tensor]]:
        """Make a step, as a graph once its shape has been used a few times; return where its arguments stand, too."""
        graph = self._recordings.find(work.shape)
        if graph is None and not self._recordings.is_due(work.shape):
            return self._step(work, values), values
        if graph is None:
            kind = self._decoder.dtype, self._decoder.device
            tables = [rotary.table(work.entries, *kind) for rotary in self._rotaries]
            graph = self._recordings.add(work.shape, values, lambda given: self._step(work, given), kept=tables)
        return graph.given(values), graph.arguments

    def _decided(
        self,
        roots: Sequence[ChainRoot],
        tokens: Sequence[Sequence[int]],
        hidden: Tensor,
        steps: tuple[tuple[VerifiedStep, ...], ...],
    ) -> Decided:
        """Return steps that kept these tokens of each root's sequence, with their residuals (T, E) at the top."""
        flat = [token for each in tokens for token in each]
        slot = [root.slot for root, each in zip(roots, tokens, strict=True) for _ in each]
        node = [place for each in tokens for place in range(len(each))]
        known = RowLists(flat, slot, node, [row - 1 if place else -1 for row, place in enumerate(node)])
        rows, of_slot, of_node, of_parent = torch.tensor(known, device=self._decoder.device).unbind()
        slots, given = tuple(root.slot for root in roots), tuple(map(len, tokens))
        draft = Draft(slots, given, rows, of_slot, of_node, of_parent, known=known)
        return Decided(draft, TargetPass(hidden, torch.arange(len(hidden))), steps)

    # What is recorded

    def _step(self, work: _Work, values: Sequence[Tensor]) -> Results:
        """Compute a step from its arguments (``_begun``).

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
        work: _Work,
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
        deltas = carried(draft_rows.deltas, which, carries)
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
        n, at = len(h), 0
        assert draft_rows.scale is not None
        for place, read in enumerate(draft_rows.reads):
            assert reading is not None
            p = self._read_deep(p, read, reading, is_known)
            stop = place + 1 if place + 1 < len(draft_rows.reads) else draft_rows.exit_layer
            rows = self._through(torch.cat((h, p)), both, at, stop)
            (h, p), at = (rows[:n], rows[n:]), stop
        rows = self._through(torch.cat((h, p)), both, at, draft_rows.exit_layer) if at == 0 else torch.cat((h, p))
        return rows[:n], rows[n:] * draft_rows.scale

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

    def _memory(self, work: _Work, blocks: Sequence[Tensor]) -> KVCache:
        """Return a cache over the blocks of the decoder's texts in which slot i has the blocks of sequence i."""
        key = work.slots, work.entries
        if key not in self._memories or self._memories[key].store is not self._decoder.blocks:
            self._memories[key] = self._decoder.new_cache(work.slots, work.entries)
        memory = self._memories[key]
        for table, there in zip(memory.tables, blocks, strict=True):
            table.lies_at(there)
        return memory


def _before(tokens: Sequence[int], ends: Sequence[int]) -> int:
    """Return how many tokens there are in front of the first of ``ends``."""
    return next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
