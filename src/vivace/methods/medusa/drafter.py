"""Medusa: further heads on the final residual, each for a later token (Cai et al. 2024, arXiv:2401.10774).

With x the normed final residual of the last kept position t, head i = 0, 1, ... guesses the token t + 2 + i (the
model's own head has given t + 1):

    x_i = x + silu(W_i x)          logits_i = U_i x_i

W_i starts at zero, U_i at the model's own head, and the model is frozen (Medusa-1). All heads read the same position,
so their guesses form a tree: every likely token of one head below every likely token of the head before. Verification
is lossless, greedy or sampled (``decode/verify.py``); the paper's typical acceptance, which is not, is left out.

Where we differ: the paper calibrates one fixed tree. Here the plan says how many guesses of each head are tried
(``widths``) and, optionally, that only the ``nodes`` likeliest nodes of the resulting tree are kept, by the heads' own
probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vivace.core.cache import KVCache
from vivace.core.config import ModelConfig
from vivace.core.draft_head import DraftHead
from vivace.core.draft_rows import ChainPlan, HeadRows
from vivace.core.model import Decoder
from vivace.core.seams import Context, Decided, Draft, TargetPass, Traversal, Verdict
from vivace.core.trained import Trained
from vivace.decode.forward import ForwardPass
from vivace.decode.multi_step import StepBudget, deciding
from vivace.decode.plain import Forgetful, OwnsNoCache
from vivace.decode.tree import Node, TreePlan, grown, likeliest, shaped
from vivace.errors import ConfigError


@dataclass(frozen=True)
class MedusaConfig:
    """How many heads there are, and whether each has an output matrix of its own."""

    heads: int = 4
    own_output: bool = True
    """Whether each head has V x E weights of its own, as in the paper; otherwise all read the model's output matrix."""

    def __post_init__(self) -> None:
        if not 1 <= self.heads <= 8:
            raise ConfigError(f"heads must be between 1 and 8, found {self.heads}")


class MedusaHeads(Trained):
    """Trained weights of the heads."""

    def __init__(self, config: MedusaConfig, model: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.mix = nn.Parameter(torch.zeros(config.heads, model.width, model.width))
        """W, (heads, E, E)."""
        own = torch.zeros(config.heads, model.vocab_size, model.width) if config.own_output else None
        self.output = None if own is None else nn.Parameter(own)
        """U, (heads, V, E)."""

    @torch.no_grad()
    def start_from(self, model: Decoder) -> None:
        """Set every head to what the model's own head computes."""
        if self.output is not None:
            self.output.copy_(model.embedding if model.lm_head is None else model.lm_head.get_parameter("weight"))

    def logits(self, head: int, x: Tensor, read: DraftHead) -> Tensor:
        """Return the logits of one head for normed residuals, with gradients: those of the tokens that ``read`` reads,
        (n, E) -> (n, ``num_rows``) float32.
        """
        inner = x + F.silu(F.linear(x, self.mix[head]))
        if self.output is not None:
            own = self.output[head] if read.ids is None else self.output[head, read.ids]
            return F.linear(inner, own).float()
        return read.scores_among(inner)


class Medusa(OwnsNoCache):
    """Implements ``Drafter``: trained heads, laid out once for all sessions."""

    name = "medusa"

    def __init__(self, model: Decoder, heads: MedusaHeads, plan: TreePlan, vocabulary: Tensor | None = None) -> None:
        """Draft for ``model`` with trained heads, on the kernels that run its layers.

        Every head guesses only tokens of ``vocabulary`` (n,); None allows all.

        Raises:
            ConfigError: the plan is deeper than the number of heads.
        """
        count = heads.config.heads
        if len(plan.widths) > count:
            raise ConfigError(f"draft widths {list(plan.widths)} go deeper than the {count} heads that exist")
        self.model = model
        self.plan = plan
        self.depth = len(plan.widths)
        self._mix = model.backend.projection(heads.mix[: self.depth].flatten(0, 1).contiguous())
        shared = DraftHead(model, vocabulary) if heads.output is None else None
        own = [None] * self.depth if heads.output is None else heads.output
        self._heads = [shared or DraftHead(model, vocabulary, weight) for weight in own[: self.depth]]
        self.head_rows = None if plan.nodes else HeadRows(self._mix, tuple(self._heads), plan.widths)
        """The heads as data for native code, where it can make whole steps; else None."""
        if self.head_rows is not None and model.backend.chain is not None:
            model.backend.chain.prepare(self.head_rows, ChainPlan())
        self.budget = StepBudget()

    def open(self, cache: KVCache) -> MedusaState:
        """Return the state of a session that has seen no position yet."""
        return MedusaState(self)

    def trees(self, x: Tensor, room: Sequence[int]) -> list[list[Node]]:
        """Return trees of guesses after normed final residuals x (n, E), each at most ``room`` levels deep."""
        inner = F.silu(self._mix(x)).view(len(x), self.depth, -1) + x[:, None]
        tokens: list[list[list[int]]] = [[] for _ in room]
        chances: list[list[list[float]]] = [[] for _ in room]
        for head, width in enumerate(self.plan.widths):
            found, likely = self._likeliest(head, inner[:, head].contiguous(), width)
            for place in range(len(room)):
                tokens[place].append(found[place])
                chances[place].append(likely[place])
        return [
            shaped(levels[:deep], shares[:deep], self.plan.nodes)
            for levels, shares, deep in zip(tokens, chances, room, strict=True)
        ]

    def _likeliest(self, head: int, x: Tensor, width: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return a head's likeliest tokens for each row, in order, and their probabilities where the plan
        needs them.
        """
        if width == 1 and not self.plan.nodes:
            return self._heads[head].best(x)[:, None].tolist(), [[1.0]] * len(x)
        return likeliest(self._heads[head].scores(x), width, with_chances=self.plan.nodes > 0)


class MedusaState(Forgetful):
    """Implements ``DraftState``: keeps the normed final residual (E,) of each slot's last kept position."""

    def __init__(self, drafter: Medusa) -> None:
        """Draft with the heads of ``drafter``."""
        self.drafter = drafter
        self.traversal: Traversal = ForwardPass()
        self._kept: dict[int, Tensor] = {}

    def propose(self, context: Context) -> Draft | Decided:
        """Return verified steps, or committed tokens with a tree below the root of every slot whose last position was
        seen.
        """
        return self._decided(context) or self._drafted(context)

    def _decided(self, context: Context) -> Decided | None:
        """Draft and verify several steps in one native call, where one greedy sequence has room for them."""
        head_rows, budget = self.drafter.head_rows, self.drafter.budget
        slot, *others = context.slots
        if head_rows is None or others or slot not in self._kept:
            return None
        found = deciding(self.drafter.model, context)
        drafts = budget.drafts(context, slot, self.drafter.depth, ChainPlan())
        if found is None or drafts is None or not found.chain.covers(head_rows):
            return None
        limit, plan = drafts
        root, left = found.root(slot, limit), (self._kept[slot], None)
        decide = lambda: found.chain.follow(root, head_rows, left, context.cache, plan, context.ends)[0]  # noqa: E731
        return budget.timed(context, decide)

    def _drafted(self, context: Context) -> Draft:
        draft, deepest = context.committed(), self.drafter.depth
        room = {slot: min(context.max_nodes.get(slot, deepest), deepest) for slot in draft.slots}
        guessing = [slot for slot in draft.slots if slot in self._kept and room[slot] > 0]
        if not guessing:
            return draft
        kept = torch.stack([self._kept[slot] for slot in guessing])
        trees = self.drafter.trees(kept, [room[slot] for slot in guessing])
        return grown(draft, dict(zip(guessing, trees, strict=True)))

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Keep the residual of each slot's last kept position, also after prompt chunks."""
        last = draft.last_rows if verdict is None else [path[-1] for path in verdict.paths]
        self._kept.update(zip(draft.slots, self.drafter.model.norm(passed.hidden[last]), strict=True))

    def release(self, slots: Sequence[int]) -> None:
        """Forget these slots."""
        for slot in slots:
            self._kept.pop(slot, None)
