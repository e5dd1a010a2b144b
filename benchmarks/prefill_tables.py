"""Tables of what pruned prompts cost and save, from files that ``benchmarks/prefill_quality.py`` wrote."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import captions
from benchmarks.result_files import read_named, tables_of
from tools.blocks import table
from vivace.evaluate.bootstrap import paired_bootstrap, ratio_of_sums

LEAST = 0.15
"""Share of the questions that a full reading has to answer for a set to say anything about answers."""
LEAST_QUESTIONS = 30
"""Questions that a set has to have for a mean over sets."""
REPORTED = "B"
"""Half of the rows on which nothing was taught or chosen."""
HEADINGS = (
    "prefill",
    "layer passes",
    "first token",
    "NLL of the answer",
    "more than full (95 %)",
    "contains it",
    "points beside full (95 %)",
    "F1",
    "as full",
)

PAPER = (
    ("full", 22.43, None),
    ("random", 16.77, 1.19),
    ("static", 19.93, 2.16),
    ("LazyLLM", 22.31, 2.34),
)
"""Multi-document questions of LongBench with Llama 2 7B on a GPU: score, and how much sooner the first token came
(arXiv:2407.14057, table 1)."""

Answers = Mapping[str, Sequence[Mapping[str, Any]]]


def rows_of(answers: Answers, *, is_timed: bool) -> Sequence[tuple[str, ...]]:
    """Return a row for each way of reading: its figures beside those of the full reading."""
    full, rows = answers["full"], []
    for name, own in answers.items():
        more = paired_bootstrap([one["nll"] for one in own], [one["nll"] for one in full])
        right, all_right = ([float(one["contains"]) for one in each] for each in (own, full))
        sooner = paired_bootstrap(
            [one["first_token_s"] for one in full], [one["first_token_s"] for one in own], statistic=ratio_of_sums
        )
        kept = ""
        if name != "full" and statistics.mean(all_right) >= LEAST:
            found = paired_bootstrap(right, all_right)
            kept = f"{100 * found.estimate:+.0f} ({100 * found.low:+.0f} to {100 * found.high:+.0f})"
        rows.append(
            (
                name,
                f"{statistics.mean(one['share'] for one in own):.0%}",
                f"{sooner.estimate:.2f}x" if is_timed else "",
                f"{statistics.mean(one['nll'] for one in own):.3f}",
                "" if name == "full" else f"{more.estimate:+.3f} ({more.low:+.3f} to {more.high:+.3f})",
                f"{statistics.mean(right):.0%}",
                kept,
                f"{statistics.mean(one['f1'] for one in own):.3f}",
                f"{statistics.mean(one['agrees'] for one in own):.0%}",
            )
        )
    return rows


def _is_timed(setting: Mapping[str, Any]) -> bool:
    """Return whether times of a run say something: the machine did nothing else, and no question found a text read."""
    share = setting["others_cpu_share"]
    return share is not None and share <= captions.BUSY and not setting.get("same_documents", False)


def tables(folder: Path) -> str:
    """Return a table for each set of questions of each committed run."""
    return tables_of(folder, _tables)


def _tables(written: Mapping[str, Any]) -> list[str]:
    parts = []
    setting, is_timed = written["setting"], _is_timed(written["setting"])
    head = f"{captions.heading(written['provenance'], setting['kernels'])}{captions.others(setting)}"
    for name, answers in written["answers"].items():
        full = answers["full"]
        if not full:
            continue
        tokens = statistics.mean(one["tokens"] for one in full)
        about = ""
        if setting.get("same_documents"):
            lots = -(-len(full) // setting["sets"][name][2])
            about = f" about {lots} lots of {setting['sets'][name][2]} documents"
        parts.append(
            f"{head}; {setting['model']}, half {setting['half']}; {name}: {len(full)} questions{about} of "
            f"{tokens:,.0f} tokens on average."
        )
        parts.append(table(HEADINGS, rows_of(answers, is_timed=is_timed)))
    return parts


def over_sets(folder: Path) -> str:
    """Return what each way keeps of the full reading's score, as a mean over all sets that the full reading answers.

    Runs on one kind of processor count together, and ways that were asked on two sets of some size or more. Of each set
    the run with most questions counts. A set weighs as much as another, whatever the number of its questions, and
    intervals are of questions drawn anew. How much sooner the first token comes is of the runs that are timed, all sets
    together.
    """
    most, timed = dict[tuple[str, str, str], dict[str, Answers]](), dict[tuple[str, str, str], list[Answers]]()
    for _, written in read_named(folder):
        setting, cpu = written["setting"], written["provenance"]["cpu"]
        if setting["half"] != REPORTED:
            continue
        for name, answers in written["answers"].items():
            for way in (each for each in answers if each != "full" and answers["full"]):
                key = (cpu, setting["model"], way)
                if _is_timed(setting):
                    timed.setdefault(key, []).append(answers)
                sets = most.setdefault(key, {})
                if name not in sets or len(sets[name]["full"]) < len(answers["full"]):
                    sets[name] = answers
    rows = list[tuple[str, ...]]()
    for key, sets in most.items():
        large = {name: each for name, each in sets.items() if len(each["full"]) >= LEAST_QUESTIONS}
        answered = {name: each for name, each in large.items() if _share(each["full"]) >= LEAST}
        if len(answered) > 1:
            rows.append((*key, *_mean_of(answered, key[-1]), _sooner(timed.get(key, []), key[-1])))
    columns = ("sets", "questions", "score", "full", "of full (95 %)", "more nats (95 %)", "first token sooner")
    return table(("processor", "model", "prefill", *columns), rows)


def _share(answers: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of answers that contain a reference."""
    return statistics.mean(float(one["contains"]) for one in answers)


def _mean_of(sets: Mapping[str, Answers], way: str) -> tuple[str, ...]:
    """Return the cells of a way's mean over sets, each of which weighs the same."""
    weights = [1 / (len(sets) * len(each["full"])) for each in sets.values() for _ in each["full"]]

    def all_of(asked: str, figure: str) -> list[float]:
        values = (float(one[figure]) for each in sets.values() for one in each[asked])
        return [value * weight for value, weight in zip(values, weights, strict=True)]

    score, full = all_of(way, "contains"), all_of("full", "contains")
    kept = paired_bootstrap(score, full, statistic=ratio_of_sums)
    size = len(weights)  # the mean of so many values is their sum over it
    more = paired_bootstrap(*([size * value for value in all_of(asked, "nll")] for asked in (way, "full")))
    return (
        ", ".join(sets),
        str(size),
        f"{sum(score):.0%}",
        f"{sum(full):.0%}",
        f"{kept.estimate:.0%} ({kept.low:.0%} to {kept.high:.0%})",
        f"{more.estimate:+.3f} ({more.low:+.3f} to {more.high:+.3f})",
    )


def _sooner(runs: Sequence[Answers], way: str) -> str:
    """Return how much sooner the first token came in runs that are timed."""
    seconds = [sum(one["first_token_s"] for run in runs for one in run[asked]) for asked in ("full", way)]
    return f"{seconds[0] / seconds[1]:.2f}x" if runs else ""


def beside_paper(folder: Path, name: str) -> str:
    """Return the paper's table of multi-document questions and, below it, ours of the set of that name.

    A run is left out in which the full reading answers too few questions to say anything about answers.
    """
    rows = [
        ("paper, Llama 2 7B", way, f"{score:.2f}", f"{score / PAPER[0][1]:.0%}", f"{sooner:.2f}x" if sooner else "")
        for way, score, sooner in PAPER
    ]
    for _, written in read_named(folder):
        answers = written["answers"].get(name) or {"full": ()}
        full, is_timed = answers["full"], _is_timed(written["setting"])
        if not full or _share(full) < LEAST or written["setting"]["half"] != REPORTED:
            continue
        seconds = statistics.mean(one["first_token_s"] for one in full)
        for way, own in answers.items():
            score = statistics.mean(one["contains"] for one in own)
            rows.append(
                (
                    f"{written['setting']['model']}, {len(full)} questions",
                    way,
                    f"{100 * score:.0f}",
                    f"{score / statistics.mean(one['contains'] for one in full):.0%}",
                    ""
                    if way == "full" or not is_timed
                    else f"{seconds / statistics.mean(one['first_token_s'] for one in own):.2f}x",
                )
            )
    return table(("model", "prefill", "score", "of full", "first token sooner"), rows)
