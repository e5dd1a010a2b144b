"""What files of weights are like once they are written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from vivace.checkpoint.files import write_tensors


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_weights_may_be_read_by_whom_other_new_files_may(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "model.safetensors", {"a": torch.zeros(2)})
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == mode
