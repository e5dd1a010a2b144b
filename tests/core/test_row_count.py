"""Padded calls: every layer sees one number of rows, and the rows asked for are what they were."""

from __future__ import annotations

import pytest
import torch

from tests.core.entries import all_entries
from tests.decode.runs import finish
from tests.decode.tiny_decoders import build, prompts
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Layer
from vivace.core.seams import Draft
from vivace.core.step import Step
from vivace.decode.lookup import PromptLookup
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.kernels.native import NativeBody


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


@pytest.mark.parametrize("is_packed", [False, True])
@torch.inference_mode()
def test_rows_that_only_leave_entries_are_padded_too(monkeypatch, body: NativeBody, is_packed: bool) -> None:
    """What ``store`` writes has the bits of a pass through the layer, and no place beside it is written."""
    model = build(torch.bfloat16).requires_grad_(False)
    if is_packed:
        pack_decoder(model, body)
    rows, stored = [], []
    project = Layer.project

    def recorded(self: Layer, h: torch.Tensor, step: Step) -> torch.Tensor:
        rows.append(len(h))
        return project(self, h, step)

    monkeypatch.setattr(Layer, "project", recorded)
    for row_count in (1, 8):
        cache = model.new_cache(2, 64, row_count=row_count)
        step = Step.of(Draft.committed_only({1: [5, 6, 7]}), cache)
        model.store(model.embed(torch.tensor([5, 6, 7]), step), step, 1)
        stored.append(list(all_entries(cache, 1)))
    assert rows == [3, 8]
    for alone, padded in zip(*stored, strict=True):
        assert torch.equal(alone, padded)
        assert alone[1, :, :3].any()
        assert not alone[1, :, 3:].any()
        assert not alone[0].any()
