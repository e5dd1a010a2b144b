"""The loop learns, keeps the best, reports, and refuses what cannot work."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.train.tiny import PAIRS, batches
from vivace.checkpoint.tokenizer import Tokenizer
from vivace.core.model import Decoder
from vivace.errors import ConfigError, UsageError
from vivace.train.batches import DataSplit
from vivace.train.config import LoopConfig, TrainConfig
from vivace.train.data import BatchPlace, Rows, TokenBatch, collate
from vivace.train.loop import fit
from vivace.train.next_token import NextToken
from vivace.train.optim import Optimiser, OptimiserConfig
from vivace.train.report import Lines, StepMeans


class Kept:
    """A report that remembers."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.readings: list[StepMeans] = []
        self.passes: list[tuple[int, float, bool]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def reading(self, reading: StepMeans) -> None:
        self.readings.append(reading)

    def held_back(self, step: int, metrics: Mapping[str, float], is_best: bool) -> None:
        self.passes.append((step, metrics["loss"], is_best))


def course(steps: int, **changes: object) -> TrainConfig:
    numbers: dict[str, object] = {"warmup_steps": 2, "evaluate_steps": 20, "report_steps": 5}
    return TrainConfig(LoopConfig(steps=steps, **(numbers | changes)), OptimiserConfig(), seed=1)  # type: ignore[arg-type]


def held_back(tokenizer: Tokenizer) -> list[TokenBatch]:
    return [collate(Rows(tokenizer, 128).encode(PAIRS[:4]))]


@pytest.mark.parametrize("autocast", [False, True])
def test_it_learns_the_pairs(tokenizer: Tokenizer, model: Decoder, folder: Path, autocast: bool) -> None:
    report = Kept()
    lessons = DataSplit(batches(tokenizer), held_back(tokenizer))
    outcome = fit(
        model, NextToken(model), lessons, course(100, autocast=autocast, clip=50.0), folder=folder, report=report
    )
    assert report.readings[0].metrics["loss"] > 4
    assert outcome.held_back["loss"] < 1.0
    assert outcome.progress.step == 100
    assert report.readings[-1].eta_s >= 0
    assert "tokens/s" in str(report.readings[-1])


def test_the_best_parameters_are_kept(tokenizer: Tokenizer, model: Decoder, folder: Path) -> None:
    report = Kept()
    objective = Forgetful(model, after=12)
    fit(
        model,
        objective,
        DataSplit(batches(tokenizer), held_back(tokenizer)),
        course(30, evaluate_steps=4),
        folder=folder,
        report=report,
    )
    best = min(loss for _, loss, _ in report.passes)
    assert report.passes[-1][1] > best
    with torch.no_grad():
        now = sum(float(part) for part, _ in objective.losses(model, held_back(tokenizer)[0]))
    assert abs(now - best) < 1e-5
    assert any("kept the parameters of step" in note for note in report.notes)


class Forgetful(NextToken):
    """Unlearns after some updates."""

    def __init__(self, model: Decoder, after: int) -> None:
        super().__init__(model)
        self.left = after

    def losses(self, model: Decoder, batch: TokenBatch) -> Iterator[tuple[Tensor, Mapping[str, float]]]:
        learns = torch.is_grad_enabled()
        for loss, seen in super().losses(model, batch):
            yield (-loss if learns and self.left < 0 else loss), seen

    def updated(self) -> None:
        self.left -= 1


class Adapter(nn.Module):
    """An objective that owns its parameters and leaves the base alone."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(model.config.width))
        self.inner = NextToken(model)

    def groups(self) -> Sequence[Mapping[str, object]]:
        return [{"params": [self.shift], "name": "shift"}]

    def losses(self, model: Decoder, batch: TokenBatch) -> Iterator[tuple[Tensor, Mapping[str, float]]]:
        loss = (self.shift - 1).square().sum()
        yield loss, {"away": float(loss.detach())}

    def updated(self) -> None:
        return None


def test_an_adapter_trains_on_a_frozen_base(tokenizer: Tokenizer, model: Decoder, folder: Path) -> None:
    before = [p.clone() for p in model.requires_grad_(False).parameters()]
    adapter = Adapter(model)
    course_ = TrainConfig(LoopConfig(steps=50, warmup_steps=0), OptimiserConfig(adamw_rate=0.1))
    fit(model, adapter, DataSplit(batches(tokenizer)), course_, folder=folder, report=Kept())
    assert float(adapter.shift.detach().mean()) > 0.8
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_accumulated_batches_make_one_step_of_their_mean(
    tokenizer: Tokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one part of the objective is made from another's gradient."""

    class Recorder(Adapter):
        def losses(self, model: Decoder, batch: TokenBatch) -> Iterator[tuple[Tensor, Mapping[str, float]]]:
            cut = self.shift.detach().requires_grad_()
            yield cut.sum() * batch.tokens.sum(), {}
            yield (self.shift * cut.grad).sum(), {}

    model = Decoder.__new__(Decoder)
    nn.Module.__init__(model)
    model.embedding = nn.Parameter(torch.zeros(1, 4))
    model.config = type("Width", (), {"width": 4})()
    recorder = Recorder.__new__(Recorder)
    nn.Module.__init__(recorder)
    recorder.shift = nn.Parameter(torch.zeros(4))
    seen: list[float] = []
    update = Optimiser.update

    def recorded(self: Optimiser, factor: float) -> None:
        seen.append(float(self.params[0].grad[0]))
        update(self, factor)

    monkeypatch.setattr(Optimiser, "update", recorded)
    data = batches(tokenizer)
    course_ = TrainConfig(LoopConfig(steps=2, warmup_steps=0, accumulate=3), OptimiserConfig())
    fit(model, recorder, DataSplit(data), course_, folder=folder, report=Kept())
    again = data.start_at(BatchPlace())
    sums = [float(next(again)[1].tokens.sum()) for _ in range(6)]
    assert seen == [pytest.approx(sum(sums[:3]) / 3), pytest.approx(sum(sums[3:]) / 3)]


def test_a_loss_that_is_not_a_number_stops_the_run(tokenizer: Tokenizer, model: Decoder, folder: Path) -> None:
    with torch.no_grad():
        model.embedding.fill_(math.nan)
    with pytest.raises(UsageError, match="lower the rates"):
        fit(model, NextToken(model), DataSplit(batches(tokenizer)), course(5), folder=folder, report=Kept())


def test_the_rate_rises_holds_and_falls_to_zero() -> None:
    loop = LoopConfig(steps=100, warmup_steps=10, hold=0.5)
    factors = [loop.factor(step, loop.spent(step, 0.0)) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[10:51] == [1.0] * 41
    assert factors[75] == pytest.approx(0.5)
    assert factors[100] == 0.0
    clock = LoopConfig(minutes=2, warmup_steps=0, hold=0.0)
    assert clock.factor(7, clock.spent(7, 60.0)) == pytest.approx(0.5)
    assert clock.spent(7, 500.0) == 1.0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"steps": 5, "minutes": 1.0},
        {"steps": 0},
        {"minutes": -1.0},
        {"steps": 5},
        {"steps": 500, "hold": 1.5},
        {"steps": 500, "accumulate": 0},
        {"steps": 500, "clip": 0.0},
    ],
)
def test_an_impossible_budget_is_refused_early(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        LoopConfig(**changes)  # type: ignore[arg-type]


def test_lines_say_where_a_run_stands() -> None:
    said: list[str] = []
    lines = Lines(said.append)
    lines.note("begins")
    lines.reading(StepMeans(20, 0.1, 1.0, 1234.0, 65.0, {"loss": 2.0}))
    lines.held_back(20, {"loss": 1.5}, True)
    assert said[0] == "begins"
    assert "step 20" in said[1]
    assert "1234 tokens/s" in said[1]
    assert "best so far" in said[2]


def test_minutes_may_be_those_of_processors(
    tokenizer: Tokenizer, model: Decoder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that waits, or that others keep from running, has used none of them."""
    began = time.monotonic()
    ahead = iter(range(10**6))
    monkeypatch.setattr(time, "monotonic", lambda: began + 60.0 * next(ahead))  # an hour passes within a few steps
    monkeypatch.setattr(time, "process_time", lambda: float(next(ahead)))
    loop = LoopConfig(minutes=1.0, clock="processor", warmup_steps=0)
    done = fit(
        model,
        NextToken(model),
        DataSplit(batches(tokenizer)),
        TrainConfig(loop, OptimiserConfig()),
        folder=folder,
        report=Kept(),
    )
    assert 5 <= done.progress.step <= 60
    assert done.progress.elapsed_s <= 70


class Blind(NextToken):
    """Reports nothing but agreement, which is finite whatever the weights are."""

    def losses(self, model: Decoder, batch: TokenBatch) -> Iterator[tuple[Tensor, Mapping[str, float]]]:
        for loss, _ in super().losses(model, batch):
            yield loss, {"agreement": 0.5}


def test_a_loss_that_is_no_number_is_noticed_where_it_is_not_reported(
    tokenizer: Tokenizer, model: Decoder, folder: Path
) -> None:
    with torch.no_grad():
        model.embedding.fill_(math.nan)
    with pytest.raises(UsageError, match=r"loss nan at step 0: lower the rates or set clip, and start in an empty"):
        fit(model, Blind(model), DataSplit(batches(tokenizer)), course(5), folder=folder, report=Kept())


class Wavering(NextToken):
    """Its loss on held-back rows is no number at first."""

    num_bad = 2

    def losses(self, model: Decoder, batch: TokenBatch) -> Iterator[tuple[Tensor, Mapping[str, float]]]:
        bad = not torch.is_grad_enabled() and self.num_bad > 0
        self.num_bad -= not torch.is_grad_enabled()
        for loss, seen in super().losses(model, batch):
            yield (loss * math.nan if bad else loss), seen


def test_an_evaluation_that_is_no_number_is_never_the_best(tokenizer: Tokenizer, model: Decoder, folder: Path) -> None:
    report, data = Kept(), DataSplit(batches(tokenizer), held_back(tokenizer))
    found = fit(model, Wavering(model), data, course(20, evaluate_steps=4), folder=folder, report=report)
    assert [is_best for *_, is_best in report.passes][:3] == [False, False, True]
    assert math.isfinite(found.progress.best_loss or math.nan)
    always = Wavering(model)
    always.num_bad = 1000
    with pytest.raises(UsageError, match="the loss on held-back rows is no number"):
        fit(model, always, data, course(8, evaluate_steps=4), folder=folder / "always", report=Kept())


def test_a_finished_run_tells_its_last_evaluation_again(tokenizer: Tokenizer, model: Decoder, folder: Path) -> None:
    data = DataSplit(batches(tokenizer), held_back(tokenizer))
    first, again = (
        fit(model, NextToken(model), data, course(8, evaluate_steps=4), folder=folder, report=Kept()) for _ in range(2)
    )
    assert again.held_back.keys() == first.held_back.keys() != set()


def test_seeds_may_be_large(tokenizer: Tokenizer, model: Decoder, folder: Path) -> None:
    settings = TrainConfig(course(2).loop, OptimiserConfig(), seed=2**62)
    fit(model, NextToken(model), DataSplit(batches(tokenizer)), settings, folder=folder, report=Kept())
