"""Chains of guesses in one native call: the lower layers, head, argmax and embedding, depth after depth.

What ``decode/shallow.py`` does step by step for drafters whose guesses come from a *companion*: a row that rides
behind each slow one, reads what it reads and stores nothing. The tokens, residuals and stored entries are to the
bit those of the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64, pointer
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.cpu.span import NativeSpan, matrix_of, norm_of, pointers, quantized_copy
from vivace.core.draft_rows import ChainPlan, DeepRead, DraftRows, Root, StreamRows
from vivace.core.seams import Decided, Draft, TargetPass, VerifiedStep
from vivace.kernels.chain import CChain, CDeepRead, CSpeculation, CStreams
from vivace.kernels.library import CMatrix, CPlan
from vivace.kernels.low_bit import Weights, quantise
from vivace.kernels.native import Matrix, pack

if TYPE_CHECKING:
    from vivace.core.model import Decoder


@dataclass(frozen=True)
class _Fixed:
    """What does not change from call to call."""

    call: CChain
    plan: CPlan
    feedback: Matrix | None
    """From the last kept row's normed residual to the offsets of the next chain."""
    kept: object
    """Holds what the two point into."""


@dataclass(frozen=True)
class _Following:
    """What does not change from call to call with followers."""

    call: CStreams
    kept: object
    """Holds what it points into."""


class NativeChain:
    """Drafts below a gate of one packed decoder."""

    def __init__(self, decoder: Decoder, span: NativeSpan) -> None:
        self._decoder = decoder
        self._span = span
        self._fixed: WeakKeyDictionary[DraftRows, dict[Weights, _Fixed]] = WeakKeyDictionary()
        self._followings: WeakKeyDictionary[StreamRows, dict[Weights, _Following]] = WeakKeyDictionary()

    @staticmethod
    def of(decoder: Decoder, span: NativeSpan | None) -> NativeChain | None:
        """For a decoder with a span and no experts, a head that is not capped and static rotations."""
        c = decoder.config
        is_capped, moves = c.logit_softcap is not None, any(rope.kind == "dynamic" for rope in c.ropes)
        if span is None or c.moe is not None or is_capped or moves:
            return None
        return NativeChain(decoder, span)

    def covers(self, companion: DraftRows) -> bool:
        """Whether it can draft with this one."""
        if companion in self._fixed:
            return True
        weights = [*companion.deltas.down.values(), *companion.deltas.up.values(), companion.scale]
        for read in companion.reads:
            weights += [read.gain, read.query, read.output]
        return all(w.dtype == torch.bfloat16 and w.is_contiguous() for w in weights)

    def prepare(self, companion: DraftRows, weights: Weights) -> None:
        """Lay weights out and make copies now, so that the first draft takes no longer than the next."""
        self._of(companion, weights)

    def draft(
        self,
        roots: Sequence[Root],
        companion: DraftRows,
        offsets: Tensor | None,
        cache: KVCache,
        plan: ChainPlan,
    ) -> Draft:
        """One chain below each root.

        Args:
            roots: of each sequence.
            companion: who guesses.
            offsets: (n, depths, E) added to the embedding where a companion starts, the last one at all further
                depths too; None for nothing.
            cache: holds the text before the roots; gets the lower layers' entries of all rows.
            plan: of the chains. A rough draft hands nothing over: what it stored is written again when it is verified.

        Returns:
            The draft; with residuals at the gate unless it is rough.
        """
        fixed, is_rough = self._of(companion, plan.weights), plan.weights != "bf16"
        call = _begun(fixed, offsets, plan.min_confidence)
        (tokens, slot, node, parent), hidden = self._run(call, fixed.plan, roots, cache, hands_over=not is_rough)
        slots, given = tuple(root.slot for root in roots), (1,) * len(roots)
        if hidden is None:
            return Draft(slots, given, tokens, slot, node, parent)
        return Draft(slots, given, tokens, slot, node, parent, hidden=hidden, entry_layer=companion.gate)

    def decide(self, roots: Sequence[Root], cache: KVCache, ends: Sequence[int] = ()) -> Decided:
        """The next tokens below each root by the whole model, greedily: plain decoding without a way back to Python.

        Args:
            roots: of each sequence; as many tokens below as their limits say.
            cache: holds the text before the roots; gets the entries of all rows.
            ends: tokens below which there is nothing more to decide.

        Returns:
            A step for each row; what follows the last row of a slot is not read yet.
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
        root: Root,
        companion: DraftRows,
        offsets: Tensor | None,
        cache: KVCache,
        plan: ChainPlan,
        ends: Sequence[int] = (),
    ) -> Decided:
        """Steps of drafting and verification of one greedy sequence without a way back to Python.

        Args:
            root: its last decided token, and guesses of a chain at most.
            companion: who guesses.
            offsets: (1, depths, E) for the first chain; the others start from what verification left.
            cache: holds the text before the root; gets the entries of all rows.
            plan: of the chains, and how many of them.
            ends: tokens below which there is nothing more to decide.

        Returns:
            Those steps; what follows their last row is not read yet.
        """
        fixed = self._of(companion, plan.weights)
        call = _begun(fixed, offsets, plan.min_confidence)
        into = CSpeculation(feedback=_struct(fixed.feedback), has_feedback=fixed.feedback is not None)
        return self._speculate(call, fixed.plan, into, root, cache, plan, ends, hands_over=plan.weights == "bf16")

    def follow(
        self,
        root: Root,
        followers: StreamRows,
        left: tuple[Tensor, Tensor | None],
        cache: KVCache,
        plan: ChainPlan,
        ends: Sequence[int] = (),
    ) -> tuple[Decided, Tensor]:
        """Steps of one greedy sequence whose guesses come from followers of the last kept row.

        Args:
            root: its last decided token, and guesses of a draft at most.
            followers: who guesses.
            left: what the last kept row had where they enter (E,), and at the top (E,) for those with feedback.
            cache: holds the text before the root; gets the entries of all rows.
            plan: of the steps; ``weights`` are those that followers read.
            ends: tokens below which there is nothing more to decide.

        Returns:
            As ``speculate``, and what the last row kept now had where they enter.
        """
        fixed = self._following(followers, plan.weights)
        entering, final = left[0].clone(), left[1]
        streams = CStreams.from_buffer_copy(fixed.call)
        streams.entering, streams.final = entering.data_ptr(), None if final is None else final.data_ptr()
        into = CSpeculation(streams=pointer(streams))
        call = CChain.from_buffer_copy(self._whole.call)
        return self._speculate(call, self._span.plan, into, root, cache, plan, ends, hands_over=False), entering

    def _speculate(
        self,
        call: CChain,
        drafting: CPlan,
        into: CSpeculation,
        root: Root,
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
        last = cache.lengths[root.slot] + plan.room
        cache.reserve([root.slot], [last - 1])
        self._place(call, [root], cache, last)
        call.ends, call.num_ends = (c_int64 * len(ends))(*ends), len(ends)
        call.hidden = hidden.data_ptr() if hands_over else None  # whether chains hand over what they did
        steps = self._span.body.speculate(drafting, self._span.plan, call, into)
        count = sum(kept[:steps])
        node = torch.arange(count)
        draft = Draft((root.slot,), (count,), tokens[:count], torch.full((count,), root.slot), node, node - 1)
        made = [VerifiedStep(kept[step], tuple(range(1, guessed[step] + 1))) for step in range(steps)]
        return Decided(draft, _at_top(hidden[:count]), (tuple(made),), into.draft_ns / 1e9)

    def _following(self, followers: StreamRows, weights: Weights) -> _Following:
        """What is the same in every call with these followers."""
        kinds = self._followings.setdefault(followers, {})
        if weights not in kinds:
            depth = self._decoder.config.num_layers
            plan, copies = self._span.quantized_copy(followers.insertion, depth, weights)
            terms, tensors = self._span.terms((followers.deltas,), followers.insertion, depth)
            marks = followers.marks.detach().to(torch.bfloat16).contiguous()
            ones = torch.ones(self._decoder.config.width, dtype=torch.bfloat16)
            feedback = None if followers.feedback is None else _packed(followers.feedback)
            call = CStreams(
                plan=pointer(plan),
                marks=marks.data_ptr(),
                ones=ones.data_ptr(),
                feedback=_struct(feedback),
                terms=terms,
                num_terms=len(terms),
                insertion=followers.insertion,
                count=len(marks),
                has_feedback=feedback is not None,
                mark_eps=torch.finfo(torch.float32).eps,
            )
            kinds[weights] = _Following(call, (plan, copies, terms, tensors, marks, ones, feedback))
        return kinds[weights]

    @cached_property
    def _whole(self) -> _Fixed:
        """All layers without a companion."""
        return self._call(self._decoder.config.num_layers, None, "bf16")

    @cached_property
    def _head(self) -> Matrix:
        """The model's own."""
        return quantized_copy(self._decoder.lm_head, "bf16")

    def _place(self, call: CChain, roots: Sequence[Root], cache: KVCache, positions: int) -> None:
        """Tell a call its roots, in a cache whose entries are below ``positions``."""
        slots, tokens, limits = zip(*roots, strict=True)
        tables = [layer.positions(positions, torch.bfloat16) for layer in self._span.rotating]
        numbers = c_int64 * len(roots)
        call.keys, call.values = self._span.addresses(cache)
        call.cosines, call.sines = pointers([cos for cos, _ in tables]), pointers([sin for _, sin in tables])
        call.slot, call.length = numbers(*slots), numbers(*(cache.lengths[slot] for slot in slots))
        call.root, call.limit = numbers(*tokens), numbers(*limits)
        call.sequences, call.capacity = len(roots), cache.capacity

    def _run(
        self, call: CChain, plan: CPlan, roots: Sequence[Root], cache: KVCache, *, hands_over: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens, slots, nodes and parents of the rows made, (4, T), and their residuals (T, E) if they are wanted."""
        deepest = [cache.lengths[root.slot] + root.limit for root in roots]
        cache.reserve([root.slot for root in roots], deepest)
        made = torch.empty(4, len(roots) + sum(root.limit for root in roots), dtype=torch.int64)
        hidden = torch.empty(made.shape[1], self._decoder.config.width, dtype=torch.bfloat16) if hands_over else None
        self._place(call, roots, cache, max(deepest) + 1)
        call.tokens, call.slots, call.nodes, call.parents = (line.data_ptr() for line in made)
        call.hidden = None if hidden is None else hidden.data_ptr()
        rows = self._span.body.chain(plan, call)
        return made[:, :rows], None if hidden is None else hidden[:rows]

    def _of(self, companion: DraftRows, weights: Weights) -> _Fixed:
        """What is the same in every call with this companion; its weights are laid out once."""
        kinds = self._fixed.setdefault(companion, {})
        if weights not in kinds:
            kinds[weights] = self._call(companion.gate, companion, weights)
        return kinds[weights]

    def _call(self, gate: int, companion: DraftRows | None, weights: Weights) -> _Fixed:
        """Chains below a gate by a companion, or by the rows themselves when there is none."""
        decoder = self._decoder
        plan, copies = self._span.quantized_copy(0, gate, weights)
        head = quantized_copy(decoder.lm_head, weights if weights == "bf16" else "int8")  # four bits name other tokens
        call = CChain(
            head=head.struct,
            rows=CMatrix() if decoder.embedding_rows is None else matrix_of(decoder.embedding_rows),
            embedding=decoder.embedding.data_ptr() if decoder.embedding_rows is None else None,
            final_norm=norm_of(decoder.final_norm),
            gate=gate,
            num_ropes=len(self._span.rotating),
            embedding_scale=float(torch.tensor(decoder.config.embedding_scale, dtype=torch.bfloat16)),
        )
        kept: list[object] = [copies, head]
        feedback = None
        if companion is not None:
            terms, tensors = self._span.terms((companion.deltas,), 0, gate)
            reads = [(read, *_matrices(read, weights)) for read in companion.reads]
            kept += [tensors, reads]
            if companion.feedback is not None:
                feedback = _packed(companion.feedback)
            call.scale, call.is_fed = companion.scale.data_ptr(), companion.is_fed
            call.terms, call.num_terms, call.num_reads = terms, len(terms), len(reads)
            call.reads = (CDeepRead * len(reads))(
                *(CDeepRead(r.layer, r.gain.data_ptr(), query.struct, output.struct) for r, query, output in reads)
            )
        return _Fixed(call, plan, feedback, kept)


def _at_top(hidden: Tensor) -> TargetPass:
    """Rows (T, E) that went through all layers."""
    return TargetPass(hidden, torch.arange(len(hidden)))


def _begun(fixed: _Fixed, offsets: Tensor | None, min_confidence: float) -> CChain:
    """A call of its own, whose companions start from these offsets (n, depths, E)."""
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
    """Query and output of a companion's reading."""
    query, output = (
        Matrix(quantise(w, weights) if weights != "bf16" else pack(w), None, w.shape[1], w.shape[0])
        for w in (read.query, read.output)
    )
    return query, output
