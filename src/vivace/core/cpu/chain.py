"""Drafting and verification in one native call: the lower layers, head, argmax and embedding of each draft token.

This is what ``decode/shallow.py`` does step by step for drafters that guess with ``DraftRows``: one row beside each row
of the decoder, which reads the same entries and stores none. Tokens, residuals and stored entries have the same bits as
step by step.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from ctypes import c_int64, pointer
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.cpu.plan import gain_of, matrix_of, pointers
from vivace.core.cpu.quantized import quantized_copy, quantized_head
from vivace.core.cpu.span import MixtureSpan, NativeSpan
from vivace.core.draft_rows import ChainPlan, ChainRoot, DeepRead, DraftRows, HeadRows, StreamRows, why_no_chain
from vivace.core.draws import Drawing
from vivace.core.low_rank import LowRankDeltas
from vivace.core.seams import Decided, Draft, TargetPass, VerifiedStep
from vivace.kernels.chain import CChain, CDeepRead, CHeads, CSpeculation, CStreams
from vivace.kernels.library import CDrawing, CMatrix, CPlan
from vivace.kernels.low_bit import Weights, quantise
from vivace.kernels.native import Matrix, pack

if TYPE_CHECKING:
    from vivace.core.draft_head import DraftHead
    from vivace.core.model import Decoder


@dataclass(frozen=True)
class _ChainCall:
    """The parts of a call that are the same for every chain with the same draft rows."""

    call: CChain
    plan: CPlan
    feedback: Matrix | None
    """Matrix from the last kept row's normed residual to the offsets of the next chain."""
    kept: object
    """References to the tensors that ``call`` and ``plan`` point into, which keep them alive."""


@dataclass(frozen=True)
class _StreamCall:
    """The parts of a call that are the same for every draft with the same stream rows or heads."""

    call: CStreams | CHeads
    widths: tuple[int, ...]
    kept: object
    """References to the tensors that ``call`` points into, which keep them alive."""


@dataclass(frozen=True)
class _Guessing:
    """The head that guesses in native calls."""

    matrix: Matrix
    ids: Tensor | None
    """(out,) int64 token of each output; None: the outputs are all tokens, in order."""

    @property
    def address(self) -> int | None:
        """Return the address of the ids for native code; None stands for the whole vocabulary."""
        return None if self.ids is None else self.ids.data_ptr()


_Kind = tuple["Weights", "DraftHead | None"]
"""What the constant part of a call depends on besides its rows: formats of weights, and the head that guesses."""


def _kind(drafting: ChainPlan) -> _Kind:
    head = drafting.head
    return drafting.weights, None if head is None or head.module is None else head


class NativeChain:
    """Drafts and verifies with one packed decoder."""

    quantizes = True
    draws_by_position = True

    def __init__(self, decoder: Decoder, span: NativeSpan) -> None:
        self._decoder = decoder
        self._span = span
        self._chain_calls: WeakKeyDictionary[DraftRows, dict[_Kind, _ChainCall]] = WeakKeyDictionary()
        self._copies: WeakKeyDictionary[DraftRows, dict[Weights, tuple[CPlan, list[object]]]] = WeakKeyDictionary()
        """Quantized layers by the rows that draft with them: drafts from all tokens and from some share them."""
        self._stream_calls: WeakKeyDictionary[StreamRows | HeadRows, dict[_Kind, _StreamCall]] = WeakKeyDictionary()

    @staticmethod
    def of(decoder: Decoder, span: NativeSpan | None) -> NativeChain | None:
        """Make it for a decoder with a span, or return None for the reason that ``why_no_chain`` gives, or where
        experts are fetched.
        """
        if span is None or isinstance(span, MixtureSpan) or why_no_chain(decoder.config) is not None:
            return None
        return NativeChain(decoder, span)

    @property
    def can_draw(self) -> bool:
        """Return whether logits are what the head computes: drawing would need a cap, a scale or a bias of them."""
        config = self._decoder.config
        return config.logit_softcap is None and config.head_scale == 1.0 and self._decoder.logits_bias is None

    def draw(self, logits: Tensor, drawing: Drawing, position: int) -> int | None:
        """Draw the token at a position from its logits (V,) float32; None where no token may come there."""
        index = self._span.body.draw(logits, _drawing(drawing), position)[0]
        return None if index < 0 else index

    def covers(self, rows: DraftRows | StreamRows | HeadRows) -> bool:
        """Return whether it can draft with these rows: their weights must be contiguous and bfloat16."""
        if isinstance(rows, StreamRows):
            return self._span.can_take(rows.deltas)
        if not isinstance(rows, DraftRows) or rows in self._chain_calls:
            return True
        weights = [*rows.deltas.down.values(), *rows.deltas.up.values()]
        weights += [] if rows.scale is None else [rows.scale]
        for read in rows.reads:
            weights += [read.gain, read.query, read.output]
        return all(w.dtype == torch.bfloat16 and w.is_contiguous() for w in weights)

    def can_wear(self, cache: KVCache, slots: Sequence[int]) -> bool:
        """Return whether it can add what the adapters of these slots do."""
        return all(map(self._span.can_take, _worn(cache, slots)))

    def prepare(self, rows: DraftRows | StreamRows | HeadRows, plan: ChainPlan) -> None:
        """Lay out weights and make quantized copies now, so that the first draft takes no longer than the next."""
        if isinstance(rows, DraftRows):
            self._of(rows, plan)
        else:
            self._stream_call(rows, plan)

    def draft(
        self,
        roots: Sequence[ChainRoot],
        draft_rows: DraftRows,
        offsets: Tensor | None,
        cache: KVCache,
        plan: ChainPlan,
    ) -> Draft:
        """Draft one chain below each root.

        Args:
            roots: last committed token of each of n sequences.
            draft_rows: rows that guess.
            offsets: (n, depths, E) added to the embedding where a draft row starts, the last one at all greater depths
                too; None for nothing.
            cache: holds the text before the roots; the entries of all rows in the lower layers are written to it.
            plan: how chains are drafted. A draft with quantized weights has no residuals, and the entries it wrote are
                written again when it is verified.

        Returns:
            The draft, with residuals at the exit layer unless the plan's weights are quantized.
        """
        fixed, is_quantized = self._of(draft_rows, plan), plan.weights != "bf16"
        call = _begun(fixed, offsets, plan.min_confidence)
        (tokens, slot, node, parent), hidden = self._run(call, fixed.plan, roots, cache, hands_over=not is_quantized)
        slots, given = tuple(root.slot for root in roots), (1,) * len(roots)
        if hidden is None:
            return Draft(slots, given, tokens, slot, node, parent)
        return Draft(slots, given, tokens, slot, node, parent, hidden=hidden, entry_layer=draft_rows.exit_layer)

    def decide(self, roots: Sequence[ChainRoot], cache: KVCache, ends: Sequence[int] = ()) -> Decided:
        """Decode the next tokens below each root with the whole model: several steps of plain decoding.

        Args:
            roots: last committed token of each sequence; as many tokens are decoded below it as its limit says.
            cache: holds the text before the roots; the entries of all rows are written to it.
            ends: end-of-text tokens, below which nothing is decoded.

        Returns:
            The steps that were made; the logits of the last row of a slot are not read yet.
        """
        call = CChain.from_buffer_copy(self._whole.call)
        call.ends, call.num_ends = (c_int64 * len(ends))(*ends), len(ends)
        (tokens, slot, node, parent), hidden = self._run(call, self._whole.plan, roots, cache, hands_over=True)
        counts = torch.bincount(slot, minlength=max(root.slot for root in roots) + 1).tolist()
        slots = tuple(root.slot for root in roots)
        given = tuple(counts[s] for s in slots)
        assert hidden is not None
        draft = Draft(slots, given, tokens, slot, node, parent)
        return Decided(draft, _at_top(hidden), tuple((VerifiedStep(1, ()),) * count for count in given))

    def speculate(
        self,
        root: ChainRoot,
        draft_rows: DraftRows,
        offsets: Tensor | None,
        cache: KVCache,
        plan: ChainPlan,
        ends: Sequence[int] = (),
    ) -> Decided:
        """Draft and verify several times for one sequence.

        Args:
            root: last committed token of the sequence, with the largest number of guesses in a chain.
            draft_rows: rows that guess.
            offsets: (1, depths, E) for the first chain; those of later chains come from ``draft_rows.feedback``.
            cache: holds the text before the root; the entries of all rows are written to it.
            plan: how chains are drafted, and how many.
            ends: end-of-text tokens, below which nothing is decoded.

        Returns:
            The steps that were made; the logits of the last row of a slot are not read yet.
        """
        fixed = self._of(draft_rows, plan)
        call = _begun(fixed, offsets, plan.min_confidence)
        into = CSpeculation(feedback=_struct(fixed.feedback), has_feedback=fixed.feedback is not None)
        return self._speculate(call, fixed.plan, into, root, cache, plan, ends, hands_over=plan.weights == "bf16")

    def follow(
        self,
        root: ChainRoot,
        rows: StreamRows | HeadRows,
        left: tuple[Tensor, Tensor | None],
        cache: KVCache,
        plan: ChainPlan,
        ends: Sequence[int] = (),
    ) -> tuple[Decided, Tensor]:
        """Draft with stream rows or heads and verify, several times, for one sequence.

        Args:
            root: last committed token of the sequence, with the largest depth of a guess.
            rows: what guesses.
            left: what the last kept row left behind (see ``Chain.follow``).
            cache: holds the text before the root; the entries of all rows are written to it.
            plan: how many steps are made; ``weights`` is the format in which stream rows read the layers.
            ends: end-of-text tokens, below which nothing is decoded.

        Returns:
            The steps, as ``speculate`` returns them, and what the row that is kept last now left behind.
        """
        fixed = self._stream_call(rows, plan)
        now, final = left[0].clone().contiguous(), left[1]
        into = CSpeculation(widths=(c_int64 * len(fixed.widths))(*fixed.widths))
        into.most = sum(accumulate(fixed.widths, operator.mul))
        spare = torch.empty(self._decoder.config.width, dtype=torch.bfloat16)
        if isinstance(fixed.call, CHeads):
            heads = CHeads.from_buffer_copy(fixed.call)
            heads.kept, into.heads = now.data_ptr(), pointer(heads)
        else:
            streams = CStreams.from_buffer_copy(fixed.call)
            streams.final = None if final is None else final.data_ptr()
            entering = spare if streams.rides else now
            streams.left, streams.entering = now.data_ptr() if streams.rides else None, entering.data_ptr()
            into.streams = pointer(streams)
        call = CChain.from_buffer_copy(self._whole.call)
        return self._speculate(call, self._span.plan, into, root, cache, plan, ends, hands_over=False), now

    def _speculate(
        self,
        call: CChain,
        drafting: CPlan,
        into: CSpeculation,
        root: ChainRoot,
        cache: KVCache,
        plan: ChainPlan,
        ends: Sequence[int],
        *,
        hands_over: bool,
    ) -> Decided:
        width = self._decoder.config.width
        tokens = torch.empty(plan.room, dtype=torch.int64)
        hidden = torch.empty(plan.room, width, dtype=torch.bfloat16)
        kept, guessed = (c_int64 * plan.steps)(), (c_int64 * plan.steps)()
        into.head, into.tokens, into.hidden = self._head.struct, tokens.data_ptr(), hidden.data_ptr()
        into.kept, into.guessed, into.steps, into.room = kept, guessed, plan.steps, plan.room
        into.most = max(into.most, root.limit)
        depths = (c_int64 * (plan.steps * into.most))()
        into.depths = depths
        streams = into.streams.contents if into.streams else None
        riding = streams.count if streams is not None and streams.rides else 0
        beside = (1 + riding) * (1 + into.most) - (1 + root.limit)  # rows of a step that are not kept in any case
        if streams is not None and not streams.rides:
            beside += streams.count  # all stream rows are computed, also those whose guesses have no room
        last = cache.lengths[root.slot] + plan.room + max(beside, 0)
        cache.extend([root.slot], [last])
        worn = self._place(call, [root], cache, last)
        call.ends, call.num_ends = (c_int64 * len(ends))(*ends), len(ends)
        call.hidden = hidden.data_ptr() if hands_over else None  # where chains leave residuals for verification
        steps = self._span.body.speculate(drafting, self._span.plan, call, into)
        del worn
        count = sum(kept[:steps])
        node = torch.arange(count)
        draft = Draft((root.slot,), (count,), tokens[:count], torch.full((count,), root.slot), node, node - 1)
        firsts = range(0, steps * into.most, into.most) if into.most else [0] * steps
        made = [
            VerifiedStep(kept[step], tuple(depths[first : first + guessed[step]])) for step, first in enumerate(firsts)
        ]
        return Decided(draft, _at_top(hidden[:count]), (tuple(made),), into.draft_ns / 1e9)

    def _stream_call(self, rows: StreamRows | HeadRows, drafting: ChainPlan) -> _StreamCall:
        """Return the part of a call that is the same for every draft with these stream rows or heads, made once."""
        kinds, kind = self._stream_calls.setdefault(rows, {}), _kind(drafting)
        if kind not in kinds:
            kinds[kind] = self._of_heads(rows) if isinstance(rows, HeadRows) else self._of_streams(rows, drafting)
        return kinds[kind]

    def _of_heads(self, rows: HeadRows) -> _StreamCall:
        guessing = [self._guessing(ChainPlan(head=head), "bf16") for head in rows.heads]
        heads = (CMatrix * len(guessing))(*(each.matrix.struct for each in guessing))
        call = CHeads(mix=matrix_of(rows.mix), heads=heads, ids=guessing[0].address, count=len(guessing))
        return _StreamCall(call, rows.widths, (rows.mix, heads, guessing))

    def _of_streams(self, stream_rows: StreamRows, drafting: ChainPlan) -> _StreamCall:
        weights, head = drafting.weights, self._guessing(drafting, "bf16")
        depth = self._decoder.config.num_layers
        plan, copies = self._span.quantized_copy(stream_rows.insertion_layer, depth, weights)
        native_deltas, tensors = self._span.native_deltas((stream_rows.deltas,), stream_rows.insertion_layer, depth)
        embeddings = stream_rows.embeddings.detach().to(torch.bfloat16).contiguous()
        ones = torch.ones(self._decoder.config.width, dtype=torch.bfloat16)
        feedback = None if stream_rows.feedback is None else _packed(stream_rows.feedback)
        exits = [None if factor is None else _packed(factor) for factor in stream_rows.early_exit or (None, None)]
        call = CStreams(
            plan=pointer(plan),
            embeddings=embeddings.data_ptr(),
            ones=ones.data_ptr(),
            feedback=_struct(feedback),
            head=head.matrix.struct,
            ids=head.address,
            deltas=native_deltas,
            num_deltas=len(native_deltas),
            insertion_layer=stream_rows.insertion_layer,
            count=len(embeddings),
            has_feedback=feedback is not None,
            pruner_down=_struct(exits[0]),
            pruner_up=_struct(exits[1]),
            exit_head=self._head.struct,
            rides=stream_rows.rides,
            runs_behind=weights != "bf16",
            embedding_eps=torch.finfo(torch.float32).eps,
        )
        widths = stream_rows.widths or (1,) * len(embeddings)
        kept = (head, plan, copies, native_deltas, tensors, embeddings, ones, feedback, exits)
        return _StreamCall(call, widths, kept)

    @cached_property
    def _whole(self) -> _ChainCall:
        """The call of plain decoding: all layers, no draft rows."""
        return self._call(self._decoder.config.num_layers, None, ChainPlan())

    @property
    def _positions(self) -> int | None:
        """Address of the learned position of a text's first entry, or None where positions are not learned."""
        table = self._decoder.position_embedding
        if table is None:
            return None
        assert table.dtype == torch.bfloat16
        assert table.is_contiguous()
        return table[self._decoder.config.position_offset :].data_ptr()

    @cached_property
    def _head(self) -> Matrix:
        """The decoder's head, not quantized, which verification uses."""
        return quantized_copy(self._decoder.lm_head, "bf16")

    def _place(self, call: CChain, roots: Sequence[ChainRoot], cache: KVCache, positions: int) -> object:
        """Set the roots of a call, what their slots wear, and the addresses of a cache in which no position reaches
        ``positions``; return what the call points into besides.
        """
        slots, tokens, limits, drawings = zip(*roots, strict=True)
        if any(drawings):
            call.drawings = (CDrawing * len(roots))(*map(_drawing, drawings))
        tables = [layer.positions(positions, torch.bfloat16) for layer in self._span.rotating]
        numbers = c_int64 * len(roots)
        call.keys, call.values, call.places = self._span.addresses(cache)
        call.cosines, call.sines = pointers([cos for cos, _ in tables]), pointers([sin for _, sin in tables])
        call.slot, call.length = numbers(*slots), numbers(*(cache.lengths[slot] for slot in slots))
        call.root, call.limit = numbers(*tokens), numbers(*limits)
        call.sequences = len(roots)
        worn, kept = self._span.native_deltas(_worn(cache, slots), 0, self._decoder.config.num_layers)
        call.worn, call.num_worn = worn, len(worn)
        return kept, tables  # a longer text in another thread may replace the decoder's own

    def _run(
        self, call: CChain, plan: CPlan, roots: Sequence[ChainRoot], cache: KVCache, *, hands_over: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Draft; return tokens, slots, nodes and parents of the T rows, (4, T), and residuals (T, E) if asked for."""
        deepest = [cache.lengths[root.slot] + root.limit for root in roots]
        cache.extend([root.slot for root in roots], [entry + 1 for entry in deepest])
        made = torch.empty(4, len(roots) + sum(root.limit for root in roots), dtype=torch.int64)
        hidden = torch.empty(made.shape[1], self._decoder.config.width, dtype=torch.bfloat16) if hands_over else None
        kept = self._place(call, roots, cache, max(deepest) + 1)
        call.tokens, call.slots, call.nodes, call.parents = (line.data_ptr() for line in made)
        call.hidden = None if hidden is None else hidden.data_ptr()
        rows = self._span.body.chain(plan, call)
        del kept
        return made[:, :rows], None if hidden is None else hidden[:rows]

    def _of(self, draft_rows: DraftRows, drafting: ChainPlan) -> _ChainCall:
        """Return the part of a call that is the same for every chain with these draft rows, made once."""
        kinds, kind = self._chain_calls.setdefault(draft_rows, {}), _kind(drafting)
        if kind not in kinds:
            kinds[kind] = self._call(draft_rows.exit_layer, draft_rows, drafting)
        return kinds[kind]

    def _copied(self, draft_rows: DraftRows, weights: Weights) -> tuple[CPlan, list[object]]:
        """Return the layers in a format as these rows read them, quantized once."""
        made = self._copies.setdefault(draft_rows, {})
        if weights not in made:
            made[weights] = self._span.quantized_copy(0, draft_rows.exit_layer, weights, draft_rows.copies)
        return made[weights]

    def _guessing(self, drafting: ChainPlan, weights: Weights) -> _Guessing:
        """Return the head that guesses in a format; the decoder's own has eight bits where others have four."""
        chosen = drafting.head
        if chosen is None or chosen.module is None:  # with four bits the whole head guesses other tokens
            return _Guessing(quantized_head(self._decoder.lm_head, "bf16" if weights == "bf16" else "int8"), None)
        return _Guessing(quantized_head(chosen.module, weights), chosen.ids)

    def _call(self, exit_layer: int, draft_rows: DraftRows | None, drafting: ChainPlan) -> _ChainCall:
        """Make the constant part of a call of chains below an exit layer; None lets the rows guess themselves."""
        decoder, weights = self._decoder, drafting.weights
        plan, copies = (self._span.plan, []) if draft_rows is None else self._copied(draft_rows, weights)
        guesses_itself = (
            draft_rows is not None and draft_rows.scale is None
        )  # its head is a small part of what it reads
        head = self._guessing(drafting, "int8" if guesses_itself and weights == "q4" else weights)
        call = CChain(
            head=head.matrix.struct,
            ids=head.address,
            rows=CMatrix() if decoder.embedding_rows is None else matrix_of(decoder.embedding_rows),
            embedding=decoder.embedding.data_ptr() if decoder.embedding_rows is None else None,
            positions=self._positions,
            final_norm=gain_of(decoder.final_norm),
            exit_layer=exit_layer,
            num_ropes=len(self._span.rotating),
            embedding_scale=float(torch.tensor(decoder.config.embedding_scale, dtype=torch.bfloat16)),
            softcap=decoder.config.logit_softcap or 0.0,
            certain=decoder.config.certain_logit or 0.0,
        )
        kept: list[object] = [copies, head]
        feedback = None
        if draft_rows is not None:
            native_deltas, tensors = self._span.native_deltas((draft_rows.deltas,), 0, exit_layer)
            reads = [(read, *_matrices(read, weights)) for read in draft_rows.reads]
            kept += [tensors, reads]
            if draft_rows.feedback is not None:
                feedback = _packed(draft_rows.feedback)
            call.scale = None if draft_rows.scale is None else draft_rows.scale.data_ptr()
            call.is_fed = draft_rows.is_fed
            call.deltas, call.num_deltas, call.num_reads = native_deltas, len(native_deltas), len(reads)
            call.reads = (CDeepRead * len(reads))(
                *(CDeepRead(r.layer, r.gain.data_ptr(), query.struct, output.struct) for r, query, output in reads)
            )
        return _ChainCall(call, plan, feedback, kept)


def _drawing(drawing: Drawing | None) -> CDrawing:
    if drawing is None:
        return CDrawing()
    key = (drawing.key + 2**63) % 2**64 - 2**63  # the same bits, signed
    return CDrawing(key, 1 / drawing.temperature, drawing.top_p)


def _worn(cache: KVCache, slots: Sequence[int]) -> tuple[LowRankDeltas, ...]:
    """Return the deltas of sequences in these slots."""
    return cache.adapters.deltas(torch.tensor(slots)) if cache.adapters.any_of(slots) else ()


def _at_top(hidden: Tensor) -> TargetPass:
    """Return the result of a pass whose rows (T, E) went through all layers."""
    return TargetPass(hidden, torch.arange(len(hidden)))


def _begun(fixed: _ChainCall, offsets: Tensor | None, min_confidence: float) -> CChain:
    """Copy the constant part of a call and set its offsets (n, depths, E)."""
    call = CChain.from_buffer_copy(fixed.call)
    call.offsets = None if offsets is None else offsets.data_ptr()
    call.num_offsets = 0 if offsets is None else offsets.shape[1]
    call.min_confidence = min_confidence
    return call


def _packed(weight: Tensor) -> Matrix:
    return Matrix(pack(weight.detach().to(torch.bfloat16)), None, weight.shape[1], weight.shape[0])


def _struct(matrix: Matrix | None) -> CMatrix:
    return CMatrix() if matrix is None else matrix.struct


def _matrices(read: DeepRead, weights: Weights) -> tuple[Matrix, Matrix]:
    """Return the query and output projections of a deep read in a format."""
    query, output = (
        Matrix(quantise(w, weights) if weights != "bf16" else pack(w), None, w.shape[1], w.shape[0])
        for w in (read.query, read.output)
    )
    return query, output
