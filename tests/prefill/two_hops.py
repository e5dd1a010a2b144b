"""A model of two layers that finds an answer in two steps, and its questions: each layer has to read the right passage.

A passage has the words ``key>mark`` and ``mark>value`` among many that say nothing, and no two passages of a prompt
share a key or a mark. A question is a key. The lower layer finds the mark of the key, the upper layer the value of the
mark. So the answer is lost where either word does not reach the layer that reads it, and no two of the three words are
the same, which leaves nothing to a search for words. What is written is the word ``mark>value``, so that the head that
reads it reads what is written next.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vivace.prompts import Prompt

KEYS = MARKS = VALUES = 12
IDLE = 24
"""How many words of each kind there are; those that are idle say nothing."""
PASSAGES, PASSAGE = 8, 38
"""Passages of a prompt, and tokens of one."""
SHORT = 12
"""Tokens of one at the beginning of training."""
TAIL = 8
"""Words between the last passage and the end of a prompt."""
WORDS = (
    ["<end>", "\n"]
    + [f"idle{i}" for i in range(IDLE)]
    + [f"key{k}" for k in range(KEYS)]
    + [f"key{k}>mark{m}" for k, m in product(range(KEYS), range(MARKS))]
    + [f"mark{m}>value{v}" for m, v in product(range(MARKS), range(VALUES))]
)
IDS = {word: place for place, word in enumerate(WORDS)}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each word; words have a space between them."""
    made = Tokenizer(models.WordLevel(IDS, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", unk_token="<end>", pad_token="<end>")


def passages(draws: Random, size: int = PASSAGE) -> tuple[list[str], list[tuple[int, int, int]]]:
    """Return the words of a prompt's passages, and the key, mark and value of each; a passage has ``size`` words."""
    keys, marks = draws.sample(range(KEYS), PASSAGES), draws.sample(range(MARKS), PASSAGES)
    facts = [(key, mark, draws.randrange(VALUES)) for key, mark in zip(keys, marks, strict=True)]
    words = list[str]()
    for key, mark, value in facts:
        own = [f"idle{draws.randrange(IDLE)}" for _ in range(size - 1)]
        first, second = draws.sample(range(size - 1), 2)
        own[first], own[second] = f"key{key}>mark{mark}", f"mark{mark}>value{value}"
        words += [*own, "\n"]
    return words, facts


def question(draws: Random) -> tuple[Prompt, int]:
    """Return a prompt with its answer, and which passage has it."""
    words, facts = passages(draws)
    place = draws.randrange(PASSAGES)
    words += [f"idle{draws.randrange(IDLE)}" for _ in range(TAIL - 1)] + [f"key{facts[place][0]}"]
    return Prompt([IDS[word] for word in words], (f"mark{facts[place][1]}>value{facts[place][2]}",), "two hops"), place


def _lesson(draws: Random, size: int) -> tuple[list[int], list[int], list[int]]:
    """Return tokens in which each passage, of ``size`` words, is asked for, and both words of each answer."""
    words, facts = passages(draws, size)
    draws.shuffle(facts)
    words += [f"idle{draws.randrange(IDLE)}" for _ in range(TAIL)]
    words += [f"key{key}" for key, _, _ in facts]
    return (
        [IDS[word] for word in words],
        [IDS[f"key{key}>mark{mark}"] for key, mark, _ in facts],
        [IDS[f"mark{mark}>value{value}"] for _, mark, value in facts],
    )


def _embeddings(width: int) -> torch.Tensor:
    """Return embeddings (V, width) in which a word of two parts is the sum of a vector for each of them.

    So what is learnt of a key holds for all words that begin with it.
    """
    found = torch.randn(len(WORDS), width) / 8
    begins, ends = torch.randn(2, 2, MARKS, width) / 8
    for one, other in product(range(MARKS), range(MARKS)):
        for kind, word in enumerate((f"key{one}>mark{other}", f"mark{one}>value{other}")):
            found[IDS[word]] = begins[kind, one] + ends[kind, other]
    return found


def lessons(model: LlamaForCausalLM, *, batch: int, steps: int, rate: float, seed: int) -> Iterator[float]:
    """Train a model, and yield the share of answers that it got right in each step.

    Where the lower layer ends the first word is asked for, so that each layer learns its own step at once. Passages are
    short in the first two thirds of the steps, which saves time.
    """
    draws = Random(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps, pct_start=0.1)
    seen = list[torch.Tensor]()
    model.model.layers[0].register_forward_hook(lambda _, __, out: seen.append(out if torch.is_tensor(out) else out[0]))
    for step in range(steps):
        size = SHORT if 3 * step < 2 * steps else PASSAGE
        drawn = zip(*(_lesson(draws, size) for _ in range(batch)), strict=True)
        ids, marks, values = (torch.tensor(each) for each in drawn)
        found = model.lm_head(model.model(ids, use_cache=False).last_hidden_state[:, -PASSAGES:])
        halfway = model.lm_head(model.model.norm(seen.pop()[:, -PASSAGES:]))
        loss = sum(cross_entropy(a.flatten(0, 1), b.flatten()) for a, b in ((halfway, marks), (found, values)))
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        yield float((found.argmax(-1) == values).float().mean())


def train(folder: Path, *, batch: int = 16, steps: int = 600, rate: float = 3e-3, seed: int = 0) -> float:
    """Train a model of two layers, write it, and return the share of answers that were right in the last steps."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=None,
        initializer_range=0.12,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).train()
    model.model.embed_tokens.weight.data = _embeddings(64)
    right = list(lessons(model, batch=batch, steps=steps, rate=rate, seed=seed))
    model.eval().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return sum(right[-10:]) / 10
