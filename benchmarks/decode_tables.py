"""Tables from the files of ``vivace bench decode --json``: the README's, all figures, and those of one method."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import captions, plots
from benchmarks.trainings import training
from tools.blocks import table

PARTS = ("provenance", "roofline", "setting", "runs")
"""Keys that every file must have."""
NONE_YET = "No results are committed yet."
OURS = (
    *("plain", "multirate", "multirate+lookup", "lookup", "multistream", "medusa", "eagle", "deed", "draft", "auto"),
    *("llama.cpp", "transformers"),
)
"""Order of the rows in the README's tables; other methods follow."""
HEADLINE = "multirate"
"""Method that the README's first sentence reports."""


@dataclass(frozen=True)
class Result:
    """One file of ``vivace bench decode``."""

    name: str
    provenance: dict[str, Any]
    roofline: dict[str, Any]
    setting: dict[str, Any]
    runs: list[dict[str, Any]]
    quality: dict[str, dict[str, float]] | None = None
    peers: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None

    @property
    def title(self) -> str:
        """Model, prompts and kernels."""
        return f"{self.setting['model']}, {self.prompt_set}, {self.setting['kernels']}"

    @property
    def prompt_set(self) -> str:
        """Name of the prompt file without its ending, with the number of prompts if it differs from the one in the
        name.
        """
        name, count = str(self.setting["prompts"]).removesuffix(".jsonl"), self.setting["num_prompts"]
        says = name.rpartition("-")[2]
        return f"{name}, the first {count}" if says.isdigit() and int(says) != count else name

    @property
    def is_twin(self) -> bool:
        """Whether the model was made by ``vivace widen``."""
        return re.search(r"-x\d+$", self.setting["model"]) is not None

    @property
    def kind(self) -> tuple[str, ...]:
        """Processor and kernels; a table has results of one kind."""
        return (self.provenance["cpu"], self.setting["kernels"])

    @property
    def plain(self) -> dict[str, Any]:
        """The run of plain decoding, with which all others are compared."""
        return next(run for run in self.runs if run["method"] == "plain")

    def run(self, method: str) -> dict[str, Any] | None:
        """Return a method's run, None if it was not measured."""
        return next((run for run in self.runs if run["method"] == method), None)


def read_results(folder: Path) -> list[Result]:
    """Read every result in a folder, in the order of names.

    Raises:
        ValueError: a file is not a result; the message names the file and what is missing.
    """
    return [_read(path) for path in sorted(folder.glob("*.json"))]


def _read(path: Path) -> Result:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    missing = set(PARTS) - set(values)
    if missing or not values["runs"]:
        lacking = ", ".join(sorted(missing)) or "runs"
        raise ValueError(f"{path.name} is not a result of `vivace bench decode`: no {lacking}")
    more = {part: values.get(part) for part in ("quality", "peers", "memory")}
    return Result(path.stem, **{part: values[part] for part in PARTS}, **more)


def summary(results: Sequence[Result]) -> str:
    """Return what the README shows: a sentence and one table of speeds, with the best kernels of the processor.

    Raises:
        ValueError: a result is not of a clean commit, or two are of different processors.
    """
    if not results:
        return NONE_YET
    unclean = [result.name for result in results if not captions.is_clean(result.provenance)]
    if unclean:
        raise ValueError(f"results from trees with uncommitted changes do not go into the README: {', '.join(unclean)}")
    processors = sorted({result.provenance["cpu"] for result in results})
    if len(processors) > 1:
        raise ValueError(f"the README's results are of several processors: {', '.join(processors)}")
    shown, *_ = _tables(results)
    pictures = (("acceptance by position", plots.ACCEPTANCE), ("time per token", plots.TIME))
    return "\n\n".join([*_lead(shown), *_speeds(shown), *(f"![{text}](docs/images/{name})" for text, name in pictures)])


def _tables(results: Sequence[Result]) -> list[list[Result]]:
    """Group results into one table for each kind of kernels, the best kernels first."""
    return list(captions.by_kind(sorted(results, key=_is_slower), lambda result: result.kind).values())


def _is_slower(result: Result) -> bool:
    """Return whether the processor has faster kernels than those that ran; the table of those results comes second."""
    return bool(result.provenance.get("best_kernels", result.setting["kernels"]) != result.setting["kernels"])


def _lead(results: Sequence[Result]) -> list[str]:
    """Return the first sentence: decoding and whole answers, on the shipped model and on a twin that exceeds the
    cache.
    """
    parts = []
    for model in dict.fromkeys(result.setting["model"] for result in results):
        own = [result for result in results if result.setting["model"] == model]
        found = [(result, run) for result in own if (run := result.run(HEADLINE)) and run["identical"]]
        if found:
            size = f"{own[0].roofline['weight_bytes'] / 1e6:.0f} MB of weights per pass"
            what = f"the wide twin {model} ({size})" if own[0].is_twin else f"{model} ({size})"
            gains = [
                f"{run['speedup']:.2f}x while decoding and {captions.whole_answers(run, result.plain):.2f}x for whole "
                f"answers on {result.prompt_set}"
                for result, run in found
            ]
            parts.append(f"on {what} **{', '.join(gains)}**")
    if not parts:
        return []
    cpu, kernels = results[0].kind
    text = f"Speed of `{HEADLINE}` relative to plain decoding, with the same text, on {cpu} with {kernels} kernels: "
    return [f"{text}{'; '.join(parts)}."]


def _speeds(results: Sequence[Result]) -> list[str]:
    """Return caption and table of methods by models and prompts, all of one kind of machine.

    Raises:
        ValueError: what the caption says once of all of them is not the same for all.
    """
    first = results[0]
    for name, found in _said_once(results).items():
        if len(found) > 1:
            raise ValueError(f"one table over {name} {', '.join(map(str, sorted(found)))}: {_names(results)}")
    commits = sorted({captions.tree(result.provenance) for result in results})
    s = first.setting
    counts = ", ".join(f"{result.setting['model']} {result.prompt_set}: {_count(result)}" for result in results)
    machine = captions.kernels(first.provenance, s["kernels"])
    caption = (
        f"**{first.provenance['cpu']}, {machine}**, {first.provenance['num_threads']} threads, batch "
        f"{s['batch_size']}, "
        f"greedy, at most {s['max_new_tokens']} new tokens; {', '.join(commits)}. Prompts: {counts}. Each "
        "cell has the speed while decoding, then that of whole answers (reading the prompt included), both relative to "
        "plain decoding, whose own row has tokens per second; then tokens per target pass. A star marks texts that "
        "differ." + _streams_note([run for result in results for run in result.runs])
    )
    names = list(dict.fromkeys(run["method"] for result in results for run in result.runs))
    names.sort(key=[*OURS, *names].index)
    rows = [(f"`{name}`", _training(results, name), *(_cell(result, name) for result in results)) for name in names]
    columns = (f"{result.setting['model']}, {result.prompt_set}" for result in results)
    return [caption, table(("method", "training", *columns), rows)]


def _said_once(results: Sequence[Result]) -> dict[str, set[Any]]:
    """Return the values of each fact that a caption says once for all results."""
    found: dict[str, set[Any]] = {"num_threads": {result.provenance["num_threads"] for result in results}}
    return found | {
        name: {result.setting[name] for result in results} for name in ("batch_size", "max_new_tokens", "dtype")
    }


def _names(results: Sequence[Result]) -> str:
    return ", ".join(result.name for result in results)


def _count(result: Result) -> str:
    return f"{result.setting['num_prompts']} x {result.setting['repeats']}{captions.others(result.setting)}"


def _training(results: Sequence[Result], method: str) -> str:
    found = {training(result.setting["model"], method) for result in results if result.run(method)}
    return "; ".join(sorted(found))


def _streams_note(runs: Sequence[dict[str, Any]]) -> str:
    """Return a note on the layers that "tokens per target pass" does not count, for streams that follow the accepted
    node.
    """
    for run in runs:
        layers = run.get("layers_per_step")
        if run["method"] == "multistream" and layers and layers["draft"]:
            total = layers["verify"] + layers["draft"]
            return (
                f" `multistream` runs `attach: kept`: besides the {layers['verify']} layers of a target pass, "
                f"{layers['draft']} more run for its streams, {total} in a step; tokens per target pass do not count "
                "them."
            )
    return ""


def _cell(result: Result, method: str) -> str:
    run = result.run(method)
    if run is None:
        return "-"
    if method == "plain":
        return f"{run['tokens_per_s']:.0f}, {run['end_to_end_tokens_per_s']:.0f} tok/s"
    star = "" if run["identical"] else "*"
    speeds = f"{run['speedup']:.2f}x{star}, {captions.whole_answers(run, result.plain):.2f}x"
    kept = run["tokens_per_target_pass"]
    return speeds if kept is None else f"{speeds}, {kept:.1f}"


def details(results: Sequence[Result]) -> str:
    """Return everything else: speeds with other kernels, setting, machine, roofline, quality, memory, whole answers."""
    if not results:
        return NONE_YET
    others = [part for group in _tables(results)[1:] for part in _speeds(group)]
    return "\n\n".join([*others, *(_details(result) for result in results)])


def _details(result: Result) -> str:
    s, p, r = result.setting, result.provenance, result.roofline
    versions = ", ".join(f"{name} {version}" for name, version in sorted(p["packages"].items()))
    cost = ", ".join(f"{k}: {r['verify_cost'][k - 1]:.2f}" for k in (1, 2, 4, 8, 16) if k <= len(r["verify_cost"]))
    lines = [
        f"## {result.title}",
        "",
        f"{s['num_prompts']} prompts, at most {s['max_new_tokens']} new tokens, batch {s['batch_size']}, "
        f"{s['repeats']} repeats, {s['dtype']}, {captions.kernels(p, s['kernels'])}, {captions.tree(p)}. "
        f"File: `{result.name}.json`.{_streams_note(result.runs)}",
        "",
        f"- machine: {p['cpu']}, {p['num_threads']} threads of {p['num_cores']} cores, device {p['device']}"
        f"{_cache(result)}{captions.others(s)}",
        f"- versions: python {p['python']}, {versions}",
        f"- roofline: a one-row pass reads {r['achieved_bytes_per_s'] / 1e9:.1f} GB/s of weights "
        f"({r['weight_bytes'] / 1e6:.1f} MB a pass); the machine reads {r['read_bytes_per_s'] / 1e9:.1f} GB/s",
        f"- a pass over k rows, in one-row passes: {cost}",
        *([f"- transformers runs in {result.peers['dtype']}, its fastest dtype here"] if result.peers else []),
        *_memory_lines(result),
        *_quality(result),
        "",
        _detail_table(result),
    ]
    return "\n".join(lines)


def _cache(result: Result) -> str:
    size = result.provenance.get("cache_bytes")
    return "" if size is None else f", its largest cache {size / 2**20:.0f} MiB"


def _memory_lines(result: Result) -> list[str]:
    """Return the peak memory of the process, which all methods share."""
    peak = max((run["peak_memory_bytes"] or 0 for run in result.runs), default=0)
    if not peak:
        return []
    whole = f"- memory: the process had {peak / 2**20:.0f} MiB at its peak, all methods and engines together"
    if result.memory is None:
        return [f"{whole}; what each of them held was not counted yet"]
    libraries = result.memory["libraries"]
    return [f"{whole}; {libraries / 2**20:.0f} MiB were libraries, before a model was read" if libraries else whole]


def _quality(result: Result) -> list[str]:
    """Return one line per task; shares are between 0 and 1, BLEU and ROUGE-L between 0 and 100."""
    return [
        f"- quality of the plain answers, {task}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        for task, values in (result.quality or {}).items()
    ]


def _detail_table(result: Result) -> str:
    rows = [
        (
            f"`{run['method']}`",
            training(result.setting["model"], run["method"]),
            run.get("plan") or "-",
            f"{run['tokens_per_s']:.1f}",
            f"{run['tokens_per_s_spread'][0]:.1f} to {run['tokens_per_s_spread'][1]:.1f}",
            interval(run),
            f"{run['first_token_ms']:.1f} ms" if run.get("first_token_ms") is not None else "-",
            _whole(run, result.plain),
            _figure(run["mean_acceptance_length"]),
            positions(run),
            layers(run),
            *_held(result, run["method"]),
            identical(run),
        )
        for run in result.runs
    ]
    speeds = ("tokens/s", "lowest to highest", "beside plain", "first token", "whole answers")
    guesses = ("acceptance length", "by position", "layers a step")
    memory = ("weights", "cache", "drafter")
    return table(("method", "training", "draft", *speeds, *guesses, *memory, "same"), rows)


def _held(result: Result, method: str) -> tuple[str, str, str]:
    """Return the memory of weights, cache and drafter in MiB."""
    held = (result.memory or {}).get("held", {}).get(method)
    if held is None:
        return ("-", "-", "-")
    shown = [f"{held[part] / 2**20:.1f} MiB" if held[part] else "0" for part in ("weights", "cache", "drafter")]
    return (shown[0], shown[1], shown[2])


def _whole(run: dict[str, Any], plain: dict[str, Any]) -> str:
    """Return rate and speed-up of whole answers, with the interval if it was recorded."""
    shown = f"{run['end_to_end_tokens_per_s']:.1f}, {captions.whole_answers(run, plain):.2f}x"
    return shown + (" ({:.2f} to {:.2f})".format(*run["end_to_end_interval"]) if "end_to_end_interval" in run else "")


def technique(results: Sequence[Result], method: str) -> str:
    """Return the results of one method and of those built on it, in a table for each kind of machine."""
    parts = []
    for (cpu, kernels), group in captions.by_kind(results, lambda result: result.kind).items():
        rows = [
            (
                f"{result.setting['model']}, {result.prompt_set}",
                f"`{run['method']}`",
                positions(run),
                _figure(run["tokens_per_target_pass"]),
                layers(run),
                interval(run),
                f"{captions.whole_answers(run, result.plain):.2f}x",
                identical(run),
                captions.tree(result.provenance),
            )
            for result in group
            for run in result.runs
            if run["method"].split("+")[0] == method
        ]
        if rows:
            guesses = ("acceptance by position", "tokens a target pass", "layers a step")
            header = ("model, prompts", "method", *guesses, "beside plain", "whole answers", "identical", "tree")
            parts += [f"**{cpu}, {captions.kernels(group[0].provenance, kernels)}**", table(header, rows)]
    return "\n\n".join(parts) or NONE_YET


def positions(run: dict[str, Any]) -> str:
    """Return the share of drafted tokens that were accepted, by position in the draft."""
    return " ".join(f"{share:.2f}" for share in run["acceptance_per_position"]) or "-"


def layers(run: dict[str, Any]) -> str:
    """Return the layers of the target that a step runs: to verify and to draft."""
    found = run.get("layers_per_step")
    if not found:
        return "-"
    return f"{found['verify']} + {found['draft']}" if found["draft"] else f"{found['verify']}"


def interval(run: Mapping[str, Any]) -> str:
    """Return the speed-up of decoding with its interval."""
    low, high = run["speedup_interval"]
    return f"{run['speedup']:.2f}x ({low:.2f} to {high:.2f})"


def identical(run: dict[str, Any]) -> str:
    """Return whether every answer is plain decoding's."""
    return "yes" if run["identical"] else f"no ({run['num_different']} differ)"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
