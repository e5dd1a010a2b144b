"""Compare what a checkpoint says here with what it says in transformers: the same tokens, and the same perplexity.

    python -m benchmarks.truth --model DIR --prompts e2e --limit 20 --text FILE --out truth.json

In float32 both write greedy answers to the same prompts. Where two differ, the first place that differs is shown with
its gap: how much larger the logit of transformers' token is than that of ours, by transformers. Rounding explains gaps
of the size of 1e-4; a larger one is an error. In bfloat16 both round, each in its own way, so both are compared with
float32 and counted side by side.

Perplexity is ``exp`` of the mean of ``-ln p(token | tokens before it)`` over pieces of the text of ``--window`` tokens,
which begin without context. The first token of a piece is not counted.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import vivace
from benchmarks.result_files import write_report
from vivace.cli.prompting import read_prompts
from vivace.evaluate.provenance import provenance

Answers = list[tuple[int, ...]]


@dataclass(frozen=True)
class Difference:
    """The first place at which two answers to a prompt differ."""

    prompt: int
    """Number of the prompt, from 0."""
    place: int
    """Number of the token in the answer, from 0."""
    ours: int | None
    """Token of ours; None if our answer ends before."""
    theirs: int | None
    gap: float | None
    """Logit of their token minus that of ours, by transformers; None if an answer ends."""


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description="Compare a checkpoint here with transformers.")
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--prompts", default="e2e", help="a .jsonl file, or a packaged set")
    parser.add_argument("--limit", type=int, default=20, help="number of prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--text", type=Path, help="text file for the perplexity")
    parser.add_argument("--window", type=int, default=512, help="tokens of a piece of the text")
    parser.add_argument("--pieces", type=int, default=8, help="number of pieces")
    parser.add_argument("--kernels", default="auto", help="of both dtypes")
    parser.add_argument("--float32-only", action="store_true", help="leave out the answers in bfloat16")
    parser.add_argument("--out", type=Path)
    found = compare(**{name: value for name, value in vars(parser.parse_args()).items() if name != "out"})
    print_findings(found)
    if out := parser.parse_args().out:
        write_report(out, found)


@torch.inference_mode()
def compare(
    *,
    model: str,
    prompts: str,
    limit: int,
    max_new_tokens: int,
    text: Path | None,
    window: int,
    pieces: int,
    kernels: str,
    float32_only: bool = False,
) -> dict[str, Any]:
    """Return the numbers that are printed."""
    engine = vivace.load(model, dtype="float32", kernels=kernels)
    theirs = AutoModelForCausalLM.from_pretrained(engine.folder, dtype=torch.float32).eval()
    encoded = [engine.tokenizer.encode_prompt(row.request) for row in read_prompts(prompts, limit)]
    exact = our_answers(engine, encoded, max_new_tokens)
    expected = their_answers(theirs, encoded, max_new_tokens, engine.tokenizer.eos_ids)
    found: dict[str, Any] = {
        "provenance": asdict(provenance(engine.model.device)),
        "kernels": engine.kernels.name,
        "model": engine.folder.name,
        "num_prompts": len(encoded),
        "longest_prompt": max(map(len, encoded)),
        "max_new_tokens": max_new_tokens,
        "float32": [asdict(one) for one in differences(encoded, exact, expected, theirs)],
    }
    if text is not None:
        ids = engine.tokenizer.encode(text.read_text(encoding="utf-8"))
        batch = [ids[first : first + window] for first in range(0, len(ids) - window + 1, window)][:pieces]
        found["perplexity"] = {
            "ours": perplexity(batch, lambda piece: engine.logits(piece[None])[0]),
            "theirs": perplexity(batch, lambda piece: theirs(piece[None]).logits[0]),
            "num_tokens": sum(len(piece) - 1 for piece in batch),
        }
    if float32_only:
        return found
    rounded = vivace.load(model, dtype="bfloat16", kernels=kernels)
    ours_rounded = our_answers(rounded, encoded, max_new_tokens)
    theirs_rounded = their_answers(theirs.bfloat16(), encoded, max_new_tokens, engine.tokenizer.eos_ids)
    found["bfloat16"] = {
        "kernels": rounded.kernels.name,
        "ours_unlike_float32": sum(a != b for a, b in zip(ours_rounded, expected, strict=True)),
        "theirs_unlike_float32": sum(a != b for a, b in zip(theirs_rounded, expected, strict=True)),
    }
    return found


def our_answers(engine: vivace.Engine, prompts: Sequence[list[int]], max_new_tokens: int) -> Answers:
    """Return greedy answers of vivace."""
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "repetition_penalty": 1.0, "method": "plain"}
    return [result.token_ids for result in engine.generate(prompts, **settings)]


def their_answers(model: Any, prompts: Sequence[list[int]], max_new_tokens: int, eos_ids: Sequence[int]) -> Answers:
    """Return greedy answers of transformers, one prompt at a time, by argmax alone."""
    answers = []
    for prompt in prompts:
        out = model(torch.tensor([prompt]), use_cache=True)
        answer = [int(out.logits[0, -1].argmax())]
        while len(answer) < max_new_tokens and answer[-1] not in eos_ids:
            out = model(torch.tensor([answer[-1:]]), past_key_values=out.past_key_values, use_cache=True)
            answer.append(int(out.logits[0, -1].argmax()))
        answers.append(tuple(answer))
    return answers


def differences(prompts: Sequence[list[int]], ours: Answers, theirs: Answers, model: Any) -> list[Difference]:
    """Return the first place of every pair of answers that differ, with the gap between their logits."""
    found = []
    for number, (prompt, mine, other) in enumerate(zip(prompts, ours, theirs, strict=True)):
        if mine == other:
            continue
        common = min(len(mine), len(other))
        place = next((at for at in range(common) if mine[at] != other[at]), common)
        if place == common:
            ended = [answer[place] if place < len(answer) else None for answer in (mine, other)]
            found.append(Difference(number, place, *ended, None))
            continue
        logits = model(torch.tensor([[*prompt, *other[:place]]])).logits[0, -1]
        gap = float(logits[other[place]] - logits[mine[place]])
        found.append(Difference(number, place, mine[place], other[place], gap))
    return found


def perplexity(batch: Sequence[Sequence[int]], logits: Callable[[Tensor], Tensor]) -> float:
    """Return the perplexity of pieces of text under a model that gives the logits of one, (T,) -> (T, V)."""
    losses = []
    for piece in batch:
        ids = torch.tensor(piece)
        logs = logits(ids)[:-1].float().log_softmax(-1)
        losses.append(-logs.gather(1, ids[1:, None]).double().squeeze(1))
    return math.exp(float(torch.cat(losses).mean()))


def print_findings(found: dict[str, Any]) -> None:
    """Print the comparison."""
    unlike = found["float32"]
    print(f"float32: {found['num_prompts'] - len(unlike)} of {found['num_prompts']} greedy answers equal transformers'")
    for one in unlike:
        gap = "one answer ends" if one["gap"] is None else f"gap {one['gap']:.2e}"
        print(f"  prompt {one['prompt']}, token {one['place']}: {one['ours']} / {one['theirs']}, {gap}")
    if "perplexity" in found:
        ours, theirs = found["perplexity"]["ours"], found["perplexity"]["theirs"]
        print(f"perplexity of {found['perplexity']['num_tokens']} tokens: {ours:.5f}, transformers {theirs:.5f}")
    if "bfloat16" not in found:
        return
    rounded = found["bfloat16"]
    print(
        f"bfloat16, answers unlike transformers' in float32: {rounded['ours_unlike_float32']} of ours "
        f"({rounded['kernels']} kernels), {rounded['theirs_unlike_float32']} of transformers'"
    )


if __name__ == "__main__":
    main()
