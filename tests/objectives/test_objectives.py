"""What every training objective lowers, against a loop over positions that anybody can check.

The loops take guesses from the row-by-row forms that draft, so they also say that training and drafting agree.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import vivace
from tests.objectives import accelerated, rivals, streams, weights, whole
from tests.objectives.case import BATCH, Case

LOOPS_ELSEWHERE = {"TeacherForcing", "RecoveryObjective"}
"""The first has sources beside its texts, and its loop is in ``tests/train/test_teacher_forcing.py``; the second is the
distillation that the objectives below are compared for, of a model that wears a LoRA or stands behind a soft prompt, as
in ``tests/recipes/test_recover.py`` and ``tests/recipes/test_prompts.py``.
"""
CASES: dict[str, Callable[[], Case]] = {
    "multirate": accelerated.multirate,
    "multirate lite": lambda: accelerated.multirate(mode="lite"),
    "multirate feedback and reach": lambda: accelerated.multirate(feedback=True, reach=(3, 2)),
    "gates": accelerated.gates,
    "foresight": accelerated.foresight,
    "medusa": rivals.medusa,
    "medusa shared": lambda: rivals.medusa(own_output=False),
    "eagle": rivals.eagle,
    "deed": rivals.deed,
    "student": rivals.student,
    "uno": rivals.uno,
    "confidence": rivals.confidence,
    "multistream": streams.multistream,
    "multistream feedback": lambda: streams.multistream(feedback=True),
    "multistream rotation": lambda: streams.multistream(identifier="rotation"),
    "shared": streams.shared,
    "shared feedback": lambda: streams.shared(feedback=True),
    "shared feedback on every node": lambda: streams.shared(feedback=True, attach="every"),
    "shared unpruned": lambda: streams.shared(pruner_rank=0),
    "next token": whole.plain,
    "supervised": whole.supervised,
    "skipping": whole.skipping,
    "depths": whole.depths,
    "balanced": whole.balanced,
    "sparse": whole.sparse,
    "lora": weights.lora,
    "prompts": weights.soft_prompt,
    "palette": weights.palette,
    "palette entries": lambda: weights.palette(trains_entries=True),
}

NO_SLOPE = {
    "shared",
    "shared feedback",
    "shared feedback on every node",
    "balanced",
    "depths",
    "palette",
    "palette entries",
}
"""What is backed through is not the slope of these: part of it is cut from the graph, rows are chosen by rank, or
matrices are clustered softly, or not rounded, while they learn."""


def loss_of(case: Case) -> float:
    """The parts, without what only carries gradients on."""
    if not case.beside:
        with torch.no_grad():
            return sum(float(loss) for loss, _ in case.objective.losses(case.model, BATCH))
    total = 0.0
    for loss, seen in case.objective.losses(case.model, BATCH):
        loss.backward()  # type: ignore[no-untyped-call]
        beside = sum(weight * seen[name] for name, weight in case.beside.items() if name in seen)
        total += beside or float(loss.detach())
    return total


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_the_loop(name: str) -> None:
    case = CASES[name]()
    with torch.no_grad():
        expected = case.oracle()
    assert expected > 0.1, "a loss that says something"
    assert loss_of(case) == pytest.approx(expected, rel=3e-4)


@pytest.mark.parametrize("name", sorted(CASES.keys() - NO_SLOPE))
def test_a_step_against_the_gradient_lowers_it(name: str) -> None:
    """As much as the gradient says: the parts that are backed through one by one are the loss's own slope."""
    case = CASES[name]()
    weights: list[Tensor] = [p for group in case.objective.groups() for p in group["params"]]  # type: ignore[attr-defined]
    torch.manual_seed(0)
    for loss, _ in case.objective.losses(case.model, BATCH):
        loss.backward()  # type: ignore[no-untyped-call]
    slopes = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in weights]
    size = sum(float(g.double().square().sum()) for g in slopes) ** 0.5
    assert size > 0
    ends = []
    for way in (-0.01, 0.01):
        _move(weights, slopes, way / size)
        torch.manual_seed(0)
        ends.append(loss_of(case))
        _move(weights, slopes, -way / size)
    assert ends[1] - ends[0] == pytest.approx(0.02 * size, rel=0.05)


@torch.no_grad()
def _move(weights: list[Tensor], slopes: list[Tensor], far: float) -> None:
    for weight, slope in zip(weights, slopes, strict=True):
        weight.add_(slope, alpha=far)


def test_the_routers_loss_is_the_loop() -> None:
    """Binary cross-entropy, gate by gate; right gates count for as much as wrong ones, and at most five times."""
    expected, loss = accelerated.router()
    assert float(loss) == pytest.approx(expected, rel=3e-4)


def test_every_objective_has_a_loop() -> None:
    """A new one cannot be added without."""
    folder = Path(vivace.__file__).parent
    names = [".".join(path.relative_to(folder.parent).with_suffix("").parts) for path in folder.rglob("*.py")]
    found = set[type]()
    for name in names:
        if not name.endswith(("__main__", "fused_kernels")):  # a program, and what needs Triton
            members = inspect.getmembers(importlib.import_module(name), inspect.isclass)
            found |= {each for _, each in members if hasattr(each, "losses") and hasattr(each, "groups")}
    checked = {type(make().objective) for make in CASES.values()}
    others = {each.__name__ for each in found - checked} - LOOPS_ELSEWHERE
    assert others == {"Objective", "NextTokenBeside"}, "the seam and a mixin"
