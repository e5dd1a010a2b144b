"""Loading a Hugging Face checkpoint into a ``Decoder``; tensors that are missing, unexpected or misshapen are an error.

The decoder is built without memory (on the ``meta`` device) and every parameter is put in its place once: as a view
of the file where it is stored in the form we use, as one copy where we fuse several tensors (query/key/value,
gate/up), and converted where another dtype is asked for. There are never two copies of the weights in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vivace.checkpoint.codes import holds_codes
from vivace.checkpoint.families import Family, family_of, translate
from vivace.checkpoint.files import Tensors, open_tensors, read_json, resolve, summary
from vivace.checkpoint.gguf.tensors import GgufTensors
from vivace.checkpoint.names import Names, Target, TensorPiece, layout
from vivace.checkpoint.neutral_keys import without
from vivace.checkpoint.quantized.palette import PaletteTensors
from vivace.checkpoint.quantized.settings import PALETTE, dtype_of, settings_of
from vivace.checkpoint.quantized.stored import QuantizedTensors
from vivace.core.backend import Backend
from vivace.core.config import ModelConfig
from vivace.core.cpu.backend import num_bytes
from vivace.core.cross import Sources
from vivace.core.model import Decoder
from vivace.core.parts import DenseParts, Parts
from vivace.errors import ConfigError, MismatchError, NotFoundError, UnsupportedError
from vivace.kernels.coded import Coded, RowCodes, stacked
from vivace.kernels.grid_codes import grid_rows
from vivace.kernels.low_bit import Weights


def read_config(path: str | Path, ignored: Sequence[str] = ()) -> dict[str, Any]:
    """Return the ``config.json`` of a checkpoint directory or Hub id, without keys that are to be ignored.

    Raises:
        NotFoundError: there is no such checkpoint.
        UnsupportedError: a family or setting is not supported; only where keys are ignored.
        ConfigError: a key cannot be ignored, as it is read or is not there.
    """
    folder = resolve(path)
    if not (folder / "config.json").is_file():
        raise NotFoundError(
            f"{folder} has no config.json; a checkpoint is a directory with config.json and safetensors weights"
        )
    raw = read_json(folder / "config.json")
    if not ignored:
        return raw
    translate(raw, ignored)
    return without(raw, tuple(ignored))


def load_config(path: str | Path, ignored: Sequence[str] = ()) -> ModelConfig:
    """Return the model configuration of a checkpoint directory or Hub id; ``ignored`` as for ``read_config``.

    Raises:
        NotFoundError: there is no such checkpoint.
        UnsupportedError: a family or setting is not supported.
    """
    return translate(read_config(path, ignored))


@dataclass(frozen=True)
class Shard:
    """The part of a model that one of several ranks loads."""

    config: ModelConfig
    """The model as this rank's layers are built: with fewer heads and columns."""
    cut: Callable[[str, Target], Target]
    """Returns the part of a parameter that this rank has, given its name and the whole of it."""
    has_ends: bool
    """Whether this rank has the embedding, the final norm and the head."""


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose names and shapes were compared with its config.json, and of which nothing else was read."""

    folder: Path
    raw: Mapping[str, Any]
    """Its ``config.json``."""
    config: ModelConfig
    stored: Tensors
    plan: Mapping[str, Target]
    """Which stored tensors fill which of our parameters."""
    dtype: torch.dtype
    """Of all weights."""
    device: torch.device

    def read(self, name: str) -> Tensor:
        """Return a parameter by our name, as a view of the file where that is possible."""
        return assemble(self.plan[name], self.stored, self.dtype, self.device)


def open_checkpoint(
    path: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    *,
    ignored: Sequence[str] = (),
    reads_sources: bool = False,
) -> OpenCheckpoint:
    """Open a checkpoint to read its parameters one by one; arguments and errors are those of ``load_decoder``."""
    folder = resolve(path)
    raw = read_config(folder, ignored)
    family, config = family_of(raw), translate(raw)
    stored = open_tensors(folder)
    if not reads_sources:
        check_has_no_encoder(config)
    config = as_stored(family, config, stored)
    plan = plan_of(family, config, stored.names)
    check(plan, stored, family, config)
    place = choose_device(device)
    written = dtype_of(raw) or stored.tensor(plan["embedding"].pieces[0].name).dtype
    return OpenCheckpoint(folder, raw, config, stored, plan, choose_dtype(dtype, written, place), place)


def load_decoder(
    path: str | Path,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    *,
    parts: Parts | None = None,
    backend: Callable[[torch.dtype], Backend | None] | None = None,
    ignored: Sequence[str] = (),
    shard: Shard | None = None,
    reads_sources: bool = False,
    sources: Sources = "shared",
) -> Decoder:
    """Load a decoder with the weights of a checkpoint, without gradients.

    Args:
        path: directory or Hub id.
        dtype: dtype of all weights; "auto" keeps the checkpoint's, but float16 becomes float32 on a CPU, where
            float16 arithmetic is slow and the result of a row depends on how many rows are computed with it.
        device: "auto", "cpu" or "cuda", as for ``choose_device``.
        parts: builds the projections in another way; parameters that it leaves out are not read.
        backend: makes the backend that runs a decoder of this dtype, or returns None to run the modules with PyTorch. A
            backend takes over each layer as soon as its weights are loaded, so that never more than one layer is in
            memory in its stored form.
        ignored: unknown keys of config.json that are read as if they were not there.
        shard: what is read of the model, built by ``parts``; None is all of it.
        reads_sources: whether the caller can run a decoder behind an encoder; otherwise such a checkpoint is refused.
        sources: what its layers read of a source (``core/cross.py``), unless ``parts`` say it.

    Raises:
        NotFoundError: there is no such checkpoint.
        CorruptError: a file is truncated or half written.
        MismatchError: tensors are missing, unexpected or of another shape than config.json says.
        UnsupportedError: a family or setting is not supported.
    """
    opened = open_checkpoint(path, dtype, device, ignored=ignored, reads_sources=reads_sources)
    config, stored = opened.config, opened.stored
    chosen = None if backend is None else backend(opened.dtype)
    with torch.device("meta"):
        if parts is None and shard is None:
            parts = DenseParts(config, sources)
        decoder = Decoder(config if shard is None else shard.config, parts, chosen)

    def read(name: str) -> Tensor | Coded:
        target = opened.plan[name]
        if shard is not None:
            return assemble(shard.cut(name, target), stored, opened.dtype, opened.device)
        coded = None if chosen is None else _coded(target, stored, chosen, is_table=name == "embedding")
        return opened.read(name) if coded is None else coded

    has_ends = shard is None or shard.has_ends
    if not has_ends:
        _leave_ends(decoder, opened.dtype, opened.device)
    if chosen is not None:
        pack_parts(decoder, read, lambda part, mapped: _let_go(part, mapped, stored), has_ends=has_ends)
    else:
        for name in [name for name, _ in decoder.named_parameters()]:
            if has_ends or name.startswith("layers."):
                put(decoder, name, read(name))
        decoder.tie()
    return decoder.requires_grad_(False).eval()


def pack_parts(
    decoder: Decoder,
    read: Callable[[str], Tensor | Coded],
    let_go: Callable[[nn.Module, set[int]], None] = lambda part, read: None,
    *,
    has_ends: bool = True,
) -> None:
    """Fill a decoder and hand it to its backend in parts: first what belongs to no layer, then layer by layer.

    Args:
        decoder: built without memory, with the backend that is to run it.
        read: returns the parameter of a name, or its codes if it is stored in few bits.
        let_go: called with each part once it is packed, and with the addresses of what was read for it.
        has_ends: whether the decoder has what belongs to no layer.
    """
    names = [name for name, _ in decoder.named_parameters()]

    def fill(prefix: str, *, is_within: bool = True) -> set[int]:
        values = {name: read(name) for name in names if name.startswith(prefix) == is_within}
        for name, value in values.items():
            put(decoder, name, value)
        return {value.data_ptr() for value in values.values() if isinstance(value, Tensor)}

    if has_ends:
        found = fill("layers.", is_within=False)
        decoder.tie()
        decoder.backend.pack_ends(decoder)
        let_go(decoder, found)
    for index, layer in enumerate(decoder.layers):
        found = fill(f"layers.{index}.")
        decoder.backend.pack_layer(decoder, index)
        let_go(layer, found)
    decoder.backend.finish(decoder)


def _leave_ends(decoder: Decoder, dtype: torch.dtype, device: torch.device) -> None:
    """Give a decoder that only runs layers an embedding without rows, which says its dtype, and no final norm."""
    width = decoder.config.width
    decoder.embedding = nn.Parameter(torch.empty(0, width, dtype=dtype, device=device), requires_grad=False)
    decoder.position_embedding = None
    decoder.final_norm = nn.Identity()


def _let_go(module: nn.Module, mapped: set[int], stored: Tensors) -> None:
    """Copy the parameters of ``module`` that still are views of the files, and unmap the files."""
    for parameter in module.parameters():
        if not parameter.is_meta and parameter.data_ptr() in mapped:
            parameter.data = parameter.data.clone()
    stored.release()


def least_bytes(path: str | Path, dtype: str = "auto", weights: Weights = "bf16", ignored: Sequence[str] = ()) -> int:
    """Memory that the weights of a checkpoint take at least once they are loaded, without reading them."""
    raw = read_config(path, ignored)
    written = dtype_of(raw) or "bfloat16"
    kind = choose_dtype(dtype, written, torch.device("cpu"))
    method, _ = settings_of(raw) or (None, None)
    folder = resolve(path)
    if (method == PALETTE or holds_codes(folder)) and weights == "bf16" and kind == torch.bfloat16:
        stored = open_tensors(folder)
        return sum(stored.num_bytes(name) for name in stored.names)
    in_bfloat16 = num_bytes(translate(raw), weights)
    return in_bfloat16 if weights != "bf16" else in_bfloat16 * kind.itemsize // torch.bfloat16.itemsize


def choose_device(device: str | torch.device) -> torch.device:
    """Return the device to run on.

    Args:
        device: "cpu"; "cuda", also with the number of a GPU ("cuda:1"); or "auto", which is the CPU.

    Raises:
        UnsupportedError: another kind of device, or a GPU that PyTorch does not find here.
    """
    kind, _, number = str(device).partition(":")
    if str(device) in ("auto", "cpu"):
        return torch.device("cpu")
    if kind != "cuda" or (number and not number.isdecimal()):
        raise UnsupportedError(f"there is no device {str(device)!r} for this version; use auto, cpu or cuda")
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"PyTorch {torch.__version__} finds no CUDA device here: install a build of PyTorch for CUDA and a driver, "
            "or leave --device out"
        )
    if int(number or 0) >= torch.cuda.device_count():
        raise UnsupportedError(f"there is no {device}: PyTorch finds {torch.cuda.device_count()} CUDA devices here")
    return torch.device("cuda", int(number or 0))


def choose_dtype(dtype: str | torch.dtype, written: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of the weights; "auto" is the checkpoint's, with float16 replaced by float32 on a CPU.

    Raises:
        ConfigError: weights cannot have this dtype.
    """
    asked = written if dtype == "auto" else dtype
    found = asked if isinstance(asked, torch.dtype) else getattr(torch, str(asked).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"weights cannot be {asked!r}; use auto, float32 or bfloat16")
    return torch.float32 if dtype == "auto" and found == torch.float16 and device.type == "cpu" else found


def plan_of(family: Family, config: ModelConfig, stored: Sequence[str]) -> dict[str, Target]:
    """Return which stored tensors fill which of our parameters, with the tensor names this checkpoint uses."""
    names, present = family.names, set(stored)
    root = next((r for r in names.roots if f"{r}{names.embedding}.weight" in present), names.roots[0])
    head = next((h for h in names.heads if f"{h}.weight" in present), names.heads[0])
    return layout(spelling(names, present, root), config, root, head)


def check_has_no_encoder(config: ModelConfig) -> None:
    """Refuse an encoder-decoder model, for callers that can run decoders only.

    Raises:
        UnsupportedError: it is one.
    """
    if config.encoder is not None:
        raise UnsupportedError(
            "this checkpoint is an encoder-decoder model, which generate, batch, serve, bench beams and "
            "custom_generate run, and train summary and train translate teach; this is for decoders without an encoder"
        )


def as_stored(family: Family, config: ModelConfig, stored: Tensors) -> ModelConfig:
    """Return the configuration with a head of its own, or without a bias of logits, where a family's files may differ
    from what ``config.json`` says.
    """
    names = family.names
    if config.logits_bias and names.logits_bias not in stored.names:  # transformers takes zeros then
        config = replace(config, logits_bias=False)
    head = f"{names.heads[0]}.weight"
    if not (names.may_untie and config.tied_head and head in stored.names):
        return config
    embedding = f"{names.roots[0]}{names.embedding}.weight"
    is_same = embedding in stored.names and torch.equal(stored.tensor(head), stored.tensor(embedding))
    return config if is_same else replace(config, tied_head=False)


def spelling(names: Names, present: set[str], root: str) -> Names:
    """Return the family's table for experts stored one by one, or for stacked experts if the checkpoint has stacks."""
    stacked = names.packed_up and any(name.startswith(root) and name.endswith(names.packed_up) for name in present)
    return names.packed() if stacked else names


def check(plan: Mapping[str, Target], stored: Tensors, family: Family, config: ModelConfig) -> None:
    """Compare names and shapes of the stored tensors with the plan, before anything is read.

    Raises:
        MismatchError: they differ; the message names every kind of difference.
    """
    needed = {piece.name for target in plan.values() for piece in target.pieces}
    missing = sorted(needed - set(stored.names))
    ignored = re.compile("|".join(family.names.ignored))
    extra = {name for name in set(stored.names) - needed if not ignored.fullmatch(name)}
    if config.tied_head:
        extra -= _tied_heads(family, stored, plan, extra)
    if missing or extra:
        lists = [f"missing: {summary(missing)}"] if missing else []
        lists += [f"unexpected: {summary(sorted(extra))}"] if extra else []
        raise MismatchError(f"the weights do not fit config.json; {'; '.join(lists)}")
    expected = {piece.name: _stored_shape(target, piece) for target in plan.values() for piece in target.pieces}
    found = {name: stored.shape(name) for name in expected}
    wrong = [f"{n} is {list(found[n])}, expected {list(shape)}" for n, shape in expected.items() if found[n] != shape]
    if wrong:
        raise MismatchError(f"the weights do not fit config.json: {summary(wrong, 3)}")


def _tied_heads(family: Family, stored: Tensors, plan: Mapping[str, Target], extra: set[str]) -> set[str]:
    """Return the heads that are stored although they are tied to the embedding.

    Raises:
        MismatchError: a stored head differs from the embedding.
    """
    heads = {f"{head}.weight" for head in family.names.heads} & extra
    embedding = plan["embedding"].pieces[0].name
    for head in heads:
        if embedding in stored.names and not torch.equal(stored.tensor(head), stored.tensor(embedding)):
            raise MismatchError(
                f"config.json says tie_word_embeddings, but {head} differs from {embedding}; set it to false"
            )
    return heads


def _stored_shape(target: Target, piece: TensorPiece) -> tuple[int, ...]:
    """Return the shape that the stored tensor of a piece must have."""
    shape = (piece.stop - piece.start, *target.shape[1:])
    shape = shape[::-1] if piece.transposed else shape
    return shape if piece.expert is None else (piece.stack, *shape)


def assemble(target: Target, stored: Tensors, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Build one parameter from its pieces: a view of the file where possible, one copy where several are fused."""
    return fused(target, [stored.tensor(piece.name, dtype) for piece in target.pieces], dtype, device)


def _coded(target: Target, stored: Tensors, backend: Backend, *, is_table: bool) -> Coded | None:
    """Return one parameter in the few bits that it is stored in; None where it is stored otherwise, or is wanted
    otherwise. Of palettes, a table of embeddings can only stay in eight bits. Experts of grids are decoded: those of a
    layer have to be of one format, which a file does not promise.
    """
    if not backend.keeps_codes:
        return None
    if isinstance(stored, GgufTensors | QuantizedTensors):
        if len(target.shape) != 2 or ".experts." in target.pieces[0].name or target.pieces[0].transposed:
            return None
        grids = [stored.grid(piece.name) for piece in target.pieces]
        return grid_rows([grid for grid in grids if grid is not None]) if None not in grids else None
    if not isinstance(stored, PaletteTensors):
        return None
    parts = [stored.coded(piece.name) for piece in target.pieces]
    known = [part for part in parts if part is not None]
    found = stacked(known) if known and len(known) == len(parts) else None
    return found if not is_table or isinstance(found, RowCodes) else None


def coded_of(folder: Path, table: Mapping[str, Target]) -> dict[str, Coded]:
    """Return the matrices that a folder of palettes has in few bits, by the names of our parameters.

    Args:
        folder: the folder.
        table: which stored tensors our parameters are made of.

    Raises:
        CheckpointError: the folder is missing or broken.
    """
    stored = open_tensors(folder)
    if not isinstance(stored, PaletteTensors):
        return {}
    found: dict[str, Coded] = {}
    for name, target in table.items():
        if all(piece.name in stored.names for piece in target.pieces):
            parts = [part for piece in target.pieces if (part := stored.coded(piece.name)) is not None]
            whole = stacked(parts) if len(parts) == len(target.pieces) else None
            if whole is not None:
                found[name] = whole
    return found


def fused(target: Target, tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Build one parameter from the stored tensors of its pieces: the tensor itself if that is possible, else a copy."""
    whole = {p: _read(values, p.expert, p.transposed) for p, values in zip(target.pieces, tensors, strict=True)}
    columns = slice(None) if target.columns is None else slice(*target.columns)
    parts = []
    for piece, (first, stop), place in target.parts():
        values = whole[piece][first:stop]
        parts.append((values if values.dim() == 1 else values[:, columns], place))
    if len(parts) == 1:
        return parts[0][0].to(device=device, dtype=dtype).contiguous()
    made = torch.empty(target.shape_read, dtype=dtype, device=device)
    for values, place in parts:
        made[place : place + len(values)] = values
    return made


def _read(values: Tensor, expert: int | None, transposed: bool) -> Tensor:
    """Return the matrix of an expert, or the whole tensor, as a view that is transposed if the family stores (in,
    out).
    """
    values = values if expert is None else values[expert]
    return values.t() if transposed else values


def put(module: nn.Module, name: str, values: Tensor | Coded) -> None:
    """Make ``values`` the parameter ``name`` of a module, without a copy. Codes are kept beside the parameter, which
    stays without memory, for a backend to lay out.
    """
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if not isinstance(values, Tensor):
        setattr(owner, "coded", values)  # noqa: B010 - of a linear layer or of the decoder
        return
    assert leaf in owner._parameters, f"the decoder has no parameter {name}"
    owner._parameters[leaf] = values if isinstance(values, nn.Parameter) else nn.Parameter(values, requires_grad=False)
