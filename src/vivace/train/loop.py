"""The training loop, which depends on no particular model, data or method.

One step computes the gradients of ``accumulate`` batches (each part of the loss is backpropagated before the next is
computed), clips them, updates the parameters and calls ``Objective.updated``. At intervals the loop reports means,
evaluates the held-back batches and keeps the best parameters, and writes a snapshot. A run that was killed continues
from its last snapshot with the same steps.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import torch

from vivace.errors import ConfigError, UsageError
from vivace.kernels.heap import keep_little, trimmer
from vivace.kernels.reference import any_order
from vivace.train.batches import BatchSource, Countable, DataSplit
from vivace.train.clock import work_seconds
from vivace.train.config import TrainConfig
from vivace.train.objective import Objective
from vivace.train.optim import Optimiser
from vivace.train.report import Lines, Report, StepMeans
from vivace.train.resume import TrainProgress, load_snapshot, read_state, save_snapshot, write_state

M = TypeVar("M")
B = TypeVar("B", bound=Countable)

BEST = "best.pt"
TRIM_S = 5.0
"""Seconds after which freed memory is given back to the system, which takes some hundredths of a second."""


@dataclass(frozen=True)
class TrainResult:
    """The end of a run; by then the objective holds the best parameters."""

    progress: TrainProgress
    held_back: Mapping[str, float]
    """Mean loss and metrics of the last evaluation on the held-back batches."""


def fit(
    model: M, objective: Objective[M, B], data: DataSplit[B], config: TrainConfig, *, folder: Path, report: Report
) -> TrainResult:
    """Train the parameters of an objective, or continue a run that was killed.

    Args:
        model: passed to the objective's ``losses`` and used nowhere else; it may be frozen.
        objective: owns the parameters and computes the loss.
        data: batches to train on, and held-back ones that select the best parameters.
        config: budget, learning rates and seed.
        folder: where snapshots are written.
        report: receives progress.

    Returns:
        The progress at the end. With held-back batches, the parameters are those with the smallest loss on them.

    Raises:
        ConfigError: the objective has no parameters, or the minutes of the budget are too short for one step.
        MismatchError: the folder holds a run with another plan.
        UsageError: the loss is infinite or not a number.
    """
    keep_little()
    run = _Run(Training(model, objective, data, config, folder, report))
    run.resume()
    while run.spent() < 1.0:
        run.step()
    run.check_steps()
    return run.finish()


@dataclass(frozen=True)
class Training(Generic[M, B]):
    """A training; fields as the arguments of ``fit``."""

    model: M
    objective: Objective[M, B]
    data: DataSplit[B]
    config: TrainConfig
    folder: Path
    report: Report


def fit_in_turn(trainings: Sequence[Training[M, B]], saved_s: Callable[[], float]) -> list[TrainResult]:
    """Train several objectives in turn, a step of each after another, so that they may share what they compute alike.

    Each has its own optimiser, budget, snapshots and result, and makes the steps that ``fit`` would make. Minutes of a
    budget are the time of its own steps (``work_seconds``), with that of what another had computed for it: what it
    would have needed alone. Snapshots of all are written together, so that a run that was killed goes on in step.

    Args:
        trainings: what to train; ``clock`` of budgets in minutes is "processor".
        saved_s: returns the seconds of work, up to now, of results that were not computed again.

    Raises:
        ConfigError: a clock is the wall's, and as ``fit``.
        MismatchError: a folder holds a run with another plan.
        UsageError: a loss is infinite or not a number.
    """
    keep_little()
    loops = [training.config.loop for training in trainings]
    if any(loop.minutes is not None and loop.clock != "processor" for loop in loops):
        raise ConfigError("trainings in turn count minutes of a processor: set loop.clock=processor")
    runs = [_Run(one, saved_s) for one in trainings]
    for run in runs:
        run.resume()
    every_s, saved = min(loop.snapshot_s for loop in loops), time.monotonic()
    while any(run.spent() < 1.0 for run in runs):
        for run in runs:
            if run.spent() < 1.0:
                with run.own_time:
                    run.step(may_save=False)
        if time.monotonic() - saved >= every_s:
            for run in runs:
                run.save()
            saved = time.monotonic()
    for run in runs:
        run.check_steps()
    return [run.finish() for run in runs]


class _OwnTime:
    """A clock that runs during the steps of one training, and counts what was computed for it before."""

    def __init__(self, saved_s: Callable[[], float], device: torch.device) -> None:
        self._saved_s, self._device = saved_s, device
        self._before = 0.0
        self._since: float | None = None

    def __enter__(self) -> None:
        self._since = self._all()

    def __exit__(self, *error: object) -> None:
        self._before, self._since = self(), None

    def __call__(self) -> float:
        """Return the seconds so far."""
        return self._before + (0.0 if self._since is None else self._all() - self._since)

    def _all(self) -> float:
        return work_seconds(self._device) + self._saved_s()


def step_seconds(model: M, objective: Objective[M, B], batches: BatchSource[B], config: TrainConfig) -> float:
    """Return how long a step of a run takes: the second one's seconds, as the first also sets things up.

    The run is over then. Parameters have changed; nothing is evaluated and nothing is written.

    Args:
        model: passed to the objective, as by ``fit``.
        objective: owns the parameters and computes the loss.
        batches: as large as those of the run.
        config: its settings.

    Raises:
        UsageError: the loss is infinite or not a number.
    """
    loop = replace(config.loop, snapshot_s=math.inf)
    quiet = Lines(lambda text: None)
    run = _Run(Training(model, objective, DataSplit(batches), replace(config, loop=loop), Path(), quiet))
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        run.step()
        if run.optimiser.params[0].is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return seconds


class _Run(Generic[M, B]):
    """The state of a training."""

    def __init__(self, training: Training[M, B], saved_s: Callable[[], float] | None = None) -> None:
        """Begin a run; its minutes are those of its own steps with ``saved_s`` (``fit_in_turn``), None counts all."""
        self.model = training.model
        self.objective = training.objective
        self.data = training.data
        self.config = training.config
        self.folder = training.folder
        self.report = training.report
        self.optimiser = Optimiser(self.objective.groups(), self.config.optimiser)
        self.progress = TrainProgress()
        self.batches = self.data.train.start_at(self.progress.place)
        self.held_back: dict[str, float] = {}
        self.window = _Window()
        self.own_time = _OwnTime(saved_s or (lambda: 0.0), self.optimiser.params[0].device)
        named = time.process_time if self.config.loop.clock == "processor" else time.monotonic
        self._now: Callable[[], float] = named if saved_s is None else self.own_time
        self.began, self.saved = self._now(), time.monotonic()
        self._trim, self._trimmed = trimmer(), time.monotonic()

    def resume(self) -> None:
        """Continue from the folder's snapshot if there is one."""
        found = load_snapshot(self.folder, self.optimiser, self.objective, self.config.plan)
        if found is not None:
            self.progress = found
            self.batches = self.data.train.start_at(found.place)
            self.report.note(f"resumed after step {found.step} of {self.folder}")
        self.began = self._now() - self.progress.elapsed_s

    def spent(self) -> float:
        """Return the share of the budget that has been used."""
        return self.config.loop.spent(self.progress.step, self._now() - self.began)

    def step(self, *, may_save: bool = True) -> None:
        """Update the parameters once; report, evaluate and write a snapshot where one is due and it may."""
        loop = self.config.loop
        spent = self.spent()
        factor = loop.factor(self.progress.step, spent)
        for micro in range(loop.accumulate):
            place, batch = next(self.batches)
            torch.manual_seed(_seed_of(self.config.seed, self.progress.step, micro))
            self._learn(batch)
            self.progress = replace(self.progress, place=place)
        if loop.accumulate > 1:  # here and not in the losses: an objective may derive one part from another's gradient
            self.optimiser.scale(1 / loop.accumulate)
        if loop.clip is not None:
            self.optimiser.clip(loop.clip)
        self.optimiser.update(factor)
        self.objective.updated()
        elapsed = self._now() - self.began
        self.progress = replace(self.progress, step=self.progress.step + 1, elapsed_s=elapsed)
        self._tell(spent, factor)
        if self.data.held_back and self.progress.step % loop.evaluate_steps == 0:
            self._evaluate()
        if may_save and time.monotonic() - self.saved >= loop.snapshot_s:
            self.save()
        if self._trim is not None and time.monotonic() - self._trimmed >= TRIM_S:
            self._trim(0)
            self._trimmed = time.monotonic()

    def check_steps(self) -> None:
        """Raise an error if the minutes of the budget were over before a second step, whose result is worth nothing."""
        minutes, seconds = self.config.loop.minutes, self.progress.elapsed_s
        if minutes is not None and self.progress.step < 2:
            took = f"{self.progress.step} steps" if self.progress.step == 0 else f"one step of {seconds:.1f} s"
            raise ConfigError(f"{minutes:g} minutes are over after {took}; give more")

    def finish(self) -> TrainResult:
        """Evaluate once more, write the last snapshot and restore the best parameters."""
        is_due = self.progress.step % self.config.loop.evaluate_steps or not self.held_back
        if self.data.held_back and is_due:
            self._evaluate()
        if self.data.held_back and self.progress.best_loss is None:
            raise UsageError("the loss on held-back rows is no number: lower the rates, and start in an empty folder")
        self.save()
        if self.data.held_back:
            self._take_best()
        return TrainResult(self.progress, self.held_back)

    def _learn(self, batch: B) -> None:
        """Add the gradients of one batch to those at hand."""
        metrics: defaultdict[str, float] = defaultdict(float)
        total = 0.0
        with self._arithmetic():
            for loss, seen in self.objective.losses(self.model, batch):
                loss.backward()
                total += float(loss.detach())
                for name, value in seen.items():
                    metrics[name] += value
        wrong = [f"{name} {value}" for name, value in {**metrics, "loss": total}.items() if not math.isfinite(value)]
        if wrong:
            raise UsageError(
                f"{wrong[0]} at step {self.progress.step}: lower the rates or set clip, and start in an empty folder"
            )
        self.window.add(metrics, batch.num_elements)
        self.progress = replace(self.progress, num_tokens=self.progress.num_tokens + batch.num_elements)

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        device = self.optimiser.params[0].device  # the loss is computed where the trained parameters are
        with torch.autocast(device.type, torch.bfloat16, enabled=self.config.loop.autocast), any_order():
            yield

    def _tell(self, spent: float, factor: float) -> None:
        if self.progress.step % self.config.loop.report_steps:
            return
        share = self.spent()
        eta = self.progress.elapsed_s / share * (1 - share) if share else 0.0
        metrics, rate = self.window.close()
        self.report.reading(StepMeans(self.progress.step, spent, factor, rate, eta, metrics, self.data.unit))

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Compute the mean loss and metrics over the held-back batches, each batch counted by its weight."""
        sums: defaultdict[str, float] = defaultdict(float)
        count = 0
        torch.manual_seed(self.config.seed)
        for batch in self.data.held_back:
            weight = batch.weight
            count += weight
            with self._arithmetic():
                for loss, seen in self.objective.losses(self.model, batch):
                    for name, value in {**seen, "loss": float(loss)}.items():
                        sums[name] += value * weight
        self.held_back = {name: value / max(1, count) for name, value in sums.items()}
        best = self.progress.best_loss
        is_best = math.isfinite(self.held_back["loss"]) and (best is None or self.held_back["loss"] < best)
        if is_best:
            kept = {"params": [p.detach() for p in self.optimiser.params], "step": self.progress.step}
            write_state(self.folder / BEST, kept)
            self.progress = replace(self.progress, best_loss=self.held_back["loss"], best_step=self.progress.step)
        self.report.held_back(self.progress.step, self.held_back, is_best)
        self.window.restart()

    @torch.no_grad()
    def _take_best(self) -> None:
        if self.progress.best_step != self.progress.step:
            for p, value in zip(self.optimiser.params, read_state(self.folder / BEST)["params"], strict=True):
                p.copy_(value)
            self.report.note(f"kept the parameters of step {self.progress.best_step}, the best on held-back rows")

    def save(self) -> None:
        """Write a snapshot."""
        elapsed = self._now() - self.began
        self.progress = replace(self.progress, elapsed_s=elapsed)
        save_snapshot(self.folder, self.progress, self.optimiser.state(), self.objective, self.config.plan)
        self.saved = time.monotonic()


class _Window:
    """Sums of metrics and elements since the last report."""

    def __init__(self) -> None:
        self._clock: Callable[[], float] = time.monotonic
        self._sums: defaultdict[str, float] = defaultdict(float)
        self.restart()

    def restart(self) -> None:
        self._sums.clear()
        self._count = self._elements = 0
        self._since = self._clock()

    def add(self, metrics: Mapping[str, float], num_elements: int) -> None:
        for name, value in metrics.items():
            self._sums[name] += value
        self._count += 1
        self._elements += num_elements

    def close(self) -> tuple[dict[str, float], float]:
        means = {name: value / max(1, self._count) for name, value in self._sums.items()}
        rate = self._elements / max(1e-9, self._clock() - self._since)
        self.restart()
        return means, rate


def _seed_of(seed: int, step: int, micro: int) -> int:
    """Return a seed for one batch that depends on its place in the run alone, so that a resumed run draws the same."""
    return ((seed * 1_000_003 + step) * 4099 + micro) % 2**63
