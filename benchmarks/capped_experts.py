"""Decode a mixture whose experts do not fit: ``python -m benchmarks.capped_experts STORE --json FILE --out DIR``.

Every row is a process of its own in two control groups (version 1, as root). One limits memory, the page cache
included, to what is resident, half of the experts and some room. The other is the kernel's throttle of block reads, so
that the device has one known speed for everybody: direct reads, page faults and read-ahead alike. Libraries are loaded
before. Files are dropped from the page cache before; what lies in caches of the machine's host cannot be.

Rows are policies of the expert cache with direct reads, a plain memory map of the same store, llama.cpp's memory map
of the same weights as GGUF, and transformers with accelerate's offload to disk: whole layers stay in memory as far as
they fit, the others are read for every token. All continue the same token ids greedily. Times with all experts in
memory, outside both groups, are measured first; the simulator replays the recorded traces with them and the stated
speed.

    python -m benchmarks.capped_experts moe.store --model moe --foresight moe/adapters/foresight --gb-per-s 2 --out out
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.capped import GROUP, drop, enter, read_bytes
from benchmarks.capped_expert_tables import RIVALS, gains_over, tables
from benchmarks.expert_guesses import load_around
from benchmarks.expert_policies import LeastRecent, OnDemand
from benchmarks.expert_traces import Trace
from benchmarks.experts import CAPACITY, Bench, MethodSystem
from benchmarks.mixture_gguf import write_mixture
from benchmarks.result_files import write_report
from vivace.checkpoint.tokenizer import load_tokenizer
from vivace.core.moe import Expert
from vivace.decode.plain import NoDrafts
from vivace.evaluate.provenance import provenance
from vivace.kernels.choice import choose
from vivace.prompts import packaged_prompts
from vivace.storage.experts.cache import Counts
from vivace.storage.experts.policy import NextUse, Policy
from vivace.storage.experts.store import StoredExperts
from vivace.storage.store import open_store

THROTTLE = Path("/sys/fs/cgroup/blkio/vivace-capped")
"""The control group that slows reads down; removed after the measurement."""
ROOM = 256 << 20
"""Bytes of the limit beside weights: activations, keys and values, and whatever Python allocates."""
POLICIES = ("on_demand", "lru", "next_layer", "ahead")
"""Rows of the expert cache."""
FEW = 8
"""Tokens of each of two answers of the slowest rival."""
MOST_S = 150
"""Seconds after which a row is cut, unless told otherwise."""
MOST_IN_MEMORY_S = 900
"""Seconds for loading and timing the whole model, without which nothing can be simulated."""


class MappedExperts:
    """Experts over a memory map of their store: the page cache decides what is in memory. Stands in for a cache."""

    def __init__(self, experts: StoredExperts) -> None:
        self.counts, self.num_slots = Counts(), 0
        with experts.store.path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        content = torch.frombuffer(self._map, dtype=torch.uint8)
        places = {key: experts.offset(key) for key in experts.keys}
        self._experts = {
            key: experts.expert(content[place : place + experts.expert_bytes]) for key, place in places.items()
        }

    def fetch(self, layer: int, chosen: Sequence[int], *, is_prompt: bool) -> Iterator[tuple[int, Expert]]:
        """Yield the experts that a layer chose; their pages are read when they run."""
        for number in dict.fromkeys(chosen):
            yield number, self._experts[layer, number]

    def prefetch(self, layer: int, likely: Sequence[int]) -> None:
        """Do nothing."""

    def predict_reuse(self, layer: int, passes: Sequence[float]) -> None:
        """Do nothing."""


def throttle(file: Path, gb_per_s: float) -> None:
    """Put this process into a new control group that reads from the file's device no faster than that."""
    THROTTLE.mkdir(exist_ok=True)
    device = file.stat().st_dev
    limit = f"{os.major(device)}:{os.minor(device)} {int(gb_per_s * 1e9)}\n"
    (THROTTLE / "blkio.throttle.read_bps_device").write_text(limit)
    (THROTTLE / "cgroup.procs").write_text(str(os.getpid()))


def confined(options: argparse.Namespace, file: Path) -> None:
    """Enter both control groups before a file is read."""
    drop(file)
    enter(options.limit)
    throttle(file, options.gb_per_s)


def bench_of(options: argparse.Namespace) -> Bench:
    """Open a store for a row of ours."""
    ahead = [("ahead", options.foresight)] if options.foresight else []
    told = {"store": options.store, "reader": "direct", "pace": None, "foresight": ahead}
    return Bench(argparse.Namespace(**told, prompts=options.prompts, tokens=options.tokens))


def ours(options: argparse.Namespace) -> dict[str, Any]:
    """Answer all prompts with a policy of the expert cache, or with a memory map."""
    confined(options, open_store(options.store).path)
    bench = bench_of(options)
    if options.row == "mmap":
        mapped: Any = MappedExperts(bench.experts)
        model = load_around(bench.store, bench.reader, mapped, bench.body)
        system = MethodSystem("mmap", mapped, Trace(bench.store.config.num_layers), model, NoDrafts())
    else:
        layers = bench.store.config.num_layers
        policies: dict[str, Policy] = {"on_demand": OnDemand(), "lru": LeastRecent()}
        policy = policies.get(options.row) or NextUse(layers, bench.num_experts)
        drafter = bench.drafters().get(options.row) or NoDrafts()
        system = bench.system(policy, bench.num_slots(options.share), drafter, options.row)
    before = 0
    for place, prompt in enumerate(bench.prompts):
        before = before if place != 1 else system.from_device
        system.answer(prompt, options.tokens, counts=place > 0)
        if place and options.row != "mmap":
            system.trace.save(options.out / f"trace-{options.row}.json")
        if place:
            print(json.dumps(figures(system, before)), flush=True)
    return figures(system, before)


def figures(system: MethodSystem, before: int) -> dict[str, Any]:
    """Return the figures of a row of ours so far, with what was read from the device since ``before``."""
    counts = system.cache.counts
    found = {
        "device_bytes": system.from_device - before,
        "loads_per_token": system.loads_per_token,
        "wait_s": counts.wait_s,
        "wasted_share": counts.wasted / max(1, counts.loads),
        "recall": system.trace.recall() if system.trace.predictions else None,
    }
    return measured(system.decode_s, [list(text) for text in system.texts]) | found


def others(options: argparse.Namespace, load: Callable[[argparse.Namespace], Callable[[list[int], bool], int]]) -> Any:
    """Answer all prompts with a function that takes new ids, and whether a text begins, and returns the likeliest."""
    few = options.row == "accelerate"  # reads every weight for every token
    prompts, count = prompts_of(options)[: 3 if few else None], min(options.tokens, FEW) if few else options.tokens
    follow = load(options)
    texts, seconds, before = [], [], 0

    def found() -> dict[str, Any]:
        said = measured(seconds, texts) | {"device_bytes": read_bytes() - before}
        return said | {"peak_bytes": said["peak_bytes"] + options.held}

    for place, prompt in enumerate(prompts):
        before = before if place != 1 else read_bytes()
        text, begun = [follow(list(prompt), True)], time.perf_counter()
        while len(text) < count:
            text.append(follow(text[-1:], False))
        texts.append(text)
        if place:
            seconds.append(time.perf_counter() - begun)
            print(json.dumps(found()), flush=True)
    return found()


def llama(options: argparse.Namespace) -> Callable[[list[int], bool], int]:
    """Load llama.cpp over a memory map."""
    import numpy as np
    from llama_cpp import Llama, llama_get_logits_ith

    confined(options, options.gguf)
    size = {"n_ctx": CAPACITY, "n_batch": 256, "n_ubatch": 256, "n_threads": 1, "n_threads_batch": 1}
    model = Llama(str(options.gguf), **size, use_mmap=True, verbose=False)

    def follow(ids: list[int], begins: bool) -> int:
        if begins:
            model.reset()
        model.eval(ids)
        return int(np.ctypeslib.as_array(llama_get_logits_ith(model.ctx, -1), (model.n_vocab(),)).argmax())

    return follow


def accelerated(options: argparse.Namespace) -> Callable[[list[int], bool], int]:
    """Load transformers with as many layers in memory as fit beside the largest; accelerate reads the others.

    Layers in memory are loaded before the group is entered, so its limit is less by what they take.

    Raises:
        ValueError: all layers fit.
    """
    from accelerate import dispatch_model, infer_auto_device_map
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    layer = type(model.model.layers[0]).__name__
    places = infer_auto_device_map(model, {"cpu": options.limit - options.room}, no_split_module_classes=[layer])
    if "disk" not in places.values():
        raise ValueError("all layers fit into the limit: there is nothing to read from the disk")
    folder = Path(tempfile.mkdtemp(dir=options.out))
    dispatch_model(model, places, main_device="cpu", offload_dir=folder)
    files = sorted(folder.glob("*.dat"))
    for file in files:
        drop(file)
    options.held = sum(each.nbytes for each in model.parameters() if each.device.type != "meta")
    options.limit -= options.held
    confined(options, files[0])
    state: dict[str, Any] = {}

    def follow(ids: list[int], begins: bool) -> int:
        past = None if begins else state["past"]
        with torch.inference_mode():
            found = model(input_ids=torch.tensor([ids]), past_key_values=past, use_cache=True)
        state["past"] = found.past_key_values
        return int(found.logits[0, -1].argmax())

    return follow


def measured(seconds: Sequence[float], texts: Sequence[list[int]]) -> dict[str, Any]:
    """Return the figures of one process; the first answer only fills caches."""
    counts = [len(text) - 1 for text in texts[1:]]
    return {
        "ms_per_token": 1e3 * sum(seconds) / sum(counts),
        "ms_by_answer": [1e3 * s / n for s, n in zip(seconds, counts, strict=True)],
        "num_tokens": sum(counts),
        "texts": texts,
        "peak_bytes": int((GROUP / "memory.max_usage_in_bytes").read_text()),
        "times_at_limit": int((GROUP / "memory.failcnt").read_text()),
    }


def prompts_of(options: argparse.Namespace) -> list[tuple[int, ...]]:
    """Return the prompts' token ids, as ``Bench`` has them."""
    tokenizer = load_tokenizer(options.store)
    texts = [p.request for task in ("e2e", "sql") for p in packaged_prompts(task)[: options.prompts]]
    return [tuple(tokenizer.encode_prompt(text)) for text in texts]


def in_memory(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, outside both groups, the compute of a token by drafter and that of an expert."""
    bench = bench_of(options)
    return {"compute_s": bench.compute_s(), "expert_s": bench.expert_s()}


ROWS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "in_memory": in_memory,
    **dict.fromkeys((*POLICIES, "mmap"), ours),
    "llama.cpp": partial(others, load=llama),
    "accelerate": partial(others, load=accelerated),
}


def run(name: str, words: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run a row in a process of its own, and cut it after some seconds; an error is a row too.

    A row that is cut keeps its whole answers, if there is one beside that which fills the caches.
    """
    command = [sys.executable, "-m", "benchmarks.capped_experts", *words, "--row", name]
    said, failed, is_cut = "", "", False
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
        said = done.stdout if done.returncode == 0 else ""
        failed = "killed for memory" if done.returncode == -9 else (done.stderr.splitlines() or ["failed"])[-1]
    except subprocess.TimeoutExpired as cut:
        said, is_cut = cut.stdout.decode() if isinstance(cut.stdout, bytes) else cut.stdout or "", True
        failed = f"no whole answer within {limit_s:g} s"
    finally:
        for group in (GROUP, THROTTLE):
            if group.is_dir():
                group.rmdir()
    return last_row(said, failed) | ({"cut_s": limit_s} if is_cut else {})


def last_row(said: str, failed: str) -> dict[str, Any]:
    """Return the last whole line of figures that a row printed, or why there is none."""
    for line in reversed(said.splitlines()):
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:
            continue  # cut in the middle, or not ours
        return found
    return {"error": failed}


def kept_rows(path: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what an interrupted run with the same settings has measured: the facts and its rows.

    Raises:
        SystemExit: the file holds a run with other settings, which is not overwritten.
    """
    if path is None or not path.is_file():
        return {"in_memory": None, "rows": {}}
    report = json.loads(path.read_text(encoding="utf-8"))
    other = [name for name, value in settings.items() if report.get(name) != value]
    if other:
        raise SystemExit(f"{path} holds a run with another {', '.join(other)}: give another --json, or remove it")
    return {"in_memory": report["in_memory"], "rows": report["rows"]}


def refuse_without_groups() -> None:
    """Say in one line what is missing where the groups cannot be made.

    Raises:
        SystemExit: a controller of version 1 is not mounted, or may not be written.
    """
    for group, file in ((GROUP, "memory.limit_in_bytes"), (THROTTLE, "blkio.throttle.read_bps_device")):
        try:
            group.mkdir(exist_ok=True)
            is_there = (group / file).is_file()
            group.rmdir()
        except OSError as error:
            raise SystemExit(
                f"cannot make {group} ({error.strerror}): needs root and control groups of version 1"
            ) from None
        if not is_there:
            raise SystemExit(f"{group.parent} has no {file}: needs control groups of version 1")


def simulated_ms(name: str, options: argparse.Namespace, bench: Bench, facts: dict[str, Any]) -> float:
    """Return the simulator's milliseconds a token for a recorded row."""
    trace = Trace.load(options.out / f"trace-{name}.json")
    compute = facts["compute_s"].get(name, facts["compute_s"]["plain"])
    bench.gb_per_s = bench.device_gb_per_s  # as fast as it is; the kernel's throttle is simulated
    bound_to = options.gb_per_s * 1e9
    return 1e3 * bench.simulated(name, trace, bench.num_slots(options.share), compute, facts["expert_s"], bound_to)


def simulate(rows: dict[str, dict[str, Any]], options: argparse.Namespace, bench: Bench, facts: dict[str, Any]) -> None:
    """Add to the policies' rows, also to those of an interrupted run, what a token computes and what is simulated."""
    for name in POLICIES:
        row = rows.get(name, {"error": "not measured"})
        if "error" not in row and "error" not in facts and "simulated_ms" not in row:
            row["compute_ms"] = 1e3 * facts["compute_s"].get(name, facts["compute_s"]["plain"])
            row["simulated_ms"] = simulated_ms(name, options, bench, facts)


def with_gains(rows: dict[str, dict[str, Any]], load_ms: float) -> None:
    """Add speed-ups over LRU and no cache, and to policies the most that any order of their loads could give.

    Args:
        rows: by name; changed.
        load_ms: milliseconds that the device needs for an expert.
    """
    fine = {name: row for name, row in rows.items() if "error" not in row}
    for row in fine.values():
        for base in ("lru", "on_demand"):
            if base in fine:
                row[f"over_{base}"], gains = gains_over(fine[base], row)
                row[f"over_{base}_range"] = [min(gains), max(gains)]
    if "compute_ms" not in fine.get("lru", {}):
        return
    whole = fine["lru"]["loads_per_token"] * load_ms + fine["lru"]["compute_ms"]
    for row in fine.values():
        if "compute_ms" in row:
            row["bound_over_lru"] = whole / max(row["loads_per_token"] * load_ms, row["compute_ms"])


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("store", type=Path)
    made.add_argument("--model", type=Path, help="the checkpoint of the store, for transformers and GGUF")
    made.add_argument("--foresight", type=Path, help="an adapter of it")
    made.add_argument("--out", type=Path, required=True, help="for traces, the GGUF file and offloaded weights")
    made.add_argument("--json", type=Path)
    made.add_argument("--share", type=float, default=0.5, help="of the experts in memory")
    made.add_argument("--gb-per-s", type=float, default=1.0, help="to which the kernel holds reads of the disk")
    made.add_argument("--prompts", type=int, default=4, help="of each task; the first only fills the caches")
    made.add_argument("--tokens", type=int, default=48)
    made.add_argument("--room", type=int, default=ROOM, help="bytes of the limit beside weights")
    made.add_argument("--rows", nargs="+", default=[*POLICIES, *RIVALS], choices=[*POLICIES, *RIVALS])
    made.add_argument(
        "--row-s", type=float, default=MOST_S, help="seconds after which a row is cut to its whole answers"
    )
    made.add_argument("--row", help=argparse.SUPPRESS)
    made.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    made.add_argument("--gguf", type=Path, help=argparse.SUPPRESS)
    made.set_defaults(held=0)  # bytes that a row has in memory outside its group
    return made


def main() -> None:
    """Measure one row, or all of them in turn."""
    options = parser().parse_args()
    torch.set_num_threads(1)
    if options.row is not None:
        print(json.dumps(ROWS[options.row](options)))
        return
    refuse_without_groups()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = bench_of(options)
    size, held = bench.store.path.stat().st_size, bench.num_slots(options.share)
    limit = size - (bench.experts.num_experts - held) * bench.experts.expert_bytes + options.room
    gguf = options.out / "model.gguf"
    if "llama.cpp" in options.rows and not gguf.is_file():
        write_mixture(options.model, gguf)
    words = [*sys.argv[1:], "--limit", str(limit), "--gguf", str(gguf)]
    settings = {
        **{"num_experts": bench.experts.num_experts, "expert_bytes": bench.experts.expert_bytes, "store_bytes": size},
        **{"share": options.share, "gb_per_s": options.gb_per_s, "limit_bytes": limit, "room_bytes": options.room},
        **{"answers": 2 * options.prompts - 1, "tokens": options.tokens, "row_s": options.row_s},
        **{"provenance": asdict(provenance(torch.device("cpu"))), "kernels": choose("auto").name},
    }
    kept = kept_rows(options.json, settings)
    facts, rows = kept["in_memory"], kept["rows"]
    if facts is None or "error" in facts:
        facts = run("in_memory", words, MOST_IN_MEMORY_S)
    report = settings | {"in_memory": facts, "rows": rows}

    def keep() -> None:
        simulate(rows, options, bench, facts)
        with_gains(rows, bench.experts.expert_bytes / (options.gb_per_s * 1e6))
        if options.json is not None:
            write_report(options.json, report)

    keep()  # the rows of an interrupted run may lack what is known now
    for name in options.rows:
        if name in rows and "error" not in rows[name]:
            continue
        rows[name] = row = run(name, words, options.row_s)
        keep()
        told = {key: value for key, value in row.items() if key not in ("texts", "ms_by_answer")}
        print(name, json.dumps(told), flush=True)
    if options.json is not None:
        print(tables(report))


if __name__ == "__main__":
    main()
