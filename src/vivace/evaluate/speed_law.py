"""The speed law: what drafting gains, from how often guesses are kept and what the parts of a step cost.

For one sequence, with p_i the share of drafts whose i-th guess is kept, D(n) the time to draft n guesses, V(n) that of
the pass that verifies them, P that of a pass over one row, h and g what the host does between passes in a step of plain
decoding and in one with a draft (several steps may share a native call, and how many do differs):

    E(n) = 1 + p_1 + ... + p_n                       tokens a step
    S(n) = E(n) (P + h) / (D(n) + V(n) + g)          beside plain decoding: ``Parts``, measured

When reading weights is all that takes time, every pass costs what it reads. With k of N layers below the gate, e the
head's share of the bytes, x what the adapters add to a layer, r and s the shares of a layer's and of the head's bytes
that a guess reads:

    S(n) = E(n) / (1 + n (r (1 - e) (1 + x) k / N + s e))       ``Shape``, counted

With p_i = alpha^i this is the law of speculative decoding (Leviathan et al. 2023, arXiv:2211.17192) with the draft's
layers shared. A measured speed far above the law is an error in the measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vivace.errors import ConfigError
from vivace.evaluate.benchmark import Record


@dataclass(frozen=True)
class Parts:
    """What the parts of a step take on one machine."""

    plain_s: float
    """P: a pass over one row and the next token."""
    draft_s: tuple[float, ...]
    """D(1), D(2), ..."""
    verify_s: tuple[float, ...]
    """V(1), V(2), ...: the pass over the rows of such a draft, from where the draft left off, and its choices."""
    plain_host_s: float = 0.0
    """h."""
    host_s: float = 0.0
    """g."""

    def step_s(self, guesses: float) -> float:
        """D(n) + V(n) + g; means of several n lie between two of them.

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
        return tokens * (self.plain_s + self.plain_host_s) / self.step_s(guesses)


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


@dataclass(frozen=True)
class Judged:
    """The law beside what was measured."""

    method: str
    tokens_per_step: float
    """That stay in the answer: what is decided behind its end does not count."""
    guesses_per_step: float
    law: float
    measured: float
    parts: Parts

    @property
    def off(self) -> float:
        """How far the measured speed lies from the law's, as a share of it."""
        return self.measured / self.law - 1


def judge(parts: Parts, record: Record, speedup: float) -> Judged:
    """The law for a method at the acceptance it had.

    Args:
        parts: of its steps.
        record: its takes.
        speedup: what was measured.
    """
    trials = [trial for batch in record.trials for trial in batch]
    guesses = sum(trial.num_drafted for trial in trials) / sum(trial.num_steps for trial in trials)
    tokens = tokens_per_step(record)
    return Judged(record.name, tokens, guesses, parts.speed_up(tokens, guesses), speedup, parts)


def tokens_per_step(record: Record) -> float:
    """Tokens that stay, behind the first block of each answer as for a speed.

    Raises:
        ConfigError: every answer ended with its first block.
    """
    trials = [trial for batch in record.trials for trial in batch]
    steps = sum(trial.num_steps - len(trial.token_ids) for trial in trials)
    if steps < 1:
        raise ConfigError(f"{record.name} answered in {len(trials)} first blocks: longer answers are needed")
    return sum(trial.num_tokens - trial.num_first_tokens for trial in trials) / steps
