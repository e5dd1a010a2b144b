"""One LoRA (Hu et al. 2021, arXiv:2106.09685) in memory: read from PEFT's files, cast and laid out for a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vivace.checkpoint.families import family_of
from vivace.checkpoint.files import RECOVERY
from vivace.checkpoint.load import read_config
from vivace.checkpoint.lora_config import CONFIG, DRAFTING
from vivace.checkpoint.peft import TENSORS, Lora, ModuleTable, base_of, load_lora
from vivace.core.layers import FeedForward, Linear
from vivace.core.low_rank import FactorLayout, FixedFactors, Site
from vivace.core.model import Decoder, Layer
from vivace.errors import CorruptError, MismatchError, NotFoundError, UnsupportedError


def recovery_of(base: Path) -> Path | None:
    """Return the folder of the LoRA that a checkpoint wears unless another one is named; None where it has none.

    Raises:
        MismatchError: its file does not say which checkpoint it is for.
    """
    folder = base / "adapters" / RECOVERY
    if not (folder / CONFIG).is_file():
        return None
    if base_of(folder, None) is None:
        raise MismatchError(
            f"{folder} does not say which checkpoint it is for; train one with vivace train recover, or put it "
            f"elsewhere and name it (--adapter {RECOVERY}=DIR --use {RECOVERY})"
        )
    return folder


def table_of(base: Path, model: Decoder) -> ModuleTable:
    """Return the matrices of a model by the names that its checkpoint's family gives them."""
    return ModuleTable(family_of(read_config(base)).names, model.config)


def why_no_lora(model: Decoder) -> str | None:
    """Return why a model's rows cannot carry low-rank deltas, or None where they can."""
    if model.stateful:
        return "it reads only the neurons that it predicts to be active, and a LoRA changes which these are"
    return None


@dataclass(frozen=True)
class FactorFile:
    """A file of factors whose numbers lie in it as they do in memory, so that all of them can be read again at once."""

    path: Path
    first: int
    """Byte at which the numbers begin."""
    stored: torch.dtype
    """In which the file has them."""
    scale: float
    """What up factors are multiplied by."""
    layout: FactorLayout
    dtype: torch.dtype
    """In which factors are held."""
    device: torch.device

    @staticmethod
    def of(path: Path, read: Lora, factors: FixedFactors) -> FactorFile | None:
        """Return a file of factors, or None where they lie in it in another order, or are not all alike.

        Args:
            path: safetensors file, which ends with its numbers.
            read: what was read from it.
            factors: the same, held.
        """
        if read.stored is None or read.scale is None:
            return None
        memory = factors.memory
        first = path.stat().st_size - memory.numel() * read.stored.itemsize
        found = FactorFile(path, first, read.stored, read.scale, factors.layout, memory.dtype, memory.device)
        return found if torch.equal(found._numbers(), memory) else None

    def read(self) -> FixedFactors:
        """Read the factors.

        Raises:
            CorruptError: the file has become shorter or longer.
        """
        return FixedFactors(self._numbers(), self.layout)

    def _numbers(self) -> Tensor:
        numbers = torch.from_numpy(np.fromfile(self.path, np.uint8, offset=self.first))
        if len(numbers) != self.stored.itemsize * self.layout.num_numbers:
            raise CorruptError(f"{self.path} is not of the length that it had; load the adapter again")
        memory = numbers.view(self.stored)
        if self.scale != 1:
            memory = memory.float()
            views = self.layout.views(memory)
            torch._foreach_mul_([views[place] for place in sorted(set(self.layout.up.values()))], self.scale)
        return memory.to(self.device, self.dtype)


class HeldLora(NamedTuple):
    """A LoRA in memory."""

    factors: FixedFactors
    """In the model's precision."""
    base: str | None
    """The base's hash as the file has it; None where it has none."""
    file: FactorFile | None
    """From which it can be read again at once; None where its factors have to be looked up one by one."""


def lora_factors(folder: Path, table: ModuleTable, model: Decoder, base: str, *, is_known: bool = False) -> HeldLora:
    """Read a LoRA for a model.

    Args:
        folder: PEFT's folder.
        table: the model's matrices.
        model: for whose rows it is.
        base: ``base_hash`` of the model's checkpoint.
        is_known: whether the same files were read before, so that their numbers need not be looked at again.

    Raises:
        CheckpointError: it is missing, broken or of another base.
        UnsupportedError: it is more than a LoRA, or the model's rows cannot carry one.
    """
    if (reason := why_no_lora(model)) is not None:
        raise UnsupportedError(f"this model takes no LoRA: {reason}")
    read = load_lora(folder, table, base, is_known=is_known)
    factors = FixedFactors.of(read.factors, model.device, model.dtype)
    return HeldLora(factors, read.base, None if is_known else FactorFile.of(folder / TENSORS, read, factors))


def draft_weights_of(folder: Path) -> list[Path]:
    """Return the folders of draft weights that were trained over a LoRA, which lie beside its files."""
    place = folder / DRAFTING
    return sorted(each for each in place.iterdir() if each.is_dir()) if place.is_dir() else []


def merge_into(model: Decoder, factors: Mapping[Site, tuple[Tensor, Tensor]]) -> None:
    """Add a LoRA to a model's own matrices, for training beside it; the model is then the adapted one for good.

    Args:
        model: a decoder whose matrices are in memory as they were trained.
        factors: down (rank, in) and up (out, rank) of each site, the scale folded in.

    Raises:
        UnsupportedError: a matrix is packed, quantized, or read from a disk.
    """
    c = model.config
    query, key = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    above = {"k": query, "v": query + key, "up": c.ffn_width if c.gated else 0}
    for (number, site), (down, up) in factors.items():
        layer = model.layers[number]
        assert isinstance(layer, Layer)
        matrix: nn.Module = layer.o if site == "o" else layer.qkv
        if site in ("gate", "up", "down"):
            assert isinstance(layer.feed_forward, FeedForward)
            matrix = layer.feed_forward.down if site == "down" else layer.feed_forward.up
        if type(matrix) is not Linear:
            raise UnsupportedError("drafts over a LoRA are trained on weights as they are stored; load them with torch")
        first = above.get(site, 0)
        with torch.no_grad():
            weight = matrix.weight.detach().clone()  # a loaded weight is a view of the file
            weight[first : first + len(up)] += (up.float() @ down.float()).to(weight)
            matrix.weight.data = weight


def stamp_of(folder: Path) -> tuple[tuple[int, int, int], ...] | None:
    """Return size, time and inode of a LoRA's two files, which change when the files do; None where one is missing."""
    try:
        stats = [(folder / name).stat() for name in (CONFIG, TENSORS)]
    except OSError:
        return None
    return tuple((each.st_size, each.st_mtime_ns, each.st_ino) for each in stats)


def version_of(folder: Path) -> str:
    """Return the SHA-256 of a LoRA's two files, 64 hexadecimal digits.

    Raises:
        NotFoundError: one is missing.
    """
    digest = hashlib.sha256()
    for name in (CONFIG, TENSORS):
        path = folder / name
        if not path.is_file():
            raise NotFoundError(f"{folder} has no {name}")
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
