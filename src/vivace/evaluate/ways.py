"""Time to the first token and decoding of every way to share a model among ranks, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vivace.core.model import Decoder
from vivace.errors import ConfigError, nearest
from vivace.parallel.every import EveryLoading
from vivace.parallel.links import HEADER
from vivace.parallel.measuring import confirm_received
from vivace.parallel.partition import even, first_token_s, gathered_s
from vivace.parallel.partition_table import search
from vivace.parallel.pipeline import KIND as PIPELINE
from vivace.parallel.scattered import KIND as SCATTERED
from vivace.parallel.world import World

GRID = 256
"""Pieces begin at multiples of it, as prompts are divided in sessions."""
READING = (
    *("one", "auto", "sequence", "sequence-causal", "pipeline-gathered"),
    *("runahead-even", "runahead-model", "runahead"),
)
"""Ways of the whole model: "runahead" has boundaries that were searched, "runahead-model" those of the cost model, and
"auto" takes for each prompt what it expects to be the fastest."""


@dataclass(frozen=True)
class WayTime:
    """What one way took for prompts of one length, or for decoding."""

    way: str
    what: str
    """"first token" or "decoding"."""
    num_tokens: int
    """Of the prompt."""
    batch: int
    seconds: tuple[float, ...]
    """Until the first token, or for one step of decoding, of each repeat."""
    median_s: float
    predicted_s: float | None
    """What the cost model expects; None where it has no model."""
    counts: tuple[int, ...] | None
    """Pieces of the prompt."""
    sent_bytes: int
    """What rank 0 sent in the last repeat, headers of frames included."""
    interface_out: int | None
    """What its interface sent meanwhile, packet headers left out as far as packets were counted; None where it is not
    known."""
    interface_in: int | None
    chosen: str | None = None
    """The way that "auto" took."""


class WayAnswering(Protocol):
    """What is asked: an engine."""

    model: Decoder
    world: World | None

    def generate(self, prompts: Any, **options: Any) -> Any:
        """Answer prompts."""
        ...


class Ways:
    """Measures the ways of a world, on rank 0."""

    def __init__(
        self,
        loading: EveryLoading,
        engines: Sequence[WayAnswering],
        names: Sequence[str],
        *,
        interface: str | None = None,
        searched: int = 6,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Measure ways by their names, ``READING``, "pipeline", "tensor" and "runahead-tensor", or "tensor:FORM".

        Args:
            loading: has loaded everything.
            engines: what it has loaded, in the order of its calls: the whole model, its share, its stages, and the
                share behind prompts that the whole model reads.
            names: of the ways.
            interface: whose counters are read; None reads none.
            searched: most partitions that a search times.
            note: is told about progress.

        Raises:
            ConfigError: there is no such way.
        """
        for name in names:
            if name not in (*READING, PIPELINE) and form_of_sums(name) is None:
                raise ConfigError(f"there is no way {name!r}{nearest(name, (*READING, PIPELINE, SCATTERED, 'tensor'))}")
        self._loading = loading
        self._whole, self._share, self._stages, self._scattered = engines
        self._names = list(names)
        self._interface = interface
        self._searched = searched
        self._note = note

    def first_tokens(self, prompts: Mapping[int, Sequence[int]], repeats: int) -> list[WayTime]:
        """Return times to the first token, for prompts by their length; the ways take turns."""
        found = []
        for length, prompt in prompts.items():
            counts = {name: self._pieces(name, prompt) for name in self._names}
            times: dict[str, list[float]] = {name: [] for name in self._names}
            bytes_of: dict[str, tuple[int, int | None, int | None]] = {}
            for turn in range(repeats):
                for name in self._names if turn % 2 else reversed(self._names):
                    before = self._counters()
                    times[name].append(self._first_token(name, prompt, counts[name]))
                    self._note(f"{length} tokens, {shown(name)}: first token after {times[name][-1]:.2f} s")
                    bytes_of[name] = self._since(before)
            predicted = self._predicted(len(prompt) - 1, counts)
            for name, seconds in times.items():
                pieces = None if counts[name] is None else tuple(counts[name] or ())
                median = statistics.median(seconds)
                one = WayTime(
                    shown(name),
                    "first token",
                    length,
                    1,
                    tuple(seconds),
                    median,
                    predicted.get(name),
                    pieces,
                    *bytes_of[name],
                    chosen=self._chosen(len(prompt) - 1) if name == "auto" else None,
                )
                found.append(one)
        return found

    def decoding(self, prompt: Sequence[int], batches: Sequence[int], tokens: int, repeats: int) -> list[WayTime]:
        """Return times of one step of decoding, for batches of one prompt; only "one" and tensor ways differ."""
        found = []
        names = [name for name in self._names if name in ("one", PIPELINE) or name.startswith("tensor")]
        for batch in batches:
            times: dict[str, list[float]] = {name: [] for name in names}
            bytes_of: dict[str, tuple[int, int | None, int | None]] = {}
            for turn in range(repeats):
                for name in names if turn % 2 else reversed(names):
                    first_s = self._answering(name, prompt, batch, 1)
                    before = self._counters()
                    times[name].append((self._answering(name, prompt, batch, tokens + 1) - first_s) / tokens)
                    bytes_of[name] = self._since(before)
            for name, seconds in times.items():
                median = statistics.median(seconds)
                self._note(f"batch {batch}, {name}: {1000 * median:.1f} ms a step")
                found.append(
                    WayTime(
                        *(shown(name), "decoding", len(prompt), batch, tuple(seconds), median, None, None),
                        *bytes_of[name],
                    )
                )
        return found

    def _answering(self, name: str, prompt: Sequence[int], batch: int, tokens: int) -> float:
        """Return the seconds that answers of so many tokens to a batch of one prompt take, reading included."""
        engine, started = self._engine(name), time.perf_counter()
        self._loading.reading.fixed = None
        options = {"method": "plain", "max_new_tokens": tokens, "ignore_eos": True, "do_sample": False}
        engine.generate([list(prompt)] * batch, batch_size=batch, **options)
        return time.perf_counter() - started

    def search(self, prompt: Sequence[int]) -> tuple[list[int], float]:
        """Return the fastest pieces of a prompt that are found by timing them, and their time."""
        start = self._modelled(len(prompt) - 1)

        def seconds(counts: tuple[int, ...]) -> float:
            return self._first_token("runahead", prompt, counts)

        return search(start, GRID, seconds, self._searched)

    def _modelled(self, length: int) -> list[int]:
        """Return the pieces that the model of the chain gives a prompt, whatever a search before has set."""
        self._loading.reading.fixed = None
        return self._loading.reading.counts(self._whole.model, length, GRID)

    def _pieces(self, name: str, prompt: Sequence[int]) -> Sequence[int] | None:
        length, ranks = len(prompt) - 1, self._loading.world.size
        if name == "runahead":
            return self.search(prompt)[0]
        if name == "runahead-model" or name.startswith(SCATTERED):
            return self._modelled(length)
        equal = name == "runahead-even" or name.startswith("sequence")
        return even(length, min(ranks, -(-length // GRID)), GRID) if equal else None

    def _engine(self, name: str) -> WayAnswering:
        """Return the engine of a way, with that way set."""
        if (form := form_of_sums(name)) is not None:
            self._loading.use(form)
            return self._scattered if name.startswith(SCATTERED) else self._share
        if name == PIPELINE:
            return self._stages
        self._loading.reading.way = "runahead" if name.startswith("runahead") else name
        return self._whole

    def _first_token(self, name: str, prompt: Sequence[int], counts: Sequence[int] | None) -> float:
        engine = self._engine(name)
        self._loading.reading.fixed = counts
        started = time.perf_counter()
        engine.generate([list(prompt)], method="plain", max_new_tokens=1, ignore_eos=True, do_sample=False)
        return time.perf_counter() - started

    def _chosen(self, length: int) -> str:
        """Return what "auto" takes for a prompt, its last token left out."""
        reading, model = self._loading.reading, self._whole.model
        return "one" if length <= GRID else reading.chosen(model, reading.expected_s(model, length, GRID))

    def _predicted(self, length: int, counts: Mapping[str, Sequence[int] | None]) -> dict[str, float]:
        reading, model = self._loading.reading, self._whole.model
        assert reading.costs is not None, "costs are measured while the model is loaded"
        if length <= GRID:
            return {}
        reading.fixed = None
        found = reading.expected_s(model, length, GRID)
        found["auto"] = found[self._chosen(length)]
        equal = even(length, min(self._loading.world.size, -(-length // GRID)), GRID)
        found["sequence"] = gathered_s(equal, reading.costs, is_dense=True)
        for name, pieces in counts.items():
            if name.startswith("runahead") and pieces is not None:
                step_s = reading.decoding_s(model).get("tensor", 0.0) if name.startswith(SCATTERED) else 0.0
                found[name] = first_token_s(pieces, reading.costs) + step_s
        return found

    def _counters(self) -> tuple[int, dict[str, int]]:
        """Return what was sent and what the interface has carried, once nothing of earlier ways is on its way."""
        confirm_received(self._loading.world)
        return self._counted()

    def _counted(self) -> tuple[int, dict[str, int]]:
        links = self._loading.world.links
        sent = sum(links.sent.values()) + HEADER.size * sum(links.frames.values())
        return sent, interface_counters(self._interface)

    def _since(self, before: tuple[int, dict[str, int]]) -> tuple[int, int | None, int | None]:
        """Return what was sent, and what the interface carried out and in; the frames that confirm it left out."""
        out, back = confirm_received(self._loading.world)
        sent, counters = self._counted()
        sent_bytes = sent - before[0] - out
        moved = {name: value - before[1][name] for name, value in counters.items()}
        if not moved:
            return sent_bytes, None, None
        return sent_bytes, payload_of(moved, "tx") - out, payload_of(moved, "rx") - back


def form_of_sums(name: str) -> str | None:
    """Return the form of sums in a way in which ranks decode together, "tensor:FORM"; None for all other ways."""
    way, _, form = name.partition(":")
    return (form or "same") if way in ("tensor", SCATTERED) else None


def shown(name: str) -> str:
    """Return a way without the folder of its calibration."""
    return name.partition("=")[0]


PACKET_HEADERS = 66
"""Bytes of the headers of Ethernet, IP and TCP (with time stamps) in one packet."""


def payload_of(counters: Mapping[str, int], direction: str) -> int:
    """Return bytes on an interface without the headers of packets, "tx" or "rx"."""
    return counters[f"{direction}_bytes"] - PACKET_HEADERS * counters[f"{direction}_packets"]


def interface_counters(interface: str | None) -> dict[str, int]:
    """Return how many bytes and packets an interface has sent and received; empty where there is none."""
    if interface is None:
        return {}
    folder = Path("/sys/class/net") / interface / "statistics"
    names = ("tx_bytes", "tx_packets", "rx_bytes", "rx_packets")
    return {name: int((folder / name).read_text()) for name in names}


def world_facts(engine: WayAnswering) -> dict[str, Any]:
    """Return what was measured of the ranks: link and costs of a layer."""
    world = engine.world
    assert world is not None
    return {"ranks": world.size, "link": None if world.link is None else vars(world.link)}
