"""Small mixtures whose experts say what they were told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.families import VOCAB
from vivace.core.model import Decoder
from vivace.core.moe import MixtureOfExperts
from vivace.core.seams import Draft, Verdict, VerifiedStep
from vivace.core.step import Step
from vivace.storage.experts.foresight.config import ForesightConfig, ForesightPlan
from vivace.storage.experts.foresight.drafter import ForesightDrafter
from vivace.storage.experts.foresight.forecast import Forecast
from vivace.storage.experts.foresight.weights import Foresight
from vivace.train.data import TokenBatch

Heard = list[tuple[str, int, tuple[Any, ...]]]
"""What was said to whose experts: they ran, for a prompt or not, were expected, or were foretold."""
Said = tuple[list[set[int]], list[tuple[float, ...]]]
"""Of each mixture, the experts that are expected and the passes that are foretold."""


class Listener:
    """The experts of a layer, as they are, and what they were told."""

    def __init__(self, experts: object, heard: Heard, layer: int) -> None:
        self.experts, self.heard, self.layer = experts, heard, layer

    def fetch(self, chosen: Sequence[int], *, is_prompt: bool) -> Iterator[tuple[int, object]]:
        self.heard.append(("prompt" if is_prompt else "ran", self.layer, tuple(chosen)))
        return self.experts.fetch(chosen, is_prompt=is_prompt)  # type: ignore[attr-defined, no-any-return]

    def prefetch(self, likely: Sequence[int]) -> None:
        self.heard.append(("expected", self.layer, tuple(likely)))

    def predict_reuse(self, passes: Sequence[float]) -> None:
        self.heard.append(("foretold", self.layer, tuple(passes)))


def listening(model: Decoder, patch: pytest.MonkeyPatch) -> Heard:
    """What a model's experts hear from now on."""
    said: Heard = []
    for index, layer in enumerate(model.layers):
        if isinstance(layer.feed_forward, MixtureOfExperts):
            mixture = layer.feed_forward
            listener = Listener(mixture.experts, said, index)
            patch.delitem(mixture._modules, "experts")
            patch.setattr(mixture, "experts", listener, raising=False)
    return said


def foresight(model: Decoder, noise: float = 0.0, **fields: Any) -> Foresight:
    """Weights that were not trained."""
    torch.manual_seed(3)
    made = Foresight(ForesightConfig(**{"rank": 4, "bottleneck": 8, **fields}), model.config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return made


def batch(length: int = 24, count: int = 4) -> TokenBatch:
    """Texts without a prompt."""
    tokens = torch.randint(1, VOCAB, (count, length), generator=torch.Generator().manual_seed(0))
    return TokenBatch(tokens, torch.ones(count, length, dtype=torch.bool))


class Sees:
    """Decoding by a forecast alone, over a cache."""

    def __init__(self, model: Decoder, at_least: float = 0.5) -> None:
        self.model, self.cache = model, model.new_cache(3, 32)
        self.foresight = foresight(model, 0.5, rate=None, forecast=8)
        assert self.foresight.forecast is not None
        self.forecast: Forecast = self.foresight.forecast
        self.drafter = ForesightDrafter(self.foresight, ForesightPlan(at_least=at_least))
        self.drafting = self.drafter.open(self.cache)

    def run(
        self, tokens: dict[int, Sequence[int]], *, kept: Sequence[Sequence[int]] = ((0,),), is_prompt: bool = False
    ) -> Tensor:
        """A pass over tokens of some slots, of which some nodes are kept; where its rows came out."""
        draft = Draft.committed_only(tokens, is_prompt=is_prompt)
        with torch.inference_mode():
            passed = self.drafting.traversal.run(self.model, draft, self.cache, chunk=is_prompt)
        nodes = zip(draft.lists.slot, draft.lists.node, strict=True)
        row_of = {where: row for row, where in enumerate(nodes)}
        paths = tuple(tuple(row_of[s, n] for n in path) for s, path in zip(draft.slots, kept, strict=True))
        verdict = None if is_prompt else Verdict(paths, (0,) * len(paths), ((VerifiedStep(1, ()),),) * len(paths))
        self.drafting.observe(draft, passed, verdict)
        self.cache.commit(list(tokens), kept)
        return passed.hidden

    def ends(self, tokens: Sequence[int]) -> Tensor:
        """Where each row of a text comes out."""
        step = Step.dense(1, len(tokens))
        with torch.inference_mode():
            return self.model.run(self.model.embed(torch.tensor(tokens), step), step)

    def said(self, last: Tensor, token: int) -> Said:
        """What is to be told of each mixture."""
        with torch.inference_mode():
            chosen, passes = self.forecast(last[None], self.model.embed(torch.tensor([token]), Step.dense(1, 1)))
        likely = [set(each.nonzero()[:, 0].tolist()) for each in chosen[0] > 0]
        return likely, [tuple(each.tolist()) for each in passes[0].exp2()]


def check(heard: Heard, expected: Said) -> None:
    """What experts heard is what was to be told."""
    foretold = [told for kind, _, told in heard if kind == "foretold"]
    likely = {layer: set(told) for kind, layer, told in heard if kind == "expected"}
    layers = [layer for kind, layer, _ in heard if kind == "foretold"]
    for mine, theirs in zip(foretold, expected[1], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    assert [likely.get(layer, set()) for layer in layers] == expected[0]
