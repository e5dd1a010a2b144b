"""``vivace train guard``: a head that tells prompts or answers of some categories from all others, learnt in minutes.

Rows are prompts whose reference is the category, or ``ok`` (or none) for what is allowed. The model reads each of them
once. A logistic regression on what it computes is then fitted exactly (L-BFGS), its strength of regularisation chosen
on held-back rows, and the threshold is set where the wanted share of allowed held-back rows is refused.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.adapters.guard.head import Features, GuardHead, HeadConfig, HeadPlan
from vivace.adapters.guard.watch import features_of
from vivace.checkpoint.files import require_folder, require_other
from vivace.core.step import Step
from vivace.decode.guarding import Action
from vivace.engine import Engine
from vivace.errors import ConfigError, UnsupportedError
from vivace.prompts import Prompt
from vivace.train.report import Report

SHOWN = 5
"""Number of references that a message lists."""
OK = "ok"
"""The reference of a row that is allowed."""


@dataclass(frozen=True)
class GuardRecipe:
    """How a guard is trained."""

    where: str = "input"
    """Whether it judges prompts ("input"), or answers ("output"): a row's text is then what was answered."""
    false_refusals: float = 0.05
    """Share of allowed rows that may be refused, by all categories together; it sets the thresholds. Answers count as
    refused where they are after any of their tokens, as in use."""
    action: Action = "block"
    """What follows: "block", or "flag", which only notes it."""
    penalties: tuple[float, ...] = (0.0001, 0.001, 0.01, 0.1, 1.0)
    """Weights of the squared norm of the head that are tried."""
    held_back: float = 0.2
    """Share of the rows on which they are compared and the threshold is set."""
    rows: int = 20000
    """Most rows that are read."""
    longest: int = 1024
    """Longer rows are left out, in tokens."""
    tokens_per_batch: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        if self.where not in ("input", "output"):
            raise ConfigError(f"where is input or output, found {self.where!r}")
        if self.action not in ("block", "flag"):
            raise ConfigError(f"action is block or flag, found {self.action!r}")
        if not 0 < self.false_refusals < 1 or not 0 < self.held_back < 1:
            raise ConfigError("false_refusals and held_back are shares between 0 and 1")
        if not self.penalties or not all(0 < penalty < math.inf for penalty in self.penalties):
            raise ConfigError(f"penalties are above 0 and finite, and at least one, found {list(self.penalties)}")
        if min(self.rows, self.longest, self.tokens_per_batch) < 1:
            raise ConfigError(
                f"rows, longest and tokens_per_batch are above 0, found {self.rows}, {self.longest} and "
                f"{self.tokens_per_batch}"
            )


@dataclass(frozen=True)
class Fitted:
    """How well a category is found on held-back rows."""

    category: str
    num_rows: int
    area: float
    """Area under the curve of hits over false refusals: the share of pairs in the right order."""
    threshold: float
    hits: float
    """Share of the category's rows that are found at the threshold."""


def learn_guard(
    recipe: GuardRecipe, engine: Engine, prompts: Sequence[Prompt], out: Path, report: Report
) -> list[Fitted]:
    """Read rows, fit the head and write it; return how good it is, by category.

    Raises:
        ConfigError: rows are missing, or one has several references, or nothing can be written there.
        UnsupportedError: there are no residuals to read of this model.
    """
    require_other(out, engine.folder, "another folder for the guard")
    require_folder(out)
    if engine.kernels.body is not None or engine.model.encoder is not None:
        raise UnsupportedError("a guard learns from a decoder in PyTorch; load it with kernels='torch'")
    texts, names = _labelled(recipe, engine, prompts)
    categories = tuple(sorted(set(names) - {OK}))
    if not categories or OK not in names:
        counts = [f"{count} of {name}" for name, count in Counter(names).most_common(SHOWN)]
        more = len(set(names)) - len(counts)
        raise ConfigError(
            f"a guard learns from rows of a category (their reference) and from allowed ones (reference {OK!r} or "
            f"none); found {', '.join(counts) or 'none'}{f' and {more} other references' if more else ''}"
        )
    features = read_features(engine, texts, recipe.tokens_per_batch, report)
    held = _held_back(names, recipe)
    wanted = torch.tensor([[name == category for category in categories] for name in names])
    fits = [_best(recipe, features, wanted[:, at], held, report, name) for at, name in enumerate(categories)]
    config = HeadConfig(categories, (recipe.where,) * len(categories))
    untold = HeadPlan((1.0,) * len(categories), recipe.action)
    head = GuardHead(config, untold, torch.stack([w for w, _ in fits]), torch.stack([b for _, b in fits]))
    judged = _as_served(recipe, engine, head, [texts[at] for at in held.nonzero()[:, 0].tolist()], features[held])
    allowed = torch.tensor([name == OK for name in names])[held]
    share = recipe.false_refusals / len(categories)  # what one refuses the others may not, so they share it
    fitted = []
    for at, category in enumerate(categories):
        threshold = lowest_threshold(judged[allowed, at], share)
        hit = judged[wanted[held, at], at]
        found, area = float((hit >= threshold).float().mean()), area_under(hit, judged[allowed, at])
        fitted.append(Fitted(category, int(wanted[:, at].sum()), area, threshold, found))
    replace(head, plan=replace(untold, thresholds=tuple(each.threshold for each in fitted))).save(out, engine.folder)
    return fitted


def lowest_threshold(scores: Tensor, share: float) -> float:
    """Return the lowest threshold at which no more than a share of these scores (n,) is refused.

    Many answers begin alike and have the same score, so it lies above a score and not on it.
    """
    ordered = scores.sort(descending=True).values
    highest = ordered[min(int(share * len(ordered)), len(ordered) - 1)]
    return float(torch.nextafter(highest, torch.tensor(2.0)).clamp(1e-6, 1))


def area_under(hits: Tensor, others: Tensor) -> float:
    """Return the probability that a score of the one kind is above one of the other, ties counting half."""
    ordered = others.sort().values
    below = torch.searchsorted(ordered, hits, right=False) + torch.searchsorted(ordered, hits, right=True)
    return float(below.double().mean() / 2 / len(others))


def _as_served(
    recipe: GuardRecipe, engine: Engine, head: GuardHead, texts: Sequence[Sequence[int]], features: Tensor
) -> Tensor:
    """Return the scores of texts as they are judged in use, (n, categories).

    A prompt is judged as a whole. An answer is judged after every token, and the highest score decides.
    """
    if recipe.where == "input":
        return head.scores(features)
    norm = engine.model.norm

    def highest(rows: Tensor) -> Tensor:
        return head.scores(Features(rows.shape[1]).each(norm(rows).float().cpu())).amax(0)

    return read_texts(engine, texts, recipe.tokens_per_batch, highest)


def read_features(engine: Engine, texts: Sequence[Sequence[int]], at_once: int, report: Report | None) -> Tensor:
    """Return what a head reads of each text, (n, 2 E)."""
    norm = engine.model.norm
    return read_texts(engine, texts, at_once, lambda rows: features_of(norm, rows), report)


@torch.inference_mode()
def read_texts(
    engine: Engine,
    texts: Sequence[Sequence[int]],
    at_once: int,
    read: Callable[[Tensor], Tensor],
    report: Report | None = None,
) -> Tensor:
    """Return what is read from the residuals of each text, (n, ...).

    Args:
        engine: the model.
        texts: in tokens.
        at_once: tokens of texts of one length that are computed together.
        read: returns what is wanted from a text's residuals (tokens, E) after the last layer.
        report: told how it goes.
    """
    model, found = engine.model, [torch.empty(0)] * len(texts)
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    done = 0
    while done < len(order):
        length = len(texts[order[done]])
        same = [place for place in order[done : done + max(1, at_once // length)] if len(texts[place]) == length]
        step = Step.dense(len(same), length, device=model.device)
        tokens = torch.tensor([list(texts[place]) for place in same], device=model.device)
        hidden = model.run(model.embed(tokens.reshape(-1), step), step).view(len(same), length, -1)
        for place, rows in zip(same, hidden, strict=True):
            found[place] = read(rows)
        if report is not None and (done + len(same)) // 1000 > done // 1000:
            report.note(f"read {done + len(same):,} of {len(texts):,} rows")
        done += len(same)
    return torch.stack(found).cpu()


def _labelled(recipe: GuardRecipe, engine: Engine, prompts: Sequence[Prompt]) -> tuple[list[list[int]], list[str]]:
    """Return the rows in tokens, and the category of each."""
    texts, names = [], []
    for row in prompts:
        if len(row.references) > 1:
            raise ConfigError(f"a row of a guard has one category, found {len(row.references)} references")
        if recipe.where == "output" and isinstance(row.request, str):
            tokens = engine.tokenizer.encode(row.request, special=False)
        else:
            tokens = engine.tokenizer.encode_prompt(row.request)
        if 0 < len(tokens) <= recipe.longest:
            texts.append(list(tokens))
            names.append(row.references[0] if row.references else OK)
    order = list(range(len(texts)))
    random.Random(recipe.seed).shuffle(order)
    order = order[: recipe.rows]
    return [texts[place] for place in order], [names[place] for place in order]


def _held_back(names: Sequence[str], recipe: GuardRecipe) -> Tensor:
    """Return which rows are held back: the same share of each category, one at least and not all.

    Raises:
        ConfigError: a category has one row only.
    """
    held, seen = torch.zeros(len(names), dtype=torch.bool), Counter[str]()
    counts = Counter(names)
    for place, name in enumerate(names):
        if counts[name] < 2:
            raise ConfigError(f"category {name!r} has one row; two are needed, and some dozens to learn anything")
        seen[name] += 1
        held[place] = seen[name] <= min(counts[name] - 1, max(1, round(recipe.held_back * counts[name])))
    return held


def _best(
    recipe: GuardRecipe, features: Tensor, wanted: Tensor, held: Tensor, report: Report, category: str
) -> tuple[Tensor, Tensor]:
    """Return the weights (2 E,) and bias of the penalty whose held-back rows are in the best order."""
    train = ~held
    mean, spread = features[train].mean(0), features[train].std(0).clamp_min(1e-6)
    normal = (features - mean) / spread
    tried = []
    for penalty in recipe.penalties:
        weight, bias = fit(normal[train], wanted[train], penalty)
        scores = normal @ weight + bias
        tried.append((area_under(scores[held & wanted], scores[held & ~wanted]), penalty, weight, bias))
    area, penalty, weight, bias = max(tried, key=lambda each: each[0])
    report.note(f"{category}: penalty {penalty:g}, area under the curve {area:.3f} on held-back rows")
    return weight / spread, bias - (weight * mean / spread).sum()


def fit(features: Tensor, wanted: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
    """Fit a logistic regression in which both classes weigh the same, whatever their numbers.

    Args:
        features: (n, f), of mean 0 and deviation 1.
        wanted: (n,) whether a row is of the class.
        penalty: weight of the squared norm, beside the mean loss.

    Returns:
        Weights (f,) and bias.
    """
    target = wanted.double()
    rare = target.mean()
    each = torch.where(wanted, 0.5 / rare, 0.5 / (1 - rare))
    x = features.double()
    weight = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = F.binary_cross_entropy_with_logits(x @ weight + bias, target, weight=each)
        value = value + penalty * weight.square().sum() / 2
        value.backward()
        return value

    optimiser.step(loss)
    return weight.detach().float(), bias.detach().float()
