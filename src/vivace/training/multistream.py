"""Training speculative streams (``multistream/``)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from vivace.checkpoint.adapters import base_hash, load_adapter
from vivace.errors import MismatchError
from vivace.multistream.calibration import SURVIVING, kept_edges, threshold_for
from vivace.multistream.config import MultistreamConfig, StreamPlan
from vivace.multistream.objective import MultistreamLoss, MultistreamObjective
from vivace.multistream.streams import Streams
from vivace.recipe import build
from vivace.training.frozen import FrozenRecipe, Ground, Outcome


@dataclass(frozen=True, kw_only=True)
class MultistreamRecipe(FrozenRecipe):
    """How to train speculative streams on a frozen base."""

    kind: Literal["multistream"] = "multistream"
    adapter: MultistreamConfig = field(default_factory=MultistreamConfig)
    loss: MultistreamLoss = field(default_factory=MultistreamLoss)
    plan: StreamPlan = field(default_factory=StreamPlan)
    """Shape of the draft, saved with the weights."""
    start: str | None = None
    """Folder of streams whose weights training goes on from, such as those that learnt other text first. They may be
    inserted higher up, and know no feedback: what they lack begins untrained."""
    tokens_per_batch: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        self.plan.check_fits(self.adapter)

    def begin(self, ground: Ground) -> StreamTraining:
        """Streams that have learnt nothing, or those of ``start``.

        Raises:
            CheckpointError: ``start`` is no adapter of this base, or has other shapes.
        """
        model = ground.engine.model.config
        streams = Streams(self.adapter, model)
        if streams.rotation is not None:
            streams.rotation.read(ground.engine.model)
        if self.start is not None:
            written, tensors = load_adapter(self.start, base_hash(ground.engine.folder))
            known = build(MultistreamConfig, written["config"]) if written["kind"] == self.kind else None
            if known is None or not known.precedes(self.adapter):
                raise MismatchError(
                    f"{self.start} is an adapter for {written['kind']} with {written['config']}; training goes on from "
                    f"one for {self.kind} with {asdict(self.adapter)}, inserted there or above"
                )
            streams.take_over(Streams(known, model), tensors)
        return StreamTraining(self.plan, MultistreamObjective(streams, self.loss), ground)


class StreamTraining:
    """Fills ``Trainee``."""

    def __init__(self, plan: StreamPlan, objective: MultistreamObjective, ground: Ground) -> None:
        self.plan = plan
        self.objective = objective
        self.streams = objective.streams
        self.ground = ground
        config = self.streams.config
        self.depth = (ground.engine.model.config.num_layers - config.insertion) * config.streams

    def finish(self) -> Outcome:
        """The weights, with the draft that the recipe gives."""
        config, model = self.streams.config, self.ground.engine.model
        width, vocab_size = model.config.width, model.config.vocab_size
        own, heads = config.num_paper_parameters(width), config.num_medusa_parameters(width, vocab_size)
        note = (
            f", {own:,} of them embeddings and pruner as the paper counts; {config.streams} heads of Medusa would have "
            f"{heads:,}, {heads / own:.0f} times as many"
        )
        if self.streams.pruner is not None:
            batches = self.ground.batches(self.ground.held_back)
            threshold = threshold_for(kept_edges(model, self.streams, batch) for batch in batches)
            note += f"; a pruning threshold of {threshold:.2g} spares {SURVIVING:.0%} of the edges that are kept"
        return Outcome(self.plan, config, self.streams.tensors(), note)
