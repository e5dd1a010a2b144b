"""The plain way up: every draft row through every remaining layer, in one pass."""

from __future__ import annotations

import torch

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Draft, TargetPass
from vivace.core.step import Step


class ForwardPass:
    """All rows of a draft through the layers from ``draft.entry_layer`` on."""

    def run(self, model: Decoder, draft: Draft, cache: KVCache, *, chunk: bool = False) -> TargetPass:
        """One pass for all slots, whatever each of them drafted."""
        step = Step.of(draft, cache, chunk=chunk)
        h = model.embed(draft.tokens, step) if draft.hidden is None else draft.hidden
        h = model.run(h, step, draft.entry_layer)
        return TargetPass(hidden=h, rows=torch.arange(len(draft.tokens)))
