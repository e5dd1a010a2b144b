"""Recipe for speculative streams (``methods/multistream``)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from vivace.checkpoint.adapters import base_hash, load_adapter
from vivace.configuration import build
from vivace.errors import MismatchError
from vivace.methods.multistream.calibration import SURVIVING, kept_edges, threshold_for
from vivace.methods.multistream.config import MultistreamConfig, StreamPlan
from vivace.methods.multistream.objective import MultistreamLoss, MultistreamObjective
from vivace.methods.multistream.streams import Streams
from vivace.recipes.frozen import FrozenRecipe, Trainable, TrainContext, TrainedAdapter
from vivace.train.distillation import rows_at_once
from vivace.train.memory import kept_per_token


@dataclass(frozen=True, kw_only=True)
class MultistreamRecipe(FrozenRecipe):
    """How to train speculative streams on a frozen base."""

    kind: Literal["multistream"] = "multistream"
    adapter: MultistreamConfig = field(default_factory=MultistreamConfig)
    loss: MultistreamLoss = field(default_factory=MultistreamLoss)
    plan: StreamPlan = field(default_factory=StreamPlan)
    """Shape of the draft that decoding makes, saved with the weights."""
    start: str | None = None
    """Folder of trained streams to start from, such as streams that were trained on other text. They may be inserted
    at a higher layer or have no feedback; weights that they lack start untrained."""
    tokens_per_batch: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        self.plan.check_fits(self.adapter)

    def begin(self, context: TrainContext) -> StreamTraining:
        """Make untrained streams, or load those of ``start``.

        Raises:
            CheckpointError: ``start`` is no adapter of this base, or its shapes do not fit.
        """
        model = context.engine.model.config
        streams = Streams(self.adapter, model)
        if streams.rotation is not None:
            streams.rotation.read(context.engine.model)
        if self.start is not None:
            written, tensors = load_adapter(self.start, base_hash(context.engine.folder))
            known = build(MultistreamConfig, written["config"]) if written["kind"] == self.kind else None
            if known is None or not known.precedes(self.adapter):
                raise MismatchError(
                    f"{self.start} is an adapter for {written['kind']} with {written['config']}; training goes on from "
                    f"one for {self.kind} with {asdict(self.adapter)}, inserted there or above"
                )
            streams.take_over(Streams(known, model), tensors)
        streams.to(context.engine.model.device)
        head = context.draft_head(self.plan.vocabulary)
        objective = MultistreamObjective(streams, self.loss, head, attach=self.plan.attach)
        return StreamTraining(self.plan, objective, context)


class StreamTraining(Trainable):
    """Trains speculative streams."""

    def __init__(self, plan: StreamPlan, objective: MultistreamObjective, context: TrainContext) -> None:
        super().__init__(context)
        self.plan = plan
        self.objective = objective
        self.streams = objective.streams
        self.depth = 0  # gradients pass through streams alone
        num_logits = context.engine.model.config.vocab_size if objective.head is None else objective.head.num_rows
        self._positions = min(context.recipe.tokens_per_batch, rows_at_once(objective.loss.rows, num_logits))

    def branch_bytes(self) -> int:
        """Return the bytes of the streams of as many positions as are in memory at once, and of what they attend to."""
        recipe, model, config = self.context.recipe, self.context.engine.model, self.streams.config
        rows, upper = self._positions * config.streams, model.config.num_layers - config.insertion_layer
        longest = min(recipe.longest, model.config.max_positions)
        scores = rows * model.config.num_heads * longest * (4 + model.dtype.itemsize)
        return upper * (rows * kept_per_token(model.config) * max(4, model.dtype.itemsize) + scores)

    def finish(self) -> TrainedAdapter:
        """Return the trained weights with the recipe's plan, and the pruner's threshold in the note if there is one."""
        config, model = self.streams.config, self.context.engine.model
        width, vocab_size = model.config.width, model.config.vocab_size
        own, heads = config.num_paper_parameters(width), config.num_medusa_parameters(width, vocab_size)
        note = (
            f", {own:,} of them embeddings and pruner as the paper counts; {config.streams} heads of Medusa would have "
            f"{heads:,}, {heads / own:.0f} times as many"
        )
        if self.streams.pruner is not None:
            batches = self.context.batches(self.context.held_back)
            threshold = threshold_for(kept_edges(model, self.streams, batch) for batch in batches)
            note += f"; a pruning threshold of {threshold:.2g} spares {SURVIVING:.0%} of the edges that are kept"
        return TrainedAdapter(self.plan, config, self.streams.tensors(), note)
