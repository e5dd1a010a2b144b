"""Drafting with the target's own lower layers: what is computed while drafting is handed to verification.

Rows climb to the *gate*, something there guesses the next token, the guess becomes a row, and so on. The
lower layers' keys, values and residuals of every node are the target's own, so verification starts at the
gate and the lower layers run once per token. One more lower pass than guesses is made: the last guesses
need their residual at the gate too (the token after them is the bonus).

Self-speculation of LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710) and of M2R2 (arXiv:2502.02040)
differ only in who guesses at the gate: ``EarlyGuess``.
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
from vivace.core.draft_rows import Chain, ChainPlan, ChainRoot, DraftRows
from vivace.core.model import Decoder
from vivace.core.sampling import drawable, sample
from vivace.core.seams import Context, Decided, Draft, TargetPass, Traversal, Verdict
from vivace.core.step import Step
from vivace.decode.forward import ForwardPass
from vivace.decode.lookup import LookupState, PromptLookup
from vivace.decode.multi_step import StepBudget, deciding, native_chain
from vivace.decode.plain import Forgetful, OwnsNoCache
from vivace.errors import ConfigError
from vivace.kernels.low_bit import Weights, check_weights


@dataclass(frozen=True)
class DraftPlan:
    """Shape of a draft."""

    widths: tuple[int, ...] = (1, 1, 1, 1)
    """Children below each leaf, depth by depth: all ones is a chain."""
    min_confidence: float = 0.0
    """Stop below a guess that the gate finds less likely than this, processors aside; 0 never stops early."""
    weights: Weights = "bf16"
    """Draft with copies in few bits of the weights below the gate and of the head. Nothing is handed over then:
    verification runs every layer. For chains on native kernels; other drafts use the weights as they are."""

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

    @staticmethod
    def chain(length: int) -> DraftPlan:
        """``length`` guesses in a row."""
        return DraftPlan((1,) * length)

    @property
    def num_nodes(self) -> int:
        """Guesses of the whole tree."""
        return sum(accumulate(self.widths, operator.mul))

    @property
    def is_chain(self) -> bool:
        """One guess per depth."""
        return set(self.widths) == {1}

    @property
    def label(self) -> str:
        """In a few characters: ``chain 4``, ``chain 6 if >= 0.5``, ``tree 2-2-1``, ``chain 3 in q4``."""
        sure = f" if >= {self.min_confidence:g}" if self.min_confidence else ""
        return shape_label(self.widths) + sure + ("" if self.weights == "bf16" else f" in {self.weights}")


def shape_label(widths: Sequence[int]) -> str:
    """Widths of a draft in a few characters, a chain's by its length."""
    return f"chain {len(widths)}" if set(widths) == {1} else "tree " + "-".join(map(str, widths))


TREES = ((2, 1), (3, 1), (2, 2, 1), (3, 2, 1), (2, 1, 1, 1), (3, 1, 1, 1), (2, 2, 1, 1), (4, 2, 1, 1), (3, 2, 1, 1, 1))
"""Small trees that a search tries."""


def draft_plans(longest: int) -> list[DraftPlan]:
    """Chains of up to ``longest`` guesses, some that stop when unsure, some by quantized copies, and small trees."""
    lengths = range(1, longest + 1)
    chains = [DraftPlan.chain(length) for length in lengths]
    unsure = [DraftPlan((1,) * length, sure) for length in lengths if length in (4, 6, 8) for sure in (0.3, 0.5, 0.7)]
    rough = [DraftPlan((1,) * length, weights=kind) for length in lengths if length >= 3 for kind in ("int8", "q4")]
    return [*chains, *unsure, *rough, *(DraftPlan(widths) for widths in TREES if len(widths) <= longest)]


class EarlyGuess(Protocol):
    """Who guesses at the gate."""

    gate: int
    """Layers below it run while drafting."""

    companion: DraftRows | None
    """The same as data, if the guesses come from rows behind the slow ones: whole chains are then drafted at once."""

    def offsets(self, final: Tensor) -> Tensor | None:
        """What is added where companions start, (n, depths, E), the last one at all further depths too.

        Args:
            final: (n, E) residuals at the top of the last verified positions; None where nothing is added.
        """
        ...

    def forward(
        self, model: Decoder, h: Tensor, step: Step, guessing: Tensor, offset: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Rows through the layers below the gate.

        Args:
            model: the target.
            h: (T, E) embedded rows.
            step: their call; all rows write.
            guessing: (n,) which of the rows want a guess.
            offset: (n, E) what is added where they start.

        Returns:
            Residuals at the gate (T, E), and (n, E) from which ``model.head`` gives the guess.
        """
        ...


class ShallowDrafter(OwnsNoCache):
    """Fills ``Drafter``: whoever guesses at the gate, and the shape of the draft."""

    def __init__(
        self, model: Decoder, guess: EarlyGuess, plan: DraftPlan, *, name: str, first: PromptLookup | None = None
    ) -> None:
        """Draft for ``model``.

        Args:
            model: the target.
            guess: who guesses at the gate.
            plan: shape of the draft.
            name: of the method, for statistics.
            first: asked before; where it knows a continuation that one is the draft.
        """
        self.first = first
        self.model = model
        self.guess = guess
        self.plan = plan
        self.name = name
        self.budget = StepBudget()
        chain, companion = model.backend.chain, guess.companion
        if plan.is_chain and chain is not None and companion is not None and chain.covers(companion):
            chain.prepare(companion, plan.weights)

    def open(self, cache: KVCache) -> ShallowState:
        """State of a session that has verified nothing yet."""
        return ShallowState(self, None if self.first is None else self.first.open(cache))


class ShallowState(Forgetful):
    """Fills ``DraftState``: drafts below the gate, depth by depth, all slots in one pass per depth."""

    def __init__(self, drafter: ShallowDrafter, first: LookupState | None) -> None:
        """Draft as ``drafter`` says, where ``first`` knows no continuation."""
        self.traversal: Traversal = ForwardPass()
        self.first = first
        self.model, self.guess, self.plan = drafter.model, drafter.guess, drafter.plan
        self._budget = drafter.budget
        self._offsets: dict[int, Tensor] = {}
        """What is added where companions start, (depths, E), from each slot's last verified position."""

    def propose(self, context: Context) -> Draft | Decided:
        """Verified steps, or the decided tokens and a chain or tree of guesses, with residuals at the gate."""
        return self._decided(context) or self._at_once(context) or self._in_steps(context)

    def _decided(self, context: Context) -> Decided | None:
        """Whole steps in one call, verification and all, where one greedy sequence has room for them."""
        companion = self.guess.companion
        if len(context.slots) > 1 or self.first is not None or companion is None or not self.plan.is_chain:
            return None
        found = deciding(self.model, context)
        if found is None or not found.chain.covers(companion):
            return None
        [(slot, token)] = found.pending.items()
        drafts = self._budget.drafts(context, slot, len(self.plan.widths), self.plan.weights, self.plan.min_confidence)
        if drafts is None:
            return None
        limit, plan = drafts
        root, offsets = ChainRoot(slot, token, limit), self._offsets_of(context.slots)
        return self._budget.timed(
            context, lambda: found.chain.speculate(root, companion, offsets, context.cache, plan, context.ends)
        )

    def _at_once(self, context: Context) -> Draft | None:
        """Chains in one call; None when there is more to it, or nobody who can.

        Guesses are the likeliest tokens where requests sample, too: fewer of them are kept than of drawn ones (3.7
        tokens a pass against 4.2 at temperature 0.7), and a draft of drawn ones takes as long as several of these.
        """
        cache, native = context.cache, self._native(context)
        if native is None or cache.adapters.any_of(context.slots):
            return None
        roots = []
        for slot in context.slots:
            tokens = context.tokens[slot]
            if len(tokens) != cache.lengths[slot] + 1 or (self.first is not None and self.first.guess(context, slot)):
                return None
            limit = min(len(self.plan.widths), context.max_nodes.get(slot, MAX_NODES))
            roots.append(ChainRoot(slot, tokens[-1], limit))
        plan, (chain, companion) = ChainPlan(self.plan.min_confidence, self.plan.weights), native
        return chain.draft(roots, companion, self._offsets_of(context.slots), cache, plan)

    def _native(self, context: Context) -> tuple[Chain, DraftRows] | None:
        """Who drafts chains in one call, whatever else this batch needs; None for trees, and where nobody does."""
        chain, companion = native_chain(self.model, context), self.guess.companion
        if chain is None or companion is None or not self.plan.is_chain or not chain.covers(companion):
            return None
        return chain, companion

    def _in_steps(self, context: Context) -> Draft:
        """Guess depth by depth. Chains are drawn only where none is ever drafted in one call.

        Otherwise a neighbour whose text repeats itself would change which random numbers a slot uses.
        """
        draft, draws = context.committed(), self.plan.is_chain and self._native(context) is None
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
            hidden, at_gate = self._lower(draft, context, fresh, leaves, depth)
            done.append(hidden)
            if len(leaves) == 0:
                break
            draft, leaves = guess_below(self.model, self.plan, context, draft, leaves, at_gate, width, draws=draws)
        return replace(draft, hidden=torch.cat(done), entry_layer=self.guess.gate)

    def _width(self, depth: int) -> int:
        return self.plan.widths[depth] if depth < len(self.plan.widths) else 0

    @staticmethod
    def _with_room(draft: Draft, leaves: Tensor, context: Context, width: int) -> Tensor:
        """Leaves that may still grow: within the plan and as deep as their slot can use."""
        if width == 0:
            return leaves[:0]
        slots = draft.lists.slot
        keep = [leaf for leaf in leaves.tolist() if draft.depths[leaf] < context.max_nodes.get(slots[leaf], MAX_NODES)]
        return torch.tensor(keep, dtype=torch.int64, device=draft.device)

    def _lower(
        self, draft: Draft, context: Context, fresh: Tensor, leaves: Tensor, depth: int
    ) -> tuple[Tensor, Tensor]:
        """New rows through the layers below the gate; leaves are among them."""
        step = Step.of(draft, context.cache)
        if len(fresh) < len(draft.tokens):
            step = step.take(fresh)
        h = self.model.embed(draft.tokens[fresh], step)
        guessing = leaves - fresh[0]
        offsets = self._offsets_of(step.slot[guessing].tolist())
        offset = None if offsets is None else offsets[:, min(depth, offsets.shape[1] - 1)]
        return self.guess.forward(self.model, h, step, guessing, offset)

    def _offsets_of(self, slots: Sequence[int]) -> Tensor | None:
        """(n, depths, E) for drafts that start here; None where no position has been verified yet."""
        known = next((self._offsets[slot] for slot in slots if slot in self._offsets), None)
        if known is None:
            return None
        if len(slots) == 1:
            return known[None]
        unknown = torch.zeros_like(known)
        return torch.stack([self._offsets.get(slot, unknown) for slot in slots])

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Remember what the top of the last kept row adds to the next draft: it stands before the next root."""
        last = draft.last_rows if verdict is None else [path[-1] for path in verdict.paths]
        final = passed.hidden[last] if len(last) > 1 else passed.hidden[last[0] : last[0] + 1]
        offsets = self.guess.offsets(final)
        if offsets is not None:
            self._offsets.update(zip(draft.slots, offsets.unbind(), strict=True))

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Entries live in the target's own cache; a shortened text is looked up afresh."""
        if self.first is not None:
            self.first.truncate(slots, lengths)

    def release(self, slots: Sequence[int]) -> None:
        """Forget what was seen of these slots."""
        for slot in slots:
            self._offsets.pop(slot, None)
        if self.first is not None:
            self.first.release(slots)


def guess_below(
    model: Decoder,
    plan: DraftPlan,
    context: Context,
    draft: Draft,
    leaves: Tensor,
    at_gate: Tensor,
    width: int,
    *,
    draws: bool,
) -> tuple[Draft, Tensor]:
    """Guess below each leaf.

    Args:
        model: whose head reads the guesses.
        plan: shape of the draft.
        context: of the step.
        draft: so far.
        leaves: (n,) rows of the draft.
        at_gate: (n, E) what the head reads for each.
        width: guesses below each.
        draws: guesses of a chain are drawn from their law where a request samples; else they are the likeliest.

    Returns:
        The draft with the guesses, and the rows of those that are sure enough to be guessed on from.
    """
    sure: Tensor | None = None
    probs: Tensor | None = None
    if context.distribution.is_greedy(context.slots) and not plan.min_confidence:
        tokens = model.greedy(at_gate)[:, None] if width == 1 else model.head(at_gate).topk(width).indices
    else:
        logits = model.head(at_gate)
        bare, distribution = torch.softmax(logits, -1), context.distribution(logits, draft, leaves)
        if draws:
            distribution = drawable(distribution)
            slots = draft.lists.slot
            drawn = [
                sample(q, context.generators[slots[leaf]])
                for q, leaf in zip(distribution, leaves.tolist(), strict=True)
            ]
            tokens, probs = torch.tensor(drawn, device=distribution.device)[:, None], distribution
        elif plan.is_chain:
            tokens = logits.argmax(-1, keepdim=True)  # as one native call guesses
        else:
            tokens = (
                (distribution + bare).topk(width).indices
            )  # a greedy law names one token: the others by the model's
        sure = bare.gather(1, tokens) >= plan.min_confidence
    draft, rows = draft.grow(leaves, tokens, probs)
    return draft, rows if sure is None else rows[sure.reshape(-1)]


MAX_NODES = 32
"""Guesses of one slot in one draft."""
