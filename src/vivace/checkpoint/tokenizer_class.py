"""Which class of transformers reads a tokenizer, remembered between runs so that the next one starts sooner.

``AutoTokenizer`` finds a class and asks it for the tokenizer. To find it, it imports transformers' configurations, and
with them kernels of the Hub, TorchDynamo, distributed tensors and SymPy: a third of the time in which a process starts.
The class by itself needs none of these. So ``tokenizers.json`` in the cache folder of the package
(``VIVACE_CACHE_DIR``) holds the name of the class by everything that the choice depends on: the versions of the two
libraries, the names of the files beside the tokenizer, and the contents of those that are looked into. Whatever is
wrong with that file or with what it names, ``AutoTokenizer`` is asked again.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
from importlib import metadata
from pathlib import Path
from typing import Any

from vivace.files import cache_folder, write_text

log = logging.getLogger(__name__)

FILE = "tokenizers.json"
FORMAT = 1
MOST = 64
"""Classes that the file keeps: those that were written last."""
LIBRARIES = ("transformers", "tokenizers")
READ = ("config.json", "tokenizer_config.json", "tokenizer.json")
"""Files that ``AutoTokenizer`` chooses by."""


def open_tokenizer(folder: Path) -> Any:
    """Open the tokenizer of a folder as ``AutoTokenizer`` would.

    Returns:
        A ``PreTrainedTokenizerBase``.

    Raises:
        Exception: whatever the libraries raise on files that they cannot read.
    """
    kept, key = cache_folder() / FILE, _key(folder)
    known = _read(kept)
    found = _class(known.get(key))
    if found is not None:
        return found.from_pretrained(str(folder), local_files_only=True)
    from transformers import AutoTokenizer

    inner = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    chosen = type(inner)
    known[key] = f"{chosen.__module__}:{chosen.__qualname__}"
    if _class(known[key]) is chosen:
        _write(kept, known)
    return inner


def _key(folder: Path) -> str:
    """Return a hash of all that the choice of a class depends on."""
    state = hashlib.sha256()
    for name in LIBRARIES:
        state.update(f"{name} {metadata.version(name)}\n".encode())
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        state.update(f"{path.name}\n".encode())
        if path.name in READ:
            state.update(hashlib.sha256(path.read_bytes()).digest())
    return state.hexdigest()


def _class(name: object) -> Any:
    """Return a tokenizer class of transformers by module and name, or None where there is none of that name."""
    module, _, own = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not module.startswith("transformers."):
        return None
    from transformers import PreTrainedTokenizerBase

    try:
        found = getattr(importlib.import_module(module), own, None)
    except ImportError:
        return None
    return found if isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase) else None


def _read(path: Path) -> dict[str, Any]:
    """Return the names that a file holds, the last written at the end; none where it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return dict(found["classes"]) if found["format"] == FORMAT else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _write(path: Path, known: dict[str, Any]) -> None:
    """Keep the last names. What another process writes meanwhile may be lost, and is then looked up again."""
    last = dict(list(known.items())[-MOST:])
    try:
        write_text(path, json.dumps({"format": FORMAT, "classes": last}) + "\n")
    except OSError as error:
        log.debug("%s is not written: %s", path, error)
