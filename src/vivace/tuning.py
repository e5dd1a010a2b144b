"""Finding the shape of a draft by measuring: what pays depends on the machine, the kernels and the prompts.

A draft that is long or wide keeps more guesses a pass and costs more to make and to verify. No formula is
asked which wins: plans play against each other and plain decoding, in turns on the same prompts, and half of
them leave after each round while the prompts left for the others double (successive halving, Jamieson &
Talwalkar 2016, arXiv:1502.07943).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from typing import Any

from vivace.baselines.exits import ExitConfig
from vivace.baselines.lookahead import LookaheadPlan
from vivace.baselines.medusa import MedusaPlan
from vivace.checkpoint.adapters import base_hash, load_adapter, replace_plan, save_adapter
from vivace.decode.shallow import DraftPlan
from vivace.engine import Engine
from vivace.errors import ConfigError
from vivace.evaluate.contest import Question, Run, Take, hold, summarise
from vivace.evaluate.entrants import Entrant
from vivace.methods import AnyPlan
from vivace.multistream.config import MultistreamConfig, StreamPlan, plans_to_try

BASELINE = "plain"
TUNED = ("multirate", "multistream", "medusa", "eagle", "deed", "uno", "layerskip", "lookahead", "draft")
"""Methods whose draft has a shape to find."""
_FIRST_PROMPTS = 8
_FINALISTS = 3
_TREES = ((2, 1), (3, 1), (2, 2, 1), (3, 2, 1), (2, 1, 1, 1), (3, 1, 1, 1), (2, 2, 1, 1), (4, 2, 1, 1), (3, 2, 1, 1, 1))


@dataclass(frozen=True)
class Trial:
    """What a plan did in the last round it played."""

    plan: AnyPlan
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
    """Chains of 1 to ``longest`` guesses, chains that stop at an unsure guess, rough chains, and small trees.

    Raises:
        ConfigError: ``longest`` below 1.
    """
    if longest < 1:
        raise ConfigError(f"the longest chain must be at least 1, found {longest}")
    lengths = range(1, longest + 1)
    chains = [DraftPlan.chain(length) for length in lengths]
    unsure = [DraftPlan((1,) * length, sure) for length in lengths if length in (4, 6, 8) for sure in (0.3, 0.5, 0.7)]
    rough = [DraftPlan((1,) * length, weights=kind) for length in lengths if length >= 3 for kind in ("int8", "q4")]
    return [*chains, *unsure, *rough, *(DraftPlan(widths) for widths in _TREES if len(widths) <= longest)]


def candidates_of(engine: Engine, method: str, longest: int = 8) -> list[AnyPlan]:
    """What to try for a method.

    Args:
        engine: the model with the method's adapter.
        method: its name.
        longest: guesses in a row at most.

    Raises:
        ConfigError: ``longest`` below 1, or the method has no draft to tune.
    """
    if method not in TUNED:
        raise ConfigError(f"{method!r} has no draft to tune; one of {', '.join(TUNED)} has")
    plans = candidates(longest)
    match method:
        case "draft":
            return [plan for plan in plans if plan == DraftPlan.chain(len(plan.widths))]
        case "eagle":
            return [plan for plan in plans if plan == DraftPlan(plan.widths, plan.min_confidence)]
        case "lookahead":
            return [LookaheadPlan(n, w, g) for n in range(3, min(6, longest + 2)) for w, g in ((3, 3), (5, 5), (7, 3))]
        case "multistream":
            streams = MultistreamConfig(**_trained(engine, "multistream"))
            return [plan for plan in plans_to_try(streams) if len(plan.widths) <= longest]
        case "medusa":
            heads = _trained(engine, "medusa").get("heads", longest)
            fit = [plan.widths for plan in plans if len(plan.widths) <= heads and plan == DraftPlan(plan.widths)]
            sparse = [MedusaPlan((5, 4, 3, 2, 2, 1, 1, 1)[:heads], nodes) for nodes in (4, 8, 12, 16, 24)]
            return [*map(MedusaPlan, fit), *sparse]
        case "uno":
            block = min(_trained(engine, "uno").get("block", longest), longest)
            chains = [MedusaPlan((1,) * length) for length in range(1, block + 1)]
            trees = [MedusaPlan((1, 4, 3, 2, 2, *[2] * block)[:block], nodes) for nodes in (4, 8, 12, 16, 24)]
            return [*chains, *trees]
    return list(plans)


def _trained(engine: Engine, kind: str) -> Mapping[str, Any]:
    """What the weights of a kind are for, as their file says; nothing where a model has no folder."""
    folder = engine.methods.adapter_folder(kind)
    return {} if folder is None else load_adapter(folder)[0]["config"]


def keep_plan(engine: Engine, method: str, plan: AnyPlan) -> str:
    """Write a plan down where the method finds it; returns where.

    A method without weights gets a folder that holds nothing else.

    Raises:
        ConfigError: a draft model is no adapter; how far it drafts is said when it is used.
    """
    folder = engine.methods.adapter_folder(method)
    assert folder is not None, "the engine is made from a checkpoint"
    if method == "draft":
        raise ConfigError("a draft model keeps no plan; give --num-draft-tokens where it is used, and --no-keep here")
    if folder.is_dir():
        replace_plan(folder, asdict(plan))
    else:
        gate = max(1, engine.model.config.num_layers // 4)
        config = asdict(ExitConfig(gate)) if method == "layerskip" else {}
        save_adapter(folder, method, base_hash(engine.folder), asdict(plan), config, {})
    return str(folder)


def search(
    engine: Engine,
    method: str,
    plans: Sequence[AnyPlan],
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
    players = {plan: _Player(describe(plan), Entrant(method, planned(engine, plan), max_new_tokens)) for plan in plans}
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


def planned(engine: Engine, plan: AnyPlan) -> Engine:
    """The same engine, drafting after another plan than its adapter's."""
    other = copy(engine)
    other.methods = engine.methods.planned(plan)
    return other


def describe(plan: AnyPlan) -> str:
    """A plan in a few characters: ``chain 4``, ``chain 6 if >= 0.5``, ``tree 2-2-1``, ``N 4 W 5 G 5``."""
    if isinstance(plan, LookaheadPlan):
        return f"N {plan.ngram} W {plan.window} G {plan.guesses}" + ("" if plan.from_prompt else " without the prompt")
    shape = f"chain {len(plan.widths)}" if set(plan.widths) == {1} else "tree " + "-".join(map(str, plan.widths))
    match plan:
        case MedusaPlan(nodes=nodes) if nodes:
            return f"{shape}, the {nodes} likeliest"
        case DraftPlan(min_confidence=sure, weights=weights):
            return shape + (f" if >= {sure:g}" if sure else "") + ("" if weights == "bf16" else f" in {weights}")
        case StreamPlan(threshold=sure, weights=weights):
            above = f"{shape} from {plan.attach} node" + (f" if >= {sure:g}" if sure else "")
            return above + ("" if weights == "bf16" else f" in {weights}")
    return shape
