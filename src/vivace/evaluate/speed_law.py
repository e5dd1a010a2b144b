"""A model of the gain from drafting, from how often draft tokens are accepted and what the parts of a step cost.

For one sequence, let p_i be the share of drafts whose i-th token is accepted, D(n) the time to draft n tokens, V(n)
that of the pass that verifies them, P that of a pass over one row, h and g the time outside of passes in a step of
plain decoding and in one with a draft (several steps may share a native call, and their number differs):

    E(n) = 1 + p_1 + ... + p_n                       tokens per step
    S(n) = E(n) (P + h) / (D(n) + V(n) + g)          speed-up over plain decoding: ``Parts``, from measured times

If only reading weights takes time, every pass costs the bytes that it reads. With k of N layers below the exit layer,
e the head's share of the bytes, x the share that the adapters add to a layer, r and s the shares of a layer's and of
the head's bytes that drafting a token reads:

    S(n) = E(n) / (1 + n (r (1 - e) (1 + x) k / N + s e))       ``Shape``, from counted bytes

With p_i = alpha^i this is the formula of speculative decoding (Leviathan et al. 2023, arXiv:2211.17192) for a draft
that shares the target's layers. A measured speed far above it is an error in the measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vivace.errors import ConfigError
from vivace.evaluate.benchmark import Record


@dataclass(frozen=True)
class StepCosts:
    """Seconds that the parts of a step take on one machine."""

    plain_s: float
    """P: a pass over one row and the choice of the next token."""
    draft_s: tuple[float, ...]
    """D(1), D(2), ...: drafting."""
    verify_s: tuple[float, ...]
    """V(1), V(2), ...: the pass that verifies such a draft, from where the draft ended, and its choices."""
    plain_host_s: float = 0.0
    """h: the time outside of passes in a step of plain decoding."""
    host_s: float = 0.0
    """g: the time outside of passes in a step with a draft."""

    def step_s(self, guesses: float) -> float:
        """Return D(n) + V(n) + g, interpolated for a mean number of draft tokens.

        Raises:
            ConfigError: drafts of this length were not measured.
        """
        if not 0 <= guesses <= len(self.draft_s):
            raise ConfigError(f"drafts of up to {len(self.draft_s)} guesses were measured, found {guesses:g}")
        known = [self.plain_s, *map(sum, zip(self.draft_s, self.verify_s, strict=True))]
        low = min(int(guesses), len(known) - 2)
        return known[low] + (guesses - low) * (known[low + 1] - known[low]) + self.host_s

    def speed_up(self, tokens: float, guesses: float) -> float:
        """Return S for these mean numbers of tokens and of draft tokens per step."""
        return tokens * (self.plain_s + self.plain_host_s) / self.step_s(guesses)


@dataclass(frozen=True)
class ModelShape:
    """The share of a whole pass that drafting one token reads."""

    exit_layer: int
    """k: number of layers below the exit layer."""
    layers: int
    """N: number of layers."""
    head_share: float
    """e: the head's share of the bytes of a pass."""
    adapters: float = 0.0
    """x: bytes that adapters add to a layer, as a share of the layer."""
    read: float = 1.0
    """r: share of a layer's bytes read; 1, about 1/2 for a draft in ``int8``, about 0.3 in ``q4``."""
    head_read: float = 1.0
    """s: share of the head's bytes read; 1, or about 1/2 for a quantized draft, whose head has eight bits."""

    @property
    def guess_share(self) -> float:
        """Return the share of a pass's bytes that drafting one token reads."""
        layers = self.read * (1 - self.head_share) * (1 + self.adapters) * self.exit_layer / self.layers
        return layers + self.head_read * self.head_share

    def speed_up(self, kept: Sequence[float]) -> float:
        """Return S if the draft token at each depth is accepted with these probabilities."""
        return speed_up(kept, self.guess_share)

    def best(self, kept: Sequence[float]) -> tuple[int, float]:
        """Return the number of draft tokens with the largest gain, and S; (0, 1) if drafting does not pay."""
        gains = [(n, self.speed_up(kept[:n])) for n in range(len(kept) + 1)]
        return max(gains, key=lambda pair: pair[1])


def speed_up(kept: Sequence[float], guess_share: float) -> float:
    """Return S if the draft token at each depth is accepted with these probabilities, and each costs such a share."""
    return (1 + sum(kept)) / (1 + len(kept) * guess_share)


def head_share(width: int, feed_forward: int, layers: int, vocabulary: int) -> float:
    """Return the head's share of the bytes (e) in a decoder with gated feed-forwards and as many key/value as query
    heads.
    """
    head = width * vocabulary
    return head / (head + layers * (4 * width**2 + 3 * width * feed_forward))


def keeping(alpha: float, guesses: int) -> list[float]:
    """Return p_1 .. p_n if each draft token is accepted with probability ``alpha`` once those before it were."""
    return [alpha**depth for depth in range(1, guesses + 1)]


@dataclass(frozen=True)
class Judged:
    """The predicted and the measured speed-up of a method."""

    method: str
    tokens_per_step: float
    """Tokens per step that stay in the answer; those after its end do not count."""
    guesses_per_step: float
    """Draft tokens per step."""
    law: float
    """Predicted speed-up."""
    measured: float
    """Measured speed-up."""
    parts: StepCosts

    @property
    def off(self) -> float:
        """Relative deviation of the measured speed-up from the prediction."""
        return self.measured / self.law - 1


def judge(parts: StepCosts, record: Record, speedup: float) -> Judged:
    """Predict the speed-up of a method from the acceptance it had.

    Args:
        parts: times of its steps.
        record: its trials.
        speedup: the measured speed-up.
    """
    trials = [trial for batch in record.trials for trial in batch]
    guesses = sum(trial.num_drafted for trial in trials) / sum(trial.num_steps for trial in trials)
    tokens = tokens_per_step(record)
    return Judged(record.name, tokens, guesses, parts.speed_up(tokens, guesses), speedup, parts)


def tokens_per_step(record: Record) -> float:
    """Return the tokens per step that stay in the answers, after the first block of each, as for a speed.

    Raises:
        ConfigError: every answer ended with its first block.
    """
    trials = [trial for batch in record.trials for trial in batch]
    steps = sum(trial.num_steps - len(trial.token_ids) for trial in trials)
    if steps < 1:
        raise ConfigError(f"{record.name} answered in {len(trials)} first blocks: longer answers are needed")
    return sum(trial.num_tokens - trial.num_first_tokens for trial in trials) / steps
