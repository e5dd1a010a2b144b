"""Checkpoint directories and the safetensors files in them.

Tensors are views of a memory map: nothing is read before it is used, and what is used in its stored form is never
copied. Saving writes a complete folder beside the target and then moves its files into place, so that a full disk
or a crash leaves the previous files intact.
"""

from __future__ import annotations

import glob
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from vivace.errors import CheckpointError, ConfigError, CorruptError, NotFoundError
from vivace.units import format_bytes

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LINK = "model.gguf.link"
"""File that names the GGUF file which holds the weights, as JSON."""
GGUF = ".gguf"
"""Ending of the names of GGUF files."""
OWN_DRAFT = "draft"
"""Folder inside a checkpoint that holds a smaller checkpoint to draft with."""
RECOVERY = "recovery"
"""Name of the LoRA that wins back what a checkpoint has lost to few bits, and of its folder in ``<model>/adapters``."""
PACKAGED = Path(__file__).parents[1] / "weights"
"""Folder of the models that come with the package, each in a folder of its name."""
TEXT_PATTERNS = ("*.json", "*.jinja", "*.model", "*.spm", "*.txt")
"""Files beside the weights: configurations, templates and tokenizers."""
PATTERNS = (*TEXT_PATTERNS, "*.safetensors")
"""Files that are downloaded from a Hub repository; pickles and other formats are not."""
VOCABULARIES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "source.spm"),
)
"""Files of which a tokenizer has at least one."""


def resolve(path: str | Path) -> Path:
    """Return a checkpoint directory: the one named, the local copy of a Hub repository, downloaded if necessary, or the
    directory that describes a GGUF file.

    Args:
        path: a directory; the name of a model that comes with the package; a GGUF file; a Hub id such as
            ``owner/name``, or ``owner/name:FILE.gguf`` for a GGUF file of a repository. With ``HF_HUB_OFFLINE=1`` only
            local copies are used.

    Raises:
        NotFoundError: ``path`` is none of these, or cannot be downloaded.
        CorruptError: the GGUF file is damaged.
        UnsupportedError: something in the GGUF file is not read.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        _require_one_kind(folder)
        return folder
    if folder.suffix.lower() == GGUF:
        from vivace.checkpoint.gguf.folder import folder_of_file

        repository, _, file = str(path).partition(":")
        if not folder.is_file() and file and _is_hub_id(repository):
            folder = _file_from_hub(repository, file)
        return folder_of_file(folder)
    if folder.exists():
        raise NotFoundError(
            f"{path} is a file; a checkpoint is a directory with config.json and safetensors weights, or a .gguf file"
        )
    if (PACKAGED / folder / "config.json").is_file() and len(folder.parts) == 1:
        return PACKAGED / folder
    if not _is_hub_id(str(path)):
        raise NotFoundError(
            f"there is no checkpoint directory {path}; give a folder, a .gguf file, or a name on the Hub (OWNER/NAME)"
        )
    return _from_hub(str(path))


def require_other(out: str | Path, source: Path, other: str = "another folder for what comes of it") -> None:
    """Refuse to write over the checkpoint that is read.

    Args:
        out: what is to be written.
        source: folder or file of the checkpoint.
        other: what to name instead.

    Raises:
        ConfigError: both are the same.
    """
    if Path(out).resolve() == source.resolve():
        raise ConfigError(f"{out} is the model itself; name {other}")


def require_folder(out: str | Path) -> None:
    """Refuse to write a folder where there is something else, before any work is done for it.

    Raises:
        ConfigError: there is a file of that name, or it is the root of a disk.
    """
    if not Path(os.path.abspath(out)).name:
        raise ConfigError(f"{out} is the root of a disk; name a folder in it")
    if Path(out).exists() and not Path(out).is_dir():
        raise ConfigError(f"{out} is a file, and a folder is written; name another")


def _require_one_kind(folder: Path) -> None:
    """Refuse a directory that holds GGUF files and no checkpoint, with the name to give instead."""
    files = sorted(path.name for path in folder.glob(f"*{GGUF}"))
    if files and not (folder / "config.json").is_file():
        raise NotFoundError(f"{folder} has no config.json; for its GGUF file give {folder / files[0]}")


def _is_hub_id(name: str) -> bool:
    parts = name.split("/")
    return len(parts) == 2 and all(parts) and not name.startswith((".", "~", "/"))


def _from_hub(name: str) -> Path:
    import huggingface_hub

    return _downloaded(name, lambda: huggingface_hub.snapshot_download(name, allow_patterns=list(PATTERNS)))


def _file_from_hub(name: str, file: str) -> Path:
    """Return one file of a repository. It is asked for as a snapshot of its own: where the Hub cannot be reached, that
    says so or finds the local copy at once, while a single file is asked for again and again for half a minute.
    """
    import huggingface_hub

    patterns = [glob.escape(file)]
    path = _downloaded(name, lambda: huggingface_hub.snapshot_download(name, allow_patterns=patterns)) / file
    if not path.is_file():
        raise NotFoundError(f"neither the Hub repository {name} nor its local copy has a file {file}")
    return path


def _downloaded(name: str, download: Callable[[], str]) -> Path:
    """Return what a download returns, with the Hub's errors as ours.

    Raises:
        NotFoundError: it cannot be downloaded.
    """
    from huggingface_hub import constants, errors

    try:
        return Path(download())
    except errors.LocalEntryNotFoundError as exc:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        raise NotFoundError(f"no directory {name}, no local copy of the Hub repository {name}, and {why}") from exc
    except errors.GatedRepoError as exc:
        raise NotFoundError(f"the Hub repository {name} is gated; accept its terms, then `hf auth login`") from exc
    except errors.RepositoryNotFoundError as exc:
        raise NotFoundError(f"there is neither a directory nor a Hub repository {name}") from exc
    except errors.HFValidationError as exc:
        raise NotFoundError(
            f"there is no directory {name}, and no Hub repository can be named so; a GGUF file of a repository is "
            "OWNER/NAME:FILE.gguf, with the whole name of the file"
        ) from exc
    except (errors.HfHubHTTPError, OSError) as exc:
        raise NotFoundError(f"the Hub repository {name} could not be fetched: {_one_line(exc)}") from exc


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        NotFoundError: there is no such file.
        CorruptError: the file does not contain a JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise NotFoundError(f"{path.parent} has no {path.name}") from exc
    except (ValueError, RecursionError) as exc:  # no JSON, no text, a number of too many digits, or too deep
        raise CorruptError(f"{path} is not readable JSON: {_one_line(exc)}") from exc
    if not isinstance(found, dict):
        raise CorruptError(f"{path} holds a JSON {type(found).__name__}, not an object")
    return found


class TensorFiles:
    """The tensors of a checkpoint by name, memory-mapped from one file or several shards."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        """Map the files.

        Args:
            paths: the file of each tensor, by tensor name; ``tensor_paths`` returns it.
        """
        self._handles = {path: _open(path) for path in dict.fromkeys(paths.values())}
        self._paths = dict(paths)

    def release(self) -> None:
        """Map the files anew, so that pages no view refers to any more leave memory."""
        self._handles = {path: _open(path) for path in self._handles}

    @property
    def names(self) -> Sequence[str]:
        """Names of the stored tensors."""
        return tuple(self._paths)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor without reading it."""
        return tuple(self._slice(name).get_shape())

    def kind(self, name: str) -> str:
        """Return the dtype of a stored tensor by name."""
        return str(self.tensor(name).dtype).removeprefix("torch.")

    def num_bytes(self, name: str) -> int:
        """Return the bytes of a stored tensor in its file."""
        return self.tensor(name).nbytes

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a stored tensor as a view of the memory map; ``dtype`` is for formats that have to be decoded."""
        found: Tensor = self._handles[self._paths[name]].get_tensor(name)
        return found

    def _slice(self, name: str) -> Any:
        return self._handles[self._paths[name]].get_slice(name)


class Tensors(Protocol):
    """The stored tensors of a checkpoint, whatever the format of its files."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the stored tensors, as Hugging Face checkpoints have them."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor without reading it."""

    def kind(self, name: str) -> str:
        """Return the dtype or number format of a stored tensor by name."""

    def num_bytes(self, name: str) -> int:
        """Return the bytes of a stored tensor in its file."""

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a stored tensor: a view of the file, or, if it has to be decoded, a copy in ``dtype`` (float32)."""

    def release(self) -> None:
        """Map the files anew, so that pages no view refers to any more leave memory."""


def open_tensors(folder: Path) -> Tensors:
    """Open the weights of a checkpoint directory.

    Raises:
        NotFoundError: there are no safetensors weights, or a shard is missing.
        CorruptError: a file is truncated, or the index lists tensors that the shards do not hold.
        UnsupportedError: the weights are quantized in a way that is not read.
    """
    if is_linked(folder):
        from vivace.checkpoint.gguf.folder import open_linked

        return open_linked(folder)
    from vivace.checkpoint.quantized.settings import PALETTE, settings_of

    files = TensorFiles(tensor_paths(folder))
    found = settings_of(read_json(folder / "config.json")) if (folder / "config.json").is_file() else None
    if found is None:
        return files
    if found[0] == PALETTE:
        from vivace.checkpoint.quantized.palette import PaletteTensors

        return PaletteTensors(files, found[1])
    from vivace.checkpoint.quantized.stored import QuantizedTensors

    return QuantizedTensors(files, *found)


def tensor_paths(folder: Path) -> dict[str, Path]:
    """Return the file of each stored tensor, from the single file or the index; raises like ``open_tensors``."""
    if is_linked(folder):
        from vivace.checkpoint.gguf.folder import linked_file

        return dict.fromkeys(open_tensors(folder).names, linked_file(folder))
    if (folder / WEIGHTS).is_file():  # as transformers does, whatever an index that was left behind says
        return dict.fromkeys(_open(folder / WEIGHTS).keys(), folder / WEIGHTS)
    if (folder / INDEX).is_file():
        listed: Mapping[str, str] = read_json(folder / INDEX).get("weight_map") or {}
        missing = sorted({shard for shard in listed.values() if not (folder / shard).is_file()})
        if missing:
            raise NotFoundError(f"{folder} lacks {len(missing)} of its shards: {', '.join(missing)}")
        stored = {shard: set(_open(folder / shard).keys()) for shard in set(listed.values())}
        lost = sorted(name for name, shard in listed.items() if name not in stored[shard])
        if lost:
            raise CorruptError(f"{folder / INDEX} lists tensors their shards do not hold: {summary(lost)}")
        return {name: folder / shard for name, shard in listed.items()}
    if any(folder.glob("*.bin")):
        raise NotFoundError(f"{folder} has pickled .bin weights only; convert them to safetensors first")
    raise NotFoundError(f"{folder} has no {WEIGHTS} and no {INDEX}")


def is_linked(folder: Path) -> bool:
    """Return whether a checkpoint directory describes a GGUF file, which holds the weights."""
    return (folder / LINK).is_file() and not any((folder / name).is_file() for name in (WEIGHTS, INDEX))


def named_file(folder: Path) -> str:
    """Return the name by which a user knows a checkpoint directory: that of the GGUF file it describes, or its own."""
    return str(read_json(folder / LINK)["file"]) if is_linked(folder) else str(folder)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of one safetensors file; raises like ``open_tensors``."""
    if not path.is_file():
        raise NotFoundError(f"{path.parent} has no {path.name}")
    handle = _open(path)
    return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118 - not a mapping


def _open(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="pt")
    except (safetensors.SafetensorError, OSError) as exc:
        size = path.stat().st_size if path.exists() else 0
        raise CorruptError(f"{path} ({format_bytes(size)}) is truncated or not safetensors: {_one_line(exc)}") from exc


@contextmanager
def staged(folder: str | Path) -> Iterator[Path]:
    """Yield a directory to write to; its files move into ``folder`` when the block ends without an error.

    The directory lies beside the target on the same disk. Its folders are merged with those of the target, and files of
    the target that are not written again are kept. ``config.json`` comes last, without which nothing loads.

    Yields:
        Path: an empty directory.

    Raises:
        CheckpointError: the disk is full or may not be written; the message says whether the target is as it was.
    """
    target = Path(os.path.abspath(folder))  # a name of its own, also for "."
    staging, moved = target.with_name(f".{target.name}.{os.getpid()}.partial"), False
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        yield staging
        files = sorted(path.relative_to(staging) for path in staging.rglob("*") if path.is_file())
        files.sort(key=lambda file: file.name == "config.json")
        for file in files:
            if (target / file).is_dir():
                raise IsADirectoryError(f"{target / file} is a folder, and a file is written there")
        for file in files:
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            (staging / file).replace(target / file)
            moved = True
    except (OSError, safetensors.SafetensorError) as exc:
        state = "only in part: write it again" if moved else "and is as it was"
        raise CheckpointError(f"{folder} could not be written, {state}: {_one_line(exc)}") from exc
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of one safetensors file; raises like ``open_tensors``."""
    if not path.is_file():
        raise NotFoundError(f"{path.parent} has no {path.name}")
    return dict(_open(path).metadata() or {})


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file that transformers can read, with further metadata; call it inside ``staged``.

    The same tensors and metadata make the same bytes, and the file may be read by whom other new files may be read by;
    safetensors itself writes metadata in an order that changes from call to call, and files that are their owner's
    alone.
    """
    facts = {"format": "pt", **(metadata or {})}
    path.touch()
    mode = path.stat().st_mode
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, path, metadata=facts)
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = {**json.loads(file.read(size)), "__metadata__": dict(sorted(facts.items()))}
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(ordered) <= size, "Python spells the header as safetensors does"
        file.seek(8)
        file.write(ordered.ljust(size))
        file.flush()
        os.fsync(file.fileno())
    path.chmod(mode)


def summary(names: Sequence[str], limit: int = 5) -> str:
    """Return the first ``limit`` names, and how many more there are, as text for an error message."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split()) or type(exc).__name__
