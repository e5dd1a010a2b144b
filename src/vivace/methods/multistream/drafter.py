"""Drafts from streams: the likeliest tokens of each stream, each below each token of the stream before.

Guesses are the likeliest tokens and are not drawn, so sampling stays exact as for all deterministic drafts
(``decode/verify.py``): a token is drawn from the model's own distribution, and the path continues where a child has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.draft_head import DraftHead
from vivace.core.draft_rows import ChainPlan
from vivace.core.model import Decoder
from vivace.core.seams import Context, Decided, Draft, TargetPass, Traversal, Verdict
from vivace.decode.multi_step import StepBudget, deciding
from vivace.decode.plain import Forgetful, OwnsNoCache
from vivace.decode.tree import every_path, grown
from vivace.methods.multistream.config import StreamPlan
from vivace.methods.multistream.forward import StreamForwardPass, StreamPass, Verified
from vivace.methods.multistream.streams import Streams


class StreamDrafter(OwnsNoCache):
    """Implements ``Drafter``: trained streams, laid out once for all sessions."""

    name = "multistream"

    def __init__(self, model: Decoder, streams: Streams, plan: StreamPlan, head: DraftHead | None = None) -> None:
        """Draft for ``model``.

        Args:
            model: the target.
            streams: streams trained on it.
            plan: shape of the draft.
            head: what guesses are read with; None is the model's head.

        Raises:
            ConfigError: these streams do not support the plan.
        """
        plan.check_fits(streams.config)
        streams.run_on(model)
        self.model = model
        self.plan = plan
        self.head = DraftHead(model) if head is None else head
        self.chain_plan = ChainPlan(weights=plan.weights, head=self.head)
        self.forward = StreamForwardPass(streams, plan)
        self.forward.prepare(model)
        self.has_feedback = streams.config.feedback and plan.attach == "kept"
        """Whether streams read what verification computed at their node."""
        self.stream_rows = None if plan.threshold else streams.stream_rows(plan.widths, rides=plan.attach == "every")
        """The streams as data for native code, where it can make whole steps; else None."""
        if self.stream_rows is not None and model.backend.chain is not None:
            model.backend.chain.prepare(self.stream_rows, self.chain_plan)
        self.budget = StepBudget()

    def open(self, cache: KVCache) -> StreamState:
        """Return the state of a session that has decoded nothing yet."""
        return StreamState(self)


class StreamState(Forgetful):
    """Implements ``DraftState``: keeps the streams of each slot's last kept node."""

    def __init__(self, drafter: StreamDrafter) -> None:
        """Draft with the streams of ``drafter``."""
        self.drafter = drafter
        self.model, self.plan, self.forward = drafter.model, drafter.plan, drafter.forward
        self.traversal: Traversal = self.forward
        self._kept: dict[int, Tensor] = {}
        """By slot, of the last kept node: its streams (streams, E), or the residual entering the
        insertion layer (E,)."""
        self._final: dict[int, Tensor] = {}
        """By slot, of the same node: the residual after the last layer (E,), for streams with feedback."""

    def propose(self, context: Context) -> Draft | Decided:
        """Return verified steps, or committed tokens with a tree below the root of every slot whose
        streams are known.
        """
        return self._decided(context) or self._drafted(context)

    def _drafted(self, context: Context) -> Draft:
        draft = context.committed()
        room = {
            slot: min(context.max_nodes.get(slot, len(self.plan.widths)), len(self.plan.widths)) for slot in draft.slots
        }
        guessing = [slot for slot in draft.slots if slot in self._kept and room[slot] > 0]
        if not guessing:
            return draft
        kept = torch.stack([self._kept[slot] for slot in guessing])
        if self.plan.attach == "kept":
            kept = self.forward.follow(self.model, guessing, kept, context.cache, self._verified(context, guessing))
        guesses = dict(zip(guessing, self._guesses(kept), strict=True))
        return grown(draft, {slot: every_path(levels[: room[slot]]) for slot, levels in guesses.items()})

    def _decided(self, context: Context) -> Decided | None:
        """Draft and verify several steps in one native call, where one greedy sequence has room for them; else return
        None.
        """
        stream_rows, budget = self.drafter.stream_rows, self.drafter.budget
        slot, *others = context.slots
        if stream_rows is None or others or slot not in self._kept:
            return None
        found = deciding(self.model, context)
        drafts = budget.drafts(context, slot, len(self.plan.widths), self.drafter.chain_plan)
        if found is None or drafts is None or not found.chain.covers(stream_rows):
            return None
        limit, plan = drafts
        root, left = found.root(slot, limit), (self._kept[slot], self._final.get(slot))

        def decide() -> Decided:
            decided, left_now = found.chain.follow(root, stream_rows, left, context.cache, plan, context.ends)
            hidden, rows = decided.passed.hidden, decided.passed.rows
            # what streams leave behind is known of the last row only, and no other is asked for
            every = left_now.expand(len(rows), *left_now.shape)
            if stream_rows.rides:
                return replace(decided, passed=StreamPass(hidden, rows, streams=every))
            return replace(decided, passed=StreamPass(hidden, rows, entering=every))

        return budget.timed(context, decide)

    def _verified(self, context: Context, slots: Sequence[int]) -> Verified | None:
        if not self.drafter.has_feedback:
            return None
        roots = torch.tensor([context.tokens[slot][-1] for slot in slots], device=context.cache.device)
        return Verified(torch.stack([self._final[slot] for slot in slots]), roots)

    def _guesses(self, streams: Tensor) -> list[list[list[int]]]:
        """Return the tokens to try, likeliest first, by slot and stream; only streams of kept nodes pass the head."""
        rows, widths = streams.flatten(0, 1), self.plan.widths
        if max(widths) == 1:
            chosen = self.drafter.head.greedy(rows)[:, None]
        else:
            chosen = self.drafter.head(rows).topk(max(widths)).indices
        levels: list[list[list[int]]] = chosen.view(len(streams), len(widths), -1).tolist()
        return [[tokens[:width] for tokens, width in zip(slot, widths, strict=True)] for slot in levels]

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Keep the streams, or the residual they start from, of each slot's last kept node; prompt chunks have none."""
        if verdict is None:
            return
        assert isinstance(passed, StreamPass), "streams ride on this drafter's own passes"
        left = passed.entering if passed.streams is None else passed.streams
        assert left is not None
        for slot, path in zip(draft.slots, verdict.paths, strict=True):
            self._kept[slot] = left[path[-1]]
            if self.drafter.has_feedback:
                self._final[slot] = passed.hidden[path[-1]]

    def release(self, slots: Sequence[int]) -> None:
        """Forget these slots."""
        for slot in slots:
            self._kept.pop(slot, None)
            self._final.pop(slot, None)
