"""``vivace tune lazy``: the soonest first token at which a pruned prompt still says what the full one says.

Every other way of reading is tuned alike, ``vivace tune gemfilter``, so that each is compared at its best.

Schedules are compared by what they keep of the *likelihood* of each prompt's reference, ``exp(-nll)`` with the mean
over its tokens, which every prompt has and which is paired: all schedules are asked the same. Where a prompt has no
reference the answer of the full reading is one. Schedules are chosen on one half of the prompts and confirmed on the
other.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from math import log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vivace.checkpoint.adapters import base_hash, replace_plan, save_adapter
from vivace.engine import Engine
from vivace.errors import ConfigError
from vivace.options import Options
from vivace.prefill.learned import KIND, LazyConfig, LazyPlan
from vivace.prefill.schedule import PRESETS
from vivace.prefill.table import find_prefill
from vivace.prompts import Prompt

SHARES = (0.5, 0.4, 0.3, 0.2)
"""Shares of the tokens that are tried at each point."""
BEST_HEADS = 3
"""Points at which the heads are tried, the lowest left out where they are many."""
DOUBT = 0.85
"""A schedule that keeps less of the likelihood than this share of the floor after a few prompts is given up."""
NATS = 0.04
"""How much more than ``-log(floor)`` the mean NLL of the references may rise. The sum of likelihoods hangs on the few
prompts that the model is sure of; the mean NLL hangs on the others, so both have to hold."""
FEW = 6
ANSWER = 24
DEPTHS = ("30%", "40%", "50%", "60%")
"""Layers that are tried of a way of reading that prunes once, as shares of the depth."""
ENTRIES = (0.5, 0.2)
"""Shares of the keys and values that are tried where a way selects them, beside all."""


@dataclass(frozen=True)
class LongPrompt:
    """A prompt, and the text whose likelihood counts."""

    prompt: tuple[int, ...]
    reference: tuple[int, ...]


@dataclass(frozen=True)
class Asked:
    """What one schedule made of one prompt."""

    nll: float
    """Of the reference, in nats a token."""
    first_token_s: float
    share: float
    """Layer passes, as a share of a full reading's."""

    @property
    def likelihood(self) -> float:
        """Return the mean probability of a token of the reference (geometric)."""
        return float(torch.tensor(-self.nll).exp())


@dataclass(frozen=True)
class TriedSchedule:
    """A schedule on some of the prompts."""

    keep: str
    num_prompts: int
    speedup: float
    """First token of the full reading over this one, sums over the prompts."""
    kept: float
    """Likelihood of the references over that of the full reading, sums over the prompts."""
    more_nll: float
    share: float


class Forced:
    """A logits processor that lets only one text be written."""

    def __init__(self, num_prompt_tokens: int, tokens: Sequence[int]) -> None:
        """Let ``tokens`` be written behind a prompt."""
        self._first, self._tokens = num_prompt_tokens, tokens

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Leave only the next token of the text."""
        only = torch.full_like(logits, -torch.inf)
        only[:, self._tokens[ids.shape[1] - self._first]] = 0
        return only


def questions(engine: Engine, prompts: Sequence[Prompt], least: int) -> list[LongPrompt]:
    """Return prompts of at least so many tokens, with their references or the full reading's answers."""
    found = []
    for row in prompts:
        tokens = tuple(engine.tokenizer.encode_prompt(row.request, raw=False))
        if len(tokens) < least:
            continue
        if row.references:
            reference = tuple(engine.tokenizer.encode(row.references[0], special=False))[:ANSWER]
        else:
            options: dict[str, Any] = {"method": "plain", "do_sample": False, "max_new_tokens": ANSWER}
            reference = engine.generate(list(tokens), **options)[0].token_ids
        if reference:
            found.append(LongPrompt(tokens, reference))
    return found


def ask(engine: Engine, question: LongPrompt, keep: str | None, name: str = KIND) -> Asked:
    """Return what a schedule of the way of reading ``name`` makes of a prompt; None reads it in full."""
    way: dict[str, Any] = {} if keep is None else {"prefill": name, "keep": keep, "min_prompt": 1}
    length = len(question.reference)
    options = Options.of(
        {"method": "plain", "do_sample": False, "max_new_tokens": length, "ignore_eos": True, "logprobs": True, **way}
    )
    request = engine.request_for(question.prompt, options)
    request = replace(request, processors=(Forced(len(question.prompt), question.reference),), prefix=None)
    result = list(engine.answer(request, options))[-1].result
    assert result is not None
    assert result.logprobs is not None
    full = (len(question.prompt) - 1) * engine.model.config.num_layers
    share = result.stats.num_prompt_layer_passes / full
    return Asked(-statistics.mean(result.logprobs), result.stats.first_token_s, share)


def candidates(engine: Engine, name: str = KIND) -> list[str]:
    """Return schedules to try: layers by shares; of ``lazy`` the paper's presets, and every learnt point."""
    spec = find_prefill(name)
    if spec.prunes_below:
        return [f"0:{share}" for share in SHARES]
    if spec.prunes_once:
        shares = [f"{depth}:{share}" for depth in DEPTHS for share in SHARES]
        return [*shares, *(f"{each}:{part}" for each in shares for part in ENTRIES if spec.has_entries)]
    if not engine.prefills.has_learned:
        return list(PRESETS)
    learned = engine.prefills.learned
    points = sorted(each.point for each in learned.config.heads)[-BEST_HEADS:]
    scored = [(point, "taught") for point in sorted(learned.maps)] + [(point, "heads") for point in points]
    return [*PRESETS, *(f"{point}:{share}:{score}" for point, score in scored for share in SHARES)]


def search(
    engine: Engine,
    schedules: Sequence[str],
    asked: Sequence[LongPrompt],
    floor: float,
    on_tried: Callable[[TriedSchedule, str], None],
    name: str = KIND,
) -> tuple[list[TriedSchedule], TriedSchedule | None]:
    """Try schedules on the even prompts, and confirm the soonest that keeps the floor on the odd ones.

    Args:
        engine: the model.
        schedules: to try.
        asked: prompts.
        floor: share of the full reading's likelihood that has to be kept.
        on_tried: told of each schedule, and of what it was tried on.
        name: the way of reading whose schedules they are.

    Returns:
        All schedules on the first half, the soonest first, and the confirmed one on the other half, or None.

    Raises:
        ConfigError: there are too few prompts.
    """
    halves = asked[::2], asked[1::2]
    if len(halves[1]) < 2:
        raise ConfigError(f"{len(asked)} prompts are too few to choose on one half and confirm on the other; give 4")
    full: list[list[Asked]] = [[], []]
    ask(engine, halves[0][0], None)  # the first run is not timed

    def tried(keep: str, half: int) -> TriedSchedule:
        found = list[Asked]()
        ask(engine, halves[half][0], keep, name)
        for number, question in zip(count(), halves[half]):
            if number == len(full[half]):
                full[half].append(ask(engine, question, None))
            found.append(ask(engine, question, keep, name))
            if half == 0 and number + 1 == FEW and _over(keep, full[0], found).kept < DOUBT * floor:
                break
        return _over(keep, full[half], found)

    trials = []
    for keep in schedules:
        trials.append(tried(keep, 0))
        on_tried(trials[-1], "chosen from")
    trials.sort(key=lambda trial: -trial.speedup)
    for trial in trials:
        if _keeps(trial, floor) and trial.num_prompts == len(halves[0]) and trial.speedup > 1:
            confirmed = tried(trial.keep, 1)
            on_tried(confirmed, "confirmed on")
            if _keeps(confirmed, floor):
                return trials, confirmed
    return trials, None


def _keeps(trial: TriedSchedule, floor: float) -> bool:
    """Return whether a schedule keeps the likelihood of the references, in the sum and in the mean of its logarithm."""
    return trial.kept >= floor and trial.more_nll <= NATS - log(floor)


def _over(keep: str, full: Sequence[Asked], found: Sequence[Asked]) -> TriedSchedule:
    """Return a schedule beside the full reading, over the prompts that it was tried on."""
    full = full[: len(found)]
    return TriedSchedule(
        keep,
        len(found),
        sum(each.first_token_s for each in full) / sum(each.first_token_s for each in found),
        sum(each.likelihood for each in found) / sum(each.likelihood for each in full),
        statistics.mean(each.nll for each in found) - statistics.mean(each.nll for each in full),
        statistics.mean(each.share for each in found),
    )


def keep_schedule(engine: Engine, keep: str) -> Path:
    """Write a schedule as the plan beside the checkpoint, and return the folder."""
    folder = engine.folder / "adapters" / KIND
    plan = asdict(LazyPlan(keep))
    if folder.is_dir():
        replace_plan(folder, plan)
    else:
        save_adapter(folder, KIND, base_hash(engine.folder), plan, asdict(LazyConfig()), {})
    engine.prefills.forget_learned()
    return folder
