"""Compare the shared mode with a plain fine-tune: ``python -m benchmarks.shared_mode --shared A --plain B --prompts
FILE``.

Both models were trained for the same number of steps on the same rows, the second without the streams' loss. Their
plain answers are scored by the task's metric, with a paired bootstrap of the ratio over prompts. The shared model's
streams decode in turns with its own plain decoding, whose text they must reproduce. Writes JSON; if no answer is right,
there is no ratio.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import vivace
from benchmarks.result_files import write_report
from benchmarks.tradeoff_measures import Judgement, judge_texts
from vivace.cli.prompting import questions_of, read_prompts
from vivace.engine import Engine
from vivace.evaluate.benchmark import Named, Record, run_benchmark, summarise
from vivace.evaluate.bootstrap import paired_bootstrap, ratio_of_sums
from vivace.evaluate.provenance import provenance
from vivace.evaluate.systems import MethodSystem
from vivace.prompts import Prompt

STREAMS = "multistream"


def compare(shared: Engine, plain: Engine, prompts: Sequence[Prompt], limit: int | None, most: int) -> dict[str, Any]:
    """Return the quality of both models on all prompts, and the speed of the streams on the first ``limit``."""
    asked = questions_of(shared, list(prompts), raw=False)
    sides = [Named("shared", MethodSystem("plain", shared, most)), Named("plain", MethodSystem("plain", plain, most))]
    records = run_benchmark(sides, asked, repeats=1)
    ours, theirs = (_judge(engine, prompts, record) for engine, record in zip((shared, plain), records, strict=True))
    ratio = paired_bootstrap(ours.values, theirs.values, statistic=ratio_of_sums) if any(theirs.values) else None
    systems = [MethodSystem(name, shared, most) for name in ("plain", STREAMS)]
    _, streams = summarise(run_benchmark(systems, asked[:limit], repeats=1), "plain")
    return {
        "num_prompts": len(prompts),
        "metrics": {"shared": ours.metrics, "plain": theirs.metrics},
        "quality": {"shared": _mean(ours.values), "plain": _mean(theirs.values)},
        "ratio": None if ratio is None else [ratio.estimate, ratio.low, ratio.high],
        "agreement_with_plain_fine_tune": sum(a == b for a, b in zip(*map(_answers, records), strict=True))
        / len(asked),
        "streams": {"num_prompts": len(asked[:limit]), **asdict(streams)},
        "kernels": shared.kernels.name,
        "provenance": asdict(provenance(shared.model.device)),
    }


def _judge(engine: Engine, prompts: Sequence[Prompt], record: Record) -> Judgement:
    """Judge the answers of a record."""
    answers = _answers(record)
    texts = [engine.tokenizer.decode(ids) for ids in answers]
    asked = [question.token_ids for question in questions_of(engine, list(prompts), raw=False)]
    return judge_texts(engine, prompts, asked, answers, texts)


def _answers(record: Record) -> list[tuple[int, ...]]:
    """Return the tokens of the first trial of each prompt."""
    return [ids for trials in record.trials for ids in trials[0].token_ids]


def _mean(values: Sequence[float]) -> float:
    """Return the mean of some values."""
    return sum(values) / len(values)


def main() -> None:
    """Measure every prompt set and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", required=True)
    parser.add_argument("--plain", required=True)
    parser.add_argument("--prompts", nargs="+", required=True, help="files or packaged sets, one task each")
    parser.add_argument("--limit", type=int, help="prompts of each that are judged")
    parser.add_argument("--timed", type=int, default=40, help="prompts of each that the streams answer")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    shared, plain = vivace.load(given.shared), vivace.load(given.plain)
    found = {}
    for name in given.prompts:
        told = compare(shared, plain, read_prompts(name, given.limit), given.timed, given.max_new_tokens)
        found[Path(name).stem] = told
        streams, quality, ratio = told["streams"], told["quality"], told["ratio"]
        beside = "no ratio" if ratio is None else f"ratio {ratio[0]:.4f} [{ratio[1]:.4f}, {ratio[2]:.4f}]"
        print(
            f"{Path(name).stem}: {told['num_prompts']} prompts, shared {quality['shared']:.4f}, plain "
            f"{quality['plain']:.4f}, {beside}; "
            f"streams {streams['tokens_per_target_pass']:.2f} tokens a pass, {streams['speedup']:.2f}x, "
            f"identical {'yes' if streams['identical'] else 'NO'}",
            flush=True,
        )
    if given.json is not None:
        write_report(given.json, found)


if __name__ == "__main__":
    main()
