"""What decoding did, under vLLM's names and formulas, so that numbers can be compared."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DecodeStats:
    """Counters of one request; times are the wall time of the steps it took part in."""

    method: str = "plain"
    choice: str | None = None
    """Why ``auto`` drafted as it did in the last step; None for all other methods."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose entries were there already."""
    num_tokens: int = 0
    """New tokens returned."""
    num_spec_steps: int = 0
    """Passes of the whole model that decoded: each emits the accepted tokens and one more."""
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    first_token_s: float = 0.0
    """From admission to the first token."""
    num_first_tokens: int = 0
    """Tokens of the first block, which arrive together: the decoding time starts behind all of them."""
    decode_s: float = 0.0
    """From the first block to the last."""

    exit_layers: list[int] = field(default_factory=list)
    """Layers below each new token, for methods whose tokens may leave early; empty for all others."""
    num_early_exits: int = 0
    """New tokens that did not come from the top."""
    num_layer_passes: int = 0
    """Rows times layers that made them, companions and late fills included; counted beside ``exit_layers``."""

    def count(self, drafted: int, accepted: int, depth: int) -> None:
        """Record one pass of the whole model: guesses made, guesses kept, longest path guessed."""
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
        """Record where new tokens left a model of ``num_layers``, and what the step cost."""
        self.exit_layers += layers
        self.num_early_exits += sum(layer < num_layers for layer in layers)
        self.num_layer_passes += layer_passes

    @property
    def early_exit_share(self) -> float | None:
        """Share of the new tokens that left early; None where none may."""
        return self.num_early_exits / len(self.exit_layers) if self.exit_layers else None

    @property
    def mean_exit_layer(self) -> float | None:
        """Layers below a new token, on average; None where none may leave early."""
        return sum(self.exit_layers) / len(self.exit_layers) if self.exit_layers else None

    @property
    def layer_passes_per_token(self) -> float | None:
        """Rows times layers for each new token, companions and late fills included; None where it is not counted."""
        return self.num_layer_passes / len(self.exit_layers) if self.exit_layers else None

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / steps: the recovered or bonus token counts (vLLM's formula)."""
        return 1 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of steps that drafted this far in which the guess at this depth was kept."""
        return [a / d for a, d in zip(self.accepted_per_position, self.drafted_per_position, strict=True)]

    @property
    def tokens_per_target_pass(self) -> float:
        """New tokens over target passes."""
        return self.num_tokens / self.num_spec_steps if self.num_spec_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first block over the time after it (for plain decoding a block is one token)."""
        return (self.num_tokens - self.num_first_tokens) / self.decode_s if self.decode_s > 0 else 0.0
