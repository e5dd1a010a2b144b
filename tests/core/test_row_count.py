"""Padded calls: every layer sees one number of rows, and the rows asked for are what they were."""

from __future__ import annotations

import torch

from tests.decode.runs import finish
from tests.decode.tiny_decoders import build, prompts
from vivace.core.model import Layer
from vivace.decode.lookup import PromptLookup
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session


def test_layers_see_one_number_of_rows_and_the_text_stays(monkeypatch) -> None:
    model = build(torch.bfloat16)
    asked = [(prompt, drafter) for prompt in prompts(4) for drafter in (NoDrafts(), PromptLookup())]

    def texts(row_count: int) -> list[tuple[int, ...]]:
        session = Session(model, num_slots=3, capacity=64, row_count=row_count)
        return [result.tokens for result in finish(session, [Request(p, 12, d) for p, d in asked], every=3)]

    usual = texts(1)
    seen = set()
    forward = Layer.forward

    def recorded(self: Layer, h: torch.Tensor, step: object) -> torch.Tensor:
        if step.chunk is None:
            seen.add(len(h))
        return forward(self, h, step)

    monkeypatch.setattr(Layer, "forward", recorded)
    assert texts(32) == usual
    assert seen == {32}
