"""Several steps in one native call, whoever guesses: models to run them on, an ear for proposals, what all must do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.decode.runs import finish
from tests.decode.tiny_decoders import build, prompts
from tests.decode.wrapped import Wrapped, WrappedState
from vivace.core.cache import KVCache
from vivace.core.config import RopeConfig
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Decoder
from vivace.core.seams import Context, Decided, Draft
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request, StopRule
from vivace.decode.session import Session
from vivace.kernels.native import NativeBody

FIELDS: dict[str, dict[str, object]] = {
    "plain": {},
    "scaled": {"embedding_scale": 3.7, "norm_offset": 1.0},
    "around": {
        **{"norm_placement": "sandwich", "qk_norm": "head", "windows": (9, None, 5) * 2, "logit_softcap": 5.0},
        **{"ropes": (RopeConfig(), RopeConfig(theta=1e6)), "rope_of_layer": (0, 1, 0) * 2},
    },
    "learned": {"positions": "learned", "position_offset": 2, "norm": "layer"},
}
MODELS = tuple(FIELDS)


def packed(name: str, body: NativeBody) -> Decoder:
    """A decoder of six layers whose weights are packed for native kernels."""
    made = build(torch.bfloat16, num_layers=6, seed=3, **FIELDS[name]).requires_grad_(False)
    pack_decoder(made, body)
    return made


@dataclass(eq=False)
class Noting(Wrapped):
    """Fills ``Drafter``: another one, and what it proposed."""

    proposed: list[Draft | Decided] = field(default_factory=list)

    def open(self, cache: KVCache) -> Any:
        """Return a state whose proposals are noted here."""
        return _NotingState(self.proposed, self.drafter.open(cache))

    @property
    def steps(self) -> list[int]:
        """Steps of each proposal that was decided already."""
        return [max(map(len, each.steps)) for each in self.proposed if isinstance(each, Decided)]

    @property
    def rows(self) -> list[tuple[int, ...]]:
        """Given tokens of each proposal by slot."""
        return [(each.draft if isinstance(each, Decided) else each).committed for each in self.proposed]


class _NotingState(WrappedState):
    def __init__(self, proposed: list[Draft | Decided], state: Any) -> None:
        super().__init__(state)
        self._proposed = proposed

    def propose(self, context: Context) -> Draft | Decided:
        self._proposed.append(self._state.propose(context))
        return self._proposed[-1]


def stops_at_every_end(model: Decoder, drafter: Noting) -> None:
    """Nothing is decided behind an end; what lies behind a stop string is forgotten, and the next text is right."""
    prompt = prompts(6, seed=2)[1]
    session = Session(model, num_slots=1, capacity=64, chunk=8, steps_per_call=4)
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
    assert max(drafter.steps) > 1
