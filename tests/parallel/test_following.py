"""A follower's caches go through what rank 0 does to its own."""

from __future__ import annotations

from typing import Any, cast

import torch

from tests.decode.tiny_decoders import build
from vivace.parallel import passes
from vivace.parallel.following import Follower


def test_what_is_restored_can_be_cut() -> None:
    """A pass failed and was taken back; afterwards a draft overshoots the end of a text."""
    follower = Follower(cast(Any, None), build(torch.float32))

    def do(operation: int, *numbers: int) -> None:
        follower.take(operation, [0, *numbers], memoryview(b""))

    do(passes.OPEN, 2, 64, 0)
    do(passes.RESTORE, 0, 0)
    do(passes.TRUNCATE, *passes.pack_lists([[0, 1], [0, 0]]))
    do(passes.RELEASE, 0, 1)
