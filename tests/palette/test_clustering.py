"""Clustering while training: gradients of every way are those of plain autograd, and little is kept for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vivace.cli.app import run
from vivace.errors import ConfigError
from vivace.evaluate.clustering import kept_bytes
from vivace.kernels.clusters import clusters_natively
from vivace.kernels.library import found_library, runnable
from vivace.palette import cluster
from vivace.palette.dkm import dkm, first_centroids, temperature
from vivace.palette.hooks import few_saved
from vivace.palette.unique import dkm_in_parts


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def gradient_of(weight: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """A weight clustered, and the gradient of a loss that treats every weight alike and otherwise."""
    leaf = weight.clone().requires_grad_()
    made = cluster(leaf, **options).weight
    (made.double() * normal(*made.shape, seed=9).double()).sum().add(made.double().square().sum() * 40).backward()
    assert leaf.grad is not None
    return made.detach(), leaf.grad


@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [16, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hooks_change_no_bit(dtype: torch.dtype, rows: int | None, rounds: int) -> None:
    weight = normal(48, 96, dtype=dtype)
    plain = gradient_of(weight, rows=rows, rounds=rounds, mode="plain")
    hooked = gradient_of(weight, rows=rows, rounds=rounds, mode="hooks")
    assert torch.equal(plain[0], hooked[0])
    assert torch.equal(plain[1], hooked[1])


@pytest.mark.parametrize("marshals", [True, False])
@pytest.mark.parametrize("uniquifies", [True, False])
def test_each_hook_alone(marshals: bool, uniquifies: bool) -> None:
    weights = normal(2, 3000, dtype=torch.bfloat16).float()
    first = first_centroids(weights, 3)
    found = []
    for uses_hooks in (False, True):
        leaf = weights.clone().requires_grad_()
        if uses_hooks:
            with few_saved(leaf, marshals=marshals, uniquifies=uniquifies):
                made, _ = dkm(leaf, first, temperature(first))
        else:
            made, _ = dkm(leaf, first, temperature(first))
        made.square().sum().backward()
        found.append(leaf.grad)
    assert torch.equal(found[0], found[1])


def test_more_rows_than_short_integers_count() -> None:
    """More than 32,767 different values, and so a list of 32-bit integers."""
    weights = torch.arange(0x4200, dtype=torch.int16).view(torch.bfloat16).float()  # up to 32
    weights = torch.cat((weights, -weights)).repeat(4)[None]
    assert len(weights.unique()) > 32768
    first, found = first_centroids(weights, 3), []
    for uses_hooks in (False, True):
        leaf = weights.clone().requires_grad_()
        if uses_hooks:
            with few_saved(leaf):
                made, _ = dkm(leaf, first, temperature(first), 1)
        else:
            made, _ = dkm(leaf, first, temperature(first), 1)
        made.square().sum().backward()
        found.append(leaf.grad)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("rows", [16, None])
def test_own_backward_is_the_derivative(rows: int | None) -> None:
    """In float64 to 1e-9 of autograd, and by finite differences of 64 weights with repeats."""
    weight = normal(32, 24, dtype=torch.float64)
    plain, own = (gradient_of(weight, rows=rows, mode=mode) for mode in ("plain", "own"))
    assert torch.allclose(plain[0], own[0], rtol=1e-9, atol=1e-12)
    assert torch.allclose(plain[1], own[1], rtol=1e-9, atol=1e-9)
    few = normal(1, 16, dtype=torch.float64).repeat(1, 4).requires_grad_()
    first = first_centroids(few.detach(), 2)
    tau = temperature(first)
    assert torch.autograd.gradcheck(lambda w: dkm_in_parts(w, first, tau, 2)[0], (few,), eps=1e-7, atol=1e-4)


@pytest.mark.parametrize("rows", [16, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_own_backward_in_less_precision(dtype: torch.dtype, rows: int | None) -> None:
    """Equal weights with different gradients keep them, whether values are shared (one palette, bfloat16) or not."""
    weight = normal(64, 96, dtype=dtype)
    plain, own = (gradient_of(weight, rows=rows, mode=mode) for mode in ("plain", "own"))
    near = 1e-4 if dtype == torch.float32 else 2e-2
    assert torch.allclose(plain[0], own[0], rtol=near, atol=1e-6)
    assert torch.allclose(plain[1].float(), own[1].float(), rtol=near, atol=near * float(plain[1].float().abs().max()))


def test_small_parts_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(48, 40, dtype=torch.float64)
    whole = gradient_of(weight, mode="own")
    monkeypatch.setattr("vivace.palette.unique.AT_ONCE", 800)
    parts = gradient_of(weight, mode="own")
    assert torch.allclose(whole[0], parts[0], rtol=1e-12)
    assert torch.allclose(whole[1], parts[1], rtol=1e-9, atol=1e-12)


needs_kernels = pytest.mark.skipif(not clusters_natively(torch.zeros(1), 8), reason="no native kernels here")


@needs_kernels
@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("body", ["avx2", "avx512"])
def test_native_clusters_are_those_of_the_oracle(
    body: str, bits: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widths that no vector divides; weights that lie on entries, far from all of them, and alike."""
    library = found_library()
    assert library is not None
    if body not in runnable(library):
        pytest.skip(f"this processor has no {body}")
    monkeypatch.setattr("vivace.kernels.clusters.body_of", lambda _: {"avx2": 0, "avx512": 1}[body])
    for width in (1, 7, 16, 333):
        weight = normal(48, width, seed=width)
        weight[3], weight[5] = weight[4], 1.0
        first = first_centroids(weight.view(3, -1), bits)
        weight[7, 0] = first[0, 1]
        options = {"bits": bits, "rounds": rounds, "centroids": first, "tau": temperature(first).clamp(min=1e-6)}
        with monkeypatch.context() as without:
            without.setattr("vivace.palette.unique.clusters_natively", lambda *_: False)
            expected, slope = gradient_of(weight, mode="own", **options)
            last = cluster(weight, mode="own", **options).centroids
        made, gradient = gradient_of(weight, mode="own", **options)
        assert torch.allclose(made, expected, rtol=2e-6, atol=1e-7)
        assert torch.allclose(cluster(weight, mode="own", **options).centroids, last, rtol=2e-6, atol=1e-8)
        assert torch.allclose(gradient, slope, rtol=2e-4, atol=2e-5 * float(slope.abs().max()))


@needs_kernels
def test_native_gradient_is_nearer_to_the_exact_one() -> None:
    """Than that of plain autograd in float32, judged by float64: sums over weights keep their digits."""
    weight = normal(64, 576)
    exact = gradient_of(weight.double(), mode="plain")[1]
    plain, own = (gradient_of(weight, mode=mode)[1].double() for mode in ("plain", "own"))
    assert float((own - exact).norm()) < float((plain - exact).norm())


@needs_kernels
def test_threads_change_no_bit() -> None:
    weight, before = normal(256, 96), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(gradient_of(weight, mode="own"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_cold_and_hot() -> None:
    """Cold: every weight is its nearest centroid. Hot: all are the mean. Weights at their centroids stay."""
    weights = normal(1, 500)
    first = first_centroids(weights, 3)
    made, last = dkm(weights, first, torch.tensor([1e-12]))
    assert torch.allclose(made, last[0][(weights[0][:, None] - last[0]).abs().argmin(1)][None], atol=1e-7)
    made, _ = dkm(weights, first, torch.tensor([1e3]))
    assert torch.allclose(made, weights.mean().expand_as(made), atol=1e-5)
    few = first[:, torch.randint(8, (300,))]
    assert torch.allclose(dkm(few, first, torch.tensor([1e-9]))[0], few, atol=1e-7)


def test_order_and_scale() -> None:
    """Permuted weights are permuted clusters; weights times s with tau times s^2 are clusters times s."""
    weights = normal(1, 400, dtype=torch.float64)
    first = first_centroids(weights, 3)
    tau = temperature(first)
    made, _ = dkm(weights, first, tau)
    order = torch.randperm(400)
    assert torch.allclose(dkm(weights[:, order], first, tau)[0], made[:, order], rtol=1e-9)
    assert torch.allclose(dkm(3 * weights, 3 * first, 9 * tau)[0], 3 * made, rtol=1e-9)
    assert torch.allclose(temperature(3 * first), 9 * tau)


@pytest.mark.parametrize("rows", [16, None])
def test_little_is_kept(rows: int | None) -> None:
    """A matrix of 256 x 1024 in three bits: the bar of the paper, 130 times less, is met by the own backward pass."""
    weight = normal(256, 1024, dtype=torch.bfloat16)
    plain, hooked, own = (kept_bytes(weight, 3, rows, 3, mode) for mode in ("plain", "hooks", "own"))
    assert own * 130 < plain
    assert hooked * (4 if rows is None else 1.5) < plain


def test_inside_a_checkpoint() -> None:
    """Activation checkpointing has hooks of its own around these."""
    weight, x = normal(32, 64, dtype=torch.bfloat16), normal(4, 64, dtype=torch.bfloat16)

    def loss(leaf: Tensor) -> Tensor:
        return (x @ cluster(leaf, mode="hooks").weight.T).float().square().sum()

    gradients = []
    for is_nested in (False, True):
        leaf = weight.clone().requires_grad_()
        (checkpoint(loss, leaf, use_reentrant=False) if is_nested else loss(leaf)).backward()
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0], gradients[1])


def _sharded(rank: int, size: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    weight = normal(32, 256, dtype=torch.bfloat16)
    plain = gradient_of(weight, mode="plain", rows=None)
    shared = gradient_of(weight, mode="hooks", rows=None, group=dist.group.WORLD)
    assert torch.equal(plain[1], shared[1])
    alone = cluster(weight.clone().requires_grad_(), mode="hooks", rows=None).kept_bytes
    less = cluster(weight.clone().requires_grad_(), mode="hooks", rows=None, group=dist.group.WORLD).kept_bytes
    assert alone is not None
    assert less is not None
    assert less < alone
    dist.destroy_process_group()


@pytest.mark.multiprocess
@pytest.mark.parametrize("size", [2])
def test_shards(size: int, tmp_path: Path) -> None:
    mp.spawn(_sharded, (size, str(tmp_path)), nprocs=size)


def test_bad_input() -> None:
    weight = normal(32, 8)
    for options, message in (
        ({"bits": 5}, "bits are 2, 3 or 4"),
        ({"rows": 12}, "do not divide into tiles of 12"),
        ({"mode": "fast"}, "mode is own, hooks, plain"),
        ({"rounds": -1}, "rounds are at least 0"),
        ({"centroids": torch.zeros(2, 4)}, "expected \\[2, 8\\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            cluster(weight, **options)
    with pytest.raises(ConfigError, match=r"found torch\.float16"):
        cluster(weight.half())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_bench(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "palette", "--shape", "64x128", "--modes", "plain,own", "--json", "-"]) == 0
    costs = json.loads(capsys.readouterr().out)["costs"]
    found = [(cost["mode"], cost["rows"]) for cost in costs]
    assert found == [("plain", None), ("own", None), ("plain", 16), ("own", 16)]
    assert all(cost["kept_bytes"] > 0 and cost["backward_s"] > 0 for cost in costs)


def test_a_bench_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in ((["--shape", "64"], "two numbers"), (["--modes", "plane"], "did you mean 'plain'")):
        assert run(["bench", "palette", *words]) != 0
        assert message in capsys.readouterr().err
