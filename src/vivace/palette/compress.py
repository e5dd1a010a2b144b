"""Writing a checkpoint folder whose matrices are palettes (``checkpoint/quantized/palette.py``)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vivace.checkpoint.files import RECOVERY, WEIGHTS, Tensors, require_folder, require_other, write_tensors
from vivace.checkpoint.load import OpenCheckpoint, load_decoder, open_checkpoint
from vivace.checkpoint.names import Target
from vivace.checkpoint.quantized.palette import CONFIG, WIDTHS, tensors_of
from vivace.checkpoint.quantized.settings import dense_config
from vivace.checkpoint.save import copy_text_files, staged_checkpoint
from vivace.core.layers import Linear
from vivace.core.model import Decoder
from vivace.core.step import Step
from vivace.errors import ConfigError, CorruptError, UnsupportedError, nearest
from vivace.kernels.coded import Coded, RowCodes
from vivace.kernels.library import LANES
from vivace.kernels.palette import BITS
from vivace.kernels.reference import any_order
from vivace.palette.plan import BitChoice, BitPlan, plan_bits
from vivace.palette.rounding import METHODS, Method, output_error, round_matrix
from vivace.palette.statistics import Distance, Statistics, distance, gather, matrices, matrices_of, watched_inputs
from vivace.palette.texts import Texts, real_rows

Progress = Callable[[int, int], None]

LEAST_WITHOUT_TEXT = 4
"""Least bits of a matrix that is rounded without any text."""
PLANNED_TILES = 24
"""Tiles of sixteen outputs of a matrix that a plan rounds to predict the loss of all of them."""


@dataclass(frozen=True)
class CompressConfig:
    """How a checkpoint is rounded."""

    bits: int | None = 3
    """Bits of every matrix of the layers; None where ``bits_per_weight`` is given."""
    bits_per_weight: float | None = None
    """Bytes of the matrices of the layers, codebooks and scales included, times eight over their weights."""
    method: Method = "gptq"
    has_scales: bool = True
    """Whether entries are integers with scales, or bfloat16."""
    rounds_ends: bool = True
    """Whether embedding and head take eight bits; otherwise they stay as they are stored."""

    def __post_init__(self) -> None:
        if (self.bits is None) == (self.bits_per_weight is None):
            raise ConfigError("say how small: --bits 2, 3, 4 or 8, or --bpw with a number of bits, one of the two")
        if self.bits_per_weight is not None and not 0 < self.bits_per_weight < math.inf:
            raise ConfigError(f"--bpw must be a number above 0, found {self.bits_per_weight:g}")
        if self.bits is not None and self.bits not in (*BITS, 8):
            raise ConfigError(f"--bits {self.bits} is not possible; palettes have 2, 3 or 4, and 8 are integers")
        if self.method not in METHODS:
            raise ConfigError(f"--method is {self.method!r}{nearest(self.method, METHODS)}")

    @property
    def needs_text(self) -> str | None:
        """Return why text is needed, or None where rounding goes without."""
        if self.bits is None:
            return "--bpw compares what bits are worth on a text"
        if self.method in ("fisher", "gptq") and self.bits != 8:
            return f"--method {self.method} rounds for a text"
        if self.bits < LEAST_WITHOUT_TEXT:
            return f"rounded to {self.bits} bits without a text that weighs the weights, a model says nothing sensible"
        return None


@dataclass(frozen=True)
class WrittenFolder:
    """A folder of palettes and its sizes."""

    folder: Path
    matrix_bytes: int
    """Bytes of the matrices of the layers in the file."""
    num_matrix_weights: int
    num_bytes: int
    """Bytes of all tensors in the file."""
    num_weights: int

    @property
    def matrix_bits(self) -> float:
        """Return the bits of a weight of the layers' matrices, codebooks and scales included."""
        return self.matrix_bytes * 8 / self.num_matrix_weights

    @property
    def all_bits(self) -> float:
        """Return the bits of a weight, averaged over all tensors of the file."""
        return self.num_bytes * 8 / self.num_weights


@dataclass(frozen=True)
class Compressed:
    """What was written, and what it costs."""

    written: WrittenFolder
    bits: Mapping[str, int]
    """Bits of each matrix of the layers, by our name."""
    predicted: float | None
    """Loss that the plan predicted, nats a token; None without a plan."""
    measured: Distance | None
    """Distance from the stored model on text that was held back; None without text."""


@torch.no_grad()
@any_order()
def compress(
    source: Path,
    out: Path,
    config: CompressConfig,
    texts: Texts | None = None,
    *,
    note: Callable[[str], None] = lambda text: None,
    progress: Progress = lambda done, total: None,
) -> Compressed:
    """Round a checkpoint and write it to a folder, all or nothing.

    Args:
        source: folder of the checkpoint.
        out: folder to write.
        config: how.
        texts: what to round for.
        note: receives what is done, a line at a time.
        progress: called with how much is done, and of how much: batches that weigh the matrices, matrices whose loss is
            predicted, then layers that are rounded.

    Raises:
        ConfigError: text is missing, the budget cannot be had, or ``out`` is the checkpoint itself, a file, or a folder
            with an adapter that recovers what another rounding lost.
        UnsupportedError: a model of this kind is not rounded to palettes.
        CheckpointError: the checkpoint is broken, or the disk is full.
    """
    if texts is None and (reason := config.needs_text) is not None:
        raise ConfigError(f"{reason}; give --data FILE, prompts with references or plain text")
    require_other(out, source)
    check_out(out)
    opened = open_checkpoint(source)
    model = load_decoder(source, dtype="float32")
    parts = matrices(model)
    check_shapes(opened.plan, parts)
    check_finite(model)
    for part in parts.values():
        part.weight.data = part.weight.data.clone()  # it may be a view of the file
    found = Statistics() if texts is None else _statistics(model, config, texts, note, progress)
    chosen = _chosen_bits(parts, config, found, note, progress)
    coded: dict[str, Coded] = {}
    for index, layer in enumerate(rounded_layers(model, chosen.bits, config, texts, found)):
        coded |= layer
        progress(index + 1, len(model.layers))
    written = write_folder(opened, out, coded, config)
    measured = None
    del model, parts  # in float32; two more are read below
    if texts is not None:
        note("comparing with the stored model on text that was held back")
        made = load_decoder(out, dtype="float32")
        measured = distance(made, load_decoder(source, dtype="float32"), texts.held_back)
    predicted = chosen.loss if config.bits_per_weight is not None else None
    return Compressed(written, chosen.bits, predicted, measured)


def write_folder(
    source: OpenCheckpoint, out: Path, coded: Mapping[str, Coded], config: CompressConfig
) -> WrittenFolder:
    """Write matrices in few bits, and everything else as it is stored, all or nothing.

    Args:
        source: the checkpoint that they are of.
        out: folder to write.
        coded: the matrices of the layers, by our names.
        config: says what becomes of embedding and head.

    Raises:
        CheckpointError: the disk is full.
    """
    table = source.plan
    ends = _ends(source) if config.rounds_ends else {}
    tensors = _tensors(source.stored, table, {**coded, **ends})
    with staged_checkpoint(out) as folder:
        write_tensors(folder / WEIGHTS, tensors)
        written = {**_plain(source.raw), "dtype": "bfloat16", "quantization_config": dict(CONFIG)}
        text = json.dumps(written, indent=2, sort_keys=True) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
        copy_text_files(source.folder, folder)
    parts = [tensor for name in coded for tensor in _stored_parts(tensors, table[name])]
    total = sum(tensor.nbytes for tensor in tensors.values())
    num_weights = sum(math.prod(target.shape) for target in table.values())
    num_matrix_weights = sum(math.prod(table[name].shape) for name in coded)
    return WrittenFolder(out, sum(part.nbytes for part in parts), num_matrix_weights, total, num_weights)


def _plain(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``config.json`` without what says how weights are stored."""
    return {key: value for key, value in dense_config(raw).items() if key != "torch_dtype"}


def check_out(out: Path) -> None:
    """Refuse a folder that a rounded checkpoint cannot be written to.

    Raises:
        ConfigError: it is a file, or has an adapter that recovers what another rounding lost, which every text would be
            refused for.
    """
    require_folder(out)
    worn = out / "adapters" / RECOVERY
    if worn.is_dir():
        raise ConfigError(f"{worn} recovers what lies in {out} now; move it away, or name another folder")


def check_finite(model: Decoder) -> None:
    """Refuse weights that are no numbers.

    Raises:
        CorruptError: a weight is infinite or not a number.
    """
    for name, weight in model.named_parameters():
        if not bool(torch.isfinite(weight).all()):
            raise CorruptError(f"{name}: a weight is infinite or not a number; the checkpoint is damaged")


def check_shapes(table: Mapping[str, Target], parts: Mapping[str, Linear]) -> None:
    """Refuse matrices that palettes cannot be written of.

    Raises:
        UnsupportedError: one has such a shape, or is stored (in, out).
    """
    for name, part in parts.items():
        pieces = table[name].pieces
        if any(piece.transposed for piece in pieces):
            raise UnsupportedError("this family stores its matrices (in, out), which palettes are not written for")
        if any(piece.start % LANES for piece in pieces) or part.weight.shape[1] % WIDTHS:
            height, width = part.weight.shape
            raise UnsupportedError(
                f"{name} is {height} x {width}: palettes take projections of a multiple of {LANES} outputs "
                f"and of {WIDTHS} inputs"
            )


def _statistics(
    model: Decoder, config: CompressConfig, texts: Texts, note: Callable[[str], None], progress: Progress
) -> Statistics:
    """Return what the method and the plan need of the text; gptq gathers moments itself, layer by layer."""
    found = Statistics()
    if config.bits_per_weight is not None:
        count = sum(batch.num_elements for batch in texts.calibration)
        note(f"weighing the matrices on {count:,} tokens, forward and backward")
        found = gather(model, texts.calibration, progress=progress)
    if config.method == "fisher":
        note("squaring the gradients of all weights")
        found.squares = gather(model, texts.calibration, squares=True, progress=progress).squares
    return found


def _chosen_bits(
    parts: Mapping[str, Linear],
    config: CompressConfig,
    found: Statistics,
    note: Callable[[str], None],
    progress: Progress,
) -> BitPlan:
    """Return the bits of each matrix, by a plan if a budget is given."""
    if config.bits is not None:
        return BitPlan(dict.fromkeys(parts, config.bits), 0, 0.0)
    assert config.bits_per_weight is not None
    note("predicting the loss of every matrix in 2, 3, 4 and 8 bits")
    choices = {}
    for number, (name, part) in enumerate(parts.items(), 1):
        choices[name] = tuple(_choice(name, part.weight, bits, config, found) for bits in (*BITS, 8))
        progress(number, len(parts))
    return plan_bits(choices, sum(part.weight.numel() for part in parts.values()), config.bits_per_weight)


def _choice(name: str, weight: Tensor, bits: int, config: CompressConfig, found: Statistics) -> BitChoice:
    """Predict the loss of a matrix in some bits from some of its tiles, rounded by weighted clustering."""
    height, width = weight.shape
    tiles = -(-height // LANES)
    picked = torch.linspace(0, tiles - 1, min(tiles, PLANNED_TILES)).round().long().unique()
    rows = (picked[:, None] * LANES + torch.arange(LANES)).flatten()
    rows = rows[rows < height]
    moments = found.mean_moments(name)
    gains = found.mean_gains(name)
    made = round_matrix(weight[rows], bits, "kmeans", importance=moments.diagonal(), has_scales=config.has_scales)
    lost = output_error(weight[rows], made, moments, gains[rows])
    return BitChoice(bits, _file_bytes(height, width, bits, config), 0.5 * lost * height / len(rows))


def _file_bytes(height: int, width: int, bits: int, config: CompressConfig) -> int:
    """Return the bytes of a matrix in the file."""
    if bits == 8:
        return height * (width + 4)
    tiles, codes = height // LANES, height * width * bits // 8
    if not config.has_scales:
        return codes + tiles * (2 << bits)
    return codes + (tiles << bits) + height * -(-width // 64) * 2


def rounded_layers(
    model: Decoder, bits: Mapping[str, int], config: CompressConfig, texts: Texts | None, found: Statistics
) -> Iterator[dict[str, Coded]]:
    """Yield the matrices of each layer, first to last, and leave the rounded weights in the model.

    With text every layer sees the inputs that the rounded layers before it give.
    """
    steps, rows, real = [], [], []
    for batch in () if texts is None else texts.calibration:
        steps.append(Step.dense(*batch.tokens.shape))
        rows.append(model.embed(batch.tokens.reshape(-1), steps[-1]))
        real.append(real_rows(batch))
    needs_inputs = texts is not None and config.method in ("gptq", "kmeans")
    for index in range(len(model.layers)):
        parts = matrices_of(model, index)
        seen = Statistics()
        if needs_inputs:
            for h, step, which in zip(rows, steps, real, strict=True):
                seen.num_rows += len(which)
                with watched_inputs(parts, which, seen):
                    model.run(h, step, index, index + 1)
        layer: dict[str, Coded] = {}
        for name, part in parts.items():
            moments = seen.mean_moments(name) if needs_inputs else None
            importance = found.squares.get(name) if moments is None else moments.diagonal()
            layer[name] = round_matrix(
                part.weight,
                bits[name],
                config.method,
                importance=importance,
                moments=moments,
                has_scales=config.has_scales,
            )
            part.weight.data = layer[name].dense()
        if needs_inputs:
            rows = [model.run(h, step, index, index + 1) for h, step in zip(rows, steps, strict=True)]
        yield layer


def _ends(source: OpenCheckpoint) -> dict[str, Coded]:
    """Return embedding and head in eight bits."""
    pieces = {name: source.plan[name].pieces[0] for name in ("embedding", "lm_head.weight") if name in source.plan}
    return {name: RowCodes.of(source.stored.tensor(piece.name)) for name, piece in pieces.items()}


def _tensors(stored: Tensors, table: Mapping[str, Target], coded: Mapping[str, Coded]) -> dict[str, Tensor]:
    """Return everything that is stored, by name: matrices in few bits, all other tensors as they were."""
    found: dict[str, Tensor] = {}
    replaced = set()
    for name, matrix in coded.items():
        for piece in table[name].pieces:
            replaced.add(piece.name)
            found |= tensors_of(piece.name, matrix.rows(piece.start, piece.stop))
    names = {piece.name for target in table.values() for piece in target.pieces}
    return found | {name: _as_stored(stored, name) for name in sorted(names - replaced)}


def _as_stored(stored: Tensors, name: str) -> Tensor:
    """Return a tensor as it is stored, or in bfloat16 where it is stored as codes."""
    found = stored.tensor(name)
    is_plain = stored.kind(name) == str(found.dtype).removeprefix("torch.")
    return found if is_plain else found.to(torch.bfloat16)


def _stored_parts(tensors: Mapping[str, Tensor], target: Target) -> list[Tensor]:
    stems = [piece.name.removesuffix(".weight") for piece in target.pieces]
    return [tensors[stem + end] for stem in stems for end in (".idx", ".lut", ".scale") if stem + end in tensors]
