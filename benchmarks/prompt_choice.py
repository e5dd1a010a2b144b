"""What choosing a soft prompt costs: ``python -m benchmarks.prompt_choice MODEL --members 9 --entries 100 --json F``.

Members are random, since what they say does not change how long they take. Prompts of several lengths, of random tokens
and new in every round, are read in four ways that take turns: without a soft prompt, behind a member that the request
names, behind the one that the first layer chooses, and as a longer prompt of as many tokens as member and prompt have
together. Reported are the times to the first token, from the call on, and the speed of decoding after it.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

import vivace
from benchmarks import captions
from benchmarks.result_files import tables_of, write_report
from tools.blocks import table
from vivace.adapters.pool.pool import AUTO, NONE
from vivace.checkpoint.load import load_config
from vivace.checkpoint.soft_prompt import save_soft_prompt
from vivace.checkpoint.tokenizer import load_tokenizer
from vivace.engine import Engine
from vivace.evaluate.others import watched_others
from vivace.evaluate.provenance import provenance

ALONE, NAMED, CHOSEN, LONGER = "no soft prompt", "named", "chosen", "a longer prompt"


def make_pool(model: Path, folder: Path, members: int, entries: int) -> list[str]:
    """Write a pool of random members; return their names."""
    width, tokenizer = load_config(model).width, load_tokenizer(model)
    names, generator = [f"{entries}-{seed}" for seed in range(members)], torch.Generator().manual_seed(0)
    for name in names:
        drawn = torch.randn(entries, width, generator=generator) / width**0.5
        save_soft_prompt(folder / name, drawn, tokenizer, model.name)
    return names


def timed(engine: Engine, ids: Sequence[int], member: str, tokens: int) -> tuple[float, float]:
    """Return the seconds to the first token of a prompt, and the tokens per second after it."""
    settings: dict[str, Any] = {"method": "plain", "ignore_eos": True, "do_sample": False, "soft_prompt": member}
    begun = time.perf_counter()
    engine.generate([list(ids)], max_new_tokens=1, **settings)
    first_s = time.perf_counter() - begun
    stats = engine.generate([list(ids)], max_new_tokens=tokens, **settings)[0].stats
    return first_s, (stats.num_tokens - stats.num_first_tokens) / stats.decode_s


def measure(
    model: Path, *, members: int, entries: int, lengths: Sequence[int], tokens: int, repeats: int
) -> dict[str, Any]:
    """Return times and speeds of all ways, a list for each prompt length."""
    firsts: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    speeds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as folder, watched_others() as others:
        names = make_pool(model, Path(folder), members, entries)
        engine = vivace.load(model, dtype="bfloat16", prompt_pool=folder)
        draws, num_words = random.Random(0), engine.model.config.vocab_size
        for turn in range(repeats + 1):
            for length in lengths:
                ids = [draws.randrange(num_words) for _ in range(length)]
                more = [draws.randrange(num_words) for _ in range(entries)]
                ways = {ALONE: (ids, NONE), NAMED: (ids, names[0]), CHOSEN: (ids, AUTO), LONGER: (more + ids, NONE)}
                for way in draws.sample(list(ways), len(ways)):
                    first_s, speed = timed(engine, *ways[way], tokens)
                    if turn > 0:  # the first round warms up
                        firsts[way][length].append(first_s)
                        speeds[way][length].append(speed)
    return {
        "provenance": asdict(provenance(torch.device("cpu"))),
        "kernels": engine.kernels.name,
        "prompt_choice": {
            "model": model.name,
            "members": members,
            "entries": entries,
            "new_tokens": tokens,
            "repeats": repeats,
            "first_s": firsts,
            "tokens_per_s": speeds,
            "cpu_share_of_others": others.cpu_share,
        },
    }


def tables(folder: Path) -> str:
    """Return the table of every result file of a folder."""
    return tables_of(folder, _tables)


def _tables(written: Mapping[str, Any]) -> list[str]:
    p = written["prompt_choice"]
    caption = (
        f"**{p['model']}**, bfloat16, {p['members']} members of {p['entries']} entries; seconds to the first token, "
        f"medians of {p['repeats']} rounds; ratios, also of the speed of the {p['new_tokens']} tokens that follow, are "
        "of the same round, with the lowest and the highest. "
        f"{captions.machine(written['provenance'], written['kernels'])}."
    )
    rows = []
    for length in p["first_s"][ALONE]:
        first = {way: median(by_length[length]) for way, by_length in p["first_s"].items()}
        shown = [f"{first[way]:.3f}" for way in (ALONE, LONGER, NAMED, CHOSEN)]
        more = _paired(p["first_s"], length, CHOSEN, NAMED)
        fast = [_paired(p["tokens_per_s"], length, CHOSEN, way) for way in (NAMED, LONGER)]
        times = [f"{median(each):.2f}x ({min(each):.2f} to {max(each):.2f})" for each in fast]
        rows.append((f"{int(length):,}", *shown, _more(more), *times))
    heads = ("tokens", *(f"{way}, s" for way in (ALONE, LONGER, NAMED, CHOSEN)))
    beside = ("chosen beside named", "decoding beside named", "beside the longer prompt")
    return [caption, table((*heads, *beside), rows)]


def _paired(found: Mapping[str, Mapping[str, Sequence[float]]], length: str, one: str, other: str) -> list[float]:
    """Return the ratio of two ways in each round."""
    return [a / b for a, b in zip(found[one][length], found[other][length], strict=True)]


def _more(ratios: Sequence[float]) -> str:
    return f"{median(ratios) - 1:+.1%} ({min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%})"


def main() -> None:
    """Measure and write a result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--members", type=int, default=9)
    parser.add_argument("--entries", type=int, default=100)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, required=True)
    given = vars(parser.parse_args())
    target = given.pop("json")
    report = measure(given.pop("model"), **given)
    write_report(target, report)
    print("\n\n".join(_tables(json.loads(target.read_text(encoding="utf-8")))))


if __name__ == "__main__":
    main()
