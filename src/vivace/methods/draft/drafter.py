"""Two-model speculation: a second, smaller decoder drafts a chain and the target verifies it.

Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding" (arXiv:2211.17192). The draft
model has a cache of its own that lags behind the text. At every step it first reads the tokens it has not seen: the new
token, and after a fully accepted chain also its own last guess, which it never ran. Then it guesses one token per pass.
Slots may lag by different amounts; all of them share every pass. Where we differ: guesses are drawn from the draft
model's distribution *after* the request's processors, so that penalties and truncation do not lower acceptance, and the
two vocabularies may be padded to different sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.sampling import drawable, sample
from vivace.core.seams import Context, Draft, TargetPass, Traversal, Verdict
from vivace.core.step import Step
from vivace.decode.forward import ForwardPass
from vivace.decode.plain import NoMemory
from vivace.errors import ConfigError

CHUNK = 256
"""Number of tokens of a slot that the draft model reads at once when it lags far behind, as after a prompt."""
PASS_CHUNKS = 4
"""Number of slots whose chunks share one such pass."""


@dataclass(frozen=True)
class DraftModelConfig:
    """How many tokens the draft model guesses."""

    num_draft_tokens: int = 4

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 1:
            raise ConfigError(f"num_draft_tokens must be at least 1, found {self.num_draft_tokens}")


class DraftModel:
    """Implements ``Drafter``: drafts with another decoder over the same tokens."""

    name = "draft"

    def __init__(self, model: Decoder, target_vocab_size: int, config: DraftModelConfig | None = None) -> None:
        """Use ``model`` as a drafter.

        Args:
            model: the draft model; its tokenizer must agree with the target's on the ids both have.
            target_vocab_size: V of the target, which may be padded more or less than the draft model's.
            config: number of guesses.
        """
        self.config = DraftModelConfig() if config is None else config
        self.model = model
        self.target_vocab_size = target_vocab_size

    leaves_all_entries = True

    def text_bytes(self, entries: int) -> int:
        """Return the bytes of keys and values of the draft model, which reads the same text as the target."""
        return self.model.slot_bytes(entries)

    def open(self, cache: KVCache) -> DraftModelState:
        """State of a session, with a cache for the draft model of as many slots and entries as the target's."""
        return DraftModelState(self, self.model.new_cache(cache.num_slots, cache.capacity, account=cache.account))


class DraftModelState(NoMemory):
    """Implements ``DraftState``: the draft model's cache, which lags behind each slot's text."""

    def __init__(self, drafter: DraftModel, cache: KVCache) -> None:
        """Draft with ``drafter`` and an empty cache of its model."""
        self.config = drafter.config
        self.traversal: Traversal = ForwardPass()
        self.cache = cache
        self._model = drafter.model
        self._target_vocab_size = drafter.target_vocab_size
        self._unverified: dict[int, int] = {}
        """Slots whose own cache holds guesses beyond the text, and how many entries the target had stored then."""

    def propose(self, context: Context) -> Draft:
        """Return a chain of up to ``num_draft_tokens`` guesses per slot, from one draft-model pass per depth for all
        slots.
        """
        draft = context.committed()
        counts = {slot: count for slot in context.slots if (count := self._room(context, slot)) > 0}
        if not counts:
            return draft
        cache = self.cache
        self._forget_guesses(tuple(self._unverified))
        for slot in counts:
            cache.prompts[slot] = context.cache.prompts[slot]
        self._catch_up(context.tokens, tuple(counts), cache)
        rows = {slot: context.tokens[slot][cache.lengths[slot] :] for slot in counts}
        leaves = dict(zip(draft.slots, draft.last_rows, strict=True))
        self._unverified.update((slot, context.cache.lengths[slot]) for slot in counts)
        for depth in range(max(counts.values())):
            growing = [slot for slot in counts if counts[slot] > depth]
            hidden = self._run({slot: rows[slot] for slot in growing}, cache)
            below = torch.tensor([leaves[slot] for slot in growing], device=draft.device)
            tokens, probs = self._guess(self._logits(hidden), context, draft, below)
            draft, nodes = draft.grow(below, tokens, probs)
            leaves.update(zip(growing, nodes.tolist(), strict=True))
            rows = dict(zip(growing, tokens.tolist(), strict=True))
        return draft

    def _room(self, context: Context, slot: int) -> int:
        """Return the number of guesses worth making: within the request's limit and the draft model's positions."""
        known = self._model.config.max_positions - len(context.tokens[slot]) + 1
        return min(self.config.num_draft_tokens, known, context.max_nodes.get(slot, known))

    def _catch_up(self, tokens: Mapping[int, Sequence[int]], slots: Sequence[int], cache: KVCache) -> None:
        """Read long missing stretches in chunks; the few tokens that one cycle leaves are read with the first guess."""
        near = self.config.num_draft_tokens + 1
        while far := [slot for slot in slots if len(tokens[slot]) - cache.lengths[slot] > near]:
            spans = {slot: (cache.lengths[slot], len(tokens[slot]) - 1) for slot in far[:PASS_CHUNKS]}
            rows = {slot: tokens[slot][at : min(at + CHUNK, last)] for slot, (at, last) in spans.items()}
            self._run(rows, cache, chunk=True)

    def _run(self, rows: Mapping[int, Sequence[int]], cache: KVCache, *, chunk: bool = False) -> Tensor:
        """Store these tokens of each slot; return the final residual of each slot's last one, (slots, E)."""
        taken = Draft.committed_only(rows, device=cache.device)
        step = Step.of(taken, cache, chunk=chunk)
        known = taken.tokens.clamp(max=self._model.config.vocab_size - 1)  # an id only the target has
        hidden = self._model.run(self._model.embed(known, step), step)
        cache.commit(taken.slots, [range(count) for count in taken.committed])
        return hidden[taken.last_committed()]

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the target's vocabulary, (n, V) float32; ids that the draft model lacks have probability
        0.
        """
        logits = self._model.head(hidden)
        missing = self._target_vocab_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=-math.inf) if missing > 0 else logits[:, : self._target_vocab_size]

    @staticmethod
    def _guess(logits: Tensor, context: Context, draft: Draft, below: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return a token after each of the draft's rows ``below``, (n, 1), and the distribution it was drawn from, (n,
        V).
        """
        if context.distribution.is_greedy(context.slots):
            return logits.argmax(-1, keepdim=True), None
        probs = drawable(context.distribution(logits, draft, below))
        slots = draft.slot[below].tolist()
        drawn = [
            sample(distribution, context.generators[slot]) for distribution, slot in zip(probs, slots, strict=True)
        ]
        return torch.tensor(drawn, device=probs.device)[:, None], probs

    def observe(self, draft: Draft, passed: TargetPass, verdict: Verdict | None) -> None:
        """Do nothing: the draft model reads the tokens themselves."""

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keep the own entries of accepted guesses; the last guess of a fully accepted chain was never run and stays
        missing.
        """
        for slot, path in zip(slots, paths, strict=True):
            if slot in self._unverified:
                self.truncate([slot], [self._unverified[slot] + len(path)])
                self._unverified.pop(slot)

    def truncate(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Forget positions >= length; the cache of a slot that is shorter does not change."""
        own = self.cache.lengths
        self.cache.truncate(slots, [min(own[s], length) for s, length in zip(slots, lengths, strict=True)])

    def extend(self, slots: Sequence[int], stops: Sequence[int]) -> None:
        """Let the draft model's own cache have room."""
        self.cache.extend(slots, stops)

    def fork(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Share the own cache's entries of the verified text."""
        self._forget_guesses(sources)
        self.cache.fork(sources, targets)

    def release(self, slots: Sequence[int]) -> None:
        """Forget these slots."""
        self._forget_guesses(slots)
        self.cache.release(slots)

    def saved(self) -> object:
        """Return the state of the own cache, guesses included."""
        return self.cache.saved(), dict(self._unverified)

    def restore(self, saved: object) -> None:
        """Set the draft model's cache and the unverified guesses back to ``saved``."""
        assert isinstance(saved, tuple)
        self.cache.restore(saved[0])
        self._unverified = saved[1]

    def _forget_guesses(self, slots: Sequence[int]) -> None:
        """Shorten the own cache to the verified text where a draft was never verified."""
        for slot in slots:
            if slot in self._unverified:
                self.truncate([slot], [self._unverified.pop(slot)])
