"""What both programs get that decode under a limit of memory."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import capped


class Told(Exception):
    """Ends a measurement where a program is asked for."""


def test_llama_cpp_computes_with_as_many_threads_as_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def open_model(path: str, **options: Any) -> None:
        asked.update(options)
        raise Told

    made: Any = ModuleType("llama_cpp")
    made.Llama, made.llama_get_logits_ith = open_model, None
    monkeypatch.setitem(sys.modules, "llama_cpp", made)
    monkeypatch.setattr(capped, "drop", lambda path: None)
    monkeypatch.setattr(capped, "enter", lambda limit: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    with pytest.raises(Told):
        capped.llama(tmp_path / "model.gguf", 1, 4)
    assert (asked["n_threads"], asked["n_threads_batch"]) == (7, 7)
