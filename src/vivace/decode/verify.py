"""Which drafted tokens are kept, and why the text is exactly what plain decoding would have written.

Words: a guess of the draft is *accepted* when verification keeps it. The token after the last accepted guess is
*recovered* when it replaces a rejected guess, and *bonus* when no guess stood there. Every step emits the accepted
tokens and one recovered or bonus token, so at least one token.

Greedy. ``chosen[r]`` is the argmax of the target's logits after row r. From the root the path descends to the child
whose token is ``chosen[r]`` as long as there is one, and then emits ``chosen[r]`` itself. Each emitted token is the
target's argmax after the text before it, and the logits of a row have the same bits as in plain decoding (a rule of
``kernels/reference.py``). So the text is the same token for token.

Sampling. ``P`` is the target's distribution after row r, with processors applied to the row's own prefix.

* Deterministic guesses are point masses: draw ``y ~ P``; descend if a child has token y, else emit it. The token at
  this position is y in both cases, hence distributed as P.
  Where nothing but a temperature and top-p changes the logits, native code draws y as the largest perturbed logit, with
  noise that belongs to the position (``core/draws.py``). A guess may then have been chosen with the same noise: y is
  the same whatever was guessed.
* Guesses drawn from a distribution ``q`` (speculative sampling, Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1;
  several independent children: recursive rejection, Miao et al. 2023, arXiv:2305.09781): a child x is accepted with
  probability ``min(1, P(x) / q(x))``; after a rejection ``P <- norm(max(P - q, 0))`` and the next child is tried; when
  no child is left, the token is drawn from the remaining P. For one child,
  ``Pr[y] = q(y) min(1, P(y)/q(y)) + (1 - sum_x min(P(x), q(x))) max(P(y) - q(y), 0) / Z``, and since
  ``Z = 1 - sum_x min(P(x), q(x))`` this is ``min(P, q)(y) + max(P - q, 0)(y) = P(y)``. Further children repeat the
  argument with the remaining distribution, which the rejected mass must follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from vivace.core.sampling import sample, uniform
from vivace.core.seams import Draft, Verdict, VerifiedStep
from vivace.decode.isolation import blaming

Guess = tuple[int, int, float]
"""(row, token, probability with which it was drawn)."""


def verify_greedy(draft: Draft, chosen: Sequence[int]) -> Verdict:
    """Keep, in each slot, the path that the target's argmax follows.

    Args:
        draft: committed tokens and guesses, T rows.
        chosen: (T,) the target's most likely token after each row.
    """
    tokens = draft.lists.tokens
    children = children_of(draft)
    paths, following = [], []
    for root in draft.last_rows:
        path = draft.path(root)
        row = root
        while (child := _carrying(chosen[row], children[row], tokens)) is not None:
            path.append(child)
            row = child
        paths.append(tuple(path))
        following.append(chosen[row])
    return _verdict(draft, paths, following)


class TargetRows(Protocol):
    """The target's distribution (V,) after each row of a draft; a tensor (T, V) is one."""

    def __getitem__(self, row: int, /) -> Tensor:
        """Return the distribution after a row."""
        ...


Draw = Callable[[int, int, int], int | None]
"""Draws the token after a row of a slot's draft, which ``n`` draft rows precede, itself included: (slot, row, n) to the
token, or None where the slot's tokens are not drawn so, or none may come."""


def verify_sampled(
    draft: Draft, target: TargetRows, generators: Mapping[int, torch.Generator], draw: Draw | None = None
) -> Verdict:
    """Keep, in each slot, a path such that the text is distributed as samples of the target.

    Args:
        draft: committed tokens and guesses, T rows; ``draft.probs`` holds the distribution each guess was drawn from.
        target: (T, V) the target's distribution after each row; rows sum to one and are one-hot for greedy slots. Only
            rows that the text reaches are looked at, each once, from the root down.
        generators: the random numbers of each slot, used by no other.
        draw: draws a token with the noise of its position, where no guess below the row was drawn from a distribution;
            None draws every token with the generators.

    Raises:
        RequestFailed: every token is excluded after a slot's committed tokens.
    """
    tokens = draft.lists.tokens
    chances = [1.0] * len(tokens) if draft.probs is None else _chances(draft.probs, draft.tokens)
    children = children_of(draft)
    paths, following = [], []
    for slot, root in zip(draft.slots, draft.last_rows, strict=True):
        path = draft.path(root)
        row, token = root, None
        while token is None:
            below = children[row]
            if draw is not None and all(chances[child] == 1.0 for child in below):
                drawn = draw(slot, row, len(path))
                child = None if drawn is None else _carrying(drawn, below, tokens)
                if child is not None:
                    path.append(child)
                    row = child
                    continue
                if (token := drawn) is not None:
                    break
            distribution = target[row]
            if row != root and not float(distribution.sum()) > 0:
                # Every token is excluded after an accepted guess. The guess becomes the last token of this step, so
                # that the error is raised where plain decoding raises it: at the next root.
                token = tokens[path.pop()]
                break
            guesses = [(child, tokens[child], chances[child]) for child in below]
            with blaming(slot, "drawing its next token"):
                child, token = _descend(distribution, guesses, draft.probs, generators[slot])
            if child is not None:
                path.append(child)
                row = child
        paths.append(tuple(path))
        following.append(token)
    return _verdict(draft, paths, following)


def _verdict(draft: Draft, paths: Sequence[tuple[int, ...]], following: Sequence[int]) -> Verdict:
    """Return the verdict for one verified step of each slot; each path begins with the committed rows."""
    guessed: dict[int, list[int]] = {slot: [] for slot in draft.slots}
    for slot, depth in zip(draft.lists.slot, draft.depths, strict=True):
        if depth:
            guessed[slot].append(depth)
    slots = zip(draft.slots, draft.committed, paths, strict=True)
    steps = tuple((VerifiedStep(len(path) - given + 1, tuple(guessed[slot])),) for slot, given, path in slots)
    return Verdict(tuple(paths), tuple(following), steps)


def _descend(
    distribution: Tensor, guesses: Sequence[Guess], probs: Tensor | None, generator: torch.Generator
) -> tuple[int | None, int | None]:
    """Return (child to continue from, None), or (None, token that ends the step)."""
    # decided by this slot's own guesses, so that its draws do not depend on what other slots drafted
    if probs is None or all(chance == 1.0 for _, _, chance in guesses):
        drawn = sample(distribution, generator)
        child = next((row for row, token, _ in guesses if token == drawn), None)
        return (None, drawn) if child is None else (child, None)
    for child, token, chance in guesses:
        if uniform(generator) * chance < float(distribution[token]):
            return child, None
        rest = (distribution - probs[child]).clamp(min=0)
        mass = float(rest.sum())
        if mass == 0.0:  # both distributions are equal up to rounding: no mass is left to draw from
            return (child, None) if float(distribution[token]) > 0 else (None, sample(distribution, generator))
        distribution = rest / mass
    return None, sample(distribution, generator)


def _chances(probs: Tensor, tokens: Tensor) -> list[float]:
    """Return the probability (T,) of each guess under the distribution it was drawn from."""
    chances: list[float] = probs.gather(1, tokens[:, None])[:, 0].tolist()
    return chances


def children_of(draft: Draft) -> list[list[int]]:
    """Return the rows below each row, in the order in which they were proposed."""
    parents = draft.lists.parent
    children: list[list[int]] = [[] for _ in parents]
    for row, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(row)
    return children


def _carrying(token: int, rows: Sequence[int], tokens: Sequence[int]) -> int | None:
    return next((row for row in rows if tokens[row] == token), None)
