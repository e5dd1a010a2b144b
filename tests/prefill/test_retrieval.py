"""A model of two layers that finds values by their keys, trained in a minute: what pruning loses and what it keeps.

A line of the prompt has one key with its value behind it, among words; the question is one of the keys. The lower layer
tells each token which one stands before it, the upper one looks for the token behind the key that is asked for. So the
value has to be there in the upper layer, and nothing that the last token reads in the lower one says where it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import vivace
from vivace.cli.app import run as run_cli
from vivace.engine import Engine
from vivace.prompts import Prompt, save_prompts

pytestmark = pytest.mark.slow

NUM_KEYS, NUM_VALUES, NUM_WORDS, LINES, LONG = 24, 24, 12, 12, 36
"""Tokens of each kind, lines of a prompt, and tokens of a line."""
NAMES = [
    "<|end|>",
    "\n",
    "?",
    *(
        f"{kind}{number:02}"
        for kind, many in (("key", NUM_KEYS), ("value", NUM_VALUES), ("word", NUM_WORDS))
        for number in range(many)
    ),
]
LINE, ASK, KEY, VALUE, WORD = 1, 2, 3, 3 + NUM_KEYS, 3 + NUM_KEYS + NUM_VALUES
LEVELS = [(2, 3), (3, 3), (4, 3), (6, 3), (8, 4), (LINES, 4), (LINES, 6), (LINES, 10), (LINES, 18), (LINES, LONG)]
"""Lines and their tokens, from what is learnt at once to the task itself."""
STEPS, MASTERED, WIDTH = 500, 0.25, 64
HELD = 60
"""Prompts that are asked."""


def draw(count: int, lines: int, long: int, asked: int, generator: torch.Generator) -> Tensor:
    """Draw texts (count, lines x long + 3 asked): lines with a key and a value each, then keys with their values."""
    keys = KEY + torch.rand(count, NUM_KEYS, generator=generator).argsort(1)[:, :lines]
    values = VALUE + torch.rand(count, NUM_VALUES, generator=generator).argsort(1)[:, :lines]
    rows = torch.randint(WORD, len(NAMES), (count, lines, long), generator=generator)
    at = torch.randint(0, long - 2, (count, lines, 1), generator=generator)
    rows.scatter_(2, at, keys[..., None]).scatter_(2, at + 1, values[..., None])
    rows[..., -1] = LINE
    chosen = torch.randint(0, lines, (count, asked), generator=generator)
    marks = torch.full((count, asked), ASK)
    answers = torch.stack([marks, keys.gather(1, chosen), values.gather(1, chosen)], -1)
    return torch.cat([rows.flatten(1), answers.flatten(1)], 1)


def trained() -> LlamaForCausalLM:
    """Train the model; beside its task the lower layer learns which token came before."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(NAMES),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        initializer_range=0.06,
    )
    model, before = LlamaForCausalLM(config), torch.nn.Linear(WIDTH, len(NAMES))
    model.model.embed_tokens.weight.data.mul_(12)  # what a token is must outweigh what untrained layers add
    optimiser = torch.optim.AdamW([*model.parameters(), *before.parameters()], lr=3e-3, betas=(0.9, 0.98))
    generator, level, recent = torch.Generator().manual_seed(1), 0, 9.0
    for step in range(STEPS):
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 50) * (1 - step / STEPS)
        lines, long = LEVELS[level]
        ids = draw(max(6, 4096 // (lines * long + 36)), lines, long, 12, generator)
        found = model(input_ids=ids, use_cache=False, output_hidden_states=True)
        behind = slice(lines * long + 1, None, 3)  # keys that are asked for: the next token is the value
        loss = cross_entropy(found.logits[:, behind].flatten(0, 1), ids[:, lines * long + 2 :: 3].flatten())
        lower = torch.nn.functional.rms_norm(found.hidden_states[1], (WIDTH,))
        earlier = cross_entropy(before(lower[:, 1:]).flatten(0, 1), ids[:, :-1].flatten())
        optimiser.zero_grad()
        (loss + 0.3 * earlier).backward()
        optimiser.step()
        recent = 0.9 * recent + 0.1 * float(loss.detach())
        if recent < MASTERED and level < len(LEVELS) - 1:
            level, recent = level + 1, 2.0
    return model


def prompts_of(count: int, seed: int) -> list[Prompt]:
    """Prompts with one question each."""
    texts = draw(count, LINES, LONG, 1, torch.Generator().manual_seed(seed)).tolist()
    named = [[NAMES[token] for token in text] for text in texts]
    return [Prompt(" ".join(names[:-1]), (names[-1],)) for names in named]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, with scores that ``train lazy`` taught."""
    folder = tmp_path_factory.mktemp("retrieval")
    words = Tokenizer(models.WordLevel({name: index for index, name in enumerate(NAMES)}, unk_token="<|end|>"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|end|>", pad_token="<|end|>").save_pretrained(folder)
    trained().save_pretrained(folder)
    data = folder / "rows.jsonl"
    save_prompts(data, prompts_of(300, seed=2))
    line = ["train", "lazy", "points=[1]", "prompts=300", "steps=240", "window=2", "opening=0", "rank=32"]
    assert run_cli([*line, "answer_tokens=1", "--model", str(folder), "--data", str(data)]) == 0
    return folder


@pytest.fixture(scope="module", params=["torch", "auto"])
def engine(folder: Path, request: pytest.FixtureRequest) -> Engine:
    return vivace.load(folder, kernels=request.param, dtype="float32")


def right(engine: Engine, **way: Any) -> float:
    """Share of the questions that are answered."""
    asked = prompts_of(HELD, seed=3)
    settings = {"do_sample": False, "ignore_eos": True, "max_new_tokens": 1, "method": "plain"}
    found = engine.generate([each.request for each in asked], **settings, **way)
    return sum(each.text.strip() == own.references[0] for each, own in zip(found, asked, strict=True)) / HELD


def test_a_taught_score_keeps_answers_that_the_papers_score_loses_so_low(engine: Engine) -> None:
    full = right(engine)
    assert full >= 0.95
    pruned: dict[str, Any] = {"prefill": "lazy", "min_prompt": 1}
    assert right(engine, keep="1:1", **pruned) == full
    assert right(engine, keep="1:0.3:taught", **pruned) >= 0.95 * full
    assert right(engine, keep="1:0.3", **pruned) <= 0.6 * full, "the last token does not read the value in layer 1"
    assert right(engine, prefill="random", keep="0:0.3", min_prompt=1) <= 0.6 * full
