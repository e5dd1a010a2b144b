"""What pruned prompts cost and save, on the same questions: ``python -m benchmarks.prefill_quality MODEL --set ...``.

``--set NAME=TASK:FILE:DOCUMENTS:COUNT`` names questions: TASK is one of ``vivace data`` (*multidoc*, *kv*, *reading*),
FILE its public source, DOCUMENTS how many documents or keys a prompt has, COUNT how many questions are asked.
``--half A`` takes the even rows of each file and ``--half B`` the odd ones: what was taught or chosen on A is reported
on B. ``--way NAME[:KEEP]`` names a way of reading; ``full`` is always read.

A question is read once in each way, in turns. From that reading come the time to the first token, the greedy answer,
and the negative log-likelihood of the first reference in nats a token, which is the sensitive figure, and paired.
Counted are answers that contain a reference, the F1 of their words, and answers that are word for word those of the
full reading. A set on which the full reading has under ``LEAST`` of the answers carries no claim about answers.

With ``--same-documents`` questions come in turns about one lot of documents, one about each, so that a prefix cache
spares the full reading what it has read before, bit for bit: far more questions in the same time. Pruned prompts share
nothing and are read as usual. Times then say nothing and are not reported.

A FILE that exists already is gone on with: its questions are not asked again, and what is found is added. One of
another model, processor, kernels, commit, half or way of reading is refused.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch

import vivace
from vivace.core.step import Step
from vivace.decode.session import Session
from vivace.engine import Engine, Options
from vivace.evaluate.long_prompts import LONG_TASKS, Layout, about_documents, read_rows
from vivace.evaluate.others import watched_others
from vivace.evaluate.provenance import provenance
from vivace.evaluate.quality import contains, word_f1
from vivace.prompts import Prompt

NEW_TOKENS = {"multidoc": 12, "reading": 12, "kv": 40}
"""Tokens of an answer, by task."""
MOST_TOKENS = 4600
"""Longer prompts are left out."""
PREFIX_BYTES = "512MiB"
"""For what was read of the documents of one lot."""


def half_of(source: Path, half: str) -> list[Mapping[str, Any]]:
    """Return the even rows of a public file, which are half A, or the odd ones, half B."""
    return read_rows(source)["AB".index(half) :: 2]


@dataclass(frozen=True)
class QuestionSet:
    """Questions of one kind."""

    name: str
    task: str
    source: Path
    documents: int
    count: int

    @staticmethod
    def of(text: str) -> QuestionSet:
        """Read NAME=TASK:FILE:DOCUMENTS:COUNT."""
        name, _, rest = text.partition("=")
        task, source, documents, count = rest.split(":")
        return QuestionSet(name, task, Path(source), int(documents), int(count))

    def questions(self, half: str, seed: int) -> list[Prompt]:
        """Return questions of a half of the rows, in an order that is drawn."""
        rows = half_of(self.source, half)
        draws, layout = Random(seed), Layout(documents=self.documents)
        places = draws.sample(range(len(rows)), min(self.count, len(rows)))
        return [LONG_TASKS[self.task](rows, place, layout, draws) for place in places]

    def about_the_same(self, half: str, seed: int) -> list[Prompt]:
        """Return questions about lots of documents, one about each document of a lot, in an order that is drawn."""
        assert self.task == "multidoc", "the other tasks have one question about a text"
        rows, draws, asked = half_of(self.source, half), Random(seed), list[Prompt]()
        places = draws.sample(range(len(rows)), len(rows))
        for first in range(0, len(places) - self.documents + 1, self.documents):
            lot = [rows[place] for place in places[first : first + self.documents]]
            documents = [row["ctxs"][0] for row in lot]
            asked += [about_documents(documents, row) for row in draws.sample(lot, len(lot))]
        return asked[: self.count]


def way_of(text: str) -> dict[str, Any]:
    """Read NAME or NAME:KEEP."""
    name, _, keep = text.partition(":")
    return {} if name == "full" else {"prefill": name, "min_prompt": 1, **({"keep": keep} if keep else {})}


@torch.inference_mode()
def ask(engine: Engine, question: Prompt, way: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one way of reading gives for a question."""
    prompt = list(engine.tokenizer.encode_prompt(question.request, raw=False))
    gold = list(engine.tokenizer.encode(question.references[0], special=False))
    new = NEW_TOKENS[question.task or "reading"]
    options = Options.of({"method": "plain", "do_sample": False, "max_new_tokens": new, **way})
    session = Session(engine.model, num_slots=1, capacity=len(prompt) + new)
    started = time.perf_counter()
    session.admit(engine.request(prompt, options))
    tokens: list[int] = []
    nll = first_token_s = passes = 0.0
    while not session.is_idle:
        for emitted in session.step():
            assert emitted.error is None, emitted.error
            if not tokens:
                first_token_s = time.perf_counter() - started
                known = emitted.stats.num_cached_tokens  # were read for another question
                passes = emitted.stats.num_prompt_layer_passes + known * engine.model.config.num_layers
                nll = _nll(engine, session, prompt, gold)
            tokens += emitted.tokens
    text = engine.tokenizer.decode([token for token in tokens if token not in engine.tokenizer.eos_ids])
    full = (len(prompt) - 1) * engine.model.config.num_layers
    return {
        "nll": round(nll, 5),
        "contains": contains(text, question.references),
        "f1": round(max(word_f1(text, reference) for reference in question.references), 4),
        "share": round(passes / full, 4),
        "first_token_s": round(first_token_s, 5),
        "tokens": len(prompt),
        "answer": text,
    }


def _nll(engine: Engine, session: Session, prompt: Sequence[int], gold: Sequence[int]) -> float:
    """Return the mean negative log-likelihood of a text behind the prompt whose last token was read just now.

    Its rows are written where drafts are, behind what is decided, so decoding goes on as if they had not been there.
    """
    gold = gold[:32]
    places = torch.arange(len(prompt) - 1, len(prompt) - 1 + len(gold))
    ids = torch.tensor([prompt[-1], *gold[:-1]])
    step = Step.packed(session.cache, [0] * len(gold), places, places)
    chances = engine.model.head(engine.model.run(engine.model.embed(ids, step), step)).float().log_softmax(-1)
    return -float(chances.gather(1, torch.tensor(gold)[:, None]).mean())


def measure(
    engine: Engine,
    sets: Sequence[QuestionSet],
    ways: Mapping[str, Mapping[str, Any]],
    half: str,
    until: float,
    found: dict[str, Any],
    *,
    same_documents: bool = False,
    save: Callable[[], None] = lambda: None,
) -> None:
    """Ask every question in every way, the sets in turns, until the time is over.

    Args:
        engine: the model.
        sets: of questions.
        ways: by name; "full" is the first.
        half: of the rows of each source.
        until: time of ``time.monotonic`` after which no question is begun.
        found: by set and way what was found before; questions go on behind those, and answers are added.
        same_documents: whether questions come in turns about one lot of documents.
        save: called when a question has been asked in all ways.
    """
    asked = {}
    for each in sets:
        own = found.setdefault(each.name, {name: [] for name in ways})
        questions = (each.about_the_same if same_documents else each.questions)(half, seed=7)
        fits = (one for one in questions if _num_tokens(engine, one) <= MOST_TOKENS)
        asked[each.name] = islice(fits, len(own["full"]), None)
    turn = 0
    while asked and time.monotonic() < until:
        for name in list(asked):
            question = next(asked[name], None)
            if question is None:
                del asked[name]
                continue
            turn += 1
            for way in list(ways) if turn % 2 else reversed(list(ways)):
                found[name][way].append(ask(engine, question, ways[way]))
            text = found[name]["full"][-1]["answer"]
            for way in ways:
                own = found[name][way][-1]
                own["agrees"] = own["answer"] == text
            for way in ways:  # texts of a data set stay where they are
                del found[name][way][-1]["answer"]
            save()
            if time.monotonic() > until:
                break
        print(_progress(found), flush=True)


def _num_tokens(engine: Engine, question: Prompt) -> int:
    return len(engine.tokenizer.encode_prompt(question.request, raw=False))


def _progress(found: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> str:
    """Return how much more the references cost in each way so far."""
    lines = []
    for name, answers in found.items():
        full = answers["full"]
        if full:
            more = {
                way: sum(a["nll"] - b["nll"] for a, b in zip(own, full, strict=True)) / len(full)
                for way, own in answers.items()
            }
            lines.append(f"{name} {len(full)}: " + ", ".join(f"{way} {value:+.3f}" for way, value in more.items()))
    return "; ".join(lines)


def unlike_before(before: Mapping[str, Any], now: Mapping[str, Any], ways: Sequence[str]) -> list[str]:
    """Return what is not as in the file that is to be gone on with: its caption speaks for all of its questions."""
    facts = {name: (before["provenance"].get(name), now["provenance"].get(name)) for name in ("cpu", "commit")}
    facts |= {
        name: (before["setting"].get(name), now["setting"].get(name))
        for name in ("model", "kernels", "half", "same_documents")
    }
    unlike = [name for name, (then, today) in facts.items() if then != today]
    sets = before["setting"].get("sets", {})
    unlike += [f"set {name}" for name, each in now["setting"]["sets"].items() if sets.get(name, each) != each]
    return unlike + ["--way"] * any(set(answers) != set(ways) for answers in before["answers"].values())


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--set", action="append", required=True, dest="sets", type=QuestionSet.of)
    parser.add_argument("--way", action="append", default=[], dest="ways")
    parser.add_argument("--half", choices=("A", "B"), default="B")
    parser.add_argument("--minutes", type=float, default=10.0, help="no question is begun later")
    parser.add_argument("--same-documents", action="store_true", help="several questions about one lot of documents")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    engine = vivace.load(asked.model, prefix_cache=PREFIX_BYTES if asked.same_documents else None)
    ways = {name: way_of(name) for name in ("full", *asked.ways)}
    before = json.loads(asked.json.read_text(encoding="utf-8")) if asked.json and asked.json.exists() else {}
    found = before.get("answers", {})
    setting = {
        "model": Path(asked.model).name,
        "kernels": engine.kernels.name,
        "half": asked.half,
        "sets": {each.name: [each.task, each.source.name, each.documents] for each in asked.sets},
        "same_documents": asked.same_documents,
        "others_cpu_share": None,
    }
    written = {"provenance": asdict(provenance(torch.device("cpu"))), "setting": setting, "answers": found}
    if before and (unlike := unlike_before(before, written, list(ways))):
        parser.error(f"{asked.json} is of another {', '.join(unlike)}: give another --json, or remove it")
    setting["sets"] = before.get("setting", {}).get("sets", {}) | setting["sets"]

    def save() -> None:
        """Write what there is, so that a run that is killed loses one question."""
        if asked.json is not None:
            asked.json.parent.mkdir(parents=True, exist_ok=True)
            beside = asked.json.with_suffix(".part")
            beside.write_text(json.dumps(written) + "\n", encoding="utf-8")
            beside.replace(asked.json)

    short = Prompt("Say a word about rain. " * 60, ("rain",), "multidoc")
    for way in ways.values():
        ask(engine, short, way)  # the first reading is not timed
    with watched_others() as others:
        until = time.monotonic() + 60 * asked.minutes
        measure(engine, asked.sets, ways, asked.half, until, found, same_documents=asked.same_documents, save=save)
    earlier = before["setting"]["others_cpu_share"] if before else 0.0
    known = earlier is not None and others.cpu_share is not None
    setting["others_cpu_share"] = max(earlier, others.cpu_share) if known else None  # of the busiest of all runs
    save()


if __name__ == "__main__":
    main()
