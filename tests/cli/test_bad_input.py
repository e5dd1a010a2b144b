"""What a user can get wrong, command by command, on real files: one line, a status, and nothing lost or left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.cli.places import Cli, files, process
from vivace.errors import UsageError, VivaceError

USAGE = UsageError.exit_code
FAILED = VivaceError.exit_code
LONG = "oak " * 400
GENERATE = ("generate", "Hello", "--model", "tiny")
WRONG: Mapping[str, tuple[Sequence[str], int, str]] = {
    "missing checkpoint": (
        ("generate", "Hi", "--model", "nowhere"),
        FAILED,
        "directory nowhere; give a folder, a .gguf",
    ),
    "a folder for a checkpoint": (
        ("generate", "Hi", "--model", "begun"),
        FAILED,
        "begun has no config.json; a checkpoint is a directory with config.json and safetensors weights",
    ),
    "a folder for an adapter": (
        (*GENERATE, "--adapter", "begun"),
        FAILED,
        "begun has no config.json; an adapter is a folder that vivace train wrote, or a LoRA of PEFT's",
    ),
    "a file for a checkpoint": (("generate", "Hi", "--model", "rows.jsonl"), FAILED, "is a file; a checkpoint is a"),
    "a configuration without weights": (("generate", "Hi", "--model", "config-only"), FAILED, "no model.safetensors"),
    "half a configuration": (("generate", "Hi", "--model", "half-json"), FAILED, "not readable JSON"),
    "truncated weights": (("generate", "Hi", "--model", "truncated"), FAILED, "is truncated or not safetensors"),
    "missing shard": (("generate", "Hi", "--model", "no-shard"), FAILED, "model-00001-of-00002.safetensors"),
    "no tokenizer": (("generate", "Hi", "--model", "no-tokenizer"), USAGE, "has no tokenizer"),
    "check, missing checkpoint": (("check", "nowhere"), FAILED, "no checkpoint directory nowhere"),
    "check, two models": (
        ("check", "tiny", "--model", "other"),
        USAGE,
        "the model is given twice, as 'tiny' and as --m",
    ),
    "doctor, two models": (
        ("doctor", "tiny", "--model", "other"),
        USAGE,
        "the model is given twice, as 'tiny' and as --m",
    ),
    "convert, truncated weights": (("convert", "m.gguf", "--model", "truncated"), FAILED, "is truncated or not"),
    "convert, another format": (("convert", "m.bin", "--model", "tiny"), USAGE, "does not end in .gguf"),
    "inspect, truncated weights": (("inspect", "truncated"), FAILED, "is truncated or not safetensors"),
    "widen, truncated weights": (("widen", "out", "--model", "truncated"), FAILED, "is truncated or not safetensors"),
    "bench, missing checkpoint": (("bench", "decode", "--model", "nowhere"), FAILED, "no checkpoint directory nowhere"),
    "demo, missing checkpoint": (("demo", "--model", "nowhere"), FAILED, "no checkpoint directory nowhere"),
    "chat, missing checkpoint": (("chat", "--model", "nowhere"), FAILED, "no checkpoint directory nowhere"),
    "unknown flag": ((*GENERATE, "--metod", "plain"), USAGE, "no option --metod; did you mean --method?"),
    "unknown flag of a group": (("bench", "decode", "--repeat", "1"), USAGE, "did you mean --repeats?"),
    "unknown command": (("genrate",), USAGE, "Did you mean 'generate'?"),
    "prompt beyond the context": (("generate", LONG, "--model", "tiny"), USAGE, "the context of this model holds 256"),
    "answer beyond the context": ((*GENERATE, "--max-new-tokens", "300"), USAGE, "the context holds 256"),
    "empty prompt": (("generate", "", "--model", "tiny"), USAGE, "the prompt is empty"),
    "empty stdin": (("generate", "-", "--model", "tiny"), USAGE, "the prompt is empty"),
    "bytes that are no text": (
        ("generate", "bad \udcff byte", "--model", "tiny"),
        USAGE,
        r"the text is not valid Unicode: there is '\udcff' after '<|user|>bad '",
    ),
    "temperature below zero": ((*GENERATE, "--temperature", "-0.5"), USAGE, "temperature must be >= 0, found -0.5"),
    "temperature that is no number": ((*GENERATE, "--temperature", "nan"), USAGE, "temperature must be >= 0"),
    "top-p beyond one": ((*GENERATE, "--top-p", "1.5"), USAGE, "top_p must be in (0, 1], found 1.5"),
    "a seed beyond every generator": (
        (*GENERATE, "--do-sample", "--seed", "99999999999999999999999"),
        USAGE,
        "seed must be at least -2**63 and below 2**64, found 99999999999999999999999",
    ),
    "no new tokens": ((*GENERATE, "--max-new-tokens", "0"), USAGE, "max_new_tokens must be at least 1, found 0"),
    "empty stop string": ((*GENERATE, "--stop-strings", ""), USAGE, "a stop string must not be empty"),
    "mixture without routers": ((*GENERATE, "--method", "mod"), FAILED, "vivace train mod --model"),
    "unknown method": ((*GENERATE, "--method", "multirat"), USAGE, "did you mean 'multirate'?"),
    "method without its adapter": ((*GENERATE, "--method", "multirate"), FAILED, "vivace train multirate --model"),
    "method without its model": ((*GENERATE, "--method", "draft"), FAILED, "--draft-model"),
    "adapter of another base": ((*GENERATE, "--adapter", "of-other"), FAILED, "was trained on base"),
    "unused adapter": (
        (*GENERATE, "--adapter", "adapter", "--method", "plain"),
        USAGE,
        "--adapter has no effect on plain",
    ),
    "unused draft model": (
        ("check", "tiny", "--draft-model", "tiny", "--methods", "lookup"),
        USAGE,
        "--draft-model has no effect on lookup",
    ),
    "adapter that is not there": ((*GENERATE, "--adapter", "none"), FAILED, "no adapter directory none"),
    "adapter that is a checkpoint": ((*GENERATE, "--adapter", "other"), FAILED, "not an adapter's configuration"),
    "adapter of a method to come": (
        (*GENERATE, "--adapter", "nova"),
        USAGE,
        "an adapter for 'nova'; this version uses adapters for calm, deed",
    ),
    "two adapters for a method": (
        (*GENERATE, "--adapter", "a=adapter", "--adapter", "b=adapter"),
        USAGE,
        "are both adapters for multirate",
    ),
    "other tokenizer": ((*GENERATE, "--draft-model", "respelt"), FAILED, "the tokenizers differ in"),
    "missing draft model": ((*GENERATE, "--draft-model", "nowhere"), FAILED, "no checkpoint directory nowhere"),
    "unknown device": ((*GENERATE, "--device", "tpu"), USAGE, "there is no device 'tpu'"),
    "unknown dtype": ((*GENERATE, "--dtype", "int8"), USAGE, "weights cannot be 'int8'"),
    "unknown kernels": (
        (*GENERATE, "--kernels", "fast"),
        USAGE,
        "kernels must be auto, torch, avx2, avx512, amx or graphs, found 'fast'",
    ),
    "bench of a prompt beyond the context": (
        ("bench", "prefill", "--model", "tiny", "--lengths", "100,300"),
        USAGE,
        "a prompt of 300 tokens; this model can be measured with 2 to 254, and 2 behind them",
    ),
    "bench of an answer beyond the context": (
        ("bench", "prefill", "--model", "tiny", "--lengths", "254", "--new-tokens", "20"),
        USAGE,
        "a prompt of 254 tokens; this model can be measured with 2 to 236, and 20 behind them",
    ),
    "bench of no lengths": (
        ("bench", "prefill", "--model", "tiny", "--lengths", "1m"),
        USAGE,
        "--lengths has '1m'; write numbers from 1 on with commas, such as 512,2k",
    ),
    "bench without a full reading": (
        ("bench", "prefill", "--model", "tiny", "--lengths", "100", "--prefills", "lazy"),
        USAGE,
        "full is the baseline of every figure; add it",
    ),
    "unknown prefill": ((*GENERATE, "--prefill", "lasy"), USAGE, "prefill is 'lasy'; did you mean 'lazy'?"),
    "a schedule for a full reading": ((*GENERATE, "--keep", "1:0.5"), USAGE, "keep has no effect on prefill full"),
    "a length for a full reading": (
        (*GENERATE, "--min-prompt", "9"),
        USAGE,
        "min_prompt has no effect on prefill full",
    ),
    "a share above one": (
        (*GENERATE, "--prefill", "lazy", "--keep", "1:1.5"),
        USAGE,
        "keep has the share 1.5 behind layer 1; it must be in (0, 1]",
    ),
    "a layer beyond the model": (
        (*GENERATE, "--prefill", "lazy", "--keep", "2:0.5"),
        USAGE,
        "keep has layer 2; this way of reading prunes behind layer 1 only",
    ),
    "a lossy method on a pruned prompt": (
        (*GENERATE, "--prefill", "lazy", "--method", "skipdecode"),
        USAGE,
        "method skipdecode skips layers of its own and cannot ride along with prefill lazy",
    ),
    "a guard that is not there": ((*GENERATE, "--guard", "none"), FAILED, "there is no guard none"),
    "a guard without rules": ((*GENERATE, "--guard", "rows.jsonl"), FAILED, "rows.jsonl is not readable JSON"),
    "material without a template": (
        (*GENERATE, "--raw", "--untrusted", "rows.jsonl"),
        USAGE,
        "--untrusted needs the chat template",
    ),
    "a pool that is not there": (
        (*GENERATE, "--prompt-pool", "none"),
        FAILED,
        "there is no pool of soft prompts none",
    ),
    "a soft prompt without a pool": ((*GENERATE, "--soft-prompt", "a"), USAGE, "there is no pool; give prompt_pool"),
    "a guard that learns nothing": (("train", "guard", "--model", "tiny"), USAGE, "say what to learn from"),
    "drafts over a LoRA that is none": (
        ("train", "multirate", "--model", "tiny", "--adapter", "tiny", "--data", "rows.jsonl"),
        FAILED,
        "there is no LoRA in tiny",
    ),
    "a prompt cache that is a file": (
        (*GENERATE, "--prompt-cache", "rows.jsonl"),
        USAGE,
        "prompt cache rows.jsonl is a file; name a folder",
    ),
    "a prompt cache without a name": ((*GENERATE, "--prompt-cache", ""), USAGE, "needs the name of a folder"),
    "a prompt cache below a file": ((*GENERATE, "--prompt-cache", "rows.jsonl/a"), USAGE, "cannot be made"),
    "a prompt cache to be read that is not there": (
        (*GENERATE, "--prompt-cache", "none", "--prompt-cache-ro"),
        FAILED,
        "there is no prompt cache none",
    ),
    "a prompt cache without room": (
        (*GENERATE, "--prompt-cache", "p", "--prompt-cache-bytes", "1KiB"),
        USAGE,
        "prompt_cache_bytes is 1.0 KiB, and one block takes",
    ),
    "a size that is none": (
        (*GENERATE, "--prompt-cache", "p", "--prompt-cache-bytes", "many"),
        USAGE,
        "expected a size such as 4GiB",
    ),
    "a limit of no prompt cache": (
        (*GENERATE, "--prompt-cache-bytes", "1GiB"),
        USAGE,
        "prompt_cache_bytes has no effect without prompt_cache",
    ),
    "reading no prompt cache": (
        (*GENERATE, "--prompt-cache-ro"),
        USAGE,
        "prompt_cache_ro has no effect without prompt_cache",
    ),
    "a limit of what is only read": (
        (*GENERATE, "--prompt-cache", ".", "--prompt-cache-ro", "--prompt-cache-bytes", "1GiB"),
        USAGE,
        "prompt_cache_bytes has no effect on a cache that is only read",
    ),
    "missing prompt file": (("generate", "--prompt-file", "no.jsonl", "--model", "tiny"), FAILED, "no such file"),
    "broken line of a prompt file": (
        ("generate", "--prompt-file", "broken.jsonl", "--model", "tiny"),
        USAGE,
        "broken.jsonl, line 2: not JSON",
    ),
    "misspelt key of a prompt file": (("check", "tiny", "--prompts", "misspelt.jsonl"), USAGE, "did you mean 'prompt'"),
    "missing prompts": (("bench", "decode", "--model", "tiny", "--prompts", "no.jsonl"), FAILED, "no such file"),
    "bench without its baseline": (("bench", "decode", "--model", "tiny", "--methods", "lookup"), USAGE, "add it"),
    "bench of an unknown method": (
        ("bench", "decode", "--model", "tiny", "--methods", "plain,lokup", "--limit", "1"),
        USAGE,
        "did you mean 'lookup'?",
    ),
    "bench of an unknown peer": (
        ("bench", "decode", "--model", "tiny", "--peers", "transformer", "--limit", "1"),
        USAGE,
        "did you mean 'transformers'?",
    ),
    "unknown recipe": (("train", "multrate", "--out", "out", "--data", "rows.jsonl"), FAILED, "multirate"),
    "unknown recipe key": (
        ("train", "typo.yaml", "--model", "tiny", "--out", "out", "--data", "rows.jsonl"),
        USAGE,
        "unknown key held_bak; did you mean 'held_back'?",
    ),
    "unknown key on the line": (
        ("train", "recipe.yaml", "loop.stepz=3", "--model", "tiny", "--out", "out", "--data", "rows.jsonl"),
        USAGE,
        "unknown key loop.stepz; did you mean 'steps'?",
    ),
    "recipe of another kind": (
        ("train", "recipe.yaml", "kind=moo", "--model", "tiny", "--out", "out", "--data", "rows.jsonl"),
        USAGE,
        "found 'moo'",
    ),
    "a decoder without data": (("train", "scratch.yaml", "--out", "out"), USAGE, "--data FILE"),
    "a decoder without a place": (("train", "scratch.yaml", "--data", "rows.jsonl"), USAGE, "--out DIR"),
    "a decoder's minutes": (
        ("train", "scratch.yaml", "--out", "out", "--data", "rows.jsonl", "--minutes", "3"),
        USAGE,
        "--minutes is for weights beside a model",
    ),
    "training without a place": (("train", "recipe.yaml", "--data", "rows.jsonl"), USAGE, "--out DIR"),
    "training for no time": (
        ("train", "recipe.yaml", "--model", "tiny", "--out", "out", "--data", "rows.jsonl", "--minutes", "0"),
        USAGE,
        "--minutes must be above 0, found 0",
    ),
    "training for less than a step": (
        ("train", "recipe.yaml", "--model", "tiny", "--data", "rows.jsonl", "--out", "out", "--minutes", "1e-9"),
        USAGE,
        "minutes are over after 0 steps; give more",
    ),
    "learning from another model's answers": (
        ("train", "recipe.yaml", "--model", "tiny", "--out", "begun", "own_tokens=900"),
        FAILED,
        "has answers of another model",
    ),
    "answers of another model": (
        ("train", "recipe.yaml", "--model", "tiny", "--out", "out", "--answers", "begun/run/own.jsonl"),
        FAILED,
        "begun/run/own.jsonl has answers of another model (0000000000000000, this one is ",
    ),
    "answering conversations in which nobody asks": (
        ("train", "recipe.yaml", "own_tokens=90", "--model", "tiny", "--out", "out", "--data", "unasked.jsonl"),
        USAGE,
        'unasked.jsonl, line 1: "messages" have no turn of the user: nothing to answer',
    ),
    "answering turns of a stranger": (
        ("train", "recipe.yaml", "own_tokens=90", "--model", "tiny", "--out", "out", "--data", "stranger.jsonl"),
        USAGE,
        """stranger.jsonl, line 1: "messages"[1] is of 'tool'""",
    ),
    "answers that are not there": (
        ("train", "recipe.yaml", "--model", "tiny", "--out", "out", "--answers", "none.jsonl"),
        FAILED,
        "cannot read the answers none.jsonl: No such file or directory",
    ),
    "a file of answers that has none": (
        ("train", "recipe.yaml", "--model", "tiny", "--out", "out", "--answers", "cut.jsonl"),
        USAGE,
        "cut.jsonl has no answers to learn from",
    ),
    "answers on a broken line": (
        ("train", "recipe.yaml", "--model", "tiny", "--out", "out", "--answers", "broken.jsonl"),
        FAILED,
        'broken.jsonl, line 1 has no "reference"',
    ),
    "prompts as answers": (
        ("train", "recipe.yaml", "--model", "tiny", "--out", "out", "--answers", "rows.jsonl"),
        FAILED,
        'rows.jsonl, line 1 has no "model": --answers takes what a training wrote',
    ),
    "answers beside data": (
        ("train", "recipe.yaml", "--model", "tiny", "--data", "rows.jsonl", "--answers", "begun/run/own.jsonl"),
        USAGE,
        "leave out --data, or --answers",
    ),
    "answers beside text to write": (
        ("train", "chat", "own_tokens=900", "--model", "tiny", "--answers", "begun/run/own.jsonl"),
        USAGE,
        "leave out own_tokens, or --answers",
    ),
    "answers beside answers to regenerate": (
        ("train", "recipe.yaml", "regenerate=9", "--model", "tiny", "--answers", "begun/run/own.jsonl"),
        USAGE,
        "leave out regenerate, or --answers",
    ),
    "a decoder's answers": (
        ("train", "scratch.yaml", "--out", "out", "--answers", "begun/run/own.jsonl"),
        USAGE,
        "--answers is for weights beside a model; decoder learns from --data",
    ),
    "a guard's answers": (
        ("train", "guard", "--model", "tiny", "--answers", "begun/run/own.jsonl"),
        USAGE,
        "guard learns from --data",
    ),
    "a guard of texts instead of categories": (
        ("train", "guard", "--model", "tiny", "--data", "letters.jsonl"),
        USAGE,
        "and 2 other references",
    ),
    "a dry run of a whole decoder": (
        ("train", "scratch.yaml", "--out", "out", "--data", "rows.jsonl", "--dry-run"),
        USAGE,
        "--dry-run is for weights beside a model as it is, not for a training of a whole model (decoder)",
    ),
    "a guard over the model": (
        ("train", "guard", "--model", "tiny", "--data", "letters.jsonl", "--out", "tiny"),
        USAGE,
        "tiny is the model itself; name another folder for the guard",
    ),
    "a guard with curves": (
        ("train", "guard", "--model", "tiny", "--data", "letters.jsonl", "--tensorboard", "curves"),
        USAGE,
        "--tensorboard draws the curves of trainings in steps",
    ),
    "a guard over a LoRA": (
        ("train", "guard", "--model", "tiny", "--data", "letters.jsonl", "--adapter", "x=y"),
        USAGE,
        "--adapter is for the weights of a method that drafts",
    ),
    "a dry run of a guard": (("train", "guard", "--model", "tiny", "--dry-run"), USAGE, "--dry-run is for recipes"),
    "a dry run without a model": (
        ("train", "recipe.yaml", "--model", "adapters", "--out", "out", "--dry-run"),
        FAILED,
        "adapters",
    ),
    "a model without a tokenizer that writes": (
        ("train", "recipe.yaml", "--model", "no-tokenizer", "--out", "out"),
        USAGE,
        "no prompts can be drawn from it",
    ),
    "training on a broken line": (
        ("train", "recipe.yaml", "--model", "tiny", "--out", "out", "--data", "broken.jsonl"),
        USAGE,
        "broken.jsonl, line 2: not JSON",
    ),
    "training on conversations that teach nothing": (
        ("train", "recipe.yaml", "--model", "tiny", "--out", "out", "--data", "asked.jsonl"),
        USAGE,
        'asked.jsonl, line 2: "messages" have no turn of the assistant',
    ),
    "regenerating conversations": (
        ("train", "recipe.yaml", "regenerate=9", "--model", "tiny", "--out", "out", "--data", "talk.jsonl"),
        USAGE,
        'found a row with "messages"',
    ),
    "raw conversations": (
        ("generate", "--prompt-file", "talk.jsonl", "--raw", "--model", "tiny"),
        USAGE,
        "give a text to be taken as it is",
    ),
    "training a missing base": (
        ("train", "recipe.yaml", "--model", "nowhere", "--out", "out", "--data", "rows.jsonl"),
        FAILED,
        "no checkpoint directory nowhere",
    ),
    "a gate above the model": (
        ("train", "recipe.yaml", "adapter.exit_layer=9", "--model", "tiny", "--out", "out", "--data", "rows.jsonl"),
        USAGE,
        "exit_layer 9 must lie below the top of a model of 2 layers",
    ),
    "a decoder on no device": (
        ("train", "scratch.yaml", "--out", "out", "--data", "rows.jsonl", "--device", "tpu"),
        USAGE,
        "there is no device 'tpu'",
    ),
    "a summary on no device": (
        ("train", "summary", "--out", "out", "--data", "rows.jsonl", "--device", "tpu"),
        USAGE,
        "there is no device 'tpu'",
    ),
    "a decoder in a dtype": (
        ("train", "scratch.yaml", "--out", "out", "--data", "rows.jsonl", "--dtype", "float32"),
        USAGE,
        "--dtype",
    ),
    "a decoder from a shape and a base": (
        ("train", "scratch.yaml", "--model", "tiny", "--out", "out", "--data", "rows.jsonl"),
        USAGE,
        "one of the two",
    ),
    "data without a source": (("data", "e2e", "nowhere", "out"), FAILED, "no train.jsonl[.gz]"),
    "data of another task": (
        ("data", "wikisql", "dev.jsonl", "out"),
        FAILED,
        "dev.jsonl, line 1: not a row of wikisql",
    ),
    "data of no task": (("data", "e2f", "dev.jsonl", "out"), USAGE, "did you mean 'e2e'?"),
    "data that is no text": (("data", "e2e", "tiny/model.safetensors", "out", "--split", "dev"), FAILED, "UTF-8"),
    "data of an unknown split": (("data", "e2e", "dev.jsonl", "out", "--split", "tset"), USAGE, "no split 'tset'"),
    "data over its source": (("data", "e2e", "dev.jsonl", "dev.jsonl"), USAGE, "is the source itself"),
    "a twin over its model": (("widen", "tiny", "--model", "tiny"), USAGE, "is the model itself"),
    "an adapter over its model": (
        ("train", "recipe.yaml", "--model", "tiny", "--out", "tiny", "--data", "rows.jsonl"),
        USAGE,
        "tiny/adapters/multirate",
    ),
    "a fine-tune over its base": (
        ("train", "finetune", "--model", "tiny", "--out", "tiny", "--data", "rows.jsonl"),
        USAGE,
        "is the base itself",
    ),
    "gptq without a text": (
        ("compress", "out", "--model", "tiny", "--bits", "4", "--method", "gptq"),
        USAGE,
        "give --data FILE",
    ),
    "tokens of no text": (
        ("compress", "out", "--model", "tiny", "--bits", "4", "--tokens", "128"),
        USAGE,
        "--tokens and --longest are of a text to round for",
    ),
    "a share of nothing measured": (
        ("convert", "out", "--model", "tiny", "--store", "--active", "0.6"),
        USAGE,
        "--active is a share of what --store --calibrate FILE measures",
    ),
    "lengths for a prefill": (
        ("tune", "lazy", "--model", "tiny", "--lengths", "64"),
        USAGE,
        "--lengths and flags of ranks have no effect on lazy",
    ),
    "a floor for ranks": (
        ("tune", "runahead", "--model", "tiny", "--floor", "0.5"),
        USAGE,
        "runahead divides prompts: leave out --floor",
    ),
    "formats of weights beside forms of sums": (
        ("evaluate", "tiny", "--wire", "int8", "--weights", "q4"),
        USAGE,
        "--weights is about answers, and --wire asks for none",
    ),
    "a folder for answers": (
        ("batch", "rows.jsonl", "begun", "--model", "tiny", "--workers", "0"),
        USAGE,
        "begun is a folder; name a file for the answers",
    ),
    "a twin as wide": (("widen", "out", "--model", "tiny", "--factor", "1"), USAGE, "at least 2, found 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_line_and_nothing_changes(cli: Cli, place: Path, name: str) -> None:
    words, status, complaint = WRONG[name]
    before = files(place)
    outcome = cli(*words, "--quiet")
    assert complaint in outcome.err
    assert (outcome.status, outcome.out, outcome.err.count("\n")) == (status, "", 1)
    assert outcome.err.startswith("error: ")
    assert "not expected" not in outcome.err
    assert files(place) == before


@pytest.mark.parametrize("name", ["truncated weights", "unknown key on the line"])
def test_a_process_ends_the_same_way(place: Path, name: str) -> None:
    words, status, complaint = WRONG[name]
    before = files(place)
    done = process(place, "--quiet", *words)
    assert complaint in done.stderr
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1)
    assert files(place) == before
