"""On a GPU: the texts of the CPU in float32, kernel by kernel and as graphs. Run with ``-m gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vivace
from tests.every_method import make_model
from vivace.core.cuda.graphs import GraphSpan
from vivace.methods.table import METHODS

PROMPTS = ("aka bob aka bob aka bob", "the quick fox the quick fox the", "fox")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device"),
]


def texts(folder: Path, method: str, **how: str) -> list[tuple[int, ...]]:
    engine = vivace.load(folder, **{"dtype": "float32", **how})  # type: ignore[arg-type]
    answers = engine.generate(PROMPTS, method=method, max_new_tokens=24, ignore_eos=True, do_sample=False)
    if how.get("kernels") == "graphs":
        assert isinstance(engine.model.backend.span, GraphSpan)
        assert len(engine.model.backend.span.recordings)
    return [answer.token_ids for answer in answers]


NATIVE = ("quantized", "quantized+lookup")
"""Methods of native kernels, which are refused beside others."""


@pytest.mark.parametrize("method", ["plain", "multirate", "deed"])
def test_whole_steps_in_bfloat16_write_the_text_of_single_launches(tmp_path: Path, method: str) -> None:
    folder = make_model(tmp_path, method)
    by_launch, by_graph = (
        texts(folder, method, kernels=kernels, device="cuda", dtype="bfloat16") for kernels in ("torch", "graphs")
    )
    assert by_graph == by_launch


@pytest.mark.parametrize("kernels", ["torch", "graphs"])
@pytest.mark.parametrize("method", [name for name in METHODS if name not in NATIVE])
def test_every_method_writes_the_text_of_the_cpu(tmp_path: Path, method: str, kernels: str) -> None:
    folder = make_model(tmp_path, method)
    expected = texts(folder, method, kernels="torch", device="cpu")
    assert texts(folder, method, kernels=kernels, device="cuda") == expected
