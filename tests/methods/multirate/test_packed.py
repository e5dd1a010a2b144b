"""Self-speculation on packed weights: drafts by native spans with terms, the text of plain decoding to the bit."""

from __future__ import annotations

import pytest
import torch

from tests.decode.runs import Result, finish
from tests.decode.tiny_decoders import build, prompts
from vivace.core.config import MoeConfig
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Decoder
from vivace.core.seams import Drafter
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.decode.shallow import DraftPlan
from vivace.kernels.low_bit import Weights
from vivace.kernels.native import NativeBody
from vivace.methods.multirate.config import MultirateConfig
from vivace.methods.multirate.drafter import self_speculation
from vivace.methods.multirate.residual import Accelerator


@pytest.fixture
def model(body: NativeBody) -> Decoder:
    made = build(torch.bfloat16, num_layers=6, seed=3).requires_grad_(False)
    pack_decoder(made, body)
    return made


def run(model: Decoder, drafter: Drafter, *, slots: int, logprobs: bool) -> list[Result]:
    requests = [Request(prompt, 21, drafter, logprobs=logprobs) for prompt in prompts(6, seed=2)]
    return finish(Session(model, num_slots=slots, capacity=64, chunk=8), requests)


@pytest.mark.slow_where(lambda widths, mode, **_: (mode == "lite") != (max(widths) > 1))
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


@pytest.mark.parametrize("weights", ["bf16", "q4"])
def test_drafts_of_a_mixture(body: NativeBody, weights: Weights) -> None:
    """Drafts read quantized copies of the experts too."""
    made = build(torch.bfloat16, num_layers=6, seed=3, moe=MoeConfig(5, 2, 20, True)).requires_grad_(False)
    pack_decoder(made, body)
    fast = Accelerator(MultirateConfig(exit_layer=5, rank=4, bottleneck=8), made.config)
    drafter = self_speculation(
        made, fast.to(torch.bfloat16).requires_grad_(False), DraftPlan((1,) * 3, weights=weights)
    )
    plain = run(made, NoDrafts(), slots=1, logprobs=True)
    for slots in (6, 1):
        found = run(made, drafter, slots=slots, logprobs=True)
        assert [(r.tokens, r.logprobs) for r in found] == [(r.tokens, r.logprobs) for r in plain]
        assert sum(r.stats.num_accepted_draft_tokens for r in found) > 0
