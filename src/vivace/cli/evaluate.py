"""``vivace evaluate``: the quality of answers, and how much quantizing the weights changes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from vivace.cli import options
from vivace.cli.console import console
from vivace.cli.evaluate_wires import WireFlags, evaluate_wires
from vivace.cli.judging import check_unused, judge_models
from vivace.cli.loading import open_engine
from vivace.cli.prompting import Limit, Prompts, questions_of, read_prompts, split_names
from vivace.errors import ConfigError
from vivace.prompts import PACKAGED, Prompt
from vivace.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from vivace.engine import Engine
    from vivace.evaluate.fidelity import Fidelity, Sheet

STORED = "bf16"
"""Format that every other one is compared with: the weights as stored."""

FORMATS = "bf16,int8,q4"
"""What is compared unless said otherwise."""

LONGEST = 96
"""Tokens of an answer unless said otherwise."""

SHOWN = {"bleu": "BLEU", "rouge_l": "ROUGE-L", "slot_error_rate": "slot errors", "exact_match": "exact match"}
SHOWN |= {"contains": "contain an answer", "f1": "F1"}
"""Metrics in the table, with the heads of their columns."""


@options.grouped
def evaluate(
    *,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Folder, Hub id or GGUF file; left out: the model that ships. With --tasks several: the others are "
            "compared with the first.",
            metavar="[MODEL]...",
        ),
    ] = None,
    tasks: Annotated[
        list[Path] | None,
        typer.Option(
            help="Task file (vivace data zeroshot|wikitext), judged by likelihood instead of answers; repeatable."
        ),
    ] = None,
    weights: Annotated[str, typer.Option(help="Formats to compare, with commas; bf16 is as stored.")] = FORMATS,
    prompts: Prompts = "e2e",
    limit: Limit = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = LONGEST,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kernels: options.Kernels = "auto",
    adapter: options.Adapter = None,
    use: options.Use = None,
    ignore_config_key: options.IgnoreConfigKey = None,
    prompt_pool: options.PromptPool = None,
    soft_prompt: options.SoftPrompt = None,
    raw: options.Raw = False,
    reading: options.PrefillFlags,
    wires: WireFlags,
    as_json: options.AsJson = False,
) -> None:
    """Measure the quality of greedy answers for several weight formats, beside the model as stored.

    With --use all of them wear the same LoRA. With --prefill they are answers to prompts that are read so, and the
    model as stored reads its own in full; what is only known of a full reading is left out.

    With --wire it measures instead what forms of sums over ranks change, by the perplexity of a text or by --tasks.

    With --tasks models are judged by how likely they find the right options and texts; with --prompt-pool each of them
    without a soft prompt and behind the one that every row gets.
    """
    from vivace.evaluate.provenance import provenance
    from vivace.kernels.low_bit import Weights, check_weights

    load = options.LoadFlags(adapter, device=device, dtype=dtype, kernels=kernels, ignore_config_key=ignore_config_key)
    way = options.given(**vars(reading))
    if not tasks and (prompt_pool is not None or soft_prompt is not None):
        raise ConfigError("--prompt-pool and --soft-prompt are for models that are judged by --tasks FILE")
    if tasks:
        given = {"--weights": weights != FORMATS, "--prompts": prompts != "e2e", "--raw": raw, "--prefill": bool(way)}
        given["--max-new-tokens"] = max_new_tokens != LONGEST
        check_unused(given)
        if wires != WireFlags():
            worn = {"--use": bool(use), "--prompt-pool": bool(prompt_pool), "--soft-prompt": bool(soft_prompt)}
            for flag in (flag for flag, is_given in worn.items() if is_given):
                raise ConfigError(f"{flag} has no effect on what --wire compares; leave out one of them")
            if models and len(models) > 1:
                raise ConfigError(f"--wire compares forms of sums of one model, found {len(models)}")
            evaluate_wires(models[0] if models else None, wires, load, tasks=tasks, limit=limit, as_json=as_json)
            return
        load = replace(load, prompt_pool=prompt_pool)
        judge_models(models or [None], tasks, load, limit=limit, use=use, soft_prompt=soft_prompt, as_json=as_json)
        return
    if models and len(models) > 1:
        raise ConfigError(f"{len(models)} models are compared by --tasks FILE; without it name one")
    model = models[0] if models else None
    if wires.wire is not None:
        given = {"--weights": weights != FORMATS, "--prompts": prompts != "e2e", "--limit": limit is not None}
        given |= {"--max-new-tokens": max_new_tokens != LONGEST, "--raw": raw, "--prefill": bool(way)}
        check_unused(given | {"--use": use is not None}, "--wire")
        evaluate_wires(model, wires, load, as_json=as_json)
        return
    if wires != WireFlags():
        raise ConfigError("--ranks, --simulate, --text and --windows have no effect without --wire; leave them out")
    names = [check_weights(name) for name in split_names(weights)]
    if not names:
        raise ConfigError(f"--weights {weights!r} names no format; give some of {', '.join(get_args(Weights))}")
    rows = read_prompts(prompts, limit)
    if adapter and use is None:
        raise ConfigError(
            "--adapter has no effect on plain decoding unless it is a LoRA that --use names; leave it out"
        )
    base = open_engine(model, (), load, use=use)

    def opened(name: str) -> Engine:
        return base if name == STORED else open_engine(model, (), replace(load, weights=name), use=use)

    asked = Comparison(rows, max_new_tokens, raw, use)
    found = compare_formats(base, names, opened, asked, way)
    if as_json:
        named = prompts if prompts in PACKAGED else Path(prompts).name
        setting = {"model": base.folder.name, "prompts": named, "num_prompts": len(rows)}
        setting |= {"max_new_tokens": max_new_tokens, "kernels": base.kernels.name, "adapter": use}
        where = asdict(provenance(base.model.device))
        console.json({"provenance": where, "setting": setting, "weights": [asdict(one) for one in found]})
        return
    print_table(found)


@dataclass(frozen=True)
class Comparison:
    """What every engine answers."""

    rows: list[Prompt]
    max_new_tokens: int
    raw: bool
    """Whether prompts are given without the chat template."""
    use: str | None = None
    """Name of the LoRA that answers wear; None for none."""


def compare_formats(
    base: Engine, names: Sequence[str], opened: Callable[[str], Engine], asked: Comparison, way: Mapping[str, Any]
) -> list[Fidelity]:
    """Measure answers of several weight formats beside those of the model as stored.

    Args:
        base: the model as stored, which reads prompts in full.
        names: formats.
        opened: opens the model in a format.
        asked: what is answered.
        way: how the formats read prompts; what is only known of a full reading is left out unless it is empty.
    """
    from vivace.evaluate.fidelity import compare_weights

    with console.progress("answering") as progress:
        stored = answer(base, asked)
        found = []
        for name in names:
            engine = opened(name)
            own = stored if name == STORED and not way else answer(engine, asked, **way)
            pair = Worn(engine, asked.use), Worn(base, asked.use)
            one = compare_weights(name, *pair, asked.rows, own, stored, on_progress=progress)
            found.append(replace(one, reference_nll=None, agreement=None) if way else one)
    return found


@dataclass(frozen=True)
class Worn:
    """Fills ``Scorer``: an engine that wears a LoRA, or none."""

    engine: Engine
    use: str | None

    @property
    def num_bytes(self) -> int:
        """Return the bytes of its weights, those of the LoRA included."""
        return self.engine.num_bytes + self.engine.adapters.num_bytes

    def logits(self, token_ids: Sequence[Sequence[int]]) -> Tensor:
        """Return the next-token logits at every position, (B, T) -> (B, T, V)."""
        return self.engine.logits(token_ids, adapter=self.use)


def answer(engine: Engine, asked: Comparison, **way: Any) -> Sheet:
    """Return greedy answers of an engine that reads prompts in some way, and the references in its tokens."""
    from vivace.evaluate.fidelity import BATCH, Sheet

    answers = engine.generate(
        [row.request for row in asked.rows],
        method="plain",
        max_new_tokens=asked.max_new_tokens,
        do_sample=False,
        batch_size=BATCH,
        raw=asked.raw,
        adapter=asked.use,
        **way,
    )
    end = engine.tokenizer.eos_ids[:1]
    encode = engine.tokenizer.encode
    references = [(*encode(row.references[0], special=False), *end) if row.references else () for row in asked.rows]
    return Sheet(questions_of(engine, asked.rows, raw=asked.raw), answers, references)


def print_table(found: list[Fidelity]) -> None:
    """Print one row for each format and task."""
    metrics = [name for name in SHOWN if any(name in values for one in found for values in one.tasks.values())]
    heads = ["weights", "memory", "task", *(SHOWN[name] for name in metrics)]
    columns = [*heads, "answer nll", "reference nll", "agreement", "same answers"]
    rows = []
    for one in found:
        for task, values in one.tasks.items():
            rows.append(
                [
                    *(one.weights, format_bytes(one.num_bytes), task),
                    *(_figure(values.get(name), name) for name in metrics),
                    f"{one.answer_nll:.4f}",
                    "-" if one.reference_nll is None else f"{one.reference_nll:.4f}",
                    "-" if one.agreement is None else f"{one.agreement:.2%}",
                    f"{one.identical_share:.0%}",
                ]
            )
    console.table("", columns, rows)
    console.note(
        "answer nll: of a format's answers under the weights as stored; agreement: tokens of the stored model's "
        "answers that the format would have written"
    )


def _figure(value: Any, metric: str) -> str:
    """Format a value of a metric; "-" if there is none."""
    if value is None:
        return "-"
    return f"{value:.1f}" if metric in ("bleu", "rouge_l") else f"{value:.1%}"
