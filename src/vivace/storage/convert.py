"""Write a store from a checkpoint, bundle by bundle, in less memory than one layer takes."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from vivace.checkpoint.adapters import base_hash
from vivace.checkpoint.files import INDEX as SHARDS
from vivace.checkpoint.files import TEXT_PATTERNS, read_json, resolve, staged
from vivace.checkpoint.load import OpenCheckpoint, open_checkpoint, read_config
from vivace.checkpoint.quantized.settings import dense_config, is_quantized
from vivace.checkpoint.save import TEXT_FILES
from vivace.core.config import ModelConfig
from vivace.errors import ConfigError, UnsupportedError
from vivace.kernels.choice import choose
from vivace.kernels.layouts import layout_of
from vivace.kernels.library import LANES
from vivace.kernels.native import pack
from vivace.storage.io.readers import PAGE
from vivace.storage.neurons.ordering import FILE as ORDERS
from vivace.storage.neurons.ordering import save_orders
from vivace.storage.neurons.predictors import FILE as PREDICTORS
from vivace.storage.neurons.thresholds import FILE as THRESHOLDS
from vivace.storage.store import (
    DATA,
    INDEX,
    MAGIC,
    Bundle,
    Layout,
    PageTable,
    Store,
    arrange,
    check_fits,
    check_layout,
    fits_tiles,
    is_store,
    open_store,
    to_json,
)

BLOCK = 256
"""Neurons whose records are assembled at once."""

Progress = Callable[[int, int], None]
"""Called with (bytes written, bytes in all)."""


def write_store(
    model: str | Path,
    output: str | Path,
    *,
    layout: Layout = "layers",
    dtype: str = "auto",
    kernels: str = "auto",
    weights: str = "bf16",
    orders: Sequence[Tensor] | None = None,
    progress: Progress | None = None,
    ignored: Sequence[str] = (),
) -> Store:
    """Write a checkpoint as a store.

    Args:
        model: directory or Hub id.
        output: folder to make; what was there stays until everything is written.
        layout: "layers", "neurons" or "selected" (see ``store.py``).
        dtype: of all weights; "auto" is that of the checkpoint.
        kernels: which will run what is streamed: "torch", "avx2", "avx512", "amx", or "auto", which is native ones
            where they run here and the layout is "layers" in bfloat16.
        weights: format of the matrices that are read while they are used: "bf16" leaves them as they are; "int8" and
            "q4" take a half and a quarter of the bytes, for native kernels and the layout "layers".
        orders: which neuron lies at each place, (F,) for each layer (``ordering.py``); None is as in the checkpoint.
        progress: called after each bundle.
        ignored: unknown keys of config.json that are read as if they were not there, and not written.

    Raises:
        NotFoundError: there is no such checkpoint.
        MismatchError: the weights do not fit config.json.
        ConfigError: the layout is for another kind of model, the output is the checkpoint itself or has adapters of
            another one, or the orders are not permutations.
        UnsupportedError: native kernels were asked for by name and cannot run this model from a store.
        CheckpointError: the disk is full or may not be written.
    """
    folder, target = resolve(model), Path(output).expanduser()
    if target.exists() and (target.resolve() == folder.resolve() or not (target.is_dir() and _is_free(target))):
        raise ConfigError(f"{target} holds something else than a store; name a folder that is not there yet")
    opened = open_checkpoint(folder, dtype, "cpu", ignored=ignored)
    config, kind = opened.config, opened.dtype
    check_fits(config, check_layout(layout))
    shapes = {name: each.shape for name, each in opened.plan.items()}
    is_tiled = _is_tiled(kernels, layout, kind, fits=fits_tiles(config, shapes))
    _check_weights(weights, layout, kind, is_tiled=is_tiled)
    bundles = arrange(config, shapes, layout, kind.itemsize, is_tiled=is_tiled, weights=weights)
    source = _Source(opened, _check_orders(orders, layout, config))
    raw = read_config(folder, ignored)
    base = base_hash(folder)
    if (target / "adapters").is_dir() and read_json(target / INDEX).get("base") != base:
        raise ConfigError(f"{target} has adapters of the model that lies there now; move them, or name another folder")
    with staged(target) as staging:
        _copy_beside(folder, staging)
        if ignored or is_quantized(raw):
            plain = json.dumps(dense_config(raw), indent=2) + "\n"
            (staging / "config.json").write_text(plain, encoding="utf-8")
        if orders is not None:
            save_orders(staging, orders)
        identity = secrets.token_hex(8)
        num_bytes, bundles, page_sums = _write(staging / DATA, identity, bundles, source, progress)
        index = to_json(identity, base, layout, kind, num_bytes, bundles, page_sums)
        (staging / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        written = {path.name for path in staging.iterdir()}
        for name in (PREDICTORS, THRESHOLDS, ORDERS):  # before the new files move: a kill leaves none beside them
            (target / name).unlink(missing_ok=True)
    for name in {*TEXT_FILES} - written:
        (target / name).unlink(missing_ok=True)  # of what this folder held before
    return open_store(target)


def _copy_beside(folder: Path, staging: Path) -> None:
    """Copy what lies beside the weights of a checkpoint: configuration, tokenizer, and adapters."""
    for pattern in TEXT_PATTERNS:
        for path in folder.glob(pattern):
            if path.name not in (SHARDS, INDEX):
                shutil.copyfile(path, staging / path.name)
    if (folder / "adapters").is_dir():
        shutil.copytree(folder / "adapters", staging / "adapters")


def _is_tiled(kernels: str, layout: Layout, dtype: torch.dtype, *, fits: bool) -> bool:
    """Decide whether matrices lie in tiles, as native kernels read them; raises as ``write_store``."""
    can = layout == "layers" and dtype == torch.bfloat16 and fits
    is_native = choose(kernels).body is not None
    if is_native and not can and kernels != "auto":
        raise UnsupportedError(
            f"{kernels} kernels stream layers in bfloat16 whose widths are multiples of {LANES}; this store has layout "
            f"{layout} in {str(dtype).removeprefix('torch.')}; leave out --kernels"
        )
    return is_native and can


def _check_weights(weights: str, layout: Layout, dtype: torch.dtype, *, is_tiled: bool) -> None:
    """Check that quantized matrices can be read as they lie; raises as ``write_store``."""
    if layout_of(weights).name != "bf16" and not is_tiled:
        raise UnsupportedError(
            f"a store in {weights} is for native kernels, layout layers and bfloat16 models whose widths are multiples "
            f"of {LANES}; this has layout {layout} in {str(dtype).removeprefix('torch.')}, or no native kernels run"
        )


def _check_orders(orders: Sequence[Tensor] | None, layout: Layout, config: ModelConfig) -> Sequence[Tensor] | None:
    """Check that orders name every neuron of their layer once; raises ``ConfigError`` otherwise."""
    if orders is None:
        return None
    every = torch.arange(config.ffn_width)
    is_whole = len(orders) == config.num_layers and all(torch.equal(order.sort().values, every) for order in orders)
    if layout == "layers" or not is_whole:
        raise ConfigError(
            f"orders are for layouts neurons and selected and name each of {config.ffn_width} neurons once in each of "
            f"{config.num_layers} layers; find them with find_orders"
        )
    return orders


def _is_free(folder: Path) -> bool:
    return is_store(folder) or not any(folder.iterdir())


class _Source:
    """The parameters of a checkpoint, read when they are needed."""

    def __init__(self, opened: OpenCheckpoint, orders: Sequence[Tensor] | None) -> None:
        self.plan = opened.plan
        self.dtype = opened.dtype
        self.orders = orders
        self._opened = opened

    def read(self, name: str) -> Tensor:
        """Read a parameter by our name, with its neurons in the order of the store."""
        values = self._opened.read(name)
        if self.orders is None or ".feed_forward." not in name:
            return values
        order, site = self.orders[int(name.split(".")[1])], name.split(".feed_forward.")[1]
        if site == "down.weight":
            return values[:, order]
        if not site.startswith("up."):
            return values
        return torch.cat([half[order] for half in values.split(len(order))])

    def release(self) -> None:
        """Release the memory of what was read."""
        self._opened.stored.release()


def _write(
    path: Path, identity: str, bundles: list[Bundle], source: _Source, progress: Progress | None
) -> tuple[int, list[Bundle], PageTable]:
    """Write the file; return its length, its bundles with their checksums, and where the table of pages lies."""
    end = max(bundle.offset + bundle.num_pages_bytes for bundle in bundles)
    done = []
    with path.open("wb") as raw:
        file = _SummedFile(raw)
        file.write((MAGIC + identity.encode() + b"\n").ljust(PAGE, b"\0"))
        for bundle in bundles:
            assert file.num_bytes == bundle.offset, bundle.name
            checksum, pieces = 0, _records(bundle, source) if bundle.count > 1 else _parts(bundle, source)
            for piece in pieces:
                checksum = zlib.crc32(piece, checksum)
                file.write(piece)
            done.append(replace(bundle, checksum=checksum))
            file.pad()
            source.release()
            if progress is not None:
                progress(file.num_bytes, end)
        table = file.table
        raw.write(table)
        raw.write(bytes(-len(table) % PAGE))
        raw.flush()
        os.fsync(raw.fileno())
        return raw.tell(), done, PageTable(end, len(table), zlib.crc32(table))


class _SummedFile:
    """A file that is written from its beginning, and the CRC-32 of each of its pages."""

    def __init__(self, file: BinaryIO) -> None:
        self.num_bytes = 0
        self._file = file
        self._sums = array("I")
        self._current = 0
        """CRC-32 of the page that is being filled."""

    def write(self, piece: memoryview | bytes) -> None:
        """Append bytes to the file, and to the checksum of the page that they are in."""
        left = memoryview(piece)
        self._file.write(left)
        while len(left):
            part, left = left[: PAGE - self.num_bytes % PAGE], left[PAGE - self.num_bytes % PAGE :]
            self._current = zlib.crc32(part, self._current)
            self.num_bytes += len(part)
            if self.num_bytes % PAGE == 0:
                self._sums.append(self._current)
                self._current = 0

    def pad(self) -> None:
        """Append zeros up to the next page."""
        self.write(bytes(-self.num_bytes % PAGE))

    @property
    def table(self) -> bytes:
        """The checksums of the pages written, four bytes each."""
        assert self.num_bytes % PAGE == 0
        return self._sums.tobytes()


def _parts(bundle: Bundle, source: _Source) -> Iterator[memoryview | bytes]:
    """Yield the bytes of a bundle, part by part."""
    done = 0
    for part in bundle.parts:
        values = _selector(bundle.name, source) if part.name == "selector" else source.read(part.name)
        yield bytes(part.offset - done)
        done = part.offset + part.num_bytes(values.element_size())
        if part.weights:
            assert tuple(values.shape) == part.shape, part.name
            yield from layout_of(part.weights).bytes_of(values)
            continue
        values = pack(values) if part.is_tiled else values
        assert tuple(values.shape) == part.shape, part.name
        yield _bytes(values)


def _selector(name: str, source: _Source) -> Tensor:
    """Read the matrix that decides which neurons are active, (F, E)."""
    feed = name.removesuffix("selector") + "feed_forward."
    width = source.plan[f"{feed}down.weight"].shape[1]
    return source.read(f"{feed}up.weight")[:width]


def _records(bundle: Bundle, source: _Source) -> Iterator[memoryview]:
    """Yield the records of a bundle, block by block; each is a neuron's gate row, up row and down column."""
    feed = bundle.name.removesuffix("neurons") + "feed_forward."
    up, down = source.read(f"{feed}up.weight"), source.read(f"{feed}down.weight")
    width = len(bundle.parts) * down.shape[0]
    for first in range(0, bundle.count, BLOCK):
        stop = min(first + BLOCK, bundle.count)
        block = torch.zeros(stop - first, bundle.stride // source.dtype.itemsize, dtype=source.dtype)
        columns = []
        for part in bundle.parts:
            if part.name == "down":
                columns.append(down[:, first:stop].t())
            else:
                # Without a gate all of "up" is one matrix; with one, gate rows come first.
                start = bundle.count if part.name == "up" and up.shape[0] > bundle.count else 0
                columns.append(up[start + first : start + stop])
        block[:, :width] = torch.cat(columns, -1)
        yield _bytes(block)


def _bytes(values: Tensor) -> memoryview:
    return values.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
