"""Lookahead decoding: n-grams that the model itself produces while decoding (Fu et al. 2024, arXiv:2402.02057).

Two kinds of branches pass the model beside the root. The *window* is a Jacobi iteration of W columns and N - 1 levels:
the token of level j in column i stands at position i + 1 + j after the root, and was the model's answer to level j - 1
one pass ago. After a pass the top level has new answers; every column with its answer is an n-gram for the *pool*, and
the levels move down by one. *Verification* branches are the n-grams of the pool that begin with the root. There are no
weights and no training.

In the tree of a draft, level 0 is a chain below the root, and the rest of a column hangs below its node of level 0. So
the window needs no attention mask of its own, and a node of the window that happens to be right is accepted as well.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Context, Draft, TargetPass, Traversal, Verdict
from vivace.decode.forward import ForwardPass
from vivace.decode.memory import DRAFT_SLACK
from vivace.decode.plain import Forgetful, OwnsNoCache
from vivace.decode.tree import Node, grown
from vivace.errors import ConfigError


@dataclass(frozen=True)
class LookaheadPlan:
    """The three numbers of the paper."""

    ngram: int = 4
    """N: length of the n-grams."""
    window: int = 5
    """W: number of columns of the Jacobi iteration."""
    guesses: int = 5
    """G: number of n-grams that are verified, and kept for each first token."""
    from_prompt: bool = True
    """Whether n-grams of the prompt fill the pool before the first pass, as in the authors' code."""

    def __post_init__(self) -> None:
        if self.ngram < 2 or self.window < 1 or self.guesses < 1:
            raise ConfigError(
                f"lookahead needs ngram >= 2, window >= 1 and guesses >= 1, found {self.ngram}, {self.window} and "
                f"{self.guesses}"
            )
        if self.num_nodes >= DRAFT_SLACK:
            raise ConfigError(
                f"(ngram - 1) x (window + guesses) is {self.num_nodes}; a draft has at most {DRAFT_SLACK - 1} nodes"
            )

    @property
    def num_nodes(self) -> int:
        """Return the largest number of rows of a pass besides the root."""
        return (self.ngram - 1) * (self.window + self.guesses)

    @property
    def label(self) -> str:
        """Return a short description: ``N 4 W 5 G 5``."""
        return f"N {self.ngram} W {self.window} G {self.guesses}" + ("" if self.from_prompt else " without the prompt")


class Pool:
    """N-grams by their first token; of each token, those used last are kept."""

    def __init__(self, plan: LookaheadPlan) -> None:
        self._plan = plan
        self._grams: dict[int, OrderedDict[tuple[int, ...], None]] = {}

    def add(self, gram: Sequence[int]) -> None:
        """Add an n-gram and drop the oldest one of its first token if there are more than G."""
        known = self._grams.setdefault(gram[0], OrderedDict())
        rest = tuple(gram[1:])
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self._plan.guesses:
            known.popitem(last=False)

    def add_text(self, tokens: Sequence[int]) -> None:
        """Add every n-gram of a text."""
        for first in range(len(tokens) - self._plan.ngram + 1):
            self.add(tokens[first : first + self._plan.ngram])

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Return the continuations of a token, latest first."""
        return list(reversed(self._grams.get(token, ())))


@dataclass
class NgramMemory:
    """The pool and the window of one sequence."""

    pool: Pool
    levels: list[list[int]]
    """N - 1 levels of W tokens."""
    grid: list[list[int]] = field(default_factory=list)
    """Nodes of the window in the draft being verified, by level; empty when the draft has no window."""


class Lookahead(OwnsNoCache):
    """Implements ``Drafter``: holds the plan; pools and windows belong to one text each."""

    name = "lookahead"

    def __init__(self, model: Decoder, plan: LookaheadPlan | None = None) -> None:
        self.model = model
        self.plan = LookaheadPlan() if plan is None else plan

    def open(self, cache: KVCache) -> LookaheadState:
        """Return the state of a session that has seen no text yet."""
        return LookaheadState(self.model, self.plan)


class LookaheadState(Forgetful):
    """Implements ``DraftState``: keeps a pool of n-grams and a window for each slot."""

    def __init__(self, model: Decoder, plan: LookaheadPlan) -> None:
        self.model = model
        self.plan = plan
        self.traversal: Traversal = ForwardPass()
        self._memory: dict[int, NgramMemory] = {}

    def propose(self, context: Context) -> Draft:
        """Return the verification branches of every slot and, where there is room for all of it, the window."""
        draft = context.committed()
        trees: dict[int, list[Node]] = {}
        for slot, given in zip(draft.slots, draft.committed, strict=True):
            if slot not in self._memory:
                self._memory[slot] = self._start(context.tokens[slot])
            memory = self._memory[slot]
            room = context.max_nodes.get(slot, self.plan.num_nodes)
            nodes = _branches(memory.pool.after(context.tokens[slot][-1]), room)
            memory.grid = []
            if room >= self.plan.window + self.plan.ngram - 1:
                memory.grid = _add_window(nodes, memory.levels, given)
            trees[slot] = nodes
        return grown(draft, trees)

    def _start(self, tokens: Sequence[int]) -> NgramMemory:
        """Start a window from the last tokens of the text, repeated: any tokens will do."""
        pool = Pool(self.plan)
        if self.plan.from_prompt:
            pool.add_text(tokens)
        span = [tokens[-1 - place % len(tokens)] for place in range(self.plan.window + self.plan.ngram)]
        return NgramMemory(pool, [span[level : level + self.plan.window] for level in range(self.plan.ngram - 1)])

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Read the answers at the top of the windows: they complete n-grams for the pools and become the top level."""
        if verdict is None:
            return
        row_of = {pair: row for row, pair in enumerate(zip(draft.lists.slot, draft.lists.node, strict=True))}
        looking = [slot for slot in draft.slots if slot in self._memory and self._memory[slot].grid]
        tops = [row_of[slot, node] for slot in looking for node in self._memory[slot].grid[-1]]
        if not tops:
            return
        answers = self.model.greedy(passed.hidden[tops]).split(self.plan.window)
        kept = dict(zip(draft.slots, verdict.accepted, strict=True))
        for slot, new in zip(looking, answers, strict=True):
            self._learn(self._memory[slot], new.tolist(), kept[slot])

    def _learn(self, memory: NgramMemory, answers: list[int], accepted: int) -> None:
        """Add the n-grams of a pass, and move the window by one plus the number of accepted tokens."""
        for column, token in enumerate(answers):
            memory.pool.add([*(level[column] for level in memory.levels), token])
        memory.grid = []
        levels = [*memory.levels[1:], answers]
        for level in levels:
            spare = level[-1:] * min(accepted, len(level))
            level[:] = level[min(accepted, len(level)) :] + spare
        memory.levels = levels

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Do nothing: n-grams of the longer text remain valid guesses."""

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Look through the same windows, which then go their own ways."""
        for source, target in zip(sources, targets, strict=True):
            if source in self._memory:
                self._memory[target] = copy.deepcopy(self._memory[source])

    def release(self, slots: Sequence[int]) -> None:
        """Forget these slots."""
        for slot in slots:
            self._memory.pop(slot, None)

    def saved(self) -> object:
        """Return copies of the windows. Pools are not copied: they gain the same n-grams when a pass is run again."""
        return {
            slot: NgramMemory(memory.pool, [list(level) for level in memory.levels], memory.grid)
            for slot, memory in self._memory.items()
        }

    def restore(self, saved: object) -> None:
        """Set the windows back to ``saved``."""
        assert isinstance(saved, dict)
        self._memory = saved


def _branches(grams: Sequence[Sequence[int]], room: int) -> list[Node]:
    """Return the n-grams as a tree with at most ``room`` levels, in which equal beginnings share nodes."""
    nodes: list[Node] = []
    known: dict[Node, int] = {}
    for gram in grams:
        above = -1
        for token in gram[:room]:
            guess = Node(above, token)
            if guess not in known:
                known[guess] = len(nodes)
                nodes.append(guess)
            above = known[guess]
    return nodes


def _add_window(nodes: list[Node], levels: Sequence[Sequence[int]], given: int) -> list[list[int]]:
    """Append the window's nodes; return the node numbers of each level, counted from the slot's first
    committed token.
    """
    above = [-1] * len(levels[0])
    grid: list[list[int]] = []
    for number, level in enumerate(levels):
        places: list[int] = []
        for column, token in enumerate(level):
            parent = (places[-1] if places else -1) if number == 0 else above[column]
            places.append(len(nodes))
            nodes.append(Node(parent, token))
        above = places
        grid.append([given + place for place in places])
    return grid
