"""The way to share a model that is chosen for each prompt, by what link and processors were measured to do.

Every rank holds the whole model, so that each prompt can be read in another way: by rank 0 alone, along a chain of
pieces, in stages whose entries end at rank 0, or as a pipeline, whose entries stay on the ranks that run the layers
(``staged.py``). What cannot be chosen, because it needs other weights, is named where it would be faster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.decode.prefill import PrefillState
from vivace.decode.prefix import CHUNK
from vivace.errors import ConfigError
from vivace.parallel.measuring import token_times
from vivace.parallel.partition import Costs, even
from vivace.parallel.partition_table import Table
from vivace.parallel.pipeline import KIND as PIPELINE
from vivace.parallel.pipeline import PipelineLeader, has_stages, read_chunks
from vivace.parallel.prediction import ShareWork, decoding_times, prompt_times, share_work
from vivace.parallel.runahead import ALONE, KIND, WAYS, RunaheadPrefill, RunaheadState
from vivace.parallel.scattered import KIND as SCATTERED
from vivace.parallel.staged import StagedSlots, staged_leader
from vivace.parallel.world import World

AUTO = "auto"
CHOSEN = (*(way for way in WAYS if way != "sequence"), PIPELINE, ALONE)
"""What is chosen from: ways of whole models."""
COUNTED = 128
"""Tokens of an answer whose decoding is counted beside the reading of its prompt, where ways differ in it."""


class AutoPrefill(RunaheadPrefill):
    """Implements ``Prefill``: prompts of more than one chunk are read in the way that is expected to be the fastest."""

    def __init__(self, world: World, way: str = AUTO, table: Table | None = None) -> None:
        """Choose among the ranks of a world, of which this process is rank 0, or take ``way`` until it is changed."""
        super().__init__(world, way, table)
        self.token_s: dict[str, float] = {}
        """What the layers were measured to take for a token, by the way of decoding."""

    def open(self, model: Decoder, cache: KVCache, *, chunk: int, spans: int = 1) -> PrefillState:
        """Return the state of a session."""
        leader = staged_leader(model)
        if leader is None:
            return super().open(model, cache, chunk=chunk, spans=spans)
        return _AutoState(self, leader, model, cache, chunk)

    def measure(self, model: Decoder) -> None:
        """Measure the link and a layer on all ranks, and the layers for one token as it can be decoded."""
        super().measure(model)
        leader = staged_leader(model)
        if leader is not None:
            self.turn = leader.turn  # the other ranks do one thing at a time
            self.token_s = dict(zip((ALONE, PIPELINE), token_times(model), strict=True))

    def expected_s(self, model: Decoder, length: int, chunk: int) -> dict[str, float]:
        """Return how many seconds each way takes for a prompt of more than one chunk, by the costs.

        Among them are "pipeline" and "tensor", unless the model cannot be shared so at all. The second holds other
        weights and can therefore not be chosen for one prompt.
        """
        num_ranks = min(self.world.size, -(-length // chunk))
        together = self.costs or Costs.of(model.config)
        pieces, equal = self.counts(model, length, chunk, KIND), even(length, num_ranks, chunk)
        works = self.works(model)
        found = prompt_times(length, pieces, equal, together, self.alone or together, self.world.size, works)
        return self._possible(model, found)

    def decoding_s(self, model: Decoder) -> dict[str, float]:
        """Return how many seconds the layers take for a token, by the way of decoding: measured where it can be chosen,
        computed for others; nothing before measuring.
        """
        if self.costs is None or self.alone is None:
            return {}
        found = decoding_times(self.costs, self.alone, self.world.size, self.works(model))
        return self._possible(model, found | self.token_s)

    def _possible(self, model: Decoder, times: Mapping[str, float]) -> dict[str, float]:
        return {way: s for way, s in times.items() if way != PIPELINE or has_stages(model.config, self.world.size)}

    def works(self, model: Decoder) -> tuple[ShareWork, ...]:
        """Return the ranks' parts of a layer with heads and columns divided; nothing where they cannot be."""
        if model.config.moe is not None:
            return ()
        try:
            return share_work(model.config, self.world.size)
        except ConfigError:
            return ()

    def chosen(self, model: Decoder, expected: Mapping[str, float]) -> str:
        """Return the fastest of the ways that can be chosen for one prompt, some tokens behind it counted."""
        steps = self.decoding_s(model)
        more_s = COUNTED * (steps.get(PIPELINE, 0.0) - steps.get(ALONE, 0.0))
        times = {way: seconds + (more_s if way == PIPELINE else 0.0) for way, seconds in expected.items()}
        return min((way for way in self.ways(model) if way in times), key=lambda way: times[way])

    def ways(self, model: Decoder) -> list[str]:
        """Return the ways that can be chosen for one prompt of a model."""
        ways = [way for way in CHOSEN if way != PIPELINE or staged_leader(model) is not None]
        forgets = any(model.config.windows)  # entries out of sight are not kept, and neither gathered nor sent back
        return [way for way in ways if not forgets or way in (ALONE, KIND, PIPELINE)]

    def reason_for(self, model: Decoder, length: int) -> str | None:
        """Return what is expected for a prompt of so many tokens, and what is taken; None where nothing is chosen."""
        if self.way != AUTO or length - 1 <= CHUNK:
            return None
        found, steps = self.expected_s(model, length - 1, CHUNK), self.decoding_s(model)
        chosen = self.chosen(model, found)
        decoding = PIPELINE if chosen == PIPELINE else ALONE
        told = ", ".join(f"{way} {seconds:.2f} s" for way, seconds in found.items())
        reason = f"read by {chosen}; expected {told}"
        if steps:
            told = ", ".join(f"{way} {1e3 * seconds:.1f} ms" for way, seconds in steps.items())
            reason += f"; decoded by {decoding}, expected a token {told}"
        best = min(found, key=lambda way: found[way])
        if best not in self.ways(model):
            reason += f"; {best} needs --parallel {best}"
        elif steps.get("tensor", math.inf) < steps.get(decoding, 0.0):
            reason += f"; --parallel {SCATTERED} decodes as tensor does, where ranks have room for a share besides"
        return reason

    def way_for(self, model: Decoder, length: int, chunk: int) -> str:
        """Return how a prompt is read: the fastest way by the costs that were measured, or what was set."""
        if length <= chunk or self.way != AUTO:
            return super().way_for(model, length, chunk)
        return self.chosen(model, self.expected_s(model, length, chunk))


class _AutoState(StagedSlots, RunaheadState):
    """Reads the prompts of one session, and tells the other ranks about those that lie there in stages."""

    def __init__(
        self, prefill: AutoPrefill, leader: PipelineLeader, model: Decoder, cache: KVCache, chunk: int
    ) -> None:
        RunaheadState.__init__(self, prefill, model, cache, chunk)
        StagedSlots.__init__(self, leader, cache)

    def read_together(self, slot: int, tokens: Sequence[int]) -> None:
        """Fill a slot with the entries of tokens, or the ranks' caches with those of their layers."""
        way = self._prefill.way_for(self.model, len(tokens), self.chunk)
        if way != PIPELINE:
            super().read_together(slot, tokens)
            return
        self.cache.staged.add(slot)
        read_chunks(self.model, self.cache, slot, tokens, self.chunk)
