"""Rivals on packed weights: the text of plain decoding to the bit; chains drafted at once are those of the steps."""

from __future__ import annotations

import pytest
import torch

from tests.decode.runs import Result, finish
from tests.decode.tiny_decoders import build, prompts
from tests.methods.rivals.conftest import RIVALS, rival
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Decoder
from vivace.core.seams import Drafter
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.kernels.native import NativeBody
from vivace.methods.skipdecode.drafter import SkipDecode, SkipPlan

COUNT = 18


@pytest.fixture
def model(body: NativeBody) -> Decoder:
    made = build(torch.bfloat16, num_layers=4, seed=3).requires_grad_(False)
    pack_decoder(made, body)
    return made


def run(model: Decoder, drafter: Drafter, slots: int) -> list[Result]:
    requests = [Request(prompt, COUNT, drafter) for prompt in prompts(4, seed=2)]
    return finish(Session(model, num_slots=slots, capacity=64, chunk=8), requests)


@pytest.mark.parametrize("name", RIVALS)
def test_text_of_plain_decoding(model: Decoder, name: str) -> None:
    plain = run(model, NoDrafts(), 1)
    unpacked = build(torch.bfloat16, num_layers=4, seed=3)
    drafter = rival(name, unpacked, on=model)
    for slots in (1, 4):
        found = run(model, drafter, slots)
        assert [r.tokens for r in found] == [r.tokens for r in plain]
        assert sum(r.stats.num_draft_tokens for r in found) > 20


@pytest.mark.parametrize("name", ["deed chain", "layerskip"])
def test_a_chain_in_one_call_is_the_chain_in_steps(model: Decoder, name: str) -> None:
    drafter = rival(name, build(torch.bfloat16, num_layers=4, seed=3), on=model)
    counts = []
    for chain in (model.backend.chain, None):
        model.backend.chain = chain
        counts.append([(r.stats.num_draft_tokens, r.stats.num_accepted_draft_tokens) for r in run(model, drafter, 2)])
    assert counts[0] == counts[1]


def test_a_schedule_of_all_layers_is_plain_decoding(model: Decoder) -> None:
    assert [r.tokens for r in run(model, SkipDecode(model, SkipPlan(4, 4, 3)), 3)] == [
        r.tokens for r in run(model, NoDrafts(), 3)
    ]
    assert run(model, SkipDecode(model, SkipPlan(4, 2, 3)), 3)
