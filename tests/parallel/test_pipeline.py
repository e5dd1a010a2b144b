"""Layers that several ranks compute one after the other have the bits of one process, in prompts and in decoding."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import vivace
from tests.checkpoint.gguf.families import make as make_codes
from tests.checkpoint.gguf.families import write_file
from tests.parallel.ranks import Ended, run_ranks
from tests.parity.families import make
from tests.tiny_checkpoints import make_checkpoint
from vivace.errors import ConfigError
from vivace.parallel.pipeline import stage_of

pytestmark = pytest.mark.multiprocess

TOGETHER = {"parallel": "pipeline", "timeout": 30.0}
IDS = torch.randint(5, 90, (600,), generator=torch.Generator().manual_seed(1)).tolist()


def answers(folder: Path, kernels: str, length: int, together: dict[str, Any]) -> Any:
    """Logits of a text, answers to prompts of several chunks and of one, in a batch, and beams."""
    engine = vivace.load(folder, kernels=kernels, **together)
    logits = engine.logits([IDS[:40], IDS[40:80]])
    prompts: list[Any] = [IDS[:length], IDS[3:20], IDS[5:length]]
    texts = [engine.generate(prompts, method=method, max_new_tokens=12, batch_size=2) for method in ("plain", "lookup")]
    beams = engine.generate([IDS[:30]], num_beams=3, max_new_tokens=6, do_sample=False)
    found = [result.token_ids for results in (*texts, beams) for result in results]
    return logits, found, None if engine.world is None else engine.world.traffic


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("count", [2, 3])
def test_texts_and_logits_are_those_of_one_process(count: int, kernels: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, context=640, layers=3)
    alone = answers(tmp_path, kernels, 560, {})
    led, *followed = run_ranks(count, answers, tmp_path, kernels, 560, TOGETHER)
    assert torch.equal(led[0], alone[0])
    assert led[1] == alone[1]
    assert [each.status for each in followed] == [0] * (count - 1)


def test_the_codes_of_a_file_are_kept_on_all_ranks(tmp_path: Path) -> None:
    path = write_file("llama", make_codes("llama"), tmp_path / "m.gguf", "q8_0")
    alone = answers(path, "auto", 100, {})
    led, _ = run_ranks(2, answers, path, "auto", 100, TOGETHER)
    assert torch.equal(led[0], alone[0])
    assert led[1] == alone[1]


@pytest.mark.parametrize("family", ["gemma3_text", "gpt2"])
def test_windows_and_learned_positions(family: str, tmp_path: Path) -> None:
    make(family).save_pretrained(tmp_path)
    alone = answers(tmp_path, "torch", 200, {})
    led, _ = run_ranks(2, answers, tmp_path, "torch", 200, TOGETHER)
    assert torch.equal(led[0], alone[0])
    assert led[1] == alone[1]


def test_layers_are_divided_and_too_many_ranks_are_refused(tmp_path: Path) -> None:
    for ranks in (2, 3, 5, 8):
        stages = [stage_of(rank, ranks, 30) for rank in (*range(1, ranks), 0)]
        assert stages[0][0] == 0
        assert stages[-1][1] == 30
        assert all(stop == first for (_, stop), (first, _) in pairwise(stages))
    make_checkpoint(tmp_path, layers=2)

    def work() -> Any:
        try:
            vivace.load(tmp_path, kernels="torch", **TOGETHER)
        except ConfigError as error:
            return str(error)
        return "nothing happened"

    first, *others = run_ranks(3, work)
    assert first == "3 ranks cannot share 2 layers; start fewer"
    assert all(isinstance(other, Ended) and other.status not in (0, None) for other in others)
