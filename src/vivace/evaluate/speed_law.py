"""The speed law: what drafting gains, from how often guesses are kept and what the parts of a step cost.

For one sequence, with p_i the share of drafts whose i-th guess is kept, D(n) the time to draft n guesses, V(n) that of
the pass that verifies them, P that of a pass over one row, and h what is done between passes in every step:

    E(n) = 1 + p_1 + ... + p_n                       tokens a step
    S(n) = E(n) (P + h) / (D(n) + V(n) + h)          beside plain decoding: ``Parts``, measured

When reading weights is all that takes time, every pass costs what it reads. With k of N layers below the gate, e the
head's share of the bytes, x what the adapters add to a layer, r and s the shares of a layer's and of the head's bytes
that a guess reads:

    S(n) = E(n) / (1 + n (r (1 - e) (1 + x) k / N + s e))       ``Shape``, counted

With p_i = alpha^i this is the law of speculative decoding (Leviathan et al. 2023, arXiv:2211.17192) with the draft's
layers shared. A measured speed far above the law is an error in the measurement.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from vivace.core.model import Decoder
from vivace.core.seams import Context, Draft, Drafter
from vivace.decode.climb import Climb
from vivace.decode.laws import Laws
from vivace.decode.request import Request
from vivace.errors import ConfigError
from vivace.evaluate.contest import Record
from vivace.evaluate.roofline import run_pass, timed


@dataclass(frozen=True)
class Parts:
    """What the parts of a step take on one machine."""

    plain_s: float
    """P: a pass over one row and its greedy choice."""
    draft_s: tuple[float, ...]
    """D(1), D(2), ..."""
    verify_s: tuple[float, ...]
    """V(1), V(2), ...: the pass over the rows of such a draft, from where the draft left off, and its choices."""
    host_s: float = 0.0
    """h."""

    def step_s(self, guesses: float) -> float:
        """D(n) + V(n) + h; means of several n lie between two of them.

        Raises:
            ConfigError: more guesses than were measured.
        """
        if not 0 <= guesses <= len(self.draft_s):
            raise ConfigError(f"drafts of up to {len(self.draft_s)} guesses were measured, found {guesses:g}")
        known = [self.plain_s, *map(sum, zip(self.draft_s, self.verify_s, strict=True))]
        low = min(int(guesses), len(known) - 2)
        return known[low] + (guesses - low) * (known[low + 1] - known[low]) + self.host_s

    def speed_up(self, tokens: float, guesses: float) -> float:
        """S, for this many tokens and guesses a step."""
        return tokens * (self.plain_s + self.host_s) / self.step_s(guesses)


@dataclass(frozen=True)
class Shape:
    """What a guess reads beside a whole pass."""

    gate: int
    """k."""
    layers: int
    """N."""
    head_share: float
    """e."""
    adapters: float = 0.0
    """x."""
    read: float = 1.0
    """r: 1, about 1/2 for a draft in ``int8``, about 0.3 in ``q4``."""
    head_read: float = 1.0
    """s: 1, about 1/2 for a rough draft, whose head has eight bits."""

    def speed_up(self, kept: Sequence[float]) -> float:
        """S, where the guess at each depth is kept this often."""
        layers = self.read * (1 - self.head_share) * (1 + self.adapters) * self.gate / self.layers
        return (1 + sum(kept)) / (1 + len(kept) * (layers + self.head_read * self.head_share))

    def best(self, kept: Sequence[float]) -> tuple[int, float]:
        """The number of guesses that gains most, and S with it; (0, 1) where drafting does not pay."""
        gains = [(n, self.speed_up(kept[:n])) for n in range(len(kept) + 1)]
        return max(gains, key=lambda pair: pair[1])


def head_share(width: int, feed_forward: int, layers: int, vocabulary: int) -> float:
    """Share of the head (e) in a decoder with a gated feed-forward and as many key and value heads as queries have."""
    head = width * vocabulary
    return head / (head + layers * (4 * width**2 + 3 * width * feed_forward))


def keeping(alpha: float, guesses: int) -> list[float]:
    """p_1 .. p_n where each guess is kept with the same chance once those before it were."""
    return [alpha**depth for depth in range(1, guesses + 1)]


@torch.inference_mode()
def measure_parts(model: Decoder, drafter: Drafter, tokens: Sequence[int], *, longest: int, repeats: int = 9) -> Parts:
    """Time the parts of a step behind a text, in turns; nothing is kept, so every turn is the same step.

    Args:
        model: the target.
        drafter: of one of its greedy methods; drafts shorter than asked for are counted as they are.
        tokens: the text; its last token is the root.
        longest: guesses of the longest draft.
        repeats: measurements per median.

    Raises:
        ConfigError: fewer than two tokens, or ``longest`` below 1.
    """
    if len(tokens) < 2 or longest < 1:
        raise ConfigError(f"a step needs two tokens and a guess, found {len(tokens)} tokens and {longest} guesses")
    cache, climb = model.new_cache(1, len(tokens) + longest + 1), Climb()
    prompt = Draft.given_only({0: list(tokens[:-1])})
    drafter.observe(prompt, climb.run(model, prompt, cache, chunk=True), None)
    cache.commit([0], [range(len(tokens) - 1)])
    request = Request(tuple(tokens), longest + 1, drafter)
    law = Laws({0: request}, {0: tokens}, cache.lengths)
    asked = [Context((0,), {0: tokens}, cache, law, {0: n}) for n in range(1, longest + 1)]
    root = asked[0].given()
    plain, drafts, checks = list[float](), [list[float]() for _ in asked], [list[float]() for _ in asked]
    for _ in range(repeats + 1):
        plain += timed(partial(run_pass, model, climb, root, cache), model.device)
        for context, drafting, checking in zip(asked, drafts, checks, strict=True):
            drafting += timed(partial(drafter.propose, context), model.device)
            checking += timed(partial(run_pass, model, climb, drafter.propose(context), cache), model.device)
    drafter.release([0])
    drafted, checked = (tuple(statistics.median(found[1:]) for found in kind) for kind in (drafts, checks))
    return Parts(statistics.median(plain[1:]), drafted, checked)


@dataclass(frozen=True)
class Judged:
    """The law beside what was measured."""

    method: str
    tokens_per_step: float
    guesses_per_step: float
    law: float
    measured: float
    parts: Parts

    @property
    def off(self) -> float:
        """How far the measured speed lies from the law's, as a share of it."""
        return self.measured / self.law - 1


def judge(parts: Parts, record: Record, plain: Record, speedup: float) -> Judged:
    """The law for a method at the acceptance it had.

    Args:
        parts: of its steps; ``host_s`` is set here, from plain decoding's steps.
        record: its takes.
        plain: plain decoding's takes of the same prompts.
        speedup: what was measured.
    """
    takes = [take for batch in record.takes for take in batch]
    steps = sum(take.num_steps for take in takes)
    alone = [take for batch in plain.takes for take in batch]
    plain_steps = sum(take.num_tokens - take.num_first_tokens for take in alone)
    host = max(0.0, sum(take.decode_s for take in alone) / max(1, plain_steps) - parts.plain_s)
    parts = replace(parts, host_s=host)
    tokens = 1 + sum(take.num_accepted for take in takes) / steps
    guesses = sum(take.num_drafted for take in takes) / steps
    return Judged(record.name, tokens, guesses, parts.speed_up(tokens, guesses), speedup, parts)
