"""A screened head chooses the head's own token, ties and all, whatever it holds and however it is laid out."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vivace.kernels.exact import pack_exact
from vivace.kernels.low_bit import multiply, prepare
from vivace.kernels.native import Matrix, NativeBody, pack
from vivace.kernels.screen import Screen, screen_of

LAYOUTS = ("row_major", "tiles", "exact12_rows", "exact12")


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def laid_out(weight: Tensor, layout: str, bias: Tensor | None, screen: Screen | None) -> Matrix:
    kept = {
        "row_major": lambda: weight,
        "tiles": lambda: pack(weight),
        "exact12_rows": lambda: pack_exact(weight, "exact12_rows"),
        "exact12": lambda: pack_exact(weight),
    }[layout]()
    return Matrix(kept, bias, weight.shape[1], weight.shape[0], screen)


def adversarial(kind: str, outs: int, ins: int, seed: int) -> tuple[Tensor, Tensor]:
    """Weights (outs, ins) and rows (3, ins) that make it hard to tell which output is the largest."""
    weight, x = normal(outs, ins, seed=seed), normal(3, ins, seed=seed + 1)
    if kind == "equal":  # every output ties
        weight = weight[:1].expand(outs, ins).contiguous()
    elif kind == "twins":  # the largest outputs are there several times, and the first of them must win
        weight = weight[torch.arange(outs) % max(1, outs // 3)]
    elif kind == "close":  # outputs differ by less than a unit in the last place of bfloat16
        weight = (weight[:1].float() * (1 + 2.0**-8 * (torch.arange(outs) % 5)[:, None] / 8)).bfloat16()
    elif kind == "outliers":
        weight[:, ::7] *= 200
        x[:, 3::5] *= 1000
    elif kind == "zeros":
        weight[outs // 2 :] = 0
        x[1] = 0
    elif kind == "negative":  # the largest output is below zero
        x = x.abs()
        weight = -weight.abs() - 1
    elif kind == "rounded away":  # whatever differs between outputs is below half a step of the screen
        weight = weight[:1] + normal(outs, ins, seed=seed + 2, scale=0.004)
    return weight.contiguous(), x


KINDS = ("normal", "equal", "twins", "close", "outliers", "zeros", "negative", "rounded away")


@settings(max_examples=120, deadline=None)
@given(
    kind=st.sampled_from(KINDS), outs=st.integers(1, 700), pairs=st.integers(1, 90), seed=st.integers(0, 50),
    layout=st.sampled_from(LAYOUTS), bias=st.booleans(), rows=st.integers(1, 19),
    threads=st.integers(1, 3),
)  # fmt: skip
def chooses_the_same(
    body: NativeBody, kind: str, outs: int, pairs: int, seed: int, layout: str, bias: bool, rows: int,
    threads: int,
) -> None:  # fmt: skip
    torch.set_num_threads(threads)
    weight, few = adversarial(kind, outs, 2 * pairs, seed)
    x = few[torch.arange(rows) % len(few)] * torch.linspace(1, 2, rows)[:, None].bfloat16()
    offset = normal(outs, seed=seed + 3) if bias else None
    whole = laid_out(weight, layout, offset, None)
    screened = laid_out(weight, layout, offset, screen_of(weight))
    logits = body.linear(whole, x).float()
    assert torch.equal(body.greedy(whole, x)[0], logits.argmax(-1))
    assert torch.equal(body.greedy(screened, x)[0], logits.argmax(-1))


def test_each_body_chooses_the_same(body: NativeBody) -> None:
    chooses_the_same(body)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS), outs=st.integers(1, 300), width=st.integers(1, 200), seed=st.integers(0, 50)
)  # fmt: skip
def test_the_norms_bound_what_the_screen_changes(kind: str, outs: int, width: int, seed: int) -> None:
    weight, x = adversarial(kind, outs, width, seed)
    screen = screen_of(weight)
    changed = weight.double() - screen.codes.dense().double()
    x = torch.cat((x, 127 * changed[:4].sign().bfloat16()))  # along what rounding changed, and nothing lost in x
    whole, scales = prepare(x)
    rounded = (whole.double() * scales[:, :, None].double()).flatten(1)[:, :width]
    size, missed = x.double().norm(dim=1), (x.double() - rounded).norm(dim=1)
    bound = size[:, None] * screen.lost[:outs].double() + missed[:, None] * screen.kept[:outs].double()
    exactly = x.double() @ weight.double().T
    assert bool(((exactly - rounded @ screen.codes.dense().double().T).abs() <= bound).all())
    in_float32 = multiply(x.float(), screen.codes)
    assert bool(((exactly - in_float32.double()).abs() <= bound).all()), "sums in float32 are within the bounds too"


def test_the_first_of_outputs_that_round_to_one_number_wins(body: NativeBody) -> None:
    """Eight bits hold these integers exactly, so bounds are narrow; 1000 and 1001 are one number in bfloat16."""
    weight, x = torch.zeros(64, 64), torch.zeros(1, 64)
    x[0, :3] = torch.tensor([127.0, 100.0, 1.0])
    weight[:, 0] = -127  # sets the step of every output to 1
    weight[10, :3], weight[20, :3] = torch.tensor([0.0, 10.0, 0.0]), torch.tensor([0.0, 10.0, 1.0])
    weight[[10, 20], 63] = 127
    for first, second in ((10, 20), (20, 10)):
        swapped = weight[torch.arange(64)]
        swapped[[10, 20]] = weight[[first, second]]
        matrix = laid_out(swapped.bfloat16(), "row_major", None, screen_of(swapped.bfloat16()))
        assert body.greedy(matrix, x.bfloat16())[0].tolist() == [10]


def test_inputs_that_eight_bits_lose_are_bounded(body: NativeBody) -> None:
    """Beside one large input the others round to zero; the output that lives on them is the largest all the same."""
    weight, x = torch.zeros(64, 64), torch.full((1, 64), 0.45)
    x[0, 0] = 127
    weight[:, 63] = 127
    weight[5, 0], weight[9, 0] = 2, 1
    weight[9, 1:] = 127
    matrix = laid_out(weight.bfloat16(), "row_major", None, screen_of(weight.bfloat16()))
    assert body.greedy(matrix, x.bfloat16())[0].tolist() == [9]


def test_most_outputs_are_never_computed(body: NativeBody) -> None:
    weight = normal(20_000, 128, seed=1)
    x = weight[[77, 19_999]] + normal(2, 128, seed=2, scale=0.3)
    screen = screen_of(weight)
    assert screen.share == 0.0
    assert body.greedy(laid_out(weight, "row_major", None, screen), x)[0].tolist() == [77, 19_999]
    assert 0 < screen.share < 0.01
    assert screen.counts[:2].tolist() == [1, 20_000]


def test_all_outputs_are_computed_where_all_may_be_the_largest(body: NativeBody) -> None:
    weight = normal(1, 64, seed=1).expand(5000, 64).contiguous()
    screen = screen_of(weight)
    assert body.greedy(laid_out(weight, "row_major", None, screen), normal(1, 64, seed=2))[0].tolist() == [0]
    assert screen.share == 1.0


def test_it_takes_half_of_the_memory() -> None:
    weight = normal(4096, 512, seed=1)
    assert screen_of(weight).nbytes < 0.52 * weight.nbytes
