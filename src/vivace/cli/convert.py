"""``vivace convert``: write a checkpoint as a GGUF file, or as a store that is read piece by piece while decoding."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from vivace.cli import options
from vivace.cli.console import console
from vivace.cli.loading import folder_of
from vivace.errors import ConfigError
from vivace.units import format_bytes

SUFFIX = ".gguf"
"""Ending of the file names of GGUF files."""


@dataclass(frozen=True)
class StoreChoice:
    """The properties of a store that the flags set."""

    layout: str
    """Name of the layout."""
    dtype: str
    """Dtype of the weights; "auto" is the checkpoint's."""
    calibrate: Path | None
    """Prompt file to calibrate with; None for no calibration."""
    active: float
    """Share of the neurons that calibration keeps."""
    error: float | None
    """Most that the output of a layer may change by neurons that are left out, instead of a share or a recall."""
    is_ordered: bool
    """Whether neurons that are active together lie side by side."""
    kernels: str
    """Kernels that the store is packed for."""
    weights: str
    """Format of the matrices that are read while they are used."""
    ignored: tuple[str, ...]
    """Unknown keys of config.json that are read as if they were not there."""


def convert(
    output: Annotated[
        Path,
        typer.Argument(
            help="File to write, its name ends in .gguf; with --store, --dense or --merge a folder.", metavar="OUT"
        ),
    ],
    model: options.Model = None,
    kind: Annotated[
        str,
        typer.Option(
            "--type",
            help="How matrices are stored: auto (as in the checkpoint, or bf16 where it is quantized), f32, f16, bf16, "
            "q8_0, q4_0; in a store auto, int8 or q4.",
        ),
    ] = "auto",
    store: Annotated[
        bool, typer.Option("--store", help="Write a store: --memory then runs it in less memory than it has.")
    ] = False,
    dense: Annotated[
        bool, typer.Option("--dense", help="Write a folder of plain safetensors that transformers reads.")
    ] = False,
    merge: Annotated[
        Path | None,
        typer.Option(help="Write the checkpoint with this LoRA (PEFT, also DoRA) merged into it.", metavar="DIR"),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(help="Of a store: layers (exact), selected (a gate in memory), neurons (ReLU and predictors)."),
    ] = "layers",
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Prompts (.jsonl) to train predictors on (neurons), or to set thresholds by (selected)."),
    ] = None,
    active: Annotated[
        float | None,
        typer.Option(help="Share of the neurons that --calibrate keeps (selected); left out: 0.5."),
    ] = None,
    error: Annotated[
        float | None,
        typer.Option(
            help="With --calibrate: the most that a layer's output may change by neurons that are left out, such as "
            "0.05; instead of --active, or of finding 99 % of the active neurons."
        ),
    ] = None,
    ordered: Annotated[
        bool,
        typer.Option("--ordered", help="With --calibrate, ReLU: neurons that are active together lie side by side."),
    ] = False,
    dtype: options.Dtype = "auto",
    kernels: Annotated[
        str, typer.Option(help="Those that shall stream a store: auto, torch, avx2, avx512 or amx.")
    ] = "auto",
    ignore_config_key: options.IgnoreConfigKey = None,
    as_json: options.AsJson = False,
) -> None:
    """Write a Llama checkpoint as GGUF, llama.cpp's file format, or any checkpoint as a store or with a LoRA inside.

    bf16 keeps every bit of a bfloat16 checkpoint. q8_0 and q4_0 take 8.5 and 4.5 bits a weight and change the model a
    little, and so do int8 and q4 of a store, of which a half and a quarter of the bytes are read.
    """
    from vivace.checkpoint.gguf.written import write_checkpoint

    ignored = tuple(ignore_config_key or ())
    if active is not None and (not store or calibrate is None):
        raise ConfigError("--active is a share of what --store --calibrate FILE measures; give both, or leave it out")
    if (error is not None or ordered) and (not store or calibrate is None):
        raise ConfigError("--error and --ordered are for --store --calibrate FILE; give both, or leave them out")
    if error is not None and active is not None:
        raise ConfigError("--active and --error both say how many neurons are kept; give one of them")
    if active is not None and layout == "neurons":
        raise ConfigError("--active is for --layout selected; with --layout neurons give --error, or leave it out")
    if dense and merge is None:
        if store or layout != "layers" or calibrate is not None or (kind, kernels) != ("auto", "auto"):
            raise ConfigError("--dense takes --model and --dtype; leave the others out")
        _write_dense(folder_of(model), output, dtype, ignored, as_json=as_json)
        return
    if merge is not None:
        if store or dense or kind != "auto" or ignored:
            raise ConfigError("--merge writes a checkpoint; leave --store, --dense, --type and --ignore-config-key out")
        _require_defaults(layout, calibrate, dtype, kernels)
        _merge(folder_of(model), merge, output, as_json=as_json)
        return
    if store:
        share, weights = 0.5 if active is None else active, "bf16" if kind == "auto" else kind
        choice = StoreChoice(layout, dtype, calibrate, share, error, ordered, kernels, weights, ignored)
        _write_store(folder_of(model), output, choice, as_json=as_json)
        return
    _require_defaults(layout, calibrate, dtype, kernels)
    if output.suffix != SUFFIX:
        raise ConfigError(f"{output} does not end in {SUFFIX}, the one format that is written; name the file so")
    with console.progress("writing"):
        written = write_checkpoint(folder_of(model), output, kind, ignored=ignored)
    if not written.splits_text_alike:
        console.note(
            "a GGUF file cannot say all that this tokenizer does (how it normalizes and splits a text, which tokens it "
            "adds): the same text may become other tokens; give token ids where that matters"
        )
    if as_json:
        console.json({"file": str(written.path), "type": written.kind, "bytes": written.num_bytes})
    else:
        console.result(f"{written.path}: {written.kind}, {format_bytes(written.num_bytes)}")


def _write_dense(folder: Path, output: Path, dtype: str, ignored: tuple[str, ...], *, as_json: bool) -> None:
    """Write a checkpoint with every weight decoded, as a folder of safetensors."""
    from vivace.checkpoint.files import WEIGHTS, require_folder, require_other
    from vivace.checkpoint.load import load_decoder, read_config
    from vivace.checkpoint.save import write_checkpoint

    require_other(output, folder)
    require_folder(output)
    with console.progress("writing"):
        decoder = load_decoder(folder, dtype=dtype, ignored=ignored)
        write_checkpoint(decoder, read_config(folder, ignored), folder, output)
    size = (output / WEIGHTS).stat().st_size
    kind = str(decoder.dtype).removeprefix("torch.")
    if as_json:
        console.json({"folder": str(output), "dtype": kind, "bytes": size})
    else:
        console.result(f"{output}: {kind}, {format_bytes(size)}")


def _require_defaults(layout: str, calibrate: Path | None, dtype: str, kernels: str) -> None:
    """Refuse the flags of a store where none is written."""
    if layout != "layers" or calibrate is not None or (dtype, kernels) != ("auto", "auto"):
        raise ConfigError(
            "--layout, --calibrate, --dtype and --kernels are for a store; give --store, or leave them out"
        )


def _merge(base: Path, adapter: Path, output: Path, *, as_json: bool) -> None:
    """Write a checkpoint with an adapter in it, and report it."""
    from vivace.checkpoint.merge import merge_checkpoint

    with console.progress("merging"):
        merged = merge_checkpoint(base, adapter, output)
    facts = {"folder": str(merged.folder), "changed": merged.num_changed, "bytes": merged.num_bytes}
    if as_json:
        console.json({**facts, "untied": merged.is_untied})
        return
    note = "; its head is no longer the embedding" if merged.is_untied else ""
    console.result(f"{merged.folder}: {merged.num_changed} tensors changed, {format_bytes(merged.num_bytes)}{note}")


def _write_store(folder: Path, output: Path, choice: StoreChoice, *, as_json: bool) -> None:
    """Write a store, calibrate it if asked to, and report both."""
    from vivace.storage.convert import write_store
    from vivace.storage.store import check_layout

    texts = None if choice.calibrate is None else _texts(folder, choice.calibrate)
    how, orders = check_layout(choice.layout), None
    if texts is not None:
        from vivace.checkpoint.load import load_config
        from vivace.storage.neurons.calibration import calibrate, check_calibration

        check_calibration(load_config(folder, choice.ignored), how, texts, choice.active, choice.error)
    if texts is not None and choice.is_ordered:
        from vivace.checkpoint.layerwise import LayerwiseDecoder
        from vivace.storage.neurons.ordering import find_orders
        from vivace.storage.neurons.predictors import split_held

        console.note(f"ordering neurons by their activity on {len(texts)} texts")
        whole = LayerwiseDecoder(folder, choice.dtype, ignored=choice.ignored)
        orders = find_orders(whole, split_held(texts)[0])
    with console.progress("writing") as progress:
        written = write_store(
            folder,
            output,
            layout=how,
            dtype=choice.dtype,
            kernels=choice.kernels,
            weights=choice.weights,
            orders=orders,
            progress=progress,
            ignored=choice.ignored,
        )
    report: list[dict[str, object]] = []
    if texts is not None:
        console.note(f"calibrating on {len(texts)} texts, with one layer at a time in memory")
        found = calibrate(folder, written, texts, choice.active, error=choice.error, ignored=choice.ignored)
        report = [asdict(line) for line in found]
    facts = {
        "folder": str(written.folder),
        "layout": written.layout,
        "weights": written.weights,
        "bytes": written.num_bytes,
    }
    if as_json:
        console.json({**facts, "dtype": str(written.dtype).removeprefix("torch."), "calibration": report})
        return
    in_few = "" if written.weights == "bf16" else f" in {written.weights}"
    console.result(f"{written.folder}: {written.layout}{in_few}, {format_bytes(written.num_bytes)}")
    for line in report:
        console.result("  " + ", ".join(f"{name} {_short(value)}" for name, value in line.items()))


def _texts(folder: Path, prompts: Path) -> list[tuple[int, ...]]:
    """Return the prompts of a file in tokens, each followed by its first reference answer if it has one."""
    from vivace.checkpoint.tokenizer import load_tokenizer
    from vivace.prompts import load_prompts
    from vivace.storage.neurons.calibration import texts_of

    return texts_of(load_tokenizer(folder), load_prompts(prompts))


def _short(value: object) -> str:
    """Format a value of the report."""
    return f"{value:.4f}" if isinstance(value, float) else str(value)
