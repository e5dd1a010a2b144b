"""Lookahead decoding: n-grams that the model itself makes up while decoding (Fu et al. 2024, arXiv:2402.02057).

Beside the root two kinds of branches go up. The *window* is a Jacobi iteration: W columns of N - 1 levels; the token of
level j in column i stands at place i + 1 + j behind the root and was the model's answer to level j - 1 one pass
ago. After a pass the top level has new answers, every column with its answer is an n-gram for the *pool*, and the
levels move down. *Verification* branches are the pool's n-grams that begin with the root. No training, no weights.

In a tree of drafts level 0 is a chain below the root and the rest of a column hangs below its level-0 node, so the
window needs no mask of its own; where a window node happens to be right, verification keeps it as well.
"""

from __future__ import annotations

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
    """N."""
    window: int = 5
    """W: columns of the Jacobi iteration."""
    guesses: int = 5
    """G: n-grams that are verified, and kept for each first token."""
    from_prompt: bool = True
    """The prompt's own n-grams fill the pool before the first pass, as in the authors' code."""

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
        """Rows of a pass besides the root."""
        return (self.ngram - 1) * (self.window + self.guesses)

    @property
    def label(self) -> str:
        """In a few characters: ``N 4 W 5 G 5``."""
        return f"N {self.ngram} W {self.window} G {self.guesses}" + ("" if self.from_prompt else " without the prompt")


class Pool:
    """N-grams by their first token, those used last kept."""

    def __init__(self, plan: LookaheadPlan) -> None:
        self._plan = plan
        self._grams: dict[int, OrderedDict[tuple[int, ...], None]] = {}

    def add(self, gram: Sequence[int]) -> None:
        """Remember an n-gram."""
        known = self._grams.setdefault(gram[0], OrderedDict())
        rest = tuple(gram[1:])
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self._plan.guesses:
            known.popitem(last=False)

    def add_text(self, tokens: Sequence[int]) -> None:
        """Remember every n-gram of a text."""
        for first in range(len(tokens) - self._plan.ngram + 1):
            self.add(tokens[first : first + self._plan.ngram])

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What followed a token, latest first."""
        return list(reversed(self._grams.get(token, ())))


@dataclass
class NgramMemory:
    """What is remembered of a sequence."""

    pool: Pool
    levels: list[list[int]]
    """N - 1 levels of W tokens."""
    grid: list[list[int]] = field(default_factory=list)
    """Nodes of the window in the draft that is being verified, level by level; empty when it had none."""


class Lookahead(OwnsNoCache):
    """Fills ``Drafter``: the plan; pools and windows are those of one text."""

    name = "lookahead"

    def __init__(self, model: Decoder, plan: LookaheadPlan | None = None) -> None:
        self.model = model
        self.plan = LookaheadPlan() if plan is None else plan

    def open(self, cache: KVCache) -> LookaheadState:
        """State of a session that has read nothing yet."""
        return LookaheadState(self.model, self.plan)


class LookaheadState(Forgetful):
    """Fills ``DraftState``: remembers a pool of n-grams and a window for each slot."""

    def __init__(self, model: Decoder, plan: LookaheadPlan) -> None:
        self.model = model
        self.plan = plan
        self.traversal: Traversal = ForwardPass()
        self._memory: dict[int, NgramMemory] = {}

    def propose(self, context: Context) -> Draft:
        """Verification branches and, while there is room for all of it, the window."""
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
        """The window begins with the text's own last tokens, over and over: any tokens do."""
        pool = Pool(self.plan)
        if self.plan.from_prompt:
            pool.add_text(tokens)
        span = [tokens[-1 - place % len(tokens)] for place in range(self.plan.window + self.plan.ngram)]
        return NgramMemory(pool, [span[level : level + self.plan.window] for level in range(self.plan.ngram - 1)])

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """New answers at the top of the windows: n-grams for the pools, levels one down."""
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
        """Take up a pass; the window moves as far as the text did."""
        for column, token in enumerate(answers):
            memory.pool.add([*(level[column] for level in memory.levels), token])
        memory.grid = []
        levels = [*memory.levels[1:], answers]
        for level in levels:
            spare = level[-1:] * min(accepted, len(level))
            level[:] = level[min(accepted, len(level)) :] + spare
        memory.levels = levels

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """What was seen of a longer text is as good as before: n-grams are guesses."""

    def release(self, slots: Sequence[int]) -> None:
        """Forget these sequences."""
        for slot in slots:
            self._memory.pop(slot, None)

    def saved(self) -> object:
        """The windows; pools gain the same n-grams again when a pass is made again."""
        return {
            slot: NgramMemory(memory.pool, [list(level) for level in memory.levels], memory.grid)
            for slot, memory in self._memory.items()
        }

    def restore(self, saved: object) -> None:
        """Look through those windows again."""
        assert isinstance(saved, dict)
        self._memory = saved


def _branches(grams: Sequence[Sequence[int]], room: int) -> list[Node]:
    """N-grams below the root, those that begin alike sharing nodes."""
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
    """Append the window; the node numbers of each level, counted from the slot's first given token."""
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
