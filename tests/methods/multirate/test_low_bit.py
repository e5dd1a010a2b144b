"""Self-speculation on weights in few bits: chains are the steps to the bit, and the text is plain decoding's."""

from __future__ import annotations

import pytest
import torch

from tests.decode.tiny_decoders import build
from tests.methods.multirate.test_chain import (  # noqa: F401 - collected here with this file's model
    chains,
    test_chain_and_steps_are_one_to_the_bit,
    test_unsure_guesses_end_their_chains_alike,
)
from tests.methods.multirate.test_packed import run
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Decoder
from vivace.decode.plain import NoDrafts
from vivace.decode.shallow import DraftPlan
from vivace.kernels.native import NativeBody
from vivace.methods.multirate.drafter import self_speculation


@pytest.fixture(params=["int8", "q4", "lut4", "exact12"])
def model(request: pytest.FixtureRequest, body: NativeBody) -> Decoder:
    made = build(torch.bfloat16, num_layers=6, seed=3, embedding_scale=3.7).requires_grad_(False)
    pack_decoder(made, body, request.param)
    return made


def test_text_and_probabilities_of_plain_decoding(model: Decoder, accelerator, chains: list[bool]) -> None:  # noqa: F811
    plain = run(model, NoDrafts(), slots=1, logprobs=True)
    for gate, noise in ((3, 0.3), (5, 0.0)):
        drafter = self_speculation(model, accelerator(torch.bfloat16, noise=noise, exit_layer=gate), DraftPlan.chain(4))
        for slots in (6, 1):
            found = run(model, drafter, slots=slots, logprobs=True)
            assert [r.tokens for r in found] == [r.tokens for r in plain]
            assert [r.logprobs for r in found] == [r.logprobs for r in plain]
    assert all(chains)
