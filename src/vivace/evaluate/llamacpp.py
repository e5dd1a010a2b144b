"""llama.cpp in the benchmark: the same weights as GGUF, the same token ids, the same number of threads.

A model that is a GGUF file is compared with llama.cpp on that very file.

It is called through the C functions of llama-cpp-python instead of its ``Llama`` class, whose loop costs more
per token than a small model does; so the time is that of llama.cpp and one ``argmax``. Settings are its defaults:
float16 cache, flash attention where available, weights repacked while loading where it can. K-quants are made by
llama.cpp's own quantizer, and ``llama.cpp-lookup`` drafts with the n-gram search of llama-cpp-python.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vivace.checkpoint.files import is_linked
from vivace.checkpoint.generation import load_eos_ids
from vivace.checkpoint.gguf.folder import linked_file
from vivace.checkpoint.gguf.written import write_checkpoint
from vivace.checkpoint.load import load_config
from vivace.errors import CapacityError, DependencyError, VivaceError
from vivace.evaluate.benchmark import BenchmarkPrompt, Trial
from vivace.evaluate.memory import Holdings, peak_memory


class LlamaKind(NamedTuple):
    """How llama.cpp runs a checkpoint."""

    weights: str = "auto"
    """Format of the matrices as ``write_checkpoint`` has it; "auto" is the checkpoint's."""
    quantized: int | None = None
    """The ``llama_ftype`` that llama.cpp's quantizer makes of that."""
    num_drafted: int = 0
    """Tokens that n-gram search may guess; 0 for plain decoding."""


LLAMA_CPP: Mapping[str, LlamaKind] = {
    "llama.cpp": LlamaKind(),
    "llama.cpp-q8_0": LlamaKind("q8_0"),
    "llama.cpp-q4_0": LlamaKind("q4_0"),
    "llama.cpp-q4_k_m": LlamaKind(quantized=15),
    "llama.cpp-q3_k_s": LlamaKind(quantized=11),
    "llama.cpp-q2_k": LlamaKind(quantized=10),
    "llama.cpp-lookup": LlamaKind(num_drafted=2),
}
"""By name on the command line. Two guesses are what llama-cpp-python's documentation advises on a processor."""

_F32 = 0
"""The ``ggml_type`` of float32."""

_PROBE = "import sys; from vivace.evaluate.llamacpp import try_out; try_out(*sys.argv[1:])"
"""Program that runs a prompt and a token through llama.cpp."""


@dataclass(frozen=True)
class LlamaRows:
    """The tokens of one pass."""

    tokens: Sequence[int]
    positions: Sequence[int]
    sequences: Sequence[int]
    wanted: Sequence[int]
    """Indices of the rows whose logits are needed."""


class LlamaCpp:
    """A GGUF file loaded by llama.cpp, with a cache for several sequences."""

    def __init__(
        self,
        path: Path,
        *,
        num_threads: int,
        capacity: int,
        num_sequences: int = 1,
        full_precision: bool = False,
    ) -> None:
        """Load a file.

        Args:
            path: a GGUF file; it may be deleted afterwards.
            num_threads: number of threads for prompts and for single tokens.
            capacity: number of cache entries per sequence.
            num_sequences: number of sequences decoded at once.
            full_precision: whether to compute attention in float32 instead of with a float16 cache and flash attention;
                this is slower, and can be compared with our numbers directly.

        Raises:
            DependencyError: llama-cpp-python is not installed.
            VivaceError: llama.cpp cannot load the file.
        """
        self._lib = lib = _library()
        params = lib.llama_model_default_params()
        params.load_mode = lib.LLAMA_LOAD_MODE_NONE  # in memory of its own, as our packed weights are
        params.n_gpu_layers = 0
        self._model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise VivaceError(f"llama.cpp does not open {path}; its version may be too old for this file")
        settings = lib.llama_context_default_params()
        settings.n_ctx = settings.n_batch = -(-capacity // 256) * 256 * num_sequences
        settings.n_seq_max = num_sequences
        settings.n_threads = settings.n_threads_batch = num_threads
        if full_precision:
            settings.type_k = settings.type_v = _F32
            settings.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = lib.llama_init_from_model(self._model, settings)
        if not self._context:
            raise VivaceError(f"llama.cpp has no room for {num_sequences} sequences of {capacity} tokens")
        weakref.finalize(self, _free, lib, self._context, self._model)
        self.capacity, self.num_sequences = capacity, num_sequences
        self.num_bytes = int(lib.llama_model_size(self._model))
        """Number of bytes of the weights."""
        self.num_entries = int(settings.n_ctx)
        """Number of cache entries, all sequences together."""
        self._loras: list[Any] = []
        self._memory = lib.llama_get_memory(self._context)
        self._vocab_size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model)))
        self._batch = _LlamaBatch(lib, settings.n_batch)

    def run(self, rows: LlamaRows) -> list[npt.NDArray[np.float32]]:
        """Run one pass and return the logits (V,) of each wanted row, valid until the next pass.

        Raises:
            CapacityError: the rows do not fit the cache.
        """
        status = self._lib.llama_decode(self._context, self._batch.fill(rows))
        if status:
            raise CapacityError(f"llama.cpp has no room for {len(rows.tokens)} rows (status {status})")
        return [self._logits(row) for row in rows.wanted]

    def forget(self, sequence: int = -1, start: int = 0) -> None:
        """Empty the cache of a sequence, or of all (-1), from a position on."""
        self._lib.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def add_lora(self, path: Path) -> int:
        """Load a LoRA's GGUF file beside the model and return its number.

        Raises:
            VivaceError: llama.cpp does not take it.
        """
        lora = self._lib.llama_adapter_lora_init(self._model, str(path).encode())
        if not lora:
            raise VivaceError(f"llama.cpp does not take {path} beside this model")
        self._loras.append(lora)
        return len(self._loras) - 1

    def wear(self, lora: int | None) -> None:
        """Let all sequences wear a LoRA from the next pass on, or none; they cannot wear different ones.

        Raises:
            VivaceError: llama.cpp refuses.
        """
        chosen = [] if lora is None else [self._loras[lora]]
        loras = (self._lib.llama_adapter_lora_p_ctypes * len(chosen))(*chosen)
        scales = (ctypes.c_float * len(chosen))(*(1.0 for _ in chosen))
        if self._lib.llama_set_adapters_lora(self._context, loras, len(chosen), scales):
            raise VivaceError("llama.cpp does not wear this LoRA")

    def _logits(self, row: int) -> npt.NDArray[np.float32]:
        """Return the logits (V,) of a row as a view of llama.cpp's memory."""
        place = ctypes.addressof(self._lib.llama_get_logits_ith(self._context, row).contents)
        values = (ctypes.c_float * self._vocab_size).from_address(place)
        return np.frombuffer(memoryview(values), np.float32)


def llama_cpp_passes(engine: LlamaCpp, num_rows: Sequence[int], *, context: int) -> list[Callable[[], object]]:
    """Return passes over k rows that take the largest logit of each, like ``roofline.passes_over``."""

    def run(rows: int) -> None:
        engine.forget(0, context)
        places = range(context, context + rows)
        for logits in engine.run(LlamaRows([1] * rows, places, [0] * rows, range(rows))):
            logits.argmax()

    engine.forget()
    engine.run(LlamaRows([1] * context, range(context), [0] * context, []))
    return [partial(run, rows) for rows in num_rows]


class _LlamaBatch:
    """llama.cpp's struct ``llama_batch`` over numpy arrays."""

    def __init__(self, lib: ModuleType, size: int) -> None:
        self._ones = np.ones(size, np.int32)
        self._tokens, self._positions, self._sequences = (np.zeros(size, np.int32) for _ in range(3))
        self._wanted = np.zeros(size, np.int8)
        first = self._sequences.ctypes.data
        self._lists = np.arange(first, first + 4 * size, 4, dtype=np.uint64)  # a row's list of sequences has one
        self._struct = lib.llama_batch()
        arrays: dict[str, npt.NDArray[Any]] = {
            **{"token": self._tokens, "pos": self._positions, "n_seq_id": self._ones},
            **{"seq_id": self._lists, "logits": self._wanted},
        }
        for name, kind in lib.llama_batch._fields_:
            if name in arrays:
                setattr(self._struct, name, arrays[name].ctypes.data_as(kind))

    def fill(self, rows: LlamaRows) -> Any:
        """Fill the struct with these rows and return it."""
        count = len(rows.tokens)
        self._tokens[:count] = rows.tokens
        self._positions[:count] = rows.positions
        self._sequences[:count] = rows.sequences
        self._wanted[:count] = 0
        self._wanted[list(rows.wanted)] = 1
        self._struct.n_tokens = count
        return self._struct


@dataclass
class _Sequence:
    """One prompt that is being answered."""

    index: int
    length: int
    tokens: list[int] = field(default_factory=list)

    def is_done(self, limit: int, ends: frozenset[int]) -> bool:
        """Return whether the answer has reached its limit or an end token."""
        return len(self.tokens) >= limit or self.tokens[-1] in ends


@dataclass(frozen=True)
class LlamaCppPeer:
    """A checkpoint run by llama.cpp."""

    name: str
    engine: LlamaCpp
    max_new_tokens: int
    end_tokens: frozenset[int]
    entry_bytes: int = 0
    """Number of bytes of one token's keys and values in all layers, in float16."""
    drafter: Callable[[npt.NDArray[np.intc]], npt.NDArray[np.intc]] | None = None
    """Guesses what follows a text; None decodes token by token."""

    def holdings(self, batch: Sequence[BenchmarkPrompt]) -> Holdings:
        """Return the bytes of weights and cache, which are allocated when the file is loaded."""
        return Holdings(self.engine.num_bytes, self.engine.num_entries * self.entry_bytes, 0)

    def answer(self, batch: Sequence[BenchmarkPrompt]) -> Trial:
        """Answer one batch with greedy decoding; all its sequences share one pass per step."""
        num_drafted = num_accepted = num_steps = 0
        with peak_memory(torch.device("cpu")) as peak:
            start = time.perf_counter()
            self.engine.forget()
            live = self._prefill(batch)
            answers = list(live)
            first_at = last_at = time.perf_counter()
            while live := [one for one in live if not one.is_done(self.max_new_tokens, self.end_tokens)]:
                if self.drafter is None:
                    self._step(live)
                else:
                    for one in live:
                        drafted, accepted = self._speculate(one, batch[one.index].token_ids)
                        num_drafted, num_accepted = num_drafted + drafted, num_accepted + accepted
                        num_steps += 1
                last_at = time.perf_counter()
        return Trial(
            num_steps=num_steps,
            num_drafted=num_drafted,
            num_accepted=num_accepted,
            token_ids=tuple(tuple(one.tokens) for one in answers),
            num_first_tokens=len(batch),
            decode_s=last_at - first_at,
            total_s=last_at - start,
            prefill_s=first_at - start,
            peak_memory_bytes=peak.num_bytes,
        )

    def _prefill(self, batch: Sequence[BenchmarkPrompt]) -> list[_Sequence]:
        """Read all prompts in one pass and return the sequences with their first tokens."""
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        lasts: list[int] = []
        for index, question in enumerate(batch):
            tokens += question.token_ids
            positions += range(len(question.token_ids))
            sequences += [index] * len(question.token_ids)
            lasts.append(len(tokens) - 1)
        found = self.engine.run(LlamaRows(tokens, positions, sequences, lasts))
        return [_Sequence(i, len(batch[i].token_ids), [int(row.argmax())]) for i, row in enumerate(found)]

    def _step(self, live: Sequence[_Sequence]) -> None:
        """Append one token to each sequence."""
        rows = LlamaRows(
            [one.tokens[-1] for one in live],
            [one.length + len(one.tokens) - 1 for one in live],
            [one.index for one in live],
            range(len(live)),
        )
        for one, logits in zip(live, self.engine.run(rows), strict=True):
            one.tokens.append(int(logits.argmax()))

    def _speculate(self, one: _Sequence, prompt: Sequence[int]) -> tuple[int, int]:
        """Append what one pass over the last token and its draft yields; return guesses made and guesses kept."""
        assert self.drafter is not None
        left = self.max_new_tokens - len(one.tokens) - 1
        draft = self.drafter(np.array([*prompt, *one.tokens], np.intc)).tolist()[:left]
        first = one.length + len(one.tokens) - 1
        count = 1 + len(draft)
        places = range(first, first + count)
        passed = self.engine.run(LlamaRows([one.tokens[-1], *draft], places, [one.index] * count, range(count)))
        kept = 0
        for guess, logits in zip([*draft, None], passed, strict=True):
            one.tokens.append(int(logits.argmax()))
            if one.tokens[-1] != guess or guess in self.end_tokens:
                break
            kept += 1
        self.engine.forget(one.index, first + kept + 1)
        return len(draft), kept


def enter_llama_cpp(
    names: Sequence[str], folder: Path, questions: Sequence[BenchmarkPrompt], *, max_new_tokens: int, batch_size: int
) -> list[LlamaCppPeer]:
    """Write a checkpoint as GGUF, once for each format, and load the files; a GGUF file is loaded itself.

    Args:
        names: keys of `LLAMA_CPP`.
        folder: the checkpoint.
        questions: the prompts of the benchmark.
        max_new_tokens: length limit of an answer.
        batch_size: number of prompts answered together.

    Raises:
        DependencyError: llama-cpp-python is not installed, or crashes on this machine.
        UnsupportedError: the checkpoint cannot be written as GGUF.
    """
    if not names:
        return []
    _library()
    longest = max((len(question.token_ids) for question in questions), default=0) + max_new_tokens
    ends = frozenset(load_eos_ids(folder))
    config = load_config(folder)
    entry_bytes = 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    peers = []
    for name in names:
        kind = LLAMA_CPP[name]
        with tempfile.TemporaryDirectory(prefix="vivace-gguf-") as place:
            path = _file_for(kind, folder, Path(place))
            _probe(name, path)
            engine = LlamaCpp(path, num_threads=torch.get_num_threads(), capacity=longest, num_sequences=batch_size)
        drafter = _ngram_drafter(kind.num_drafted) if kind.num_drafted else None
        peers.append(LlamaCppPeer(name, engine, max_new_tokens, ends, entry_bytes, drafter))
    return peers


def _file_for(kind: LlamaKind, folder: Path, place: Path) -> Path:
    """Return the file that llama.cpp runs: the user's own if the model is one and no other format was asked for, or
    one that is written to a folder.
    """
    if is_linked(folder) and kind.weights == "auto" and kind.quantized is None:
        return linked_file(folder)
    path = place / "model.gguf"
    write_checkpoint(folder, path, kind.weights, tokenizer=False)
    return path if kind.quantized is None else _quantized(path, kind.quantized)


def _quantized(path: Path, kind: int) -> Path:
    """Let llama.cpp quantize a file; return the new file beside it, and remove the old one.

    Raises:
        VivaceError: it cannot.
    """
    lib, target = _library(), path.with_suffix(".quantized.gguf")
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.nthread = kind, torch.get_num_threads()
    if lib.llama_model_quantize(str(path).encode(), str(target).encode(), ctypes.byref(params)):
        raise VivaceError(f"llama.cpp does not quantize this checkpoint (llama_ftype {kind}); leave this peer out")
    path.unlink()
    return target


def _ngram_drafter(num_drafted: int) -> Callable[[npt.NDArray[np.intc]], npt.NDArray[np.intc]]:
    """Return the prompt lookup of llama-cpp-python, with n-grams of up to two tokens as by default."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    drafter: Callable[[npt.NDArray[np.intc]], npt.NDArray[np.intc]] = LlamaPromptLookupDecoding(
        num_pred_tokens=num_drafted
    )
    return drafter


def try_out(path: str, num_threads: str) -> None:
    """Run a prompt of 40 tokens and one token more through a file, as ``_PROBE`` does in a process of its own."""
    engine = LlamaCpp(Path(path), num_threads=int(num_threads), capacity=64)
    engine.run(LlamaRows([1] * 40, range(40), [0] * 40, [39]))
    engine.run(LlamaRows([1], [40], [0], [0]))


def _probe(name: str, path: Path) -> None:
    """Answer a prompt in a separate process first, since a crash would end the whole benchmark.

    Raises:
        DependencyError: it crashed. Other failures show when the file is loaded.
    """
    command = [sys.executable, "-c", _PROBE, str(path), str(torch.get_num_threads())]
    status = subprocess.run(command, capture_output=True, check=False).returncode
    if status < 0:
        raise DependencyError(
            f"peer {name} crashes on this machine ({signal.Signals(-status).name}); leave it out of --peers, or "
            "compile llama-cpp-python again without the instructions that do it (docs/quickstart.md)"
        )


@cache
def _library() -> ModuleType:
    """Return llama-cpp-python's module of C functions, with its log switched off.

    Raises:
        DependencyError: llama-cpp-python is not installed.
    """
    try:
        from llama_cpp import llama_cpp
    except ImportError as error:
        raise DependencyError(
            "peer llama.cpp needs llama-cpp-python, which compiles it with cmake and g++ in some minutes; "
            "run: pip install 'vivace[llamacpp]'"
        ) from error
    lib: ModuleType = llama_cpp
    lib.llama_log_set(_no_log(lib), ctypes.c_void_p(0))
    return lib


@cache
def _no_log(lib: Any) -> Any:
    """Return a log callback that does nothing; it is cached, because C holds no reference to it."""
    return lib.llama_log_callback(lambda *_: None)


def _free(lib: Any, context: Any, model: Any) -> None:
    """Free llama.cpp's memory."""
    lib.llama_free(context)
    lib.llama_model_free(model)
