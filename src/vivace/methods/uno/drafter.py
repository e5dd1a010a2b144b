"""UNO: low-rank deltas let the model itself draft a block in one pass (SGLang pull request 37667, 2026).

A cycle is two passes of the whole model. In the first, noise rows with the deltas follow the root, whose row has the
model's own weights:

    row 0 = root           predicts x_1 as the model itself does
    row j = noise, j >= 1  predicts x_{j+1}, with low-rank deltas on every projection

In the second pass the model verifies x_1 .. x_K. Nothing else is stored: the second pass overwrites the entries of the
noise rows, so its numbers are those of plain decoding.

What is known of the published system is how it serves: the two passes, the seed row, and a draft that is a chain or the
likeliest nodes of a tree of the rows' marginal distributions (``widths`` and ``nodes`` of the plan). The rest is ours,
because it is not known to us: the input of a noise row is the embedding of token 0 plus one learnt vector; a row reads
the noise rows before it and not those after it, so that drafting is an ordinary chain to the kernels; deltas are
distilled from the frozen model like all drafters here. Where a request samples, guesses are the rows' likeliest tokens
and are not drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vivace.core.cache import KVCache
from vivace.core.config import ModelConfig
from vivace.core.draft_head import DraftHead
from vivace.core.low_rank import PROJECTIONS, LowRank, LowRankDeltas, site_shapes
from vivace.core.model import Decoder
from vivace.core.seams import Context, Draft
from vivace.core.step import Step
from vivace.decode.forward import ForwardPass
from vivace.decode.plain import NoDrafts
from vivace.decode.tree import Node, TreePlan, grown, likeliest, shaped
from vivace.errors import ConfigError


@dataclass(frozen=True)
class UnoConfig:
    """Length of a block, and size of its deltas."""

    block: int = 6
    """Number of guesses of a block: the root's and one of each noise row."""
    rank: int = 16
    """Rank of the deltas on every projection of every layer."""

    def __post_init__(self) -> None:
        if not 2 <= self.block <= 16 or self.rank < 1:
            raise ConfigError(f"block must be between 2 and 16 and rank at least 1, found {self.block} and {self.rank}")


class UnoDeltas(LowRank):
    """Trained weights: the noise and the low-rank deltas, which start at zero; experts get none."""

    def __init__(self, config: UnoConfig, model: ModelConfig) -> None:
        # drawn before the factors, so that a seed gives the same weights as in older versions
        noise = torch.randn(model.width) * 0.02
        super().__init__(site_shapes(model, range(model.num_layers), dict.fromkeys(PROJECTIONS, config.rank)))
        self.config = config
        self.depth = model.num_layers
        self.noise = nn.Parameter(noise)
        """(E,) added to the embedding of token 0."""

    def disturbed(self, embedded: Tensor) -> Tensor:
        """Return noise rows from embeddings of token 0, (n, E) -> (n, E)."""
        return (embedded + self.noise).to(embedded.dtype)


class Uno(NoDrafts):
    """Implements ``Drafter``: it keeps no state, since a block is made from the cache alone."""

    def __init__(self, model: Decoder, weights: UnoDeltas, plan: TreePlan, head: DraftHead | None = None) -> None:
        """Draft for ``model``.

        Raises:
            ConfigError: the plan is deeper than the block.
        """
        super().__init__("uno", ForwardPass())
        if len(plan.widths) > weights.config.block:
            raise ConfigError(f"draft widths {list(plan.widths)} go deeper than a block of {weights.config.block}")
        if model.backend.span is None:
            weights.widen()
        self.model = model
        self.weights = weights
        self.plan = plan
        self._head = DraftHead(model) if head is None else head
        self._deltas: dict[tuple[int, int], LowRankDeltas] = {}

    def propose(self, context: Context) -> Draft:
        """Return the committed tokens, with a block below the root of every slot, all of them from one pass."""
        draft, deepest = context.committed(), len(self.plan.widths)
        room = {slot: min(context.max_nodes.get(slot, deepest), deepest) for slot in draft.slots}
        guessing = {slot: count for slot, count in room.items() if count > 0}
        if not guessing:
            return draft
        fresh = {slot: context.tokens[slot][context.cache.lengths[slot] :] for slot in guessing}
        given = Draft.committed_only(fresh, device=context.cache.device)
        hidden = self.block(given, list(guessing.values()), context.cache)
        return grown(draft, dict(zip(guessing, self._trees(hidden, list(guessing.values())), strict=True)))

    def block(self, given: Draft, counts: Sequence[int], cache: KVCache) -> Tensor:
        """Run the draft pass; return the final residuals of the guessing rows, slot by slot, (sum of counts, E).

        Args:
            given: committed tokens of each slot.
            counts: number of guesses of each slot, the root's included.
            cache: holds the text before them; verification overwrites what this pass stores.
        """
        chains = [[Node(place - 1, 0) for place in range(count - 1)] for count in counts]
        rows = grown(given, dict(zip(given.slots, chains, strict=True)))
        first, step = len(given.tokens), Step.of(rows, cache)
        h = self.model.embed(rows.tokens, step)
        h = torch.cat((h[:first], self.weights.disturbed(h[first:])))
        top = self.model.run(h, replace(step, deltas=(self._deltas_of(first, len(h) - first),)))
        guessing, noise = list[int](), first
        for root, count in zip(given.last_rows, counts, strict=True):
            guessing += [root, *range(noise, noise + count - 1)]
            noise += count - 1
        return top[torch.tensor(guessing, device=top.device)]

    def _deltas_of(self, num_prompt: int, num_noise: int) -> LowRankDeltas:
        """Return the deltas of a call; calls of the same shape share one object."""
        key = (num_prompt, num_noise)
        if key not in self._deltas:
            which = torch.zeros(num_prompt + num_noise, dtype=torch.int64, device=self.weights.device)
            which[:num_prompt] = -1
            self._deltas[key] = self.weights.deltas(which)
        return self._deltas[key]

    def _trees(self, hidden: Tensor, counts: Sequence[int]) -> list[list[Node]]:
        """Return each slot's guesses from the rows that make them."""
        widths, nodes = self.plan.widths, self.plan.nodes
        if self.plan.is_chain and not nodes:
            levels = [[token] for token in self._head.greedy(hidden).tolist()]
            chances = [[1.0]] * len(levels)
        else:
            levels, chances = likeliest(self._head(hidden), max(widths), with_chances=nodes > 0)
        trees, first = list[list[Node]](), 0
        for count in counts:
            rows = range(first, first + count)
            tokens = [levels[row][:width] for row, width in zip(rows, widths, strict=False)]
            likely = [chances[row][:width] for row, width in zip(rows, widths, strict=False)]
            trees.append(shaped(tokens, likely, nodes))
            first += count
        return trees
