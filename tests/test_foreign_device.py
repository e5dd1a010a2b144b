"""Decoding and training on a device other than the CPU: every tensor is made there, and the text is the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vivace
from tests.core import decoders
from tests.core.foreign_device import FOREIGN, copied, foreign_device
from tests.decode.runs import finish
from tests.every_method import NOT_QUICK, make_model
from tests.objectives.case import BATCH
from tests.objectives.test_objectives import CASES
from vivace.checkpoint.load import choose_device
from vivace.core.cuda.backend import CudaBackend
from vivace.core.cuda.graphs import GraphSpan
from vivace.core.cuda.recordings import Results
from vivace.core.cuda.whole_step import WHOLE_STEP
from vivace.decode.depth import ExitThresholds
from vivace.decode.plain import NoDrafts
from vivace.decode.prefix import PrefixCache
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.decode.shallow import DraftPlan
from vivace.decode.tree import TreePlan
from vivace.engine import Engine
from vivace.errors import UnsupportedError
from vivace.kernels.choice import choose
from vivace.methods.confidence.drafter import Confidence, ConfidenceConfig, ConfidencePlan, ConfidentDepth
from vivace.methods.table import METHODS
from vivace.train.data import TokenBatch

PROMPTS = ("aka bob aka bob aka bob", "the quick fox the quick fox the", "fox")
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 3}
STRICT: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "exact": True}
TREES: dict[str, Any] = {
    "multirate": DraftPlan((2, 2, 1)),
    "eagle": DraftPlan((2, 1)),
    "medusa": TreePlan((3, 2), 4),
    "uno": TreePlan((2, 2)),
}
Run = Callable[[Engine], list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("foreign")


def opened(folder: Path, method: str) -> Engine:
    return vivace.load(make_model(folder, method), kernels="torch", dtype="float32")


def moved(engine: Engine) -> Engine:
    """The engine, its models on the foreign device; drafters are made there when they are asked for."""
    engine.model.to(FOREIGN)
    if engine.methods.second is not None:
        engine.methods.second.decoder.to(FOREIGN)
    return engine


def texts(engine: Engine, method: str, **options: Any) -> list[tuple[int, ...]]:
    asked = {"method": method, "max_new_tokens": 6, "ignore_eos": True, **options}
    return [answer.token_ids for answer in engine.generate(PROMPTS, **asked)]


def same_on_both(folder: Path, method: str, run: Run) -> None:
    expected = run(opened(folder, method))
    with foreign_device():
        found = run(moved(opened(folder, method)))
    assert found == expected
    assert copied, "numbers that Python reads are copied from the device"


def remembered(work: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
    """Record by remembering what is to be done; what would read numbers is refused, as a graph refuses it."""
    before = copied.total()
    results = work()
    assert copied.total() == before, f"a graph waits for no number: {sorted(copied)}"

    def launch() -> None:
        for place, value in zip(results, work(), strict=True):
            place.copy_(value)

    return launch, results


@pytest.mark.parametrize("method", ["plain", "multirate", "deed"])
def test_whole_steps_are_made_there(folder: Path, method: str) -> None:
    def run(engine: Engine) -> list[tuple[int, ...]]:
        if engine.model.device == FOREIGN:
            engine.model.run_on(CudaBackend(remembered))
        found = [text for _ in range(3) for text in texts(engine, method, **GREEDY)]
        assert engine.model.device != FOREIGN or any(shape[0] == WHOLE_STEP for shape in recorded_shapes(engine))
        return found

    same_on_both(folder, method, run)


def recorded_shapes(engine: Engine) -> list[Any]:
    span = engine.model.backend.span
    assert isinstance(span, GraphSpan)
    return list(span.recordings.shapes)


def test_a_tensor_of_the_cpu_is_found() -> None:
    """The device itself: what meets a tensor of the CPU is named, copies and numbers are not."""
    with foreign_device():
        there = torch.tensor([1.0, 2.0], device=FOREIGN)
        assert (there.to("cpu") + torch.ones(2)).tolist() == [2.0, 3.0]
        assert (there + 1).tolist() == [2.0, 3.0]
        assert there[[1]].tolist() == [2.0]
    with pytest.raises(AssertionError, match="two devices met at 1 places"), foreign_device():
        torch.zeros(2, device=FOREIGN) + torch.ones(2)


@NOT_QUICK
@pytest.mark.parametrize("method", METHODS)
def test_every_method(folder: Path, method: str) -> None:
    same_on_both(folder, method, lambda e: texts(e, method, **GREEDY) + texts(e, method, **SAMPLED))


def test_a_step_waits_for_the_device_once(folder: Path) -> None:
    """Of a plain greedy step only the token is read back; everything else that Python needs it knows already."""
    engine, reads = opened(folder, "plain"), []
    for count in (4, 16):
        with foreign_device():
            moved(engine).generate(PROMPTS[0], method="plain", max_new_tokens=count, ignore_eos=True, **GREEDY)
            reads.append(sum(copied.values()))
    assert reads[1] - reads[0] == 12, copied


def test_processors_and_padded_calls(folder: Path) -> None:
    same_on_both(folder, "plain", lambda e: texts(e, "plain", min_new_tokens=4, **STRICT))


@pytest.mark.parametrize("method", TREES)
def test_trees(folder: Path, method: str) -> None:
    def run(engine: Engine) -> list[tuple[int, ...]]:
        engine.methods = engine.methods.planned(TREES[method])
        return texts(engine, method, **GREEDY)

    same_on_both(folder, method, run)


@NOT_QUICK
@pytest.mark.parametrize("method", ["multirate", "eagle", "medusa"])
def test_behind_a_cached_prompt(folder: Path, method: str) -> None:
    def run(engine: Engine) -> list[tuple[int, ...]]:
        prefix = PrefixCache(engine.model.config, chunk=4, max_bytes=1 << 24).salted(None)
        asked = vivace.engine.Options(method=method, max_new_tokens=6, ignore_eos=True, do_sample=False)
        requests = [replace(engine.request(prompt, asked), prefix=prefix) for prompt in PROMPTS[:1] * 2]
        session = Session(engine.model, num_slots=1, capacity=64, chunk=4)
        answers = finish(session, requests)
        assert answers[1].stats.num_cached_tokens > 0
        return [answer.tokens for answer in answers]

    same_on_both(folder, method, run)


@pytest.mark.parametrize("missing", ["deferred", "propagate", "mask"])
def test_early_exit_with_missing_entries(folder: Path, missing: Any) -> None:
    def run(engine: Engine) -> list[tuple[int, ...]]:
        plan = ConfidencePlan((ExitThresholds(0.98, (0.1, 0.1)),), missing)
        drafter = ConfidentDepth("calm", Confidence(ConfidenceConfig((2, 4)), engine.model.config), plan)
        asked = vivace.engine.Options(max_new_tokens=6, ignore_eos=True, do_sample=False)
        requests = [replace(engine.request(prompt, asked), drafter=drafter) for prompt in PROMPTS]
        answers = finish(Session(engine.model, num_slots=2, capacity=64), requests)
        assert any(answer.stats.num_early_exits for answer in answers)
        return [answer.tokens for answer in answers]

    same_on_both(folder, "plain", run)


@pytest.mark.parametrize("variant", decoders.VARIANTS)
def test_every_kind_of_decoder(variant: str) -> None:
    prompt = tuple(decoders.tokens(20))

    def run(device: torch.device | str) -> tuple[int, ...]:
        model = decoders.build(variant).to(device)
        [answer] = finish(Session(model, num_slots=1, capacity=64, chunk=8), [Request(prompt, 6, NoDrafts())])
        return answer.tokens

    expected = run("cpu")
    with foreign_device() as device:
        assert run(device) == expected


def test_logits(folder: Path) -> None:
    expected = opened(folder, "plain").logits([[1, 2, 3], [4, 5, 6]])
    with foreign_device():
        found = moved(opened(folder, "plain")).logits([[1, 2, 3], [4, 5, 6]])
        assert torch.allclose(found.cpu(), expected, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_every_objective(name: str) -> None:
    expected = descent(name, "cpu")
    with foreign_device() as device:
        assert descent(name, device) == pytest.approx(expected, rel=1e-3)


def descent(name: str, device: torch.device | str) -> tuple[float, float]:
    """The loss of an objective and the size of its gradient."""
    torch.manual_seed(6)
    case = CASES[name]()
    case.model.to(device)
    for part in vars(case.objective).values():
        if isinstance(part, nn.Module):
            part.to(device)
    batch = TokenBatch(BATCH.tokens.to(device), BATCH.scored.to(device))
    torch.manual_seed(7)
    total = 0.0
    for loss, _ in case.objective.losses(case.model, batch):
        total += float(loss.detach())
        loss.backward()  # type: ignore[no-untyped-call]
    learnt = [p for group in case.objective.groups() for p in group["params"]]  # type: ignore[attr-defined]
    size = sum(float(p.grad.float().square().sum()) for p in learnt if p.grad is not None) ** 0.5
    assert size > 0
    return total, size


def test_the_device_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert {choose_device(name) for name in ("auto", "cpu")} == {torch.device("cpu")}
    for name in ("tpu", "mps", "cuda:first"):
        with pytest.raises(UnsupportedError, match=f"no device '{name}'"):
            choose_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="finds no CUDA device here: install"):
        vivace.load(make_model(folder, "plain"), device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [choose_device(name).index for name in ("cuda", "cuda:1")] == [0, 1]
    with pytest.raises(UnsupportedError, match="no cuda:2: PyTorch finds 2"):
        choose_device("cuda:2")


def test_native_kernels_stay_on_the_cpu(folder: Path) -> None:
    gpu = torch.device("cuda:0")
    assert choose(device=gpu).name == "graphs"
    assert choose("torch", device=gpu).name == "torch"
    with pytest.raises(UnsupportedError, match="avx2 kernels run on the CPU"):
        choose("avx2", device=gpu)
