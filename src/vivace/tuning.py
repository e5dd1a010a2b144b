"""Finding the shape of a draft by measuring: what pays depends on the machine, the kernels and the prompts.

A draft that is long or wide keeps more guesses a pass and costs more to make and to verify. No formula is
asked which wins: plans play against each other and plain decoding, in turns on the same prompts, and half of
them leave after each round while the prompts left for the others double (successive halving, Jamieson &
Talwalkar 2016, arXiv:1502.07943).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

from vivace.decode.shallow import DraftPlan
from vivace.engine import Engine
from vivace.errors import ConfigError
from vivace.evaluate.contest import Question, Run, Take, hold, summarise
from vivace.evaluate.entrants import Entrant

BASELINE = "plain"
_FIRST_PROMPTS = 8
_FINALISTS = 3
_TREES = ((2, 1), (3, 1), (2, 2, 1), (3, 2, 1), (2, 1, 1, 1), (3, 1, 1, 1), (2, 2, 1, 1), (4, 2, 1, 1), (3, 2, 1, 1, 1))


@dataclass(frozen=True)
class Trial:
    """What a plan did in the last round it played."""

    plan: DraftPlan
    run: Run
    num_prompts: int


@dataclass(frozen=True)
class _Player:
    """Fills ``Contestant``: a method under one plan."""

    name: str
    entrant: Entrant

    def answer(self, batch: Sequence[Question]) -> Take:
        return self.entrant.answer(batch)


def candidates(longest: int = 8) -> list[DraftPlan]:
    """Chains of 1 to ``longest`` guesses, chains that stop at an unsure guess, and small trees.

    Raises:
        ConfigError: ``longest`` below 1.
    """
    if longest < 1:
        raise ConfigError(f"the longest chain must be at least 1, found {longest}")
    lengths = range(1, longest + 1)
    chains = [DraftPlan.chain(length) for length in lengths]
    unsure = [DraftPlan((1,) * length, sure) for length in lengths if length in (4, 6, 8) for sure in (0.3, 0.5, 0.7)]
    return [*chains, *unsure, *(DraftPlan(widths) for widths in _TREES if len(widths) <= longest)]


def search(
    engine: Engine,
    method: str,
    plans: Sequence[DraftPlan],
    questions: Sequence[Question],
    *,
    max_new_tokens: int = 64,
    batch_size: int = 1,
    on_round: Callable[[int, int], None] | None = None,
) -> list[Trial]:
    """Let plans play until three are left; those play on all prompts.

    Args:
        engine: the model, with the kernels that will decode.
        method: whose draft it is, such as "multirate".
        plans: who plays.
        questions: prompts; the last round takes all.
        max_new_tokens: longest answer.
        batch_size: prompts decoded together.
        on_round: told before each round how many plans play on how many prompts.

    Returns:
        Every plan's last round, fastest of the last round first, then those that left later before those that
        left earlier.

    Raises:
        ConfigError: no plan or no prompt.
    """
    if not plans or not questions:
        raise ConfigError(f"a search needs a plan and a prompt, found {len(plans)} plans and {len(questions)} prompts")
    plain = Entrant(BASELINE, engine, max_new_tokens)
    players = {plan: _Player(describe(plan), Entrant(method, _planned(engine, plan), max_new_tokens)) for plan in plans}
    left, count, gone = list(players), _FIRST_PROMPTS, list[Trial]()
    while True:
        last = len(left) <= _FINALISTS
        asked = questions if last else questions[:count]
        if on_round is not None:
            on_round(len(left), len(asked))
        records = hold(
            [plain, *(players[plan] for plan in left)], asked, batch_size=batch_size, repeats=3 if last else 1
        )
        runs = summarise(records, BASELINE)[1:]
        trials = [Trial(plan, run, len(asked)) for plan, run in zip(left, runs, strict=True)]
        trials.sort(key=lambda trial: trial.run.tokens_per_s, reverse=True)
        if last:
            return [*trials, *gone]
        kept = max(_FINALISTS, len(left) // 2)
        gone = [*trials[kept:], *gone]
        left = [trial.plan for trial in trials[:kept]]
        count *= 2


def _planned(engine: Engine, plan: DraftPlan) -> Engine:
    """The same engine, drafting after another plan than its adapter's."""
    other = copy(engine)
    other.methods = engine.methods.planned(plan)
    return other


def describe(plan: DraftPlan) -> str:
    """A plan in a few characters: ``chain 4``, ``chain 6 if >= 0.5``, ``tree 2-2-1``."""
    shape = f"chain {len(plan.widths)}" if plan.is_chain else "tree " + "-".join(map(str, plan.widths))
    return f"{shape} if >= {plan.min_confidence:g}" if plan.min_confidence else shape
