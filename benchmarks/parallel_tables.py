"""Tables of ways to share a model among ranks: measured ones, forms of sums, and simulated ones apart from both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import captions
from benchmarks.result_files import NO_RUN, read_named
from tools.blocks import table

WIRES = "wires"
"""Files whose names begin so are of ``vivace evaluate --wire``."""


class MixedError(ValueError):
    """Simulated numbers were about to stand beside measured ones."""


def cells_of(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the measured cells of files.

    Raises:
        MixedError: one of them is simulated.
    """
    cells: list[dict[str, Any]] = []
    for path in paths:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["is_simulated"]:
            raise MixedError(f"{path.name} is simulated and has no place among measured results")
        cells += found["cells"]
    return cells


def measured(folder: Path) -> str:
    """Return first tokens and decoding, one table for each machine, commit, model and number of ranks."""
    paths = [path for path in sorted(folder.glob("*.json")) if not path.name.startswith((WIRES, "simulated"))]
    parts: dict[tuple[str, int, float], list[dict[str, Any]]] = {}
    for cell in cells_of(paths):
        kernels, link = cell["setting"]["kernels"], cell["link"]
        caption = f"{captions.heading(cell['provenance'], kernels)}, `{cell['setting']['model']}`"
        parts.setdefault((caption, link["ranks"], link["cpu_share"]), []).append(cell)
    made = [
        f"{caption}. {note(cells)}\n\n{first_tokens(cells)}\n\n{choices(cells)}{decoding(cells)}{answers(cells)}"
        for (caption, _, _), cells in ((key, sorted(found, key=_place)) for key, found in parts.items())
    ]
    return "\n\n".join(made) or NO_RUN


def _place(cell: dict[str, Any]) -> tuple[float, int]:
    """Return where a cell stands in a table: slow links first, and short prompts."""
    mbit = cell["link"]["mbit"]
    lengths = (row["num_tokens"] for row in cell["rows"] if row["what"] == "first token")
    return float("inf") if mbit is None else mbit, min(lengths, default=0)


def note(cells: Sequence[dict[str, Any]]) -> str:
    """Return what links were, and what machines are not."""
    links = [cell["link"] for cell in cells]
    kinds = ", ".join(dict.fromkeys(link["kind"] for link in links))
    rates = "; ".join(f"{name}: {rate:,.0f} Mbit/s measured" for name, rate in measured_rates(links).items())
    ranks, share = links[0]["ranks"], links[0]["cpu_share"]
    return (
        f"{ranks} ranks on one machine, {share:g} of a core and one thread each, links: {kinds} ({rates}). "
        "The ranks share a memory bus, which machines do not."
    )


def measured_rates(links: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return what a plain stream measured on each link, the lowest of several runs."""
    rates: dict[str, float] = {}
    for link in links:
        name, rate = name_of(link), link["measured_mbit"]
        rates[name] = min(rate, rates.get(name, rate))
    return rates


def name_of(link: dict[str, Any]) -> str:
    """Return what a link is called in tables."""
    return "not shaped" if link["mbit"] is None else f"{link['mbit']:g} Mbit/s"


def first_tokens(cells: Sequence[dict[str, Any]]) -> str:
    """Return seconds to the first token: a row for each link and length, a column for each way."""
    rows = [(cell, row) for cell in cells for row in cell["rows"] if row["what"] == "first token"]
    ways = list(dict.fromkeys(row["way"] for _, row in rows))
    places = list(dict.fromkeys((name_of(cell["link"]), row["num_tokens"]) for cell, row in rows))
    seconds = {(name_of(cell["link"]), row["num_tokens"], row["way"]): row["median_s"] for cell, row in rows}
    body = []
    for link, length in places:
        found = [seconds.get((link, length, way)) for way in ways]
        best = min(value for value in found if value is not None)
        shown = ["-" if value is None else f"**{value:.2f}**" if value == best else f"{value:.2f}" for value in found]
        body.append((link, f"{length:,}", *shown))
    return table(("link", "tokens", *(f"{way}, s" for way in ways)), body)


WITHIN = 0.1
"""By how much "auto" may be slower than the fastest way that was measured beside it."""


def choices(cells: Sequence[dict[str, Any]]) -> str:
    """Return what "auto" took beside the fastest way of each link and length, and how often it came near enough."""
    body, num_near = [], 0
    for cell in cells:
        rows = [row for row in cell["rows"] if row["what"] == "first token"]
        for auto in (row for row in rows if row["way"] == "auto"):
            others = [row for row in rows if row["num_tokens"] == auto["num_tokens"] and row["way"] != "auto"]
            best = min(others, key=lambda row: row["median_s"])
            ratio = auto["median_s"] / best["median_s"]
            num_near += ratio <= 1 + WITHIN
            times = (f"{row['median_s']:.2f}" for row in (auto, best))
            took = auto.get("chosen") or "-"
            body.append(
                (
                    name_of(cell["link"]),
                    f"{auto['num_tokens']:,}",
                    took,
                    next(times),
                    best["way"],
                    next(times),
                    f"{ratio:.2f}",
                )
            )
    if not body:
        return ""
    heads = ("link", "tokens", "auto took", "auto, s", "fastest", "fastest, s", "ratio")
    told = f"`auto` beside the fastest way: within {WITHIN:.0%} of it in {num_near} of {len(body)} cells."
    return f"{told}\n\n{table(heads, body)}\n\n"


PAUSE_S = 0.05
"""For how long a rank that has half of a core pauses at a time."""


def decoding(cells: Sequence[dict[str, Any]]) -> str:
    """Return milliseconds of a step of decoding; steps of parts of a core that are shorter than its pauses left out."""
    rows = [
        (cell, row)
        for cell in cells
        for row in cell["rows"]
        if row["what"] == "decoding" and (cell["link"]["cpu_share"] == 1 or row["median_s"] >= PAUSE_S)
    ]
    ways = list(dict.fromkeys(row["way"] for _, row in rows))
    places = list(dict.fromkeys((name_of(cell["link"]), row["batch"]) for cell, row in rows))
    steps = {(name_of(cell["link"]), row["batch"], row["way"]): row["median_s"] for cell, row in rows}
    body = [
        (
            link,
            str(batch),
            *(f"{1000 * steps[link, batch, way]:.1f}" if (link, batch, way) in steps else "-" for way in ways),
        )
        for link, batch in places
    ]
    return table(("link", "batch", *(f"{way}, ms a step" for way in ways)), body) if body else ""


ANSWER = 128
"""Tokens of the answer in ``answers``."""
DECODES_AS = {"runahead-tensor": "tensor", "runahead-model": "one", "one": "one", "tensor": "tensor"}
"""By which way those of first tokens decode."""


def answers(cells: Sequence[dict[str, Any]]) -> str:
    """Return what a prompt and its answer take together, where one way reads along a chain and decodes by shares."""
    body = []
    for cell in cells:
        steps = {row["way"]: row["median_s"] for row in cell["rows"] if row["what"] == "decoding" and row["batch"] == 1}
        found: dict[int, dict[str, float]] = {}
        for row in cell["rows"]:
            step = steps.get(DECODES_AS.get(row["way"], ""))
            if row["what"] == "first token" and step is not None:
                found.setdefault(row["num_tokens"], {})[row["way"]] = row["median_s"] + (ANSWER - 1) * step
        body += [
            (name_of(cell["link"]), f"{length:,}", *(f"{times[way]:.2f}" for way in DECODES_AS))
            for length, times in found.items()
            if set(DECODES_AS) <= set(times)
        ]
    if not body:
        return ""
    told = f"A prompt and {ANSWER} tokens of an answer, from both tables:"
    return f"\n\n{told}\n\n{table(('link', 'tokens', *(f'{way}, s' for way in DECODES_AS)), body)}"


def wires(folder: Path) -> str:
    """Return perplexities of forms of sums, with bits of a number everything counted, and scores of task files."""
    made = []
    for _, found in read_named(folder, f"{WIRES}*.json"):
        if "tasks" in found["setting"]:
            made.append(retained(found))
            continue
        rows = [
            (
                row["wire"],
                str(row["ranks"]),
                "-" if row["bits"] is None else f"{row['bits']:.2f}",
                f"{row['perplexity']:.2f}",
                "-" if row["saturation"] is None else f"{row['saturation']:.2%}",
            )
            for row in found["wires"]
        ]
        setting = found["setting"]
        count = found["wires"][0]["num_tokens"]
        caption = f"{captions.heading(found['provenance'], 'torch')}, `{setting['model']}`"
        made.append(
            f"{caption}, {count:,} tokens in windows of {setting['window']}; ranks are threads of one process.\n\n"
            + table(("form", "ranks", "bits a number", "perplexity", "clipped"), rows)
        )
    return "\n\n".join(made) or NO_RUN


def retained(found: dict[str, Any]) -> str:
    """Return what forms of sums leave of the score of one process."""
    setting, counted = found["setting"], found["setting"]["counted"]
    body = []
    for one in found["wires"]:
        judged = one["judgements"]
        divergences = [each["kl"] for each in judged if each["kl"] is not None]
        body.append(
            (
                one["wire"],
                str(one["ranks"]),
                *("-" if value is None else f"{value:.1%}" for value in (one["mean"], one["retained"])),
                *(f"{each['accuracy_by_byte']:.1%}" for each in judged if each["task"] in counted),
                f"{sum(divergences) / len(divergences):.4f}" if divergences else "-",
            )
        )
    caption = f"{captions.heading(found['provenance'], 'torch')}, `{setting['model']}`"
    rows = {each["task"]: each["num_rows"] for each in found["wires"][0]["judgements"]}
    left = [task for task in rows if task not in counted]
    sizes = ", ".join(f"{task} {count}" for task, count in rows.items())
    without = f" Not above chance, and not in the mean: {', '.join(left)}." if left else ""
    heads = ("form", "ranks", "right by byte", "of one process", *counted, "KL")
    return f"{caption}, zero-shot tasks, the first rows of each ({sizes}).{without}\n\n" + table(heads, body)


def simulated(folder: Path) -> str:
    """Return what the simulator says, beside what was measured and beside the paper."""
    paths = sorted(folder.glob("simulated*.json"))
    if not paths:
        return NO_RUN
    found = json.loads(paths[-1].read_text(encoding="utf-8"))
    compared = [
        (
            "not shaped" if row["mbit"] is None else f"{row['mbit']:g} Mbit/s",
            str(row["ranks"]),
            f"{row['length']:,}",
            row["way"],
            f"{row['simulated_s']:.2f}",
            f"{row['measured_s']:.2f}",
            f"{row['simulated_s'] / row['measured_s'] - 1:+.0%}",
        )
        for row in found["compared"]
    ]
    papers = [
        (
            row["model"],
            str(row["ranks"]),
            f"{row['length']:,}",
            f"{row['gigabytes_per_s']:g} GB/s",
            f"{row['attention']:g}x",
            f"{row['ratio']:.2f}x",
            f"{row['paper']:.2f}x",
        )
        for row in found["papers"]
    ]
    more = [
        (
            "not shaped" if row["mbit"] is None else f"{row['mbit']:g} Mbit/s",
            str(row["ranks"]),
            *(f"{seconds:.1f}" for seconds in row["seconds"].values()),
        )
        for row in found["more_ranks"]
    ]
    ways = tuple(f"{way}, s" for way in found["more_ranks"][0]["seconds"]) if more else ()
    return "\n\n".join(
        [
            "**Simulated**, from coefficients that a bench measured at its start, beside its times:",
            table(("link", "ranks", "tokens", "way", "simulated, s", "measured, s", "off"), compared),
            " ".join(
                _how_far(ranks, [row for row in found["compared"] if row["ranks"] == ranks])
                for ranks in sorted({row["ranks"] for row in found["compared"]})
            ),
            "**Simulated**: more ranks of that machine, a prompt of 8,184 tokens:",
            table(("link", "ranks", *ways), more),
            "**Simulated**: sequence over runahead on A100s, by how many times its multiplications attention costs, "
            "beside the paper's ratio:",
            table(("model", "ranks", "tokens", "link", "attention", "simulated", "paper"), papers),
        ]
    )


def _how_far(ranks: int, compared: Sequence[Mapping[str, Any]]) -> str:
    """Return how many times of so many ranks are within a tenth of the measured ones, and the largest difference."""
    off = [abs(row["simulated_s"] / row["measured_s"] - 1) for row in compared]
    near = sum(each <= 0.1 for each in off)
    return f"Of {ranks} ranks, {near} of {len(off)} are within 10 %, and none is further off than {max(off):.0%}."
