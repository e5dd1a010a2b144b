"""Drafting with the target's own lower layers, whose results verification reuses.

Rows run to the *exit layer*; there the next token is guessed, the guess becomes a row, and so on. Keys, values and
residuals of every row below the exit layer are the target's own. So verification continues from the exit layer, and the
lower layers run once per token. The last guesses run through the lower layers too, since the bonus token after them
needs their residuals there.

The self-speculation of LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710) and of M2R2 (arXiv:2502.02040) differ only in
what guesses at the exit layer: ``EarlyGuess``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.draft_head import DraftHead, check_size, size_label
from vivace.core.draft_rows import Chain, ChainPlan, ChainRoot, DraftRows
from vivace.core.model import Decoder
from vivace.core.sampling import drawable, sample
from vivace.core.seams import Context, Decided, Draft, TargetPass, Traversal, Verdict
from vivace.core.step import Step
from vivace.decode.forward import ForwardPass
from vivace.decode.lookup import LookupState, PromptLookup
from vivace.decode.multi_step import StepBudget, deciding, drawings_of, native_chain
from vivace.decode.plain import Forgetful, OwnsNoCache
from vivace.errors import ConfigError
from vivace.kernels.low_bit import Weights, check_weights


@dataclass(frozen=True)
class DraftPlan:
    """The shape of a draft."""

    widths: tuple[int, ...] = (1, 1, 1, 1)
    """Number of children below each leaf, by depth: all ones is a chain."""
    min_confidence: float = 0.0
    """Guesses whose probability at the exit layer (before processors) is lower have no guess below them; 0 keeps all.
    Where native code draws the guess, it is the distance of the two best tokens: (a - b) / (a + b) with a and b the
    exponentials of their perturbed logits."""
    weights: Weights = "bf16"
    """Format in which drafting reads the layers below the exit layer and the head. Residuals of a quantized format are
    not reused: verification runs every layer. Native kernels quantize chains only; other drafts use the weights as they
    are."""
    vocabulary: int = 0
    """Number of tokens that may be guessed, the most frequent ones of the draft vocabulary; 0 allows all."""

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ConfigError(f"draft widths must be positive and at least one, found {list(self.widths)}")
        if self.num_nodes > MAX_NODES:
            raise ConfigError(
                f"draft widths {list(self.widths)} make {self.num_nodes} guesses; a draft has at most {MAX_NODES}"
            )
        if not 0 <= self.min_confidence < 1:
            raise ConfigError(f"min_confidence must be in [0, 1), found {self.min_confidence}")
        check_weights(self.weights)
        check_size(self.vocabulary)

    @staticmethod
    def chain(length: int) -> DraftPlan:
        """Return the plan of ``length`` guesses in a row."""
        return DraftPlan((1,) * length)

    @property
    def num_nodes(self) -> int:
        """Return the number of guesses of the whole tree."""
        return sum(accumulate(self.widths, operator.mul))

    @property
    def is_chain(self) -> bool:
        """Return whether there is one guess per depth."""
        return set(self.widths) == {1}

    @property
    def label(self) -> str:
        """Return a short description: ``chain 4``, ``chain 6 if >= 0.5``, ``tree 2-2-1``, ``chain 3 in q4``."""
        sure = f" if >= {self.min_confidence:g}" if self.min_confidence else ""
        kind = "" if self.weights == "bf16" else f" in {self.weights}"
        return shape_label(self.widths) + sure + kind + size_label(self.vocabulary)


def shape_label(widths: Sequence[int]) -> str:
    """Return a short description of a draft's widths; a chain is described by its length."""
    return f"chain {len(widths)}" if set(widths) == {1} else "tree " + "-".join(map(str, widths))


TREES = ((2, 1), (3, 1), (2, 2, 1), (3, 2, 1), (2, 1, 1, 1), (3, 1, 1, 1), (2, 2, 1, 1), (4, 2, 1, 1), (3, 2, 1, 1, 1))
"""Widths of the small trees that a search tries."""


def draft_plans(longest: int) -> list[DraftPlan]:
    """Return the plans that a search tries: chains up to ``longest``, some with a least confidence, quantized or both,
    and small trees.
    """
    lengths = range(1, longest + 1)
    chains = [DraftPlan.chain(length) for length in lengths]
    unsure = [DraftPlan((1,) * length, sure) for length in lengths if length in (4, 6, 8) for sure in (0.3, 0.5, 0.7)]
    quantized = [DraftPlan((1,) * length, weights=kind) for length in lengths for kind in ("int8", "q4")]
    both = [DraftPlan((1,) * length, sure, "q4") for length in lengths if length in (4, 6) for sure in (0.3, 0.5)]
    return [*chains, *unsure, *quantized, *both, *(DraftPlan(widths) for widths in TREES if len(widths) <= longest)]


class EarlyGuess(Protocol):
    """What guesses tokens at the exit layer."""

    exit_layer: int
    """Number of layers below the exit layer; only they run while drafting."""

    draft_rows: DraftRows | None
    """The same guesses as draft rows that native code can run, so that it drafts whole chains in one call; None if they
    cannot be described so."""

    def offsets(self, final: Tensor) -> Tensor | None:
        """Return what is added where draft rows start, (n, depths, E), the last offset at all greater depths too.

        Args:
            final: (n, E) residuals of the last verified positions after the last layer.

        Returns None where nothing is added.
        """
        ...

    def forward(
        self, model: Decoder, h: Tensor, step: Step, guessing: Tensor, offset: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run rows through the layers below the exit layer.

        Args:
            model: the target.
            h: (T, E) embedded rows.
            step: their call; all rows write keys and values.
            guessing: (n,) which of the rows need a guess.
            offset: (n, E) what is added where their draft rows start.

        Returns:
            Residuals at the exit layer (T, E), and (n, E) from which ``model.head`` reads the guesses.
        """
        ...


class ShallowDrafter(OwnsNoCache):
    """Implements ``Drafter``: drafts of a plan's shape, guessed by an ``EarlyGuess``."""

    def __init__(
        self,
        model: Decoder,
        guess: EarlyGuess,
        plan: DraftPlan,
        *,
        name: str,
        first: PromptLookup | None = None,
        head: DraftHead | None = None,
    ) -> None:
        """Draft for ``model``.

        Args:
            model: the target.
            guess: guesses at the exit layer.
            plan: shape of the draft.
            name: name of the method, for statistics.
            first: prompt lookup that is asked before; where it finds a continuation, that is the draft.
            head: what guesses are read with; None is the model's head.
        """
        self.head = DraftHead(model) if head is None else head
        self.chain_plan = ChainPlan(plan.min_confidence, plan.weights, self.head, length=len(plan.widths))
        self.first = first
        self.model = model
        self.guess = guess
        self.plan = plan
        self.name = name
        self.budget = StepBudget()
        chain, draft_rows = model.backend.chain, guess.draft_rows
        if plan.is_chain and chain is not None and draft_rows is not None and chain.covers(draft_rows):
            chain.prepare(draft_rows, self.chain_plan)

    def open(self, cache: KVCache) -> ShallowState:
        """Return the state of a session that has verified nothing yet."""
        return ShallowState(self, None if self.first is None else self.first.open(cache))


class ShallowState(Forgetful):
    """Implements ``DraftState``: drafts with the lower layers depth by depth, all slots in one pass per depth."""

    def __init__(self, drafter: ShallowDrafter, first: LookupState | None) -> None:
        """Draft as ``drafter`` does, where ``first`` finds no continuation."""
        self.traversal: Traversal = ForwardPass()
        self.first = first
        self.model, self.guess, self.plan = drafter.model, drafter.guess, drafter.plan
        self._head, self._chain_plan = drafter.head, drafter.chain_plan
        self._budget = drafter.budget
        self._offsets: dict[int, Tensor] = {}
        """By slot: what is added where draft rows start, (depths, E), computed from the last verified position."""

    def propose(self, context: Context) -> Draft | Decided:
        """Return verified steps, or committed tokens with a chain or tree of guesses and residuals at the
        exit layer.
        """
        return self._decided(context) or self._at_once(context) or self._in_steps(context)

    def _decided(self, context: Context) -> Decided | None:
        """Draft and verify several steps in one native call, where one sequence has room for them; else return None."""
        draft_rows = self.guess.draft_rows
        if len(context.slots) > 1 or self.first is not None or draft_rows is None or not self.plan.is_chain:
            return None
        found = deciding(self.model, context)
        if found is None or not found.chain.covers(draft_rows):
            return None
        [slot] = context.slots
        drafts = self._budget.drafts(context, slot, len(self.plan.widths), self._chain_plan)
        if drafts is None:
            return None
        limit, plan = drafts
        root, offsets = found.root(slot, limit), self._offsets_of(context.slots)
        return self._budget.timed(
            context, lambda: found.chain.speculate(root, draft_rows, offsets, context.cache, plan, context.ends)
        )

    def _at_once(self, context: Context) -> Draft | None:
        """Draft a chain below every slot in one native call; return None where that is not possible.

        Guesses of a request that samples from its logits are drawn with the noise that verification draws with; those
        of others are the likeliest tokens.
        """
        cache, native = context.cache, self._native(context)
        if native is None:
            return None
        drawings, roots = drawings_of(native[0], context), []
        for slot in context.slots:
            tokens = context.tokens[slot]
            if len(tokens) != cache.lengths[slot] + 1 or (self.first is not None and self.first.guess(context, slot)):
                return None
            limit = min(len(self.plan.widths), context.max_nodes.get(slot, MAX_NODES))
            roots.append(ChainRoot(slot, tokens[-1], limit, drawings.get(slot)))
        chain, draft_rows = native
        return chain.draft(roots, draft_rows, self._offsets_of(context.slots), cache, self._chain_plan)

    def _native(self, context: Context) -> tuple[Chain, DraftRows] | None:
        """Return what drafts chains in one native call, whatever this batch needs; None for trees and without native
        code.
        """
        chain, draft_rows = native_chain(self.model, context), self.guess.draft_rows
        if chain is None or draft_rows is None or not self._may_be_native(context):
            return None
        return chain, draft_rows

    def _may_be_native(self, context: Context) -> bool:
        """Return whether chains are drafted in one native call where no adapter or pruned prompt of this batch forbids
        it: which random numbers a slot uses must not depend on its neighbours.
        """
        chain, draft_rows = self.model.backend.chain, self.guess.draft_rows
        if chain is None or context.cache.row_count != 1 or draft_rows is None or not self.plan.is_chain:
            return False
        return chain.covers(draft_rows)

    def _in_steps(self, context: Context) -> Draft:
        """Draft depth by depth. Guesses of a chain are drawn only where no native call could ever draft it.

        Otherwise a neighbour whose text repeats itself, which prompt lookup drafts for, would change which random
        numbers a slot uses.
        """
        draft, draws = context.committed(), self.plan.is_chain and not self._may_be_native(context)
        leaves = draft.last_committed()
        if self.first is not None:
            draft, known = self.first.seed(draft, context)
            roots = zip(draft.slots, draft.last_rows, strict=True)
            growing = [root for slot, root in roots if slot not in known]
            leaves = torch.tensor(growing, dtype=torch.int64, device=draft.device)
        done: list[Tensor] = []
        for depth in range(len(self.plan.widths) + 1):
            fresh = torch.arange(sum(len(h) for h in done), len(draft.tokens), device=draft.device)
            width = self._width(depth)
            leaves = self._with_room(draft, leaves, context, width)
            hidden, at_exit = self._lower(draft, context, fresh, leaves, depth)
            done.append(hidden)
            if len(leaves) == 0:
                break
            draft, leaves = guess_below(self._head, self.plan, context, draft, leaves, at_exit, width, draws=draws)
        return replace(draft, hidden=torch.cat(done), entry_layer=self.guess.exit_layer)

    def _width(self, depth: int) -> int:
        return self.plan.widths[depth] if depth < len(self.plan.widths) else 0

    @staticmethod
    def _with_room(draft: Draft, leaves: Tensor, context: Context, width: int) -> Tensor:
        """Return the leaves below which guesses may still be added: within the plan and within their slot's limit."""
        if width == 0:
            return leaves[:0]
        slots = draft.places.slot
        keep = [leaf for leaf in leaves.tolist() if draft.depths[leaf] < context.max_nodes.get(slots[leaf], MAX_NODES)]
        return torch.tensor(keep, dtype=torch.int64, device=draft.device)

    def _lower(
        self, draft: Draft, context: Context, fresh: Tensor, leaves: Tensor, depth: int
    ) -> tuple[Tensor, Tensor]:
        """Run the new rows, which include the leaves, through the layers below the exit layer."""
        step = Step.of(draft, context.cache)
        if len(fresh) < len(draft.tokens):
            step = step.take(fresh)
        h = self.model.embed(draft.tokens[fresh], step)
        guessing = leaves - fresh[0]
        offsets = self._offsets_of(step.slot[guessing].tolist())
        offset = None if offsets is None else offsets[:, min(depth, offsets.shape[1] - 1)]
        return self.guess.forward(self.model, h, step, guessing, offset)

    def _offsets_of(self, slots: Sequence[int]) -> Tensor | None:
        """Return offsets (n, depths, E) for draft rows of these slots; None where no position has been verified yet."""
        known = next((self._offsets[slot] for slot in slots if slot in self._offsets), None)
        if known is None:
            return None
        if len(slots) == 1:
            return known[None]
        unknown = torch.zeros_like(known)
        return torch.stack([self._offsets.get(slot, unknown) for slot in slots])

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Compute the offsets of the next draft from the residual of the last kept row, which precedes
        the next root.
        """
        last = draft.last_rows if verdict is None else [path[-1] for path in verdict.paths]
        final = passed.hidden[last] if len(last) > 1 else passed.hidden[last[0] : last[0] + 1]
        offsets = self.guess.offsets(final)
        if offsets is not None:
            self._offsets.update(zip(draft.slots, offsets.unbind(), strict=True))

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Tell the prompt lookup; all other entries are in the target's own cache."""
        if self.first is not None:
            self.first.truncate(slots, lengths)

    def release(self, slots: Sequence[int]) -> None:
        """Forget these slots."""
        for slot in slots:
            self._offsets.pop(slot, None)
        if self.first is not None:
            self.first.release(slots)


def guess_below(
    head: DraftHead,
    plan: DraftPlan,
    context: Context,
    draft: Draft,
    leaves: Tensor,
    at_exit: Tensor,
    width: int,
    *,
    draws: bool,
) -> tuple[Draft, Tensor]:
    """Guess tokens below each leaf.

    Args:
        head: what reads the guesses.
        plan: shape of the draft.
        context: of the step.
        draft: the draft so far.
        leaves: (n,) rows of the draft.
        at_exit: (n, E) what the head reads for each.
        width: number of guesses below each.
        draws: whether guesses of a chain are drawn from their distribution where a request samples; else they are the
            likeliest tokens.

    Returns:
        The draft with the guesses, and the rows of those that are confident enough to have guesses below them.
    """
    sure: Tensor | None = None
    probs: Tensor | None = None
    if context.distribution.is_greedy(context.slots) and not plan.min_confidence:
        tokens = head.greedy(at_exit)[:, None] if width == 1 else head(at_exit).topk(width).indices
    else:
        logits = head(at_exit)
        bare, distribution = torch.softmax(logits, -1), context.distribution(logits, draft, leaves)
        if draws:
            distribution = drawable(distribution)
            slots = draft.places.slot
            drawn = [
                sample(q, context.generators[slots[leaf]])
                for q, leaf in zip(distribution, leaves.tolist(), strict=True)
            ]
            tokens, probs = torch.tensor(drawn, device=distribution.device)[:, None], distribution
        elif plan.is_chain:
            tokens = logits.argmax(-1, keepdim=True)  # the same guesses as a native call makes
        else:
            # a greedy request's distribution has one token; the model's own probabilities rank the others
            tokens = (distribution + bare).topk(width).indices
        sure = bare.gather(1, tokens) >= plan.min_confidence
    draft, rows = draft.grow(leaves, tokens, probs)
    return draft, rows if sure is None else rows[sure.reshape(-1)]


MAX_NODES = 32
"""Largest number of guesses of one slot in one draft."""
