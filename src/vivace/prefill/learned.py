"""Scores that are learnt or chosen for one model, and the files in which they lie beside it.

The mean over all heads of what the last token reads (eq. 1 of LazyLLM, arXiv:2407.14057) says little about which
passage a question needs, in a layer low enough to save time. Two other scores of a token look at the tokens of the
prompt that ask: the last ones, the *window*, and the first ones, the *opening*, since some questions stand in front of
their text.

* ``heads``: with how much weight the window reads the token in a few heads of the layer below the point, those that
  find what the answer needs on a user's own prompts (retrieval heads: Wu et al. 2024, arXiv:2404.15574); the opening
  cannot read what is behind it, and does not ask;
* ``taught``: each token q of window and opening looks for its best match in a passage, and the passage has the sum over
  them, ``sum_q w(x_q) max_i (W_q x_q . W_k x_i) / sqrt(r)`` with ``w = log(1 + exp(u . x_q))``: the late interaction
  of ColBERT (Khattab & Zaharia 2020, arXiv:2004.12832) between residuals x at the point, each divided by its root mean
  square. ``W_q``, ``W_k`` of rank r and ``u``, one for the window and one for the opening, are taught (``lessons.py``)
  what the answers of the model's own prompts read in the layers above. This score is ours, not the paper's.

Both are scores of passages (``passages.py``), of which the former takes the token that is read most.

A folder has the form of every adapter (``checkpoint/adapters.py``): its *plan* is the schedule that ``--prefill lazy``
takes where none is given, its *config* the window, the rank and the heads of each layer, its weights the maps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import softplus

from vivace.checkpoint.adapters import load_adapter
from vivace.configuration import build
from vivace.core.config import ModelConfig
from vivace.errors import ConfigError, MismatchError
from vivace.prefill.passages import largest

KIND = "lazy"
WINDOW = 32
"""Tokens at the end of a prompt that are asked what it needs."""
OPENING = 64
"""Tokens at its beginning that are."""
RANK = 64
SIDES = ("query", "key", "weight")
"""Parts of maps, as they are called in a file."""


@dataclass(frozen=True)
class LazyPlan:
    """The schedule of a model."""

    keep: str = "balanced"
    """As ``--keep`` takes it."""


@dataclass(frozen=True)
class HeadsBelow:
    """Heads that find what the window needs."""

    point: int
    """Number of layers below the point; they are heads of the last of these."""
    heads: tuple[int, ...]


@dataclass(frozen=True)
class LazyConfig:
    """What the scores of a model are made from."""

    window: int = WINDOW
    opening: int = 0
    """Tokens at the beginning that are asked; 0 where maps were taught to ask the window alone."""
    rank: int = RANK
    breaks: tuple[int, ...] = ()
    """Tokens that end a line of text."""
    layers: tuple[int, ...] = ()
    """Points for which maps were taught: number of layers below."""
    heads: tuple[HeadsBelow, ...] = ()
    """For each point at which heads were chosen, which."""


@dataclass(frozen=True, eq=False)
class Maps:
    """Low-rank maps of residuals at one point."""

    query: Tensor
    """(r, E)"""
    key: Tensor
    """(r, E)"""

    weight: Tensor
    """(1, E) or (2, E): says how much a token of the window counts, and one of the opening, where that asks."""

    def scores(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the score of each passage, (n, E) -> (P,) float32, where ``lengths`` are those of the parts."""
        x = normed(hidden)
        return self.matches(*self.asking(x, lengths), x, lengths).sum(1)

    def asking(self, x: Tensor, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the tokens of a prompt (n, E) that ask: their residuals (Q, E), and how much each counts (Q,)."""
        sides = (x[len(x) - lengths[-1] :], x[: lengths[0]])[: len(self.weight)]
        counts = [softplus(side @ weight) for side, weight in zip(sides, self.weight, strict=True)]
        return torch.cat(sides), torch.cat(counts)

    def matches(self, asking: Tensor, counts: Tensor, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return how well each passage matches each token that asks.

        Args:
            asking: (Q, E) normed residuals of the tokens that ask.
            counts: (Q,) how much each of them counts.
            x: (n, E) residuals of a prompt.
            lengths: of the prompt's parts.

        Returns:
            (P, Q), weighted.
        """
        found = (x @ self.key.T) @ (asking @ self.query.T).T / sqrt(len(self.key))
        return largest(found, lengths) * counts


def normed(hidden: Tensor) -> Tensor:
    """Return residuals (n, E) in float32, each divided by its root mean square."""
    x = hidden.float()
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


@dataclass(frozen=True, eq=False)
class LearnedScores:
    """The contents of a folder."""

    plan: LazyPlan
    config: LazyConfig
    maps: Mapping[int, Maps]
    """By point."""
    where: Path

    @staticmethod
    def read(folder: Path, base: str) -> LearnedScores:
        """Read a folder.

        Args:
            folder: its path.
            base: ``base_hash`` of the model.

        Raises:
            CheckpointError: it is missing, broken, or of another base or kind.
        """
        written, tensors = load_adapter(folder, base)
        if written["kind"] != KIND:
            raise MismatchError(f"{folder} is an adapter for {written['kind']}, not for prefill {KIND}")
        config = build(LazyConfig, written["config"])
        names = {f"{side}.{layer}" for layer in config.layers for side in SIDES}
        if names != set(tensors):
            raise MismatchError(f"the weights in {folder} do not fit its config.json; train it again")
        # where the window alone asks, its weight was first stored as (E,)
        maps = {
            layer: Maps(*(torch.atleast_2d(tensors[f"{side}.{layer}"]) for side in SIDES)) for layer in config.layers
        }
        return LearnedScores(build(LazyPlan, written["plan"]), config, maps, folder)

    def check_fits(self, model: ModelConfig) -> None:
        """Refuse heads and maps that the model has no place for.

        Raises:
            MismatchError: a head is not there, or maps have another width.
        """
        heads = [head for each in self.config.heads for head in each.heads]
        if not all(0 <= head < model.num_heads for head in heads):
            raise MismatchError(f"{self.where} asks heads {sorted(heads)} of a model that has {model.num_heads}")
        for layer, each in self.maps.items():
            if {each.query.shape[-1], each.key.shape[-1], each.weight.shape[-1]} != {model.width}:
                raise MismatchError(f"the maps of layer {layer} in {self.where} are not for a width of {model.width}")

    def heads(self, point: int) -> tuple[int, ...]:
        """Return the heads that are asked at a point."""
        [found] = [each.heads for each in self.config.heads if each.point == point]
        return found

    def check(self, layer: int, score: str) -> None:
        """Refuse a point for which a score was not learnt.

        Raises:
            ConfigError: the message names the points there are.
        """
        known = sorted(self.maps) if score == "taught" else sorted(each.point for each in self.config.heads)
        if layer not in known:
            there = ", ".join(map(str, known)) or "none"
            raise ConfigError(f"keep scores layer {layer} by {score}; {self.where} has it for {there}", field="keep")


def tensors_of(maps: Mapping[int, Maps]) -> dict[str, Tensor]:
    """Return maps by the names that they have in a file."""
    return {f"{side}.{layer}": getattr(each, side).contiguous() for layer, each in maps.items() for side in SIDES}
