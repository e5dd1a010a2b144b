"""What a process keeps of products of many shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vivace.kernels.heap import _CACHES

GROWN = """
import sys
import torch
from vivace.kernels.heap import keep_little, trimmer

def kept() -> int:
    trimmer()(0)
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("RssAnon")).split()[1])

if sys.argv[1] == "little":
    keep_little()
torch.set_num_threads(1)
weight = torch.randn(1536, 576, dtype=torch.bfloat16)
torch.nn.functional.linear(torch.randn(8, 576, dtype=torch.bfloat16), weight)
before = kept()
for rows in range(8, 1608, 8):
    torch.nn.functional.linear(torch.randn(rows, 576, dtype=torch.bfloat16), weight)
print(kept() - before)
"""


def test_little_is_kept_of_products_of_many_shapes() -> None:
    if not Path("/proc/self/status").is_file():
        pytest.skip("the system does not count a process's memory")
    plain = {name: value for name, value in os.environ.items() if name not in _CACHES}  # others have called it here

    def grown(word: str) -> int:
        words = [sys.executable, "-c", GROWN, word]
        return int(subprocess.run(words, capture_output=True, text=True, check=True, env=plain).stdout)

    little, usual = grown("little"), grown("usual")
    if usual < 30_000:
        pytest.skip("this processor's products keep nothing")
    assert little < 0.5 * usual
