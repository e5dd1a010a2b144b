"""The ablation of LLM in a flash (Alizadeh et al. 2023, arXiv:2312.11514, table 3) on this machine's disk.

Run it on a machine that does nothing else, with room for three copies of the model on the disk to be measured:

    python -m benchmarks.flash make flash-model
    python -m benchmarks.flash run flash-model --out flash.json

``take`` makes the stores of a trained ReLU model that is large enough (for example a widened one), with predictors
trained on the prompts of a file; ``run`` then decodes a packaged prompt, greedily. ``agree`` compares its choices with
those of the model that is completely in memory:

    python -m benchmarks.flash take relu-x8 flash-relu --calibrate prompts.jsonl
    python -m benchmarks.flash agree flash-relu

``make`` writes an OPT checkpoint of 1.2 GB with random weights. Its sparsity is synthetic: up-projections have rank 64
and biases that leave about a tenth of the neurons active, and embeddings share a component, so that neighbouring tokens
activate many of the same neurons. The predictors are the factors themselves and miss nothing. The benchmark therefore
measures how much is read, how fast, and what it costs; not what predictors of a trained model miss.

Every row reads directly from the device, bypassing the page cache, decodes the same prompt, and reports the bytes that
the kernel counted. All rows except the last two run on PyTorch, and all except the last read with threads of Python.
naive reads all matrices for every token; hybrid keeps half of the model in memory; the others keep what fits beside
attention in half of the model. Rows take turns within a repeat, each in a process of its own. Tokens are sampled from a
nearly uniform distribution, because greedy decoding of random weights repeats itself and would read nothing new.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.flash_models import ApartReader, make, setting_of, trial
from benchmarks.following import followed, written
from benchmarks.result_files import write_report
from vivace.checkpoint.load import put
from vivace.checkpoint.tokenizer import load_tokenizer
from vivace.core.model import Decoder
from vivace.core.sampling import Sampling
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.evaluate.provenance import provenance
from vivace.kernels.choice import choose
from vivace.prompts import packaged_prompts
from vivace.storage.budget import plan_memory
from vivace.storage.io.async_reader import CHUNK_BYTES
from vivace.storage.io.probing import ReaderChoice, device_bytes, probe
from vivace.storage.io.readers import DirectReader
from vivace.storage.io.thread_reader import ThreadAsyncReader
from vivace.storage.loading import SCATTERED_THREADS, Storage, load_stored, read_bundle
from vivace.storage.neurons.cache import NeuronCache, Runs
from vivace.storage.neurons.loader import NeuronCounts
from vivace.storage.neurons.predictors import PredictorConfig
from vivace.storage.store import Store, is_store, open_store
from vivace.storage.streaming import Stream, StreamedParts

PROMPT, TOKENS = 128, 256
"""Number of tokens of the prompt, and of prompt and answer for which memory is planned."""


@dataclass(frozen=True)
class Row:
    """One way of running the model, per decoded token."""

    name: str
    tokens_per_s: float
    ms: float
    read_ms: float
    """Time that computing waited for reads."""
    manage_ms: float
    compute_ms: float
    gb_read: float
    gb_from_device: float | None
    """Bytes read from the device, as the kernel counts them."""
    gb_per_s: float
    """Rate while reading."""
    planned_gb: float
    """Planned size of weights, buffers and cache in memory."""
    anonymous_gb: float | None
    """Growth of memory since before loading, as the kernel counts it (RssAnon and RssShmem), after the last token."""
    asked: float | None
    """Share of a layer's neurons that were needed."""
    found: float | None
    """Share of those neurons that were in memory."""
    tokens: list[int]
    """Decoded tokens."""


def main() -> None:
    """Make a model, or measure one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("make", help="write the model and its stores")
    made.add_argument("model", type=Path)
    for name, default in (("width", 2048), ("ffn", 8192), ("layers", 12), ("heads", 16), ("vocab", 8192)):
        made.add_argument(f"--{name}", type=int, default=default)
    taken = commands.add_parser("take", help="make the stores of a trained model with ReLU")
    taken.add_argument("source", type=Path)
    taken.add_argument("model", type=Path)
    taken.add_argument("--calibrate", type=Path, required=True, help="prompts (.jsonl) that predictors are trained on")
    taken.add_argument("--rank", type=int, default=PredictorConfig.rank, help="of the predictors")
    taken.add_argument("--recall", type=float, default=PredictorConfig.recall, help="that they are set to")
    taken.add_argument("--epochs", type=int, default=PredictorConfig.epochs, help="that they are trained for")
    taken.add_argument("--order", choices=("activity", "file"), default="activity", help="in which neurons lie")
    measured = commands.add_parser("run", help="measure every row")
    measured.add_argument("model", type=Path)
    measured.add_argument("--out", type=Path, default=Path("flash.json"))
    measured.add_argument("--repeats", type=int, default=3)
    measured.add_argument("--new-tokens", type=int, default=48)
    measured.add_argument("--share", type=float, default=0.5, help="of the model that memory holds")
    measured.add_argument("--rows", help="only these of the table, with commas between; the first is compared with")
    measured.add_argument("--threads", type=int, help="that compute, beside those that read")
    measured.add_argument("--under", default="", help="command that each row runs under, such as: taskset -c 0,1")
    judged = commands.add_parser("agree", help="hold the neurons' answers against the resident model's")
    judged.add_argument("model", type=Path)
    judged.add_argument("--prompts", type=int, default=2, help="packaged ones of each set")
    judged.add_argument("--new-tokens", type=int, default=32)
    judged.add_argument("--share", type=float, default=0.5, help="of the model that memory holds")
    one = commands.add_parser("row", help="measure one row, as JSON")
    one.add_argument("model", type=Path)
    one.add_argument("name")
    one.add_argument("new_tokens", type=int)
    one.add_argument("share", type=float)
    one.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.command == "row":
        torch.set_num_threads(options.threads or torch.get_num_threads())
        open_row = rows(options.model, options.share)[options.name]
        print(json.dumps(asdict(measure(options.name, open_row, options.new_tokens))))
    elif options.command == "take":
        predictors = PredictorConfig(options.rank, options.recall, options.epochs)
        trial(options.source, options.model, options.calibrate, predictors, is_ordered=options.order == "activity")
    elif options.command == "make":
        make(options.model, options.width, options.ffn, options.layers, options.heads, options.vocab)
    elif options.command == "agree":
        print(json.dumps(agree(options.model, options.prompts, options.new_tokens, options.share)))
    else:
        every = list(rows(options.model, options.share))
        names = every if options.rows is None else [name.strip() for name in options.rows.split(",")]
        if unknown := set(names) - set(every):
            parser.error(f"no such rows: {', '.join(sorted(unknown))}; there are {', '.join(every)}")
        run(options.model, names, options)


class Forgetful(NeuronCache):
    """A cache without a window: every token reads all neurons it needs."""

    def turn(self, active: Tensor) -> Runs:
        """Empty the cache, then select the active neurons."""
        self.forget()
        return super().turn(active)


@contextmanager
def streamed(store: Store, share: float, num_buffers: int) -> Iterator[tuple[Decoder, Storage]]:
    """Open a dense model: a share of it stays in memory, the rest is read for every token."""
    reader = DirectReader(store.path)
    plan = plan_memory(store, None, TOKENS)
    if share:
        plan = plan_memory(store, int(share * plan.total_bytes), TOKENS)
    else:
        units = tuple(name for name in store.bundles if name != "resident")
        size = num_buffers * max(store[unit].num_pages_bytes for unit in units)
        fixed = store["resident"].num_bytes
        plan = replace(plan, resident=(), streamed=units, resident_bytes=fixed, buffer_bytes=size)
    with closing(ThreadAsyncReader(reader)) as opened:
        stream = Stream(store, opened, plan.streamed, num_buffers)
        with torch.device("meta"):
            decoder = Decoder(store.config, StreamedParts(store.config, stream))
        for name in ("resident", *plan.resident):
            for parameter, values in read_bundle(store, opened, name).items():
                put(decoder, parameter, values)
        yield decoder.eval(), Storage(store, plan, ReaderChoice(reader, "asked for"), opened, None, stream)
        stream.close()
    reader.close()


@contextmanager
def sparse(
    store: Store, share: float, window: int, *, is_bundled: bool = True, computes: bool = False, reads: bool = False
) -> Iterator[tuple[Decoder, Storage]]:
    """Open a model that reads the neurons its predictors select.

    Args:
        store: the store of neurons.
        share: share of the model in memory.
        window: number of tokens whose neurons are kept; 0 keeps none.
        is_bundled: whether rows and columns of a neuron lie side by side.
        computes: whether native kernels compute.
        reads: whether native code reads.
    """
    budget = int(share * plan_memory(store, None, TOKENS).total_bytes)
    keep = max(1, window)
    body = choose("auto").body if computes else None
    model, storage = load_stored(store.folder, budget, reader="direct", num_tokens=TOKENS, window=keep, body=body)
    assert storage.neurons is not None
    if not window:
        old = storage.neurons.caches
        storage.neurons.caches = [Forgetful(len(c.row_of), c.room, c.stride, 1) for c in old]
        del old
    if reads:
        yield model, storage
    else:
        apart = None if is_bundled else ApartReader(store)
        cut = CHUNK_BYTES if apart is None else apart.chunk_bytes
        other = ThreadAsyncReader(apart or storage.reader.reader, num_threads=SCATTERED_THREADS, chunk_bytes=cut)
        with closing(other):
            storage.neurons.reader = other
            yield model, storage
    storage.close()


Opening = Callable[[], AbstractContextManager[tuple[Decoder, Storage]]]


def rows(folder: Path, share: float) -> dict[str, Opening]:
    """Return every way of running the model by name; each opens as a context of (model, storage)."""
    dense, neurons = open_store(folder / "layers"), open_store(folder / "neurons")
    return {
        "naive": lambda: streamed(dense, 0.0, 1),
        "hybrid": lambda: streamed(dense, share, 1),
        "hybrid, read ahead": lambda: streamed(dense, share, 2),
        "+ predictor": lambda: sparse(neurons, share, 0, is_bundled=False),
        "+ window": lambda: sparse(neurons, share, 4, is_bundled=False),
        "+ bundling": lambda: sparse(neurons, share, 4),
        "+ native kernels": lambda: sparse(neurons, share, 4, computes=True),
        "+ native reads": lambda: sparse(neurons, share, 4, computes=True, reads=True),
    }


def run(folder: Path, names: Sequence[str], options: argparse.Namespace) -> None:
    """Measure rows, print a table and write a file."""
    new_tokens, share = options.new_tokens, options.share
    assert is_store(folder / "layers"), f"{folder} was not made by this benchmark"
    store = open_store(folder / "layers")
    found: dict[str, list[Row]] = {}
    limit = probe(DirectReader(store.path), store.path, num_bytes=256 << 20)
    for _ in range(options.repeats):
        for name in names:
            words = [sys.executable, "-m", "benchmarks.flash", "row", str(folder), name, str(new_tokens), str(share)]
            words = [*shlex.split(options.under), *words]
            words += [] if options.threads is None else [f"--threads={options.threads}"]
            row = Row(**json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout))
            found.setdefault(name, []).append(row)
            print(row, file=sys.stderr, flush=True)
    best = {name: _median(each) for name, each in found.items()}
    result = {
        "provenance": asdict(provenance(torch.device("cpu"))),
        "model": {"bytes": store.num_bytes, "share": share, "new_tokens": new_tokens, **setting_of(folder)},
        "threads": options.threads,
        "device_gb_per_s": limit,
        "rows": [asdict(row) for row in best.values()],
        "repeats": {name: [row.ms for row in each] for name, each in found.items()},
    }
    write_report(options.out, result)
    print(f"device {limit:.2f} GB/s; model {store.num_bytes / 1e9:.2f} GB")
    print(table(list(best.values())))


def agree(folder: Path, num_prompts: int, new_tokens: int, share: float) -> dict[str, Any]:
    """Compare the neurons' choices with the full model's, along its own greedy answers to packaged prompts.

    Returns:
        For each set: number of tokens; share of them that the neurons would have chosen; increase of the negative
        log-likelihood in nats per token; and share of neurons that were needed.
    """
    dense, neurons = open_store(folder / "layers"), open_store(folder / "neurons")
    tokenizer = load_tokenizer(dense.folder)
    sets = {
        name: [tokenizer.encode_prompt(row.request) for row in packaged_prompts(name)[:num_prompts]]
        for name in ("e2e", "sql")
    }
    model, storage = load_stored(dense.folder, reader="direct", num_tokens=TOKENS)
    texts = {name: [written(model, prompt, new_tokens) for prompt in prompts] for name, prompts in sets.items()}
    storage.close()
    del model, storage
    found = {}
    with sparse(neurons, share, 4) as (model, storage):
        for name in sets:
            before = _counters(storage)
            along = followed(model, texts[name])
            gone = {key: value - before[key] for key, value in _counters(storage).items()}
            cells = along.num_tokens * model.config.num_layers * model.config.ffn_width
            found[name] = {
                "tokens": along.num_tokens,
                "agreed": along.agreed,
                "surprise": along.surprise,
                "asked": gone["active"] / cells,
                "read": gone["missing"] / cells,
            }
    return found


def measure(name: str, open_row: Opening, new_tokens: int) -> Row:
    """Decode once without timing the prompt."""
    at_rest = _anonymous_bytes()
    with open_row() as (model, storage):
        row = _decode(name, model, storage, new_tokens)
        held = _anonymous_bytes()
    return row if held is None or at_rest is None else replace(row, anonymous_gb=(held - at_rest) / 1e9)


def _decode(name: str, model: Decoder, storage: Storage, new_tokens: int) -> Row:
    """Decode and return the figures per token."""
    draw = torch.Generator().manual_seed(1)
    random = torch.randint(0, model.config.vocab_size, (PROMPT,), generator=draw).tolist()
    prompt = setting_of(storage.store.folder.parent).get("prompt")
    sampling = Sampling(do_sample=True, temperature=100.0) if prompt is None else Sampling()
    prompt = random if prompt is None else prompt
    session = Session(model, num_slots=1, capacity=len(prompt) + new_tokens + 1)
    session.admit(Request(tuple(prompt), new_tokens + 1, NoDrafts(), sampling=sampling, logprobs=False))
    session.step()  # the prompt and the first token
    before, begun = _counters(storage), time.perf_counter()
    tokens = [token for emitted in session.drain() for token in emitted.tokens]
    count = len(tokens)
    seconds = (time.perf_counter() - begun) / count
    after = _counters(storage)
    gone = {key: (after[key] - before[key]) / count for key in after}
    return Row(
        name,
        tokens_per_s=1 / seconds,
        ms=seconds * 1e3,
        read_ms=gone["wait"] * 1e3,
        manage_ms=gone["manage"] * 1e3,
        compute_ms=(seconds - gone["wait"] - gone["manage"]) * 1e3,
        gb_read=gone["bytes"] / 1e9,
        gb_from_device=None if device_bytes() is None else gone["device"] / 1e9,
        gb_per_s=gone["bytes"] / gone["busy"] / 1e9 if gone["busy"] else 0.0,
        planned_gb=storage.plan.num_bytes / 1e9,
        anonymous_gb=None,
        asked=gone["active"] / model.config.num_layers / model.config.ffn_width if storage.neurons else None,
        found=1 - gone["missing"] / max(1, gone["active"]) if storage.neurons else None,
        tokens=tokens,
    )


def _counters(storage: Storage) -> dict[str, float]:
    """Return the counters of reads and neurons."""
    traffic = (storage.async_reader if storage.neurons is None else storage.neurons.reader).traffic
    counts = NeuronCounts() if storage.neurons is None else storage.neurons.counts
    return {
        "wait": traffic.wait_s,
        "busy": traffic.busy_s,
        "bytes": traffic.num_bytes,
        "manage": counts.manage_s,
        "active": counts.active,
        "missing": counts.read,
        "device": device_bytes() or 0,
    }


def _anonymous_bytes() -> int | None:
    """Return the bytes of this process that are not mapped from files; None if the system does not report them."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def _median(each: list[Row]) -> Row:
    """Return the row with the median time."""
    middle = statistics.median_low(row.ms for row in each)
    return next(row for row in each if row.ms == middle)


def _same(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of tokens until two texts differ."""
    return next((place for place, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), len(a))


def equal_ms(first: Row, fastest: Row) -> float:
    """Return the milliseconds per token of the first row if it had read at the rate of the fastest row.

    The first row reads everything and waits for all of it, so that its waiting time shrinks in proportion.
    """
    return first.ms - first.read_ms * (1 - first.gb_per_s / fastest.gb_per_s)


def fastest_like(measured: Sequence[Row]) -> Row:
    """Return the row with the highest rate among those that read whole matrices and wait for them, like the first."""
    alike = [row for row in measured if row.asked is None and "ahead" not in row.name]
    return max(alike, key=lambda row: row.gb_per_s)


def table(measured: list[Row]) -> str:
    """Return a Markdown table with speed and text relative to the first row, and the speed at equal reading rates.

    Whole matrices are read at another rate than neurons, and rows were measured at different times on one disk. The
    last column therefore compares with the first row at the highest rate that a row with whole matrices reached.
    """
    first = measured[0]
    fastest = fastest_like(measured)
    heads = ("GB planned", "GB held", "GB read a token", "read at, GB/s")
    heads += ("ms a token", "reading", "managing", "computing")
    equal = f"speed, had {first.name} read at {fastest.gb_per_s:.2f} GB/s"
    lines = ["| | " + " | ".join((*heads, "speed", equal, "same text")) + " |", "|---" * (len(heads) + 4) + "|"]
    for row in measured:
        gigabytes = f"{row.planned_gb:.2f} | {row.anonymous_gb or 0.0:.2f} | {row.gb_read:.3f} | {row.gb_per_s:.2f}"
        times = " | ".join(f"{ms:.0f}" for ms in (row.ms, row.read_ms, row.manage_ms, row.compute_ms))
        text = f"{_same(first.tokens, row.tokens)} of {len(row.tokens)}"
        gains = f"{first.ms / row.ms:.1f}x | {equal_ms(first, fastest) / row.ms:.1f}x"
        lines.append(f"| {row.name} | {gigabytes} | {times} | {gains} | {text} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
