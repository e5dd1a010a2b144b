"""A pool of soft prompts beside a model: what the model computes of each, and which one a request gets.

Attention is causal, so the keys and values of a soft prompt do not depend on the text behind it. They are computed
once, for positions that end just in front of the text (rotary embeddings depend on differences only), and every request
begins with the blocks of its member, which all of them share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from vivace.adapters.pool.choice import Scoring, scores_of
from vivace.checkpoint.soft_prompt import is_soft_prompt, load_soft_prompt
from vivace.checkpoint.tokenizer import Tokenizer
from vivace.core.cache import Blocks, KVCache
from vivace.core.model import Decoder, Layer
from vivace.core.step import Step
from vivace.decode.memory import MemoryBudget
from vivace.decode.request import Request
from vivace.errors import ConfigError, NotFoundError, UnsupportedError, nearest

NONE = "none"
"""What a request names that wants no soft prompt."""
AUTO = "auto"
"""What a request names that leaves the choice to the first layer."""


@dataclass(frozen=True)
class Member:
    """Fills ``Lead``: one soft prompt, as texts begin with it."""

    name: str
    count: int
    version: str
    blocks: Blocks
    keys: Tensor
    """(K, count, D) float32 keys of the first layer."""

    def attach(self, slot: int, cache: KVCache) -> None:
        """Let an empty slot begin with its entries."""
        cache.begin_with(slot, self.count, self.blocks, self.version)


class PromptPool:
    """The soft prompts of one model."""

    def __init__(
        self, model: Decoder, prompts: dict[str, Tensor], memory: MemoryBudget, scoring: Scoring = "joint"
    ) -> None:
        """Compute keys and values of every member.

        Args:
            model: the decoder.
            prompts: embeddings (n, E) by name, in the order in which ties are broken.
            memory: what their blocks are taken from.
            scoring: how members are compared.

        Raises:
            UnsupportedError: texts of this model cannot stand behind a soft prompt.
            BusyError: there is no memory for them.
        """
        if (reason := why_no_pool(model)) is not None:
            raise UnsupportedError(f"this model takes no soft prompts: {reason}")
        self.model = model
        self.scoring: Scoring = scoring
        longest = max(len(each) for each in prompts.values())
        self._cache = model.new_cache(len(prompts), longest, account=memory)
        self.members = {name: self._computed(slot, name, prompts[name]) for slot, name in enumerate(prompts)}

    @torch.inference_mode()
    def _computed(self, slot: int, name: str, embeddings: Tensor) -> Member:
        """Run a soft prompt through all layers, at the positions in front of a text."""
        model, count = self.model, len(embeddings)
        rows = embeddings.to(model.device, model.dtype)
        step = Step.at(self._cache, [slot] * count, list(range(count)))
        for layer in model.layers:
            assert isinstance(layer, Layer)
            assert layer.rotary is not None
            turned = layer.rotary.in_front(count, model.dtype, model.device)
            step.rotations[id(layer.rotary), model.dtype] = turned
        model.run(rows, step)
        self._cache.commit([slot], [range(count)])
        keys = self._cache.entries(0, slot, count)[0].float().clone()
        version = hashlib.sha256(rows.float().cpu().numpy().tobytes()).hexdigest()
        return Member(name, count, version, self._cache.lend(slot, 0, count), keys)

    def scores(self, tokens: Sequence[int]) -> dict[str, float]:
        """Return the score of every member for a prompt, by name."""
        keys = [member.keys for member in self.members.values()]
        return dict(zip(self.members, scores_of(self.model, tokens, keys, self.scoring), strict=True))

    def choose(self, tokens: Sequence[int]) -> Member:
        """Return the member with the highest score for a prompt, the first of those that are equal."""
        if len(self.members) == 1:
            return next(iter(self.members.values()))
        scores = self.scores(tokens)
        return self.members[max(scores, key=lambda name: scores[name])]

    def member(self, asked: str, tokens: Sequence[int]) -> Member | None:
        """Return the member that a text gets: a named one, the one that the first layer chooses ("auto"), or none.

        Raises:
            ConfigError: there is none of this name.
        """
        if asked == NONE:
            return None
        return self.choose(tokens) if asked == AUTO else self.find(asked)

    def find(self, name: str) -> Member:
        """Return a member.

        Raises:
            ConfigError: there is none of this name.
        """
        if name not in self.members:
            raise ConfigError(f"soft_prompt is {name!r}{nearest(name, (AUTO, NONE, *self.members))}")
        return self.members[name]


def behind(request: Request, pool: PromptPool, asked: str) -> Request:
    """Return a request whose text stands behind a member of the pool.

    Args:
        request: with all its settings.
        pool: the members.
        asked: name of a member, "auto" or "none".

    Raises:
        ConfigError: there is no such member.
        UnsupportedError: a member is asked for together with what it cannot be combined with.
    """
    if asked == NONE or (asked == AUTO and request.adapter is not None):
        return request
    conflict = {
        "a LoRA": request.adapter is not None,
        "beams": request.beams is not None,
        f"prefill {request.prefill.name}": not request.prefill.is_exact or request.prefill.drafter is not None,
    }
    for what, is_there in conflict.items():
        if is_there:
            raise UnsupportedError(f"a soft prompt cannot be combined with {what}; leave out one of them")
    return replace(request, lead=pool.member(asked, request.tokens))


def why_no_pool(model: Decoder) -> str | None:
    """Return why texts of a model cannot stand behind a soft prompt, or None where they can."""
    c = model.config
    if model.encoder is not None:
        return "it has an encoder"
    if model.stateful:
        return "a part of it remembers the tokens that it has read, or it runs on several ranks"
    if c.positions != "rotary":
        return f"its positions are not rotary ({c.positions}), so they would have to move"
    if any(rope.kind in ("dynamic", "longrope") for rope in c.ropes):
        return "its rotary embedding depends on the length of a text"
    if any(c.window(layer) is not None for layer in range(c.num_layers)):
        return "its layers have sliding windows, which would pass the soft prompt"
    return None


def load_pool(
    path: str | Path, model: Decoder, tokenizer: Tokenizer, memory: MemoryBudget, scoring: Scoring = "joint"
) -> PromptPool:
    """Read a pool for a model.

    Args:
        path: folder with a folder for each member, or of one soft prompt.
        model: the decoder.
        tokenizer: of the model.
        memory: what the members' keys and values are taken from.
        scoring: how members are compared.

    Raises:
        CheckpointError: it is missing, broken, or of another width or tokenizer.
        UnsupportedError: texts of this model cannot stand behind a soft prompt.
    """
    place = Path(path)
    if not place.is_dir():
        raise NotFoundError(f"there is no pool of soft prompts {place}")
    folders = [place] if is_soft_prompt(place) else sorted(each for each in place.iterdir() if is_soft_prompt(each))
    if not folders:
        raise NotFoundError(f"{place} holds no soft prompts (folders as PEFT's prompt tuning writes them)")
    if wrong := [each.name for each in folders if each.name in (AUTO, NONE)]:
        raise ConfigError(f"a soft prompt cannot be called {wrong[0]!r}; rename its folder in {place}")
    if (reason := why_no_pool(model)) is not None:
        raise UnsupportedError(f"this model takes no soft prompts: {reason}")
    width = model.config.width
    return PromptPool(model, {f.name: load_soft_prompt(f, width, tokenizer) for f in folders}, memory, scoring)
