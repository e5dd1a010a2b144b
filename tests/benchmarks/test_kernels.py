"""A token of plain decoding is timed as often as is asked for, however short the text."""

from __future__ import annotations

import pytest
import torch

from benchmarks import kernels


def test_a_text_that_is_at_its_end_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CONTEXT", 4)
    monkeypatch.setattr(kernels, "LONGEST", 16)
    shape = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    decoder = kernels._random_llama({**shape, "num_attention_heads": 2, "num_key_value_heads": 1})
    with torch.inference_mode():
        step = kernels._tokens(decoder)
        assert all(step() for _ in range(40))
