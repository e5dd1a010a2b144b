"""Calibrated sums in four bits: what calibration sees, what ranks get, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import vivace
import vivace.parallel.world as worlds
from tests.parallel.ranks import run_ranks
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.adapters import base_hash, save_adapter
from vivace.checkpoint.load import load_config
from vivace.errors import ConfigError, CorruptError, MismatchError, NotFoundError
from vivace.kernels.wire import LEAST_STEP
from vivace.parallel.calibration import GAMMA, FeatureRange, Seen
from vivace.parallel.collective import HalfWire, LinkedSum, summed_as_sent, summed_in_two_shots
from vivace.parallel.lowbit import FORMS, KIND, Calibration, LowBitWire, kept_features, num_features
from vivace.parallel.shares import columns_of
from vivace.parallel.simulated import SimulatedLoading

POINT = (0, "down")
WIDTH = 128
PLANTED = [3, 77]


def parts_of(seed: int, ranks: int, count: int = 64) -> list[torch.Tensor]:
    """Parts of several ranks in which two features are thirty times as large as the others."""
    numbers = torch.Generator().manual_seed(seed)
    size = torch.ones(WIDTH)
    size[PLANTED] = 30
    return [torch.randn(count, WIDTH, generator=numbers) * size for _ in range(ranks)]


def calibrated(ranks: int) -> Calibration:
    """A calibration of one layer on such parts."""
    seen = Seen(ranks)
    for seed in range(8):
        parts = parts_of(seed, ranks)
        for site in ("o", "down"):
            for rank, part in enumerate(parts):
                seen.update(part, (0, site), rank)
            seen.update(sum(parts), (0, site), ranks)

    class Config:
        num_layers = 1

    return seen.calibration(Config, "float32")  # type: ignore[arg-type]


def test_ranges_are_moving_averages_whose_first_text_sets_them() -> None:
    seen, texts = FeatureRange(), [torch.randn(5, 4), torch.randn(9, 4) * 3]
    seen.update(texts[0])
    assert torch.equal(seen.low, texts[0].amin(0))
    seen.update(texts[1])
    assert torch.equal(seen.high, (1 - GAMMA) * texts[0].amax(0) + GAMMA * texts[1].amax(0))


def test_steps_have_the_least_squared_error() -> None:
    seen = FeatureRange()
    numbers = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.01, 1, 3])
    seen.update(numbers)
    relative = numbers[::4].abs() / numbers[::4].abs().mean(1, keepdim=True)
    tried = 2.0 ** torch.arange(-8, 3, 0.125)
    errors = torch.stack([(relative - (relative / s).round().clamp(max=7) * s).square().sum(0) for s in tried])
    chosen = torch.stack([(relative - (relative / s).round().clamp(max=7) * s).square().sum(0) for s in seen.step()])
    assert bool((chosen.diagonal() <= errors.amin(0) * 1.05).all())


def test_kept_features_are_those_of_large_ranges_on_all_ranks() -> None:
    calibration = calibrated(3)
    for form in ("paper", "lowbit"):
        code = calibration.code(POINT, form)
        assert code.keep.tolist() == PLANTED
    assert len(calibration.code(POINT, "random").keep) == 2
    assert len(calibration.code(POINT, "int4").keep) == 0
    assert kept_features(torch.ones(2, 5), 2).tolist() == [0, 1], "of equal ranges the first features"
    assert [num_features(width, 1 / 64) for width in (576, 768, 63, 64, 4608)] == [10, 12, 1, 2, 72]


def test_errors_rank_as_in_the_paper_and_ours_are_smaller() -> None:
    calibration, parts = calibrated(4), parts_of(99, 4)
    total = sum(parts)
    error = {}
    for form in FORMS:
        found = summed_as_sent(parts, LowBitWire(calibration, form), POINT)
        error[form] = float((found - total).norm())
    assert error["lowbit"] < error["paper"] < error["random"] <= error["int4"]


def test_two_shots_round_once_more() -> None:
    calibration, parts = calibrated(3), parts_of(50, 3)
    code = calibration.code(POINT, "paper")
    wire = LowBitWire(calibration, "paper")
    twice = summed_in_two_shots(parts, wire, POINT)
    once = summed_as_sent(parts, wire, POINT)
    inside = (once[:, code.rest] / code.scales[3]).abs() <= 7.5
    assert bool((((twice - once).abs()[:, code.rest] <= code.scales[3] / 2 * 1.001) | ~inside).all())


def test_with_all_features_kept_the_sum_is_that_of_bfloat16() -> None:
    calibration, parts = calibrated(2), parts_of(7, 2)
    whole = LowBitWire(calibration, "paper", keep=1.0)
    assert torch.equal(summed_as_sent(parts, whole, POINT), summed_as_sent(parts, HalfWire(), POINT))


def test_clipped_numbers_are_counted() -> None:
    wire = LowBitWire(calibrated(2), "paper")
    wire.encode(parts_of(3, 1)[0] * 5, POINT, 0)
    assert wire.numbers[POINT] == 64 * (WIDTH - 2)
    assert 0.02 < wire.saturation < 0.6


@pytest.mark.multiprocess
@pytest.mark.parametrize("count", [2, 3, 5])
def test_ranks_get_what_one_process_computes(count: int) -> None:
    calibration = calibrated(count)

    def work() -> Any:
        world = worlds.join(timeout_s=20)
        linked = LinkedSum(world, LowBitWire(calibration, "lowbit"))
        found = [linked.all_reduce(parts_of(1, count, size)[world.rank], point=POINT) for size in (1, 90)]
        return found, dict(world.links.sent)

    answers = run_ranks(count, work)
    wire = LowBitWire(calibration, "lowbit")
    for place, size in enumerate((1, 90)):
        parts = parts_of(1, count, size)
        summed = summed_in_two_shots if size > 1 and count > wire.most_in_one_shot else summed_as_sent
        expected = summed(parts, wire, POINT)
        assert all(torch.equal(answer[0][place], expected) for answer in answers)
    if count < 5:
        assert answers[0][1] == {(other, "down"): 91 * wire.code(POINT).row_bytes for other in range(1, count)}


def config_of(folder: Path, ranks: int) -> dict[str, Any]:
    """What a calibration of these ranks notes."""
    return {"num_ranks": ranks, "columns": columns_of(load_config(folder), ranks), "dtype": "float32"}


def make_calibration(folder: Path, ranks: int) -> Path:
    """A calibration of a tiny model, whose ranges are made up."""
    config = load_config(folder)
    shape = (2 * config.num_layers, ranks + 1, config.width)
    tensors = {"low": torch.full(shape, -1.0), "high": torch.rand(shape) + 0.5, "step": torch.full(shape, 0.4)}
    out = folder / "adapters" / f"{KIND}-{ranks}"
    save_adapter(out, KIND, base_hash(folder), {}, config_of(folder, ranks), tensors)
    return out


@pytest.mark.multiprocess
@pytest.mark.parametrize("count", [2, 4])
def test_a_simulated_world_equals_real_ranks_bit_for_bit(count: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    make_calibration(tmp_path, count)
    ids = [list(range(5, 45)), list(range(60, 100))]

    def work() -> Any:
        engine = vivace.load(tmp_path, kernels="torch", parallel="tensor", wire="lowbit", timeout=20)
        return engine.logits(ids), engine.world.saturation

    logits, saturation = run_ranks(count, work)[0]
    threads = torch.get_num_threads()
    try:
        engine = vivace.load(tmp_path, kernels="torch", parallel=SimulatedLoading(count, "lowbit"))
        assert torch.equal(engine.logits(ids), logits)
        assert engine.world.saturation == saturation
    finally:
        torch.set_num_threads(threads)
    assert not torch.equal(vivace.load(tmp_path, kernels="torch").logits(ids), logits)


def test_a_calibration_of_something_else_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "a")
    make_checkpoint(tmp_path / "b", seed=1)
    folder, base = make_calibration(tmp_path / "a", 2), base_hash(tmp_path / "a")
    columns = columns_of(load_config(tmp_path / "a"), 2)
    assert float(Calibration.read(folder, base, columns, "float32").code(POINT, "lowbit").scales.min()) >= LEAST_STEP
    with pytest.raises(MismatchError, match="for ranks 2, this is ranks 4"):
        Calibration.read(folder, base, columns * 2, "float32")
    with pytest.raises(MismatchError, match="for dtype float32, this is dtype bfloat16"):
        Calibration.read(folder, base, columns, "bfloat16")
    with pytest.raises(
        MismatchError, match=r"for feed-forward columns by rank \[.*\], this is .* \[1, 2\]; calibrate again"
    ):
        Calibration.read(folder, base, [1, 2], "float32")
    with pytest.raises(MismatchError, match="was trained on base"):
        Calibration.read(folder, base_hash(tmp_path / "b"), columns, "float32")
    with pytest.raises(NotFoundError, match="vivace train lowbit ranks=3"):
        Calibration.read(tmp_path / "none", base, [8] * 3, "float32")
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "kind": "medusa"}))
    with pytest.raises(MismatchError, match="not a calibration"):
        Calibration.read(folder, base, columns, "float32")


def test_errors_are_fed_back_to_the_next_sum() -> None:
    calibration, width = calibrated(2), WIDTH
    drawn = torch.Generator().manual_seed(5)
    whole = Calibration(2, "float32", *(part.repeat(8, 1, 1) for part in calibration.tensors().values()))
    rows = [torch.randn(20, width, generator=drawn) for _ in range(16)]
    points = [(layer, site) for layer in range(8) for site in ("o", "down")]
    left = {}
    for form in ("lowbit", "open"):
        wire = LowBitWire(whole, form)
        for _ in range(2):  # another pass begins without the errors of the last one
            sent = [wire.code(at).add(list(wire.encode(x, at, 0))) for at, x in zip(points, rows, strict=True)]
            left[form] = (torch.stack(rows).sum(0) - torch.stack(sent).sum(0)).norm()
        first = LowBitWire(whole, "open").encode(rows[0], points[0], 0)
        assert torch.equal(sent[0], wire.code(points[0]).add(list(first)))
        last = rows[-1] - sent[-1]
    assert left["lowbit"] < left["open"] / 2
    assert left["lowbit"] < 2 * last.norm(), "the stream lacks the errors of one sum"
    fixed = LowBitWire(whole, "lowbit", feeds_back=False)
    again = [fixed.code(at).add(list(fixed.encode(x, at, 0))) for at, x in zip(points, rows, strict=True)]
    assert torch.equal(torch.stack(again), torch.stack(sent))


def test_nothing_is_fed_back_to_other_rows() -> None:
    wire, rows = LowBitWire(calibrated(2), "lowbit"), torch.randn(9, WIDTH)
    wire.encode(rows, (0, "o"), 0)
    fewer = wire.encode(rows[-1:], (0, "down"), 0)
    assert torch.equal(fewer[0], LowBitWire(calibrated(2), "open").encode(rows[-1:], (0, "down"), 0)[0])


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_sums_that_are_not_finite_are_not_calibrated(number: float) -> None:
    x = torch.ones(3, WIDTH)
    x[1, 5] = number
    with pytest.raises(ConfigError, match=r"not finite .*--dtype float32"):
        Seen(2).update(x, POINT, 1)


@pytest.mark.parametrize("damage", ["no steps", "other shapes", "other ranks", "not finite", "flat"])
def test_a_damaged_calibration_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    """One with numbers that are not finite would make every answer of the model one of nothing."""
    tensors = calibrated(2).tensors()
    change: dict[str, Any] = {
        "no steps": {"step": None},
        "other shapes": {"step": tensors["step"][..., :5].contiguous()},
        "other ranks": {name: part[:, :2].contiguous() for name, part in tensors.items()},
        "not finite": {"step": torch.full_like(tensors["step"], torch.nan)},
        "flat": {name: part.flatten() for name, part in tensors.items()},
    }
    stored = {name: part for name, part in (tensors | change[damage]).items() if part is not None}
    save_adapter(
        tmp_path / "lowbit-2", KIND, "abc", {}, {"num_ranks": 2, "columns": [8, 8], "dtype": "float32"}, stored
    )
    with pytest.raises(CorruptError, match=r"lowbit-2 holds no calibration .*vivace train lowbit ranks=2"):
        Calibration.read(tmp_path / "lowbit-2", "abc", [8, 8], "float32")
