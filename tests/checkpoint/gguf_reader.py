"""A small reader of GGUF files, written from the format's description and not from our writer."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_NUMBERS = {0: np.float32, 1: np.float16}


@dataclass
class Gguf:
    keys: dict[str, Any]
    kinds: dict[str, int]
    tensors: dict[str, Tensor]
    """float32, or bfloat16 where stored so."""


def read_gguf(path: Path) -> Gguf:
    data = path.read_bytes()
    at = 0

    def take(letters: str) -> tuple[Any, ...]:
        nonlocal at
        found = struct.unpack_from(f"<{letters}", data, at)
        at += struct.calcsize(f"<{letters}")
        return found

    def text() -> str:
        nonlocal at
        (length,) = take("Q")
        at += length
        return data[at - length : at].decode()

    def value(kind: int) -> Any:
        if kind == 8:
            return text()
        if kind == 9:
            inner, count = take("IQ")
            return [value(inner) for _ in range(count)]
        return take(_SCALARS[kind])[0]

    assert data[:4] == b"GGUF"
    at = 4
    version, num_tensors, num_keys = take("IQQ")
    assert version == 3
    keys = {}
    for _ in range(num_keys):
        name = text()
        keys[name] = value(*take("I"))
    table = []
    for _ in range(num_tensors):
        name, (rank,) = text(), take("I")
        table.append((name, take(f"{rank}Q")[::-1], *take("IQ")))
    start = -(-at // 32) * 32
    assert all(offset % 32 == 0 for *_, offset in table)
    tensors = {name: read_values(data[start + offset :], shape, kind) for name, shape, kind, offset in table}
    return Gguf(keys, {name: kind for name, _, kind, _ in table}, tensors)


def read_values(data: bytes, shape: tuple[int, ...], kind: int) -> Tensor:
    count = int(np.prod(shape))
    if kind == 30:
        return torch.frombuffer(bytearray(data[: 2 * count]), dtype=torch.bfloat16).view(shape)
    if kind in _NUMBERS:
        return torch.from_numpy(np.frombuffer(data, _NUMBERS[kind], count).astype(np.float32)).view(shape)
    size = {8: 34, 2: 18}[kind]
    blocks = np.frombuffer(data, np.uint8, count // 32 * size).reshape(-1, size)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == 8:
        codes = blocks[:, 2:].view(np.int8).astype(np.float32)
    else:
        codes = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1).astype(np.float32) - 8
    return torch.from_numpy(scale * codes).view(shape)
