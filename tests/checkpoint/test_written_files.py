"""What files of weights are like once they are written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from vivace.checkpoint.files import write_tensors


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_weights_may_be_read_by_whom_other_new_files_may(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "model.safetensors", {"a": torch.zeros(2)})
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == mode


def test_the_same_tensors_and_metadata_make_the_same_bytes(tmp_path: Path) -> None:
    path, notes = tmp_path / "model.safetensors", {"ä": 'one "two"\n\x1f', "base": "\b\x7f\\", "c": "\u2028"}
    tensors = {"b": torch.arange(3), "a": torch.ones(2, 2, dtype=torch.bfloat16)}
    written = set()
    for _ in range(12):
        write_tensors(path, tensors, notes)
        written.add(path.read_bytes())
    assert len(written) == 1
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", **notes}
        assert all(torch.equal(file.get_tensor(name), value) for name, value in tensors.items())
