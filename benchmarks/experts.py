"""Measure experts that are read from disk: ``python -m benchmarks.experts --store DIR --foresight NAME=DIR --out DIR``.

Policies take turns on every prompt, in an order that is drawn for each. Each has a cache of its own and direct reads
from the store; every foresight adapter is one of them, used by its own plan. Writes ``experts.json`` (seconds and
tokens of all answers, hits by kind, recall, wasted bytes and bytes from the device, the bound, and the simulator's
result on the same traces) after every share, and ``trace-NAME.json``, from which ``benchmarks.expert_sweep`` draws its
plot.

``--pace`` replaces the disk by a simulated device of the given speed (``paced_device.py``), and ``--pace equal`` by one
with which LRU's loads of a decoded token take as long as its computation, for each share; the figures say so. Loads of
prompts do not count there.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

import torch

from benchmarks.expert_guesses import NextLayerForwardPass, load_around
from benchmarks.expert_policies import LeastRecent, OnDemand, Oracle, Static
from benchmarks.expert_simulator import Machine, simulate
from benchmarks.expert_traces import RecordingPolicy, Trace
from benchmarks.paced_device import PacedExperts
from benchmarks.result_files import write_report
from vivace.checkpoint.tokenizer import load_tokenizer
from vivace.core.model import Decoder
from vivace.core.moe import Expert
from vivace.core.seams import Drafter
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.evaluate.provenance import provenance
from vivace.kernels.choice import choose
from vivace.methods.composition import read_adapter, trained
from vivace.prompts import packaged_prompts
from vivace.storage.experts.cache import CHUNK_BYTES, ExpertCache
from vivace.storage.experts.foresight.config import ForesightPlan
from vivace.storage.experts.foresight.drafter import ForesightDrafter
from vivace.storage.experts.foresight.weights import Foresight
from vivace.storage.experts.policy import NextUse, Policy
from vivace.storage.experts.store import StoredExperts
from vivace.storage.io.probing import device_bytes, open_reader, probe
from vivace.storage.io.readers import aligned
from vivace.storage.store import Store, open_store

CAPACITY = 512
"""Number of cache entries."""
POLICIES = {"plain", "on_demand", "lru", "next_use", "static", "next_layer", "oracle", "recorded"}
"""Systems that need no adapter."""
UNLIMITED = 1e9
"""GB/s of a device that takes no time, used until a pace is set."""


@dataclass
class MethodSystem:
    """A policy with its own cache, and the times of its answers so far."""

    name: str
    cache: ExpertCache
    trace: Trace
    """Grows while the system answers."""
    model: Decoder
    drafter: Drafter
    decode_s: list[float] = field(default_factory=list)
    """Seconds of decoding of each answer."""
    num_tokens: list[int] = field(default_factory=list)
    """Number of decoded tokens of each answer, without its first."""
    from_device: int = 0
    """Bytes read from the device."""
    decode_loads: int = 0
    """Number of experts loaded while these tokens were decoded."""
    texts: list[tuple[int, ...]] = field(default_factory=list)
    """Tokens of each answer."""

    def answer(self, prompt: tuple[int, ...], num_tokens: int, *, counts: bool) -> None:
        """Decode greedy tokens after a prompt; the first is computed with the prompt and not timed."""
        session = Session(self.model, num_slots=1, capacity=CAPACITY)
        session.admit(Request(prompt, num_tokens, self.drafter))
        read, loads = device_bytes() or 0, 0
        tokens: tuple[int, ...] = ()
        with torch.inference_mode(), _uncollected():
            while not session.is_idle:
                for emitted in session.step():
                    loads = loads if tokens else self.cache.counts.loads
                    tokens += emitted.tokens
                    stats = emitted.stats
        self.texts.append(tokens)
        self.from_device += (device_bytes() or 0) - read
        if counts:
            self.decode_s.append(stats.decode_s)
            self.num_tokens.append(len(tokens) - 1)
            self.decode_loads += self.cache.counts.loads - loads

    @property
    def loads_per_token(self) -> float:
        """Number of experts loaded per decoded token."""
        return self.decode_loads / max(1, sum(self.num_tokens))

    @property
    def token_s(self) -> float:
        """Mean seconds per token over all answers."""
        return sum(self.decode_s) / sum(self.num_tokens)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Switch off garbage collection during a block, since it would search the traces of all systems while they
    decode.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def foresight_of(folder: Path, store: Store) -> tuple[Foresight, ForesightPlan]:
    """Return the weights and the plan of an adapter of the store's checkpoint."""
    weights, plan = trained(folder, *read_adapter("foresight", folder, store.base), store.config)
    return weights.to(store.dtype), plan


class Bench:
    """One benchmark: a store, a reader, prompts and adapters."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.store = open_store(options.store)
        self.stack = ExitStack()
        self.reader = open_reader(self.store.path, options.reader).reader
        self.device_gb_per_s = probe(self.reader, self.store.path)
        self.is_paced = options.pace is not None
        self.gb_per_s = UNLIMITED if self.is_paced else self.device_gb_per_s
        self.body = choose("auto").body if self.store.is_tiled else None
        self.experts = StoredExperts(self.store, self.reader, self.body)
        tokenizer = load_tokenizer(options.store)
        texts = [p.request for task in ("e2e", "sql") for p in packaged_prompts(task)[: options.prompts]]
        self.prompts = [tuple(tokenizer.encode_prompt(text)) for text in texts]
        self.foresight = {name: foresight_of(folder, self.store) for name, folder in options.foresight}

    def system(self, policy: Policy, num_slots: int, drafter: Drafter, name: str) -> MethodSystem:
        """Return a policy with a cache of its own."""
        layers = self.store.config.num_layers
        experts = self.paced_experts() if self.is_paced else self.experts
        recording = RecordingPolicy(policy, layers)
        cache = self.stack.enter_context(ExpertCache(experts, recording, layers, num_slots))
        model = load_around(self.store, self.reader, cache, self.body)
        return MethodSystem(name, cache, recording.trace, model, drafter)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Stop all threads at the end of the block."""
        with self.stack:
            yield
        self.stack = ExitStack()

    def recorded(self, name: str) -> Trace:
        """Record what the routers choose on these prompts, and what the drafter of this name predicts."""
        with self.closing():
            system = self.system(LeastRecent(), self.experts.num_experts, self.drafters()[name], "recorded")
            for prompt in self.prompts:
                system.answer(prompt, self.options.tokens, counts=False)
            return system.trace

    def drafters(self) -> dict[str, Drafter]:
        """Return the ways of decoding that predict experts, and plain decoding, which does not."""
        assert self.store.config.moe is not None
        guess = NoDrafts("next_layer", NextLayerForwardPass(self.store.config.moe.top_k))
        seeing = {name: ForesightDrafter(weights, plan, name) for name, (weights, plan) in self.foresight.items()}
        return {"plain": NoDrafts(), "next_layer": guess, **seeing}

    def set_pace(self, share: float, compute_s: float) -> float | None:
        """Set the speed of the device for a share of the experts and return it in GB/s; None is the real device."""
        pace = self.options.pace
        if pace == "equal":
            pace = self.lru_loads(share) * self.experts.expert_bytes / compute_s / 1e9
            if not pace:
                raise SystemExit(f"LRU loads nothing with {share:.0%} of the experts in memory: no pace is equal")
        self.gb_per_s = self.device_gb_per_s if pace is None else pace
        return pace  # type: ignore[no-any-return]

    def paced_experts(self) -> PacedExperts:
        """Return the experts behind a simulated device, for one cache."""
        offsets = {key: self.experts.offset(key) for key in self.experts.keys}
        return PacedExperts(self.experts.expert_bytes, offsets, self.in_memory, self.gb_per_s * 1e9)

    @cached_property
    def in_memory(self) -> dict[int, Expert]:
        """All experts by their offsets in the file, read once."""
        found = {}
        for place in map(self.experts.offset, self.experts.keys):
            memory = aligned(self.experts.expert_bytes)
            self.reader.read(place, memory)
            found[place] = self.experts.expert(torch.frombuffer(memory, dtype=torch.uint8))
        return found

    def lru_loads(self, share: float) -> float:
        """Return the number of experts that LRU loads per decoded token."""
        self.gb_per_s = UNLIMITED
        with self.closing():
            system = self.system(LeastRecent(), self.num_slots(share), NoDrafts(), "lru")
            for place, prompt in enumerate(self.prompts):
                system.answer(prompt, self.options.tokens, counts=place > 0)
            return system.loads_per_token

    @property
    def num_experts(self) -> int:
        """Number of experts in a layer."""
        assert self.store.config.moe is not None
        return self.store.config.moe.num_experts

    def num_slots(self, share: float) -> int:
        """Return the number of experts in memory."""
        return max(1, round(share * self.experts.num_experts))

    def compute_s(self) -> dict[str, float]:
        """Return the seconds per token with every expert in memory, by drafter."""
        with self.closing():
            full = self.experts.num_experts
            systems = [self.system(LeastRecent(), full, way, name) for name, way in self.drafters().items()]
            draws = random.Random(0)
            for turn in range(2):
                for prompt in self.prompts[:: max(1, len(self.prompts) // 6)]:
                    for system in draws.sample(systems, len(systems)):
                        system.answer(prompt, self.options.tokens, counts=turn == 1)
            return {e.name: e.token_s for e in systems}

    def held(self, share: float, trace: Trace) -> list[MethodSystem]:
        """Run all policies on all prompts, in an order drawn for each; the first prompt only fills the caches."""
        num = self.num_slots(share)
        layers, experts = self.store.config.num_layers, self.num_experts
        seeing = self.drafters()
        plain = seeing.pop("plain")
        with self.closing():
            systems = [
                self.system(OnDemand(), num, plain, "on_demand"),
                self.system(LeastRecent(), num, plain, "lru"),
                self.system(NextUse(layers, experts), num, plain, "next_use"),
                self.system(Static.of(trace, num), num, plain, "static"),
                *(self.system(NextUse(layers, experts), num, way, name) for name, way in seeing.items()),
                self.system(Oracle(trace), num, plain, "oracle"),
            ]
            draws = random.Random(0)
            for place, prompt in enumerate(self.prompts):
                for system in draws.sample(systems, len(systems)):
                    system.answer(prompt, self.options.tokens, counts=place > 0)
        assert all(system.texts == systems[0].texts for system in systems), "policies gave different texts"
        return systems

    def simulated(
        self, name: str, trace: Trace, num_slots: int, compute_s: float, expert_s: float, throttled_to: float = inf
    ) -> float:
        """Return the seconds per token according to the simulator, on a device that may be throttled (bytes/s)."""
        moe = self.store.config.moe
        assert moe is not None
        layers = trace.num_layers
        layer_s = max(0.0, compute_s / layers - moe.top_k * expert_s)
        latency_s = 0.0 if self.is_paced else Machine.latency_s
        machine = Machine(
            self.gb_per_s * 1e9,
            self.experts.expert_bytes,
            num_slots,
            layer_s,
            expert_s,
            latency_s,
            CHUNK_BYTES,
            throttled_to,
        )
        policies: dict[str, Policy] = {
            "on_demand": OnDemand(),
            "lru": LeastRecent(),
            "static": Static.of(trace, num_slots),
            "oracle": Oracle(trace),
        }
        policy = policies.get(name) or NextUse(layers, moe.num_experts)
        return simulate(trace, policy, machine, warm_up=1).pass_s

    def expert_s(self) -> float:
        """Return the seconds that one expert in memory takes for one row, the least of many."""
        memory = torch.zeros(self.experts.expert_bytes, dtype=torch.uint8)
        expert = self.experts.expert(memory)
        x = torch.randn(1, self.store.config.width).to(self.store.dtype)
        times = []
        bare: Any = type("NoDeltas", (), {"deltas": (), "low_rank": ()})()
        with torch.inference_mode():
            for _ in range(200):
                begun = time.perf_counter()
                expert(x, bare)
                times.append(time.perf_counter() - begun)
        return min(times)


def named(word: str) -> tuple[str, Path]:
    """Parse the value of ``--foresight``."""
    name, _, folder = word.partition("=")
    if not (name and folder):
        raise argparse.ArgumentTypeError(f"NAME=DIR is needed, found {word}")
    return name, Path(folder)


def pace(word: str) -> float | str:
    """Parse the value of ``--pace``."""
    found = word if word == "equal" else float(word)
    if not isinstance(found, str) and not found > 0:
        raise argparse.ArgumentTypeError(f"a device reads more than {word} GB/s")
    return found


def row(system: MethodSystem, bench: Bench, compute_s: dict[str, float], expert_s: float) -> dict[str, Any]:
    """Return the results of one policy."""
    counts, size = system.cache.counts, bench.experts.expert_bytes
    trace = system.trace
    kind = system.name if system.name in compute_s else "plain"
    simulated = bench.simulated(system.name, trace, system.cache.num_slots, compute_s[kind], expert_s)
    return {
        "policy": system.name,
        "tokens_per_s": 1 / system.token_s,
        "ms_per_token": 1e3 * system.token_s,
        "ms_by_answer": [1e3 * s / n for s, n in zip(system.decode_s, system.num_tokens, strict=True)],
        "tokens_by_answer": system.num_tokens,
        "simulated_ms_per_token": 1e3 * simulated,
        "compute_ms_per_token": 1e3 * compute_s[kind],
        "loads_per_token": system.loads_per_token,
        "load_ms_per_token": 1e3 * system.loads_per_token * size / (bench.gb_per_s * 1e9),
        "wait_s": counts.wait_s,
        "recall": trace.recall() if trace.predictions else None,
        **{"resident": counts.hits, "ahead": counts.prefetched, "awaited": counts.late, "missed": counts.misses},
        **{"loads": counts.loads, "wasted": counts.wasted},
        "loaded_bytes": counts.loads * size,
        "wasted_bytes": counts.wasted * size,
        "device_bytes": system.from_device,
    }


def with_gains(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each policy its speed-ups over the baselines, over all answers and the least and greatest of an answer,
    and the largest speed-up over LRU that any order of its loads could give.
    """
    times = {each["policy"]: each["ms_by_answer"] for each in rows}
    whole = {each["policy"]: each["ms_per_token"] for each in rows}
    lru = next(each for each in rows if each["policy"] == "lru")
    longest = lru["load_ms_per_token"] + lru["compute_ms_per_token"]
    for each in rows:
        for base in ("on_demand", "lru", "oracle"):
            gains = [theirs / ours for theirs, ours in zip(times[base], each["ms_by_answer"], strict=True)]
            each[f"over_{base}"] = whole[base] / each["ms_per_token"]
            each[f"over_{base}_range"] = [min(gains), max(gains)]
        each["bound_over_lru"] = longest / max(each["load_ms_per_token"], each["compute_ms_per_token"])
    return rows


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument(
        "--foresight", type=named, action="append", default=[], metavar="NAME=DIR", help="an adapter; repeatable"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=float, nargs="+", default=[0.25, 0.5], help="of experts in memory")
    parser.add_argument("--pace", type=pace, help="GB/s of a device that is not here, or 'equal'")
    parser.add_argument("--reader", default="direct")
    parser.add_argument("--prompts", type=int, default=6, help="of each task")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    found = parser.parse_args()
    names = [name for name, _ in found.foresight]
    taken = sorted(POLICIES.intersection(names)) or [name for name in names if names.count(name) > 1]
    if taken:
        parser.error(f"--foresight {taken[0]}=...: another system has that name")
    return found


def main() -> None:
    """Measure every share and write the report."""
    options = arguments()
    torch.set_num_threads(options.threads)
    bench = Bench(options)
    assert bench.store.config.moe is not None
    options.out.mkdir(parents=True, exist_ok=True)
    traces = {name: bench.recorded(name) for name in bench.drafters() if name != "plain"}
    for name, each in traces.items():
        each.save(options.out / f"trace-{name}.json")
    trace, compute_s, expert_s = traces["next_layer"], bench.compute_s(), bench.expert_s()
    runs: list[dict[str, Any]] = []
    report = {
        "settings": {k: v for k, v in vars(options).items() if not isinstance(v, Path) and k != "foresight"},
        "foresight": {
            name: {"config": asdict(weights.config), "plan": asdict(plan)}
            for name, (weights, plan) in bench.foresight.items()
        },
        "expert_bytes": bench.experts.expert_bytes,
        "num_experts": bench.experts.num_experts,
        "device_gb_per_s": bench.device_gb_per_s,
        "is_paced": options.pace is not None,
        "expert_us": 1e6 * expert_s,
        "compute_ms_per_token": {name: 1e3 * seconds for name, seconds in compute_s.items()},
        "runs": runs,
        "provenance": asdict(provenance(torch.device("cpu"))),
    }
    for share in options.share:
        paced = bench.set_pace(share, compute_s["plain"])
        rows = with_gains([row(system, bench, compute_s, expert_s) for system in bench.held(share, trace)])
        runs.append({"share": share, "pace_gb_per_s": paced, "gb_per_s": bench.gb_per_s, "policies": rows})
        write_report(options.out / "experts.json", report)  # after every share, so that a run that is cut keeps those
        for each in rows:
            told = (
                "tokens_per_s",
                "ms_per_token",
                "simulated_ms_per_token",
                "over_lru",
                "over_oracle",
                "bound_over_lru",
            )
            print(share, each["policy"], *(f"{each[k]:.2f}" for k in told), flush=True)


if __name__ == "__main__":
    main()
