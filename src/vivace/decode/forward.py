"""The plain way up: every draft row through every remaining layer, in one pass."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from vivace.core.cache import KVCache
from vivace.core.model import Decoder
from vivace.core.seams import Draft, TargetPass
from vivace.core.step import Step
from vivace.kernels.threads import one_pytorch_thread


class ForwardPass:
    """All rows of a draft through the layers from ``draft.entry_layer`` on."""

    def run(self, model: Decoder, draft: Draft, cache: KVCache, *, chunk: bool = False) -> TargetPass:
        """One pass for all slots, whatever each of them drafted."""
        step = Step.of(draft, cache, chunk=chunk)
        h = model.embed(draft.tokens, step) if draft.hidden is None else draft.hidden
        h = model.run(h, step, draft.entry_layer)
        return TargetPass(hidden=h, rows=torch.arange(len(draft.tokens)))


def threads_of(model: Decoder) -> AbstractContextManager[None]:
    """Whose threads work while rows go up one by one: PyTorch's stay out of the way of native layers."""
    return nullcontext() if model.backend.span is None else one_pytorch_thread()
