"""Steps of decoding as recorded graphs: drafting, verification and what is kept of them, without waiting for a token.

A step of a small model is a millisecond on a GPU, and reading its token back before the next begins takes as long. So
one graph holds a whole step (``whole_step.py``). What it leaves (the token to go on from, the length of the text, the
offsets of the next draft) is the argument of the next launch. The tokens of several steps are then read at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.cuda.recordings import Recordings, Results
from vivace.core.cuda.whole_step import WholeStep, Work
from vivace.core.draft_rows import ChainPlan, ChainRoot, DraftRows, HeadRows, StreamRows
from vivace.core.draws import Drawing
from vivace.core.seams import Decided, Draft, RowLists, TargetPass, VerifiedStep
from vivace.kernels.reference import KEY_BLOCK

if TYPE_CHECKING:
    from vivace.core.model import Decoder

FEWEST_ENTRIES = 4 * KEY_BLOCK
"""Entries that a graph reads at least; shorter texts read masked ones, which costs less than graphs of their own."""


class GraphChain:
    """Drafts and verifies with one decoder, whose steps are recorded."""

    quantizes = False
    draws_by_position = can_draw = False

    def __init__(self, decoder: Decoder, recordings: Recordings) -> None:
        """Decode with graphs that are kept among a decoder's recordings."""
        self._decoder = decoder
        self._step = WholeStep(decoder)
        self._recordings = recordings

    def draw(self, logits: Tensor, drawing: Drawing, position: int) -> int | None:
        """Refuse: tokens are drawn from their distribution, since the noise of all tokens takes longer than a step."""
        raise AssertionError("a session draws from the distribution here")

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
        guesses = max(plan.length, *(root.limit for root in roots))
        stops = [cache.lengths[root.slot] + 1 for root in roots]
        work = self._work(roots, max(stops) + guesses, guesses, draft_rows, plan, is_verified=False)
        with self._recordings.lock:
            (tokens, hidden, *_), _ = self._launch(work, self._arguments(work, roots, cache, stops, offsets))
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
        guesses, first = max(plan.length, root.limit), cache.lengths[root.slot]
        stop = first + max(1, min(plan.room, cache.reach(root.slot) - first - guesses))
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
                steps.append(VerifiedStep(count, tuple(range(1, max(root.limit, count - 1) + 1))))
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

    @staticmethod
    def _work(
        roots: Sequence[ChainRoot],
        last: int,
        guesses: int,
        draft_rows: DraftRows | None,
        plan: ChainPlan,
        *,
        is_verified: bool,
    ) -> Work:
        """Describe a step whose rows read up to ``last`` entries."""
        entries = max(FEWEST_ENTRIES, KEY_BLOCK << (-(-last // KEY_BLOCK) - 1).bit_length())
        head = None if plan.head is None or plan.head.module is None else plan.head
        return Work(1 << (len(roots) - 1).bit_length(), guesses, entries, draft_rows, head, is_verified)

    def _arguments(
        self, work: Work, roots: Sequence[ChainRoot], cache: KVCache, stops: Sequence[int], offsets: Tensor | None
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
        work: Work,
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
            values = self._arguments(work, roots, cache, stops, offsets)
            for _ in range(steps):
                (tokens, residuals, after, *left), arguments = self._launch(work, values)
                ran.append(torch.cat((tokens, after), 1))
                hidden.append(residuals.clone())
                values = [*left, *arguments[len(left) :]]
        return torch.stack(ran).tolist(), hidden

    def _launch(self, work: Work, values: Sequence[Tensor]) -> tuple[Results, Sequence[Tensor]]:
        """Make a step, as a graph once its shape has been used a few times; return where its arguments stand, too."""
        graph = self._recordings.find(work.shape)
        if graph is None and not self._recordings.is_due(work.shape):
            return self._step(work, values), values
        if graph is None:
            graph = self._recordings.add(work.shape, values, partial(self._step, work), self._tables)
            self._recordings.end_with(*work.owners)
        return graph.given(values), graph.arguments

    def _tables(self) -> object:
        """Return the tables that rotations are read from now, which may be replaced by longer ones."""
        kind = self._decoder.dtype, self._decoder.device
        return [rotary.table(1, *kind) for rotary in self._step.rotaries]

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


def _before(tokens: Sequence[int], ends: Sequence[int]) -> int:
    """Return how many tokens there are in front of the first of ``ends``."""
    return next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
