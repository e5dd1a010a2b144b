"""What pruned prompts cost: ``python -m benchmarks.prefill_quality MODEL QUESTIONS --json FILE``.

QUESTIONS is a file of rows with ``question``, ``answers`` and ``ctxs``, whose first passage has the answer (the
multi-document questions of Liu et al. 2023, *Lost in the middle*, arXiv:2307.03172). A prompt has the passage of its
question at a place that is drawn among passages of other questions, then the question; the chat template is the
model's. Every way of reading is asked the same. Measured are, question by question,

* the negative log-likelihood of the first answer in nats a token, the model being made to write it: the sensitive one,
  and paired, since every way has the same questions;
* whether the greedy answer contains one of the answers, without case and punctuation;
* the share of a full reading's layer passes, and the first token's time. Times are noted, but only those of ``vivace
  bench prefill`` are reported.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import vivace
from benchmarks import captions
from tools.blocks import table
from vivace.engine import Engine, Options
from vivace.evaluate.bootstrap import paired_bootstrap
from vivace.evaluate.long_prompts import DEV_EVERY
from vivace.evaluate.provenance import provenance
from vivace.evaluate.quality import contains
from vivace.prefill.schedule import parse_keep
from vivace.recipes.lazy_plan import Forced

WAYS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "lazy, paper": {"prefill": "lazy", "keep": "paper"},
    "lazy, balanced": {"prefill": "lazy", "keep": "balanced"},
    "lazy, fast": {"prefill": "lazy", "keep": "fast"},
    "static": {"prefill": "static", "keep": "4:0.5"},
    "random": {"prefill": "random", "keep": "0:0.5"},
    "lexical": {"prefill": "lexical", "keep": "0:0.5"},
}
"""Ways of reading that are compared, by their names in the table."""
NEW_TOKENS = 24
LOW = 4
"""Layer behind which ``static`` prunes."""


def questions(path: Path, count: int, num_documents: int, seed: int, *, only_dev: bool = False) -> list[dict[str, Any]]:
    """Return questions with their documents in order, and the answers.

    With ``only_dev`` they are rows that ``vivace data multidoc`` puts into *dev*, so that nothing was learnt on them.
    """
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    rows = [json.loads(line) for line in text.splitlines()][:: DEV_EVERY if only_dev else 1]
    draws, made = random.Random(seed), []
    for number in draws.sample(range(len(rows)), count):
        others = draws.sample([place for place in range(len(rows)) if place != number], num_documents - 1)
        documents = [rows[place]["ctxs"][0] for place in others]
        place = draws.randrange(num_documents)
        documents.insert(place, rows[number]["ctxs"][0])
        listed = [f"Document {at} ({each['title']}): {each['text']}" for at, each in enumerate(documents, 1)]
        text = "\n".join(["Here are some documents.", *listed, "", f"Question: {rows[number]['question']}?"])
        text += "\nAnswer the question in a few words, from the documents."
        made.append({"text": text, "answers": rows[number]["answers"], "place": place, "row": number})
    return made


def beside(engine: Engine, keep: str, length: int) -> dict[str, Mapping[str, Any]]:
    """Return a schedule of ``lazy``, and the other ways with as many layer passes.

    Args:
        engine: the model.
        keep: the schedule.
        length: tokens of a prompt, for which passes are counted.
    """
    num_layers = engine.model.config.num_layers
    share = parse_keep(keep, num_layers).share(length, num_layers)
    low = (share * num_layers - LOW) / (num_layers - LOW)
    ways: dict[str, Mapping[str, Any]] = {f"lazy, {keep}": {"prefill": "lazy", "keep": keep}}
    if low > 0:
        ways[f"static, {LOW}:{low:.2f}"] = {"prefill": "static", "keep": f"{LOW}:{low:.4f}"}
    for name in ("random", "lexical"):
        ways[f"{name}, 0:{share:.2f}"] = {"prefill": name, "keep": f"0:{share:.4f}"}
    return ways


def ask(engine: Engine, question: Mapping[str, Any], way: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one way of reading gives for a question."""
    prompt = engine.tokenizer.encode_prompt([{"role": "user", "content": question["text"]}], raw=False)
    gold = engine.tokenizer.encode(question["answers"][0], special=False)
    options = {"method": "plain", "do_sample": False, **way}
    [answer] = engine.generate(list(prompt), max_new_tokens=NEW_TOKENS, **options)
    asked = Options.of({**options, "max_new_tokens": len(gold), "ignore_eos": True, "logprobs": True})
    request = engine.request(list(prompt), asked)
    forced = replace(request, processors=(Forced(len(prompt), gold),))
    result = list(engine.answer(forced, asked))[-1].result
    assert result is not None
    assert result.logprobs is not None
    assert list(result.token_ids) == gold
    full_passes = (len(prompt) - 1) * engine.model.config.num_layers
    return {
        "nll": -statistics.mean(result.logprobs),
        "contains": contains(answer.text, question["answers"]),
        "text": answer.text,
        "share": answer.stats.num_prompt_layer_passes / full_passes,
        "first_token_s": answer.stats.first_token_s,
        "num_prompt_tokens": len(prompt),
    }


def measure(
    engine: Engine, asked: Sequence[Mapping[str, Any]], ways: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Ask every question in every way."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for number, question in enumerate(asked, 1):
        for name, way in ways.items():
            found[name].append(ask(engine, question, way))
        line = ", ".join(f"{name} {answers[-1]['nll']:.2f}" for name, answers in found.items())
        print(f"{number}/{len(asked)}: {line}", flush=True)
    return found


def tables(folder: Path) -> str:
    """Return the table of all committed runs."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        written = json.loads(path.read_text(encoding="utf-8"))
        setting, rows = written["setting"], []
        full = written["answers"]["full"]
        for name, answers in written["answers"].items():
            more = paired_bootstrap([one["nll"] for one in answers], [one["nll"] for one in full])
            rows.append(
                (
                    name,
                    f"{statistics.mean(one['share'] for one in answers):.0%}",
                    f"{statistics.mean(one['nll'] for one in answers):.3f}",
                    "" if name == "full" else f"{more.estimate:+.3f} ({more.low:+.3f} to {more.high:+.3f})",
                    f"{sum(one['contains'] for one in answers)} of {len(answers)}",
                )
            )
        tokens = statistics.mean(one["num_prompt_tokens"] for one in full)
        parts.append(
            f"{captions.heading(written['provenance'], setting['kernels'])}; {setting['model']}, {len(full)} questions "
            f"with {setting['documents']} documents each, {tokens:,.0f} tokens on average."
        )
        headings = ("prefill", "layer passes", "NLL of the answer", "more than full (95 %)", "answers that contain it")
        parts.append(table(headings, rows))
    return "\n\n".join(parts) or "No run is committed yet."


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("questions", type=Path)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--documents", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="append", help="a schedule of lazy, beside the other ways at equal passes")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    engine = vivace.load(asked.model)
    only_dev = bool(asked.keep)
    rows = questions(asked.questions, asked.limit, asked.documents, asked.seed, only_dev=only_dev)
    ways = dict(WAYS)
    if asked.keep:
        length = len(engine.tokenizer.encode_prompt([{"role": "user", "content": rows[0]["text"]}], raw=False))
        ways = {"full": {}}
        for keep in asked.keep:
            ways |= beside(engine, keep, length)
    answers = measure(engine, rows, ways)
    setting = {
        "model": Path(asked.model).name,
        "kernels": engine.kernels.name,
        "questions": asked.questions.name,
        "documents": asked.documents,
        "seed": asked.seed,
    }
    if asked.json is not None:
        written = {"provenance": asdict(provenance(torch.device("cpu"))), "setting": setting, "answers": answers}
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
