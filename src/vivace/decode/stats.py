"""Counters of decoding, with the names and formulas of vLLM where it has them, so that figures can be compared."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DecodeStats:
    """Counters of one request; times are wall times of the steps in which it took part, in seconds."""

    method: str = "plain"
    choice: str | None = None
    """Why ``auto`` drafted as it did in the last step that could have guesses; None where there was none, and for all
    other methods."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Number of prompt tokens whose entries came from a prefix cache."""
    prefill: str = "full"
    """How the prompt was read."""
    prefill_reason: str | None = None
    """Why it was read in full although something else was asked for."""
    prompt_pool: str | None = None
    """The soft prompt that stands in front of the text; None for none."""
    num_prompt_layer_passes: int = 0
    """Sum over layers of the rows that passed them while the prompt was read."""
    prompt_kept: list[list[int]] = field(default_factory=list)
    """For each layer behind which prompt tokens were pruned: the layer, and how many tokens went on."""
    came_back: list[list[int]] = field(default_factory=list)
    """For each step, and in it for each of these layers: how many prompt tokens came back and were computed behind it;
    empty where what is pruned stays away."""
    num_tokens: int = 0
    """New tokens returned."""
    guard: dict[str, float] = field(default_factory=dict)
    """What a guard found, by category, with the highest score; never what was written."""
    num_preemptions: int = 0
    """How often it lost its slot to older requests when memory ended, and was read again."""
    num_spec_steps: int = 0
    """Number of verified steps; each emits the accepted tokens and one more."""
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    pass_s: float = 0.0
    """This request's share of the passes of the model over beams, head included; with ``select_s`` it is about the
    request's share of ``verify_s``. Both are zero without beams."""
    select_s: float = 0.0
    """This request's share of choosing how beams go on."""
    first_token_s: float = 0.0
    """Seconds from admission to the first token."""
    num_first_tokens: int = 0
    """Number of tokens of the first block. They arrive together, so ``decode_s`` begins after all of them."""
    decode_s: float = 0.0
    """Seconds from the first block to the last."""

    exit_layers: list[int] = field(default_factory=list)
    """For methods with early exits: number of layers that each new token passed; empty for all others."""
    num_early_exits: int = 0
    """Number of new tokens that left before the last layer."""
    num_layer_passes: int = 0
    """Sum over layers of the rows that passed them, draft rows and later fills included; counted with
    ``exit_layers``."""

    def count(self, drafted: int, accepted: int, depth: int) -> None:
        """Record one verified step: guesses made, guesses accepted, depth of the longest path guessed."""
        self.num_spec_steps += 1
        self.num_draft_tokens += drafted
        self.num_accepted_draft_tokens += accepted
        while len(self.drafted_per_position) < depth:
            self.drafted_per_position.append(0)
            self.accepted_per_position.append(0)
        for position in range(depth):
            self.drafted_per_position[position] += 1
        for position in range(accepted):
            self.accepted_per_position[position] += 1

    def count_exits(self, layers: list[int], num_layers: int, layer_passes: int) -> None:
        """Record after how many layers new tokens left a model of ``num_layers``, and the layer passes of the step."""
        self.exit_layers += layers
        self.num_early_exits += sum(layer < num_layers for layer in layers)
        self.num_layer_passes += layer_passes

    @property
    def prompt_computed(self) -> list[list[int]]:
        """Return, for each layer behind which prompt tokens were pruned, the layer and how many passed it so far."""
        if not self.prompt_kept:  # nothing of it was read before the first new token
            return []
        back = [sum(counts) for counts in zip(*self.came_back, strict=True)] or [0] * len(self.prompt_kept)
        return [[layer, kept + more] for (layer, kept), more in zip(self.prompt_kept, back, strict=True)]

    @property
    def early_exit_share(self) -> float | None:
        """Return the share of new tokens that left early; None for methods without early exits."""
        return self.num_early_exits / len(self.exit_layers) if self.exit_layers else None

    @property
    def mean_exit_layer(self) -> float | None:
        """Return the mean number of layers that a new token passed; None for methods without early exits."""
        return sum(self.exit_layers) / len(self.exit_layers) if self.exit_layers else None

    @property
    def layer_passes_per_token(self) -> float | None:
        """Return layer passes per new token, draft rows and later fills included; None for methods
        without early exits.
        """
        return self.num_layer_passes / len(self.exit_layers) if self.exit_layers else None

    @property
    def mean_acceptance_length(self) -> float:
        """Return 1 + accepted / steps: the recovered or bonus token counts (vLLM's formula)."""
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Return accepted over drafted tokens."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Return, by depth, the share of drafts at least that deep in which the guess at that depth was accepted."""
        return [a / d for a, d in zip(self.accepted_per_position, self.drafted_per_position, strict=True)]

    @property
    def tokens_per_target_pass(self) -> float:
        """Return new tokens over verified steps."""
        return self.num_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens after the first block over the seconds after it (in plain decoding a block is
        one token).
        """
        return (self.num_tokens - self.num_first_tokens) / self.decode_s if self.decode_s > 0 else 0.0
