"""Decoders whose layers are spread over processes compute what one process computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vivace
from tests.parallel.ranks import Ended, run_ranks
from tests.parity.families import CONFIGS, make
from tests.tiny_checkpoints import make_checkpoint
from vivace.checkpoint.families import FAMILIES

pytestmark = pytest.mark.multiprocess

MIXTURES = {"mixtral", "olmoe", "qwen3_moe"}
DENSE = sorted(set(CONFIGS) - MIXTURES)
IDS = [5, 9, 13, 2, 40, 41, 42, 17, 80, 3, 66, 5, 9, 13, 2, 40, 41, 42, 17, 80, 3, 66, 11]


def answers(folder: Path, kernels: str, together: dict[str, Any]) -> tuple[torch.Tensor, list[Any], Any]:
    """Logits of a text and answers to a few prompts, in a batch that sequences leave at different times."""
    engine = vivace.load(folder, kernels=kernels, dtype="float32", **together)
    logits = engine.logits([IDS, IDS[::-1]])
    prompts: list[Any] = [IDS, IDS[3:], IDS[::-1]]
    texts = [engine.generate(prompts, method=method, max_new_tokens=12, batch_size=2) for method in ("plain", "lookup")]
    sampled = engine.generate(IDS, method="lookup", max_new_tokens=8, temperature=0.9, seed=3)
    beams = engine.generate([IDS, IDS[4:]], num_beams=3, max_new_tokens=6, do_sample=False)
    found = [result.token_ids for results in (*texts, sampled, beams) for result in results]
    return logits, found, None if engine.world is None else engine.world.traffic


@pytest.mark.parametrize("name", DENSE)
def test_every_dense_family_on_two_ranks(name: str, tmp_path: Path) -> None:
    make(name).save_pretrained(tmp_path)
    alone = answers(tmp_path, "torch", {})
    led, followed = run_ranks(2, answers, tmp_path, "torch", {"parallel": "tensor", "timeout": 30.0})
    torch.testing.assert_close(led[0], alone[0], rtol=0, atol=1e-4)
    assert led[1] == alone[1]
    assert isinstance(followed, Ended)
    assert followed.status == 0


def test_all_families_are_tried() -> None:
    decoders = {name for name, family in FAMILIES.items() if not family.has_encoder}
    assert decoders - set(CONFIGS) == {"gemma3"}  # whose language model is gemma3_text
    assert len(DENSE) == 10


@pytest.mark.slow_where(lambda count, kernels: (count, kernels) in ((3, "auto"), (4, "torch")))
@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_more_ranks_than_key_value_heads(count: int, kernels: str, tmp_path: Path) -> None:
    make("qwen2").save_pretrained(tmp_path)
    alone = answers(tmp_path, kernels, {})
    led, *followed = run_ranks(count, answers, tmp_path, kernels, {"parallel": "tensor", "timeout": 30.0})
    torch.testing.assert_close(led[0], alone[0], rtol=0, atol=1e-4)
    assert led[1] == alone[1]
    assert [each.status for each in followed] == [0] * (count - 1)


def test_bytes_are_those_of_the_formula(tmp_path: Path) -> None:
    """Every row is summed twice in every layer; each rank sends its part of it to the other one."""

    def traffic(folder: Path) -> Any:
        engine = vivace.load(folder, kernels="torch", parallel="tensor", timeout=30.0)
        engine.logits([IDS])
        return engine.world.traffic["1"], engine.model.config

    make_checkpoint(tmp_path)
    (sent, config), _ = run_ranks(2, traffic, tmp_path)
    for point in ("o", "down"):
        assert sent[point]["bytes"] == config.num_layers * len(IDS) * config.width * 4
