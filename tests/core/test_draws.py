"""Tokens drawn as the largest perturbed logit: the random bits, the distribution, top-p, and native against PyTorch."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import Tensor

from tests.decode.oracles import chi_square
from vivace.core.draws import Drawing, drawn, gumbels, threefry
from vivace.core.sampling import Sampling, distribution
from vivace.kernels.library import CDrawing, runnable
from vivace.kernels.native import NativeBody

LIKELY = 1e-3
"""p-values above this are agreement; the draws are fixed, so a test that passed passes again."""


@pytest.mark.parametrize(
    ("key", "counters", "words"),
    [
        (0, (0, 0), (0x6B200159, 0x99BA4EFE)),
        (2**64 - 1, (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        (0x03707344_13198A2E, (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_random_bits_are_those_of_the_authors(key: int, counters: tuple[int, int], words: tuple[int, int]) -> None:
    """Known answers of Random123 for Threefry-2x32 with twenty rounds."""
    first, second = threefry(key, *(torch.tensor([counter]) for counter in counters))
    assert (int(first), int(second)) == words


def test_noise_depends_on_seed_position_and_token_only() -> None:
    noise = gumbels(5, 9, torch.arange(64))
    some = torch.tensor([63, 2, 31])
    torch.testing.assert_close(gumbels(5, 9, some), noise[some], rtol=0, atol=0)
    assert not bool((gumbels(5, 10, some) == noise[some]).any())
    assert not bool((gumbels(6, 9, some) == noise[some]).any())


def law(count: int, seed: int, spread: float = 3.0) -> Tensor:
    """Logits (count,) of which some are likely and many are not, one excluded."""
    logits = spread * torch.randn(count, generator=torch.Generator().manual_seed(seed))
    logits[1] = -math.inf
    return logits


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_tokens_are_distributed_as_the_softmax(top_p: float) -> None:
    logits, drawing = law(12, seed=0, spread=1), Drawing(3, temperature=0.8, top_p=top_p)
    counts = torch.bincount(
        torch.tensor([drawn(logits, drawing, position, None) for position in range(2000)]), minlength=12
    )
    want = distribution(logits[None], Sampling(do_sample=True, temperature=0.8, top_p=top_p), [()])[0]
    assert counts[want == 0].sum() == 0
    assert chi_square(counts, want.double()) > LIKELY


def test_a_coupled_guess_is_the_token_as_often_as_the_bound_says() -> None:
    """Two laws at total variation distance d agree in at least (1 - d) / (1 + d) of all positions."""
    target, draft = (
        law(40, seed=1, spread=1.5),
        law(40, seed=1, spread=1.5) + 0.4 * torch.randn(40, generator=torch.Generator().manual_seed(2)),
    )
    d = 0.5 * float((torch.softmax(target, 0) - torch.softmax(draft, 0)).abs().sum())
    same = [drawn(target, Drawing(0, 1.0), at) == drawn(draft, Drawing(0, 1.0), at) for at in range(1500)]
    bound, share = (1 - d) / (1 + d), sum(same) / len(same)
    assert 0.05 < d < 0.4
    assert share > bound - 4 * math.sqrt(bound * (1 - bound) / len(same))
    likeliest = int(draft.argmax())
    assert share > 0.05 + float(torch.softmax(target, 0)[likeliest])


def test_nothing_is_drawn_where_every_token_is_excluded() -> None:
    assert drawn(torch.full((5,), -math.inf), Drawing(0, 1.0), 3) is None
    one = torch.full((5,), -math.inf)
    one[3] = -7.0
    assert {drawn(one, Drawing(0, 1.0, top_p), at) for at in range(50) for top_p in (1.0, 0.2)} == {3}


@pytest.fixture(params=["avx2", "avx512"])
def body(request: pytest.FixtureRequest, library: ctypes.CDLL) -> NativeBody:
    if request.param not in runnable(library):
        pytest.skip(f"this processor has no {request.param}")
    return NativeBody(request.param, library)


def native(body: NativeBody, logits: Tensor, drawing: Drawing, position: int, tokens: Tensor | None = None) -> int:
    key = drawing.key - 2**64 if drawing.key >= 2**63 else drawing.key
    return body.draw(logits, CDrawing(key, 1 / drawing.temperature, drawing.top_p), position, tokens)[0]


def rivals_of(logits: Tensor, drawing: Drawing, position: int, tokens: Tensor | None, *found: int) -> bool:
    """Whether two indices have the same score up to rounding, so that either may be drawn."""
    tokens = torch.arange(len(logits)) if tokens is None else tokens
    scores = logits.double() / drawing.temperature + gumbels(drawing.key, position, tokens)
    return abs(float(scores[found[0]] - scores[found[1]])) < 1e-4


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.05])
@pytest.mark.parametrize("count", [3, 128, 129, 1000])
def test_native_draws_are_the_oracles(body: NativeBody, count: int, top_p: float) -> None:
    is_other = 0
    for position in range(60):
        logits = law(count, seed=position).bfloat16().float()  # rounded logits are often equal
        drawing = Drawing(2**64 - 1 - position, 0.3 + position / 40, top_p)
        got, want = native(body, logits, drawing, position), drawn(logits, drawing, position)
        is_other += got != want
        assert got == want or rivals_of(logits, drawing, position, None, got, want or 0)
    assert is_other <= 1


def test_native_draws_of_a_draft_vocabulary_are_the_oracles(body: NativeBody) -> None:
    tokens = torch.randperm(5000, generator=torch.Generator().manual_seed(0))[:777].sort().values
    for position in range(40):
        logits, drawing = law(777, seed=position), Drawing(position, 0.7)
        got, want = native(body, logits, drawing, position, tokens), drawn(logits, drawing, position, tokens)
        assert got == want or rivals_of(logits, drawing, position, tokens, got, want or 0)


def test_native_draws_say_that_no_token_may_come(body: NativeBody) -> None:
    for scores in (torch.full((300,), -math.inf), torch.full((300,), math.nan)):
        assert native(body, scores, Drawing(0, 1.0, 0.5), 0) == -1
    one = torch.full((300,), -math.inf)
    one[250] = -3.0
    assert {native(body, one, Drawing(0, 1.0, top_p), at) for at in range(300) for top_p in (1.0, 0.2)} == {250}
