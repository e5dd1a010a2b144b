"""What blocks of keys and values cost and save: speed beside an older tree, memory of a large server, and chats.

`python -m benchmarks.blocks speed OLD_TREE` decodes with this tree and with another one (built in place) by turns, one
process each, and writes medians of the ratios of their times. `memory` fills a session whose keys and values have the
shape of an 8B model's with 16 texts of 300 tokens and reads what the kernel counts; `served` has 16 clients ask `vivace
serve` for as many at once. `chat` times the first token of a turn behind a long history, with and without what is kept.
`entries` compares texts and bytes of `--kv int8` with those of bfloat16.

Each prints what it found, and writes it where ``--json FILE`` says, before its name.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx2
import torch

from benchmarks.result_files import write_report
from vivace.core.config import ModelConfig
from vivace.core.cpu.backend import pack_decoder
from vivace.core.model import Decoder
from vivace.decode.plain import NoDrafts
from vivace.decode.request import Request
from vivace.decode.session import Session
from vivace.kernels.choice import choose

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 7
"""Turns of each tree; the median of their ratios counts."""
NEW_TOKENS = 48
SHAPE = {
    **{"vocab_size": 2000, "width": 576, "num_layers": 6, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    **{"ffn_width": 1536, "max_positions": 8192},
}
"""Layers of SmolLM2-135M with random weights, six of its thirty where nothing else is said."""
LARGE = {
    **{"vocab_size": 64, "width": 64, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    **{"ffn_width": 64, "max_positions": 8192},
}
"""Keys and values of Llama 3's 8B, with everything else small."""
ENTRY_BYTES = 2 * LARGE["num_layers"] * LARGE["num_kv_heads"] * LARGE["head_dim"] * 2
"""Of keys and values of a token in bfloat16."""


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    commands = parser.add_subparsers(dest="command", required=True)
    speed = commands.add_parser("speed")
    speed.add_argument("old", type=Path, help="another tree with its kernels built")
    speed.add_argument("--rounds", type=int, default=ROUNDS)
    commands.add_parser("memory")
    commands.add_parser("served")
    commands.add_parser("chat").add_argument("--history", type=int, default=3000)
    entries = commands.add_parser("entries")
    entries.add_argument("--limit", type=int, default=60)
    commands.add_parser("times")
    arguments = parser.parse_args()
    if arguments.command == "times":
        print(json.dumps(step_times()))
        return
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "speed": lambda: compare_speed(arguments.old, arguments.rounds),
        "memory": large_memory,
        "served": served_memory,
        "chat": lambda: chat_times(arguments.history),
        "entries": lambda: compare_entries(arguments.limit),
    }
    from vivace.evaluate.provenance import provenance

    found = {"provenance": asdict(provenance(torch.device("cpu"))), **measures[arguments.command]()}
    if arguments.json is not None:
        write_report(arguments.json, found)
    print(json.dumps({key: value for key, value in found.items() if key != "provenance"}, indent=1))


def random_model(shape: dict[str, Any]) -> Decoder:
    """Return a decoder with random weights, packed for the fastest kernels."""
    torch.manual_seed(0)
    model = Decoder(ModelConfig(**shape))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0) if "norm" in name else weight.normal_(std=weight.shape[-1] ** -0.5)
    model = model.to(torch.bfloat16).requires_grad_(False).eval()
    pack_decoder(model, choose("auto").body)
    return model


def requests(count: int, num_prompt: int, num_new: int, vocab: int) -> list[Request]:
    """Return requests with random prompts."""
    generator = torch.Generator().manual_seed(count)
    prompts = torch.randint(0, vocab, (count, num_prompt), generator=generator).tolist()
    return [Request(tuple(prompt), num_new, NoDrafts()) for prompt in prompts]


# Speed, beside another tree


def step_times() -> dict[str, float]:
    """Return milliseconds of a decoding step of one row and of eight, behind 100 entries and 3,000."""
    model, found = random_model(SHAPE), {}
    for rows in (1, 8):
        for entries in (100, 3000):
            session = Session(model, num_slots=rows, capacity=entries + NEW_TOKENS + 8)
            for request in requests(rows, entries, NEW_TOKENS, SHAPE["vocab_size"]):
                session.admit(request)
            times: list[float] = []
            while not session.is_idle:
                started = time.perf_counter()
                emitted = session.step()
                if len(emitted) == rows:
                    times.append(time.perf_counter() - started)
            found[f"{rows} rows, {entries} entries"] = 1000 * statistics.median(times[4:])
    return found


def compare_speed(old: Path, rounds: int) -> dict[str, Any]:
    """Run both trees by turns; return times and the medians of new over old."""
    trees = {"old": old.resolve(), "new": ROOT}
    times: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
    for turn in range(rounds):
        for name in ("old", "new") if turn % 2 else ("new", "old"):
            environment = {**os.environ, "PYTHONPATH": f"{trees[name]}/src:{trees[name]}"}
            command = [sys.executable, str(Path(__file__).resolve()), "times"]
            done = subprocess.run(
                command, env=environment, cwd=trees[name], stdout=subprocess.PIPE, text=True, check=True
            )
            times[name].append(json.loads(done.stdout.splitlines()[-1]))
    cases = list(times["new"][0])
    ratios = {
        case: statistics.median(new[case] / old[case] for new, old in zip(times["new"], times["old"], strict=True))
        for case in cases
    }
    medians = {
        name: {case: statistics.median(t[case] for t in turns) for case in cases} for name, turns in times.items()
    }
    return {"rounds": rounds, "milliseconds": medians, "new_over_old": ratios}


# Memory of a large model's server


def resident_bytes(process: int | str = "self") -> int:
    """Return the anonymous memory of a process, as the kernel counts it."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def large_memory() -> dict[str, Any]:
    """Fill 16 slots of 8,192 entries with 300 tokens each."""
    model = random_model(LARGE)
    warm = Session(model, num_slots=1, capacity=64)
    warm.admit(requests(1, 40, 2, LARGE["vocab_size"])[0])
    list(warm.drain())
    before = resident_bytes()
    session = Session(model, num_slots=16, capacity=8192)
    started = resident_bytes() - before
    for request in requests(16, 280, 20, LARGE["vocab_size"]):
        session.admit(request)
    most = entries = 0
    while not session.is_idle:
        session.step()
        stored = sum(session.cache.lengths)
        if stored >= entries:
            most, entries = resident_bytes() - before, stored
    needed = entries * ENTRY_BYTES
    left = resident_bytes() - before
    return {"texts": 16, "entries": entries, "bytes_at_start": started, "bytes_needed": needed, "bytes_taken": most,
            "taken_over_needed": most / needed, "bytes_left_behind": left}  # fmt: skip


def served_memory() -> dict[str, Any]:
    """Ask a server for 16 texts of 300 tokens at once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.server_process import server_process

    config = LlamaConfig(
        vocab_size=LARGE["vocab_size"],
        hidden_size=LARGE["width"],
        num_hidden_layers=LARGE["num_layers"],
        num_attention_heads=LARGE["num_heads"],
        num_key_value_heads=LARGE["num_kv_heads"],
        head_dim=LARGE["head_dim"],
        intermediate_size=LARGE["ffn_width"],
        max_position_embeddings=LARGE["max_positions"],
    )
    prompts = [list(request.tokens) for request in requests(17, 40, 260, LARGE["vocab_size"])]
    with tempfile.TemporaryDirectory() as place:
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(f"{place}/model")
        words = ("--model", f"{place}/model", "--method", "plain", "--max-num-seqs", "16", "--prefix-cache", "0")
        with server_process(*words, log=Path(place) / "log") as (address, process):

            def ask(place: int) -> int:
                body = {"prompt": prompts[place], "max_tokens": 260, "ignore_eos": True, "return_token_ids": True}
                reply = httpx2.post(f"{address}/v1/completions", json=body, timeout=300).raise_for_status().json()
                return len(prompts[place]) + len(reply["choices"][0]["token_ids"])

            ask(16)
            before = most = resident_bytes(process.pid)
            with ThreadPoolExecutor(16) as pool:
                answers = [pool.submit(ask, place) for place in range(16)]
                while not all(answer.done() for answer in answers):
                    most = max(most, resident_bytes(process.pid))
                    time.sleep(0.005)
            entries = sum(answer.result() - 1 for answer in answers)  # the last token of each is never stored
    needed = entries * ENTRY_BYTES
    return {"clients": 16, "entries": entries, "bytes_needed": needed, "bytes_taken": most - before,
            "taken_over_needed": (most - before) / needed}  # fmt: skip


# Chats


def chat_times(history: int) -> dict[str, Any]:
    """Return seconds to the first token of a turn behind a history, when the history is kept and when it is not."""
    from vivace.decode.prefix import STRETCH, PrefixCache

    model = random_model({**SHAPE, "num_layers": 30})
    prefix = PrefixCache(model.config, max_bytes=sys.maxsize, chunk=STRETCH, by_row=True)
    [first] = requests(1, history - 200, 200, SHAPE["vocab_size"])
    found: dict[str, list[float]] = {"kept": [], "anew": []}
    read = {}
    session = Session(model, num_slots=1, capacity=history + 300)
    session.admit(replace(first, prefix=prefix.salted()))
    answer = [token for emitted in session.drain() for token in emitted.tokens]
    for turn in range(3):
        ids: dict[str, tuple[int, ...]] = {}
        message = torch.randint(0, 2000, (20,), generator=torch.Generator().manual_seed(turn)).tolist()
        for name, uses in (("anew", False), ("kept", True)):
            prompt = (*first.tokens, *answer, *message)
            session = Session(model, num_slots=1, capacity=history + 300)
            session.admit(replace(first, tokens=prompt, max_new_tokens=8, prefix=prefix.salted() if uses else None))
            emitted = list(session.drain())
            found[name].append(emitted[-1].stats.first_token_s)
            read[name] = emitted[-1].stats.num_prompt_tokens - emitted[-1].stats.num_cached_tokens
            ids[name] = tuple(token for each in emitted for token in each.tokens)
        assert ids["kept"] == ids["anew"]
    seconds = {name: statistics.median(times) for name, times in found.items()}
    return {"layers": 30, "history": history, "tokens_read": read, "first_token_s": seconds,
            "kept_over_anew": seconds["kept"] / seconds["anew"]}  # fmt: skip


# Entries in eight bits


def compare_entries(limit: int) -> dict[str, Any]:
    """Return bytes, speed and quality of the model that ships with entries as its weights and in eight bits.

    Packaged prompts of e2e have no references; their texts are compared with those of whole entries.
    """
    import sacrebleu

    import vivace
    from vivace.prompts.records import packaged_prompts

    found: dict[str, Any] = {}
    for name in ("e2e", "sql"):
        rows = packaged_prompts(name)[:limit]
        texts: dict[str, list[str]] = {}
        result: dict[str, Any] = {}
        for kv in ("same", "int8"):
            engine = vivace.load(kv=kv)
            answers = engine.generate([row.request for row in rows], method="plain", batch_size=8, max_new_tokens=64)
            texts[kv] = [answer.text.strip() for answer in answers]
            right = [row.references or (text,) for row, text in zip(rows, texts["same"], strict=True)]
            store = engine.model.blocks
            result[kv] = {
                "bytes_per_entry": store.block_bytes / store.size,
                "perplexity": _perplexity(engine, rows, [texts_of_row[0] for texts_of_row in right]),
                "tokens_per_s": statistics.median(answer.stats.tokens_per_s for answer in answers),
                "bleu": sacrebleu.corpus_bleu(texts[kv], [[one[0] for one in right]]).score,
                "exact_match": statistics.mean(text in one for text, one in zip(texts[kv], right, strict=True)),
            }
        same = sum(a == b for a, b in zip(texts["same"], texts["int8"], strict=True))
        has_references = any(row.references for row in rows)
        compared = "references" if has_references else "texts with whole entries"
        found[name] = {**result, "compared_with": compared, "texts": len(rows), "texts_that_agree": same}
    return found


def _perplexity(engine: Any, rows: Sequence[Any], right: Sequence[str]) -> float:
    """Return the perplexity of answers, read through the cache row by row."""
    from vivace.core.seams import Draft
    from vivace.core.step import Step

    total, count = 0.0, 0
    for row, text in zip(rows, right, strict=True):
        prompt = engine.tokenizer.encode_prompt(row.request)
        answer = [*engine.tokenizer.encode(text, special=False), *engine.tokenizer.eos_ids[:1]]
        tokens = [*prompt, *answer]
        cache = engine.model.new_cache(1, len(tokens))
        with torch.inference_mode():
            step = Step.of(Draft.committed_only({0: tokens[:-1]}), cache)
            hidden = engine.model.run(engine.model.embed(torch.tensor(tokens[:-1]), step), step)
            logprobs = torch.log_softmax(engine.model.head(hidden[len(prompt) - 1 :]), -1)
        total -= float(logprobs.gather(1, torch.tensor(answer)[:, None]).sum())
        count += len(answer)
    return math.exp(total / count)


if __name__ == "__main__":
    main()
