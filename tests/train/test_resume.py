"""A run killed with -9 at a random step and resumed has the weights of one that was not, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.train import killed
from vivace.checkpoint.tokenizer import Tokenizer
from vivace.errors import CheckpointError, CorruptError, MismatchError
from vivace.train.resume import STATE, HasState, TrainProgress, load_snapshot, read_state, save_snapshot, write_state

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def start_and_kill(folder: Path, tokenizer: str, at_step: int, delay_s: float) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "tests/train/killed.py"), str(folder), tokenizer]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(f"step {at_step} ") and "held back" not in line:
                break
        time.sleep(delay_s)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL


def test_a_killed_run_resumes_to_the_same_bits(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = str(tokenizer.inner.name_or_path)
    whole = killed.train(tmp_path / "whole", Path(source))
    rng = random.Random()
    first = rng.randint(2, killed.STEPS - 25)
    start_and_kill(tmp_path / "killed", source, first, rng.random() * 0.03)
    stopped = read_state(tmp_path / "killed" / STATE)["progress"]["step"]
    assert first - 1 <= stopped < killed.STEPS, "the kill came too late to prove anything"
    resumed = killed.train(tmp_path / "killed", Path(source))
    for (name, ours), theirs in zip(resumed.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs), f"{name} differs after a kill at step {stopped}"
    states = [read_state(tmp_path / run / STATE) for run in ("killed", "whole")]
    for mine, other in zip(*(s["optimiser"]["parts"] for s in states), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine["masters"], other["masters"], strict=True))
        for a, b in zip(mine["moments"], other["moments"], strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not [path for path in (tmp_path / "whole").iterdir() if "partial" in path.name]


class Counting:
    """An objective's memory."""

    def __init__(self) -> None:
        self.count = 0

    def state(self) -> dict[str, int]:
        return {"count": self.count}

    def restore(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Stub:
    """An optimiser's memory."""

    def __init__(self) -> None:
        self.seen: object = None

    def restore(self, state: object) -> None:
        self.seen = state


def test_an_objectives_own_memory_comes_back(tmp_path: Path) -> None:
    first, second, optimiser = Counting(), Counting(), Stub()
    assert isinstance(first, HasState)
    first.count = 5
    save_snapshot(tmp_path, TrainProgress(step=4), {"a": 1}, first, "plan")
    found = load_snapshot(tmp_path, optimiser, second, "plan")
    assert (found, second.count, optimiser.seen) == (TrainProgress(step=4), 5, {"a": 1})


def test_another_plan_is_refused_and_no_snapshot_is_a_start(tmp_path: Path) -> None:
    assert load_snapshot(tmp_path, Stub(), Counting(), "plan") is None
    save_snapshot(tmp_path, TrainProgress(), {}, Counting(), "plan")
    with pytest.raises(MismatchError, match="another recipe"):
        load_snapshot(tmp_path, Stub(), Counting(), "other")
    save_snapshot(tmp_path, TrainProgress(step=3), {}, Counting(), json.dumps({"base": "b", "rows": 2}))
    with_digest = {"base": "b", "data": "1234", "rows": 2}
    assert load_snapshot(tmp_path, Stub(), Counting(), json.dumps(with_digest)) == TrainProgress(step=3)
    save_snapshot(tmp_path, TrainProgress(step=3), {}, Counting(), json.dumps(with_digest))
    with pytest.raises(MismatchError, match="another recipe"):
        load_snapshot(tmp_path, Stub(), Counting(), json.dumps(with_digest | {"data": "5678"}))


def test_a_truncated_state_is_named_and_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / STATE
    write_state(path, {"x": torch.ones(100)})
    whole = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match="No space left"):
        write_state(path, {"x": torch.zeros(100)})
    assert path.read_bytes() == whole
    assert [p.name for p in tmp_path.iterdir()] == [STATE]
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptError, match="truncated"):
        read_state(path)


@pytest.mark.parametrize(
    "found", [b"hello", b"\x80\x02a.", b"\x80\x02G.", {}, {"format": 1, "plan": "plan"}, {"weight": 1}]
)
def test_what_is_no_state_is_one_line(tmp_path: Path, found: bytes | dict[str, object]) -> None:
    path = tmp_path / STATE
    if isinstance(found, bytes):
        path.write_bytes(found)
    else:
        write_state(path, found)
    with pytest.raises(CorruptError, match="not a training state"):
        load_snapshot(tmp_path, Stub(), Counting(), "plan")


def test_no_flipped_bit_is_taken_for_a_weight(tmp_path: Path) -> None:
    """Of every third byte one bit: what is read is what was written, or the file is refused in one line."""
    path, content = tmp_path / STATE, {"step": 7, "weight": torch.arange(12.0), "plan": "plan"}
    write_state(path, content)
    whole, num_refused = path.read_bytes(), 0
    for place in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            found = read_state(path)
        except CorruptError:
            num_refused += 1
        else:
            assert torch.equal(found.pop("weight"), content["weight"])
            assert found == {"step": 7, "plan": "plan"}
    assert num_refused > len(whole) / 12


def test_a_plan_is_any_text(tmp_path: Path) -> None:
    save_snapshot(tmp_path, TrainProgress(), {}, Counting(), "3")
    with pytest.raises(MismatchError, match="another recipe"):
        load_snapshot(tmp_path, Stub(), Counting(), "4")
