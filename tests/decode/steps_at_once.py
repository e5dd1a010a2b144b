"""Drafters that make several steps in one native call, whoever guesses: models to run them on, and what all must do."""

from __future__ import annotations

import pytest
import torch

from tests.decode.runs import finish
from tests.decode.tiny_decoders import build, prompts
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Decoder
from vivace.core.seams import Context, Draft, Drafter
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request, StopRule
from vivace.decode.session import Session
from vivace.kernels.native import NativeBody

MODELS = ("plain", "scaled")


def packed(name: str, body: NativeBody) -> Decoder:
    """For a body; the one that is scaled has an embedding that is multiplied and a norm that is shifted."""
    fields = {"embedding_scale": 3.7, "norm_offset": 1.0} if name == "scaled" else {}
    made = build(torch.bfloat16, num_layers=6, seed=3, **fields).requires_grad_(False)
    pack_decoder(made, body)
    return made


def steps_of(kind: type, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps made in each call from now on in which drafters of this kind drafted and verified."""
    made: list[int] = []
    ahead = kind._ahead  # type: ignore[attr-defined]

    def noting(self: Drafter, context: Context) -> Draft | None:
        draft: Draft | None = ahead(self, context)
        made.extend([] if draft is None else [len(draft.passes[0].kept)])
        return draft

    monkeypatch.setattr(kind, "_ahead", noting)
    return made


def stops_at_every_end(model: Decoder, drafter: Drafter, steps: list[int]) -> None:
    """Nothing is decided behind an end; what lies behind a stop string is forgotten, and the next text is right."""
    prompt = prompts(6, seed=2)[1]
    session = Session(model, num_slots=1, capacity=64, chunk=8)
    [plain] = finish(session, [Request(prompt, 21, NoDrafts())])
    for end in set(plain.tokens):
        upto = plain.tokens[: plain.tokens.index(end) + 1]
        for stop in (
            StopRule(end_tokens=frozenset([end])),
            StopRule(stop_strings=(chr(end + 40),), detokenize=lambda ids: "".join(chr(i + 40) for i in ids)),
        ):
            [result] = finish(session, [Request(prompt, 21, drafter, stop=stop)])
            assert (result.tokens, result.reason) == (upto, "stop")
            assert not session.cache.lengths[0]
    [result] = finish(session, [Request(prompt, 21, drafter)])
    assert result.tokens == plain.tokens
    assert max(steps) > 1
