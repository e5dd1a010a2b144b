"""Self-speculation on packed weights: drafts by native spans with terms, the text of plain decoding to the bit."""

from __future__ import annotations

import pytest
import torch

from tests.decode.runs import Result, finish
from tests.decode.tiny_decoders import build, prompts
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Decoder
from vivace.core.seams import Drafter
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.decode.shallow import DraftPlan
from vivace.kernels.native import NativeBody
from vivace.methods.multirate.drafter import self_speculation


@pytest.fixture
def model(body: NativeBody) -> Decoder:
    made = build(torch.bfloat16, num_layers=6, seed=3).requires_grad_(False)
    pack_decoder(made, body)
    return made


def run(model: Decoder, drafter: Drafter, *, slots: int, logprobs: bool) -> list[Result]:
    requests = [Request(prompt, 21, drafter, logprobs=logprobs) for prompt in prompts(6, seed=2)]
    return finish(Session(model, num_slots=slots, capacity=64, chunk=8), requests)


@pytest.mark.parametrize("widths", [(1, 1, 1, 1), (3, 2, 1)], ids=str)
@pytest.mark.parametrize("mode", ["delta", "lite"])
def test_text_and_probabilities_of_plain_decoding(model: Decoder, accelerator, widths, mode) -> None:
    plain = run(model, NoDrafts(), slots=1, logprobs=True)
    accepted = 0
    for gate, noise in ((3, 0.3), (5, 0.0)):
        fast = accelerator(torch.bfloat16, noise=noise, mode=mode, exit_layer=gate)
        drafter = self_speculation(model, fast, DraftPlan(widths))
        for slots, logprobs in ((6, True), (2, False), (1, True)):
            found = run(model, drafter, slots=slots, logprobs=logprobs)
            assert [r.tokens for r in found] == [r.tokens for r in plain]
            assert not logprobs or [r.logprobs for r in found] == [r.logprobs for r in plain]
            accepted += sum(r.stats.num_accepted_draft_tokens for r in found)
    assert accepted > 0
