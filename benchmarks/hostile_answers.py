"""Requests whose answers are known, because the engine computed them before the server was started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vivace.engine import Engine
from vivace.prompts import packaged_prompts

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
NUM_PROMPTS = 5
"""Number of prompts of each packaged set."""
NUM_SEEDS = 2
LONGEST = 48


@dataclass(frozen=True)
class Known:
    """A request, and parts of the first choice that its reply must have."""

    route: str
    body: Mapping[str, Any]
    choice: Mapping[str, Any]

    def differs(self, choice: Mapping[str, Any]) -> str | None:
        """Return the difference to a choice that was received; None if there is none."""
        for name, wanted in self.choice.items():
            if choice.get(name) != wanted:
                return f"{name} is {choice.get(name)!r} where the engine gives {wanted!r}, asked {dict(self.body)}"
        return None


def greedy(engine: Engine) -> list[Known]:
    """Return conversations, half of them to their end, half of them to a length limit."""
    prompts = _prompts()
    found: list[Known] = []
    for ignores in (False, True):
        results = engine.generate(prompts, max_new_tokens=LONGEST, ignore_eos=ignores, do_sample=False, method="plain")
        for prompt, result in zip(prompts, results, strict=True):
            body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "ignore_eos": ignores}
            body |= {"max_tokens": LONGEST, "return_token_ids": True}
            found.append(Known(CHAT, body, {"token_ids": list(result.token_ids), "text": result.text}))
    return found


def sampled(engine: Engine) -> list[Known]:
    """Return texts sampled with a seed, for which ``auto`` drafts by lookup, which uses no random numbers."""
    drawing = {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True}
    found = []
    for prompt in _prompts():
        for seed in range(NUM_SEEDS):
            (result,) = engine.generate(
                prompt, raw=True, max_new_tokens=LONGEST, method="lookup", seed=seed, do_sample=True, **drawing
            )
            body = {"prompt": prompt, "seed": seed, "max_tokens": LONGEST, "return_token_ids": True, **drawing}
            found.append(Known(COMPLETIONS, body, {"token_ids": list(result.token_ids), "text": result.text}))
    return found


def scored(engine: Engine) -> list[Known]:
    """Return prompts with log p of their tokens, some of them long enough to be scored in several parts."""
    prompts = _prompts()
    found = []
    for prompt in (*prompts[:4], "\n".join(prompts), "\n".join(prompts[::-1])):
        tokens = engine.tokenizer.encode(prompt)
        logprobs = torch.log_softmax(engine.logits([tokens])[0, :-1], -1)
        own = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
        body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0}
        found.append(Known(COMPLETIONS, body, {"text": prompt, "token_logprobs": [None, *own]}))
    return found


def known_answers(engine: Engine) -> dict[str, Sequence[Known]]:
    """Return the known answers for each kind of client that compares with them."""
    return {"greedy": greedy(engine), "sampled": sampled(engine), "echo": scored(engine)}


def _prompts() -> list[str]:
    return [str(prompt.request) for name in ("e2e", "sql") for prompt in packaged_prompts(name)[:NUM_PROMPTS]]
