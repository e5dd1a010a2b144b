"""Drafters that know the answer and may choose to be wrong: the adversaries of verification."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vivace.core.seams import Context, Draft, TargetPass, Traversal, Verdict
from vivace.decode.forward import ForwardPass
from vivace.decode.plain import Stateless

Rightness = Callable[[int], bool]
"""Whether the guess for this place of the text is right."""

RIGHTNESS: dict[str, Rightness] = {
    "never": lambda place: False,
    "always": lambda place: True,
    "sometimes": lambda place: place * 2654435761 % 7 < 5,
}


class Scripted(Stateless):
    """Replays known texts: a tree whose widths are ``shape``, one child on the known path, the others wrong."""

    name = "scripted"

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        vocab: int,
        *,
        shape: Sequence[int] = (1, 1, 1, 1),
        is_right: Rightness = RIGHTNESS["always"],
        is_ragged: bool = False,
        heeds_limit: bool = True,
    ) -> None:
        """Know ``texts`` (prompt and continuation, longest first where one begins another)."""
        self.traversal: Traversal = ForwardPass()
        self.texts = [list(text) for text in texts]
        self.vocab = vocab
        self.shape = tuple(shape)
        self.is_right = is_right
        self.is_ragged = is_ragged
        self.heeds_limit = heeds_limit

    def propose(self, context: Context) -> Draft:
        draft = context.committed()
        reach = {slot: self._reach(context, slot) for slot in context.slots}
        leaves = {slot: [root] for slot, root in zip(draft.slots, draft.last_committed().tolist(), strict=True)}
        for depth, width in enumerate(self.shape):
            growing = [slot for slot in context.slots if reach[slot] > depth]
            if not growing:
                break
            below = [(slot, row) for slot in growing for row in leaves[slot]]
            tokens = [self._children(context, draft, slot, row, depth, width) for slot, row in below]
            draft, rows = draft.grow(torch.tensor([row for _, row in below]), torch.tensor(tokens))
            leaves = {slot: [] for slot in growing}
            for place, row in enumerate(rows.tolist()):
                leaves[below[place // width][0]].append(row)
        return draft

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Knows everything already."""

    def _reach(self, context: Context, slot: int) -> int:
        reach = len(self.shape)
        if self.is_ragged:
            reach = (len(context.tokens[slot]) + 3 * slot) % (reach + 1)
        return min(reach, context.max_nodes[slot]) if self.heeds_limit else reach

    def _children(self, context: Context, draft: Draft, slot: int, row: int, depth: int, width: int) -> list[int]:
        tokens = context.tokens[slot]
        place = len(tokens) + depth
        text = next((text for text in self.texts if text[: len(tokens)] == list(tokens)), [])
        right = text[place] if place < len(text) else place % self.vocab
        first = 0 if self.is_right(place) else 1
        children = [(right + first + j) % self.vocab for j in range(width)]
        turn = place % width  # the right one is not always the first
        return children[turn:] + children[:turn]
