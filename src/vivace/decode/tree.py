"""Trees of guesses whose tokens are all known before any of them passes the model."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vivace.core.draft_head import check_size, size_label
from vivace.core.seams import Draft
from vivace.decode.shallow import MAX_NODES, DraftPlan, shape_label
from vivace.errors import ConfigError


class Node(NamedTuple):
    """A guess below another guess or below the root."""

    parent: int
    """Index of the parent in the list of nodes, -1 for the root."""
    token: int


def grown(draft: Draft, trees: Mapping[int, Sequence[Node]]) -> Draft:
    """Return the draft with a tree below the root of each slot in ``trees``; a node's parent precedes it."""
    tokens, slot, node, parent = (list(column) for column in draft.lists)
    for index, root, given in zip(draft.slots, draft.last_rows, draft.committed, strict=True):
        first = len(tokens)
        for place, guess in enumerate(trees.get(index, ())):
            tokens.append(guess.token)
            slot.append(index)
            node.append(given + place)
            parent.append(root if guess.parent < 0 else first + guess.parent)
    rows, slots, nodes, parents = torch.tensor((tokens, slot, node, parent), device=draft.device)
    return Draft(draft.slots, draft.committed, rows, slots, nodes, parents)


def every_path(levels: Sequence[Sequence[int]]) -> list[Node]:
    """Return the tree in which every token of a level stands below every token of the level above, level by level."""
    nodes: list[Node] = []
    leaves = [-1]
    for level in levels:
        above, leaves = leaves, []
        for leaf in above:
            for token in level:
                leaves.append(len(nodes))
                nodes.append(Node(leaf, token))
    return nodes


def likeliest_paths(levels: Sequence[Sequence[int]], chances: Sequence[Sequence[float]], count: int) -> list[Node]:
    """Return the ``count`` likeliest nodes of ``every_path``. A node's probability is the product along its path.

    Args:
        levels: tokens of each depth, likeliest first.
        chances: their probabilities, assumed independent of the tokens above.
        count: largest number of nodes.
    """
    nodes: list[Node] = []
    waiting = [(-math.log(max(chances[0][0], 1e-30)), 0, 0, -1, 0)] if levels and levels[0] else []
    turn = 0
    while waiting and len(nodes) < count:
        cost, _, depth, parent, rank = heapq.heappop(waiting)
        nodes.append(Node(parent, levels[depth][rank]))
        own = -math.log(max(chances[depth][rank], 1e-30))
        if rank + 1 < len(levels[depth]):  # its next sibling
            turn += 1
            sibling = cost - own - math.log(max(chances[depth][rank + 1], 1e-30))
            heapq.heappush(waiting, (sibling, turn, depth, parent, rank + 1))
        if depth + 1 < len(levels):  # its likeliest child
            turn += 1
            child = cost - math.log(max(chances[depth + 1][0], 1e-30))
            heapq.heappush(waiting, (child, turn, depth + 1, len(nodes) - 1, 0))
    return nodes


def shaped(levels: Sequence[Sequence[int]], chances: Sequence[Sequence[float]], count: int) -> list[Node]:
    """Return the ``count`` likeliest nodes of ``every_path``, or all of them if ``count`` is 0 (see
    ``likeliest_paths``).
    """
    return likeliest_paths(levels, chances, count) if count else every_path(levels)


def likeliest(logits: Tensor, width: int, *, with_chances: bool) -> tuple[list[list[int]], list[list[float]]]:
    """Return the likeliest tokens of each row, in order, and their probabilities (their logits without
    ``with_chances``).

    Args:
        logits: (n, V).
        width: number of tokens per row; a row of fewer gives all of them.
        with_chances: whether probabilities are wanted, which cost a sum over the vocabulary.
    """
    values, tokens = logits.topk(min(width, logits.shape[-1]))
    if with_chances:
        values = (values - logits.logsumexp(-1, keepdim=True)).exp()
    return tokens.tolist(), values.tolist()


@dataclass(frozen=True)
class TreePlan:
    """The shape of a draft whose levels are guessed independently."""

    widths: tuple[int, ...] = (3, 2, 1, 1)
    """For each depth: number of likeliest tokens that are tried."""
    nodes: int = 0
    """Of all paths through these tokens only this many nodes, the likeliest; 0 takes all."""
    vocabulary: int = 0
    """Number of tokens that may be guessed, the most frequent ones of the draft vocabulary; 0 allows all."""

    def __post_init__(self) -> None:
        if self.nodes < 0 or self.nodes > MAX_NODES:
            raise ConfigError(f"nodes must be between 0 and {MAX_NODES}, found {self.nodes}")
        if not self.widths or min(self.widths) < 1:
            raise ConfigError(f"draft widths must be positive and at least one, found {list(self.widths)}")
        check_size(self.vocabulary)
        if self.nodes and max(self.widths) > MAX_NODES:
            raise ConfigError(f"draft widths must be at most {MAX_NODES}, found {list(self.widths)}")
        if not self.nodes:
            DraftPlan(self.widths)  # refuses what is too large

    @property
    def is_chain(self) -> bool:
        """Return whether there is one guess per depth."""
        return set(self.widths) == {1}

    @property
    def label(self) -> str:
        """Return a short description: ``tree 3-2-1-1``, ``tree 5-4-3, the 12 likeliest``."""
        likeliest = f", the {self.nodes} likeliest" if self.nodes else ""
        return shape_label(self.widths) + likeliest + size_label(self.vocabulary)
