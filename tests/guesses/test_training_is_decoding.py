"""What every drafter computes while it decodes is what its training objective computes at the same positions.

Text is safe whatever a drafter says, so nothing but tests like these notices one that decodes with other numbers than
it was trained with: it drafts worse, and decoding is slower. Decoding runs in sessions, for one text and for ragged
ones together, from the prompt on and behind a cached prefix, on PyTorch in float32 and on native kernels in bfloat16.
Training runs its own objective on PyTorch in float32 with the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.decode.tiny_decoders import VOCAB, build
from tests.guesses.listening import Ears, Listening, Proposal, repeated
from tests.guesses.methods import METHODS, make
from tests.guesses.trained import Trained, longest
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Decoder
from vivace.decode.prefix import PrefixCache
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.kernels.native import NativeBody

CHUNK = 8
LENGTHS = (5, 18, 1, 26)
"""Of the prompts: within a chunk, behind several, and none to be read."""


@pytest.fixture
def ears(monkeypatch: pytest.MonkeyPatch) -> Ears:
    made = Ears()
    made.put_on(monkeypatch)
    return made


def model_of(dtype: torch.dtype) -> Decoder:
    """Six layers; matrices are half as large as those of other tests, whose sharp attention multiplies rounding."""
    model = build(dtype, num_layers=6, seed=3).requires_grad_(False)
    for parameter in model.layers.parameters():
        if parameter.dim() > 1:
            parameter.mul_(0.5)
    return model


def requests(drafter: Listening, prefix: PrefixCache | None = None, count: int = 40) -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    prompts = [tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist()) for length in LENGTHS]
    salted = None if prefix is None else prefix.salted(None)
    return [Request(prompt, count, drafter, prefix=salted, shows_guesses=True) for prompt in prompts]


def heard(session: Session, asked: Sequence[Request], steps: int) -> list[Proposal]:
    """Proposals of the first steps."""
    drafter = asked[0].drafter
    assert isinstance(drafter, Listening)
    drafter.heard.clear()
    for request in asked:
        session.admit(request)
    for _ in range(steps):
        session.step()
    return list(drafter.heard)


class Compared(NamedTuple):
    """How much was compared."""

    rows: int
    guesses: int
    handed: int


def agree(proposals: Sequence[Proposal], trained: Trained, *, repeats: bool, relative: float, logit: float) -> Compared:
    """Compare rows, guesses and what is handed over with training's.

    Args:
        proposals: What was drafted.
        trained: What training makes of it.
        repeats: Texts that repeat themselves are drafted from.
        relative: Distance of two rows that are the same but for rounding, beside their length.
        logit: The same of two logits.
    """
    counts = [0, 0, 0]
    for proposal in proposals:
        if repeats and (known := repeated(proposal.text)):
            (path,) = longest(proposal.guesses)
            assert (*path, *proposal.guesses[path]) == known
            continue
        expected, count = trained.rows(proposal), len(proposal.text)
        for path, guesses in proposal.guesses.items():
            if path in proposal.rows:
                away = distance(proposal.rows[path], expected[path])
                assert away < relative, f"the row behind {path} of {count} tokens is {away:.3g} away"
                counts[0] += 1
            said = trained.logits(path, expected[path])
            least = float(said.topk(len(guesses)).values[-1]) - logit
            for token in guesses:
                short = least - float(said[token])
                assert short <= 0, f"guess {token} behind {path} of {count} tokens is {short:.3g} too unlikely"
                counts[1] += 1
        for path, row in proposal.handed.items():
            away = distance(row, trained.final([*proposal.text, *path], proposal.entry_layer)[-1])
            assert away < relative, f"what {path} of {count} tokens hands over is {away:.3g} away"
            counts[2] += 1
    return Compared(*counts)


def distance(row: Tensor, expected: Tensor) -> float:
    """Of two residuals (E,), beside their length."""
    return float((row.float() - expected).norm() / expected.norm())


EXACTLY = {"relative": 1e-3, "logit": 1e-3}
ROUNDED = {"relative": 0.06, "logit": 0.1}
"""bfloat16 through six layers leaves rows .01 to .05 away, and logits, which spread by 1.5, up to .05 short."""


def is_a_variant(name: str) -> bool:
    """Whether a drafter is another one of the same method: a tree beside a chain, or settings of their own."""
    return " " in name and not name.endswith(" chain")


@torch.no_grad()
@pytest.mark.slow_where(lambda name, slots: slots == 1 and is_a_variant(name))
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("name", METHODS)
def test_on_pytorch(ears: Ears, name: str, slots: int) -> None:
    model = model_of(torch.float32)
    drafter, trained = make(METHODS[name], model, model, ears)
    listening = METHODS[name].heard(drafter, ears)
    session = Session(model, num_slots=slots, capacity=96, chunk=CHUNK)
    asked = requests(listening)
    found = heard(session, asked if slots > 1 else asked[1:2], 6)
    counts = agree(found, trained, repeats=listening.repeats, **EXACTLY)
    assert counts.guesses >= 2 * len(found) > 4 * slots
    assert counts.rows > len(found)
    assert bool(counts.handed) == name.startswith(("multirate", "deed", "layerskip"))


@torch.no_grad()
@pytest.mark.slow_where(lambda name, kept: is_a_variant(name))
@pytest.mark.parametrize("kept", [16, 26], ids=["begun", "repeated"])
@pytest.mark.parametrize("name", METHODS)
def test_behind_a_cached_prefix(ears: Ears, name: str, kept: int) -> None:
    """Of prompts that begin like earlier ones, and of whole prompts that were there before."""
    model = model_of(torch.float32)
    drafter, trained = make(METHODS[name], model, model, ears)
    listening = METHODS[name].heard(drafter, ears)
    prefix = PrefixCache(model.config, chunk=CHUNK, max_bytes=1 << 30)
    session = Session(model, num_slots=4, capacity=96, chunk=CHUNK)
    heard(session, requests(listening, prefix), 4)
    session = Session(model, num_slots=4, capacity=96, chunk=CHUNK)
    asked = [
        replace(request, tokens=(*request.tokens[:kept], *(token ^ 1 for token in request.tokens[kept:])))
        for request in requests(listening, prefix)
    ]
    found = heard(session, asked, 4)
    assert prefix.num_hits >= 2 * 16
    counts = agree(found, trained, repeats=listening.repeats, **EXACTLY)
    assert counts.guesses >= 2 * len(found) > 12
    assert counts.rows > len(found)


AT_ONCE = ("multirate chain", "multirate knowing chain", "multirate unsure", "multirate+lookup", "deed chain")


@torch.no_grad()
@pytest.mark.parametrize("name", METHODS)
def test_on_native_kernels(ears: Ears, body: NativeBody, name: str) -> None:
    """Every draft step by step, so that its rows can be heard."""
    found, counts = on_native(ears, body, name, at_once=False)
    assert counts.guesses >= 2 * found > 12
    assert counts.rows > found


@torch.no_grad()
@pytest.mark.parametrize("name", AT_ONCE)
def test_chains_in_one_native_call(ears: Ears, body: NativeBody, name: str) -> None:
    """Nobody hears their rows: what they guess and what they hand over is compared."""
    found, counts = on_native(ears, body, name, at_once=True)
    assert counts.guesses >= 2 * found > 12
    assert counts.handed > found


def on_native(ears: Ears, body: NativeBody, name: str, *, at_once: bool) -> tuple[int, Compared]:
    """Draft for ragged texts on native kernels; the number of proposals, and what was compared."""
    target, exact = model_of(torch.bfloat16), model_of(torch.bfloat16).float()
    pack_decoder(target, body)
    if not at_once:
        target.backend.chain = None
    drafter, trained = make(METHODS[name], target, exact, ears)
    listening = METHODS[name].heard(drafter, ears)
    found = heard(Session(target, num_slots=4, capacity=96, chunk=CHUNK), requests(listening), 4)
    return len(found), agree(found, trained, repeats=listening.repeats, **ROUNDED)
